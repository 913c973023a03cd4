"""A bug that another framework had: the report, a small test that it fails, and the bug itself, to plant."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from tests.distributed.detect import Detector


@dataclass(frozen=True)
class KnownBug:
    """A reported bug with which training went wrong without an error, and the means to show that it is absent here.

    Args:
        reports: where it was reported: project and number, ``NVIDIA/Megatron-LM#7452 (finding 8)``.
        kind: what it belongs to, a heading of the page.
        bug: what went wrong there, in one sentence.
        check: what is compared here, in one sentence that names the independent side.
        detector: the ranks, the job of each, and whether their results are right.
        plant: patches the library so that it has the bug, on every rank.
        mended: what was wrong here too, in one sentence, if the bug was found here.
    """

    reports: tuple[str, ...]
    kind: str
    bug: str
    check: str
    detector: Detector
    plant: Callable[[], AbstractContextManager[Any]]
    mended: str = ""


@dataclass(frozen=True)
class UncoveredBug:
    """A reported bug that no test here covers; it does not count.

    Args:
        reports: as of a known bug.
        bug: what went wrong there, in one sentence.
        why: the reason, in one sentence.
    """

    reports: tuple[str, ...]
    bug: str
    why: str
