"""Show the memory of a run, and what ZeRO saves: ``python tools/memory.py --preset llama2-7b --bf16 --world-size 4``.

Takes the flags of a training run. Prints, for each ZeRO stage, the memory of the rank that has most: what is allocated
for the whole run, and what is added at the peak of a step.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # if this checkout is not installed

from megatron.arguments.cli import parse
from megatron.config.errors import UserError
from megatron.config.parallel import ZERO_STAGES
from megatron.config.run import RunConfig
from megatron.config.text import echo
from megatron.convert.huggingface.config import read_model_values
from megatron.data.errors import DataError
from megatron.layers.parameters import num_parameters
from megatron.planner.memory import STATE_KINDS, max_host_bytes, max_peak_bytes
from megatron.training.start import with_vocabulary

REQUIRED_FLAGS = {
    ("--mock-data",): ("--data-path", "--data-args-path", "--train-data-path", "--per-split-data-args-path"),
    ("--train-iters", "1"): ("--train-samples",),
}
"""Flags required of a run that do not affect memory, and alternatives to each. A --config file may contain any."""


def main(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """Print the table and return the exit status."""
    if {"-h", "--help"} & {*argv}:
        echo(__doc__)
        return 0
    try:
        echo("\n".join(memory_table(*parse_run(argv, environ))))
    except (UserError, DataError) as error:
        echo(error, file=sys.stderr)
        return 2
    return 0


def parse_run(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[RunConfig, int]:
    """Return the configuration and the number of ranks of the flags of a run, with the vocabulary of its data.

    Raises:
        UserError: with all problems of the flags.
        DataError: if the vocabulary is unknown, or the data cannot be read.
    """
    parsed = parse(["--check-config", *complete_flags(argv)], environ, read_model=read_model_values)
    given = parsed.config.model.vocab_size is not None  # its tokenizer may be elsewhere
    return parsed.config if given else with_vocabulary(parsed.config), parsed.world_size


def complete_flags(argv: Sequence[str]) -> list[str]:
    """Return the flags, completed by those that every run requires."""
    given = {word.partition("=")[0] for word in argv}
    missing = (flag for flag, others in REQUIRED_FLAGS.items() if not {flag[0], "--config", *others} & given)
    return [*argv, *(word for flag in missing for word in flag)]


def memory_table(config: RunConfig, world_size: int) -> Iterator[str]:
    """Yield the lines of the output."""

    def row(name: str, cells: Iterable[str]) -> str:
        return f"{name:<17}" + "".join(f"{cell:>10}" for cell in cells)

    def gibibytes(counts: Iterable[int]) -> list[str]:
        return [f"{count / 2**30:,.2f}" for count in counts]

    p = config.parallel
    stages = [with_zero_stage(config, name) for name in ZERO_STAGES]
    peaks = [max_peak_bytes(stage, world_size) for stage in stages]
    sums = [sum(parts[kind] for kind in STATE_KINDS) for parts in peaks]
    pp, dp, tp = p.pipeline_model_parallel_size, p.data_parallel_size(world_size), p.tensor_model_parallel_size
    context = f"CP {p.context_parallel_size} x " if p.context_parallel_size > 1 else ""
    yield f"{num_parameters(config.model):,} parameters on {world_size} ranks: PP {pp} x DP {dp} x {context}TP {tp}"
    yield "GiB on the fullest rank"
    yield ""
    yield row("", [f"ZeRO-{stage}" for stage in ZERO_STAGES.values()])
    rows = {part: gibibytes(parts[part] for parts in peaks) for part in peaks[0]}
    shown = {part: row(part, cells) for part, cells in rows.items() if {*cells} != {"0.00"}}
    yield from (line for part, line in shown.items() if part in STATE_KINDS)
    yield row("sum", gibibytes(sums))
    yield row("of ZeRO-0", [f"1/{sums[0] / total:.2f}" for total in sums])
    yield ""
    yield from (line for part, line in shown.items() if part not in STATE_KINDS)
    yield row("peak of a step", gibibytes(sum(parts.values()) for parts in peaks))
    host = [sum(max_host_bytes(stage, world_size).values()) for stage in stages]
    if any(host):
        yield row("host memory", gibibytes(host))
    if p.weight_replicas(world_size) == 1:
        yield f"there is nothing to share with DP 1: more ranks are --world-size {2 * world_size}"


def with_zero_stage(config: RunConfig, strategy: str) -> RunConfig:
    """Return the configuration with another ZeRO stage."""
    parallel = replace(
        config.parallel,
        use_distributed_optimizer=False,
        data_parallel_sharding_strategy=strategy,
        overlap_param_gather=config.parallel.overlap_param_gather and strategy != "no_shard",
    )
    return replace(config, parallel=parallel)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
