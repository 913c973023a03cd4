"""Blends of more sources than a process may have files open, as most systems start one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from megatron.config.run import DataConfig, TrainingConfig
from megatron.data.errors import DataError
from megatron.data.loader import build_data
from tests.unit.data.pairs import write

ROOT = Path(__file__).parents[3]
SOURCES = 40
PROGRAM = """
import resource, sys
from tests.unit.data.test_open_files import notes
for limits in ((50, 1024), (50, 150)):
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    print(notes(sys.argv[1]), resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def notes(folder: str) -> list[str]:
    """What is said of a blend of all pairs in a folder, with a cache; each source takes two files and three tables."""
    prefixes = tuple(word for number in range(SOURCES) for word in ("1", f"{folder}/{number}"))
    data = DataConfig(data_path=prefixes, split="1", data_cache_path=f"{folder}/cache")
    training = TrainingConfig(seq_length=8, global_batch_size=4, train_iters=10, eval_iters=0)
    try:
        return list(build_data(data, training, 50, 1).notes)
    except DataError as error:
        return [str(error)]


def test_what_the_system_allows_is_asked_for_and_otherwise_the_remedy_is_told(tmp_path: Path) -> None:
    for number in range(SOURCES):
        write(tmp_path / str(number), [[number] * 9] * 4)
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True)
    enough, too_few = done.stdout.splitlines()
    assert enough == "[] (1024, 1024)"
    assert "Too many open files" in too_few
    assert "ulimit -n 65536" in too_few
    assert too_few.endswith("(150, 150)")
