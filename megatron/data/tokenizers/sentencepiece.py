"""Tokenizers stored as a SentencePiece ``.model`` file."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

from megatron.data.errors import DataError
from megatron.data.tokenizers.base import (
    LibraryTokenizer,
    convert_library_errors,
    num_encoder_threads,
    read_tokenizer_file,
)
from megatron.data.tokenizers.huggingface import SENTENCEPIECE_MODEL, files_with_config

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

    def __init__(self, tokenizer_model: str | Path, parse_special_tokens: bool = False) -> None:
        """Read a ``.model`` file, or ``tokenizer.model`` of a folder.

        Raises:
            DataError: if it is missing or damaged, or has no end-of-sentence piece.
        """
        file = Path(tokenizer_model)
        file = file / SENTENCEPIECE_MODEL if file.is_dir() else file
        content = read_tokenizer_file(file, "--tokenizer-model FILE.model")
        self.files = {SENTENCEPIECE_MODEL: content}
        self.settings = {"parse_special_tokens": True} if parse_special_tokens else {}
        self._model = model = parse_model(content, file)
        special = [number for number, piece in enumerate(model.pieces) if _is_special(piece)]
        # Pieces of type USER_DEFINED are matched in text and decoded; those of type CONTROL are not.
        self._decoder = _processor_with(model, special, "USER_DEFINED", file)
        self._processor = self._decoder if parse_special_tokens else _processor_with(model, special, "CONTROL", file)
        self.vocab_size = len(model.pieces)
        self.special_ids = {model.pieces[number].piece: number for number in special}
        trainer = model.trainer_spec
        self._control = {
            piece.piece: number for number, piece in enumerate(model.pieces) if piece.type == piece.CONTROL
        }
        if trainer.eos_piece not in self._control:
            raise DataError(f"{file} has no end-of-sentence piece, which ends a document", "train it with an eos_id")
        self.eod = self._control[trainer.eos_piece]
        self.pad = self._control.get(trainer.pad_piece)

    def _identity(self) -> tuple[str, ...]:
        return (hashlib.sha256(self.files[SENTENCEPIECE_MODEL]).hexdigest(),)

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
        from megatron.data.tokenizers.tokenizer_json import from_sentencepiece

        spec = self._model.normalizer_spec
        if self.settings and (spec.add_dummy_prefix or spec.remove_extra_whitespaces):
            return {}
        content = from_sentencepiece(self._model, self.special_ids)
        if content is None:
            return {}
        trainer = self._model.trainer_spec
        unknown = next(piece.piece for piece in self._model.pieces if piece.type == piece.UNKNOWN)
        tokens = {"eos_token": trainer.eos_piece, "bos_token": trainer.bos_piece, "unk_token": unknown}
        tokens["pad_token"] = trainer.pad_piece
        roles = {role: token for role, token in tokens.items() if token in (*self._control, unknown)}
        return files_with_config(content, {"clean_up_tokenization_spaces": False, **roles})


class GPTSentencePieceTokenizer(SentencePieceTokenizer):
    """Megatron-LM's other name for `SentencePieceTokenizer`."""


class Llama2Tokenizer(SentencePieceTokenizer):
    """Megatron-LM's other name for `SentencePieceTokenizer`."""


def parse_model(content: bytes, file: Path) -> Any:
    """Return the ``ModelProto`` of a model file; raise DataError if ``content`` is not a SentencePiece model."""
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    protobuf = import_module("sentencepiece.sentencepiece_model_pb2")
    try:
        model = protobuf.ModelProto.FromString(content)
        problem = "" if model.pieces else "it has no pieces"
    except DecodeError as error:
        problem = str(error)
    if problem:
        raise DataError(f"{file}: this is not a SentencePiece model: {problem}", "--tokenizer-model FILE.model")
    return model


def _is_special(piece: Any) -> bool:
    """Return True if the spelling of a piece in a text stays text rather than becoming its id."""
    is_mark = piece.type == piece.USER_DEFINED and MARK_PATTERN.fullmatch(piece.piece)
    return piece.type == piece.CONTROL or bool(is_mark)


def _processor_with(model: Any, special: list[int], kind: str, file: Path) -> Any:
    """Return the library's tokenizer, with the pieces ``special`` of type ``kind``."""
    import sentencepiece

    changed = type(model)()
    changed.CopyFrom(model)
    for number in special:
        changed.pieces[number].type = changed.pieces[number].Type.Value(kind)
    with convert_library_errors(DataError, f"{file}: not a model that SentencePiece can read", "copy it again"):
        return sentencepiece.SentencePieceProcessor(model_proto=changed.SerializeToString())
