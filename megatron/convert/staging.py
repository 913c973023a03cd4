"""Staging folder of a conversion, in which a conversion that was killed continues.

A journal in it names the source, the options and the version of this program, and then every complete file with its
size and its checksums. A line is written after its file is on disk. The next conversion that begins its journal the
same keeps the files that still match their lines, and writes the others.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Lock
from types import TracebackType
from typing import Any, NamedTuple, Self

from megatron.checkpoint.durable_files import LockState, lock_holder, make_folder, sync_file, sync_folder, try_lock
from megatron.checkpoint.errors import CheckpointError, DamagedCheckpointError, StorageError
from megatron.checkpoint.format import Manifest
from megatron.checkpoint.load import CheckpointReader
from megatron.checkpoint.save import RankFile

JOURNAL = "conversion.jsonl"

ProgressCallback = Callable[[str, int, int], None]
"""Progress callback: (name of the last tensor, bytes written, bytes to write)."""


@contextmanager
def disk_errors(building: Path, flag: str = "--save-hf") -> Iterator[None]:
    """Raise StorageError for an error of the disk while ``building``, the folder of ``flag``, is written."""
    try:
        yield
    except OSError as error:
        seen = f"{error.filename or building}: {error.strerror or error}"
        raise StorageError(f"{seen}; nothing was exported", f"{flag} A_FOLDER_ELSEWHERE") from error


@contextmanager
def removed_on_error(folder: Path) -> Iterator[None]:
    """Delete a folder if the block raises, as far as the disk allows it."""
    try:
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


class ConversionProgress:
    """Counts written bytes and reports them; threads report one at a time."""

    def __init__(self, report: ProgressCallback, total: int) -> None:
        self._report, self._total, self._done = report, total, 0
        self._lock, self.stop = Lock(), Event()

    def add(self, name: str, size: int) -> None:
        """Count ``size`` bytes of a tensor; raise CancelledError once ``stop`` is set."""
        with self._lock:
            if self.stop.is_set():
                raise CancelledError
            self._done += size
            self._report(name, self._done, self._total)


class StagedFile(NamedTuple):
    """A file of a conversion."""

    bytes: int  # of its tensors
    write: Callable[[ConversionProgress], RankFile]


class StagingFolder:
    """Files of a conversion that is not published. Use as a context manager: it is locked until the block ends."""

    complete: dict[str, RankFile]  # chunks and checksums of each complete file, by its name

    def __init__(self, folder: Path, source: Mapping[str, Any]) -> None:
        """Open the folder, or create it, and delete everything that is not a complete file from the same source.

        Args:
            folder: of this conversion.
            source: all that the files depend on, as JSON.

        Raises:
            CheckpointError: if another process converts into the same folder.
        """
        self.folder = folder
        make_folder(folder)
        self._journal = (folder / JOURNAL).open("a+b")
        if try_lock(self._journal) is LockState.HELD:
            holder = lock_holder(folder / JOURNAL)
            self._journal.close()
            raise CheckpointError(f"{folder} is being written by {holder or 'another process'}; wait until it ends")
        head = json.dumps(source, sort_keys=True).encode()
        self._journal.seek(0)
        first, *lines = self._journal.read().split(b"\n")
        read = [self._parse(line) for line in lines[:-1]] if first == head else []  # the last line may be incomplete
        self.complete = {name: file for file in read if file is not None for name in file.files}
        self.kept = len(self.complete)  # files of an earlier conversion
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name not in (*self.complete, JOURNAL):
                path.unlink()
        self._journal.truncate(0)
        self._journal.write(head + b"\n")
        for file in self.complete.values():
            self._append(file)

    def _parse(self, line: bytes) -> RankFile | None:
        """Return the file that a line of the journal describes, or None if it is not there as described."""
        with suppress(ValueError, KeyError, TypeError, AttributeError, DamagedCheckpointError):
            file = RankFile.from_json(json.loads(line))
            manifest = Manifest(self.folder, 0, {}, file.files, {}, {})
            manifest.check_files()
            reader = CheckpointReader(manifest)
            for name in file.files:
                reader.verify_head(name)
            for tensor, record in file.tensors.items():
                for chunk in record.chunks:
                    reader.verify(tensor, chunk)
            return file
        return None

    def _append(self, file: RankFile) -> None:
        self._journal.write(json.dumps(file.to_json()).encode() + b"\n")
        sync_file(self._journal)

    def write(self, files: Mapping[str, StagedFile], workers: int, report: ProgressCallback) -> list[RankFile]:
        """Write the files that are not complete, in up to ``workers`` threads; return all in their order."""
        missing = [file for name, file in files.items() if name not in self.complete]
        progress = ConversionProgress(report, sum(file.bytes for file in missing))
        if workers == 1:
            for file in missing:
                self._finish(file.write(progress))
        else:
            with ThreadPoolExecutor(workers) as pool:
                try:
                    for future in as_completed([pool.submit(file.write, progress) for file in missing]):
                        self._finish(future.result())
                except BaseException:
                    progress.stop.set()
                    pool.shutdown(wait=False, cancel_futures=True)
                    raise
        return [self.complete[name] for name in files]

    def _finish(self, file: RankFile) -> None:
        sync_folder(self.folder)
        self.complete |= dict.fromkeys(file.files, file)
        self._append(file)

    def close_journal(self) -> None:
        """Remove the journal: the folder is complete."""
        os.unlink(self.folder / JOURNAL)
        sync_folder(self.folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._journal.close()
