"""The measured bubble equals the simulated one: stages of a given time, on four ranks, under every schedule.

Time is a clock of the test. Tensors carry it from rank to rank: a rank that waits for one goes on no sooner than it was
made. So the load of the machine changes nothing that the recorder measures.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from megatron.config.parallel import ParallelConfig
from megatron.distributed.comm import Pending
from megatron.distributed.grad_accumulator import GradAccumulator, WgradOperand
from megatron.distributed.layout import Layout
from megatron.distributed.mesh import Mesh
from megatron.distributed.micro_batch import MicroBatch
from megatron.pipeline import recorder as recorder_module
from megatron.pipeline.communication import channels
from megatron.pipeline.recorder import record_timeline
from megatron.pipeline.runtime import Pipeline
from megatron.pipeline.simulate import StageCosts, simulate
from tests.kit.pipelines import SIZES, batches_of, program_of
from tests.kit.pool import Pool
from tests.kit.solo import Gradients

RANKS, MICROBATCHES = 4, 6

FORWARD, INPUT, WEIGHT = 0.44, 0.36, 0.30
"""Seconds of a rank's layers; a stage of several has its share. All different: none can stand for another."""


class Clock:
    """The time of a rank, in seconds."""

    now = 0.0

    def spend(self, seconds: float) -> Tensor:
        """Compute for some seconds, and return the time after them, ``[1]``."""
        self.now += seconds
        return torch.tensor([self.now], dtype=torch.float64)


class _Compute(torch.autograd.Function):
    """The forward and the input gradient of a stage; a grad_accumulator runs its weight gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: float, clock: Clock, grad_accumulator: GradAccumulator) -> Tensor:
        ctx.save_for_backward(x)
        ctx.share, ctx.clock, ctx.grad_accumulator = share, clock, grad_accumulator
        return clock.spend(FORWARD / share)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        [x] = ctx.saved_tensors
        dw = ctx.grad_accumulator.accumulate_wgrad("weight", WgradOperand(x), WgradOperand(dy))
        return ctx.clock.spend(INPUT / ctx.share), None, None, dw


class ComputingStage:
    """A stage that computes for its share of a rank's time."""

    def __init__(self, number: int, stages: int, clock: Clock, grad_accumulator: GradAccumulator) -> None:
        self.last, self.share = number + 1 == stages, stages // RANKS
        self.clock, self.grad_accumulator = clock, grad_accumulator

    def __call__(self, x: Tensor | None, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """As a chunk is called."""
        start = torch.ones(1, dtype=torch.float64, requires_grad=True) if x is None else x
        out = _Compute.apply(start, self.share, self.clock, self.grad_accumulator)
        return out.sum() if self.last else out, torch.zeros(())


def bubble(rank: int, world_size: int, name: str) -> float:
    """The bubble that a recorder measures on the clocks of the ranks."""
    program, clock, wait = program_of(name, RANKS, MICROBATCHES), Clock(), Pending.wait
    layout = Layout.from_config(ParallelConfig(pipeline_model_parallel_size=RANKS), RANKS)
    mesh = Mesh(layout, rank, placement=program.placement, edges=channels(program.placement))
    grad_accumulator = GradAccumulator(lambda target, x, dy, beta: clock.spend(WEIGHT / SIZES[name]))
    grad_accumulator.bind(Gradients({"weight": torch.zeros(())}))
    stages = [stage for stage, place in enumerate(program.placement) if place == rank]
    chunks = {stage: ComputingStage(stage, program.stages, clock, grad_accumulator) for stage in stages}

    def buffer(batch: MicroBatch) -> Tensor:
        return torch.empty(1, dtype=torch.float64)

    def wait_for(pending: Pending) -> Tensor:
        tensor = wait(pending)
        clock.now = max(clock.now, tensor.item())
        return tensor

    pipeline = Pipeline(chunks, program.placement, rank, mesh.channels, buffer, grad_accumulator)
    with (
        patch.object(recorder_module, "time", SimpleNamespace(time=lambda: clock.now)),
        patch.object(Pending, "wait", wait_for),
        record_timeline(pipeline, mesh.group("pp"), torch.device("cpu")) as recorder,
    ):
        pipeline.run(program.ranks[rank], batches_of(MICROBATCHES), torch.ones(()))
    return recorder.timeline(name).bubble


@pytest.mark.parametrize("name", SIZES)
def test_the_bubble_is_the_simulated_one(pool: Pool, name: str) -> None:
    program, share = program_of(name, RANKS, MICROBATCHES), SIZES[name]
    costs = StageCosts.uniform(program.stages, FORWARD / share, INPUT / share, WEIGHT / share)
    expected = simulate(program, costs).bubble
    for measured in pool.run(RANKS, bubble, name):
        assert measured == pytest.approx(expected, abs=1e-12)
