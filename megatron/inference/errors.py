"""The one error people meet who ask a model for text."""

from __future__ import annotations


class InferenceError(ValueError):
    """What was asked cannot be generated; the text says what was seen and how to mend it."""

    def __init__(self, seen: str, *fixes: str) -> None:
        super().__init__(seen + ("\n  fix: " + " | ".join(fixes) if fixes else ""))
