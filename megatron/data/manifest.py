"""Manifest of a pair of token files: ``<prefix>.manifest.json``, what was read, what was dropped, and checksums.

Its fields are described in docs/formats.md. The checksums are of blocks of `BLOCK_BYTES`, so that a block can be
checked on its own, and so that an interrupted writer continues them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

import xxhash

from megatron.config.files import parse_json, read_small
from megatron.data.errors import DataError

MANIFEST_SUFFIX, ORIGINS_SUFFIX = "manifest.json", "origins"
FORMAT, VERSION = "megatron-pretrain-data", 1
BLOCK_BYTES = 16 << 20  # of a file, under one checksum
READ_BYTES = 1 << 20
MAX_BYTES = 256 << 20  # of a manifest, the checksums of 200 TB, and of other lists of all inputs
DIGEST_BYTES = 8
DIGEST = re.compile("[0-9a-f]{16}")
COPY_AGAIN = "copy the files of the pair again"


class Writable(Protocol):
    """Anything with the method ``write`` of a binary file."""

    def write(self, content: Any, /) -> object:
        """Write all of ``content``."""


class BlockChecksums:
    """Checksums of a file, block by block, while it is written in order."""

    def __init__(self, target: Writable, digests: IO[bytes] | None = None) -> None:
        """Pass on what is written to ``target``; the checksums of complete blocks go to ``digests``, or are kept."""
        self._target, self._digests = target, digests
        self._kept: list[bytes] = []
        self._open = xxhash.xxh3_64()
        self._left = BLOCK_BYTES
        self.num_bytes = 0

    def resume(self, file: IO[bytes], num_bytes: int) -> None:
        """Continue after ``num_bytes``, of which ``file`` holds those of the open block."""
        self.num_bytes = num_bytes
        start = num_bytes - num_bytes % BLOCK_BYTES
        file.seek(start)
        while start < num_bytes:
            content = file.read(min(READ_BYTES, num_bytes - start))
            self._open.update(content)
            self._left -= len(content)
            start += len(content)

    def write(self, content: Any) -> None:
        """Write bytes."""
        self._target.write(content)
        rest = memoryview(content).cast("B")
        self.num_bytes += len(rest)
        while rest:
            piece, rest = rest[: self._left], rest[self._left :]
            self._open.update(piece)
            self._left -= len(piece)
            if not self._left:
                self._close_block()

    def _close_block(self) -> None:
        digest = self._open.digest()
        if self._digests is None:
            self._kept.append(digest)
        else:
            self._digests.write(digest)
        self._open, self._left = xxhash.xxh3_64(), BLOCK_BYTES

    def finish(self) -> FileChecksums:
        """Return the checksums of the complete file."""
        digests = self._kept
        if self._digests is not None:
            self._digests.seek(0)
            content = self._digests.read()
            digests = [content[i : i + DIGEST_BYTES] for i in range(0, len(content), DIGEST_BYTES)]
        last = [] if self._left == BLOCK_BYTES else [self._open.digest()]
        return FileChecksums(self.num_bytes, tuple(digest.hex() for digest in [*digests, *last]))


@dataclass(frozen=True)
class FileChecksums:
    """Size of a file, and the XXH3-64 of each of its blocks, as 16 hexadecimal digits."""

    bytes: int
    xxh3: Sequence[str]

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> FileChecksums:
        """Return those of a manifest; raise ValueError or TypeError if they do not cover the whole file."""
        stored, digests = values["bytes"], values["xxh3"]
        if not (
            _is_count(stored) and len(digests) == -(-stored // BLOCK_BYTES) and all(map(DIGEST.fullmatch, digests))
        ):
            raise ValueError("a file has no size, or not a checksum for each of its blocks")
        return cls(stored, digests)

    def check(self, path: Path, report: Callable[[int], None] = lambda _: None) -> None:
        """Raise DataError if a file is another one; ``report`` is called with the bytes read."""
        found = BlockChecksums(_Nowhere())
        with open(path, "rb") as file:
            while content := file.read(READ_BYTES):
                found.write(content)
                report(len(content))
        self.compare(found.finish(), path)

    def compare(self, found: FileChecksums, path: str | Path) -> None:
        """Raise DataError if the checksums that were ``found`` of a file are not these."""
        if found.bytes != self.bytes:
            raise DataError(f"{path} has {found.bytes:,} bytes, but by its manifest {self.bytes:,}", COPY_AGAIN)
        for number, (seen, expected) in enumerate(zip(found.xxh3, self.xxh3, strict=True)):
            if seen != expected:
                first = number * BLOCK_BYTES
                place = f"bytes {first:,} to {min(first + BLOCK_BYTES, self.bytes):,}"
                raise DataError(f"{path}: {place} are not those of its manifest: the checksum is wrong", COPY_AGAIN)


class _Nowhere:
    """Drops what is written."""

    def write(self, content: Any) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class DatasetManifest:
    """The manifest of a pair of token files: contents, inputs, options and checksums."""

    files: Mapping[str, FileChecksums]  # by suffix
    fingerprint: str  # `IndexedDataset.fingerprint`
    counts: Mapping[str, int]  # documents, sequences, tokens, and more of preprocessing
    facts: Mapping[str, Any] = field(default_factory=dict)  # the other fields, see docs/formats.md

    @classmethod
    def read(cls, prefix: str | Path) -> DatasetManifest | None:
        """Read ``<prefix>.manifest.json``; None if there is none.

        Raises:
            DataError: if it is damaged.
        """
        path = f"{prefix}.{MANIFEST_SUFFIX}"
        try:
            return cls.parse(read_small(path, MAX_BYTES), path)
        except FileNotFoundError:
            return None

    @classmethod
    def parse(cls, content: bytes, name: str) -> DatasetManifest:
        """Return the manifest with this content; ``name`` is used in messages."""
        try:
            fields = parse_json(content)
            if (fields.pop("format"), fields.pop("version")) != (FORMAT, VERSION):
                raise ValueError(f"it is not in version {VERSION} of the format {FORMAT}")
            files = {suffix: FileChecksums.parse(values) for suffix, values in fields.pop("files").items()}
            if not {"bin", "idx"} <= {*files} <= {"bin", "idx", ORIGINS_SUFFIX}:
                raise ValueError(f"its files are {', '.join(files)!r:.80}")
            manifest = cls(files, fields.pop("fingerprint"), fields.pop("counts"), fields)
            if wrong := [*manifest._wrong_fields()]:
                raise ValueError(f"the value of {', '.join(wrong)} is of another kind")
            return manifest
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise DataError(f"{name} is damaged: {error}", COPY_AGAIN, f"rm {name}") from error

    def _wrong_fields(self) -> Iterator[str]:
        """Yield the names of fields whose values are not what they must be."""
        if not isinstance(self.fingerprint, str):
            yield "fingerprint"
        for name, counts in (("counts", self.counts), ("dropped", self.facts.get("dropped", {}))):
            if not (isinstance(counts, dict) and all(map(_is_count, counts.values()))):
                yield name
        shard, inputs = self.facts.get("shard", [0, 1]), self.facts.get("inputs") or []
        if not (isinstance(shard, list) and len(shard) == 2 and all(map(_is_count, shard)) and shard[0] < shard[1]):
            yield "shard"
        if not (isinstance(inputs, list) and all(map(_is_input, inputs))):
            yield "inputs"

    def to_bytes(self) -> bytes:
        """Return the content of the file: a line for each field."""
        files = {suffix: vars(file) for suffix, file in self.files.items()}
        fields = {"format": FORMAT, "version": VERSION, "counts": self.counts, **self.facts}
        fields |= {"fingerprint": self.fingerprint, "files": files}
        lines = (f"{json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}" for name, value in fields.items())
        return ("{" + ",\n ".join(lines) + "}\n").encode()

    def check_files(
        self, prefix: str | Path, report: Callable[[int], None] = lambda _: None, omit: Sequence[str] = ()
    ) -> None:
        """Raise DataError if a file of the pair has another content than when it was written."""
        for suffix, file in self.files.items():
            path = Path(f"{prefix}.{suffix}")
            if suffix not in omit and (path.exists() or suffix != ORIGINS_SUFFIX):  # origins may be left behind
                file.check(path, report)


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_input(record: object) -> bool:
    """Return True for what `InputRecords.describe` yields."""
    return (
        isinstance(record, dict)
        and isinstance(record.get("file"), str)
        and _is_count(record.get("bytes"))
        and _is_count(record.get("files", 1))
        and isinstance(digest := record.get("xxh3"), str)
        and DIGEST.fullmatch(digest) is not None
    )


def recorded_fingerprint(prefix: str) -> str | None:
    """Return the fingerprint of a pair as its manifest records it; None without a manifest."""
    manifest = DatasetManifest.read(prefix)
    return None if manifest is None else manifest.fingerprint


MAX_INPUTS = 10_000  # input files listed one by one


class InputRecords:
    """Sizes and checksums of the input files, collected block by block while they are read.

    The checksum of a file is the XXH3-64 of the checksums of its blocks. Files after the first `MAX_INPUTS` are one
    record.
    """

    def __init__(self, records: Sequence[Sequence[Any]] = ()) -> None:
        """Continue ``records`` of an interrupted run."""
        self.records = [list(record) for record in records]  # [first file, number of files, bytes, checksum], in order

    def add(self, file: int, stored: int, digest: bytes) -> None:
        """Add a block of a file, which has this number; ``stored`` is its size in the file."""
        records = self.records
        last = records[-1] if records else None
        if last is not None and (last[0] + last[1] > file or len(records) >= MAX_INPUTS):
            last[1] = max(last[1], file + 1 - last[0])
            last[2] += stored
            last[3] = xxhash.xxh3_64_hexdigest(bytes.fromhex(last[3]) + digest)
        else:
            records.append([file, 1, stored, xxhash.xxh3_64_hexdigest(digest)])

    def describe(self, names: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Yield the records as a manifest holds them, with the ``names`` of the files."""
        for file, count, stored, digest in self.records:
            more = {} if count == 1 else {"files": count}
            yield {"file": names[file], **more, "bytes": stored, "xxh3": digest}


def merge_fields(manifests: Sequence[DatasetManifest | None]) -> dict[str, Any]:
    """Return the fields of a pair merged from pairs with these manifests, for `IndexedDatasetWriter`.

    Numbers that are counts are sums, inputs are listed one after the other, and other fields are kept where all parts
    agree. If nothing is known of a part, nothing is known of the whole either.
    """
    known = [manifest for manifest in manifests if manifest is not None]
    if len(known) < len(manifests):
        return {}
    facts = [manifest.facts for manifest in known]
    inputs = [each.get("inputs") for each in facts]
    together = {
        "inputs": None if None in inputs else _fold([record for each in inputs if each for record in each]),
        "dropped": dict(sorted(_sums([each.get("dropped", {}) for each in facts]).items())),
    }
    fields = {}
    for name, value in facts[0].items():
        if name in together or all(other.get(name) == value for other in facts):
            fields[name] = together.get(name, value)
    return fields | {"counts": _sums([manifest.counts for manifest in known])}


def _sums(counts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    names = dict.fromkeys(name for each in counts for name in each)
    return {name: sum(each.get(name, 0) for each in counts) for name in names}


def _fold(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the records with those after the first `MAX_INPUTS` as one."""
    kept, rest = records[:MAX_INPUTS], records[MAX_INPUTS - 1 :]
    if len(records) > MAX_INPUTS:
        digest = xxhash.xxh3_64_hexdigest(b"".join(bytes.fromhex(record["xxh3"]) for record in rest))
        files, stored = (sum(record.get(name, 1) for record in rest) for name in ("files", "bytes"))
        kept[-1] = {"file": rest[0]["file"], "files": files, "bytes": stored, "xxh3": digest}
    return kept
