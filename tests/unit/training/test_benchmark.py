"""The benchmark of logging, in small."""

from __future__ import annotations

import re
import time

import pytest

from benchmarks.logging_overhead import CLOCKS, SINKS, main, price, take_turns, together
from benchmarks.record import spread


def test_blocks_take_turns_after_a_round_that_warms_up() -> None:
    done: list[str] = []
    seconds = take_turns({"bare": lambda: done.append("bare"), "logged": lambda: done.append("logged")}, rounds=3)
    assert done == ["bare", "logged"] * 4
    assert {name: {clock: len(times) for clock, times in of.items()} for name, of in seconds.items()} == {
        "bare": dict.fromkeys(CLOCKS, 3),
        "logged": dict.fromkeys(CLOCKS, 3),
    }


def test_a_price_is_in_microseconds_of_processor_time() -> None:
    def busy() -> None:
        until = time.thread_time() + 1e-3
        while time.thread_time() < until:
            pass

    assert 900 < price(busy, calls=5, rounds=3)[0] < 2000
    assert price(lambda: time.sleep(0.002), calls=3, rounds=3)[0] < 1000  # sleep takes no processor time


def test_a_spread_is_median_lowest_highest() -> None:
    assert spread([5.0, 1.0, 2.00004, 9.0, 0.5]) == [2.0, 0.5, 9.0]


def test_all_parts_together() -> None:
    step = {"timers of level 0": [3.0], "timers of level 2": [8.0], "the profiler, idle": [2.0]}
    lines = {f"a line to {name}": [20.0 + number] for number, name in enumerate(SINKS)}
    result = {"every step": step, "every log line": {"reading": [50.0], **lines}, "steps_per_line": 10}
    assert together(result) == 8 + 2 + (50 + 20 + 1 + 2 + 3) / 10


@pytest.mark.slow
def test_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["--num-layers", "1", "--hidden-size", "32", "--seq-length", "16"]
    assert main([*shape, "--steps", "2", "--repeats", "2", "--calls", "3"]) == 0
    rows = re.findall(r"^\| (a line to|wall|processor|timers)", capsys.readouterr().out, re.MULTILINE)
    assert rows == ["wall", "processor", "processor", *["timers"] * 3, *["a line to"] * 4]
