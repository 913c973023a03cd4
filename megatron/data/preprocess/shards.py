"""Parts of a corpus that are preprocessed apart: ``--shard i/n``.

The stored bytes of all files, one after the other, are cut into ``n`` equal ranges, and a document belongs to the shard
in whose range it begins. Of compressed files and tables, whole blocks of about 2 MiB of text take the place of
documents. Shards merged in order give the token files of the whole corpus.
"""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from collections.abc import Sequence
from typing import NamedTuple

from megatron.data.preprocess.files import is_plain
from megatron.data.preprocess.remote import InputFile


class Shard(NamedTuple):
    """One of several parts of a corpus."""

    number: int  # from 0 on
    of: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Parse ``i/n``.

        Raises:
            ArgumentTypeError: if it is not a shard.
        """
        match = re.fullmatch(r"(\d+)/(\d+)", text)
        if match is None or not int(match[1]) < int(match[2]):
            raise ArgumentTypeError(f"{text}: n shards are numbered 0/n to (n-1)/n, as by sbatch --array=0-15")
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"


class FilesPart(NamedTuple):
    """Files of a shard."""

    files: list[InputFile]
    start: int  # byte of the first file before which documents belong to earlier shards
    stop: int | None  # byte of the last file from which on they belong to later ones; None for none


def select_part(files: Sequence[InputFile], sizes: Sequence[int], shard: Shard) -> FilesPart:
    """Return the files of a shard; ``sizes`` are their bytes."""
    total = sum(sizes)
    begin, end = (total * number // shard.of for number in (shard.number, shard.number + 1))
    is_last = shard.number == shard.of - 1
    found: list[InputFile] = []
    start, stop, offset = 0, None, 0
    for file, size in zip(files, sizes):
        starts_here = begin <= offset and (offset < end or is_last)
        if starts_here or (not is_plain(file) and offset < end and begin < offset + size):
            if not found:
                start = max(0, begin - offset)
            found.append(file)
            stop = end - offset if not is_plain(file) and not is_last and end < offset + size else None
        offset += size
    return FilesPart(found, start, stop)
