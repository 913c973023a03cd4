"""Health and speed of the disks that a run writes to and reads from. Does not import torch.

What a measurement writes is one file without a name, which no crash can leave behind.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from megatron.config.text import format_bytes
from tools.lib.findings import BAD, NOTE, OK, Finding, repeat_for
from tools.lib.installed import installed

GROUP = "disks"
SECONDS = 0.7
"""Of each measurement; a disk has three."""
BLOCK, MOST = 4 << 20, 1 << 30
"""Bytes of a block, and at most of the file that is written."""
PAGE, SYNCS = 4096, 8
SLOW_BYTES, SLOW_SYNC = 100e6, 0.1
"""Bytes per second and seconds of a sync, of one process, beyond which a disk gets a note."""
STORES = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs"}


def disk_findings(name: str, place: str) -> Iterator[Finding]:
    """Yield findings on the disk of a folder that a run writes to; the folder need not exist.

    Args:
        name: printed before the findings, such as ``--save``.
        place: folder, or the URI of an object store.
    """
    scheme, separator, _ = place.partition("://")
    if separator:
        yield _store(name, place, scheme)
        return
    folder = _existing(Path(place))
    there = os.statvfs(folder)
    total, free = there.f_blocks * there.f_frsize, there.f_bavail * there.f_frsize
    kind = file_system(folder)
    facts = {"path": str(folder), "type": kind, "free": free, "bytes": total}
    sentence = f"{place} ({kind}): {format_bytes(free)} free of {format_bytes(total)}"
    little = total and free < 0.05 * total
    todo = "`du -s * | sort -n`; --keep-last N keeps N checkpoints" if little else ""
    yield Finding(GROUP, name, NOTE if little else OK, sentence, todo, facts)
    if there.f_files and there.f_favail < 0.01 * there.f_files:
        yield Finding(
            GROUP, name, BAD, f"{there.f_favail} of {there.f_files} files may still be created", "delete files"
        )
    if there.f_flag & os.ST_RDONLY or not os.access(folder, os.W_OK | os.X_OK):
        yield Finding(GROUP, name, BAD, f"{folder} cannot be written to", "choose another folder, or `chmod u+w`")
        return
    yield from _speed(name, folder)


def _speed(name: str, folder: Path) -> Iterator[Finding]:
    """Write, sync and read a file without a name in a folder."""
    block = os.urandom(1 << 16) * (BLOCK >> 16)  # a disk that compresses needs to see no zeros
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            descriptor, size = file.fileno(), 0

            def write() -> float:
                nonlocal size
                os.pwrite(descriptor, block, size % MOST)
                os.fdatasync(descriptor)
                size += BLOCK
                return BLOCK

            written, taken = repeat_for(SECONDS, write)
            pause = statistics.median(_sync(descriptor) for _ in range(SYNCS if taken < 2 * SECONDS else 1))
            read = _read(descriptor, min(size, MOST))
    except OSError as error:
        yield Finding(
            GROUP, name, BAD, f"a file in {folder} cannot be written: {error.strerror}", "free space, or another disk"
        )
        return
    rate = written / taken
    facts = {"write_bytes_per_s": rate, "read_bytes_per_s": read, "sync_s": pause}
    sentence = (
        f"one process writes {rate / 1e6:.0f} MB/s, reads {read / 1e6:.0f} MB/s, a sync takes {1000 * pause:.1f} ms"
    )
    slow = rate < SLOW_BYTES or pause > SLOW_SYNC
    todo = "--async-save, or --local-save on a disk of the node" if slow else ""
    yield Finding(GROUP, name, NOTE if slow else OK, sentence, todo, facts)


def _sync(descriptor: int) -> float:
    """Return the seconds of writing and syncing one page."""
    begun = time.perf_counter()
    os.pwrite(descriptor, b"x" * PAGE, 0)
    os.fsync(descriptor)
    return time.perf_counter() - begun


def _read(descriptor: int, size: int) -> float:
    """Return the bytes per second of reading a file from its beginning, out of the page cache where that is allowed."""
    with suppress(OSError, AttributeError):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    place = 0

    def read() -> float:
        nonlocal place
        place = place if place < size else 0
        count = len(os.pread(descriptor, BLOCK, place))
        place += BLOCK
        return count

    total, taken = repeat_for(min(SECONDS, 0.05 + size / 5e9), read)
    return total / taken


def data_findings(prefix: str) -> Iterator[Finding]:
    """Yield findings on a pair of token files: whether they can be read, and how fast."""
    name = "--data-path"
    scheme, separator, _ = prefix.partition("://")
    if separator:
        yield _store(name, prefix, scheme)
        return
    paths = [path for end in (".bin", ".idx", "") if (path := Path(f"{prefix}{end}")).is_file()]
    if not paths:
        todo = f"python tools/inspect_dataset.py {prefix}"
        yield Finding(GROUP, name, BAD, f"there is no {prefix}.bin", todo)
        return
    try:
        with paths[0].open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            rate = _read(file.fileno(), max(1, size))
    except OSError as error:
        yield Finding(GROUP, name, BAD, f"{paths[0]} cannot be read: {error.strerror}", f"ls -l {paths[0]}")
        return
    sentence = f"{paths[0].name} ({file_system(paths[0])}, {format_bytes(size)}): {rate / 1e6:.0f} MB/s"
    yield Finding(GROUP, name, OK, sentence, facts={"read_bytes_per_s": rate})


def _store(name: str, place: str, scheme: str) -> Finding:
    """Return whether the library of an object store is installed; nothing is sent."""
    library = STORES.get(scheme)
    if library is not None and installed(library) is None:
        return Finding(GROUP, name, BAD, f"{place} needs {library}, which is not installed", f"pip install {library}")
    return Finding(GROUP, name, OK, f"{place}: an object store, not measured")


def _existing(path: Path) -> Path:
    """Return a folder, or the nearest one above it that exists."""
    path = path.expanduser().absolute()
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def file_system(path: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """Return the type of the file system that a path is on, such as ``nfs4``."""
    kind, longest, place = "unknown", "", str(path.resolve())
    with suppress(OSError):
        for line in mounts.read_text().splitlines():
            _, where, type_, *_ = line.split(" ")
            where = where.replace("\\040", " ")
            if (place == where or place.startswith(where.rstrip("/") + "/")) and len(where) >= len(longest):
                kind, longest = type_, where
    return kind
