"""From a command line to a checked configuration.

Every config field is a flag. Values are merged in this order: defaults, the model of the checkpoint or of the
``hf:DIR`` to start from, ``--preset``, ``--config`` files, flags, ``--set``. The command line is parsed flag by flag,
and all problems, of spelling and of values, are reported at once.
"""

from __future__ import annotations

import argparse
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron.arguments.checks.model import suggest_nodes
from megatron.arguments.compatibility import compare_configs
from megatron.arguments.megatron_flags import check_unknown_flags, implied_default_notes, implied_default_problems
from megatron.arguments.presets import PRESETS
from megatron.arguments.sources import (
    ConfigSource,
    ModelReader,
    build_config,
    flat_values,
    from_assignments,
    from_checkpoint,
    from_hugging_face,
    from_mapping,
    merge_values,
    no_model_reader,
    read_yaml,
    resolve,
    to_dict,
)
from megatron.arguments.summary import summary
from megatron.arguments.validate import NOTES, find_problems, unused_option_notes
from megatron.config.errors import Problem, UserError, did_you_mean
from megatron.config.launch import Launch, restart_notes
from megatron.config.plugins import load_plugins
from megatron.config.run import CheckpointConfig, RunConfig
from megatron.config.settings import GROUPS, NOUNS, SETTINGS, SPELLINGS, Setting, replace_by_flags

MAX_CHOICES_WIDTH = 70  # characters of choices in a placeholder; longer ones are listed in the help text


@dataclass(frozen=True)
class GivenFlag:
    """One flag as it was written."""

    spelling: str
    setting: Setting
    words: Sequence[str]  # after the flag

    @property
    def main(self) -> str:
        """The spelling, the same for ``--x`` and ``--no-x``: of two, the later overrides the earlier."""
        return self.setting.flag if self.spelling == self.setting.negative else self.spelling

    def value(self) -> Any:
        """Return the value.

        Raises:
            ValueError: if the words are not a value.
        """
        constants = self.setting.constants
        if self.spelling not in constants:
            return self.setting.from_words(self.words)
        if self.words:
            raise ValueError("takes no value")
        return constants[self.spelling]


@dataclass(frozen=True)
class CommandLine:
    """A command line, split into flags."""

    known: argparse.Namespace  # --preset, --config, --set, --check-config, --fake-world, --fake-rank, --world-size
    given: list[GivenFlag] = field(default_factory=list)  # the flags of config fields, in order
    # Unknown flags, each with the words after it; and words that follow no flag.
    foreign: list[list[str]] = field(default_factory=list)
    malformed: ConfigSource = field(default_factory=ConfigSource)  # problems of flags that argparse rejected

    @property
    def spellings(self) -> set[str]:
        """All spellings on the command line."""
        return {given.spelling for given in self.given} | {words[0] for words in self.foreign}


def parse_flags(argv: Sequence[str]) -> CommandLine:
    """Parse a command line flag by flag, so that one malformed flag does not hide problems of the others."""
    parser = make_parser()
    command_line = CommandLine(parser.parse_args([]))
    for words in _split_flags(argv):
        spelling, equals, value = words[0].partition("=")
        setting = SPELLINGS.get(spelling)
        if setting is None:
            try:
                _, stray = parser.parse_known_args(words, command_line.known)
            except argparse.ArgumentError as error:
                command_line.malformed.problems.append(Problem("E002", f"{spelling}: {error.message}"))
                continue
        elif equals or spelling in setting.constants:
            command_line.given.append(GivenFlag(spelling, setting, [value] if equals else []))
            stray = words[1:]
        else:
            command_line.given.append(GivenFlag(spelling, setting, words[1:]))
            stray = []
        if stray:
            command_line.foreign.append(stray)
    return command_line


def _split_flags(argv: Sequence[str]) -> Iterator[list[str]]:
    """Yield each flag with the words after it; words before the first flag come first."""
    words: list[str] = []
    for word in argv:
        if words and _is_flag(word):
            yield words
            words = []
        words.append(word)
    if words:
        yield words


def _is_flag(word: str) -> bool:
    """Return True for words such as ``--x`` and ``-x``, but not for ``-`` and negative numbers."""
    try:
        float(word)
    except ValueError:
        return word.startswith("-") and word != "-"
    return False


def make_parser() -> argparse.ArgumentParser:
    """Build the parser, with one group of flags for each config class; :func:`parse_flags` parses these itself."""
    parser = argparse.ArgumentParser(
        prog="pretrain_gpt.py",
        usage="%(prog)s [--preset NAME] [--config FILE] [flags] [--set GROUP.FIELD=VALUE]",
        description="Pretrain a GPT. Flags are spelled as Megatron-LM spells them.",
        allow_abbrev=False,
        exit_on_error=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=110),
    )
    sources = parser.add_argument_group("sources", "Later ones override earlier ones: preset, config, flags, set.")
    sources.add_argument("--preset", metavar="NAME", help=f"Start from a known model: {', '.join(PRESETS)}.")
    files = "YAML, by group or flat; later files override earlier ones."
    sources.add_argument("--config", nargs="+", action="extend", default=[], metavar="FILE", help=files)
    assignment = "Set a field; null clears it."
    sources.add_argument("--set", nargs="+", action="extend", default=[], metavar="GROUP.FIELD=VALUE", help=assignment)
    sources.add_argument("--check-config", action="store_true", help="Check everything, print a summary and stop.")
    fake = "Check, build one rank of --world-size without allocating memory or starting other ranks, and stop."
    sources.add_argument("--fake-world", action="store_true", help=fake)
    sources.add_argument("--fake-rank", type=_int, metavar="R", help="The rank that --fake-world builds. [0]")
    ranks = "Number of ranks to check for. Default: as many as launched."
    sources.add_argument("--world-size", type=_int, metavar="N", help=ranks)
    for group, cls in GROUPS.items():
        arguments = parser.add_argument_group(group, inspect.cleandoc(cls.__doc__ or "").split("\n")[0])
        for setting in (s for s in SETTINGS.values() if s.group == group):
            _add(arguments, setting)
    return parser


def _int(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not {NOUNS[int]}") from None


def _add(group: Any, setting: Setting) -> None:
    constants = setting.constants
    text = help_text(setting).replace("%", "%%")
    if setting.flag not in constants:
        group.add_argument(setting.flag, metavar=metavar(setting), default=argparse.SUPPRESS, help=text)
    for spelling, value in constants.items():
        same = f"The same as {setting.spell(value)}."
        shown = {setting.flag: text, setting.negative: argparse.SUPPRESS}.get(spelling, same)
        group.add_argument(spelling, action="store_true", default=argparse.SUPPRESS, help=shown)


def metavar(setting: Setting) -> str:
    """Return the placeholder for the value in the help."""
    word = {int: "N", float: "X", str: "TEXT"}[setting.kind.scalar]
    if setting.choices:
        word = "WORD" if _choices_are_long(setting) else "{" + ",".join(setting.choices) + "}"
    return f"{word} ..." if setting.kind.open else " ".join([word] * (setting.kind.length or 1))


def help_text(setting: Setting) -> str:
    """Return the help text with the default and long lists of choices."""
    text = setting.help
    if _choices_are_long(setting):
        text += f" One of {', '.join(setting.choices)}."
    if setting.default is None or setting.default == ():
        return text
    return f"{text} [{default_text(setting)}]"


def _choices_are_long(setting: Setting) -> bool:
    """Return True if the choices are too long for the placeholder."""
    return sum(map(len, setting.choices)) > MAX_CHOICES_WIDTH


def default_text(setting: Setting) -> str:
    """Return the default as text; for a boolean, the flag that turns it off."""
    if setting.kind.scalar is bool:
        return f"on; off: {setting.negative}" if setting.default else "off"
    return setting.spell(setting.default).partition(" ")[2]


SavedConfigReader = Callable[[CheckpointConfig], Mapping[str, Any] | None]
"""Returns ``to_dict`` of the configuration in the checkpoint that a run starts from. None without a checkpoint; raises
UserError if it cannot be read."""


@dataclass(frozen=True)
class ParsedArguments:
    """A command line that passed every check."""

    config: RunConfig  # derived values are written out
    world_size: int  # ranks it was checked for
    check_only: bool = False  # --check-config or --fake-world
    notes: tuple[str, ...] = ()  # one line each, to be printed
    fake_rank: int | None = None  # rank of --fake-world; None without

    def summary(self, iteration: int = 0, consumed_samples: int = 0, data: Sequence[str] = ()) -> str:
        """Return the text that ``--check-config`` prints.

        Args:
            iteration: steps taken before.
            consumed_samples: samples used before.
            data: lines about the training data.
        """
        notes = [f"note: {note}" for note in self.notes]
        rows = summary(self.config, self.world_size, iteration, consumed_samples)
        return "\n".join([*notes, rows, *data, "config ok"])


def parse(
    argv: Sequence[str],
    environ: Mapping[str, str] = os.environ,
    recall: SavedConfigReader = lambda options: None,
    read_model: ModelReader = no_model_reader,
) -> ParsedArguments:
    """Parse and check a command line.

    Args:
        argv: without the program's name.
        environ: environment variables, with the number of ranks from torchrun or srun.
        recall: returns the configuration of the checkpoint that the run starts from.
        read_model: returns the model's fields of the Hugging Face folder that the run starts from.

    Raises:
        UserError: with every problem of flags, files and values.
    """
    command_line = parse_flags(argv)
    options = command_line.known
    unknown_flags, notes = check_unknown_flags(command_line.foreign)
    given = _read_sources(command_line)
    sources = [_from_preset(options.preset), *given, command_line.malformed, unknown_flags]
    without_checkpoint = build_config(merge_values(source.values for source in sources))
    saved = None
    unreadable: Sequence[Problem] = ()
    try:
        saved = recall(without_checkpoint.checkpoint)
    except UserError as error:  # reported with problems that may follow from it; without any, by the first rank
        unreadable = error.problems
    load = without_checkpoint.checkpoint.load
    start = from_hugging_face(load, read_model) if saved is None else from_checkpoint(saved)
    sources.insert(0, start)
    values = merge_values(source.values for source in sources)
    config = build_config(values)
    found = [problem for source in sources for problem in source.problems]
    found += implied_default_problems(command_line.spellings, config)
    launch = Launch.read(environ)
    world_size = _world_size(options, config, launch, found, notes)
    fake_rank = _fake_rank(options, launch, found)
    doubtful = {name for source in sources for name in source.doubtful}
    for problem in find_problems(config, world_size, doubtful):
        explained = suggest_nodes(problem, config, world_size, launch)
        if not problem.code.startswith(("E5", "E8")):  # those quote files, whose paths must stay as they are
            explained = replace(explained, sentence=replace_by_flags(explained.sentence))
        found.append(explained)
    in_range = all(problem.code != "E600" for problem in found)  # derived sizes need that
    if saved is None and start.values and in_range:
        shape = to_dict(build_config(start.values))
        changes = compare_configs(shape, resolve(config, world_size), "weights-only", name="config.json")
        notes += changes.lines
        found += changes.problems
    if found:
        no_folder = any(problem.code in ("E801", "E802") for problem in found)  # the reason why it is unreadable
        raise UserError(found if no_folder else [*unreadable, *found])
    resolved = resolve(config, world_size)
    if saved is not None:
        before = flat_values(resolve(without_checkpoint, world_size))
        after = flat_values(resolved)
        inherited = sorted(set(start.values) - {"vocab_size"})  # usually not given but known from the data
        flags = [SETTINGS[name].spell(after[name]) for name in inherited if before[name] != after[name]]
        notes += [f"taken from the checkpoint's model, because no flag sets it: {' '.join(flags)}"] if flags else []
    notes += implied_default_notes(command_line.spellings, values)
    notes += [note for notes_of in NOTES for note in notes_of(config, world_size)]
    notes += restart_notes(environ)
    chosen = merge_values(source.values for source in given)
    notes += map(replace_by_flags, unused_option_notes(config, chosen))
    return ParsedArguments(resolved, world_size, options.check_config or options.fake_world, tuple(notes), fake_rank)


def _read_sources(command_line: CommandLine) -> list[ConfigSource]:
    """Return the values of files, flags and ``--set``, after importing the plugins that any of them names.

    Raises:
        UserError: for a plugin that cannot be imported. Other options are not checked then, because plugins extend
            the values that these may have.
    """
    trees = [(path, read_yaml(path)) for path in command_line.known.config]

    def read() -> list[ConfigSource]:
        files = [
            ConfigSource(problems=[tree]) if isinstance(tree, Problem) else from_mapping(tree, path)
            for path, tree in trees
        ]
        return [*files, _from_flags(command_line.given), from_assignments(command_line.known.set)]

    sources = read()
    plugins = merge_values(source.values for source in sources).get("plugin")
    if plugins:
        load_plugins(plugins)
        sources = read()  # with the names that the plugins registered
    return sources


def _from_preset(name: str | None) -> ConfigSource:
    if name is None or name in PRESETS:
        return ConfigSource(values=dict(PRESETS[name]) if name else {})
    guess = did_you_mean(name, PRESETS)
    fixes = tuple(f"--preset {known}" for known in ([guess] if guess else PRESETS))
    # Without its preset the model is unknown: the fields that presets set are not checked.
    preset_fields = {field for preset in PRESETS.values() for field in preset}
    return ConfigSource(problems=[Problem("E007", f"there is no preset {name}", fixes)], doubtful=preset_fields)


def _from_flags(given: Sequence[GivenFlag]) -> ConfigSource:
    result = ConfigSource()
    last = dict[str, GivenFlag]()
    for flag in given:
        name = flag.setting.name
        try:
            value = flag.value()
        except ValueError as error:
            result.refuse(flag.setting, flag.spelling, error, flag.words)
            continue
        before = last.get(name)
        if before is not None and before.main != flag.main and result.values[name] != value:
            result.doubtful.add(name)
            sentence = f"{before.spelling} and {flag.spelling} contradict each other: both set {flag.setting.flag}"
            result.problems.append(Problem("E003", sentence, (f"drop {before.spelling}", f"drop {flag.spelling}")))
        last[name] = flag
        result.values[name] = result.values.get(name, ()) + value if flag.setting.option.append else value
    return result


def _world_size(
    options: argparse.Namespace, config: RunConfig, launch: Launch, found: list[Problem], notes: list[str]
) -> int:
    """Return the number of ranks to check for; append problems and notes about it."""
    given: int | None = options.world_size
    if given is not None and given < 1:
        found.append(Problem("E008", f"--world-size {given}: must be at least 1", ("--world-size 1",)))
        given = None
    if options.check_config or options.fake_world:
        fewest = max(1, config.parallel.model_ranks)
        if given is None and launch.launcher is None and fewest > 1:
            notes.append(f"--world-size is not given: checked for {fewest} ranks, the fewest that hold one model")
        return given or (launch.world_size if launch.launcher else fewest)
    found += launch.problems()
    if given is not None and given != launch.world_size:
        sentence = f"--world-size {given}, but the launcher started {launch.world_size}"
        found.append(Problem("E008", sentence, (f"torchrun --nproc-per-node {given}", "--check-config")))
    return given or launch.world_size


def _fake_rank(options: argparse.Namespace, launch: Launch, found: list[Problem]) -> int | None:
    """Return the rank that ``--fake-world`` builds, if any; append problems about it."""
    rank = options.fake_rank
    if not options.fake_world:
        if rank is not None:
            sentence = f"--fake-rank {rank} needs --fake-world"
            found.append(Problem("E010", sentence, ("--fake-world --world-size N", "drop --fake-rank")))
        return None
    if launch.world_size > 1:
        sentence = f"--fake-world runs in one process, but the launcher started {launch.world_size}"
        found.append(Problem("E010", sentence, ("python pretrain_gpt.py --fake-world --world-size N",)))
    if options.world_size is None:
        sentence = "--fake-world needs --world-size"
        found.append(Problem("E010", sentence, ("--world-size 1024",)))
    elif rank is not None and options.world_size > 0 and not 0 <= rank < options.world_size:
        highest = options.world_size - 1
        sentence = f"--fake-rank {rank}: the ranks of --world-size {options.world_size} are 0 to {highest}"
        found.append(Problem("E010", sentence, ("--fake-rank 0", f"--fake-rank {highest}")))
    return rank or 0
