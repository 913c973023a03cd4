"""Token files in an object store as the output of a tool: ``--output-prefix s3://bucket/corpus``.

They are written to a folder on disk first, ``--staging-dir``, so that an interrupted run continues, and uploaded when
they are complete. An object appears when its upload is complete, the index last, so that no unfinished pair is read.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from megatron.checkpoint.durable_files import checksum, publish_file
from megatron.checkpoint.location import parse_location
from megatron.data.errors import DataError
from megatron.data.indexed_writer import DATASET_SUFFIXES
from megatron.data.preprocess.remote import is_uri

if TYPE_CHECKING:
    from megatron.checkpoint.object_store import RemotePath

UPLOAD_BYTES = 8 << 20


class StagedOutput:
    """A prefix in a store, and where its files are written on disk before they are uploaded."""

    def __init__(self, uri: str, folder: str | None, command: Sequence[str]) -> None:
        """Choose the place on disk; the same ``command`` has the same one, so that it continues.

        Raises:
            DataError: if there is no folder to write to, or no library for the store.
        """
        if folder is None:
            fix = "--staging-dir FOLDER_ON_A_LOCAL_DISK"
            raise DataError(f"--output-prefix {uri}: files are completed on disk before they are uploaded", fix)
        self.uri = uri
        self._folder = Path(folder, f"{PurePosixPath(uri).name}.{checksum(repr(command).encode())}")
        self.prefix = str(self._folder / PurePosixPath(uri).name)
        missing = _object(uri).missing_library()
        if missing is not None:
            raise DataError(*missing)

    def check_not_existing(self, names: Iterable[str], overwrite: bool) -> None:
        """Refuse to replace pairs of the store, unless ``overwrite``; ``names`` follow the prefix."""
        for name in names:
            if not overwrite and (index := _object(f"{self.uri}{name}.idx")).exists():
                raise DataError(f"{index} is there already", "--overwrite", "another --output-prefix")

    def is_complete(self, names: Iterable[str], source: str) -> bool:
        """Return True if all pairs lie on disk, from a run that was ended before their upload.

        ``source`` is a checksum of what they are made from. That of an incomplete run is recorded.

        Raises:
            DataError: if they are complete, but were made from something else.
        """
        record = self._folder / "source"
        if not all(Path(f"{self.prefix}{name}.idx").exists() for name in names):
            self._folder.mkdir(parents=True, exist_ok=True)
            publish_file(record, source.encode())
            return False
        if not record.exists() or record.read_text() != source:
            seen = f"{self._folder} holds complete files of an earlier run, but what they were made from has changed"
            raise DataError(seen, f"make them again: rm -r {shlex.quote(str(self._folder))}")
        return True

    def upload(self, names: Sequence[str]) -> None:
        """Upload the pairs, and remove them from the disk.

        Raises:
            DataError: if the store fails; the files stay on disk, and the same command uploads them.
        """
        try:
            for name in names:
                _object(f"{self.uri}{name}.idx").remove()  # an older index must not outlive its ids
                for suffix in _uploaded(self.prefix + name):
                    _upload(Path(f"{self.prefix}{name}.{suffix}"), _object(f"{self.uri}{name}.{suffix}"))
        except OSError as error:
            why = f"the upload of {error.filename} failed: {error.strerror}"
            raise DataError(f"{why}; the files are in {self._folder}", "the same command uploads them") from error
        shutil.rmtree(self._folder)


def add_staging_flag(add: argparse._ActionsContainer) -> None:
    """Add ``--staging-dir``."""
    help_text = "folder on a local disk, for an --output-prefix in a store: files are completed there, then uploaded"
    add.add_argument("--staging-dir", metavar="DIR", help=help_text)


def staged_output(args: argparse.Namespace, command: Sequence[str]) -> StagedOutput | None:
    """Return the output of a tool if it is in a store, and let ``args.output_prefix`` name its place on disk."""
    if not is_uri(args.output_prefix):
        return None
    staged = StagedOutput(args.output_prefix.rstrip("/"), args.staging_dir, command)
    args.output_prefix = staged.prefix
    return staged


def _object(uri: str) -> RemotePath:
    location = parse_location(uri)
    if isinstance(location, Path):
        raise DataError(f"{uri} is a path, not a URI", str(location))
    return location


def _uploaded(prefix: str) -> Iterator[str]:
    """Yield the endings of the files of a pair, that of the index last."""
    for suffix in (*(suffix for suffix in DATASET_SUFFIXES if suffix != "idx"), "idx"):
        path = Path(f"{prefix}.{suffix}")
        if path.is_dir():
            yield from (f"{suffix}/{file.name}" for file in sorted(path.iterdir()))
        elif path.exists():
            yield suffix


def _upload(path: Path, target: RemotePath) -> None:
    def once() -> None:
        with open(path, "rb") as file, target.writer() as writer:
            while content := file.read(UPLOAD_BYTES):
                writer.write(content)

    target.retry(once)
    size = target.call(lambda store, key: store.info(key)["size"])
    if size != path.stat().st_size:
        raise DataError(f"{target} has {size:,} bytes, {path} {path.stat().st_size:,}", "upload it again")
