"""Test the progress that data tools show."""

from __future__ import annotations

import io

import pytest

from megatron.data import progress
from megatron.data.progress import ByteProgress, PreprocessProgress, PreprocessTotals, StageProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines are due at every update, as if much time had passed."""
    monkeypatch.setattr(progress, "TERMINAL_INTERVAL", 1e-9)
    monkeypatch.setattr(progress, "FILE_INTERVAL", 1e-9)


def steps(stream: io.StringIO, interval: int | None = None) -> str:
    shown = PreprocessProgress(stream, 1000, interval)
    shown.message("a sentence")
    for step in range(1, 101):
        shown.update(
            PreprocessTotals(stored_bytes=10 * step, documents=step, text_bytes=step << 20, tokens=8000 * step)
        )
    shown.close()
    return stream.getvalue()


def test_a_terminal_shows_one_line_that_is_written_over() -> None:
    text = steps(Terminal())
    assert "a sentence\n" in text
    assert text.count("\n") == 1
    assert "\r[######..................]  25.0% | 25 documents, 200k tokens | " in text
    assert text.count("MiB/s") + text.count("GiB/s") == 100
    assert text.endswith(" \r"), "erased"


@pytest.mark.parametrize(("interval", "lines"), [(None, 100), (20, 5), (1000, 0), (0, 0)])
def test_a_file_gets_whole_lines_now_and_then(interval: int | None, lines: int) -> None:
    text = steps(io.StringIO(), interval)
    assert text.startswith("a sentence\n")
    assert text.count("\n") == lines + 1
    assert "\r" not in text
    assert text.count("] 100.0% | 100 documents, 800k tokens | ") == min(lines, 1)


def test_nothing_is_shown_before_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "FILE_INTERVAL", 60.0)
    assert steps(io.StringIO()) == "a sentence\n"


def test_bytes_and_stages() -> None:
    stream = io.StringIO()
    meter = ByteProgress(stream, 10 << 30)
    meter.add(1 << 30)
    meter.add(1 << 30)
    meter.close()
    assert [line.split(",")[0] for line in stream.getvalue().splitlines()] == ["1.00G of 10.0G", "2.00G of 10.0G"]
    stream = io.StringIO()
    stages = StageProgress(stream)
    stages.set_stage("reading")
    stages.tick()
    stages.close()
    assert stream.getvalue() == "reading, 00:00\n" * 2
