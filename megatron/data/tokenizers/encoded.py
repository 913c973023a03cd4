"""What a tokenizer is to the rest of the project, and what a batch of texts becomes."""

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
    """The ids of several texts, end to end.

    Attributes:
        ids: ``[total]``, of an integer dtype that holds every id of the tokenizer.
        lengths: ``[n]``, how many of them belong to each text; 0 for an empty one.
    """

    ids: NDArray[Any]
    lengths: NDArray[np.int64]


class Tokenizer(Protocol):
    """Text to ids ``0 .. vocab_size - 1`` and back; with equal fingerprints, the same id means the same text."""

    @property
    def vocab_size(self) -> int:
        """Number of ids."""

    @property
    def eod(self) -> int:
        """The id that ends a document."""

    @property
    def pad(self) -> int | None:
        """The id that fills up a sample; it may be the one that ends a document; None without one."""

    @property
    def special_ids(self) -> Mapping[str, int]:
        """The ids of special tokens, by how each is spelled."""

    @property
    def fingerprint(self) -> str:
        """Short digest of the table from ids to text: whether special tokens are looked for in texts is not in it."""

    @property
    def earlier_fingerprints(self) -> tuple[str, ...]:
        """Other digests that earlier records may hold for the same files."""

    @property
    def files(self) -> Mapping[str, bytes]:
        """Contents by name of the files it is made from."""

    @property
    def library(self) -> str:
        """The package whose code turns text into ids."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """What it was told besides its files and its size, as plain JSON values."""

    def encode(self, text: str | bytes) -> NDArray[Any]:
        """Ids ``[n]`` of the text; bytes are taken as UTF-8."""

    def encode_batch(self, texts: Sequence[str | bytes]) -> Encoded:
        """Ids of the texts: as `encode`, and faster for a tokenizer that has threads."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids."""

    def hugging_face_files(self) -> dict[str, bytes]:
        """Contents by name of files that ``transformers`` turns into a tokenizer of the same ids; none if it cannot."""


def earlier_fingerprints(*facts: str) -> tuple[str, ...]:
    """What records held when the setting counted: of the ``facts`` without and with it."""
    return fingerprint(*facts), fingerprint(*facts, "parse_special_tokens")


def unicode_text(text: str | bytes) -> str:
    """The text as characters.

    Raises:
        UnicodeError: when bytes are not UTF-8, or a character is half of a surrogate pair.
    """
    if isinstance(text, bytes):
        return text.decode()
    text.encode()  # half of a surrogate pair is no character
    return text


def from_lists(lists: Sequence[Sequence[int]]) -> Encoded:
    """The batch of lists of ids."""
    lengths = np.fromiter(map(len, lists), dtype=np.int64, count=len(lists))
    return Encoded(np.fromiter(chain.from_iterable(lists), dtype=np.int32, count=int(lengths.sum())), lengths)


class LibraryTokenizer(ABC):
    """How a tokenizer encodes by means of a ``library``."""

    library: str

    def encode(self, text: str | bytes) -> NDArray[Any]:
        """Ids of the text.

        Raises:
            ValueError: when it is no Unicode text, or the library cannot encode it.
        """
        return self.encode_batch([text]).ids

    def encode_batch(self, texts: Sequence[str | bytes]) -> Encoded:
        """Ids of the texts, on as many threads as the library takes: one in a worker process.

        Raises:
            ValueError: when one is no Unicode text, or the library cannot encode it.
        """
        characters = [unicode_text(text) for text in texts]
        with failures_as(cannot_encode(self.library)):
            return from_lists(self.ids_of(characters))

    @abstractmethod
    def ids_of(self, texts: list[str]) -> Sequence[Sequence[int]]:
        """What the library makes of the texts; it may raise anything."""


def threads() -> int:
    """How many threads a library may encode a batch on: all cores; one in a worker process, which shares them.

    ``RAYON_NUM_THREADS``, which the libraries written in Rust heed by themselves, counts for the others too.
    """
    told = os.environ.get("RAYON_NUM_THREADS", "")
    if told.isascii() and told.isdigit() and int(told) > 0:
        return int(told)
    return 1 if multiprocessing.parent_process() is not None else os.cpu_count() or 1
