"""Record which tokenizer wrote a dataset, in ``<prefix>.tokens.json`` and ``<prefix>.tokenizer/``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megatron.data.errors import DataError
from megatron.data.tokenizers.choice import TokenizerChoice, build_tokenizer
from megatron.data.tokenizers.encoded import Tokenizer
from megatron.data.tokenizers.huggingface import HuggingFaceTokenizer

RECORD = "tokens.json"  # <prefix>.tokens.json describes the tokenizer of <prefix>.bin
FOLDER = "tokenizer"  # <prefix>.tokenizer/ holds its files, if it has any
OTHER_NAMES = {
    "GPTSentencePieceTokenizer": "SentencePieceTokenizer",
    "Llama2Tokenizer": "SentencePieceTokenizer",
    "GPT2BPETokenizer": "HuggingFaceTokenizer",  # kept as a tokenizer.json
}
"""Tokenizer types that give the same ids as another type when built from the same files."""
REWRITE = "rewrite the dataset with tools/preprocess_data.py"


@dataclass(frozen=True)
class TokenizerRecord:
    """Description of the tokenizer that wrote a dataset. Fields missing from older records are ``None``."""

    tokenizer_type: str
    vocab_size: int
    eod: int
    fingerprint: str
    pad: int | None = None
    special_ids: Mapping[str, int] | None = None
    settings: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> TokenizerRecord:
        """Return the record of a tokenizer."""
        return cls(
            type(tokenizer).__name__,
            tokenizer.vocab_size,
            tokenizer.eod,
            tokenizer.fingerprint,
            tokenizer.pad,
            dict(tokenizer.special_ids),
            dict(tokenizer.settings),
        )

    def to_bytes(self) -> bytes:
        """Return the contents of the record file."""
        return (json.dumps(asdict(self), indent=1) + "\n").encode()

    @property
    def parses_special_tokens(self) -> bool:
        """True if special tokens spelled out in text were encoded as their ids."""
        return bool((self.settings or {}).get("parse_special_tokens"))

    def may_be(self, tokenizer_type: str) -> bool:
        """Return True if ``tokenizer_type`` is this type or an equivalent one."""
        return tokenizer_type in (self.tokenizer_type, kind(self.tokenizer_type)) or (
            kind(tokenizer_type) == kind(self.tokenizer_type) == "SentencePieceTokenizer"
        )


def kind(tokenizer_type: str) -> str:
    """Return the canonical name of equivalent types."""
    return OTHER_NAMES.get(tokenizer_type, tokenizer_type)


def same_ids(one: str | Path, other: str | Path) -> bool:
    """Return True if two datasets both have a record and an id means the same text in both.

    Raises:
        DataError: if a record is invalid.
    """
    a, b = read_record(one), read_record(other)
    if a is None or b is None or (a.vocab_size, a.eod) != (b.vocab_size, b.eod):
        return False
    if a.fingerprint == b.fingerprint:
        return True
    current = _current_fingerprint(one)
    return current is not None and current == _current_fingerprint(other)


def wrote(prefix: str | Path, tokenizer: Tokenizer) -> bool:
    """Return True if a dataset has a record and ``tokenizer`` gives the ids it was written with.

    Raises:
        DataError: if the record is invalid.
    """
    record = read_record(prefix)
    if record is None or (record.vocab_size, record.eod) != (tokenizer.vocab_size, tokenizer.eod):
        return False
    known = (tokenizer.fingerprint, *tokenizer.earlier_fingerprints)
    return record.fingerprint in known or _current_fingerprint(prefix) == tokenizer.fingerprint


def _current_fingerprint(prefix: str | Path) -> str | None:
    """Return the current fingerprint of the recorded tokenizer, or None if it can no longer be rebuilt."""
    try:
        tokenizer = recorded_tokenizer(prefix)
    except DataError:
        return None
    return None if tokenizer is None else tokenizer.fingerprint


def read_record(prefix: str | Path, tokenizer_type: str | None = None) -> TokenizerRecord | None:
    """Read the record of a dataset; return None if there is none, as for a dataset of Megatron-LM.

    Raises:
        DataError: if the record is invalid or names another type than ``tokenizer_type``.
    """
    path = Path(f"{prefix}.{RECORD}")
    try:
        record = TokenizerRecord(**json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{path}: {error}", REWRITE) from error
    if tokenizer_type is not None and not record.may_be(tokenizer_type):
        raise DataError(
            f"{prefix} was written with {record.tokenizer_type}, not with {tokenizer_type}",
            f"--tokenizer-type {record.tokenizer_type}",
        )
    return record


def recorded_tokenizer(prefix: str | Path, tokenizer_type: str | None = None) -> Tokenizer | None:
    """Rebuild the tokenizer that wrote a dataset; return None if there is no record.

    Raises:
        DataError: if the record names another type than ``tokenizer_type``, or the rebuilt tokenizer differs from it.
    """
    record = read_record(prefix, tokenizer_type)
    if record is None:
        return None
    tokenizer = _rebuild(record, Path(f"{prefix}.{FOLDER}"), Path(f"{prefix}.{RECORD}"))
    current = TokenizerRecord.of(tokenizer)
    if record.fingerprint in tokenizer.earlier_fingerprints:
        current = replace(current, fingerprint=record.fingerprint)
    if record.special_ids is None:  # an older record, without these fields
        current = replace(current, pad=None, special_ids=None, settings=None)
    if current != record:
        raise DataError(f"{prefix}.{RECORD} records {record}, but that tokenizer is now {current}", REWRITE)
    return tokenizer


def _rebuild(record: TokenizerRecord, folder: Path, path: Path) -> Tokenizer:
    needs_size = record.tokenizer_type in ("NullTokenizer", "TikTokenizer")
    model = None if record.tokenizer_type in ("ByteTokenizer", "NullTokenizer") else str(folder)
    size = record.vocab_size if needs_size else None
    try:
        if record.tokenizer_type == "HuggingFaceTokenizer":
            # Not through build_tokenizer, which refuses some tokenizers that older data were written with.
            return HuggingFaceTokenizer(folder, **(record.settings or {}))
        choice = TokenizerChoice(record.tokenizer_type, model, vocab_size=size, **(record.settings or {}))
    except TypeError as error:
        raise DataError(f"{path}: {error}", REWRITE) from error
    return build_tokenizer(choice)


def tokenizer_files(prefix: str | Path) -> dict[str, bytes]:
    """Return the Hugging Face files, by name, of the tokenizer that wrote a dataset.

    Empty without a record and for NullTokenizer. Those of a ByteTokenizer give the same ids, except that
    ``transformers`` encodes ``<|endoftext|>`` in text as one id unless ``split_special_tokens=True``.
    """
    tokenizer = recorded_tokenizer(prefix)
    return {} if tokenizer is None else tokenizer.hugging_face_files()
