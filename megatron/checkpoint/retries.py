"""What an object store's library raises, made into OSErrors; and calls made again when they fail, which is told."""

from __future__ import annotations

import errno
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

ATTEMPTS = 5
"""How often a call is made in all. The libraries beneath repeat single requests by themselves, without a word."""

FIRST_WAIT = 1.0
"""Seconds before the second attempt, on average; doubled before each one after it."""

ERRNO = (
    (FileNotFoundError, errno.ENOENT),
    (PermissionError, errno.EACCES),
    (FileExistsError, errno.EEXIST),
    (ImportError, errno.ENOPKG if hasattr(errno, "ENOPKG") else errno.ENOSYS),
    (NotImplementedError, errno.ENOSYS),
)
"""What no repetition mends."""

NO_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "DefaultCredentialsError")
"""Names of what libraries raise where nobody has said who asks; their modules are not imported to catch them."""

T = TypeVar("T")


@contextmanager
def translated(place: object) -> Iterator[None]:
    """Raise an OSError that names ``place`` for whatever a library raises inside.

    Raises:
        OSError: with ``EIO`` where it may be otherwise a moment later.
    """
    try:
        yield
    except Exception as error:
        raise as_os_error(error, place) from error


def as_os_error(error: Exception, place: object) -> OSError:
    """What a library raised about ``place``, with a number by which it can be judged and a text that says it."""
    number = next((number for kind, number in ERRNO if isinstance(error, kind)), errno.EIO)
    if type(error).__name__ in NO_CREDENTIALS:
        number = errno.EACCES
    if isinstance(error, OSError) and error.filename == str(place):
        return error
    said = error.__cause__ or error  # what the store said itself, where the library has put it into other words
    text = " ".join((getattr(said, "strerror", None) or str(said) or "no answer").split())
    if number == errno.ENOENT:
        text = "there is no such object or bucket"
    elif number == errno.EACCES:
        text = f"access denied ({text})"
    elif number == errno.EIO and not isinstance(error, OSError):
        text = f"{type(error).__name__}: {text}"
    return OSError(number, text, str(place))  # Python makes it a FileNotFoundError or the like


def is_lasting(error: OSError) -> bool:
    """Whether an error of `translated` would be the same a moment later."""
    return error.errno != errno.EIO


def again(action: Callable[[], T]) -> T:
    """What ``action`` returns; it is called again, later and later, while it raises what may pass.

    Raises:
        OSError: of the last attempt, or the first one that is lasting.
    """
    for number in range(1, ATTEMPTS):
        try:
            return action()
        except OSError as error:
            if is_lasting(error):
                raise
            seconds = FIRST_WAIT * 2 ** (number - 1) * random.uniform(0.5, 1.5)  # ranks that fail together, not again
            tell(f"{error.filename}: {error.strerror}; attempt {number} of {ATTEMPTS}, the next in {seconds:.1f} s")
        time.sleep(seconds)
    return action()


def tell(text: str) -> None:
    """Say, on whatever rank, what went wrong although it goes on."""
    with suppress(OSError):  # a console that takes nothing stops no save
        print(f"warning: {text}", file=sys.stderr, flush=True)
