"""Text to ids and back, and the record beside a dataset of which tokenizer wrote it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron.data.errors import DataError

RECORD = "tokens.json"  # <prefix>.tokens.json says what the ids of <prefix>.bin mean
END_OF_DOCUMENT = "<|endoftext|>"


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

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids."""


class ByteTokenizer:
    """The bytes of UTF-8 text are its ids; 256 ends a document. Any bytes can be encoded."""

    vocab_size = 257
    eod = 256

    @property
    def fingerprint(self) -> str:
        """Of the fixed table."""
        return _fingerprint("0..255 are bytes", f"256 is {END_OF_DOCUMENT}")

    def encode(self, text: str | bytes) -> NDArray[np.uint8]:
        """One id per byte."""
        return np.frombuffer(text.encode() if isinstance(text, str) else text, dtype=np.uint8)

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
        return _fingerprint("decimal ids", str(self.vocab_size))

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

    def decode(self, ids: Iterable[int]) -> str:
        """The ids in decimal."""
        return " ".join(str(i) for i in ids)


TOKENIZER_TYPES = ("ByteTokenizer", "NullTokenizer")


def build_tokenizer(tokenizer_type: str, vocab_size: int | None = None) -> Tokenizer:
    """The tokenizer of a name; ``vocab_size`` is what NullTokenizer needs to be told, and others know themselves.

    Raises:
        DataError: when the name is not known, or the size is missing.
    """
    if tokenizer_type == "ByteTokenizer":
        return ByteTokenizer()
    if tokenizer_type != "NullTokenizer":
        raise DataError(
            f"there is no {tokenizer_type}: text is read by ByteTokenizer; ids that another tokenizer made, by "
            "NullTokenizer (as decimal numbers) or from the .bin and .idx of Megatron-LM's preprocessing",
            "--tokenizer-type ByteTokenizer",
            "--tokenizer-type NullTokenizer --vocab-size N",
            "pretrain_gpt.py --data-path PREFIX_OF_BIN_AND_IDX --vocab-size N",
        )
    if vocab_size is None or vocab_size < 1:
        raise DataError("NullTokenizer must be told how many ids there are", "--vocab-size 50257")
    return NullTokenizer(vocab_size)


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


def read_record(prefix: str | Path) -> TokenizerRecord | None:
    """The record beside a dataset; None where none was written, as for a dataset of Megatron-LM.

    Raises:
        DataError: when there is one and it cannot be understood.
    """
    path = Path(f"{prefix}.{RECORD}")
    try:
        return TokenizerRecord(**json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{path}: {error}", "write the dataset anew with tools/preprocess_data.py") from error


def recorded_tokenizer(prefix: str | Path, tokenizer_type: str | None) -> Tokenizer | None:
    """The tokenizer that wrote a dataset, which is ``tokenizer_type`` if that is given; None without a record.

    Raises:
        DataError: when the record names another type, or the tokenizer of that name now gives other ids.
    """
    record = read_record(prefix)
    if record is None:
        return None
    if tokenizer_type not in (None, record.tokenizer_type):
        raise DataError(
            f"{prefix} was written with {record.tokenizer_type}, not with {tokenizer_type}",
            f"--tokenizer-type {record.tokenizer_type}",
        )
    tokenizer = build_tokenizer(record.tokenizer_type, record.vocab_size)
    if TokenizerRecord.of(tokenizer) != record:
        raise DataError(
            f"{prefix}.{RECORD} records {record}, but that tokenizer is now {TokenizerRecord.of(tokenizer)}",
            "write the dataset anew with tools/preprocess_data.py",
        )
    return tokenizer


def _fingerprint(*facts: str) -> str:
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]
