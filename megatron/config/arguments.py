"""From a command line to a checked configuration.

Values are merged in this order: defaults, the model of the checkpoint or of the ``hf:DIR`` to start from, ``--preset``,
``--config`` files, flags, ``--set``. All problems, of spelling and of values, are reported at once.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron.config.checks import (
    batch,
    checkpoint,
    data,
    experts,
    graphs,
    idle,
    layout,
    pipeline,
    profiling,
    sharding,
)
from megatron.config.compare import compare
from megatron.config.foreign import assumptions, habits, judge
from megatron.config.launch import Launch, restart_remarks
from megatron.config.parser import Given, read
from megatron.config.presets import PRESETS
from megatron.config.problems import Problem, UserError, did_you_mean
from megatron.config.resolve import resolve
from megatron.config.run import CheckpointConfig, RunConfig
from megatron.config.settings import SETTINGS, in_flags
from megatron.config.sources import (
    Layer,
    build,
    flat,
    from_assignments,
    from_checkpoint,
    from_file,
    from_hugging_face,
    lay_over,
    to_dict,
)
from megatron.config.summary import summary
from megatron.config.validate import problems

Recall = Callable[[CheckpointConfig], Mapping[str, Any] | None]
"""Returns ``to_dict`` of the configuration in the checkpoint that a run starts from. None without a checkpoint; raises
UserError if it cannot be read."""


@dataclass(frozen=True)
class Parsed:
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
    argv: Sequence[str], environ: Mapping[str, str] = os.environ, recall: Recall = lambda options: None
) -> Parsed:
    """Parse and check a command line.

    Args:
        argv: without the program's name.
        environ: environment variables, with the number of ranks from torchrun or srun.
        recall: returns the configuration of the checkpoint that the run starts from.

    Raises:
        UserError: with every problem of flags, files and values.
    """
    command_line = read(argv)
    options = command_line.known
    unknown_flags, notes = judge(command_line.foreign)
    files = [from_file(path) for path in options.config]
    flags = _from_flags(command_line.given)
    assignments = from_assignments(options.set)
    sources = [_from_preset(options.preset), *files, flags, assignments, command_line.malformed, unknown_flags]
    without_checkpoint = build(lay_over(source.values for source in sources))
    unreadable: Sequence[Problem] = ()
    try:
        saved = recall(without_checkpoint.checkpoint)
    except UserError as error:  # reported with problems that may follow from it; without any, by the first rank
        saved = None
        unreadable = error.problems
    load = without_checkpoint.checkpoint.load
    start = from_hugging_face(load) if saved is None else from_checkpoint(saved)
    sources.insert(0, start)
    values = lay_over(source.values for source in sources)
    config = build(values)
    found = [problem for source in sources for problem in source.problems] + habits(command_line.spellings, config)
    check_only = options.check_config or options.fake_world
    launch = Launch.read(environ)
    world_size = _world_size(options, config, launch, found, notes)
    fake_rank = _fake_rank(options, launch, found)
    doubtful = {name for source in sources for name in source.doubtful}
    for problem in problems(config, world_size, doubtful):
        explained = layout.suggest_nodes(problem, config, world_size, launch)
        if not problem.code.startswith(("E5", "E8")):  # those quote files, whose paths must stay as they are
            explained = replace(explained, sentence=in_flags(explained.sentence))
        found.append(explained)
    in_range = all(problem.code != "E600" for problem in found)  # derived sizes need that
    if saved is None and start.values and in_range:
        shape = to_dict(build(start.values))
        changes = compare(shape, resolve(config, world_size), "weights-only", name="config.json")
        notes += changes.lines
        found += changes.problems
    if found:
        no_folder = any(problem.code in ("E801", "E802") for problem in found)  # the reason why it is unreadable
        raise UserError(found if no_folder else [*unreadable, *found])
    if saved is not None:
        inherited = set(start.values) - {"vocab_size"}  # usually not given but known from the data
        notes += _inherited_notes(
            sorted(inherited), resolve(without_checkpoint, world_size), resolve(config, world_size)
        )
    notes += assumptions(command_line.spellings, values)
    notes += [*batch.batch_notes(config, world_size), *data.data_notes(config), *checkpoint.checkpoint_notes(config)]
    notes += [*profiling.profiling_notes(config, world_size), *graphs.cuda_graph_notes(config)]
    notes += [*pipeline.pipeline_notes(config, world_size), *experts.expert_notes(config)]
    notes += [*sharding.sharding_notes(config, world_size), *restart_remarks(environ)]
    given = lay_over(source.values for source in (*files, flags, assignments))
    notes += map(in_flags, idle.unused_option_notes(config, given))
    return Parsed(resolve(config, world_size), world_size, check_only, tuple(notes), fake_rank)


def _inherited_notes(names: Iterable[str], own: RunConfig, config: RunConfig) -> list[str]:
    """Return a note about values that come from the checkpoint's model and differ from the defaults."""
    before = flat(own)
    after = flat(config)
    flags = [SETTINGS[name].spell(after[name]) for name in names if before[name] != after[name]]
    return [f"taken from the checkpoint's model, because no flag sets it: {' '.join(flags)}"] if flags else []


def _from_preset(name: str | None) -> Layer:
    if name is None or name in PRESETS:
        return Layer(values=dict(PRESETS[name]) if name else {})
    guess = did_you_mean(name, PRESETS)
    fixes = tuple(f"--preset {known}" for known in ([guess] if guess else PRESETS))
    # Without its preset the model is unknown: the fields that presets set are not checked.
    preset_fields = {field for preset in PRESETS.values() for field in preset}
    return Layer(problems=[Problem("E007", f"there is no preset {name}", fixes)], doubtful=preset_fields)


def _from_flags(given: Sequence[Given]) -> Layer:
    result = Layer()
    last = dict[str, Given]()
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
        result.values[name] = value
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
