"""The limit on open files: every mapped file counts, and a blend maps several per source."""

from __future__ import annotations

import errno
from contextlib import suppress

REMEDY = "ulimit -n 65536"


def allow_many() -> None:
    """Raise the soft limit on open files to the hard limit, if the system permits."""
    try:
        import resource
    except ImportError:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):  # some systems report a hard limit that they refuse to set
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def are_too_many(error: BaseException) -> bool:
    """Return True if a file could not be opened because too many are open."""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)
