"""Report each rank's current pipeline action when a rank fails, to show what it was waiting for."""

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
"""Seconds between two checks for a failed rank."""

PATIENCE = 2.0
"""Seconds that the first rank to fail waits for the positions of the others."""

ELSEWHERE = "other work"
"""Position of a rank outside its pipeline."""

MOST_RANKS = 16
"""Ranks listed per position."""


def whereabouts(mesh: Mesh, pipeline: Pipeline) -> AbstractContextManager[object]:
    """Publish this rank's position in ``pipeline`` if a rank fails inside; without pipeline parallelism do nothing."""
    if len(set(mesh.placement)) == 1:
        return NOTHING
    return Whereabouts(mesh.rank, lambda: str(pipeline.at or ELSEWHERE))


class Whereabouts:
    """Publish this rank's position: at once when this rank fails, else as soon as another one has failed.

    A thread checks for failed ranks, because the main thread may be blocked in a collective.
    """

    def __init__(self, rank: int, place: Callable[[], str]) -> None:
        """Start the thread.

        Args:
            rank: global rank of this process.
            place: returns its current position.
        """
        self._rank = rank
        self._place = place
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="position reporter", daemon=True)
        self._thread.start()

    def __enter__(self) -> Whereabouts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        self._thread.join(LOOK_EVERY)  # at most: it may be blocked on a store that no longer answers
        if error is not None:
            self._publish()

    def _watch(self) -> None:
        while not self._stopped.wait(LOOK_EVERY):
            if words_left([FAILED]):
                self._publish()
                return

    def _publish(self) -> None:
        leave_word(_key(self._rank), self._place())


@contextmanager
def spared() -> Iterator[None]:
    """Ignore SIGTERM, which launchers send to all ranks as soon as one has exited. Use in the main thread."""
    previous = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def where_all_are(rank: int, world_size: int) -> str:
    """Return a line with the position of each rank, for a failure report; empty if none is in a pipeline.

    Waits a few seconds for ranks that have not published theirs; the position of dead ranks stays unknown.
    """
    if not words_left([_key(rank)]):
        return ""
    keys = [_key(r) for r in range(world_size)]
    deadline = time.monotonic() + PATIENCE
    found = words_left(keys)
    while len(found) < world_size and time.monotonic() < deadline:
        time.sleep(0.05)
        found = words_left(keys)
    ranks_at: dict[str, list[int]] = defaultdict(list)
    for r, key in enumerate(keys):
        ranks_at[found.get(key, "no answer")].append(r)
    if [*ranks_at] == [ELSEWHERE]:
        return ""
    return "the ranks were at: " + ", ".join(f"{place} ({_list_ranks(ranks)})" for place, ranks in ranks_at.items())


def _list_ranks(ranks: list[int]) -> str:
    more = f" and {len(ranks) - MOST_RANKS} more" if len(ranks) > MOST_RANKS else ""
    return f"rank{'s' * (len(ranks) > 1)} {' '.join(map(str, ranks[:MOST_RANKS]))}{more}"


def _key(rank: int) -> str:
    return f"place of rank {rank}"
