from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers.optimization as hf

from megatron.config.batch import lr_scale, schedule_lengths
from megatron.config.optimizer import OptimizerConfig
from megatron.config.run import RunConfig
from megatron.config.training import TrainingConfig
from megatron.optimizer.lr_scheduler import LearningRateSchedule

STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
WSD_STYLES = ("exponential", "linear", "cosine", "minus_sqrt")


def schedule(*, total: int = 1000, batch: int = 1, **options: Any) -> LearningRateSchedule:
    training = TrainingConfig(train_samples=total, global_batch_size=batch)
    config = RunConfig(optimizer=OptimizerConfig(**options), training=training)
    return LearningRateSchedule.from_config(config.optimizer, schedule_lengths(config, 1))


# lr 1, min_lr 0.1, warm-up from 0.2 over 100 samples, decay until 900, WSD over the last 400 of these.
# Worked by hand from the formulas of Megatron-LM's scheduler.
HALF_WAY = {"exponential": 2 * math.sqrt(0.5) - 1, "linear": 0.5, "cosine": 0.5, "minus_sqrt": 1 - math.sqrt(0.5)}
TABLE: list[tuple[str, str, int, float]] = [
    *[(style, "linear", 0, 0.2) for style in STYLES],
    *[(style, "linear", 50, 0.6) for style in STYLES],
    *[(style, "linear", 100, 1.0) for style in STYLES],
    *[(style, "linear", 901, 0.1) for style in STYLES if style != "constant"],
    ("constant", "linear", 901, 1.0),
    ("linear", "linear", 500, 0.55),
    ("linear", "linear", 300, 0.775),
    ("linear", "linear", 900, 0.1),
    ("cosine", "linear", 500, 0.55),
    ("cosine", "linear", 300, 0.1 + 0.9 * 0.5 * (1 + math.sqrt(0.5))),
    ("cosine", "linear", 900, 0.1),
    ("inverse-square-root", "linear", 400, 0.5),
    ("inverse-square-root", "linear", 900, 1 / 3),
    *[("WSD", style, 500, 1.0) for style in WSD_STYLES],
    *[("WSD", style, 700, 0.1 + 0.9 * share) for style, share in HALF_WAY.items()],
    *[("WSD", style, 900, 0.1) for style in WSD_STYLES],
]


@pytest.mark.parametrize(("style", "wsd_style", "samples", "expected"), TABLE)
def test_worked_values(style: str, wsd_style: str, samples: int, expected: float) -> None:
    found = schedule(
        lr=1.0,
        min_lr=0.1,
        lr_warmup_init=0.2,
        lr_warmup_samples=100,
        lr_decay_samples=900,
        lr_decay_style=style,
        lr_wsd_decay_samples=400,
        lr_wsd_decay_style=wsd_style,
    )
    assert found.learning_rate(samples) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("floor", [None, 0.05])
def test_the_decoupled_rate_matches_a_run_with_its_peak_and_floor(style: str, floor: float | None) -> None:
    """As in Megatron-LM, whose groups have a largest and a smallest rate of their own in one schedule."""
    options = {"lr_decay_style": style, "lr_wsd_decay_samples": 400, "lr_warmup_init": 0.02, "lr_warmup_samples": 100}
    both = schedule(lr=1.0, min_lr=0.1, decoupled_lr=0.5, decoupled_min_lr=floor, **options)
    alone = schedule(lr=0.5, min_lr=0.1 if floor is None else floor, **options)
    plain = schedule(lr=1.0, min_lr=0.1, **options)
    for samples in (0, 60, 100, 300, 777, 1000):
        rates = both.rates(samples)
        assert rates.decoupled_lr == alone.learning_rate(samples)
        assert rates.lr == plain.learning_rate(samples)
        assert plain.rates(samples).decoupled_lr is None


@pytest.mark.parametrize(("rule", "factor"), [("none", 1.0), ("linear", 4.0), ("sqrt", 2.0)])
@pytest.mark.parametrize("style", STYLES)
def test_scaled_rates_match_a_run_with_scaled_options(style: str, rule: str, factor: float) -> None:
    options = {"lr_decay_style": style, "lr_wsd_decay_samples": 400, "lr_warmup_init": 0.02, "lr_warmup_samples": 100}
    rates = {"lr": 0.75, "min_lr": 0.125, "decoupled_lr": 0.5, "decoupled_min_lr": 0.0625}
    training = TrainingConfig(train_samples=1000, global_batch_size=64, rampup_batch_size=(16, 16, 300))
    base = None if rule == "none" else 16
    config = RunConfig(
        optimizer=OptimizerConfig(lr_scaling=rule, lr_base_batch_size=base, **rates, **options), training=training
    )
    lengths, scale = schedule_lengths(config, 1), lr_scale(config, 1)
    scaled = LearningRateSchedule.from_config(config.optimizer, lengths, scale)
    by_hand = OptimizerConfig(**{name: rate * factor for name, rate in rates.items()}, **options)
    assert scaled == LearningRateSchedule.from_config(by_hand, lengths)
    assert scaled.learning_rate(0) == 0.02, "the warm-up begins where it did"
    assert scaled.learning_rate(100) == 0.75 * factor, "the batch is 32 there, but the full one counts"


def hf_rates(make: Callable[..., Any], steps: int, **options: Any) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=3e-4)
    scheduler = make(optimizer, **options)
    rates = []
    for _ in range(steps):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return rates


ORACLES: dict[str, tuple[dict[str, Any], Callable[..., Any], dict[str, Any]]] = {
    "constant": ({"lr_decay_style": "constant"}, hf.get_constant_schedule_with_warmup, {}),
    "linear": ({"lr_decay_style": "linear"}, hf.get_linear_schedule_with_warmup, {"num_training_steps": 200}),
    "cosine": ({"lr_decay_style": "cosine"}, hf.get_cosine_schedule_with_warmup, {"num_training_steps": 200}),
    "cosine to a floor": (
        {"lr_decay_style": "cosine", "min_lr": 3e-5},
        hf.get_cosine_with_min_lr_schedule_with_warmup,
        {"num_training_steps": 200, "min_lr_rate": 0.1},
    ),
    "inverse sqrt": ({"lr_decay_style": "inverse-square-root"}, hf.get_inverse_sqrt_schedule, {}),
    **{
        f"WSD {ours}": (
            {"lr_decay_style": "WSD", "lr_wsd_decay_style": ours, "lr_wsd_decay_iters": 50},
            hf.get_wsd_schedule,
            {"num_decay_steps": 50, "num_stable_steps": 130, "decay_type": theirs},
        )
        for ours, theirs in (("linear", "linear"), ("cosine", "cosine"), ("minus_sqrt", "1-sqrt"))
    },
}


@pytest.mark.parametrize("name", ORACLES)
def test_equals_transformers(name: str) -> None:
    """200 steps of 8 samples, 20 of them warm-up, whichever unit the lengths are given in."""
    options, make, theirs = ORACLES[name]
    expected = hf_rates(make, 200, num_warmup_steps=20, **theirs)
    ours = schedule(total=1600, batch=8, lr=3e-4, lr_warmup_iters=20, **options)
    assert [ours.learning_rate(8 * step) for step in range(200)] == pytest.approx(expected, rel=1e-9, abs=1e-18)


@pytest.mark.parametrize(
    ("style", "samples", "expected"),
    [
        ("constant", 0, 0.1),
        ("constant", 5000, 0.1),
        ("linear", 0, 0.02),
        ("linear", 250, 0.04),
        ("linear", 1000, 0.1),
        ("linear", 1001, 0.1),
        ("cosine", 0, 0.02),
        ("cosine", 250, 0.02 + 0.08 * 0.5 * (1 - math.sqrt(0.5))),
        ("cosine", 500, 0.06),
        ("cosine", 1000, 0.1),
    ],
)
def test_weight_decay(style: str, samples: int, expected: float) -> None:
    start = 0.1 if style == "constant" else 0.02
    run = schedule(weight_decay_incr_style=style, start_weight_decay=start, end_weight_decay=0.1)
    assert run.weight_decay(samples) == pytest.approx(expected, rel=1e-12)
