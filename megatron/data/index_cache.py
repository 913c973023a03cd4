"""Index tables that take time to build, in a folder shared by all processes of a run and by later runs.

An entry is a folder ``<kind>-<fingerprint>`` with one ``.npy`` file per table and ``about.json``, which records what
the tables were made from and the checksum of every file. The fingerprint covers everything that decides the tables,
so an entry is never out of date: other data or settings have another entry.

One process builds: it holds a lock (``flock``) that ends with the process, writes to a temporary folder, syncs, and
renames. The others poll the file system until the entry appears or the lock is free; no process blocks in a
collective. Every table is verified against its checksum when it is first read, and again once its file has another
inode, size or time of change. Where the folder cannot be written or may be
another user's, and where the lock is not released for minutes, tables are built in memory; a process that held the lock
and failed to publish removes the lock file, so that all waiting processes build at once.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

import numpy as np
import xxhash
from numpy.lib import format as npy
from numpy.typing import NDArray

from megatron.checkpoint.durable_files import (
    LockState,
    NewFile,
    durable_rename,
    lock_holder,
    make_folder,
    replace_file,
    sync_folder,
    try_lock,
    write_file,
)
from megatron.config.files import open_regular, parse_json, read_small
from megatron.config.privacy import PRIVATE_FILE, check_access, private_mode
from megatron.config.text import echo
from megatron.data.dataset import fingerprint
from megatron.data.indexed_dataset import OPEN_FILES_FIX, is_too_many_open_files
from megatron.data.known_files import file_identity

CACHE_FORMAT = 1  # increased when the tables of the same facts change
ABOUT = "about.json"
VERIFIED = "verified.json"  # inode, size and times of each table whose checksum was verified
BUILDING = ".building"
WAIT_MESSAGE_SECONDS = 30.0
LONGEST_WAIT_SECONDS = 600.0  # a lock may be held by a process that never builds
SHORTEST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.02, 1.0

Tables = dict[str, NDArray[Any]]

Check = Callable[[Mapping[str, Any], Tables], None]
"""Raises ValueError for tables that these facts cannot have led to. Whoever writes tables can write their checksums."""


class IndexCache:
    """A folder of index tables."""

    def __init__(self, folder: str | Path, checks: Mapping[str, Check] = MappingProxyType({})) -> None:
        """Use ``folder``, which need not exist, with a check for each kind of tables."""
        self.folder = Path(folder)
        self._checks = checks
        self.notes: list[str] = []  # warnings for the user, a sentence each
        self._is_writable = True

    def tables(self, kind: str, facts: Mapping[str, object], build: Callable[[], Tables], source: str = "") -> Tables:
        """Return the tables that ``build()`` makes from ``facts``: from the folder if they are there, else built.

        Args:
            kind: kind of the tables, the start of the entry's name.
            facts: everything that decides them, in JSON types.
            build: builds them; no table may be empty.
            source: name of the files, recorded for people.

        Returns:
            Read-only memory maps, or the result of ``build()`` where the folder cannot be used.
        """
        about = {"format": CACHE_FORMAT, "kind": kind, "facts": json.loads(json.dumps(facts)), "source": source}
        path = self.folder / f"{kind}-{fingerprint(CACHE_FORMAT, json.dumps(facts, sort_keys=True))}"
        try:
            check_access(self.folder, shared=True)
            found = self._read(path, about)
            if found is None and self._is_writable:
                make_folder(self.folder, private=True)
                found = self._build_once(path, about, build)
            return found or build()
        except OSError as error:
            self._give_up(error)
            return build()

    def _build_once(self, path: Path, about: Mapping[str, Any], build: Callable[[], Tables]) -> Tables:
        """Return the entry once any process has built it; if this one builds it and cannot publish, what it built."""
        mode = private_mode(self.folder, PRIVATE_FILE)  # whoever can open it can lock it
        with open(f"{path}.lock", "ab", opener=lambda name, flags: os.open(name, flags, mode)) as lock:
            found = self._wait(lock, path, about)
            if found is not None:
                return found
            shutil.rmtree(path, ignore_errors=True)  # damaged
            built = build()
            try:
                _publish(path, about, built)
                return self._read(path, about) or built
            except OSError as error:
                self._give_up(error)
                with suppress(OSError):
                    os.unlink(lock.name)
                return built

    def _give_up(self, error: OSError) -> None:
        """Stop writing to the folder, and stop waiting for other processes, which probably cannot write either."""
        self._is_writable = False
        fix = f" ({OPEN_FILES_FIX})" if is_too_many_open_files(error) else ""
        self._note(f"{self.folder} cannot be used ({error.strerror or error}): tables are built in memory{fix}")

    def _wait(self, lock: IO[bytes], path: Path, about: Mapping[str, Any]) -> Tables | None:
        """Return the entry once another process has built it, or None if this process must build it.

        It must once it holds the lock, or if the file system has no locks.

        Raises:
            OSError: when another process held the lock and could not publish, or did not release it.
        """
        began = reported = time.monotonic()
        pause = SHORTEST_PAUSE_SECONDS
        while True:
            state = try_lock(lock)
            if (found := self._read(path, about)) is not None:
                return found
            if state is LockState.UNSUPPORTED:  # the first to publish is kept
                self._note(f"{self.folder} has no file locks: every process builds its tables itself")
                return None
            if not os.path.exists(lock.name) or not os.path.samestat(os.stat(lock.name), os.fstat(lock.fileno())):
                raise OSError("another process could not write to it")
            if state is LockState.ACQUIRED:
                for left in path.parent.glob(f"{path.name}.*{BUILDING}"):  # of killed processes
                    shutil.rmtree(left, ignore_errors=True)
                return None
            now = time.monotonic()
            if now - reported > WAIT_MESSAGE_SECONDS or now - began > LONGEST_WAIT_SECONDS:
                reported, process = now, lock_holder(Path(lock.name)) or "another process"
                if now - began > LONGEST_WAIT_SECONDS:
                    raise TimeoutError(errno.ETIMEDOUT, f"{process} has locked {lock.name} for {now - began:.0f} s")
                echo(f"waiting {now - began:.0f} s for {process} to build {path}", file=sys.stderr, flush=True)
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def _read(self, path: Path, about: Mapping[str, Any]) -> Tables | None:
        """Return the verified tables of an entry; None when it is missing or, with a note, damaged.

        Raises:
            OSError: when it cannot be read: it may be intact, and others may be reading it.
        """
        try:
            written = parse_json(read_small(path / ABOUT))
            if any(written[name] != about[name] for name in ("format", "kind", "facts")):
                raise ValueError(f"{ABOUT} describes other tables")
            files = written["tables"].items()
            known = _verified(path)
            opened = {
                name: _mapped(path / f"{name}.npy", size, checksum, known.get(name)) for name, (size, checksum) in files
            }
            tables = {name: table for name, (table, _) in opened.items()}
            identities = {name: identity for name, (_, identity) in opened.items()}
            if identities != known:
                if about["kind"] in self._checks:
                    self._checks[about["kind"]](about["facts"], tables)
                with suppress(OSError):  # read-only: the next process verifies them, too
                    replace_file(path / VERIFIED, json.dumps(identities))
            return tables
        except (FileNotFoundError, ValueError, LookupError, TypeError, AttributeError) as error:
            if path.exists():
                self._note(f"the tables in {path} are damaged and not used: {error}")
            return None

    def _note(self, sentence: str) -> None:
        if sentence not in self.notes:
            self.notes.append(sentence)


def cache_entry_of(table: NDArray[Any]) -> Path | None:
    """Return the cache entry that a table is mapped from; None for a table in memory."""
    base: Any = table
    while isinstance(base, np.ndarray) and not isinstance(base, np.memmap):
        base = base.base
    return Path(base.filename).parent if isinstance(base, np.memmap) and base.filename is not None else None


def _verified(path: Path) -> dict[str, list[int]]:
    """Return the identities of the files of an entry when their checksums were last verified; empty if unknown."""
    with suppress(OSError, ValueError):
        found = parse_json(read_small(path / VERIFIED))
        return found if isinstance(found, dict) else {}
    return {}


def _mapped(path: Path, size: int, checksum: str, known: list[int] | None) -> tuple[NDArray[Any], list[int]]:
    """Verify a file and map its table through the same descriptor, so that a replaced file cannot slip in.

    A file of the ``known`` identity has been verified. Returns the table, and the file's identity.

    Raises:
        ValueError: when size or checksum differ.
    """
    with open_regular(path) as file:
        state = os.fstat(file.fileno())
        if state.st_size != size:
            raise ValueError(f"{path.name} has {state.st_size:,} bytes instead of {size:,}")
        identity = list(file_identity(state))
        if identity != known and hashlib.file_digest(file, xxhash.xxh3_64).hexdigest() != checksum:
            raise ValueError(f"{path.name} has another checksum")
        file.seek(0)
        try:
            if npy.read_magic(file) != (1, 0):
                raise ValueError("another version of the format")
            shape, _, dtype = npy.read_array_header_1_0(file)
        except Exception as error:  # of many classes: the header is a literal of Python
            raise ValueError(f"{path.name} has no header of an array: {error}") from error
        if dtype.kind not in "iuf" or file.tell() + math.prod(shape) * dtype.itemsize != size:
            raise ValueError(f"{path.name} holds no table of numbers")  # of objects, the bytes would be pointers
        return np.asarray(np.memmap(file, dtype, "r", file.tell(), shape)), identity


def _publish(path: Path, about: Mapping[str, Any], tables: Tables) -> None:
    """Write and sync an entry, then rename it into place."""
    folder = Path(f"{path}.{os.urandom(8).hex()}{BUILDING}")
    folder.mkdir()
    try:
        written = {}
        for name, table in tables.items():
            rows = np.ascontiguousarray(table)
            header = io.BytesIO()
            npy.write_array_header_1_0(header, npy.header_data_from_array_1_0(rows))
            content = rows.reshape(-1).view(np.uint8).data
            checksum = xxhash.xxh3_64(header.getvalue())  # of the intended content, not of what the disk holds
            checksum.update(content)
            with NewFile(folder / f"{name}.npy") as file:
                file.write(header.getvalue())
                file.write(content)
            written[name] = header.tell() + content.nbytes, checksum.hexdigest()
        write_file(folder / ABOUT, json.dumps({**about, "tables": written}, indent=2).encode())
        sync_folder(folder)
        try:
            durable_rename(folder, path)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # else another process was first
                raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)
