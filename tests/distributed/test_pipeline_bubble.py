"""A measured bubble is the simulated one: stages that sleep, on four ranks, under every schedule.

Ranks that sleep need no processor, but on a busy machine they wake late, which mostly adds to the bubble. So a run that
is off is repeated, up to ``TRIES`` runs, of which one has to be near.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.config.parallel import ParallelConfig
from megatron.distributed import comm
from megatron.distributed.grad_accumulator import GradAccumulator, WgradOperand
from megatron.distributed.layout import Layout
from megatron.distributed.mesh import Mesh
from megatron.distributed.micro_batch import MicroBatch
from megatron.pipeline.communication import channels
from megatron.pipeline.recorder import record_timeline
from megatron.pipeline.runtime import Pipeline
from megatron.pipeline.simulate import StageCosts, simulate
from tests.distributed.pool import Pool
from tests.pipelines import SIZES, batches_of, program_of

RANKS, MICROBATCHES = 4, 6
TRIES = 8
POINTS = 0.03
"""By how much the share of time in which ranks do not compute may differ."""

FORWARD, INPUT, WEIGHT = 0.044, 0.036, 0.030
"""Seconds of a rank's layers; a stage of several has its share. All different: none can stand for another."""


class _Sleep(torch.autograd.Function):
    """The identity, slow both ways; its weight gradient, which a grad_accumulator multiplies, is slow as well."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: float, grad_accumulator: GradAccumulator) -> Tensor:
        ctx.save_for_backward(x)
        ctx.share, ctx.grad_accumulator = share, grad_accumulator
        time.sleep(FORWARD / share)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        time.sleep(INPUT / ctx.share)
        [x] = ctx.saved_tensors
        return dy, ctx.grad_accumulator.accumulate_wgrad("weight", WgradOperand(x), WgradOperand(dy)), None


class Sleeper:
    """A stage that sleeps for its share of a rank's time."""

    def __init__(self, number: int, stages: int, grad_accumulator: GradAccumulator) -> None:
        self.first, self.last, self.share, self.grad_accumulator = (
            number == 0,
            number + 1 == stages,
            stages // RANKS,
            grad_accumulator,
        )

    def __call__(self, x: Tensor | None, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """As a chunk is called."""
        start = torch.ones(1, requires_grad=True) if x is None else x
        out = _Sleep.apply(start, self.share, self.grad_accumulator)
        return out.sum() if self.last else out, torch.zeros(())


def bubbles(rank: int, world_size: int, name: str, expected: float) -> list[float]:
    """Of run after run, until one is near ``expected``."""
    program = program_of(name, RANKS, MICROBATCHES)
    layout = Layout.from_config(ParallelConfig(pipeline_model_parallel_size=RANKS), RANKS)
    mesh = Mesh(layout, rank, placement=program.placement, edges=channels(program.placement))
    grad_accumulator = GradAccumulator(lambda target, x, dy, beta: time.sleep(WEIGHT / SIZES[name]))
    grad_accumulator.bind({"weight": torch.zeros(())}.__getitem__, lambda name: None)
    chunks = {
        s: Sleeper(s, program.stages, grad_accumulator) for s, place in enumerate(program.placement) if place == rank
    }
    pipeline = Pipeline(chunks, program.placement, rank, mesh.channels, lambda batch: torch.empty(1), grad_accumulator)
    found: list[float] = []
    while len(found) < TRIES and not any(abs(bubble - expected) < POINTS for bubble in found):
        comm.all_reduce(torch.zeros(1), mesh.world)
        with record_timeline(pipeline, mesh.group("pp"), torch.device("cpu")) as recorder:
            pipeline.run(program.ranks[rank], batches_of(MICROBATCHES), torch.ones(()))
        found.append(recorder.timeline(name).bubble)
    return found


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_the_bubble_is_the_simulated_one(pool: Pool, name: str) -> None:
    program, share = program_of(name, RANKS, MICROBATCHES), SIZES[name]
    costs = StageCosts.uniform(program.stages, FORWARD / share, INPUT / share, WEIGHT / share)
    expected = simulate(program, costs).bubble
    measured = pool.run(RANKS, bubbles, name, expected, check_collectives=False)[0]
    assert min(abs(bubble - expected) for bubble in measured) < POINTS, f"{measured}, not {expected:.3f}"
