"""The weights that the update rule moves, in at least fp32, beside those that the model computes with.

Where weights are bf16 a master may be kept as the 16 bits that its weight lacks: half of the memory, and no bit less.
The weight is the master rounded to the nearest, ties away from zero, where a plain master's ties go to the even
neighbour: one number in 131,072 differs, in its last bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

LOW = 16
"""Bits that fp32 has and bf16 has not."""


def split(values: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 values as the nearest bf16 values, ties away from zero, and what is missing of their bits, int16."""
    bits = values.view(torch.int32)
    high = (bits + (1 << (LOW - 1))) >> LOW
    return high.to(torch.int16).view(torch.bfloat16), (bits - (high << LOW)).to(torch.int16)


def joined(high: Tensor, low: Tensor) -> Tensor:
    """The fp32 values that :func:`split` took apart, to the bit."""
    return ((high.view(torch.int16).to(torch.int32) << LOW) + low.to(torch.int32)).view(torch.float32)


def wide(dtype: torch.dtype) -> torch.dtype:
    """At least fp32."""
    return torch.promote_types(dtype, torch.float32)


class Masters(Mapping[str, Tensor]):
    """A master of every weight, by name; of fp32 and fp64 weights, these themselves.

    Attributes:
        remainders: of masters that are kept so, the bits that the weights lack; what is looked up by name is a copy of
            those then, and :meth:`put` changes them.
    """

    def __init__(self, weights: Mapping[str, Tensor], as_remainders: bool) -> None:
        """Begin with the values of the weights.

        Args:
            weights: this rank's shares.
            as_remainders: keep the masters of bf16 weights as remainders.

        """
        self.weights = weights
        self.remainders: dict[str, Tensor] = {}
        self._plain: dict[str, Tensor] = {}
        for name, weight in weights.items():
            if as_remainders and weight.dtype == torch.bfloat16:
                self.remainders[name] = torch.zeros_like(weight, dtype=torch.int16)
            else:
                self._plain[name] = weight.to(wide(weight.dtype))

    def __getitem__(self, name: str) -> Tensor:
        if name in self.remainders:
            return joined(self.weights[name], self.remainders[name])
        return self._plain[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.weights)

    def __len__(self) -> int:
        return len(self.weights)

    @torch.no_grad()
    def put(self, values: Mapping[str, Tensor]) -> None:
        """Take other values."""
        for name, value in values.items():
            if name in self.remainders:
                high, low = split(value)
                self.weights[name].copy_(high)
                self.remainders[name].copy_(low)
            elif value.data_ptr() != self._plain[name].data_ptr():
                self._plain[name].copy_(value)

    @torch.no_grad()
    def publish(self) -> None:
        """Round plain masters into the weights; those that are remainders always were."""
        copies = [(self.weights[name], master) for name, master in self._plain.items()]
        copies = [(weight, master) for weight, master in copies if weight.dtype != master.dtype]
        if copies:
            weights, masters = zip(*copies)
            torch._foreach_copy_(weights, masters)
