"""Base classes of tokenizers, and what all of them share.

`Tokenizer` is the interface the rest of the project uses; `EncodedBatch` holds the concatenated ids of several texts.
`LibraryTokenizer` is the base class of tokenizers that call a library: it checks that texts are Unicode, converts the
library's exceptions to ValueError and concatenates the ids.
"""

from __future__ import annotations

import multiprocessing
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron.config.files import TABLE_FILE_BYTES, read_small
from megatron.data.dataset import fingerprint
from megatron.data.errors import DataError

RUST_PANIC = "PanicException"  # of Rust libraries: not an `Exception`, and a separate class in each


@contextmanager
def convert_library_errors(error: type[Exception], failure: str, *fixes: str) -> Iterator[None]:
    """Convert any exception of a library to ``error(f"{failure}: {first line of its message}", *fixes)``.

    MemoryError, Ctrl-C and the exceptions of signal handlers pass through unchanged.
    """
    try:
        yield
    except MemoryError:
        raise
    except BaseException as cause:
        if not isinstance(cause, Exception) and type(cause).__name__ != RUST_PANIC:
            raise
        message = (str(cause).strip() or type(cause).__name__).partition("\n")[0]
        raise error(f"{failure}: {message}", *fixes) from cause


class EncodedBatch(NamedTuple):
    """Concatenated ids of several texts."""

    ids: NDArray[Any]  # ``[total]``, of an integer dtype that holds every id
    lengths: NDArray[np.int64]  # ``[n]``, number of ids of each text


class Tokenizer(ABC):
    """Text to ids ``0 .. vocab_size - 1`` and back."""

    library: str  # package whose code turns text into ids
    vocab_size: int
    eod: int  # id that ends a document
    pad: int | None = None  # id that pads a sample, possibly equal to `eod`
    special_ids: Mapping[str, int] = {}  # ids of the special tokens, by their spelling
    files: Mapping[str, bytes] = {}  # contents of the files it was built from, by name
    settings: Mapping[str, Any] = {}  # besides files and vocabulary size, as plain JSON values

    @abstractmethod
    def _identity(self) -> tuple[str, ...]:
        """Return what determines the mapping from ids to text. `settings` are not part of it."""

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the mapping from ids to text; equal digests mean equal ids."""
        return fingerprint(*self._identity())

    def _legacy_identity(self) -> tuple[str, ...]:
        """Return what earlier versions computed the fingerprint of."""
        return self._identity()

    @property
    def legacy_fingerprints(self) -> tuple[str, ...]:
        """Digests that earlier versions recorded, without and with the setting ``parse_special_tokens``."""
        facts = self._legacy_identity()
        return fingerprint(*facts), fingerprint(*facts, "parse_special_tokens")

    def encode(self, text: str | bytes) -> NDArray[Any]:
        """Return the ids ``[n]`` of a text; bytes must be UTF-8; raise ValueError if the text cannot be encoded."""
        return self.encode_batch([text]).ids

    @abstractmethod
    def encode_batch(self, texts: Sequence[str | bytes]) -> EncodedBatch:
        """Return the ids of several texts, on as many threads as the library uses (one in a worker process).

        Raises:
            ValueError: if a text cannot be encoded.
        """

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of the ids, including special tokens; unknown ids are skipped."""

    def hugging_face_files(self) -> dict[str, bytes]:
        """Return files, by name, from which ``transformers`` builds a tokenizer with equal ids; empty if impossible."""
        return {}


def unicode_text(text: str | bytes) -> str:
    """Return the text as a string; raise UnicodeError if bytes are not UTF-8 or the text has an unpaired surrogate."""
    if isinstance(text, bytes):
        return text.decode()
    text.encode()  # raises for an unpaired surrogate
    return text


class LibraryTokenizer(Tokenizer):
    """Base class of tokenizers that encode by calling ``library``."""

    def encode_batch(self, texts: Sequence[str | bytes]) -> EncodedBatch:
        """Return the ids of several texts."""
        characters = [unicode_text(text) for text in texts]
        with convert_library_errors(ValueError, f"{self.library} cannot encode this text"):
            lists = self.ids_of(characters)
            lengths = np.fromiter(map(len, lists), dtype=np.int64, count=len(lists))
            ids = np.fromiter(chain.from_iterable(lists), dtype=np.int32, count=int(lengths.sum()))
        return EncodedBatch(ids, lengths)

    @abstractmethod
    def ids_of(self, texts: list[str]) -> Sequence[Sequence[int]]:
        """Call the library, which may raise anything."""


def num_encoder_threads() -> int:
    """Return the number of encoder threads: all cores, or 1 in a worker process.

    ``RAYON_NUM_THREADS``, which libraries written in Rust read themselves, is applied to the other libraries too.
    """
    limit = os.environ.get("RAYON_NUM_THREADS", "")
    if limit.isascii() and limit.isdigit() and int(limit) > 0:
        return int(limit)
    return 1 if multiprocessing.parent_process() is not None else os.cpu_count() or 1


def read_tokenizer_file(path: Path, *fixes: str, limit: int = TABLE_FILE_BYTES) -> bytes:
    """Return the content of a file of at most ``limit`` bytes; raise DataError with ``fixes`` if it cannot be read."""
    try:
        return read_small(path, limit)
    except FileNotFoundError:
        raise DataError(f"there is no {path}", *fixes) from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", *fixes) from error
