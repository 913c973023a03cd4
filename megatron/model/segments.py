"""Compose the blocks of a chunk once, at build: plain, recomputed in backward, or with activation offload."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from megatron.layers.activation_offload import ActivationOffload
from megatron.layers.context import BuildContext, ForwardContext, Losses
from megatron.layers.norm import Residual
from megatron.layers.recompute import recompute
from megatron.layers.recompute_plan import RecomputePlan
from megatron.model.block import Block, run_blocks

Segment = Callable[[Residual, Losses, ForwardContext], tuple[Residual, Losses]]
"""Runs consecutive blocks: takes and returns the hidden state, and the losses so far."""


def compose_blocks(blocks: Sequence[Block], plan: RecomputePlan, context: BuildContext) -> Segment:
    """Return what runs the blocks of a chunk."""
    recomputed = [numbers for numbers, again in plan.segments(len(blocks)) if again]
    if context.offload is None and not recomputed:
        return partial(run_blocks, blocks)
    segments: dict[int, Segment] = {
        numbers.start: partial(_run_again if again else run_blocks, blocks[numbers.start : numbers.stop])
        for numbers, again in plan.segments(len(blocks))
    }
    return _Segments(segments, context.offload)


def _run_again(
    blocks: Sequence[Block], residual: Residual, losses: Losses, ctx: ForwardContext
) -> tuple[Residual, Losses]:
    """Run consecutive blocks, in training again in backward, for which one tensor is kept."""
    if not ctx.training:
        return run_blocks(blocks, residual, losses, ctx)
    x_SBH, losses = recompute(_run_to_sum, blocks, residual.sum(), losses, ctx)
    return Residual(x_SBH), losses


def _run_to_sum(blocks: Sequence[Block], x_SBH: Tensor, losses: Losses, ctx: ForwardContext) -> tuple[Tensor, Losses]:
    residual, losses = run_blocks(blocks, Residual(x_SBH), losses, ctx)
    return residual.sum(), losses


@dataclass(frozen=True)
class _Segments:
    """Segments one after the other, whose saved tensors may be kept on the host."""

    # By the position of their first block.
    segments: dict[int, Segment]
    offload: ActivationOffload | None

    def __call__(self, residual: Residual, losses: Losses, ctx: ForwardContext) -> tuple[Residual, Losses]:
        tables = (table for found in ctx.rotary.values() for table in (found.cos, found.sin))
        saving = nullcontext if self.offload is None else self.offload.blocks(tables)
        for first, segment in self.segments.items():
            with saving(first):
                residual, losses = segment(residual, losses, ctx)
        return residual, losses
