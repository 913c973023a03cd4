"""Hooks before each call to the file system that touches certain files."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

CALLS = ("open", "write", "fsync", "close", "mkdir", "rename", "unlink", "rmdir")
"""Everything a save asks of the system that can leave something behind."""

REFUSED = ("open", "write", "fsync", "mkdir", "rename")
"""Those that a full disk refuses."""

REAL = {name: getattr(os, name) for name in CALLS}
"""The calls themselves, for what happens before them."""


@contextmanager
def watched_calls(
    touched: Callable[[str], bool], before: Callable[[str, str, tuple[Any, ...]], None]
) -> Iterator[None]:
    """Inside, ask ``before(name, path, arguments)`` before each of ``CALLS`` whose path is ``touched``."""
    opened: dict[int, str] = {}

    def path_of(what: Any, folder: int | None) -> str | None:
        if isinstance(what, int):
            return opened.get(what)
        if folder is not None:
            return f"{opened[folder]}/{what}" if folder in opened else None
        path = os.fsdecode(what)
        return path if touched(path) else None

    def wrapped(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            path = path_of(args[0], kwargs.get("dir_fd"))
            if path is not None:
                before(name, path, args)
            result = REAL[name](*args, **kwargs)
            if name == "open" and path is not None:
                opened[result] = path
            if name == "close":
                opened.pop(args[0], None)
            return result

        return call

    with ExitStack() as stack:
        for name in CALLS:
            stack.enter_context(patch.object(os, name, wrapped(name)))
        yield


def refuse(name: str, path: str) -> None:
    """Fail as a full disk does.

    Raises:
        OSError: ENOSPC, for the calls in ``REFUSED``.
    """
    if name in REFUSED:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
