"""Runs that save to an object store on this machine, on one and on four ranks, without network access."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import fsspec.config
import pytest
import torch.distributed as dist

from megatron.checkpoint import object_store
from megatron.checkpoint.errors import StorageError
from megatron.checkpoint.folder import CheckpointFolder
from megatron.checkpoint.format import Manifest
from megatron.checkpoint.load import load_sharded
from megatron.checkpoint.object_store import RemotePath
from megatron.checkpoint.save import save_sharded
from megatron.checkpoint.verify import list_damage
from megatron.distributed.comm import Group
from tests.kit.pool import Pool
from tests.kit.runs import differences, start, steps, tiny_run
from tests.unit.checkpoint.s3_server import Store, serving, settings
from tests.unit.checkpoint.samples import dealt, partition, samples

RUN = "s3://bucket/run"
FLAGS = f"--save {RUN} --save-interval 2 --keep-last 2"


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Store]]:
    monkeypatch.setattr(object_store, "FIRST_WAIT", 0.01)
    with serving() as both:
        reach(both[0])
        yield both


def reach(address: str) -> None:
    """Tell s3fs in this process of the one store that there is."""
    fsspec.config.conf["s3"] = settings(address)


def write_and_read(rank: int, world: int, address: str, seed: int) -> list[str]:
    """Names of tensors that come out wrong after they went there in one random layout and came in another."""
    reach(address)
    object_store.FIRST_WAIT = 0.01
    group, tensors, draw = Group(tuple(range(world)), rank, dist.group.WORLD), samples(seed), random.Random(rank)
    path = CheckpointFolder(RemotePath(RUN)).path(seed)
    share = dealt(tensors, rank, world, seed)
    save_sharded(
        path, {n: tensors[n].entry(boxes) for n, boxes in share.items()}, {"seed": seed}, {}, group, {"a": b"b"}
    )
    manifest = Manifest.open(path)
    wanted = {n: s.empty([draw.choice(partition(s.view, draw, 4))]) for n, s in tensors.items()}
    load_sharded(manifest, wanted, group)
    return [n for n, filled in wanted.items() if not tensors[n].is_in(filled)]


def fail_to_write(rank: int, world: int, address: str) -> str:
    """The error on this rank where the store takes no file of the last one."""
    reach(address)
    object_store.FIRST_WAIT = 0.01
    group, tensors = Group(tuple(range(world)), rank, dist.group.WORLD), samples(1)
    share = dealt(tensors, rank, world, 1)
    held = {n: tensors[n].entry(boxes) for n, boxes in share.items()}
    try:
        save_sharded(CheckpointFolder(RemotePath(RUN)).path(9), held, {}, {}, group)
    except StorageError as error:
        return str(error)
    return ""


def test_four_ranks_to_the_bit(pool: Pool, address: tuple[str, Store]) -> None:
    assert pool.run(4, write_and_read, address[0], 1) == [[]] * 4
    manifest = Manifest.open(RemotePath(RUN) / "iter_0000001")
    assert [*list_damage(manifest)] == []
    assert len({name.split("/")[0] for name in manifest.folder.files()}) == 4 + 2  # of ranks, "a", manifest


def test_a_refused_rank_is_reported_on_all_ranks(pool: Pool, address: tuple[str, Store]) -> None:
    assert pool.run(4, write_and_read, address[0], 1) == [[]] * 4
    address[1].fault = lambda r: "403" if r.kind == "PUT" and "00003" in r.key else None
    (printed,) = {*pool.run(4, fail_to_write, address[0])}
    assert "access denied" in printed
    assert "(rank 3); no checkpoint was written" in printed
    assert CheckpointFolder(RemotePath(RUN)).newest()[0].state == {"seed": 1}


def test_a_run_goes_on_as_if_nothing_had_been(address: tuple[str, Store], tmp_path: Path) -> None:
    """A single fault is reported and mended; a refused save is skipped, and the next one is whole."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert start(tiny_run(whole, f"--save {whole} --save-interval 6")).status == 0
    number = iter(range(10**6))
    address[1].fault = lambda r: "503" if next(number) % 11 == 5 else None
    printed = start(tiny_run(cut, f"{FLAGS} --exit-interval 4"))
    assert (printed.status, f"saved {RUN}/iter_0000004" in printed.out) == (0, True)
    assert "attempt 1 of 5" in printed.err
    address[1].fault = lambda r: "503" if "iter_0000006/attempt" in r.key else None
    printed = start(tiny_run(cut, FLAGS))
    assert printed.status == 1  # nothing was saved at the end
    assert f"resumed from {RUN}/iter_0000004: step 4" in printed.out
    assert "no checkpoint was written" in printed.err
    address[1].fault = lambda r: None
    printed = start(tiny_run(cut, FLAGS))
    assert (printed.status, f"saved {RUN}/iter_0000006" in printed.out) == (0, True)
    assert steps(cut) == steps(whole)
    assert differences(whole / "iter_0000006", RemotePath(RUN) / "iter_0000006") == []
    assert [i for i, _ in CheckpointFolder(RemotePath(RUN)).named()] == [6, 4]


def test_a_store_that_cannot_be_written_or_read_ends_the_run_before_a_step(
    address: tuple[str, Store], tmp_path: Path
) -> None:
    address[1].fault = lambda r: "403"
    printed = start(tiny_run(tmp_path, FLAGS))
    assert printed.status == 1
    assert f"{RUN}/claim.json: access denied" in printed.err
    address[1].fault = lambda r: None
    assert start(tiny_run(tmp_path, f"{FLAGS} --exit-interval 2")).status == 0
    address[1].fault = lambda r: "503" if r.kind != "PUT" and "iter_" in r.key else None
    printed = start(tiny_run(tmp_path, FLAGS))
    assert printed.status == 2
    assert "E811 cannot search for checkpoints: " in printed.err
