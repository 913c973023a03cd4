"""Interface of a tokenizer, and the batch of ids it returns."""

from __future__ import annotations

import multiprocessing
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron.data.digest import fingerprint
from megatron.data.tokenizers.failures import cannot_encode, failures_as


class Encoded(NamedTuple):
    """Concatenated ids of several texts."""

    ids: NDArray[Any]  # ``[total]``, of an integer dtype that holds every id
    lengths: NDArray[np.int64]  # ``[n]``, number of ids of each text


class Tokenizer(Protocol):
    """Text to ids ``0 .. vocab_size - 1`` and back."""

    @property
    def vocab_size(self) -> int:
        """Number of ids."""

    @property
    def eod(self) -> int:
        """Id that ends a document."""

    @property
    def pad(self) -> int | None:
        """Id that pads a sample, possibly equal to `eod`; None if there is none."""

    @property
    def special_ids(self) -> Mapping[str, int]:
        """Ids of the special tokens, by their spelling."""

    @property
    def fingerprint(self) -> str:
        """Digest of the mapping from ids to text; equal digests mean equal ids. `settings` are not part of it."""

    @property
    def earlier_fingerprints(self) -> tuple[str, ...]:
        """Digests that earlier versions recorded for the same files."""

    @property
    def files(self) -> Mapping[str, bytes]:
        """Contents of the files it was built from, by name."""

    @property
    def library(self) -> str:
        """Package whose code turns text into ids."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """Settings besides files and vocabulary size, as plain JSON values."""

    def encode(self, text: str | bytes) -> NDArray[Any]:
        """Return the ids ``[n]`` of a text; bytes must be UTF-8."""

    def encode_batch(self, texts: Sequence[str | bytes]) -> Encoded:
        """Return the ids of several texts, encoded in parallel if the library has threads."""

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of the ids."""

    def hugging_face_files(self) -> dict[str, bytes]:
        """Return files, by name, from which ``transformers`` builds a tokenizer with equal ids; empty if impossible."""


def earlier_fingerprints(*facts: str) -> tuple[str, ...]:
    """Return the digests used when ``parse_special_tokens`` was still part of them: without and with it."""
    return fingerprint(*facts), fingerprint(*facts, "parse_special_tokens")


def unicode_text(text: str | bytes) -> str:
    """Return the text as a string.

    Raises:
        UnicodeError: if bytes are not UTF-8 or the text has an unpaired surrogate.
    """
    if isinstance(text, bytes):
        return text.decode()
    text.encode()  # raises for an unpaired surrogate
    return text


def from_lists(lists: Sequence[Sequence[int]]) -> Encoded:
    """Concatenate lists of ids."""
    lengths = np.fromiter(map(len, lists), dtype=np.int64, count=len(lists))
    return Encoded(np.fromiter(chain.from_iterable(lists), dtype=np.int32, count=int(lengths.sum())), lengths)


class LibraryTokenizer(ABC):
    """Base class of tokenizers that encode by calling ``library``."""

    library: str

    def encode(self, text: str | bytes) -> NDArray[Any]:
        """Return the ids of a text.

        Raises:
            ValueError: if it is not Unicode text or the library cannot encode it.
        """
        return self.encode_batch([text]).ids

    def encode_batch(self, texts: Sequence[str | bytes]) -> Encoded:
        """Return the ids of several texts, on as many threads as the library uses (one in a worker process).

        Raises:
            ValueError: if one is not Unicode text or the library cannot encode it.
        """
        characters = [unicode_text(text) for text in texts]
        with failures_as(cannot_encode(self.library)):
            return from_lists(self.ids_of(characters))

    @abstractmethod
    def ids_of(self, texts: list[str]) -> Sequence[Sequence[int]]:
        """Call the library, which may raise anything."""


def threads() -> int:
    """Return the number of encoder threads: all cores, or 1 in a worker process.

    ``RAYON_NUM_THREADS``, which libraries written in Rust read themselves, is applied to the other libraries too.
    """
    limit = os.environ.get("RAYON_NUM_THREADS", "")
    if limit.isascii() and limit.isdigit() and int(limit) > 0:
        return int(limit)
    return 1 if multiprocessing.parent_process() is not None else os.cpu_count() or 1
