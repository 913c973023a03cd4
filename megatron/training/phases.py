"""The phase that a start of a run with ``--phases`` continues, from the checkpoint that it resumes.

A checkpoint has the name and the origin of its phase. A phase that has taken its steps is followed by the next one,
which begins from the same checkpoint. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from megatron.checkpoint.errors import CheckpointError
from megatron.checkpoint.format import Manifest
from megatron.checkpoint.location import Location
from megatron.config.batch import Origin, final_iteration
from megatron.config.errors import Problem, UserError
from megatron.config.phases import Phase
from megatron.config.run import RunConfig
from megatron.config.text import listed
from megatron.training.resume_source import ResumeSource, is_own_checkpoint, position_of, step_of


class PhaseFacts(NamedTuple):
    """The phase of a checkpoint; JSON."""

    name: str
    begin: int  # steps taken before it
    iteration: int  # steps taken in it
    samples: int  # consumed in it


class PhaseChoice(NamedTuple):
    """The phase that a start continues, or begins."""

    place: int  # in the plan
    source: ResumeSource  # with checkpoints from which it can continue
    earlier: tuple[Location, ...] = ()  # older checkpoints, of phases before


def read_phase(path: Location) -> PhaseFacts | None:
    """Return the phase of a checkpoint; None if its manifest cannot be read here."""
    try:
        manifest = Manifest.open(path)
    except (CheckpointError, OSError):
        return None
    origin = Origin.from_state(manifest.state)
    name = manifest.state.get("phase", {}).get("name", "")
    return PhaseFacts(name, origin.iteration, *origin.local(*position_of(manifest)))


def choose_phase(
    configs: Sequence[RunConfig],
    source: ResumeSource,
    world_size: int,
    read: Callable[[Location], PhaseFacts | None] = read_phase,
) -> PhaseChoice:
    """Return the phase that a start continues.

    Args:
        configs: of the phases of the run.
        source: what the run starts from.
        world_size: number of ranks.
        read: returns the phase of a checkpoint, the same on every rank.

    Raises:
        UserError: if the newest checkpoint of the run is of none of its phases.
    """
    names = [config.training.phase_name for config in configs]
    found = ((path, facts) for path in source.paths if (facts := read(path)) is not None)
    path, facts = next(found, (None, None))
    if path is None or facts is None or source.mode == "weights-only":
        return PhaseChoice(0, source)
    options = configs[0].checkpoint
    if facts.name not in names:
        if source.mode == "new-phase" or not is_own_checkpoint(path, options):
            return PhaseChoice(0, source)
        of = f"of phase {facts.name}, which" if facts.name else "of no phase, which"
        sentence = f"{path} is {of} --phases {configs[0].training.phases} does not have: it has {listed(names)}"
        fix = f"the file with the phase {facts.name}" if facts.name else "--resume-mode new-phase"
        raise UserError([Problem("E342", sentence, (fix,))])
    place = names.index(facts.name)
    config, newest = configs[place], source.paths.index(path)
    ranks = config.parallel.data_parallel_size(world_size)
    has_ended = final_iteration(config.training, ranks, facts.iteration, facts.samples) <= facts.iteration
    if has_ended and place + 1 < len(configs):
        begins = replace(source, paths=source.paths[: newest + 1], mode="new-phase")
        return PhaseChoice(place + 1, begins, source.paths[newest + 1 :])
    mode = "exact" if source.mode == "new-phase" else source.mode
    of_phase = [each for each in source.paths[newest + 1 :] if step_of(each) > facts.begin]
    kept = (*source.paths[: newest + 1], *of_phase)
    return PhaseChoice(place, replace(source, paths=kept, mode=mode), source.paths[len(kept) :])


def plan_notes(plan: Sequence[Phase], place: int) -> list[str]:
    """Return the log line on the place of a phase among others; none for a run of one phase."""
    if len(plan) == 1:
        return []
    later = [phase.name for phase in plan[place + 1 :]]
    follows = f"; {listed(later)} {'follows' if len(later) == 1 else 'follow'}" if later else ", the last one"
    return [f"phase {plan[place].name}, {place + 1} of {len(plan)}{follows}"]
