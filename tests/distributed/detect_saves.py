"""Small jobs that detect faults in the communication about checkpoints; like the jobs in ``detect``."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from megatron.arguments.sources import to_dict
from megatron.checkpoint.format import Manifest
from megatron.checkpoint.load import CheckpointReader
from megatron.checkpoint.save import CheckpointExtras, save_sharded
from megatron.checkpoint.tensor_file import GlobalTensor, TensorPart
from megatron.config.checkpoint import CheckpointConfig
from megatron.distributed.launch import gather_results, run_on_rank0, world_group
from megatron.distributed.sharding import Box
from megatron.training import local_checkpoints
from megatron.training.build import build_trainer
from megatron.training.checkpoint_contents import run_state, tensors_to_save, total_bytes
from megatron.training.checkpointer import CheckpointContents, Checkpointer
from megatron.training.local_checkpoints import FileTransfer, LocalSave, NodeCheckpoints, files_needed
from megatron.training.trainer import Trainer
from tests.distributed.detect import ZERO1, Detector
from tests.kit.cases import Case


def act_together(rank: int, world_size: int) -> list[int]:
    """Gather the result of every rank on all ranks."""
    return gather_results(lambda: rank, world_group(rank, world_size))


def save_rows(rank: int, world_size: int) -> list[float]:
    """Every rank saves a row of a tensor; the numbers in the rows of the checkpoint."""
    world = world_group(rank, world_size)
    folder = Path(run_on_rank0(mkdtemp, world))
    path, shape = folder / "iter_0000001", (world_size, 3)
    row = TensorPart(Box((rank, 0), (1, 3)), torch.full((1, 3), float(rank)))
    try:
        try:
            save_sharded(path, {"w": GlobalTensor(shape, shape, torch.float32, (row,))}, {}, {}, world)
        except ValueError:  # refused, because rows are missing: that is how a lost one is noticed
            return []
        return run_on_rank0(lambda: CheckpointReader(Manifest.open(path)).read("w")[:, 0].tolist(), world)
    finally:
        if rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


def is_busy(rank: int, world_size: int) -> bool:
    """Return True if this rank knows that the last rank is still saving."""
    saver: Any = SimpleNamespace(
        poll=lambda: None,
        pending=(CheckpointContents(1, {}, {}), Future()) if rank == world_size - 1 else None,
        _lost_contact=False,
        _log=SimpleNamespace(warning=lambda text: None),
        world=world_group(rank, world_size),
        options=SimpleNamespace(save_interval=1),
        trainer=SimpleNamespace(iteration=2),
    )
    return Checkpointer._is_busy(saver)


def sizes_of_a_save(rank: int, world_size: int, case: Case) -> list[int]:
    """Return the bytes of a checkpoint, and of a local checkpoint as it is logged."""
    trainer = build_trainer(case.config(), rank, world_size)
    printed: list[int] = []
    log: Any = SimpleNamespace(checkpoint=lambda path, size, seconds: printed.append(size), warning=printed.append)
    with a_node(rank, world_size) as tier:
        save = LocalSave(trainer, tier, 1)
        save.log = log
        save._save()
    return [total_bytes(tensors_to_save(trainer), trainer.mesh.world), *printed]


def exchange_files(rank: int, world_size: int) -> bool:
    """Two ranks give each other a file of several blocks; whether what comes is what was sent."""
    with TemporaryDirectory() as folder, patch.object(local_checkpoints, "BLOCK_BYTES", 8):
        sent, received, peer = Path(folder) / "sent", Path(folder) / "received", 1 - rank
        contents = [bytes(range(1 + 100 * r, 33 + 100 * r)) for r in range(world_size)]
        sent.write_bytes(contents[rank])
        local_checkpoints.send_and_receive(
            FileTransfer(sent, peer, 32), FileTransfer(received, peer, 32), world_group(rank, world_size)
        )
        return received.read_bytes() == contents[peer]


@contextmanager
def a_node(rank: int, world_size: int) -> Iterator[NodeCheckpoints]:
    """Every rank is a node of its own, with a disk of its own."""
    alone = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    with TemporaryDirectory() as folder, patch.dict(os.environ, alone):
        world = world_group(rank, world_size)
        nodes = NodeCheckpoints.join(CheckpointConfig(local_save=folder), world)
        nodes.file_group = replace(world, handle=dist.new_group())
        yield nodes


def count_nodes(rank: int, world_size: int) -> int:
    """Nodes that this rank knows of."""
    with a_node(rank, world_size) as tier:
        return tier.count


def saved_on(tier: NodeCheckpoints, trainer: Trainer) -> Path:
    """The folder of a checkpoint on this node."""
    extra = CheckpointExtras(run_state(trainer), to_dict(trainer.config), trainer.files)
    tier.save(0, tensors_to_save(trainer), extra)
    return tier.path(0)


def find_damage(rank: int, world_size: int, case: Case) -> list[tuple[int, str]]:
    """On every node the file of its own rank is damaged; the damaged copies that this rank knows of."""
    trainer = build_trainer(case.config(), rank, world_size)
    with a_node(rank, world_size) as tier:
        folder = saved_on(tier, trainer)
        found, _ = tier.find()
        manifest = Manifest.read(folder)
        files = sorted({chunk.file for record in manifest.tensors.values() for chunk in record.chunks})
        damaged = manifest.folder / files[rank]
        content = damaged.read_bytes()
        damaged.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        needs = dict.fromkeys(range(world_size), frozenset(files))
        _, bad = tier._choose_verified(found[0], manifest, needs)
        return sorted((node, str(files.index(file))) for node, file in bad)


def exchange_needs(rank: int, world_size: int, case: Case) -> dict[int, list[str]]:
    """Return the files that every node needs, as this rank knows them."""
    trainer, found_needs = build_trainer(case.config(), rank, world_size), {}

    def proved(
        tier: NodeCheckpoints, checkpoint: Any, manifest: Any, needs: Mapping[int, frozenset[str]]
    ) -> tuple[Any, Any]:
        found_needs.update({node: sorted(files) for node, files in needs.items()})
        return {}, {}

    with a_node(rank, world_size) as tier, patch.object(NodeCheckpoints, "_choose_verified", proved):
        saved_on(tier, trainer)
        tier.fetch(tier.find()[0][0], tensors_to_save(trainer))
    return found_needs


def bring_back_what_is_needed(rank: int, world_size: int, case: Case) -> bool:
    """Return True if the last node, which has lost all files, gets the ones that its own rank needs."""
    trainer = build_trainer(case.config(), rank, world_size)
    with a_node(rank, world_size) as tier:
        folder = saved_on(tier, trainer)
        attempt = Manifest.read(folder).folder
        before = {path.name: path.read_bytes() for path in attempt.iterdir()}
        if rank == world_size - 1:
            shutil.rmtree(folder)
        found, _ = tier.find()
        tensors = tensors_to_save(trainer)
        manifest, _ = tier.fetch(found[0], tensors)
        needed = files_needed(manifest, tensors)
        return all((attempt / name).exists() and (attempt / name).read_bytes() == before[name] for name in needed)


def _alike(ranks: Any) -> bool:
    return len(set(ranks)) == 1


SAVES: dict[str, Detector] = {
    "together": Detector(2, act_together, (), lambda ranks: list(ranks) == [[0, 1], [0, 1]]),
    "save": Detector(2, save_rows, (), lambda ranks: list(ranks) == [[0.0, 1.0], [0.0, 1.0]]),
    "busy": Detector(2, is_busy, (), lambda ranks: list(ranks) == [True, True]),
    "sizes": Detector(2, sizes_of_a_save, (ZERO1,), lambda ranks: _alike(size for sizes in ranks for size in sizes)),
    "exchange": Detector(2, exchange_files, (), lambda ranks: list(ranks) == [True, True]),
    "nodes": Detector(2, count_nodes, (), lambda ranks: list(ranks) == [2, 2]),
    "damage": Detector(2, find_damage, (ZERO1,), lambda ranks: list(ranks) == 2 * [[(0, "0"), (1, "1")]]),
    "needs": Detector(2, exchange_needs, (ZERO1,), lambda ranks: _alike(map(str, ranks))),
    "bring back": Detector(2, bring_back_what_is_needed, (ZERO1,), lambda ranks: list(ranks) == [True, True]),
}
