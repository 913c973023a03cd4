"""From a command line to a start: sources -> configuration -> what tokenizer and data determine -> problems.

``arguments.cli.parse`` reads the sources and checks their values. Here the vocabulary, the lengths in epochs and the
machine complete the configuration, and everything that would end the start later is found. No torch.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from megatron.arguments.checks.checkpoint import holds_checkpoints
from megatron.arguments.cli import ParsedArguments, given_values, parse
from megatron.arguments.phases import (
    collect_phases,
    describe_plan,
    mixture_phases,
    plan_phases,
    planned,
    read_phases,
)
from megatron.checkpoint.format import Manifest
from megatron.checkpoint.framework_folders import find_config_folder
from megatron.config.batch import WHOLE_RUN, Origin
from megatron.config.errors import Problem, UserError
from megatron.config.launch import Launch, end_refused_start
from megatron.config.phases import Phase
from megatron.config.run import RunConfig
from megatron.config.text import echo
from megatron.convert.huggingface.config import build_config_json, model_folder, read_model_values
from megatron.data.blend_usage import blend_usage
from megatron.data.build import resolve_epochs
from megatron.data.dataset_info import resolve_vocab_size
from megatron.data.errors import DataError
from megatron.data.preview import data_fingerprints, preview_data
from megatron.data.skipped_dataset import SKIPPED, SampleSkips
from megatron.data.tokenizers.huggingface import TOKENIZER_JSON
from megatron.training.machine import MACHINE_CODES, fit_to_machine
from megatron.training.phases import PhaseChoice, choose_phase
from megatron.training.resume_source import (
    ResumeSource,
    StartPreview,
    compare_data,
    continues_data,
    find_resume_source,
    preview_start,
    stored_config,
    stored_layout,
)

SILENCE_SECONDS = 3.0
"""Delay before a rank that prints no error exits."""


@dataclass(frozen=True)
class Start:
    """A start that nothing refuses."""

    parsed: ParsedArguments  # the configuration as it is to run, with all notes
    position: tuple[int, int] = (0, 0)  # with --check-config: steps and samples that were taken before
    data: Sequence[str] = ()  # with --check-config: lines on the data
    phases: tuple[Start, ...] = ()  # of --phases; ``parsed`` is that of the first

    @property
    def plan(self) -> list[Phase]:
        """The phases of the run in their order, one without --phases."""
        return [planned(each.parsed) for each in self.phases or (self,)]

    def report(self, began: float) -> int:
        """Print what ``--check-config`` and ``--fake-world`` ask for; return the exit status."""
        with suppress(BrokenPipeError):  # | head
            for each, heading in zip(self.phases, describe_plan(self.plan, self.parsed.world_size)):
                echo(f"{heading}\n{each.parsed.summary(*each.position, each.data)}\n", flush=True)
            if not self.phases:
                echo(self.parsed.summary(*self.position, self.data), flush=True)
        if self.parsed.fake_rank is None:
            return 0
        from megatron.training.fake_world import fake_world  # imports torch

        try:
            echo(fake_world(self.parsed.config, self.parsed.world_size, self.parsed.fake_rank, began).report())
        except UserError as error:
            echo(error, file=sys.stderr, flush=True)
            return 2
        return 0


def read_start(argv: Sequence[str], about: str = "") -> Start:
    """Read and check a command line; arguments as for ``pretrain_gpt.main``.

    Raises:
        UserError: with all problems.
        DataError: if the data cannot be used, and there is no other problem.
    """
    Launch.read(os.environ)  # a broken environment is refused before any flag
    phases = parse_phases(argv, about)
    if len(phases) == 1 and phases[0].config.training.phases is None:
        return check_start(phases[0])
    sources = [ResumeSource() for _ in phases]  # of those that do not come next
    source = find_resume_source(phases[0].config.resume_options)
    choice = PhaseChoice(0, source)
    with nullcontext() if phases[0].check_only else suppress(UserError):  # which the start itself finds, then
        choice = choose_phase([each.config for each in phases], source, phases[0].world_size)
    sources[choice.place] = choice.source
    if Launch.read(os.environ).rank == 0:  # data of later phases would else be opened only where these begin
        phases[choice.place + 1 :] = [replace(each, check_only=True) for each in phases[choice.place + 1 :]]
    beginnings = planned_beginnings(phases, choice)

    def check_phase(phase: tuple[ParsedArguments, ResumeSource, Beginning]) -> Start:
        try:
            return check_start(*phase)
        except DataError as error:
            raise DataError(f"phase {phase[0].config.training.phase_name}: {error.seen}", *error.fixes) from error

    names = [str(each.config.training.phase_name) for each in phases]
    starts = collect_phases(names, [*zip(phases, sources, beginnings)], check_phase)
    return replace(starts[0], phases=tuple(starts))


def parse_phases(argv: Sequence[str], about: str = "") -> list[ParsedArguments]:
    """Return the configuration of each phase of a command line, or of its only one, with what the data determine.

    Arguments and errors as for :func:`read_start`, without the checks of the start.
    """
    given = given_values(argv)
    entries = mixture_phases(given) if given.get("phases") is None else read_phases(given["phases"])
    if not entries:
        parsed = parse(
            argv, recall=stored_config, read_model=read_model_values, about=about, stored_layout=stored_layout
        )
        return [replace(parsed, config=with_data(parsed.config, parsed.world_size))]

    def parse_phase(where: str, options: Mapping[str, Any], world_size: int | None) -> ParsedArguments:
        parsed = parse(
            argv,
            recall=lambda options: stored_config(replace(options, save=None)),  # its own may be of any phase
            read_model=read_model_values,
            about=about,
            phase=(where, options),
            world_size=world_size,
        )
        return replace(parsed, config=with_data(parsed.config, parsed.world_size))

    return plan_phases(given.get("phases") or given["data_mixture"], entries, given, parse_phase)


def with_data(config: RunConfig, world_size: int) -> RunConfig:
    """Return the configuration with tokenizer, vocabulary size and lengths that follow from the data."""
    return resolve_epochs(with_vocabulary(with_tokenizer(config)), world_size)


def with_tokenizer(config: RunConfig) -> RunConfig:
    """Return the configuration with the tokenizer of the model to start from, if conversations have no other."""
    if not config.data.chat_data_path or config.data.tokenizer_type is not None:
        return config
    source = find_resume_source(config.checkpoint.first_start)
    if source.weights is not None:
        folder = model_folder(find_config_folder(source.weights) or Path())
    elif source.paths:  # the manifest of the first is valid
        folder = Path(str(Manifest.open(source.paths[0]).folder), "tokenizer")
    if source.fresh or not (folder / TOKENIZER_JSON).is_file():
        return config
    data = replace(config.data, tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder))
    return replace(config, data=data)


def with_vocabulary(config: RunConfig) -> RunConfig:
    """Return the configuration with the vocabulary size taken from the data's tokenizer if no flag gives it."""
    options = config.checkpoint
    weights = options.save if holds_checkpoints(options.save) else options.load
    size = resolve_vocab_size(config.data, config.model.vocab_size, weights)
    return replace(config, model=replace(config.model, vocab_size=size))


class Beginning(NamedTuple):
    """Planned start position of a phase."""

    origin: Origin = WHOLE_RUN
    skipped: Sequence[int] = ()  # places of its data that are skipped before, as in a checkpoint


FROM_THE_START = Beginning()
"""Beginning of a run of one phase."""


def planned_beginnings(phases: Sequence[ParsedArguments], choice: PhaseChoice) -> list[Beginning]:
    """Return where each phase begins, as the checkpoint has it for the one of ``choice``.

    After errors in the data, which `check_start` finds, phases begin as if nothing had been read.
    """
    if not any(each.check_only or each.config.data.data_mixture for each in phases):
        return [FROM_THE_START] * len(phases)  # where they begin is of no use
    beginnings, after = list[Beginning](), FROM_THE_START
    for place, each in enumerate(phases):
        start = StartPreview(segments={SKIPPED: after.skipped}, origin=after.origin)
        if place == choice.place:
            with suppress(UserError, DataError):
                found = preview_start(each.config, each.world_size, choice.source)
                start = start if found.origin is None else found
        beginnings.append(Beginning(start.origin or WHOLE_RUN, (start.segments or {}).get(SKIPPED, ())))
        after = planned_end(each, start, phases[min(place + 1, len(phases) - 1)].config)
    return beginnings


def planned_end(parsed: ParsedArguments, start: StartPreview, following: RunConfig) -> Beginning:
    """Return where the phase after one begins that takes its steps from ``start`` on."""
    config, size, phase, before = parsed.config, parsed.world_size, planned(parsed), start.origin or WHOLE_RUN
    sources, read, skipped = Counter(before.sources), 0, list[int]()
    samples = phase.tokens // config.training.seq_length
    with suppress(UserError, DataError):
        if config.data.data_mixture is not None:
            for stage in blend_usage(config, size, before, (start.iteration, start.consumed_samples), start.segments):
                sources.update({use.name: use.tokens for use in stage.sources})
        elif reads_on(config, following, size):
            read, streams = before.read + samples, config.diloco.streams
            consumed, past = streams * (before.read + start.consumed_samples), (start.segments or {}).get(SKIPPED, ())
            training = config.training
            skips = SampleSkips(config.data, training.seq_length, past, consumed, training.phase_name).ranges
            skipped = skips.clip(0, skips.end(streams * read)).to_list()
    position = before.iteration + phase.steps, before.samples + samples, before.tokens + phase.tokens
    return Beginning(Origin(*position, read, sources=dict(sources)), skipped)


def reads_on(before: RunConfig, config: RunConfig, world_size: int) -> bool:
    """Return True if a phase continues to read the data of the one before; raise as `data_fingerprints`."""
    return continues_data(before, data_fingerprints(before, world_size)["train"], config, world_size)


def check_start(
    parsed: ParsedArguments, source: ResumeSource | None = None, beginning: Beginning = FROM_THE_START
) -> Start:
    """Check the start on this machine and, with ``--check-config``, what the run would read.

    Args:
        parsed: with the vocabulary size, and lengths that follow from the data.
        source: what it starts from; None to search for it.
        beginning: of its phase, unless the checkpoint has it.

    Raises:
        UserError: with all problems.
        DataError: if the data cannot be used, and there is no other problem.
    """
    config, size, notes, problems = parsed.config, parsed.world_size, [*parsed.notes], list[Problem]()

    @contextmanager
    def collected() -> Iterator[None]:
        try:
            yield
        except UserError as error:
            problems.extend(error.problems)
            notes.extend(note for note in error.notes if note not in notes)
        except DataError as error:
            if not problems:
                raise
            notes.append(str(error))

    with collected():
        if config.checkpoint.save is not None and config.checkpoint.save_hf_interval is not None:
            build_config_json(config.model)  # raises if no model of Hugging Face computes the same
    with collected():
        if parsed.here:
            config, found = fit_to_machine(config, size)
            notes += found
    start, data = StartPreview(), list[str]()
    with collected():
        if parsed.check_only:
            source = source or find_resume_source(config.resume_options)
            config = source.without_samples(config)
        start = preview_position(parsed, source, beginning)
        notes += start.notes
    position = start.iteration, start.consumed_samples
    with collected():
        data = describe_data(replace(parsed, config=config), start)
        if start.data is not None:
            fingerprints = data_fingerprints(config, size, *position, start.segments)
            notes += compare_data(start.data, fingerprints, config, start.own)
    if problems:
        raise UserError(problems, notes)
    return Start(replace(parsed, config=config, notes=tuple(notes)), position, data)


def preview_position(parsed: ParsedArguments, source: ResumeSource | None, beginning: Beginning) -> StartPreview:
    """Return where a start reads its data: from the checkpoint, or as planned. Notes are those of ``--check-config``.

    Raises as `preview_start`, only with ``--check-config``: without it, a start that resumes raises it itself.
    """
    config, size, start = parsed.config, parsed.world_size, StartPreview()
    if parsed.check_only:
        start = preview_start(config, size, source)
    elif config.data.data_mixture is not None:
        with suppress(UserError, DataError):
            start = replace(preview_start(config, size, source), notes=(), data=None)
    if start.origin is not None:
        return start
    return replace(start, origin=beginning.origin, segments={SKIPPED: beginning.skipped} if beginning.skipped else None)


def describe_data(parsed: ParsedArguments, start: StartPreview) -> list[str]:
    """Return the lines of ``--check-config`` on the data from ``start`` on; none without it.

    That a mixture fits the run, and reads no source too often, is always checked before torch is imported.

    Raises as `preview_data`.
    """
    config, size, origin = parsed.config, parsed.world_size, start.origin or WHOLE_RUN
    position = start.iteration, start.consumed_samples
    if parsed.check_only:
        return preview_data(config, size, *position, start.segments, origin)
    if config.data.data_mixture is not None:
        blend_usage(config, size, origin, position, start.segments)
    return []


def refuse(error: UserError | DataError) -> int:
    """Report why the start is refused, once; return the exit status.

    All ranks have the same flags, so rank 0 reports errors in them. Files, GPUs and memory may be missing on one
    machine only.
    """
    launch = Launch()
    with suppress(UserError):  # which then is ``error``
        launch = Launch.read(os.environ)
    of_machine = isinstance(error, DataError) or not MACHINE_CODES.isdisjoint(p.code for p in error.problems)
    reports = launch.rank == 0 or (of_machine and launch.local_rank == 0)
    if reports:
        echo(error, file=sys.stderr, flush=True)
    report = "\n".join(map(str, error.problems)) if isinstance(error, UserError) else str(error)
    return end_refused_start(SILENCE_SECONDS, report if reports else None)
