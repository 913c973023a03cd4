"""Tokenizers of SentencePiece: a ``.model`` file."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron.data.digest import fingerprint
from megatron.data.errors import DataError
from megatron.data.tokenizers.encoded import LibraryTokenizer, earlier_fingerprints, threads
from megatron.data.tokenizers.reading import read_file
from megatron.data.tokenizers.sentencepiece_file import Kind, Model, Piece, read_model, with_kinds
from megatron.data.tokenizers.sentencepiece_json import hugging_face_files

MODEL = "tokenizer.model"
MARK = re.compile(r"<.+>|\[.+\]", re.DOTALL)


class SentencePieceTokenizer(LibraryTokenizer):
    """The ids that the library ``sentencepiece`` gives, of nothing but the text.

    No control symbol (``<s>``, ``</s>``) is put around a text, and one that is spelled out in it stays text unless it
    is told otherwise. SentencePiece knows a second kind of symbol, the user-defined, which it finds in every text.
    Those that are written as marks, ``<...>`` or ``[...]``, are treated as control symbols here; the others, such as
    runs of spaces and single digits, are words.

    The ids, their number and the end of a document (the model's ``eos``) are those of Megatron-LM's tokenizers of the
    library ``sentencepiece``. Its older Llama2Tokenizer put ``<s>`` before every text, which is not done here.

    Attributes:
        files: the file by its name beside a dataset.
        vocab_size: number of pieces.
        eod: the id of the model's end-of-sentence piece.
        pad: the id of its padding piece; None without one.
        special_ids: ids of its control symbols and marks.
        settings: ``parse_special_tokens`` where it is on.
    """

    library = "sentencepiece"

    def __init__(self, path: str | Path, parse_special_tokens: bool = False) -> None:
        """Read a ``.model`` file, or ``tokenizer.model`` of a folder.

        Raises:
            DataError: when there is none, it is damaged, or it has no piece that ends a document.
        """
        file = Path(path, MODEL) if Path(path).is_dir() else Path(path)
        self._load(read_file(file, "--tokenizer-model FILE.model"), file, parse_special_tokens)

    @classmethod
    def of(cls, content: bytes, file: Path) -> SentencePieceTokenizer:
        """The tokenizer of a file's ``content``.

        Raises:
            DataError: as the constructor.
        """
        new = cls.__new__(cls)
        new._load(content, file, parse_special_tokens=False)
        return new

    def _load(self, content: bytes, file: Path, parse_special_tokens: bool) -> None:
        self.files: Mapping[str, bytes] = {MODEL: content}
        self.settings: Mapping[str, Any] = {"parse_special_tokens": True} if parse_special_tokens else {}
        self._model = _model(content, file)
        pieces = self._model.pieces
        original = _processor(content, file)
        self.vocab_size = len(pieces)
        self.eod = original.eos_id()
        if self.eod < 0:
            raise DataError(f"{file} has no end-of-sentence piece: nothing ends a document", "train it with an eos_id")
        self.pad, self._bos, self._unk = (
            number if number >= 0 else None for number in (original.pad_id(), original.bos_id(), original.unk_id())
        )
        self.special_ids = {piece.text: number for number, piece in enumerate(pieces) if is_special(piece)}
        self._spelling = _processor(with_kinds(content, _found), file)
        kinds = _found if parse_special_tokens else _text
        self._processor = _processor(with_kinds(content, kinds), file)

    @property
    def fingerprint(self) -> str:
        """Of the content of the file."""
        return fingerprint(hashlib.sha256(self.files[MODEL]).hexdigest())

    @property
    def earlier_fingerprints(self) -> tuple[str, ...]:
        """Of the content of the file, and the setting."""
        return earlier_fingerprints(hashlib.sha256(self.files[MODEL]).hexdigest())

    def ids_of(self, texts: list[str]) -> list[list[int]]:
        """Ids, on all cores unless in a worker process."""
        return self._processor.encode(texts, num_threads=threads()) if texts else []

    def decode(self, ids: Iterable[int]) -> str:
        """Text, special tokens spelled out; ids that the tokenizer does not have are left out."""
        return self._spelling.decode([int(number) for number in ids if 0 <= number < self.vocab_size])

    def hugging_face_files(self) -> dict[str, bytes]:
        """A ``tokenizer.json`` of the same ids, for models that it can express.

        It begins the text anew after a special token, so that there is none where these are found and that matters.
        """
        if self.settings and (self._model.dummy_prefix or self._model.squeeze_spaces):
            return {}
        roles = {"eos_token": self._model.pieces[self.eod].text}
        for role, number in (("bos_token", self._bos), ("unk_token", self._unk), ("pad_token", self.pad)):
            if number is not None:
                roles[role] = self._model.pieces[number].text
        return hugging_face_files(self._model, self.special_ids, roles)


class GPTSentencePieceTokenizer(SentencePieceTokenizer):
    """Megatron-LM's name for the same: its ids and special ids are those of `SentencePieceTokenizer`."""


class Llama2Tokenizer(SentencePieceTokenizer):
    """Megatron-LM's name for the same: its ids and special ids are those of `SentencePieceTokenizer`."""


def is_special(piece: Piece) -> bool:
    """Whether a piece, spelled out in a text, is text rather than its id."""
    return piece.kind is Kind.CONTROL or (piece.kind is Kind.USER_DEFINED and bool(MARK.fullmatch(piece.text)))


def _text(piece: Piece) -> Kind:
    """The kind with which a piece is not found in a text if it is special."""
    return Kind.CONTROL if is_special(piece) else piece.kind


def _found(piece: Piece) -> Kind:
    """The kind with which a piece is found in a text, and spelled out, if it is special."""
    return Kind.USER_DEFINED if is_special(piece) else piece.kind


def _model(content: bytes, file: Path) -> Model:
    try:
        return read_model(content)
    except DataError as error:
        raise DataError(f"{file}: {error}") from error


def _processor(content: bytes, file: Path) -> Any:
    try:
        import sentencepiece
    except ImportError as error:
        raise DataError(f"sentencepiece is needed for {file}", "pip install sentencepiece") from error
    try:
        return sentencepiece.SentencePieceProcessor(model_proto=content)
    except Exception as error:  # RuntimeError, or whatever its binding raises
        raise DataError(f"{file} is no model that SentencePiece reads: {error}", "copy it again") from error
