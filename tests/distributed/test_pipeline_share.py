"""The bubble in a run's log lines matches the schedule, wherever a rank waits."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from megatron.config.run import RunConfig
from megatron.layers.norm import Residual
from megatron.pipeline.plan import build_program
from megatron.pipeline.simulate import StageCosts, simulate
from megatron.training.trainer import Trainer
from tests.kit.pool import Pool
from tests.kit.runs import before_step, column, start, tiny_run

FORWARD, BACKWARD = 0.02, 0.05
"""Seconds for which a layer sleeps."""

POINTS = 0.03
"""By how much the share of the step may differ."""


def slow_down(trainer: Trainer) -> None:
    """Let every layer sleep, forward and backward."""

    def nap(dy: Tensor) -> None:
        time.sleep(BACKWARD)

    def doze(layer: nn.Module, inputs: Any, output: tuple[Residual, Tensor | None]) -> None:
        time.sleep(FORWARD)
        if output[0].x.requires_grad:
            output[0].x.register_hook(nap)

    for chunk in trainer.chunks.values():
        for name, module in chunk.named_modules():
            if name.startswith("layers.") and name.count(".") == 1:
                module.register_forward_hook(doze)


def run_rank(rank: int, world_size: int, config: RunConfig) -> int | None:
    """A rank's exit status."""
    return start(config, before_step(1, slow_down), rank, world_size).status


@pytest.mark.parametrize("flags", ["--num-layers 4 --num-virtual-stages-per-pipeline-rank 2"], ids=["vpp2"])
def test_the_bubble_of_a_run_matches_its_schedule(pool: Pool, tmp_path: Path, flags: str) -> None:
    config = tiny_run(tmp_path, f"--pipeline-model-parallel-size 2 {flags}", 2)
    assert pool.run(2, run_rank, config) == [0, 0]
    program = build_program(config.parallel, 4)
    expected = simulate(program, StageCosts.uniform(program.stages, FORWARD, BACKWARD, 0.0)).bubble
    shortest = min(zip(column(tmp_path, "iteration-time"), column(tmp_path, "bubble")))  # other programs lengthen steps
    assert shortest[1] == pytest.approx(expected, abs=POINTS)
