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
    """A split in a sentence: ``training``, ``validation``, ``validation (wiki)``."""
    kind, name = WORDS[kind_of(split)], name_of(split)
    return f"{kind} ({name})" if name else kind


def titled(split: str) -> str:
    """The beginning of a line about a split: its kind in a column of eleven characters, then its name, if any."""
    name = name_of(split)
    return f"{kind_of(split):<11}" + (f"{name}: " if name else "")
