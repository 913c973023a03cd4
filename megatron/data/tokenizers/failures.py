"""Failures of the libraries that encode, as errors of this project."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

PANIC = "PanicException"  # of a library written in Rust; no `Exception`, and each has a class of its own


@contextmanager
def failures_as(error_of: Callable[[str], Exception]) -> Iterator[None]:
    """Whatever a library raises in here becomes an error made of the first line of what it said.

    Want of memory goes through, and so does what is no failure of the library: Ctrl-C, and what the handler of a signal
    raises to end the program, which is no `Exception`.
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
    """For `failures_as`: the error of a text that a library does not encode."""
    return lambda said: ValueError(f"{library} cannot encode this text: {said}")
