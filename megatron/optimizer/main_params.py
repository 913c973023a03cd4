"""Main parameters, in at least fp32, which the optimizer updates, and the model weights rounded from them.

For bf16 weights, a main parameter may be stored as the 16 bits that the weight lacks: half of the memory, without
loss.
The weight is then the main parameter rounded to nearest with ties away from zero, where an ordinary cast rounds ties
to
even: one value in 131,072 differs, in its last bit.

Weights lie in flat buffers with the layout of the gradient buckets. A rank rounds its shard into its part of each
buffer, and an all-gather gives it to the other ranks. The all-gather may overlap with the next forward, in which
every
module then waits for its own weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from megatron.distributed import comm
from megatron.distributed.comm import Group, Pending
from megatron.distributed.mesh import Mesh
from megatron.optimizer.grad_buffer import GradBuffer, param_view

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
        for name, weight in weights.items():
            if as_remainders and weight.dtype == torch.bfloat16:
                self.remainders[name] = torch.zeros_like(weight, dtype=torch.int16)
            else:
                self._plain[name] = weight.to(accum_dtype(weight.dtype))

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
        """Round main parameters to the weights; weights with remainders are up to date already."""
        copies = [(self.weights[name], main) for name, main in self._plain.items()]
        copies = [(weight, main) for weight, main in copies if weight.dtype != main.dtype]
        if copies:
            weights, mains = zip(*copies)
            torch._foreach_copy_(weights, mains)


class ParameterStore:
    """All parameters of a rank, as views of flat buffers."""

    def __init__(self, params: Mapping[str, nn.Parameter], buckets: GradBuffer, mesh: Mesh, overlap: bool) -> None:
        """Move the parameters' values into the buffers.

        Args:
            params: by name; they become views of the buffers.
            buckets: of their gradients.
            mesh: the groups.
            overlap: let :meth:`gather` return before the all-gathers are complete.

        """
        self._overlap = overlap
        # This rank's shards of the weights, by name; shaped like their gradients.
        self.shards: dict[str, Tensor] = {}
        self._buffers: list[tuple[Tensor, Tensor, Group]] = []  # the buffer, this rank's part, the ranks to gather over
        self._pending: dict[int, Pending] = {}
        self._buffer_of: dict[int, int] = {}  # index of the buffer, by id of the parameter
        for number, bucket in enumerate(buckets.buckets):
            names, shards = list(bucket.specs), bucket.layout.shards
            first = params[names[0]]
            buffer = torch.zeros(bucket.layout.packing.size, dtype=first.dtype, device=first.device)
            for name in names:
                view = param_view(buffer, bucket.layout.packing, name, bucket.specs[name])
                view.copy_(params[name].detach())
                params[name].data = view
            part = buffer.view(shards.size, -1)[shards.rank]
            self._buffers.append((buffer, part, mesh.weight_gather_group(*bucket.specs[names[0]].reduce_axes)))
            self._buffer_of |= {id(params[name]): number for name in names}
            self.shards |= {name: buckets.shard_view(part, name) for name in names if name in buckets.shards}
        self.shards = {name: self.shards[name] for name in buckets.shards}

    def gather(self) -> None:
        """Start all-gathering the updated weights, in the order of forward.

        :attr:`shards` must not be written, nor other ranks' weights read, before :meth:`wait`.
        """
        self.wait()
        for number in reversed(range(len(self._buffers))):
            buffer, part, group = self._buffers[number]
            if group.size > 1:
                self._pending[number] = comm.start_all_gather(part, group, buffer)
        if not self._overlap:
            self.wait()

    def wait(self, buffers: Iterable[int] | None = None) -> None:
        """Wait for the all-gathers of some buffers; by default of all."""
        for number in [*self._pending] if buffers is None else buffers:
            if number in self._pending:
                self._pending.pop(number).wait()

    def wait_before_forward(self, modules: Iterable[nn.Module]) -> None:
        """Register hooks that make each of the modules wait for its own weights before its forward."""
        for module in modules:
            own_buffers = sorted({self._buffer_of[id(parameter)] for parameter in module.parameters()})
            module.register_forward_pre_hook(lambda *_, buffers=own_buffers: self.wait(buffers))
