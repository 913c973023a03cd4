"""Parse a JSON line or a plain file into texts, and describe what is wrong with an invalid one."""

from __future__ import annotations

import codecs
import json
import shlex
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from megatron.data.errors import DataError
from megatron.data.text.compressed import SUFFIXES, DamagedError, decompressed

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
NUL = b"\\u0000"  # as escaped in JSON
MEND = "fix or remove this line"


class BadDocumentError(Exception):
    """Problem of a document, without the name of its file and line."""

    def __init__(self, seen: str, *fixes: str) -> None:
        super().__init__(seen)
        self.seen = seen  # a sentence without its subject, such as " is not JSON"
        self.fixes = fixes

    def of(self, source: str, *more_fixes: str) -> DataError:
        """Return the error with ``source`` (file and line) as the subject of the sentence."""
        return DataError(source + self.seen, *self.fixes, *more_fixes)


def texts_of_line(line: bytes, keys: Sequence[str], file: Path) -> tuple[str, ...]:
    """Return the texts under ``keys`` of a JSON line; ``file`` is used in messages.

    Raises:
        BadDocumentError: if it is not a JSON object in UTF-8 with Unicode text under each key.
    """
    try:
        record = _reader()(line)
    except (ValueError, RecursionError):
        record = _read_slowly(line, file)
    if not isinstance(record, dict):
        hint = (f"jq -c '.[]' {shlex.quote(str(file))} > lines.jsonl",) if isinstance(record, list) else ()
        raise BadDocumentError(f" is {JSON_KINDS[type(record)]}, not an object", MEND, *hint)
    return tuple([_text(record, key) for key in keys])


def texts_of_good_lines(content: bytes, keys: Sequence[str]) -> list[list[bytes]] | None:
    """Return for each key the texts of all lines, in UTF-8: a fast path for blocks without special cases.

    None if a line is blank or may be invalid; `parse_line` then decides.
    """
    if NUL in content:
        return None
    try:
        records: list[Any] = list(map(_reader(), whole_lines(content)))
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
        encoding = "UTF-16" if line.startswith(UTF_16) else "LATIN1"
        raise BadDocumentError(f" is not UTF-8 text: {error.reason}", *_recode(file, encoding)) from error
    except RecursionError as error:
        raise BadDocumentError(" is nested too deeply", MEND) from error
    except ValueError as error:
        raise BadDocumentError(f" is not JSON: {error}", MEND) from error


def _text(record: dict[str, object], key: str) -> str:
    text = record.get(key)
    if not isinstance(text, str):
        if key not in record:
            has = ", ".join(list(record)[:8]) or "none"
            raise BadDocumentError(f" has no key '{key}'; its keys: {has}", "--json-keys KEY", MEND)
        raise BadDocumentError(f": '{key}' is {JSON_KINDS[type(text)]}, not a string", MEND)
    if "\0" in text:
        raise BadDocumentError(f": '{key}' is not text: character {text.index(chr(0)):,} is NUL", MEND)
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            seen = f": '{key}' is not Unicode: character {error.start:,} is an unpaired surrogate"
            raise BadDocumentError(seen, MEND) from error
    return text


def whole_lines(content: bytes) -> list[bytes]:
    """Split a block into lines; text after the last line end counts as a line unless empty."""
    lines = content.split(b"\n")
    if not lines[-1]:
        lines.pop()
    return lines


def plain_text(file: Path) -> bytes:
    """Return the content of a plain file; its encoding is not checked.

    Raises:
        BadDocumentError: if it is UTF-16, contains NUL, or is compressed and damaged.
    """
    try:
        with open(file, "rb") as stream:
            content = b"".join(decompressed(file, stream)) if file.suffix.lower() in SUFFIXES else stream.read()
    except DamagedError as error:
        raise BadDocumentError(f" {error}", "copy it again", _exclude(file)) from error
    if content.startswith(UTF_16):
        raise BadDocumentError(" is UTF-16, not UTF-8 text", *_recode(file, "UTF-16"))
    if b"\0" in content:
        seen = f" is not text: byte {content.index(0):,} is NUL"
        raise BadDocumentError(seen, "remove this file", _exclude(file))
    return content


def other_encoding(file: Path, error: UnicodeDecodeError) -> BadDocumentError:
    """Return the error of a plain file that is not UTF-8."""
    seen = f" is not UTF-8 text: byte {error.start:,}: {error.reason}"
    return BadDocumentError(seen, *_recode(file, "LATIN1"), _exclude(file))


def check_utf8(content: bytes, file: Path) -> None:
    """Raise BadDocumentError if a plain file is not UTF-8."""
    try:
        content.decode()
    except UnicodeDecodeError as error:
        raise other_encoding(file, error) from error


def no_document(file: Path) -> BadDocumentError:
    """Return the error of a JSON-lines file without documents."""
    return BadDocumentError(" has no documents", "remove this file", _exclude(file))


def _exclude(file: Path) -> str:
    return f"--exclude {shlex.quote(file.name)}"


def _recode(file: Path, encoding: str) -> tuple[str, ...]:
    """Return the command that converts a file to UTF-8."""
    if file.suffix.lower() in SUFFIXES:
        return (f"decompress it and convert it from {encoding} with iconv",)
    name, new = shlex.quote(str(file)), shlex.quote(str(file.with_stem(f"{file.stem}.utf8")))
    return (f"iconv -f {encoding} -t UTF-8 {name} > {new}",)
