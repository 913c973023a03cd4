"""Each bug that other frameworks had is absent, and would be noticed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.detect import Detector
from tests.distributed.test_mutants import verdict
from tests.kit.pool import Pool
from tests.kit.short import one_in
from tests.known_bugs.bugs import BUGS, UNCOVERED
from tests.known_bugs.page import PAGE, rows_of, uncovered_row, words_of

CLEAN: list[tuple[Detector, str]] = []
"""Verdicts on the library as it is; several bugs share a job."""


def run_with_bug(rank: int, world_size: int, name: str) -> Any:
    """Run the job of a bug's test with the bug planted."""
    bug = BUGS[name]
    with bug.plant():
        return bug.detector.function(rank, world_size, *bug.detector.args)


def clean_verdict(pool: Pool, detector: Detector) -> str:
    """Return the verdict on the library as it is, once for each job."""
    for known, found in CLEAN:
        if known.function is detector.function and known.args == detector.args:
            return found
    CLEAN.append((detector, verdict(pool, detector, detector.function, *detector.args)))
    return CLEAN[-1][1]


@pytest.mark.parametrize("name", BUGS)
def test_a_known_bug_is_absent(pool: Pool, name: str) -> None:
    assert clean_verdict(pool, BUGS[name].detector) == "right"


@pytest.mark.parametrize("name", one_in(3, BUGS))
def test_a_known_bug_would_be_noticed(pool: Pool, name: str) -> None:
    assert verdict(pool, BUGS[name].detector, run_with_bug, name) == "wrong"


def test_the_page_has_all_known_bugs() -> None:
    """``python -m tests.known_bugs`` writes it."""
    text = PAGE.read_text()
    assert rows_of(text) == {words_of(bug) for bug in BUGS.values()}
    assert all(uncovered_row(bug) in text for bug in UNCOVERED)
