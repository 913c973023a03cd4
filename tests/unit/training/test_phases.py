"""Phases of a run: against trainers that take over each other's state by hand, killed anywhere, and their records."""

from __future__ import annotations

import json
import math
import shutil
import signal
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.save import rank_file_name
from megatron.config.errors import UserError
from megatron.config.phases import Phase
from megatron.optimizer.lr_scheduler import Rates
from megatron.training.build import build_trainer
from megatron.training.checkpoint_contents import local_tensors
from megatron.training.resume_source import preview_start
from megatron.training.step import train_step
from megatron.training.trainer import Trainer
from tests.kit.runs import (
    before_step,
    checkpoint,
    column,
    differences,
    kill,
    saved_steps,
    start,
    steps,
    tiny_phases,
    tiny_run,
)
from tests.unit.checkpoint.samples import file_of, flip

ROPE = "--position-embedding-type rope --params-dtype fp64 --hidden-dropout 0.1"
LONG = {"seq_length": 16, "max_position_embeddings": 16, "rotary_base": 500000}
PHASES: list[dict[str, Any]] = [
    {"name": "main", "tokens": 90},  # 3 steps of 4 x 8
    {"name": "long", "tokens": "0.1K", **LONG, "global_batch_size": 2},  # 4 steps of 2 x 16
    {"name": "anneal", "tokens": 64, "lr": 2e-3, "lr_decay_style": "linear", "lr_warmup_iters": 1, "seed": 7},
]
EDGES = 3, 7, 9
FLAGS = f"{ROPE} --lr-decay-style cosine --lr-warmup-iters 2 --min-lr 1e-3 --weight-decay-incr-style linear "
FLAGS += "--start-weight-decay 0 --end-weight-decay 0.1 --save-interval 2"


def phased(folder: Path, flags: str = FLAGS, phases: list[dict[str, Any]] = PHASES) -> list[Phase]:
    return tiny_phases(folder, phases, flags)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three phases."""
    folder = tmp_path_factory.mktemp("phases") / "whole"
    done = start(phased(folder))
    assert (done.status, done.err) == (0, "")
    assert "earlier start" not in done.out
    assert done.out.count(f"{folder} holds the phase before: metrics.jsonl is appended to; changed files") == 2
    return folder


def cosine(tokens: int) -> tuple[float, float]:
    """Learning rate and weight decay after ``tokens`` of the 224 on the schedule: a warm-up of 64, then a cosine."""
    rate = 1e-2 * tokens / 64
    if tokens > 64:
        rate = 1e-3 + (1e-2 - 1e-3) * 0.5 * (1 + math.cos(math.pi * (tokens - 64) / (224 - 64)))
    return rate, 0.1 * tokens / 224


RATES = [cosine(tokens) for tokens in range(0, 224, 32)]
RATES += [(0.0, 0.0), (2e-3, 0.05)]  # the annealing: a warm-up of 1 step, then 2e-3 to 1e-3 over the one that is left


def take_over(trainer: Trainer, before: Trainer | None) -> None:
    """Copy weights, moments and the step of Adam, without a checkpoint."""
    if before is None:
        return
    for name, tensor in local_tensors(trainer).items():
        tensor.copy_(local_tensors(before)[name])
    trainer.optimizer.main_params.set(dict(before.optimizer.main_params))
    trainer.optimizer.write_weights()
    trainer.optimizer.set_steps_applied(before.optimizer.steps_applied())


def test_phases_equal_trainers_that_take_over_state_by_hand(whole: Path) -> None:
    expected, before, digest = [], None, 0
    rates = iter(RATES)
    for phase, (first, last) in zip(phased(whole), ((0, 3), (3, 7), (7, 9))):
        trainer = build_trainer(phase.config, 0, 1)
        take_over(trainer, before)
        for step in range(first, last):
            batches = [replace(batch, step=step) for batch in trainer.next_batches()]
            expected.append(train_step(trainer, batches, Rates(*next(rates))).loss.item())
            trainer.progress.iteration += 1
            trainer.progress.consumed_samples += trainer.reader.next_batch_size
        before = trainer
        digest += trainer.data.digest("train", 0, trainer.consumed_samples)
    assert column(whole, "samples-digest")[-1] == f"{digest % 2**64:016x}"
    assert column(whole, "lm loss") == pytest.approx(expected, rel=1e-13)


def test_tokens_steps_and_names_are_those_of_the_run(whole: Path) -> None:
    assert column(whole, "consumed-tokens") == [*range(32, 289, 32)]
    assert column(whole, "consumed-samples") == [4, 8, 12, 14, 16, 18, 20, 24, 28]
    assert column(whole, "iteration") == [*range(1, 10)]
    assert column(whole, "phase") == ["main"] * 3 + ["long"] * 4 + ["anneal"] * 2
    assert column(whole, "learning-rate") == pytest.approx([rate for rate, _ in RATES], rel=1e-12)
    assert column(whole, "weight-decay") == pytest.approx([decay for _, decay in RATES], rel=1e-12)
    assert column(whole, "starts") == [1] * 9
    assert [phase.config.model.rotary_base for phase in phased(whole)] == [10000, 500000, 10000]
    assert len(set(column(whole, "run-id", "run-id"))) == 1
    _, state = checkpoint(whole / "saved/iter_0000009")
    assert state["phase"].pop("digest")
    assert state["phase"] == {
        "name": "anneal",
        "iteration": 7,
        "consumed_samples": 20,
        "consumed_tokens": 224,
        "read": 0,
        "sources": {},
    }
    assert json.loads((whole / "finished.json").read_text())["iteration"] == 9


def test_a_run_killed_in_every_phase_ends_as_if_nothing_had_happened(whole: Path, tmp_path: Path) -> None:
    """Also where a phase has begun and has no checkpoint of its own yet, and after its last step."""
    for number in (4, 8):
        killed = start(phased(tmp_path), before_step(number, kill))
        assert (killed.status, killed.err) == (None, "")
        assert not (tmp_path / "finished.json").exists()
    assert start(phased(tmp_path)).status == 0
    check_same(whole, tmp_path)
    assert "nothing to do: this run ends with step 9" in start(phased(tmp_path)).out


def check_same(whole: Path, parts: Path) -> None:
    """The records and all checkpoints of two runs are the same, to the bit."""
    assert steps(parts) == steps(whole)
    assert saved_steps(whole / "saved") == saved_steps(parts / "saved") == [2, 3, 4, 6, 7, 8, 9]
    for step in saved_steps(whole / "saved"):
        path = f"saved/iter_{step:07d}"
        assert differences(whole / path, parts / path) == [], step


@pytest.mark.slow
@pytest.mark.parametrize("number", range(1, 10))
def test_killed_before_any_step(whole: Path, tmp_path: Path, number: int) -> None:
    start(phased(tmp_path), before_step(number, kill))
    assert start(phased(tmp_path)).status == 0
    check_same(whole, tmp_path)


@pytest.mark.slow
def test_a_damaged_checkpoint_falls_back_to_the_phase_before(whole: Path, tmp_path: Path) -> None:
    start(phased(tmp_path), before_step(5, kill))  # the checkpoints are of steps 2, 3 and 4
    for step in (3, 4):
        flip(file_of(tmp_path / f"saved/iter_{step:07d}", rank_file_name(0)))
    again = start(phased(tmp_path))
    assert (again.status, again.err) == (0, "")
    assert again.out.count("passed over") >= 2
    assert f"resumed from {tmp_path}/saved/iter_0000002" in again.out
    check_same(whole, tmp_path)


@pytest.mark.slow
def test_three_starts_by_hand_are_the_phases(whole: Path, tmp_path: Path) -> None:
    """With ``--resume-mode new-phase``; each is given twice, and the second one continues the phase."""
    by_hand = f"{FLAGS} --save {tmp_path}/saved --set training.train_iters=null"
    common = "--schedule-tokens 64 224 0 224 --lr-warmup-iters 0"
    options = [
        f"--phase-name main --set training.train_samples=12 {common}",
        "--phase-name long --seq-length 16 --max-position-embeddings 16 --rotary-base 500000 --global-batch-size 2 "
        f"--set training.train_samples=8 {common}",
        "--phase-name anneal --lr 2e-3 --lr-decay-style linear --lr-warmup-iters 1 --seed 7 "
        "--set training.train_samples=8",
    ]
    for number, phase in enumerate(options):
        run = tiny_run(tmp_path, f"{by_hand} {phase} --resume-mode new-phase")
        first = start(run, before_step((2, 6, 9)[number], kill))
        again = start(run)
        assert (first.status, first.err, again.status, again.err) == (None, "", 0, "")
        assert ("a new phase" in first.out) == (number > 0)
        assert "a new phase" not in again.out
        assert "nothing to do" in start(run).out
    check_same(whole, tmp_path)


def test_phases_of_the_same_options_are_one_run(tmp_path: Path) -> None:
    """The data continue, and so does everything else: to the bit, as lengths are powers of 2."""
    flags = f"{ROPE} --lr-decay-style cosine --lr-warmup-iters 2 --ema-decay 0.9 --save-interval 2"
    assert start(tiny_run(tmp_path / "one", f"{flags} --save {tmp_path}/one/saved")).status == 0
    halves = [{"name": "first", "tokens": 96}, {"name": "second", "tokens": 96}]
    assert start(phased(tmp_path / "two", flags, halves)).status == 0
    one, two = (tmp_path / name for name in ("one", "two"))
    assert steps(one) == steps(two)
    assert column(one, "samples-digest") == column(two, "samples-digest")
    found = differences(one / "saved/iter_0000006", two / "saved/iter_0000006")
    assert found in (["data", "phase"], ["phase"])  # the order of the data was planned in two parts


WAYS = {
    "in the background": ("--async-save", 1),
    "on the node's disk": ("--local-save {0}/node --local-save-interval 1", 1),
    "in parts": ("--exit-interval 2", 5),
    "in parts that end with a phase": ("--exit-interval 7", 2),
    "evaluated": ("--eval-iters 1 --eval-interval 4", 1),
    "health": ("--log-health-interval 2", 1),
    "other kernels of recomputation": ("--recompute-granularity full", 1),
}


FAST = {"in parts that end with a phase"}


@pytest.mark.parametrize("way", [pytest.param(way, marks=() if way in FAST else pytest.mark.slow) for way in WAYS])
def test_however_it_is_run_and_saved_the_phases_are_the_same(whole: Path, tmp_path: Path, way: str) -> None:
    flags, starts = WAYS[way]
    for number in range(starts):
        done = start(phased(tmp_path, f"{FLAGS} {flags.format(tmp_path)}"))
        assert done.status == 0  # a save may be left out while another one is written
        assert (tmp_path / "finished.json").exists() == (number + 1 == starts)
        if way == "in parts" and number + 1 < starts:
            assert f"stopped by --exit-interval 2 after step {2 * number + 2} of 9" in done.out
    assert column(tmp_path, "lm loss") == column(whole, "lm loss")
    found = differences(tmp_path / "saved/iter_0000009", whole / "saved/iter_0000009")
    assert found == ([] if way != "evaluated" else ["data", "evaluated", "losses"])
    if way == "evaluated":
        assert column(tmp_path, "iteration", "lm loss validation") == [3, 4, 7, 8, 9]
        assert column(tmp_path, "iteration", "lm loss test") == [9], "at the end of the run, not of each phase"


@pytest.mark.slow
@pytest.mark.parametrize("number", [3, 4, 7, 8])
def test_a_signal_at_the_edge_of_a_phase(whole: Path, tmp_path: Path, number: int) -> None:
    stopped = start(phased(tmp_path), before_step(number, lambda trainer: signal.raise_signal(signal.SIGUSR1)))
    assert stopped.status == 128 + signal.SIGUSR1
    assert max(saved_steps(tmp_path / "saved")) == number
    assert start(phased(tmp_path)).status == 0
    check = steps(tmp_path), steps(whole)
    assert check[0] == check[1]
    assert differences(tmp_path / "saved/iter_0000009", whole / "saved/iter_0000009") == []


@pytest.mark.slow
def test_only_evaluated(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    flags = f"{FLAGS} --skip-train --eval-iters 1"
    printed = start(phased(tmp_path / "run", flags))
    assert printed.status == 0
    assert "evaluated step 9" in printed.out


@pytest.mark.slow
def test_a_plan_that_is_changed(whole: Path, tmp_path: Path) -> None:
    """Phases may be added, and finished ones changed; a phase that is gone, or was changed while it ran, is refused."""
    shutil.copytree(whole, tmp_path / "run")
    main, long, anneal = PHASES
    later = {"name": "more", "tokens": 64, "lr": 1e-3, "seed": 7}
    longer = start(phased(tmp_path / "run", phases=[{**main, "tokens": 64}, long, anneal, later]))
    assert (longer.status, longer.err) == (0, "")
    assert column(tmp_path / "run", "phase")[9:] == ["more", "more"]
    gone = start(phased(tmp_path / "run", phases=[main, long, anneal]))
    assert gone.status == 2
    assert "E342" in gone.err
    assert "is of phase more, which --phases" in gone.err
    changed = start(phased(tmp_path / "run", phases=[main, long, anneal, {**later, "lr": 2e-3, "tokens": 128}]))
    assert changed.status == 2
    assert "E825 the batch, the length or the schedule is not the checkpoint's: " in changed.err
    assert "fix: tokens: 64 in phase more, --lr 0.001 | --resume-mode new-schedule" in changed.err


def test_a_run_without_phases_continues_with_them_by_a_resume_mode(tmp_path: Path) -> None:
    flags = f"{ROPE} --save-interval 2"
    assert start(tiny_run(tmp_path, f"{flags} --save {tmp_path}/saved")).status == 0
    phases = [{"name": "long", "tokens": 64, **LONG}]
    refused = start(phased(tmp_path, flags, phases))
    assert refused.status == 2
    assert "E342" in refused.err
    assert "fix: --resume-mode new-phase" in refused.err
    assert start(phased(tmp_path, f"{flags} --resume-mode new-phase", phases)).status == 0
    assert column(tmp_path, "consumed-tokens")[-2:] == [192, 256]
    assert "nothing to do" in start(phased(tmp_path, f"{flags} --resume-mode new-phase", phases)).out
    # the same phase by hand from another folder, which a further phase does not follow
    hand = f"{flags} --seq-length 16 --max-position-embeddings 16 --rotary-base 500000 --set training.train_iters=null "
    hand += (
        f"--set training.train_samples=4 --schedule-tokens 0 64 0 64 --save {tmp_path}/saved --resume-mode new-phase"
    )
    for more, refusal in {
        "--phase-name long": None,
        "--phase-name next": "E342 .* is of phase long: .*fix: drop --load$",
        "--phase-name next --clip-grad 0.5": r"E825 .*fix: --clip-grad 1 \| drop --load \| ",
    }.items():
        with pytest.raises(UserError, match=f"(?sm){refusal}") if refusal else nullcontext():
            preview_start(tiny_run(tmp_path, f"{hand} {more} --load {tmp_path}"), 1)
        preview_start(tiny_run(tmp_path, f"{hand} {more}"), 1)
