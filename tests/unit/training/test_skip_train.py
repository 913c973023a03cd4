"""Evaluations without training: ``--skip-train``."""

from __future__ import annotations

import signal
from pathlib import Path
from unittest.mock import patch

import pytest

from megatron.checkpoint.lease import acquire_lease
from megatron.config.run import CheckpointConfig
from megatron.training.loggers.run_folder import read_history
from megatron.training.resume_source import read_only_options
from tests.runs import column, contents, records, start, tiny_run

FLAGS = "--save {0}/saved --save-interval 3 --eval-interval 3 --eval-iters 2"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of six steps, saved and evaluated after the third and the last."""
    folder = tmp_path_factory.mktemp("trained")
    assert start(tiny_run(folder / "run", FLAGS.format(folder))).status == 0
    return folder


def test_the_losses_are_those_of_the_run_and_nothing_is_changed(trained: Path, tmp_path: Path) -> None:
    before = contents(trained)
    printed = start(tiny_run(tmp_path, FLAGS.format(trained) + " --skip-train"))
    assert (printed.status, printed.samples, printed.err) == (0, {}, "")
    assert contents(trained) == before
    for kind in ("lm loss validation", "lm loss test"):
        assert column(tmp_path, kind, kind) == column(trained / "run", kind, kind)[-1:]
        assert column(tmp_path, "iteration", kind) == [6]
    assert "validation at 6: loss" in printed.out
    assert "saves      none: --save is not set" in printed.out
    assert not (tmp_path / "finished.json").exists()
    assert not (tmp_path / "loss.png").exists()


def test_an_older_checkpoint_is_evaluated_on_request(trained: Path, tmp_path: Path) -> None:
    flags = f"--load {trained}/saved --ckpt-step 3 --eval-iters 2 --skip-train"
    assert start(tiny_run(tmp_path, flags)).status == 0
    kind = "lm loss validation"
    assert column(tmp_path, "iteration", kind) == [3]
    assert column(tmp_path, kind, kind) == column(trained / "run", kind, kind)[:1]


def test_weights_alone_are_evaluated_as_those_of_no_step(trained: Path, tmp_path: Path) -> None:
    flags = f"--load {trained}/saved --resume-mode weights-only --eval-iters 2 --skip-train --seed 7"
    assert start(tiny_run(tmp_path, flags)).status == 0
    kind = "lm loss validation"
    assert column(tmp_path, "iteration", kind) == [0]
    assert column(tmp_path, kind, kind) != column(trained / "run", kind, kind)[-1:]  # other samples


def test_a_run_that_is_at_work_is_not_disturbed(trained: Path, tmp_path: Path) -> None:
    """Its folder is locked meanwhile, and its curve in the same run folder stays whole."""
    config = tiny_run(trained / "run", FLAGS.format(trained) + " --skip-train --log-interval 2")
    curve = read_history(trained / "run/metrics.jsonl").train
    with acquire_lease(trained / "saved"):
        assert start(config).status == 0
    assert read_history(trained / "run/metrics.jsonl").train == curve
    assert read_history(trained / "run/metrics.jsonl").restarts == []
    assert "an evaluation alone on 1 rank" in (trained / "run/incidents.md").read_text()
    ids = [record["run-id"] for record in records(trained / "run", "run-id")]
    assert len(set(ids)) == 2, "an evaluation is no part of the run, in no place that it reports to"


def test_no_step_is_taken_and_finished_json_stays(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "finished.json").write_text("{}")
    printed = start(tiny_run(tmp_path, FLAGS.format(trained) + " --skip-train --train-iters 9 --lr-decay-iters 6"))
    assert (printed.status, printed.samples) == (0, {})
    assert (tmp_path / "finished.json").read_text() == "{}"


def test_a_signal_ends_it_at_once(trained: Path, tmp_path: Path) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        with patch("megatron.training.loop.evaluate_and_log", lambda *arguments: signal.raise_signal(signal.SIGTERM)):
            start(tiny_run(tmp_path, FLAGS.format(trained) + " --skip-train"))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == [signal.SIGTERM] * 2  # as many as there are splits: nobody else listened


@pytest.mark.parametrize("own", [True, False])
def test_what_is_loaded_is_what_a_run_would_begin_with(tmp_path: Path, own: bool) -> None:
    save = tmp_path / "save"
    if own:
        (save / "iter_0000003").mkdir(parents=True)
    options = CheckpointConfig(save=str(save), load="other", resume_mode="new-schedule", ckpt_step=4)
    read = read_only_options(options)
    assert read.save is None
    assert (read.load, read.resume_mode, read.ckpt_step) == (
        (str(save), "exact", None) if own else ("other", "new-schedule", 4)
    )
    asked = read_only_options(CheckpointConfig(save=str(save), ckpt_step=4))
    assert (asked.load, asked.ckpt_step) == (str(save), 4)
