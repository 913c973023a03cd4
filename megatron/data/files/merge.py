"""Token files put end to end: the pair that one preprocessing of all their text would have written."""

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
from megatron.data.files.indexed import IndexedDataset, IndexedDatasetWriter, remove_leftovers
from megatron.data.tokenizers.record import FOLDER, RECORD, TokenizerRecord, read_record, same_ids

INDEX_BYTES = 20  # of a sequence that is a document: length, pointer and boundary


@dataclass(frozen=True)
class Part:
    """What one pair adds to the whole."""

    prefix: str
    dtype: np.dtype[Any]
    documents: int
    sequences: int
    tokens: int
    record: TokenizerRecord | None

    @classmethod
    def of(cls, prefix: str) -> Part:
        """Open a pair, check all of it but its ids, and close it again: thousands may be merged.

        Raises:
            DataError: when it is missing or damaged, or the record beside it is.
        """
        data = IndexedDataset(prefix, floats=True)
        return cls(prefix, data.dtype, len(data.documents) - 1, len(data), data.num_tokens, read_record(prefix))

    @property
    def num_bytes(self) -> int:
        """Size of ``.bin``."""
        return self.tokens * self.dtype.itemsize


def find_prefixes(inputs: Sequence[str]) -> list[str]:
    """The pairs to merge: of a folder all that lie in it, by name; anything else is a prefix itself.

    Raises:
        DataError: when a folder holds none, or traces of one that is not finished, or a pair is named twice.
    """
    prefixes = [prefix for one in inputs for prefix in (_in_folder(Path(one)) if _is_folder(one) else [one])]
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


def _is_folder(one: str) -> bool:
    """Megatron-LM keeps the cache of a pair in a folder of the pair's name: then the pair is meant."""
    return os.path.isdir(one) and not os.path.isfile(f"{one}.idx")


def _in_folder(folder: Path) -> list[str]:
    names = sorted(os.listdir(folder))
    unfinished = [name for name in names if name.endswith(".part")]
    if unfinished:
        raise DataError(
            f"{folder / unfinished[0]}: somebody still writes there, or was killed while writing",
            f"wait | rm {shlex.quote(str(folder))}/*.part",
        )
    prefixes = sorted({stem for stem, suffix in map(os.path.splitext, names) if suffix in (".bin", ".idx")})
    if not prefixes:
        raise DataError(f"{folder} holds no .bin and .idx", "--input FOLDER_OF_PAIRS | --input PREFIX PREFIX ...")
    return [str(folder / prefix) for prefix in prefixes]


def check_parts(parts: Sequence[Part]) -> None:
    """Whether the ids of all parts mean the same.

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
            said, unsaid = known[0].prefix, part.prefix
            raise DataError(
                f"{said}.{RECORD} says which tokenizer wrote {said}, and nothing says it of {unsaid}",
                f"if it was the same one: cp {shlex.quote(f'{said}.{RECORD}')} {shlex.quote(f'{unsaid}.{RECORD}')}",
            )
    for one, other in pairwise(known):
        _check_records(one, other)


def _check_records(a: Part, b: Part) -> None:
    same = same_ids(a.prefix, b.prefix)
    seen = [dict(vars(part.record)) for part in (a, b)]
    for name in ("pad", "special_ids") if same else seen[0]:
        values = [record[name] for record in seen]
        if values[0] != values[1] and _said_by_both(name, seen):
            raise DataError(
                f"{a.prefix} and {b.prefix} were written with different tokenizers: "
                f"{name} is {values[0]!s:.60} and {values[1]!s:.60}",
                "preprocess both with the same tokenizer",
            )


def _said_by_both(name: str, records: Sequence[dict[str, Any]]) -> bool:
    """Whether a field is in both records: older ones have no special ids, and nothing that came with them."""
    later = ("pad", "special_ids", "settings")
    return name not in later or all(record["special_ids"] is not None for record in records)


def check_output(inputs: Sequence[str], parts: Sequence[Part], output: str) -> None:
    """Whether the merged pair can be written there, besides its parts.

    Raises:
        DataError: when it is one of them, or would be one the next time, or the disk has no room.
    """
    if not os.path.basename(output):
        raise DataError(f"--output-prefix {output} is a folder", f"--output-prefix {output}merged")
    folder = os.path.realpath(os.path.dirname(output) or ".")
    for part in parts:
        if os.path.realpath(f"{output}.bin") == os.path.realpath(f"{part.prefix}.bin"):
            raise DataError(f"--output-prefix {output} is one of the pairs to merge", "another --output-prefix")
    for one in inputs:
        if _is_folder(one) and os.path.realpath(one) == folder:
            raise DataError(
                f"--output-prefix {output} lies in {one}, whose pairs are merged: next time it would be one of them",
                f"--output-prefix {os.path.join(os.path.dirname(folder), os.path.basename(output))}",
            )
    os.makedirs(folder, exist_ok=True)
    needed = sum(part.num_bytes + 2 * INDEX_BYTES * max(part.sequences, part.documents) for part in parts)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise DataError(f"{needed:,} bytes are needed in {folder}, which has {free:,} free", "another --output-prefix")


def merge(parts: Sequence[Part], output: str, report: Callable[[int], None] = lambda _: None) -> None:
    """Write the pair ``output``, with the record and the files of the parts' tokenizer beside it.

    Ids are copied block by block. The pair appears when it is whole, and not before.

    Args:
        parts: of one type and one tokenizer, as `check_parts` checks it.
        output: prefix of the two files.
        report: called with the number of bytes of every block of ids that was copied.

    Raises:
        DataError: when a part is no longer what it was.
        OSError: when the disk refuses; nothing is left behind then.
    """
    remove_leftovers(output)
    with IndexedDatasetWriter(output, parts[0].dtype) as writer:
        for part in parts:
            data = IndexedDataset(part.prefix, floats=True)
            if (data.dtype, data.num_tokens, len(data)) != (part.dtype, part.tokens, part.sequences):
                raise DataError(f"{part.prefix} has changed since the merge began", "merge when nobody writes it")
            writer.add_pair(f"{part.prefix}.bin", data.lengths, data.documents, report)
        writer.leave_no(RECORD)
        writer.leave_no(FOLDER)
        for suffix, content in _beside(parts).items():
            writer.add_file(suffix, content)


def _beside(parts: Sequence[Part]) -> dict[str, bytes]:
    """Record and tokenizer files of the part whose record says most, and that its texts may hold special tokens."""
    speaking = [part for part in parts if part.record is not None and part.record.special_ids is not None]
    known = speaking or [part for part in parts if part.record is not None]
    if not known:
        return {}
    prefix = max(known, key=lambda part: part.record is not None and part.record.parses_special_tokens).prefix
    folder = Path(f"{prefix}.{FOLDER}")
    files = {f"{FOLDER}/{path.name}": path.read_bytes() for path in sorted(folder.glob("*")) if path.is_file()}
    return {RECORD: Path(f"{prefix}.{RECORD}").read_bytes()} | files
