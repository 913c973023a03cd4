"""Each bug that other frameworks had is absent, and would be noticed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.test_mutants import verdict
from tests.kit.pool import Pool
from tests.known_bugs.bugs import BUGS


def run_with_bug(rank: int, world_size: int, name: str) -> Any:
    """Run the job of a bug's test with the bug planted."""
    bug = BUGS[name]
    with bug.plant():
        return bug.detector.function(rank, world_size, *bug.detector.args)


@pytest.mark.parametrize("name", BUGS)
def test_a_known_bug_is_absent(pool: Pool, name: str) -> None:
    detector = BUGS[name].detector
    assert verdict(pool, detector, detector.function, *detector.args) == "right"


@pytest.mark.parametrize("name", BUGS)
def test_a_known_bug_would_be_noticed(pool: Pool, name: str) -> None:
    assert verdict(pool, BUGS[name].detector, run_with_bug, name) == "wrong"
