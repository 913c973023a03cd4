"""The names a run's numbers are kept under: those in the documentation, all of them, and no others."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron.config.model import ModelConfig
from megatron.config.run import RunConfig, TrainingConfig
from megatron.distributed import comm
from megatron.distributed.comm import BUBBLE, Group
from megatron.distributed.timing import PHASES, Timers
from megatron.optimizer.lr_scheduler import Rates
from megatron.training.callbacks.health import summarize_health
from megatron.training.loggers.base import MEMORY_CAPACITY, scalar_metrics
from megatron.training.loggers.base import METRICS as METRIC_TABLE
from megatron.training.metrics import (
    MetricsWindow,
    RankStats,
    StepMetrics,
    ThroughputModel,
    evaluation_metrics,
    timer_metrics,
)

DOCS = Path(__file__).parents[3] / "docs/operations.md"
SECTION = DOCS.read_text(encoding="utf-8").split("## Every metric\n")[1].split("\n## ")[0]
METRICS, EVALUATIONS, HEALTH, TIMERS = (
    re.findall(r"^\| (`.*?) \|(.*)\|$", table, flags=re.MULTILINE) for table in SECTION.split("|---|---|---|\n")[1:]
)
CPU = torch.device("cpu")


def names(rows: list[tuple[str, str]]) -> set[str]:
    return {name for cell, _ in rows for name in re.findall(r"`(.*?)`", cell)}


def everything() -> dict[str, Any]:
    """A log line with every metric that there is."""
    ranks = [
        RankStats(2.0, {"tp": 0.1, BUBBLE: 0.1}, dict.fromkeys(PHASES, 1.0 + rank), 1, 2, {"tp": 1.0})
        for rank in range(2)
    ]
    window = MetricsWindow(torch.device("cpu"), 8, world=Group((0, 1), 0, None, "tp"), timers=Timers(2, CPU))
    router = {name: torch.zeros(()) for name in ("load_balancing_loss", "seq_load_balancing_loss", "z_loss")}
    scalars = [torch.tensor(x) for x in (1.0, 1.0, True, 1.0, False)]
    window.add(StepMetrics(*scalars, router), samples=1)
    rates = Rates(0.1, 0.01, decoupled_lr=0.2)
    config = RunConfig(model=ModelConfig(vocab_size=64), training=TrainingConfig(seq_length=8, train_iters=1))
    with patch("megatron.training.metrics.gather_rank_stats", lambda *arguments: ranks):
        metrics = window.read(iteration=1, consumed_samples=1, rates=rates, samples_digest="0")
    for option in ("minmax", "all"):
        metrics |= timer_metrics(ranks, option)
    return metrics | ThroughputModel.from_config(config, 2, "cpu").metrics(metrics) | {"world-size": 2}


def general(logged: Iterable[str]) -> set[str]:
    """Names with AXES and TIMER in the place of what they stand for."""
    timers = "|".join(sorted(PHASES, key=len, reverse=True))
    named = (re.sub(r"^(communication|sent-bytes)-tp$", r"\1-AXES", name) for name in logged)
    return {re.sub(f"^({timers})-time", "TIMER-time", name) for name in named}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group of two ranks without a second process."""
    monkeypatch.setattr(comm, "all_reduce", lambda x, group, op="sum": x)


EVALUATED = evaluation_metrics("valid:wiki", 4.0, 5.0).keys()


def test_the_table_has_every_metric_and_no_other() -> None:
    assert general(everything().keys() - {MEMORY_CAPACITY}) | EVALUATED == METRIC_TABLE.keys()


def test_every_metric_is_documented() -> None:
    assert names(METRICS) == METRIC_TABLE.keys() - EVALUATED - {"world-size"}
    assert names(EVALUATIONS) == EVALUATED


def test_lists_are_documented_as_lists_and_all_else_is_one_number_everywhere() -> None:
    """No name stands for a list in one place and for a number in another."""
    metrics = everything()
    lists = {name for name, value in metrics.items() if isinstance(value, list)}
    assert general(lists) == {name for name, metric in METRIC_TABLE.items() if metric.unit.startswith("list of")}
    assert general(lists) == {name for cell, rest in METRICS if "list of" in rest for name in names([(cell, rest)])}
    shown = scalar_metrics(metrics)
    assert {name: metrics[name] for name in shown} == shown
    assert (shown["skipped-iterations-count"], shown["spikes-skipped"]) == (1, 1)


def test_every_timer_is_documented() -> None:
    rows = [(cell.strip("`"), *(part.strip() for part in rest.split("|"))) for cell, rest in TIMERS]
    assert rows == [(name, str(phase.level), phase.meaning) for name, phase in PHASES.items()]


def test_metrics_of_health_have_the_documented_form() -> None:
    step = StepMetrics(*torch.ones(5))
    report = summarize_health(
        ["embedding", "layers.0", "head"], torch.ones(3, 8), torch.ones(3), torch.ones(3, 2), step
    )
    general = {re.sub("^health/[a-z-]+/(embedding|layers.0|head)$", "health/QUANTITY/LAYER", name) for name in report}
    assert general == names(HEALTH)


def test_what_does_not_apply_is_left_out() -> None:
    window = MetricsWindow(CPU, seq_length=1)
    window.add(StepMetrics(*(torch.zeros(()) for _ in range(5))), samples=1)
    metrics = window.read(iteration=1, consumed_samples=1, rates=Rates(0.1, 0.01))
    several = re.compile(r"communication|sent|bubble|slowest|mem-max-rank|.*-time-|decoupled|samples-digest")
    assert not {name for name in metrics if several.match(name)}
