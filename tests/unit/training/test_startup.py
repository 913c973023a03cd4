"""Times of a start: nested phases, the start of the process, the log line and the event."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from megatron.data.loader import build_data
from megatron.training import startup
from megatron.training.checkpointer import choose_resume_source
from megatron.training.startup import PHASES, StartupTimer, process_start_time, startup_line
from tests.runs import records, start, tiny_run

ROOT = Path(__file__).parents[3]
DOCS = (ROOT / "docs/operations.md").read_text(encoding="utf-8")


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The current time of the clock."""
    times = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: times[-1])
    return times


def told(watch: StartupTimer) -> dict[str, float]:
    return {name: seconds for name, seconds in watch.seconds.items() if seconds}


def test_each_phase_has_what_none_inside_it_has(now: list[float]) -> None:
    watch = StartupTimer(90.0, "python")
    watch.enter("flags")
    now.append(101.0)
    watch.enter("other")
    with watch("checkpoint"):
        now.append(103.0)
        with watch("data"):
            now.append(107.0)
        now.append(115.0)
    now.append(131.0)
    watch.enter("first step")
    now.append(163.0)
    watch.stop()
    now.append(999.0)
    assert told(watch) == {
        "python": 10.0, "flags": 1.0, "checkpoint": 10.0, "data": 4.0, "other": 16.0, "first step": 32.0
    }  # fmt: skip
    assert sum(watch.seconds.values()) == 163.0 - watch.began
    assert not watch.running


def test_a_phase_that_raises_ends(now: list[float]) -> None:
    watch = StartupTimer()
    with suppress(ValueError), watch("data"):
        now.append(101.0)
        raise ValueError("torn")
    now.append(103.0)
    watch.stop()
    assert told(watch) == {"data": 1.0, "other": 2.0}


def test_a_process_began_when_it_was_made() -> None:
    """Not the time of the first call."""
    program = "from megatron.training.startup import process_start_time; print(process_start_time())"
    before = time.monotonic()
    out = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    after = time.monotonic()
    assert before - 0.02 <= float(out) < after  # the kernel counts in hundredths
    assert float(out) - before < (after - before) / 2


def test_without_a_proc_file_system_the_process_begins_now(now: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "Path", lambda name: Path("/nowhere") / name.lstrip("/"))
    assert process_start_time() == 100.0


def test_the_line_names_what_took_long_and_who_took_much_longer() -> None:
    mine = dict.fromkeys(PHASES, 0.0) | {"imports": 3.06, "data": 0.04, "first step": 10.0}
    assert startup_line(mine, mine) == "start-up 13.1s: imports 3.1 first step 10.0"
    longest = mine | {"imports": 9.0, "first step": 10.9}
    assert (
        startup_line(mine, longest) == "start-up 13.1s: imports 3.1 first step 10.0; longest on any rank: imports 9.0"
    )


def slowly(name: str, function: Callable[..., Any], seconds: float) -> AbstractContextManager[Any]:
    """Slow down the function that ``megatron.training`` calls by this name."""

    def call(*arguments: Any, **named: Any) -> Any:
        time.sleep(seconds)
        return function(*arguments, **named)

    return patch(f"megatron.training.{name}", call)


def test_startup_times_are_logged_once_after_the_first_step(tmp_path: Path) -> None:
    flags = f"--save {tmp_path}/saved --save-interval 2 --log-interval 3"
    with (
        slowly("trainer.build_data", build_data, 0.01),
        slowly("main.choose_resume_source", choose_resume_source, 0.01),
    ):  # else less than is shown
        started = start(tiny_run(tmp_path, flags))
    (event,) = [record for record in records(tmp_path, "event") if record["event"] == "start-up"]
    assert (event["iteration"], list(event["phases"]), list(event["slowest"])) == (1, [*PHASES], [*PHASES])
    assert event["seconds"] == pytest.approx(sum(event["phases"].values()), abs=0.01)
    assert event["phases"] == event["slowest"]
    assert all(event["phases"][name] > 0 for name in ("model", "data", "checkpoint", "first step"))
    (line,) = [line for line in started.out.splitlines() if line.startswith("start-up ")]
    assert started.out.index(line) < started.out.index("3/6 ")


def test_what_is_read_of_a_checkpoint_and_what_of_the_data_are_two_things(tmp_path: Path) -> None:
    """Data are opened while a checkpoint is loaded."""
    flags = f"--save {tmp_path}/saved --save-interval 2"
    start(tiny_run(tmp_path, f"{flags} --exit-interval 2"))
    start(tiny_run(tmp_path, flags), slowly("trainer.build_data", build_data, 0.5))
    events = [record for record in records(tmp_path, "event") if record["event"] == "start-up"]
    assert [event["iteration"] for event in events] == [1, 3]
    assert events[1]["phases"]["data"] > 0.4
    assert events[1]["phases"]["checkpoint"] > 0


def test_a_start_without_a_step_logs_no_times(tmp_path: Path) -> None:
    config = tiny_run(tmp_path, f"--save {tmp_path}/saved")
    start(config)
    assert "start-up" not in start(config).out


def test_every_phase_is_documented() -> None:
    table = DOCS.split("## How long a start takes\n")[1].split("\n## ")[0].split("|---|---|\n")[1].split("\n\n")[0]
    assert table.splitlines() == [f"| `{name}` | {meaning} |" for name, meaning in PHASES.items()]
