"""Find text files and read their documents, in an order that depends only on the file names.

`find_text_files` expands files, patterns, folders and datasets, and rejects what would be read twice. A file of JSON
lines holds one document per line, a table one per row; any other file is one document. Compressed files are
decompressed as streams. `spool_pipes` copies standard input and pipes to files first.
`split_into_blocks` cuts files into blocks of whole lines or rows, or of plain files, that a worker encodes at once; the
block size changes neither the documents nor their order. `read_block` yields the documents of a block, and a
`BadDocument` for each invalid one.
"""

from __future__ import annotations

import argparse
import codecs
import glob
import io
import json
import math
import os
import re
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import IO, Any, NamedTuple

import xxhash

from megatron.checkpoint.durable_files import LockState, try_lock
from megatron.config.files import FOLLOW_LINKS, OUTSIDE, add_links_flag, readable_files, walk_folders
from megatron.config.text import echo, listed
from megatron.data.errors import DataError
from megatron.data.preprocess.streams import (
    READ_BYTES,
    PieceReader,
    compression_suffix,
    decompress,
    holds_values,
    json_values,
    read_pieces,
    recode_fix,
)
from megatron.data.preprocess.tables import (
    TABLE_SUFFIXES,
    Row,
    UnreadableTableError,
    hugging_face_files,
    parse_rows,
    read_batches,
    saved_dataset_files,
)

UTF_16_BOMS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
JSON_TYPE_NAMES: dict[type, str] = {
    dict: "an object",
    list: "an array",
    str: "a string",
    int: "a number",
    float: "a number",
    bool: "a boolean",
    type(None): "null",
}
ESCAPED_NUL = b"\\u0000"  # as escaped in JSON
FIX_LINE = "fix or remove this document"


class BadDocumentError(DataError):
    """Problem of a document, without the name of its file and line: `seen` is a sentence without its subject."""


class TextDocument(NamedTuple):
    """Document as read from a file."""

    texts: tuple[str | bytes, ...]  # its text under each requested key; UTF-8 bytes for a plain file
    place: tuple[Path, int]  # file, and line within the block or file from 1 on; line 0 for a plain file
    num_bytes: int  # bytes of decompressed input, without the line end


class BadDocument(NamedTuple):
    """Invalid document of a block."""

    file: Path
    line: int  # or row; from 1 on, within the block; 0 for a plain file
    seen: str  # a sentence without its subject
    fixes: tuple[str, ...]
    num_bytes: int = 0
    rest: bool = False  # whether the rest of the file cannot be read either

    def of(self, lines_before: int, *more_fixes: str) -> DataError:
        """Return the error, with the line number in the file after ``lines_before`` lines in earlier blocks."""
        source = f"{self.file}:{lines_before + self.line}" if self.line else str(self.file)
        return DataError(source + self.seen, *self.fixes, *more_fixes)


def parse_line(line: bytes, keys: Sequence[str], file: Path) -> tuple[str, ...]:
    """Return the texts under ``keys`` of a JSON line; ``file`` is used in messages.

    Raises:
        BadDocumentError: if it is not a JSON object in UTF-8 with Unicode text under each key.
    """
    record = parse_record(line, file)
    return tuple([text_of(record, key) for key in keys])


def parse_record(line: bytes, file: Path) -> dict[str, Any]:
    """Return the JSON object in a line; ``file`` is used in messages.

    Raises:
        BadDocumentError: if it is not a JSON object in UTF-8.
    """
    try:
        record = _reader()(line)
    except (ValueError, RecursionError):
        record = _read_slowly(line, file)
    if not isinstance(record, dict):
        hint = (f"jq -c '.[]' {shlex.quote(str(file))} > lines.jsonl",) if isinstance(record, list) else ()
        raise BadDocumentError(f" is {JSON_TYPE_NAMES[type(record)]}, not an object", FIX_LINE, *hint)
    return record


def parse_row(row: Row, keys: Sequence[str]) -> tuple[str, ...]:
    """Return the texts under ``keys`` of a table's row; raise BadDocumentError if one is null or not Unicode text."""
    try:
        record = {key: text if text is None else text.decode() for key, text in row.items()}
    except UnicodeDecodeError as error:
        raise BadDocumentError(f" is not UTF-8 text: {error.reason}", "fix or remove this row") from error
    return tuple([text_of(record, key) for key in keys])


def parse_valid_lines(content: bytes, keys: Sequence[str]) -> list[list[bytes]] | None:
    """Return for each key the texts of all lines, in UTF-8: a fast path for blocks without special cases.

    None if a line is blank or may be invalid; `parse_line` then decides.
    """
    if ESCAPED_NUL in content:
        return None
    try:
        records: list[Any] = list(map(_reader(), split_lines(content)))
        return [[record[key].encode() for record in records] for key in keys]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


@cache
def _reader() -> Callable[[bytes], object]:
    """Return the fastest JSON parser. Lines it rejects are parsed again by `_read_slowly`, which explains the error."""
    try:
        import orjson
    except ImportError:
        return lambda line: json.loads(line.decode())
    return orjson.loads


def _read_slowly(line: bytes, file: Path) -> object:
    try:
        return json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        encoding = "UTF-16" if line.startswith(UTF_16_BOMS) else "LATIN1"
        raise BadDocumentError(f" is not UTF-8 text: {error.reason}", recode_fix(file, encoding)) from error
    except RecursionError as error:
        raise BadDocumentError(" is nested too deeply", FIX_LINE) from error
    except ValueError as error:
        raise BadDocumentError(f" is not JSON: {error}", FIX_LINE) from error


def text_of(record: Mapping[str, object], key: str) -> str:
    """Return the text under a key; raise BadDocumentError if there is none, or it is not Unicode."""
    text = record.get(key)
    if not isinstance(text, str):
        if key not in record:
            has = ", ".join(list(record)[:8]) or "none"
            raise BadDocumentError(f" has no key '{key}'; its keys: {has}", "--json-keys KEY", FIX_LINE)
        raise BadDocumentError(f": '{key}' is {JSON_TYPE_NAMES[type(text)]}, not a string", FIX_LINE)
    if "\0" in text:
        raise BadDocumentError(f": '{key}' is not text: character {text.index(chr(0)):,} is NUL", FIX_LINE)
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            seen = f": '{key}' is not Unicode: character {error.start:,} is an unpaired surrogate"
            raise BadDocumentError(seen, FIX_LINE) from error
    return text


def split_lines(content: bytes) -> list[bytes]:
    """Split a block into lines; text after the last line end counts as a line unless empty."""
    lines = content.split(b"\n")
    if not lines[-1]:
        lines.pop()
    return lines


def _read_plain_text(file: Path, block: FileBlock, check_utf8: bool) -> bytes:
    """Return the content of a plain file; raise BadDocumentError if it is damaged, too large, or not text."""
    max_bytes, exclude = block.max_bytes, f"--exclude {shlex.quote(file.name)}"
    with open(file, "rb") as stream:
        if compression_suffix(file):
            text = PieceReader(decompress(file, stream))
            content = io.BufferedReader(text).read(max_bytes + 1)
            if text.damage is not None:
                raise BadDocumentError(f" {text.damage}", "copy it again", exclude) from text.damage
            fits = len(content) <= max_bytes
        else:
            fits = block.stored <= max_bytes or os.fstat(stream.fileno()).st_size <= max_bytes
            content = stream.read() if fits else b""
    if not fits:
        raise BadDocumentError(*_too_long(max_bytes), exclude)
    if content.startswith(UTF_16_BOMS):
        raise BadDocumentError(" is UTF-16, not UTF-8 text", recode_fix(file, "UTF-16"))
    if b"\0" in content:
        seen = f" is not text: byte {content.index(0):,} is NUL"
        raise BadDocumentError(seen, "remove this file", exclude)
    try:
        if check_utf8:
            content.decode()
    except UnicodeDecodeError as error:
        seen = f" is not UTF-8 text: byte {error.start:,}: {error.reason}"
        raise BadDocumentError(seen, recode_fix(file, "LATIN1"), exclude) from error
    return content


UNFINISHED = ".part"  # ends the names of files that are written, which a folder does not contribute
JSON_LINES_SUFFIXES = (".jsonl", ".json", ".ndjson")
BLOCK_BYTES = 2 << 20
MAX_LINE_BYTES = 1 << 27  # default of --max-line-bytes


class LineBlock(NamedTuple):
    """Whole lines of a JSON-lines file, or rows of a table; or, without content, one line that is too long."""

    file: Path
    content: bytes | range  # the lines or rows, or the byte range of the file that holds them
    stored: int  # bytes they take in the file, compressed if it is
    first: bool  # whether the file begins with them
    last: bool  # whether the file ends with them
    # why the line, or after the last block the rest of the file, cannot be read, and fixes; empty if it can
    damage: tuple[str, ...] = ()

    def read(self) -> bytes:
        """Return the lines; raise DataError if the file has become shorter."""
        if isinstance(self.content, bytes):
            return self.content
        with open(self.file, "rb") as stream:
            stream.seek(self.content.start)
            content = stream.read(len(self.content))
        if len(content) != len(self.content):
            raise DataError(f"{self.file} became shorter while it was read", "rerun when no process is writing it")
        return content


class FileBlock(NamedTuple):
    """Plain files, one document each."""

    files: tuple[Path, ...]
    stored: int  # total size, compressed if they are
    max_bytes: int = MAX_LINE_BYTES  # of the text of a file


Block = LineBlock | FileBlock


def is_table(file: Path) -> bool:
    """Return True if the name is that of a Parquet or Arrow file, ignoring case."""
    return file.name.lower().endswith(TABLE_SUFFIXES)


def is_plain(file: Path) -> bool:
    """Return True for a file that is one document: no table, and no JSON lines, ignoring case and compression."""
    name = uncompressed_name(file).lower().removesuffix(UNFINISHED)
    return not name.endswith(JSON_LINES_SUFFIXES) and not is_table(file)


def uncompressed_name(file: Path) -> str:
    """Return the file name without the suffix of its compression."""
    return file.name[: len(file.name) - len(compression_suffix(file))]


def split_into_blocks(
    files: Sequence[Path], keys: Sequence[str], block_bytes: int = BLOCK_BYTES, max_line_bytes: int = MAX_LINE_BYTES
) -> Iterator[Block]:
    """Yield blocks of about ``block_bytes`` of text in the order of the files; a longer line makes a larger block.

    Of tables only the columns ``keys`` are read. Lines, rows and plain files over ``max_line_bytes`` are invalid.
    """
    plain: list[Path] = []
    size = 0
    for file in files:
        if is_plain(file):
            plain.append(file)
            size += file.stat().st_size
        if plain and (size >= block_bytes or not is_plain(file)):
            yield FileBlock(tuple(plain), size, max_line_bytes)
            plain, size = [], 0
        if is_table(file):
            yield from _cut_table(file, keys, block_bytes, max_line_bytes)
        elif not is_plain(file):
            yield from split_lines_file(file, block_bytes, max_line_bytes)
    if plain:
        yield FileBlock(tuple(plain), size, max_line_bytes)


def split_lines_file(
    file: Path, block_bytes: int = BLOCK_BYTES, max_line_bytes: int = MAX_LINE_BYTES
) -> Iterator[LineBlock]:
    """Yield the blocks of one JSON-lines file, at least one. Memory use is bounded however long a line is.

    A file that is a JSON array, or objects over several lines, has a line for each value.
    """
    head_bytes = min(block_bytes, max_line_bytes) - 1  # before the end of the last line: only that line can be too long
    if (has_values := holds_values(file)) or compression_suffix(file):
        return _cut_stream(file, has_values, head_bytes, max_line_bytes)
    return _cut_stored(file, head_bytes, max_line_bytes)


def _cut_stored(file: Path, head_bytes: int, max_line_bytes: int) -> Iterator[LineBlock]:
    """Cut a file that is read as it is: only ends of lines are read here, the rest by workers at the same time."""
    size, start = file.stat().st_size, 0
    with open(file, "rb") as stream:
        while True:
            stream.seek(start + head_bytes)
            part = _skip_line(stream, max_line_bytes)
            good = end = min(stream.tell(), size)
            if end - start > max_line_bytes:
                stream.seek(start)
                line = start + stream.read(head_bytes).rfind(b"\n") + 1
                good = line if end - line - part.endswith(b"\n") > max_line_bytes else end
                stream.seek(end)
            if good > start or end == start:
                yield LineBlock(file, range(start, good), good - start, start == 0, last=good == size)
            if good < end:
                if not part.endswith(b"\n"):
                    _skip_line(stream)
                start = stream.tell()
                yield LineBlock(file, b"", start - good, good == 0, last=False, damage=_too_long(max_line_bytes))
            elif end == size:
                return
            else:
                start = end


def _skip_line(stream: IO[bytes], limit: float = math.inf) -> bytes:
    """Read the rest of a line, or more than ``limit`` bytes of it, in parts; return the last part."""
    part = b" "
    while part[-1:] not in (b"\n", b"") and limit >= 0:
        part = stream.readline(READ_BYTES)
        limit -= len(part)
    return part


def _cut_stream(file: Path, has_values: bool, head_bytes: int, max_line_bytes: int) -> Iterator[LineBlock]:
    """Cut a file that is decompressed, or whose values become lines."""
    size, done, first, last = file.stat().st_size, 0, True, False
    with open(file, "rb") as stream:
        pieces = read_pieces(file, stream)
        raw = PieceReader(json_values(file, pieces, max_line_bytes) if has_values else pieces)
        text = io.BufferedReader(raw, READ_BYTES)
        while not last:
            head = text.read(head_bytes)
            whole = head.rfind(b"\n") + 1
            tail = text.readline(max_line_bytes + 2 - len(head[whole:]))
            content = head + tail
            is_long = len(content) - whole - tail.endswith(b"\n") > max_line_bytes
            last = not is_long and not text.peek(1)
            is_cut = last and raw.damage is not None and not content.endswith(b"\n")
            if is_long or is_cut:
                content = head[:whole]
            if content or not is_long:
                end = size if last else stream.tell()
                damage = () if raw.damage is None or not last else (f" {raw.damage}", *raw.damage.fixes)
                yield LineBlock(file, content, end - done, first, last, damage)
                done, first = end, False
            if is_long:
                if not tail.endswith(b"\n"):
                    _skip_line(text)
                end = stream.tell()
                yield LineBlock(file, b"", end - done, first, last=False, damage=_too_long(max_line_bytes))
                done, first = end, False


def _too_long(max_bytes: int) -> tuple[str, ...]:
    return f" is longer than {max_bytes:,} bytes", f"--max-line-bytes {2 * max_bytes}", FIX_LINE


def _cut_table(file: Path, keys: Sequence[str], block_bytes: int, max_row_bytes: int) -> Iterator[LineBlock]:
    """Yield the blocks of a table; the last one has no rows."""
    done = 0  # bytes of the file
    first = True
    damage: tuple[str, ...] = ()
    try:
        for content, end in read_batches(file, keys, min(block_bytes, max_row_bytes), max_row_bytes):
            why = _too_long(max_row_bytes) if content is None else ()
            yield LineBlock(file, content or b"", end - done, first, last=False, damage=why)
            done, first = end, False
    except UnreadableTableError as error:
        damage = (error.seen, *error.fixes)
    yield LineBlock(file, b"", file.stat().st_size - done, first, last=True, damage=damage)


SKIP_BAD_FLAG = "--on-bad-line skip"
MAX_REPORTED = 20  # bad documents reported one by one; the others are only counted
UNSUPPORTED_FORMATS = (".zip", ".tar", ".tgz", ".7z")
UNSUPPORTED_COMPRESSIONS = {
    ".zstd": "mv {0} {1}.zst",
    ".z": "uncompress {0}",
    ".lz4": "lz4 -d {0}",
    ".br": "brotli -d {0}",
}
"""Suffixes of unsupported compressions, and the command that decompresses such a file."""


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(text)


def add_input_flags(parser: argparse.ArgumentParser) -> None:
    """Add the input flags of a data tool: ``input``, ``json_keys``, ``suffix``, ``exclude`` and more."""
    add = parser.add_argument_group("input").add_argument
    folder_files = "files to read from a folder, in the order of their paths, also if .gz, .zst, .bz2 or .xz follows"
    suffixes = [*JSON_LINES_SUFFIXES, *TABLE_SUFFIXES, ".txt"]
    inputs = (
        "files, quoted patterns, folders, datasets of the hub hf:NAME[:CONFIG][:SPLIT], standard input (-) or pipes"
    )
    keys = "keys of an object's texts, or columns of a table (text)"
    longest = f"longest line or plain file, in bytes; a longer one is an invalid document ({MAX_LINE_BYTES:,})"
    bad_lines = "at an invalid document: stop (fail), or report it, count it and continue"
    add("--input", nargs="+", required=True, metavar="PATH", help=inputs)
    add("--json-keys", nargs="+", default=["text"], metavar="KEY", help=keys)
    add("--suffix", nargs="+", default=suffixes, metavar=".EXT", help=f"{folder_files} ({' '.join(suffixes)})")
    add("--exclude", nargs="+", default=[], metavar="NAME", help="files and folders to skip inside a folder")
    add("--max-line-bytes", type=_positive, default=MAX_LINE_BYTES, metavar="N", help=longest)
    add("--on-bad-line", choices=("fail", "skip"), default="fail", help=bad_lines)
    add_links_flag(parser)


@contextmanager
def spool_pipes(inputs: Sequence[str], output: str) -> Iterator[list[str]]:
    """Replace standard input (``-``) and pipes among ``inputs`` by copies beside ``output``, removed at the end.

    The copies are JSON lines. Their time is a checksum of the content, so that a run that continues an interrupted one
    recognizes the same content.

    Raises:
        DataError: if another process is writing a copy.
    """
    names: list[str] = []
    copies: list[Path] = []
    files = ExitStack()  # the copies, which stay locked
    try:
        for name in inputs:
            is_pipe = os.path.exists(name) and not os.path.isfile(name) and not os.path.isdir(name)
            if name == "-" or is_pipe or name.startswith(("/dev/stdin", "/dev/fd/")):
                path = Path(f"{output}.pipe{len(copies)}.jsonl{UNFINISHED}")
                path.parent.mkdir(parents=True, exist_ok=True)
                copy = files.enter_context(path.open("ab"))
                if try_lock(copy) is LockState.HELD:
                    raise DataError(f"{path}: another process is writing it", "another --output-prefix")
                copies.append(path)
                copy.truncate(0)
                digest = xxhash.xxh3_64()
                with open(0 if name == "-" else name, "rb", closefd=name != "-") as pipe:
                    while piece := pipe.read(BLOCK_BYTES):
                        copy.write(piece)
                        digest.update(piece)
                copy.flush()
                os.utime(path, ns=(0, digest.intdigest() % 10**18))
                name = str(path)
            names.append(name)
        yield names
    finally:
        for path in copies:
            path.unlink(missing_ok=True)
        files.close()


def find_text_files(
    inputs: Sequence[str],
    suffixes: Collection[str],
    exclude: Collection[str],
    follow_links: bool = False,
    note: Callable[[str], object] = echo,
) -> list[Path]:
    """Return the files named by ``inputs``: files, glob patterns like ``data/*.jsonl``, folders, or ``hf:NAME``.

    A folder contributes all files below it that end in one of ``suffixes`` (ignoring case, compressed or not), sorted
    by path, without files and folders named in ``exclude``. Patterns are sorted too. An existing file name is never
    treated as a pattern. Folders and patterns contribute each file once, without what `readable_files` leaves out,
    which a ``note`` names. A folder written by `save_to_disk` of Hugging Face `datasets` contributes the rows of the
    dataset. Inputs that match no file, unsupported formats, and documents that would be read twice are errors.
    """
    files: list[Path] = []
    for name in inputs:
        unread: list[str] = []
        folder = None
        if os.path.isdir(name):
            folder = Path(name)
            found = _walk(folder, suffixes, exclude, follow_links, unread)
        elif name.startswith("hf:"):
            found = hugging_face_files(name)
        elif os.path.isfile(name):
            found = [Path(name)]
        else:
            folder = Path(re.split(r"[^/]*[*?[]", name)[0])
            found = [path for path in _match(name, folder, follow_links, unread) if not os.path.isdir(path)]
        if folder is not None:
            found = readable_files(folder, found, follow_links, unread)
            _refuse_copies(found)
        fixes = [FOLLOW_LINKS] if any(OUTSIDE in each for each in unread) else []
        summary = f"--input {name}: {len(unread):,} not read: {listed(unread)}"
        if not found:
            raise DataError(summary, *fixes) if unread else _no_files(name, suffixes)
        if unread:
            note("; ".join([summary, *(f"{fix} reads what is {OUTSIDE}" for fix in fixes)]))
        files += found
    seen: dict[str, Path] = {}
    for file in files:
        _check_format(file)
        other = seen.setdefault(os.path.realpath(file), file)
        if other is not file:
            why = f"{file} is given twice" if file == other else f"{file} is {other}, which is given too"
            fix = "name it once; to repeat a corpus, give it a weight: pretrain_gpt.py --data-path 2 PREFIX"
            raise DataError(f"--input: {why}: its documents would be read twice", fix)
    return files


def _no_files(name: str, suffixes: Collection[str]) -> DataError:
    why = f"no file below it ends in {' or '.join(suffixes)}" if os.path.isdir(name) else "there is no such file"
    return DataError(f"--input {name}: {why}", "--input FILE.jsonl", "--input FOLDER --suffix .txt")


def _check_format(file: Path) -> None:
    suffix = file.suffix.lower()
    failure = f"{file}: {file.suffix} files are not supported"
    if suffix in UNSUPPORTED_FORMATS:
        raise DataError(failure, "write its documents as lines of a .jsonl file")
    if suffix in UNSUPPORTED_COMPRESSIONS:
        name, unpacked = shlex.quote(str(file)), shlex.quote(str(file.with_suffix("")))
        raise DataError(failure, UNSUPPORTED_COMPRESSIONS[suffix].format(name, unpacked))


def _walk(
    folder: Path, suffixes: Collection[str], exclude: Collection[str], follow_links: bool, unread: list[str]
) -> list[Path]:
    wanted = tuple(suffix.lower() for suffix in suffixes)
    found: list[Path] = []
    for path, folders, names in walk_folders(folder, exclude, follow_links, unread):
        files = [Path(path, name) for name in names if name not in exclude]
        if saved := saved_dataset_files(Path(path)):
            files, folders[:] = saved, []
        found += [file for file in files if _ends_in(file, wanted)]
    return found


def _match(pattern: str, folder: Path, follow_links: bool, unread: list[str]) -> list[Path]:
    """Return the paths that match a pattern; ``**``, which follows every link in `glob`, walks as in a folder."""
    parts = Path(pattern).relative_to(folder).parts
    if "**" not in parts:
        return [*map(Path, glob.glob(pattern))]
    walk = walk_folders(folder, (), follow_links, unread)
    files = (Path(path, name) for path, _, names in walk for name in names)
    return [file for file in files if _fits(file.relative_to(folder).parts, parts)]


def _fits(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    if not parts or not pattern:
        return not parts and pattern in ((), ("**",))
    if pattern[0] == "**" and _fits(parts, pattern[1:]):
        return True
    is_hidden = parts[0].startswith(".") and not pattern[0].startswith(".")
    if is_hidden or not fnmatchcase(parts[0], pattern[0]):
        return False
    return _fits(parts[1:], pattern[pattern[0] != "**" :])


def _ends_in(file: Path, wanted: tuple[str, ...]) -> bool:
    names = [file.name.lower(), uncompressed_name(file).lower()]
    if file.suffix.lower() in UNSUPPORTED_COMPRESSIONS:
        names.append(file.stem.lower())
    return any(name.endswith(wanted) for name in names)


def _refuse_copies(files: Collection[Path]) -> None:
    """Raise DataError for files that differ only in their compression."""
    seen: dict[Path, Path] = {}
    for file in sorted(files):
        other = seen.setdefault(file.with_name(uncompressed_name(file)), file)
        if other != file:
            why = f"{file} lies beside {other}: the same documents would be read twice"
            raise DataError(why, f"--exclude {shlex.quote(file.name)}", "name both files with --input")


def check_single_key(file: Path, keys: Sequence[str]) -> None:
    """Raise DataError if several keys are requested of a plain file."""
    if len(keys) > 1 and is_plain(file):
        raise DataError(f"{file} is plain text without the keys {', '.join(keys)}", "--json-keys text")


class BadDocumentReport:
    """Raise the errors of bad documents, or count them and report the first `MAX_REPORTED`.

    Blocks are added in their order, so that their lines are numbered within the file.
    """

    def __init__(
        self, skip: bool = False, message: Callable[[str], object] = echo, counts: Sequence[int] = (0, 0, 0)
    ) -> None:
        self._skip = skip
        self._message = message
        # bad documents; lines and documents of the current file of lines, in the blocks added so far
        self.count, self._lines, self._documents = counts

    @property
    def counts(self) -> tuple[int, int, int]:
        """Numbers with which a new report continues this one."""
        return self.count, self._lines, self._documents

    def lines_before(self, block: Block) -> int:
        """Return the number of lines of the file before the next block."""
        return 0 if isinstance(block, LineBlock) and block.first else self._lines

    def add(self, block: Block, lines: int, documents: int, bad: Sequence[BadDocument], num_bad: int) -> None:
        """Add a block with its numbers of lines, documents and bad documents, of which ``bad`` are the first ones."""
        self._lines = self.lines_before(block)
        if isinstance(block, LineBlock) and block.first:
            self._documents = 0
        for document in bad:
            self._add_error(document.of(self._lines, *([] if document.rest else [SKIP_BAD_FLAG])))
        self.count += num_bad - len(bad)
        self._lines += lines
        self._documents += documents
        if isinstance(block, LineBlock) and block.last and not self._documents:
            fixes = ("remove this file", f"--exclude {shlex.quote(block.file.name)}", SKIP_BAD_FLAG)
            self._add_error(DataError(f"{block.file} has no documents", *fixes))

    def _add_error(self, error: DataError) -> None:
        if not self._skip:
            raise error
        self.count += 1
        if self.count <= MAX_REPORTED:
            self._message(f"passed over: {error.seen}")
        if self.count == MAX_REPORTED:
            self._message("passed over: further ones are only counted")


def load_block(block: Block) -> tuple[Block, int]:
    """Return the block with its lines in memory, and the number of line ends or rows; plain files are not read."""
    if isinstance(block, FileBlock):
        return block, 0
    content = block.read()
    if is_table(block.file):
        return block, len(parse_rows(content))
    return block._replace(content=content), content.count(b"\n") + (bool(block.damage) and not block.last)


def read_block(block: Block, keys: Sequence[str], any_bytes: bool = False) -> Iterator[TextDocument | BadDocument]:
    """Yield the documents of a block: one per line (except blank lines), row or plain file, an error for each bad one.

    Args:
        block: to read.
        keys: JSON keys of the texts.
        any_bytes: whether a plain file may be other than UTF-8.
    """
    if isinstance(block, FileBlock):
        for file in block.files:
            try:
                content = _read_plain_text(file, block, check_utf8=not any_bytes)
                yield TextDocument((content,), (file, 0), len(content))
            except BadDocumentError as bad:
                yield BadDocument(file, 0, bad.seen, bad.fixes, file.stat().st_size)
        return
    file = block.file
    number = 0
    lines: Sequence[bytes | Row] = parse_rows(block.read()) if is_table(file) else split_lines(block.read())
    for number, line in enumerate(lines, 1):
        if isinstance(line, bytes) and not line.strip():
            continue
        size = len(line) if isinstance(line, bytes) else sum(len(text or b"") for text in line.values())
        try:
            texts = parse_line(line, keys, file) if isinstance(line, bytes) else parse_row(line, keys)
            yield TextDocument(texts, (file, number), size)
        except BadDocumentError as bad:
            yield BadDocument(file, number, bad.seen, bad.fixes, size)
    if block.damage:
        yield BadDocument(file, number + 1, block.damage[0], block.damage[1:], rest=block.last)


def read_documents(
    files: Sequence[Path],
    keys: Sequence[str],
    report: BadDocumentReport | None = None,
    max_line_bytes: int = MAX_LINE_BYTES,
) -> Iterator[TextDocument]:
    """Yield the documents of files, in this order; add bad ones to the report, whose default raises their errors."""
    for file in files:
        check_single_key(file, keys)
    report = report or BadDocumentReport()
    for unread in split_into_blocks(files, keys, max_line_bytes=max_line_bytes):
        block, lines = load_block(unread)
        documents = list(read_block(block, keys))
        bad = [document for document in documents if isinstance(document, BadDocument)]
        report.add(block, lines, len(documents), bad, len(bad))
        yield from (document for document in documents if isinstance(document, TextDocument))
