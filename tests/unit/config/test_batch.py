"""The closed form of the batch ramp against walking through it step by step, as Megatron-LM does."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from megatron.config.batch import (
    final_consumed_samples,
    final_iteration,
    full_global_batch_size,
    get_num_microbatches,
    global_batch_size_at,
    padding_samples,
    planned_samples,
    rampup_stages,
)
from megatron.config.run import TrainingConfig


def megatron_batch(ramp: tuple[int, int, int], full: int, consumed: int) -> int:
    """RampupBatchsizeNumMicroBatchesCalculator.update, in exact arithmetic (Megatron-LM divides floats)."""
    start, increment, samples = ramp
    if consumed > samples:
        return full
    steps = int(consumed / Fraction(samples, (full - start) // increment))
    return min(start + steps * increment, full)


def walk(ramp: tuple[int, int, int], full: int, samples: int | None, steps: int | None) -> list[tuple[int, int]]:
    """(consumed before, batch) of every step of a run of ``samples`` samples or ``steps`` steps."""
    taken, consumed = [], 0
    while steps is None or len(taken) < steps:
        size = megatron_batch(ramp, full, consumed)
        if samples is not None and consumed + size > samples:
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


@given(ramps())
def test_ramp(config: TrainingConfig) -> None:
    full, ramp = config.global_batch_size, config.rampup_batch_size
    assert full is not None
    assert ramp is not None
    taken = walk(ramp, full, config.train_samples, config.train_iters)
    assert [global_batch_size_at(config, 1, consumed) for consumed, _ in taken] == [size for _, size in taken]
    assert final_iteration(config, 1) == len(taken)
    if config.train_samples is None:
        assert planned_samples(config, 1) == sum(size for _, size in taken)
    else:
        assert planned_samples(config, 1) == config.train_samples
    assert final_consumed_samples(config, 1) == sum(size for _, size in taken)


@given(ramps(), st.integers(0, 10**6))
def test_a_run_that_goes_on_from_any_of_its_steps_ends_where_it_would_have(config: TrainingConfig, dice: int) -> None:
    full, ramp = config.global_batch_size, config.rampup_batch_size
    assert full is not None
    assert ramp is not None
    taken = walk(ramp, full, config.train_samples, config.train_iters)
    iteration = dice % (len(taken) + 1)
    point = (iteration, sum(size for _, size in taken[:iteration]))
    for measure in (final_iteration, planned_samples, final_consumed_samples):
        assert measure(config, 1, *point) == measure(config, 1)


@given(ramps(), st.integers(0, 700), st.integers(0, 1500))
def test_a_run_may_go_on_from_where_it_has_never_been(config: TrainingConfig, iteration: int, consumed: int) -> None:
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


@given(ramps())
def test_stages_are_whole_steps_in_order(config: TrainingConfig) -> None:
    stages = rampup_stages(config, 1)
    assert stages[0][0] == 0
    assert stages[-1][1] == config.global_batch_size
    for (at, size), (end, larger) in zip(stages, stages[1:]):
        assert at < end
        assert size < larger
        assert (end - at) % size == 0


@given(st.integers(1, 64), st.integers(1, 8), st.integers(1, 8))
def test_padding_is_what_micro_batches_of_all_ranks_have_besides_the_batch(batch: int, micro: int, ranks: int) -> None:
    config = TrainingConfig(micro_batch_size=micro, global_batch_size=batch, pad_global_batch=True)
    computed = get_num_microbatches(config, ranks) * micro * ranks
    assert padding_samples(config, ranks, batch) == computed - batch
    assert 0 <= computed - batch < micro * ranks
    assert padding_samples(replace(config, pad_global_batch=False), ranks, batch) == 0


@given(st.integers(1, 64), st.integers(1, 8), st.integers(1, 8), st.integers(1, 1000))
def test_without_a_ramp(batch: int, micro: int, ranks: int, samples: int) -> None:
    fixed = TrainingConfig(global_batch_size=batch, train_samples=samples)
    assert rampup_stages(fixed, ranks) == [(0, batch)]
    assert final_iteration(fixed, ranks) == samples // batch
    derived = TrainingConfig(micro_batch_size=micro, train_iters=samples)
    assert full_global_batch_size(derived, ranks) == global_batch_size_at(derived, ranks, samples) == micro * ranks
    assert planned_samples(derived, ranks) == samples * micro * ranks
    assert final_iteration(derived, ranks) == samples
