"""Blends of more sources than a process may have files open, as most systems start one."""

from __future__ import annotations

import multiprocessing
import resource
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from megatron.config.data import DataConfig
from megatron.config.training import TrainingConfig
from megatron.data.errors import DataError
from megatron.data.loader import build_data
from tests.unit.data.pairs import write

SOURCES = 40


def notes(folder: Path, soft: int, hard: int) -> tuple[list[str], tuple[int, int]]:
    """With these limits, return the notes on a cached blend, whose sources take two files and three tables each."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    prefixes = tuple(word for number in range(SOURCES) for word in ("1", f"{folder}/{number}"))
    data = DataConfig(data_path=prefixes, split="1", data_cache_path=f"{folder}/cache")
    training = TrainingConfig(seq_length=8, global_batch_size=4, train_iters=10, eval_iters=0)
    try:
        found = list(build_data(data, training, 50, 1).notes)
    except DataError as error:
        found = [str(error)]
    return found, resource.getrlimit(resource.RLIMIT_NOFILE)


@pytest.mark.parametrize(("hard", "expected"), [(1024, []), (150, ["Too many open files", "ulimit -n 65536"])])
def test_the_limit_is_raised_to_the_maximum(tmp_path: Path, hard: int, expected: list[str]) -> None:
    """If that is too low, the error has a fix."""
    for number in range(SOURCES):
        write(tmp_path / str(number), [[number] * 9] * 4)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        found, limits = pool.submit(notes, tmp_path, 50, hard).result()
    assert limits == (hard, hard)
    assert bool(found) == bool(expected)
    assert all(words in found[0] for words in expected)
