"""How a dataclass field becomes a flag: the one helper every configuration class uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Option:
    """What a field says about itself beyond its name, type and default.

    ``aliases`` maps an extra flag to the constant it stores, for the negative and shorthand
    spellings of Megatron-LM (``--disable-bias-linear`` stores ``False`` in ``add_bias_linear``).
    """

    help: str
    choices: tuple[str, ...] | None = None
    aliases: Mapping[str, Any] | None = None


def option(
    default: Any,
    help: str,
    *,
    choices: Sequence[str] | None = None,
    aliases: Mapping[str, Any] | None = None,
) -> Any:
    """A dataclass field with a help text; the flag is ``--field-name`` (booleans also ``--no-field-name``)."""
    record = Option(help, tuple(choices) if choices else None, aliases)
    return field(default=default, metadata={"option": record})
