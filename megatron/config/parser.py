"""The flags of every configuration field, for argparse."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.config.presets import PRESETS
from megatron.config.problems import Problem
from megatron.config.settings import GROUPS, NOUNS, SETTINGS, SPELLINGS, Setting
from megatron.config.sources import Layer

MOST_LETTERS = 70  # of the words to choose from that are shown beside a flag


@dataclass(frozen=True)
class Given:
    """One flag as it was written.

    Attributes:
        spelling: the flag.
        setting: the field it is about.
        words: what followed it.
        constant: what the flag stores by itself; None for a flag that takes words.
    """

    spelling: str
    setting: Setting
    words: tuple[str, ...] = ()
    constant: Any = None

    @property
    def main(self) -> str:
        """The spelling, one for ``--x`` and ``--no-x``: of those a later one is meant to override an earlier."""
        return self.setting.flag if self.spelling == self.setting.negative else self.spelling

    def value(self) -> Any:
        """What it means.

        Raises:
            ValueError: when the words are no value.
        """
        return self.setting.from_words(self.words) if self.constant is None else self.constant


@dataclass(frozen=True)
class Reading:
    """A command line, taken apart.

    Attributes:
        known: ``preset``, ``config``, ``set``, ``check_config``, ``fake_world``, ``fake_rank``, ``world_size``;
            the flags of fields as ``given``.
        foreign: flags that are not ours, each with the words after it; and words that follow no flag.
        malformed: what is wrong with the way in which flags are written.
    """

    known: argparse.Namespace
    foreign: list[list[str]] = field(default_factory=list)
    malformed: Layer = field(default_factory=Layer)

    @property
    def given(self) -> list[Given]:
        """The flags of fields, in order."""
        return self.known.given

    @property
    def spellings(self) -> set[str]:
        """The flags that could be read, and those that are not ours."""
        return {given.spelling for given in self.given} | {words[0] for words in self.foreign}


def read(argv: Sequence[str]) -> Reading:
    """Take a command line apart, flag by flag, so that one which cannot be read hides no other."""
    parser = make_parser()
    reading = Reading(parser.parse_args([]))
    for words in _flags(argv):
        try:
            _, rest = parser.parse_known_args(words, reading.known)
        except argparse.ArgumentError as error:
            _refuse(reading.malformed, words[0].partition("=")[0], error.message)
            continue
        if rest:
            reading.foreign.append(rest)
    return reading


def _flags(argv: Sequence[str]) -> Iterator[list[str]]:
    """Each flag with the words after it; words before any flag come first."""
    words: list[str] = []
    for word in argv:
        if word.startswith("--") and words:
            yield words
            words = []
        words.append(word)
    if words:
        yield words


def _refuse(layer: Layer, spelling: str, message: str) -> None:
    setting = SPELLINGS.get(spelling)
    if setting is None:
        layer.problems.append(Problem("E002", f"{spelling}: {message}"))
    else:  # words after the flag of a field are judged later; only a constant's flag is refused by the parser
        layer.refuse(setting, spelling, ValueError("takes no value"))


class _Note(argparse.Action):
    """Remembers that a flag was written; what it means is decided when all flags are known."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        namespace.given.append(Given(option_string or "", SETTINGS[self.dest], tuple(values), self.const))


class _Help(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=110)

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        """Show one value as one: the parser itself takes any number, to say what is wrong with it later."""
        if isinstance(action, _Note):
            return str(action.metavar)
        return super()._format_args(action, default_metavar)


def make_parser() -> argparse.ArgumentParser:
    """The parser, with one group of flags for each configuration class."""
    parser = argparse.ArgumentParser(
        prog="pretrain_gpt.py",
        usage="%(prog)s [--preset NAME] [--config FILE] [flags] [--set GROUP.FIELD=VALUE]",
        description="Pretrain a GPT. Flags are spelled as Megatron-LM spells them.",
        allow_abbrev=False,
        exit_on_error=False,
        formatter_class=_Help,
    )
    parser.set_defaults(given=[])
    _add_sources(parser.add_argument_group("sources", "Later ones win: preset, config, flags, set."))
    for group, cls in GROUPS.items():
        arguments = parser.add_argument_group(group, inspect.cleandoc(cls.__doc__ or "").split("\n")[0])
        for setting in (s for s in SETTINGS.values() if s.group == group):
            _add(arguments, setting)
    return parser


def _add_sources(group: Any) -> None:
    group.add_argument("--preset", metavar="NAME", help=f"Start from a known model: {', '.join(PRESETS)}.")
    group.add_argument(
        "--config",
        nargs="+",
        action="extend",
        default=[],
        metavar="FILE",
        help="YAML, by group or flat; the last wins.",
    )
    assignment = "Set a field; null empties it."
    group.add_argument("--set", nargs="+", action="extend", default=[], metavar="GROUP.FIELD=VALUE", help=assignment)
    group.add_argument("--check-config", action="store_true", help="Check everything, print a summary and stop.")
    ranks = "Ranks to check for. Default: as many as launched."
    fake = "Check, then build one rank of --world-size, with nothing allocated and no other rank there, and stop."
    group.add_argument("--fake-world", action="store_true", help=fake)
    group.add_argument("--fake-rank", type=_whole, metavar="R", help="The rank of --fake-world. [0]")
    group.add_argument("--world-size", type=_whole, metavar="N", help=ranks)


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not {NOUNS[int]}") from None


def _add(group: Any, setting: Setting) -> None:
    text = describe(setting).replace("%", "%%")
    if setting.kind.scalar is bool:
        constants = {setting.flag: (True, text), setting.negative: (False, argparse.SUPPRESS)}
    else:
        constants = {}
        group.add_argument(
            setting.flag, action=_Note, dest=setting.name, nargs="*", metavar=metavar(setting), help=text
        )
    for alias, value in (setting.option.aliases or {}).items():
        constants[alias] = (value, f"The same as {setting.spell(value)}.")
    for spelling, (value, text) in constants.items():
        group.add_argument(spelling, action=_Note, dest=setting.name, nargs=0, const=value, help=text)


def metavar(setting: Setting) -> str:
    """What the help shows in place of the value."""
    word = {int: "N", float: "X", str: "TEXT"}[setting.kind.scalar]
    if setting.option.choices:
        word = "WORD" if _are_many(setting) else "{" + ",".join(setting.option.choices) + "}"
    return " ".join([word] * (setting.kind.length or 1)) + (
        " ..." if setting.kind.many and not setting.kind.length else ""
    )


def describe(setting: Setting) -> str:
    """Help text with the words to choose from, where they are many, and the default, where the text does not say it."""
    text = setting.option.help
    if _are_many(setting):
        text += f" One of {', '.join(setting.option.choices or ())}."
    if setting.default is None or setting.default == ():
        return text
    return f"{text} [{shown_default(setting)}]"


def _are_many(setting: Setting) -> bool:
    """Whether the words to choose from would not fit beside the flag."""
    return sum(map(len, setting.option.choices or ())) > MOST_LETTERS


def shown_default(setting: Setting) -> str:
    """The default as one would write it; for a boolean, how to turn it off."""
    if setting.kind.scalar is bool:
        return f"on; off: {setting.negative}" if setting.default else "off"
    return setting.spell(setting.default).partition(" ")[2]
