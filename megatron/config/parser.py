"""The argparse parser with the flags of every config field."""

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

MAX_CHOICES_WIDTH = 70  # characters of choices in a placeholder; longer ones are listed in the help text


@dataclass(frozen=True)
class Given:
    """One flag as it was written."""

    spelling: str
    setting: Setting
    words: tuple[str, ...] = ()  # after the flag
    constant: Any = None  # stored by a flag without words

    @property
    def main(self) -> str:
        """The spelling, the same for ``--x`` and ``--no-x``: of two, the later overrides the earlier."""
        return self.setting.flag if self.spelling == self.setting.negative else self.spelling

    def value(self) -> Any:
        """Return the value.

        Raises:
            ValueError: if the words are not a value.
        """
        return self.setting.from_words(self.words) if self.constant is None else self.constant


@dataclass(frozen=True)
class Reading:
    """A command line, split into flags."""

    # --preset, --config, --set, --check-config, --fake-world, --fake-rank, --world-size; field flags in ``given``
    known: argparse.Namespace
    # Unknown flags, each with the words after it; and words that follow no flag.
    foreign: list[list[str]] = field(default_factory=list)
    malformed: Layer = field(default_factory=Layer)  # problems of flags that argparse rejected

    @property
    def given(self) -> list[Given]:
        """The flags of config fields, in order."""
        return self.known.given

    @property
    def spellings(self) -> set[str]:
        """All spellings on the command line."""
        return {given.spelling for given in self.given} | {words[0] for words in self.foreign}


def read(argv: Sequence[str]) -> Reading:
    """Parse a command line flag by flag, so that one malformed flag does not hide problems of the others."""
    parser = make_parser()
    reading = Reading(parser.parse_args([]))
    for words in _split_flags(argv):
        try:
            _, rest = parser.parse_known_args(words, reading.known)
        except argparse.ArgumentError as error:
            spelling = words[0].partition("=")[0]
            setting = SPELLINGS.get(spelling)
            if setting is None:
                reading.malformed.problems.append(Problem("E002", f"{spelling}: {error.message}"))
            else:  # argparse rejects only words after a constant's flag; words after other flags are checked later
                reading.malformed.refuse(setting, spelling, ValueError("takes no value"))
            continue
        if rest:
            reading.foreign.append(rest)
    return reading


def _split_flags(argv: Sequence[str]) -> Iterator[list[str]]:
    """Yield each flag with the words after it; words before the first flag come first."""
    words: list[str] = []
    for word in argv:
        if word.startswith("--") and words:
            yield words
            words = []
        words.append(word)
    if words:
        yield words


class _RecordFlag(argparse.Action):
    """Record that a flag was written; it is interpreted when all flags are known."""

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
        """Show one value: the parser accepts any number, to report a wrong number later."""
        if isinstance(action, _RecordFlag):
            return str(action.metavar)
        return super()._format_args(action, default_metavar)


def make_parser() -> argparse.ArgumentParser:
    """Build the parser, with one group of flags for each config class."""
    parser = argparse.ArgumentParser(
        prog="pretrain_gpt.py",
        usage="%(prog)s [--preset NAME] [--config FILE] [flags] [--set GROUP.FIELD=VALUE]",
        description="Pretrain a GPT. Flags are spelled as Megatron-LM spells them.",
        allow_abbrev=False,
        exit_on_error=False,
        formatter_class=_Help,
    )
    parser.set_defaults(given=[])
    _add_sources(parser.add_argument_group("sources", "Later ones override earlier ones: preset, config, flags, set."))
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
        help="YAML, by group or flat; later files override earlier ones.",
    )
    assignment = "Set a field; null clears it."
    group.add_argument("--set", nargs="+", action="extend", default=[], metavar="GROUP.FIELD=VALUE", help=assignment)
    group.add_argument("--check-config", action="store_true", help="Check everything, print a summary and stop.")
    ranks = "Number of ranks to check for. Default: as many as launched."
    fake = "Check, build one rank of --world-size without allocating memory or starting other ranks, and stop."
    group.add_argument("--fake-world", action="store_true", help=fake)
    group.add_argument("--fake-rank", type=_int, metavar="R", help="The rank that --fake-world builds. [0]")
    group.add_argument("--world-size", type=_int, metavar="N", help=ranks)


def _int(text: str) -> int:
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
            setting.flag, action=_RecordFlag, dest=setting.name, nargs="*", metavar=metavar(setting), help=text
        )
    for alias, value in (setting.option.aliases or {}).items():
        constants[alias] = (value, f"The same as {setting.spell(value)}.")
    for spelling, (value, text) in constants.items():
        group.add_argument(spelling, action=_RecordFlag, dest=setting.name, nargs=0, const=value, help=text)


def metavar(setting: Setting) -> str:
    """Return the placeholder for the value in the help."""
    word = {int: "N", float: "X", str: "TEXT"}[setting.kind.scalar]
    if setting.option.choices:
        word = "WORD" if _choices_are_long(setting) else "{" + ",".join(setting.option.choices) + "}"
    return " ".join([word] * (setting.kind.length or 1)) + (
        " ..." if setting.kind.many and not setting.kind.length else ""
    )


def describe(setting: Setting) -> str:
    """Return the help text with the default and long lists of choices."""
    text = setting.option.help
    if _choices_are_long(setting):
        text += f" One of {', '.join(setting.option.choices or ())}."
    if setting.default is None or setting.default == ():
        return text
    return f"{text} [{shown_default(setting)}]"


def _choices_are_long(setting: Setting) -> bool:
    """Return True if the choices are too long for the placeholder."""
    return sum(map(len, setting.option.choices or ())) > MAX_CHOICES_WIDTH


def shown_default(setting: Setting) -> str:
    """Return the default as text; for a boolean, the flag that turns it off."""
    if setting.kind.scalar is bool:
        return f"on; off: {setting.negative}" if setting.default else "off"
    return setting.spell(setting.default).partition(" ")[2]
