"""Tables that take time to build, kept in a folder that all processes of a run, and later runs, share.

An entry is a folder ``<kind>-<fingerprint>`` with one ``.npy`` file per table and ``about.json``, which says what the
tables were made from and the checksum of every file. The fingerprint is one of all that decides the tables, so an
entry is never out of date: other data or other settings have another entry.

One process builds: it holds a lock (``flock``) that dies with it, writes beside the entry's place, and renames when
all is on the disk. The others look at the file system until the entry is there or the lock is free; nobody waits
inside a collective. What is read is proved against the checksums. Where nothing can be written, tables are built in
memory; a process that had its turn and could not publish removes the lock's file, so that all who wait build at once.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import xxhash
from numpy.lib import format as npy
from numpy.typing import NDArray

from megatron.data.digest import fingerprint
from megatron.data.files import open_files

FORMAT = 1  # raised when a table of the same facts changes
ABOUT, FILES = "about.json", "files"
BUILDING = ".building"
PATIENCE_SECONDS = 30.0
SHORTEST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.02, 1.0

Tables = dict[str, NDArray[Any]]

Identity = tuple[int, int] | None
"""What tells an entry from one that replaces it; None where there is none."""


class Cache:
    """A folder of tables.

    Attributes:
        folder: which need not exist.
        notes: what a person should know, a sentence each.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.notes: list[str] = []
        self._takes_tables = True

    def tables(self, kind: str, facts: Mapping[str, object], build: Callable[[], Tables], source: str = "") -> Tables:
        """The tables that ``build()`` makes from ``facts``: out of the folder if they are there, else built.

        Args:
            kind: of the tables; begins the entry's name.
            facts: all that decides them, in JSON's types; ``files`` is the fingerprint of the files that are read.
            build: makes them; none may be empty.
            source: name of these files. It is written down and decides nothing.

        Returns:
            Read-only memory maps, or what ``build()`` gave where the folder cannot be used.
        """
        about = {"format": FORMAT, "kind": kind, "facts": json.loads(json.dumps(facts)), "source": source}
        path = self.folder / f"{kind}-{fingerprint(FORMAT, json.dumps(facts, sort_keys=True))}"
        try:
            seen = _identity(path)
            found = self._read(path, about) if seen else None
            if found is None and self._takes_tables:
                self._note_changed(about)
                self.folder.mkdir(parents=True, exist_ok=True)
                found = self._shared(path, about, build, seen)
            return found or build()
        except OSError as error:
            self._give_up(error)
            return build()

    def _shared(self, path: Path, about: Mapping[str, Any], build: Callable[[], Tables], seen: Identity) -> Tables:
        """The entry, made by the process whose turn it is; when that is this one and cannot, what it has built.

        Raises:
            OSError: when another one had its turn and could not.
        """
        with open(f"{path}.lock", "a") as lock:
            found = self._wait(lock, path, about, seen) if self._has_locks(lock) else None
            if found is not None:
                return found
            built = build()
            try:
                _publish(path, about, built, seen)
                return self._read(path, about) or built
            except OSError as error:
                self._give_up(error)
                with suppress(OSError):
                    os.unlink(lock.name)
                return built

    def _give_up(self, error: OSError) -> None:
        """Write no more, and wait for nobody who would: a process that cannot either would be waited for in vain."""
        self._takes_tables = False
        remedy = f" ({open_files.REMEDY})" if open_files.are_too_many(error) else ""
        self._note(f"{self.folder} cannot be used ({error.strerror or error}): tables are built in memory{remedy}")

    def _wait(self, lock: IO[str], path: Path, about: Mapping[str, Any], seen: Identity) -> Tables | None:
        """The entry as soon as another process has built it, or None as soon as it is this one's turn to build.

        ``seen`` is the entry that is there already, but damaged.

        Raises:
            OSError: when another process had its turn and could not publish.
        """
        began = told = time.monotonic()
        pause = SHORTEST_PAUSE_SECONDS
        while True:
            mine = _locked(lock)
            now = _identity(path)
            if now not in (None, seen):
                found, seen = self._read(path, about), now
                if found is not None:
                    return found
            if not _is_named(lock):
                raise OSError("another process could not write to it")
            if mine:
                _remove_unfinished(path)
                return None
            if time.monotonic() - told > PATIENCE_SECONDS:
                told = time.monotonic()
                print(f"waiting {told - began:.0f} s for another process to build {path}", file=sys.stderr, flush=True)
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def _has_locks(self, lock: IO[str]) -> bool:
        """Whether the file system knows locks. Where it does not, everyone builds and the first to finish is kept."""
        try:
            fcntl.flock(lock, fcntl.LOCK_UN)
        except OSError as error:
            self._note(f"{self.folder} has no locks ({error.strerror}): every process builds its tables itself")
            return False
        return True

    def _read(self, path: Path, about: Mapping[str, Any]) -> Tables | None:
        """The tables of an entry, proved; None, and a note, when it is damaged.

        Raises:
            OSError: when it cannot be read: it may be whole, and others may be reading it.
        """
        try:
            written = json.loads((path / ABOUT).read_bytes())
            if any(written[name] != about[name] for name in ("format", "kind", "facts")):
                raise ValueError(f"{ABOUT} tells of other tables")
            return {name: _mapped(path / f"{name}.npy", *proof) for name, proof in written["tables"].items()}
        except (FileNotFoundError, ValueError, LookupError, TypeError, AttributeError) as error:
            self._note(f"the tables in {path} are damaged and not used: {error}")
            return None

    def _note_changed(self, about: Mapping[str, Any]) -> None:
        """Say so where the folder has tables of the same source, but all of other content."""
        content, contents = about["facts"].get(FILES), self._contents.get(about["source"], ())
        if content is not None and contents and content not in contents:
            self._note(f"{about['source']} is not what it was when {self.folder} got tables of it: they are built anew")

    @cached_property
    def _contents(self) -> dict[str, set[str]]:
        """By source, the fingerprints of the files that the entries were made from; looked up once."""
        found: dict[str, set[str]] = {}
        for path in self.folder.glob(f"*/{ABOUT}"):
            with suppress(OSError, ValueError, LookupError, TypeError):
                about = json.loads(path.read_bytes())
                found.setdefault(about["source"], set()).add(about["facts"][FILES])
        return found

    def _note(self, sentence: str) -> None:
        if sentence not in self.notes:
            self.notes.append(sentence)


def entry_of(table: NDArray[Any]) -> Path | None:
    """The entry that a table is mapped from; None for one in memory."""
    base: Any = table
    while isinstance(base, np.ndarray) and not isinstance(base, np.memmap):
        base = base.base
    return Path(base.filename).parent if isinstance(base, np.memmap) and base.filename is not None else None


def _identity(path: Path) -> Identity:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def _locked(lock: IO[str]) -> bool:
    """Whether this process holds the lock, now or already."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_named(lock: IO[str]) -> bool:
    """Whether the lock's file is still the one of its name."""
    try:
        return os.path.samestat(os.stat(lock.name), os.fstat(lock.fileno()))
    except FileNotFoundError:
        return False


def _mapped(path: Path, size: int, checksum: str) -> NDArray[Any]:
    """The table in a file that is as it was written: what is mapped is what was proved, whatever gets its name.

    Raises:
        ValueError: when it is not.
    """
    with open(path, "rb") as file:
        held = os.fstat(file.fileno()).st_size
        if held != size:
            raise ValueError(f"{path.name} has {held:,} bytes instead of {size:,}")
        if hashlib.file_digest(file, xxhash.xxh3_64).hexdigest() != checksum:
            raise ValueError(f"{path.name} has another checksum")
        file.seek(0)
        npy.read_magic(file)
        shape, fortran, dtype = npy.read_array_header_1_0(file)
        order: Literal["F", "C"] = "F" if fortran else "C"
        return np.asarray(np.memmap(file, dtype, "r", file.tell(), shape, order))


def _publish(path: Path, about: Mapping[str, Any], tables: Tables, damaged: Identity) -> None:
    """Write an entry, and give it its name when all of it is on the disk; the ``damaged`` one in its place goes."""
    folder = Path(f"{path}.{os.urandom(8).hex()}{BUILDING}")
    folder.mkdir()
    try:
        written = {}
        for name, table in tables.items():
            with _synced(folder / f"{name}.npy") as stream:
                counted = _Counted(stream)
                np.save(counted, table, allow_pickle=False)
            written[name] = counted.size, counted.checksum.hexdigest()
        with _synced(folder / ABOUT) as stream:
            stream.write(json.dumps({**about, "tables": written}, indent=2).encode())
        if damaged is not None and _identity(path) == damaged:
            shutil.rmtree(path)
        _sync(folder)
        _give_name(folder, path)
        _sync(path.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Counted:
    """Hands on what is written, and keeps its size and checksum: of what should be in the file, not of what is.

    It is no file to numpy, which would write into one past Python and not hear of a disk that is full.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.size = 0
        self.checksum = xxhash.xxh3_64()

    def write(self, content: bytes) -> int:
        """Write on."""
        self.size += len(content)
        self.checksum.update(content)
        return self._stream.write(content)


def _give_name(folder: Path, path: Path) -> None:
    """Rename, unless another process was first."""
    try:
        os.rename(folder, path)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise


@contextmanager
def _synced(path: Path) -> Iterator[IO[bytes]]:
    """A new file whose content is on the disk when the block ends."""
    with open(path, "xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Make the names in a folder outlast a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_unfinished(path: Path) -> None:
    """Remove what a process that was killed left; only the holder of the lock may."""
    for left in path.parent.glob(f"{path.name}.*{BUILDING}"):
        shutil.rmtree(left, ignore_errors=True)
