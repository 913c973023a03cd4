from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.training.checkpointer import Checkpointer, SavedCheckpoint
from megatron.training.metrics import Goodput
from tests.kit.runs import before_step, kill, records, start, tiny_run


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1.7e9
        monkeypatch.setattr(time, "time", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_the_start_of_the_process_counts(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)
    assert Goodput(started=980.0).run_seconds() == 20.0


def test_a_clock_that_was_set_back_gives_no_share(clock: Clock) -> None:
    run = Goodput()
    assert run.value() is None
    clock.now += 100
    run.productive_seconds += 100
    assert run.value() == 1.0
    clock.now -= 50
    assert run.value() is None


SPANS = st.lists(st.tuples(st.sampled_from(["step", "idle", "save", "crash"]), st.integers(1, 100)), max_size=20)


@settings(max_examples=50, derandomize=True)
@given(SPANS)
def test_it_is_the_share_of_the_history(spans: list[tuple[str, int]]) -> None:
    """Compared with a list of steps that a crash cuts off at the last save."""
    with pytest.MonkeyPatch.context() as patch:
        clock = Clock(patch)
        first, run = clock.now, Goodput()
        history: list[int] = []
        kept, saved = 0, run.state_dict()
        for what, seconds in spans:
            clock.now += seconds
            if what == "step":
                run.productive_seconds += seconds
                history.append(seconds)
            elif what == "save":
                kept, saved = len(history), run.state_dict()
            elif what == "crash":
                run = Goodput()
                run.load_state_dict(saved)
                history = history[:kept]
        clock.now += 1
        assert run.value() == pytest.approx(sum(history) / (clock.now - first))
        assert run.run_seconds() == clock.now - first


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
