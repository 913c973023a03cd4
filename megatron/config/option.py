"""How a dataclass field becomes a flag: the one helper every configuration class uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.config.numbers import text


@dataclass(frozen=True)
class Limits:
    """The interval a number, or each of several, must lie in; None leaves a side open."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None

    def hold(self, value: float) -> bool:
        """Whether ``value`` lies inside."""
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
        return " and ".join(f"{words} {text(bound)}" for words, bound in bounds if bound is not None)


@dataclass(frozen=True)
class Option:
    """What a field says about itself beyond its name, type and default.

    Attributes:
        help: one or two sentences.
        choices: the words allowed (each of them, where the field is a tuple).
        aliases: an extra flag -> the constant it stores, for the negative and shorthand spellings of Megatron-LM
            (``--disable-bias-linear`` stores ``False`` in ``add_bias_linear``).
        limits: the numbers allowed.
        parse: turns the text of a flag into the value; raises ValueError. Default: by the field's type.
        example: a value that is often good, of an option whose default is none.
    """

    help: str
    choices: tuple[str, ...] | None = None
    aliases: Mapping[str, Any] | None = None
    limits: Limits = Limits()
    parse: Callable[[str], Any] | None = None
    example: float | None = None


def option(
    default: Any,
    help: str,
    *,
    choices: Sequence[str] | None = None,
    aliases: Mapping[str, Any] | None = None,
    parse: Callable[[str], Any] | None = None,
    example: float | None = None,
    **limits: float,
) -> Any:
    """A dataclass field with a help text; the flag is ``--field-name`` (booleans also ``--no-field-name``).

    Args:
        default: value when nobody says anything.
        help: see ``Option``, as for the rest.
        choices: words allowed.
        aliases: extra flags and the constants they store.
        parse: reads the flag's text.
        example: offered in place of a number that is not allowed.
        limits: ``at_least``, ``above``, ``at_most``, ``below``.

    """
    record = Option(help, tuple(choices) if choices else None, aliases, Limits(**limits), parse, example)
    return field(default=default, metadata={"option": record})
