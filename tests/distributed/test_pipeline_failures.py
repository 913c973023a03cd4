"""Failures in a step of a pipeline run: one report, with the action of every rank."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from megatron.config.run import RunConfig
from megatron.config.text import format_bytes
from megatron.planner.memory import rank_state_bytes
from megatron.training.trainer import Trainer
from tests.kit.pool import Pool
from tests.kit.runs import Outcome, before_step, column, start, tiny_run

INTERLEAVED = (
    "--num-layers 4 --max-position-embeddings 512 "
    "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
)
TIMEOUT, NAP = 3.0, 4.5
"""Seconds that a rank waits for another, and that one does not answer."""


def overheat() -> None:
    raise ValueError("too hot")


FAULTS: dict[str, Callable[[], object]] = {
    "raises": overheat,
    "sleeps": partial(time.sleep, NAP),
    "allocates": partial(torch.empty, 1 << 52),
}
"""Faults of rank 1 in 3F2 of step 3."""


def break_stage(trainer: Trainer, how: str) -> None:
    """Let it happen in stage 3's forward of micro-batch 2, from now on."""
    forwards: list[object] = []

    def before(*_: object) -> None:
        forwards.append(None)
        if len(forwards) == 3:
            FAULTS[how]()

    if 3 in trainer.chunks:
        trainer.chunks[3].register_forward_pre_hook(before)


def run_rank(rank: int, world_size: int, config: RunConfig, how: str) -> tuple[Outcome, float]:
    """Return the output of a rank, and the time at which it ended."""
    return start(config, before_step(3, partial(break_stage, how=how)), rank, world_size), time.monotonic()


def run_broken(pool: Pool, folder: Path, how: str) -> tuple[str, str]:
    """Return the output of the first rank that notices a failure of rank 1, and the records."""
    config = tiny_run(folder, f"{INTERLEAVED} --distributed-timeout-minutes {TIMEOUT / 60}", 2)
    ranks = pool.run(2, run_rank, config, how, backend="gloo")
    assert [printed.status for printed, _ in ranks] == [1, 1]
    assert abs(ranks[0][1] - ranks[1][1]) < 2 * TIMEOUT
    assert column(folder, "iteration") == [1, 2]
    (text,) = [printed.err for printed, _ in ranks if printed.err]
    (incident,) = [line for line in (folder / "incidents.md").read_text().splitlines() if "error:" in line]
    return text, incident


def test_a_rank_that_raises_is_reported_with_its_action(pool: Pool, tmp_path: Path) -> None:
    printed, incident = run_broken(pool, tmp_path, "raises")
    assert printed.startswith("error on rank 1: Traceback (most recent call last)")
    *_, cause, action, places = printed.splitlines()
    assert (cause, action) == ("ValueError: too hot", "in the pipeline at 3F2")
    assert places == "the ranks were at: 2B2 (rank 0), 3F2 (rank 1)"
    assert incident.endswith("step 2: error: rank 1: ValueError: too hot, in the pipeline at 3F2")


def test_a_rank_that_does_not_answer_is_reported_with_its_action(pool: Pool, tmp_path: Path) -> None:
    printed, incident = run_broken(pool, tmp_path, "sleeps")
    stall = (
        "stalled for 0.05 minutes (--distributed-timeout-minutes): rank 1: forward-compute, step 3, micro-batch 2 (3F2)"
    )
    assert printed.startswith(f"error on rank 0: {stall}")
    assert "; others: message from rank 1 to rank 0, step 3, micro-batch 2 (2B2)\n" in printed
    assert "the ranks were at: 2B2 (rank 0), 3F2 (rank 1)" in printed
    assert stall in incident


def test_a_rank_without_memory_ends_all_and_explains_its_own(pool: Pool, tmp_path: Path) -> None:
    printed, incident = run_broken(pool, tmp_path, "allocates")
    error, report = printed.split("the ranks were at: 2B2 (rank 0), 3F2 (rank 1)\nmemory of rank 1 on cpu")
    assert "can't allocate memory" in error
    assert ": 16,777,216.00 GiB could not be allocated" in report
    state = rank_state_bytes(tiny_run(tmp_path, INTERLEAVED, 2), 2, 1)
    for part in ("weights", "gradients"):
        size = re.escape(format_bytes(state[part]))
        assert re.search(rf"^  {part} +{size} +{size}$", report, re.MULTILINE), report
    assert "in the pipeline at 3F2" in incident
    assert "memory of rank" not in incident
