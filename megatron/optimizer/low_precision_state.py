"""Optimizer state in low precision: moments in bf16, and main parameters as the bits that bf16 weights lack.

A moment that decays slowly changes by less than half of a bf16 step per update, which rounding to nearest would always
lose. So moments are updated in fp32 and rounded stochastically, which is exact in the mean. The random bits are a
function of (seed, update, parameter, element of the global tensor): equal in every layout, without state to save.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from megatron.distributed.param_layout import ParamShard
from megatron.distributed.random import stable_hash
from megatron.distributed.sharding import ShardSpec
from megatron.kernels.dropout import random_bits
from megatron.optimizer.main_params import LOW_BITS, MainParams, accum_dtype, join_fp32, split_fp32
from megatron.optimizer.rules import (
    ElementwiseRule,
    TensorSlice,
    UpdateArgs,
    UpdateObserver,
    UpdateRule,
    copies_of,
    copies_of_state,
    iterate_blocks,
)


@dataclass(frozen=True)
class GlobalIndices:
    """Global row and column of every element of a rank's local tensor; arbitrary for padding."""

    # int64 [local rows]: the global row of each local row. A 1-D tensor has rows of one element.
    rows: Tensor
    # Elements per local row.
    width: int
    # Global column of the first element of a local row.
    first: int

    @classmethod
    def of(cls, spec: ShardSpec, device: torch.device) -> GlobalIndices:
        """Compute the indices of a parameter."""
        flat = len(spec.shape) == 1
        lead = len(spec.view) if flat else len(spec.view) - 1
        rows = torch.zeros(spec.local_view[:lead], dtype=torch.int64)
        numbers = torch.arange(spec.shape[0]).view(spec.view[:lead])
        for piece in spec.pieces:
            rows[piece.local_box.slices[:lead]] = numbers[piece.global_box.slices[:lead]]
        if flat:
            return cls(rows.flatten().to(device), 1, 0)
        first = spec.pieces[0].global_box.start[-1] if spec.pieces else 0
        return cls(rows.flatten().to(device), spec.local_view[-1], first)

    def bits(self, key: int, step: Tensor, start: int, stop: int) -> Tensor:
        """Return random bits, int32, for elements ``start`` to ``stop`` of the flattened local tensor."""
        first_row, end_row = start // self.width, -(-stop // self.width)
        columns = torch.arange(self.first, self.first + self.width, device=self.rows.device)
        bits = random_bits(key, step, self.rows[first_row:end_row], columns)
        return bits.view(-1)[start - first_row * self.width : stop - first_row * self.width]


class LowPrecisionRule(UpdateRule):
    """Wraps an update rule: block by block, state and main parameters are widened to fp32, updated and stored again.

    Moments in bf16 are rounded stochastically; main parameters are exact. A skipped update changes no bit, because
    values that bf16 represents are never rounded.
    """

    def __init__(
        self,
        rule: ElementwiseRule,
        main_params: MainParams,
        names: Sequence[str],
        specs: Mapping[str, ShardSpec],
        shares: Mapping[str, ParamShard],
        dtypes: Mapping[str, torch.dtype],
        seed: int,
    ) -> None:
        """Allocate the state.

        Args:
            rule: created without parameters; it is given those of each block.
            main_params: main parameters.
            names: of the parameters to update.
            specs: by name.
            shares: shards to update, by name.
            dtypes: by kind of state in bf16; at most two kinds.
            seed: of the run.
        """
        self._low = [main_params.remainders.get(name) for name in names]
        self.params = [main_params[n] if low is None else main_params.weights[n] for n, low in zip(names, self._low)]
        self._rule, self._dtypes = rule, dict(dtypes)
        self.state = {
            kind: [torch.zeros_like(p, dtype=self._dtypes.get(kind, accum_dtype(p.dtype))) for p in self.params]
            for kind in rule.state
        }
        device = self.params[0].device
        self.step_counts = [torch.zeros((), dtype=torch.float32, device=device)]
        self._places = [GlobalIndices.of(specs[name], device) for name in names]
        self._first = [shares[name].start for name in names]
        self._keys = [stable_hash(seed, "moments", name) for name in names]

    def of_copies(self, indices: Sequence[int]) -> UpdateRule | None:
        """See :class:`UpdateRule`."""
        found = copy(self)
        found._rule = copy(self._rule)
        found.params, found.state = copies_of(self.params, indices), copies_of_state(self.state, indices)
        found.step_counts = copies_of(self.step_counts, (0,))
        found._low = [None if (low := self._low[index]) is None else low.clone() for index in indices]
        found._places = [self._places[index] for index in indices]
        found._first, found._keys = ([every[i] for i in indices] for every in (self._first, self._keys))
        return found

    @torch.no_grad()
    def update(self, args: UpdateArgs) -> None:
        """Apply one step."""
        (count,), rule = self.step_counts, self._rule
        if not rule.fused:
            args = args.scaled()
        for block in iterate_blocks(self.params):
            rule.params = [self._wide(cut) for cut in block]
            rule.step_counts = [count.clone() for _ in block]
            rule.state = {
                kind: [cut.view_in(stored).to(param.dtype) for cut, param in zip(block, rule.params)]
                for kind, stored in self.state.items()
            }
            grads = [cut.view_in(args.grads) for cut in block]
            observe = None if args.observe is None else partial(_observe_block, block, args.observe)
            rule.update(replace(args, grads=grads, weights=(), observe=observe))
            self._store(block, rule)
        count.add_(1.0 - args.skip)
        args.write_weights(self.params)

    def _wide(self, cut: TensorSlice) -> Tensor:
        low, stored = self._low[cut.index], cut.view_in(self.params)
        return stored if low is None else join_fp32(stored, low.view(-1)[cut.start : cut.stop])

    def _store(self, block: Sequence[TensorSlice], rule: UpdateRule) -> None:
        """Store a block's low-precision values; values in fp32 were updated in place."""
        for cut, updated in zip(block, rule.params):
            low = self._low[cut.index]
            if low is not None:
                high, rest = split_fp32(updated)
                cut.view_in(self.params).copy_(high)
                low.view(-1)[cut.start : cut.stop].copy_(rest)
        if self._dtypes:
            self._round(block, rule.state)

    def _round(self, block: Sequence[TensorSlice], moments: Mapping[str, Sequence[Tensor]]) -> None:
        step = self.step_counts[0].long()
        bits = torch.cat([self._bits(cut, step) for cut in block])
        for part, kind in enumerate(self._dtypes):
            values = torch.cat([value.float() for value in moments[kind]])
            rounded = stochastic_round(values, bits >> (LOW_BITS * part)).split(
                [value.numel() for value in moments[kind]]
            )
            torch._foreach_copy_([cut.view_in(self.state[kind]) for cut in block], list(rounded))

    def _bits(self, cut: TensorSlice, step: Tensor) -> Tensor:
        first = self._first[cut.index]
        return self._places[cut.index].bits(self._keys[cut.index], step, first + cut.start, first + cut.stop)


def stochastic_round(values: Tensor, bits: Tensor) -> Tensor:
    """Round fp32 values stochastically to bf16; the expected value is exact.

    Args:
        values: fp32, any shape.
        bits: int32 of the same shape; the lowest 16 are used.
    """
    raised = (bits & ((1 << LOW_BITS) - 1)).add_(values.view(torch.int32))
    return raised.bitwise_right_shift_(LOW_BITS).to(torch.int16).view(torch.bfloat16)


def _observe_block(
    block: Sequence[TensorSlice], observe: UpdateObserver, index: int, start: int, before: Tensor, after: Tensor
) -> None:
    """Call ``observe`` with the place in the parameter of elements of a block."""
    observe(block[index].index, block[index].start + start, before, after)
