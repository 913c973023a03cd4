"""Errors of inference."""

from __future__ import annotations


class InferenceError(ValueError):
    """A request that cannot be fulfilled; the message states the problem and fixes."""

    def __init__(self, seen: str, *fixes: str) -> None:
        super().__init__(seen + ("\n  fix: " + " | ".join(fixes) if fixes else ""))
