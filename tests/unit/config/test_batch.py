"""Batches, ramps and lengths in closed form, against walking through a run step by step, as Megatron-LM does."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.config.batch import (
    batch_size_stages,
    final_consumed_samples,
    final_iteration,
    full_global_batch_size,
    get_num_microbatches,
    global_batch_size_at,
    padding_samples,
    planned_samples,
    samples_without_rampup,
    schedule_lengths,
)
from megatron.config.optimizer import OptimizerConfig
from megatron.config.run import RunConfig
from megatron.config.training import TrainingConfig

few = settings(max_examples=50, deadline=None)


def megatron_batch(ramp: tuple[int, int, int], full: int, consumed: int) -> int:
    """RampupBatchsizeNumMicroBatchesCalculator.update, in exact arithmetic (Megatron-LM divides floats)."""
    start, increment, samples = ramp
    if consumed > samples:
        return full
    steps = int(consumed / Fraction(samples, (full - start) // increment))
    return min(start + steps * increment, full)


def walk(config: TrainingConfig) -> list[tuple[int, int]]:
    """(consumed before, batch) of every step of a run with a ramp."""
    assert config.rampup_batch_size is not None
    taken, consumed = [], 0
    while config.train_iters is None or len(taken) < config.train_iters:
        size = megatron_batch(config.rampup_batch_size, config.global_batch_size or 0, consumed)
        if config.train_samples is not None and consumed + size > config.train_samples:
            break
        taken.append((consumed, size))
        consumed += size
    return taken


@st.composite
def ramps(draw: st.DrawFn) -> TrainingConfig:
    start, increment, rises = draw(st.integers(1, 12)), draw(st.integers(1, 12)), draw(st.integers(1, 8))
    ramp = (start, increment, draw(st.integers(1, 400)))
    length = draw(st.sampled_from(["train_iters", "train_samples"]))
    amount = draw(st.integers(1, 600))
    return TrainingConfig(global_batch_size=start + rises * increment, rampup_batch_size=ramp, **{length: amount})


def run_of(training: TrainingConfig, warmup: int, decay: int, final: int) -> RunConfig:
    optimizer = OptimizerConfig(lr_warmup_iters=warmup, lr_decay_iters=decay, lr_wsd_decay_iters=final)
    return RunConfig(training=training, optimizer=optimizer)


@few
@given(ramps(), st.integers(0, 80), st.integers(1, 80), st.integers(0, 10**6))
def test_a_ramp_and_any_point_to_resume_from(config: TrainingConfig, warmup: int, decay: int, dice: int) -> None:
    full, taken = config.global_batch_size or 0, walk(config)
    total = sum(size for _, size in taken)
    assert [global_batch_size_at(config, 1, consumed) for consumed, _ in taken] == [size for _, size in taken]
    assert final_iteration(config, 1) == len(taken)
    assert final_consumed_samples(config, 1) == total
    assert planned_samples(config, 1) == (config.train_samples or total)
    stages = batch_size_stages(config, 1)
    assert (stages[0][0], stages[-1][1]) == (0, full)
    for (at, size), (end, larger) in zip(stages, stages[1:]):
        assert at < end
        assert size < larger
        assert (end - at) % size == 0, "stages are whole steps"
    iteration = dice % (len(taken) + 1)
    point = (iteration, sum(size for _, size in taken[:iteration]))
    for measure in (final_iteration, planned_samples, final_consumed_samples):
        assert measure(config, 1, *point) == measure(config, 1)
    lengths = run_of(config, warmup, decay, 3)
    assert samples_without_rampup(config, 1, point[1]) == iteration * full
    assert schedule_lengths(lengths, 1, *point) == schedule_lengths(lengths, 1)
    assert schedule_lengths(lengths, 1)[:3] == (warmup * full, decay * full, 3 * full)


@few
@given(ramps(), st.integers(0, 700), st.integers(0, 1500), st.integers(0, 90))
def test_a_run_may_resume_from_where_it_has_never_been(
    config: TrainingConfig, iteration: int, consumed: int, warmup: int
) -> None:
    """After a change of batch, walked through step by step: the counts of steps and of samples need not fit."""
    steps, samples = iteration, consumed
    while True:
        size = global_batch_size_at(config, 1, samples)
        if config.train_samples is None and steps >= (config.train_iters or 0):
            break
        if config.train_samples is not None and samples + size > config.train_samples:
            break
        steps, samples = steps + 1, samples + size
    assert final_iteration(config, 1, iteration, consumed) == steps
    assert final_consumed_samples(config, 1, iteration, consumed) == samples
    assert planned_samples(config, 1, iteration, consumed) == (config.train_samples or samples)
    if iteration and consumed:
        end = schedule_lengths(run_of(config, warmup, 1, 1), 1, iteration, consumed).warmup
        passed = samples_without_rampup(config, 1, consumed)
        assert (end <= passed) == (warmup <= iteration or end == passed), "a warm-up that has ended stays ended"
        assert end == passed or warmup != iteration


@few
@given(st.integers(1, 20), st.integers(1, 20), st.integers(0, 30), st.integers(0, 60), st.integers(1, 60))
def test_after_a_change_of_batch_every_step_counts_its_own_samples(
    before: int, after: int, change: int, warmup: int, decay: int
) -> None:
    sizes = [before] * change + [after] * 60
    training = TrainingConfig(global_batch_size=after, train_iters=60)
    found = schedule_lengths(run_of(training, warmup, decay, 5), 1, change, before * change)
    assert found == (sum(sizes[:warmup]), sum(sizes[:decay]), 5 * after, sum(sizes[:60]))


@few
@given(st.integers(1, 64), st.integers(1, 8), st.integers(1, 8), st.integers(1, 1000))
def test_padding_and_runs_without_a_ramp(batch: int, micro: int, ranks: int, samples: int) -> None:
    padded = TrainingConfig(micro_batch_size=micro, global_batch_size=batch, pad_global_batch=True)
    computed = get_num_microbatches(padded, ranks) * micro * ranks
    assert padding_samples(padded, ranks, batch) == computed - batch
    assert 0 <= computed - batch < micro * ranks
    assert padding_samples(replace(padded, pad_global_batch=False), ranks, batch) == 0
    fixed = TrainingConfig(global_batch_size=batch, train_samples=samples)
    assert batch_size_stages(fixed, ranks) == [(0, batch)]
    assert final_iteration(fixed, ranks) == samples // batch
    derived = TrainingConfig(micro_batch_size=micro, train_iters=samples)
    assert full_global_batch_size(derived, ranks) == global_batch_size_at(derived, ranks, samples) == micro * ranks
    assert planned_samples(derived, ranks) == samples * micro * ranks
    assert final_iteration(derived, ranks) == samples


def test_lengths_in_samples_and_as_fractions() -> None:
    training = TrainingConfig(global_batch_size=8, train_iters=100)
    config = RunConfig(training=training, optimizer=OptimizerConfig(lr_warmup_samples=30, lr_decay_samples=600))
    assert schedule_lengths(config, 1, 50, 200)[:2] == (30, 600)
    share = replace(config, optimizer=OptimizerConfig(lr_warmup_fraction=0.1))
    assert schedule_lengths(share, 1, 50, 200)[:2] == (pytest.approx(60), 600)


@few
@given(st.lists(st.tuples(st.integers(1, 900), st.integers(1, 12)), min_size=1, max_size=5), st.integers(1, 9))
def test_a_schedule_of_batch_sizes_by_tokens(parts: list[tuple[int, int]], length: int) -> None:
    """As Megatron-LM's: each size holds from its tokens divided by the sequence length on."""
    begins = [sum(tokens for tokens, _ in parts[:i]) for i in range(len(parts))]
    words = tuple(f"{tokens}:{size}" for tokens, (_, size) in zip(begins, parts))
    config = TrainingConfig(seq_length=length, step_batch_size_schedule=words, train_iters=400)
    consumed = 0
    for _ in range(400):
        size = [size for tokens, (_, size) in zip(begins, parts) if tokens // length <= consumed][-1]
        assert global_batch_size_at(config, 3, consumed) == size
        consumed += size
    assert (final_iteration(config, 3), final_consumed_samples(config, 3)) == (400, consumed)
    assert full_global_batch_size(config, 3) == parts[-1][1]


def test_equal_steps_by_tokens_are_a_ramp() -> None:
    by_tokens = TrainingConfig(seq_length=1000, step_batch_size_schedule=("0:384 200M:768", "0.4B:1152"))
    ramp = TrainingConfig(global_batch_size=1152, rampup_batch_size=(384, 384, 400_000))
    assert batch_size_stages(by_tokens, 1) == batch_size_stages(ramp, 1)
