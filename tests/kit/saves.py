"""Disks as slow as a test wants: a save waits, where it writes, until the run is where the test wants it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from megatron.checkpoint.folder import CheckpointFolder
from megatron.training import checkpointer
from tests.kit.runs import before_step

SECONDS = 30.0
"""After which something that is waited for will not come any more."""


@contextmanager
def all_of(*contexts: Any) -> Iterator[None]:
    """All of them at once."""
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


@contextmanager
def before_writing(act: Callable[[int], None]) -> Iterator[None]:
    """Call ``act`` with the step of each checkpoint before it is written, in the process that writes it."""
    original = checkpointer.save_sharded  # type: ignore[attr-defined]

    def write(folder: Path, *arguments: Any) -> Any:
        act(int(folder.name[5:]))
        return original(folder, *arguments)

    with patch.object(checkpointer, "save_sharded", write):
        yield


def slowly(seconds: float, *at: int) -> Any:
    """A disk that takes so long for the checkpoints of these steps."""
    return before_writing(lambda step: time.sleep(seconds if step in at else 0.0))


@contextmanager
def over_before(begins: int) -> Iterator[None]:
    """Step ``begins`` waits for the first save in a thread to be over."""
    over, real = threading.Event(), checkpointer.run_in_background  # type: ignore[attr-defined]

    def in_background(work: Callable[[], Any], name: str) -> Any:
        future = real(work, name)
        future.add_done_callback(lambda _: over.set())
        return future

    with before_step(begins, lambda _: wait_on(over)), patch.object(checkpointer, "run_in_background", in_background):
        yield


@contextmanager
def written_when(step: int, begins: int) -> Iterator[None]:
    """The checkpoint of ``step``, the first, is written when step ``begins`` begins, which waits until it is over."""
    begun = threading.Event()
    held = before_writing(lambda iteration: wait_on(begun) if iteration == step else None)
    with over_before(begins), before_step(begins, lambda _: begun.set()), held:
        yield


@contextmanager
def deleted_when(begins: int) -> Iterator[None]:
    """The first save is over, on the rank that deletes older checkpoints, when step ``begins`` begins."""
    begun, real = threading.Event(), CheckpointFolder.retain

    def retain(*arguments: Any, **named: Any) -> Any:
        wait_on(begun)
        return real(*arguments, **named)

    held = patch.object(CheckpointFolder, "retain", retain)
    with over_before(begins), before_step(begins, lambda _: begun.set()), held:
        yield


def wait_on(event: threading.Event) -> None:
    """Wait until it happens.

    Raises:
        TimeoutError: when it does not.
    """
    if not event.wait(SECONDS):
        raise TimeoutError("what was waited for does not come")
