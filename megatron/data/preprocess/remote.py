"""Input files in object stores and on web servers, ``s3://bucket/corpus/*.jsonl``, read as streams through fsspec.

A `RemoteFile` has the methods of ``Path`` that reading needs. Requests that may succeed a moment later are repeated
(`megatron.checkpoint.object_store`); an answer that is too short is an error.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from megatron.checkpoint.durable_files import checksum
from megatron.checkpoint.location import URI, parse_location
from megatron.config.errors import UserError
from megatron.data.errors import DataError

if TYPE_CHECKING:
    from megatron.checkpoint.object_store import RemotePath

BUFFER_BYTES = 8 << 20  # read ahead of a stream


class RemoteStat(NamedTuple):
    """Size of an object, and a number that differs if another object takes its name."""

    st_size: int
    st_mtime_ns: int


@dataclass(frozen=True, order=True)
class RemoteFile:
    """Object of a store, as it was when it was listed."""

    uri: str
    listed: RemoteStat

    def __str__(self) -> str:
        return self.uri

    @property
    def name(self) -> str:
        """Last part of the path."""
        return PurePosixPath(self.uri).name

    @property
    def suffix(self) -> str:
        """Ending of the name, with its dot."""
        return PurePosixPath(self.name).suffix

    @property
    def stem(self) -> str:
        """Name without the last ending."""
        return PurePosixPath(self.name).stem

    def with_name(self, name: str) -> RemoteFile:
        """Return the file of this name beside it."""
        return RemoteFile(f"{self.uri.rpartition('/')[0]}/{name}", self.listed)

    def with_suffix(self, suffix: str) -> RemoteFile:
        """Return the file with another ending."""
        return self.with_name(self.stem + suffix)

    def with_stem(self, stem: str) -> RemoteFile:
        """Return the file with another name before its ending."""
        return self.with_name(stem + self.suffix)

    def stat(self) -> RemoteStat:
        """Return the size and version when it was listed."""
        return self.listed

    def open(self, mode: str) -> IO[bytes]:
        """Open the object for reading."""
        return io.BufferedReader(_RemoteStream(self), BUFFER_BYTES)


InputFile = Path | RemoteFile


def current_stat(file: InputFile) -> os.stat_result | RemoteStat:
    """Return the size and version that a file has now."""
    return file.stat() if isinstance(file, Path) else _list_object(_location(file.uri)).listed


def is_uri(name: str) -> bool:
    """Return True for the URI of an object or folder in a store."""
    return URI.fullmatch(name) is not None and not name.startswith("file:")


def list_remote(name: str, is_wanted: Callable[[str], bool], exclude: Collection[str]) -> list[RemoteFile]:
    """Return the object that a URI names, those that match it as a pattern, or those below it that are wanted.

    Args:
        name: the URI.
        is_wanted: whether the object of a name is read from a folder.
        exclude: names of folders and objects that are left out of a folder.

    Raises:
        OSError: if the store fails.
    """
    folder, *pattern = _split_pattern(name)
    if not pattern:
        try:
            return [_list_object(_location(name))]
        except FileNotFoundError:
            pass
    base = _location(folder)

    def find(store: Any, key: str) -> dict[str, Any]:
        start = len(store._strip_protocol(key).rstrip("/")) + 1
        return {path[start:]: entry for path, entry in store.find(key, detail=True).items()}

    found = []
    for path, entry in base.call(find).items():
        parts = PurePosixPath(path).parts
        if fits_pattern(parts, tuple(pattern)) if pattern else is_wanted(path) and not {*parts} & {*exclude}:
            found.append(RemoteFile(f"{base}/{path}", _stat_of(entry)))
    return sorted(found, key=lambda file: PurePosixPath(file.uri).parts)


def fits_pattern(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """Return True if the parts of a path match those of a pattern, of which ``**`` matches any number."""
    if not parts or not pattern:
        return not parts and pattern in ((), ("**",))
    if pattern[0] == "**" and fits_pattern(parts, pattern[1:]):
        return True
    is_hidden = parts[0].startswith(".") and not pattern[0].startswith(".")
    if is_hidden or not fnmatchcase(parts[0], pattern[0]):
        return False
    return fits_pattern(parts[1:], pattern[pattern[0] != "**" :])


def _split_pattern(name: str) -> list[str]:
    """Return the folder of a URI before its first part with a wildcard, and the parts from there on."""
    scheme, _, path = name.partition("://")
    parts = path.split("/")
    first = next((i for i, part in enumerate(parts) if any(sign in part for sign in "*?[")), len(parts))
    if scheme in ("http", "https"):  # a query is no pattern, and a web server has no folders
        first = len(parts)
    return [f"{scheme}://{'/'.join(parts[:first])}", *parts[first:]]


def _location(uri: str) -> RemotePath:
    try:
        location = parse_location(uri)
    except UserError as error:  # it holds a credential
        raise DataError(error.problems[0].sentence, *error.problems[0].fixes) from error
    if isinstance(location, Path):
        raise DataError(f"{uri} is a path, not a URI", str(location))
    missing = location.missing_library()
    if missing is not None:
        raise DataError(*missing)
    return location


def _list_object(location: RemotePath) -> RemoteFile:
    entry = location.call(lambda store, key: store.info(key))
    if entry["type"] == "directory":
        raise FileNotFoundError(str(location))
    if entry.get("size") is None:
        raise DataError(f"{location}: the server does not state the size", "download it first")
    return RemoteFile(str(location), _stat_of(entry))


def _stat_of(entry: dict[str, Any]) -> RemoteStat:
    version = next((entry[name] for name in ("ETag", "etag", "LastModified", "mtime") if entry.get(name)), "")
    return RemoteStat(entry["size"], int(checksum(str(version).encode()), 16) >> 1)


class _RemoteStream(io.RawIOBase):
    """Bytes of an object, with random access."""

    def __init__(self, file: RemoteFile) -> None:
        self._size, self._place = file.listed.st_size, 0
        self._reader = _location(file.uri).reader(self._size)

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to a byte, and return its place."""
        self._place = offset + (0, self._place, self._size)[whence]
        return self._place

    def tell(self) -> int:
        """Return the place of the next byte."""
        return self._place

    def readinto(self, buffer: Any) -> int:
        """Fill ``buffer`` as far as the object goes, and return the number of bytes."""
        count = max(0, min(len(buffer), self._size - self._place))
        if count:
            self._reader.read(self._place, memoryview(buffer)[:count])
            self._place += count
        return count
