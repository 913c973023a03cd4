"""Command-line conventions of the data tools."""

from __future__ import annotations

import errno
import os
import signal

import pytest

from megatron.data.errors import (
    DataError,
    StoppedError,
    StopSignal,
    ToolParser,
    disk_error,
    run_tool,
    stop_on_signals,
)


@pytest.mark.parametrize(
    ("number", "file", "reported"),
    [
        (errno.ENOSPC, None, "d/out cannot be written: W\n  fix: make room on that disk | another --output"),
        (errno.EACCES, "d", "d/out cannot be written: W\n  fix: another --output"),
        (errno.ENOENT, "d/tmpabc", "d/out cannot be written: W\n  fix: another --output"),
        (errno.EACCES, "d/out.bin.7.part", "d/out cannot be written: W\n  fix: another --output"),
        (errno.EACCES, "d/in.jsonl", "d/in.jsonl cannot be read: W"),
        (errno.EIO, "e/out", "e/out cannot be read: W"),
    ],
)
def test_disk_errors_are_described(number: int, file: str | None, reported: str) -> None:
    assert str(disk_error(OSError(number, "W", file), "d/out", "--output")) == reported


BOTH = (signal.SIGTERM, signal.SIGINT)


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", BOTH)
def test_at_first_a_signal_raises_at_once(number: signal.Signals) -> None:
    with pytest.raises(StoppedError, match=number.name) as caught, stop_on_signals():
        send(number)
    assert caught.value.status == 128 + number


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


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (DataError("it is wrong", "mend it"), 1, "x: it is wrong\n  fix: mend it\n"),
        (OSError(errno.EIO, "W", "in"), 1, "x: in cannot be read: W\n"),
        (StoppedError(signal.SIGINT), 130, "x: stopped by SIGINT before d/out was written\n"),
    ],
)
def test_errors_become_a_message_and_a_status(
    error: BaseException, status: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(stop: StopSignal) -> None:
        raise error

    assert run_tool(ToolParser("x.py", "", ""), fail, "d/out", "--output") == status
    assert capsys.readouterr().err == line


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
