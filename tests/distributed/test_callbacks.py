"""Callbacks on several ranks: they may communicate, and see complete weights while these are still being gathered."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron.config import plugins
from megatron.config.plugins import register
from megatron.config.run import RunConfig
from megatron.distributed import comm
from megatron.optimizer.parameter_store import ParameterStore
from megatron.training import main
from megatron.training.callbacks.base import Callback
from megatron.training.metrics import StepMetrics
from megatron.training.trainer import Trainer
from tests.kit.pool import Pool
from tests.kit.runs import checkpoint, tiny_run

OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
PLAIN = ""


def run_and_compare(rank: int, world_size: int, config: RunConfig) -> list[list[float]]:
    """Run with a callback that compares the weights of all ranks; return their sums, by call and rank."""
    seen: list[list[float]] = []
    place = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
    gather = ParameterStore.start_gather

    def late(weights: ParameterStore) -> None:
        time.sleep(0.1 * rank)
        gather(weights)

    lateness = patch.object(ParameterStore, "start_gather", late)
    with patch.dict(os.environ, place), patch.dict(plugins._registered, {"callback": {}}), lateness:

        @register("callback", "compare")
        class Compare(Callback):
            interval = 2

            def compare(self) -> None:
                weights = torch.cat([p.detach().flatten().double() for p in self.trainer.params.values()])
                seen.append(comm.all_gather_objects(weights.square().sum().item(), self.trainer.mesh.world))

            def on_step_start(self) -> None:
                self.compare()

            def on_step_end(self, metrics: StepMetrics) -> None:
                self.compare()

            def on_log(self, record: Any) -> None:
                self.compare()

            def on_evaluate(self, record: Any) -> None:
                self.compare()

            def on_iteration_end(self) -> None:
                self.compare()

        if main.run(config) != 0:
            raise RuntimeError("the run failed")
    return seen


def test_weights_are_complete_and_the_same_on_all_ranks(pool: Pool, tmp_path: Path) -> None:
    flags = "--eval-interval 3 --eval-iters 1 --train-iters 4"
    ranks = pool.run(2, run_and_compare, tiny_run(tmp_path / "overlap", f"{flags} {OVERLAP}", 2))
    plain = pool.run(2, run_and_compare, tiny_run(tmp_path / "plain", f"{flags} {PLAIN}", 2))
    assert ranks[0] == ranks[1]
    assert all(first == second for first, second in ranks[0])
    assert len(ranks[0]) > 10
    assert [sums[0] for sums in ranks[0]] == [sums[0] for sums in plain[0]]


def run_with_averages(rank: int, world_size: int, config: RunConfig) -> int:
    """Run with a callback that has state, small and by parameter; return the exit status."""
    place = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
    with patch.dict(os.environ, place), patch.dict(plugins._registered, {"callback": {}}):

        @register("callback", "averages")
        class Averages(Callback):
            pauses = False

            def __init__(self, trainer: Trainer) -> None:
                super().__init__(trainer)
                self.loss, self.steps = 0.0, 0
                self.squares = {n: torch.zeros_like(w) for n, w in trainer.optimizer.main_params.items()}

            def on_step_end(self, metrics: StepMetrics) -> None:
                self.steps += 1
                self.loss += (metrics.loss.item() - self.loss) / self.steps
                for name, squares in self.squares.items():
                    squares.lerp_(self.trainer.optimizer.main_params[name].square(), 1 / self.steps)

            def state_dict(self) -> dict[str, Any]:
                return {"loss": self.loss, "steps": self.steps}

            def load_state_dict(self, state: Mapping[str, Any]) -> None:
                self.loss, self.steps = state["loss"], state["steps"]

            def tensors(self) -> dict[str, dict[str, torch.Tensor]]:
                return {"mean_square": self.squares}

        return main.run(config)


def test_a_callback_resumes_in_another_layout(pool: Pool, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert pool.run(1, run_with_averages, tiny_run(tmp_path, f"--fp64 --save {whole}")) == [0]
    sharded = f"--fp64 --save {parts} --tensor-model-parallel-size 2 --sequence-parallel {OVERLAP} --exit-interval 3"
    assert pool.run(4, run_with_averages, tiny_run(tmp_path, sharded, 4)) == [0] * 4
    assert pool.run(1, run_with_averages, tiny_run(tmp_path, f"--fp64 --save {parts}")) == [0]
    (expected, numbers), (found, resumed) = (checkpoint(folder / "iter_0000006") for folder in (whole, parts))
    kept = [name for name in expected if name.startswith("optim.mean_square.")]
    assert len(kept) == sum("optim." not in name for name in expected)
    errors = [(found[name] - expected[name]).abs().max() / expected[name].abs().max() for name in kept]
    assert max(errors) < 1e-10
    assert resumed["callback averages"]["steps"] == numbers["callback averages"]["steps"] == 6
    assert resumed["callback averages"]["loss"] == pytest.approx(numbers["callback averages"]["loss"], rel=1e-12)
