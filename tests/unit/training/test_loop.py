"""The training loop in one process, controlled by flags, signals and non-finite numbers."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from megatron.config.errors import Problem, UserError
from megatron.data.indexed_writer import IndexedDatasetWriter
from megatron.data.loader import BatchArrays, MaskBuilder
from megatron.training.build import build_trainer
from megatron.training.callbacks.health import HealthMonitor
from megatron.training.failure_report import NonFiniteError
from megatron.training.loggers.run_folder import read_history
from megatron.training.loggers.run_logger import RunLogger
from megatron.training.loop import StopRequest, build_callbacks, train
from megatron.training.step import evaluate
from megatron.training.trainer import Trainer
from megatron.training.trainer_state import run_state
from tests.runs import before_step, column, differences, kill, records, saved_steps, spoil_step, start, steps, tiny_run


def trained(folder: Path, flags: str = "") -> tuple[int, Trainer]:
    """Return the exit status and the trainer."""
    config = tiny_run(folder, flags)
    trainer = build_trainer(config, 0, 1)
    stop = StopRequest(trainer.mesh.world, trainer.device)
    try:
        with RunLogger(config, world_size=1, device=trainer.device) as log:
            return train(trainer, None, log, stop, build_callbacks(trainer, log, stop)), trainer
    finally:
        stop.restore()


def test_a_run_takes_every_step_on_new_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    original = Trainer.next_batches

    def next_batches(trainer: Trainer) -> Any:
        batches = original(trainer)
        seen.extend(i for batch in batches for i in batch.sample_ids.tolist())
        return batches

    monkeypatch.setattr(Trainer, "next_batches", next_batches)
    status, trainer = trained(tmp_path)
    assert (status, trainer.iteration, trainer.consumed_samples) == (0, 6, 24)
    assert seen == list(range(24))
    assert column(tmp_path, "iteration") == [1, 2, 3, 4, 5, 6]
    assert column(tmp_path, "consumed-samples") == [4, 8, 12, 16, 20, 24]
    assert records(tmp_path, "lm loss validation") == []
    assert records(tmp_path, "text") == []


def test_every_log_line_covers_the_steps_since_the_last(tmp_path: Path) -> None:
    trained(tmp_path / "each")
    trained(tmp_path / "some", "--log-interval 4")
    losses = column(tmp_path / "each", "lm loss")
    assert column(tmp_path / "some", "iteration") == [4, 6]
    assert column(tmp_path / "some", "lm loss") == pytest.approx([sum(losses[:4]) / 4, sum(losses[4:]) / 2])


def test_learning_rate_and_weight_decay_follow_the_samples(tmp_path: Path) -> None:
    decay = "--weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 0.6"
    trained(tmp_path, f"--lr-warmup-iters 2 --lr-decay-style linear {decay}")
    assert column(tmp_path, "learning-rate") == pytest.approx([0.0, 0.005, 0.01, 0.0075, 0.005, 0.0025])
    assert column(tmp_path, "weight-decay") == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4, 0.5])


def test_evaluation_at_its_interval_and_at_the_end(tmp_path: Path) -> None:
    _, trainer = trained(tmp_path, "--eval-interval 4 --eval-iters 2")
    assert column(tmp_path, "iteration", "lm loss validation") == [4, 6]
    assert column(tmp_path, "consumed-samples", "lm loss validation") == [16, 24]
    first, last = column(tmp_path, "lm loss validation", "lm loss validation")
    assert last == evaluate(trainer).item() != first


def test_evaluation_only_at_the_end(tmp_path: Path) -> None:
    trained(tmp_path, "--eval-iters 1")
    assert column(tmp_path, "iteration", "lm loss validation") == [6]


def test_layers_are_reported_at_their_interval_and_change_nothing(tmp_path: Path) -> None:
    trained(tmp_path / "plain")
    trained(tmp_path / "watched", "--log-health-interval 2")
    assert column(tmp_path / "watched", "iteration", "params-norm") == [2, 4, 6]
    norms = column(tmp_path / "watched", "health/grad-norm/total", "params-norm")
    assert norms == pytest.approx(column(tmp_path / "watched", "grad-norm")[1::2], rel=1e-6)
    assert column(tmp_path / "watched", "lm loss") == column(tmp_path / "plain", "lm loss")
    assert (tmp_path / "watched" / "health.png").exists()
    assert not (tmp_path / "plain" / "health.png").exists()


def test_looking_at_layers_and_copies_does_not_count_as_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both take a thousand seconds of the window's clock here."""
    late, now, report = [0.0], time.perf_counter, HealthMonitor.report

    def slow(result: Any) -> Any:
        late[0] += 1000.0
        return result

    monkeypatch.setattr("megatron.training.metrics.time.perf_counter", lambda: now() + late[0])
    monkeypatch.setattr(HealthMonitor, "report", lambda vitals, metrics: slow(report(vitals, metrics)))
    monkeypatch.setattr("megatron.training.callbacks.health.check_weight_copies", slow)
    trained(tmp_path, "--log-health-interval 2 --check-weight-hash-across-dp-replicas-interval 3")
    assert late[0] == 5 * 1000.0
    assert max(column(tmp_path, "iteration-time")) < 500.0


def test_weights_that_differ_are_not_saved(tmp_path: Path) -> None:
    flags = f"--save {tmp_path}/saved --save-interval 1 --check-weight-hash-across-dp-replicas-interval 3"
    differ = UserError([Problem("E707", "copies of the weights differ")])
    with (
        patch("megatron.training.callbacks.health.check_weight_copies", side_effect=differ),
        pytest.raises(UserError, match="E707"),
    ):
        trained(tmp_path, flags)
    assert saved_steps(tmp_path / "saved") == [1, 2]


def evaluated(folder: Path) -> list[int]:
    """Return the steps after which there was an evaluation."""
    return column(folder, "iteration", "lm loss validation")


EVALUATING = "--save {}/saved --eval-interval 2 --eval-iters 1"


@pytest.mark.parametrize("step", [2, 6])
def test_a_run_killed_while_it_evaluates_evaluates_again(tmp_path: Path, step: int) -> None:
    def killed(trainer: Trainer, split: str) -> Any:
        return kill(trainer) if trainer.iteration == step else evaluate(trainer, split)

    config = tiny_run(tmp_path, EVALUATING.format(tmp_path) + " --save-interval 1")
    assert start(config, patch("megatron.training.loop.evaluate", killed)).status is None
    assert evaluated(tmp_path) == [*range(2, step, 2)]
    assert saved_steps(tmp_path / "saved") == [*range(1, step)]  # not a step whose evaluation is lost
    assert start(config).status == 0
    assert evaluated(tmp_path) == [2, 4, 6]
    assert start(config).samples == {}
    assert evaluated(tmp_path) == [2, 4, 6]


def test_what_a_signal_prevents_is_made_up_for(tmp_path: Path) -> None:
    config = tiny_run(tmp_path, EVALUATING.format(tmp_path))
    assert start(config, before_step(4, lambda trainer: signal.raise_signal(signal.SIGTERM))).status == 143
    assert evaluated(tmp_path) == [2]
    assert start(config).status == 0
    assert evaluated(tmp_path) == [2, 4, 6]
    start(tiny_run(tmp_path / "whole", EVALUATING.format(tmp_path / "whole")))
    assert steps(tmp_path) == steps(tmp_path / "whole")
    assert differences(tmp_path / "saved/iter_0000006", tmp_path / "whole/saved/iter_0000006") == []


def test_a_signal_in_the_last_step_does_not_cost_the_last_evaluation(tmp_path: Path) -> None:
    config = tiny_run(tmp_path, EVALUATING.format(tmp_path))
    assert start(config, before_step(6, lambda trainer: signal.raise_signal(signal.SIGTERM))).status == 0
    assert evaluated(tmp_path) == [2, 4, 6]


def test_what_was_evaluated_at_an_exit_is_not_evaluated_again(tmp_path: Path) -> None:
    assert start(tiny_run(tmp_path, f"{EVALUATING.format(tmp_path)} --exit-interval 4")).status == 0
    assert start(tiny_run(tmp_path, EVALUATING.format(tmp_path))).status == 0
    assert evaluated(tmp_path) == [2, 4, 6]


# --- several sets ---


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


@pytest.mark.parametrize("split", ["valid:wiki", "valid:code", "test"])
def test_a_run_killed_between_two_sets_repeats_the_step_and_no_more(tmp_path: Path, corpora: str, split: str) -> None:
    """A step that no checkpoint holds is lost, and so is the evaluation after it."""

    def killed(trainer: Trainer, name: str) -> Any:
        return kill(trainer) if (trainer.iteration, name) == (6, split) else evaluate(trainer, name)

    config = tiny_run(tmp_path, f"{corpora} --save {tmp_path}/saved --save-interval 1")
    assert start(config, patch("megatron.training.loop.evaluate", killed)).status is None
    before = WHOLE[: 4 + ["valid:wiki", "valid:code", "test"].index(split)]
    assert evaluations(tmp_path) == before
    again = start(config)
    assert (again.status, list(again.samples)) == (0, [6])
    assert evaluations(tmp_path) == [*before, *WHOLE[4:]]
    assert start(config).status == 0
    assert evaluations(tmp_path) == [*before, *WHOLE[4:]]


def test_a_run_stopped_before_evaluating_makes_up_for_every_set(tmp_path: Path, corpora: str) -> None:
    """Also if it is killed between two evaluations: all of an unsaved step are repeated."""
    config = tiny_run(tmp_path, f"{corpora} --save {tmp_path}/saved")
    start(config, before_step(4, lambda trainer: signal.raise_signal(signal.SIGTERM)))
    assert evaluations(tmp_path) == BOTH[:2]

    def killed(trainer: Trainer, name: str) -> Any:
        return kill(trainer) if name == "valid:code" else evaluate(trainer, name)

    start(config, patch("megatron.training.loop.evaluate", killed))
    start(config)
    assert evaluations(tmp_path) == [*BOTH[:3], *WHOLE[2:]]
    history = read_history(tmp_path / "metrics.jsonl")
    assert [(point.name.split()[-1], point.iteration) for point in history.evaluations] == WHOLE


def test_test_data_are_read_at_the_end_of_each_run(tmp_path: Path, corpora: str) -> None:
    """Not if it only stops early."""
    saving = f"{corpora} --save {tmp_path}/saved"
    start(tiny_run(tmp_path, f"{saving} --exit-interval 4"))
    assert column(tmp_path, "iteration", "lm loss test") == []
    start(tiny_run(tmp_path, saving))
    start(tiny_run(tmp_path, f"{saving} --train-iters 8 --load {tmp_path}/saved --resume-mode new-schedule"))
    assert column(tmp_path, "iteration", "lm loss test") == [6, 8]


def test_a_set_that_is_new_is_evaluated(tmp_path: Path, corpora: str) -> None:
    """After the last step of a finished run."""
    one = corpora.replace("--multiple-validation-sets", "")
    assert start(tiny_run(tmp_path, f"{one} --save {tmp_path}/saved")).status == 0
    printed = start(tiny_run(tmp_path, f"{corpora} --save {tmp_path}/saved"))
    assert (printed.status, printed.samples) == (0, {})
    assert evaluations(tmp_path)[-3:] == [("test", 6), ("wiki", 6), ("code", 6)]


def test_a_checkpoint_of_one_evaluation_only_is_gone_on_from(tmp_path: Path) -> None:
    """Old checkpoints have one number for the validation data, and none for test data."""

    def older(trainer: Trainer) -> dict[str, Any]:
        now = run_state(trainer)
        del now["data"]["stretches"]["test"], now["data"]["fingerprints"]["test"]
        return now | {"evaluated": now["evaluated"]["valid"]}

    config = tiny_run(tmp_path, EVALUATING.format(tmp_path))
    stopping = tiny_run(tmp_path, f"{EVALUATING.format(tmp_path)} --exit-interval 4")
    start(stopping, patch("megatron.training.checkpointer.run_state", older))
    assert start(config).status == 0
    assert evaluations(tmp_path) == [("validation", 2), ("validation", 4), ("validation", 6), ("test", 6)]
    start(tiny_run(tmp_path / "whole", EVALUATING.format(tmp_path / "whole")))
    assert differences(tmp_path / "saved/iter_0000006", tmp_path / "whole/saved/iter_0000006") == []


def test_where_no_label_counts_there_is_no_loss_and_no_harm(tmp_path: Path) -> None:
    def masked(masks: MaskBuilder, tokens: Any, labels: Any) -> BatchArrays:
        return BatchArrays(tokens, labels, np.zeros(tokens.shape, dtype=np.float32), None, None)

    with patch.object(MaskBuilder, "build", masked):
        status, trainer = trained(tmp_path, "--eval-iters 1")
    assert status == 0
    assert column(tmp_path, "lm loss") == [0.0] * 6
    assert column(tmp_path, "grad-norm") == [0.0] * 6
    assert column(tmp_path, "lm loss validation", "lm loss validation") == [None]
    assert all(p.isfinite().all() for p in trainer.chunks[0].parameters())


def test_evaluation_changes_nothing(tmp_path: Path) -> None:
    trained(tmp_path / "without")
    trained(tmp_path / "with", "--eval-interval 1 --eval-iters 2")
    assert column(tmp_path / "with", "lm loss") == column(tmp_path / "without", "lm loss")


def test_exit_interval(tmp_path: Path) -> None:
    status, trainer = trained(tmp_path, "--exit-interval 4 --log-interval 3")
    assert (status, trainer.iteration) == (0, 4)
    assert column(tmp_path, "iteration") == [3, 4]
    assert column(tmp_path, "text", "text") == ["stopped by --exit-interval 4 after step 4 of 6"]


def test_an_exit_at_the_end_is_no_stop(tmp_path: Path) -> None:
    status, trainer = trained(tmp_path, "--exit-interval 6")
    assert (status, trainer.iteration) == (0, 6)
    assert records(tmp_path, "text") == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_after_its_step(tmp_path: Path, number: signal.Signals) -> None:
    with before_step(2, lambda trainer: signal.raise_signal(number)):
        status, trainer = trained(tmp_path, "--log-interval 5 --eval-interval 1 --eval-iters 1")
    assert (status, trainer.iteration) == (128 + number, 2)
    assert column(tmp_path, "iteration") == [2]
    assert column(tmp_path, "iteration", "lm loss validation") == [1]  # not another one while somebody waits
    assert column(tmp_path, "text", "text") == [f"stopped by signal {number} ({number.name}) after step 2 of 6"]


def test_a_signal_in_the_last_step_comes_too_late(tmp_path: Path) -> None:
    with before_step(6, lambda trainer: signal.raise_signal(signal.SIGTERM)):
        status, trainer = trained(tmp_path)
    assert (status, trainer.iteration) == (0, 6)


def test_a_bad_step_stops_the_run(tmp_path: Path) -> None:
    sentence = r"step 3 is not finite; first on rank 0: output of layers\.0, micro-batch 0, samples \[8\]$"
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


def test_an_overflow_that_a_smaller_loss_scale_can_cure_does_not_stop_the_run(tmp_path: Path) -> None:
    status, _ = trained(tmp_path, "--fp16 --initial-loss-scale 1e12 --hysteresis 1 --log-interval 6")
    (skipped,) = column(tmp_path, "skipped-iterations")
    assert status == 0
    assert skipped[0] == 1


def test_an_overflow_at_a_constant_loss_scale_does(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match="first on rank 0: gradient of "):
        trained(tmp_path, "--fp16 --loss-scale 1e12")


def test_a_ramp_and_a_last_batch_that_is_not_full(tmp_path: Path) -> None:
    ramp = "--rampup-batch-size 2 2 8 --global-batch-size 6"
    status, trainer = trained(tmp_path, f"{ramp} --train-iters null --train-samples 27")
    assert (status, trainer.iteration, trainer.consumed_samples) == (0, 6, 26)
    assert column(tmp_path, "batch-size") == [2, 2, 4, 6, 6, 6]
    assert column(tmp_path, "consumed-samples") == [2, 4, 8, 14, 20, 26]


SAVING = "--save {}/saved --save-interval 5"
ENDS = {
    signal.SIGTERM: (143, "signal 15 (SIGTERM)"),
    signal.SIGINT: (130, "signal 2 (SIGINT)"),
    signal.SIGUSR1: (138, "signal 10 (SIGUSR1)"),
}


def check_going_on(tmp_path: Path, step: int) -> None:
    """A run stopped after ``step`` has saved, and resumed it ends like one that was not stopped."""
    stopped, whole = tmp_path / "stopped", tmp_path / "whole"
    assert saved_steps(stopped / "saved") == [step]
    again = start(tiny_run(stopped, SAVING.format(stopped)))
    assert (again.status, sorted(again.samples)) == (0, [*range(step + 1, 7)])
    start(tiny_run(whole, SAVING.format(whole)))
    assert steps(stopped) == steps(whole)
    assert differences(stopped / "saved/iter_0000006", whole / "saved/iter_0000006") == []


@pytest.mark.parametrize("number", ENDS)
def test_a_signal_saves(tmp_path: Path, number: signal.Signals) -> None:
    status, why = ENDS[number]
    stopped = tmp_path / "stopped"
    printed = start(
        tiny_run(stopped, SAVING.format(stopped)), before_step(3, lambda trainer: signal.raise_signal(number))
    )
    assert (printed.status, printed.err) == (status, "")
    assert f"stopped by {why} after step 3 of 6" in printed.out
    check_going_on(tmp_path, 3)


def test_the_clock_saves(tmp_path: Path) -> None:
    stopped = tmp_path / "stopped"
    config = tiny_run(stopped, f"{SAVING.format(stopped)} --exit-duration-in-mins 90.5")
    late = [time.monotonic()]
    clock = SimpleNamespace(monotonic=lambda: late[-1])
    with patch("megatron.training.loop.time", clock):
        printed = start(config, before_step(4, lambda trainer: late.append(time.monotonic() + 90.5 * 60)))
    assert (printed.status, printed.err) == (124, "")
    assert "stopped by --exit-duration-in-mins after step 4 of 6" in printed.out
    check_going_on(tmp_path, 4)


def test_an_exit_interval_saves(tmp_path: Path) -> None:
    stopped = tmp_path / "stopped"
    printed = start(tiny_run(stopped, f"{SAVING.format(stopped)} --exit-interval 2"))
    assert (printed.status, printed.err) == (0, "")
    check_going_on(tmp_path, 2)


def test_the_last_step_is_saved_whatever_the_interval(tmp_path: Path) -> None:
    start(tiny_run(tmp_path, SAVING.format(tmp_path)))
    assert saved_steps(tmp_path / "saved") == [5, 6]
