"""All config fields as one flat table, and the conversion of text into their values.

``SETTINGS`` maps field names to settings, ``SPELLINGS`` maps flags to settings. A setting parses words of the command
line and YAML values, and spells a value as a flag for use in a fix.
"""

from __future__ import annotations

import ast
import inspect
import math
import re
import shlex
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from megatron.config.errors import format_number
from megatron.config.option import Option
from megatron.config.plugins import registered
from megatron.config.run import RunConfig

NOUNS = {int: "a whole number", float: "a number", bool: "true or false", str: "text (put it in quotes)"}


@dataclass(frozen=True)
class FieldType:
    """The type of a config field."""

    scalar: type  # of the value, or of each item
    optional: bool = False  # None is allowed
    many: bool = False  # the value is a tuple
    length: int | None = None  # items of the tuple; None for any number

    @property
    def open(self) -> bool:
        """True for a tuple of any length."""
        return self.many and self.length is None

    @classmethod
    def of(cls, hint: Any) -> FieldType:
        """Parse an annotation: a scalar, ``tuple[int, int]`` or ``tuple[str, ...]``, each optionally ``| None``."""
        optional = isinstance(hint, UnionType)
        if optional:
            hint = next(a for a in get_args(hint) if a is not type(None))
        if get_origin(hint) is tuple:
            items = get_args(hint)
            return cls(items[0], optional, many=True, length=None if Ellipsis in items else len(items))
        return cls(hint, optional)


@dataclass(frozen=True)
class Setting:
    """One field of one config group."""

    group: str  # field of RunConfig
    name: str  # unique over all groups
    kind: FieldType
    default: Any
    option: Option
    help: str  # the docstring below the field

    @property
    def key(self) -> str:
        """``group.name``, as in ``--set``."""
        return f"{self.group}.{self.name}"

    @property
    def flag(self) -> str:
        """The main spelling of the flag."""
        return flag(self.name)

    @property
    def negative(self) -> str:
        """The flag that stores False in a boolean field."""
        return flag("no_" + self.name)

    @property
    def choices(self) -> tuple[str, ...]:
        """The allowed words, with the names that plugins register; empty if any word is allowed."""
        return (*self.option.choices, *(registered(self.option.kind) if self.option.kind else ()))

    @property
    def constants(self) -> dict[str, Any]:
        """The flags that take no value, with what they store."""
        own = {self.flag: True, self.negative: False} if self.kind.scalar is bool else {}
        return own | dict(self.option.aliases)

    @property
    def spellings(self) -> list[str]:
        """All flags that set this field."""
        return list(dict.fromkeys([self.flag, *self.constants]))

    def value_in(self, config: RunConfig) -> Any:
        """Return the value of the field in a configuration."""
        return getattr(getattr(config, self.group), self.name)

    def spell(self, value: Any) -> str:
        """Return the flag, in its main spelling, that stores ``value``."""
        if value is None or value == ():
            return f"--set {self.key}=null"
        if isinstance(value, bool):
            return self.flag if value else self.negative
        items = value if isinstance(value, tuple) else (value,)
        words = (format_number(item) if isinstance(item, float) else shlex.quote(str(item)) for item in items)
        return " ".join([self.flag, *words])

    def from_words(self, words: Sequence[str]) -> Any:
        """Parse the words after a flag; ``null`` is None for an optional field and () for an open tuple.

        Raises:
            ValueError: with a message for the user.
        """
        if list(words) == ["null"] and (self.kind.optional or self.kind.open):
            return None if self.kind.optional else ()
        if self.kind.many:
            return self._tuple([self._from_text(w) for w in words])
        if len(words) != 1:
            raise ValueError("needs a value" if not words else f"takes one value, not {len(words)}: {' '.join(words)}")
        return self._check_choice(self._from_text(words[0]))

    def from_native(self, value: Any) -> Any:
        """Convert a YAML or JSON value. Numbers may be text, because YAML reads ``1e-5`` as text.

        Raises:
            ValueError: with a message for the user.
        """
        if value is None:
            if self.kind.optional or self.kind.open:
                return None if self.kind.optional else ()
            raise ValueError("needs a value")
        if self.kind.many:
            items = value if isinstance(value, (list, tuple)) else [value]
            if self.kind.scalar is str:  # in a list of texts, such as weights and prefixes, numbers need no quotes
                items = [str(item) if type(item) in (int, float) else item for item in items]
            return self._tuple([self._scalar(item) for item in items])
        return self._check_choice(self._scalar(value))

    def _tuple(self, items: list[Any]) -> tuple[Any, ...]:
        if self.kind.length not in (None, len(items)):
            raise ValueError(f"takes {self.kind.length} values, not {len(items)}")
        return tuple(self._check_choice(item) for item in items)

    def _check_choice(self, value: Any) -> Any:
        if self.choices and value is not None and value not in self.choices:
            raise ValueError(f"{value!r} is not one of {', '.join(self.choices)}")
        return value

    def _scalar(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._from_text(value)
        if self.kind.scalar is float and type(value) is int:
            return float(value)
        if type(value) is not self.kind.scalar:
            raise ValueError(f"{value!r} is not {NOUNS[self.kind.scalar]}")
        return _check_finite(value)

    def _from_text(self, text: str) -> Any:
        if self.option.parse:
            return self.option.parse(text)
        scalar = self.kind.scalar
        if scalar is str:
            return text
        if scalar is bool:
            if text.lower() not in ("true", "false"):
                raise ValueError(f"{text!r} is not {NOUNS[bool]}")
            return text.lower() == "true"
        try:
            return _check_finite(scalar(text))
        except ValueError:
            raise ValueError(f"{text!r} is not {NOUNS[scalar]}") from None


def _check_finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is not {NOUNS[float]}")
    return value


def flag(name: str) -> str:
    """Return the flag of a field: ``hidden_size`` -> ``--hidden-size``."""
    return "--" + name.replace("_", "-")


def replace_by_flags(sentence: str) -> str:
    """Replace the field names in a sentence by their flags.

    A name of one word is replaced only at the beginning; elsewhere it is probably an ordinary word. Text in single
    quotes is the user's and stays as it is.
    """

    def flag_of(word: re.Match[str]) -> str:
        setting = SETTINGS.get(word[0])
        return setting.flag if setting else word[0]

    quoted = r"(?<!\w)'[^']*'(?!\w)"
    return re.sub(quoted + r"|(?<![\w./=-])[a-z0-9]+(_[a-z0-9]+)+(?![\w./=-])|^\w+(?= )", flag_of, sentence)


def _help_texts(classes: Iterable[type]) -> dict[str, str]:
    """Return the docstring below every field, which Python does not store, from the source of the classes.

    Empty where only compiled files are installed.
    """
    texts: defaultdict[str, str] = defaultdict(str)
    for module in {sys.modules[cls.__module__] for cls in classes}:
        try:
            source = inspect.getsource(module)
        except OSError:
            continue
        for node in ast.walk(ast.parse(source)):
            for statement, below in pairwise(node.body if isinstance(node, ast.ClassDef) else ()):
                match statement, below:
                    case ast.AnnAssign(target=ast.Name(name)), ast.Expr(value=ast.Constant(str(text))):
                        texts[name] = " ".join(text.split())
    return texts


def _all_settings() -> dict[str, Setting]:
    table = {}
    texts = _help_texts(GROUPS.values())
    for group, cls in GROUPS.items():
        hints = get_type_hints(cls)
        for f in fields(cls):
            kind = FieldType.of(hints[f.name])
            table[f.name] = Setting(group, f.name, kind, f.default, f.metadata["option"], texts[f.name])
    return table


GROUPS: dict[str, type] = get_type_hints(RunConfig)
SETTINGS = _all_settings()
SPELLINGS = {spelling: setting for setting in SETTINGS.values() for spelling in setting.spellings}
