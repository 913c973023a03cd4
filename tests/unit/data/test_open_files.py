"""Blends of more sources than a process may have files open, as most systems start one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron.config.data import DataConfig
from megatron.config.training import TrainingConfig
from megatron.data.errors import DataError
from megatron.data.loader import build_data
from tests.unit.data.pairs import write

ROOT = Path(__file__).parents[3]
SOURCES = 40
OPENED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
from tests.unit.data.test_open_files import notes
print(notes(sys.argv[3]))
print(resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def notes(folder: str) -> list[str]:
    """Return the notes on a blend of all pairs in a cached folder; each source takes two files and three tables."""
    prefixes = tuple(word for number in range(SOURCES) for word in ("1", f"{folder}/{number}"))
    data = DataConfig(data_path=prefixes, split="1", data_cache_path=f"{folder}/cache")
    training = TrainingConfig(seq_length=8, global_batch_size=4, train_iters=10, eval_iters=0)
    try:
        return list(build_data(data, training, 50, 1).notes)
    except DataError as error:
        return [str(error)]


def printed(folder: Path, soft: int, hard: int) -> list[str]:
    """Return the output of a process with these limits of open files, and the soft limit it ends with."""
    command = [sys.executable, "-c", OPENED, str(soft), str(hard), str(folder)]
    done = subprocess.run(command, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(SOURCES):
        write(tmp_path / str(number), [[number] * 9] * 4)
    return tmp_path


def test_the_limit_is_raised_to_the_maximum(folder: Path) -> None:
    assert printed(folder, 50, 1024) == ["[]", "(1024, 1024)"]


def test_a_maximum_that_is_too_low_is_reported_with_a_fix(folder: Path) -> None:
    (message, limits) = printed(folder, 50, 150)
    assert "Too many open files" in message
    assert "ulimit -n 65536" in message
    assert limits == "(150, 150)"
