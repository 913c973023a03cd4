"""Fetch blocks of token files from object stores ahead of their use, in threads.

The threads take the missing blocks in the order in which they will be read. A block that another process of the machine
is fetching is passed over, so that ranks which read the same samples share the work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from threading import Condition, Thread
from typing import TYPE_CHECKING, TypeAlias

from megatron.data.errors import DataError

if TYPE_CHECKING:
    from megatron.data.token_store import RemoteTokens

Block: TypeAlias = "tuple[RemoteTokens, int]"
"""A block: the ids, and its number."""

THREADS = 8
HELD_SECONDS, FAILED_SECONDS, FULL_SECONDS = 0.1, 5.0, 60.0
"""Delays before a block is tried again: another process is fetching it, the store fails, the cache is full."""


class BlockPrefetch:
    """Threads that fetch what ``plan`` returns."""

    def __init__(self, plan: Callable[[], Sequence[Block]], threads: int = THREADS) -> None:
        """Start no thread yet; ``plan`` returns the next blocks in order, and is called in a thread."""
        self._plan = plan
        self._changed = Condition()
        self._stale = True  # the plan
        self._planned = False
        self._stopped = False
        self._missing: list[Block] = []
        self._busy: set[Block] = set()
        self._later: dict[Block, float] = {}  # block -> time before which it is not tried
        self.errors: dict[Block, DataError] = {}  # of blocks that are still missing
        workers = [Thread(target=self._fetch_missing, name=f"fetch-{i}", daemon=True) for i in range(threads)]
        self._threads = [Thread(target=self._follow_plan, name="plan-fetches", daemon=True), *workers]

    def start(self) -> None:
        """Begin to fetch."""
        for thread in self._threads:
            thread.start()

    def move(self) -> None:
        """Ask for the plan again, because blocks have been read."""
        with self._changed:
            self._stale = True
            self._changed.notify_all()

    @property
    def done(self) -> bool:
        """True if all blocks of the last plan are in the cache."""
        return self._planned and not (self._missing or self._stale)

    def stop(self) -> None:
        """End the threads; one in a request ends with the process."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _follow_plan(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stale or self._stopped)
                if self._stopped:
                    return
                self._stale = False
            missing = [block for block in self._plan() if not block[0].touch(block[1])]
            with self._changed:
                self._missing, self._planned = missing, True
                kept = set(missing)
                self._later = {block: at for block, at in self._later.items() if block in kept}
                self.errors = {block: error for block, error in self.errors.items() if block in kept}
                self._changed.notify_all()

    def _fetch_missing(self) -> None:
        while True:
            with self._changed:
                while not self._stopped and (block := self._next()) is None:
                    self._changed.wait(HELD_SECONDS if self._missing else None)
                if self._stopped or block is None:
                    return
                self._busy.add(block)
            error, delay = None, 0.0
            try:
                delay = 0.0 if block[0].fetch(block[1]) else HELD_SECONDS
            except DataError as failure:
                error, delay = failure, FAILED_SECONDS
            except BlockingIOError:
                delay = FULL_SECONDS
            with self._changed:
                self._busy.discard(block)
                self.errors.pop(block, None)
                if delay:
                    self._later[block] = time.monotonic() + delay
                elif block in self._missing:
                    self._missing.remove(block)
                if error is not None and block in self._missing:
                    self.errors[block] = error

    def _next(self) -> Block | None:
        now = time.monotonic()
        ready = (b for b in self._missing if b not in self._busy and self._later.get(b, 0.0) <= now)
        return next(ready, None)
