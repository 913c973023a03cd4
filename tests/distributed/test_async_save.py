"""Background saves on several ranks: they agree on skipped, lost and finished saves, whichever rank is slow."""

from __future__ import annotations

import os
import random
import signal
import threading
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from megatron.config.run import RunConfig
from megatron.distributed.comm import Group
from megatron.distributed.mesh import Mesh
from tests.kit.pool import Pool, RankError
from tests.kit.runs import Outcome, differences, full_disk, saved_steps, start, tiny_run
from tests.kit.saves import all_of, deleted_when, over_before, slowly, written_when

RANKS = 2
LONG = pytest.mark.slow
LAYOUTS = {
    "zero1": "--use-distributed-optimizer --overlap-param-gather --bf16 --store-param-remainders",
    "tp2-sp": "--tensor-model-parallel-size 2 --sequence-parallel",
    "pp2": "--pipeline-model-parallel-size 2",
}


def run_of(folder: Path, flags: str = "--async-save", every: int = 2) -> RunConfig:
    """A run of 6 steps."""
    return tiny_run(folder, f"--save {folder}/saved --save-interval {every} {flags}", RANKS)


def killed_at(step: int, call: int) -> AbstractContextManager[Any]:
    """SIGKILL at a write to the disk by the thread that saves ``step``."""
    real, count = os.write, [0]

    def write(fd: int, content: Any) -> int:
        if threading.current_thread().name == f"save of step {step}":
            count[0] += 1
            if count[0] > call:
                os.kill(os.getpid(), signal.SIGKILL)
        return real(fd, content)

    return patch.object(os, "write", write)


def impatient_at_first() -> AbstractContextManager[Any]:
    """The first communicators give a rank up after a second."""
    patient, made = Mesh.background_group, []

    def background_group(mesh: Mesh) -> Group:
        if made:
            return patient(mesh)
        made.append(dist.new_group([*mesh.world.ranks], timeout=timedelta(seconds=1), backend="gloo"))
        return Group(mesh.world.ranks, mesh.world.rank, made[0])

    return patch.object(Mesh, "background_group", background_group)


EVENTS = {
    "": nullcontext,
    "slow": partial(written_when, 2, 5),
    "slow to delete": partial(deleted_when, 5),
    "full disk": lambda: all_of(full_disk(2), over_before(4)),
    "too slow": lambda: all_of(slowly(3.0, 2), over_before(4)),
    "patient": lambda: over_before(4),
}


def run_rank(
    rank: int, world_size: int, config: RunConfig, what: str = "", on: int = 0, others: str = "", calls: int = 0
) -> Outcome:
    """A run on this rank: ``what`` happens on the rank ``on``, and ``others`` on the others."""
    event = EVENTS[what if rank == on else others]() if what != "killed" else nullcontext()
    if what == "killed" and rank == on:
        event = killed_at(4, calls)
    given_up = impatient_at_first() if what == "too slow" else nullcontext()
    return start(config, all_of(event, given_up), rank, world_size)


def equal(folder: Path, other: Path, *steps: int) -> bool:
    """Return True if both have these checkpoints, to the bit, and the first has no others."""
    names = [f"saved/iter_{step:07d}" for step in steps]
    return saved_steps(folder / "saved") == [*steps] and not any(differences(folder / n, other / n) for n in names)


@pytest.fixture(scope="module")
def plain(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, saved at once."""
    folder = tmp_path_factory.mktemp("plain")
    assert [printed.status for printed in pool.run(RANKS, run_rank, run_of(folder, ""))] == [0, 0]
    return folder


@pytest.mark.parametrize("layout", ["zero1", *(pytest.param(name, marks=LONG) for name in ("tp2-sp", "pp2"))])
def test_async_saves_match_synchronous_ones(pool: Pool, tmp_path: Path, layout: str) -> None:
    for name, flags in (("plain", ""), ("async", "--async-save")):
        config = run_of(tmp_path / name, f"{flags} {LAYOUTS[layout]}", every=4)
        assert [printed.status for printed in pool.run(RANKS, run_rank, config)] == [0, 0]
    assert equal(tmp_path / "async", tmp_path / "plain", 4, 6)


@pytest.mark.parametrize("slow", [pytest.param(0, marks=LONG), 1])
def test_all_skip_a_save_while_one_rank_still_writes(pool: Pool, tmp_path: Path, plain: Path, slow: int) -> None:
    """The weights have changed twice before that rank writes its part."""
    ranks = pool.run(RANKS, run_rank, run_of(tmp_path), "slow", slow)
    assert [printed.status for printed in ranks] == [0, 0]
    assert equal(tmp_path, plain, 2, 6)
    assert "warning: step 4 is not saved: the save of step 2, begun " in ranks[0].err
    assert ranks[1].err == ""


def test_all_skip_a_save_while_one_rank_still_deletes(pool: Pool, tmp_path: Path, plain: Path) -> None:
    """The others are done with theirs long before."""
    ranks = pool.run(RANKS, run_rank, run_of(tmp_path), "slow to delete")
    assert [printed.status for printed in ranks] == [0, 0]
    assert equal(tmp_path, plain, 2, 6)


@pytest.mark.parametrize("full", [pytest.param(0, marks=LONG), 1])
def test_a_full_disk_on_one_rank(pool: Pool, tmp_path: Path, plain: Path, full: int) -> None:
    ranks = pool.run(RANKS, run_rank, run_of(tmp_path), "full disk", full, "patient")
    assert [printed.status for printed in ranks] == [0, 0]
    assert equal(tmp_path, plain, 4, 6)
    assert f"the disk is full (rank {full}); no checkpoint was written" in ranks[0].err


def test_ranks_that_lose_contact_while_writing_save_the_next_time(pool: Pool, tmp_path: Path, plain: Path) -> None:
    """Rank 1 takes three seconds, the others wait for one."""
    ranks = pool.run(RANKS, run_rank, run_of(tmp_path), "too slow", 1, "patient")
    assert [printed.status for printed in ranks] == [0, 0]
    assert "warning: step 2 is not saved: the ranks lost contact while writing: " in ranks[0].err
    assert equal(tmp_path, plain, 4, 6)


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=LONG)])
def test_a_rank_that_is_killed_while_it_writes(pool: Pool, tmp_path: Path, plain: Path, rank: int) -> None:
    calls = random.Random(rank).randint(0, 2)
    with pytest.raises(RankError, match=rf"rank {rank} of 2 failed in .*: process died: killed by SIGKILL"):
        pool.run(RANKS, run_rank, run_of(tmp_path, every=4), "killed", rank, "", calls)
    assert [path.name for path in (tmp_path / "saved").glob(".epoch-*/iter*")] == ["iter_0000004"]
    ranks = pool.run(RANKS, run_rank, run_of(tmp_path, every=4))
    assert [printed.status for printed in ranks] == [0, 0]
    assert equal(tmp_path, plain, 4, 6)


def count_sockets(rank: int, world_size: int, config: RunConfig, lazy: str) -> tuple[int | None, list[int]]:
    """Run training; return its exit status, and the sockets that each group for background threads opened at first."""
    added = []
    real = Mesh.background_group

    def background_group(mesh: Mesh) -> Group:
        before = open_sockets()
        group = real(mesh)
        added.append(open_sockets() - before)
        return group

    with (
        patch.dict(os.environ, {"TORCH_GLOO_LAZY_INIT": lazy}),
        patch.object(Mesh, "background_group", background_group),
    ):
        return start(config, None, rank, world_size).status, added


def open_sockets() -> int:
    links = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    return sum(link.is_symlink() and os.readlink(link).startswith("socket:") for link in links)


def test_a_background_group_connects_no_rank_before_its_first_message(pool: Pool, tmp_path: Path) -> None:
    """Each pair of ranks has a connection otherwise, whether it ever sends a message or not."""
    opened = []
    for lazy in ("0", "1"):
        folder = tmp_path / lazy
        config = tiny_run(folder, f"--save {folder}/saved --save-interval 2 --async-save", 4)
        ranks = pool.run(4, count_sockets, config, lazy)
        assert [status for status, _ in ranks] == [0] * 4
        assert saved_steps(folder / "saved")[-1] == 6
        opened.append([counts[0] for _, counts in ranks])
    assert [mesh - lazy for mesh, lazy in zip(*opened, strict=True)] == [3] * 4
