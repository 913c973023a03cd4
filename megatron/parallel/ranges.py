"""Named stretches of time, as a profile shows them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from torch.autograd import profiler
from torch.profiler import record_function

from megatron.parallel.stopwatch import NOTHING

COMMUNICATION = "communication "
"""What the ranges of collectives begin with; the axes of the group follow."""


def span(name: str, inner: AbstractContextManager[None] = NOTHING) -> AbstractContextManager[None]:
    """``inner``, and a range of that name around it in the profile that is being recorded; about 1 us where none is."""
    return _both(name, inner) if profiler._is_profiler_enabled else inner


@contextmanager
def _both(name: str, inner: AbstractContextManager[None]) -> Iterator[None]:
    with record_function(name), inner:
        yield
