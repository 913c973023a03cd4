"""From a command line to a checked configuration.

Values are laid over one another in this order: defaults, ``--preset``, ``--config`` files, flags, ``--set``. Everything
that is wrong, in the spelling as in the values, is reported at once.
"""

from __future__ import annotations

import argparse
import inspect
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from megatron.config import megatron_flags
from megatron.config.presets import PRESETS
from megatron.config.problems import Problem, UserError, did_you_mean
from megatron.config.resolve import resolve
from megatron.config.run import RunConfig
from megatron.config.settings import GROUPS, SETTINGS, Setting, flag
from megatron.config.sources import Layer, build, from_assignments, from_file, lay_over
from megatron.config.sources import to_yaml as to_yaml
from megatron.config.summary import summary
from megatron.config.validate import problems


@dataclass(frozen=True)
class Parsed:
    """A command line that passed every check.

    Attributes:
        config: resolved: derived values are written out.
        world_size: ranks it was checked for.
        check_only: whether ``--check-config`` asked for nothing more.
        notes: one line each, to be printed: what was ignored, and why.
    """

    config: RunConfig
    world_size: int
    check_only: bool = False
    notes: tuple[str, ...] = ()

    def summary(self) -> str:
        """What ``--check-config`` prints."""
        notes = [f"note: {note}" for note in self.notes]
        return "\n".join([*notes, summary(self.config, self.world_size), "config ok"])


@dataclass
class Given:
    """One flag as it was written: its spelling, the field it is about, and the value or the words after it."""

    spelling: str
    setting: Setting
    words: list[str] = field(default_factory=list)
    constant: Any = None

    def value(self) -> Any:
        """What it means; raises ValueError."""
        return self.constant if self.constant is not None else self.setting.from_words(self.words)


def parse(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> Parsed:
    """The configuration of a command line.

    Args:
        argv: without the program's name.
        environ: where torchrun or srun say how many ranks there are.

    Raises:
        UserError: with every problem of flags, files and values.

    """
    known, unknown = make_parser().parse_known_args(list(argv))
    given: list[Given] = getattr(known, "given", [])
    layers = [*_presets(known.preset), *map(from_file, known.config), _from_flags(given), from_assignments(known.set)]
    foreign, notes = _foreign(unknown)
    config = build(lay_over([layer.values for layer in layers]))
    found = [p for layer in (*layers, foreign) for p in layer.problems] + _habits(unknown, config)
    doubtful = set().union(*(layer.doubtful for layer in (*layers, foreign)))
    world_size = _world_size(known, config, environ, found, notes)
    found += problems(config, world_size, frozenset(doubtful))
    if found:
        raise UserError(found)
    return Parsed(resolve(config, world_size), world_size, known.check_config, tuple(notes))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError([Problem("E002", message)])


class _Note(argparse.Action):
    """Remembers that a flag was written, in order; what it means is decided when all are known."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        namespace.given = getattr(namespace, "given", [])
        words = values if self.nargs == "*" else []
        namespace.given.append(Given(option_string or self.dest, SETTINGS[self.dest], words, self.const))


def make_parser() -> argparse.ArgumentParser:
    """The parser, one group of flags for each configuration class."""
    parser = _Parser(
        prog="pretrain_gpt.py",
        description="Pretrain a GPT. Flags are spelled as Megatron-LM spells them; docs/flags.md lists them too.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=110),
    )
    sources = parser.add_argument_group("where values come from (later ones win: preset, config, flags, set)")
    sources.add_argument("--preset", default=None, metavar="NAME", help=f"Start from {', '.join(PRESETS)}.")
    sources.add_argument("--config", nargs="+", default=[], metavar="YAML", help="Files of options, by group or flat.")
    sources.add_argument(
        "--set",
        action="extend",
        nargs="+",
        default=[],
        metavar="GROUP.FIELD=VALUE",
        help="Set one field; null empties it.",
    )
    sources.add_argument("--check-config", action="store_true", default=False, help="Check, print a summary and stop.")
    sources.add_argument(
        "--world-size", type=int, default=None, metavar="N", help="Ranks to check for. Default: as the launcher says."
    )
    for group, cls in GROUPS.items():
        arguments = parser.add_argument_group(group, inspect.cleandoc(cls.__doc__ or "").split("\n")[0])
        for setting in (s for s in SETTINGS.values() if s.group == group):
            _add(arguments, setting)
    return parser


def _add(group: Any, setting: Setting) -> None:
    help_text = describe(setting).replace("%", "%%")
    if setting.kind.scalar is bool:
        group.add_argument(setting.flag, action=_Note, dest=setting.name, nargs=0, const=True, help=help_text)
        group.add_argument(
            negative(setting), action=_Note, dest=setting.name, nargs=0, const=False, help=argparse.SUPPRESS
        )
    else:
        group.add_argument(
            setting.flag, action=_Note, dest=setting.name, nargs="*", metavar=metavar(setting), help=help_text
        )
    for spelling, value in (setting.option.aliases or {}).items():
        group.add_argument(
            spelling, action=_Note, dest=setting.name, nargs=0, const=value, help=f"= {spell(setting, value)}"
        )


def negative(setting: Setting) -> str:
    """The flag that stores False in a boolean field."""
    return flag("no_" + setting.name)


def metavar(setting: Setting) -> str:
    """What the help shows in place of the value."""
    if setting.option.choices:
        return "{" + ",".join(setting.option.choices) + "}"
    word = {int: "N", float: "X", str: "TEXT"}[setting.kind.scalar]
    return " ".join([word] * (setting.kind.length or 1))


def spell(setting: Setting, value: Any) -> str:
    """The flag, in its main spelling, that stores ``value``."""
    if value is True or value is False:
        return setting.flag if value else negative(setting)
    if isinstance(value, tuple):
        return " ".join([setting.flag, *map(str, value)])
    return f"{setting.flag} {value:g}" if isinstance(value, float) else f"{setting.flag} {value}"


def describe(setting: Setting) -> str:
    """Help text with the default, where the text does not say it."""
    default = setting.default
    if default is None or default == ():
        return setting.option.help
    if setting.kind.scalar is bool:
        shown = f"on; off: {negative(setting)}" if default else "off"
    else:
        shown = spell(setting, default).partition(" ")[2]
    return f"{setting.option.help} [{shown}]"


def _presets(name: str | None) -> Iterator[Layer]:
    if name is None:
        return
    if name in PRESETS:
        yield Layer(values=dict(PRESETS[name]))
        return
    guess = did_you_mean(name, PRESETS)
    fixes = (f"--preset {guess}",) if guess else tuple(f"--preset {known}" for known in PRESETS)
    # Without the preset nothing is known about the model, so nothing about it is checked.
    shape = {s.name for s in SETTINGS.values() if s.name in PRESETS["tiny-llama"] or s.group == "model"}
    yield Layer(problems=[Problem("E007", f"there is no preset {name}", fixes)], doubtful=shape)


def _from_flags(given: Sequence[Given]) -> Layer:
    layer, said = Layer(), dict[str, Given]()
    for g in given:
        name = g.setting.name
        try:
            value = g.value()
        except ValueError as error:
            layer.refuse(g.setting, g.spelling, error)
            continue
        before = said.get(name)
        if before is not None and _main(before) != _main(g) and layer.values[name] != value:
            layer.doubtful.add(name)
            layer.problems.append(
                Problem(
                    "E003", f"{before.spelling} and {g.spelling} contradict each other: both set {name}", ("drop one",)
                )
            )
        said[name], layer.values[name] = g, value
    return layer


def _main(given: Given) -> str:
    """Spellings that mean to override one another (``--x`` and a later ``--no-x``) are one."""
    setting = given.setting
    return setting.flag if given.spelling in (setting.flag, negative(setting)) else given.spelling


def _foreign(unknown: Sequence[str]) -> tuple[Layer, list[str]]:
    """What is wrong with the flags that are not ours, and notes on those that may be ignored."""
    layer, notes = Layer(), list[str]()
    for spelling, words in _grouped(unknown):
        reason = megatron_flags.IGNORED.get(spelling)
        harmless = megatron_flags.HARMLESS_VALUES.get(spelling)
        if reason and (harmless is None or tuple(words)[:1] in [(h,) for h in harmless]):
            notes.append(f"ignored: {' '.join([spelling, *words])} because {reason}")
        else:
            layer.problems.append(_refusal(spelling, words, layer.doubtful))
    return layer, notes


def _grouped(unknown: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Flags with the words after them; words before any flag come under an empty flag."""
    spelling, words = "", list[str]()
    for word in unknown:
        if not word.startswith("--"):
            words.append(word)
            continue
        if spelling or words:
            yield spelling, words
        spelling, equals, value = word.partition("=")
        words = [value] if equals else []
    if spelling or words:
        yield spelling, words


def _refusal(spelling: str, words: list[str], doubtful: set[str]) -> Problem:
    if not spelling:
        return Problem("E001", f"{' '.join(words)}: belongs to no flag")
    if spelling in megatron_flags.IGNORED:
        return Problem("E004", f"{spelling} {' '.join(words)} of Megatron-LM is not here", (_drop(spelling),))
    if spelling in megatron_flags.REFUSED:
        why, fixes = megatron_flags.REFUSED[spelling]
        return Problem("E004", f"{spelling} of Megatron-LM is not here: {why}", fixes)
    prefixes = [p for p in megatron_flags.FAMILIES if spelling.startswith(p)]
    if prefixes:
        why = megatron_flags.FAMILIES[max(prefixes, key=len)]
        return Problem("E004", f"{spelling} of Megatron-LM is not here: {why}", (_drop(spelling),))
    if spelling in megatron_flags.OTHERS.split():
        return Problem("E004", f"{spelling} is known to Megatron-LM, not here", (_drop(spelling),))
    return _unknown(spelling, doubtful)


def _drop(spelling: str) -> str:
    return f"drop {spelling}"


def _unknown(spelling: str, doubtful: set[str]) -> Problem:
    about = {s.flag: s.name for s in SETTINGS.values()}
    about |= {negative(s): s.name for s in SETTINGS.values() if s.kind.scalar is bool}
    about |= {alias: s.name for s in SETTINGS.values() for alias in s.option.aliases or ()}
    guess = did_you_mean(spelling, [*about, "--preset", "--config", "--set", "--check-config", "--world-size"])
    if guess in about:
        doubtful.add(about[guess])
    return Problem("E001", f"{spelling}: no such flag", (f"did you mean {guess}?",) if guess else ("--help",))


def _habits(unknown: Sequence[str], config: RunConfig) -> list[Problem]:
    """Flags that are harmless here only beside others: Megatron-LM's defaults for them differ from ours."""
    found, model = [], config.model
    if "--group-query-attention" in unknown and model.num_query_groups is None:
        sentence = "--group-query-attention without --num-query-groups is one group in Megatron-LM, one per head here"
        found.append(
            Problem("E004", sentence, ("--num-query-groups 1", f"--num-query-groups {model.num_attention_heads}"))
        )
    if "--no-position-embedding" in unknown and model.position_embedding_type == "learned_absolute":
        sentence = "--no-position-embedding beside learned positions contradicts itself"
        found.append(Problem("E004", sentence, ("--position-embedding-type none", "--position-embedding-type rope")))
    return found


def _world_size(
    known: argparse.Namespace, config: RunConfig, environ: Mapping[str, str], found: list[Problem], notes: list[str]
) -> int:
    """Ranks to check for; problems and notes about them are appended."""
    launched = launched_ranks(environ)
    asked: int | None = known.world_size
    if asked is not None and asked < 1:
        found.append(Problem("E008", f"--world-size {asked}: there must be at least one rank", ("--world-size 1",)))
        return 1
    if known.check_config:
        fewest = config.parallel.model_ranks
        if asked is None and launched is None and fewest > 1:
            notes.append(f"--world-size is not given: checked for {fewest} ranks, the fewest that hold one model")
        return asked or launched or max(1, fewest)
    if asked is not None and asked != (launched or 1):
        sentence = f"--world-size {asked}, but the launcher started {launched or 1}"
        fixes = (f"torchrun --nproc-per-node {asked} {Path('pretrain_gpt.py')}", "--check-config", "drop --world-size")
        found.append(Problem("E008", sentence, fixes))
    return asked or launched or 1


def launched_ranks(environ: Mapping[str, str]) -> int | None:
    """Ranks that torchrun or srun started; None for a plain process."""
    for rank, size in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")):
        if rank in environ and size in environ:
            return int(environ[size])
    return None
