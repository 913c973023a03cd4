"""Where in the pipeline every rank was when one failed: what it did mostly tells what it was waiting for."""

from __future__ import annotations

import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType

from megatron.parallel.mesh import FAILED, Mesh, leave_word, words_left
from megatron.parallel.stopwatch import NOTHING
from megatron.pipeline.runtime import Pipeline

LOOK_EVERY = 1.0
"""Seconds between two looks for a rank that has failed."""

PATIENCE = 2.0
"""Seconds that the first rank to fail gives the others to say where they are."""

ELSEWHERE = "other work"
"""The place of a rank that is not in its pipeline."""

MOST_RANKS = 16
"""Ranks that are listed for one place."""


def whereabouts(mesh: Mesh, pipeline: Pipeline) -> AbstractContextManager[object]:
    """Say where in ``pipeline`` this rank is, should a rank fail inside; nothing where it runs on one rank."""
    if len(set(mesh.placement)) == 1:
        return NOTHING
    return Whereabouts(mesh.rank, lambda: str(pipeline.at or ELSEWHERE))


class Whereabouts:
    """Says where this rank is, to the one that tells of a failure: at once when it fails itself, else when asked.

    A rank that waits for one that has failed cannot do anything else, so that a thread of its own looks.
    """

    def __init__(self, rank: int, place: Callable[[], str]) -> None:
        """Begin to look.

        Args:
            rank: this one, of all.
            place: where it is.
        """
        self._rank, self._place, self._over = rank, place, threading.Event()
        self._thread = threading.Thread(target=self._look, name="whereabouts", daemon=True)
        self._thread.start()

    def __enter__(self) -> Whereabouts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join(LOOK_EVERY)  # it may be asking for a word where nobody answers any more
        if error is not None:
            self._tell()

    def _look(self) -> None:
        while not self._over.wait(LOOK_EVERY):
            if words_left([FAILED]):
                self._tell()
                return

    def _tell(self) -> None:
        leave_word(_word(self._rank), self._place())


@contextmanager
def spared() -> Iterator[None]:
    """Not ended inside by the launcher, whose SIGTERM goes to all ranks as soon as one is gone; for the main thread."""
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def where_all_are(rank: int, world_size: int) -> str:
    """A line that names the place of each rank, for the one that tells of a failure; empty where none is in a pipeline.

    Waits up to ``PATIENCE`` for ranks that are still at work; those that are gone are unknown.
    """
    if not words_left([_word(rank)]):
        return ""
    names, until = [_word(r) for r in range(world_size)], time.monotonic() + PATIENCE
    found = words_left(names)
    while len(found) < world_size and time.monotonic() < until:
        time.sleep(0.05)
        found = words_left(names)
    ranks_at: dict[str, list[int]] = defaultdict(list)
    for r, name in enumerate(names):
        ranks_at[found.get(name, "no answer")].append(r)
    if [*ranks_at] == [ELSEWHERE]:
        return ""
    return "the ranks were at: " + ", ".join(f"{place} ({_listed(ranks)})" for place, ranks in ranks_at.items())


def _listed(ranks: list[int]) -> str:
    more = f" and {len(ranks) - MOST_RANKS} more" if len(ranks) > MOST_RANKS else ""
    return f"rank{'s' * (len(ranks) > 1)} {' '.join(map(str, ranks[:MOST_RANKS]))}{more}"


def _word(rank: int) -> str:
    return f"place of rank {rank}"
