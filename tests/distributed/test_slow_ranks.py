"""Slow ranks are named, with their machine and the phase in which they are slow, without the waits of the others."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron.config.run import RunConfig
from megatron.training.callbacks.profiler import is_layer
from megatron.training.components.slow_ranks import SlowRank, describe, find_slow_ranks
from megatron.training.trainer import Trainer
from tests.kit.pool import Pool
from tests.kit.runs import before_step, records, start, tiny_run

SLEEP = 0.4
SLOW = 2


def slow_forward(trainer: Trainer) -> None:
    def late(module: torch.nn.Module, inputs: Any) -> None:
        if torch.is_grad_enabled() or not module.training:
            time.sleep(SLEEP)

    chunk = next(iter(trainer.chunks.values()))
    next(module for name, module in chunk.named_modules() if is_layer(name)).register_forward_pre_hook(late)


def slow_backward(trainer: Trainer) -> None:
    def late(gradient: torch.Tensor) -> None:
        time.sleep(SLEEP)

    def observe(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if output[0].x.requires_grad:
            output[0].x.register_hook(late)

    chunk = next(iter(trainer.chunks.values()))
    next(module for name, module in chunk.named_modules() if is_layer(name)).register_forward_hook(observe)


def slow_optimizer(trainer: Trainer) -> None:
    update = trainer.optimizer.update

    def late(*arguments: Any, **options: Any) -> Any:
        time.sleep(SLEEP)
        return update(*arguments, **options)

    trainer.optimizer.update = late  # type: ignore[method-assign]


def slow_data(trainer: Trainer) -> None:
    read = trainer.reader.next_batches

    def late(*arguments: Any) -> Any:
        time.sleep(SLEEP)
        return read(*arguments)

    trainer.reader.next_batches = late  # type: ignore[method-assign]


EVENTS: dict[str, Callable[[Trainer], None]] = {
    "forward": slow_forward,
    "backward": slow_backward,
    "optimizer": slow_optimizer,
    "data": slow_data,
}


def run_rank(rank: int, world_size: int, config: RunConfig, place: str) -> int | None:
    event = before_step(1, EVENTS[place]) if rank == SLOW else None
    with patch.dict(os.environ, {"SLURMD_NODENAME": f"node{rank}"}):
        return start(config, event, rank, world_size).status


@pytest.mark.parametrize(
    ("place", "layout"),
    [
        ("forward", "--tensor-model-parallel-size 2"),
        pytest.param("backward", "--tensor-model-parallel-size 2", marks=pytest.mark.slow),
        pytest.param("optimizer", "--use-distributed-optimizer", marks=pytest.mark.slow),
        pytest.param("data", "--pipeline-model-parallel-size 2", marks=pytest.mark.slow),
    ],
)
def test_a_slow_rank_is_named_with_its_machine_and_phase(pool: Pool, tmp_path: Path, place: str, layout: str) -> None:
    flags = f"{layout} --eval-iters 0 --train-iters 4 --log-slowest-ranks-interval 1"
    assert pool.run(4, run_rank, tiny_run(tmp_path, flags, 4), place) == [0] * 4
    events = [line for line in records(tmp_path, "text") if "slowest ranks in steps" in line["text"]]
    assert [event["event"] for event in events] == ["note", "note", "warning", "warning"]
    for step, event in [*enumerate(events, 1)][1:]:  # in the first step all are slow, in the optimizer
        assert event["text"].startswith(f"slowest ranks in steps {step} to {step}: ")
        assert re.search(rf"\brank {SLOW} on node2 \+\d+% in {place} \(for {step} reports\)", event["text"])


def test_ranks_are_compared_within_their_stage() -> None:
    even, slow = [1.0, 2.0, 4.0, 1.0], [1.0, 2.0, 5.0, 1.0]
    heavy = [2.0, 4.0, 8.0, 2.0]  # a stage with twice the layers
    assert find_slow_ranks([even, even, heavy, heavy], [0, 0, 1, 1]) == []
    assert find_slow_ranks([even, slow, even, heavy, heavy, heavy], [0, 0, 0, 1, 1, 1]) == [
        SlowRank(1, pytest.approx(1 / 8), "backward")  # type: ignore[arg-type]
    ]
    assert find_slow_ranks([[0.0] * 4] * 2, [0, 0]) == []


def test_a_node_whose_ranks_are_all_slow_is_named_as_one() -> None:
    hosts = ["a", "a", "b", "b", "c", "c", "d", "d"]
    slow = [SlowRank(2, 0.5, "forward"), SlowRank(3, 0.25, "forward")]
    assert describe(slow, hosts, {2: 1, 3: 1}) == "all 2 ranks of b +25% to +50% in forward"
    slow += [SlowRank(rank, 0.1, "data") for rank in (0, 4, 6)]
    text = "rank 0 on a +10% in data, rank 4 on c +10% in data (for 2 reports), rank 6 on d +10% in data"
    assert describe(slow, hosts, {0: 1, 2: 1, 3: 1, 4: 2, 6: 1}).endswith(text)
    assert describe(slow[:1], ["a"] * 8, {2: 4}) == "rank 2 +50% in forward (for 4 reports)"
    many = [SlowRank(rank, 0.1, "data") for rank in range(0, 8, 2)]
    assert describe(many, hosts, dict.fromkeys(range(8), 1)).endswith("rank 4 on c +10% in data, 1 more")
