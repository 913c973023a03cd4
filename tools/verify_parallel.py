"""Check that a parallel layout computes what one process computes, for any flags of ``pretrain_gpt.py``.

    python tools/verify_parallel.py --world-size 4 --preset tiny-llama --tensor-model-parallel-size 2

Runs the first steps on CPUs in one process and in ``--world-size`` processes, and compares loss, gradient norm and
every parameter's gradient. The first parameter that differs is reported.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # if this checkout is not installed

from megatron.arguments.cli import parse
from megatron.config.errors import Problem, UserError
from megatron.config.model import ModelConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.run import RunConfig
from megatron.config.text import echo
from megatron.convert.huggingface.config import read_model_values
from megatron.data.dataset_info import resolve_vocab_size
from megatron.data.errors import DataError
from megatron.layers.parameters import num_parameters
from megatron.pipeline.plan import AUTO, SCHEDULE_SUFFIX, schedule_name, stage_layers
from tools.lib.ranks import run_ranks

if TYPE_CHECKING:
    from tools.lib.verify_parallel import RankTrace, StepDeviation

Launcher = Callable[[RunConfig, int, int], "list[list[RankTrace]]"]

ASSUMED_FLAGS = {
    "E304": ("--train-iters", "100"),
    "E501": ("--mock-data",),
    "E104": ("--vocab-size", "257"),
}
"""Flags assumed if missing, by the code of the error that would be reported otherwise."""

TOLERANCE = {"fp64": 1e-10, "fp32": 1e-5}
GRADIENT_FLOOR = {"fp64": 1e-5, "fp32": 1e-2}
"""Lower bound of a gradient's norm relative to all gradients, because some gradients are only rounding errors."""

LAYER_COUNT_OPTIONS = (
    "num_layers_per_virtual_pipeline_stage",
    "pipeline_model_parallel_layout",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
"""Pipeline options that fix the number of layers."""

MANY_PARAMETERS = 20_000_000
"""Number of parameters above which --shrink is suggested."""

LONGEST_SHRUNK = 2048
"""Tokens of a sample that --shrink leaves at most, for the patterns of attention."""


@dataclass(frozen=True)
class LayoutComparison:
    """Runs to compare."""

    layout: RunConfig  # on ``world_size`` ranks
    reference: RunConfig  # on one
    world_size: int
    steps: int
    notes: tuple[str, ...]  # changes to the flags


def main(argv: Sequence[str], launch: Launcher | None = None) -> int:
    """Compare and report; ``launch`` replaces `run_processes` in tests.

    Returns:
        0 if everything agrees, 1 if something differs or fails, 2 for invalid flags.
    """
    own, flags = build_parser().parse_known_args(list(argv))
    try:
        if own.steps < 1:
            raise UserError([Problem("E002", f"--steps {own.steps}: must be at least 1", ("--steps 1",))])
        check = prepare_runs(flags, own.world_size, own.steps, own.dtype, own.shrink)
    except (UserError, DataError) as error:
        echo(error, file=sys.stderr)
        return 2
    for note in check.notes:
        echo(f"note: {note}")
    try:
        return compare_runs(check, launch or run_processes)
    except Exception as error:  # of a rank, whose output has the details
        echo(f"verify_parallel: {type(error).__name__}: {error}", file=sys.stderr)
        return 1


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of this tool's own flags."""
    parser = argparse.ArgumentParser(
        description="Check that a parallel layout computes what one process computes.",
        epilog="All other flags are those of pretrain_gpt.py.",
        allow_abbrev=False,
    )
    parser.add_argument("--world-size", type=int, required=True, metavar="N", help="ranks to run, each a process")
    parser.add_argument("--steps", type=int, default=2, metavar="N", help="steps to compare; fp32 compares one (2)")
    parser.add_argument("--dtype", choices=tuple(TOLERANCE), default="fp64", help="number format to compare in (fp64)")
    parser.add_argument(
        "--shrink",
        action="store_true",
        help="use at most 2 layers, samples of 64 tokens and 2 micro-batches per rank; in a pipeline one layer per "
        "stage and twice as many micro-batches as ranks",
    )
    return parser


def prepare_runs(flags: Sequence[str], world_size: int, steps: int, dtype: str, shrink: bool) -> LayoutComparison:
    """Return the two runs to compare."""
    config, assumed = read_config(flags, world_size)
    notes = [f"not given, so assumed: {' '.join(flag)}" for flag in assumed]
    smaller = shrink_assignments(config, world_size)
    if shrink:
        notes.append("shrunk: " + (", ".join(smaller) or "nothing, it is small already"))
        config, _ = read_config([*flags, *(word for flag in assumed for word in flag), "--set", *smaller], world_size)
    model = replace(config.model, vocab_size=resolve_vocab_size(config.data, config.model.vocab_size))
    if not shrink and smaller and num_parameters(model) > MANY_PARAMETERS:
        notes.append(f"{num_parameters(model):,} parameters take long on CPUs; --shrink runs {', '.join(smaller)}")
    training = replace(config.training, device="cpu", rampup_batch_size=None, step_batch_size_schedule=())
    layout = replace(
        config,
        model=model,
        parallel=replace(config.parallel, distributed_backend="gloo"),
        precision=replace(config.precision, params_dtype=dtype),
        training=training,
        optimizer=replace(config.optimizer, clip_grad=0.0),
    )
    notes.append(f"computed in {dtype} on CPUs at the peak learning rate, without clipping or batch ramp")
    reference = replace(
        layout, parallel=ParallelConfig(), training=replace(training, recompute_granularity=None, recompute_method=None)
    )
    return LayoutComparison(layout, reference, world_size, steps if dtype == "fp64" else 1, tuple(notes))


def read_config(flags: Sequence[str], world_size: int) -> tuple[RunConfig, list[tuple[str, ...]]]:
    """Return the checked configuration, and the flags added for missing ones."""
    assumed: dict[str, tuple[str, ...]] = {}
    while True:
        extra = [word for flag in assumed.values() for word in flag]
        try:
            asked = [*flags, *extra, "--check-config", "--world-size", str(world_size)]
            return parse(asked, environ={}, read_model=read_model_values).config, list(assumed.values())
        except UserError as error:
            found = {p.code for p in error.problems}
            lacking = {code: flag for code, flag in ASSUMED_FLAGS.items() if code in found and code not in assumed}
            if not lacking or not found <= set(ASSUMED_FLAGS):
                left = [p for p in error.problems if p.code not in ASSUMED_FLAGS or p.code in assumed]
                launch = re.compile(r"torchrun --nproc-per-node (\d+)|start (\d+) ranks")  # this tool starts them
                own = [tuple(launch.sub(r"--world-size \1\2", fix) for fix in p.fixes) for p in left]
                raise UserError([replace(p, fixes=fixes) for p, fixes in zip(left, own)]) from None
            assumed |= lacking


def shrink_assignments(config: RunConfig, world_size: int) -> list[str]:
    """Return assignments that shorten the run. Widths, and thus the sharding, are unchanged."""
    training, parallel = config.training, config.parallel
    parts, dp = parallel.sequence_multiple, parallel.data_parallel_size(world_size)
    patterns = [config.model.pattern(layer) for layer in range(config.model.num_layers)]
    sizes = (size for p in patterns for size in (p.window, p.chunk, p.prefix, p.first) if size)
    length = max(64, min(2 * max(sizes, default=0), LONGEST_SHRUNK))  # so that patterns hide something
    small = {"seq_length": (training.seq_length, -(-length // parts) * parts)}
    if not str(parallel.pipeline_schedule).endswith(SCHEDULE_SUFFIX):  # which is for one number of micro-batches
        batch = 2 * parallel.pipeline_model_parallel_size * training.micro_batch_size * dp
        small["global_batch_size"] = (training.global_batch_size or 0, batch)
    assignments = []
    if all(getattr(parallel, option) in (None, False, AUTO) for option in LAYER_COUNT_OPTIONS):
        fewest = max(2, len(stage_layers(config.model, parallel, config.training.seq_length)))
        if config.model.layer_pattern is None:
            small = {"num_layers": (config.model.num_layers, fewest)} | small
        else:
            assignments.append(f"hybrid_layer_pattern={_shortened(config.model, fewest)}")
    assignments += [f"{name}={limit}" for name, (value, limit) in small.items() if value > limit]
    if (training.recompute_num_layers or 0) > 2:
        assignments.append("recompute_num_layers=2")
    schedules = ("rampup_batch_size", "step_batch_size_schedule")
    return assignments + [f"{name}=null" for name in schedules if getattr(training, name)]


def _shortened(model: ModelConfig, fewest: int) -> str:
    """Return the pattern of the first blocks of a model, among which are all kinds, with those of its heads."""
    kinds = [model.mixers(layer) for layer in range(model.num_layers)]
    count = max(fewest, 1 + max(map(kinds.index, kinds)))
    symbols = str(model.hybrid_layer_pattern)[: model.residual_layer(count) if count < len(kinds) else None]
    heads = [model.mtp_hybrid_override_pattern or symbols[-1]] * model.prediction_depths
    return "/".join((symbols, *heads))


def compare_runs(check: LayoutComparison, launch: Launcher) -> int:
    """Run both, print a table and a verdict, and return the exit status."""
    from megatron.training.build import build_trainer  # torch: only for flags known to be good
    from tools.lib.verify_parallel import compare_traces, join_traces, trace_steps

    echo(f"1 process against {check.world_size}: {describe_layout(check.layout.parallel, check.world_size)}")
    steps_each = f"{check.steps} step{'' if check.steps == 1 else 's'}"
    echo(f"reference: {steps_each} on 1 process ...", flush=True)
    reference = [join_traces([step]) for step in trace_steps(build_trainer(check.reference, 0, 1), check.steps)]
    echo(f"layout: {steps_each} on {check.world_size} processes ...", flush=True)
    ranks = launch(check.layout, check.world_size, check.steps)
    steps = [join_traces(step) for step in zip(*ranks)]
    dtype, lr = check.layout.precision.params_dtype, check.layout.optimizer.lr
    echo(f"{'step':>4}  {'loss':>20}  {'error':>8}  {'grad norm':>12}  {'error':>8}  largest error of a gradient")
    for i, (got, ref) in enumerate(zip(steps, reference, strict=True), 1):
        found = [d for d in compare_traces(i, got, ref, GRADIENT_FLOOR[dtype], lr) if d.kind != "weight"]
        loss, norm, *gradients = found
        worst = max(gradients, key=lambda d: d.error)
        echo(
            f"{loss.step:>4}  {got.loss:>20.16g}  {loss.error:>8.1e}  {got.grad_norm:>12.6g}  {norm.error:>8.1e}  "
            f"{worst.error:.1e} {worst.name}"
        )
        bad = [d for d in found if d.error > TOLERANCE[dtype]]
        if bad or got.drifted:
            echo(describe_difference(bad, got.drifted, TOLERANCE[dtype]))
            return 1
    echo(f"equal: {len(reference[0].grads)} gradients agree to {TOLERANCE[dtype]:g}, copies to the bit")
    return 0


def describe_layout(parallel: ParallelConfig, world_size: int) -> str:
    """Describe a layout, as ``PP 2 x VPP 2 (interleaved) x DP 1 x CP 2 (p2p) x TP 2 + sequence parallel``."""
    pp, vpp = parallel.pipeline_model_parallel_size, parallel.num_virtual_stages_per_pipeline_rank or 1
    chunks = f" x VPP {vpp}" if vpp > 1 else ""
    pipeline = f"PP {pp}{chunks} ({schedule_name(parallel, vpp)}) x " if pp * vpp > 1 else ""
    sharing = " + sequence parallel" if parallel.sequence_parallel else ""
    dp = parallel.data_parallel_size(world_size)
    cp = parallel.context_parallel_size
    context = f"CP {cp} ({parallel.cp_comm_type}) x " if cp > 1 else ""
    return f"{pipeline}DP {dp} x {context}TP {parallel.tensor_model_parallel_size}{sharing}"


def describe_difference(bad: Sequence[StepDeviation], drifted: Sequence[str], tolerance: float) -> str:
    """Describe the first difference, in the order in which the forward pass uses the parameters."""
    lines = []
    if bad:
        first = next((d for d in bad if d.kind == "gradient"), bad[0])
        what = f"the gradient of {first.name}" if first.kind == "gradient" else first.kind.replace("_", " ")
        lines.append(f"differs in step {first.step}: first {what}, error {first.error:.1e} (allowed: {tolerance:g})")
        lines.append(f"{len(bad)} quantities differ in all")
    if drifted:
        lines.append(f"not the same on all ranks that share it: {drifted[0]}" + (", ..." if len(drifted) > 1 else ""))
    return "\n".join(lines)


def run_processes(config: RunConfig, world_size: int, steps: int) -> list[list[RankTrace]]:
    """Run each rank in its own process and return the traces in rank order."""
    return run_ranks(run_rank, config, world_size, steps, preload=["tools.lib.verify_parallel", "torch._dynamo"])


def run_rank(config: RunConfig, rank: int, world_size: int, steps: int) -> list[RankTrace]:
    """Run one rank, which has joined the others."""
    import torch

    from megatron.training.build import build_trainer
    from tools.lib.verify_parallel import trace_steps

    torch.set_num_threads(1)
    return trace_steps(build_trainer(config, rank, world_size), steps)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
