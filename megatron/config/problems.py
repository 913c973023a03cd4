"""What is wrong with what a person asked for, and how it is told."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        code: ``E`` and three digits; its section in docs/troubleshooting.md explains the rule.
        sentence: what was seen and which rule it breaks.
        fixes: ways out, each of which can be pasted into the command.
    """

    code: str
    sentence: str
    fixes: tuple[str, ...] = ()

    def __str__(self) -> str:
        text = f"{self.code} {self.sentence}"
        return f"{text}\n  fix: {' | '.join(self.fixes)}" if self.fixes else text


class UserError(ValueError):
    """Everything that is wrong with a request, told at once; ``str()`` is what the person reads."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        """Tell of one or more problems."""
        self.problems = tuple(problems)
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        closing = f"{count}; docs/troubleshooting.md explains the codes"
        super().__init__("\n".join([*map(str, problems), closing]))

    def __reduce__(self) -> tuple[type[UserError], tuple[tuple[Problem, ...]]]:
        """Pickled, it is made of the same problems again."""
        return type(self), (self.problems,)


def did_you_mean(word: str, known: Iterable[str]) -> str | None:
    """The known word that ``word`` is most likely a misspelling of."""
    return next(iter(get_close_matches(word, list(known), n=1, cutoff=0.72)), None)
