from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch

from megatron.config.run import PrecisionConfig
from megatron.optimizer.loss_scaler import LossScaler


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
    scaler = LossScaler(65536.0, "cpu", dynamic=True, minimum=minimum, window=window, hysteresis=hysteresis)
    seen = set()
    for step in range(120):
        overflow = draw.random() < odds
        machine.update(overflow)
        scaler.update(torch.tensor(float(overflow)))
        assert scaler.scale.item() == machine.scale, f"step {step}"
        seen.add(machine.scale)
        if step == 60:  # a restart in the middle changes nothing
            resumed = LossScaler(1.0, "cpu", dynamic=True, minimum=minimum, window=window, hysteresis=hysteresis)
            resumed.load_state_dict(scaler.state_dict())
            scaler = resumed
    assert len(seen) > 2


def test_the_scale_is_one_tensor_for_good() -> None:
    """A recorded step repeats what was done to it."""
    scaler = LossScaler(8.0, "cpu", dynamic=True, hysteresis=1)
    scale = scaler.scale
    scaler.update(torch.tensor(True))
    assert (scale.item(), scaler.scale is scale) == (4.0, True)


def test_update_never_reads_a_value() -> None:
    """Meta tensors have none, so any wait for the device would raise."""
    scaler = LossScaler(8.0, "meta", dynamic=True)
    scaler.update(torch.empty((), dtype=torch.bool, device="meta"))
    assert scaler.scale.shape == ()
    with pytest.raises(RuntimeError):
        scaler.scale.item()


def test_fp16_is_dynamic_by_default() -> None:
    config = PrecisionConfig(
        params_dtype="fp16", initial_loss_scale=2.0**20, min_loss_scale=2.0**19, loss_scale_window=3, hysteresis=1
    )
    scaler = LossScaler.from_config(config, "cpu")
    scales = []
    for overflow in (True, True, False, False, False):
        scaler.update(torch.tensor(overflow))
        scales.append(scaler.scale.item() / 2.0**19)
    assert scales == [1, 1, 1, 1, 2]


@pytest.mark.parametrize(
    ("dtype", "loss_scale", "expected"), [("fp16", 128.0, 128.0), ("bf16", None, 1.0), ("fp32", 64.0, 1.0)]
)
def test_constant_scales_stay(dtype: str, loss_scale: float | None, expected: float) -> None:
    scaler = LossScaler.from_config(PrecisionConfig(params_dtype=dtype, loss_scale=loss_scale), "cpu")
    for _ in range(2100):
        scaler.update(torch.tensor(True))
    assert scaler.scale.item() == expected
    assert scaler.state_dict() == {}
    assert not scaler.can_shrink(scaler.scale)


def test_can_shrink_until_the_minimum() -> None:
    scaler = LossScaler(4.0, "cpu", dynamic=True, minimum=2.0, hysteresis=1)
    assert scaler.can_shrink(scaler.scale)
    scaler.update(torch.tensor(True))
    assert not scaler.can_shrink(scaler.scale)


def test_state_of_a_constant_scale_is_refused() -> None:
    constant, dynamic = LossScaler(1.0, "cpu"), LossScaler(1.0, "cpu", dynamic=True)
    with pytest.raises(ValueError, match="no dynamic loss scale"):
        dynamic.load_state_dict(constant.state_dict())


def test_a_window_that_was_made_shorter_grows_at_the_next_good_step() -> None:
    scaler = LossScaler(8.0, "cpu", dynamic=True, window=3)
    scaler.load_state_dict({"scale": 8.0, "good_steps": 7, "lives": 2})
    scaler.update(torch.tensor(0.0))
    assert scaler.state_dict() == {"scale": 16.0, "good_steps": 0, "lives": 2}
