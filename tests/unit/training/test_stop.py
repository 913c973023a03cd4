from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron.distributed.comm import Group
from megatron.training import loop
from megatron.training.callbacks.profiler import NO_REQUEST
from megatron.training.loop import STOP_FILE_FOUND, StopRequest, exit_status, stop_reason
from tests.runs import before_step, column, differences, records, saved_steps, start, tiny_run

CPU = torch.device("cpu")


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """Signals that reach the previous handlers."""
    numbers: list[int] = []
    previous = {s: signal.signal(s, lambda number, frame: numbers.append(number)) for s in loop.SIGNALS}
    yield numbers
    for number, handler in previous.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", loop.SIGNALS)
def test_the_first_signal_is_remembered(heard: list[int], number: signal.Signals) -> None:
    request = StopRequest(Group(), CPU)
    assert request.poll() == 0
    signal.raise_signal(number)
    assert request.poll() == request.poll() == 128 + number
    assert heard == []
    request.restore()


def test_the_same_signal_passed_on_by_a_launcher_is_no_second_one(heard: list[int]) -> None:
    request = StopRequest(Group(), CPU)
    for _ in range(3):
        signal.raise_signal(signal.SIGINT)
    assert (request.poll(), heard) == (128 + signal.SIGINT, [])
    request.restore()


def test_an_impatient_user_gets_through(heard: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "ECHO_SECONDS", -1.0)
    request = StopRequest(Group(), CPU)
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGINT)
    assert (request.poll(), heard) == (128 + signal.SIGTERM, [signal.SIGINT])


def test_signals_are_given_back(heard: list[int]) -> None:
    StopRequest(Group(), CPU).restore()
    signal.raise_signal(signal.SIGTERM)
    assert heard == [signal.SIGTERM]


def test_one_rank_alone_asks_no_device(heard: list[int]) -> None:
    """Reading a tensor on the meta device would raise."""
    request = StopRequest(Group(), torch.device("meta"))
    assert (request.poll(), request.profile_request) == (0, NO_REQUEST)
    signal.raise_signal(signal.SIGTERM)
    assert request.poll() == 128 + signal.SIGTERM
    request.restore()


@pytest.mark.parametrize(("since", "answer"), [(None, 0), (400.5, 0), (399.9, loop.TIME_LIMIT)])
def test_the_time_limit_counts_from_a_given_start(
    heard: list[int], monkeypatch: pytest.MonkeyPatch, since: float | None, answer: int
) -> None:
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: 1000.0))
    request = StopRequest(Group(), CPU, minutes=10.0, since=since)
    assert request.poll() == answer
    request.restore()


def test_a_file_is_looked_for_every_time(heard: list[int], tmp_path: Path) -> None:
    file = tmp_path / "stop"
    request = StopRequest(Group(), CPU, file=file)
    assert request.poll() == 0
    file.touch()
    assert request.poll() == STOP_FILE_FOUND
    file.unlink()
    assert request.poll() == 0
    request.restore()


def test_a_file_is_the_last_of_all_reasons(heard: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    now = [0.0]
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: now[-1]))
    request = StopRequest(Group(), CPU, minutes=1.0, file=tmp_path)
    printed = [request.poll()]
    now.append(60.0)
    printed.append(request.poll())
    signal.raise_signal(signal.SIGUSR1)
    printed.append(request.poll())
    assert printed == [STOP_FILE_FOUND, loop.TIME_LIMIT, 128 + signal.SIGUSR1]
    assert [exit_status(number) for number in (0, *printed)] == [0, 0, 124, 138]
    assert [stop_reason(number, "a/stop") for number in printed] == [
        "--stop-file a/stop",
        "--exit-duration-in-mins",
        "signal 10 (SIGUSR1)",
    ]
    request.restore()


FLAGS = "--save {0}/saved --eval-interval 1 --eval-iters 1 --stop-file {0}/stop"


def test_a_file_ends_a_run_as_a_signal_does_but_for_the_status(tmp_path: Path) -> None:
    config, file = tiny_run(tmp_path / "run", FLAGS.format(tmp_path)), tmp_path / "stop"
    printed = start(config, before_step(3, lambda trainer: file.touch()))
    assert (printed.status, printed.err) == (0, "")
    assert saved_steps(tmp_path / "saved") == [3]
    # no further evaluation after the signal
    assert column(tmp_path / "run", "iteration", "lm loss validation") == [1, 2]
    stops = [record["text"] for record in records(tmp_path / "run", "event") if record["event"] == "stop"]
    assert stops == [f"stopped by --stop-file {file} after step 3 of 6"]
    file.unlink()
    assert start(config).status == 0
    whole = tmp_path / "whole"
    whole.mkdir()
    start(tiny_run(whole / "run", FLAGS.format(whole)))
    assert differences(tmp_path / "saved/iter_0000006", whole / "saved/iter_0000006") == []


def test_a_file_that_is_there_already_stops_the_run_before_a_step(tmp_path: Path) -> None:
    (tmp_path / "stop").touch()
    config = tiny_run(tmp_path / "run", FLAGS.format(tmp_path))
    printed = start(config)
    assert (printed.status, printed.samples, saved_steps(tmp_path / "saved")) == (0, {}, [])
    assert "before the first step of this start: 0 of 6 are taken, and there is nothing new to save" in printed.out
    (tmp_path / "stop").unlink()
    start(config)
    (tmp_path / "stop").touch()
    printed = start(config)  # nothing to do
    assert "nothing to do" in printed.out
    assert "stopped by" not in printed.out


def test_a_signal_during_the_start_ends_it_before_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = StopRequest.__init__

    def signalled(request: StopRequest, *arguments: object, **named: object) -> None:
        original(request, *arguments, **named)  # type: ignore[arg-type]
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(StopRequest, "__init__", signalled)
    printed = start(tiny_run(tmp_path / "run", FLAGS.format(tmp_path)))
    assert (printed.status, printed.samples, printed.err) == (143, {}, "")
    assert "stopped by signal 15 (SIGTERM) before the first step" in printed.out


def test_time_that_is_up_before_the_first_step_still_leaves_one(tmp_path: Path) -> None:
    """Otherwise a job that is requeued with a limit below the time of a start would never end."""
    flags = FLAGS.format(tmp_path) + " --exit-duration-in-mins 1e-9"
    printed = start(tiny_run(tmp_path / "run", flags))
    assert (printed.status, sorted(printed.samples), saved_steps(tmp_path / "saved")) == (124, [1], [1])
