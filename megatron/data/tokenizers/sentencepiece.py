"""Tokenizers stored as a SentencePiece ``.model`` file.

The first part parses and edits the file, a protocol buffer (source: ``sentencepiece_model.proto``). It does so by hand,
because the parsers that sentencepiece and transformers bring register the same name and cannot be imported together.
`SentencePieceTokenizer` changes the types of special pieces there, so that their spelling stays text. The last part
converts a model to a ``tokenizer.json``, for ``transformers`` and gigatoken.

Only models for which the ids are equal for every text are converted. The format differs from SentencePiece:

* unigram scores are summed in another precision, so that near-ties differ;
* a normalization table (NFKC) is applied to whole grapheme clusters: a character with its marks, or CR LF;
* text on both sides of a matched symbol is normalized separately, with its own dummy prefix and removal of spaces;
* two merges cannot have the same score, where SentencePiece takes the left one.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

from megatron.data.errors import DataError
from megatron.data.tokenizers.base import LibraryTokenizer, num_encoder_threads, read_tokenizer_file
from megatron.data.tokenizers.huggingface import bpe_merges, bpe_tokenizer_files

PIECES_FIELD, TRAINER_FIELD, NORMALIZER_FIELD = 1, 2, 3  # fields of ModelProto
PIECE_TEXT_FIELD, PIECE_SCORE_FIELD, PIECE_TYPE_FIELD = 1, 2, 3  # fields of SentencePiece
MODEL_TYPE_FIELD, SPACE_AS_SUFFIX_FIELD, BYTE_FALLBACK_FIELD = 3, 24, 35  # fields of TrainerSpec
CHARSMAP_FIELD, DUMMY_PREFIX_FIELD, SQUEEZE_SPACES_FIELD, ESCAPE_SPACES_FIELD = 2, 3, 4, 5  # fields of NormalizerSpec
VARINT_TYPE, FIXED64_TYPE, BYTES_TYPE, FIXED32_TYPE = 0, 1, 2, 5  # wire types


class PieceType(IntEnum):
    """Type of a piece."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class SegmentationAlgorithm(IntEnum):
    """Segmentation algorithm of a model."""

    UNIGRAM = 1
    BPE = 2
    WORD = 3
    CHAR = 4


class VocabularyPiece(NamedTuple):
    """Vocabulary entry; its id is its position."""

    text: str
    score: float
    kind: PieceType


class SentencePieceModel(NamedTuple):
    """Parts of a model that determine the ids of a text."""

    pieces: tuple[VocabularyPiece, ...]  # by id
    algorithm: SegmentationAlgorithm
    byte_fallback: bool  # characters without a piece become the pieces of their bytes, not the unknown piece
    space_as_suffix: bool  # spaces end words instead of beginning them
    charsmap: bytes  # compiled normalization table, possibly empty
    dummy_prefix: bool  # a space is added before the text
    squeeze_spaces: bool  # leading, trailing and repeated spaces are removed
    escape_spaces: bool  # spaces become U+2581


def parse_model(content: bytes) -> SentencePieceModel:
    """Parse a model file; raise DataError if ``content`` is not a SentencePiece model."""
    pieces = []
    nested = {TRAINER_FIELD: b"", NORMALIZER_FIELD: b""}
    try:
        for field, _, value in _fields(content):
            if field == PIECES_FIELD:
                pieces.append(_parse_piece(value))
            elif field in nested:
                nested[field] += value
        trainer, normalizer = ({field: value for field, _, value in _fields(part)} for part in nested.values())
        algorithm = SegmentationAlgorithm(trainer.get(MODEL_TYPE_FIELD, SegmentationAlgorithm.UNIGRAM))
    except (IndexError, ValueError, TypeError, AttributeError, struct.error) as error:
        raise DataError(f"this is not a SentencePiece model: {error}", "--tokenizer-model FILE.model") from error
    if not pieces:
        raise DataError("this is not a SentencePiece model: it has no pieces", "--tokenizer-model FILE.model")
    return SentencePieceModel(
        tuple(pieces),
        algorithm,
        byte_fallback=bool(trainer.get(BYTE_FALLBACK_FIELD, False)),
        space_as_suffix=bool(trainer.get(SPACE_AS_SUFFIX_FIELD, False)),
        charsmap=normalizer.get(CHARSMAP_FIELD, b""),
        dummy_prefix=bool(normalizer.get(DUMMY_PREFIX_FIELD, True)),
        squeeze_spaces=bool(normalizer.get(SQUEEZE_SPACES_FIELD, True)),
        escape_spaces=bool(normalizer.get(ESCAPE_SPACES_FIELD, True)),
    )


def with_piece_types(content: bytes, kind_of: Callable[[VocabularyPiece], PieceType]) -> bytes:
    """Return the file's ``content`` with the piece types of ``kind_of`` and nothing else changed."""
    written = []
    for field, raw, value in _fields(content):
        if field == PIECES_FIELD:
            piece = _parse_piece(value)
            kind = kind_of(piece)
            if kind is not piece.kind:
                value += bytes((PIECE_TYPE_FIELD << 3 | VARINT_TYPE, kind))  # the last value of a field counts
                raw = bytes((PIECES_FIELD << 3 | BYTES_TYPE,)) + _varint(len(value)) + value
        written.append(raw)
    return b"".join(written)


def _parse_piece(message: bytes) -> VocabularyPiece:
    fields = {field: value for field, _, value in _fields(message)}
    (score,) = struct.unpack("<f", fields.get(PIECE_SCORE_FIELD, bytes(4)))
    kind = PieceType(fields.get(PIECE_TYPE_FIELD, PieceType.NORMAL))
    return VocabularyPiece(fields.get(PIECE_TEXT_FIELD, b"").decode(), score, kind)


def _fields(message: bytes) -> Iterator[tuple[int, bytes, Any]]:
    """Yield each field of a message: number, raw bytes including the key, and value (a number or bytes)."""
    position = 0
    while position < len(message):
        start = position
        key, position = _read_varint(message, position)
        wire_type = key & 7
        value: int | bytes
        if wire_type == VARINT_TYPE:
            value, position = _read_varint(message, position)
        else:
            if wire_type == BYTES_TYPE:
                size, position = _read_varint(message, position)
            elif wire_type in (FIXED32_TYPE, FIXED64_TYPE):
                size = 4 if wire_type == FIXED32_TYPE else 8
            else:
                raise ValueError(f"the field at byte {start:,} has unknown wire type {wire_type}")
            value = message[position : position + size]
            position += size
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


ESCAPED_SPACE = "\u2581"


def sentencepiece_to_hugging_face(
    model: SentencePieceModel, special: Mapping[str, int], roles: Mapping[str, str]
) -> dict[str, bytes]:
    """Return the files of a tokenizer with the ids of ``model``; empty if the format cannot express it.

    Args:
        model: content of the model file.
        special: ids of its special tokens.
        roles: spelling of ``eos_token`` and other tokens for ``transformers``.
    """
    if not _is_convertible(model, special):
        return {}
    normalizers: list[dict[str, Any]] = []
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": ESCAPED_SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if model.squeeze_spaces:
        normalizers.append({"type": "Replace", "pattern": {"Regex": r"\A +| +\z"}, "content": ""})
        normalizers.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    if model.dummy_prefix:
        normalizers.append({"type": "Prepend", "prepend": ESCAPED_SPACE})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    normalizers.append({"type": "Replace", "pattern": {"String": " "}, "content": ESCAPED_SPACE})
    symbols = [
        (number, piece.text, piece.text in special)
        for number, piece in enumerate(model.pieces)
        if piece.kind in (PieceType.CONTROL, PieceType.USER_DEFINED)
    ]
    scores = {piece.text: piece.score for piece in model.pieces if piece.kind is PieceType.NORMAL}
    bpe = {
        "unk_token": next(piece.text for piece in model.pieces if piece.kind is PieceType.UNKNOWN),
        "fuse_unk": True,
        "byte_fallback": model.byte_fallback,
        "ignore_merges": False,
        "vocab": {piece.text: number for number, piece in enumerate(model.pieces)},
        "merges": bpe_merges(sorted(scores, key=lambda piece: -scores[piece])),  # SentencePiece's: best score first
    }
    return bpe_tokenizer_files(
        added_tokens=symbols,
        normalizer={"type": "Sequence", "normalizers": normalizers},
        pre_tokenizer=None,
        decoder={"type": "Sequence", "decoders": decoders},
        model=bpe,
        config={"clean_up_tokenization_spaces": False, **roles},
    )


def _is_convertible(model: SentencePieceModel, special: Mapping[str, int]) -> bool:
    if model.algorithm is not SegmentationAlgorithm.BPE:
        return False
    if model.charsmap or model.space_as_suffix or not model.escape_spaces:
        return False
    kinds = {piece.kind for piece in model.pieces if piece.text not in special}
    if PieceType.UNUSED in kinds or (PieceType.USER_DEFINED in kinds and (model.dummy_prefix or model.squeeze_spaces)):
        return False
    words = [piece for piece in model.pieces if piece.kind is PieceType.NORMAL]
    scores = [piece.score for piece in words if len(piece.text) > 1]
    letters = {piece.text for piece in words if len(piece.text) == 1}
    return len(set(scores)) == len(scores) and letters.issuperset("".join(piece.text for piece in words))


MODEL_FILE = "tokenizer.model"
MARK_PATTERN = re.compile(r"<.+>|\[.+\]", re.DOTALL)  # user-defined symbols that are treated as control symbols


class SentencePieceTokenizer(LibraryTokenizer):
    """Tokenizer of the ``sentencepiece`` library.

    Control symbols (``<s>``, ``</s>``) are not added around a text, and stay text where spelled out in it, unless
    ``parse_special_tokens``. SentencePiece matches user-defined symbols in every text. Those written as ``<...>`` or
    ``[...]`` are treated as control symbols here; others, such as runs of spaces or digits, are ordinary pieces.

    Ids, vocabulary size and end-of-document id (the model's ``eos``) equal those of Megatron-LM's SentencePiece
    tokenizers, except that its legacy Llama2Tokenizer put ``<s>`` before every text.
    """

    library = "sentencepiece"

    def __init__(self, path: str | Path, parse_special_tokens: bool = False) -> None:
        """Read a ``.model`` file, or ``tokenizer.model`` of a folder.

        Raises:
            DataError: if it is missing or damaged, or has no end-of-sentence piece.
        """
        file = Path(path, MODEL_FILE) if Path(path).is_dir() else Path(path)
        self._load(read_tokenizer_file(file, "--tokenizer-model FILE.model"), file, parse_special_tokens)

    @classmethod
    def of(cls, content: bytes, file: Path) -> SentencePieceTokenizer:
        """Return the tokenizer of a model's ``content``; ``file`` is used in messages."""
        new = cls.__new__(cls)
        new._load(content, file, parse_special_tokens=False)
        return new

    def _load(self, content: bytes, file: Path, parse_special_tokens: bool) -> None:
        self.files = {MODEL_FILE: content}
        self.settings = {"parse_special_tokens": True} if parse_special_tokens else {}
        try:
            self._model = parse_model(content)
        except DataError as error:
            raise DataError(f"{file}: {error}") from error
        pieces = self._model.pieces
        original = _processor(content, file)
        self.vocab_size = len(pieces)
        self.eod = original.eos_id()
        if self.eod < 0:
            raise DataError(f"{file} has no end-of-sentence piece, which ends a document", "train it with an eos_id")
        self.pad = original.pad_id() if original.pad_id() >= 0 else None
        self._roles = {"eos_token": self.eod, "bos_token": original.bos_id(), "unk_token": original.unk_id()}
        self._roles["pad_token"] = original.pad_id()
        self.special_ids = {piece.text: number for number, piece in enumerate(pieces) if _is_special(piece)}
        # Pieces of type USER_DEFINED are matched in text and decoded; those of type CONTROL are not.
        matched = _processor_with(content, file, PieceType.USER_DEFINED)
        self._decoder = matched
        self._processor = matched if parse_special_tokens else _processor_with(content, file, PieceType.CONTROL)

    def _identity(self) -> tuple[str, ...]:
        return (hashlib.sha256(self.files[MODEL_FILE]).hexdigest(),)

    def ids_of(self, texts: list[str]) -> list[list[int]]:
        """Encode, on all cores unless in a worker process."""
        return self._processor.encode(texts, num_threads=num_encoder_threads()) if texts else []

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text, including special tokens; unknown ids are skipped."""
        return self._decoder.decode([int(number) for number in ids if 0 <= number < self.vocab_size])

    def hugging_face_files(self) -> dict[str, bytes]:
        """Return a ``tokenizer.json`` of equal ids, if the format can express the model.

        The format restarts normalization after a special token. If special tokens are parsed and this changes ids,
        there is none.
        """
        if self.settings and (self._model.dummy_prefix or self._model.squeeze_spaces):
            return {}
        roles = {role: self._model.pieces[number].text for role, number in self._roles.items() if number >= 0}
        return sentencepiece_to_hugging_face(self._model, self.special_ids, roles)


class GPTSentencePieceTokenizer(SentencePieceTokenizer):
    """Megatron-LM's other name for `SentencePieceTokenizer`."""


class Llama2Tokenizer(SentencePieceTokenizer):
    """Megatron-LM's other name for `SentencePieceTokenizer`."""


def _is_special(piece: VocabularyPiece) -> bool:
    """Return True if the spelling of a piece in a text stays text rather than becoming its id."""
    is_mark = piece.kind is PieceType.USER_DEFINED and MARK_PATTERN.fullmatch(piece.text)
    return piece.kind is PieceType.CONTROL or bool(is_mark)


def _processor_with(content: bytes, file: Path, special_kind: PieceType) -> Any:
    """Return the library's tokenizer with special pieces of type ``special_kind``."""
    changed = with_piece_types(content, lambda piece: special_kind if _is_special(piece) else piece.kind)
    return _processor(changed, file)


def _processor(content: bytes, file: Path) -> Any:
    try:
        import sentencepiece
    except ImportError as error:
        raise DataError(f"sentencepiece is needed for {file}", "pip install sentencepiece") from error
    try:
        return sentencepiece.SentencePieceProcessor(model_proto=content)
    except Exception as error:  # RuntimeError, or another class of its bindings
        raise DataError(f"{file}: not a model that SentencePiece can read: {error}", "copy it again") from error
