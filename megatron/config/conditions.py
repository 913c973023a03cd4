"""Conditions on the options of a run, and the rules by which a class of options refuses combinations."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from inspect import isfunction
from typing import Any

from megatron.config.errors import Problem
from megatron.config.plugins import registered
from megatron.config.run import RunConfig
from megatron.config.settings import GROUPS, SETTINGS
from megatron.config.text import format_number, nearest_multiples

RELATIONS: dict[str, Callable[[Any, Any], Any]] = {">": operator.gt, ">=": operator.ge, "%": operator.mod}


def value_of(name: str, config: RunConfig) -> Any:
    """Return the value of a field, or of a property of a class of options."""
    if name in SETTINGS:
        return SETTINGS[name].value_in(config)
    return next(getattr(config.group(group), name) for group, cls in GROUPS.items() if hasattr(cls, name))


def holds(condition: str, config: RunConfig, or_plugin: bool = False) -> bool:
    """Return True if a condition holds, such as ``optimizer!=muon and adam_eps or not save``.

    A term is ``name`` (of a field or property that is set, or on), ``name=value|value``, ``name!=value|value`` (a list
    has, or has not, one of the values), or a comparison with a number or another field, false unless both are set:
    ``name>other``, ``name>=other``, and ``name%other`` if it is no multiple. It may follow ``not``; ``and`` binds more
    tightly than ``or``.

    Args:
        condition: as text.
        config: of the run.
        or_plugin: ``field=value`` holds for names that plugins register too: they may use the options of what is
            built in.
    """
    alternatives = (each.split(" and ") for each in condition.split(" or "))
    return any(all(_term_holds(term, config, or_plugin) for term in terms) for terms in alternatives)


def _term_holds(term: str, config: RunConfig, or_plugin: bool) -> bool:
    positive, name, relation, operand = _parse_term(term)
    value = value_of(name, config)
    if relation == "":
        found = value is not None and value is not False and value != ()
    elif relation in RELATIONS:
        other = float(operand) if operand.isdecimal() else value_of(operand, config)
        found = None not in (value, other) and bool(RELATIONS[relation](value, other))
    else:
        values = value if isinstance(value, tuple) else (value,)
        found = any(str(each) in operand.split("|") for each in values) == (relation == "=")
        kind = SETTINGS[name].option.kind if name in SETTINGS else None
        found = found or (or_plugin and relation == "=" and kind is not None and value in registered(kind))
    return found == positive


@cache
def _parse_term(term: str) -> tuple[bool, str, str, str]:
    """Return False after ``not``, and the name, relation and operand of a term."""
    positive = term.removeprefix("not ")
    name, relation, operand = re.fullmatch(r"(\w+)(!=|>=|=|>|%|)(.*)", positive).groups()  # type: ignore[union-attr]
    return positive == term, name, relation, operand


@dataclass(frozen=True)
class Rule:
    """A configuration for which the condition holds is refused."""

    condition: str  # as `holds` reads it
    code: str
    sentence: str  # ``{name}`` is a value, ``{name+1}`` and ``{name*4}`` are computed from it
    fixes: tuple[str, ...]  # also with ``{name%other}``: the nearest multiples of ``other``, a fix for each

    @classmethod
    @cache
    def parse(cls, text: str) -> Rule:
        """Read a paragraph: the condition, then code and sentence, then ``fix:`` and fixes between bars."""
        message, _, fixes = " ".join(text.split()).partition(" fix: ")
        condition, code, sentence = re.split(r" (E\d{3}) ", message, maxsplit=1)
        return cls(condition, code, sentence, tuple(fixes.split(" | ")))

    def problem(self, config: RunConfig) -> Problem:
        """Return the problem of a configuration for which the condition holds."""
        fixes = tuple(text for fix in self.fixes for text in _filled(fix, config))
        return Problem(self.code, _filled(self.sentence, config)[0], fixes)


def _filled(text: str, config: RunConfig) -> list[str]:
    """Return a text with its values; several texts for multiples."""
    texts = [text]
    for place, name, sign, operand in re.findall(r"(\{(\w+)(?:([-+*%])(\w+))?\})", text):
        value = value_of(name, config)
        if sign == "%":
            other = int(operand) if operand.isdecimal() else value_of(operand, config)
            shown = [*map(str, nearest_multiples(value, other))]
        elif sign:
            shown = [str(value * int(operand) if sign == "*" else value + int(sign + operand))]
        else:
            shown = [SETTINGS[name].show(value) if name in SETTINGS else format_number(value)]
        texts = [each.replace(place, number) for each in texts for number in shown]
    return texts


def paragraphs(name: str) -> list[str]:
    """Return the paragraphs of a text that classes of options have, those of loaded plugins too."""
    return [text for group in GROUPS.values() for text in _paragraphs_of(group, name)]


@cache
def _paragraphs_of(cls: type, name: str) -> list[str]:
    texts = (vars(each).get(name, "") for each in reversed(cls.__mro__))
    return [each for text in texts for each in text.split("\n\n") if each.strip()]


def rules() -> list[Rule]:
    """Return the rules of all classes of options."""
    return [Rule.parse(text) for text in paragraphs("refused")]


def broken_rules(config: RunConfig, rules: Iterable[Rule]) -> Iterator[Problem]:
    """Yield the problems of rules whose condition holds."""
    return (rule.problem(config) for rule in rules if holds(rule.condition, config))


def group_methods(config: RunConfig, prefix: str) -> Iterator[Callable[[RunConfig, int], Any]]:
    """Yield the methods of all classes of options whose names begin with ``check_``, ``note_`` or ``row_``."""
    for name, cls in GROUPS.items():
        yield from (getattr(config.group(name), method) for method in _methods_of(cls, prefix))


@cache
def _methods_of(cls: type, prefix: str) -> list[str]:
    own = (vars(each).items() for each in reversed(cls.__mro__))
    return [name for items in own for name, each in items if name.startswith(prefix) and isfunction(each)]
