"""A run that goes on with another batch: where its warm-up and decay are then, and whether they fit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.runs import before_step, kill, start, steps
from tests.unit.training.test_resume import go_on, run_of

WARM_UP = "--lr-decay-style linear --train-iters 12 --lr-warmup-iters 3"


def rates(folder: Path) -> list[float]:
    """Learning rates of steps 5, 6, ..."""
    return [numbers["learning-rate"] for step, numbers in sorted(steps(folder).items()) if step > 4]


def test_after_a_change_of_batch_size_the_schedule_continues(tmp_path: Path) -> None:
    """Steps 1-4 of 4 samples, then 8 of 16: the warm-up took 12 samples, and the run takes 144."""
    start(run_of(tmp_path, WARM_UP), before_step(5, kill))
    larger = f"{WARM_UP} --global-batch-size 16"
    printed = start(run_of(tmp_path, f"{larger} --resume-mode new-schedule"), before_step(8, kill))
    assert printed.err == ""
    printed = go_on(tmp_path, larger)  # exactly so after another start
    assert (printed.status, printed.err, sorted(printed.samples)) == (0, "", [*range(7, 13)])
    assert rates(tmp_path) == pytest.approx([1e-2 * (144 - n) / (144 - 12) for n in range(16, 144, 16)])


def test_another_learning_rate_does_not_move_where_the_batch_changed(tmp_path: Path) -> None:
    start(run_of(tmp_path, WARM_UP), before_step(5, kill))
    for lr, number in ((1e-2, 7), (2e-2, 0)):
        flags = f"{WARM_UP} --global-batch-size 16 --lr {lr} --resume-mode new-schedule"
        start(run_of(tmp_path, flags), before_step(number, kill))
    assert rates(tmp_path)[2:] == pytest.approx([2e-2 * (144 - n) / (144 - 12) for n in range(48, 144, 16)])


def test_a_schedule_is_checked_from_where_the_run_resumes(tmp_path: Path) -> None:
    """20 samples of warm-up are over; 12 steps of the new batch would not be as many."""
    flags = "--train-iters 12 --lr-warmup-samples 20 --global-batch-size {}"
    start(run_of(tmp_path, flags.format(8)), before_step(7, kill))
    smaller = flags.format(1)
    printed = start(run_of(tmp_path, f"{smaller} --resume-mode new-schedule"), before_step(10, kill))
    assert printed.err == ""
    assert sorted(go_on(tmp_path, smaller).samples) == [9, 10, 11, 12]


def test_a_schedule_that_does_not_fit_where_the_run_resumes(tmp_path: Path) -> None:
    start(run_of(tmp_path), before_step(6, kill))
    printed = go_on(tmp_path, "--lr-warmup-iters 9 --train-iters 10 --lr-decay-iters 8 --resume-mode new-schedule")
    assert (printed.status, printed.samples) == (2, {})
    assert "E403 the warm-up of 36 samples does not end before the decay does, at 32 (the checkpoint is " in printed.err
    assert "iter_0000004)\n  fix: --lr-warmup-iters " in printed.err
    printed = go_on(tmp_path, "--lr-warmup-iters 6 --lr-decay-iters 5 --global-batch-size 8 --resume-mode new-schedule")
    assert "the warm-up of 32 samples does not end before the decay does, at 24" in printed.err
    fix = re.findall(r"fix: (--set \S+) ", printed.err)
    assert fix == ["--set optimizer.lr_warmup_samples=2"]
    mended = f"--lr-warmup-iters 6 --lr-decay-iters 5 --global-batch-size 8 --resume-mode new-schedule {fix[0]}"
    assert go_on(tmp_path, mended).err == ""
