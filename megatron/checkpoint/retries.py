"""Convert exceptions of object store libraries to OSError, and retry failed calls."""

from __future__ import annotations

import errno
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

ATTEMPTS = 5
"""Attempts of a call in all. The libraries below repeat single requests on their own, silently."""

FIRST_WAIT = 1.0
"""Average seconds before the second attempt; doubled before each further one."""

ERRNO = (
    (FileNotFoundError, errno.ENOENT),
    (PermissionError, errno.EACCES),
    (FileExistsError, errno.EEXIST),
    (ImportError, errno.ENOPKG if hasattr(errno, "ENOPKG") else errno.ENOSYS),
    (NotImplementedError, errno.ENOSYS),
)
"""Exceptions that a retry cannot fix."""

NO_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "DefaultCredentialsError")
"""Names of the exceptions for missing credentials; matched by name so that their modules need not be imported."""

T = TypeVar("T")


@contextmanager
def translated(place: object) -> Iterator[None]:
    """Convert any exception of a library to an OSError that names ``place``.

    Raises:
        OSError: with ``EIO`` if the error may be transient.
    """
    try:
        yield
    except Exception as error:
        raise as_os_error(error, place) from error


def as_os_error(error: Exception, place: object) -> OSError:
    """Return an OSError with a matching errno for what a library raised about ``place``."""
    number = next((number for kind, number in ERRNO if isinstance(error, kind)), errno.EIO)
    if type(error).__name__ in NO_CREDENTIALS:
        number = errno.EACCES
    if isinstance(error, OSError) and error.filename == str(place):
        return error
    original = error.__cause__ or error  # the store's own message, where the library has wrapped it
    text = " ".join((getattr(original, "strerror", None) or str(original) or "no answer").split())
    if number == errno.ENOENT:
        text = "there is no such object or bucket"
    elif number == errno.EACCES:
        text = f"access denied ({text})"
    elif number == errno.EIO and not isinstance(error, OSError):
        text = f"{type(error).__name__}: {text}"
    return OSError(number, text, str(place))  # Python makes it a FileNotFoundError or the like


def is_lasting(error: OSError) -> bool:
    """Return True if retrying after an error of `translate_errors` is useless."""
    return error.errno != errno.EIO


def again(action: Callable[[], T]) -> T:
    """Call ``action`` until it succeeds, with exponential backoff after transient errors.

    Raises:
        OSError: of the last attempt, or the first permanent one.
    """
    for number in range(1, ATTEMPTS):
        try:
            return action()
        except OSError as error:
            if is_lasting(error):
                raise
            seconds = FIRST_WAIT * 2 ** (number - 1) * random.uniform(0.5, 1.5)  # spreads the ranks
            tell(f"{error.filename}: {error.strerror}; attempt {number} of {ATTEMPTS}, retrying in {seconds:.1f} s")
        time.sleep(seconds)
    return action()


def tell(text: str) -> None:
    """Print a warning to stderr, on any rank."""
    with suppress(OSError):  # a closed console must not fail a save
        print(f"warning: {text}", file=sys.stderr, flush=True)
