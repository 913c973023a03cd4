"""Text files as a stream of documents, in an order that depends only on their names."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from megatron.data.errors import DataError

JSON_LINES = (".jsonl", ".json")
PLAIN_TEXT = (".txt",)
COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip")


class Document(NamedTuple):
    """One document as it was read.

    Attributes:
        texts: its text under each of the keys asked for; bytes where nothing said how they are encoded.
        source: file, and line if it has one, for messages.
        num_bytes: how much of the input it took.
    """

    texts: tuple[str | bytes, ...]
    source: str
    num_bytes: int


def find_files(inputs: Sequence[str], suffixes: Collection[str], exclude: Collection[str]) -> list[Path]:
    """Files named by ``inputs``: each a file, a pattern like ``data/*.jsonl``, or a folder.

    Of a folder, these are the files below it that end in one of ``suffixes``, in the order of their paths; folders
    called one of ``exclude`` are passed over. Patterns are sorted too.

    Raises:
        DataError: when an input gives no file.
    """
    files: list[Path] = []
    for name in inputs:
        if os.path.isdir(name):
            found = _walk(Path(name), tuple(suffixes), exclude)
        else:
            found = [Path(p) for p in (sorted(glob.glob(name, recursive=True)) or [name]) if os.path.isfile(p)]
        if not found:
            what = (
                f"no file below it ends in {' or '.join(suffixes)}" if os.path.isdir(name) else "there is no such file"
            )
            raise DataError(f"--input {name}: {what}", "--input FILE.jsonl", "--input FOLDER --suffix .txt")
        files += found
    return files


def _walk(folder: Path, suffixes: tuple[str, ...], exclude: Collection[str]) -> list[Path]:
    found = []
    for path, folders, names in os.walk(folder, onerror=_raise):
        folders[:] = [f for f in folders if f not in exclude]
        found += [Path(path, n) for n in names if n.endswith(suffixes) and os.path.isfile(os.path.join(path, n))]
    return sorted(found, key=lambda p: p.relative_to(folder).as_posix())


def _raise(error: OSError) -> None:
    raise error


def read_documents(file: Path, keys: Sequence[str]) -> Iterator[Document]:
    """Documents of one file: a JSON object per line of ``.jsonl`` and ``.json``, else the whole file.

    Raises:
        DataError: when a line is no JSON object with text under each of ``keys``, naming file and line.
    """
    if file.suffix in COMPRESSED:
        raise DataError(f"{file} is compressed", "decompress it first")
    if file.suffix in JSON_LINES:
        yield from _json_lines(file, keys)
    elif len(keys) > 1:
        raise DataError(f"{file} is one plain text, not {len(keys)} texts: {', '.join(keys)}", "--json-keys text")
    else:
        text = file.read_bytes()
        yield Document((text,), str(file), len(text))


def _json_lines(file: Path, keys: Sequence[str]) -> Iterator[Document]:
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, 1):
            source = f"{file}:{number}"
            try:
                record = json.loads(line)
            except ValueError as error:
                raise DataError(f"{source} is not JSON: {error}", "mend or remove this line") from error
            yield Document(tuple(_text(record, key, source) for key in keys), source, len(line))


def _text(record: object, key: str, source: str) -> str:
    if not isinstance(record, dict):
        raise DataError(f"{source} holds a JSON {type(record).__name__}, not an object", "mend or remove this line")
    if key not in record:
        has = ", ".join(list(record)[:8]) or "none"
        raise DataError(f"{source} has no key '{key}'; its keys: {has}", "--json-keys KEY", "mend or remove this line")
    if not isinstance(record[key], str):
        raise DataError(f"{source}: '{key}' holds a {type(record[key]).__name__}, not text", "mend or remove this line")
    return str(record[key])
