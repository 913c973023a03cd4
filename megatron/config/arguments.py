"""From a command line to a checked configuration.

Values are laid over one another in this order: defaults, the model of the checkpoint or of the ``hf:DIR`` to start
from, ``--preset``, ``--config`` files, flags, ``--set``. Everything that is wrong, in the spelling as in the values, is
reported at once.
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
"""From where a run starts to ``to_dict`` of the configuration that the checkpoint there has; None if none is wanted,
and a UserError if one is, but cannot be read."""


@dataclass(frozen=True)
class Parsed:
    """A command line that passed every check.

    Attributes:
        config: resolved: derived values are written out.
        world_size: ranks it was checked for.
        check_only: whether nothing but a check was asked for, of ``--check-config`` or ``--fake-world``.
        fake_rank: the rank that ``--fake-world`` asks to build after it; None without.
        notes: one line each, to be printed: what was ignored, and why.
    """

    config: RunConfig
    world_size: int
    check_only: bool = False
    notes: tuple[str, ...] = ()
    fake_rank: int | None = None

    def summary(self, iteration: int = 0, consumed_samples: int = 0, data: Sequence[str] = ()) -> str:
        """What ``--check-config`` prints of a run that has taken so many steps and used so many samples.

        ``data`` are lines about what it reads.
        """
        notes = [f"note: {note}" for note in self.notes]
        rows = summary(self.config, self.world_size, iteration, consumed_samples)
        return "\n".join([*notes, rows, *data, "config ok"])


def parse(
    argv: Sequence[str], environ: Mapping[str, str] = os.environ, recall: Recall = lambda options: None
) -> Parsed:
    """The configuration of a command line.

    Args:
        argv: without the program's name.
        environ: where torchrun or srun say how many ranks there are.
        recall: finds the configuration of the checkpoint that the run starts from.

    Raises:
        UserError: with every problem of flags, files and values.

    """
    reading = read(argv)
    known = reading.known
    foreign, notes = judge(reading.foreign)
    files = [from_file(path) for path in known.config]
    flags, assignments = _from_flags(reading.given), from_assignments(known.set)
    layers = [_preset(known.preset), *files, flags, assignments, reading.malformed, foreign]
    own = build(lay_over(layer.values for layer in layers))
    saved, lost = _recalled(recall, own.checkpoint)
    theirs = from_hugging_face(own.checkpoint.load) if saved is None else from_checkpoint(saved)
    layers.insert(0, theirs)
    said = lay_over(layer.values for layer in layers)
    config = build(said)
    found = [problem for layer in layers for problem in layer.problems] + habits(reading.spellings, config)
    checking = known.check_config or known.fake_world
    launch = Launch.read(environ)
    world_size = _world_size(known, config, launch, found, notes)
    fake_rank = _fake_rank(known, launch, found)
    doubtful = {name for layer in layers for name in layer.doubtful}
    wrong = problems(config, world_size, doubtful)
    found += [_in_flags(layout.on_nodes(problem, config, world_size, launch)) for problem in wrong]
    in_range = all(problem.code != "E600" for problem in found)  # derived sizes need that
    if saved is None and theirs.values and in_range:
        shape = to_dict(build(theirs.values))
        changes = compare(shape, resolve(config, world_size), "weights-only", name="config.json")
        notes += changes.lines
        found += changes.problems
    if found:
        explained = any(problem.code in ("E801", "E802") for problem in found)  # why there is none, better than lost
        raise UserError(found if explained else [*lost, *found])
    if saved is not None:
        told = set(theirs.values) - {"vocab_size"}  # which is most often not said but known from the data
        notes += _taken_over(sorted(told), resolve(own, world_size), resolve(config, world_size))
    notes += assumptions(reading.spellings, said)
    notes += [*batch.remarks(config, world_size), *data.remarks(config), *checkpoint.remarks(config)]
    notes += [*profiling.remarks(config, world_size), *graphs.remarks(config), *pipeline.remarks(config, world_size)]
    notes += [*experts.remarks(config), *sharding.remarks(config, world_size), *restart_remarks(environ)]
    asked = lay_over(layer.values for layer in (*files, flags, assignments))
    notes += map(in_flags, idle.remarks(config, asked))
    return Parsed(resolve(config, world_size), world_size, checking, tuple(notes), fake_rank)


def _in_flags(problem: Problem) -> Problem:
    """The problem in terms of flags; those of files speak of flags already, and of paths, which stay as they are."""
    of_files = problem.code.startswith(("E5", "E8"))
    return problem if of_files else replace(problem, sentence=in_flags(problem.sentence))


def _recalled(recall: Recall, options: CheckpointConfig) -> tuple[Mapping[str, Any] | None, Sequence[Problem]]:
    """What the checkpoint says, and why it does not.

    The latter is told beside problems that may follow from it. Without any, the first rank will tell, when it has
    looked at the checkpoint for all.
    """
    try:
        return recall(options), ()
    except UserError as error:
        return None, error.problems


def _taken_over(names: Iterable[str], own: RunConfig, config: RunConfig) -> list[str]:
    """A note on what comes from the checkpoint's model and would be something else without it."""
    before, after = flat(own), flat(config)
    taken = [SETTINGS[name].spell(after[name]) for name in names if before[name] != after[name]]
    return [f"from the checkpoint's model, where no flag says otherwise: {' '.join(taken)}"] if taken else []


def _preset(name: str | None) -> Layer:
    if name is None or name in PRESETS:
        return Layer(values=dict(PRESETS[name]) if name else {})
    guess = did_you_mean(name, PRESETS)
    fixes = tuple(f"--preset {known}" for known in ([guess] if guess else PRESETS))
    # Without its preset nothing is known about the model: what presets speak of is not checked.
    spoken_of = {field for preset in PRESETS.values() for field in preset}
    return Layer(problems=[Problem("E007", f"there is no preset {name}", fixes)], doubtful=spoken_of)


def _from_flags(given: Sequence[Given]) -> Layer:
    layer, said = Layer(), dict[str, Given]()
    for g in given:
        name = g.setting.name
        try:
            value = g.value()
        except ValueError as error:
            layer.refuse(g.setting, g.spelling, error, g.words)
            continue
        before = said.get(name)
        if before is not None and before.main != g.main and layer.values[name] != value:
            layer.doubtful.add(name)
            sentence = f"{before.spelling} and {g.spelling} contradict each other: both set {g.setting.flag}"
            layer.problems.append(Problem("E003", sentence, (f"drop {before.spelling}", f"drop {g.spelling}")))
        said[name], layer.values[name] = g, value
    return layer


def _world_size(
    known: argparse.Namespace, config: RunConfig, launch: Launch, found: list[Problem], notes: list[str]
) -> int:
    """Ranks to check for; problems and notes about them are appended."""
    asked: int | None = known.world_size
    if asked is not None and asked < 1:
        found.append(Problem("E008", f"--world-size {asked}: there is at least one rank", ("--world-size 1",)))
        asked = None
    if known.check_config or known.fake_world:
        fewest = max(1, config.parallel.model_ranks)
        if asked is None and launch.launcher is None and fewest > 1:
            notes.append(f"--world-size is not given: checked for {fewest} ranks, the fewest that hold one model")
        return asked or (launch.world_size if launch.launcher else fewest)
    found += launch.problems()
    if asked is not None and asked != launch.world_size:
        sentence = f"--world-size {asked}, but the launcher started {launch.world_size}"
        found.append(Problem("E008", sentence, (f"torchrun --nproc-per-node {asked}", "--check-config")))
    return asked or launch.world_size


def _fake_rank(known: argparse.Namespace, launch: Launch, found: list[Problem]) -> int | None:
    """The rank that ``--fake-world`` is to build; problems about it are appended."""
    rank, launched = known.fake_rank, launch.world_size
    if not known.fake_world:
        if rank is not None:
            sentence = f"--fake-rank {rank} is a rank of --fake-world, which is not asked for"
            found.append(Problem("E010", sentence, ("--fake-world --world-size N", "drop --fake-rank")))
        return None
    if launched > 1:
        sentence = f"--fake-world needs one process for ranks of any number, and the launcher started {launched}"
        found.append(Problem("E010", sentence, ("python pretrain_gpt.py --fake-world --world-size N",)))
    if known.world_size is None:
        sentence = "--fake-world builds a rank of a large run, and nothing says how large"
        found.append(Problem("E010", sentence, ("--world-size 1024",)))
    elif rank is not None and known.world_size > 0 and not 0 <= rank < known.world_size:
        sentence = f"--fake-rank {rank}: the ranks of --world-size {known.world_size} are 0 to {known.world_size - 1}"
        found.append(Problem("E010", sentence, ("--fake-rank 0", f"--fake-rank {known.world_size - 1}")))
    return rank or 0
