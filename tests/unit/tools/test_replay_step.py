"""``tools/replay_step.py`` on the command line: what it prints, its exit statuses, and that it only reads."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file

from megatron.checkpoint.format import Manifest
from megatron.checkpoint.rewinds import Rewind, write_rewinds
from megatron.config import plugins
from megatron.config.plugins import register
from megatron.training.callbacks.base import Callback
from megatron.training.component import Component
from megatron.training.incidents import read_incidents
from megatron.training.loggers.base import Metrics
from megatron.training.metrics import StepMetrics
from tests.distributed.test_replay import EMBEDDING, SAVES, STEP, nan_in_embedding
from tests.kit.runs import before_step, contents, start, tiny_run
from tools.lib.replayed_step import ReplayTarget, on_course, read_target
from tools.replay_step import main


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that meets a NaN in step 5, with checkpoints inside."""
    folder = tmp_path_factory.mktemp("replay") / "run"
    outcome = start(tiny_run(folder, f"{SAVES} --save {folder}/saved"), before_step(STEP, nan_in_embedding))
    assert outcome.status == 1
    ((incident, found),) = read_incidents(folder)
    assert (outcome.out + outcome.err).count(found.sentence) == 1
    assert f"take the step again: python tools/replay_step.py {incident}\n" in outcome.err
    assert f"; {incident}\n" in (folder / "incidents.md").read_text()
    return folder


def replayed(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str]:
    """Return the exit status and all that the tool printed."""
    status = main([str(word) for word in argv])
    printed = capsys.readouterr()
    return status, printed.out + printed.err


def test_an_incident_is_equal_and_its_module_and_sample_are_named(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(run)
    [(incident, _)] = read_incidents(run)
    with before_step(STEP, nan_in_embedding):
        status, text = replayed(capsys, incident, "--bisect", "--samples", "--save", tmp_path / "kept")
    assert status == 0, text
    assert "step 4: loss" in text
    assert "gradients equal to the bit" in text
    assert f"first out of line: the output of {EMBEDDING}, not finite" in text
    assert "> sample 16, micro-batch 0 of rank 0" in text
    assert "equal to the bit" in text.splitlines()[-1]
    kept = load_file(tmp_path / "kept" / f"{EMBEDDING}.safetensors")
    output, weight = kept["micro_batch.0.output.0"], kept["parameter.weight"]
    assert output.isnan().any()
    assert weight.isnan().any(1).sum() == 1
    assert contents(run) == before


def test_a_step_that_differs_ends_with_status_1_and_names_the_first_number(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    [(incident, _)] = read_incidents(run)
    status, text = replayed(capsys, incident)
    assert status == 1
    assert "DIFFERS" in text.splitlines()[-1]


def test_a_copied_run_is_found_with_its_checkpoints_and_a_healthy_step_is_equal(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run, tmp_path / "copy")
    moved = run.with_name("away")
    run.rename(moved)
    try:
        status, text = replayed(capsys, tmp_path / "copy", "--step", 4, "--bisect")
    finally:
        moved.rename(run)
    assert status == 0, text
    assert "from iter_0000003" in text
    assert "no module is out of line" in text


def test_a_mean_of_steps_is_taken_again_from_before_its_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert start(tiny_run(tmp_path, f"{SAVES} --save {tmp_path}/saved --exit-interval 4 --log-interval 2")).status == 0
    assert read_target(tmp_path, 4, ()).threads == torch.get_num_threads()
    status, text = replayed(capsys, tmp_path, "--step", 3)
    assert status == 2
    assert "logged steps 3 to 4 by their mean" in text
    assert "--step 4" in text
    assert "in this process" not in text  # nothing was computed
    status, text = replayed(capsys, tmp_path, "--step", 4)
    assert status == 0, text
    assert "steps 3 to 4: loss" in text
    status, text = replayed(capsys, tmp_path, "--step", 6)
    assert status == 2
    assert "nothing to compare step 6 with: its last log line is of step 4\n  fix: --step 4 | --bisect\n" in text


def test_the_debugger_is_entered_before_the_module_in_the_last_step_alone(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for each micro-batch."""
    entered = list[str]()
    monkeypatch.setattr(sys, "breakpointhook", lambda: entered.append("here"))
    status, text = replayed(capsys, run, "--step", 5, "--stop-at", EMBEDDING, "--checkpoint", "none")
    assert status == 0, text  # the NaN step is not in the log
    assert len(entered) == 4


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ((), "is no incident: name a step of the run"),
        (("--step", "0"), "steps are counted from 1"),
        (("--step", "7", "--bisect"), "the run ends with step 6, and has no step 7\n  fix: --step 4\n"),
        (("--step", "5", "--checkpoint", "nowhere"), "no checkpoint before step 5"),
        (("--step", "5", "--set", "data.sed=3"), "there is no option"),
        (("--step", "5", "--set", "elastic.elastic_replicas=2"), "a step of an elastic replica sums"),
        (("--step", "4", "--module", "layers.7.mlp", "--samples"), "the model has no module layers.7.mlp"),
    ],
)
def test_what_cannot_be_taken_again_ends_with_status_2(
    run: Path, capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], words: str
) -> None:
    status, text = replayed(capsys, run, *argv)
    assert status == 2, text
    assert words in text


class Shrink(Callback):
    """Changes weights after each step, by what it has kept from the start."""

    def on_train_start(self) -> None:
        self.factor = 0.9

    def on_step_end(self, metrics: StepMetrics) -> None:
        for x in self.trainer.optimizer.weights.shards.values():
            x.data.mul_(self.factor)

    def on_iteration_end(self) -> None:
        self.factor -= 0.01

    def on_log(self, metrics: Metrics) -> None:
        """Nothing."""


def test_callbacks_of_plugins_act_after_each_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    note = "note: a replay does not call on_log of the callback shrink (--plugin)"
    with patch.dict(plugins._registered, {"callback": {}}):
        register("callback", "shrink")(Shrink)
        assert start(tiny_run(tmp_path)).status == 0
        status, text = replayed(capsys, tmp_path, "--step", 4)
        assert (status, text.count(" equal"), note in text) == (0, 12, False), text
        with patch.object(Shrink, "on_iteration_end", Component.on_iteration_end):
            status, text = replayed(capsys, tmp_path, "--step", 4)
    assert (status, "step 2: loss" in text, note in text) == (1, True, True), text


def test_a_checkpoint_that_a_rewind_has_undone_is_not_the_base_of_later_steps(tmp_path: Path) -> None:
    """Step 6 was saved before the run went back from step 7 to step 4; step 5 afterwards."""
    rewind = Rewind("a", "spike", 7, 3, 16, 28)
    write_rewinds(tmp_path, [rewind])

    def is_base(iteration: int, known: list[Rewind], record: dict[str, Any]) -> bool:
        state = {"iteration": iteration, "rewinds": {"list": [each.to_json() for each in known]}}
        target = ReplayTarget(tmp_path, 8, tiny_run(tmp_path), 1, record)
        return on_course(target, Manifest(tmp_path / f"iter_{iteration:07d}", 1, {}, {}, state, {}))

    after, before = {"rewinds": ["a"]}, {"rewinds": list[str]()}
    assert [is_base(6, [], record) for record in (after, before, {})] == [False, True, False]
    assert [is_base(4, [], record) for record in (after, before, {})] == [True, True, True]
    assert [is_base(5, [rewind], record) for record in (after, before, {})] == [True, False, True]
