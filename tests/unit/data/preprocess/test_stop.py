"""Signals, noted and told where that is safe."""

from __future__ import annotations

import os
import signal

import pytest

from megatron.data.errors import StoppedError
from megatron.data.preprocess.run import stop_on_signals

BOTH = (signal.SIGTERM, signal.SIGINT)


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", BOTH)
def test_at_first_a_signal_ends_what_goes_on(number: signal.Signals) -> None:
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


def test_what_a_library_swallowed_is_told_by_the_next_check() -> None:
    with stop_on_signals() as stop:
        try:
            send(signal.SIGTERM)
        except BaseException:
            swallowed = True
        assert swallowed
        with pytest.raises(StoppedError, match="SIGTERM"):
            stop.wait_for_checks()
