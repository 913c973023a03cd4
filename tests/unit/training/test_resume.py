"""A run that was killed goes on as if nothing had happened: to the bit, in one process."""

from __future__ import annotations

import random
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from megatron.config.run import RunConfig
from tests.runs import before_step, differences, kill, start, steps, tiny_run

STEPS = 9
LENGTH = f"--train-iters {STEPS} --save-interval 2"
"""Not a multiple of the interval: the last checkpoint is the end's."""

FP16 = "--fp16 --initial-loss-scale 1e13 --hysteresis 1 --loss-scale-window 2"
RUNS = {
    "fp32 adam": "--weight-decay-incr-style cosine --start-weight-decay 0 --end-weight-decay 0.6",
    "bf16 sgd": "--bf16 --optimizer sgd --lr-decay-style WSD --lr-wsd-decay-iters 3",
    "fp16, skipping": FP16,
    "fp64, tied by rope": "--params-dtype fp64 --position-embedding-type rope --num-query-groups 1",
    "dropout": "--hidden-dropout 0.1 --attention-dropout 0.1 --lr-warmup-iters 3",
    "recompute": "--recompute-granularity full --hidden-dropout 0.1 --micro-batch-size 2",
    "ramp": "--rampup-batch-size 2 2 16 --micro-batch-size 1 --global-batch-size 6",
    "evaluation": "--eval-interval 3 --eval-iters 2 --hidden-dropout 0.1",
    "untied": "--untie-embeddings-and-output-weights --normalization RMSNorm --swiglu --disable-bias-linear",
}


def run_of(folder: Path, flags: str) -> RunConfig:
    return tiny_run(folder, f"{LENGTH} {flags} --save {folder}/saved")


def twins(folder: Path, flags: str, *kills: int) -> tuple[Path, Path]:
    """Folders of a run, and of the same run killed at these steps and started again each time."""
    whole, parts = folder / "whole", folder / "parts"
    uninterrupted = start(run_of(whole, flags))
    assert (uninterrupted.status, uninterrupted.err) == (0, "")
    read: dict[int, Any] = {}
    for number in (*kills, None):
        event = before_step(number, kill) if number is not None else nullcontext()
        told = start(run_of(parts, flags), event)
        assert (told.status, told.err) == (None if number else 0, "")
        read |= told.samples
    assert read == uninterrupted.samples
    return whole, parts


def check_twins(whole: Path, parts: Path, last: int = STEPS) -> None:
    assert steps(parts) == steps(whole)
    assert sorted(steps(whole)) == [*range(1, last + 1)]
    assert differences(parts / f"saved/iter_{last:07d}", whole / f"saved/iter_{last:07d}") == []


@pytest.mark.parametrize("name", RUNS)
def test_a_killed_run_ends_as_if_nothing_had_happened(tmp_path: Path, name: str) -> None:
    killed_at = random.Random(name).randrange(3, STEPS + 1)
    check_twins(*twins(tmp_path, RUNS[name], killed_at))
