"""Facts of token files that were checked before, so that later starts need not read the files again.

A record holds the fingerprint and the number of tokens of a pair. Its name is a hash of the inodes, sizes and times of
both files: a file that anybody has written to since has another time of change (``ctime``), which cannot be set.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from megatron.checkpoint.durable_files import make_folder, replace_file
from megatron.config.privacy import check_access
from megatron.data.dataset import fingerprint

PARTS = 3  # words of a record


class KnownPair(NamedTuple):
    """Fingerprint and size of token files whose index was checked."""

    fingerprint: str
    tokens: int


def file_identity(state: os.stat_result) -> tuple[int, int, int, int]:
    """Return what changes whenever a file is written to or replaced."""
    return state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns


class KnownFiles:
    """A folder of records."""

    def __init__(self, folder: str | Path) -> None:
        """Use ``folder``, which need not exist."""
        self._folder = Path(folder) / "pairs"

    def _path(self, prefix: str) -> Path:
        states = (os.stat(f"{prefix}.{suffix}") for suffix in ("idx", "bin"))
        return self._folder / fingerprint(*map(file_identity, states))

    def read(self, prefix: str) -> KnownPair | None:
        """Return the record of a pair; None if there is none, or another user may have written it."""
        try:
            check_access(self._folder, shared=True)
            words = self._path(prefix).read_text().split()
            known = KnownPair(words[0], int(words[1]))
            return known if words[2] == fingerprint(*known) and len(words) == PARTS else None
        except (OSError, ValueError, LookupError):
            return None

    def write(self, prefix: str, known: KnownPair) -> None:
        """Record a pair, where the folder can be written; a record that a crash has cut off is not read."""
        with suppress(OSError):
            check_access(self._folder, shared=True)
            make_folder(self._folder, private=True)
            replace_file(self._path(prefix), f"{known.fingerprint} {known.tokens} {fingerprint(*known)}\n")
