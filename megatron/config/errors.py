"""User-facing errors.

A ``Problem`` has a code, a sentence and fixes to paste; ``UserError`` reports all problems at once. Each code has a
section in docs/troubleshooting.md. A fix keeps what was meant; what trains another model, or on other data, is a
choice of the user.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.config.privacy import REDACTED, redact
from megatron.config.text import LONGEST_SENTENCE, clipped

MOST_PROBLEMS = 100
"""Problems that a message lists; a file from somebody else can have any number."""


@dataclass(frozen=True)
class Problem:
    """One error in a command line, file or configuration."""

    code: str  # ``E`` and three digits; docs/troubleshooting.md has a section on each
    sentence: str  # what is wrong, and the rule
    fixes: tuple[str, ...] = ()  # alternatives to paste into the command
    choices: tuple[str, ...] = ()  # alternatives that change the model or the data

    def __str__(self) -> str:
        text = f"{self.code} {clipped(self.sentence, LONGEST_SENTENCE)}"
        text += f"\n  fix: {' | '.join(self.fixes)}" if self.fixes else ""
        return text + (f"\n  choose: {' | '.join(self.choices)}" if self.choices else "")


class UserError(ValueError):
    """All problems of a request; ``str()`` is the message for the user."""

    def __init__(self, problems: Sequence[Problem], notes: Sequence[str] = ()) -> None:
        """Store one or more problems, and notes on what was read besides."""
        self.problems, self.notes = tuple(problems), tuple(notes)
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        closing = f"{count}; docs/troubleshooting.md explains the codes"
        more = [f"and {len(problems) - MOST_PROBLEMS:,} more"] if len(problems) > MOST_PROBLEMS else []
        shown = [*(f"note: {note}" for note in notes), *map(str, problems[:MOST_PROBLEMS]), *more, closing]
        super().__init__(redact("\n".join(shown)))

    def __reduce__(self) -> tuple[type[UserError], tuple[tuple[Problem, ...], tuple[str, ...]]]:
        """Pickle by the problems, not by the message."""
        return type(self), (self.problems, self.notes)


def credential_problem(text: str) -> Problem:
    """Return the problem of a flag with its value, or of a location, that holds a credential."""
    clean = redact(text)
    sentence = f"{clean} holds a credential, which belongs in the environment: options are recorded in files and logs"
    without = clean.replace(f"{REDACTED}@", "")
    return Problem("E014", sentence, () if REDACTED in without else (without,))
