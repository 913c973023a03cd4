"""Compute MinHash signatures of texts, whose bands of equal values mark near-duplicates (Broder, 1997).

A text becomes the set of its word n-grams after `normalize`. Each of ``bands * rows`` hash functions keeps its minimum
over the set, and two texts have equal minima with a probability that is the Jaccard similarity s of their sets. Texts
that agree in all ``rows`` values of any band are duplicates: with probability ``1 - (1 - s^rows)^bands``
(Leskovec, Rajaraman and Ullman, Mining of Massive Datasets, section 3.4). The hash functions are those of datatrove
with its default 64-bit xxhash, so equal words give equal signatures.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

MERSENNE_PRIME = np.uint64((1 << 61) - 1)
MERSENNE_BITS = np.uint64(61)
TILE = 256  # n-grams hashed at once: their products stay in the cache
NO_KEY = 0  # of texts that have fewer words than an n-gram

NUMBER = re.compile(r"\d+(?:[.,]\d+)?")
UNSPACED = re.compile("[\u0e00-\u0eff\u0f00-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\U00020000-\U0003ffff]")
"""Thai to Burmese, Khmer, Japanese and Chinese characters: no spaces separate their words, so each one is a word."""

Keys = NDArray[np.uint64]


@dataclass(frozen=True)
class MinHashOptions:
    """Parameters of the signatures."""

    ngram: int = 5  # words of an n-gram
    bands: int = 14
    rows: int = 8  # hash functions of a band
    seed: int = 1

    def probability(self, similarity: float) -> float:
        """Return the probability that two texts of this Jaccard similarity agree in a band."""
        return 1 - (1 - similarity**self.rows) ** self.bands


class _Separators(dict[int, str | None]):
    """Table of `str.translate`: marks, symbols and control characters become spaces, accents vanish."""

    def __missing__(self, code: int) -> str | None:
        category = unicodedata.category(chr(code))
        kept = None if category == "Mn" else " " if category[0] in "PSCZ" else chr(code)
        self[code] = kept
        return kept


_SEPARATORS = _Separators()


def normalize(text: str) -> list[str]:
    """Return the words of a text in lower case, without accents and punctuation, every number as 0."""
    text = NUMBER.sub("0", text.lower())
    if not text.isascii():
        text = UNSPACED.sub(r" \g<0> ", unicodedata.normalize("NFD", text))
    return text.translate(_SEPARATORS).split()


def shingles(words: Sequence[str], ngram: int) -> Keys:
    """Return the hashes ``[n]`` of all n-grams of the words, joined by spaces."""
    encoded = [word.encode() for word in words]
    count = len(encoded) - ngram + 1
    if count < 1:
        return np.empty(0, np.uint64)
    text = b" ".join(encoded)
    ends = np.cumsum(np.fromiter(map(len, encoded), np.int64, len(encoded)) + 1)
    starts, stops = (np.append(0, ends)[:count]).tolist(), (ends[ngram - 1 :] - 1).tolist()
    digest = xxhash.xxh64_intdigest
    return np.array([digest(text[start:stop]) for start, stop in zip(starts, stops)], np.uint64)


class MinHash:
    """Hash functions of one seed."""

    def __init__(self, options: MinHashOptions) -> None:
        self.options = options
        count = options.bands * options.rows
        generator = np.random.RandomState(options.seed)
        self._factors = generator.randint(1, int(MERSENNE_PRIME), dtype=np.uint64, size=(1, count))
        self._offsets = generator.randint(0, int(MERSENNE_PRIME), dtype=np.uint64, size=(1, count))

    def signature(self, hashes: Keys) -> Keys:
        """Return the minima ``[bands, rows]`` of all hash functions over hashes ``[n]``, ``n >= 1``."""
        lowest: Keys | None = None
        for first in range(0, len(hashes), TILE):
            values = hashes[first : first + TILE, None] * self._factors
            values += self._offsets
            high = values >> MERSENNE_BITS  # x mod 2^61 - 1, where 2^61 is congruent to 1
            values &= MERSENNE_PRIME
            values += high
            np.subtract(values, MERSENNE_PRIME, out=high)  # wraps around unless the value is too large
            found = np.minimum(values, high, out=values).min(axis=0)
            lowest = found if lowest is None else np.minimum(lowest, found)
        if lowest is None:
            raise ValueError("a signature needs at least one n-gram")
        return lowest.reshape(self.options.bands, self.options.rows)

    def band_keys(self, text: str) -> list[int]:
        """Return a key for each band, equal if the values of the band are; `NO_KEY` if the text has no n-gram."""
        hashes = shingles(normalize(text), self.options.ngram)
        if not len(hashes):
            return [NO_KEY] * self.options.bands
        return [xxhash.xxh3_64_intdigest(band.tobytes()) for band in self.signature(hashes)]


def exact_key(text: str) -> int:
    """Return a key that is equal for texts with the same words between white space."""
    return xxhash.xxh3_64_intdigest(" ".join(text.split()).encode())
