"""Number formats, loss scaling and FP8."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd
from typing import ClassVar

from megatron.config.errors import Problem
from megatron.config.option import MegatronOption, Need, Run, option
from megatron.config.text import multiples_as_fixes

FP16 = Need("params_dtype=fp16", "fp16")
DYNAMIC_LOSS_SCALE = Need("params_dtype!=fp16 or not loss_scale", "a dynamic loss scale")
FP8 = Need("fp8_format")
FIRST_LAST_LAYERS_BF16 = Need("first_last_layers_bf16")

FP8_MULTIPLES = {"tensorwise": 16, "rowwise": 16, "blockwise": 128, "mxfp8": 32}
"""Divisor of the sizes of a rank's matrices: of a block, or of cuBLAS for 8-bit operands."""


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
        "tensorwise",
        role="free",
        choices=("tensorwise", "rowwise", "blockwise", "mxfp8", "delayed"),
        needs=FP8,
        megatron=MegatronOption(
            "delayed",
            "scales of the current tensor need no history and do not depend on the layout",
            missing={"custom": "recipes in Python files are not supported"},
        ),
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

    refused: ClassVar = """
    params_dtype=fp16 and not loss_scale and min_loss_scale>initial_loss_scale
    E406 --initial-loss-scale {initial_loss_scale} is below --min-loss-scale {min_loss_scale}
      fix: --min-loss-scale {initial_loss_scale} | --initial-loss-scale {min_loss_scale}

    fp8_format and fp8_recipe=delayed
    E920 --fp8-recipe delayed is not supported: scales always come from the current tensor
      fix: --fp8-recipe tensorwise
    """

    def layer_in_fp8(self, layer: int, num_layers: int) -> bool:
        """Return True if the linears of a block, by its global index, are in FP8; that of the heads as the last one."""
        start, end = self.num_layers_at_start_in_bf16, num_layers - self.num_layers_at_end_in_bf16
        first_or_last = self.first_last_layers_bf16 and not start <= min(layer, num_layers - 1) < end
        return self.fp8_format is not None and not first_or_last

    def check_fp8_chunks(self, config: Run, world_size: int) -> Iterator[Problem]:
        """Check that chunks of the MLP do not divide the rows that share a scale."""
        parallel, recipe = config.parallel, self.fp8_recipe
        size, samples = config.training.mlp_chunk_size, config.training.micro_batch_size
        rows = config.training.seq_length // parallel.sequence_ranks
        if self.fp8_format is None or recipe not in FP8_MULTIPLES or size is None or size >= rows:
            return
        of, chunk = FP8_MULTIPLES[recipe], f"--mlp-chunk-size {size}"
        if recipe in ("tensorwise", "rowwise"):
            sentence = f"{chunk} would give each chunk a scale: those of --fp8-recipe {recipe} cover all rows"
            yield Problem(
                "E925", sentence, ("drop --mlp-chunk-size", "--fp8-format e4m3 --fp8-recipe mxfp8", "drop --fp8-format")
            )
        elif size * samples % of:
            sentence = f"{chunk} x --micro-batch-size {samples} is no multiple of {of}, as --fp8-recipe {recipe} needs"
            yield Problem("E925", sentence, multiples_as_fixes("--mlp-chunk-size", size, of // gcd(of, samples)))

    def check_fp8_layers(self, config: Run, world_size: int) -> Iterator[Problem]:
        """Check that a layer is left for FP8."""
        layers = config.model.num_layers
        if self.fp8_format is None or any(self.layer_in_fp8(layer, layers) for layer in range(layers)):
            return
        start, end = self.num_layers_at_start_in_bf16, self.num_layers_at_end_in_bf16
        sentence = (
            f"--first-last-layers-bf16 keeps {start} first and {end} last of {layers} layers out of FP8: none is left"
        )
        yield Problem("E924", sentence, ("drop --fp8-format", "--no-first-last-layers-bf16"))

    def note_gradients(self, config: Run, world_size: int) -> Iterator[str]:
        """Yield a note about gradients of another type than the format has."""
        if self.fp8_format == "hybrid" and self.fp8_recipe in ("blockwise", "mxfp8"):
            yield f"--fp8-recipe {self.fp8_recipe}: gradients are e4m3 too, as their blocks need no wider range"

    def note_overlap(self, config: Run, world_size: int) -> Iterator[str]:
        """Yield a note about layers whose communication does not overlap with products."""
        if self.fp8_format is not None and config.parallel.tp_comm_overlap:
            yield "--tp-comm-overlap does not apply to layers in FP8"
