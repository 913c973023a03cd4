"""How many files a process may have open: each one that is mapped counts, and a blend maps several for every source."""

from __future__ import annotations

import errno
from contextlib import suppress

REMEDY = "ulimit -n 65536"


def allow_many() -> None:
    """Let this process open as many files as the system lets it ask for; where it lets nobody ask, nothing changes."""
    try:
        import resource
    except ImportError:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):  # some systems refuse what they say is allowed
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def are_too_many(error: BaseException) -> bool:
    """Whether a file could not be opened because too many are."""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)
