"""Named ranges in profiles."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from torch.autograd import profiler
from torch.profiler import record_function

from megatron.parallel.stopwatch import NOTHING

COMMUNICATION = "communication "
"""Prefix of the ranges of collectives; the axes of the group follow."""


def span(name: str, inner: AbstractContextManager[None] = NOTHING) -> AbstractContextManager[None]:
    """Return ``inner``, inside a range named ``name`` while a profile is recorded; costs about 1 us otherwise."""
    return _in_range(name, inner) if profiler._is_profiler_enabled else inner


@contextmanager
def _in_range(name: str, inner: AbstractContextManager[None]) -> Iterator[None]:
    with record_function(name), inner:
        yield
