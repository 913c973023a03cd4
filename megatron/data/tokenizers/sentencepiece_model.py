"""Tokenizers stored as a SentencePiece ``.model`` file."""

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
from megatron.data.tokenizers.sentencepiece_file import Kind, Piece, read_model, with_kinds
from megatron.data.tokenizers.sentencepiece_json import hugging_face_files

MODEL = "tokenizer.model"
MARK = re.compile(r"<.+>|\[.+\]", re.DOTALL)


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
        file = Path(path, MODEL) if Path(path).is_dir() else Path(path)
        self._load(read_file(file, "--tokenizer-model FILE.model"), file, parse_special_tokens)

    @classmethod
    def of(cls, content: bytes, file: Path) -> SentencePieceTokenizer:
        """Return the tokenizer of a model's ``content``; ``file`` is used in messages."""
        new = cls.__new__(cls)
        new._load(content, file, parse_special_tokens=False)
        return new

    def _load(self, content: bytes, file: Path, parse_special_tokens: bool) -> None:
        self.files: Mapping[str, bytes] = {MODEL: content}
        self.settings: Mapping[str, Any] = {"parse_special_tokens": True} if parse_special_tokens else {}
        try:
            self._model = read_model(content)
        except DataError as error:
            raise DataError(f"{file}: {error}") from error
        pieces = self._model.pieces
        original = _processor(content, file)
        self.vocab_size = len(pieces)
        self.eod = original.eos_id()
        if self.eod < 0:
            raise DataError(f"{file} has no end-of-sentence piece, which ends a document", "train it with an eos_id")
        self.pad, self._bos_id, self._unk_id = (
            number if number >= 0 else None for number in (original.pad_id(), original.bos_id(), original.unk_id())
        )
        self.special_ids = {piece.text: number for number, piece in enumerate(pieces) if is_special(piece)}
        self._decoder = _processor(with_kinds(content, _matched), file)
        kind_of = _matched if parse_special_tokens else _not_matched
        self._processor = _processor(with_kinds(content, kind_of), file)

    @property
    def fingerprint(self) -> str:
        """Digest of the file."""
        return fingerprint(hashlib.sha256(self.files[MODEL]).hexdigest())

    @property
    def earlier_fingerprints(self) -> tuple[str, ...]:
        """Digests of the file, without and with the setting."""
        return earlier_fingerprints(hashlib.sha256(self.files[MODEL]).hexdigest())

    def ids_of(self, texts: list[str]) -> list[list[int]]:
        """Encode, on all cores unless in a worker process."""
        return self._processor.encode(texts, num_threads=threads()) if texts else []

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
        roles = {"eos_token": self._model.pieces[self.eod].text}
        for role, number in (("bos_token", self._bos_id), ("unk_token", self._unk_id), ("pad_token", self.pad)):
            if number is not None:
                roles[role] = self._model.pieces[number].text
        return hugging_face_files(self._model, self.special_ids, roles)


class GPTSentencePieceTokenizer(SentencePieceTokenizer):
    """Megatron-LM's other name for `SentencePieceTokenizer`."""


class Llama2Tokenizer(SentencePieceTokenizer):
    """Megatron-LM's other name for `SentencePieceTokenizer`."""


def is_special(piece: Piece) -> bool:
    """Return True if the spelling of a piece in a text stays text rather than becoming its id."""
    return piece.kind is Kind.CONTROL or (piece.kind is Kind.USER_DEFINED and bool(MARK.fullmatch(piece.text)))


def _not_matched(piece: Piece) -> Kind:
    """Return the type under which special pieces are not matched in text."""
    return Kind.CONTROL if is_special(piece) else piece.kind


def _matched(piece: Piece) -> Kind:
    """Return the type under which special pieces are matched in text, and decoded."""
    return Kind.USER_DEFINED if is_special(piece) else piece.kind


def _processor(content: bytes, file: Path) -> Any:
    try:
        import sentencepiece
    except ImportError as error:
        raise DataError(f"sentencepiece is needed for {file}", "pip install sentencepiece") from error
    try:
        return sentencepiece.SentencePieceProcessor(model_proto=content)
    except Exception as error:  # RuntimeError, or another class of its bindings
        raise DataError(f"{file}: not a model that SentencePiece can read: {error}", "copy it again") from error
