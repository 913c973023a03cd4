"""The names of a run's parts of the data: ``train``; ``valid``, or ``valid:NAME`` for each of several; ``test``."""

from __future__ import annotations

WORDS = {"train": "training", "valid": "validation", "test": "test"}


def kind_of(split: str) -> str:
    """``train``, ``valid`` or ``test``: what the samples of a split are for."""
    return split.partition(":")[0]


def name_of(split: str) -> str:
    """The name of one of several validation sets; empty for every other split."""
    return split.partition(":")[2]


def spoken(split: str) -> str:
    """A split in a sentence: ``training``, ``validation``, ``wiki validation``."""
    return f"{name_of(split)} {WORDS[kind_of(split)]}".strip()
