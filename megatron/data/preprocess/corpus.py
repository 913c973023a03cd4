"""Read the documents of text files, in the order of the files.

A file of JSON lines holds one document per line, a table one per row; any other file is one document. Compressed files
are decompressed as streams. `split_into_blocks` cuts files into blocks of whole lines or rows, or of plain files, that
a worker encodes at once; the block size changes neither the documents nor their order. `read_block` yields the
documents of a block, and a `BadDocument` for each invalid one.
"""

from __future__ import annotations

import codecs
import io
import json
import math
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import IO, Any, NamedTuple

from megatron.config.text import echo
from megatron.data.errors import DataError
from megatron.data.preprocess.files import MAX_LINE_BYTES, is_plain, is_table
from megatron.data.preprocess.remote import InputFile, RemoteFile
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
from megatron.data.preprocess.tables import Row, UnreadableTableError, parse_rows, read_batches, read_rows
from megatron.data.preprocess.transforms import DocumentTransforms, StepError

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
FIX_LINE = "fix or remove this document"


class BadDocumentError(DataError):
    """Problem of a document, without the name of its file and line: `seen` is a sentence without its subject."""


class TextDocument(NamedTuple):
    """Document as read from a file."""

    texts: tuple[str | bytes, ...]  # its text under each requested key; UTF-8 bytes for a plain file
    place: tuple[InputFile, int]  # file, and line within the block or file from 1 on; line 0 for a plain file
    num_bytes: int  # bytes of decompressed input, without the line end


class DroppedDocument(NamedTuple):
    """Document that a step has dropped."""

    reason: str
    num_bytes: int  # of decompressed input, as `TextDocument.num_bytes`


class BadDocument(NamedTuple):
    """Invalid document of a block."""

    file: InputFile
    line: int  # or row; from 1 on, within the block; 0 for a plain file
    seen: str  # a sentence without its subject
    fixes: tuple[str, ...]
    num_bytes: int = 0
    rest: bool = False  # whether the rest of the file cannot be read either

    def of(self, lines_before: int, *more_fixes: str) -> DataError:
        """Return the error, with the line number in the file after ``lines_before`` lines in earlier blocks."""
        source = f"{self.file}:{lines_before + self.line}" if self.line else str(self.file)
        return DataError(source + self.seen, *self.fixes, *more_fixes)


def parse_record(line: bytes, file: InputFile) -> dict[str, Any]:
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


def parse_row(row: Row, keys: Sequence[str]) -> dict[str, Any]:
    """Return the columns of a table's row, those of ``keys`` as text; raise BadDocumentError if one is not UTF-8."""
    try:
        texts = {key: row[key].decode() for key in keys if isinstance(row.get(key), bytes)}
    except UnicodeDecodeError as error:
        raise BadDocumentError(f" is not UTF-8 text: {error.reason}", "fix or remove this row") from error
    return {**row, **texts}


def parse_valid_lines(content: bytes, keys: Sequence[str]) -> list[list[bytes]] | None:
    """Return for each key the texts of all lines, in UTF-8: a fast path for blocks without special cases.

    None if a line is blank or may be invalid; `read_block` then decides.
    """
    try:
        records: list[Any] = list(map(_reader(), split_lines(content)))
        columns = [[record[key].encode() for record in records] for key in keys]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    has_nul = any(b"\0" in text for texts in columns for text in texts)  # faster than to look for its escapes before
    return None if has_nul else columns


@cache
def _reader() -> Callable[[bytes], object]:
    """Return the fastest JSON parser. Lines it rejects are parsed again by `_read_slowly`, which explains the error."""
    try:
        import orjson
    except ImportError:
        return lambda line: json.loads(line.decode())
    return orjson.loads


def _read_slowly(line: bytes, file: InputFile) -> object:
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


def _read_plain_text(file: InputFile, block: FileBlock, check_utf8: bool) -> bytes:
    """Return the content of a plain file; raise BadDocumentError if it is damaged, too large, or not text."""
    max_bytes, exclude = block.max_bytes, f"--exclude {shlex.quote(file.name)}"
    with file.open("rb") as stream:
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


BLOCK_BYTES = 2 << 20


class LineBlock(NamedTuple):
    """Whole lines of a JSON-lines file, or rows of a table; or, without content, one line that is too long."""

    file: InputFile
    content: bytes | range  # the lines or rows, or the byte range of the file that holds them
    stored: int  # bytes they take in the file, compressed if it is
    first: bool  # whether the file begins with them
    last: bool  # whether the file ends with them
    # why the line, or after the last block the rest of the file, cannot be read, and fixes; empty if it can
    damage: tuple[str, ...] = ()
    part: bool = False  # whether only a part of the file is read
    rows_before: int = 0  # rows of the file before that part
    dropped: frozenset[int] = frozenset()  # lines or rows to leave out, from 1 on

    def read(self) -> bytes:
        """Return the lines; raise DataError if the file has become shorter."""
        if isinstance(self.content, bytes):
            return self.content
        with self.file.open("rb") as stream:
            stream.seek(self.content.start)
            content = stream.read(len(self.content))
        if len(content) != len(self.content):
            raise DataError(f"{self.file} became shorter while it was read", "rerun when no process is writing it")
        return content


class FileBlock(NamedTuple):
    """Plain files, one document each."""

    files: tuple[InputFile, ...]
    stored: int  # total size, compressed if they are
    max_bytes: int = MAX_LINE_BYTES  # of the text of a file
    dropped: frozenset[int] = frozenset()  # files to leave out, from 1 on


Block = LineBlock | FileBlock


def split_into_blocks(
    files: Sequence[InputFile],
    keys: Sequence[str],
    block_bytes: int = BLOCK_BYTES,
    max_line_bytes: int = MAX_LINE_BYTES,
    transforms: DocumentTransforms | None = None,
    start: int = 0,
    stop: int | None = None,
) -> Iterator[Block]:
    """Yield blocks of about ``block_bytes`` of text in the order of the files; a longer line makes a larger block.

    Of tables only the columns ``keys`` are read, and those that ``transforms`` read. Lines, rows and plain files over
    ``max_line_bytes`` are invalid. Of the first file, what begins before byte ``start`` is left out, and of the last
    one what begins at or after byte ``stop`` (see `Shard`).
    """
    plain: list[InputFile] = []
    size = 0
    for number, file in enumerate(files):
        if is_plain(file):
            plain.append(file)
            size += file.stat().st_size
        if plain and (size >= block_bytes or not is_plain(file)):
            yield FileBlock(tuple(plain), size, max_line_bytes)
            plain, size = [], 0
        if is_plain(file):
            continue
        part = start if number == 0 else 0, stop if number == len(files) - 1 else None
        if is_table(file):
            rows = read_batches(file, keys, min(block_bytes, max_line_bytes), max_line_bytes)
            if transforms and transforms.takes_records:
                rows = read_rows(file, transforms.columns, min(block_bytes, max_line_bytes), max_line_bytes)
            yield from _take_part(_cut_table(file, rows, max_line_bytes), *part)
        else:
            yield from split_lines_file(file, block_bytes, max_line_bytes, *part)
    if plain:
        yield FileBlock(tuple(plain), size, max_line_bytes)


def split_lines_file(
    file: InputFile,
    block_bytes: int = BLOCK_BYTES,
    max_line_bytes: int = MAX_LINE_BYTES,
    start: int = 0,
    stop: int | None = None,
) -> Iterator[LineBlock]:
    """Yield the blocks of one JSON-lines file, at least one. Memory use is bounded however long a line is.

    Args:
        file: to read.
        block_bytes: size of a block.
        max_line_bytes: limit of a line.
        start: byte of the file before which lines are left out; of a stream, blocks.
        stop: byte from which on they are; None for the end.

    A file that is a JSON array, or objects over several lines, has a line for each value.
    """
    head_bytes = min(block_bytes, max_line_bytes) - 1  # before the end of the last line: only that line can be too long
    if (has_values := holds_values(file)) or compression_suffix(file) or isinstance(file, RemoteFile):
        return _take_part(_cut_stream(file, has_values, head_bytes, max_line_bytes), start, stop)
    return _cut_stored(file, head_bytes, max_line_bytes, start, stop)


def _take_part(blocks: Iterator[LineBlock], start: int, stop: int | None) -> Iterator[LineBlock]:
    """Yield the blocks of a file that begin in a part of it; a block without content if there are none."""
    if (start, stop) == (0, None):
        yield from blocks
        return
    place = rows = 0
    first, ended = True, False
    for block in blocks:
        if stop is not None and place >= stop:
            break
        if place >= start:
            yield block._replace(first=first, part=True, rows_before=rows)
            first, ended = False, block.last
        else:
            rows += load_block(block)[1]
        place += block.stored
        file = block.file
    if not ended:
        yield LineBlock(file, b"", 0, first, True, (), True, rows)


def _line_start(stream: IO[bytes], place: int) -> int:
    """Return the place of the first line of a file that begins at or after ``place``."""
    if place:
        stream.seek(place - 1)
        _skip_line(stream)
    return stream.tell() if place else 0


def _count_lines(stream: IO[bytes], end: int) -> int:
    """Return the number of lines before byte ``end`` of a file."""
    stream.seek(0)
    return sum(stream.read(min(BLOCK_BYTES, end - at)).count(b"\n") for at in range(0, end, BLOCK_BYTES))


def _cut_stored(
    file: InputFile, head_bytes: int, max_line_bytes: int, start: int, stop: int | None
) -> Iterator[LineBlock]:
    """Cut a file that is read as it is: only ends of lines are read here, the rest by workers at the same time."""
    with file.open("rb") as stream:
        begin = start = _line_start(stream, start)
        size = file.stat().st_size if stop is None else _line_start(stream, stop)
        rows = _count_lines(stream, begin)
        is_part = begin > 0 or stop is not None
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
                lines = range(start, good)
                yield LineBlock(file, lines, good - start, start == begin, good == size, (), is_part, rows)
            if good < end:
                if not part.endswith(b"\n"):
                    _skip_line(stream)
                start = stream.tell()
                why = _too_long(max_line_bytes)
                yield LineBlock(file, b"", start - good, good == begin, False, why, is_part, rows)
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


def _cut_stream(file: InputFile, has_values: bool, head_bytes: int, max_line_bytes: int) -> Iterator[LineBlock]:
    """Cut a file that is decompressed, or whose values become lines."""
    size, done, first, last = file.stat().st_size, 0, True, False
    with file.open("rb") as stream:
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


def _cut_table(file: InputFile, batches: Iterator[tuple[bytes | None, int]], max_row_bytes: int) -> Iterator[LineBlock]:
    """Yield the ``batches`` of a table as blocks; the last one has no rows."""
    done = 0  # bytes of the file
    first = True
    damage: tuple[str, ...] = ()
    try:
        for content, end in batches:
            why = _too_long(max_row_bytes) if content is None else ()
            yield LineBlock(file, content or b"", end - done, first, last=False, damage=why)
            done, first = end, False
    except UnreadableTableError as error:
        damage = (error.seen, *error.fixes)
    yield LineBlock(file, b"", file.stat().st_size - done, first, last=True, damage=damage)


SKIP_BAD_FLAG = "--on-bad-line skip"
MAX_REPORTED = 20  # bad documents reported one by one; the others are only counted


def check_single_key(file: InputFile, keys: Sequence[str]) -> None:
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
        return block.rows_before if isinstance(block, LineBlock) and block.first else self._lines

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
        if isinstance(block, LineBlock) and block.last and not block.part and not self._documents:
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
    left_out = bool(block.damage) and not block.last  # a line or row that is too long
    if is_table(block.file):
        return block, len(parse_rows(content)) + left_out
    return block._replace(content=content), content.count(b"\n") + left_out


def read_block(
    block: Block, keys: Sequence[str], any_bytes: bool = False, transforms: DocumentTransforms | None = None
) -> Iterator[TextDocument | DroppedDocument | BadDocument]:
    """Yield the documents of a block: one per line (except blank lines), row or plain file, an error for each bad one.

    Those in ``block.dropped`` are left out.

    Args:
        block: to read.
        keys: JSON keys of the texts.
        any_bytes: whether a plain file may be other than UTF-8, if there are no transforms.
        transforms: applied to each document.
    """
    if isinstance(block, FileBlock):
        for file in [file for number, file in enumerate(block.files, 1) if number not in block.dropped]:
            try:
                content = _read_plain_text(file, block, check_utf8=bool(transforms) or not any_bytes)
                place = file, 0
                if transforms:
                    yield _transform({keys[0]: content.decode()}, keys, transforms, place, len(content))
                else:
                    yield TextDocument((content,), place, len(content))
            except BadDocumentError as bad:
                yield BadDocument(file, 0, bad.seen, bad.fixes, file.stat().st_size)
        return
    file = block.file
    number = 0
    lines: Sequence[bytes | Row] = parse_rows(block.read()) if is_table(file) else split_lines(block.read())
    for number, line in enumerate(lines, 1):
        if number in block.dropped or (isinstance(line, bytes) and not line.strip()):
            continue
        size = len(line) if isinstance(line, bytes) else sum(len(line.get(key) or b"") for key in keys)
        try:
            record = parse_record(line, file) if isinstance(line, bytes) else parse_row(line, keys)
            yield _transform(record, keys, transforms, (file, number), size)
        except BadDocumentError as bad:
            yield BadDocument(file, number, bad.seen, bad.fixes, size)
    if block.damage:
        yield BadDocument(file, number + 1, block.damage[0], block.damage[1:], rest=block.last)


def _transform(
    record: dict[str, Any],
    keys: Sequence[str],
    transforms: DocumentTransforms | None,
    place: tuple[InputFile, int],
    num_bytes: int,
) -> TextDocument | DroppedDocument:
    """Return the texts of a record after all transforms; raise BadDocumentError if there are none."""
    if transforms:
        try:
            result = transforms(record)
        except StepError as error:
            raise BadDocumentError(str(error), error.fix) from error
        if isinstance(result, str):
            return DroppedDocument(result, num_bytes)
        record = result
    return TextDocument(tuple([text_of(record, key) for key in keys]), place, num_bytes)


def read_documents(
    files: Sequence[InputFile],
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
