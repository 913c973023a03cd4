"""How the tools for data speak."""

from __future__ import annotations

import errno
import os
import signal

import pytest

from megatron.data.errors import StoppedError, ToolParser, disk_error, pluralize, raise_on_signals


def test_numbers_in_words() -> None:
    assert [pluralize(n, "documents") for n in (0, 1, 2, 1234)] == [
        "0 documents",
        "1 document",
        "2 documents",
        "1,234 documents",
    ]


@pytest.mark.parametrize(
    ("number", "file", "told"),
    [
        (errno.ENOSPC, None, "d/out cannot be written: W\n  fix: make room on that disk | another --output"),
        (errno.EACCES, "d", "d/out cannot be written: W\n  fix: another --output"),
        (errno.ENOENT, "d/tmpabc", "d/out cannot be written: W\n  fix: another --output"),
        (errno.EACCES, "d/out.bin.7.part", "d/out cannot be written: W\n  fix: another --output"),
        (errno.EACCES, "d/in.jsonl", "d/in.jsonl cannot be read: W"),
        (errno.EIO, "e/out", "e/out cannot be read: W"),
    ],
)
def test_what_the_disk_refuses(number: int, file: str | None, told: str) -> None:
    assert str(disk_error(OSError(number, "W", file), "d/out", "--output")) == told


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_here_is_an_exception_and_afterwards_what_it_was(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(StoppedError, match=number.name) as stopped, raise_on_signals():
        os.kill(os.getpid(), number)
    assert stopped.value.status == 128 + number
    assert signal.getsignal(number) == before


def test_flags_are_told_in_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    parser = ToolParser("x.py", "what it does", "more")
    parser.add_argument("--workers", type=int)
    assert parser.parse(["--workers", "3"]).workers == 3
    for argv, told in (
        (["--worker=3"], "x: there is no --worker (did you mean --workers?)"),
        (["--workers", "a"], "x: argument --workers: invalid int value: 'a'"),
    ):
        with pytest.raises(SystemExit) as ended:
            parser.parse(argv)
        assert ended.value.code == 2
        assert capsys.readouterr().err == f"{told}\n  help: python tools/x.py --help\n"
