"""Text files as a stream of documents, in an order that depends only on their names."""

from __future__ import annotations

import argparse
import codecs
import glob
import json
import os
import shlex
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from megatron.data.errors import DataError

JSON_LINES = (".jsonl", ".json")
PLAIN_TEXT = (".txt",)
COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip")
UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
JSON_KINDS: dict[type, str] = {
    dict: "an object",
    list: "an array",
    str: "a string",
    int: "a number",
    float: "a number",
    bool: "a boolean",
    type(None): "null",
}


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


def add_input_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of a tool that reads text: ``input``, ``json_keys``, ``suffix``, ``exclude``."""
    read = parser.add_argument_group("input")
    read.add_argument("--input", nargs="+", required=True, metavar="PATH", help="files, quoted patterns or folders")
    read.add_argument(
        "--json-keys", nargs="+", default=["text"], metavar="KEY", help="where an object's texts are (text)"
    )
    read.add_argument(
        "--suffix",
        nargs="+",
        default=[*JSON_LINES, *PLAIN_TEXT],
        metavar=".EXT",
        help="which files to take from a folder, in the order of their paths (.jsonl .json .txt)",
    )
    read.add_argument(
        "--exclude", nargs="+", default=[], metavar="NAME", help="files and folders to pass over inside a folder"
    )


def find_files(inputs: Sequence[str], suffixes: Collection[str], exclude: Collection[str]) -> list[Path]:
    """Files named by ``inputs``: each a file, a pattern like ``data/*.jsonl``, or a folder.

    Of a folder, these are the files below it that end in one of ``suffixes``, in the order of their paths; files and
    folders called one of ``exclude`` are passed over. Patterns are sorted too.

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
        wanted = [Path(path, name) for name in names if name.endswith(suffixes) and name not in exclude]
        found += [file for file in wanted if file.is_file()]
    return sorted(found, key=lambda p: p.relative_to(folder).as_posix())


def _raise(error: OSError) -> None:
    raise error


def read_documents(file: Path, keys: Sequence[str]) -> Iterator[Document]:
    """Documents of one file: a JSON object per line of ``.jsonl`` and ``.json`` (blank lines aside), else all of it.

    Raises:
        DataError: when a line is no JSON object with text under each of ``keys``, naming file and line; when there is
            no object; when the file is compressed or binary.
    """
    if file.suffix in COMPRESSED:
        raise DataError(f"{file} is compressed", "decompress it first")
    if file.suffix in JSON_LINES:
        yield from _json_lines(file, keys)
    elif len(keys) > 1:
        raise DataError(f"{file} is one plain text, not {len(keys)} texts: {', '.join(keys)}", "--json-keys text")
    else:
        yield _plain_text(file)


def _plain_text(file: Path) -> Document:
    text = file.read_bytes()
    if text.startswith(UTF_16):
        raise DataError(f"{file} is UTF-16, not UTF-8 text", _recode(file, "UTF-16"))
    if b"\0" in text:
        seen = f"{file} is not text: byte {text.index(0):,} is NUL"
        raise DataError(seen, "remove this file", f"--exclude {shlex.quote(file.name)}")
    return Document((text,), str(file), len(text))


def _json_lines(file: Path, keys: Sequence[str]) -> Iterator[Document]:
    empty = True
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.isspace():
                continue
            source, empty = f"{file}:{number}", False
            record = _json_object(line, file, source)
            yield Document(tuple(_text(record, key, source) for key in keys), source, len(line))
    if empty:
        raise DataError(f"{file} holds no document", "remove this file", f"--exclude {shlex.quote(file.name)}")


def _json_object(line: bytes, file: Path, source: str) -> dict[str, object]:
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        encoding = "UTF-16" if line.startswith(UTF_16) else "LATIN1"
        raise DataError(f"{source} is not UTF-8 text: {error.reason}", _recode(file, encoding)) from error
    except ValueError as error:
        raise DataError(f"{source} is not JSON: {error}", "mend or remove this line") from error
    if not isinstance(record, dict):
        raise DataError(f"{source} holds {JSON_KINDS[type(record)]}, not an object", "mend or remove this line")
    return record


def not_utf8(file: Path, error: UnicodeDecodeError) -> DataError:
    """The error to raise where the bytes of a plain text are not those of UTF-8."""
    seen = f"{file} is not UTF-8 text: byte {error.start:,}: {error.reason}"
    return DataError(seen, _recode(file, "LATIN1"), f"--exclude {shlex.quote(file.name)}")


def _recode(file: Path, encoding: str) -> str:
    """The command that makes UTF-8 of a file."""
    name, new = shlex.quote(str(file)), shlex.quote(str(file.with_stem(f"{file.stem}.utf8")))
    return f"iconv -f {encoding} -t UTF-8 {name} > {new}"


def _text(record: dict[str, object], key: str, source: str) -> str:
    if key not in record:
        has = ", ".join(list(record)[:8]) or "none"
        raise DataError(f"{source} has no key '{key}'; its keys: {has}", "--json-keys KEY", "mend or remove this line")
    text = record[key]
    if not isinstance(text, str):
        raise DataError(f"{source}: '{key}' holds {JSON_KINDS[type(text)]}, not a string", "mend or remove this line")
    return text
