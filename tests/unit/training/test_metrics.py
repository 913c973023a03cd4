"""Metrics of a log line: of the steps, compared between ranks, against the hardware, and their documentation."""

from __future__ import annotations

import math
import re
import statistics
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.config.model import ModelConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.precision import PrecisionConfig
from megatron.config.router import LOSS_NAMES
from megatron.config.run import RunConfig
from megatron.config.training import TrainingConfig
from megatron.distributed import comm
from megatron.distributed.comm import BUBBLE, Group
from megatron.distributed.timing import PHASES, Timers
from megatron.optimizer.lr_scheduler import Rates
from megatron.planner.flops import FlopsPerToken
from megatron.training import metrics
from megatron.training.callbacks.health import summarize_health
from megatron.training.checkpointer import Checkpointer, SavedCheckpoint
from megatron.training.loggers.base import Metrics
from megatron.training.loggers.console import (
    CONSOLE_PREFIX,
    EVALUATION_METRICS,
    MEMORY_CAPACITY,
    METRICS,
    ON_GPU,
    SECONDS_LEFT,
    TOTAL_ITERATIONS,
)
from megatron.training.loggers.feature_metrics import POWER_METRICS
from megatron.training.metrics import (
    BUBBLE_TIME,
    Goodput,
    MetricsWindow,
    RankStats,
    StepMetrics,
    ThroughputModel,
    compare_ranks,
    evaluation_metrics,
    peak_flops,
    peak_memory,
    timer_metrics,
)
from tests.kit.runs import before_step, kill, records, start, tiny_run
from tools.generate_docs import LOGS, logs_page

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
def single_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of several ranks that are all in the same place."""
    monkeypatch.setattr(comm, "all_reduce", lambda x, group, op="sum": x)
    monkeypatch.setattr(metrics, "gather_rank_stats", lambda mine, world, device: [mine])


def step(loss: float, grad_norm: float = 1.0, skipped: bool = False, loss_scale: float = 1.0) -> StepMetrics:
    scalars = map(torch.tensor, (loss, grad_norm, skipped, loss_scale, skipped))
    return StepMetrics(*scalars)


def of_rank(seconds: float, waits: dict[str, float], timers: dict[str, float]) -> dict[str, float]:
    """Measurements of one rank, by metric."""
    return {
        "iteration-time": seconds,
        **{f"communication-{axes}": wait for axes, wait in waits.items()},
        **{f"{name}-time": seconds for name, seconds in timers.items()},
        "mem-max-allocated-bytes": 10,
        MEMORY_CAPACITY: 80,
    }


def times(record: dict[str, Any]) -> dict[str, Any]:
    """The timers."""
    return {name: x for name, x in record.items() if "-time" in name and name != "iteration-time"}


def waits(record: dict[str, Any]) -> dict[str, Any]:
    """The waits for other ranks."""
    return {name: x for name, x in record.items() if name.startswith("communication-")}


def read(window: MetricsWindow, steps: int = 1, **options: Any) -> dict[str, Any]:
    """Read after ``steps`` steps of one sample."""
    return window.read(iteration=steps, consumed_samples=steps, rates=Rates(0.0, 0.0), **options)


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


def test_a_step_that_was_not_computed_has_no_part_in_speed_and_last_values(clock: Clock) -> None:
    window = MetricsWindow(CPU, seq_length=10)
    window.add(step(4.0, grad_norm=0.5), samples=2)
    window.add(StepMetrics.of_nothing(torch.tensor(1.0), ()), samples=4, computed=False)
    clock.now += 5.0
    record = read(window, 8)
    assert (record["lm loss"], record["grad-norm"], record["tokens-per-second"]) == (4.0, 0.5, 4.0)
    assert (record["skipped-iterations"], record["spikes-skipped"], window.computed) == ([8], 0, 0)


def test_reading_starts_a_new_window_and_spikes_are_skips_with_a_finite_gradient(clock: Clock) -> None:
    window = MetricsWindow(CPU, seq_length=1)
    window.add(step(1.0), samples=1)
    clock.now += 2.0
    assert read(window)["iteration-time"] == 2.0
    for nonfinite in (True, False, False):
        window.add(replace(step(3.0, skipped=True), nonfinite=torch.tensor(nonfinite)), samples=1)
    window.add(step(3.0), samples=1)
    clock.now += 2.0
    record = read(window, 8)
    assert (record["skipped-iterations"], record["skipped-iterations-count"]) == ([5, 6, 7], 3)
    assert (record["spikes-skipped"], record["lm loss"]) == (2, 3.0)  # a skipped update has a loss
    assert record["iteration-time"] == 0.5
    with pytest.raises(ValueError, match="no step"):
        read(window)


def test_one_rank_alone_has_no_waits(clock: Clock) -> None:
    timers = Timers(1, CPU)
    window = MetricsWindow(CPU, seq_length=1, timers=timers, timing_option="all")
    for _ in range(2):
        for name in ("batch-generator", "optimizer"):
            with timers(name):
                clock.now += 0.5
        window.add(step(3.0), samples=1)
    record = read(window, 2)
    assert (record["iteration-time"], record["data-wait"]) == (1.0, 0.5)
    assert times(record) == {"batch-generator-time": 0.5, "optimizer-time": 0.5}
    several = re.compile(r"communication|sent|bubble|slowest|mem-max-rank|.*-time-|decoupled|samples-digest")
    assert not {name for name in record if several.match(name)}


def test_times_before_the_first_step_and_in_pauses_are_excluded(clock: Clock, single_process: None) -> None:
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
    record = read(window)
    assert record["iteration-time"] == 1.0
    assert waits(record) == {"communication-tp": 1.0, "communication-share": 1.0}
    assert times(record) == {"optimizer-time": 1.0}


def test_sent_bytes_are_per_step_without_pauses(clock: Clock, single_process: None) -> None:
    group = Group((0, 1), 0, None, "tp")
    group.called("all-reduce", torch.zeros(()), 100.0)  # before the first step
    window = MetricsWindow(CPU, seq_length=1, world=group)
    for _ in range(2):
        clock.now += 1.0
        group.called("all-reduce", torch.zeros(()), 6.0)
        group.called("send", torch.zeros(()), 8.0)
        window.add(step(3.0), samples=1)
    with window.paused():
        group.called("send", torch.zeros(()), 100.0)
    record = read(window, 2)
    assert record["sent-bytes-tp"] == 7.0


@pytest.mark.parametrize(
    ("captured", "expected"),
    [
        ("none", {"batch-generator", "forward-backward", "optimizer", "optimizer-inner-step"}),
        ("optimizer", {"batch-generator", "forward-backward", "optimizer"}),
        ("step", {"batch-generator"}),
    ],
)
def test_what_a_graph_replays_is_not_measured_and_not_reported_as_zero(
    clock: Clock, single_process: None, captured: str, expected: set[str]
) -> None:
    timers, group = Timers(2, CPU), Group((0, 1), 0, None, "tp")
    window = MetricsWindow(CPU, seq_length=1, world=group, timers=timers)
    for name in ("batch-generator", "forward-backward", "optimizer", "optimizer-inner-step"):
        with timers(name), group.blocked(torch.zeros(())):
            clock.now += 1.0
    window.add(step(3.0), samples=1)
    record = read(window, captured=captured)
    assert times(record).keys() == {f"{name}-time" for name in expected}
    assert bool(waits(record)) is (captured != "step")


def test_asking_the_ranks_is_no_communication_of_the_next_steps(
    clock: Clock, single_process: None, monkeypatch: pytest.MonkeyPatch
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
        record = read(window)
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
        read(window, 2)
        assert goodput.productive_seconds == seconds


def test_no_finite_loss_is_no_loss(clock: Clock) -> None:
    window = MetricsWindow(CPU, seq_length=1)
    for loss in (math.nan, math.inf):
        window.add(step(loss, skipped=True), samples=1)
    clock.now += 1.0
    assert math.isnan(read(window)["lm loss"])


def test_a_pause_that_fails_does_not_count_either(clock: Clock) -> None:
    """The steps before an evaluation that fails are still read, for the last log line."""
    window = MetricsWindow(CPU, seq_length=1)
    window.add(step(1.0), samples=1)
    clock.now += 1.0
    with suppress(OSError), window.paused():
        clock.now += 100.0
        raise OSError("evaluation")
    assert read(window, alone=True)["iteration-time"] == 1.0


def test_a_step_that_fails_or_stalls_is_no_training(clock: Clock, single_process: None) -> None:
    timers, group, goodput = Timers(2, CPU), Group((0, 1), 0, None, "dp"), Goodput()
    window = MetricsWindow(CPU, seq_length=8, world=group, timers=timers, goodput=goodput)
    for _ in range(2):
        clock.now += 2.0
        window.add(step(1.0), samples=1)
    with suppress(OSError), timers("batch-generator"), group.blocked(torch.zeros(())):
        clock.now += 600.0
        raise OSError("timed out")
    record = read(window, 2, alone=True)
    assert (record["iteration-time"], record["tokens-per-second"], goodput.productive_seconds) == (2.0, 4.0, 4.0)
    assert waits(record) == times(record) == {}
    assert "data-wait" not in record


def test_adding_a_step_reads_no_value() -> None:
    """Meta tensors have none, so any wait for the device would raise."""
    scalar = torch.empty((), device="meta")
    window = MetricsWindow(torch.device("meta"), seq_length=1)
    window.add(StepMetrics(scalar, scalar, scalar.bool(), scalar, scalar.bool()), samples=1)
    with pytest.raises(NotImplementedError):
        read(window)


def test_memory_covers_the_allocations_of_this_process() -> None:
    block = torch.ones(2**20, dtype=torch.float64)
    used, total = peak_memory(CPU)
    assert block.nbytes < used < total


def test_perplexity() -> None:
    assert evaluation_metrics("valid", math.log(7.0))["lm loss validation ppl"] == pytest.approx(7.0)
    assert evaluation_metrics("test", 1e6)["lm loss test ppl"] == math.inf


def everything() -> dict[str, Any]:
    """A log line with every metric that there is."""
    ranks = [
        of_rank(2.0, {"tp": 0.1, BUBBLE: 0.1}, dict.fromkeys(PHASES, 1.0 + rank)) | {"sent-bytes-tp": 1.0}
        for rank in range(2)
    ]
    window = MetricsWindow(CPU, 8, world=Group((0, 1), 0, None, "tp"), timers=Timers(2, CPU))
    losses = (*LOSS_NAMES.values(), "z_loss", "mtp loss 1", "mtp loss 2", "source loss web")
    router = {name: torch.zeros(()) for name in losses}
    window.add(replace(step(1.0, skipped=True), nonfinite=torch.tensor(False), extra=router), samples=1)
    config = RunConfig(model=ModelConfig(vocab_size=64), training=TrainingConfig(seq_length=8, train_iters=1))
    with patch.object(metrics, "gather_rank_stats", lambda *arguments: ranks):
        found = window.read(
            iteration=1, consumed_samples=1, rates=Rates(0.1, 0.01, decoupled_lr=0.2), samples_digest="0"
        )
    for option in ("minmax", "all"):
        found |= timer_metrics(ranks, option)
    return (
        found
        | ThroughputModel.from_config(config, 2, "cpu").metrics(found)
        | {**dict.fromkeys(POWER_METRICS, 1.0), "world-size": 2, "phase": "main", "rewinds": 1}
    )


def general(logged: Iterable[str]) -> set[str]:
    """Names with AXES and TIMER in the place of what they stand for, without metrics of the console."""
    timers = "|".join(sorted(PHASES, key=len, reverse=True))
    named = (re.sub(r"^(communication|sent-bytes)-tp$", r"\1-AXES", name) for name in logged)
    named = (re.sub(r"^mtp loss \d$", "mtp loss N", name) for name in named)
    named = (re.sub(r"^source loss web$", "source loss NAME", name) for name in named)
    return {re.sub(f"^({timers})-time", "TIMER-time", name) for name in named if not name.startswith(CONSOLE_PREFIX)}


def test_the_table_has_every_metric_and_no_other(single_process: None) -> None:
    found = everything()
    assert general(found) == general(METRICS)
    assert evaluation_metrics("valid:wiki", 4.0, {"ema": 5.0}, seconds=1.0).keys() == EVALUATION_METRICS.keys()
    lists = {name for name, value in found.items() if isinstance(value, list)}
    assert general(lists) == {name for name, metric in METRICS.items() if metric.unit.startswith("list of")}


def test_the_tables_in_the_documentation_match_the_code() -> None:
    text = LOGS.read_text()
    assert text == logs_page(text), "run: python tools/generate_docs.py"
    for name in summarize_health(
        ["embedding", "layers.0", "head"],
        torch.ones(3, 8),
        torch.ones(3),
        torch.ones(3, 2),
        StepMetrics(*torch.ones(5)),
    ):
        form = re.sub("^health/[a-z-]+/(embedding|layers.0|head)$", "health/QUANTITY/LAYER", name)
        assert f"`{form}`" in text.split("## Every metric")[1].split("\n## ")[0]


RANK = of_rank(1.0, {"tp": 0.1, "dp": 0.1}, {"batch-generator": 0.01, "optimizer": 0.2})


def test_the_fullest_and_the_slowest_rank_are_found() -> None:
    """Steps take all ranks the same time; the slowest is the one for which the others wait."""
    ranks = [RANK, RANK | {"mem-max-allocated-bytes": 27, MEMORY_CAPACITY: 81}, RANK, RANK]
    ranks[2] = of_rank(1.0, {"tp": 0.02, "dp": 0.02}, {"batch-generator": 0.03, "optimizer": 0.1})
    seen = compare_ranks(ranks)
    assert (seen["mem-max-rank"], seen["mem-max-allocated-bytes"], seen[MEMORY_CAPACITY]) == (1, 27, 81)
    assert seen["slowest-rank"] == 2
    assert seen["slowest-rank-excess"] == pytest.approx(0.96 / 0.8 - 1)
    assert (seen["communication-tp"], seen["communication-dp"]) == pytest.approx((0.08, 0.08))
    assert seen["communication-share"] == pytest.approx(0.16)
    assert seen["data-wait"] == 0.03


def test_sent_bytes_are_averaged_and_the_share_of_waits_is_relative_to_the_mean_step() -> None:
    """0.4 s of waits in two steps that took 1 and 3 s."""
    ranks = [RANK | {"sent-bytes-tp": 2.0, "sent-bytes-dp": n, "iteration-time": n} for n in (1.0, 3.0)]
    seen = compare_ranks(ranks)
    assert (seen["sent-bytes-tp"], seen["sent-bytes-dp"]) == (2.0, 2.0)
    assert seen["communication-share"] == pytest.approx(0.4 / 4.0)


def test_waits_for_the_pipeline_are_no_communication() -> None:
    """Half a second and none, of two steps of a second; the rank that never waits for its neighbours is the slowest."""
    bubbles = [RANK | {BUBBLE_TIME: seconds} for seconds in (0.5, 0.0)]
    seen = compare_ranks(bubbles)
    assert seen["bubble"] == pytest.approx(0.25)
    assert (seen["communication-tp"], seen["communication-dp"]) == pytest.approx((0.1, 0.1))
    assert "communication-bubble" not in seen
    assert seen["communication-share"] == pytest.approx(0.2)
    assert seen["slowest-rank"] == 1
    assert "bubble" not in compare_ranks([RANK])


def test_options_of_timers() -> None:
    ranks = [RANK, RANK | {"batch-generator-time": 0.0, "optimizer-time": 0.4}]
    assert timer_metrics([RANK], "all")["optimizer-time"] == 0.2
    assert timer_metrics(ranks, "max")["optimizer-time"] == 0.4
    assert timer_metrics(ranks, "minmax")["optimizer-time-min"] == 0.2
    assert timer_metrics(ranks, "all")["optimizer-time-by-rank"] == [0.2, 0.4]
    assert timer_metrics([RANK | {"batch-generator-time": 0.0, "optimizer-time": 0.0}], "max") == {}  # it never ran


@settings(max_examples=50, derandomize=True)
@given(st.lists(st.integers(0, 900), min_size=2, max_size=40))
def test_the_slowest_waits_least(milliseconds: list[int]) -> None:
    waits = [wait / 1000 for wait in milliseconds]
    ranks = [of_rank(1.0, {"world": wait}, {}) for wait in waits]
    seen = compare_ranks(ranks)
    assert waits[seen["slowest-rank"]] == min(waits)
    assert seen["slowest-rank-excess"] == pytest.approx((1 - min(waits)) / statistics.median(1 - w for w in waits) - 1)
    assert seen["slowest-rank-excess"] >= 0


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4e12),
        ("NVIDIA H100 80GB HBM2e", "bf16", None),
        ("NVIDIA GB200", "bf16", 2500e12),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312e12),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", "bf16", None),
        ("NVIDIA A100-SXM4-80GB", "fp32", None),
        ("NVIDIA A10G", "bf16", None),
        ("Tesla V100-SXM2-32GB", "fp16", 125e12),
        ("NVIDIA L40", "bf16", None),
        ("AMD Instinct MI250X", "bf16", 191.5e12),
        ("AMD Instinct MI250X / MI250", "bf16", None),  # 191.5 or 181.05
        ("cpu", "bf16", None),
        ("Some GPU of 2031", "bf16", None),
    ],
)
def test_only_known_hardware_has_a_peak(name: str, dtype: str, expected: float | None) -> None:
    assert peak_flops(name, dtype) == expected


def record(consumed_samples: int = 40) -> Metrics:
    return {"consumed-samples": consumed_samples, "tokens-per-second": 800.0}


def test_yardstick_of_a_run() -> None:
    config = RunConfig(
        model=ModelConfig(vocab_size=100, attention_dropout=0.0),
        parallel=ParallelConfig(tensor_model_parallel_size=2),
        precision=PrecisionConfig(params_dtype="bf16"),
        training=TrainingConfig(seq_length=100, micro_batch_size=1, train_iters=100),
    )
    throughput_model = ThroughputModel.from_config(config, 8, "NVIDIA A100-SXM4-80GB")
    flops = FlopsPerToken.from_config(config)
    assert (throughput_model.total_iterations, throughput_model.total_samples) == (100, 400)  # 8 / TP2 = 4 a step
    smaller_before = ThroughputModel.from_config(config, 8, "cpu", iteration=60, consumed_samples=120)
    assert (smaller_before.total_iterations, smaller_before.total_samples) == (100, 280)
    assert throughput_model.metrics(record()) == {  # of 800 tokens/s on 8 ranks
        "throughput": pytest.approx(100 * flops.megatron / 1e12),
        "tokens-per-second-per-gpu": 100.0,
        "mfu": pytest.approx(100 * flops.full / 312e12),
        "mfu-causal": pytest.approx(100 * flops.causal / 312e12),
        "hfu": pytest.approx(100 * flops.full / 312e12),
        SECONDS_LEFT: pytest.approx(90 * 0.5),
        TOTAL_ITERATIONS: 100,
        ON_GPU: True,
    }
    assert throughput_model.metrics(record(consumed_samples=400))[SECONDS_LEFT] == 0
    by_samples = replace(config, training=replace(config.training, train_iters=None, train_samples=403))
    assert ThroughputModel.from_config(by_samples, 8, "cpu").metrics(record(consumed_samples=400))[SECONDS_LEFT] == 0
    cpu = ThroughputModel.from_config(config, 2, "cpu")
    assert [name for name, value in cpu.metrics(record()).items() if value is None] == ["mfu", "mfu-causal", "hfu"]
    again = replace(config, training=replace(config.training, recompute_granularity="full"))
    values = ThroughputModel.from_config(again, 8, "NVIDIA A100-SXM4-80GB").metrics(record())
    assert values["mfu"] == throughput_model.metrics(record())["mfu"]
    assert values["hfu"] == pytest.approx(100 * FlopsPerToken.from_config(again).hardware / 312e12)
    assert not cpu.on_gpu


# ---- Goodput


def test_the_start_of_the_process_counts_and_a_clock_that_was_set_back_gives_no_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [1.7e9]
    monkeypatch.setattr(time, "time", lambda: now[0])
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)
    assert Goodput(started=980.0).run_seconds() == 20.0
    run = Goodput()
    assert run.value() is None
    now[0] += 100
    run.productive_seconds += 100
    assert run.value() == 1.0
    now[0] -= 50
    assert run.value() is None


SPANS = st.lists(st.tuples(st.sampled_from(["step", "idle", "save", "crash"]), st.integers(1, 100)), max_size=20)


@settings(max_examples=50, derandomize=True)
@given(SPANS)
def test_it_is_the_share_of_the_history(spans: list[tuple[str, int]]) -> None:
    """Compared with a list of steps that a crash cuts off at the last save."""
    now, history, kept = [1.7e9], list[int](), 0
    with patch.object(time, "time", lambda: now[0]):
        run = Goodput()
        saved = run.state_dict()
        for what, seconds in spans:
            now[0] += seconds
            if what == "step":
                run.productive_seconds += seconds
                history.append(seconds)
            elif what == "save":
                kept, saved = len(history), run.state_dict()
            elif what == "crash":
                run = Goodput()
                run.load_state_dict(saved)
                history = history[:kept]
        now[0] += 1
        assert run.value() == pytest.approx(sum(history) / (now[0] - 1.7e9))
        assert run.run_seconds() == now[0] - 1.7e9


def test_a_run_that_was_killed_and_continued(tmp_path: Path) -> None:
    """Steps 1 and 2 of the first start count, its lost step 3 does not, and all later ones do."""
    flags = f"--train-iters 5 --save {tmp_path}/saved --save-interval 2 --eval-interval 2 --eval-iters 1"
    for number in (4, 0):
        start(tiny_run(tmp_path, flags), before_step(number, kill))
    history = {record["iteration"]: record for record in records(tmp_path)}  # the later one of a step taken twice
    assert [record["starts"] for record in history.values()] == [1, 1, 2, 2, 2]
    productive = 0.0
    for record in history.values():
        productive += record["iteration-time"]
        assert record["goodput"] * record["run-seconds"] == pytest.approx(
            productive, rel=0.01, abs=0.01
        )  # between a line and the save after it
        assert record["run-seconds"] > productive


def test_a_fork_has_a_goodput_of_its_own(tmp_path: Path) -> None:
    start(tiny_run(tmp_path / "a", f"--exit-interval 3 --save {tmp_path}/saved"))
    start(tiny_run(tmp_path / "b", f"--load {tmp_path}/saved --save {tmp_path}/others"))
    found = [(record["iteration"], record["starts"]) for record in records(tmp_path / "b")]
    assert found == [(4, 1), (5, 1), (6, 1)]


def test_saving_is_no_part_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Checkpointer.write

    def slowly(checkpointer: Checkpointer) -> SavedCheckpoint:
        time.sleep(1.0)
        return write(checkpointer)

    monkeypatch.setattr(Checkpointer, "write", slowly)
    start(tiny_run(tmp_path, f"--train-iters 3 --save {tmp_path}/saved --save-interval 1 --log-interval 3"))
    (record,) = records(tmp_path)
    assert record["iteration-time"] < 0.6
    assert record["run-seconds"] > 2.0  # two saves come before the line
