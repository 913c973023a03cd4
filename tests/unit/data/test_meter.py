"""How far a copy is."""

from __future__ import annotations

import io

import pytest

from megatron.data.indexed_writer import ByteProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that it shows."""
    shows = [100.0]
    monkeypatch.setattr("megatron.data.indexed_writer.time.monotonic", lambda: shows[0])
    return shows


def test_a_file_gets_a_line_now_and_then(clock: list[float]) -> None:
    stream = io.StringIO()
    meter = ByteProgress(stream, 10**10)
    for clock[0] in (104.0, 110.0, 115.0, 120.0):
        meter.add(10**9)
    meter.close()
    assert stream.getvalue().splitlines() == [
        "2.0 GB of 10.0 GB, 200.0 MB/s, 40 s left",
        "4.0 GB of 10.0 GB, 200.0 MB/s, 30 s left",
    ]


def test_a_terminal_has_one_line_that_goes_away(clock: list[float]) -> None:
    stream = Terminal()
    meter = ByteProgress(stream, 10**9)
    for clock[0] in (100.1, 101.0):
        meter.add(10**8)
    meter.close()
    assert stream.getvalue() == "\r200.0 MB of 1.0 GB, 200.0 MB/s, 4 s left\x1b[K\r\x1b[K"
