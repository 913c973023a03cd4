"""The log of a rank: what gets into it, its size, and that it never harms the run."""

from __future__ import annotations

import errno
import logging
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megatron.training import rank_log as module
from megatron.training.loggers.console import print_warning
from megatron.training.rank_log import crashed_ranks, give_nccl_a_file, rank_log, set_level, write_text
from tests.kit.runs import start, tiny_run


def log_of(folder: Path, rank: int = 3) -> str:
    return (folder / "ranks" / f"rank_{rank:05}.log").read_text()


def test_it_has_what_python_writes_to_stderr_which_goes_there_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = ["warning: a warning", "one of a library", "s3://user:pass-word1@host/x"]
    for start_number in (1, 2):
        with rank_log(str(tmp_path), 3, 8, {"SLURM_JOB_ID": "77"}):
            print_warning("a warning")
            print("one of a library", file=sys.stderr)
            print("s3://user:pass-word1@host/x", file=sys.stderr)
        found = log_of(tmp_path)
        assert (
            found.count("==== 20") == found.count("rank 3 of 8 on ") == found.count("SLURM_JOB_ID=77") == start_number
        )
    printed = capsys.readouterr().err
    assert all(text in printed for text in texts)
    assert texts[0] in found
    assert texts[1] in found
    assert "s3://***@host/x" in found
    assert "pass-word1" not in found
    assert os.stat(tmp_path / "ranks" / "rank_00003.log").st_mode & 0o077 == 0
    write_text("nothing is open now")
    assert log_of(tmp_path) == found


def test_levels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root, before = logging.getLogger(), (logging.getLogger().level, [*logging.getLogger().handlers])
    assert not set_level(logging.DEBUG)[0]
    with rank_log(str(tmp_path), 0, 1, {}):
        for level in (logging.DEBUG, logging.INFO):
            assert set_level(level)[0]
        logging.getLogger("some.library").info("a detail")
        logging.getLogger("some.library").debug("a smaller one")
    assert (root.level, [*root.handlers]) == before
    found = log_of(tmp_path, 0)
    assert found.count("some.library INFO: a detail") == 1
    assert "a smaller one" not in found
    assert "a detail" not in capsys.readouterr().err


def test_a_full_log_makes_place_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BYTES", 4000)
    with rank_log(str(tmp_path), 0, 1, {}):
        for number in range(100):
            write_text(f"line {number} {'x' * 90}\n")
        assert all(path.stat().st_size < 6000 for path in (tmp_path / "ranks").iterdir())
        child = os.fork()
        if child == 0:
            os.abort()
        os.waitpid(child, 0)
    files = {path.name: path.read_text() for path in (tmp_path / "ranks").iterdir()}
    assert sorted(files) == ["rank_00000.log", "rank_00000.log.1"]
    assert "line 99 " in files["rank_00000.log"] + files["rank_00000.log.1"]
    assert "in test_a_full_log" in files["rank_00000.log"]  # through the descriptor that it had before


def test_texts_of_several_threads_are_all_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BYTES", 20_000)
    replace = Path.replace

    def slow(path: Path, target: str) -> Path:
        time.sleep(0.01)
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", slow)
    with rank_log(str(tmp_path), 0, 1, {}), ThreadPoolExecutor(8) as threads:
        for thread in range(8):
            threads.submit(lambda thread=thread: [write_text(f"{thread}-{n} {'x' * 90}\n") for n in range(40)])
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "ranks").iterdir()}
    assert sizes["rank_00000.log.1"] > 19_000


def test_disks_that_cannot_be_written_cost_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ranks").touch()
    with rank_log(str(tmp_path), 0, 1, {}), rank_log(str(tmp_path), 1, 2, {}):
        write_text("x")
    assert capsys.readouterr().err.count("warning: there are no logs of ranks") == 1
    (tmp_path / "ranks").unlink()

    def full(file: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with rank_log(str(tmp_path), 0, 1, {}):
        monkeypatch.setattr(module.os, "write", full)
        for _ in range(3):
            write_text("x")
        monkeypatch.undo()


def test_a_disk_that_hangs_costs_one_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "DISK_SECONDS", 0.2)
    answers, write = threading.Event(), os.write

    def hang(file: int, data: bytes) -> int:
        answers.wait(60.0)
        return write(file, data)

    began = time.monotonic()
    with rank_log(str(tmp_path), 0, 1, {}):
        write_text("before\n")
        monkeypatch.setattr(module.os, "write", hang)
        for number in range(50):
            print(f"warning {number}", file=sys.stderr)
        child = os.fork()
        if child == 0:  # its thread is its own
            monkeypatch.undo()
            write_text("of a child\n")
            os._exit(0)
        os.waitpid(child, 0)
    assert time.monotonic() - began < 10.0
    answers.set()
    monkeypatch.undo()
    printed = capfd.readouterr().err
    assert printed.count("the disk does not answer") == 1
    assert "warning 49" in printed
    found = log_of(tmp_path, 0)
    assert "before\n" in found
    assert "of a child\n" in found


def test_crashes_are_those_of_the_last_start(tmp_path: Path) -> None:
    folder = tmp_path / "ranks"
    folder.mkdir()
    crash, head = "Fatal Python error: Segmentation fault\n\nThread 0x1\n", "\n==== 2026-01-01 rank 1\n"
    (folder / "rank_00001.log").write_text(head + crash)
    (folder / "rank_00002.log").write_text(head + crash + head)
    (folder / "rank_00003.log").write_text("x" * 100_000 + head + crash.replace("Segmentation fault", "Aborted"))
    with rank_log(str(tmp_path), 0, 5, {}):
        found = crashed_ranks(5)
    assert [line.split(";")[0] for line in found] == [
        "rank 1 has crashed: Segmentation fault",
        "rank 3 has crashed: Aborted",
    ]


def test_nccl_gets_a_file_if_it_writes_at_all() -> None:
    for environ, expected in (
        ({}, None),
        ({"NCCL_DEBUG": "INFO"}, "/runs/a/ranks/nccl_%h_%p.log"),
        ({"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": "own"}, "own"),
    ):
        variables: dict[str, str] = dict(environ)  # type: ignore[call-overload]
        give_nccl_a_file("/runs/a", variables)
        assert variables.get("NCCL_DEBUG_FILE") == expected


def test_a_run_can_do_without(tmp_path: Path) -> None:
    assert start(tiny_run(tmp_path, "--train-iters 1 --eval-iters 0 --no-rank-logs")).status == 0
    assert not (tmp_path / "ranks").exists()
