"""Loss scale and spikes: which steps are skipped."""

from __future__ import annotations

import json
import math
import random
import statistics
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron.config.precision import PrecisionConfig
from megatron.optimizer.distributed_optimizer import UpdateResult
from megatron.training.components.precision import DynamicLossScaler, LossScaler
from megatron.training.components.spikes import SpikeGuard


@dataclass
class Machine:
    """Megatron-LM's rules in plain Python."""

    scale: float
    minimum: float
    window: int
    hysteresis: int
    good: int = 0
    left: int = field(init=False)

    def __post_init__(self) -> None:
        self.left = self.hysteresis

    def update(self, overflow: bool) -> None:
        if overflow:
            self.good = 0
            self.left -= 1
            if self.left <= 0:
                self.scale = max(self.scale / 2, self.minimum)
            return
        self.good += 1
        if self.good == self.window:
            self.good, self.left, self.scale = 0, self.hysteresis, self.scale * 2


@pytest.mark.parametrize("seed", range(8))
def test_follows_the_state_machine(seed: int) -> None:
    draw = random.Random(seed)
    window, hysteresis = draw.randint(1, 6), draw.randint(1, 4)
    minimum, odds = draw.choice([1.0, 256.0]), draw.choice([0.1, 0.3, 0.6])
    machine = Machine(65536.0, minimum, window, hysteresis)
    scaler = DynamicLossScaler(65536.0, "cpu", minimum=minimum, window=window, hysteresis=hysteresis)
    seen = set()
    for step in range(120):
        overflow = draw.random() < odds
        machine.update(overflow)
        scaler.update(torch.tensor(float(overflow)))
        assert scaler.scale.item() == machine.scale, f"step {step}"
        seen.add(machine.scale)
        if step == 60:  # a restart in the middle changes nothing
            resumed = DynamicLossScaler(1.0, "cpu", minimum=minimum, window=window, hysteresis=hysteresis)
            resumed.load_state_dict(scaler.state_dict())
            scaler = resumed
    assert len(seen) > 2


def test_update_never_reads_a_value() -> None:
    """Meta tensors have none, so any wait for the device would raise."""
    scaler = DynamicLossScaler(8.0, "meta")
    scaler.update(torch.empty((), dtype=torch.bool, device="meta"))
    assert scaler.scale.shape == ()
    with pytest.raises(RuntimeError):
        scaler.scale.item()


@pytest.mark.parametrize(
    ("dtype", "loss_scale", "expected"), [("fp16", 128.0, 128.0), ("bf16", None, 1.0), ("fp32", 64.0, 1.0)]
)
def test_constant_scales_stay(dtype: str, loss_scale: float | None, expected: float) -> None:
    scaler = LossScaler.from_config(PrecisionConfig(params_dtype=dtype, loss_scale=loss_scale), "cpu")
    for _ in range(2100):
        scaler.after_step(UpdateResult(*[torch.tensor(1.0)] * 5))
    assert scaler.scale.item() == expected
    assert scaler.state_dict() == {}
    assert scaler.minimum is None


def test_state_of_a_constant_scale_is_refused() -> None:
    constant, dynamic = LossScaler(1.0, "cpu"), DynamicLossScaler(1.0, "cpu")
    with pytest.raises(ValueError, match="no dynamic loss scale"):
        dynamic.load_state_dict(constant.state_dict())


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


def decisions(guard: SpikeGuard, history: list[tuple[float, float]]) -> list[bool]:
    return [bool(guard.is_spike(*torch.tensor([loss, norm], dtype=torch.float64))) for loss, norm in history]


@settings(max_examples=80, deadline=None, derandomize=True)
@given(steps, st.sampled_from([0.7, 1.3, 2.9]), st.integers(2, 7))
@example([(1.0, 1.0), (1.5, 1.0), (1.0, 1.0), (9.0, 1.0), (1.0, 9.0), (9.0, 9.0)], 2.9, 6)
def test_verdicts_match_a_plain_list(history: list[tuple[float, float]], deviations: float, window: int) -> None:
    assert decisions(SpikeGuard(deviations, window, "cpu"), history) == expected(history, deviations, window)


@pytest.mark.parametrize("seen", [0, 3, 8, 13])
@pytest.mark.parametrize("window", [4, 8, 20])
def test_state_goes_through_json_into_any_window(seen: int, window: int) -> None:
    generator = torch.Generator().manual_seed(seen)
    history = torch.rand(seen + 6, 2, generator=generator, dtype=torch.float64).tolist()
    before, after = SpikeGuard(0.5, 8, "cpu"), SpikeGuard(0.5, window, "cpu")
    decisions(before, history[:seen])
    state = json.loads(json.dumps(before.state_dict()))
    assert state == {"losses": [a for a, _ in history[:seen]][-8:], "grad_norms": [b for _, b in history[:seen]][-8:]}
    after.load_state_dict(state)
    fresh = SpikeGuard(0.5, window, "cpu")
    decisions(fresh, history[max(0, seen - 8) : seen])
    assert decisions(after, history[seen:]) == decisions(fresh, history[seen:])
