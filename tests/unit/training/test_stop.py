from __future__ import annotations

import signal
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from megatron.parallel.comm import Group
from megatron.training import stop
from megatron.training.profile_request import NOTHING
from megatron.training.stop import StopRequest

CPU = torch.device("cpu")


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """The signals that reach whoever listened before."""
    numbers: list[int] = []
    previous = {s: signal.signal(s, lambda number, frame: numbers.append(number)) for s in stop.SIGNALS}
    yield numbers
    for number, handler in previous.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", stop.SIGNALS)
def test_the_first_signal_is_remembered(heard: list[int], number: signal.Signals) -> None:
    request = StopRequest(Group(), CPU)
    assert request.agreed() == 0
    signal.raise_signal(number)
    assert request.agreed() == request.agreed() == 128 + number
    assert heard == []
    request.restore()


def test_the_same_signal_passed_on_by_a_launcher_is_no_second_one(heard: list[int]) -> None:
    request = StopRequest(Group(), CPU)
    for _ in range(3):
        signal.raise_signal(signal.SIGINT)
    assert (request.agreed(), heard) == (128 + signal.SIGINT, [])
    request.restore()


def test_an_impatient_user_gets_through(heard: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop, "ECHO_SECONDS", -1.0)
    request = StopRequest(Group(), CPU)
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGINT)
    assert (request.agreed(), heard) == (128 + signal.SIGTERM, [signal.SIGINT])


def test_signals_are_given_back(heard: list[int]) -> None:
    StopRequest(Group(), CPU).restore()
    signal.raise_signal(signal.SIGTERM)
    assert heard == [signal.SIGTERM]


def test_one_rank_alone_asks_no_device(heard: list[int]) -> None:
    """A tensor on a meta device has no value, so to read one would raise."""
    request = StopRequest(Group(), torch.device("meta"))
    assert (request.agreed(), request.wish) == (0, NOTHING)
    signal.raise_signal(signal.SIGTERM)
    assert request.agreed() == 128 + signal.SIGTERM
    request.restore()


@pytest.mark.parametrize(("since", "answer"), [(None, 0), (400.5, 0), (399.9, stop.TIME_IS_UP)])
def test_the_clock_counts_from_where_it_is_told(
    heard: list[int], monkeypatch: pytest.MonkeyPatch, since: float | None, answer: int
) -> None:
    monkeypatch.setattr(stop, "time", SimpleNamespace(monotonic=lambda: 1000.0))
    request = StopRequest(Group(), CPU, minutes=10.0, since=since)
    assert request.agreed() == answer
    request.restore()
