"""Fill-in-the-middle (Bavarian et al., arXiv 2207.14255): ``--fim-data``.

A document is cut at two random characters into prefix, middle and suffix, and the middle comes last. With the tokens
``<p>``, ``<s>`` and ``<m>`` before prefix, suffix and middle, it becomes one of::

    PSM:  <p> prefix <s> suffix <m> middle
    SPM:  <p> <s> suffix <m> prefix middle

As in Megatron-LM, this happens to the parts of documents that a sample holds, the three texts are encoded again, and a
sample that has become longer is cut at its end.

A part keeps its token ids, cut between them, if its text cannot be encoded again because it has special tokens or
characters that a sample cuts, or if it would become too long for the room that ``--packing best-fit`` leaves.

Random numbers are a hash of the seed, the samples' files, the epoch, the document and the place in it, so they are the
same in every layout, in every blend, and after every resume.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from megatron.config.data import DataConfig
from megatron.data.dataset import Piece, Sample, SourceDataset, SourceUsage, Span, fingerprint, splitmix64
from megatron.data.errors import DataError
from megatron.data.tokenizers.base import Tokenizer

ADDED_IDS = 3
"""Ids that a change adds if the others stay the same."""

SPARE_IDS = 8
"""Room for a packed part of a document to grow; of 1,480 Python files, encoded by a BPE of 32,000 ids, 98 % needed no
more."""

MAX_FIXES = 4  # tokens to choose from, in an error

CUT_CHARACTER = "\ufffd"
"""Character that replaces bytes that are not valid UTF-8."""

PARTS = {"prefix": "pre|begin", "middle": "mid|end", "suffix": "suf|hole"}
"""Parts of a document, and the words in their tokens' names."""

NUM_DRAWS = 5
GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio, the increment of splitmix64

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class FillInMiddle:
    """The change of documents."""

    tokenizer: Tokenizer
    data: DataConfig  # rates, and the text that excludes
    prefix: int  # ids of the tokens
    middle: int
    suffix: int
    pad: int
    eod: int
    split: int | None  # divides fragments; None if nothing does

    @classmethod
    def of(cls, data: DataConfig, tokenizer: Tokenizer | None) -> FillInMiddle:
        """Look up the tokens of the options.

        Raises:
            DataError: if the tokenizer is unknown, or lacks one of them.
        """
        if tokenizer is None:
            seen = "--fim-data encodes parts of documents again, and the data have no tokenizer record"
            raise DataError(seen, "--tokenizer-type HuggingFaceTokenizer --tokenizer-model DIR_OR_tokenizer.json")
        prefix, middle, suffix = (find_token(tokenizer, f"fim_{name}_token", data) for name in PARTS)
        pad = find_token(tokenizer, "fim_pad_token", data)
        eod = find_token(tokenizer, "fim_eod_token", data)
        split = None if data.fim_split_sample is None else find_token(tokenizer, "fim_split_sample", data)
        return cls(tokenizer, data, prefix, middle, suffix, pad, eod, split)

    @cached_property
    def fingerprint(self) -> str:
        """16 hexadecimal digits of everything that decides the change, except the seed."""
        ids = self.prefix, self.middle, self.suffix, self.pad, self.eod, self.split
        rates = self.data.fim_rate, self.data.fim_spm_rate, self.data.fim_fragment_rate, self.data.fim_no_prefix
        return fingerprint("fim", *ids, *rates)

    @cached_property
    def _special(self) -> Ids:
        return np.array([*self.tokenizer.special_ids.values(), self.eod], dtype=np.int64)

    def change(self, ids: Ids, key: int, most: int | None) -> Ids:
        """Change a part of a document, or the documents that end in it.

        Args:
            ids: ``[n]``.
            key: of the random numbers.
            most: ids that may be added; None for any number.
        """
        changed: list[Ids] = []
        for start, document, end in _divided(ids, self.eod):
            fragments = list(_divided(document, self.split))
            rate = 1.0 if len(fragments) == 1 else self.data.fim_fragment_rate or 0.0
            if uniform_draws(key + start)[0] >= self.data.fim_rate:
                rate = 0.0
            for begin, fragment, separator in fragments:
                _, coin, *cuts, spm = uniform_draws(key + start + begin)
                new = self._with_middle_last(fragment, sorted(cuts), spm, most) if coin < rate else fragment
                most = None if most is None else most - len(new) + len(fragment)
                changed += [new, separator]
            changed.append(end)
        return np.concatenate(changed)

    def _with_middle_last(self, ids: Ids, cuts: Sequence[float], spm: float, most: int | None) -> Ids:
        """Cut ids at two places, as shares of their length, and move the middle to the end."""
        text = self.tokenizer.decode(ids.tolist())
        excluded = self.data.fim_no_prefix is not None and text.startswith(self.data.fim_no_prefix)
        if not len(ids) or excluded or (most is not None and most < ADDED_IDS):
            return ids
        parts = self._encoded_parts(ids, text, cuts)
        if parts is None or (most is not None and sum(map(len, parts)) + ADDED_IDS - len(ids) > most):
            parts = np.split(ids, [int(cut * (len(ids) + 1)) for cut in cuts])
        prefix, middle, suffix = parts
        new: list[list[int] | Ids]
        if spm < self.data.fim_spm_rate:
            new = [[self.prefix, self.suffix], suffix, [self.middle], prefix, middle]
        else:
            new = [[self.prefix], prefix, [self.suffix], suffix, [self.middle], middle]
        return np.concatenate([np.asarray(each, dtype=np.int64) for each in new])

    def _encoded_parts(self, ids: Ids, text: str, cuts: Sequence[float]) -> list[Ids] | None:
        """Return the ids of the three parts of a text; None if they would not give the same text again."""
        if CUT_CHARACTER in text or np.isin(ids, self._special).any():
            return None
        first, second = (int(cut * (len(text) + 1)) for cut in cuts)
        parts = [self.tokenizer.encode(part) for part in (text[:first], text[first:second], text[second:])]
        again = "".join(self.tokenizer.decode(part.tolist()) for part in parts)
        return [part.astype(np.int64) for part in parts] if again == text else None


def find_token(tokenizer: Tokenizer, name: str, data: DataConfig) -> int:
    """Return the id of the token that an option names; the one that ends documents if the option is not set.

    Raises:
        DataError: if the tokenizer has no such token.
    """
    token, flag = getattr(data, name), f"--{name.replace('_', '-')}"
    if token is None:
        return tokenizer.eod
    if token in tokenizer.special_ids:
        return tokenizer.special_ids[token]
    ids = tokenizer.encode(token).tolist()
    if len(ids) == 1 and tokenizer.decode(ids) == token:
        return int(ids[0])
    words = PARTS.get(name.split("_")[1], name.split("_")[1])
    known = [each for each in tokenizer.special_ids if re.search(rf"(?i)\b_?(fim)?[^a-z]*({words})", each)]
    fixes = [f"{flag} {shlex.quote(each)}" for each in known[:MAX_FIXES]]
    seen = f"{flag} {token} is no token of the data's tokenizer"
    raise DataError(seen, *fixes or ["data written with a tokenizer that has it", "drop --fim-data"])


def uniform_draws(key: int) -> list[float]:
    """Return `NUM_DRAWS` numbers from 0 to below 1 that a key gives."""
    start = splitmix64(np.array([key % 2**64], dtype=np.uint64))
    bits = splitmix64(start + np.arange(NUM_DRAWS, dtype=np.uint64) * GOLDEN)
    return ((bits >> np.uint64(11)) * 2.0**-53).tolist()


def _divided(ids: Ids, separator: int | None) -> Iterator[tuple[int, Ids, Ids]]:
    """Yield where each part between separators starts, the part, and the separator after it, if there is one."""
    start = 0
    for end in [] if separator is None else np.flatnonzero(ids == separator).tolist():
        yield start, ids[start:end], ids[end : end + 1]
        start = end + 1
    yield start, ids[start:], ids[:0]


class FimDataset(SourceDataset):
    """Samples of a source, with documents changed by `FillInMiddle`."""

    def __init__(self, dataset: SourceDataset, fim: FillInMiddle, seed: int) -> None:
        self.dataset, self.fim, self._seed = dataset, fim, seed
        self.seq_length, self.source, self.part = dataset.seq_length, dataset.source, dataset.part
        self.tokens, self.epochs, self.largest_table = dataset.tokens, dataset.epochs, dataset.largest_table
        self.spare = 0

    def __len__(self) -> int:
        return len(self.dataset)

    def pieces(self, i: int) -> list[Piece]:
        """See `SourceDataset.pieces`."""
        pieces, spare = self.dataset.pieces(i), self.dataset.spare
        facts = int(self.fingerprint, 16), self._seed, self.dataset.epoch_of(i)
        keys = np.zeros(len(pieces), dtype=np.uint64)
        for fact in (*facts, [piece.sequence for piece in pieces]):
            keys = splitmix64(keys + np.asarray(fact, dtype=np.uint64))
        return [
            piece._replace(ids=self.fim.change(piece.ids.astype(np.int64), key + piece.offset, spare))
            for piece, key in zip(pieces, keys.tolist())
        ]

    def assemble(self, pieces: Sequence[Piece], pad: int | None = None) -> Sample:
        """See `SourceDataset.assemble`."""
        return self.dataset.assemble(pieces, self.fim.pad if pad is None else pad)

    def epoch_of(self, i: int) -> int:
        """See `SourceDataset.epoch_of`."""
        return self.dataset.epoch_of(i)

    def spans(self, i: int) -> tuple[Span, ...]:
        """See `Dataset.spans`."""
        return self.dataset.spans(i)

    def places_of(self, sequences: Mapping[str, NDArray[np.int64]]) -> NDArray[np.int64]:
        """See `Dataset.places_of`."""
        return self.dataset.places_of(sequences)

    def source_usage(self, samples: int) -> tuple[SourceUsage, ...]:
        """See `Dataset.source_usage`."""
        return self.dataset.source_usage(samples)

    @cached_property
    def fingerprint(self) -> str:
        """See `fim_fingerprint`."""
        return fim_fingerprint(self.dataset.fingerprint, self.fim)

    def sample_hashes(self, places: NDArray[np.int64]) -> NDArray[np.uint64]:
        """See `Dataset.sample_hashes`."""
        return self.dataset.sample_hashes(places)


def fim_fingerprint(of_dataset: str, fim: FillInMiddle) -> str:
    """Return 16 hexadecimal digits of the documents and of their change."""
    return fingerprint("fim", of_dataset, fim.fingerprint)
