"""The helper that declares a dataclass field as a command-line flag.

``option`` attaches help text, choices, limits and aliases to a field; flags, YAML keys, ``--help``, docs/flags.md and
validation are derived from them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from megatron.config.text import format_number


@dataclass(frozen=True)
class Limits:
    """The interval that a number, or every number of a tuple, must lie in; None leaves a side open."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None

    def hold(self, value: float) -> bool:
        """Return True if ``value`` lies inside."""
        return (
            (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        bounds = (
            ("at least", self.at_least),
            ("above", self.above),
            ("at most", self.at_most),
            ("below", self.below),
        )
        return " and ".join(f"{words} {format_number(bound)}" for words, bound in bounds if bound is not None)


class Role(Enum):
    """Part of a run that a field determines. The resume mode decides which roles may change when a run resumes."""

    SHAPE = "shape"  # the shapes of the model's tensors
    FUNCTION = "function"  # what the model computes from its weights
    DATA = "data"  # the samples and their order
    STATE = "state"  # the optimizer's state
    SCHEDULE = "schedule"  # the batch, the length, and the update of a step
    FREE = "free"  # how it is computed, and what is logged
    START = "start"  # a single start of the run


@dataclass(frozen=True)
class Need:
    """A condition without which a field has no effect.

    Setting the field then is an error if ``fix`` names flags that fulfil the condition, and a note if not.
    """

    # ``field`` (set or on), ``field=value|value``, a condition of ``arguments.validate``, or a predicate of RunConfig
    condition: str | Callable[[Any], bool]
    text: str = ""  # the condition in words, with names of fields; default: as written
    fix: str = ""

    def __str__(self) -> str:
        return self.text or str(self.condition).replace("=", " ").replace("|", " or ")


@dataclass(frozen=True)
class Option:
    """The metadata of a config field besides its name, type and default."""

    help: str
    role: Role
    needs: tuple[Need, ...] = ()
    # allowed words, for a tuple of every item; `Setting.choices` adds those of plugins
    choices: tuple[str, ...] | None = None
    kind: str | None = None  # of plugins whose names are allowed too
    append: bool = False  # a repeated flag adds to the tuple instead of replacing it
    # Extra flags and the constants they store, for the negative and shorthand spellings of Megatron-LM:
    # ``--disable-bias-linear`` stores False in ``add_bias_linear``.
    aliases: Mapping[str, Any] | None = None
    limits: Limits = Limits()  # allowed numbers
    # converts the flag's text, raises ValueError; default: by type
    parse: Callable[[str], Any] | None = None
    example: float | None = None  # a reasonable value, for a number without a default


def option(
    default: Any,
    help: str,
    *,
    role: str,
    needs: str | Need | Sequence[Need] = (),
    choices: Sequence[str] | None = None,
    kind: str | None = None,
    append: bool = False,
    aliases: Mapping[str, Any] | None = None,
    parse: Callable[[str], Any] | None = None,
    example: float | None = None,
    **limits: float,
) -> Any:
    """Declare a dataclass field with a help text.

    The flag is ``--field-name``; booleans also have ``--no-field-name``.

    Args:
        default: value when no source sets the field.
        help: one or two sentences.
        role: value of a :class:`Role`.
        needs: conditions without which the field has no effect; a text is a :class:`Need` whose violation is noted.
        choices: allowed words.
        kind: kind of plugins whose names are allowed too.
        append: a repeated flag adds to the tuple.
        aliases: extra flags and the constants they store.
        parse: converts the flag's text.
        example: suggested in place of a number that is not allowed.
        limits: ``at_least``, ``above``, ``at_most``, ``below``.
    """
    if isinstance(needs, str):
        needs = Need(needs)
    record = Option(
        help,
        Role(role),
        (needs,) if isinstance(needs, Need) else tuple(needs),
        tuple(choices) if choices else None,
        kind,
        append,
        aliases,
        Limits(**limits),
        parse,
        example,
    )
    return field(default=default, metadata={"option": record})
