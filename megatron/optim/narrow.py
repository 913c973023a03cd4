"""Moments kept in bf16, and masters as the bits that bf16 weights lack.

Where a moment decays slowly, what a step adds to it is less than half of a bf16 step, and rounding to the nearest
value would lose it every time. So a moment is widened for its update, and rounded up or down at random, with
chances that make the mean exact. Chance is a function of (seed, update, parameter, element of the global tensor):
the same in every layout, with no state to save.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megatron.config.run import OptimizerConfig
from megatron.kernels.adam import Adam, adam
from megatron.kernels.hashing import random_bits
from megatron.optim.blocks import Cut, blocks
from megatron.optim.groups import ParamGroup
from megatron.optim.masters import LOW, Masters, joined, split, wide
from megatron.optim.rules import RULES, AdamW, Rate, Rule
from megatron.parallel.ownership import Share
from megatron.parallel.random import hash_of
from megatron.parallel.shard import ShardSpec


@dataclass(frozen=True)
class Places:
    """Which row and column of the global tensor each element of a rank's part has; those of padding have any.

    Attributes:
        rows: int64 ``[local rows]``: the global row of each; a 1-D tensor has rows of one element.
        width: elements of a local row.
        first: global column of the first element of a local row.
    """

    rows: Tensor
    width: int
    first: int

    @classmethod
    def of(cls, spec: ShardSpec, device: torch.device) -> Places:
        """The places of a parameter's part."""
        flat = len(spec.shape) == 1
        lead = len(spec.view) if flat else len(spec.view) - 1
        rows = torch.zeros(spec.local_view[:lead], dtype=torch.int64)
        numbers = torch.arange(spec.shape[0]).view(spec.view[:lead])
        for piece in spec.pieces:
            rows[piece.local.slices[:lead]] = numbers[piece.place.slices[:lead]]
        if flat:
            return cls(rows.flatten().to(device), 1, 0)
        first = spec.pieces[0].place.start[-1] if spec.pieces else 0
        return cls(rows.flatten().to(device), spec.local_view[-1], first)

    def bits(self, key: int, step: Tensor, start: int, stop: int) -> Tensor:
        """Random bits, int32, of the local elements from ``start`` to ``stop`` of the flattened tensor."""
        above, below = start // self.width, -(-stop // self.width)
        columns = torch.arange(self.first, self.first + self.width, device=self.rows.device)
        drawn = random_bits(key, step, self.rows[above:below], columns)
        return drawn.view(-1)[start - above * self.width : stop - above * self.width]


class NarrowRule:
    """Any rule, with masters or state kept narrow: every block is widened, updated, and made narrow again.

    State in bf16 is rounded at random; masters lose nothing.

    A skipped update is found again to the bit, because a value that bf16 has is never rounded.
    """

    def __init__(
        self,
        rule: Rule,
        masters: Masters,
        names: Sequence[str],
        specs: Mapping[str, ShardSpec],
        shares: Mapping[str, Share],
        dtypes: Mapping[str, torch.dtype],
        seed: int,
    ) -> None:
        """Make the state.

        Args:
            rule: of no parameters: it is lent those of each block.
            masters: of all parameters.
            names: of those to move.
            specs: by name.
            shares: what of each is moved, by name.
            dtypes: of the kinds of state that are in bf16; at most two.
            seed: of the run.
        """
        self._low = [masters.remainders.get(name) for name in names]
        self.params = [masters[n] if low is None else masters.weights[n] for n, low in zip(names, self._low)]
        self._rule, self._dtypes = rule, dict(dtypes)
        self.state = {
            kind: [torch.zeros_like(p, dtype=self._dtypes.get(kind, wide(p.dtype))) for p in self.params]
            for kind in rule.state
        }
        device = self.params[0].device
        self.step_counts = [torch.zeros((), dtype=torch.float32, device=device)]
        self._places = [Places.of(specs[name], device) for name in names]
        self._first = [shares[name].start for name in names]
        self._keys = [hash_of(seed, "moments", name) for name in names]

    @torch.no_grad()
    def update(self, grads: Sequence[Tensor], lr: Rate, weight_decay: float, skip: Tensor) -> None:
        """One step of :class:`Rule`."""
        (count,) = self.step_counts
        for block in blocks(self.params):
            rule = self._rule
            rule.params = [self._wide(cut) for cut in block]
            rule.step_counts = [count.clone() for _ in block]
            rule.state = {
                kind: [cut.of(held).to(param.dtype) for cut, param in zip(block, rule.params)]
                for kind, held in self.state.items()
            }
            rule.update([cut.of(grads) for cut in block], lr, weight_decay, skip)
            self._put_back(block, rule)
        count.add_(1.0 - skip)

    def _wide(self, cut: Cut) -> Tensor:
        low, held = self._low[cut.index], cut.of(self.params)
        return held if low is None else joined(held, low.view(-1)[cut.start : cut.stop])

    def _put_back(self, block: Sequence[Cut], rule: Rule) -> None:
        """Make narrow what a block has become; what is wide was updated in place."""
        for cut, moved in zip(block, rule.params):
            low = self._low[cut.index]
            if low is not None:
                high, rest = split(moved)
                cut.of(self.params).copy_(high)
                low.view(-1)[cut.start : cut.stop].copy_(rest)
        if self._dtypes:
            self._round(block, rule.state)

    def _round(self, block: Sequence[Cut], moments: Mapping[str, Sequence[Tensor]]) -> None:
        step = self.step_counts[0].long()
        bits = torch.cat([self._bits(cut, step) for cut in block])
        for part, kind in enumerate(self._dtypes):
            values = torch.cat([value.float() for value in moments[kind]])
            rounded = round_at_random(values, bits >> (LOW * part)).split([value.numel() for value in moments[kind]])
            torch._foreach_copy_([cut.of(self.state[kind]) for cut in block], list(rounded))

    def _bits(self, cut: Cut, step: Tensor) -> Tensor:
        first = self._first[cut.index]
        return self._places[cut.index].bits(self._keys[cut.index], step, first + cut.start, first + cut.stop)


def round_at_random(values: Tensor, bits: Tensor) -> Tensor:
    """fp32 values as bf16: the next one towards zero, or away from it, in the mean the value itself.

    Args:
        values: fp32, any shape.
        bits: int32 of the same shape; the lowest 16 are used.
    """
    raised = (bits & ((1 << LOW) - 1)).add_(values.view(torch.int32))
    return raised.bitwise_right_shift_(LOW).to(torch.int16).view(torch.bfloat16)


def make_rule(
    group: ParamGroup,
    masters: Masters,
    specs: Mapping[str, ShardSpec],
    shares: Mapping[str, Share],
    config: OptimizerConfig,
    seed: int,
    kernel: Adam = adam,
) -> Rule:
    """A group's rule, its moments in the configured formats; ``kernel`` computes Adam."""
    create = partial(AdamW, kernel=kernel) if group.rule == "adam" else RULES[group.rule]
    wished = {"exp_avg": config.exp_avg_dtype, "exp_avg_sq": config.exp_avg_sq_dtype}
    rule = create([], config)
    narrow = {kind: torch.bfloat16 for kind, dtype in wished.items() if dtype == "bf16" and kind in rule.state}
    if narrow or any(name in masters.remainders for name in group.names):
        return NarrowRule(rule, masters, group.names, specs, shares, narrow, seed)
    return create([masters[name] for name in group.names], config)
