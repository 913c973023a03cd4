"""Places in object stores, ``s3://bucket/run``, beside those on disks: what of a path a checkpoint needs.

The stores are reached through fsspec, whose libraries for each (s3fs, gcsfs, adlfs, ...) are there or are asked for.
There is no rename, no folder and no half-written object in them: an object is there as a whole when its upload is done.
Every call is repeated when it fails (``retries``), and raises OSErrors alone.
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
"""Bytes of a part of an upload, of which a rank holds two or three; a store takes 10,000 parts of an object."""

RANGE = 8 << 20
"""Bytes asked for in a request."""

RANGES = 4
"""Requests under way at a time."""

URI = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]+)://(.*)", re.DOTALL)

PATIENCE = {"connect_timeout": 10, "read_timeout": 20}
"""Seconds without an answer after which S3's library makes a request anew."""

T = TypeVar("T")


@dataclass(frozen=True, order=True)
class RemotePath:
    """A place in an object store, with the names that pathlib has for the same.

    Attributes:
        uri: without a slash at its end.
    """

    uri: str

    def __str__(self) -> str:
        return self.uri

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self.uri}/{name}")

    @property
    def scheme(self) -> str:
        """Which store it is: ``s3``."""
        return self.uri.partition("://")[0]

    @property
    def bucket(self) -> str:
        """The part of the store that it is in; nothing where none is named."""
        return self.uri.partition("://")[2].partition("/")[0]

    @property
    def name(self) -> str:
        """What comes after the last slash; nothing for a bucket."""
        return PurePosixPath(self._inside).name

    @property
    def suffix(self) -> str:
        """What comes after the name's last dot, and the dot."""
        return PurePosixPath(self._inside).suffix

    @property
    def parent(self) -> RemotePath:
        """The place that it lies in; a bucket's own is itself."""
        return RemotePath(self.uri.rpartition("/")[0]) if self._inside else self

    def with_name(self, name: str) -> RemotePath:
        """Another place beside it."""
        return self.parent / name

    def with_suffix(self, suffix: str) -> RemotePath:
        """The same with another suffix, or with none."""
        return self.with_name(PurePosixPath(self.name).with_suffix(suffix).name)

    def resolve(self) -> RemotePath:
        """Itself: there are no links."""
        return self

    @property
    def _inside(self) -> str:
        """The path inside the bucket."""
        return self.uri.partition("://")[2].partition("/")[2]

    def exists(self) -> bool:
        """Whether there is an object of this name, or one further inside.

        Raises:
            OSError: when the store does not say.
        """
        return bool(self._info())

    def is_file(self) -> bool:
        """Whether there is an object of this name.

        Raises:
            OSError: when the store does not say.
        """
        return self._info().get("type") == "file"

    def is_dir(self) -> bool:
        """Whether there are objects further inside.

        Raises:
            OSError: when the store does not say.
        """
        return self._info().get("type") == "directory"

    def modified(self) -> float:
        """When the object was written, in seconds since 1970.

        Raises:
            OSError: when the store does not say.
        """
        return float(self._call(lambda fs, key: fs.modified(key)).timestamp())

    def folders(self) -> list[RemotePath]:
        """Places one further inside that have others inside.

        Raises:
            OSError: when the store does not say.
        """
        entries = self._list(lambda fs, key: fs.ls(key, detail=True))
        names = {PurePosixPath(entry["name"].rstrip("/")).name for entry in entries if entry["type"] == "directory"}
        return [self / name for name in sorted(names)]

    def files(self) -> dict[str, int]:
        """Bytes of every object inside, however far, by its name from here on.

        Raises:
            OSError: when the store does not say.
        """

        def inside(fs: Any, key: str) -> list[dict[str, Any]]:
            start, found = len(key.strip("/")) + 1, fs.find(key, detail=True).values()
            return [{"name": entry["name"].strip("/")[start:], "size": entry["size"]} for entry in found]

        return {entry["name"]: entry["size"] for entry in self._list(inside)}

    def read_bytes(self) -> bytes:
        """All of an object.

        Raises:
            OSError: when it is not there, or the store refuses or does not answer.
        """
        return bytes(self._call(lambda fs, key: fs.cat_file(key)))

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with bytes of an object from ``offset`` on.

        Raises:
            OSError: when it is not there or has not so many, or the store refuses or does not answer.
        """
        starts = list(range(0, len(buffer), RANGE))
        for first in range(0, len(starts), RANGES):
            some = [(start, min(start + RANGE, len(buffer))) for start in starts[first : first + RANGES]]
            self._call(lambda fs, key, some=some: _fetch(fs, key, offset, some, buffer))

    def write_bytes(self, content: bytes | memoryview) -> None:
        """Make an object of a few bytes, or give it others.

        Raises:
            OSError: when the store refuses or does not answer; the object may be there nevertheless.
        """
        self._call(lambda fs, key: fs.pipe_file(key, bytes(content)))

    def remove(self) -> None:
        """Remove an object, if it is there.

        Raises:
            OSError: when the store refuses or does not answer.
        """

        def gone(fs: Any, key: str) -> None:
            with suppress(FileNotFoundError):
                fs.rm_file(key)

        self._call(gone)

    def remove_all(self) -> None:
        """Remove every object inside, if there are any.

        Raises:
            OSError: when the store refuses or does not answer.
        """

        def gone(fs: Any, key: str) -> None:
            with suppress(FileNotFoundError):
                fs.rm(key, recursive=True)

        self._call(gone)

    def _info(self) -> dict[str, Any]:
        """What the store says of it; nothing where there is nothing."""
        try:
            return dict(self._call(lambda fs, key: fs.info(key)))
        except FileNotFoundError:
            return {}

    def _list(self, ask: Callable[[Any, str], list[dict[str, Any]]]) -> list[dict[str, Any]]:
        """What ``ask`` lists; nothing where there is nothing."""
        try:
            return self._call(ask)
        except FileNotFoundError:
            return []

    def _call(self, ask: Callable[..., T]) -> T:
        """What a call of the library returns, repeated where that may help."""

        def once() -> T:
            with translated(self):
                return ask(*_reached(self))

        return again(once)


Location = Path | RemotePath
"""Where a checkpoint is."""


def location(text: str | Location) -> Location:
    """The place that an option names: a path, or a URI such as ``s3://bucket/run``."""
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
    """A place where it is known that it is on a disk.

    Raises:
        TypeError: when it is not.
    """
    if isinstance(path, RemotePath):
        raise TypeError(f"{path} is on no disk")
    return path


def missing_library(path: RemotePath) -> tuple[str, str] | None:
    """What is missing to reach a place, as a sentence and a command; None where nothing is."""
    from fsspec.registry import known_implementations, registry  # type: ignore[import-untyped]

    if path.scheme in registry:
        return None
    if path.scheme not in known_implementations:
        near = "s3://, gs://, az:// and others of fsspec are"
        return f"{path}: no kind of store is called {path.scheme}://; {near}", "pip install A_LIBRARY_FOR_IT"
    package = known_implementations[path.scheme]["class"].partition(".")[0]
    if package == "fsspec" or find_spec(package) is not None:
        return None
    return f"{path} needs a library that is not installed: {package}", f"pip install {package}"


def _reached(path: RemotePath) -> tuple[Any, str]:
    """The store of a place, and the name that the place has in it."""
    from fsspec.core import url_to_fs  # type: ignore[import-untyped]

    missing = missing_library(path)
    if missing is not None:
        raise ImportError("; ".join(missing))
    options: dict[str, Any] = {"use_listings_cache": False}  # other ranks and other runs write too
    if path.scheme in ("s3", "s3a"):
        from fsspec.config import conf  # type: ignore[import-untyped]

        options["config_kwargs"] = PATIENCE | conf.get(path.scheme, {}).get("config_kwargs", {})
    store, key = url_to_fs(path.uri, **options)
    if path.scheme in ("s3", "s3a"):
        store.retries = 1  # repeated here, and told; those of the library beneath it remain
    return store, key


def _fetch(store: Any, key: str, offset: int, some: list[tuple[int, int]], buffer: memoryview) -> None:
    """Read ranges of an object at once, each to its place in ``buffer``."""
    first, last = ([offset + range_[end] for range_ in some] for end in (0, 1))
    for (start, stop), content in zip(some, store.cat_ranges([key] * len(some), first, last, on_error="raise")):
        if len(content) != stop - start:
            raise OSError(f"{len(content)} bytes came of {stop - start} asked for")
        buffer[start:stop] = content


class RemoteFile:
    """An object being written, part by part; it is there when the block ends without an exception."""

    def __init__(self, path: RemotePath) -> None:
        self._path = path
        with translated(path):
            store, key = _reached(path)
            self._file = store.open(key, "wb", block_size=PART)

    def write(self, content: bytes | memoryview) -> None:
        """Append all of ``content``.

        Raises:
            OSError: when the store refuses or does not answer; then the object has to be begun anew.
        """
        with translated(self._path):
            self._file.write(content)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Finish the upload, unless the content is incomplete: then nothing of it stays."""
        try:
            if kind is None:
                with translated(self._path):
                    self._file.close()
        except OSError:
            self._give_up()
            raise
        if kind is not None:
            self._give_up()

    def _give_up(self) -> None:
        """Tell the store to forget the parts, as far as it answers; the library must not finish them later."""
        try:
            self._file.discard()
        except Exception:  # it was not reached before either
            return
        finally:
            self._file.closed = True
