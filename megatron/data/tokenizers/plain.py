"""Tokenizers without files: bytes, and ids written as decimal numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.data.digest import fingerprint
from megatron.data.errors import DataError
from megatron.data.tokenizers.encoded import Encoded
from megatron.data.tokenizers.huggingface import END_OF_DOCUMENT, bytes_as_ids, tokenizer_files

LONGEST = 100  # digits of a number; int() rejects strings of thousands of digits


class ByteTokenizer:
    """Tokenizer whose ids are the UTF-8 bytes of the text; 256 ends a document. Any bytes can be encoded."""

    vocab_size = 257
    eod = 256
    pad = None
    special_ids: Mapping[str, int] = {END_OF_DOCUMENT: 256}
    files: Mapping[str, bytes] = {}
    settings: Mapping[str, Any] = {}
    earlier_fingerprints: tuple[str, ...] = ()
    library = "numpy"

    @property
    def fingerprint(self) -> str:
        """Digest of the fixed mapping."""
        return fingerprint("0..255 are bytes", f"256 is {END_OF_DOCUMENT}")

    def encode(self, text: str | bytes) -> NDArray[np.uint8]:
        """Return one id per byte."""
        return np.frombuffer(text.encode() if isinstance(text, str) else text, dtype=np.uint8)

    def encode_batch(self, texts: Sequence[str | bytes]) -> Encoded:
        """Return one id per byte of each text."""
        pieces = [text.encode() if isinstance(text, str) else text for text in texts]
        lengths = np.fromiter(map(len, pieces), dtype=np.int64, count=len(pieces))
        return Encoded(np.frombuffer(b"".join(pieces), dtype=np.uint8).astype(np.uint16), lengths)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text; bytes that are not UTF-8 become U+FFFD."""
        pieces = (END_OF_DOCUMENT.encode() if i == self.eod else bytes((i,)) for i in ids)
        return b"".join(pieces).decode(errors="replace")

    def hugging_face_files(self) -> dict[str, bytes]:
        """Return a tokenizer of equal ids, except that ``transformers`` encodes ``<|endoftext|>`` in text as one id."""
        return tokenizer_files(bytes_as_ids())


class NullTokenizer:
    """Tokenizer of text that consists of space-separated decimal ids; the last id ends a document."""

    pad = None
    special_ids: Mapping[str, int] = {}
    files: Mapping[str, bytes] = {}
    settings: Mapping[str, Any] = {}
    earlier_fingerprints: tuple[str, ...] = ()
    library = "numpy"

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.eod = vocab_size - 1

    @property
    def fingerprint(self) -> str:
        """Digest of the vocabulary size."""
        return fingerprint("decimal ids", str(self.vocab_size))

    def encode(self, text: str | bytes) -> NDArray[np.int64]:
        """Return the numbers in the text.

        Raises:
            DataError: if a word is not an id of the vocabulary.
        """
        words = text.split()
        wrong = next((w for w in words if not self._is_id(w)), None)
        if wrong is not None:
            shown = wrong.decode(errors="replace") if isinstance(wrong, bytes) else wrong
            raise DataError(
                f"NullTokenizer reads ids 0..{self.vocab_size - 1} separated by spaces, not '{shown[:40]}'",
                "--tokenizer-type ByteTokenizer",
            )
        return np.array([int(w) for w in words], dtype=np.int64)

    def _is_id(self, word: str | bytes) -> bool:
        return word.isascii() and word.isdigit() and len(word) <= LONGEST and int(word) < self.vocab_size

    def encode_batch(self, texts: Sequence[str | bytes]) -> Encoded:
        """Return the numbers in each text.

        Raises:
            DataError: if a word is not an id of the vocabulary.
        """
        arrays = [self.encode(text) for text in texts]
        lengths = np.fromiter(map(len, arrays), dtype=np.int64, count=len(arrays))
        return Encoded(np.concatenate([np.zeros(0, np.int64), *arrays]), lengths)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the ids as decimal numbers."""
        return " ".join(str(i) for i in ids)

    def hugging_face_files(self) -> dict[str, bytes]:
        """Return no files: the text behind the ids is unknown."""
        return {}
