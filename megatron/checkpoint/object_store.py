"""Paths in object stores, ``s3://bucket/run``, with the operations of pathlib that checkpoints need.

Stores are accessed through fsspec and its library for each (s3fs, gcsfs, adlfs, ...), which must be installed.
Objects cannot be renamed, folders do not exist, and an object appears as a whole when its upload is complete. Every
exception of a library is converted to an OSError, and calls that may succeed a moment later are retried.
"""

from __future__ import annotations

import errno
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import PurePosixPath
from types import TracebackType
from typing import Any, Self, TypeVar

from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_attempt

from megatron.config.privacy import redact
from megatron.config.text import echo

ATTEMPTS = 5
"""Attempts of a call in all. The libraries below repeat single requests on their own, silently."""

FIRST_WAIT = 1.0
"""Average seconds before the second attempt; doubled before each further one."""

PERMANENT_ERRORS = (
    (FileNotFoundError, errno.ENOENT),
    (PermissionError, errno.EACCES),
    (FileExistsError, errno.EEXIST),
    (ImportError, errno.ENOPKG if hasattr(errno, "ENOPKG") else errno.ENOSYS),
    (NotImplementedError, errno.ENOSYS),
)
"""Exceptions that a retry cannot fix."""

NO_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "DefaultCredentialsError")
"""Names of the exceptions for missing credentials; matched by name so that their modules need not be imported."""

T = TypeVar("T")


@contextmanager
def translate_errors(place: object) -> Iterator[None]:
    """Convert any exception of a library to an OSError that names ``place``, with ``EIO`` if it may be transient."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) and error.filename == str(place):
            raise
        number = next((number for kind, number in PERMANENT_ERRORS if isinstance(error, kind)), errno.EIO)
        if type(error).__name__ in NO_CREDENTIALS:
            number = errno.EACCES
        original = error.__cause__ or error  # the store's own message, where the library has wrapped it
        text = " ".join((getattr(original, "strerror", None) or str(original) or "no answer").split())
        if number == errno.ENOENT:
            text = "there is no such object or bucket"
        elif number == errno.EACCES:
            text = f"access denied ({text})"
        elif number == errno.EIO and not isinstance(error, OSError):
            text = f"{type(error).__name__}: {text}"
        raise OSError(number, text, str(place)) from error  # Python makes it a FileNotFoundError or the like


PART = 32 << 20
"""Bytes of an upload part; a rank holds two or three, and a store accepts 10,000 parts per object."""

RANGE = 8 << 20
"""Bytes of one range request."""

RANGES = 4
"""Concurrent range requests."""

S3_TIMEOUTS = {"connect_timeout": 10, "read_timeout": 20}
"""Timeouts in seconds after which the S3 library repeats a request."""


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
        """Ending of the name, with its dot."""
        return PurePosixPath(self._key).suffix

    @property
    def parent(self) -> RemotePath:
        """Parent folder; that of a bucket is the bucket itself."""
        return RemotePath(self.uri.rpartition("/")[0]) if self._key else self

    def resolve(self) -> RemotePath:
        """Return the path itself: stores have no links."""
        return self

    @property
    def _key(self) -> str:
        """Path inside the bucket."""
        return self.uri.partition("://")[2].partition("/")[2]

    def exists(self) -> bool:
        """Return True if there is an object of this name or below it."""
        try:
            return bool(self.call(lambda fs, key: fs.info(key)))
        except FileNotFoundError:
            return False

    def modified(self) -> float:
        """Return when the object was written, in seconds since 1970."""
        return float(self.call(lambda fs, key: fs.modified(key)).timestamp())

    def folders(self) -> list[RemotePath]:
        """Return the folders directly inside."""
        try:
            entries = self.call(lambda fs, key: fs.ls(key, detail=True))
        except FileNotFoundError:
            return []
        names = {PurePosixPath(entry["name"].rstrip("/")).name for entry in entries if entry["type"] == "directory"}
        return [self / name for name in sorted(names)]

    def files(self) -> dict[str, int]:
        """Return the size of every object below this path, by its relative name."""

        def find(fs: Any, key: str) -> dict[str, int]:
            start = len(key.strip("/")) + 1
            return {name.strip("/")[start:]: entry["size"] for name, entry in fs.find(key, detail=True).items()}

        try:
            return self.call(find)
        except FileNotFoundError:
            return {}

    def read_bytes(self) -> bytes:
        """Return the content of an object."""
        return bytes(self.call(lambda fs, key: fs.cat_file(key)))

    def write_bytes(self, content: bytes | memoryview) -> None:
        """Create or replace a small object; after an OSError it may exist nevertheless."""
        self.call(lambda fs, key: fs.pipe_file(key, bytes(content)))

    def reader(self, size: int) -> RemoteReader:
        """Return a reader of an object of ``size`` bytes."""
        return RemoteReader(self, size)

    def writer(self) -> RemoteFileWriter:
        """Begin the upload of an object."""
        return RemoteFileWriter(self)

    def missing_library(self) -> tuple[str, str] | None:
        """Return a message and an install command if the library for this store is missing, else None."""
        from fsspec.registry import known_implementations, registry  # type: ignore[import-untyped]

        if self.scheme in registry:
            return None
        if self.scheme not in known_implementations:
            known = "s3://, gs://, az:// and others of fsspec are"
            return f"{self}: {self.scheme}:// is not a known kind of store; {known}", "pip install A_LIBRARY_FOR_IT"
        package = known_implementations[self.scheme]["class"].partition(".")[0]
        if package == "fsspec" or find_spec(package) is not None:
            return None
        return f"{self} needs a library that is not installed: {package}", f"pip install {package}"

    def retry(self, action: Callable[[], T]) -> T:
        """Call ``action`` until it succeeds, with exponential backoff after transient errors; raise the last error."""

        def report(state: RetryCallState) -> None:
            error = state.outcome.exception() if state.outcome else None
            if isinstance(error, OSError) and state.next_action:
                again = f"attempt {state.attempt_number} of {ATTEMPTS}, retrying in {state.next_action.sleep:.1f} s"
                self.warn(f"{error.strerror}; {again}")

        attempts = Retrying(
            retry=retry_if_exception(lambda error: isinstance(error, OSError) and error.errno == errno.EIO),
            stop=stop_after_attempt(ATTEMPTS),
            wait=lambda state: FIRST_WAIT * 2 ** (state.attempt_number - 1) * random.uniform(0.5, 1.5),  # spreads ranks
            before_sleep=report,
            reraise=True,
        )
        return attempts(action)

    def warn(self, text: str) -> None:
        """Print a warning about this object to stderr, on any rank."""
        with suppress(OSError):  # a closed console must not fail a save
            echo(f"warning: {redact(f'{self}: {text}')}", file=sys.stderr, flush=True)

    def remove(self) -> None:
        """Delete an object if it exists."""
        with suppress(FileNotFoundError):
            self.call(lambda fs, key: fs.rm_file(key))

    def remove_all(self) -> None:
        """Delete every object below this path."""
        with suppress(FileNotFoundError):
            self.call(lambda fs, key: fs.rm(key, recursive=True))

    def call(self, request: Callable[..., T]) -> T:
        """Return the result of a library call, retried on transient errors."""

        def once() -> T:
            with translate_errors(self):
                return request(*_open_store(self))

        return self.retry(once)


def _open_store(path: RemotePath) -> tuple[Any, str]:
    """Return the fsspec file system of a path, and the path's key in it."""
    from fsspec.core import url_to_fs  # type: ignore[import-untyped]

    missing = path.missing_library()
    if missing is not None:
        raise ImportError("; ".join(missing))
    options: dict[str, Any] = {"use_listings_cache": False}  # other ranks and runs write too
    if path.scheme in ("s3", "s3a"):
        from fsspec.config import conf  # type: ignore[import-untyped]

        options["config_kwargs"] = S3_TIMEOUTS | conf.get(path.scheme, {}).get("config_kwargs", {})
    store, key = url_to_fs(path.uri, **options)
    if path.scheme in ("s3", "s3a"):
        store.retries = 1  # retried and reported here; retries of the library below remain
    return store, key


class RemoteFileWriter:
    """An object being uploaded part by part; it exists once the block ends without an exception."""

    def __init__(self, path: RemotePath) -> None:
        self._path = path
        with translate_errors(path):
            store, key = _open_store(path)
            self._file = store.open(key, "wb", block_size=PART)

    def write(self, content: bytes | memoryview) -> None:
        """Append all of ``content``; after an OSError the upload must restart from the beginning."""
        with translate_errors(self._path):
            self._file.write(content)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Complete the upload; after an exception discard its parts as far as possible."""
        complete = False
        try:
            if kind is None:
                with translate_errors(self._path):
                    self._file.close()
                complete = True
        finally:
            if not complete:
                with suppress(Exception):  # the store is unreachable
                    self._file.discard()
                self._file.closed = True  # keeps the library from completing it later


READ_AHEAD = 1 << 20
"""Bytes fetched at least, ahead of their use."""


class RemoteReader:
    """An object in a store. Small consecutive chunks are fetched together, ahead of their use."""

    block = RANGE * RANGES

    def __init__(self, path: RemotePath, size: int) -> None:
        self._path, self._size = path, size
        self._ahead, self._start = memoryview(b""), 0

    def read(self, offset: int, buffer: memoryview) -> int:
        """Fill ``buffer``; OSError if the object is too short."""
        if len(buffer) >= READ_AHEAD:
            self._fetch(offset, buffer)
            return len(buffer)
        first = offset - self._start
        if not 0 <= first <= len(self._ahead) - len(buffer):
            ahead = memoryview(bytearray(max(len(buffer), min(READ_AHEAD, self._size - offset))))
            self._fetch(offset, ahead)
            self._ahead, self._start, first = ahead, offset, 0
        buffer[:] = self._ahead[first : first + len(buffer)]
        return len(buffer)

    def _fetch(self, offset: int, buffer: memoryview) -> None:
        """Read ranges of the object concurrently, each into its position in ``buffer``."""

        def read(store: Any, key: str, ranges: list[tuple[int, int]]) -> None:
            starts, stops = ([offset + place for place in places] for places in zip(*ranges))
            contents = store.cat_ranges([key] * len(ranges), starts, stops, on_error="raise")
            for (start, stop), content in zip(ranges, contents):
                if len(content) != stop - start:
                    raise OSError(f"received {len(content)} of {stop - start} requested bytes")
                buffer[start:stop] = content

        ranges = [(start, min(start + RANGE, len(buffer))) for start in range(0, len(buffer), RANGE)]
        for first in range(0, len(ranges), RANGES):
            self._path.call(partial(read, ranges=ranges[first : first + RANGES]))

    def close(self) -> None:
        """Do nothing: requests are independent."""
