"""Read JSON that is not one value per line: arrays, and objects over several lines, of any size in bounded memory."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator

BEGINS_WITH_VALUES = re.compile(rb"\[\s*[^\s\]]|{[ \t\r]*\n\s*\"")
"""The beginning of a text that is an array of something, or an object over several lines."""


def json_values(pieces: Iterator[bytes], max_bytes: int) -> Iterator[bytes]:
    """Yield the values of a JSON text as lines: the elements of its arrays, and other values.

    Raises:
        ValueError: for a value that is not JSON, or longer than ``max_bytes``.
    """
    decoder, parse = codecs.getincrementaldecoder("utf-8-sig")(), json.JSONDecoder().raw_decode
    text, at, inside, ended, tried = "", 0, False, False, 0
    while True:
        at = next((i for i in range(at, len(text)) if text[i] not in " \t\r\n"), len(text))
        mark = text[at : at + 1]
        if mark and mark in ("],", "[")[not inside]:
            at, inside = at + 1, mark != "]"
            continue
        end = 0
        if mark and (ended or len(text) - at >= 2 * tried):  # a longer value is parsed again once there is as much more
            try:
                _, end = parse(text, at)
            except (ValueError, RecursionError) as error:
                if ended or len(text) - at > max_bytes:
                    raise ValueError(f"{error}" if ended else f"longer than {max_bytes:,} bytes, or {error}") from error
                tried = len(text) - at
        if end and (ended or end < len(text)):  # else a number may go on
            yield text[at:end].replace("\r", " ").replace("\n", " ").encode() + b"\n"
            at, tried = end, 0
        elif not ended:
            piece = next(pieces, None)
            ended = piece is None
            text, at = text[at:] + decoder.decode(piece or b"", final=ended), 0
        elif not mark:
            break
    if inside:
        raise ValueError("the array does not end")
