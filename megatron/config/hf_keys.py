"""Keys of a Hugging Face ``config.json``, and reading them so that nothing but what is meant is taken."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]
Values = dict[str, Any]


@dataclass(frozen=True)
class Key:
    """A key of config.json that says exactly what one of our fields says.

    Attributes:
        ours: the field of `ModelConfig`.
        theirs: the key.
        default: its value when the key is missing, as in transformers' class.
        optional: null is a value, too, as it is where the default is null.
    """

    ours: str
    theirs: str
    default: Any
    optional: bool = False


class RefusedError(ValueError):
    """A sentence on what config.json says and is not here."""


def value_of(key: Key, config: Json) -> Any:
    """What ``config`` says under the key, as a number of the kind the key has.

    Raises:
        RefusedError: when it is no such number.
    """
    value = config.get(key.theirs, key.default)
    fractional = isinstance(key.default, float)
    if value is None and (key.default is None or key.optional):
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float) if fractional else int):
        raise RefusedError(f"{key.theirs} is {value!r}, not a {'number' if fractional else 'whole number'}")
    return float(value) if fractional else value


def switch(config: Json, name: str, default: bool) -> bool:
    """What ``config`` says under ``name``, true or false.

    Raises:
        RefusedError: when it says something else.
    """
    value = config.get(name, default)
    if not isinstance(value, bool):
        raise RefusedError(f"{name} is {value!r}, not true or false")
    return value
