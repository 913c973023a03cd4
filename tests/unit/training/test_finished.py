"""``finished.json`` exists exactly if the last step has been taken and saved."""

from __future__ import annotations

import errno
import json
import os
import signal
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from megatron.checkpoint.errors import StorageError
from megatron.config.run import RunConfig
from megatron.training import loop
from megatron.training.trainer import Trainer
from tests.runs import KilledError, before_step, full_disk, kill, records, saved_steps, spoil_step, start, tiny_run

SAVING = "--save {}/saved --save-interval 2"
KEYS = {"iteration", "consumed-samples", "run-id", "checkpoint", "time"}


def run_of(folder: Path, flags: str = "") -> RunConfig:
    return tiny_run(folder, f"{SAVING.format(folder)} {flags}")


def told(folder: Path) -> dict[str, Any] | None:
    """Return the content of the file, or None."""
    path = folder / loop.FINISHED_FILE
    return json.loads(path.read_text()) if path.exists() else None


@pytest.mark.parametrize("flags", ["", "--async-save"])
def test_a_run_that_has_ended_is_proven_to_have(tmp_path: Path, flags: str) -> None:
    assert start(run_of(tmp_path, flags)).status == 0
    proof = told(tmp_path)
    assert proof is not None
    assert proof.keys() == KEYS
    assert (proof["iteration"], proof["consumed-samples"]) == (6, 24)
    assert proof["checkpoint"] == str(tmp_path / "saved/iter_0000006")
    assert proof["run-id"] == records(tmp_path, "run-id")[0]["run-id"]
    assert sorted(path.name for path in tmp_path.iterdir() if "finished" in path.name) == [loop.FINISHED_FILE]


def test_without_checkpoints_it_names_none_and_without_a_folder_there_is_none(tmp_path: Path) -> None:
    assert start(tiny_run(tmp_path)).status == 0
    proof = told(tmp_path)
    assert proof is not None
    assert proof["checkpoint"] is None


def test_it_comes_after_the_checkpoint(tmp_path: Path) -> None:
    seen: list[list[int]] = []
    original = loop.write_facts

    def write(folder: Path, facts: loop.FinishedFacts) -> None:
        seen.append(saved_steps(tmp_path / "saved"))
        original(folder, facts)

    with patch.object(loop, "write_facts", write):
        start(run_of(tmp_path, "--async-save"))
    assert [steps[-1] for steps in seen] == [6]  # on a busy machine an earlier save may be skipped


@pytest.mark.parametrize(
    ("event", "status"),
    [
        (before_step(3, lambda trainer: signal.raise_signal(signal.SIGTERM)), 143),
        (before_step(3, kill), None),
        (before_step(3, spoil_step), 1),
        (full_disk(6), 1),
    ],
    ids=["signal", "kill", "error", "full disk"],
)
def test_a_run_that_ends_early_or_unsaved_leaves_none(tmp_path: Path, event: Any, status: int | None) -> None:
    assert start(run_of(tmp_path), event).status == status
    assert told(tmp_path) is None
    assert start(run_of(tmp_path)).status == 0
    assert told(tmp_path) is not None


def test_an_exit_interval_is_no_end(tmp_path: Path) -> None:
    assert start(run_of(tmp_path, "--exit-interval 4")).status == 0
    assert told(tmp_path) is None


def test_killed_between_the_last_save_and_the_proof(tmp_path: Path) -> None:
    def killed(folder: Path, facts: loop.FinishedFacts) -> None:
        raise KilledError

    assert start(run_of(tmp_path), patch.object(loop, "write_facts", killed)).status is None
    assert (saved_steps(tmp_path / "saved"), told(tmp_path)) == ([2, 4, 6], None)
    again = start(run_of(tmp_path))
    assert (again.status, again.samples) == (0, {})
    assert "nothing to do" in again.out
    proof = told(tmp_path)
    assert proof is not None
    assert proof["checkpoint"] == str(tmp_path / "saved/iter_0000006")


def test_a_longer_run_takes_it_back_before_its_first_step(tmp_path: Path) -> None:
    start(run_of(tmp_path, "--lr-decay-style constant"))
    assert told(tmp_path) is not None
    seen: list[Any] = []
    longer = run_of(tmp_path, "--lr-decay-style constant --train-iters 8")
    assert start(longer, before_step(7, lambda trainer: seen.append(told(tmp_path)))).status == 0
    assert seen == [None]
    proof = told(tmp_path)
    assert proof is not None
    assert proof["iteration"] == 8


def test_a_start_that_stops_before_its_first_step_has_removed_the_file(tmp_path: Path) -> None:
    start(run_of(tmp_path, "--lr-decay-style constant"))
    (tmp_path / "stop").touch()
    start(run_of(tmp_path, f"--lr-decay-style constant --train-iters 8 --stop-file {tmp_path}/stop"))
    assert told(tmp_path) is None


def test_a_start_that_is_superseded_does_not_take_back_the_proof_of_a_later_one(tmp_path: Path) -> None:
    def later(trainer: Trainer) -> None:
        (tmp_path / "saved/.epoch-1").rename(tmp_path / "saved/.epoch-2")
        (tmp_path / "saved/.epoch-2/claim.json").write_text('{"epoch": 2, "token": "5f", "start": {}}')
        loop.write_facts(tmp_path, {"iteration": 6})
        retract(trainer)

    retract = loop.remove_finished_file
    failed = start(run_of(tmp_path), patch.object(loop, "remove_finished_file", later))
    assert (failed.status, told(tmp_path)) == (1, {"iteration": 6})
    assert "E817" in failed.err


def no_room(*arguments: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_disk_that_is_full_by_then_costs_the_status_and_the_next_start_mends_it(tmp_path: Path) -> None:
    failed = start(run_of(tmp_path), patch.object(loop, "publish_file", no_room))
    assert (failed.status, told(tmp_path)) == (1, None)
    assert "finished.json, which marks the end of training, cannot be written: the disk is full" in failed.err
    assert "Traceback" not in failed.err
    assert start(run_of(tmp_path)).status == 0
    assert told(tmp_path) is not None


@pytest.mark.parametrize("call", ["write_file", "sync_folder", "os.rename"])
def test_a_write_that_fails_leaves_nothing_half_written(tmp_path: Path, call: str) -> None:
    with patch(f"megatron.checkpoint.durable_files.{call}", no_room), pytest.raises(StorageError):
        loop.write_facts(tmp_path, {"iteration": 1})
    assert [path.name for path in tmp_path.iterdir() if path.name != loop.FINISHED_FILE] == []
    (tmp_path / f"{loop.FINISHED_FILE}.part").write_text("{")  # of one that was killed
    loop.write_facts(tmp_path, {"iteration": 2})
    assert told(tmp_path) == {"iteration": 2}


def test_a_run_that_has_nothing_to_do_has_its_last_checkpoint_in_its_own_folder(tmp_path: Path) -> None:
    """As when it starts from the last checkpoint of another folder."""
    start(run_of(tmp_path / "old"))
    config = tiny_run(tmp_path, f"{SAVING.format(tmp_path)} --load {tmp_path}/old/saved")
    again = start(config)
    assert (again.status, again.samples, saved_steps(tmp_path / "saved")) == (0, {}, [6])
    proof = told(tmp_path)
    assert proof is not None
    assert proof["checkpoint"] == str(tmp_path / "saved/iter_0000006")


def test_a_file_that_cannot_be_removed_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / loop.FINISHED_FILE / "x").mkdir(parents=True)
    failed = start(tiny_run(tmp_path))
    assert (failed.status, failed.samples) == (1, {})


def test_a_checkpoint_of_another_step_does_not_count(tmp_path: Path) -> None:
    """A trainer that is ahead of its last checkpoint has not saved its end."""
    seen: list[bool] = []

    def look(trainer: Trainer) -> None:
        seen.append(loop.is_last_step_saved(trainer))

    start(run_of(tmp_path), before_step(3, look))
    start(run_of(tmp_path / "other"), before_step(4, look))
    assert seen == [True, False]
