"""Names of splits: ``train``; ``valid``, or ``valid:NAME`` for each of several validation sets; ``test``."""

from __future__ import annotations

WORDS = {"train": "training", "valid": "validation", "test": "test"}


def kind_of(split: str) -> str:
    """Return ``train``, ``valid`` or ``test`` for the name of a split."""
    return split.partition(":")[0]


def name_of(split: str) -> str:
    """Return NAME of ``valid:NAME``, else an empty string."""
    return split.partition(":")[2]


def spoken(split: str) -> str:
    """Return a split's name for messages: ``training``, ``validation``, ``validation (wiki)``."""
    kind, name = WORDS[kind_of(split)], name_of(split)
    return f"{kind} ({name})" if name else kind


def titled(split: str) -> str:
    """Return the start of a summary line: the split's kind padded to eleven characters, then its NAME, if any."""
    name = name_of(split)
    return f"{kind_of(split):<11}" + (f"{name}: " if name else "")
