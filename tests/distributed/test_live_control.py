"""Requests to a job of several ranks: all act after the same step, and numbers stay as they are."""

from __future__ import annotations

import re
from pathlib import Path
from unittest.mock import patch

import pytest

from megatron.config.run import RunConfig
from megatron.training import control, main
from megatron.training.trainer import Trainer
from tests.distributed.test_loop import LateStopRequest
from tests.kit.pool import Pool
from tests.kit.runs import before_step, column, records, saved_steps, start, tiny_run


def ask(trainer: Trainer) -> None:
    if trainer.mesh.rank == 0:
        text = "save\nevaluate\nlog-interval 1\n"
        (Path(str(trainer.config.logging.run_dir)) / "control").write_text(text)


def run_rank(rank: int, world_size: int, config: RunConfig, late: bool = False) -> tuple[int | None, str]:
    kind = LateStopRequest if late else main.StopRequest
    with patch.object(control, "FILE_CHECK_SECONDS", 0.0), patch.object(main, "StopRequest", kind):
        outcome = start(config, before_step(2, ask), rank, world_size)
    return outcome.status, outcome.err


FLAGS = "--log-interval 3 --eval-iters 2 --save-interval 50"


@pytest.mark.parametrize(
    ("flags", "late", "step"),
    [("--pipeline-model-parallel-size 2", False, 2), ("--use-distributed-optimizer --async-save", True, 3)],
)
def test_ranks_act_after_the_same_step(pool: Pool, tmp_path: Path, flags: str, late: bool, step: int) -> None:
    config = tiny_run(tmp_path / "run", f"{FLAGS} {flags} --save {tmp_path}/saved", 2)
    assert pool.run(2, run_rank, config, late) == [(0, ""), (0, "")]
    assert saved_steps(tmp_path / "saved") == [step, 6]
    assert column(tmp_path / "run", "iteration", "lm loss validation") == [step, 6]
    assert column(tmp_path / "run", "iteration") == [3, 4, 5, 6]
    events = [line for line in records(tmp_path / "run", "event") if line["event"] == "control"]
    assert [(event["iteration"], event["done"]) for event in events] == [(step, True)] * 3
    for rank in range(2):
        log = (tmp_path / "run" / "ranks" / f"rank_{rank:05}.log").read_text()
        assert re.match(rf"==== .* rank {rank} of 2 on .*, process \d+", log)
    alone = tiny_run(tmp_path / "plain", f"--eval-iters 2 {flags}", 2)
    with_none = pool.run(2, start_plain, alone)
    assert with_none == [(0, ""), (0, "")]
    assert column(tmp_path / "run", "lm loss")[1:] == column(tmp_path / "plain", "lm loss")[3:]


def start_plain(rank: int, world_size: int, config: RunConfig) -> tuple[int | None, str]:
    outcome = start(config, None, rank, world_size)
    return outcome.status, outcome.err
