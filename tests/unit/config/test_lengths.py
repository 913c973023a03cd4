"""Lengths in steps, as samples, of runs that change their batch: against counting the samples of every step."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.config.batch import final_iteration, samples_without_rampup, schedule_lengths
from megatron.config.run import OptimizerConfig, RunConfig, TrainingConfig
from tests.unit.config.test_batch import ramps, walk


def run_of(training: TrainingConfig, warmup: int, decay: int, final: int) -> RunConfig:
    optimizer = OptimizerConfig(lr_warmup_iters=warmup, lr_decay_iters=decay, lr_wsd_decay_iters=final)
    return RunConfig(training=training, optimizer=optimizer)


@given(ramps(), st.integers(0, 80), st.integers(1, 80), st.integers(0, 10**6))
def test_seen_from_any_of_its_steps_an_unchanged_run_is_the_same(
    training: TrainingConfig, warmup: int, decay: int, dice: int
) -> None:
    """And a length in steps is that many full batches, ramp or none."""
    assert training.rampup_batch_size is not None
    full = training.global_batch_size or 0
    config = run_of(training, warmup, decay, 3)
    taken = walk(training.rampup_batch_size, full, training.train_samples, training.train_iters)
    iteration = dice % (len(taken) + 1)
    consumed = sum(size for _, size in taken[:iteration])
    assert samples_without_rampup(training, 1, consumed) == iteration * full
    assert schedule_lengths(config, 1, iteration, consumed) == schedule_lengths(config, 1)
    assert schedule_lengths(config, 1)[:3] == (warmup * full, decay * full, 3 * full)


@given(
    before=st.integers(1, 20),
    after=st.integers(1, 20),
    change=st.integers(0, 30),
    warmup=st.integers(0, 60),
    decay=st.integers(1, 60),
)
def test_after_a_change_of_batch_every_step_counts_its_own_samples(
    before: int, after: int, change: int, warmup: int, decay: int
) -> None:
    sizes = [before] * change + [after] * 60
    training = TrainingConfig(global_batch_size=after, train_iters=60)
    found = schedule_lengths(run_of(training, warmup, decay, 5), 1, change, before * change)
    assert found == (sum(sizes[:warmup]), sum(sizes[:decay]), 5 * after, sum(sizes[:60]))


@given(ramps(), st.integers(1, 60), st.integers(1, 600), st.integers(0, 90))
def test_what_is_over_stays_over(training: TrainingConfig, iteration: int, consumed: int, steps: int) -> None:
    """Whatever the batches were before, and with a ramp that now begins in its middle."""
    at = schedule_lengths(run_of(training, steps, 1, 1), 1, iteration, consumed).warmup
    passed = samples_without_rampup(training, 1, consumed)
    assert (at <= passed) == (steps <= iteration or at == passed)
    assert at == passed or steps != iteration


def test_lengths_in_samples_and_shares_are_what_they_are() -> None:
    training = TrainingConfig(global_batch_size=8, train_iters=100)
    config = RunConfig(training=training, optimizer=OptimizerConfig(lr_warmup_samples=30, lr_decay_samples=600))
    assert schedule_lengths(config, 1, 50, 200)[:2] == (30, 600)
    share = replace(config, optimizer=OptimizerConfig(lr_warmup_fraction=0.1))
    assert schedule_lengths(share, 1, 50, 200)[:2] == (pytest.approx(60), 600)
    assert final_iteration(training, 1, 50, 200) == 100
