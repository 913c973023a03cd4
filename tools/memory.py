"""Show the memory saved by ZeRO: ``python tools/memory.py --preset llama2-7b --bf16 --world-size 4``.

Takes the flags of a training run. Prints, for each ZeRO stage, the bytes allocated for the whole run on the rank that
has most, including alignment. Activations come on top of it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # if this checkout is not installed

from megatron.arguments.cli import parse
from megatron.config.errors import Problem, UserError
from megatron.config.parallel import ZERO_STAGES
from megatron.config.run import RunConfig
from megatron.config.text import echo
from megatron.convert.huggingface.config import read_model_values
from megatron.layers.parameters import num_parameters
from megatron.planner.memory import STATE_KINDS, communicator_bytes, max_state_bytes, reduction_buffer_bytes

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
        parsed = parse(["--check-config", *complete_flags(argv)], environ, read_model=read_model_values)
        if parsed.config.model.vocab_size is None:
            raise UserError([Problem("E104", "the vocabulary size is not specified", ("--vocab-size 50257",))])
        echo("\n".join(memory_table(parsed.config, parsed.world_size)))
    except UserError as error:
        echo(error, file=sys.stderr)
        return 2
    return 0


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
    held = [max_state_bytes(stage, world_size) for stage in stages]
    sums = [sum(parts.values()) for parts in held]
    pp, dp, tp = p.pipeline_model_parallel_size, p.data_parallel_size(world_size), p.tensor_model_parallel_size
    yield f"{num_parameters(config.model):,} parameters on {world_size} ranks: PP {pp} x DP {dp} x TP {tp}"
    yield "GiB on the fullest rank, without activations"
    yield ""
    yield row("", [f"ZeRO-{stage}" for stage in ZERO_STAGES.values()])
    rows = {part: gibibytes(parts[part] for parts in held) for part in STATE_KINDS}
    yield from (row(part, cells) for part, cells in rows.items() if {*cells} != {"0.00"})
    yield row("sum", gibibytes(sums))
    yield row("of ZeRO-0", [f"1/{sums[0] / total:.2f}" for total in sums])
    yield ""
    yield row("in flight", gibibytes(reduction_buffer_bytes(stage, world_size) for stage in stages))
    yield "(gradients being reduced during backward: at most this much more, freed after the step)"
    if any(buffers := [communicator_bytes(stage, world_size) for stage in stages]):
        yield row("NCCL, estimated", gibibytes(buffers))
        yield "(buffers of the communicators, outside of PyTorch's memory; all-to-alls and NVLS need more)"
    if dp == 1:
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
