"""Pretrain a GPT: ``python pretrain_gpt.py --help``, or under torchrun or srun for several processes."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

from megatron.config.arguments import Parsed, parse
from megatron.config.checks.checkpoint import holds_checkpoints
from megatron.config.launch import Launch, leave
from megatron.config.problems import UserError
from megatron.config.run import RunConfig
from megatron.data.errors import DataError
from megatron.data.vocabulary import vocabulary
from megatron.training.data_preview import data_rows
from megatron.training.preview import Preview, preview, recall
from megatron.training.startup import StartUp

SILENCE_SECONDS = 3.0
"""How long a rank stays that has nothing to say of an error."""


def main(argv: Sequence[str]) -> int:
    """Check the flags, then train.

    Returns:
        The exit status: 0 at the end, 1 after an error, 2 for flags or files that are refused before the first
        step, 124 when ``exit_duration_in_mins`` is over, 128 + n after signal n.

    """
    startup = StartUp.of_process()
    startup.enter("flags")
    try:
        parsed = parse(argv, recall=recall)
        config = with_vocabulary(parsed.config)
        seen = preview(config, parsed.world_size) if parsed.check_only else Preview()
        begin = seen.iteration, seen.consumed_samples
        data = data_rows(config, parsed.world_size, *begin) if parsed.check_only else []
    except (UserError, DataError) as error:
        launch = Launch.read(os.environ)
        # Flags are the same on all ranks; files may be missing on one machine only.
        if launch.rank == 0 or (isinstance(error, DataError) and launch.local_rank == 0):
            print(error, file=sys.stderr, flush=True)
        else:  # a launcher ends all ranks as soon as one is gone: not before the one that speaks
            time.sleep(SILENCE_SECONDS)
        return 2
    if parsed.check_only:
        checked = Parsed(config, parsed.world_size, notes=(*parsed.notes, *seen.notes))
        print(checked.summary(*begin, data), flush=True)
        if parsed.fake_rank is None:
            return 0
        return show_fake_world(config, parsed.world_size, parsed.fake_rank, startup.began)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads starve each other on a busy machine
    with startup("imports"):
        from megatron.training.main import run  # torch takes seconds to import: only for flags known to be good

    startup.enter("other")
    return run(config, parsed.notes, startup)


def show_fake_world(config: RunConfig, world_size: int, rank: int, started: float) -> int:
    """Build one rank of a large run here and print what it is; returns the exit status, 2 for flags that do not do."""
    from megatron.training.fake_world import fake_world

    try:
        print(fake_world(config, world_size, rank, started).report())
    except UserError as error:
        print(error, file=sys.stderr, flush=True)
        return 2
    return 0


def with_vocabulary(config: RunConfig) -> RunConfig:
    """The configuration with the vocabulary's size filled in from the data's tokenizer, where no flag gives it."""
    options = config.checkpoint
    weights = options.save if holds_checkpoints(options.save) else options.load
    size = vocabulary(config.data, config.model.vocab_size, weights)
    return replace(config, model=replace(config.model, vocab_size=size))


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
