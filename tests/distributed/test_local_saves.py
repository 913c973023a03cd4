"""Saves to the nodes' own disks by four ranks on two nodes: refused, and files on their way between ranks.

Ranks that are killed in one are in ``crashes``.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from megatron.checkpoint.errors import DamagedCheckpointError, StorageError
from megatron.checkpoint.format import whole_box
from megatron.checkpoint.load import load_sharded
from megatron.checkpoint.save import CheckpointExtras, local_bytes
from megatron.checkpoint.tensor_file import GlobalTensor
from megatron.distributed.comm import Group
from megatron.distributed.sharding import Box
from megatron.training import local_checkpoints as exchange_module
from megatron.training.local_checkpoints import FileTransfer, NodeCheckpoints, send_and_receive
from tests.kit.pool import Pool
from tests.kit.watched_calls import refuse, watched_calls
from tests.unit.checkpoint.samples import Sample
from tests.unit.checkpoint.test_faults import content

WORLD = 4
NODES = (0, 0, 1, 1)


def everyone(rank: int) -> Group:
    return Group(tuple(range(WORLD)), rank, dist.group.WORLD)


def tier(folder: Path, rank: int) -> NodeCheckpoints:
    wire = Group(tuple(range(WORLD)), rank, dist.new_group(list(range(WORLD))))
    return NodeCheckpoints(folder / f"node{NODES[rank]}", NODES, everyone(rank), wire)


def quarters(rank: int, sample: Sample) -> list[Box]:
    """A quarter of the rows of a sample is this rank's."""
    return [Box((0, 3 * rank, 0), (2, 3, 5))]


def parts(rank: int, value: float) -> dict[str, GlobalTensor]:
    return {name: sample.entry(quarters(rank, sample)) for name, sample in content(value).items()}


def step(rank: int, world: int, folder: Path, iteration: int) -> None:
    """Save as a run does, and delete the one before."""
    extra = CheckpointExtras(
        {"iteration": iteration}, {"checkpoint": {"save": "a"}}, {"tokenizer/tokenizer.json": b"{}"}
    )
    here = tier(folder, rank)
    here.save(iteration, parts(rank, iteration), extra)
    assert here.delete_others(iteration) is None


def newest(rank: int, world: int, folder: Path) -> int:
    """The step of the newest checkpoint that the nodes have all of, of which this rank gets another part."""
    here = tier(folder, rank)
    found, _ = here.find()
    for checkpoint in found:
        tensors = {
            n: s.empty([whole_box(s.view)] if rank == 3 else [Box((0, 1, 0), (2, 4, 5))]) for n, s in content(0).items()
        }
        try:
            manifest, _ = here.fetch(checkpoint, tensors)
        except DamagedCheckpointError:
            continue
        load_sharded(manifest, tensors, everyone(rank))
        assert all(sample.is_in(tensors[name]) for name, sample in content(checkpoint.iteration).items())
        return checkpoint.iteration
    return 0


def refused(rank: int, world: int, folder: Path, failing: int, call: str, at: int) -> str:
    """Return the error where a rank's disk is full from its ``at``-th ``call`` on."""
    calls = list[str]()

    def before(name: str, path: str, args: tuple[Any, ...]) -> None:
        calls.append(name)
        if rank == failing and name == call and calls.count(call) > at:
            refuse(name, path)

    try:
        with watched_calls(lambda path: True, before):
            step(rank, world, folder, 2)
    except StorageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("failing", "call", "at"), [(1, "open", 1), pytest.param(2, "mkdir", 0, marks=pytest.mark.slow)]
)
def test_a_full_disk_on_one_rank_is_reported_on_all(
    pool: Pool, tmp_path: Path, failing: int, call: str, at: int
) -> None:
    pool.run(WORLD, step, tmp_path, 1)
    (text,) = {*pool.run(WORLD, refused, tmp_path, failing, call, at)}
    assert f": the disk is full (rank {failing}); no local checkpoint was written" in text
    assert f"node{NODES[failing]}/iter_0000002" in text
    assert [path.name for path in tmp_path.glob("node*/iter*")] == ["iter_0000001"] * 2
    assert pool.run(WORLD, newest, tmp_path) == [1] * WORLD


def on_the_disk(rank: int, world: int, folder: Path) -> list[str]:
    """Files that this rank's second save asks the disk to keep after it wrote to them for the last time."""
    calls: dict[str, list[str]] = {}

    def before(name: str, path: str, args: tuple[Any, ...]) -> None:
        if name in ("write", "fsync"):
            calls.setdefault(os.path.basename(path), []).append(name)

    with watched_calls(lambda path: True, before):
        step(rank, world, folder, 2)
    return sorted(name for name, made in calls.items() if made[-1] == "fsync")


def test_copies_are_on_the_disk_as_well(pool: Pool, tmp_path: Path) -> None:
    """A rank writes its own tensors and the copies of a rank of the other node."""
    for rank, kept in enumerate(pool.run(WORLD, on_the_disk, tmp_path)):
        assert {f"tensors_{rank:05d}.safetensors", f"tensors_{(rank + 2) % WORLD:05d}.safetensors.part"} <= {*kept}


def crowded(rank: int, world: int, folder: Path, node: int, free: int) -> str:
    """Return the error where the disk of a node has so many bytes left."""
    room = SimpleNamespace(free=free if NODES[rank] == node else 1 << 30)
    try:
        with patch.object(shutil, "disk_usage", lambda path: room):
            step(rank, world, folder, 2)
    except StorageError as error:
        return str(error)
    return ""


def test_a_node_without_space_for_files_and_copies_is_reported_on_all_ranks(pool: Pool, tmp_path: Path) -> None:
    """A quarter of a checkpoint is each rank's; of two nodes, each has two and the copies of two."""
    pool.run(WORLD, step, tmp_path, 1)
    needed, node = sum(local_bytes(parts(rank, 0)) for rank in range(WORLD)), 1
    (text,) = {*pool.run(WORLD, crowded, tmp_path, node, needed - 1)}
    assert text.startswith(f"{tmp_path}/node{node}: a checkpoint takes ")
    assert text.endswith("no local checkpoint was written\n  fix: free some space | --local-save ELSEWHERE")
    assert [path.name for path in tmp_path.glob("node*/iter*")] == ["iter_0000001"] * 2
    assert pool.run(WORLD, crowded, tmp_path, node, needed) == [""] * WORLD


BLOCK = 1000


def ring(rank: int, world: int, folder: Path, sizes: list[int], act: Callable[[int], None] | None) -> str:
    """Send each rank's file to the next rank, and return the error of the disk."""
    sent, received = folder / f"{rank}.out", folder / f"{rank}.in"
    sent.write_bytes(random.Random(rank).randbytes(sizes[rank]))
    if act is not None:
        act(rank)
    before = (rank - 1) % world
    with patch.object(exchange_module, "BLOCK_BYTES", BLOCK):
        error = send_and_receive(
            FileTransfer(sent, (rank + 1) % world, sizes[rank]),
            FileTransfer(received, before, sizes[before]),
            everyone(rank),
        )
    if error is not None:
        return f"{type(error).__name__} {os.path.basename(error.filename or '')}"
    return "" if received.read_bytes() == random.Random(before).randbytes(sizes[before]) else "other bytes"


@pytest.mark.parametrize("sizes", [[0, 1, BLOCK - 1, BLOCK], [BLOCK + 1, 3 * BLOCK, 0, 2 * BLOCK + 7]])
def test_files_around_a_ring(pool: Pool, tmp_path: Path, sizes: list[int]) -> None:
    (tmp_path / "2.in.part").write_bytes(b"of a start before")
    assert pool.run(WORLD, ring, tmp_path, sizes, None) == [""] * WORLD
    assert not [*tmp_path.glob("*.part")]


def broken(rank: int, world: int, folder: Path, sizes: list[int], what: str) -> str:
    """A ring in which rank 1 cannot read its file, or cannot write what it is sent."""

    def act(number: int) -> None:
        if number == 1 and what == "source":
            os.truncate(folder / "1.out", 10)
        elif number == 1:
            (folder / "1.in.part").mkdir()

    return ring(rank, world, folder, sizes, act)


@pytest.mark.parametrize("what", ["source", "target"])
def test_a_disk_that_refuses_one_rank_stops_no_other(pool: Pool, tmp_path: Path, what: str) -> None:
    printed = pool.run(WORLD, broken, tmp_path, [2 * BLOCK] * WORLD, what)
    other = "other bytes" if what == "source" else ""  # zeros, discarded once rank 1 has reported its error
    assert printed[1].startswith(("OSError 1.out", "FileExistsError 1.in.part", "IsADirectoryError"))
    assert printed[2] == other
    assert (printed[0], printed[3]) == ("", "")
