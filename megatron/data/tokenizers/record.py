"""The record beside a dataset of which tokenizer wrote it."""

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

RECORD = "tokens.json"  # <prefix>.tokens.json says what the ids of <prefix>.bin mean
OTHER_NAMES = {
    "GPTSentencePieceTokenizer": "SentencePieceTokenizer",
    "Llama2Tokenizer": "SentencePieceTokenizer",
    "GPT2BPETokenizer": "HuggingFaceTokenizer",  # kept as a tokenizer.json
}
"""Types whose tokenizers, made of the same files, are those of another type."""

FOLDER = "tokenizer"  # <prefix>.tokenizer/ holds the files of the tokenizer that made them, if it has any


@dataclass(frozen=True)
class TokenizerRecord:
    """What a dataset says about the tokenizer that wrote it; ``None`` where an older record does not say it."""

    tokenizer_type: str
    vocab_size: int
    eod: int
    fingerprint: str
    pad: int | None = None
    special_ids: Mapping[str, int] | None = None
    settings: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> TokenizerRecord:
        """The record of a tokenizer."""
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
        """Contents of the file."""
        return (json.dumps(asdict(self), indent=1) + "\n").encode()

    @property
    def parses_special_tokens(self) -> bool:
        """Whether special tokens that were spelled out in texts became their ids."""
        return bool((self.settings or {}).get("parse_special_tokens"))

    def may_be(self, tokenizer_type: str) -> bool:
        """Whether the type of the tokenizer goes by this name too."""
        return tokenizer_type in (self.tokenizer_type, kind(self.tokenizer_type)) or (
            kind(tokenizer_type) == kind(self.tokenizer_type) == "SentencePieceTokenizer"
        )


def kind(tokenizer_type: str) -> str:
    """One name for types that are the same."""
    return OTHER_NAMES.get(tokenizer_type, tokenizer_type)


def same_ids(one: str | Path, other: str | Path) -> bool:
    """Whether an id means the same text in two datasets that both have a record, whenever and however it was made.

    Raises:
        DataError: when a record cannot be understood.
    """
    a, b = read_record(one), read_record(other)
    if a is None or b is None or (a.vocab_size, a.eod) != (b.vocab_size, b.eod):
        return False
    return a.fingerprint == b.fingerprint or bool(_now(one) and _now(one) == _now(other))


def wrote(prefix: str | Path, tokenizer: Tokenizer) -> bool:
    """Whether the ids of a dataset that has a record are those of a tokenizer.

    Raises:
        DataError: when the record cannot be understood.
    """
    record = read_record(prefix)
    if record is None or (record.vocab_size, record.eod) != (tokenizer.vocab_size, tokenizer.eod):
        return False
    known = (tokenizer.fingerprint, *tokenizer.earlier_fingerprints)
    return record.fingerprint in known or _now(prefix) == tokenizer.fingerprint


def _now(prefix: str | Path) -> str | None:
    """The fingerprint that a record would have today, by the files beside it; None where they are not what it says."""
    try:
        tokenizer = recorded_tokenizer(prefix)
    except DataError:
        return None
    return None if tokenizer is None else tokenizer.fingerprint


def read_record(prefix: str | Path, tokenizer_type: str | None = None) -> TokenizerRecord | None:
    """The record beside a dataset; None where none was written, as for a dataset of Megatron-LM.

    Raises:
        DataError: when there is one and it cannot be understood, or names another type than ``tokenizer_type``.
    """
    path = Path(f"{prefix}.{RECORD}")
    try:
        record = TokenizerRecord(**json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{path}: {error}", "write the dataset anew with tools/preprocess_data.py") from error
    if tokenizer_type is not None and not record.may_be(tokenizer_type):
        raise DataError(
            f"{prefix} was written with {record.tokenizer_type}, not with {tokenizer_type}",
            f"--tokenizer-type {record.tokenizer_type}",
        )
    return record


def recorded_tokenizer(prefix: str | Path, tokenizer_type: str | None = None) -> Tokenizer | None:
    """The tokenizer that wrote a dataset, which is ``tokenizer_type`` if that is given; None without a record.

    Raises:
        DataError: when the record names another type, or the tokenizer of that name now gives other ids.
    """
    record = read_record(prefix, tokenizer_type)
    if record is None:
        return None
    tokenizer = _rebuilt(record, Path(f"{prefix}.{FOLDER}"), Path(f"{prefix}.{RECORD}"))
    now = TokenizerRecord.of(tokenizer)
    if record.fingerprint in tokenizer.earlier_fingerprints:
        now = replace(now, fingerprint=record.fingerprint)
    if _said(now, record) != record:
        raise DataError(
            f"{prefix}.{RECORD} records {record}, but that tokenizer is now {now}",
            "write the dataset anew with tools/preprocess_data.py",
        )
    return tokenizer


def _rebuilt(record: TokenizerRecord, folder: Path, path: Path) -> Tokenizer:
    needs_size = record.tokenizer_type in ("NullTokenizer", "TikTokenizer")
    model = None if record.tokenizer_type in ("ByteTokenizer", "NullTokenizer") else str(folder)
    size = record.vocab_size if needs_size else None
    try:
        if record.tokenizer_type == "HuggingFaceTokenizer":  # older data may be of one that is refused today
            return HuggingFaceTokenizer(folder, **(record.settings or {}))
        choice = TokenizerChoice(record.tokenizer_type, model, vocab_size=size, **(record.settings or {}))
    except TypeError as error:
        raise DataError(f"{path}: {error}", "write the dataset anew with tools/preprocess_data.py") from error
    return build_tokenizer(choice)


def _said(now: TokenizerRecord, record: TokenizerRecord) -> TokenizerRecord:
    """Of what a tokenizer is now, as much as a record says."""
    if record.special_ids is not None:
        return now
    return TokenizerRecord(now.tokenizer_type, now.vocab_size, now.eod, now.fingerprint)


def tokenizer_files(prefix: str | Path) -> dict[str, bytes]:
    """Contents by name of the files that a model trained on a dataset carries, for `HuggingFaceTokenizer` to read.

    A ByteTokenizer becomes a tokenizer of the same ids; only, ``<|endoftext|>`` spelled out in a text is one id to
    ``transformers`` unless it is told otherwise (``split_special_tokens=True``). Without a record, or where the ids are
    nobody's (NullTokenizer), there is no file.

    Raises:
        DataError: as `recorded_tokenizer`.
    """
    tokenizer = recorded_tokenizer(prefix)
    return {} if tokenizer is None else tokenizer.hugging_face_files()
