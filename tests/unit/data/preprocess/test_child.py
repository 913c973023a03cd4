"""Work in a process of its own."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from megatron.data.errors import DataError
from megatron.data.preprocess.encode import ProgressSender, run_in_subprocess


class Listener:
    """Keeps what it is told; may have had enough."""

    def __init__(self, ticks: int = 1000) -> None:
        self.told: list[tuple[str, str]] = []
        self.ticks = ticks

    def set_stage(self, stage: str) -> None:
        self.told.append(("stage", stage))

    def message(self, text: str) -> None:
        self.told.append(("message", text))

    def tick(self) -> None:
        self.ticks -= 1
        if not self.ticks:
            raise KeyboardInterrupt


def work(plan: str, teller: ProgressSender) -> str:
    """What the other process does."""
    teller.set_stage("a stage")
    teller.message("a sentence")
    if plan == "bad":
        raise DataError("bad data", "mend them")
    if plan == "gone":
        raise FileNotFoundError(2, "No such file", "x")
    if plan == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if plan.startswith("/"):
        Path(plan).write_text(str(os.getpid()))
        time.sleep(60)
    return f"{plan} done"


def test_what_it_returns_and_tells() -> None:
    listener = Listener()
    assert run_in_subprocess(work, "work", listener) == "work done"
    assert listener.told == [("stage", "a stage"), ("message", "a sentence")]


def test_what_it_raises_and_how_it_dies() -> None:
    with pytest.raises(DataError, match="bad data\n  fix: mend them") as bad:
        run_in_subprocess(work, "bad", Listener())
    assert (bad.value.seen, bad.value.fixes) == ("bad data", ("mend them",))
    with pytest.raises(FileNotFoundError) as gone:
        run_in_subprocess(work, "gone", Listener())
    assert gone.value.filename == "x"
    with pytest.raises(DataError, match="a worker process was killed by SIGKILL; it may have run out of memory"):
        run_in_subprocess(work, "killed", Listener())


def test_it_ends_with_the_call_however_that_ends(tmp_path: Path) -> None:
    path = tmp_path / "pid"

    class Until(Listener):
        def tick(self) -> None:
            if path.exists() and path.read_text():
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_in_subprocess(work, str(path), Until())
    with pytest.raises(ProcessLookupError):
        os.kill(int(path.read_text()), 0)
