"""Merge token files: the result is the pair that one preprocessing of all their text would have written."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from megatron.data.errors import DataError
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.indexed_writer import IndexedDatasetWriter, remove_unfinished_files
from megatron.data.tokenizers.tokenizer import (
    FILES_SUFFIX,
    RECORD_SUFFIX,
    TokenizerRecord,
    have_same_ids,
    read_tokenizer_record,
)

INDEX_ENTRY_BYTES = 20  # index entry of a document of one sequence: length, pointer and boundary


@dataclass(frozen=True)
class MergeInput:
    """One pair to merge."""

    prefix: str
    dtype: np.dtype[Any]
    documents: int
    sequences: int
    tokens: int
    record: TokenizerRecord | None

    @classmethod
    def of(cls, prefix: str) -> MergeInput:
        """Open a pair, check everything but its ids, and close it again: thousands may be merged.

        Raises:
            DataError: when the pair or its record is missing or damaged.
        """
        data = IndexedDataset(prefix, floats=True)
        return cls(
            prefix, data.dtype, len(data.documents) - 1, len(data), data.num_tokens, read_tokenizer_record(prefix)
        )

    @property
    def num_bytes(self) -> int:
        """Size of ``.bin``."""
        return self.tokens * self.dtype.itemsize


def find_prefixes(inputs: Sequence[str]) -> list[str]:
    """Return the pairs to merge: of a folder all pairs in it, by name; anything else is itself a prefix.

    Raises:
        DataError: when a folder holds no pair or an unfinished one, or a pair is named twice.
    """
    prefixes = [p for path in inputs for p in (_prefixes_in(Path(path)) if _is_folder(path) else [path])]
    seen: dict[str, str] = {}
    for prefix in prefixes:
        path = os.path.realpath(f"{prefix}.bin")
        if path in seen:
            raise DataError(
                f"{prefix} is named twice, also as {seen[path]}; to read a corpus more often, give it a weight",
                f"pretrain_gpt.py --data-path 2 {prefix} 1 OTHER",
            )
        seen[path] = prefix
    return prefixes


def _is_folder(path: str) -> bool:
    """Return True for a folder of pairs. Megatron-LM's cache folder has the name of its pair, which then is meant."""
    return os.path.isdir(path) and not os.path.isfile(f"{path}.idx")


def _prefixes_in(folder: Path) -> list[str]:
    names = sorted(os.listdir(folder))
    unfinished = [name for name in names if name.endswith(".part")]
    if unfinished:
        raise DataError(
            f"{folder / unfinished[0]}: another process is writing it, or was killed while writing",
            f"wait | rm {shlex.quote(str(folder))}/*.part",
        )
    prefixes = sorted({stem for stem, suffix in map(os.path.splitext, names) if suffix in (".bin", ".idx")})
    if not prefixes:
        raise DataError(f"{folder} holds no .bin and .idx", "--input FOLDER_OF_PAIRS | --input PREFIX PREFIX ...")
    return [str(folder / prefix) for prefix in prefixes]


def check_compatible(parts: Sequence[MergeInput]) -> None:
    """Check that ids mean the same in all parts.

    Raises:
        DataError: when two have different types or tokenizers; it names both.
    """
    for a, b in pairwise(parts):
        if a.dtype != b.dtype:
            raise DataError(
                f"{a.prefix} holds {a.dtype}, {b.prefix} {b.dtype}: one pair has one type",
                "preprocess both with the same tokenizer",
                f"leave them apart: pretrain_gpt.py --data-path {a.prefix} {b.prefix}",
            )
    known = [part for part in parts if part.record is not None]
    for part in parts if known else ():
        if part.record is None:
            recorded, unrecorded = f"{known[0].prefix}.{RECORD_SUFFIX}", f"{part.prefix}.{RECORD_SUFFIX}"
            raise DataError(
                f"{recorded} names the tokenizer of {known[0].prefix}, but {part.prefix} has no such record",
                f"if it was the same one: cp {shlex.quote(recorded)} {shlex.quote(unrecorded)}",
            )
    for a, b in pairwise(known):
        _check_records(a, b)


def _check_records(a: MergeInput, b: MergeInput) -> None:
    records = [dict(vars(part.record)) for part in (a, b)]
    for name in ("pad", "special_ids") if have_same_ids(a.prefix, b.prefix) else records[0]:
        values = [record[name] for record in records]
        if values[0] != values[1] and _in_both(name, records):
            raise DataError(
                f"{a.prefix} and {b.prefix} were written with different tokenizers: "
                f"{name} is {values[0]!s:.60} and {values[1]!s:.60}",
                "preprocess both with the same tokenizer",
            )


def _in_both(name: str, records: Sequence[dict[str, Any]]) -> bool:
    """Return True if both records have the field: older ones lack special ids and the fields added with them."""
    later = ("pad", "special_ids", "settings")
    return name not in later or all(record["special_ids"] is not None for record in records)


def check_output(inputs: Sequence[str], parts: Sequence[MergeInput], output: str) -> None:
    """Check that the merged pair can be written beside its parts.

    Raises:
        DataError: when it is one of them, or would be one in the next merge, or the disk has too little space.
    """
    if not os.path.basename(output):
        raise DataError(f"--output-prefix {output} is a folder", f"--output-prefix {output}merged")
    folder = os.path.realpath(os.path.dirname(output) or ".")
    for part in parts:
        if os.path.realpath(f"{output}.bin") == os.path.realpath(f"{part.prefix}.bin"):
            raise DataError(f"--output-prefix {output} is one of the pairs to merge", "another --output-prefix")
    for path in inputs:
        if _is_folder(path) and os.path.realpath(path) == folder:
            raise DataError(
                f"--output-prefix {output} lies in {path}, whose pairs are merged: the next merge would include it",
                f"--output-prefix {os.path.join(os.path.dirname(folder), os.path.basename(output))}",
            )
    os.makedirs(folder, exist_ok=True)
    needed = sum(part.num_bytes + 2 * INDEX_ENTRY_BYTES * max(part.sequences, part.documents) for part in parts)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise DataError(f"{needed:,} bytes are needed in {folder}, which has {free:,} free", "another --output-prefix")


def merge_datasets(parts: Sequence[MergeInput], output: str, report: Callable[[int], None] = lambda _: None) -> None:
    """Write the pair ``output``, with the tokenizer record and files of its parts.

    Ids are copied block by block. The pair is published when it is complete.

    Args:
        parts: pairs that passed `check_compatible`.
        output: prefix of the two files.
        report: called with the size in bytes of every block copied.

    Raises:
        DataError: when a part has changed since it was checked.
        OSError: when the disk refuses; nothing is left behind then.
    """
    remove_unfinished_files(output)
    with IndexedDatasetWriter(output, parts[0].dtype) as writer:
        for part in parts:
            data = IndexedDataset(part.prefix, floats=True)
            if (data.dtype, data.num_tokens, len(data)) != (part.dtype, part.tokens, part.sequences):
                raise DataError(
                    f"{part.prefix} has changed since the merge began", "merge again after all writers have finished"
                )
            writer.add_pair(f"{part.prefix}.bin", data.lengths, data.documents, report)
        writer.remove_on_publish(RECORD_SUFFIX)
        writer.remove_on_publish(FILES_SUFFIX)
        for suffix, content in _tokenizer_files(parts).items():
            writer.add_file(suffix, content)


def _tokenizer_files(parts: Sequence[MergeInput]) -> dict[str, bytes]:
    """Read the record and tokenizer files of the part with the most complete record."""
    complete = [part for part in parts if part.record is not None and part.record.special_ids is not None]
    known = complete or [part for part in parts if part.record is not None]
    if not known:
        return {}
    prefix = max(known, key=lambda part: part.record is not None and part.record.parses_special_tokens).prefix
    folder = Path(f"{prefix}.{FILES_SUFFIX}")
    files = {f"{FILES_SUFFIX}/{path.name}": path.read_bytes() for path in sorted(folder.glob("*")) if path.is_file()}
    return {RECORD_SUFFIX: Path(f"{prefix}.{RECORD_SUFFIX}").read_bytes()} | files
