"""The one error data files and their users meet."""

from __future__ import annotations


class DataError(ValueError):
    """A data file, or what a run asks of it, is wrong; the text says what was seen and how to mend it.

    Attributes:
        seen: the first of the two.
        fixes: the second.
    """

    def __init__(self, seen: str, *fixes: str) -> None:
        self.seen = seen
        self.fixes = fixes
        super().__init__(seen + ("\n  fix: " + " | ".join(fixes) if fixes else ""))
