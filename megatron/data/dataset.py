"""The interface of a data set, and what all data sets share.

`Dataset` gives samples by number; `MockDataset` generates them. `sample_digest` hashes which samples were read: each
place of the stream contributes 64 bits mixed from the place and its sample's hash, added modulo 2**64, so that ranks
can sum what each of them read in any order. A checkpoint stores the sum, which proves on resume that the data are the
same. Splits are named ``train``; ``valid``, or ``valid:NAME`` for each of several validation sets; ``test``.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron.config.data import DataConfig
from megatron.config.data_paths import SPLITS


class Sample(NamedTuple):
    """One training sequence of ``s`` tokens.

    A run derives the loss mask and the documents from the tokens. Labels that a sample's own mask leaves out do not
    count, and its own documents replace those that the end-of-document id divides.
    """

    tokens: NDArray[np.int64]  # int64 [s], the model's inputs
    labels: NDArray[np.int64]  # int64 [s], the next token at each position
    loss_mask: NDArray[np.float32] | None = None  # float32 [s], 1 where a label counts, else 0
    # int64 [s], ids of the documents within which attention stays and positions count, in runs; None for one document
    documents: NDArray[np.int64] | None = None
    extra: Mapping[str, NDArray[Any]] = MappingProxyType({})  # [s] each, for objectives; the same names in all samples

    @classmethod
    def of(cls, text: NDArray[np.int64]) -> Sample:
        """Split ``s + 1`` consecutive ids into inputs and labels."""
        return cls(text[:-1], text[1:])


class Span(NamedTuple):
    """Consecutive tokens of one sequence of token files, which a sample was read from."""

    source: str  # prefix of the files
    sequence: int  # number of the sequence in them
    offset: int  # tokens of the sequence before the first one
    tokens: int  # number of tokens


class SourceUsage(NamedTuple):
    """How much of one source a number of samples reads."""

    source: str  # name
    tokens: int  # tokens read
    once: int  # tokens in one epoch
    padding: float = 0.0  # share of the samples that holds no token

    @property
    def epochs(self) -> float:
        """Passes over the source."""
        return self.tokens / self.once

    def __str__(self) -> str:
        padded = f", {self.padding:.2%} padding" if self.padding else ""
        return f"{self.tokens:,} tokens = {self.epochs:.2f} epochs of {self.once:,} in {self.source}{padded}"


class SampleRequest(NamedTuple):
    """A request to a dataset made by code, for samples ``first`` to ``first + samples - 1`` of a split."""

    split: str  # train, valid or test
    first: int
    samples: int
    seq_length: int  # tokens of a sample
    vocab_size: int
    seed: int
    data: DataConfig  # with the plugins' options


class Dataset(Protocol):
    """Samples by number. Sample ``i`` is the same on every rank and at every call."""

    seq_length: int  # tokens per sample

    def __len__(self) -> int: ...

    def __getitem__(self, i: int) -> Sample: ...

    def spans(self, i: int) -> tuple[Span, ...]:
        """Return what sample ``i`` is read from, in order, the last label included; empty for generated data."""
        return ()

    def places_of(self, sequences: Mapping[str, NDArray[np.int64]]) -> NDArray[np.int64]:
        """Return the ascending numbers of the samples that hold a token of ``sequences``, ascending, by source."""
        wanted = {source: set(numbers.tolist()) for source, numbers in sequences.items()}
        held = [
            any(span.tokens and span.sequence in wanted.get(span.source, ()) for span in self.spans(i))
            for i in range(len(self))
        ]
        return np.flatnonzero(held)

    def source_of(self, i: int) -> str | None:
        """Return the source of sample ``i``, as `source_usage` names it; None for generated data."""
        return next((span.source for span in self.spans(i)), None)

    def source_usage(self, samples: int) -> tuple[SourceUsage, ...]:
        """Return the tokens that the first ``samples`` samples read from each source; empty for generated data."""

    def planned_usage(self, samples: int) -> tuple[SourceUsage, ...]:
        """Return `source_usage` within a sample of each source and stage, without reading the order up to there."""
        return self.source_usage(samples)

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits of the content of the samples, independent of paths and of the number of samples."""

    def sample_hashes(self, places: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Return a hash of each of the samples ``places [n]``, from which the checkpoint's data digest is computed."""

    def describe(self, tokens: int) -> str:
        """Describe the sources of the first ``tokens`` tokens, one line per source."""
        return "\n".join(map(str, self.planned_usage(tokens // self.seq_length)))


class Piece(NamedTuple):
    """Consecutive tokens of a document in a sample."""

    sequence: int  # of the first token
    offset: int  # tokens of the sequence before it
    ids: NDArray[Any]  # ids [n]


class SourceDataset(Dataset):
    """Samples of the sequences of one pair of token files, epoch after epoch."""

    source: str  # prefix of the files
    part: range  # the sequences of the split
    tokens: int  # in one epoch
    epochs: int  # passes over the split
    largest_table: NDArray[Any]  # the largest table of the order
    spare: int | None  # ids by which a piece may grow; None if samples are cut at their length

    def __getitem__(self, i: int) -> Sample:
        return self.assemble(self.pieces(i))

    @abstractmethod
    def pieces(self, i: int) -> list[Piece]:
        """Return what sample ``i`` is made of, in order."""

    @abstractmethod
    def assemble(self, pieces: Sequence[Piece], pad: int | None = None) -> Sample:
        """Make a sample of pieces, which may have changed their lengths if it is padded with id ``pad``."""

    @abstractmethod
    def epoch_of(self, i: int) -> int:
        """Return the epoch in which sample ``i`` begins."""


DIGEST_BLOCK = 1 << 14  # so that intermediate arrays stay in the CPU cache


def fingerprint(*facts: object) -> str:
    """Return 16 hexadecimal digits of the SHA-256 of a list of facts."""
    return hashlib.sha256("\n".join(map(str, facts)).encode()).hexdigest()[:16]


def splitmix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply a bijection on 64-bit integers in which every output bit depends on every input bit.

    Source: the finaliser of splitmix64 (Steele, Lea and Flood, OOPSLA 2014), with the constants of D. Stafford's
    variant 13.
    """
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def sample_digest(places: NDArray[np.int64], hashes: NDArray[np.uint64], salt: int) -> int:
    """Return the sum modulo 2**64 of a hash of each place ``[n]``, its sample's hash ``[n]`` and ``salt``."""
    keys = splitmix64(places.astype(np.uint64) ^ np.uint64(salt))
    return int(splitmix64(keys ^ hashes).sum(dtype=np.uint64))


SPLIT_LABELS = {"train": "training", "valid": "validation", "test": "test"}


def split_kind(split: str) -> str:
    """Return ``train``, ``valid`` or ``test`` for the name of a split."""
    return split.partition(":")[0]


def validation_set_name(split: str) -> str:
    """Return NAME of ``valid:NAME``, else an empty string."""
    return split.partition(":")[2]


def split_label(split: str) -> str:
    """Return a split's name for messages: ``training``, ``validation``, ``validation (wiki)``."""
    kind, name = SPLIT_LABELS[split_kind(split)], validation_set_name(split)
    return f"{kind} ({name})" if name else kind


def split_heading(split: str) -> str:
    """Return the start of a summary line: the split's kind padded to eleven characters, then its NAME, if any."""
    name = validation_set_name(split)
    return f"{split_kind(split):<11}" + (f"{name}: " if name else "")


MOCK_ALPHABET_SIZE = 256
MOCK_JUMP_PROBABILITY = 1 / 8


class MockDataset(Dataset):
    """A Markov chain over at most 256 ids drawn from the whole vocabulary.

    Each id has one successor, followed with probability 7/8; otherwise the chain jumps to a random id of the alphabet.
    A model's loss starts at log(vocab_size), falls to log(256) = 5.5 nats once it knows the alphabet, and to the
    entropy of the chain, about 1.1 nats per token, once it knows the successors.

    Sample ``i`` of a stream depends on ``(seed, stream, i)`` only. The alphabet and the successors depend on ``seed``
    only, so that training and validation are different text in the same language.
    """

    def __init__(
        self, vocab_size: int, seq_length: int, num_samples: int, seed: int, stream: int = 0, first: int = 0
    ) -> None:
        """Serve samples ``first .. first + num_samples - 1`` of a stream as samples 0, 1, ... of this dataset."""
        # int64 ids, each followed by its successor, the last by the first
        self.alphabet = _random(seed).permutation(vocab_size)[:MOCK_ALPHABET_SIZE].astype(np.int64)
        self.seq_length = seq_length
        self._vocab_size = vocab_size
        self._num_samples = num_samples
        self._first = first
        self._key = (seed, stream)

    @classmethod
    def create(cls, request: SampleRequest) -> MockDataset:
        """Return the samples that are asked for; each split is a stream."""
        _, first, samples, length, vocab_size, seed, _ = request
        return cls(vocab_size, length, samples, seed, SPLITS.index(request.split), first)

    def __len__(self) -> int:
        return self._num_samples

    def describe(self, tokens: int) -> str:
        """Describe the data in one line."""
        return f"{tokens:,} generated tokens over {len(self.alphabet)} ids"

    def source_usage(self, samples: int) -> tuple[SourceUsage, ...]:
        """Return an empty tuple: generated data have no sources."""
        return ()

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits of vocabulary size, sequence length, seed and stream."""
        return fingerprint("mock", self._vocab_size, self.seq_length, *self._key)

    def sample_hashes(self, places: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Return the samples' positions in the stream."""
        return (places + self._first).astype(np.uint64)

    def __getitem__(self, i: int) -> Sample:
        if not 0 <= i < self._num_samples:
            raise IndexError(f"sample {i} of a mock dataset of {self._num_samples}")
        random = _random(*self._key, self._first + i)
        length, letters = self.seq_length + 1, len(self.alphabet)
        jumps = random.random_sample(length) < MOCK_JUMP_PROBABILITY
        steps = np.where(jumps, random.randint(letters, size=length), 1)
        steps[0] = random.randint(letters)
        return Sample.of(self.alphabet[np.cumsum(steps) % letters])


def _random(*key: int) -> np.random.RandomState:
    # RandomState, whose stream numpy keeps the same in every version
    return np.random.RandomState(np.array(key, dtype=np.uint32))
