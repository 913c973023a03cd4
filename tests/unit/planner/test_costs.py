"""The costs of a run against formulas by hand, and the interval of saves against the exact expectation."""

from __future__ import annotations

import math

import pytest

from megatron.arguments.cli import parse
from megatron.config.run import RunConfig
from megatron.planner.costs import RunCosts, Terms, best_save_interval
from megatron.planner.hardware import Cluster, accelerators
from megatron.planner.memory import max_peak_bytes
from megatron.planner.search import Plan
from megatron.planner.step_time import step_time

CLUSTER = Cluster.of(accelerators()["h100-80g"])
FLAGS = (
    "--check-config --mock-data --preset gpt3-175b --bf16 --train-iters 10 --global-batch-size 1536 --world-size 1024"
    " --tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 8 --use-distributed-optimizer"
)


def plan_of(flags: str = "") -> Plan:
    config: RunConfig = parse(f"{FLAGS} {flags}".split(), {}).config
    return Plan({}, config, step_time(config, 1024, CLUSTER), max_peak_bytes(config, 1024))


def test_costs_are_those_of_the_formulas() -> None:
    plan, terms = plan_of(), Terms(tokens=300e9, price=2.5, watts=1000, mtbf=50_000, storage=1e9)
    cost = RunCosts.of(plan, 1024, CLUSTER, terms)
    steps = math.ceil(300e9 / (1536 * 2048))
    hours = steps * plan.time.seconds / 3600
    assert (cost.steps, cost.days, cost.gpu_hours) == (steps, pytest.approx(hours / 24), pytest.approx(1024 * hours))
    assert (cost.price, cost.energy) == (pytest.approx(2.5 * 1024 * hours), pytest.approx(1024 * hours))
    layers, h, s, vocabulary = 96, 12288, 2048, 50257
    n = 12 * layers * h * h + vocabulary * h
    done = 1536 * s / plan.time.seconds / 1024 / 989.4e12
    assert cost.mfu == pytest.approx((6 * n + 12 * layers * h * s) * done)
    assert cost.mfu_causal == pytest.approx((6 * n + 6 * layers * h * s) * done)
    assert cost.hfu == cost.mfu
    parameters = 174.6e9
    assert cost.checkpoint == pytest.approx(12 * parameters, rel=2e-3)  # fp32 weights and two moments
    assert (cost.save, cost.mtbf) == (pytest.approx(cost.checkpoint / 128e9), pytest.approx(50_000 * 3600 / 1024))


def test_asynchronous_saves_wait_for_the_copy_alone() -> None:
    terms = Terms(tokens=300e9, price=None, watts=700, mtbf=50_000, storage=1e9)
    plain, copied = (RunCosts.of(plan_of(flags), 1024, CLUSTER, terms) for flags in ("", "--save runs/a --async-save"))
    assert copied.save == pytest.approx(plain.checkpoint / 1024 / CLUSTER.accelerator.host.bandwidth)
    assert copied.write == plain.write == plain.save > copied.save
    assert plain.interval > copied.interval >= copied.write
    assert plain.days < copied.days_with_failures < plain.days_with_failures


def test_recomputation_counts_in_hfu_alone() -> None:
    terms = Terms(tokens=300e9, price=None, watts=700)
    cost = RunCosts.of(plan_of("--recompute-granularity full"), 1024, CLUSTER, terms)
    assert cost.price is None
    layers, h, s, vocabulary = 96, 12288, 2048, 50257
    blocks, head = 12 * layers * h * h, vocabulary * h
    again = 8 * blocks + 6 * head + 16 * layers * h * s
    assert cost.hfu / cost.mfu == pytest.approx(again / (6 * (blocks + head) + 12 * layers * h * s))


def expected_time(interval: float, save: float, mtbf: float) -> float:
    """Return the expected time per time of work when failures are a Poisson process (Daly 2006, equation 13)."""
    return mtbf * (math.exp((interval + save) / mtbf) - 1) / interval


@pytest.mark.parametrize("save", [1.0, 30.0, 600.0])
@pytest.mark.parametrize("mtbf", [3600.0, 86400.0, 30 * 86400.0])
def test_the_interval_of_saves_loses_least(save: float, mtbf: float) -> None:
    found = best_save_interval(save, mtbf)
    least = min(expected_time(found * 1.02**n, save, mtbf) for n in range(-150, 150))
    assert expected_time(found, save, mtbf) == pytest.approx(least, rel=2e-4)


def test_saves_that_take_longer_than_failures_are_apart() -> None:
    assert best_save_interval(100.0, 40.0) == 40.0
