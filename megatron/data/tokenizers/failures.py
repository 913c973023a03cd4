"""Convert exceptions of encoder libraries to this project's errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

PANIC = "PanicException"  # of Rust libraries: not an `Exception`, and a separate class in each


@contextmanager
def failures_as(error_of: Callable[[str], Exception]) -> Iterator[None]:
    """Convert any exception of a library to ``error_of(first line of its message)``.

    MemoryError, Ctrl-C and the exceptions of signal handlers pass through unchanged.
    """
    try:
        yield
    except MemoryError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != PANIC:
            raise
        raise error_of((str(error) or type(error).__name__).partition("\n")[0]) from error


def cannot_encode(library: str) -> Callable[[str], ValueError]:
    """Return an ``error_of`` for `convert_library_errors` that names the library."""
    return lambda message: ValueError(f"{library} cannot encode this text: {message}")
