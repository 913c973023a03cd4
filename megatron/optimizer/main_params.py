"""Main parameters, in at least fp32, which the optimizer updates, and the model weights rounded from them.

For bf16 weights, a main parameter may be stored as the 16 bits that the weight lacks: half of the memory, without
loss. The weight is then the main parameter rounded to nearest with ties away from zero, where an ordinary cast rounds
ties to even: one value in 131,072 differs, in its last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from megatron.kernels.adam import round_to

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
        narrow = {}
        for name, weight in weights.items():
            if as_remainders and weight.dtype == torch.bfloat16:
                self.remainders[name] = torch.zeros_like(weight, dtype=torch.int16)
            else:
                self._plain[name] = weight
                if weight.dtype != accum_dtype(weight.dtype):
                    narrow[name] = weight
        # Main parameters are laid out like the weights, so that few kernels round all of them.
        self._copies, wide = copy_runs(narrow, lambda flat: flat.to(accum_dtype(flat.dtype)))
        self._plain |= wide

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


def flat_runs(tensors: Sequence[Tensor]) -> list[tuple[list[int], Tensor]]:
    """Merge contiguous tensors that follow one another in memory without a gap.

    Returns:
        As few views as possible of all elements, and the indices of the tensors that each covers, in order. A view of
        several tensors is flat.
    """
    runs: list[list[int]] = []
    end: tuple[int, int] | None = None
    places = [(x.untyped_storage()._cdata, int(x.storage_offset())) for x in tensors]
    for index in sorted(range(len(tensors)), key=places.__getitem__):
        x, (storage, offset) = tensors[index], places[index]
        if x.is_contiguous() and end == (storage, offset):
            runs[-1].append(index)
        else:
            runs.append([index])
        end = (storage, offset + x.numel()) if x.is_contiguous() else None
    merged = []
    for run in runs:
        first, total = tensors[run[0]], sum(tensors[index].numel() for index in run)
        merged.append((run, first.as_strided((total,), (1,)) if len(run) > 1 else first))
    return merged


def copy_runs(
    tensors: Mapping[str, Tensor], copy: Callable[[Tensor], Tensor]
) -> tuple[list[tuple[Tensor, Tensor]], dict[str, Tensor]]:
    """Copy contiguous tensors, so that those that follow one another in memory stay together.

    Args:
        tensors: by name.
        copy: returns a tensor as large as a flat one.

    Returns:
        Pairs of originals and copies, both flat, as few as possible; and the copies by name.
    """
    names, pairs, copies = [*tensors], [], {}
    for run, whole in flat_runs([*tensors.values()]):
        flat = whole.view(-1)
        copied = copy(flat)
        pairs.append((flat, copied))
        for index, part in zip(run, copied.split([tensors[names[index]].numel() for index in run])):
            copies[names[index]] = part.view(tensors[names[index]].shape)
    return pairs, copies
