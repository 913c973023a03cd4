"""Text to ids and back, and the record beside a dataset of which tokenizer wrote it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron.data import huggingface
from megatron.data.digest import fingerprint
from megatron.data.errors import DataError
from megatron.data.huggingface import END_OF_DOCUMENT, HuggingFaceTokenizer

__all__ = [
    "END_OF_DOCUMENT",
    "FOLDER",
    "RECORD",
    "TOKENIZER_TYPES",
    "ByteTokenizer",
    "HuggingFaceTokenizer",
    "NullTokenizer",
    "Tokenizer",
    "TokenizerRecord",
    "build_tokenizer",
    "read_record",
    "recorded_tokenizer",
    "tokenizer_files",
]

RECORD = "tokens.json"  # <prefix>.tokens.json says what the ids of <prefix>.bin mean
FOLDER = "tokenizer"  # <prefix>.tokenizer/ holds the files of the tokenizer that made them, if it has any


class Tokenizer(Protocol):
    """Text to ids ``0 .. vocab_size - 1`` and back; equal fingerprints mean equal ids for equal text."""

    @property
    def vocab_size(self) -> int:
        """Number of ids."""

    @property
    def eod(self) -> int:
        """The id that ends a document."""

    @property
    def fingerprint(self) -> str:
        """Short digest of the table from text to ids."""

    def encode(self, text: str | bytes) -> NDArray[Any]:
        """Ids ``[n]`` of the text; bytes are taken as UTF-8."""

    def encode_batch(self, texts: Sequence[str | bytes]) -> list[NDArray[Any]]:
        """Ids of each text: as `encode`, and faster for a tokenizer that has threads."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids."""


class ByteTokenizer:
    """The bytes of UTF-8 text are its ids; 256 ends a document. Any bytes can be encoded."""

    vocab_size = 257
    eod = 256

    @property
    def fingerprint(self) -> str:
        """Of the fixed table."""
        return fingerprint("0..255 are bytes", f"256 is {END_OF_DOCUMENT}")

    def encode(self, text: str | bytes) -> NDArray[np.uint8]:
        """One id per byte."""
        return np.frombuffer(text.encode() if isinstance(text, str) else text, dtype=np.uint8)

    def encode_batch(self, texts: Sequence[str | bytes]) -> list[NDArray[np.uint8]]:
        """One id per byte of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """Text, where bytes that are not UTF-8 become U+FFFD."""
        pieces = (END_OF_DOCUMENT.encode() if i == self.eod else bytes((i,)) for i in ids)
        return b"".join(pieces).decode(errors="replace")


class NullTokenizer:
    """Text that is ids already, written in decimal with spaces between; the last id ends a document."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.eod = vocab_size - 1

    @property
    def fingerprint(self) -> str:
        """Of the number of ids."""
        return fingerprint("decimal ids", str(self.vocab_size))

    def encode(self, text: str | bytes) -> NDArray[np.int64]:
        """The numbers in the text.

        Raises:
            DataError: when a word is not an id of the vocabulary.
        """
        words = text.split()
        wrong = next((w for w in words if not w.isdigit() or int(w) >= self.vocab_size), None)
        if wrong is not None:
            shown = wrong.decode(errors="replace") if isinstance(wrong, bytes) else wrong
            raise DataError(
                f"NullTokenizer reads ids 0..{self.vocab_size - 1} with spaces between, not '{shown[:40]}'",
                "--tokenizer-type ByteTokenizer",
            )
        return np.array([int(w) for w in words], dtype=np.int64)

    def encode_batch(self, texts: Sequence[str | bytes]) -> list[NDArray[np.int64]]:
        """The numbers in each text.

        Raises:
            DataError: as `encode`.
        """
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """The ids in decimal."""
        return " ".join(str(i) for i in ids)


TOKENIZER_TYPES = ("HuggingFaceTokenizer", "ByteTokenizer", "NullTokenizer")


def build_tokenizer(
    tokenizer_type: str, vocab_size: int | None = None, tokenizer_model: str | Path | None = None
) -> Tokenizer:
    """The tokenizer of a name.

    Args:
        tokenizer_type: one of `TOKENIZER_TYPES`.
        vocab_size: what NullTokenizer needs to be told; others know it themselves.
        tokenizer_model: folder or file that HuggingFaceTokenizer is read from.

    Raises:
        DataError: when the name is not known, or what it needs is missing or damaged, or it reads no file.
    """
    if tokenizer_type == "HuggingFaceTokenizer":
        if tokenizer_model is None:
            raise DataError("HuggingFaceTokenizer must be told where it is", "--tokenizer-model DIR_OR_tokenizer.json")
        return HuggingFaceTokenizer(tokenizer_model)
    if tokenizer_type not in TOKENIZER_TYPES:
        raise _unknown(tokenizer_type)
    if tokenizer_model is not None:
        raise DataError(f"{tokenizer_type} reads no file", "leave out --tokenizer-model")
    if tokenizer_type == "ByteTokenizer":
        return ByteTokenizer()
    if vocab_size is None or vocab_size < 1:
        raise DataError("NullTokenizer must be told how many ids there are", "--vocab-size 50257")
    return NullTokenizer(vocab_size)


def _unknown(tokenizer_type: str) -> DataError:
    return DataError(
        f"there is no {tokenizer_type}: text is read by HuggingFaceTokenizer or ByteTokenizer; ids that another "
        "tool made, by NullTokenizer (as decimal numbers) or from the .bin and .idx of Megatron-LM's preprocessing",
        "--tokenizer-type HuggingFaceTokenizer --tokenizer-model DIR_OR_tokenizer.json",
        "--tokenizer-type ByteTokenizer",
        "--tokenizer-type NullTokenizer --vocab-size N",
        "pretrain_gpt.py --data-path PREFIX_OF_BIN_AND_IDX --vocab-size N",
    )


@dataclass(frozen=True)
class TokenizerRecord:
    """What a dataset says about the tokenizer that wrote it."""

    tokenizer_type: str
    vocab_size: int
    eod: int
    fingerprint: str

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> TokenizerRecord:
        """The record of a tokenizer."""
        return cls(type(tokenizer).__name__, tokenizer.vocab_size, tokenizer.eod, tokenizer.fingerprint)

    def to_bytes(self) -> bytes:
        """Contents of the file."""
        return (json.dumps(asdict(self), indent=1) + "\n").encode()


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
    if tokenizer_type not in (None, record.tokenizer_type):
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
    folder = f"{prefix}.{FOLDER}" if record.tokenizer_type == "HuggingFaceTokenizer" else None
    tokenizer = build_tokenizer(record.tokenizer_type, record.vocab_size, folder)
    if TokenizerRecord.of(tokenizer) != record:
        raise DataError(
            f"{prefix}.{RECORD} records {record}, but that tokenizer is now {TokenizerRecord.of(tokenizer)}",
            "write the dataset anew with tools/preprocess_data.py",
        )
    return tokenizer


def tokenizer_files(prefix: str | Path) -> dict[str, bytes]:
    """Contents by name of the files that a model trained on a dataset carries, for `HuggingFaceTokenizer` to read.

    A ByteTokenizer becomes a tokenizer of the same ids; only, ``<|endoftext|>`` spelled out in a text is one id to
    ``transformers`` unless it is told otherwise (``split_special_tokens=True``). Without a record, or where the ids are
    nobody's (NullTokenizer), there is no file.

    Raises:
        DataError: as `recorded_tokenizer`.
    """
    tokenizer = recorded_tokenizer(prefix)
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return dict(tokenizer.files)
    if isinstance(tokenizer, ByteTokenizer):
        return huggingface.tokenizer_files(huggingface.bytes_as_ids())
    return {}
