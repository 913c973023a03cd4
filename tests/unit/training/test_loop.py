"""The training loop in one process: steps, evaluations, and ends by flags, signals, files and non-finite numbers."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.checkpoint.lease import acquire_lease
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.errors import Problem, UserError
from megatron.data.indexed_writer import IndexedDatasetWriter
from megatron.data.loader import BatchArrays, MaskBuilder
from megatron.distributed.comm import Group
from megatron.optimizer.lr_scheduler import Rates
from megatron.training import features
from megatron.training import stop as stop_request
from megatron.training.build import build_trainer
from megatron.training.callbacks.health import HealthReport
from megatron.training.checkpointer import Checkpointer
from megatron.training.components.nonfinite import NonFiniteCheck
from megatron.training.control import NO_REQUEST
from megatron.training.failure_report import NonFiniteError
from megatron.training.features import build_callbacks
from megatron.training.loggers.run_folder import read_history
from megatron.training.loggers.run_logger import RunLogger
from megatron.training.loop import train
from megatron.training.metrics import Goodput, MetricsWindow
from megatron.training.resume_source import read_only_options
from megatron.training.step import evaluate, train_step
from megatron.training.stop import (
    SIGNALS,
    STOP_FILE_FOUND,
    TIME_LIMIT,
    StopRequest,
    exit_status,
)
from megatron.training.trainer import Trainer
from tests.kit.runs import (
    before_step,
    column,
    contents,
    differences,
    kill,
    records,
    saved_steps,
    spoil_step,
    start,
    steps,
    tiny_run,
)
from tests.kit.solo import random_batch
from tests.unit.training.test_cuda_graphs import state_of

CPU = torch.device("cpu")


def trained(folder: Path, flags: str = "") -> tuple[int, Trainer]:
    """Return the exit status and the trainer."""
    config = tiny_run(folder, flags)
    trainer = build_trainer(config, 0, 1)
    stop = StopRequest(trainer.mesh.world, trainer.device)
    try:
        with RunLogger(config, world_size=1, device=trainer.device) as log:
            checkpointer = Checkpointer(trainer)
            trainer.components += build_callbacks(trainer, log, stop, checkpointer)
            return train(trainer, None, log, stop, checkpointer, Goodput()), trainer
    finally:
        stop.restore()


def test_a_run_takes_every_step_on_new_samples(tmp_path: Path) -> None:
    printed = start(tiny_run(tmp_path, "--log-interval 4 --check-weight-hash-across-dp-replicas-interval 3"))
    assert printed.status == 0
    assert [number for step in range(1, 7) for number, _ in printed.samples[step]] == [*range(24)]
    assert column(tmp_path, "iteration") == [4, 6]
    assert column(tmp_path, "consumed-samples") == [16, 24]
    assert records(tmp_path, "lm loss validation") == []
    trained(tmp_path / "each")
    losses = column(tmp_path / "each", "lm loss")
    assert column(tmp_path, "lm loss") == pytest.approx([sum(losses[:4]) / 4, sum(losses[4:]) / 2])


def test_learning_rate_and_weight_decay_follow_the_samples(tmp_path: Path) -> None:
    decay = "--weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 0.6"
    trained(tmp_path, f"--lr-warmup-iters 2 --lr-decay-style linear {decay}")
    assert column(tmp_path, "learning-rate") == pytest.approx([0.0, 0.005, 0.01, 0.0075, 0.005, 0.0025])
    assert column(tmp_path, "weight-decay") == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4, 0.5])


def test_a_ramp_and_a_last_batch_that_is_not_full(tmp_path: Path) -> None:
    ramp = "--rampup-batch-size 2 2 8 --global-batch-size 6"
    status, trainer = trained(tmp_path, f"{ramp} --train-iters null --train-samples 27")
    assert (status, trainer.iteration, trainer.consumed_samples) == (0, 6, 26)
    assert column(tmp_path, "batch-size") == [2, 2, 4, 6, 6, 6]
    assert column(tmp_path, "consumed-samples") == [2, 4, 8, 14, 20, 26]


def test_batches_without_labels_give_zero_loss_and_finite_weights(tmp_path: Path) -> None:
    def masked(masks: MaskBuilder, tokens: Any, labels: Any, *_: Any) -> BatchArrays:
        return BatchArrays(tokens, labels, np.zeros(tokens.shape, dtype=np.float32), None, None)

    with patch.object(MaskBuilder, "build", masked):
        status, trainer = trained(tmp_path, "--eval-iters 1")
    assert status == 0
    assert column(tmp_path, "lm loss") == column(tmp_path, "grad-norm") == [0.0] * 6
    assert column(tmp_path, "lm loss validation", "lm loss validation") == [None]
    assert all(p.isfinite().all() for p in trainer.chunks[0].parameters())


# ---- Health


def test_health_reports_do_not_change_the_run_and_do_not_count_as_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A report and a check of copies take a thousand seconds of the window's clock here."""
    trained(tmp_path / "plain")
    late, now, report = [0.0], time.perf_counter, HealthReport.report

    def slow(result: Any) -> Any:
        late[0] += 1000.0
        return result

    monkeypatch.setattr("megatron.training.metrics.time.perf_counter", lambda: now() + late[0])
    monkeypatch.setattr(HealthReport, "report", lambda vitals, metrics: slow(report(vitals, metrics)))
    monkeypatch.setattr("megatron.training.callbacks.health.check_weight_copies", slow)
    trained(tmp_path, "--log-health-interval 2 --check-weight-hash-across-dp-replicas-interval 3")
    assert late[0] == 5 * 1000.0
    assert max(column(tmp_path, "iteration-time")) < 500.0
    assert column(tmp_path, "iteration", "params-norm") == [2, 4, 6]
    norms = column(tmp_path, "health/grad-norm/total", "params-norm")
    assert norms == pytest.approx(column(tmp_path, "grad-norm")[1::2], rel=1e-6)
    assert column(tmp_path, "lm loss") == column(tmp_path / "plain", "lm loss")


def test_weights_that_differ_are_not_saved(tmp_path: Path) -> None:
    flags = f"--save {tmp_path}/saved --save-interval 1 --check-weight-hash-across-dp-replicas-interval 3"
    differ = UserError([Problem("E707", "copies of the weights differ")])
    failing = patch("megatron.training.callbacks.health.check_weight_copies", side_effect=differ)
    printed = start(tiny_run(tmp_path, flags), failing)
    assert (printed.status, "E707" in printed.err) == (1, True)
    assert saved_steps(tmp_path / "saved") == [1, 2]


def test_a_bad_step_stops_the_run(tmp_path: Path) -> None:
    sentence = r"step 3 is not finite; first on rank 0: output of layers\.0, micro-batch 0, samples \[8\]"
    with before_step(3, spoil_step), pytest.raises(NonFiniteError, match=sentence):
        trained(tmp_path, "--log-interval 5")
    assert column(tmp_path, "iteration") == [2]  # the good steps are logged before the run ends
    assert [record["iteration"] for record in records(tmp_path, "event") if record["event"] == "error"] == [2]


def test_a_bad_step_is_skipped_on_request(tmp_path: Path) -> None:
    with before_step(3, spoil_step):
        status, trainer = trained(tmp_path, "--on-nonfinite skip --log-interval 2")
    assert (status, trainer.iteration, trainer.consumed_samples) == (0, 6, 24)
    assert column(tmp_path, "skipped-iterations") == [[], [3], []]
    assert None not in column(tmp_path, "lm loss")
    assert all(p.isfinite().all() for p in trainer.chunks[0].parameters())


def test_an_overflow_stops_the_run_only_if_no_smaller_loss_scale_can_cure_it(tmp_path: Path) -> None:
    status, _ = trained(tmp_path, "--fp16 --initial-loss-scale 1e12 --hysteresis 1 --log-interval 6")
    (skipped,) = column(tmp_path, "skipped-iterations")
    assert (status, skipped[0]) == (0, 1)
    with pytest.raises(NonFiniteError, match="first on rank 0: gradient of "):
        trained(tmp_path, "--fp16 --loss-scale 1e12")


@pytest.mark.parametrize(
    ("flags", "ends"),
    [("", True), ("--fp16 --initial-loss-scale 16 --min-loss-scale 16", True)]
    + [("--fp16 --initial-loss-scale 16 --hysteresis 1", False), ("--skip-spikes 3 --ema-decay 0.9", True)],
)
def test_a_flag_read_one_step_late_ends_the_run_with_the_same_weights_and_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, ends: bool
) -> None:
    """As on GPUs: the step after the bad one is taken, and changes nothing."""
    results = []
    for late in (False, True):
        trainers: list[Trainer] = []
        taken = []

        def check(trainer: Trainer, late: bool = late, trainers: list[Trainer] = trainers) -> Any:
            def spoil(block: torch.nn.Module, inputs: Any, output: Any) -> Any:
                step, (residual, losses) = inputs[1].batch.step, output
                taken.append(step)  # noqa: B023
                return (residual._replace(x=residual.x * torch.nan), losses) if step == 2 else None

            next(iter(trainer.chunks[0].layers.values())).register_forward_hook(spoil)
            trainers.append(trainer)
            return NonFiniteCheck(trainer, late)

        monkeypatch.setattr(features, "NonFiniteCheck", check)
        sentence = ""
        try:
            trained(tmp_path / str(late), f"--log-interval 100 {flags}")
        except NonFiniteError as error:
            sentence = str(error)
        (trainer,) = trainers
        scaler_tensors = sum(map(torch.is_tensor, vars(trainer.scaler).values()))
        kept = state_of(trainer)[: -len(trainer.buckets.buckets) - scaler_tensors]
        results.append((sentence, kept, trainer.scaler.scale))
        assert (3 in taken) is (late or not ends)
    (prompt, before, scale), (late_sentence, after, late_scale) = results
    assert prompt == late_sentence
    assert prompt.startswith("the loss or gradient of step 3 is not finite; first on rank 0: output of") is ends
    assert scale == late_scale
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_late_flag_is_read_before_the_step_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "NonFiniteCheck", lambda trainer: NonFiniteCheck(trainer, late=True))
    for number, flags in enumerate(("--log-interval 3", "--eval-interval 3 --eval-iters 1", "--save-interval 3")):
        folder = tmp_path / str(number)

        def spoil(trainer: Trainer) -> None:
            for parameter in trainer.chunks[0].parameters():
                parameter.data.fill_(torch.nan)

        flags = f"--log-interval 100 {flags} --save {folder}/saved"
        further = list[Trainer]()
        with before_step(3, spoil), before_step(4, further.append), pytest.raises(NonFiniteError, match="step 3 is"):
            trained(folder, flags)
        assert further == []
        assert saved_steps(folder / "saved") == []
        assert column(folder, "iteration", "lm loss validation") == []


# ---- Evaluations


def test_evaluation_at_its_interval_and_at_the_end(tmp_path: Path) -> None:
    _, trainer = trained(tmp_path, "--eval-interval 4 --eval-iters 2")
    assert column(tmp_path, "iteration", "lm loss validation") == [4, 6]
    assert column(tmp_path, "consumed-samples", "lm loss validation") == [16, 24]
    first, last = column(tmp_path, "lm loss validation", "lm loss validation")
    assert last == evaluate(trainer).item() != first
    trained(tmp_path / "plain", "--eval-iters 1")
    assert column(tmp_path / "plain", "iteration", "lm loss validation") == [6]
    assert column(tmp_path, "lm loss") == column(tmp_path / "plain", "lm loss"), "an evaluation changes nothing"


EVALUATING = "--save {}/saved --eval-interval 2 --eval-iters 1"


def evaluated(folder: Path) -> list[int]:
    """Return the steps after which there was an evaluation."""
    return column(folder, "iteration", "lm loss validation")


def test_an_evaluation_that_a_signal_prevents_is_made_up_for(tmp_path: Path) -> None:
    config = tiny_run(tmp_path, EVALUATING.format(tmp_path))
    assert start(config, before_step(4, lambda trainer: signal.raise_signal(signal.SIGTERM))).status == 143
    assert evaluated(tmp_path) == [2]
    # a signal in the last step comes too late
    assert start(config, before_step(6, lambda trainer: signal.raise_signal(signal.SIGTERM))).status == 0
    assert evaluated(tmp_path) == [2, 4, 6]
    start(tiny_run(tmp_path / "whole", EVALUATING.format(tmp_path / "whole")))
    assert steps(tmp_path) == steps(tmp_path / "whole")
    assert differences(tmp_path / "saved/iter_0000006", tmp_path / "whole/saved/iter_0000006") == []


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Flags of a run that trains on one dataset, evaluates on two others, and tests on the first."""
    folder, random = tmp_path_factory.mktemp("corpora"), np.random.default_rng(0)
    for number, name in enumerate(("train", "wiki", "code")):
        with IndexedDatasetWriter(folder / name, np.uint16) as writer:
            for _ in range(30):
                writer.add_document(random.integers(10 * number, 10 * number + 10, 20))
    paths = f"--train-data-path {folder}/train --valid-data-path {folder}/wiki {folder}/code"
    several = f"{paths} --test-data-path {folder}/train --multiple-validation-sets"
    return f"--set data.mock_data=false {several} --eval-interval 2 --eval-iters 1"


def evaluations(folder: Path) -> list[tuple[str, int]]:
    """Return split and step of every evaluation, in order."""
    found = []
    for record in records(folder, "consumed-samples"):
        kinds = [kind for kind in ("validation", "test") if f"lm loss {kind}" in record]
        found += [(record.get("validation-set", kind), record["iteration"]) for kind in kinds]
    return found


BOTH = [("wiki", 2), ("code", 2), ("wiki", 4), ("code", 4), ("wiki", 6), ("code", 6)]
WHOLE = [*BOTH, ("test", 6)]


def test_every_validation_set_has_its_own_loss(tmp_path: Path, corpora: str) -> None:
    _, trainer = trained(tmp_path, corpora)
    assert evaluations(tmp_path) == WHOLE
    losses = column(tmp_path, "lm loss validation", "lm loss validation")[-2:]
    assert losses == [evaluate(trainer, split).item() for split in ("valid:wiki", "valid:code")]
    assert losses[0] != losses[1]
    assert column(tmp_path, "lm loss test", "lm loss test") == [evaluate(trainer, "test").item()]


@pytest.mark.parametrize("split", ["valid:wiki", "test"])
def test_a_run_killed_between_two_sets_repeats_the_step_and_no_more(tmp_path: Path, corpora: str, split: str) -> None:
    """A step that no checkpoint holds is lost, and so is the evaluation after it."""

    def killed(trainer: Trainer, name: str, *more: Any) -> Any:
        return kill(trainer) if (trainer.iteration, name) == (6, split) else evaluate(trainer, name, *more)

    config = tiny_run(tmp_path, f"{corpora} --save {tmp_path}/saved --save-interval 1")
    assert start(config, patch("megatron.training.loop.evaluate", killed)).status is None
    before = WHOLE[: 4 + ["valid:wiki", "valid:code", "test"].index(split)]
    assert evaluations(tmp_path) == before
    assert saved_steps(tmp_path / "saved") == [1, 2, 3, 4, 5]  # not a step whose evaluation is lost
    again = start(config)
    assert (again.status, list(again.samples)) == (0, [6])
    assert start(config).status == 0
    assert evaluations(tmp_path) == [*before, *WHOLE[4:]]


def test_a_run_stopped_before_evaluating_makes_up_for_every_set(tmp_path: Path, corpora: str) -> None:
    """Also if it is killed between two evaluations: all of an unsaved step are repeated."""
    config = tiny_run(tmp_path, f"{corpora} --save {tmp_path}/saved")
    start(config, before_step(4, lambda trainer: signal.raise_signal(signal.SIGTERM)))
    assert evaluations(tmp_path) == BOTH[:2]

    def killed(trainer: Trainer, name: str, *more: Any) -> Any:
        return kill(trainer) if name == "valid:code" else evaluate(trainer, name, *more)

    start(config, patch("megatron.training.loop.evaluate", killed))
    start(config)
    assert evaluations(tmp_path) == [*BOTH[:3], *WHOLE[2:]]
    history = read_history(tmp_path / "metrics.jsonl")
    assert [(point.name.split()[-1], point.iteration) for point in history.evaluations] == WHOLE


def test_test_data_are_read_at_the_end_of_each_run_and_a_new_set_at_once(tmp_path: Path, corpora: str) -> None:
    """Not if it only stops early."""
    one = corpora.replace("--multiple-validation-sets", "") + f" --save {tmp_path}/saved"
    start(tiny_run(tmp_path, f"{one} --exit-interval 4"))
    assert column(tmp_path, "iteration", "lm loss test") == []
    assert start(tiny_run(tmp_path, one)).status == 0
    printed = start(tiny_run(tmp_path, f"{corpora} --save {tmp_path}/saved"))
    assert (printed.status, printed.samples) == (0, {})
    assert evaluations(tmp_path)[-3:] == [("test", 6), ("wiki", 6), ("code", 6)]
    longer = f"--train-iters 8 --load {tmp_path}/saved --resume-mode new-schedule"
    start(tiny_run(tmp_path, f"{one} {longer}"))
    assert column(tmp_path, "iteration", "lm loss test") == [6, 8]


# ---- Evaluating without training


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of six steps, saved and evaluated after the third and the last."""
    folder = tmp_path_factory.mktemp("trained")
    assert start(tiny_run(folder / "run", SKIPPING.format(folder))).status == 0
    return folder


SKIPPING = "--save {0}/saved --save-interval 3 --eval-interval 3 --eval-iters 2"


def test_skip_train_evaluates_as_the_run_did_and_changes_nothing(saved_run: Path, tmp_path: Path) -> None:
    before = contents(saved_run)
    (tmp_path / "finished.json").write_text("{}")
    longer = "--train-iters 9 --lr-decay-iters 6"
    printed = start(tiny_run(tmp_path, SKIPPING.format(saved_run) + f" --skip-train {longer}"))
    assert (printed.status, printed.samples, printed.err) == (0, {}, "")
    assert contents(saved_run) == before
    for kind in ("lm loss validation", "lm loss test"):
        assert column(tmp_path, kind, kind) == column(saved_run / "run", kind, kind)[-1:]
        assert column(tmp_path, "iteration", kind) == [6]
    assert (tmp_path / "finished.json").read_text() == "{}"


@pytest.mark.parametrize(("flags", "step"), [("--ckpt-step 3", 3), ("--resume-mode weights-only --seed 7", 0)])
def test_skip_train_evaluates_the_requested_splits(saved_run: Path, tmp_path: Path, flags: str, step: int) -> None:
    flags = f"--load {saved_run}/saved {flags} --eval-iters 2 --skip-train"
    assert start(tiny_run(tmp_path, flags)).status == 0
    kind = "lm loss validation"
    assert column(tmp_path, "iteration", kind) == [step]
    same = column(tmp_path, kind, kind) == column(saved_run / "run", kind, kind)[:1]
    assert same == (step == 3)  # weights alone see other samples


def test_skip_train_does_not_disturb_a_run_that_is_at_work(saved_run: Path) -> None:
    """Its folder is locked meanwhile, and its curve in the same run folder stays whole."""
    config = tiny_run(saved_run / "run", SKIPPING.format(saved_run) + " --skip-train --log-interval 2")
    curve = read_history(saved_run / "run/metrics.jsonl").train
    with acquire_lease(saved_run / "saved"):
        assert start(config).status == 0
    history = read_history(saved_run / "run/metrics.jsonl")
    assert (history.train, history.restarts) == (curve, [])
    ids = [record["run-id"] for record in records(saved_run / "run", "run-id")]
    assert len(set(ids)) == 2, "an evaluation is no part of the run, in no place that it reports to"


def test_a_signal_ends_skip_train_at_once(saved_run: Path, tmp_path: Path, received: list[int]) -> None:
    signalling = patch(
        "megatron.training.loop.evaluate_and_log", lambda *arguments: signal.raise_signal(signal.SIGTERM)
    )
    start(tiny_run(tmp_path, SKIPPING.format(saved_run) + " --skip-train"), signalling)
    assert received == [signal.SIGTERM] * 2  # one per split: no handler of the run was installed


@pytest.mark.parametrize("own", [True, False])
def test_skip_train_loads_the_weights_of_a_start(tmp_path: Path, own: bool) -> None:
    save = tmp_path / "save"
    if own:
        (save / "iter_0000003").mkdir(parents=True)
    options = CheckpointConfig(save=str(save), load="other", resume_mode="new-schedule", ckpt_step=4)
    read = read_only_options(options)
    expected = (str(save), "exact", None) if own else ("other", "new-schedule", 4)
    assert (read.save, read.load, read.resume_mode, read.ckpt_step) == (None, *expected)
    asked = read_only_options(CheckpointConfig(save=str(save), ckpt_step=4))
    assert (asked.load, asked.ckpt_step) == (str(save), 4)


# ---- Ends


def check_going_on(stopped: Path, whole: Path, step: int) -> None:
    """A run stopped after ``step`` has saved, and resumed it ends like one that was not stopped."""
    assert saved_steps(stopped / "saved") == [step]
    again = start(tiny_run(stopped, SAVING.format(stopped)))
    assert (again.status, sorted(again.samples)) == (0, [*range(step + 1, 7)])
    assert steps(stopped) == steps(whole)
    assert differences(stopped / "saved/iter_0000006", whole / "saved/iter_0000006") == []


SAVING = "--save {}/saved --save-interval 5"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing stopped."""
    folder = tmp_path_factory.mktemp("whole")
    start(tiny_run(folder, SAVING.format(folder)))
    assert saved_steps(folder / "saved") == [5, 6], "the last step is saved whatever the interval"
    return folder


ENDS = {
    signal.SIGTERM: (143, "signal 15 (SIGTERM)"),
    signal.SIGINT: (130, "signal 2 (SIGINT)"),
    signal.SIGUSR1: (138, "signal 10 (SIGUSR1)"),
}


@pytest.mark.parametrize("number", ENDS)
def test_a_signal_saves(tmp_path: Path, whole: Path, number: signal.Signals) -> None:
    status, why = ENDS[number]
    flags = f"{SAVING.format(tmp_path)} --log-interval 5 --eval-interval 1 --eval-iters 1"
    printed = start(tiny_run(tmp_path, flags), before_step(3, lambda trainer: signal.raise_signal(number)))
    assert (printed.status, printed.err) == (status, "")
    assert f"stopped by {why} after step 3 of 6" in printed.out
    assert column(tmp_path, "iteration") == [3]
    assert evaluated(tmp_path) == [1, 2]  # no second evaluation during a wait
    assert saved_steps(tmp_path / "saved") == [3]


def test_the_clock_saves(tmp_path: Path, whole: Path) -> None:
    config = tiny_run(tmp_path, f"{SAVING.format(tmp_path)} --exit-duration-in-mins 90.5")
    late = [time.monotonic()]
    clock = SimpleNamespace(monotonic=lambda: late[-1])
    with patch("megatron.training.stop.time", clock):
        printed = start(config, before_step(4, lambda trainer: late.append(time.monotonic() + 90.5 * 60)))
    assert (printed.status, printed.err) == (124, "")
    assert "stopped by --exit-duration-in-mins after step 4 of 6" in printed.out
    check_going_on(tmp_path, whole, 4)


def test_an_exit_interval_saves(tmp_path: Path, whole: Path) -> None:
    printed = start(tiny_run(tmp_path, f"{SAVING.format(tmp_path)} --exit-interval 2"))
    assert (printed.status, printed.err) == (0, "")
    assert "stopped by --exit-interval 2 after step 2 of 6" in printed.out
    check_going_on(tmp_path, whole, 2)


def test_an_exit_at_the_end_is_no_stop(tmp_path: Path) -> None:
    status, trainer = trained(tmp_path, "--exit-interval 6")
    assert (status, trainer.iteration) == (0, 6)
    assert records(tmp_path, "text") == []


STOPPING = "--save {0}/saved --eval-interval 1 --eval-iters 1 --stop-file {0}/stop"


def test_a_file_ends_a_run_as_a_signal_does_but_for_the_status(tmp_path: Path) -> None:
    config, file = tiny_run(tmp_path / "run", STOPPING.format(tmp_path)), tmp_path / "stop"
    printed = start(config, before_step(3, lambda trainer: file.touch()))
    assert (printed.status, printed.err) == (0, "")
    assert saved_steps(tmp_path / "saved") == [3]
    assert evaluated(tmp_path / "run") == [1, 2]  # no further evaluation
    stops = [record["text"] for record in records(tmp_path / "run", "event") if record["event"] == "stop"]
    assert stops == [f"stopped by --stop-file {file} after step 3 of 6"]
    printed = start(config)  # it is there already
    assert (printed.status, printed.samples, saved_steps(tmp_path / "saved")) == (0, {}, [3])
    assert "before the first step of this start: 3 of 6 are taken, and there is nothing new to save" in printed.out
    file.unlink()
    assert sorted(start(config).samples) == [4, 5, 6]
    file.touch()
    printed = start(config)
    assert "nothing to do" in printed.out
    assert "stopped by" not in printed.out


def test_a_signal_during_the_start_ends_it_before_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = StopRequest.__init__

    def signalled(request: StopRequest, *arguments: object, **named: object) -> None:
        original(request, *arguments, **named)  # type: ignore[arg-type]
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(StopRequest, "__init__", signalled)
    printed = start(tiny_run(tmp_path / "run", STOPPING.format(tmp_path)))
    assert (printed.status, printed.samples, printed.err) == (143, {}, "")
    assert "stopped by signal 15 (SIGTERM) before the first step" in printed.out


def test_time_that_is_up_before_the_first_step_still_leaves_one(tmp_path: Path) -> None:
    """Otherwise a job that is requeued with a limit below the time of a start would never end."""
    flags = STOPPING.format(tmp_path) + " --exit-duration-in-mins 1e-9"
    printed = start(tiny_run(tmp_path / "run", flags))
    assert (printed.status, sorted(printed.samples), saved_steps(tmp_path / "saved")) == (124, [1], [1])


@pytest.fixture
def received() -> Iterator[list[int]]:
    """Signals that reach the previous handlers."""
    numbers: list[int] = []
    previous = {s: signal.signal(s, lambda number, frame: numbers.append(number)) for s in SIGNALS}
    yield numbers
    for number, handler in previous.items():
        signal.signal(number, handler)


def test_a_second_signal_has_its_default_effect_unless_it_is_the_echo_of_a_launcher(
    received: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    request = StopRequest(Group(), torch.device("meta"))  # one rank reads no tensor, which would raise here
    assert (request.poll(), request.requests) == (0, NO_REQUEST)
    for _ in range(3):
        signal.raise_signal(signal.SIGTERM)
    assert (request.poll(), received) == (128 + signal.SIGTERM, [])
    monkeypatch.setattr(stop_request, "ECHO_SECONDS", -1.0)
    signal.raise_signal(signal.SIGINT)
    assert (request.poll(), received) == (128 + signal.SIGTERM, [signal.SIGINT])


@pytest.mark.parametrize(("since", "answer"), [(None, 0), (400.5, 0), (399.9, TIME_LIMIT)])
def test_the_time_limit_counts_from_a_given_start(
    received: list[int], monkeypatch: pytest.MonkeyPatch, since: float | None, answer: int
) -> None:
    monkeypatch.setattr(stop_request, "time", SimpleNamespace(monotonic=lambda: 1000.0))
    request = StopRequest(Group(), CPU, minutes=10.0, since=since)
    assert request.poll() == answer


def test_a_stop_file_comes_last(received: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    now = [0.0]
    monkeypatch.setattr(stop_request, "time", SimpleNamespace(monotonic=lambda: now[-1]))
    request = StopRequest(Group(), CPU, minutes=1.0, file=str(tmp_path))
    codes = [request.poll()]
    now.append(60.0)
    codes.append(request.poll())
    signal.raise_signal(signal.SIGUSR1)
    codes.append(request.poll())
    assert codes == [STOP_FILE_FOUND, TIME_LIMIT, 128 + signal.SIGUSR1]
    assert [exit_status(code) for code in (0, *codes)] == [0, 0, 124, 138]
    request.restore()
    signal.raise_signal(signal.SIGTERM)
    assert received == [signal.SIGTERM]


# ---- The host reads nothing inside a step

LOOKS = ("_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "_unique2", "equal", "unique_consecutive")
"""Operations that synchronise the host; ``item`` and ``bool`` are the first."""


class HostLooks(TorchDispatchMode):
    """Count them while active."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in LOOKS:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--bf16",
        "--fp16",
        "--hidden-dropout 0.1 --attention-dropout 0.1",
        "--recompute-granularity full",
        "--recompute-granularity selective --recompute-modules layernorm activation core_attn",
        "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --bf16",
        "--optimizer lion",
        "--optimizer sgd",
        "--skip-spikes 6 --ema-decay 0.99 --decoupled-lr 1e-4 --lr-factors *norm*=0.5",
        "--window-size 3 --z-loss-coeff 1e-3 --position-embedding-type rope",
    ],
)
def test_the_host_reads_nothing_inside_a_step(flags: str, tmp_path: Path) -> None:
    trainer = build_trainer(tiny_run(tmp_path, flags), 0, 1)
    documents = torch.arange(8).expand(2, 8) // 3
    batches = [random_batch(trainer.config.model, 2, 8, seed=seed, documents=documents) for seed in range(2)]
    rates = Rates(torch.tensor(1e-3), 0.1, torch.tensor(1e-4) if "decoupled" in flags else None)
    window = MetricsWindow(trainer.device, 8)
    train_step(trainer, batches, rates)
    with HostLooks() as looks:
        window.add(train_step(trainer, batches, replace(rates, lr=torch.tensor(2e-3))), 4)
    assert looks.seen == []


def test_a_look_would_be_seen(tmp_path: Path) -> None:
    trainer = build_trainer(tiny_run(tmp_path), 0, 1)
    with HostLooks() as looks:
        metrics = train_step(trainer, trainer.next_batches(), Rates(1e-3, 0.1))
        assert torch.isfinite(metrics.loss)
        metrics.loss.item()
    assert looks.seen == ["is_nonzero", "_local_scalar_dense"] or looks.seen == ["_local_scalar_dense"] * 2
