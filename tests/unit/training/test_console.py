from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from megatron.planner.flops import FlopsPerToken
from megatron.training.loggers import console
from megatron.training.loggers.base import EvaluationRecord, TimerStats, TrainRecord
from megatron.training.loggers.console import evaluation_line, progress_line, timing_line
from megatron.training.throughput import ThroughputModel

RECORD = TrainRecord(
    iteration=1240,
    consumed_samples=1_904_640,
    consumed_tokens=3_900_702_720,
    loss=2.41374,
    grad_norm=0.4129,
    learning_rate=6e-5,
    weight_decay=0.1,
    batch_size=1536,
    loss_scale=1.0,
    seconds_per_step=7.6,
    tokens_per_second=404 * 1024,
    memory_bytes=27 * 2**30,
    memory_total_bytes=80 * 2**30,
)
YARDSTICK = ThroughputModel(
    total_iterations=95368,
    total_samples=95368 * 1536,
    seq_length=2048,
    world_size=1024,
    flops=FlopsPerToken(full=1.0774e12, causal=1.06e12, hardware=1.0774e12, megatron=1.06e12),
    peak_flops=989.4e12,
    on_gpu=True,
)
FULL = " 1240/95368 3.90B tok | loss 2.4137 gnorm .41 lr 6.0e-5 | 7.60s 404 tok/s/gpu MFU 44.0% | mem 27/80G | ETA 8d7h"


def test_a_line_of_a_large_run() -> None:
    assert progress_line(RECORD, YARDSTICK) == FULL


LARGE = replace(
    RECORD,
    world_size=1024,
    memory_rank=113,
    data_wait=0.01,
    communication={"tp": 0.46, "pp": 0.23, "dp": 0.15, "world": 0.001},
    communication_share=0.11,
    bubble=0.025,
    slowest_rank=731,
    slowest_excess=0.041,
    goodput=0.979,
    run_seconds=1e6,
    starts=1,
)
WIDEST = (
    FULL.split(" | mem")[0]
    + " | comm 11% (tp6 pp3 dp2) bubble 2.5% data 0% | mem 27/80G r113 | slow r731 +4% | goodput 97.9% ETA 8d7h"
)


def test_a_line_of_many_ranks() -> None:
    assert progress_line(LARGE, YARDSTICK) == WIDEST


@pytest.mark.parametrize(
    ("change", "column", "shown"),
    [
        ({"slowest_excess": 0.029}, "slow", False),
        ({"slowest_excess": None}, "slow", False),
        ({"communication": {"tp": 0.03}, "communication_share": 0.004}, "comm 0% bubble", True),
        ({"communication": {}, "communication_share": None}, "comm", False),
        ({"communication": {"tp": 9.0, "dp": 1.0}, "communication_share": 0.9}, "comm 90% (tp81 dp9)", True),
        ({"bubble": None}, "bubble", False),
        ({"goodput": 0.996}, "goodput", False),
        ({"goodput": 0.996, "starts": 2}, "goodput 99.6%", True),
        ({"run_seconds": 599.0}, "goodput", False),
        ({"goodput": None, "starts": 2}, "goodput", False),
        ({"memory_rank": None}, "mem 27/80G |", True),
    ],
)
def test_columns_that_say_nothing_are_left_out(change: dict[str, Any], column: str, shown: bool) -> None:
    assert (column in progress_line(replace(LARGE, **change), YARDSTICK)) is shown


def test_a_wait_for_data_outlives_the_columns_that_say_little() -> None:
    """That the data are in time is the first to go, that they are not stays."""
    slow = replace(LARGE, data_wait=3.8)
    assert "data 50%" in progress_line(slow, YARDSTICK, 100)
    assert "data" not in progress_line(LARGE, YARDSTICK, 100)


def test_narrow_terminals_lose_the_new_columns_first() -> None:
    lines = [progress_line(LARGE, YARDSTICK, width) for width in range(30, 230)]
    assert all(len(line) <= width for line, width in zip(lines, range(30, 230)))
    assert lines[-1] == WIDEST
    assert "(tp6" not in progress_line(LARGE, YARDSTICK, len(WIDEST) - 1)


def test_timers_have_a_line_of_their_own() -> None:
    assert timing_line(RECORD) is None
    timings = {"forward-backward": TimerStats(0.131, shortest=0.12), "optimizer": TimerStats(0.0091)}
    line = timing_line(replace(RECORD, timings=timings))
    assert line == "times: forward-backward 0.12s to 0.13s, optimizer 9.10ms"
    assert timing_line(replace(RECORD, timings={"optimizer": TimerStats(2.0, None, (1.0, 2.0))})) == (
        "times: optimizer 1.00s 2.00s"
    )


def test_a_line_on_a_cpu_counts_all_ranks_and_has_no_mfu() -> None:
    throughput_model = replace(YARDSTICK, world_size=2, peak_flops=None, on_gpu=False, total_iterations=2000)
    record = replace(RECORD, tokens_per_second=12_345.0, seconds_per_step=0.0123, memory_bytes=None)
    line = progress_line(record, throughput_model)
    assert "| 12.3ms 12.3K tok/s |" in line
    assert "MFU" not in line
    assert "mem" not in line


def test_a_line_says_what_was_skipped_and_the_loss_scale() -> None:
    line = progress_line(replace(RECORD, skipped=(1239, 1240), loss_scale=65536.0, loss=math.nan), YARDSTICK)
    assert "loss - gnorm " in line
    assert " | scale 65.5K | skipped 2 | " in line


def test_narrow_terminals_get_fewer_columns() -> None:
    lines = [progress_line(RECORD, YARDSTICK, width) for width in range(30, 130)]
    assert all(len(line) <= width for line, width in zip(lines, range(30, 130)))
    assert all(line.startswith(" 1240/95368") and "loss 2.4137" in line for line in lines)
    assert lines[-1] == FULL
    assert lines[0] == " 1240/95368 | loss 2.4137"
    assert [len(line) for line in lines] == sorted(len(line) for line in lines)


def test_a_skipped_step_outlives_almost_every_column() -> None:
    line = progress_line(replace(RECORD, skipped=(1240,)), YARDSTICK, 40)
    assert line == " 1240/95368 | loss 2.4137 | skipped 1"


def test_validation() -> None:
    line = evaluation_line(EvaluationRecord(500, 4000, 1_024_000, math.log(12.0)))
    assert line == "validation at 500: loss 2.4849 ppl 12.0 (1.02M tok)"


@pytest.mark.parametrize(("split", "title"), [("valid:wiki", "validation wiki"), ("test", "test")])
def test_evaluations_are_told_apart(split: str, title: str) -> None:
    line = evaluation_line(EvaluationRecord(500, 4000, 1_024_000, math.nan, split))
    assert line.startswith(f"{title} at 500: loss - ppl ")


@pytest.mark.parametrize(
    ("form", "value", "text"),
    [
        (console.format_compact, 0, "0"),
        (console.format_compact, 404, "404"),
        (console.format_compact, 999, "999"),
        (console.format_compact, 3.14159, "3.14"),
        (console.format_compact, 999.7, "1.00K"),
        (console.format_compact, 1000, "1.00K"),
        (console.format_compact, 98_304, "98.3K"),
        (console.format_compact, 999_499, "999K"),
        (console.format_compact, 999_500, "1.00M"),
        (console.format_compact, 3.9e9, "3.90B"),
        (console.format_compact, 15e12, "15.0T"),
        (console.format_compact, 4.2e16, "42000T"),
        (console.format_plain, 0.0, "0"),
        (console.format_plain, 0.41, ".41"),
        (console.format_plain, 1.5, "1.50"),
        (console.format_plain, 9.996, "10.0"),
        (console.format_plain, 123.4, "123"),
        (console.format_plain, 0.0034, "3.4e-3"),
        (console.format_plain, 4.12e7, "4.1e7"),
        (console.format_plain, math.inf, "inf"),
        (console.format_plain, math.nan, "nan"),
        (console.format_exponent, 6e-5, "6.0e-5"),
        (console.format_exponent, 0.0, "0"),
        (console.format_exponent, 1.0, "1.0e0"),
        (console.format_step_time, 7.6, "7.60s"),
        (console.format_step_time, 83.21, "83.2s"),
        (console.format_step_time, 0.0996, "0.10s"),
        (console.format_step_time, 0.0456, "45.6ms"),
        (console.format_duration, 12.4, "12s"),
        (console.format_duration, 59.6, "1m00s"),
        (console.format_duration, 249, "4m09s"),
        (console.format_duration, 11_100, "3h05m"),
        (console.format_duration, 86_399, "1d0h"),
        (console.format_duration, 8 * 86_400 + 6 * 3600 + 1801, "8d7h"),
    ],
)
def test_numbers(form: Callable[[float], str], value: float, text: str) -> None:
    assert form(value) == text


def test_compact_without_zeros() -> None:
    trimmed = [console.format_compact(x, trim=True) for x in (1e9, 2.5e6, 1.01e9, 200_000, 0)]
    assert trimmed == ["1B", "2.5M", "1.01B", "200K", "0"]


def test_memory() -> None:
    assert console.format_memory(600 * 2**20, 16 * 2**30) == "0.6/16G"
