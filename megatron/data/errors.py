"""The error type of the data package."""

from __future__ import annotations


class DataError(ValueError):
    """A data file is wrong, or does not fit what the run needs."""

    def __init__(self, seen: str, *fixes: str) -> None:
        self.seen = seen  # what is wrong
        self.fixes = fixes  # what to do about it, one alternative each
        super().__init__(seen + ("\n  fix: " + " | ".join(fixes) if fixes else ""))
