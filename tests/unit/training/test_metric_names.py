"""The names a run's numbers are kept under: those in the documentation, all of them, and no others."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from megatron.config.model import ModelConfig
from megatron.config.run import RunConfig, TrainingConfig
from megatron.distributed.timing import PHASES
from megatron.training.callbacks.health import HealthRecord
from megatron.training.loggers.base import EvaluationRecord, TimerStats, TrainRecord, scalar_metrics
from megatron.training.throughput import ThroughputModel

DOCS = Path(__file__).parents[3] / "docs/operations.md"
SECTION = DOCS.read_text(encoding="utf-8").split("## Every metric\n")[1].split("\n## ")[0]
METRICS, EVALUATIONS, HEALTH, TIMERS = (
    re.findall(r"^\| (`.*?) \|(.*)\|$", table, flags=re.MULTILINE) for table in SECTION.split("|---|---|---|\n")[1:]
)
PLACES = {"iteration", "consumed-samples", "consumed-tokens"}


def names(rows: list[tuple[str, str]]) -> set[str]:
    return {name for cell, _ in rows for name in re.findall(r"`(.*?)`", cell)}


def everything() -> TrainRecord:
    """A record that has something to say in every field."""
    values: dict[str, Any] = {field.name: 1 for field in fields(TrainRecord)}
    timings = {name: TimerStats(2.0, 1.0, (1.0, 2.0)) for name in PHASES}
    router = dict.fromkeys(("load_balancing_loss", "seq_load_balancing_loss", "z_loss"), 1.0)
    values |= {"communication": {"tp": 1.0}, "sent": {"tp": 1.0}, "timings": timings, "router_losses": router}
    return TrainRecord(**values | {"skipped": (1,), "spikes": (1,)})


def test_every_metric_of_training_is_documented() -> None:
    config = RunConfig(model=ModelConfig(vocab_size=64), training=TrainingConfig(seq_length=8, train_iters=1))
    told = everything().values() | ThroughputModel.from_config(config, 1, "cpu").values(everything())
    general = {re.sub(r"^(communication|sent-bytes)-tp$", r"\1-AXES", name) for name in told}
    general = {re.sub(f"^({'|'.join(sorted(PHASES, key=len, reverse=True))})-time", "TIMER-time", n) for n in general}
    assert general == names(METRICS)


def test_what_is_documented_as_a_list_is_one_and_all_else_is_the_same_number_everywhere() -> None:
    """No name stands for a list in one place and for a number in another."""
    values = everything().values()
    lists = {re.sub("^.*-time-", "TIMER-time-", name) for name, value in values.items() if isinstance(value, list)}
    assert lists == {name for cell, rest in METRICS if "list of" in rest for name in names([(cell, rest)])}
    shown = scalar_metrics(values)
    assert {name: values[name] for name in shown} == shown
    assert (shown["skipped-iterations-count"], shown["spikes-skipped"]) == (1, 1)


def test_every_metric_of_an_evaluation_is_documented() -> None:
    assert EvaluationRecord(1, 2, 3, 4.0, "valid:wiki", 5.0).values().keys() == names(EVALUATIONS) | PLACES


def test_every_timer_is_documented() -> None:
    rows = [(cell.strip("`"), *(part.strip() for part in rest.split("|"))) for cell, rest in TIMERS]
    assert rows == [(name, str(phase.level), phase.meaning) for name, phase in PHASES.items()]


def test_metrics_of_health_have_the_documented_form() -> None:
    record = HealthRecord(1, 2, 3, {"grad-norm": {"layers.0": 1.0}}, {"num-zeros": 0.0})
    assert record.values().keys() == PLACES | {"num-zeros", "health/grad-norm/layers.0"}
    assert {"num-zeros", "health/QUANTITY/LAYER"} < names(HEALTH)


def test_what_does_not_apply_is_left_out() -> None:
    alone = TrainRecord(1, 2, 3, 4.0, 5.0, 6.0, 7.0, 8, 9.0, 10.0, 11.0)
    several = re.compile(r"communication|sent|bubble|slowest|mem-max-rank|.*-time-|good")
    assert not {name for name in alone.values() if several.match(name)}


@pytest.mark.parametrize(
    ("timing", "values"),
    [
        (TimerStats(2.0), {"optimizer-time": 2.0}),
        (TimerStats(2.0, shortest=1.0), {"optimizer-time": 2.0, "optimizer-time-min": 1.0}),
        (TimerStats(2.0, by_rank=(2.0, 1.0)), {"optimizer-time": 2.0, "optimizer-time-by-rank": [2.0, 1.0]}),
    ],
)
def test_names_of_timers(timing: TimerStats, values: dict[str, object]) -> None:
    assert timing.values("optimizer") == values
