"""Saving in the loop: in a background thread, skipped, waited for, failing.

Tests choose how slow the disk is: the thread waits, before it writes, until the run has reached a given point.
"""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron.checkpoint.errors import DamagedCheckpointError
from megatron.checkpoint.format import Manifest
from megatron.config.errors import UserError
from megatron.config.run import RunConfig
from megatron.training import checkpointer
from megatron.training.build import build_trainer
from megatron.training.trainer_state import tensors_to_save
from tests.runs import before_step, differences, full_disk, records, saved_steps, spoil_step, start, tiny_run
from tests.saves import all_of, before_writing, slowly, wait_on, written_when

EVERY_2 = "--save {0}/saved --save-interval 2"
ASYNC = f"{EVERY_2} --async-save"


def run_of(folder: Path, flags: str = ASYNC) -> RunConfig:
    """A run of 6 steps that saves every 2."""
    return tiny_run(folder, flags.format(folder))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of the same run, saved synchronously."""
    folder = tmp_path_factory.mktemp("plain")
    assert start(run_of(folder, EVERY_2)).status == 0
    return folder / "saved"


def same_as(plain: Path, folder: Path, *steps: int) -> bool:
    """Return True if exactly these checkpoints exist, equal to the synchronous ones to the bit."""
    names = [f"iter_{step:07d}" for step in steps]
    equal = all(differences(plain / name, folder / "saved" / name) == [] for name in names)
    return saved_steps(folder / "saved") == [*steps] and equal


def disk_with(*free: int) -> Any:
    """A disk with the given free bytes at successive queries; the last value repeats."""
    answers = iter(free)
    return patch.object(shutil, "disk_usage", lambda path: SimpleNamespace(free=next(answers, free[-1])))


def warnings(told: str) -> list[str]:
    return [line for line in told.splitlines() if line.startswith("warning: ")]


def test_a_checkpoint_is_of_its_step_however_late_it_is_written(plain: Path, tmp_path: Path) -> None:
    """Two more steps change every weight before the first byte is written."""
    printed = start(run_of(tmp_path), written_when(2, begins=5))
    assert printed.status == 0
    assert same_as(plain, tmp_path, 2, 6)
    (skipped,) = warnings(printed.err)
    assert skipped.startswith("warning: step 4 is not saved: the save of step 2, begun ")
    assert "  fix: --save-interval 4\n" in printed.err
    told_at = [printed.out.index(text) for text in ("\n4/6 ", "saved/iter_0000002: ", "\n6/6 ", "saved/iter_0000006: ")]
    assert told_at == sorted(told_at)


def test_steps_are_taken_while_a_slow_disk_writes(plain: Path, tmp_path: Path) -> None:
    printed = start(run_of(tmp_path, ASYNC.replace("interval 2", "interval 4")), slowly(3.0, 4))
    assert printed.status == 0
    assert same_as(plain, tmp_path, 4, 6)
    first = next(r for r in records(tmp_path, "event") if r["event"] == "checkpoint")
    (taken,) = (r["time"] for r in records(tmp_path) if r["iteration"] == 5)
    assert first["seconds"] - first["blocking-seconds"] > 3.0
    assert taken < first["time"]


def test_waiting_for_the_last_save_is_logged(plain: Path, tmp_path: Path) -> None:
    event = all_of(slowly(0.5, 6), patch.object(checkpointer, "WAIT_NOTE_SECONDS", 0.2))
    printed = start(run_of(tmp_path, ASYNC.replace("interval 2", "interval 100")), event)
    assert printed.status == 0
    assert same_as(plain, tmp_path, 6)
    assert printed.out.count("waiting for the checkpoint of step 6: ") >= 2
    assert ", training stood still for 0." in printed.out


def test_the_last_one_waits_for_the_one_before(plain: Path, tmp_path: Path) -> None:
    printed = start(run_of(tmp_path, ASYNC.replace("interval 2", "interval 4")), slowly(0.7, 4))
    assert (printed.status, warnings(printed.err)) == (0, [])
    assert same_as(plain, tmp_path, 4, 6)


def test_a_full_disk_costs_a_save_and_not_the_run(plain: Path, tmp_path: Path) -> None:
    printed = start(run_of(tmp_path), all_of(full_disk(2), written_when(2, begins=4)))
    assert printed.status == 0
    assert same_as(plain, tmp_path, 4, 6)
    (warning,) = warnings(printed.err)
    assert warning.startswith(f"warning: step 2 is not saved: {tmp_path}/saved/.epoch-1/iter_0000002.tmp/")
    assert warning.endswith("the disk is full (rank 0); no checkpoint was written")


def test_a_full_disk_at_the_end_is_an_error(plain: Path, tmp_path: Path) -> None:
    printed = start(run_of(tmp_path, ASYNC.replace("interval 2", "interval 4")), full_disk(6))
    assert printed.status == 1
    assert printed.err.startswith(f"error: {tmp_path}/saved/.epoch-1/iter_0000006.tmp/")
    assert "the disk is full (rank 0); no checkpoint was written" in printed.err
    assert saved_steps(tmp_path / "saved") == [4]
    assert start(run_of(tmp_path)).status == 0
    assert differences(plain / "iter_0000006", tmp_path / "saved/iter_0000006") == []


@pytest.mark.parametrize("flags", [EVERY_2, ASYNC])
def test_a_run_does_not_begin_without_room_for_a_checkpoint(tmp_path: Path, flags: str) -> None:
    printed = start(run_of(tmp_path, flags), disk_with(10))
    assert (printed.status, printed.samples) == (2, {})
    assert printed.err.startswith(f"error: E816 {tmp_path}/saved: a checkpoint takes ")
    assert printed.err.count("E816") == 1


@pytest.mark.parametrize("flags", [EVERY_2, ASYNC])
def test_without_room_there_is_no_save_until_there_is(plain: Path, tmp_path: Path, flags: str) -> None:
    """Free space is queried at the start and at each save, again after leftovers were removed."""
    printed = start(run_of(tmp_path, flags.replace("interval 2", "interval 4")), disk_with(1 << 30, 10, 10, 1 << 30))
    assert printed.status == 0
    assert same_as(plain, tmp_path, 6)
    (warning,) = warnings(printed.err)
    assert warning.startswith(f"warning: step 4 is not saved: E816 {tmp_path}/saved: a checkpoint takes ")


def test_no_step_waits_for_a_disk_that_does_not_answer(plain: Path, tmp_path: Path) -> None:
    """While step 4 is saved the disk hangs, free-space queries included, until the run is at step 6."""
    at_6, real, asked = threading.Event(), checkpointer.disk_space_problem, [0]

    def shortage(*arguments: Any) -> Any:
        asked[0] += 1
        if asked[0] == 2:  # the first time was the start
            wait_on(at_6)
        return real(*arguments)

    printed = start(
        run_of(tmp_path, ASYNC.replace("interval 2", "interval 4")),
        all_of(before_step(6, lambda _: at_6.set()), patch.object(checkpointer, "disk_space_problem", shortage)),
    )
    assert printed.status == 0
    assert same_as(plain, tmp_path, 4, 6)


@pytest.mark.parametrize("flags", [EVERY_2, ASYNC])
def test_without_room_at_the_end_there_is_an_error(tmp_path: Path, flags: str) -> None:
    config = run_of(tmp_path, f"--train-iters 1 {flags.replace('interval 2', 'interval 100')}")
    printed = start(config, disk_with(1 << 30, 10))
    assert printed.status == 1
    assert printed.err.startswith(f"error: E816 {tmp_path}/saved: ")


def test_a_run_that_fails_waits_for_the_save_under_way(plain: Path, tmp_path: Path) -> None:
    event = all_of(slowly(0.5, 2), before_step(3, spoil_step))
    printed = start(run_of(tmp_path), event)
    assert printed.status == 1
    assert same_as(plain, tmp_path, 2)
    assert f"saved {tmp_path}/saved/iter_0000002: " in printed.out
    assert "not finite" in printed.err or "non-finite" in printed.err


def test_but_not_for_ever(tmp_path: Path) -> None:
    go = threading.Event()
    event = all_of(
        before_writing(lambda step: wait_on(go)),
        before_step(3, spoil_step),
        patch.object(checkpointer, "GRACE_SECONDS", 0.2),
    )
    started = time.monotonic()
    assert start(run_of(tmp_path), event).status == 1
    assert time.monotonic() - started < 20
    assert saved_steps(tmp_path / "saved") == []
    go.set()


def test_an_error_that_no_disk_explains_ends_the_run(tmp_path: Path) -> None:
    def fail(step: int) -> None:
        raise ZeroDivisionError("a bug")

    printed = start(run_of(tmp_path), before_writing(fail))
    assert printed.status == 1
    assert "ZeroDivisionError: a bug" in printed.err


def test_older_ones_stay_where_the_new_one_cannot_be_opened(tmp_path: Path) -> None:
    original = Manifest.open

    def open_(path: Path) -> Manifest:
        if path.name == "iter_0000006":
            raise DamagedCheckpointError(f"{path} is truncated")
        return original(path)

    config = run_of(tmp_path, f"{ASYNC} --keep-last 1".replace("interval 2", "interval 4"))
    printed = start(config, patch.object(Manifest, "open", open_))
    assert printed.status == 0
    assert f"older checkpoints are not deleted: {tmp_path}/saved/iter_0000006 is truncated" in printed.err
    assert saved_steps(tmp_path / "saved") == [4, 6]


def test_older_ones_go_when_the_new_one_is_whole(tmp_path: Path) -> None:
    assert start(run_of(tmp_path, f"{ASYNC} --keep-last 1")).status == 0
    assert saved_steps(tmp_path / "saved") == [6]


def test_main_parameters_stored_as_remainders_are_computed_when_written(tmp_path: Path) -> None:
    """Not all at once, which would take the memory that remainders save."""
    trainer = build_trainer(tiny_run(tmp_path, "--bf16 --store-param-remainders"), 0, 1)
    masters = dict(trainer.optimizer.main_params)
    with patch("megatron.optimizer.main_params.join_fp32", side_effect=AssertionError):
        tensors = tensors_to_save(trainer)
    (part,) = tensors["layers.0.mlp.linear_fc2.weight"].parts
    assert torch.equal(part.resolve().flatten(), masters["layers.0.mlp.linear_fc2.weight"].flatten())


def test_without_a_folder_there_is_nothing_to_write_to(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="E601 --async-save has no effect without"):
        tiny_run(tmp_path, "--async-save")
