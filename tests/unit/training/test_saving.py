"""Saving in the loop, at once and in a background thread; ``finished.json``; one run per folder.

Tests choose how slow the disk is: the thread waits, before it writes, until the run has reached a given point.
"""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import AutoModelForCausalLM

import pretrain_gpt
from megatron.checkpoint.errors import CheckpointError, DamagedCheckpointError
from megatron.checkpoint.folder import CheckpointFolder
from megatron.checkpoint.format import MARKER, Manifest
from megatron.checkpoint.lease import acquire_lease
from megatron.checkpoint.load import CheckpointReader
from megatron.config.errors import Problem, UserError
from megatron.config.run import RunConfig
from megatron.distributed.comm import Group
from megatron.training import checkpointer
from megatron.training.build import build_trainer
from megatron.training.checkpoint_contents import tensors_to_save
from megatron.training.checkpointer import FINISHED_FILE, Checkpointer, hold_save_folder
from tests.kit.runs import (
    FLAGS,
    KilledError,
    before_step,
    differences,
    full_disk,
    records,
    run_in_process,
    saved_steps,
    spoil_step,
    start,
    tiny_run,
)
from tests.kit.saves import all_of, before_writing, slowly, wait_on, written_when

EVERY_2 = "--save {0}/saved --save-interval 2"
ASYNC = f"{EVERY_2} --async-save"
EVERY_4, ASYNC_4 = EVERY_2.replace("interval 2", "interval 4"), ASYNC.replace("interval 2", "interval 4")


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


def warnings(reported: str) -> list[str]:
    return [line for line in reported.splitlines() if line.startswith("warning: ")]


def test_a_checkpoint_is_of_its_step_however_late_it_is_written(plain: Path, tmp_path: Path) -> None:
    """Two more steps change every weight before the first byte is written."""
    printed = start(run_of(tmp_path), written_when(2, begins=5))
    assert printed.status == 0
    assert same_as(plain, tmp_path, 2, 6)
    (skipped,) = warnings(printed.err)
    assert skipped.startswith("warning: step 4 is not saved: the save of step 2, begun ")
    assert "  fix: --save-interval 4\n" in printed.err
    reported_at = [
        printed.out.index(text) for text in ("\n4/6 ", "saved/iter_0000002: ", "\n6/6 ", "saved/iter_0000006: ")
    ]
    assert reported_at == sorted(reported_at)


def test_steps_are_taken_while_a_slow_disk_writes_and_the_last_save_waits(plain: Path, tmp_path: Path) -> None:
    event = all_of(slowly(1.0, 4, 6), patch.object(checkpointer, "WAIT_NOTE_SECONDS", 0.3))
    printed = start(run_of(tmp_path, ASYNC_4), event)
    assert (printed.status, warnings(printed.err)) == (0, [])
    assert same_as(plain, tmp_path, 4, 6)
    first = next(r for r in records(tmp_path, "event") if r["event"] == "checkpoint")
    (taken,) = (r["time"] for r in records(tmp_path) if r["iteration"] == 5)
    assert first["seconds"] - first["blocking-seconds"] > 1.0
    assert taken < first["time"]
    assert printed.out.count("waiting for the checkpoint of step 6: ") >= 2
    assert ", training stood still for 0." in printed.out


@pytest.mark.parametrize(
    ("flags", "event"), [(EVERY_2, full_disk(2)), (ASYNC, all_of(full_disk(2), written_when(2, 4)))]
)
def test_a_full_disk_costs_a_save_and_not_the_run(plain: Path, tmp_path: Path, flags: str, event: Any) -> None:
    printed = start(run_of(tmp_path, flags), event)
    assert printed.status == 0
    assert same_as(plain, tmp_path, 4, 6)
    (warning,) = warnings(printed.err)
    assert warning.startswith(f"warning: step 2 is not saved: {tmp_path}/saved/.epoch-1/iter_0000002/attempt-")
    assert warning.endswith("the disk is full (rank 0); no checkpoint was written")


@pytest.mark.parametrize("flags", [EVERY_4, ASYNC_4])
def test_a_full_disk_at_the_end_is_an_error(plain: Path, tmp_path: Path, flags: str) -> None:
    printed = start(run_of(tmp_path, flags), full_disk(6))
    assert printed.status == 1
    assert printed.err.startswith(f"error: {tmp_path}/saved/.epoch-1/iter_0000006/attempt-")
    assert "the disk is full (rank 0); no checkpoint was written\n  fix: free some space | --" in printed.err
    assert saved_steps(tmp_path / "saved") == [4]
    assert finished(tmp_path) is None
    assert start(run_of(tmp_path, flags)).samples.keys() == {5, 6}
    assert differences(plain / "iter_0000006", tmp_path / "saved/iter_0000006") == []


def test_a_run_does_not_begin_without_room_for_a_checkpoint(tmp_path: Path) -> None:
    printed = start(run_of(tmp_path), disk_with(10))
    assert (printed.status, printed.samples) == (2, {})
    assert printed.err.startswith(f"error: E816 {tmp_path}/saved: a checkpoint takes ")
    assert printed.err.count("E816") == 1


@pytest.mark.parametrize("flags", [EVERY_4, ASYNC_4])
def test_without_room_there_is_no_save_until_there_is(plain: Path, tmp_path: Path, flags: str) -> None:
    """Free space is queried at the start and at each save, again after leftovers were removed."""
    printed = start(run_of(tmp_path, flags), disk_with(1 << 30, 10, 10, 1 << 30))
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
        run_of(tmp_path, ASYNC_4),
        all_of(before_step(6, lambda _: at_6.set()), patch.object(checkpointer, "disk_space_problem", shortage)),
    )
    assert printed.status == 0
    assert same_as(plain, tmp_path, 4, 6)


def test_a_run_that_fails_waits_for_the_save_under_way(plain: Path, tmp_path: Path) -> None:
    printed = start(run_of(tmp_path), all_of(slowly(0.5, 2), before_step(3, spoil_step)))
    assert printed.status == 1
    assert same_as(plain, tmp_path, 2)
    assert f"saved {tmp_path}/saved/iter_0000002: " in printed.out
    assert "not finite" in printed.err


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
        if step == 2:
            raise ZeroDivisionError("a bug")

    printed = start(run_of(tmp_path), before_writing(fail))
    assert printed.status == 1
    assert "ZeroDivisionError: a bug" in printed.err


@pytest.mark.parametrize(
    ("flags", "call", "error"),
    [
        (ASYNC_4, (Manifest, "open"), DamagedCheckpointError("iter_0000006 is truncated")),
        (EVERY_4, (CheckpointFolder, "retain"), OSError(errno.EROFS, os.strerror(errno.EROFS), "iter_0000004")),
    ],
)
def test_older_ones_stay_if_the_new_one_cannot_be_opened_or_the_disk_refuses(
    tmp_path: Path, flags: str, call: tuple[Any, str], error: Exception
) -> None:
    real = getattr(*call)

    def fails(*arguments: Any, **named: Any) -> Any:
        if (tmp_path / "saved/iter_0000006" / MARKER).exists():
            raise error
        return real(*arguments, **named)

    printed = start(run_of(tmp_path, f"{flags} --keep-last 1"), patch.object(*call, fails))
    assert printed.status == 0
    assert f"warning: older checkpoints are not deleted: {error}" in printed.err
    assert saved_steps(tmp_path / "saved") == [4, 6]


@pytest.mark.parametrize(
    ("flags", "kept"), [(f"{ASYNC} --keep-last 1", [6]), (f"{EVERY_2} --keep-last 1 --keep-every 4", [4, 6])]
)
def test_retention_flags_select_the_kept_checkpoints(tmp_path: Path, flags: str, kept: list[int]) -> None:
    assert start(run_of(tmp_path, f"{flags} --exit-interval 4")).status == 0
    assert start(run_of(tmp_path, flags)).status == 0
    assert saved_steps(tmp_path / "saved") == kept


def test_main_parameters_stored_as_remainders_are_computed_when_written(tmp_path: Path) -> None:
    """Not all at once, which would take the memory that remainders save."""
    trainer = build_trainer(tiny_run(tmp_path, "--bf16 --store-param-remainders"), 0, 1)
    main_params = dict(trainer.optimizer.main_params)
    with patch("megatron.optimizer.main_params.join_fp32", side_effect=AssertionError):
        tensors = tensors_to_save(trainer)
    (part,) = tensors["layers.0.mlp.linear_fc2.weight"].parts
    assert torch.equal(part.resolve().flatten(), main_params["layers.0.mlp.linear_fc2.weight"].flatten())


# ---- finished.json: it exists exactly if the last step has been taken and saved


def finished(folder: Path) -> Any:
    """Return the content of the file, or None."""
    path = folder / FINISHED_FILE
    return json.loads(path.read_text()) if path.exists() else None


def test_a_run_that_has_ended_is_proven_to_have(tmp_path: Path) -> None:
    seen: list[list[int]] = []
    mark = Checkpointer.mark_finished

    def watched(saver: Checkpointer, done: bool) -> None:
        seen.append(saved_steps(tmp_path / "saved"))
        mark(saver, done)

    with patch.object(Checkpointer, "mark_finished", watched):
        assert start(run_of(tmp_path)).status == 0
    assert seen[1][-1] == 6, "it comes after the checkpoint"
    proof = finished(tmp_path)
    assert proof.keys() == {"iteration", "consumed-samples", "run-id", "checkpoint", "time"}
    assert (proof["iteration"], proof["consumed-samples"]) == (6, 24)
    assert proof["checkpoint"] == str(tmp_path / "saved/iter_0000006")
    assert proof["run-id"] == records(tmp_path, "run-id")[0]["run-id"]
    assert start(tiny_run(tmp_path / "unsaved")).status == 0
    assert finished(tmp_path / "unsaved")["checkpoint"] is None


@pytest.mark.parametrize(
    ("event", "flags", "status"),
    [
        (before_step(3, lambda trainer: signal.raise_signal(signal.SIGTERM)), "", 143),
        (before_step(3, spoil_step), "", 1),
        (None, "--exit-interval 4", 0),
    ],
    ids=["signal", "error", "exit interval"],
)
def test_a_run_that_ends_early_leaves_none(tmp_path: Path, event: Any, flags: str, status: int) -> None:
    assert start(run_of(tmp_path, f"{EVERY_2} {flags}"), event).status == status
    assert finished(tmp_path) is None


def killed_before_the_proof() -> Any:
    mark = Checkpointer.mark_finished

    def killed(saver: Checkpointer, done: bool) -> None:
        if done:
            raise KilledError
        mark(saver, done)

    return patch.object(Checkpointer, "mark_finished", killed)


def no_room(*arguments: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("event", [killed_before_the_proof(), patch.object(checkpointer, "publish_file", no_room)])
def test_the_next_start_writes_it(tmp_path: Path, event: Any) -> None:
    failed = start(run_of(tmp_path), event)
    if failed.status is not None:
        assert failed.status == 1
        assert "finished.json, which marks the end of training, cannot be written: the disk is full" in failed.err
        assert "Traceback" not in failed.err
    assert (saved_steps(tmp_path / "saved")[-1], finished(tmp_path)) == (6, None)
    again = start(run_of(tmp_path))
    assert (again.status, again.samples, again.err) == (0, {}, "")
    assert "nothing to do: this run ends with step 6, and 6 are taken" in again.out
    assert finished(tmp_path)["checkpoint"] == str(tmp_path / "saved/iter_0000006")


def test_a_longer_run_takes_it_back_before_its_first_step(tmp_path: Path) -> None:
    constant = f"{EVERY_2} --lr-decay-style constant"
    start(run_of(tmp_path, constant))
    seen: list[Any] = [finished(tmp_path)]
    longer = run_of(tmp_path, f"{constant} --train-iters 8")
    assert start(longer, before_step(7, lambda trainer: seen.append(finished(tmp_path)))).status == 0
    seen.append(finished(tmp_path))
    assert [proof and proof["iteration"] for proof in seen] == [6, None, 8]


def test_a_superseded_start_keeps_the_finished_file_of_a_later_one(tmp_path: Path) -> None:
    mark = Checkpointer.mark_finished

    def later(saver: Checkpointer, done: bool) -> None:
        (tmp_path / "saved/.epoch-1").rename(tmp_path / "saved/.epoch-2")
        (tmp_path / "saved/.epoch-2/claim.json").write_text('{"epoch": 2, "token": "5f", "start": {}}')
        (tmp_path / FINISHED_FILE).write_text('{"iteration": 6}')
        mark(saver, done)

    failed = start(run_of(tmp_path), patch.object(Checkpointer, "mark_finished", later))
    assert (failed.status, finished(tmp_path)) == (1, {"iteration": 6})
    assert "E817" in failed.err


def test_a_finished_run_has_its_last_checkpoint_in_its_own_folder(tmp_path: Path) -> None:
    """As when it starts from the last checkpoint of another folder."""
    start(run_of(tmp_path / "old"))
    again = start(run_of(tmp_path, f"{EVERY_2} --load {tmp_path}/old/saved"))
    assert (again.status, again.samples, saved_steps(tmp_path / "saved")) == (0, {}, [6])
    assert finished(tmp_path)["checkpoint"] == str(tmp_path / "saved/iter_0000006")


def test_a_file_that_cannot_be_removed_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / FINISHED_FILE / "x").mkdir(parents=True)
    failed = start(tiny_run(tmp_path))
    assert (failed.status, failed.samples) == (1, {})


def test_a_user_error_of_a_child_process_keeps_its_problems() -> None:
    error = UserError([Problem("E802", "no such disk", ("--save ANOTHER", "--save B")), Problem("E813", "newer")])
    sent = pickle.loads(pickle.dumps(error))
    assert (type(sent), str(sent), sent.problems) == (UserError, str(error), error.problems)


# ---- One run per folder; for several ranks see tests/distributed/test_resume.py


def test_a_folder_is_held_for_as_long_as_the_run_takes(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    in_use = pytest.raises(CheckpointError, match="is in use by process ")
    with hold_save_folder(str(folder), Group()), in_use, acquire_lease(folder):
        pass
    with acquire_lease(folder):
        before = sorted(path.name for path in folder.iterdir())
        printed = start(run_of(tmp_path))
        assert (printed.status, printed.samples) == (1, {})
        assert printed.err.startswith(f"error: {folder} is in use by process ")
        assert printed.err.endswith("\n  fix: --save ANOTHER\n")
        assert sorted(path.name for path in folder.iterdir()) == before
    assert start(run_of(tmp_path)).status == 0


def test_a_folder_that_cannot_be_made_is_found_before_the_first_step(tmp_path: Path) -> None:
    printed = start(tiny_run(tmp_path, "--save /proc/nope"))
    assert (printed.status, printed.samples) == (1, {})
    assert "no checkpoint can be written to /proc/nope" in printed.err


# ---- Exports to Hugging Face


EXPORTS = "--save {0}/saved --save-interval 1 --save-hf-interval 3 --keep-last 1"


def warnings_of(folder: Path) -> list[str]:
    return [record["text"] for record in records(folder, "text") if record["event"] == "warning"]


@pytest.fixture
def converter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace the converter by one that copies the marker, once the file that is returned exists."""
    script, go = tmp_path / "converter", tmp_path / "go"
    script.write_text(f"""#!/bin/sh
while [ "$1" != --load ]; do shift; done
while [ ! -e {go} ]; do sleep 0.02; done
[ -e "$4" ] && echo "convert_checkpoint: $4 exists" && exit 1
rm -rf "$4.tmp"; mkdir "$4"; cat "$2/COMPLETE" > "$4/config.json"
""")
    script.chmod(0o755)
    go.touch()
    monkeypatch.setattr(sys, "executable", str(script))
    return go


def test_a_checkpoint_that_is_written_again_is_exported_again(tmp_path: Path, converter: Path) -> None:
    flags = "--save {0}/saved --save-interval 3 --save-hf-interval 3 --resume-mode new-schedule --lr"
    marker, exported = tmp_path / "saved/iter_0000006" / MARKER, tmp_path / "saved/hf/iter_0000006/config.json"
    assert start(run_of(tmp_path, f"{flags} 0.01")).status == 0
    first = marker.read_bytes()
    assert exported.read_bytes() == first
    shutil.rmtree(marker.parent)
    assert start(run_of(tmp_path, f"{flags} 0.02")).status == 0
    second = marker.read_bytes()
    assert exported.read_bytes() == second != first
    assert warnings_of(tmp_path) == []
    exported.write_bytes(b"of an earlier checkpoint; the run was killed before it replaced the export")
    os.utime(exported, ns=(0, 0))
    assert start(run_of(tmp_path, f"{flags} 0.02 --train-iters 7")).status == 0
    assert exported.read_bytes() == second


def test_of_the_checkpoints_that_wait_for_an_export_the_newest_is_kept(tmp_path: Path, converter: Path) -> None:
    flags = "--save {0}/saved --save-interval 1 --save-hf-interval 1 --keep-last 1"
    converter.unlink()  # the first export takes as long as the run
    assert start(run_of(tmp_path, f"{flags} --exit-interval 4")).status == 0
    assert warnings_of(tmp_path) == [
        f"step {step} is not exported: the export of step 1 is not finished\n  fix: --save-hf-interval 2"
        for step in (2, 3)
    ]
    assert saved_steps(tmp_path / "saved") == [1, 3, 4], "3 waited when 4 was saved"
    converter.touch()

    def wait(trainer: Any) -> None:
        while not (tmp_path / "saved/hf/iter_0000001/config.json").exists():
            time.sleep(0.02)
        time.sleep(0.5)  # until the process has ended

    again = run_of(tmp_path, flags.replace("hf-interval 1", "hf-interval 6"))
    assert start(again, before_step(6, wait)).status == 0
    exported = {path.name for path in (tmp_path / "saved" / "hf").iterdir()}
    assert exported == {"iter_0000001", "iter_0000004", "iter_0000006"}
    assert len(warnings_of(tmp_path)) == 2


def test_a_converter_ends_with_its_run_even_by_sigkill(tmp_path: Path) -> None:
    target = tmp_path / "saved" / "hf" / "iter_0000003"

    def converters() -> list[Path]:
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended
                found += [path] if str(target).encode() in (path / "cmdline").read_bytes().split(b"\0") else []
        return found

    flags = EXPORTS.format(tmp_path)
    assert run_in_process(tmp_path, flags, 3, lambda: bool(converters())) == -signal.SIGKILL
    deadline = time.monotonic() + 30
    while converters():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert not target.exists()
    assert target.with_name("iter_0000003.tmp").exists(), "the next start continues"


@pytest.mark.slow
def test_checkpoints_are_exported_beside_training_and_the_last_is_waited_for(tmp_path: Path) -> None:
    """A start that ends early leaves an export, which the next start continues; retention keeps its checkpoint."""
    assert start(run_of(tmp_path, f"{EXPORTS} --exit-interval 4")).status == 0
    notes = [record["text"] for record in records(tmp_path, "text")]
    assert "the export of step 3 is interrupted; the next start continues it" in notes
    exported = tmp_path / "saved" / "hf"
    assert not (exported / "iter_0000003").exists()
    assert saved_steps(tmp_path / "saved") == [3, 4]
    assert start(run_of(tmp_path, EXPORTS)).status == 0
    assert {path.name for path in exported.iterdir()} == {"iter_0000003", "iter_0000006"}
    assert saved_steps(tmp_path / "saved") == [3, 6], "4 and 5 are deleted, 3 was in use when 6 was saved"
    assert warnings_of(tmp_path) == []
    model, info = AutoModelForCausalLM.from_pretrained(exported / "iter_0000006", output_loading_info=True)
    assert not any(info.values())
    saved = CheckpointReader(Manifest.open(tmp_path / "saved" / "iter_0000006"))
    assert torch.equal(model.transformer.wte.weight, saved.read("embedding.word_embeddings.weight"))
    assert json.loads((tmp_path / FINISHED_FILE).read_text())["iteration"] == 6


def test_a_failed_export_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "saved" / "hf" / "iter_0000006").mkdir(parents=True)
    (tmp_path / "saved" / "hf" / "iter_0000006" / "README.md").write_text("x")
    assert start(run_of(tmp_path, EXPORTS.replace("interval 3", "interval 6"))).status == 0
    (warning,) = warnings_of(tmp_path)
    command = f"python tools/convert_checkpoint.py --load {tmp_path}/saved/iter_0000006 --save-hf A_NEW_FOLDER"
    reason = f"{tmp_path}/saved/hf/iter_0000006 exists and is not empty\n  fix: {command}"
    assert warning == f"step 6 is not exported: {reason}"
    assert (tmp_path / "saved" / "hf" / "iter_0000006.log").exists()


def test_a_model_without_a_family_is_refused_before_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = f"{FLAGS} --save {tmp_path}/saved --save-interval 1 --save-hf-interval 3 --position-embedding-type none"
    assert pretrain_gpt.main(flags.split()) == 2
    assert "E852 Hugging Face's gpt2 has no position_embedding_type none" in capsys.readouterr().err
    assert not (tmp_path / "saved").exists()
