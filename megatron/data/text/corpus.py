"""Text files as a stream of documents, in an order that depends only on their names."""

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
"""Suffixes of what is not unpacked here, and what to do with a file instead."""


class Document(NamedTuple):
    """One document as it was read.

    Attributes:
        texts: its text under each of the keys asked for; bytes of UTF-8 where it is a plain file.
        source: file, and line if it has one, for messages.
        num_bytes: how much of the decompressed input it took, without its line end.
    """

    texts: tuple[str | bytes, ...]
    source: str
    num_bytes: int


def add_input_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of a tool that reads text: ``input``, ``json_keys``, ``suffix``, ``exclude``, ``on_bad_line``."""
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
        help="which files to take from a folder, in the order of their paths, also if .gz, .zst, .bz2 or .xz follows "
        "(.jsonl .json .ndjson .txt)",
    )
    read.add_argument(
        "--exclude", nargs="+", default=[], metavar="NAME", help="files and folders to pass over inside a folder"
    )
    read.add_argument(
        "--on-bad-line",
        choices=("fail", "skip"),
        default="fail",
        help="at a document that is no text: end (fail), or name it, count it and go on",
    )


def find_files(inputs: Sequence[str], suffixes: Collection[str], exclude: Collection[str]) -> list[Path]:
    """Files named by ``inputs``: each a file, a pattern like ``data/*.jsonl``, or a folder.

    Of a folder, these are the files below it that end in one of ``suffixes``, in any case, compressed or not, in the
    order of their paths; files and folders called one of ``exclude`` are passed over, and so are links to files that
    are there themselves. Patterns are sorted too. What is the name of a file is no pattern.

    Raises:
        DataError: when an input gives no file, or the same documents would come twice: a folder or pattern has a file
            compressed in different ways, or a file is named twice; when a file is of a format that is not read.
    """
    files: list[Path] = []
    for name in inputs:
        found = _walk(Path(name), tuple(suffixes), exclude) if os.path.isdir(name) else _named(name)
        if not found:
            raise _nothing(name, suffixes)
        files += found
    for file in files:
        _check_format(file)
    _refuse_repeats(files)
    return files


def _named(name: str) -> list[Path]:
    """The file of this name, or those that it is a pattern for."""
    if os.path.isfile(name):
        return [Path(name)]
    found = [Path(path) for path in sorted(glob.glob(name, recursive=True)) if os.path.isfile(path)]
    _refuse_copies(found)
    return found


def _nothing(name: str, suffixes: Collection[str]) -> DataError:
    if os.path.isdir(name):
        what = f"no file below it ends in {' or '.join(suffixes)}"
    elif os.path.exists(name):
        what = "it is a pipe or a device, and the input is read more than once"
        return DataError(f"--input {name}: {what}", "write it to a file: cat ... > FILE.jsonl")
    else:
        what = "there is no such file"
    return DataError(f"--input {name}: {what}", "--input FILE.jsonl", "--input FOLDER --suffix .txt")


def _check_format(file: Path) -> None:
    suffix = file.suffix.lower()
    if suffix in ARCHIVES:
        raise DataError(f"{file}: {file.suffix} files are not read", "write its documents as lines of a .jsonl file")
    if suffix in OTHER_COMPRESSIONS:
        unpack = OTHER_COMPRESSIONS[suffix].format(shlex.quote(str(file)), shlex.quote(str(file.with_suffix(""))))
        raise DataError(f"{file}: {file.suffix} files are not read", unpack)


def _walk(folder: Path, suffixes: tuple[str, ...], exclude: Collection[str]) -> list[Path]:
    found = []
    for path, folders, names in os.walk(folder, onerror=_raise):
        folders[:] = [f for f in folders if f not in exclude]
        wanted = [Path(path, name) for name in names if name not in exclude]
        found += [file for file in wanted if _ends_in(file, suffixes) and file.is_file()]
    found = _without_links(found)
    _refuse_copies(found)
    return sorted(found, key=lambda p: p.relative_to(folder).as_posix())


def _without_links(files: Collection[Path]) -> list[Path]:
    """Every file once: under the name that is no link, else under the first."""
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
    """Refuse files that differ in their compression alone."""
    seen: dict[Path, Path] = {}
    for file in sorted(files):
        other = seen.setdefault(file.with_name(unpacked_name(file)), file)
        if other != file:
            what = f"{file} lies beside {other}: the same documents would come twice"
            raise DataError(what, f"--exclude {shlex.quote(file.name)}", "name both files with --input")


def _refuse_repeats(files: Collection[Path]) -> None:
    """Refuse a file that was given twice, by whatever names."""
    seen: dict[str, Path] = {}
    for file in files:
        other = seen.setdefault(os.path.realpath(file), file)
        if other is not file:
            what = f"{file} is given twice" if file == other else f"{file} is {other}, which is given too"
            fix = "name it once; to read a corpus more often, give it a weight: pretrain_gpt.py --data-path 2 PREFIX"
            raise DataError(f"--input: {what}: its documents would come twice", fix)


def _raise(error: OSError) -> None:
    raise error


def read_documents(
    file: Path, keys: Sequence[str], passed_over: Callable[[DataError], None] | None = None
) -> Iterator[Document]:
    """Documents of one file: a JSON object per line of ``.jsonl`` and ``.json`` (blank lines aside), else all of it.

    Args:
        file: to read.
        keys: where an object's texts are.
        passed_over: is told what is wrong with a document, which is left out then.

    Raises:
        DataError: when a line is no JSON object with text under each of ``keys``, naming file and line; when there is
            no object; when the file is damaged, binary or not UTF-8; all of it only unless ``passed_over`` is told.
            When there are several keys and one text.
    """
    documents = _documents_of_lines if holds_lines(file) else _document_of_plain
    for document in documents(file, keys):
        if isinstance(document, Document):
            yield document
        elif passed_over is None:
            raise document
        else:
            passed_over(document)


def _documents_of_lines(file: Path, keys: Sequence[str]) -> Iterator[Document | DataError]:
    """Each document, or what is wrong with it."""
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
    """Refuse several keys where there is one text.

    Raises:
        DataError: naming the keys.
    """
    if len(keys) > 1:
        raise DataError(f"{file} is one plain text, not {len(keys)} texts: {', '.join(keys)}", "--json-keys text")
