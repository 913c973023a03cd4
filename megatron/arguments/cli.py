"""From a command line to a checked configuration.

Every config field is a flag. Values are merged in this order: defaults, the model of the checkpoint or of the
``hf:DIR`` to start from, ``--preset``, ``--config`` files, flags, ``--set``. The command line is parsed flag by flag,
and all problems, of spelling and of values, are reported at once.
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from megatron.arguments.compatibility import StoredLayoutReader, compare_configs
from megatron.arguments.hardware import hardware_problems, known_cluster
from megatron.arguments.help import OWN_FLAGS, asks_for_help, help_text, make_parser
from megatron.arguments.megatron_flags import (
    apply_foreign_flags,
    apply_foreign_values,
    check_unknown_flags,
    implied_default_problems,
    implied_values,
    meaning_notes,
    unsupported,
)
from megatron.arguments.presets import PRESETS, preset_batch_notes
from megatron.arguments.sources import (
    ConfigSource,
    ModelReader,
    Values,
    build_config,
    flat_values,
    from_assignments,
    from_checkpoint,
    from_hugging_face,
    from_mapping,
    merge_values,
    read_yaml,
    resolve,
    to_dict,
)
from megatron.arguments.summary import summary
from megatron.arguments.validate import find_notes, find_problems, is_met, unused_option_notes
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.data_paths import SOURCE_OPTIONS
from megatron.config.errors import Problem, UserError, credential_problem
from megatron.config.launch import Launch, launch_notes
from megatron.config.layer_pattern import pattern_notes
from megatron.config.machine import has_no_gpu
from megatron.config.model import ModelConfig
from megatron.config.option import Role
from megatron.config.plugins import load_plugins
from megatron.config.privacy import redact
from megatron.config.run import RunConfig
from megatron.config.settings import SETTINGS, SPELLINGS, Setting
from megatron.config.text import did_you_mean, echo, nearest_multiples
from megatron.layers.mixers.registry import find_mixer


@dataclass(frozen=True)
class GivenFlag:
    """One flag of a config field as it was written, with the words after it."""

    spelling: str
    setting: Setting
    words: Sequence[str]


def with_our_words(flag: GivenFlag) -> GivenFlag:
    """Return a flag with Megatron-LM's words for its value replaced by ours."""
    lists = flag.setting.many and flag.setting.scalar is int  # they may have brackets
    ours = len(flag.words) == 1 and flag.words[0] in flag.setting.choices
    if ours or not (flag.setting.choices or lists or set(flag.words) <= {*flag.setting.option.megatron.values}):
        return flag
    return replace(flag, words=apply_foreign_values(flag.spelling, flag.words))


def _value_of_missing_feature(flag: GivenFlag) -> str:
    """Return what is missing for the value of a flag; empty for one that this program may have."""
    several = len(flag.words) > 1 and not flag.setting.many
    if not (several or (flag.setting.choices and any(word not in flag.setting.choices for word in flag.words))):
        return ""
    missing = flag.setting.option.megatron.missing
    found = [missing[word] for word in (word.strip("[],") for word in flag.words) if word in missing]
    return found[0] if found else missing.get("several", "") if len(flag.words) > 1 else ""


@dataclass(frozen=True)
class CommandLine:
    """A command line, split into flags."""

    known: argparse.Namespace  # --preset, --config, --set, --check-config, --fake-world, --fake-rank, --world-size
    given: list[GivenFlag] = field(default_factory=list)
    # Unknown flags, each with the words after it; and words that follow no flag.
    foreign: list[list[str]] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)  # of flags that argparse rejected

    @property
    def check_only(self) -> bool:
        """True for ``--check-config`` and ``--fake-world``."""
        return bool(self.known.check_config or self.known.fake_world)


def parse_flags(argv: Sequence[str]) -> CommandLine:
    """Parse a command line flag by flag, so that one malformed flag does not hide problems of the others."""
    parser = _own_flags()
    command_line = CommandLine(parser.parse_args([]))
    flags: list[list[str]] = []  # each with the words after it; words before the first flag come first
    for word in argv:
        if not flags or _is_flag(word):
            flags.append([])
        flags[-1].append(word)
    for words in flags:
        spelling, equals, value = words[0].partition("=")
        setting = SPELLINGS.get(spelling)
        stray = words[1:]
        if setting is None:
            try:
                _, stray = parser.parse_known_args(words, command_line.known)
            except argparse.ArgumentError as error:
                command_line.problems.append(Problem("E002", f"{spelling}: {error.message}"))
                continue
        elif equals or spelling in setting.constants:
            command_line.given.append(GivenFlag(spelling, setting, [value] if equals else []))
        else:
            command_line.given.append(GivenFlag(spelling, setting, stray))
            continue
        if stray:
            command_line.foreign.append(stray)
    return command_line


@cache
def _own_flags() -> argparse.ArgumentParser:
    """Return the parser of the flags that are no config fields."""
    return make_parser(of_settings=False)


def _is_flag(word: str) -> bool:
    """Return True for words such as ``--x`` and ``-x``, but not for ``-`` and negative numbers."""
    try:
        float(word)
    except ValueError:
        return word.startswith("-") and word != "-"
    return False


REQUIRED = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")
"""Fields without a default for a run that starts from no checkpoint or Hugging Face model."""

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
    here: bool = True  # the run is to start on this machine; False for --check-config of other machines
    given: frozenset[str] = frozenset()  # fields that flags and files set, without those of a preset or a checkpoint

    def summary(self, iteration: int = 0, consumed_samples: int = 0, data: Sequence[str] = ()) -> str:
        """Return the text that ``--check-config`` prints.

        Args:
            iteration: steps taken before.
            consumed_samples: samples used before.
            data: lines about the training data.
        """
        notes, config = [f"note: {note}" for note in self.notes], self.config
        if self.here and config.training.device == "auto" and has_no_gpu():
            config = replace(config, training=replace(config.training, device="cpu"))
        known = self.here or self.config.planning.plan_gpu is not None
        cluster = known_cluster(config, self.world_size) if known else None
        rows = summary(config, self.world_size, iteration, consumed_samples, cluster)
        return "\n".join([*notes, rows, *data, "config ok"])


def parse(
    argv: Sequence[str],
    environ: Mapping[str, str] = os.environ,
    recall: SavedConfigReader = lambda options: None,
    read_model: ModelReader | None = None,
    about: str = "",
    stored_layout: StoredLayoutReader = lambda options: None,
    phase: tuple[str, Mapping[str, Any]] | None = None,
    world_size: int | None = None,
) -> ParsedArguments:
    """Parse and check a command line.

    Args:
        argv: without the program's name.
        environ: environment variables, with the number of ranks from torchrun or srun.
        recall: returns the configuration of the checkpoint that the run starts from.
        read_model: returns the model's fields of the Hugging Face folder that the run starts from. None refuses one.
        about: docstring of the program, for its help; empty for pretrain_gpt.py.
        stored_layout: returns the layout of the checkpoint that the run resumes from, for ``--plan auto``.
        phase: further options, which override all others, and where they are from.
        world_size: number of ranks to check for, where neither flag nor launcher gives it.

    Raises:
        UserError: with every problem of flags, files and values.
        DataError: if ``--plan auto`` needs the vocabulary size, and it is unknown.
        SystemExit: after printing the help or the version that ``argv`` asks for.
    """
    trees = _load_plugins(argv)
    if (text := help_text(argv, about)) is not None:
        with suppress(BrokenPipeError):  # | head
            echo(text, end="", flush=True)
        raise SystemExit(0)
    line, launch = parse_flags(argv), Launch.read(environ)
    flags = TranslatedFlags.read(line)
    findings = Findings(notes=[*flags.notes])
    given = _given_sources(line, flags, trees, phase)
    sources = [_from_preset(line.known.preset), *given, ConfigSource(problems=line.problems)]
    flags_only = build_config(merge_values(source.values for source in sources))
    if credentials := [*credential_problems(argv, flags_only)]:  # before anything is read with them
        raise UserError(credentials)
    start = StartModel.read(flags_only.checkpoint.first_start, recall, read_model)
    sources.insert(0, start.source)
    values = merge_values(source.values for source in sources)
    config = build_config(values)
    refused, ignored = flags.refused(config)
    sources += refused
    findings.add(ignored)
    findings.add(problem for source in sources for problem in source.problems)
    findings.add(implied_default_problems(flags.spellings, config))
    findings.add(note for _, note in meaning_notes(flags.spellings, config))
    if not (findings.problems or start.unreadable):  # after a mistake elsewhere, nothing may be missing
        findings.add(_missing_problems(values, config.model, start, about))
    world_size = world_size or _world_size(line.known, config, launch)
    findings.add(_launch_findings(line.known, config, launch))
    doubtful = {name for source in sources for name in source.doubtful}
    given_values = merge_values(source.values for source in given)
    findings.add(hardware_problems(config))
    if config.planning.plan is not None:
        from megatron.arguments.planning import plan_layout  # the planner is loaded only where it is used

        planned = plan_layout(config, world_size, given_values, findings.problems, stored_layout, environ)
        findings.add(planned.findings)
        config, doubtful = planned.config, doubtful | planned.undecided
    findings.add(
        suggest_nodes(each, config, world_size, launch) for each in find_problems(config, world_size, doubtful)
    )
    typed = {flag.setting.name for flag in line.given}
    findings.problems = [
        separate_choices(without_flags_to_drop(each, typed), config, values, doubtful) for each in findings.problems
    ]
    findings.add(start.differences(config, world_size, findings.problems))
    if findings.problems:
        no_folder = any(problem.code in ("E801", "E802") for problem in findings.problems)  # why it is unreadable
        raise UserError([*(() if no_folder else start.unreadable), *findings.problems], findings.notes)
    resolved = resolve(config, world_size)
    findings.add(start.inherited(resolve(flags_only, world_size), resolved))
    findings.add(find_notes(config, world_size))
    findings.add(launch_notes(environ))
    findings.add(unused_option_notes(config, given_values))
    findings.add(pattern_notes(given_values, config.model))
    findings.add(preset_batch_notes(line.known.preset, resolved, world_size))  # last, and so nearest to the summary
    fake_rank = line.known.fake_rank or 0 if line.known.fake_world else None
    here = not line.check_only or (line.known.world_size is None and world_size == launch.world_size)
    notes, fields = tuple(findings.notes), frozenset(given_values)
    return ParsedArguments(resolved, world_size, line.check_only, notes, fake_rank, here, fields)


def given_values(argv: Sequence[str]) -> Values:
    """Return the values that presets, flags and files set, as far as they can be read; see `parse` for errors."""
    trees, line = _load_plugins(argv), parse_flags(argv)
    sources = [_from_preset(line.known.preset), *_given_sources(line, TranslatedFlags.read(line), trees)]
    return merge_values(source.values for source in sources)


def suggest_nodes(problem: Problem, config: RunConfig, world_size: int, launch: Launch) -> Problem:
    """Rephrase E202 as a number of nodes for a job started by torchrun; return other problems unchanged.

    After the loss of a node, the remaining ranks may not hold whole models, and the fix is a number of nodes.
    """
    each = launch.local_size
    by_nodes = launch.launcher == "torchrun" and launch.world_size == world_size and each > 1 and not world_size % each
    if problem.code != "E202" or not by_nodes:
        return problem
    unit = config.parallel.model_ranks // math.gcd(config.parallel.model_ranks, each)
    if unit == 1:
        return problem
    nodes = world_size // each
    counted = "1 node" if nodes == 1 else f"{nodes} nodes"
    enough = (f"torchrun --nnodes {n}" for n in nearest_multiples(nodes, unit))
    sentence = f"{problem.sentence}: {counted} of {each}, and whole models need a multiple of {unit}"
    return Problem("E202", sentence, (*enough, *(fix for fix in problem.fixes if fix.startswith("--"))))


@dataclass
class Findings:
    """The problems of a command line, and notes on it."""

    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, found: Iterable[Problem | str]) -> None:
        """Add problems, and notes, which are texts."""
        for each in found:
            if isinstance(each, Problem):
                self.problems.append(each)
            else:
                self.notes.append(each)


@dataclass(frozen=True)
class StartModel:
    """The model of the checkpoint or of the Hugging Face folder that a run starts from."""

    source: ConfigSource  # its fields; without any for a run from scratch
    saved: Mapping[str, Any] | None = None  # the configuration in the checkpoint
    unreadable: Sequence[Problem] = ()  # why the checkpoint cannot be read; without others, the first rank reports it

    @classmethod
    def read(cls, options: CheckpointConfig, recall: SavedConfigReader, read_model: ModelReader | None) -> StartModel:
        """Read the model that ``options`` name."""
        try:
            saved = recall(options)
        except UserError as error:
            return cls(from_hugging_face(options.load, read_model), unreadable=error.problems)
        return cls(from_hugging_face(options.load, read_model) if saved is None else from_checkpoint(saved), saved)

    def differences(self, config: RunConfig, world_size: int, found: Sequence[Problem]) -> Iterator[Problem | str]:
        """Yield what options change of a Hugging Face model, unless a derived size cannot be computed."""
        if self.saved is None and self.source.values and all(problem.code != "E600" for problem in found):
            shape = to_dict(build_config(self.source.values))
            of_base = replace(config, model=config.model.base)
            changes = compare_configs(shape, resolve(of_base, world_size), "weights-only", name="config.json")
            yield from changes.lines
            yield from changes.problems

    def inherited(self, flags_only: RunConfig, config: RunConfig) -> Iterator[str]:
        """Yield a note on what a run takes from the checkpoint's model."""
        before, after = flat_values(flags_only), flat_values(config)
        names = sorted(set(self.source.values) - {"vocab_size"})  # usually not given but known from the data
        flags = [SETTINGS[name].spell(after[name]) for name in names if before[name] != after[name]]
        if flags and self.saved is not None:
            yield f"taken from the checkpoint's model, because no flag sets it: {' '.join(flags)}"


def _missing_problems(values: Values, model: ModelConfig, start: StartModel, about: str) -> Iterator[Problem]:
    """Yield a problem if a run from scratch lacks a size of its model."""
    known = {*values}
    if model.hybrid_layer_pattern is not None:
        known.add("num_layers")
    if not any(find_mixer(name).uses_attention_heads for name in model.token_mixer_names):
        known.add("num_attention_heads")
    missing = [SETTINGS[name] for name in REQUIRED if name not in known]
    if missing and start.saved is None and not start.source.values:
        sentence = f"the model is not complete: {', '.join(setting.flag for setting in missing)} must be given"
        fixes = (" ".join(setting.spell(setting.default) for setting in missing), "--preset gpt2-124m")
        if about:  # of fine-tuning
            fixes = ("--pretrained-checkpoint CHECKPOINTS", "--pretrained-checkpoint hf:DIR")
        yield Problem("E011", sentence, fixes)


SOURCES = {name for names in SOURCE_OPTIONS for name in names}
"""Fields that name the data."""

NEEDED = {*REQUIRED, "vocab_size", "yarn_original_max_position_embeddings"}
"""Fields without which there is no model: a fix that gives one of them changes nothing."""


def without_flags_to_drop(problem: Problem, typed: Collection[str]) -> Problem:
    """Return a problem whose fixes drop only flags of the command line; values from elsewhere become the default.

    Args:
        problem: of a run.
        typed: fields that flags have set.
    """
    fixes = []
    for fix in problem.fixes:
        setting = SPELLINGS.get(fix.removeprefix("drop ")) if fix.startswith("drop ") else None
        fixes.append(fix if setting is None or setting.name in typed else setting.spell(setting.default))
    return replace(problem, fixes=tuple(fixes))


def separate_choices(problem: Problem, config: RunConfig, given: Collection[str], doubtful: Set[str]) -> Problem:
    """Return a problem whose fixes keep the model and the data; those that change them become its choices.

    Args:
        problem: of ``config``.
        config: of the run.
        given: fields that were set.
        doubtful: fields whose given value could not be read: a fix repeats it as it was meant.
    """
    kept: list[str] = []
    others: list[str] = []
    for fix in problem.fixes:
        after = {name: value for name, value in _effects(fix).items() if value is ... or name not in doubtful}
        keeps = all(_keeps_meaning(SETTINGS[name], value, config, given) for name, value in after.items())
        (kept if keeps else others).append(fix)
    return replace(problem, fixes=tuple(kept), choices=(*problem.choices, *others))


def _effects(fix: str) -> Values:
    """Return the values that a fix sets by field; ``...`` for a field that it drops, or whose value is not written."""
    if fix.startswith("drop "):
        return {SPELLINGS[word].name: ... for word in fix.split() if word in SPELLINGS}
    try:
        command_line = parse_flags(shlex.split(fix))
    except ValueError:  # a sentence
        return {}
    written = {flag.setting.name: ... for flag in command_line.given}
    return written | merge_values(
        [_from_flags(command_line.given).values, from_assignments(command_line.known.set).values]
    )


def _keeps_meaning(setting: Setting, value: Any, config: RunConfig, given: Collection[str]) -> bool:
    """Return True if an option may get ``value``, because the model and the data stay the same."""
    absent = setting.name not in given
    if setting.name in SOURCES:
        return absent or _files(value) == _files(setting.value_in(config))
    if setting.section != "model" and setting.option.role not in (Role.SHAPE, Role.FUNCTION, Role.DATA):
        return True
    return bool(value == setting.value_in(config)) or (absent and setting.name in NEEDED)


def _files(value: Any) -> list[str]:
    """Return the words of a source of tokens, without the endings of a prefix."""
    words = value if isinstance(value, tuple) else (str(value),)
    return [word.removesuffix(".bin").removesuffix(".idx") for word in " ".join(words).split()]


def credential_problems(argv: Sequence[str], config: RunConfig) -> Iterator[Problem]:
    """Yield a problem for every word of the command line and every option of ``config`` that holds a credential."""
    texts, flag = [], ""
    for word in argv:
        if _is_flag(word):
            flag, _, word = word.partition("=")
        texts.append(f"{flag} {shlex.quote(word)}")
    for setting in SETTINGS.values():
        value = setting.value_in(config)
        items = value if isinstance(value, tuple) else (value,)
        texts += [f"{setting.flag} {shlex.quote(item)}" for item in items if isinstance(item, str)]
    for text in dict.fromkeys(texts):
        if redact(text, certain=True) != text:
            yield credential_problem(text)


@dataclass(frozen=True)
class TranslatedFlags:
    """The flags of a command line in the words of this program."""

    counterparts: Sequence[GivenFlag]  # of flags that other programs have; flags that are given override them
    given: Sequence[GivenFlag]
    unsupported: Sequence[GivenFlag]  # whose values ask for what is missing here
    unknown: Sequence[Sequence[str]]  # each with the words after it; and words that follow no flag
    spellings: Set[str]  # as given
    notes: Sequence[str]

    @classmethod
    def read(cls, line: CommandLine) -> TranslatedFlags:
        """Translate the flags of a command line."""
        unsupported = [flag for flag in line.given if _value_of_missing_feature(flag)]
        applied, unknown, notes = apply_foreign_flags(line.foreign, {flag.setting.name for flag in line.given})
        given = [flag for flag in line.given if flag not in unsupported]
        ours = [with_our_words(flag) for flag in given]
        notes += [
            f"applied: {flag.spelling} {' '.join(flag.words)} as {' '.join(new.words)}"
            for flag, new in zip(given, ours)
            if list(flag.words) != list(new.words)
        ]
        counterparts = [with_our_words(GivenFlag(flag, SPELLINGS[flag], words)) for flag, *words in applied]
        spellings = {flag.spelling for flag in given} | {words[0] for words in line.foreign}
        return cls(counterparts, ours, unsupported, unknown, spellings, notes)

    def refused(self, config: RunConfig) -> tuple[list[ConfigSource], list[str]]:
        """Return the flags that this program does not have, as sources of problems, and notes on those without effect.

        Args:
            config: that the other flags make.
        """
        unknown, notes = check_unknown_flags(self.unknown, config, [*OWN_FLAGS, "--help"])
        values = ConfigSource()
        for flag in self.unsupported:
            unmet = [need for need in flag.setting.option.needs if not is_met(need, config)]
            if unmet:
                notes.append(f"{flag.spelling} has no effect without {unmet[0]}")
                continue
            sentence = unsupported(flag.spelling, flag.words, _value_of_missing_feature(flag))
            values.problems.append(Problem("E004", sentence))
            values.doubtful.add(flag.setting.name)
        return [unknown, values], notes


def _given_sources(
    line: CommandLine, flags: TranslatedFlags, trees: Trees, phase: tuple[str, Mapping[str, Any]] | None = None
) -> list[ConfigSource]:
    """Return the values of files, flags, ``--set`` and a phase, after the defaults that they imply."""
    sources = [
        *(from_mapping(tree, path) for path, tree in trees),
        _from_flags(flags.counterparts),
        _from_flags(flags.given),
        from_assignments(line.known.set),
        *([] if phase is None else [from_mapping(phase[1], phase[0])]),
    ]
    return [ConfigSource(implied_values(merge_values(source.values for source in sources))), *sources]


Trees = Sequence[tuple[str, Mapping[str, Any]]]
"""The contents of the files of ``--config``, each after its path."""


def _load_plugins(argv: Sequence[str]) -> Trees:
    """Import the plugins that a command line or its files name; return the contents of the files.

    Raises:
        UserError: for a file that cannot be read or a plugin that cannot be imported. Other options are not checked
            then: any may be in the file, and plugins add options and extend the values that these may have.
    """
    line = parse_flags(argv)
    trees = [(path, read_yaml(path)) for path in line.known.config]
    if unread := [tree for _, tree in trees if isinstance(tree, Problem)]:
        if asks_for_help(argv):
            return []
        raise UserError(unread)
    readable = [(path, tree) for path, tree in trees if not isinstance(tree, Problem)]
    sources = [
        from_mapping({key: tree[key] for key in ("compute", "plugin") if key in tree}, "") for _, tree in readable
    ]
    sources.append(_from_flags([flag for flag in line.given if flag.setting.name == "plugin"]))
    sources.append(from_assignments(text for text in line.known.set if "plugin" in text.partition("=")[0]))
    load_plugins(merge_values(source.values for source in sources).get("plugin") or ())
    if used := SPELLINGS.keys() & {*OWN_FLAGS, "--help"}:
        raise UserError([Problem("E914", f"a plugin has options of the names {', '.join(used)}, which are in use")])
    return readable


def flags_config(command_line: CommandLine) -> RunConfig:
    """Return the configuration that the flags of a command line make, as far as they can be read."""
    values = _from_flags([with_our_words(flag) for flag in command_line.given]).values
    return build_config(implied_values(values) | values)


def _from_preset(name: str | None) -> ConfigSource:
    if name is None or name in PRESETS:
        return ConfigSource(values=dict(PRESETS[name]) if name else {})
    guess = did_you_mean(name, PRESETS)
    alike = [guess] if guess else [known for known in PRESETS if name in known]
    fixes = tuple(f"--preset {known}" for known in alike or PRESETS)
    # Without its preset the model is unknown: the fields that presets set are not checked.
    preset_fields = {field for preset in PRESETS.values() for field in preset}
    return ConfigSource(problems=[Problem("E007", f"there is no preset {name}", fixes)], doubtful=preset_fields)


def _from_flags(given: Sequence[GivenFlag]) -> ConfigSource:
    result = ConfigSource()
    last: dict[str, str] = {}  # spelling by field
    for flag in given:
        setting, spelling, words = flag.setting, flag.spelling, flag.words
        before, old = last.get(setting.name, spelling), result.values.get(setting.name)
        if spelling in setting.constants:
            if words:
                result.refuse(setting, spelling, "takes no value")
                continue
            result.values[setting.name] = setting.constants[spelling]
        elif not result.read(setting, spelling, None if words == ["null"] else words):
            continue
        new = result.values[setting.name]
        main = {setting.flag, setting.negative}  # of these, the later overrides the earlier
        if old != new and before != spelling and not {before, spelling} <= main:
            result.doubtful.add(setting.name)
            sentence = f"{before} and {spelling} contradict each other: both set {setting.flag}"
            result.problems.append(Problem("E003", sentence, (f"drop {before}", f"drop {spelling}")))
        last[setting.name] = spelling
        if setting.option.append:
            result.values[setting.name] = (old or ()) + new
    return result


def _world_size(options: argparse.Namespace, config: RunConfig, launch: Launch) -> int:
    """Return the number of ranks to check for: as given, or launched, or the fewest that hold one model."""
    given: int = max(options.world_size or 0, 0)
    launched = launch.launcher is not None or not (options.check_config or options.fake_world)
    return given or (launch.world_size if launched else max(1, config.parallel.model_ranks))


def _launch_findings(options: argparse.Namespace, config: RunConfig, launch: Launch) -> Iterator[Problem | str]:
    """Yield problems and notes about the number of ranks, the launcher and the fake world."""
    given = options.world_size
    if given is not None and given < 1:
        yield Problem("E008", f"--world-size {given}: must be at least 1", ("--world-size 1",))
        given = None
    if options.check_config or options.fake_world:
        fewest = max(1, config.parallel.model_ranks)
        if given is None and launch.launcher is None and fewest > 1:
            yield f"--world-size is not given: checked for {fewest} ranks, the fewest that hold one model"
    else:
        yield from launch.problems()
        if given not in (None, launch.world_size):
            sentence = f"--world-size {given}, but the launcher started {launch.world_size}"
            yield Problem("E008", sentence, (f"torchrun --nproc-per-node {given}", "--check-config"))
    yield from _fake_world_problems(options, launch)


def _fake_world_problems(options: argparse.Namespace, launch: Launch) -> Iterator[Problem]:
    rank, size = options.fake_rank, options.world_size
    if not options.fake_world:
        if rank is not None:
            fixes = ("--fake-world --world-size N", "drop --fake-rank")
            yield Problem("E010", f"--fake-rank {rank} needs --fake-world", fixes)
        return
    if launch.world_size > 1:
        sentence = f"--fake-world runs in one process, but the launcher started {launch.world_size}"
        yield Problem("E010", sentence, ("python pretrain_gpt.py --fake-world --world-size N",))
    if size is None:
        yield Problem("E010", "--fake-world needs --world-size", ("--world-size 1024",))
    elif rank is not None and size > 0 and not 0 <= rank < size:
        sentence = f"--fake-rank {rank}: the ranks of --world-size {size} are 0 to {size - 1}"
        yield Problem("E010", sentence, ("--fake-rank 0", f"--fake-rank {size - 1}"))
