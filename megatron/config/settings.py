"""All config fields as one flat table: their flags, and the conversion of text and YAML values.

``SETTINGS`` maps field names to settings, ``SPELLINGS`` maps flags to settings. They have the options of loaded
plugins too.
"""

from __future__ import annotations

import ast
import inspect
import math
import shlex
import sys
from collections.abc import ItemsView, Iterator, Mapping, ValuesView
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import cache
from itertools import pairwise
from types import UnionType
from typing import Any, NamedTuple, TypeVar, get_args, get_origin

from megatron.config.errors import Problem, UserError
from megatron.config.option import Option
from megatron.config.plugins import option_groups, registered
from megatron.config.run import RunConfig
from megatron.config.text import flag, format_number

NOUNS = {int: "a whole number", float: "a number", bool: "true or false", str: "text (put it in quotes)"}


class Setting:
    """One field of one config group."""

    def __init__(self, group: str, name: str, default: Any, option: Option, hint: Any) -> None:
        """Parse the annotation: a scalar, ``tuple[int, int]`` or ``tuple[str, ...]``, each optionally ``| None``."""
        self.group = group  # field of RunConfig, or name of a plugin's class
        self.section = "model" if group in registered("model_options") else group  # of files and checkpoints
        self.name = name  # unique over all groups
        self.key = f"{self.section}.{name}"  # as in --set
        self.default = default
        self.option = option
        self.optional = isinstance(hint, UnionType)  # None is allowed
        if self.optional:
            hint = next(arg for arg in get_args(hint) if arg is not type(None))
        self.many = get_origin(hint) is tuple
        items = get_args(hint) if self.many else (hint,)
        self.scalar: type = items[0]  # type of the value, or of each item of a tuple
        self.open = Ellipsis in items  # a tuple of any length
        self.length = len(items) if self.many and not self.open else None
        self.flag = flag(name)
        self.negative = flag("no_" + name)  # stores False in a boolean field
        own = {self.flag: True, self.negative: False} if self.scalar is bool else {}
        self.constants: dict[str, Any] = own | dict(option.aliases)  # flags that take no value, with what they store

    @property
    def help(self) -> str:
        """The docstring below the field; empty where only compiled files are installed."""
        owner = next(cls for cls in GROUPS[self.group].__mro__ if self.name in vars(cls).get("__annotations__", ()))
        return help_texts(owner.__module__).get(self.name, "")

    @property
    def choices(self) -> tuple[str, ...]:
        """The allowed words, with the names that plugins register; empty if any word is allowed."""
        return (*self.option.choices, *(registered(self.option.kind) if self.option.kind else ()))

    def is_in(self, group: str) -> bool:
        """Return True if files have the field in a group, now or in an earlier version."""
        return group in (self.group, self.section, self.option.formerly)

    def value_in(self, config: RunConfig) -> Any:
        """Return the value of the field in a configuration."""
        return getattr(config.group(self.group), self.name)

    def allows(self, value: Any) -> bool:
        """Return True unless a number of a value lies outside the limits."""
        numbers = value if self.many else (value,)
        return value is None or self.scalar not in (int, float) or all(map(self.option.allows, numbers))

    def show(self, value: Any, separator: str = " ") -> str:
        """Return a value as text, unquoted; the items of a tuple are separated."""
        items = value if isinstance(value, tuple) else (value,)
        return separator.join(format_number(item) if isinstance(item, float) else str(item) for item in items)

    def spell(self, value: Any) -> str:
        """Return the flag, in its main spelling, that stores ``value``."""
        if value is None or value == ():
            return f"--set {self.key}=null"
        if isinstance(value, bool):
            return self.flag if value else self.negative
        if isinstance(value, str) and value.startswith("-"):  # else it would be a flag
            return f"{self.flag}={shlex.quote(value)}"
        items = value if isinstance(value, tuple) else (value,)
        return " ".join([self.flag, *(shlex.quote(self.show(item)) for item in items)])

    def convert(self, value: Any) -> Any:
        """Return a YAML or JSON value, its text, or the words after a flag as a value of the field.

        Numbers may be text, because YAML reads ``1e-5`` as text. One item stands for a tuple of one. None stays None
        for an optional field and empties a tuple of any length.

        Raises:
            ValueError: with a message for the user.
        """
        if value is None and (self.optional or self.open):
            return None if self.optional else ()
        items = list(value) if isinstance(value, (list, tuple)) else [value]
        if value is None or not (items or self.many):
            raise ValueError("needs a value")
        if len(items) > 1 and not self.many:
            raise ValueError(f"takes one value, not {len(items)}: {' '.join(map(str, items))}")
        converted = tuple(map(self._convert_item, items))
        if self.length not in (None, len(items)):
            raise ValueError(f"takes {self.length} values, not {len(items)}")
        return converted if self.many else converted[0]

    def describe_value(self, value: Any) -> str:
        """Return a value as text after a flag; on or off for a boolean, and nothing for None and ()."""
        if isinstance(value, bool):
            return "on" if value else "off"
        return "" if value is None or value == () else self.spell(value).removeprefix(self.flag)[1:]

    @property
    def metavar(self) -> str:
        """The placeholder for the value in help and documentation; empty for a boolean."""
        word = "WORD" if self.choices else {bool: "", int: "N", float: "X", str: "TEXT"}[self.scalar]
        return f"{word} ..." if self.open else " ".join([word] * (self.length or 1))

    def describe(self, quote: str = "") -> str:
        """Return help text, choices, limits, needs and aliases; words to type are put between ``quote``."""
        parts = [self.help]
        if self.choices:
            parts.append(f"One of {', '.join(f'{quote}{choice}{quote}' for choice in self.choices)}.")
        if self.option.limits:
            parts.append(f"Must be {self.option.limits}.")
        parts += [f"Has no effect without {need}." for need in self.option.needs]
        for alias, value in self.option.aliases.items():
            parts.append(f"{quote}{alias}{quote} is {quote}{self.spell(value)}{quote}.")
        return " ".join(parts)

    def _convert_item(self, value: Any) -> Any:
        if self.many and self.scalar is str and type(value) in (int, float):
            value = str(value)  # in a list of texts, such as weights and prefixes, numbers need no quotes
        parse, check = self.option.parse, self.option.check
        if isinstance(value, str) and check:
            check(value)
        item = parse(value) if isinstance(value, str) and parse else _as_type(value, self.scalar)
        if self.option.kind and not self.choices and item is not None:
            raise ValueError(f"no plugin registers {item!r} as {self.option.kind}")
        if self.choices and item is not None and item not in self.choices:
            same = [choice for choice in self.choices if choice.lower() == str(item).lower()]
            if not same:
                or_plugin = ", nor a name that a --plugin registers" if self.option.kind else ""
                raise ValueError(f"{item!r} is not one of {', '.join(self.choices)}{or_plugin}")
            item = same[0]
        return item


def _as_type(value: Any, scalar: type) -> Any:
    """Return a value, or the value of a text, if it has the type and fits into 64 bits; integers may be floats."""
    item = value
    with suppress(ValueError, OverflowError):
        if scalar is bool and isinstance(value, str):
            item = {"true": True, "false": False}.get(value.lower())
        elif isinstance(value, str) or (scalar is float and type(value) is int):
            item = scalar(value)
    if type(item) is not scalar or (isinstance(item, float) and not math.isfinite(item)):
        raise ValueError(f"{value!r} is not {NOUNS[scalar]}")
    if isinstance(item, int) and not -(2**63) <= item < 2**63:
        raise ValueError(f"{value} is a whole number of more than 64 bits")
    if isinstance(item, str) and "\0" in item:
        raise ValueError(f"{value!r} has a character NUL")
    return item


@cache
def help_texts(module: str) -> dict[str, str]:
    """Return the docstring below every field of a module's classes, which Python does not store, from its source."""
    texts = {}
    with suppress(OSError):
        for node in ast.walk(ast.parse(inspect.getsource(sys.modules[module]))):
            for statement, below in pairwise(node.body if isinstance(node, ast.ClassDef) else ()):
                match statement, below:
                    case ast.AnnAssign(target=ast.Name(name)), ast.Expr(value=ast.Constant(str(text))):
                        texts[name] = " ".join(text.split())
    return texts


BUILT_IN_GROUPS = {name: type(group) for name, group in vars(RunConfig()).items() if is_dataclass(group)}


class _Tables(NamedTuple):
    groups: dict[str, type]
    settings: dict[str, Setting]
    spellings: dict[str, Setting]


@cache
def _tables(plugins: tuple[tuple[str, type], ...]) -> _Tables:
    """Return the options by group, field and flag: the built-in ones, and those of plugins.

    Raises:
        UserError: if a plugin's class is no group of options, or has a name that is in use.
    """
    tables, problems = _Tables({}, {}, {}), []
    for group, cls in (*BUILT_IN_GROUPS.items(), *plugins):
        try:
            settings = {setting.name: setting for setting in _settings_of(group, cls)}
        except TypeError as error:
            problems.append(Problem("E914", f"the options {group} of a plugin: {error}"))
            continue
        spellings = {spelling: each for each in settings.values() for spelling in (each.flag, *each.constants)}
        used = {group, *settings, *spellings} & {*tables.groups, *tables.settings, *tables.spellings}
        if used and (group, cls) in plugins:
            sentence = f"the options {group} of a plugin have names of other options: {', '.join(sorted(used))}"
            problems.append(Problem("E914", sentence))
        tables.groups[group] = cls
        tables.settings.update(settings)
        tables.spellings.update(spellings)
    if problems:
        raise UserError(problems)
    return tables


@cache
def _evaluated(annotation: str) -> Any:
    """Return the type of a field; to evaluate each annotation once makes programs start fast."""
    return eval(annotation)


def _settings_of(group: str, cls: type) -> list[Setting]:
    """Return the settings of a group; TypeError unless it is a frozen dataclass of fields declared with ``option``."""
    if not (is_dataclass(cls) and cls.__dataclass_params__.frozen and group.isidentifier()):  # type: ignore[attr-defined]
        raise TypeError("register a frozen dataclass under a name of letters, digits and underscores")
    settings = []
    for each in fields(cls):
        hint = _evaluated(each.type) if isinstance(each.type, str) else each.type
        if "option" in each.metadata:
            settings.append(Setting(group, each.name, each.default, each.metadata["option"], hint))
        elif each.name != "plugin_options":
            raise TypeError(f"declare the field {each.name} with option(...)")
    if unknown := [setting.name for setting in settings if setting.scalar not in NOUNS]:
        raise TypeError(f"{', '.join(unknown)}: an option is an int, float, bool or str, or a tuple of them")
    return settings


T = TypeVar("T")


class _OptionTable(Mapping[str, T]):
    """One of the tables of the built-in options and those of the plugins that are loaded now."""

    def __init__(self, name: str) -> None:
        self._name = name

    def _now(self) -> dict[str, T]:
        table: dict[str, T] = getattr(_tables(tuple(option_groups().items())), self._name)
        return table

    def __getitem__(self, key: str) -> T:
        return self._now()[key]

    def __contains__(self, key: object) -> bool:
        return key in self._now()

    def __iter__(self) -> Iterator[str]:
        return iter(self._now())

    def __len__(self) -> int:
        return len(self._now())

    def items(self) -> ItemsView[str, T]:
        return self._now().items()

    def values(self) -> ValuesView[T]:
        return self._now().values()


GROUPS: Mapping[str, type] = _OptionTable("groups")
"""The dataclasses of options by name, such as ``model``."""

SETTINGS: Mapping[str, Setting] = _OptionTable("settings")
"""Settings by field name."""

SPELLINGS: Mapping[str, Setting] = _OptionTable("spellings")
"""Settings by flag."""
