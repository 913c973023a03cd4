from __future__ import annotations

import math
import os
import pty
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from megatron.config import text as formatting
from megatron.planner.flops import FlopsPerToken
from megatron.training.loggers.base import Metrics
from megatron.training.loggers.console import MEMORY_CAPACITY, evaluation_line, progress_line, timing_line
from megatron.training.loggers.terminal import open_console
from megatron.training.metrics import ThroughputModel, evaluation_metrics

STEP = 1240
RECORD: Metrics = {
    "consumed-samples": 1_904_640,
    "consumed-tokens": 3_900_702_720,
    "lm loss": 2.41374,
    "grad-norm": 0.4129,
    "learning-rate": 6e-5,
    "weight-decay": 0.1,
    "batch-size": 1536,
    "loss-scale": 1.0,
    "iteration-time": 7.6,
    "tokens-per-second": 404 * 1024,
    "tokens-per-second-per-gpu": 404,
    "mem-max-allocated-bytes": 27 * 2**30,
    MEMORY_CAPACITY: 80 * 2**30,
    "skipped-iterations-count": 0,
}
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


LARGE: Metrics = {
    **RECORD,
    "mem-max-rank": 113,
    "data-wait": 0.01,
    "communication-tp": 0.46,
    "communication-pp": 0.23,
    "communication-dp": 0.15,
    "communication-world": 0.001,
    "communication-share": 0.11,
    "bubble": 0.025,
    "slowest-rank": 731,
    "slowest-rank-excess": 0.041,
    "goodput": 0.979,
    "run-seconds": 1e6,
    "starts": 1,
}


def line_of(metrics: Metrics, width: int | None = None, model: ThroughputModel = YARDSTICK) -> str:
    """The line of metrics in which None stands for a name that is left out."""
    known = {name: value for name, value in metrics.items() if value is not None}
    return progress_line(STEP, {**known, **model.metrics(known)}, width)


WIDEST = (
    FULL.split(" | mem")[0]
    + " | comm 11% (tp6 pp3 dp2) bubble 2.5% data 0% | mem 27/80G r113 | slow r731 +4% | goodput 97.9% ETA 8d7h"
)


def test_lines_of_one_rank_and_of_many() -> None:
    assert line_of(RECORD) == FULL
    assert line_of(LARGE) == WIDEST


NO_WAITS: Metrics = dict.fromkeys(f"communication-{axes}" for axes in ("tp", "pp", "dp", "world"))


@pytest.mark.parametrize(
    ("change", "column", "shown"),
    [
        ({"slowest-rank-excess": 0.029}, "slow", False),
        ({"slowest-rank-excess": None}, "slow", False),
        ({**NO_WAITS, "communication-tp": 0.03, "communication-share": 0.004}, "comm 0% bubble", True),
        ({**NO_WAITS, "communication-share": None}, "comm", False),
        (
            {**NO_WAITS, "communication-tp": 9.0, "communication-dp": 1.0, "communication-share": 0.9},
            "comm 90% (tp81 dp9)",
            True,
        ),
        ({"bubble": None}, "bubble", False),
        ({"goodput": 0.996}, "goodput", False),
        ({"goodput": 0.996, "starts": 2}, "goodput 99.6%", True),
        ({"run-seconds": 599.0}, "goodput", False),
        ({"goodput": None, "starts": 2}, "goodput", False),
        ({"mem-max-rank": None}, "mem 27/80G |", True),
    ],
)
def test_columns_without_information_are_omitted(change: dict[str, Any], column: str, shown: bool) -> None:
    assert (column in line_of({**LARGE, **change})) is shown


def test_a_wait_for_data_is_dropped_after_minor_columns() -> None:
    """A short wait for data is dropped first, a long one stays."""
    slow = {**LARGE, "data-wait": 3.8}
    assert "data 50%" in line_of(slow, 100)
    assert "data" not in line_of(LARGE, 100)


@pytest.mark.parametrize(("record", "full"), [(RECORD, FULL), (LARGE, WIDEST)])
def test_narrow_terminals_get_fewer_columns_and_lose_the_new_ones_first(record: Metrics, full: str) -> None:
    lines = {width: line_of(record, width) for width in range(30, 230)}
    assert all(len(line) <= width for width, line in lines.items())
    assert all(line.startswith(" 1240/95368") and "loss 2.4137" in line for line in lines.values())
    assert (lines[30], lines[229]) == (" 1240/95368 | loss 2.4137", full)
    assert [*map(len, lines.values())] == sorted(map(len, lines.values()))
    assert "(tp6" not in lines[len(full) - 1]
    assert line_of({**record, "skipped-iterations-count": 1}, 40) == " 1240/95368 | loss 2.4137 | skipped 1"


def test_timers_have_a_line_of_their_own() -> None:
    assert timing_line(RECORD) is None
    times = {"forward-backward-time": 0.131, "forward-backward-time-min": 0.12, "optimizer-time": 0.0091}
    line = timing_line({**RECORD, **times})
    assert line == "times: forward-backward 0.12s to 0.13s, optimizer 9.10ms"
    assert timing_line({**RECORD, "optimizer-time": 2.0, "optimizer-time-by-rank": [1.0, 2.0]}) == (
        "times: optimizer 1.00s 2.00s"
    )


def test_a_line_on_a_cpu_counts_all_ranks_and_has_no_mfu() -> None:
    throughput_model = replace(YARDSTICK, world_size=2, peak_flops=None, on_gpu=False, total_iterations=2000)
    record = {**RECORD, "tokens-per-second": 12_345.0, "iteration-time": 0.0123, "mem-max-allocated-bytes": None}
    line = line_of(record, model=throughput_model)
    assert "| 12.3ms 12.3K tok/s |" in line
    assert "MFU" not in line
    assert "mem" not in line


def test_a_line_states_skipped_steps_and_the_loss_scale() -> None:
    line = line_of({**RECORD, "skipped-iterations-count": 2, "loss-scale": 65536.0, "lm loss": math.nan})
    assert "loss - gnorm " in line
    assert " | scale 65.5K | skipped 2 | " in line


@pytest.mark.parametrize(
    ("split", "loss", "line"),
    [
        ("valid", math.log(12.0), "validation at 500: loss 2.4849 ppl 12.0 (1.02M tok)"),
        ("valid:wiki", math.nan, "validation wiki at 500: loss - ppl nan (1.02M tok)"),
        ("test", math.nan, "test at 500: loss - ppl nan (1.02M tok)"),
    ],
)
def test_evaluations_are_separate(split: str, loss: float, line: str) -> None:
    metrics = {"consumed-tokens": 1_024_000, **evaluation_metrics(split, loss)}
    assert evaluation_line(500, metrics) == line


NUMBERS: dict[Callable[[float], str], dict[float, str]] = {
    formatting.format_compact: {
        0: "0",
        404: "404",
        999.7: "1.00K",
        98_304: "98.3K",
        999_500: "1.00M",
        4.2e16: "42000T",
    },
    formatting.format_plain: {
        0.0: "0",
        0.41: ".41",
        9.996: "10.0",
        123.4: "123",
        0.0034: "3.4e-3",
        4.12e7: "4.1e7",
        math.nan: "nan",
    },
    formatting.format_exponent: {6e-5: "6.0e-5", 0.0: "0", 1.0: "1.0e0"},
    formatting.format_step_time: {7.6: "7.60s", 83.21: "83.2s", 0.0996: "0.10s", 0.0456: "45.6ms"},
    formatting.format_duration: {
        12.4: "12s",
        59.6: "1m00s",
        249: "4m09s",
        11_100: "3h05m",
        86_399: "1d0h",
        8 * 86_400 + 6 * 3600 + 1801: "8d7h",
    },
}


def test_numbers() -> None:
    for form, texts in NUMBERS.items():
        assert [form(value) for value in texts] == list(texts.values())
    trimmed = [formatting.format_compact(x, trim=True) for x in (1e9, 2.5e6, 1.01e9, 200_000, 0)]
    assert trimmed == ["1B", "2.5M", "1.01B", "200K", "0"]
    assert formatting.format_memory(600 * 2**20, 16 * 2**30) == "0.6/16G"


# ---- A terminal


def shown_on_a_terminal(monkeypatch: pytest.MonkeyPatch, term: str) -> str:
    """Return the output of a run of 95,368 steps on a terminal of 110 columns."""
    master, slave = pty.openpty()
    monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("COLUMNS", "110")
    monkeypatch.setattr(sys, "stdout", os.fdopen(slave, "w"))
    console = open_console(STEP - 10, YARDSTICK.total_iterations)
    values = {**RECORD, **YARDSTICK.metrics(RECORD)}
    console.event(STEP - 10, "note", {"text": "a note"})
    console.event(STEP - 10, "start-up", {"phases": {"python": 0.1}, "slowest": {"python": 0.1}})
    for step in (STEP - 1, STEP):
        console.stepped(step)
        console.log(step, values)
    console.stepped(STEP + 1)
    console.event(STEP, "warning", {"text": "hot"})
    console.close()
    sys.stdout.flush()
    os.set_blocking(master, False)
    shown = b""
    with suppress(BlockingIOError):
        while True:
            shown += os.read(master, 100_000)
    return shown.decode()


def test_a_terminal_has_a_bar_in_place_of_log_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown_on_a_terminal(monkeypatch, "xterm")
    assert "\u2501" in text, "the bar"
    assert text.count("legend: step/steps, tokens so far | loss: mean since the last line, ") == 1
    assert "a note" in text
    assert "\x1b[?25l" not in text, "the cursor stays visible"
    *_, last = text.split("\x1b[2K")
    assert last.startswith(" 1241/95368 3.90B tok | loss 2.4137 gnorm .41 lr 6.0e-5 | 7.60s 404 tok/s/gpu")
    assert last.count("\n") == 1


def test_a_terminal_that_cannot_move_the_cursor_has_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = shown_on_a_terminal(monkeypatch, "dumb").replace("\r", "").splitlines()
    assert [line[:12] for line in lines] == ["a note", "start-up 0.1", "legend: step", " 1239/95368 ", " 1240/95368 "]
