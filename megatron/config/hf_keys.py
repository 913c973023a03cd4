"""Typed access to the keys of a Hugging Face ``config.json``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]
Values = dict[str, Any]


@dataclass(frozen=True)
class Key:
    """A numeric key of config.json with the same meaning as a field of `ModelConfig`."""

    ours: str  # field of ModelConfig
    theirs: str  # key in config.json
    default: Any  # value of a missing key, as in the transformers class
    optional: bool = False  # null is allowed although the default is not null


class RefusedError(ValueError):
    """A value in config.json that is not supported."""


def value_of(key: Key, config: Json) -> Any:
    """Return the value of a key: a float if its default is one, else an int; or None where null is allowed.

    Raises:
        RefusedError: when the value has another type.
    """
    value = config.get(key.theirs, key.default)
    fractional = isinstance(key.default, float)
    if value is None and (key.default is None or key.optional):
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float) if fractional else int):
        raise RefusedError(f"{key.theirs} is {value!r}, not {'a number' if fractional else 'a whole number'}")
    return float(value) if fractional else value


def switch(config: Json, name: str, default: bool) -> bool:
    """Return the boolean value of a key.

    Raises:
        RefusedError: when the value is not a boolean.
    """
    value = config.get(name, default)
    if not isinstance(value, bool):
        raise RefusedError(f"{name} is {value!r}, not true or false")
    return value
