"""One line of a file of JSON lines as texts, or one plain file as a text; and what is wrong with one that is not."""

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
NUL = b"\\u0000"  # how JSON spells it
MEND = "mend or remove this line"


class BadDocumentError(Exception):
    """What is wrong with a document, told so that the name of its file, and line, goes before it.

    Attributes:
        seen: the sentence without its subject, such as ``" is not JSON"``.
        fixes: what can be done.
    """

    def __init__(self, seen: str, *fixes: str) -> None:
        super().__init__(seen)
        self.seen = seen
        self.fixes = fixes

    def of(self, source: str, *more_fixes: str) -> DataError:
        """The error for the document that is called so."""
        return DataError(source + self.seen, *self.fixes, *more_fixes)


def texts_of_line(line: bytes, keys: Sequence[str], file: Path) -> tuple[str, ...]:
    """The texts under ``keys`` in a JSON object; ``file``, which holds the line, is only named in messages.

    Raises:
        BadDocumentError: when it is no JSON object of UTF-8, or holds under a key no text or one that is no Unicode.
    """
    try:
        record = _reader()(line)
    except (ValueError, RecursionError):
        record = _read_slowly(line, file)
    if not isinstance(record, dict):
        hint = (f"jq -c '.[]' {shlex.quote(str(file))} > lines.jsonl",) if isinstance(record, list) else ()
        raise BadDocumentError(f" holds {JSON_KINDS[type(record)]}, not an object", MEND, *hint)
    return tuple([_text(record, key) for key in keys])


def texts_of_good_lines(content: bytes, keys: Sequence[str]) -> list[list[bytes]] | None:
    """For each key the texts of all lines of ``content``, in UTF-8: those of `texts_of_line`, sooner.

    None where a line is blank, or is not what it should be, or might not be.
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
    """The fastest reader of JSON; what it refuses is read once more by `_read_slowly`, which says why."""
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
        raise BadDocumentError(f": '{key}' holds {JSON_KINDS[type(text)]}, not a string", MEND)
    if "\0" in text:
        raise BadDocumentError(f": '{key}' is not text: character {text.index(chr(0)):,} is NUL", MEND)
    if not text.isascii():
        _check_unicode(text, key)
    return text


def _check_unicode(text: str, key: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        seen = f": '{key}' is not Unicode: character {error.start:,} is half of a surrogate pair"
        raise BadDocumentError(seen, MEND) from error


def whole_lines(content: bytes) -> list[bytes]:
    """The lines of a block without their ends; what follows the last end is one only if it is not empty."""
    lines = content.split(b"\n")
    if not lines[-1]:
        lines.pop()
    return lines


def plain_text(file: Path) -> bytes:
    """The content of a plain file, if it can be text; of which encoding is not looked at.

    Raises:
        BadDocumentError: when it cannot, or is compressed and damaged.
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
    """What is wrong with a plain file whose bytes are not those of UTF-8."""
    seen = f" is not UTF-8 text: byte {error.start:,}: {error.reason}"
    return BadDocumentError(seen, *_recode(file, "LATIN1"), _exclude(file))


def check_utf8(content: bytes, file: Path) -> None:
    """Refuse a plain file of another encoding.

    Raises:
        BadDocumentError: when it is not UTF-8.
    """
    try:
        content.decode()
    except UnicodeDecodeError as error:
        raise other_encoding(file, error) from error


def no_document(file: Path) -> BadDocumentError:
    """What is wrong with a file of JSON lines that has none."""
    return BadDocumentError(" holds no document", "remove this file", _exclude(file))


def _exclude(file: Path) -> str:
    return f"--exclude {shlex.quote(file.name)}"


def _recode(file: Path, encoding: str) -> tuple[str, ...]:
    """The command that makes UTF-8 of a file."""
    if file.suffix.lower() in SUFFIXES:
        return (f"decompress it and convert it from {encoding} with iconv",)
    name, new = shlex.quote(str(file)), shlex.quote(str(file.with_stem(f"{file.stem}.utf8")))
    return (f"iconv -f {encoding} -t UTF-8 {name} > {new}",)
