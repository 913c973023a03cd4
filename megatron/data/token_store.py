"""Token files in object stores, ``s3://bucket/prefix``: read in blocks, through a cache on a local disk.

`TokenStore.open` lists the objects of a prefix, and copies the small ones (``.idx``, the manifest, the tokenizer's
record and files) whole to a folder of the cache, once per machine. ``.bin`` stays where it is: `RemoteTokens` reads the
blocks that are needed. Each object is identified by its size and ETag (or time): one that was replaced is another
object, with blocks of its own, and a run that reads the old one ends.

Wrong bytes are never used. Bytes from the store are compared with the checksums of the manifest
(:mod:`megatron.data.manifest`) if it is there, else with those of the first time that they were read; bytes from the
cache with those written beside them. Requests that fail are repeated with growing pauses.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron.checkpoint.durable_files import LockState, make_folder, publish_file, sync_file, try_lock
from megatron.checkpoint.location import parse_location
from megatron.checkpoint.object_store import RemotePath
from megatron.config.data_store import CHUNK_BYTES, DataStoreOptions
from megatron.config.privacy import check_access
from megatron.data.block_cache import BlockCache, chunk_sums
from megatron.data.dataset import fingerprint
from megatron.data.errors import DataError
from megatron.data.manifest import (
    BLOCK_BYTES,
    COPY_AGAIN,
    MANIFEST_SUFFIX,
    ORIGINS_SUFFIX,
    BlockChecksums,
    DatasetManifest,
    FileChecksums,
)

SMALL_SUFFIXES = (MANIFEST_SUFFIX, "tokens.json", ORIGINS_SUFFIX, "idx")
"""Objects of a prefix that are copied whole, in this order; those in the folder ``PREFIX.tokenizer`` are, too."""

COPY_BYTES = 32 << 20
FETCH_THREADS = 8
FIXES = {
    errno.ESTALE: "start again: the resumed run compares the new data with those of its checkpoint",
    errno.EACCES: "check the credentials, and who may read the bucket",
}
"""Fixes of errors of a store that remain after retries."""


class StoredObject(NamedTuple):
    """An object of a store, as it was when it was listed."""

    path: RemotePath
    size: int
    version: str  # ETag, or the time of its last change

    @classmethod
    def of(cls, path: RemotePath, entry: Mapping[str, Any]) -> StoredObject:
        """Read an entry of a listing of fsspec."""
        known = (
            entry.get(name) for name in ("ETag", "etag", "md5Hash", "generation", "LastModified", "mtime", "created")
        )
        return cls(path, int(entry["size"]), str(next((value for value in known if value), "")).strip('"'))

    def read(self, start: int, stop: int, check: Callable[[bytes], str | None] = lambda content: None) -> bytes:
        """Read a range, again while the store fails or ``check`` returns what is wrong with the content.

        Raises:
            DataError: if it cannot be read, or the object has been replaced.
        """

        def request(store: Any, key: str) -> bytes:
            with store.open(key, "rb", cache_type="none") as file:
                if StoredObject.of(self.path, file.details) != self:
                    raise OSError(errno.ESTALE, "the object has been replaced since it was opened", str(self.path))
                file.seek(start)
                content = bytes(file.read(stop - start))
            if len(content) != stop - start:
                raise OSError(f"received {len(content):,} of {stop - start:,} requested bytes")
            if (wrong := check(content)) is not None:
                raise OSError(wrong)
            return content

        with store_errors(self.path, f"bytes {start:,} to {stop:,} cannot be read"):
            return self.path.call(request)


@contextmanager
def store_errors(path: RemotePath, what: str) -> Iterator[None]:
    """Turn the OSErrors of a store inside the context into a DataError."""
    try:
        yield
    except OSError as error:
        fix = FIXES.get(error.errno or 0, "start again when the store answers: what was read is kept in the cache")
        raise DataError(f"{path}: {what}: {error.strerror or error}", fix) from error


BYTES = np.dtype("u1")


class RemoteTokens:
    """The ids of a ``.bin`` in a store, read as they are sliced; thread-safe."""

    def __init__(
        self,
        source: StoredObject,
        folder: Path,
        cache: BlockCache,
        block_bytes: int,
        sums: NDArray[np.uint64] | None = None,
        dtype: np.dtype[Any] = BYTES,
    ) -> None:
        """Read ``source``, whose blocks are kept in ``folder``.

        Args:
            source: the object.
            folder: of the cache, for this object.
            cache: that has this folder.
            block_bytes: bytes of a block, a multiple of `CHUNK_BYTES`.
            sums: uint64 ``[parts]`` checksums of each `BLOCK_BYTES` of the object; None if there are none.
            dtype: of the ids.
        """
        self.source, self.block_bytes, self.dtype = source, block_bytes, dtype
        self._folder, self._cache, self._sums = folder, cache, sums
        self._last: tuple[int, bytes] | None = None  # number and content of a block that could not be kept
        self._blocks = folder / f"blocks-{block_bytes}"
        self.fetched = 0  # blocks that this process has read from the store

    @property
    def nbytes(self) -> int:
        """Bytes of all ids."""
        return len(self) * self.dtype.itemsize

    def __len__(self) -> int:
        return self.source.size // self.dtype.itemsize

    def view(self, dtype: np.dtype[Any]) -> RemoteTokens:
        """Return the same bytes as ids of another type."""
        return RemoteTokens(self.source, self._folder, self._cache, self.block_bytes, self._sums, dtype)

    def __getitem__(self, ids: slice) -> NDArray[Any]:
        """Return consecutive ids.

        Raises:
            DataError: if they are not cached and the store does not return them.
        """
        start, stop, step = ids.indices(len(self))
        if step != 1:
            raise IndexError(f"step {step} of a slice of {self.source.path}")
        size = self.dtype.itemsize
        content = self._read(start * size, max(start, stop) * size)
        return np.frombuffer(content, dtype=self.dtype)

    def _read(self, start: int, stop: int) -> bytes:
        if start == stop:
            return b""
        numbers = range(start // self.block_bytes, (stop - 1) // self.block_bytes + 1)
        parts = []
        for number in numbers:
            block = self.block_range(number)
            parts.append(self._read_block(number, max(start, block.start), min(stop, block.stop)))
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def block_range(self, number: int) -> range:
        """Return the bytes of a block."""
        first = number * self.block_bytes
        return range(first, min(first + self.block_bytes, self.source.size))

    def _path(self, number: int) -> Path:
        return self._blocks / f"{number:09d}"

    def _read_block(self, number: int, start: int, stop: int) -> bytes:
        block, path = self.block_range(number), self._path(number)
        part = (start - block.start, stop - block.start)
        found = self._cache.read(path, len(block), *part)
        if found is None:
            with self._cache.writing(path) as file:
                if file is not None:
                    content = self._download(block)
                    self._cache.write(file, path, content)
                    return content[slice(*part)]
            found = self._cache.read(path, len(block), *part)  # another process has written it
        if found is None:  # it cannot be kept
            last = self._last  # of another thread in the next moment
            if last is None or last[0] != number:
                last = self._last = number, self._download(block)
            found = last[1][slice(*part)]
        return found

    def touch(self, number: int) -> bool:
        """Count a block as used now; return False if it is not in the cache."""
        return self._cache.touch(self._path(number))

    def fetch(self, number: int) -> bool:
        """Have a block in the cache before it is read; return False if another process is fetching it.

        Raises:
            DataError: if the store does not return it.
            BlockingIOError: if it cannot be kept.
        """
        path = self._path(number)
        if self.touch(number):
            return True
        with self._cache.writing(path, wait=False) as file:
            if file is not None:
                if not self._cache.write(file, path, self._download(self.block_range(number))):
                    raise BlockingIOError(errno.EAGAIN, "the cache is full", str(path))
                return True
        if not self._cache.is_open:
            raise BlockingIOError(errno.EAGAIN, "the cache cannot be written", str(path))
        return self.touch(number)

    def _download(self, block: range) -> bytes:
        """Read a block from the store, and verify it."""
        recorded = self._sums is not None and self.block_bytes % BLOCK_BYTES == 0
        size = BLOCK_BYTES if recorded else CHUNK_BYTES

        def check(content: bytes) -> str | None:
            found, first = chunk_sums(content, size), block.start // size
            known = self._sums[first : first + len(found)] if recorded else self._seen(first, len(found))  # type: ignore[index]
            wrong = np.flatnonzero((known != found) & (recorded | (known != 0)))
            if wrong.size:
                at = (first + int(wrong[0])) * size
                return f"the bytes from {at:,} on have another checksum than " + ("recorded" if recorded else "before")
            if not recorded:
                self._remember(first, found)
            return None

        content = self.source.read(block.start, block.stop, check)
        self.fetched += 1
        return content

    def _seen(self, first: int, count: int) -> NDArray[np.uint64]:
        """Return the checksums of chunks when they were first read, uint64 ``[count]``; 0 for those never read."""
        held = b""
        with suppress(OSError), open(self._folder / "seen", "rb") as file:
            file.seek(8 * first)
            held = file.read(8 * count)
        return np.frombuffer(held[: len(held) // 8 * 8].ljust(8 * count, b"\0"), dtype="<u8")

    def _remember(self, first: int, sums: NDArray[np.uint64]) -> None:
        """Record the checksums of chunks that were read for the first time."""
        with suppress(OSError):  # a full disk: they are compared with nothing
            file = os.open(self._folder / "seen", os.O_WRONLY | os.O_CREAT, 0o666)
            try:
                os.pwrite(file, sums.tobytes(), 8 * first)
            finally:
                os.close(file)

    def sample(self, starts: Iterable[int], size: int) -> list[bytes]:
        """Read up to ``size`` bytes from each of ``starts`` on from the store, concurrently and without the cache."""
        with ThreadPoolExecutor(FETCH_THREADS) as pool:
            return list(pool.map(lambda at: self.source.read(at, min(at + size, self.source.size)), starts))


class RemotePrefix(NamedTuple):
    """Token files in an object store: local index, remote blocks, and their checksums."""

    local: str  # prefix of the copies of its small files
    tokens: RemoteTokens
    manifest: DatasetManifest | None

    def fingerprint(self, compute: Callable[[Callable[[Sequence[int], int], Iterable[bytes]]], str]) -> str:
        """Return that of the manifest, else the result of ``compute`` with a sample, which is kept in the cache."""
        if self.manifest is not None:
            return self.manifest.fingerprint
        path = Path(f"{self.local}.fingerprint")
        with suppress(OSError):
            return path.read_text()
        found = compute(self.tokens.sample)
        with suppress(OSError):
            publish_file(path, found.encode())
        return found


class TokenStore:
    """Prefixes in object stores, and their cache."""

    def __init__(self, folder: Path, max_bytes: int, block_bytes: int) -> None:
        """Use a cache ``folder``, which need not exist; arguments as `DataStoreOptions`."""
        self.folder = folder
        self.cache = BlockCache(folder, max_bytes)
        self._block_bytes = block_bytes
        self.opened: dict[str, RemotePrefix] = {}  # by URI
        self._listings: dict[RemotePath, dict[str, Mapping[str, Any]]] = {}
        self._lock = threading.Lock()

    def open(self, prefix: str) -> RemotePrefix:
        """Copy the small files of a prefix, unless they are there, and return what is read of it.

        Raises:
            DataError: if the prefix lacks an object, or the store or the disk fails.
        """
        found = self.opened.get(prefix)
        if found is None:
            try:
                found = self.opened[prefix] = self._open(prefix)
            except OSError as error:  # of the disk
                seen = f"--data-store-cache {self.folder} cannot be used: {error.strerror or error}"
                raise DataError(seen, "--data-store-cache ANOTHER") from error
        return found

    def open_all(self, prefixes: Iterable[str]) -> None:
        """Open several prefixes, concurrently."""
        with ThreadPoolExecutor(2 * FETCH_THREADS) as pool:
            list(pool.map(self.open, prefixes))

    def _open(self, prefix: str) -> RemotePrefix:
        path = remote_path(prefix)
        listing, name = self._list(path.parent), path.name
        missing = [f"{path}.{suffix}" for suffix in ("bin", "idx") if f"{name}.{suffix}" not in listing]
        if missing:
            raise DataError(f"{missing[0]}: there is no such object", "give the URI without .bin/.idx")
        source = StoredObject.of(path.parent / f"{name}.bin", listing[f"{name}.bin"])
        small = {
            f"{name}.{suffix}": StoredObject.of(path.parent / f"{name}.{suffix}", listing[f"{name}.{suffix}"])
            for suffix in SMALL_SUFFIXES
            if f"{name}.{suffix}" in listing
        }
        if f"{name}.tokenizer" in listing:
            inner = path.parent / f"{name}.tokenizer"
            files = {file: entry for file, entry in self._list(inner).items() if entry["type"] == "file"}
            small |= {f"{name}.tokenizer/{f}": StoredObject.of(inner / f, entry) for f, entry in files.items()}
        versions = sorted((key, each.size, each.version) for key, each in small.items())
        self._make_folder()
        folder = self.folder / f"{name}-{fingerprint(source.path, source.size, source.version)}"
        copies = folder / f"files-{fingerprint(*versions)}"
        make_folder(copies, private=True)
        manifest, sums = None, None
        for key, each in small.items():  # the manifest is the first
            suffix = key.removeprefix(f"{name}.")
            self._copy(each, copies / key, None if manifest is None else manifest.files.get(suffix))
            if suffix == MANIFEST_SUFFIX:
                manifest = DatasetManifest.read(copies / name)
        if manifest is not None and (known := manifest.files.get("bin")) is not None:
            if known.bytes != source.size:
                seen = f"{source.path} has {source.size:,} bytes, but by its manifest {known.bytes:,}"
                raise DataError(seen, COPY_AGAIN)
            sums = np.array([int(each, 16) for each in known.xxh3], dtype="<u8")
        tokens = RemoteTokens(source, folder, self.cache, self._block_bytes, sums)
        return RemotePrefix(str(copies / name), tokens, manifest)

    def _make_folder(self) -> None:
        check_access(self.folder, shared=True)
        make_folder(self.folder, private=True)

    def _list(self, folder: RemotePath) -> dict[str, Mapping[str, Any]]:
        """Return the entries of a folder by name; the store is asked once."""
        with self._lock:
            if folder not in self._listings:

                def ask(store: Any, key: str) -> dict[str, Mapping[str, Any]]:
                    entries = store.ls(key, detail=True)
                    return {entry["name"].rstrip("/").rpartition("/")[2]: entry for entry in entries}

                with store_errors(folder, "the folder cannot be listed"):
                    self._listings[folder] = folder.call(ask)
            return self._listings[folder]

    def _copy(self, source: StoredObject, target: Path, known: FileChecksums | None) -> None:
        """Copy an object to a file, unless it is there, and compare it with its checksums; one process does."""
        if target.exists():
            return
        target.parent.mkdir(exist_ok=True)
        with open(f"{target}.lock", "ab") as lock:
            while try_lock(lock) is LockState.HELD and not target.exists():
                time.sleep(0.05)
            if target.exists():
                return
            part = Path(f"{target}.part")
            with open(part, "wb") as file:
                sink = BlockChecksums(file)
                for start in range(0, source.size, COPY_BYTES):
                    sink.write(source.read(start, min(start + COPY_BYTES, source.size)))
                sync_file(file)
            if known is not None:
                known.compare(sink.finish(), str(source.path))
            os.rename(part, target)


def remote_path(prefix: str) -> RemotePath:
    """Return the location of a prefix in a store."""
    path = parse_location(prefix)
    if isinstance(path, Path):
        raise DataError(f"{prefix} is not in an object store", f"give the path {path}")
    return path


def default_folder() -> Path:
    """Return the folder of the cache if no option names another."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron" / "tokens"


def token_store(options: DataStoreOptions) -> TokenStore:
    """Return the store of this process with these options."""
    return _store(options.data_store_cache, options.data_store_cache_bytes, options.data_store_block_bytes)


@lru_cache(maxsize=1)
def _store(folder: str | None, max_bytes: int, block_bytes: int) -> TokenStore:
    return TokenStore(default_folder() if folder is None else Path(folder), max_bytes, block_bytes)
