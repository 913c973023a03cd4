"""Checkpoints by several ranks: any layout to any other to the bit, and the same error on every rank."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron.checkpoint.errors import CheckpointError, DamagedCheckpointError, StorageError
from megatron.checkpoint.folder import CheckpointFolder
from megatron.checkpoint.format import Manifest
from megatron.checkpoint.load import CheckpointReader, load_sharded
from megatron.checkpoint.save import save_sharded
from megatron.checkpoint.tensor_file import GlobalTensor, TensorPart
from megatron.distributed.comm import Group
from megatron.distributed.launch import is_peer_lost
from megatron.distributed.sharding import Box
from tests.kit.pool import Pool, RankError
from tests.unit.checkpoint import samples
from tests.unit.checkpoint.samples import attempt, dealt, partition, same, small

SEEDS = range(6)


def group(rank: int, world: int) -> Group:
    return Group(tuple(range(world)), rank, dist.group.WORLD if world > 1 else None)


def write_random(rank: int, world: int, folder: Path) -> None:
    for seed in SEEDS:
        tensors = samples.samples(seed)
        share = dealt(tensors, rank, world, seed)
        held = {name: tensors[name].entry(boxes) for name, boxes in share.items() if boxes or seed % 2}
        save_sharded(folder / f"iter_{seed}", held, {"seed": seed}, {}, group(rank, world))


def read_random(rank: int, world: int, folder: Path) -> list[str]:
    """Names of tensors that came out wrong: all boxes of a random layout, and one more that others have too."""
    wrong = []
    for seed in SEEDS:
        manifest, draw = Manifest.open(folder / f"iter_{seed}"), random.Random(100 * seed + rank)
        tensors = samples.samples(seed)
        share = dealt(tensors, rank, world, seed + 50)
        wanted = {}
        for name, boxes in share.items():
            dtype = torch.float64 if draw.random() < 0.3 and name != "step" else None
            extra = draw.choice(partition(tensors[name].view, draw, 4))
            wanted[name] = tensors[name].empty([*boxes, extra], dtype)
        load_sharded(manifest, wanted, group(rank, world))
        wrong += [f"{seed}/{name}" for name, filled in wanted.items() if not tensors[name].is_in(filled)]
        wrong += [f"{seed}/state"] * (manifest.state != {"seed": seed})
    return wrong


@pytest.mark.parametrize("writers", [1, 2, 3, 4])
def test_any_layout_to_any_other_to_the_bit(pool: Pool, tmp_path: Path, writers: int) -> None:
    pool.run(writers, write_random, tmp_path)
    for readers in {1, 3, 5 - writers}:
        assert pool.run(readers, read_random, tmp_path) == [[]] * readers
    for seed in SEEDS:
        reader = CheckpointReader(Manifest.open(tmp_path / f"iter_{seed}"))
        for name, sample in samples.samples(seed).items():
            assert same(reader.read(name), sample.tensor.view(sample.view))


def halves(rank: int, world: int) -> dict[str, GlobalTensor]:
    n = 12 // world
    return {name: sample.entry([Box((0, n * rank, 0), (2, n, 5))]) for name, sample in small().items()}


def outcome(action: Callable[[], None]) -> tuple[str, str]:
    try:
        action()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def save_halves(rank: int, world: int, path: Path) -> None:
    save_sharded(path, halves(rank, world), {"by": world}, {}, group(rank, world))


def full_disk(rank: int, world: int, path: Path, failing: int, call: str) -> tuple[str, str]:
    real = getattr(os, call)

    def fails(*args: object, **kwargs: object) -> object:
        raise OSError(28, "No space left on device")

    if rank == failing:
        setattr(os, call, fails)
    try:
        return outcome(lambda: save_halves(rank, world, path))
    finally:
        setattr(os, call, real)


@pytest.mark.parametrize(("failing", "call"), [(0, "write"), (2, "write"), (2, "fsync"), (0, "rename")])
def test_a_disk_error_on_one_rank_is_raised_on_all_ranks(pool: Pool, tmp_path: Path, failing: int, call: str) -> None:
    runs = CheckpointFolder(tmp_path)
    pool.run(3, save_halves, runs.path(1))
    found = pool.run(3, full_disk, runs.path(2), failing, call)
    assert len(set(found)) == 1
    kind, text = found[0]
    assert kind == StorageError.__name__
    assert f"the disk is full (rank {failing})" in text
    assert str(tmp_path) in text
    assert [(f.iteration, f.problem) for f in runs.candidates()] == [(1, None)]
    assert [path.name for path in tmp_path.iterdir()] == ["iter_0000001"]


def load_first_half(rank: int, world: int, path: Path) -> tuple[str, str]:
    """Each rank reads its own part, so that only one of them meets the damage."""
    wanted = {name: small()[name].empty([part.box for part in t.parts]) for name, t in halves(rank, world).items()}
    return outcome(lambda: load_sharded(Manifest.open(path), wanted, group(rank, world)))


def test_a_damaged_chunk_is_reported_on_all_ranks(pool: Pool, tmp_path: Path) -> None:
    path = tmp_path / "iter_1"
    pool.run(2, save_halves, path)
    chunk = Manifest.open(path).tensors["optim.exp_avg.a"].chunks[-1]
    damaged = attempt(path) / chunk.file
    with damaged.open("r+b") as file:
        file.seek(chunk.offset + 17)
        file.write(b"?")
    found = pool.run(2, load_first_half, path)
    assert set(found) == {
        (
            DamagedCheckpointError.__name__,
            f"{damaged} has flipped bytes (tensor optim.exp_avg.a)",
        ),
    }


def not_a_partition(rank: int, world: int, path: Path, fault: str) -> tuple[str, str]:
    tensors = halves(rank, world)
    if rank == 1 and fault == "hole":
        tensors["a"] = GlobalTensor((24, 5), (2, 12, 5), torch.float32, ())
    if rank == 1 and fault == "overlap":
        tensors["a"] = halves(0, world)["a"]
    if rank == 1 and fault == "type":
        tensors["a"] = small()["a"].entry([], torch.float64)
    return outcome(lambda: save_sharded(path, tensors, {}, {}, group(rank, world)))


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("hole", "a: element [0, 6, 0] is not covered"),
        ("overlap", "a: [0:2, 0:6, 0:5] and [0:2, 0:6, 0:5] overlap"),
        ("type", " on rank 1, "),
    ],
)
def test_parts_that_are_no_partition_are_not_written(pool: Pool, tmp_path: Path, fault: str, sentence: str) -> None:
    found = pool.run(2, not_a_partition, tmp_path / "iter_1", fault)
    assert found[0] == found[1]
    assert found[0][0] == "ValueError"
    assert sentence in found[0][1]
    assert "optim" not in found[0][1]
    assert list(tmp_path.iterdir()) == []


def some_ranks(rank: int, world: int, path: Path) -> bool:
    """The last two ranks write and read; the first does not take part."""
    handle = dist.new_group([1, 2])
    if rank == 0:
        return True
    part = Group((1, 2), rank - 1, handle)
    save_sharded(path, halves(rank - 1, 2), {}, {}, part)
    filled = small()["a"].empty([Box((0, 3, 1), (2, 8, 3))])
    load_sharded(Manifest.open(path), {"a": filled}, part)
    return small()["a"].is_in(filled)


def test_a_group_that_is_not_all_ranks(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(3, some_ranks, tmp_path / "iter_1") == [True] * 3
    assert sorted(Manifest.open(tmp_path / "iter_1").files) == [f"tensors_0000{i}.safetensors" for i in (0, 1)]


def dies(rank: int, world: int, path: Path) -> None:
    """Rank 1 is killed when its part is asked for; rank 0, which gathers the results, writes down what it saw."""

    def last_words() -> torch.Tensor:
        os.kill(os.getpid(), signal.SIGKILL)
        return torch.empty(0)

    tensors = halves(rank, world)
    if rank == 1:
        part = tensors["a"].parts[0]
        tensors["a"] = GlobalTensor((24, 5), (2, 12, 5), torch.float32, (TensorPart(part.box, last_words),))
    try:
        save_sharded(path, tensors, {}, {}, group(rank, world))
    except Exception as error:
        if rank == 0:
            (path.parent / "seen.txt").write_text(f"{isinstance(error, CheckpointError)} {is_peer_lost(error)}")


def test_a_rank_that_dies_publishes_nothing(pool: Pool, tmp_path: Path) -> None:
    runs = CheckpointFolder(tmp_path)
    pool.run(3, save_halves, runs.path(1))
    with pytest.raises(RankError, match="SIGKILL"):
        pool.run(3, dies, runs.path(2), backend="gloo")
    assert (tmp_path / "seen.txt").read_text() == "False True"
    newest, *_ = [found for found in runs.candidates() if found.manifest]
    assert newest.iteration == 1
    pool.run(3, save_halves, runs.path(2))
    assert [(f.iteration, f.problem) for f in runs.candidates()] == [(2, None), (1, None)]


def load_as_dtensor(rank: int, world: int, path: Path) -> list[bool]:
    """Load as any torch program would: its own state dict, the library's own planner."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

    from megatron.checkpoint.dcp_reader import CheckpointStorageReader

    mesh = init_device_mesh("cpu", (world,))
    equal = []
    for placement in (Shard(0), Shard(1), Replicate()):
        wanted = {name: distribute_tensor(torch.zeros(24, 5), mesh, [placement]) for name in small()}
        dcp.load(wanted, storage_reader=CheckpointStorageReader(Manifest.open(path)))
        for name, sample in small().items():
            found = wanted[name]
            assert isinstance(found, DTensor)
            equal.append(same(found.full_tensor(), sample.tensor))
    return equal


def test_the_library_loads_our_checkpoints_into_dtensors(pool: Pool, tmp_path: Path) -> None:
    pool.run(3, save_halves, tmp_path / "iter_1")
    assert pool.run(2, load_as_dtensor, tmp_path / "iter_1", backend="gloo") == [[True] * 6] * 2
