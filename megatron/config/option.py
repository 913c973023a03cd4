"""The helper that declares a dataclass field as a command-line flag.

``option`` attaches choices, limits, aliases and more to a field, and the docstring below the field is its help text.
Flags, YAML keys, ``--help``, docs/flags.md and validation are derived from them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeAlias, TypeVar

from megatron.config.text import flag, format_number

T = TypeVar("T")

Run: TypeAlias = Any
"""The whole configuration, a :class:`megatron.config.run.RunConfig`, which imports the classes of options."""

MAX_LAYERS, MAX_SIZE = 10_000, 10**9
"""Limits of the sizes of a model, which bound memory and time before anything is built."""


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
    """A condition without which a field has no effect; setting the field then is noted."""

    condition: str  # as :func:`megatron.config.settings.holds` reads it, or a name in ``arguments.validate.CONDITIONS``
    text: str = ""  # the condition in words; default: as a flag

    def __str__(self) -> str:
        name, _, values = self.condition.partition("=")
        return self.text or f"{flag(name)} {values.replace('|', ' or ')}".strip()


INSIDE = {"at_least": operator.ge, "above": operator.gt, "at_most": operator.le, "below": operator.lt}
"""Limits of a number, or of every number of a tuple, as keywords of :func:`option`."""


@dataclass(frozen=True, kw_only=True)
class WithPluginOptions:
    """A configuration that components of plugins get, and find their own options in."""

    plugin_options: tuple[Any, ...] = field(default=(), repr=False)  # objects of the classes that plugins register

    def plugin(self, cls: type[T]) -> T:
        """Return the options that a plugin has registered as ``cls``; the defaults if no source sets one."""
        return next((each for each in self.plugin_options if type(each) is cls), cls())


@dataclass(frozen=True)
class MegatronOption:
    """Differences between a field here and the flag of that name in Megatron-LM."""

    default: str = ""  # if it is another one
    reason: str = ""  # for ours
    values: Mapping[str, str] = field(default_factory=dict)  # their words, and ours for the same
    missing: Mapping[str, str] = field(default_factory=dict)  # words for what is not here; ``several``: of many words


ZERO_IS_NONE = MegatronOption(values={"0": "null"})


@dataclass(frozen=True)
class Option:
    """The metadata of a config field besides its name, type, default and help text."""

    role: Role
    needs: tuple[Need, ...]
    bounds: Mapping[str, float]  # the limits that are set, by their names in ``INSIDE``
    # allowed words, for a tuple of every item; `Setting.choices` adds those of plugins
    choices: tuple[str, ...] = ()
    kind: str | None = None  # of plugins whose names are allowed too
    same_shapes: tuple[tuple[str, ...], ...] = ()  # words between which a change keeps the shapes: one of FUNCTION
    droppable: bool = False  # a model without it has tensors that one with it has, too: a change of FUNCTION
    append: bool = False  # a repeated flag adds to the tuple instead of replacing it
    # Extra flags and the constants they store, for the negative and shorthand spellings of Megatron-LM:
    # ``--disable-bias-linear`` stores False in ``add_bias_linear``.
    aliases: Mapping[str, Any] = field(default_factory=dict)
    # Other spellings of the flag in Megatron-LM, and by Megatron-LM's earlier releases; they take the same value.
    spellings: tuple[str, ...] = ()
    formerly: str = ""  # group of the field in the files of earlier versions
    parse: Callable[[str], Any] | None = None  # converts the flag's text, raises ValueError; default: by type
    check: Callable[[str], Any] | None = None  # raises ValueError for a text that is not allowed
    example: float | None = None  # suggested in place of a number that is not allowed and has no default
    megatron: MegatronOption = MegatronOption()

    def allows(self, number: float) -> bool:
        """Return True if ``number`` is finite and lies inside the limits."""
        return abs(number) < math.inf and all(INSIDE[name](number, bound) for name, bound in self.bounds.items())

    @property
    def limits(self) -> str:
        """The limits in words; empty without any."""
        return " and ".join(f"{name.replace('_', ' ')} {format_number(n)}" for name, n in self.bounds.items())


def option(default: Any, *, role: str, needs: str | Need | Sequence[str | Need] = (), **properties: Any) -> Any:
    """Declare a config field. Its flag is ``--field-name``; booleans also have ``--no-field-name``.

    Args:
        default: value when no source sets the field.
        role: value of a :class:`Role`.
        needs: conditions without which the field has no effect; a text is a :class:`Need`.
        properties: limits of a number (``at_least``, ``above``, ``at_most``, ``below``), and other attributes of
            :class:`Option`.

    A class of options carries what belongs to it, in texts of paragraphs and in methods. ``refused`` has rules on
    combinations (`megatron.config.conditions.Rule`), ``other_meanings`` notes on flags that mean something else in
    Megatron-LM (`megatron.arguments.megatron_flags`). Methods take the whole configuration and the number of ranks:
    ``check_...`` yields problems, ``note_...`` yields notes of one line on a configuration without problems, and
    ``row_...`` returns that row of the summary, or what is added to it. The memory forecast reads ``state_copies``,
    copies of the main parameters that a feature keeps (part of the report -> option that turns it on, and their
    number), and ``buffer_bytes``, its other bytes on a rank. Rules on ``cuda_graph=`` and methods ``check_graph_...``
    decide what ``--cuda-graph auto`` captures, too. A class from which a group inherits is a dataclass without methods
    of its own (``init=False, eq=False, repr=False``), which take time to make.
    """
    conditions = (needs,) if isinstance(needs, (str, Need)) else needs
    needed = tuple(Need(each) if isinstance(each, str) else each for each in conditions)
    bounds = {name: properties.pop(name) for name in INSIDE if name in properties}
    return field(default=default, metadata={"option": Option(Role(role), needed, bounds, **properties)})
