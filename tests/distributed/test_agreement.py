"""Ranks with different data do not start: a copy on one machine may be older than the others."""

from __future__ import annotations

from pathlib import Path
from socket import gethostname

import numpy as np
import pytest

from megatron.config.errors import UserError
from megatron.config.run import RunConfig
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.indexed_writer import IndexedDatasetWriter
from megatron.distributed.launch import world_group
from megatron.pipeline.schedules import make_schedule
from megatron.training.build_model import check_same_kernels
from tests.kit.pool import Pool
from tests.kit.runs import Outcome, saved_steps, start, steps, tiny_run


def write(prefix: Path, seed: int) -> Path:
    """Forty documents of the same lengths, whatever the seed."""
    prefix.parent.mkdir(exist_ok=True)
    random = np.random.default_rng(seed)
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for _ in range(40):
            writer.add_document(random.integers(0, 31, 9).tolist())
    return prefix


def begin_from_own(rank: int, world_size: int, configs: tuple[RunConfig, ...]) -> Outcome:
    return start(configs[rank], None, rank, world_size)


def run_with(pool: Pool, folder: Path, *flags: str, data: str = "--set data.mock_data=false") -> list[Outcome]:
    """A run on as many ranks as there are ``flags``, each of which holds for one rank."""
    every = f"{data} --split 8,1,1 --eval-iters 1 --save {folder}/saved --global-batch-size 6"
    configs = tuple(tiny_run(folder, f"{every} {own}", len(flags)) for own in flags)
    return pool.run(len(flags), begin_from_own, configs)


def kernels_reported(rank: int, world_size: int) -> str:
    try:
        check_same_kernels(f"kernels: {'torch' if rank == 1 else 'compiled'}", world_group(rank, world_size))
    except UserError as error:
        return str(error)
    return ""


def test_ranks_that_would_compute_differently_are_named(pool: Pool) -> None:
    (message,) = set(pool.run(3, kernels_reported))
    assert message.startswith("E904 ranks would compute differently: ranks 0, 2 (")
    assert f"): kernels: compiled; rank 1 ({gethostname()}): kernels: torch" in message


def test_a_machine_with_another_file_of_a_schedule_is_named(pool: Pool, tmp_path: Path) -> None:
    for name in ("here", "there"):
        make_schedule("gpipe" if name == "here" else "zb-h1", 2, 1, 6).save(tmp_path / f"{name}.csv")
    flags = (f"--pipeline-model-parallel-size 2 --pipeline-schedule {tmp_path}/{n}.csv" for n in ("here", "there"))
    ranks = run_with(pool, tmp_path, *flags, data="--mock-data")
    assert [(printed.status, printed.samples) for printed in ranks] == [(2, {}), (2, {})]
    (message,) = [printed.err for printed in ranks if printed.err]
    assert "E212 " in message
    assert f".csv is not the same on all ranks: rank 0 ({gethostname()}): " in message


def test_a_machine_with_an_older_copy_is_named_before_the_first_step(pool: Pool, tmp_path: Path) -> None:
    copies = [write(tmp_path / name / "corpus", seed) for name, seed in (("new", 1), ("old", 2))]
    ranks = run_with(pool, tmp_path, *(f"--data-path {copy}" for copy in copies))
    assert [(printed.status, printed.samples) for printed in ranks] == [(2, {}), (2, {})]
    (message,) = [printed.err for printed in ranks if printed.err]
    assert "the training and validation and test data are not the same on all ranks: rank 0 (" in message
    assert f"; rank 1 ({gethostname()}): content " in message
    assert "\n  fix: copy the same files to every machine" in message
    assert saved_steps(tmp_path / "saved") == []


@pytest.mark.parametrize("split", ["valid", "test"])
def test_the_split_that_differs_is_named(pool: Pool, tmp_path: Path, split: str) -> None:
    one, other = (write(tmp_path / name, seed) for seed, name in enumerate(("one", "other")))
    files = {"train": one, "valid": one, "test": one}
    flags = [
        "--set data.split=null " + " ".join(f"--{name}-data-path {path}" for name, path in (files | changed).items())
        for changed in ({}, {split: other}, {})
    ]
    (message,) = [printed.err for printed in run_with(pool, tmp_path, *flags) if printed.err]
    word = {"valid": "validation", "test": "test"}[split]
    assert f"the {word} data are not the same on all ranks: ranks 0, 2 ({gethostname()}): content " in message


def test_copies_of_the_same_data_go_together(pool: Pool, tmp_path: Path) -> None:
    copies = [write(tmp_path / name / "corpus", 1) for name in ("here", "there")]
    assert IndexedDataset(copies[0]).fingerprint == IndexedDataset(copies[1]).fingerprint
    ranks = run_with(pool, tmp_path, *(f"--data-path {copy}" for copy in copies))
    assert [(printed.status, printed.err) for printed in ranks] == [(0, ""), (0, "")]
    assert sorted(steps(tmp_path)) == [1, 2, 3, 4, 5, 6]
