"""Command-line conventions of the data tools."""

from __future__ import annotations

import errno
import os
import signal

import pytest

from megatron.data.errors import (
    StoppedError,
    ToolParser,
    disk_error,
    stop_on_signals,
)


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


BOTH = (signal.SIGTERM, signal.SIGINT)


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", BOTH)
def test_later_it_waits_for_a_check(number: signal.Signals) -> None:
    before = [signal.getsignal(one) for one in BOTH]
    with stop_on_signals() as stop:
        stop.wait_for_checks()
        stop.check()
        send(number)
        send(number)
        with pytest.raises(StoppedError, match=number.name):
            stop.check()
    assert [signal.getsignal(one) for one in BOTH] == before


def test_unknown_flags_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    parser = ToolParser("x.py", "what it does", "more")
    parser.add_argument("--workers", type=int)
    assert parser.parse(["--workers", "3"]).workers == 3
    for argv, printed in (
        (["--worker=3"], "x: there is no --worker (did you mean --workers?)"),
        (["--workers", "a"], "x: argument --workers: invalid int value: 'a'"),
    ):
        with pytest.raises(SystemExit) as ended:
            parser.parse(argv)
        assert ended.value.code == 2
        assert capsys.readouterr().err == f"{printed}\n  help: python tools/x.py --help\n"
