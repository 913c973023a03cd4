from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron.distributed import comm
from megatron.distributed.comm import Group
from megatron.distributed.timing import Timers
from megatron.optimizer.lr_scheduler import Rates
from megatron.training import metrics
from megatron.training.metrics import (
    Goodput,
    MetricsWindow,
    RankStats,
    StepMetrics,
    device_name,
    evaluation_metrics,
    peak_memory,
)

CPU = torch.device("cpu")


class Clock:
    """Stands in for time.perf_counter."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


@pytest.fixture
def nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of several ranks that are all in the same place."""
    monkeypatch.setattr(comm, "all_reduce", lambda x, group, op="sum": x)


def step(loss: float, grad_norm: float = 1.0, skipped: bool = False, loss_scale: float = 1.0) -> StepMetrics:
    scalars = map(torch.tensor, (loss, grad_norm, skipped, loss_scale, skipped))
    return StepMetrics(*scalars)


def times(record: dict[str, Any]) -> dict[str, Any]:
    """The timers."""
    return {name: x for name, x in record.items() if "-time" in name and name != "iteration-time"}


def waits(record: dict[str, Any]) -> dict[str, Any]:
    """The waits for other ranks."""
    return {name: x for name, x in record.items() if name.startswith("communication-")}


def test_a_window_becomes_one_record(clock: Clock) -> None:
    window = MetricsWindow(CPU, seq_length=10)
    window.add(step(4.0, grad_norm=0.5), samples=2)
    window.add(step(math.nan, grad_norm=math.inf, skipped=True, loss_scale=16.0), samples=4)
    window.add(step(2.0, grad_norm=0.25, loss_scale=8.0), samples=6)
    clock.now += 6.0
    record = window.read(iteration=30, consumed_samples=100, rates=Rates(0.1, 0.01))
    assert (record["iteration"], record["consumed-samples"], record["consumed-tokens"]) == (30, 100, 1000)
    assert record["lm loss"] == 3.0  # of the two steps that have one
    assert record["skipped-iterations"] == [29]
    assert (record["grad-norm"], record["loss-scale"], record["batch-size"]) == (0.25, 8.0, 6)
    assert (record["learning-rate"], record["weight-decay"]) == (0.1, 0.01)
    assert record["iteration-time"] == 2.0
    assert record["tokens-per-second"] == (2 + 4 + 6) * 10 / 6.0


def test_reading_starts_a_new_window(clock: Clock) -> None:
    window = MetricsWindow(CPU, seq_length=1)
    for loss in (1.0, 5.0):
        window.add(step(loss), samples=1)
        clock.now += 2.0
        record = window.read(iteration=1, consumed_samples=1, rates=Rates(0.0, 0.0))
        assert (record["lm loss"], record["iteration-time"]) == (loss, 2.0)
    with pytest.raises(ValueError, match="no step"):
        window.read(iteration=1, consumed_samples=1, rates=Rates(0.0, 0.0))


def test_a_skipped_update_has_a_loss(clock: Clock) -> None:
    """A gradient that overflows in 16 bits says nothing against the loss."""
    window = MetricsWindow(CPU, seq_length=1)
    window.add(step(3.0, grad_norm=math.inf, skipped=True), samples=1)
    clock.now += 1.0
    record = window.read(iteration=1, consumed_samples=1, rates=Rates(0.0, 0.0))
    assert (record["lm loss"], record["skipped-iterations"]) == (3.0, [1])


def test_spikes_are_skips_with_a_finite_gradient(clock: Clock) -> None:
    window = MetricsWindow(CPU, seq_length=1)
    for nonfinite in (True, False, False):
        window.add(replace(step(3.0, skipped=True), nonfinite=torch.tensor(nonfinite)), samples=1)
    window.add(replace(step(3.0), nonfinite=torch.tensor(False)), samples=1)
    clock.now += 1.0
    record = window.read(iteration=8, consumed_samples=1, rates=Rates(0.0, 0.0))
    assert (record["skipped-iterations"], record["spikes-skipped"]) == ([5, 6, 7], 2)


def test_one_rank_alone_has_nobody_to_wait_for(clock: Clock) -> None:
    timers = Timers(1, CPU)
    window = MetricsWindow(CPU, seq_length=1, timers=timers, timing_option="all")
    for _ in range(2):
        for name in ("batch-generator", "optimizer"):
            with timers(name):
                clock.now += 0.5
        window.add(step(3.0), samples=1)
    record = window.read(iteration=2, consumed_samples=2, rates=Rates(0.0, 0.0))
    assert (record["iteration-time"], record["data-wait"]) == (1.0, 0.5)
    assert times(record) == {"batch-generator-time": 0.5, "optimizer-time": 0.5}
    assert not {"communication-share", "mem-max-rank", "slowest-rank", "slowest-rank-excess"} & record.keys()
    assert not waits(record)


def test_what_happened_before_the_first_step_and_in_pauses_is_not_of_the_steps(clock: Clock, nobody_else: None) -> None:
    timers = Timers(1, CPU)
    group = Group((0, 1), 0, None, "tp")

    def wait() -> None:
        with timers("optimizer"), group.blocked(torch.zeros(())):
            clock.now += 1.0

    wait()
    window = MetricsWindow(CPU, seq_length=1, world=group, timers=timers)
    wait()
    window.add(step(3.0), samples=1)
    with window.paused():
        wait()
    record = window.read(iteration=1, consumed_samples=1, rates=Rates(0.0, 0.0), alone=True)
    assert record["iteration-time"] == 1.0
    assert waits(record) == {"communication-tp": 1.0, "communication-share": 1.0}
    assert times(record) == {"optimizer-time": 1.0}


def test_bytes_are_those_of_a_step_and_pauses_send_none_of_them(clock: Clock, nobody_else: None) -> None:
    group = Group((0, 1), 0, None, "tp")
    group.sends("all-reduce", 100.0)  # before the first step
    window = MetricsWindow(CPU, seq_length=1, world=group)
    for _ in range(2):
        clock.now += 1.0
        group.sends("all-reduce", 6.0)
        group.sends("send", 8.0)
        window.add(step(3.0), samples=1)
    with window.paused():
        group.sends("send", 100.0)
    record = window.read(iteration=2, consumed_samples=2, rates=Rates(0.0, 0.0), alone=True)
    assert record["sent-bytes-tp"] == 7.0


def test_waits_that_nobody_sees_are_not_told_as_none(clock: Clock, nobody_else: None) -> None:
    window = MetricsWindow(CPU, seq_length=1, world=Group((0, 1), 0, None, "tp"), recorded="step")
    clock.now += 1.0
    window.add(step(3.0), samples=1)
    record = window.read(iteration=1, consumed_samples=1, rates=Rates(0.0, 0.0), alone=True)
    assert waits(record) == {}


@pytest.mark.parametrize(
    ("recorded", "told"),
    [
        ("none", {"batch-generator", "forward-backward", "optimizer", "optimizer-inner-step"}),
        ("optimizer", {"batch-generator", "forward-backward", "optimizer"}),
        ("step", {"batch-generator"}),
    ],
)
def test_phases_of_the_few_steps_that_were_not_replayed_are_not_told_as_those_of_all(
    clock: Clock, recorded: str, told: set[str]
) -> None:
    timers = Timers(2, CPU)
    window = MetricsWindow(CPU, seq_length=1, timers=timers, recorded=recorded)
    for name in ("batch-generator", "forward-backward", "optimizer", "optimizer-inner-step"):
        with timers(name):
            clock.now += 1.0
    window.add(step(3.0), samples=1)
    record = window.read(iteration=1, consumed_samples=1, rates=Rates(0.0, 0.0))
    assert times(record).keys() == {f"{name}-time" for name in told}


def test_asking_the_ranks_is_no_communication_of_the_next_steps(
    clock: Clock, nobody_else: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Group((0, 1), 0, None, "world")

    def gather(mine: RankStats, world: Group, device: torch.device) -> list[RankStats]:
        with world.blocked(torch.zeros(())):
            clock.now += 1.0
        return [mine, mine]

    monkeypatch.setattr(metrics, "gather_rank_stats", gather)
    window = MetricsWindow(CPU, seq_length=1, world=group)
    for _ in range(2):
        with group.blocked(torch.zeros(())):
            clock.now += 0.25
        window.add(step(3.0), samples=1)
        record = window.read(iteration=1, consumed_samples=1, rates=Rates(0.0, 0.0))
        assert record["communication-world"] == 0.25


def test_steps_count_towards_goodput_before_a_pause_ends_and_once(clock: Clock) -> None:
    """A checkpoint is written in a pause, and its state holds the steps up to there."""
    goodput = Goodput()
    window = MetricsWindow(CPU, seq_length=1, goodput=goodput)
    clock.now += 4.0
    window.add(step(3.0), samples=1)
    with window.paused():
        assert goodput.productive_seconds == 4.0
        clock.now += 100.0
    for seconds in (7.0, 10.0):
        clock.now += 3.0
        window.add(step(3.0), samples=1)
        window.read(iteration=2, consumed_samples=2, rates=Rates(0.0, 0.0))
        assert goodput.productive_seconds == seconds


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_no_finite_loss_is_no_loss(clock: Clock, loss: float) -> None:
    window = MetricsWindow(CPU, seq_length=1)
    window.add(step(loss, skipped=True), samples=1)
    clock.now += 1.0
    assert math.isnan(window.read(iteration=1, consumed_samples=1, rates=Rates(0.0, 0.0))["lm loss"])


def test_pauses_do_not_count(clock: Clock) -> None:
    window = MetricsWindow(CPU, seq_length=1)
    window.add(step(1.0), samples=1)
    clock.now += 1.0
    with window.paused():
        clock.now += 100.0
    clock.now += 2.0
    assert window.read(iteration=1, consumed_samples=1, rates=Rates(0.0, 0.0))["iteration-time"] == 3.0


def test_a_pause_that_fails_does_not_count_either(clock: Clock) -> None:
    """The steps before an evaluation that fails are still read, for the last log line."""
    window = MetricsWindow(CPU, seq_length=1)
    window.add(step(1.0), samples=1)
    clock.now += 1.0

    def fail() -> None:
        with window.paused():
            clock.now += 100.0
            raise OSError("evaluation")

    with pytest.raises(OSError, match="evaluation"):
        fail()
    assert window.read(iteration=1, consumed_samples=1, rates=Rates(0.0, 0.0), alone=True)["iteration-time"] == 1.0


def test_adding_a_step_reads_no_value() -> None:
    """Meta tensors have none, so any wait for the device would raise."""
    scalar = torch.empty((), device="meta")
    window = MetricsWindow(torch.device("meta"), seq_length=1)
    window.add(StepMetrics(scalar, scalar, scalar.bool(), scalar, scalar.bool()), samples=1)
    with pytest.raises(NotImplementedError):
        window.read(iteration=1, consumed_samples=1, rates=Rates(0.0, 0.0))


def test_memory_covers_what_this_process_holds() -> None:
    block = torch.ones(32 * 2**20, dtype=torch.float64)  # 256 MiB
    used, total = peak_memory(CPU)
    assert block.nbytes < used < total


def test_device_name_of_a_cpu() -> None:
    assert device_name(CPU) == "cpu"


def test_perplexity() -> None:
    assert evaluation_metrics("valid", math.log(7.0))["lm loss validation ppl"] == pytest.approx(7.0)
    assert evaluation_metrics("test", 1e6)["lm loss test ppl"] == math.inf
