"""Main parameters, in at least fp32, which the optimizer updates, and the model weights rounded from them.

:class:`ShardMemory` is where this rank's shards are updated.

For bf16 weights, a main parameter may be stored as the 16 bits that the weight lacks: half of the memory, without
loss. The weight is then the main parameter rounded to nearest with ties away from zero, where an ordinary cast rounds
ties to even: one value in 131,072 differs, in its last bit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from megatron.kernels.adam import round_to
from megatron.optimizer.flat_views import adjacent_runs, flat_runs
from megatron.optimizer.rules import UpdateArgs

LOW_BITS = 16
"""Bits of fp32 that bf16 lacks."""


def split_fp32(values: Tensor) -> tuple[Tensor, Tensor]:
    """Split fp32 values into the nearest bf16 values, ties away from zero, and the remaining bits, int16."""
    bits = values.view(torch.int32)
    high = (bits + (1 << (LOW_BITS - 1))) >> LOW_BITS
    return high.to(torch.int16).view(torch.bfloat16), (bits - (high << LOW_BITS)).to(torch.int16)


def join_fp32(high: Tensor, low: Tensor) -> Tensor:
    """Return the fp32 values that :func:`split_fp32` split, bit for bit."""
    return ((high.view(torch.int16).to(torch.int32) << LOW_BITS) + low.to(torch.int32)).view(torch.float32)


def accum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return ``dtype`` or fp32, whichever is wider."""
    return torch.promote_types(dtype, torch.float32)


class ShardMemory:
    """Weights and gradients of this rank's shards, by name, in the memory where they are updated: that of the device.

    A subclass keeps some of them elsewhere, and copies between there and the device.
    """

    # Parameters that the host updates.
    on_host: frozenset[str] = frozenset()

    def __init__(self, weights: Mapping[str, Tensor], grads: Mapping[str, Tensor]) -> None:
        """Create the memory. Gradients elsewhere are valid after an update."""
        self.weights, self.grads = weights, grads

    def start(self, skip: Tensor, factor: Tensor) -> None:
        """Start copying what updates elsewhere need: the device scalars of :class:`UpdateArgs`, and gradients."""

    def local(self, args: UpdateArgs, names: Sequence[str]) -> UpdateArgs:
        """Return the arguments of the update of ``names`` in the memory of these parameters."""
        return args

    def upload(self, names: Collection[str] | None = None) -> None:
        """Start copying weights to the device, all by default."""

    def wait(self) -> None:
        """Let the device wait for the copies."""

    def synchronize(self) -> None:
        """Let the host wait for all copies, before it changes :attr:`weights`."""


class MainParams(Mapping[str, Tensor]):
    """Main parameters by name; for fp32 and fp64 weights, the weights themselves."""

    def __init__(self, weights: Mapping[str, Tensor], as_remainders: bool) -> None:
        """Start from the values of the weights.

        Args:
            weights: this rank's shards.
            as_remainders: store the main parameters of bf16 weights as remainders.

        """
        self.weights = weights
        # The bits that bf16 weights lack. These main parameters are computed on access, so writing to what
        # ``self[name]`` returns changes nothing: use :meth:`set`.
        self.remainders: dict[str, Tensor] = {}
        self._plain: dict[str, Tensor] = {}
        # Weights and their main parameters, both flat.
        self._copies: list[tuple[Tensor, Tensor]] = []
        narrow = []
        for name, weight in weights.items():
            if as_remainders and weight.dtype == torch.bfloat16:
                self.remainders[name] = torch.zeros_like(weight, dtype=torch.int16)
            else:
                self._plain[name] = weight
                if weight.dtype != accum_dtype(weight.dtype):
                    narrow.append(name)
        # Main parameters are laid out like the weights, so that few kernels round all of them.
        for run in adjacent_runs([weights[name] for name in narrow]):
            names = [narrow[index] for index in run]
            (flat,) = flat_runs([weights[name] for name in names])
            main = flat.to(accum_dtype(flat.dtype)).view(-1)
            self._copies.append((flat.view(-1), main))
            for name, part in zip(names, main.split([weights[name].numel() for name in names])):
                self._plain[name] = part.view(weights[name].shape)

    def __getitem__(self, name: str) -> Tensor:
        if name in self.remainders:
            return join_fp32(self.weights[name], self.remainders[name])
        return self._plain[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.weights)

    def __len__(self) -> int:
        return len(self.weights)

    @torch.no_grad()
    def set(self, values: Mapping[str, Tensor]) -> None:
        """Set main parameters."""
        for name, value in values.items():
            if name in self.remainders:
                high, low = split_fp32(value)
                self.weights[name].copy_(high)
                self.remainders[name].copy_(low)
            elif value.data_ptr() != self._plain[name].data_ptr():
                self._plain[name].copy_(value)

    @torch.no_grad()
    def write_weights(self) -> None:
        """Round main parameters to the weights, except those with remainders."""
        round_to((weights, main) for weights, main in self._copies)
