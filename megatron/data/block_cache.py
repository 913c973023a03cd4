"""A bounded cache of blocks of remote files on a local disk, shared by the processes of a machine.

A block is a file: its content, then the xxh3 checksum of each `CHUNK_BYTES` of it. Every read verifies the chunks that
it touches, so that a block damaged on the disk is deleted and fetched again, never used. Blocks are written to a
``.part`` file under its lock (``flock``, which ends with the process) and renamed; whoever waits for the lock finds the
block there, so that a machine fetches each block once. The sizes of all blocks are counted in the file ``usage``. When
they exceed the limit, the blocks that were not used for longest are deleted, a tenth at a time.
"""

from __future__ import annotations

import errno
import os
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

import numpy as np
import xxhash
from numpy.typing import NDArray

from megatron.checkpoint.durable_files import LockState, try_lock
from megatron.config.data_store import CHUNK_BYTES
from megatron.config.text import echo

KEPT_SHARE = 0.9  # of the limit, after blocks were deleted
PART = ".part"  # ends the name of a block that is being written
LONGEST_WAIT_SECONDS = 120.0  # for a process that fetches a block
SHORTEST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.005, 0.2
RETRY_SECONDS = 60.0  # after which a disk that refused a block is tried again
USAGE = struct.Struct("<q")
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def chunk_sums(content: bytes | memoryview, size: int = CHUNK_BYTES) -> NDArray[np.uint64]:
    """Return the xxh3 checksum of each ``size`` bytes of ``content``, uint64 ``[chunks]``."""
    view = memoryview(content)
    starts = range(0, len(view), size)
    return np.array([xxhash.xxh3_64_intdigest(view[at : at + size]) for at in starts], dtype="<u8")


class BlockCache:
    """A folder of blocks."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """Use ``folder``, which need not exist, for at most ``max_bytes`` of blocks."""
        self.folder, self.max_bytes = folder, max_bytes
        self._closed_until = 0.0  # the disk refused a block
        self._reported: set[str] = set()

    @property
    def is_open(self) -> bool:
        """False for a while after the disk has refused a block."""
        return time.monotonic() >= self._closed_until

    def read(self, block: Path, size: int, start: int, stop: int) -> bytes | None:
        """Return bytes ``start .. stop - 1`` of a block of ``size`` bytes; None if it is missing or damaged."""
        try:
            file = os.open(block, os.O_RDONLY)
        except OSError:
            return None
        try:
            first, last = start // CHUNK_BYTES, -(-stop // CHUNK_BYTES)
            begin, end = first * CHUNK_BYTES, min(last * CHUNK_BYTES, size)
            content = os.pread(file, end - begin, begin)
            known = np.frombuffer(os.pread(file, 8 * (last - first), size + 8 * first), dtype="<u8")
            if len(content) == end - begin and np.array_equal(chunk_sums(content), known):
                with suppress(OSError):  # of another user, or read-only
                    os.utime(file)  # of which blocks are used
                return content[start - begin : stop - begin]
        except (OSError, ValueError):  # ValueError: half a checksum
            pass
        finally:
            os.close(file)
        self.report(f"{block} is damaged and read again")
        with suppress(OSError):
            block.unlink()
        return None

    def touch(self, block: Path) -> bool:
        """Count a block as used now; return False if it is missing."""
        try:
            os.utime(block)
        except PermissionError:  # of another user
            return True
        except OSError:
            return False
        return True

    @contextmanager
    def writing(self, block: Path, wait: bool = True) -> Iterator[IO[bytes] | None]:
        """Hold the right to write a block.

        Yields None if the block is there, if another process is writing it (with ``wait``: for longer than
        `LONGEST_WAIT_SECONDS`), or if the folder cannot be written.
        """
        file = None
        try:
            if self.is_open:
                file = self._lock(block, wait)
        except OSError as error:
            self._refused(error)
        try:
            yield file
        finally:
            if file is not None:
                file.close()

    def _lock(self, block: Path, wait: bool) -> IO[bytes] | None:
        block.parent.mkdir(parents=True, exist_ok=True)
        part, began, pause = block.with_name(block.name + PART), time.monotonic(), SHORTEST_PAUSE_SECONDS
        while not block.exists():
            with ExitStack() as opened:
                file = opened.enter_context(open(part, "ab"))
                state = try_lock(file)
                if state is not LockState.HELD and _is_at(file, part):
                    if block.exists():
                        part.unlink()
                        return None
                    opened.pop_all()
                    return file
            if state is LockState.HELD:
                if not wait or time.monotonic() - began > LONGEST_WAIT_SECONDS:
                    return None
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        return None

    def write(self, file: IO[bytes], block: Path, content: bytes) -> bool:
        """Write the content of a block to the file of `writing`, and publish it; return False if it cannot be kept."""
        sums = chunk_sums(content)
        size = len(content) + sums.nbytes
        part = block.with_name(block.name + PART)
        try:
            if not self._reserve(size):
                part.unlink(missing_ok=True)
                return False
            try:
                file.truncate(0)  # of a process that was killed
                file.write(content)
                file.write(sums.data)
                file.flush()
                os.rename(part, block)
                return True
            except OSError:
                with suppress(OSError):
                    part.unlink()
                self._reserve(-size)
                raise
        except OSError as error:
            self._refused(error)
            return False

    def _refused(self, error: OSError) -> None:
        """Stop writing for a while; what is there is still read."""
        self._closed_until = time.monotonic() + RETRY_SECONDS
        fix = "make room on that disk" if error.errno in FULL else "--data-store-cache ANOTHER"
        self.report(f"blocks cannot be kept in {self.folder} ({error.strerror or error}): they are read again ({fix})")

    def _reserve(self, size: int) -> bool:
        """Count ``size`` more bytes, and delete blocks if they would exceed the limit; False if they would still."""
        with open(self.folder / "usage", "a+b") as file:
            while try_lock(file) is LockState.HELD:
                time.sleep(SHORTEST_PAUSE_SECONDS)
            file.seek(0)
            held = file.read()
            used = USAGE.unpack(held)[0] if len(held) == USAGE.size else self._delete(self.max_bytes)
            if size > 0 and used + size > self.max_bytes:
                used = self._delete(int(KEPT_SHARE * self.max_bytes) - size)
            fits = used + size <= self.max_bytes
            file.truncate(0)
            file.write(USAGE.pack(max(0, used + size * fits)))
            return fits

    def _delete(self, limit: int) -> int:
        """Delete the blocks that were not used for longest while all are larger than ``limit``; return their size."""
        found = []
        for block in self.folder.glob("*/blocks-*/*"):
            with suppress(OSError):
                state = block.stat()
                found.append((state.st_mtime_ns, state.st_size, block))
        found.sort()
        used = sum(size for _, size, _ in found)
        for _, size, block in found:
            if used <= limit:
                break
            if block.name.endswith(PART):
                with suppress(OSError), open(block, "ab") as file:
                    if try_lock(file) is LockState.ACQUIRED:  # of a process that was killed
                        block.unlink()
                        used -= size
                continue
            with suppress(OSError):
                block.unlink()
                used -= size
        return used

    def report(self, text: str) -> None:
        """Print a warning once."""
        if text not in self._reported:
            self._reported.add(text)
            with suppress(OSError):
                echo(f"warning: {text}", file=sys.stderr, flush=True)


def _is_at(file: IO[bytes], path: Path) -> bool:
    """Return True if ``path`` still names an open file."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False
