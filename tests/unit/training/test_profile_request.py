from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron.arguments.validate import MAX_PROFILE_STEPS
from megatron.distributed.comm import Group
from megatron.training.callbacks import profiler
from megatron.training.callbacks.profiler import (
    DEFAULT_PROFILE_STEPS,
    NO_REQUEST,
    ProfileRequest,
    ProfileRequestListener,
)
from megatron.training.loop import StopRequest


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(profiler, "time", SimpleNamespace(monotonic=clock.monotonic))
    return clock


@pytest.fixture(autouse=True)
def _signals_as_they_were() -> Iterator[None]:
    before = signal.getsignal(signal.SIGUSR2)
    yield
    signal.signal(signal.SIGUSR2, before)


def requests(run_dir: Path | None, rank: int = 0) -> tuple[ProfileRequestListener, list[str]]:
    printed: list[str] = []
    return ProfileRequestListener(None if run_dir is None else str(run_dir), rank, printed.append), printed


def test_a_signal_is_a_wish_once(tmp_path: Path) -> None:
    asked, printed = requests(tmp_path, rank=3)
    assert asked.take() == NO_REQUEST
    signal.raise_signal(signal.SIGUSR2)
    signal.raise_signal(signal.SIGUSR2)
    assert [asked.take(), asked.take(), printed] == [ProfileRequest(DEFAULT_PROFILE_STEPS), NO_REQUEST, []]


def test_without_a_run_folder_a_signal_is_told_and_ends_nothing() -> None:
    asked, printed = requests(None)
    signal.raise_signal(signal.SIGUSR2)
    assert asked.take() == NO_REQUEST
    assert printed == ["SIGUSR2 requests a profile, which needs --run-dir; this run has none"]


@pytest.mark.parametrize(
    ("text", "wish"),
    [
        ("", ProfileRequest(DEFAULT_PROFILE_STEPS)),
        ("\n", ProfileRequest(DEFAULT_PROFILE_STEPS)),
        ("5", ProfileRequest(5)),
        (" 12 \n", ProfileRequest(12)),
        (str(MAX_PROFILE_STEPS), ProfileRequest(MAX_PROFILE_STEPS)),
        ("pipeline\n", ProfileRequest(pipeline=DEFAULT_PROFILE_STEPS)),
        ("pipeline 3", ProfileRequest(pipeline=3)),
    ],
)
def test_a_file_says_what_and_how_many_steps_and_goes(
    tmp_path: Path, clock: Clock, text: str, wish: ProfileRequest
) -> None:
    asked, printed = requests(tmp_path)
    (tmp_path / "PROFILE").write_text(text)
    assert asked.take() == wish
    assert (list(tmp_path.iterdir()), printed) == ([], [])


@pytest.mark.parametrize(
    "text",
    [
        "0",
        "-1",
        "two",
        "pipeline0",
        "pipeline two",
        "3 pipeline",
        "2.5",
        "1e3",
        str(MAX_PROFILE_STEPS + 1),
        "00000000199",
        "9" * 5000,
        "000000001" * 600,
        "\0\xff",
    ],
)
def test_a_file_that_says_something_else_is_told(tmp_path: Path, clock: Clock, text: str) -> None:
    asked, printed = requests(tmp_path)
    (tmp_path / "PROFILE").write_text(text)
    assert asked.take() == NO_REQUEST
    assert list(tmp_path.iterdir()) == []
    (sentence,) = printed
    assert sentence.startswith("no profile: PROFILE may be empty, for 2 steps, or contain a number of steps up to 20")
    assert len(sentence) < 250


def test_the_file_is_looked_for_once_a_second_and_by_rank_0(tmp_path: Path, clock: Clock) -> None:
    (asked, _), (other, _) = requests(tmp_path), requests(tmp_path, rank=1)
    assert asked.take() == NO_REQUEST
    (tmp_path / "PROFILE").touch()
    clock.now += 0.9
    assert [asked.take(), other.take()] == [NO_REQUEST, NO_REQUEST]
    clock.now += 0.2
    assert [other.take(), asked.take(), asked.take()] == [NO_REQUEST, ProfileRequest(DEFAULT_PROFILE_STEPS), NO_REQUEST]


def test_a_file_that_cannot_be_removed_is_told_once(tmp_path: Path, clock: Clock) -> None:
    asked, printed = requests(tmp_path)
    (tmp_path / "PROFILE").mkdir()
    for _ in range(3):
        assert asked.take() == NO_REQUEST
        clock.now += 2.0
    (sentence,) = printed
    assert "is ignored from now on, because it cannot be removed" in sentence


def test_a_stop_and_a_wish_are_agreed_on_together(tmp_path: Path) -> None:
    asked, _ = requests(tmp_path)
    stop = StopRequest(Group(), torch.device("cpu"), profiles=asked)
    try:
        assert (stop.poll(), stop.profile_request) == (0, NO_REQUEST)
        signal.raise_signal(signal.SIGUSR2)
        assert (stop.poll(), stop.profile_request) == (0, ProfileRequest(DEFAULT_PROFILE_STEPS))
        signal.raise_signal(signal.SIGUSR1)
        assert (stop.poll(), stop.profile_request) == (128 + signal.SIGUSR1, NO_REQUEST)
    finally:
        stop.restore()


def test_the_signal_is_given_back(tmp_path: Path) -> None:
    heard: list[int] = []
    signal.signal(signal.SIGUSR2, lambda number, frame: heard.append(number))
    asked, _ = requests(tmp_path)
    asked.restore()
    signal.raise_signal(signal.SIGUSR2)
    assert (asked.take(), heard) == (NO_REQUEST, [signal.SIGUSR2])
