"""Adapters (LoRA, DoRA) over frozen weights: their options, which are those of the model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import ClassVar, Self

from megatron.config.option import MAX_SIZE, Need, option

LORA = Need("lora_rank")

QUANTIZED_BITS = {"int8": 8, "nf4": 4}
"""Bits of a weight by ``frozen_weights_precision``, without its share of a scale."""

QUANTIZED_BLOCK = 64
"""Inputs of a row that share a scale, of 4 bytes."""


@dataclass(frozen=True, init=False, eq=False, repr=False)
class AdapterOptions:
    """Options of adapters."""

    lora_rank: int | None = option(None, role="shape", at_least=1, at_most=MAX_SIZE)
    """Train adapters of this rank (LoRA) beside linears of the model in pretrained_checkpoint, and freeze all its
    parameters."""
    lora_alpha: float | None = option(None, role="function", above=0, needs=LORA, example=32)
    """Scale what adapters add by this / lora_rank. Default: 2 x lora_rank."""
    lora_target: tuple[str, ...] = option(("linear_*",), role="shape", needs=LORA)
    """Shell patterns of the linears with adapters, such as linear_qkv, linear_qkv.q, linear_fc1.gate or
    layers.0.mlp.*; experts have none."""
    lora_dora: bool = option(False, role="shape", needs=LORA)
    """Train the magnitudes of the rows of adapted weights too (DoRA)."""
    frozen_weights_precision: str | None = option(None, role="function", choices=("int8", "nf4"), needs=LORA)
    """Keep the frozen weights of attention and MLP as 8-bit integers or 4-bit NormalFloat, with a scale for 64 inputs;
    each product converts them. Default: as params_dtype."""

    refused: ClassVar = """
    lora_rank and fp8_format
    E113 --fp8-format does not support --lora-rank
      fix: drop --fp8-format | drop --lora-rank

    cuda_graph=step and lora_rank
    E113 --cuda-graph step is untested with --lora-rank
      fix: --cuda-graph none | drop --lora-rank
    """

    @property
    def base(self) -> Self:
        """The model without adapters."""
        full = replace(self, lora_rank=None, lora_alpha=None, frozen_weights_precision=None)
        return replace(full, lora_target=AdapterOptions.lora_target, lora_dora=False)

    @property
    def quantized_block_bytes(self) -> int | None:
        """Bytes of ``QUANTIZED_BLOCK`` inputs of a row of quantised weights; None without such weights."""
        if self.frozen_weights_precision is None or self.lora_rank is None:
            return None
        return QUANTIZED_BLOCK * QUANTIZED_BITS[self.frozen_weights_precision] // 8 + 4

    @property
    def lora_scale(self) -> float:
        """Factor of what adapters add; 0 without adapters."""
        if self.lora_rank is None:
            return 0.0
        return 2.0 if self.lora_alpha is None else self.lora_alpha / self.lora_rank

    def adapts(self, linear: str) -> bool:
        """Return True if ``lora_target`` matches the global name of a linear, or of a part such as ``...qkv.q``."""
        return any(fnmatchcase(linear, form) for each in self.lora_target for form in (each, f"*.{each}"))
