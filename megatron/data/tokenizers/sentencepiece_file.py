"""What is in a SentencePiece ``.model`` file, which is a protocol buffer, without the library for such.

Source: ``sentencepiece_model.proto`` (ModelProto) of SentencePiece; the encoding of protocol buffers.
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

VARINT, BYTES = 0, 2  # two of the ways in which a value is written


class Kind(IntEnum):
    """What a piece is."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class Algorithm(IntEnum):
    """How a model cuts text into pieces."""

    UNIGRAM = 1
    BPE = 2
    WORD = 3
    CHAR = 4


@dataclass(frozen=True)
class Piece:
    """An entry of the vocabulary; its id is its place."""

    text: str
    score: float
    kind: Kind


@dataclass(frozen=True)
class Model:
    """What of a model decides which ids a text has.

    Attributes:
        pieces: by id.
        algorithm: how text is cut.
        byte_fallback: characters without a piece become the pieces of their bytes, not the unknown one.
        space_as_suffix: a word ends in its space instead of beginning with it.
        charsmap: compiled table of characters that are replaced first; may be empty.
        dummy_prefix: a space is put before the text.
        squeeze_spaces: spaces at both ends, and all but one of a run, are dropped.
        escape_spaces: a space becomes U+2581.
    """

    pieces: tuple[Piece, ...]
    algorithm: Algorithm
    byte_fallback: bool
    space_as_suffix: bool
    charsmap: bytes
    dummy_prefix: bool
    squeeze_spaces: bool
    escape_spaces: bool


def read_model(content: bytes) -> Model:
    """The model in a file's ``content``.

    Raises:
        DataError: when it is none.
    """
    try:
        pieces = tuple(_piece(value) for field, _, value in _fields(content) if field == PIECES)
        trainer, normalizer = _message(content, TRAINER), _message(content, NORMALIZER)
        algorithm = Algorithm(int(trainer.get(MODEL_TYPE, Algorithm.UNIGRAM)))
    except (IndexError, ValueError, TypeError, struct.error) as error:
        raise DataError(f"this is no SentencePiece model: {error}", "--tokenizer-model FILE.model") from error
    if not pieces:
        raise DataError("this is no SentencePiece model: it has no pieces", "--tokenizer-model FILE.model")
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
    """The file's ``content`` with other kinds of pieces, and nothing else changed."""
    written = []
    for field, raw, value in _fields(content):
        if field == PIECES and isinstance(value, bytes):
            piece = _piece(value)
            if kind_of(piece) is not piece.kind:
                value += bytes((KIND << 3 | VARINT, kind_of(piece)))  # of a field that comes twice, the last counts
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
    """The values of a message inside another, by field."""
    parts = [value for field, _, value in _fields(content) if field == wanted and isinstance(value, bytes)]
    return {field: value for field, _, value in _fields(b"".join(parts))}


def _fields(message: bytes) -> Iterator[tuple[int, bytes, bytes | int]]:
    """Each field of a message: its number, all of its bytes, and its value."""
    at = 0
    while at < len(message):
        begin = at
        key, at = _read_varint(message, at)
        value: bytes | int
        match key & 7:
            case 0:
                value, at = _read_varint(message, at)
            case 1:
                value, at = message[at : at + 8], at + 8
            case 2:
                size, at = _read_varint(message, at)
                value, at = message[at : at + size], at + size
            case 5:
                value, at = message[at : at + 4], at + 4
            case other:
                raise ValueError(f"byte {begin:,} begins a field of kind {other}")
        if at > len(message):
            raise ValueError(f"it ends inside the field that begins at byte {begin:,}")
        yield key >> 3, message[begin:at], value


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    """A number and where it ends: seven bits a byte, the lowest first; the last byte is below 128."""
    number = shift = 0
    while message[at] >= 128:
        number |= (message[at] & 127) << shift
        at, shift = at + 1, shift + 7
    return number | message[at] << shift, at + 1


def _varint(number: int) -> bytes:
    low, rest = number & 127, number >> 7
    return bytes((low | 128,)) + _varint(rest) if rest else bytes((low,))
