"""Parse and edit SentencePiece ``.model`` files, which are protocol buffers, without a protobuf library.

Source: ``sentencepiece_model.proto`` (ModelProto) of SentencePiece; the protocol buffer encoding.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum

from megatron.data.errors import DataError

PIECES, TRAINER, NORMALIZER = 1, 2, 3  # fields of ModelProto
PIECE, SCORE, KIND = 1, 2, 3  # fields of SentencePiece
MODEL_TYPE, SPACE_AS_SUFFIX, BYTE_FALLBACK = 3, 24, 35  # fields of TrainerSpec
CHARSMAP, DUMMY_PREFIX, SQUEEZE_SPACES, ESCAPE_SPACES = 2, 3, 4, 5  # fields of NormalizerSpec

VARINT, BYTES = 0, 2  # wire types


class Kind(IntEnum):
    """Type of a piece."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class Algorithm(IntEnum):
    """Segmentation algorithm of a model."""

    UNIGRAM = 1
    BPE = 2
    WORD = 3
    CHAR = 4


@dataclass(frozen=True)
class Piece:
    """Vocabulary entry; its id is its position."""

    text: str
    score: float
    kind: Kind


@dataclass(frozen=True)
class Model:
    """Parts of a model that determine the ids of a text."""

    pieces: tuple[Piece, ...]  # by id
    algorithm: Algorithm
    byte_fallback: bool  # characters without a piece become the pieces of their bytes, not the unknown piece
    space_as_suffix: bool  # spaces end words instead of beginning them
    charsmap: bytes  # compiled normalization table, possibly empty
    dummy_prefix: bool  # a space is added before the text
    squeeze_spaces: bool  # leading, trailing and repeated spaces are removed
    escape_spaces: bool  # spaces become U+2581


def read_model(content: bytes) -> Model:
    """Parse a model file.

    Raises:
        DataError: if ``content`` is not a SentencePiece model.
    """
    try:
        pieces = tuple(_piece(value) for field, _, value in _fields(content) if field == PIECES)
        trainer, normalizer = _message(content, TRAINER), _message(content, NORMALIZER)
        algorithm = Algorithm(int(trainer.get(MODEL_TYPE, Algorithm.UNIGRAM)))
    except (IndexError, ValueError, TypeError, struct.error) as error:
        raise DataError(f"this is not a SentencePiece model: {error}", "--tokenizer-model FILE.model") from error
    if not pieces:
        raise DataError("this is not a SentencePiece model: it has no pieces", "--tokenizer-model FILE.model")
    charsmap = normalizer.get(CHARSMAP, b"")
    return Model(
        pieces,
        algorithm,
        byte_fallback=bool(trainer.get(BYTE_FALLBACK, False)),
        space_as_suffix=bool(trainer.get(SPACE_AS_SUFFIX, False)),
        charsmap=charsmap if isinstance(charsmap, bytes) else b"",
        dummy_prefix=bool(normalizer.get(DUMMY_PREFIX, True)),
        squeeze_spaces=bool(normalizer.get(SQUEEZE_SPACES, True)),
        escape_spaces=bool(normalizer.get(ESCAPE_SPACES, True)),
    )


def with_kinds(content: bytes, kind_of: Callable[[Piece], Kind]) -> bytes:
    """Return the file's ``content`` with the piece types of ``kind_of`` and nothing else changed."""
    written = []
    for field, raw, value in _fields(content):
        if field == PIECES and isinstance(value, bytes):
            piece = _piece(value)
            if kind_of(piece) is not piece.kind:
                value += bytes((KIND << 3 | VARINT, kind_of(piece)))  # the last value of a repeated field wins
                raw = bytes((PIECES << 3 | BYTES,)) + _varint(len(value)) + value
        written.append(raw)
    return b"".join(written)


def _piece(message: bytes | int) -> Piece:
    if isinstance(message, int):
        raise ValueError("a piece is a number")
    fields = {field: value for field, _, value in _fields(message)}
    text, score, kind = fields.get(PIECE, b""), fields.get(SCORE, bytes(4)), fields.get(KIND, Kind.NORMAL)
    if isinstance(text, int) or isinstance(score, int) or isinstance(kind, bytes):
        raise ValueError("a piece is not a text, a score and a kind")
    return Piece(text.decode(), struct.unpack("<f", score)[0], Kind(kind))


def _message(content: bytes, wanted: int) -> dict[int, bytes | int]:
    """Return the fields of a nested message."""
    parts = [value for field, _, value in _fields(content) if field == wanted and isinstance(value, bytes)]
    return {field: value for field, _, value in _fields(b"".join(parts))}


def _fields(message: bytes) -> Iterator[tuple[int, bytes, bytes | int]]:
    """Yield each field of a message: number, raw bytes including the key, and value."""
    position = 0
    while position < len(message):
        start = position
        key, position = _read_varint(message, position)
        value: bytes | int
        wire_type = key & 7
        if wire_type == VARINT:
            value, position = _read_varint(message, position)
        elif wire_type in (1, 2, 5):
            size = {1: 8, 5: 4}.get(wire_type, 0)
            if wire_type == BYTES:
                size, position = _read_varint(message, position)
            value = message[position : position + size]
            position += size
        else:
            raise ValueError(f"the field at byte {start:,} has unknown wire type {wire_type}")
        if position > len(message):
            raise ValueError(f"it ends inside the field that begins at byte {start:,}")
        yield key >> 3, message[start:position], value


def _read_varint(message: bytes, position: int) -> tuple[int, int]:
    """Return a varint (7 bits per byte, lowest first; the last byte is below 128) and its end position."""
    number = shift = 0
    while message[position] >= 128:
        number |= (message[position] & 127) << shift
        position += 1
        shift += 7
    return number | message[position] << shift, position + 1


def _varint(number: int) -> bytes:
    low, rest = number & 127, number >> 7
    return bytes((low | 128,)) + _varint(rest) if rest else bytes((low,))
