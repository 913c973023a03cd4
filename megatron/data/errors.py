"""The one error data files and their users meet."""

from __future__ import annotations


class DataError(ValueError):
    """A data file, or what a run asks of it, is wrong; the text says what was seen and how to mend it."""

    def __init__(self, seen: str, *fixes: str) -> None:
        super().__init__(seen + ("\n  fix: " + " | ".join(fixes) if fixes else ""))
