"""Positions of the ranks in a failure report; for real ranks see test_pipeline_runtime.py."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.distributed.comm import Group
from megatron.distributed.launch import FAILED_KEY
from megatron.training import failure_report
from megatron.training.failure_report import PeerWatchdog, rank_positions, report_failure


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Messages published by ranks."""
    left: dict[str, str] = {}

    def found(names: Sequence[str]) -> dict[str, str]:
        return {name: left[name] for name in names if name in left}

    monkeypatch.setattr(failure_report, "publish_text", left.__setitem__)
    monkeypatch.setattr(failure_report, "read_texts", found)
    monkeypatch.setattr(failure_report, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(failure_report, "POSITION_TIMEOUT_SECONDS", 0.1)
    return left


def rank_5_at(action: str) -> PeerWatchdog:
    """Return the watchdog of rank 5 of 6, whose pipeline is at an action."""
    pipeline: Any = SimpleNamespace(at=action)
    return PeerWatchdog(Group(tuple(range(6)), 5), pipeline)


def test_ranks_at_the_same_position_are_listed_together(words: dict[str, str]) -> None:
    words.update({f"place of rank {rank}": "0B0" if rank < 18 else "1F2" for rank in range(19)})
    expected = f"the ranks were at: 0B0 (ranks {' '.join(map(str, range(16)))} and 2 more), 1F2 (rank 18)"
    assert rank_positions(3, 19) == expected


def test_ranks_that_do_not_answer_are_listed_after_a_while(words: dict[str, str]) -> None:
    words["place of rank 1"] = "1F2"
    assert rank_positions(1, 3) == "the ranks were at: no answer (ranks 0 2), 1F2 (rank 1)"


def test_without_a_pipeline_nothing_is_reported_and_there_is_no_wait(words: dict[str, str]) -> None:
    began = time.monotonic()
    assert rank_positions(0, 2) == ""
    assert time.monotonic() - began < 0.1


def test_if_no_rank_was_in_the_pipeline_nothing_is_reported(words: dict[str, str]) -> None:
    words.update({"place of rank 0": "other work", "place of rank 1": "other work"})
    assert rank_positions(0, 2) == ""
    words["place of rank 1"] = "1F2"
    assert rank_positions(0, 2) == "the ranks were at: other work (rank 0), 1F2 (rank 1)"


def test_a_failing_rank_publishes_its_position(words: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="too hot"), rank_5_at("1F2"):
        raise ValueError("too hot")
    assert words == {"place of rank 5": "1F2"}


def test_a_rank_that_ends_normally_publishes_nothing(words: dict[str, str]) -> None:
    with rank_5_at("1F2"):
        pass
    assert words == {}


def test_a_waiting_rank_publishes_its_position_once_another_has_failed(words: dict[str, str]) -> None:
    with rank_5_at("0B0"):
        time.sleep(0.05)
        assert words == {}
        words[FAILED_KEY] = "1"
        deadline = time.monotonic() + 5
        while "place of rank 5" not in words and time.monotonic() < deadline:
            time.sleep(0.01)
        assert words["place of rank 5"] == "0B0"


def test_sigterm_is_ignored_while_a_failure_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def positions(rank: int, world_size: int) -> str:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)
        return ""

    monkeypatch.setattr(failure_report, "rank_positions", positions)
    before = signal.getsignal(signal.SIGTERM)
    report_failure(ValueError("too hot"))
    assert signal.getsignal(signal.SIGTERM) == before
