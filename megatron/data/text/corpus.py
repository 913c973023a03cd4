"""Find text files and read their documents, in an order that depends only on the file names."""

from __future__ import annotations

import argparse
import glob
import os
import shlex
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from megatron.data.errors import DataError
from megatron.data.text.blocks import JSON_LINES, cut_lines, holds_lines, unpacked_name
from megatron.data.text.records import (
    BadDocumentError,
    check_utf8,
    no_document,
    plain_text,
    texts_of_line,
    whole_lines,
)

PLAIN_TEXT = (".txt",)
SKIP = "--on-bad-line skip"
ARCHIVES = (".zip", ".tar", ".tgz", ".7z", ".parquet", ".arrow")
OTHER_COMPRESSIONS = {".zstd": "mv {0} {1}.zst", ".z": "uncompress {0}", ".lz4": "lz4 -d {0}", ".br": "brotli -d {0}"}
"""Suffixes of unsupported compressions, and the command that decompresses such a file."""


class Document(NamedTuple):
    """Document as read from a file."""

    texts: tuple[str | bytes, ...]  # its text under each requested key; UTF-8 bytes for a plain file
    source: str  # ``file`` or ``file:line``, for messages
    num_bytes: int  # bytes of decompressed input, without the line end


def add_input_flags(parser: argparse.ArgumentParser) -> None:
    """Add the input flags of a data tool: ``input``, ``json_keys``, ``suffix``, ``exclude``, ``on_bad_line``."""
    read = parser.add_argument_group("input")
    read.add_argument("--input", nargs="+", required=True, metavar="PATH", help="files, quoted patterns or folders")
    read.add_argument(
        "--json-keys", nargs="+", default=["text"], metavar="KEY", help="keys of an object's texts (text)"
    )
    read.add_argument(
        "--suffix",
        nargs="+",
        default=[*JSON_LINES, *PLAIN_TEXT],
        metavar=".EXT",
        help="files to read from a folder, in the order of their paths, also if .gz, .zst, .bz2 or .xz follows "
        "(.jsonl .json .ndjson .txt)",
    )
    read.add_argument(
        "--exclude", nargs="+", default=[], metavar="NAME", help="files and folders to skip inside a folder"
    )
    read.add_argument(
        "--on-bad-line",
        choices=("fail", "skip"),
        default="fail",
        help="at an invalid document: stop (fail), or report it, count it and continue",
    )


def find_files(inputs: Sequence[str], suffixes: Collection[str], exclude: Collection[str]) -> list[Path]:
    """Return the files named by ``inputs``: each a file, a glob pattern like ``data/*.jsonl``, or a folder.

    A folder contributes all files below it that end in one of ``suffixes`` (ignoring case, compressed or not), sorted
    by path, without files and folders named in ``exclude`` and links to other files of it. Patterns are sorted too. An
    existing file name is never treated as a pattern.

    Raises:
        DataError: if an input matches no file, a format is not supported, or documents would be read twice because a
            file is given twice or lies beside a compressed copy of itself.
    """
    files: list[Path] = []
    for name in inputs:
        found = _walk(Path(name), tuple(suffixes), exclude) if os.path.isdir(name) else _expand(name)
        if not found:
            raise _no_files(name, suffixes)
        files += found
    for file in files:
        _check_format(file)
    _refuse_repeats(files)
    return files


def _expand(name: str) -> list[Path]:
    """Return the file of this name, or those that match it as a pattern."""
    if os.path.isfile(name):
        return [Path(name)]
    found = [Path(path) for path in sorted(glob.glob(name, recursive=True)) if os.path.isfile(path)]
    _refuse_copies(found)
    return found


def _no_files(name: str, suffixes: Collection[str]) -> DataError:
    if os.path.isdir(name):
        why = f"no file below it ends in {' or '.join(suffixes)}"
    elif os.path.exists(name):
        why = "it is a pipe or a device, and the input is read more than once"
        return DataError(f"--input {name}: {why}", "write it to a file: cat ... > FILE.jsonl")
    else:
        why = "there is no such file"
    return DataError(f"--input {name}: {why}", "--input FILE.jsonl", "--input FOLDER --suffix .txt")


def _check_format(file: Path) -> None:
    suffix = file.suffix.lower()
    if suffix in ARCHIVES:
        fix = "write its documents as lines of a .jsonl file"
        raise DataError(f"{file}: {file.suffix} files are not supported", fix)
    if suffix in OTHER_COMPRESSIONS:
        unpack = OTHER_COMPRESSIONS[suffix].format(shlex.quote(str(file)), shlex.quote(str(file.with_suffix(""))))
        raise DataError(f"{file}: {file.suffix} files are not supported", unpack)


def _walk(folder: Path, suffixes: tuple[str, ...], exclude: Collection[str]) -> list[Path]:
    def fail(error: OSError) -> None:
        raise error

    found = []
    for path, folders, names in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if name not in exclude]
        files = [Path(path, name) for name in names if name not in exclude]
        found += [file for file in files if _ends_in(file, suffixes) and file.is_file()]
    found = _without_links(found)
    _refuse_copies(found)
    return sorted(found, key=lambda file: file.relative_to(folder).as_posix())


def _without_links(files: Collection[Path]) -> list[Path]:
    """Keep each file once, preferably under a name that is not a link."""
    names: dict[str, Path] = {}
    for file in sorted(files, key=lambda file: (file.is_symlink(), file)):
        names.setdefault(os.path.realpath(file), file)
    return [*names.values()]


def _ends_in(file: Path, suffixes: tuple[str, ...]) -> bool:
    wanted = tuple(suffix.lower() for suffix in suffixes)
    names = [file.name.lower(), unpacked_name(file).lower()]
    if file.suffix.lower() in OTHER_COMPRESSIONS:
        names.append(file.stem.lower())
    return any(name.endswith(wanted) for name in names)


def _refuse_copies(files: Collection[Path]) -> None:
    """Raise DataError for files that differ only in their compression."""
    seen: dict[Path, Path] = {}
    for file in sorted(files):
        other = seen.setdefault(file.with_name(unpacked_name(file)), file)
        if other != file:
            why = f"{file} lies beside {other}: the same documents would be read twice"
            raise DataError(why, f"--exclude {shlex.quote(file.name)}", "name both files with --input")


def _refuse_repeats(files: Collection[Path]) -> None:
    """Raise DataError for a file given twice, under any names."""
    seen: dict[str, Path] = {}
    for file in files:
        other = seen.setdefault(os.path.realpath(file), file)
        if other is not file:
            why = f"{file} is given twice" if file == other else f"{file} is {other}, which is given too"
            fix = "name it once; to repeat a corpus, give it a weight: pretrain_gpt.py --data-path 2 PREFIX"
            raise DataError(f"--input: {why}: its documents would be read twice", fix)


def read_documents(
    file: Path, keys: Sequence[str], on_bad: Callable[[DataError], None] | None = None
) -> Iterator[Document]:
    """Yield the documents of a file: one per line of a JSON-lines file (except blank lines), else one.

    Args:
        file: to read.
        keys: JSON keys of the texts.
        on_bad: called with the error of each invalid document, which is skipped. By default the error is raised.

    Raises:
        DataError: if a line is not a JSON object with text under each of ``keys``, the file has no document, or it is
            damaged, binary or not UTF-8. Also if a plain file is read with several keys.
    """
    documents = _documents_of_lines if holds_lines(file) else _document_of_plain
    for document in documents(file, keys):
        if isinstance(document, Document):
            yield document
        elif on_bad is None:
            raise document
        else:
            on_bad(document)


def _documents_of_lines(file: Path, keys: Sequence[str]) -> Iterator[Document | DataError]:
    """Yield each document, or its error."""
    number = documents = 0
    for block in cut_lines(file):
        for line in whole_lines(block.read()):
            number += 1
            if line and not line.isspace():
                documents += 1
                try:
                    yield Document(texts_of_line(line, keys, file), f"{file}:{number}", len(line))
                except BadDocumentError as bad:
                    yield bad.of(f"{file}:{number}", SKIP)
        if block.trouble:
            yield DataError(f"{file}:{number + 1} {block.trouble}", "copy the file again", SKIP)
            return
    if not documents:
        yield no_document(file).of(str(file), SKIP)


def _document_of_plain(file: Path, keys: Sequence[str]) -> Iterator[Document | DataError]:
    check_plain(file, keys)
    try:
        text = plain_text(file)
        check_utf8(text, file)
        yield Document((text,), str(file), len(text))
    except BadDocumentError as bad:
        yield bad.of(str(file), SKIP)


def check_plain(file: Path, keys: Sequence[str]) -> None:
    """Raise DataError if several keys are requested of a plain file."""
    if len(keys) > 1:
        raise DataError(f"{file} is plain text without the keys {', '.join(keys)}", "--json-keys text")
