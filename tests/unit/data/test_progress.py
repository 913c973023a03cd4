"""What is shown while preprocessing runs."""

from __future__ import annotations

import io

import pytest

from megatron.data import progress
from megatron.data.progress import (
    ByteProgress,
    PreprocessProgress,
    PreprocessTotals,
    format_count,
    format_duration,
    progress_line,
)


class Screen(io.StringIO):
    """A terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, to be set."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_a_line_says_how_far_how_fast_and_how_long() -> None:
    totals = PreprocessTotals(stored_bytes=250, documents=1234, text_bytes=3 << 20, tokens=800_000)
    line = progress_line(totals, 1000, 2.0)
    assert line == (
        "[######..................]  25.0% | 1,234 documents, 800k tokens | 1.50 MiB/s, 400k tokens/s | 6s left"
    )
    assert progress_line(PreprocessTotals(), 1000, 0.0).endswith("| ? left")


def test_a_terminal_shows_one_line_that_is_written_over(clock: list[float]) -> None:
    screen = Screen()
    shown = PreprocessProgress(screen, 100)
    for step in range(1, 101):
        clock[0] += 0.05
        shown.update(PreprocessTotals(stored_bytes=step, documents=step))
    assert screen.getvalue().count("\n") == 0
    assert 20 <= screen.getvalue().count("\r") <= 26  # five times a second for five seconds
    shown.message("a sentence")
    shown.close()
    assert screen.getvalue().endswith("\r\x1b[Ka sentence\n")


@pytest.mark.parametrize(("interval", "lines"), [(None, 5), (20, 5), (1, 101), (1000, 0), (0, 0)])
def test_a_file_gets_a_line_now_and_then(clock: list[float], interval: int | None, lines: int) -> None:
    file = io.StringIO()
    shown = PreprocessProgress(file, 101, interval)
    for step in range(1, 102):
        clock[0] += 0.5
        shown.update(PreprocessTotals(stored_bytes=step, documents=step))
    shown.close()
    assert file.getvalue().count("\n") == lines
    assert "\r" not in file.getvalue()


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (999, "999"), (1000, "1k"), (999_499, "999k"), (999_500, "1M"), (16_349_000, "16.3M"), (3e11, "300B")],
)
def test_short_numbers(number: float, text: str) -> None:
    assert format_count(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0s"), (59.4, "59s"), (59.6, "1m00s"), (185, "3m05s"), (7800, "2h10m"), (100_800, "1d04h")],
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_bytes_in_a_file(clock: list[float]) -> None:
    stream = io.StringIO()
    meter = ByteProgress(stream, 10 << 30)
    for clock[0] in (104.0, 110.0, 115.0, 120.0):
        meter.add(1 << 30)
    meter.close()
    assert stream.getvalue().splitlines() == [
        "2.00 GiB of 10.00 GiB, 204.80 MiB/s, 40 s left",
        "4.00 GiB of 10.00 GiB, 204.80 MiB/s, 30 s left",
    ]


def test_bytes_on_a_terminal(clock: list[float]) -> None:
    stream = Screen()
    meter = ByteProgress(stream, 1 << 30)
    for clock[0] in (100.1, 101.0):
        meter.add(1 << 27)
    meter.close()
    assert stream.getvalue() == "\r256.00 MiB of 1.00 GiB, 256.00 MiB/s, 3 s left\x1b[K\r\x1b[K"
