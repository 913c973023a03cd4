"""Moments kept in bf16.

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
from megatron.optim.rules import RULES, AdamW, Rate, Rule
from megatron.parallel.random import hash_of
from megatron.parallel.shard import ShardSpec

LOW = 16
"""Bits that fp32 has and bf16 has not."""


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
    """Any rule, with some of its state in bf16: every block is widened, updated, and rounded at random.

    A skipped update is found again to the bit, because a value that bf16 has is never rounded.
    """

    def __init__(
        self,
        rule: Rule,
        params: Sequence[Tensor],
        names: Sequence[str],
        specs: Mapping[str, ShardSpec],
        dtypes: Mapping[str, torch.dtype],
        seed: int,
    ) -> None:
        """Make the state.

        Args:
            rule: of no parameters: it is lent those of each block.
            params: to move, contiguous.
            names: theirs.
            specs: by name.
            dtypes: of the kinds of state that are narrow; at most two.
            seed: of the run.
        """
        self.params, self._rule, self._dtypes = list(params), rule, dict(dtypes)
        self.state = {
            kind: [torch.zeros_like(p, dtype=self._dtypes.get(kind, p.dtype)) for p in self.params]
            for kind in rule.state
        }
        device = self.params[0].device
        self.step_counts = [torch.zeros((), dtype=torch.float32, device=device)]
        self._places = [Places.of(specs[name], device) for name in names]
        self._keys = [hash_of(seed, "moments", name) for name in names]

    @torch.no_grad()
    def update(self, grads: Sequence[Tensor], lr: Rate, weight_decay: float, skip: Tensor) -> None:
        """One step of :class:`Rule`."""
        (count,) = self.step_counts
        for block in blocks(self.params):
            rule = self._rule
            rule.params = [cut.of(self.params) for cut in block]
            rule.step_counts = [count.clone() for _ in block]
            rule.state = {
                kind: [cut.of(held).to(param.dtype) for cut, param in zip(block, rule.params)]
                for kind, held in self.state.items()
            }
            rule.update([cut.of(grads) for cut in block], lr, weight_decay, skip)
            self._put_back(block, rule.state)
        count.add_(1.0 - skip)

    def _put_back(self, block: Sequence[Cut], wide: Mapping[str, Sequence[Tensor]]) -> None:
        """Round what a block's moments have become; those that are not narrow were updated in place."""
        step = self.step_counts[0].long()
        bits = torch.cat([self._places[c.index].bits(self._keys[c.index], step, c.start, c.stop) for c in block])
        for part, kind in enumerate(self._dtypes):
            values = torch.cat([value.float() for value in wide[kind]])
            rounded = round_at_random(values, bits >> (LOW * part)).split([value.numel() for value in wide[kind]])
            torch._foreach_copy_([cut.of(self.state[kind]) for cut in block], list(rounded))


def round_at_random(values: Tensor, bits: Tensor) -> Tensor:
    """fp32 values as bf16: the next one towards zero, or away from it, in the mean the value itself.

    Args:
        values: fp32, any shape.
        bits: int32 of the same shape; the lowest 16 are used.
    """
    raised = (bits & ((1 << LOW) - 1)).add_(values.view(torch.int32))
    return raised.bitwise_right_shift_(LOW).to(torch.int16).view(torch.bfloat16)


def make_rule(
    names: Sequence[str],
    masters: Mapping[str, Tensor],
    specs: Mapping[str, ShardSpec],
    config: OptimizerConfig,
    seed: int,
    kernel: Adam = adam,
) -> Rule:
    """The configured rule for some parameters, its moments in the configured formats; ``kernel`` computes Adam."""
    create = partial(AdamW, kernel=kernel) if config.optimizer == "adam" else RULES[config.optimizer]
    params = [masters[name] for name in names]
    wished = {"exp_avg": config.exp_avg_dtype, "exp_avg_sq": config.exp_avg_sq_dtype}
    rule = create([], config)
    narrow = {kind: torch.bfloat16 for kind, dtype in wished.items() if dtype == "bf16" and kind in rule.state}
    return NarrowRule(rule, params, names, specs, narrow, seed) if narrow else create(params, config)
