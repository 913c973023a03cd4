"""Paths in object stores, ``s3://bucket/run``, with the operations of pathlib that checkpoints need.

Stores are accessed through fsspec and its library for each (s3fs, gcsfs, adlfs, ...), which must be installed.
Objects cannot be renamed, folders do not exist, and an object appears as a whole when its upload is complete. Every
call is retried on failure (``retries``) and raises only OSError.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import unquote

from megatron.checkpoint.retries import again, translated

PART = 32 << 20
"""Bytes of an upload part; a rank holds two or three, and a store accepts 10,000 parts per object."""

RANGE = 8 << 20
"""Bytes of one range request."""

RANGES = 4
"""Concurrent range requests."""

URI = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]+)://(.*)", re.DOTALL)

PATIENCE = {"connect_timeout": 10, "read_timeout": 20}
"""Timeouts in seconds after which the S3 library repeats a request."""

T = TypeVar("T")


@dataclass(frozen=True, order=True)
class RemotePath:
    """A path in an object store; the methods shared with ``pathlib.Path`` have the same names.

    Methods that access the store raise OSError if it fails, denies access or does not answer.
    """

    uri: str  # without a trailing slash

    def __str__(self) -> str:
        return self.uri

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self.uri}/{name}")

    @property
    def scheme(self) -> str:
        """Kind of store: ``s3``."""
        return self.uri.partition("://")[0]

    @property
    def bucket(self) -> str:
        """Name of the bucket; "" if the URI has none."""
        return self.uri.partition("://")[2].partition("/")[0]

    @property
    def name(self) -> str:
        """Last component of the path; "" for a bucket."""
        return PurePosixPath(self._key).name

    @property
    def suffix(self) -> str:
        """Suffix of the name, with its dot."""
        return PurePosixPath(self._key).suffix

    @property
    def parent(self) -> RemotePath:
        """Parent folder; that of a bucket is the bucket itself."""
        return RemotePath(self.uri.rpartition("/")[0]) if self._key else self

    def with_name(self, name: str) -> RemotePath:
        """Return the path with another last component."""
        return self.parent / name

    def with_suffix(self, suffix: str) -> RemotePath:
        """Return the path with another suffix, or without one."""
        return self.with_name(PurePosixPath(self.name).with_suffix(suffix).name)

    def resolve(self) -> RemotePath:
        """Return the path itself: stores have no links."""
        return self

    @property
    def _key(self) -> str:
        """Path inside the bucket."""
        return self.uri.partition("://")[2].partition("/")[2]

    def exists(self) -> bool:
        """Return True if there is an object of this name or below it."""
        return bool(self._info())

    def is_file(self) -> bool:
        """Return True if there is an object of this name."""
        return self._info().get("type") == "file"

    def is_dir(self) -> bool:
        """Return True if there are objects below this path."""
        return self._info().get("type") == "directory"

    def modified(self) -> float:
        """Return when the object was written, in seconds since 1970."""
        return float(self._call(lambda fs, key: fs.modified(key)).timestamp())

    def folders(self) -> list[RemotePath]:
        """Return the folders directly inside."""
        entries = self._list(lambda fs, key: fs.ls(key, detail=True))
        names = {PurePosixPath(entry["name"].rstrip("/")).name for entry in entries if entry["type"] == "directory"}
        return [self / name for name in sorted(names)]

    def files(self) -> dict[str, int]:
        """Return the size of every object below this path, by its relative name."""

        def inside(fs: Any, key: str) -> list[dict[str, Any]]:
            start, found = len(key.strip("/")) + 1, fs.find(key, detail=True).values()
            return [{"name": entry["name"].strip("/")[start:], "size": entry["size"]} for entry in found]

        return {entry["name"]: entry["size"] for entry in self._list(inside)}

    def read_bytes(self) -> bytes:
        """Return the content of an object."""
        return bytes(self._call(lambda fs, key: fs.cat_file(key)))

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes of an object from ``offset`` on; OSError if the object is too short."""
        starts = list(range(0, len(buffer), RANGE))
        for first in range(0, len(starts), RANGES):
            ranges = [(start, min(start + RANGE, len(buffer))) for start in starts[first : first + RANGES]]
            self._call(lambda fs, key, ranges=ranges: _fetch(fs, key, offset, ranges, buffer))

    def write_bytes(self, content: bytes | memoryview) -> None:
        """Create or replace a small object; after an OSError it may exist nevertheless."""
        self._call(lambda fs, key: fs.pipe_file(key, bytes(content)))

    def remove(self) -> None:
        """Delete an object if it exists."""

        def delete(fs: Any, key: str) -> None:
            with suppress(FileNotFoundError):
                fs.rm_file(key)

        self._call(delete)

    def remove_all(self) -> None:
        """Delete every object below this path."""

        def delete(fs: Any, key: str) -> None:
            with suppress(FileNotFoundError):
                fs.rm(key, recursive=True)

        self._call(delete)

    def _info(self) -> dict[str, Any]:
        """Return the store's description of the path; {} if there is nothing."""
        try:
            return dict(self._call(lambda fs, key: fs.info(key)))
        except FileNotFoundError:
            return {}

    def _list(self, request: Callable[[Any, str], list[dict[str, Any]]]) -> list[dict[str, Any]]:
        """Return the result of the listing ``request``; [] if there is nothing."""
        try:
            return self._call(request)
        except FileNotFoundError:
            return []

    def _call(self, request: Callable[..., T]) -> T:
        """Return the result of a library call, retried on transient errors."""

        def once() -> T:
            with translated(self):
                return request(*_open_store(self))

        return again(once)


Location = Path | RemotePath
"""Path of a checkpoint, on disk or in an object store."""


def location(text: str | Location) -> Location:
    """Parse the value of an option: a path, or a URI such as ``s3://bucket/run``."""
    if not isinstance(text, str):
        return text
    match = URI.fullmatch(text)
    if match is None:
        return Path(text)
    scheme, rest = match[1].lower(), match[2]
    if scheme == "file":
        return Path("/" + unquote(rest.removeprefix("localhost")).lstrip("/"))
    return RemotePath(f"{scheme}://{rest.strip('/')}")


def on_disk(path: Location) -> Path:
    """Return a location that must be on disk as a ``Path``.

    Raises:
        TypeError: if it is in an object store.
    """
    if isinstance(path, RemotePath):
        raise TypeError(f"{path} is not on a disk")
    return path


def missing_library(path: RemotePath) -> tuple[str, str] | None:
    """Return a message and an install command if the library for a store is missing, else None."""
    from fsspec.registry import known_implementations, registry  # type: ignore[import-untyped]

    if path.scheme in registry:
        return None
    if path.scheme not in known_implementations:
        known = "s3://, gs://, az:// and others of fsspec are"
        return f"{path}: {path.scheme}:// is not a known kind of store; {known}", "pip install A_LIBRARY_FOR_IT"
    package = known_implementations[path.scheme]["class"].partition(".")[0]
    if package == "fsspec" or find_spec(package) is not None:
        return None
    return f"{path} needs a library that is not installed: {package}", f"pip install {package}"


def _open_store(path: RemotePath) -> tuple[Any, str]:
    """Return the fsspec file system of a path, and the path's key in it."""
    from fsspec.core import url_to_fs  # type: ignore[import-untyped]

    missing = missing_library(path)
    if missing is not None:
        raise ImportError("; ".join(missing))
    options: dict[str, Any] = {"use_listings_cache": False}  # other ranks and runs write too
    if path.scheme in ("s3", "s3a"):
        from fsspec.config import conf  # type: ignore[import-untyped]

        options["config_kwargs"] = PATIENCE | conf.get(path.scheme, {}).get("config_kwargs", {})
    store, key = url_to_fs(path.uri, **options)
    if path.scheme in ("s3", "s3a"):
        store.retries = 1  # retried and reported here; retries of the library below remain
    return store, key


def _fetch(store: Any, key: str, offset: int, ranges: list[tuple[int, int]], buffer: memoryview) -> None:
    """Read ranges of an object concurrently, each into its position in ``buffer``."""
    starts = [offset + start for start, _ in ranges]
    stops = [offset + stop for _, stop in ranges]
    contents = store.cat_ranges([key] * len(ranges), starts, stops, on_error="raise")
    for (start, stop), content in zip(ranges, contents):
        if len(content) != stop - start:
            raise OSError(f"received {len(content)} of {stop - start} requested bytes")
        buffer[start:stop] = content


class RemoteFile:
    """An object being uploaded part by part; it exists once the block ends without an exception."""

    def __init__(self, path: RemotePath) -> None:
        self._path = path
        with translated(path):
            store, key = _open_store(path)
            self._file = store.open(key, "wb", block_size=PART)

    def write(self, content: bytes | memoryview) -> None:
        """Append all of ``content``; after an OSError the upload must restart from the beginning."""
        with translated(self._path):
            self._file.write(content)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Complete the upload, or discard it after an exception."""
        try:
            if kind is None:
                with translated(self._path):
                    self._file.close()
        except OSError:
            self._discard()
            raise
        if kind is not None:
            self._discard()

    def _discard(self) -> None:
        """Discard the uploaded parts as far as possible, and keep the library from completing them later."""
        try:
            self._file.discard()
        except Exception:  # the store is unreachable
            return
        finally:
            self._file.closed = True
