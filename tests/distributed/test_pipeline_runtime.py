"""The runtime on real ranks: gradients, and the report of a failure inside a schedule."""

from __future__ import annotations

import os
import re
import signal
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron.config.parallel import ParallelConfig
from megatron.distributed.launch import register_failure
from megatron.distributed.layout import Layout
from megatron.distributed.mesh import Mesh
from megatron.distributed.micro_batch import MicroBatch
from megatron.pipeline.actions import COMPUTE_KINDS, Action, PipelineSchedule
from megatron.pipeline.communication import channels
from megatron.pipeline.recorder import record_timeline
from megatron.pipeline.runtime import Chunk
from megatron.pipeline.simulate import Timeline
from megatron.training import failure_report
from megatron.training.failure_report import explain_error
from tests.kit.pipelines import SEED, Ends, LinearStage, batches_of, pipeline_of, program_of
from tests.kit.pool import Pool, RankError

RANKS, MICROBATCHES = 4, 6
TIMEOUT = 20.0
"""Of the groups, in seconds."""

SHORT = 5.0
"""Of the groups of a rank that hangs, in seconds."""

CLOCKS = 1e-3
"""Seconds by which the clocks of two processes may differ."""


def mesh_of(rank: int, program: PipelineSchedule, seconds: float = TIMEOUT) -> Mesh:
    ranks = len(program.ranks)
    layout = Layout.from_config(ParallelConfig(pipeline_model_parallel_size=ranks), ranks)
    return Mesh(
        layout, rank, timedelta(seconds=seconds), placement=program.placement, edges=channels(program.placement)
    )


def fails_in_1f2(chunk: LinearStage, how: str) -> Chunk:
    """A stage 1 that raises in micro-batch 2, or whose process dies or hangs there."""

    def run(x: Tensor | None, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        if chunk.number == 1 and int(batch.tokens[0, 0]) == 6:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "hang":
                time.sleep(2 * SHORT)
            raise ValueError("too hot")
        return chunk(x, batch)

    return run


def fail(rank: int, world_size: int, how: str, reported: Path) -> None:
    """A step in which rank 1 fails; the first rank to notice writes what it would print, and when it could."""
    program, ends = program_of("1f1b", world_size, MICROBATCHES), Ends()
    mesh = mesh_of(rank, program, SHORT if how == "hang" else TIMEOUT)
    pipeline = pipeline_of(program, rank, mesh.channels, ends, partial(fails_in_1f2, how=how))
    failure_report.POLL_SECONDS, failure_report.POSITION_TIMEOUT_SECONDS = 0.1, 4.0  # the machine may be busy
    began = time.monotonic()
    try:
        with failure_report.PeerWatchdog(mesh.world, pipeline):
            pipeline.run(program.ranks[rank], batches_of(MICROBATCHES), torch.tensor(SEED))
    except Exception as error:
        if register_failure():
            text = f"{explain_error(error)}\n{failure_report.rank_positions(rank, world_size)}"
            reported.write_text(f"{text}\nafter {time.monotonic() - began:.1f} s", encoding="utf-8")
        raise


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks get the time that they need to end by themselves."""
    monkeypatch.setattr("tests.kit.pool.GRACE", TIMEOUT)


@pytest.mark.usefixtures("patience")
def test_of_a_rank_that_is_killed_the_others_report(pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"rank 1 of 4 failed in .*: process died: killed by SIGKILL") as caught:
        pool.run(RANKS, fail, "kill", tmp_path / "reported", backend="gloo")
    assert "still running" not in str(caught.value)
    cause, *_, places, seconds = (tmp_path / "reported").read_text(encoding="utf-8").splitlines()
    assert cause.startswith("lost contact with another rank")
    # rank 1 dies in its third forward; a busy machine may not have let the ranks around it come as far
    at = r"(\d(SEND_|RECV_)?[FB]\d)"
    assert re.fullmatch(
        rf"the ranks were at: {at} \(rank 0\), no answer \(rank 1\), {at} \(rank 2\), {at} \(rank 3\)", places
    )
    assert float(seconds.split()[1]) < TIMEOUT


def timeline(rank: int, world_size: int) -> Timeline:
    program, ends = program_of("zb-v", world_size, MICROBATCHES), Ends()
    mesh = mesh_of(rank, program)
    pipeline = pipeline_of(program, rank, mesh.channels, ends)
    with record_timeline(pipeline, mesh.group("pp"), torch.device("cpu")) as recorder:
        pipeline.run(program.ranks[rank], batches_of(MICROBATCHES), torch.tensor(SEED))
    return recorder.timeline(program.name)


def test_ranks_record_one_timeline_together(pool: Pool) -> None:
    """On one clock: nothing begins before what it needs is over on another rank."""
    seen, *others = pool.run(2, timeline)
    assert all(other == seen for other in others)
    program = program_of("zb-v", 2, MICROBATCHES)
    ran = {interval.action: interval for intervals in seen.intervals for interval in intervals}
    computed = [tuple(a for a in actions if a.kind in COMPUTE_KINDS) for actions in program.ranks]
    assert [tuple(interval.action for interval in intervals) for intervals in seen.intervals] == computed
    for (stage, kind, microbatch), start, _ in ran.values():
        before = Action(stage - 1, kind, microbatch) if kind == "F" else Action(stage + 1, kind, microbatch)
        if before in ran and kind != "W":
            assert ran[before].end <= start + CLOCKS
