"""The real client of Weights & Biases and a server on this machine: killed runs, and a server that falls silent."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from megatron.training.loggers.wandb import last_step_on_disk
from tests.killed import run_in_process
from tests.runs import column, records
from tests.wandb_server import running

pytestmark = pytest.mark.slow

FLAGS = "--train-iters 12 --save {0}/saved --save-interval 4 --wandb-project tests --wandb-save-dir {0}"
AT_ONCE = {"WANDB_X_FILE_STREAM_TRANSMIT_INTERVAL": "0.2"}


@pytest.mark.parametrize("arrives", [True, False])
def test_the_server_gets_every_step_once(tmp_path: Path, arrives: bool) -> None:
    """Whether the steps before the kill have reached it or not."""
    flags = FLAGS.format(tmp_path)
    with running() as server:

        def reached() -> list[int]:
            return [row["_step"] for row in server.rows]

        variables = server.environment | {"HOME": str(tmp_path)}
        expected = [1, 2, 3, 4, 5, 6] if arrives else []
        at_once = AT_ONCE if arrives else {}
        killed = run_in_process(tmp_path / "run", flags, 7, lambda: reached() == expected, **variables, **at_once)
        assert (killed, reached()) == (-9, expected)
        assert run_in_process(tmp_path / "run", flags, **variables) == 0
        assert reached() == list(range(1, 13))
        assert server.finished
        losses = dict(zip(column(tmp_path / "run", "iteration"), column(tmp_path / "run", "lm loss")))
        assert {row["_step"]: row["lm loss"] for row in server.rows} == losses


def _wrote(files: Path, step: int) -> bool:
    return last_step_on_disk(files, "*") == step


def test_files_of_a_run_that_was_killed_offline_are_sent_without_gaps_or_steps_twice(tmp_path: Path) -> None:
    """By ``wandb sync`` as it comes, all folders at once."""
    files, run, flags = tmp_path / "wandb", tmp_path / "run", FLAGS.format(tmp_path)
    offline = {"WANDB_MODE": "offline", "WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL": "0.1"}
    for kill_after, written in ((7, 6), (10, 9)):
        run_in_process(run, flags, kill_after, partial(_wrote, files, written), **offline)
    run_in_process(run, flags, **offline)
    folders = sorted(map(str, files.glob("offline-run-*")))
    assert len(folders) == 3
    with running() as server:
        variables = os.environ | server.environment | {"HOME": str(tmp_path)}
        command = [str(Path(sys.executable).with_name("wandb")), "sync", *folders]
        subprocess.run(command, env=variables, timeout=120)
        assert [row["_step"] for row in server.rows] == list(range(1, 13))


@pytest.mark.parametrize("mode", ["online", "offline"])
def test_a_chain_of_starts_is_one_curve_that_tells_where_it_was_started_again(tmp_path: Path, mode: str) -> None:
    """Stopped between two saves' steps, killed, and brought to its end."""
    files, run, flags = tmp_path / "wandb", tmp_path / "run", FLAGS.format(tmp_path)
    with running() as server:
        at_once = AT_ONCE | {"WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL": "0.1"}
        variables = server.environment | {"HOME": str(tmp_path)} | at_once | {"WANDB_MODE": mode}

        def reported() -> bool:
            if mode == "offline":
                return _wrote(files, 8)
            return [row["_step"] for row in server.rows][-1:] == [8]

        assert run_in_process(run, f"{flags} --exit-interval 3", **variables) == 0
        assert run_in_process(run, flags, 9, reported, **variables) == -9
        assert run_in_process(run, flags, **variables) == 0
        if mode == "offline":
            folders = sorted(map(str, files.glob("offline-run-*")))
            command = [str(Path(sys.executable).with_name("wandb")), "sync", *folders]
            subprocess.run(command, env=os.environ | variables | {"WANDB_MODE": "online"}, timeout=120)
        assert [row["_step"] for row in server.rows] == list(range(1, 13))
        assert [row["restarts"] for row in server.rows] == [0] * 3 + [1] * 5 + [2] * 4


def test_a_server_that_never_answers_costs_a_warning_and_less_than_a_minute(tmp_path: Path) -> None:
    with running() as server:
        server.silent.set()
        began = time.monotonic()
        variables = server.environment | {"HOME": str(tmp_path)}
        assert run_in_process(tmp_path / "run", FLAGS.format(tmp_path), **variables) == 0
    assert time.monotonic() - began < 75
    (warning,) = [record["text"] for record in records(tmp_path / "run", "text") if record["event"] == "warning"]
    assert warning.startswith("Weights & Biases receives no data from this run: ")
    assert column(tmp_path / "run", "iteration") == list(range(1, 13))


def test_a_server_that_falls_silent_costs_a_warning_and_less_than_a_minute(tmp_path: Path) -> None:
    with running() as server:
        variables = server.environment | {"HOME": str(tmp_path)}
        answer = server.answer

        def answer_first(query: str, found: dict[str, object]) -> dict[str, object]:
            if "CreateRunFiles" in query:
                server.silent.set()
            return answer(query, found)

        server.answer = answer_first  # type: ignore[method-assign]
        began = time.monotonic()
        assert run_in_process(tmp_path / "run", FLAGS.format(tmp_path), **variables) == 0
    assert server.silent.is_set()
    assert time.monotonic() - began < 75
    assert column(tmp_path / "run", "iteration") == list(range(1, 13))
    (warning,) = [record["text"] for record in records(tmp_path / "run", "text") if record["event"] == "warning"]
    assert warning.startswith("Weights & Biases receives no further data from this run: ")
