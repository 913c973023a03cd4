"""Pretrain a GPT. Run with ``python``, or with torchrun or srun for several processes; see ``--help``."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from megatron.config.schemes import split_scheme

if __name__ == "__main__":  # until training has handlers of its own; the imports below take a while
    signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))

from megatron.arguments.checks.checkpoint import holds_checkpoints
from megatron.arguments.cli import ParsedArguments, parse
from megatron.checkpoint.format import Manifest
from megatron.config.errors import Problem, UserError
from megatron.config.launch import Launch, end_refused_start, exit_process
from megatron.config.run import RunConfig
from megatron.config.text import echo
from megatron.convert.huggingface.config import build_config_json, model_folder, read_model_values
from megatron.data.build import resolve_epochs
from megatron.data.dataset_info import resolve_vocab_size
from megatron.data.errors import DataError
from megatron.data.preview import data_fingerprints, preview_data
from megatron.data.tokenizers.huggingface import TOKENIZER_JSON
from megatron.training.machine import MACHINE_CODES, fit_to_machine
from megatron.training.resume_source import (
    StartPreview,
    compare_data,
    find_resume_source,
    preview_start,
    stored_config,
)
from megatron.training.startup import StartupTimer, process_start_time

SILENCE_SECONDS = 3.0
"""Delay before a rank that prints no error exits."""


def main(argv: Sequence[str], about: str = "") -> int:
    """Check the flags, then train.

    Args:
        argv: without the program's name.
        about: docstring of another program, whose ``argv`` begins with ``--config`` and the file of its defaults.

    Returns:
        The exit status: 0 at the end, 1 after an error, 2 if flags or files are refused before the first step,
        124 after ``exit_duration_in_mins``, 128 + n after signal n.
    """
    startup = StartupTimer(process_start_time(), "python")
    startup.enter("flags")
    launch = Launch()
    try:
        launch = Launch.read(os.environ)
        parsed = parse(argv, recall=stored_config, read_model=read_model_values, about=about)
        config = with_vocabulary(with_tokenizer(parsed.config))
        config = resolve_epochs(config, parsed.world_size)
        parsed, position, data = check_start(replace(parsed, config=config))
        config = parsed.config
    except (UserError, DataError) as error:
        return refuse(error, launch)
    if parsed.check_only:
        with suppress(BrokenPipeError):  # | head
            echo(parsed.summary(*position, data), flush=True)
        if parsed.fake_rank is None:
            return 0
        return show_fake_world(config, parsed.world_size, parsed.fake_rank, startup.began)
    if threads_exceed_cores(os.environ):  # threads that spin while they wait take cores from those that work
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with startup("imports"):
        from megatron.training.main import run  # torch takes seconds to import: only after the flags passed

    startup.enter("other")
    return run(config, parsed.notes, startup)


def refuse(error: UserError | DataError, launch: Launch) -> int:
    """Report why the start is refused, once; return the exit status.

    All ranks have the same flags, so rank 0 reports errors in them. Files, GPUs and memory may be missing on one
    machine only.
    """
    of_machine = isinstance(error, DataError) or not MACHINE_CODES.isdisjoint(p.code for p in error.problems)
    reports = launch.rank == 0 or (of_machine and launch.local_rank == 0)
    if reports:
        echo(error, file=sys.stderr, flush=True)
    report = "\n".join(map(str, error.problems)) if isinstance(error, UserError) else str(error)
    return end_refused_start(SILENCE_SECONDS, report if reports else None)


def check_start(parsed: ParsedArguments) -> tuple[ParsedArguments, tuple[int, int], Sequence[str]]:
    """Check the start on this machine and, with ``--check-config``, what the run would read.

    Args:
        parsed: with the vocabulary size, and lengths that follow from the data.

    Returns:
        The configuration as it is to run, with all notes; and for ``--check-config`` the steps and samples that were
        taken before, and lines on the data.

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
            start = preview_start(config, size)
            notes += start.notes
    position = start.iteration, start.consumed_samples
    with collected():
        data = preview_data(config, size, *position) if parsed.check_only else []
        if start.data is not None:
            notes += compare_data(start.data, data_fingerprints(config, size, *position), config, start.own)
    if problems:
        raise UserError(problems, notes)
    return replace(parsed, config=config, notes=tuple(notes)), position, data


def threads_exceed_cores(environ: Mapping[str, str], cores: int | None = None) -> bool:
    """Return True if the ranks of this machine together have more OpenMP threads than ``cores``.

    Args:
        environ: environment of this rank.
        cores: of the machine; None counts those that this process may use.
    """
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    launch = Launch.read(environ)
    ranks = launch.local_size
    if launch.launcher == "srun":  # it may bind each rank to cores of its own
        cores = cores or os.cpu_count() or 1
        counts = re.findall(r"(?:^|,)(\d+)", environ.get("SLURM_STEP_TASKS_PER_NODE", ""))  # such as 4(x2),3
        ranks = max([ranks, *map(int, counts)])
    first = environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    threads = int(first) if first.isdecimal() and int(first) else usable
    return ranks * threads > (cores or usable)


def show_fake_world(config: RunConfig, world_size: int, rank: int, started: float) -> int:
    """Build one rank of a large run without allocating memory and print a report; return 0, or 2 for invalid flags."""
    from megatron.training.fake_world import fake_world

    try:
        echo(fake_world(config, world_size, rank, started).report())
    except UserError as error:
        echo(error, file=sys.stderr, flush=True)
        return 2
    return 0


def with_tokenizer(config: RunConfig) -> RunConfig:
    """Return the configuration with the tokenizer of the model to start from, if conversations have no other."""
    if not config.data.chat_data_path or config.data.tokenizer_type is not None:
        return config
    source = find_resume_source(config.checkpoint.first_start)
    if source.weights is not None:
        folder = model_folder(split_scheme(source.weights)[1])
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


if __name__ == "__main__":
    exit_process(main(sys.argv[1:]))
