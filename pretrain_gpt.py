"""Pretrain a GPT. Run with ``python``, or with torchrun or srun for several processes; see ``--help``."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

if __name__ == "__main__":  # until training has handlers of its own; the imports below take a while
    signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))

from megatron.arguments.checks.checkpoint import holds_checkpoints
from megatron.arguments.cli import ParsedArguments, parse
from megatron.checkpoint.format import Manifest
from megatron.config.errors import UserError
from megatron.config.launch import Launch, exit_process
from megatron.config.run import RunConfig
from megatron.config.text import echo
from megatron.convert.huggingface.config import build_config_json, model_folder, read_model_values
from megatron.data.build import resolve_epochs
from megatron.data.dataset_info import resolve_vocab_size
from megatron.data.errors import DataError
from megatron.data.preview import preview_data
from megatron.data.tokenizers.huggingface import TOKENIZER_JSON
from megatron.training.resume_source import StartPreview, find_resume_source, preview_start, stored_config
from megatron.training.startup import StartupTimer, process_start_time

SILENCE_SECONDS = 3.0
"""Delay before a rank that prints no error exits."""


def main(argv: Sequence[str]) -> int:
    """Check the flags, then train.

    Returns:
        The exit status: 0 at the end, 1 after an error, 2 if flags or files are refused before the first step,
        124 after ``exit_duration_in_mins``, 128 + n after signal n.
    """
    startup = StartupTimer(process_start_time(), "python")
    startup.enter("flags")
    launch = Launch()
    try:
        launch = Launch.read(os.environ)
        parsed = parse(argv, recall=stored_config, read_model=read_model_values)
        config = with_vocabulary(with_tokenizer(parsed.config))
        config = resolve_epochs(config, parsed.world_size)
        if config.checkpoint.save is not None and config.checkpoint.save_hf_interval is not None:
            build_config_json(config.model)  # raises if no model of Hugging Face computes the same
        start = preview_start(config, parsed.world_size) if parsed.check_only else StartPreview()
        position = start.iteration, start.consumed_samples
        data = preview_data(config, parsed.world_size, *position) if parsed.check_only else []
    except (UserError, DataError) as error:
        # All ranks have the same flags, so rank 0 reports errors in them; files may be missing on one machine only.
        if launch.rank == 0 or (isinstance(error, DataError) and launch.local_rank == 0):
            echo(error, file=sys.stderr, flush=True)
        else:  # a launcher kills all ranks once one exits: let the reporting rank print first
            time.sleep(SILENCE_SECONDS)
        return 2
    if parsed.check_only:
        checked = ParsedArguments(config, parsed.world_size, notes=(*parsed.notes, *start.notes))
        with suppress(BrokenPipeError):  # | head
            echo(checked.summary(*position, data), flush=True)
        if parsed.fake_rank is None:
            return 0
        return show_fake_world(config, parsed.world_size, parsed.fake_rank, startup.began)
    if threads_exceed_cores(os.environ):  # threads that spin while they wait take cores from those that work
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with startup("imports"):
        from megatron.training.main import run  # torch takes seconds to import: only after the flags passed

    startup.enter("other")
    return run(config, parsed.notes, startup)


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
    if source.hf is not None:
        folder = model_folder(source.hf)
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
