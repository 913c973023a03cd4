"""Other users of this machine, for tests that run as root and fork processes of these users."""

from __future__ import annotations

import os
import pickle
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import pytest

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")

NOBODY = 65534
"""The user who is up to no good."""

T = TypeVar("T")


def as_user(uid: int, act: Callable[[], T], groups: Sequence[int] = ()) -> T:
    """Call ``act`` in a process of another user; return its result, or raise what it has raised there."""
    receiver, sender = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups(groups)
            os.setgid(uid)
            os.setuid(uid)
            outcome = pickle.dumps((act(), None))
        except BaseException as error:  # pytest's own cannot be pickled
            is_plain = isinstance(error, Exception) and not isinstance(error, AssertionError)
            outcome = pickle.dumps((None, error if is_plain else AssertionError(str(error))))
        finally:
            with suppress(BaseException):
                os.write(sender, outcome)
            os._exit(0)
    os.close(sender)
    with open(receiver, "rb") as pipe:
        result, raised = pickle.load(pipe)
    os.waitpid(child, 0)
    if raised is not None:
        raise raised
    return result


@contextmanager
def public_folder() -> Iterator[Path]:
    """A folder in which anybody may create files, and only their own can be removed, as in ``/dev/shm``."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o1777)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def give(folder: Path, uid: int, mode: int) -> None:
    """Make a folder and all in it another user's."""
    for path in (folder, *folder.rglob("*")):
        os.chown(path, uid, uid)
    folder.chmod(mode)
