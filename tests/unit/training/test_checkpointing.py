"""A run that was killed goes on as if nothing had happened, to the bit; what a checkpoint holds of it; full disks."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from megatron.config.run import RunConfig
from megatron.data.indexed import IndexedDatasetWriter
from megatron.parallel.microbatch import MicroBatch
from megatron.training.checkpointing import held, state, to_write
from megatron.training.setup import Trainer, build
from tests.runs import before_step, checkpoint, column, differences, kill, records, saved_steps, start, steps, tiny_run

STEPS = 9
LENGTH = f"--train-iters {STEPS} --save-interval 2"
"""Not a multiple of the interval: the last checkpoint is the end's."""

FP16 = "--fp16 --initial-loss-scale 1e13 --hysteresis 1 --loss-scale-window 2"
RUNS = {
    "fp32 adam": "--weight-decay-incr-style cosine --start-weight-decay 0 --end-weight-decay 0.6",
    "bf16 sgd": "--bf16 --optimizer sgd --lr-decay-style WSD --lr-wsd-decay-iters 3",
    "bf16 adam": "--bf16",
    "fp16, skipping": FP16,
    "fp64, rope": "--params-dtype fp64 --position-embedding-type rope --num-query-groups 1",
    "dropout": "--hidden-dropout 0.1 --attention-dropout 0.1 --lr-warmup-iters 3",
    "recompute": "--recompute-granularity full --hidden-dropout 0.1 --micro-batch-size 2",
    "ramp": "--rampup-batch-size 2 2 16 --micro-batch-size 1 --global-batch-size 6",
    "evaluation": "--eval-interval 3 --eval-iters 2 --hidden-dropout 0.1",
    "untied": "--untie-embeddings-and-output-weights --normalization RMSNorm --swiglu --disable-bias-linear",
}


def run_of(folder: Path, flags: str = "") -> RunConfig:
    return tiny_run(folder, f"{LENGTH} {flags} --save {folder}/saved")


def check_twins(folder: Path, flags: str, *kills: int, again: str = "") -> Path:
    """A run, and the same run killed in these steps and started again each time (with the flags ``again``), are one.

    Returns the folder of the run that was killed.
    """
    whole, parts = folder / "whole", folder / "parts"
    uninterrupted = start(run_of(whole, flags))
    assert (uninterrupted.status, uninterrupted.err) == (0, "")
    read: dict[int, Any] = {}
    for i, number in enumerate((*kills, 0)):
        told = start(run_of(parts, f"{flags} {again if i else ''}"), before_step(number, kill))
        assert (told.status, told.err) == (None if number else 0, "")
        assert ("resumed from" in told.out) == (i > 0)
        read |= told.samples
    assert read == uninterrupted.samples
    assert steps(parts) == steps(whole)
    assert sorted(read) == sorted(steps(whole)) == [*range(1, STEPS + 1)]
    for step in (*range(2, STEPS, 2), STEPS):
        path = f"saved/iter_{step:07d}"
        assert differences(parts / path, whole / path) == []
    return parts


@pytest.mark.parametrize("name", RUNS)
def test_a_killed_run_ends_as_if_nothing_had_happened(tmp_path: Path, name: str) -> None:
    check_twins(tmp_path, RUNS[name], random.Random(name).randrange(3, STEPS + 1))


def test_skipped_steps_before_and_after_the_kill(tmp_path: Path) -> None:
    parts = check_twins(tmp_path, FP16, 5)
    skipped = {step for step, numbers in steps(parts).items() if numbers["skipped-iterations"]}
    assert min(skipped) < 4 < max(skipped)
    tensors, numbers = checkpoint(parts / "saved/iter_0000004")
    assert numbers["optimizer"]["steps"] == 4 - len([step for step in skipped if step <= 4])
    assert numbers["loss_scaler"].keys() == {"scale", "good_steps", "lives"}


def test_killed_in_several_starts(tmp_path: Path) -> None:
    check_twins(tmp_path, "--hidden-dropout 0.1", 3, 4, 6, 9)


def test_killed_before_the_first_checkpoint_means_from_the_beginning(tmp_path: Path) -> None:
    config = run_of(tmp_path)
    assert start(config, before_step(2, kill)).status is None
    assert start(config).samples.keys() == set(range(1, STEPS + 1))


def write_documents(prefix: Path, seed: int = 0) -> str:
    """Flags of a small dataset of random documents; a run goes through it twice."""
    random = np.random.default_rng(seed)
    with IndexedDatasetWriter(prefix, np.int32) as writer:
        for _ in range(40):
            writer.add_document(random.integers(0, 31, 5).tolist())
    return f"--no-mock-data --data-path {prefix} --split 30,10"


def test_into_another_epoch(tmp_path: Path) -> None:
    flags = write_documents(tmp_path / "documents")
    parts = check_twins(tmp_path, f"{flags} --eval-interval 4 --eval-iters 1", 6)
    (summary,) = {text for text in column(parts, "text", "text") if "epochs of" in text}
    assert "288 tokens = 1.9" in summary


def test_another_micro_batch_size_is_the_same_run_up_to_rounding(tmp_path: Path) -> None:
    fp64 = "--params-dtype fp64 --hidden-dropout 0.1"
    start(run_of(tmp_path / "whole", fp64))
    start(run_of(tmp_path / "parts", fp64), before_step(6, kill))
    told = start(run_of(tmp_path / "parts", f"{fp64} --micro-batch-size 4 --recompute-granularity full"))
    assert "--micro-batch-size: checkpoint 1 -> now 4" in told.out
    losses = [[numbers["lm loss"] for numbers in steps(tmp_path / run).values()] for run in ("whole", "parts")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-12)
