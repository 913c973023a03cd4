"""Runs that go back: against runs that are started by hand from the same checkpoint, killed anywhere, and refused."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron.checkpoint.format import Manifest
from megatron.config.checkpoint import CheckpointConfig
from megatron.training import features, rewinds
from megatron.training.components.nonfinite import NonFiniteCheck
from megatron.training.components.spikes import SpikeCheck
from megatron.training.incidents import read_incidents, read_step_record
from megatron.training.loggers.run_folder import read_history
from megatron.training.resume_source import find_resume_source
from megatron.training.start import read_start
from megatron.training.trainer import Trainer
from tests.kit.runs import FLAGS as KIT_FLAGS
from tests.kit.runs import (
    KilledError,
    Outcome,
    before_step,
    column,
    differences,
    kill,
    records,
    saved_steps,
    spoiled_sample,
    start,
    steps,
    tiny_phases,
    tiny_run,
)
from tests.unit.training.test_skipping import corpora
from tools import inspect_dataset
from tools.lib.report_page import PageOptions, report_body
from tools.lib.run_differences import open_samples, read_run
from tools.lib.run_hours import run_hours
from tools.lib.run_record import read_record

FLAGS = "--params-dtype fp64 --train-iters 10 --save-interval 2"
NONFINITE = "--on-nonfinite rewind:3"
SPIKES = "--skip-spikes 12 --spike-window 4 --on-spike rewind:3"


def run_flags(folder: Path, more: str = "") -> str:
    return f"{FLAGS} --save {folder}/saved {more}"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """A run in which nothing happens."""
    return start(tiny_run(tmp_path_factory.mktemp("plain"), FLAGS))


def in_step(outcome: Outcome, step: int) -> tuple[int, ...]:
    """The tokens of a sample of a step, not the first, that no other sample has."""
    every = [tokens for samples in outcome.samples.values() for _, tokens in samples]
    return next(tokens for _, tokens in outcome.samples[step][1:] if every.count(tokens) == 1)


def by_hand(folder: Path, found: Path, step: int, skips: str, flags: str) -> Outcome:
    """Start from a checkpoint of another run, without samples."""
    shutil.copytree(found / f"saved/iter_{step:07d}", folder / f"from/iter_{step:07d}")
    return start(tiny_run(folder, f"{flags} --load {folder}/from --save {folder}/saved --skip-samples {skips}"))


def test_a_run_that_goes_back_equals_one_that_is_started_by_hand(tmp_path: Path, plain: Outcome) -> None:
    """In step 7, NaN: the newest checkpoint of step 4 or earlier, without the samples of steps 5 to 7."""
    folder = tmp_path / "run"
    with spoiled_sample(in_step(plain, 7)):
        outcome = start(tiny_run(folder, run_flags(folder, NONFINITE)))
    assert outcome.status == 0
    went_back = "goes back from step 7 to step 4, and leaves out the samples 16:28"
    assert went_back in outcome.out
    hand = by_hand(tmp_path / "hand", folder, 4, "16:28", FLAGS)
    assert hand.status == 0
    assert {step: hand.samples[step] for step in range(5, 11)} == {s: outcome.samples[s] for s in range(5, 11)}
    assert differences(folder / "saved/iter_0000010", tmp_path / "hand/saved/iter_0000010") == ["rewinds"]
    again = steps(folder)
    assert {step: again[step] for step in range(5, 11)} == steps(tmp_path / "hand")
    (incident,) = [incident for _, incident in read_incidents(folder)]
    assert (incident.kind, incident.step, incident.facts["places"]) == ("nonfinite", 7, [24, 28])
    assert "output of layers.0.input_layernorm, micro-batch 1, samples [25]" in incident.sentence
    check_log_of_a_rewind(folder, outcome.out.partition(went_back)[2].splitlines()[1:])
    start_flags = f"{run_flags(folder)} --check-config".split()
    with patch.dict(os.environ, RANK="0", WORLD_SIZE="1", LOCAL_RANK="0"):
        preview = read_start([*KIT_FLAGS.split(), *start_flags]).parsed
    assert "has gone back 1 time: leaves out the samples 16:28" in preview.notes
    assert preview.config.data.skip_samples == ("16:28",)


def check_log_of_a_rewind(folder: Path, lines: list[str]) -> None:
    """Check that nothing reads like another start: the console after the line on the rewind, journal, files."""
    before_training = lines[: next(i for i, line in enumerate(lines) if " tok | " in line)]
    passed_over = f"passed over {folder}/saved/iter_0000006: "
    assert len(before_training) == 2
    assert before_training[0].startswith(passed_over)
    assert before_training[1].startswith(f"resumed from {folder}/saved/iter_0000004")
    journal = (folder / "incidents.md").read_text()
    assert (journal.count(": started"), journal.count(": ended")) == (1, 1)
    assert [path.name for path in folder.iterdir() if ".1." in path.name] == []
    assert "16:28" in (folder / "config.yaml").read_text()


def test_the_tools_show_what_the_run_has_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Samples of a step by the last time that it was taken, the curve, and the difference from a run by hand."""
    wiki, code = corpora(tmp_path)
    flags = f"--set data.mock_data=false --data-path 0.7 {wiki} 0.3 {code} --split 1"
    plain = start(tiny_run(tmp_path / "plain", f"{FLAGS} {flags}"))
    folder = tmp_path / "run"
    with spoiled_sample(in_step(plain, 7)):
        outcome = start(tiny_run(folder, run_flags(folder, f"{flags} {NONFINITE}")))
    assert outcome.status == 0
    for step in (4, 5, 7, 10):
        capsys.readouterr()
        assert inspect_dataset.main(["--json", "--run", str(folder), "--step", str(step), "--tokens", "99"]) == 0
        found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [facts["sample"] for facts in found] == [number for number, _ in outcome.samples[step]]
        for facts, (_, tokens) in zip(found, outcome.samples[step]):
            assert [i for part in facts["documents"] for i in part["ids"]][:-1] == [*tokens]
            assert facts["checked"]
    history = read_history(folder / "metrics.jsonl")
    assert (history.rewinds, history.restarts) == ([128], [])
    assert [point.iteration for point in history.train] == [*range(1, 11)]
    assert open_samples(read_run(folder)).skipped.to_list() == [16, 28]
    assert "<dd class=detail>1 start</dd>" in report_body(read_record(folder), PageOptions())
    twin = start(tiny_run(tmp_path / "twin", f"{FLAGS} {flags} --skip-samples 16:28"))
    assert twin.samples == outcome.samples
    ((record, _),) = read_incidents(folder)
    spoiled = next(each for each in read_step_record(record)["samples"] if each["sample"] == 25)
    assert spoiled["documents"][0]["source"] in (wiki, code)


@contextmanager
def late_checks() -> Iterator[None]:
    """Read what a step has left one step late, as on GPUs."""
    create = SpikeCheck.create.__func__  # type: ignore[attr-defined]

    def late_spikes(cls: type[SpikeCheck], trainer: Trainer) -> Any:
        if (check := create(cls, trainer)) is not None:
            check.late = True
        return check

    with (
        patch.object(features, "NonFiniteCheck", lambda trainer: NonFiniteCheck(trainer, late=True)),
        patch.object(SpikeCheck, "create", classmethod(late_spikes)),
    ):
        yield


@pytest.mark.parametrize(
    "late", [pytest.param(False, id="at once", marks=pytest.mark.slow), pytest.param(True, id="late")]
)
def test_a_spike_is_undone(tmp_path: Path, plain: Outcome, late: bool) -> None:
    """Step 8, of which the host learns in step 9 if flags are read late; the log lines of both come later."""
    folder, flags = tmp_path / "run", f"{SPIKES} --log-interval 10 --save-interval 5"
    with spoiled_sample(in_step(plain, 8), 1e3), late_checks() if late else ExitStack():
        outcome = start(tiny_run(folder, run_flags(folder, flags)))
    assert outcome.status == 0
    assert "goes back from step 8 to step 5, and leaves out the samples 20:32" in outcome.out
    hand = by_hand(tmp_path / "hand", folder, 5, "20:32", f"{FLAGS} {flags}")
    assert hand.status == 0
    assert differences(folder / "saved/iter_0000010", tmp_path / "hand/saved/iter_0000010") == ["rewinds"]
    (incident,) = [incident for _, incident in read_incidents(folder)]
    assert (incident.kind, incident.step, incident.facts["policy"]) == ("spike", 8, "rewind:3")
    assert incident.facts["grad-norm"] > 100 * incident.facts["mean"]["grad-norm"]


@pytest.mark.parametrize("policy", ["log", "skip"])
def test_other_policies_leave_the_stream(tmp_path: Path, plain: Outcome, policy: str) -> None:
    with spoiled_sample(in_step(plain, 7), 1e3):
        flags = f"--skip-spikes 12 --spike-window 4 --on-spike {policy} --max-incidents 1"
        outcome = start(tiny_run(tmp_path, run_flags(tmp_path, flags)))
    assert outcome.status == 0
    assert outcome.samples == plain.samples
    skipped = [step for record in records(tmp_path) for step in record["skipped-iterations"]]
    assert skipped == ([7] if policy == "skip" else [])
    (folder, incident), *_ = read_incidents(tmp_path)
    assert (incident.kind, incident.step) == ("spike", 7)
    assert bool(read_step_record(folder).get("layers")) is (policy == "skip")
    events = [line for line in records(tmp_path, "event") if line["event"] == "incident"]
    assert [line["iteration"] for line in events][:1] == [6]  # the last step that was counted


def test_the_explanation_of_a_skipped_step_changes_nothing(tmp_path: Path, plain: Outcome) -> None:
    """Steps after it are the same without, also those of experts that are balanced by a bias."""
    moe = (
        "--num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type none --moe-router-score-function sigmoid "
    )
    moe += "--moe-router-enable-expert-bias --ema-decay 0.9 --on-nonfinite skip --train-iters 8"
    for most in (0, 5):
        folder = tmp_path / str(most)
        with spoiled_sample(in_step(plain, 4)):
            assert start(tiny_run(folder, run_flags(folder, f"{moe} --max-incidents {most}"))).status == 0
        assert len([*read_incidents(folder)]) == min(most, 1)
    assert differences(*(tmp_path / f"{most}/saved/iter_0000008" for most in (0, 5))) == []


def test_steps_that_are_skipped_for_ever_are_reported_ever_less(tmp_path: Path) -> None:
    """The page has their number and their time in its head."""

    def spoil(trainer: Trainer) -> None:
        trainer.chunks[0].embedding.register_forward_hook(lambda module, inputs, output: output * torch.nan)

    flags = run_flags(tmp_path, "--on-nonfinite skip --max-incidents 1 --log-interval 2")
    assert start(tiny_run(tmp_path, flags), before_step(4, spoil)).status == 0
    found = [event for event in records(tmp_path, "event") if event["event"] == "incident"]
    texts = [re.findall(r"step (\d+) is not finite(, like \d .*);", event["text"]) for event in found[1:]]
    assert texts == [[(n, f", like {m} before it in this start")] for n, m in (("5", 1), ("6", 2), ("8", 4))]
    assert [step for record in records(tmp_path) for step in record["skipped-iterations"]] == [*range(4, 11)]
    record = read_record(tmp_path)
    head = "<dt>skipped updates</dt><dd>7</dd><dd class=detail>70.0% of the steps</dd>"
    assert head in report_body(record, PageOptions())
    assert "<dd class=detail>last line nan</dd>" in report_body(record, PageOptions())
    seconds = [2 * line["iteration-time"] for line in records(tmp_path)]
    parts, trained = run_hours(record).parts, seconds[0] + seconds[1] / 2
    assert (parts["training"], parts["skipped"]) == pytest.approx((trained, sum(seconds) - trained))
    last = records(tmp_path)[-1]
    assert last["goodput"] * last["run-seconds"] == pytest.approx(trained, rel=1e-3)


@pytest.mark.parametrize("late", [False, True])
def test_weights_that_are_not_finite_stop_a_run_that_skips(tmp_path: Path, late: bool) -> None:
    """No checkpoint has them, and the next start goes on from the last one before."""

    def spoil(trainer: Trainer) -> None:
        trainer.optimizer.main_params["layers.0.mlp.linear_fc1.weight"].view(-1)[3] = torch.nan

    run = tiny_run(tmp_path, run_flags(tmp_path, "--on-nonfinite skip --log-interval 100"))
    with late_checks() if late else ExitStack():
        outcome = start(run, before_step(4, spoil))
    sentence = (
        "the loss or gradient of step 4 is not finite, and neither is the weight layers.0.mlp.linear_fc1.weight "
        "(rank 0), which --on-nonfinite skip leaves as it is"
    )
    assert outcome.status == 1
    assert f"error: {sentence}\n  fix: --ckpt-step N" in outcome.err
    assert saved_steps(tmp_path / "saved") == [2]
    ((_, incident),) = read_incidents(tmp_path)
    assert (incident.step, incident.sentence, incident.facts["policy"]) == (4, sentence, "stop")
    assert start(run).status == 0
    assert saved_steps(tmp_path / "saved") == [2, 4, 6, 8, 10]


def test_a_start_from_a_named_step_goes_back_too(tmp_path: Path, plain: Outcome) -> None:
    assert start(tiny_run(tmp_path, run_flags(tmp_path, "--exit-interval 4"))).status == 0
    with spoiled_sample(in_step(plain, 7)):
        outcome = start(tiny_run(tmp_path, run_flags(tmp_path, f"{NONFINITE} --ckpt-step 4 --replay-check 1")))
    assert outcome.status == 0, outcome.err
    assert "goes back from step 7 to step 4" in outcome.out
    checked = re.findall("replay-check: (.*) from step 5 on; the last that was found clean is (.*)", outcome.out)
    assert checked == [("2 steps checked", "6"), ("6 steps checked", "10")]


# ---- Killed and started again


def killed_at(point: str) -> Callable[..., Any]:
    original = rewinds.add_rewinds

    def write(*arguments: Any) -> None:
        if point == "after the record":
            original(*arguments)
        raise KilledError

    return write


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, plain: Outcome) -> Path:
    """A run that goes back from step 7 and is not killed."""
    folder = tmp_path_factory.mktemp("whole")
    with spoiled_sample(in_step(plain, 7)):
        assert start(tiny_run(folder, run_flags(folder, NONFINITE))).status == 0
    return folder


@pytest.mark.parametrize(
    "point", ["before the record", "after the record", "step 5", pytest.param("step 7", marks=pytest.mark.slow)]
)
def test_a_kill_at_any_time_changes_nothing(tmp_path: Path, plain: Outcome, whole: Path, point: str) -> None:
    run = tiny_run(tmp_path, run_flags(tmp_path, NONFINITE))
    with spoiled_sample(in_step(plain, 7)):
        if point.startswith("step"):
            killing = before_step(int(point[5:]), second_time(kill))
        else:
            killing = patch.object(rewinds, "add_rewinds", killed_at(point))
        assert start(run, killing).status is None
        if point == "after the record":  # nor does a run that only evaluates, or starts from this one
            assert saved_steps(tmp_path / "saved") == [2, 4, 6]
            other = find_resume_source(CheckpointConfig(load=f"{tmp_path}/saved"))
            assert other.paths[0] == tmp_path / "saved/iter_0000004"
            assert "the run has gone back from step 7" in other.notes[0]
        # without flags, after the record: the folder decides
        run = run if point == "before the record" else tiny_run(tmp_path, run_flags(tmp_path))
        assert start(run).status == 0
    assert [rewind | {"id": 0} for rewind in recorded(tmp_path)] == [rewind | {"id": 0} for rewind in recorded(whole)]
    assert differences(*(folder / "saved/iter_0000010" for folder in (tmp_path, whole))) == ["rewinds"]  # their ids
    assert steps(tmp_path) == steps(whole)


def second_time(act: Callable[[Trainer], None]) -> Callable[[Trainer], None]:
    calls = iter(range(1000))

    def act_then(trainer: Trainer) -> None:
        if next(calls):
            act(trainer)

    return act_then


def recorded(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / "saved/rewinds.json").read_text())
    return found


def test_two_rewinds_and_the_limit(tmp_path: Path, plain: Outcome) -> None:
    """Step 5 and, after it, a sample that the stream without those of steps 3 to 5 has in its step 8."""
    more = "--max-rewinds 1 --train-iters 12"
    longer = start(tiny_run(tmp_path / "plain", f"{FLAGS} --train-iters 12"))
    once, again = in_step(longer, 5), in_step(longer, 11)
    folder = tmp_path / "run"
    with spoiled_sample(once), spoiled_sample(again):
        outcome = start(tiny_run(folder, run_flags(folder, f"{NONFINITE} {more}")))
        assert outcome.status == 1
        assert "the run has gone back 1 time, the limit of --max-rewinds" in outcome.err
        assert len(recorded(folder)) == 1
        allowed = start(tiny_run(folder, run_flags(folder, f"{NONFINITE} --train-iters 12 --max-rewinds 2")))
    assert allowed.status == 0
    assert [(each["step"], each["begin"], each["end"]) for each in recorded(folder)] == [(5, 8, 20), (8, 32, 44)]
    assert Manifest.open(folder / "saved/iter_0000012").state["data"]["stretches"]["skipped"] == [8, 20, 32, 44]


def test_what_happens_without_an_old_checkpoint(tmp_path: Path, plain: Outcome) -> None:
    """A run that has not saved goes back to its start; one that has deleted what is needed stops."""
    for name, flags in {"start": "--save-interval 8", "kept": "--save-interval 1 --keep-last 2"}.items():
        folder = tmp_path / name
        with spoiled_sample(in_step(plain, 6)):
            outcome = start(tiny_run(folder, run_flags(folder, f"{NONFINITE} {flags}")))
        if name == "kept":
            assert outcome.status == 1
            assert "no checkpoint of this phase is of step 3 or earlier: the oldest is of step 4" in outcome.err
            assert saved_steps(folder / "saved") == [4, 5]
            assert not (folder / "saved/rewinds.json").exists()
        else:
            assert outcome.status == 0
            assert "goes back from step 6 to step 0, and leaves out the samples 12:24" in outcome.out
            hand = start(tiny_run(tmp_path / "hand", f"{FLAGS} --skip-samples 12:24"))
            assert steps(folder) == steps(tmp_path / "hand")
            assert hand.samples == outcome.samples
            assert column(folder, "rewinds", "rewinds") == [1] * 10


# ---- With other features

WITH: dict[str, str] = {
    "batch ramp": "--rampup-batch-size 2 2 6 --global-batch-size 4",
    "asynchronous saves": "--async-save",
    "average of the weights": "--ema-decay 0.9",
    "samples and steps that are skipped": "--skip-samples 4:6 21:22 --iterations-to-skip 6",
    "evaluations": "--eval-interval 2 --eval-iters 1",
    "mixed precision": "--params-dtype bf16",
    "fp16": "--set params_dtype=fp16 --initial-loss-scale 1 --min-loss-scale 1",
    "the health of layers": "--log-health-interval 2 --check-weight-hash-across-dp-replicas-interval 3",
}


def check_against_a_run_by_hand(folder: Path, flags: str, step: int = 7) -> None:
    """Compare with a run that starts from the checkpoint without the samples."""
    plain = start(tiny_run(folder / "plain", f"{FLAGS} {flags}"))
    assert plain.status == 0, plain.err
    with spoiled_sample(in_step(plain, step)):
        outcome = start(tiny_run(folder / "run", run_flags(folder / "run", f"{flags} {NONFINITE}")))
    assert outcome.status == 0, outcome.err
    (rewind,) = recorded(folder / "run")
    skips = f"{rewind['begin']}:{rewind['end']} {' '.join(re.findall(r'--skip-samples ([0-9: ]+)', flags))}"
    (there,) = re.findall(r"goes back from step \d+ to step (\d+)", outcome.out)
    others = re.sub("--skip-samples [0-9: ]+", "", flags)
    hand = by_hand(folder / "hand", folder / "run", int(there), skips, f"{FLAGS} {others}")
    assert hand.status == 0, hand.err
    last = saved_steps(folder / "run/saved")[-1]
    assert differences(*(folder / f"{name}/saved/iter_{last:07d}" for name in ("run", "hand"))) == ["rewinds"]
    assert {step: numbers for step, numbers in steps(folder / "run").items() if step > int(there)} == {
        step: numbers for step, numbers in steps(folder / "hand").items() if step > int(there)
    }
    assert hand.samples == {step: samples for step, samples in outcome.samples.items() if step > int(there)}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "batch ramp" else pytest.mark.slow) for name in WITH]
)
def test_with_other_features(tmp_path: Path, name: str) -> None:
    check_against_a_run_by_hand(tmp_path, WITH[name])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["blend", "best-fit"])
def test_with_other_data(tmp_path: Path, kind: str) -> None:
    wiki, code = corpora(tmp_path)
    packing = "--packing best-fit --eod-id 0 --eod-mask-loss --reset-attention-mask --reset-position-ids"
    blend = f"--set data.mock_data=false --data-path 0.7 {wiki} 0.3 {code} --split 1"
    check_against_a_run_by_hand(tmp_path, f"{blend} {packing if kind == 'best-fit' else ''}")


@pytest.mark.slow
@pytest.mark.parametrize(("interval", "there"), [(3, 6), (7, 4)])
def test_checkpoints_on_the_nodes(tmp_path: Path, plain: Outcome, interval: int, there: int) -> None:
    """The one of step 6 on a node is old enough; that of step 7 is not, and is passed over."""
    folder = tmp_path / "run"
    flags = f"--save-interval 4 --local-save {tmp_path}/node{{node}} --local-save-interval {interval}"
    with spoiled_sample(in_step(plain, 8)):
        outcome = start(tiny_run(folder, run_flags(folder, f"{flags} --on-nonfinite rewind:2")))
    assert outcome.status == 0, outcome.err
    assert f"goes back from step 8 to step {there}, and leaves out the samples 24:32" in outcome.out
    assert ("node0/iter_0000007: the run has gone back from step 8" in outcome.out) is (interval == 7)
    twin = start(tiny_run(tmp_path / "twin", f"{FLAGS} --skip-samples 24:32"))
    assert twin.samples == outcome.samples
    assert steps(folder) == steps(tmp_path / "twin")


@pytest.mark.parametrize("step", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_phases(tmp_path: Path, plain: Outcome, step: int) -> None:
    """Back to the beginning of the second phase, whose checkpoint is of the first, and across nothing."""
    phases: list[dict[str, Any]] = [
        {"name": "main", "tokens": 64},
        {"name": "end", "tokens": 256, "lr": 1e-3},
    ]
    flags = "--params-dtype fp64 --save-interval 2"
    whole = start(tiny_phases(tmp_path / "plain", phases, flags))
    assert (whole.status, sorted(whole.samples)) == (0, [*range(1, 11)])
    with spoiled_sample(in_step(whole, step)):
        outcome = start(tiny_phases(tmp_path / "run", phases, f"{flags} --on-nonfinite rewind:2"))
    assert outcome.status == 0, outcome.err
    (rewind,) = recorded(tmp_path / "run")
    assert (rewind["phase"], rewind["step"]) == ("end", step)
    skips = f"--skip-samples end/{rewind['begin']}:{rewind['end']}"
    twin = start(tiny_phases(tmp_path / "twin", phases, f"{flags} {skips}"))
    assert twin.status == 0, twin.err
    assert twin.samples == outcome.samples
    assert steps(tmp_path / "run") == steps(tmp_path / "twin")
    digests = [column(tmp_path / name, "samples-digest")[-1] for name in ("run", "twin")]
    assert digests[0] == digests[1]
    # the segments in which samples are planned differ, because the twin plans for more from its beginning
    found = differences(*(tmp_path / f"{name}/saved/iter_0000010" for name in ("run", "twin")))
    assert {*found} - {"data"} == {"rewinds"}
