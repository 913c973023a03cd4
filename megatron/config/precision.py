"""Number formats, loss scaling and FP8."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.option import Need, option

FP16 = Need("params_dtype=fp16", "fp16")

DYNAMIC_LOSS_SCALE = Need("params_dtype!=fp16 or not loss_scale", "a dynamic loss scale")

FP8 = Need("fp8_format")

FIRST_LAST_LAYERS_BF16 = Need("first_last_layers_bf16")


@dataclass(frozen=True)
class PrecisionConfig:
    """Number formats and the loss scaling of fp16. Main params, gradients and moments are at least fp32."""

    params_dtype: str = option(
        "fp32",
        role="free",
        choices=("fp64", "fp32", "bf16", "fp16"),
        aliases={"--bf16": "bf16", "--fp16": "fp16", "--fp64": "fp64"},
    )
    """Data type of weights and activations; fp64 is for tests."""
    loss_scale: float | None = option(None, role="free", above=0, example=65536, needs=FP16)
    """Constant loss scale for fp16. Default: dynamic."""
    initial_loss_scale: float = option(4294967296.0, role="free", above=0, needs=(FP16, DYNAMIC_LOSS_SCALE))
    """Initial dynamic loss scale."""
    min_loss_scale: float = option(1.0, role="free", above=0, needs=(FP16, DYNAMIC_LOSS_SCALE))
    """Lower bound of the dynamic loss scale."""
    loss_scale_window: int = option(1000, role="free", at_least=1, needs=(FP16, DYNAMIC_LOSS_SCALE))
    """Steps without overflow after which the dynamic loss scale doubles."""
    hysteresis: int = option(2, role="free", at_least=1, needs=(FP16, DYNAMIC_LOSS_SCALE))
    """The dynamic scale halves at the N-th overflow since it last doubled, and at each one after it."""
    fp8_format: str | None = option(None, role="free", choices=("e4m3", "hybrid"))
    """Multiply the linears of blocks in FP8. hybrid: gradients as e5m2, the rest as e4m3. Weights keep their type."""
    fp8_recipe: str = option(
        "tensorwise", role="free", choices=("tensorwise", "rowwise", "blockwise", "mxfp8", "delayed"), needs=FP8
    )
    """Elements that share a scale: tensorwise, rowwise, blockwise (1 x 128; weights 128 x 128) or mxfp8 (1 x 32). The
    last two need fp8_format e4m3. delayed is refused."""
    fp8_wgrad: bool = option(True, role="free", aliases={"--disable-fp8-wgrad": False}, needs=FP8)
    """Multiply weight gradients in FP8 too."""
    first_last_layers_bf16: bool = option(False, role="free", needs=FP8)
    """Keep the first and the last layers out of FP8."""
    num_layers_at_start_in_bf16: int = option(1, role="free", at_least=0, needs=(FP8, FIRST_LAST_LAYERS_BF16))
    """Number of first layers out of FP8."""
    num_layers_at_end_in_bf16: int = option(1, role="free", at_least=0, needs=(FP8, FIRST_LAST_LAYERS_BF16))
    """Number of last layers out of FP8."""

    def layer_in_fp8(self, layer: int, num_layers: int) -> bool:
        """Return True if the linears of a block, by its global index, are in FP8."""
        start, end = self.num_layers_at_start_in_bf16, num_layers - self.num_layers_at_end_in_bf16
        return self.fp8_format is not None and (not self.first_last_layers_bf16 or start <= layer < end)
