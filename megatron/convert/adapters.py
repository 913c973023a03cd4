"""The weights of a model with the adapters of its linears added, computed box by box."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from megatron.checkpoint.format import relative_box, split_box, whole_box
from megatron.checkpoint.tensor_file import copy_tiled
from megatron.config.model import ModelConfig
from megatron.convert.huggingface.weights import BLOCK_ELEMENTS, ModelSource, WeightSource
from megatron.distributed.sharding import Box
from megatron.layers.adapter_parameters import adapted_parts, part_of_rows
from megatron.layers.parameters import gpt


def describe_adapters(model: ModelConfig) -> str:
    """Return kind, rank, factor and places of a model's adapters."""
    kind = "DoRA" if model.lora_dora else "LoRA"
    return f"{kind} of rank {model.lora_rank}, scaled by {model.lora_scale:g}, on {' '.join(model.lora_target)}"


class MergedWeights:
    """Weights ``W + s B A`` of LoRA (arXiv 2106.09685), with rows scaled to DoRA's magnitudes (arXiv 2402.09353).

    Sums are computed in fp64, so that what is rounded from them hardly depends on the boxes.
    """

    def __init__(self, base: ModelSource, adapters: WeightSource, model: ModelConfig) -> None:
        """Add adapters to a model.

        Args:
            base: the model without adapters.
            adapters: the adapters.
            model: architecture with the options of the adapters.
        """
        self.base, self.adapters, self.model, self.specs = base, adapters, model, gpt(model)
        self._row_factors = cache(self._compute_row_factors)

    def read(self, name: str, view: tuple[int, ...], box: Box) -> Tensor:
        """Return the elements of ``box`` of a tensor, in fp64 if there are adapters beside it."""
        linear, _, local = name.rpartition(".")
        if local != "weight" or f"{linear}.lora_b" not in self.specs:
            return self.base.read(name, view, box)
        merged = self._sum(linear, box)
        return merged.mul_(self._row_factors(linear)[box.slices[:-1]].unsqueeze(-1)) if self.model.lora_dora else merged

    def fill(self, name: str, view: tuple[int, ...], box: Box, out: Tensor) -> None:
        """As :meth:`read`, into a tensor of shape ``box.size`` and any strides and floating-point type."""
        for block in split_box(box, BLOCK_ELEMENTS):
            copy_tiled(out[relative_box(block, box).slices], self.read(name, view, block))

    def adapter(self, name: str) -> Tensor:
        """Return a tensor of the adapters in its stored shape."""
        spec = self.specs[name]
        return self.adapters.read(name, spec.view, whole_box(spec.view)).reshape(spec.shape)

    def adapted_parts(self, linear: str) -> tuple[int, ...]:
        """Return the indices in `linear_parts` of the parts of a linear that have adapters."""
        return adapted_parts(self.model, linear, self.specs[f"{linear}.weight"])

    def magnitudes(self, linear: str) -> Tensor:
        """Return DoRA's magnitude of each row; of rows without adapters the norm that they have."""
        adapted, magnitudes = self._adapted_rows(linear), self.adapter(f"{linear}.lora_magnitude")
        return magnitudes if adapted.all() else magnitudes.where(adapted, self._row_norms(linear).to(magnitudes.dtype))

    def _sum(self, linear: str, box: Box) -> Tensor:
        """Return a box of ``W + s B A`` of a linear, in fp64."""
        weight, high = self.specs[f"{linear}.weight"], self.specs[f"{linear}.lora_a"]
        rank, columns = self.model.lora_rank or 1, box.size[-1]
        a_box = Box((*(0,) * (len(high.view) - 1), box.start[-1]), (*high.view[:-1], columns))
        b_box = Box((*box.start[:-1], 0), (*box.size[:-1], rank))
        a = self.adapters.read(f"{linear}.lora_a", high.view, a_box).double().reshape(-1, columns)
        b = self.adapters.read(f"{linear}.lora_b", (*weight.view[:-1], rank), b_box).double().reshape(-1, 1, rank)
        part_of = torch.tensor(part_of_rows(weight)).view(weight.view[:-1])[box.slices[:-1]]
        own = part_of.reshape(-1, 1, 1) == torch.tensor(self.adapted_parts(linear)).unsqueeze(1)  # [rows, parts, 1]
        base = self.base.read(f"{linear}.weight", weight.view, box).double().reshape(-1, columns)
        return torch.addmm(base, (b * own).flatten(1), a, alpha=self.model.lora_scale).view(box.size)

    def _adapted_rows(self, linear: str) -> Tensor:
        """Return which rows of a linear have adapters, ``[out]``."""
        part_of = torch.tensor(part_of_rows(self.specs[f"{linear}.weight"]))
        return torch.isin(part_of, torch.tensor(self.adapted_parts(linear)))

    def _row_norms(self, linear: str) -> Tensor:
        """Return the 2-norms of the rows of ``W + s B A``, in fp64 ``[out]``."""
        view = self.specs[f"{linear}.weight"].view
        squares = torch.zeros(view[:-1], dtype=torch.float64)
        for block in split_box(whole_box(view), BLOCK_ELEMENTS):
            squares[block.slices[:-1]] += self._sum(linear, block).square_().sum(-1)
        return squares.sqrt().flatten()

    def _compute_row_factors(self, linear: str) -> Tensor:
        """Return DoRA's factor of each row, its magnitude over its norm, in fp64 and the view of the rows.

        That of a row of norm 0 is 1; PEFT's is not a number.
        """
        norms = self._row_norms(linear)
        scaled = self._adapted_rows(linear) & (norms > 0)
        factors = self.adapter(f"{linear}.lora_magnitude") / norms
        return factors.where(scaled, 1.0).view(self.specs[f"{linear}.weight"].view[:-1])
