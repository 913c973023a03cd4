"""Spikes against a window kept in a list, with the statistics module."""

from __future__ import annotations

import json
import math
import statistics

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron.optimizer.loss_scaler import SpikeGuard

values = st.floats(-100, 100, width=16) | st.sampled_from([1e6, math.inf, math.nan])
steps = st.lists(st.tuples(values, values), max_size=20)


def expected(history: list[tuple[float, float]], deviations: float, window: int) -> list[bool]:
    """One verdict per step."""
    kept: list[tuple[float, float]] = []
    verdicts = []
    for step in history:
        finite = all(map(math.isfinite, step))
        ready = len(kept) >= max(2, window // 2)
        verdicts.append(
            finite
            and ready
            and any(x > statistics.mean(c) + deviations * statistics.stdev(c) for x, c in zip(step, zip(*kept)))
        )
        kept = [*kept, step][-window:] if finite else kept
    return verdicts


def told(guard: SpikeGuard, history: list[tuple[float, float]]) -> list[bool]:
    return [bool(guard.is_spike(*torch.tensor([loss, norm], dtype=torch.float64))) for loss, norm in history]


@settings(max_examples=80, deadline=None, derandomize=True)
@given(steps, st.sampled_from([0.7, 1.3, 2.9]), st.integers(2, 7))
@example([(1.0, 1.0), (1.5, 1.0), (1.0, 1.0), (9.0, 1.0), (1.0, 9.0), (9.0, 9.0)], 2.9, 6)
def test_verdicts_are_those_of_a_plain_list(history: list[tuple[float, float]], deviations: float, window: int) -> None:
    assert told(SpikeGuard(deviations, window, "cpu"), history) == expected(history, deviations, window)


def test_either_is_a_spike_and_only_upward() -> None:
    calm = [(2.0 + 0.01 * (i % 3), 1.0 + 0.01 * (i % 2)) for i in range(8)]
    for step, verdict in {(2.0, 1.0): False, (3.0, 1.0): True, (2.0, 2.0): True, (0.0, 0.0): False}.items():
        assert told(SpikeGuard(6.0, 8, "cpu"), [*calm, step])[-1] is verdict


def test_a_level_that_stays_is_a_spike_no_more() -> None:
    steps = [(1.0 + 0.01 * (i % 2), 1.0) for i in range(16)] + [(5.0 + 0.01 * (i % 2), 1.0) for i in range(16)]
    verdicts = told(SpikeGuard(3.0, 16, "cpu"), steps)
    assert verdicts[16]
    assert not any(verdicts[24:])


@pytest.mark.parametrize("seen", [0, 3, 8, 13])
@pytest.mark.parametrize("window", [4, 8, 20])
def test_state_goes_through_json_into_any_window(seen: int, window: int) -> None:
    generator = torch.Generator().manual_seed(seen)
    history = torch.rand(seen + 6, 2, generator=generator, dtype=torch.float64).tolist()
    before, after = SpikeGuard(0.5, 8, "cpu"), SpikeGuard(0.5, window, "cpu")
    told(before, history[:seen])
    state = json.loads(json.dumps(before.state_dict()))
    assert state == {"losses": [a for a, _ in history[:seen]][-8:], "grad_norms": [b for _, b in history[:seen]][-8:]}
    after.load_state_dict(state)
    fresh = SpikeGuard(0.5, window, "cpu")
    told(fresh, history[max(0, seen - 8) : seen])
    assert told(after, history[seen:]) == told(fresh, history[seen:])


def test_it_is_changed_in_place() -> None:
    """So that a recorded update can be repeated."""
    guard = SpikeGuard(3.0, 4, "cpu")
    before = [tensor.data_ptr() for tensor in vars(guard).values() if torch.is_tensor(tensor)]
    told(guard, [(1.0, 1.0)] * 3)
    assert before == [tensor.data_ptr() for tensor in vars(guard).values() if torch.is_tensor(tensor)]
