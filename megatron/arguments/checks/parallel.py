"""Checks of the parallel layout: mesh axes, pipeline schedule and stages, and ZeRO sharding.

Tensor, sequence and context parallelism are checked against the model and the number of ranks; pipeline parallelism
against its layers and every batch of the run; ZeRO against the data-parallel ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from megatron.arguments.checks.training import batch_multiple
from megatron.config.batch import get_num_microbatches, rampup_stages
from megatron.config.errors import Problem
from megatron.config.launch import Launch
from megatron.config.parallel import ParallelConfig
from megatron.config.run import RunConfig
from megatron.config.settings import SETTINGS, flag
from megatron.config.text import divisors, flag_fixes, format_bytes, nearest, nearest_multiples
from megatron.distributed.layout import Layout
from megatron.pipeline import plan
from megatron.pipeline.actions import ScheduleError
from megatron.pipeline.partition import AUTO, parse_layout
from megatron.planner.communication import data_parallel_traffic
from megatron.planner.memory import bucket_shapes


def check_context_parallel(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Reject context parallelism: the mesh has the axis, but the model does not support it yet."""
    if config.parallel.context_parallel_size > 1:
        sentence = f"context parallelism of {config.parallel.context_parallel_size} is not supported"
        yield Problem("E201", sentence, ("--context-parallel-size 1",))


def check_world_size(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that the ranks of one model divide the world size."""
    parallel = config.parallel
    if world_size % parallel.model_ranks == 0:
        return
    name = "TP" if parallel.model_ranks == parallel.tensor_model_parallel_size else "TP x PP"
    name += " x CP" if parallel.context_parallel_size > 1 else ""
    ranks = "1 rank is" if world_size == 1 else f"{world_size} ranks are"
    smaller = [
        fix
        for axis in ("tensor_model_parallel_size", "pipeline_model_parallel_size")
        for fix in flag_fixes(flag(axis), _smaller(getattr(parallel, axis), parallel.model_ranks, world_size))
    ]
    enough = max(nearest_multiples(world_size, parallel.model_ranks))
    start = f"torchrun --nproc-per-node {enough}" if enough <= 8 else f"start {enough} ranks"
    yield Problem("E202", f"{ranks} not a multiple of {name} = {parallel.model_ranks}", (*smaller, start))


def suggest_nodes(problem: Problem, config: RunConfig, world_size: int, launch: Launch) -> Problem:
    """Rephrase E202 as a number of nodes for a job started by torchrun; return other problems unchanged.

    After the loss of a node, the remaining ranks may not hold whole models, and the fix is a number of nodes.
    """
    nodes_known = launch.launcher == "torchrun" and launch.world_size == world_size and launch.local_size > 1
    if problem.code != "E202" or not nodes_known or world_size % launch.local_size:
        return problem
    nodes = world_size // launch.local_size
    model_ranks = config.parallel.model_ranks
    each = model_ranks // math.gcd(model_ranks, launch.local_size)
    if each == 1:
        return problem
    counted = "1 node" if nodes == 1 else f"{nodes} nodes"
    enough = tuple(f"torchrun --nnodes {n}" for n in nearest_multiples(nodes, each))
    return replace(
        problem,
        sentence=f"{problem.sentence}: {counted} of {launch.local_size}, and whole models need a multiple of {each}",
        fixes=(*enough, *(fix for fix in problem.fixes if fix.startswith("--"))),
    )


def _smaller(size: int, model_ranks: int, world_size: int) -> list[int]:
    """Return the largest smaller divisor of ``size`` with which whole models fill all ranks, if any."""
    others = model_ranks // size
    return [n for n in divisors(size) if n < size and world_size % (n * others) == 0][-1:]


def check_heads_divide(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that TP divides the query heads, and that key/value heads and TP divide one another."""
    model = config.model
    tp = config.parallel.tensor_model_parallel_size
    if model.num_attention_heads % tp:
        sizes = flag_fixes(
            "--tensor-model-parallel-size",
            nearest(tp, [n for n in divisors(model.num_attention_heads) if world_size % n == 0]),
        )
        counts = flag_fixes("--num-attention-heads", nearest_multiples(model.num_attention_heads, tp))
        yield Problem("E203", f"{model.num_attention_heads} heads do not divide over TP {tp}", sizes + counts)
    elif model.kv_groups % tp and tp % model.kv_groups:
        fit = [n for n in divisors(model.num_attention_heads) if n % tp == 0 or tp % n == 0]
        sentence = f"{model.kv_groups} key/value heads and TP {tp}: neither is a multiple of the other"
        yield Problem("E203", sentence, flag_fixes("--num-query-groups", nearest(model.kv_groups, fit)))


def check_mlp_divides(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that TP divides the width of the MLP, or of the shared expert that replaces it."""
    model = config.model
    tp = config.parallel.tensor_model_parallel_size
    option = "--ffn-hidden-size"
    module = "an MLP"
    width = model.ffn
    if model.num_experts is not None:
        option = "--moe-shared-expert-intermediate-size"
        module = "a shared expert"
        width = model.moe_shared_expert_intermediate_size or 0
    if width % tp:
        fixes = flag_fixes(option, nearest_multiples(width, tp))
        yield Problem("E204", f"{module} of width {width} does not divide over TP {tp}", fixes)


def check_sequence_parallel(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that TP divides the sequence length under sequence parallelism."""
    parallel = config.parallel
    length = config.training.seq_length
    if parallel.sequence_parallel and length % parallel.tensor_model_parallel_size:
        fixes = flag_fixes("--seq-length", nearest_multiples(length, parallel.tensor_model_parallel_size))
        sentence = f"samples of {length} tokens do not divide over TP {parallel.tensor_model_parallel_size}"
        yield Problem("E205", f"sequence parallelism: {sentence}", (*fixes, "--no-sequence-parallel"))


def check_backend(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that NCCL is used only on GPUs."""
    if config.parallel.distributed_backend == "nccl" and config.training.device == "cpu":
        fixes = ("--distributed-backend gloo", "--device cuda")
        yield Problem("E206", "the nccl backend cannot serve CPUs", fixes)


LAYOUT_CHECKS = (
    check_context_parallel,
    check_world_size,
    check_heads_divide,
    check_mlp_divides,
    check_sequence_parallel,
    check_backend,
)


def check_stages(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that the schedule exists, the options agree on the stages, and every stage has layers."""
    model, parallel = config.model, config.parallel
    layout = parallel.pipeline_model_parallel_layout
    problem = _schedule_problem("E208", plan.required_virtual_stages, parallel)
    if layout not in (None, plan.AUTO):
        problem = problem or _schedule_problem("E210", parse_layout, layout, model.num_layers)
    problem = problem or _schedule_problem("E209", plan.virtual_stages, model, parallel)
    if problem:
        yield problem
        return
    known = plan.resolve_pipeline(model, parallel)
    if known.pipeline_schedule != plan.DEFAULT_VIRTUAL_SCHEDULE:  # reported as an unused option
        known = replace(known, microbatch_group_size_per_virtual_pipeline_stage=None)
    unfilled = _schedule_problem("E210", plan.stage_layers, model, known)
    unable = (
        None
        if unfilled
        else _schedule_problem("E208", plan.peak_counts, known, plan.nearest_num_microbatches(known, 1))
    )
    if unable and str(known.pipeline_schedule).endswith(plan.SCHEDULE_SUFFIX):
        unable = replace(unable, sentence=f"{known.pipeline_schedule}: {unable.sentence}")
    yield from filter(None, (unfilled, unable))


def check_batches(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that the schedule can run every batch of the run, including those of a ramp."""
    parallel = _resolve_pipeline(config)
    if parallel is None or world_size % parallel.model_ranks:
        return
    training = config.training
    unit = batch_multiple(config, world_size)
    ranks = parallel.data_parallel_size(world_size)
    ramp = rampup_stages(training, ranks)
    for sample, size in ramp:
        count = get_num_microbatches(training, ranks, size)
        if not count or (size % unit and not training.pad_global_batch):  # reported by the batch checks
            continue
        full = sample == ramp[-1][0]
        problem = _schedule_problem("E211", plan.peak_counts, parallel, count)
        if problem is None and full and training.eval_iters:
            problem = _schedule_problem("E211", plan.build_program, parallel, count, True)
        if problem:
            batch = f"global batch {size}" + (f" from sample {sample:,} on" if len(ramp) > 1 else "")
            near = flag_fixes(
                "--global-batch-size", [plan.nearest_num_microbatches(parallel, count) * unit] if full else []
            )
            fixes = (*near, "drop --rampup-batch-size") if len(ramp) > 1 else near
            yield replace(problem, sentence=f"{batch}: {problem.sentence}", fixes=fixes)
            return


def _resolve_pipeline(config: RunConfig) -> ParallelConfig | None:
    """Return the resolved options, or None if :func:`check_stages` reports a problem."""
    try:
        parallel = plan.resolve_pipeline(config.model, config.parallel)
        plan.stage_layers(config.model, parallel)
        plan.peak_counts(parallel, plan.nearest_num_microbatches(parallel, 1))
    except ScheduleError:
        return None
    return parallel


def _schedule_problem(code: str, function: Callable[..., object], *arguments: object) -> Problem | None:
    try:
        function(*arguments)
    except ScheduleError as error:
        return Problem(code, error.sentence, error.fixes)
    return None


def pipeline_notes(config: RunConfig, world_size: int) -> Iterator[str]:
    """Yield notes about uneven or costly stages and about schedules without a benefit."""
    model = config.model
    parallel = plan.resolve_pipeline(config.model, config.parallel)
    chunks = parallel.num_virtual_stages_per_pipeline_rank or 1
    name = parallel.pipeline_schedule
    ranks = parallel.pipeline_model_parallel_size
    if plan.is_split_by_cost(model, parallel) and parallel.pipeline_model_parallel_layout is None:
        sentence = f"{model.num_layers} layers do not divide over {ranks * chunks} stages"
        yield f"{sentence}: they are distributed by cost, as with {AUTO}"
    if ranks > 1 and name == plan.DEFAULT_VIRTUAL_SCHEDULE and chunks == 1:
        yield "--pipeline-schedule interleaved with VPP 1 has the same bubble as 1f1b and keeps more activations"
    if ranks == 1 and (chunks > 1 or name != plan.DEFAULT_SCHEDULE):
        yield f"{_set_flags(config.parallel)} has no effect with --pipeline-model-parallel-size 1"
    if ranks > 1 and model.vocab_size is not None:
        yield from _unbalanced_note(config, parallel, world_size)


STAGE_OPTIONS = (
    "pipeline_schedule",
    "num_virtual_stages_per_pipeline_rank",
    "num_layers_per_virtual_pipeline_stage",
    "pipeline_model_parallel_layout",
)
"""Options that set several stages per rank or a schedule."""


def _set_flags(parallel: ParallelConfig) -> str:
    """Return the given pipeline options as flags."""
    given = [(SETTINGS[name], getattr(parallel, name)) for name in STAGE_OPTIONS]
    return " with ".join(setting.spell(value) for setting, value in given if value is not None)


MIN_BUBBLE_GAIN = 0.03
"""Smallest gain of the layout by cost, as a fraction of the ranks' time, that is worth a note."""


def _unbalanced_note(config: RunConfig, parallel: ParallelConfig, world_size: int) -> Iterator[str]:
    """Yield a note if the layout by cost has a much smaller bubble than equal numbers of layers."""
    model = config.model
    if plan.is_split_by_cost(model, parallel) or any(
        getattr(parallel, name) for group in plan.LAYER_SPLIT_OPTIONS for name in group
    ):
        return
    by_cost = plan.stage_layers(model, replace(parallel, pipeline_model_parallel_layout=plan.AUTO))
    equal = plan.stage_costs(model, plan.stage_layers(model, parallel))
    count = get_num_microbatches(config.training, parallel.data_parallel_size(world_size))
    before, after = (
        plan.simulated_bubble(parallel, count, costs) for costs in (equal, plan.stage_costs(model, by_cost))
    )
    if before - after > MIN_BUBBLE_GAIN:
        yield f"{AUTO} reduces the bubble from {before:.1%} to {after:.1%}"


PIPELINE_CHECKS = (check_stages, check_batches)


SHARDED = "--use-distributed-optimizer"
MAX_PADDING = 0.25
"""Padding of a bucket, relative to its parameters, above which a note is printed."""


def check_strategy(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that the sharding options agree, and that options of sharded state are used only with it."""
    parallel = config.parallel
    if parallel.use_distributed_optimizer and parallel.data_parallel_sharding_strategy == "no_shard":
        fixes = ("drop --use-distributed-optimizer", "--data-parallel-sharding-strategy optim")
        yield Problem("E215", "use_distributed_optimizer and no_shard contradict each other", fixes)
    if parallel.zero_stage:
        return
    if parallel.overlap_param_gather:
        sentence = "overlap_param_gather needs a sharded optimizer: without one, no weights are gathered"
        yield Problem("E215", sentence, (SHARDED, "--no-overlap-param-gather"))
    if parallel.num_distributed_optimizer_instances > 1:
        sentence = f"{parallel.num_distributed_optimizer_instances} optimizer instances need a sharded optimizer"
        yield Problem("E215", sentence, (SHARDED, "--num-distributed-optimizer-instances 1"))


def check_instances(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that the optimizer instances divide the data-parallel ranks, and the ranks with the same experts."""
    parallel = config.parallel
    count = parallel.num_distributed_optimizer_instances
    if not parallel.zero_stage or world_size % parallel.model_ranks:
        return
    replicas = world_size // (parallel.model_ranks // parallel.context_parallel_size)
    sizes = {"DP": replicas}
    experts = parallel.expert_model_parallel_size * parallel.expert_tp * parallel.pipeline_model_parallel_size
    if config.model.num_experts is not None and world_size % experts == 0:
        sizes["expert DP"] = world_size // experts
    for name, size in sizes.items():
        if size % count:
            sentence = f"{count} optimizer instances do not divide {name} = {size}"
            fit = [n for n in divisors(size) if all(other % n == 0 for other in sizes.values())]
            fit = [n for n in fit if n < replicas] or fit  # one rank per instance would shard nothing
            yield Problem("E215", sentence, flag_fixes("--num-distributed-optimizer-instances", nearest(count, fit)))


def check_captured_update(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Reject capturing an update that gathers weights, which is untested."""
    what = config.compute.cuda_graph
    if what != "none" and config.parallel.zero_stage:
        sentence = f"--cuda-graph {what} is untested with a sharded optimizer"
        yield Problem("E913", sentence, ("--cuda-graph none", "--data-parallel-sharding-strategy no_shard"))


def sharding_notes(config: RunConfig, world_size: int) -> Iterator[str]:
    """Yield notes about bf16 gradient reduction and ZeRO sharding."""
    if config.parallel.grad_reduce_in_bf16:
        yield "--grad-reduce-in-bf16: gradients are rounded before the reduction, so the numbers depend on the layout"
    replicas = config.parallel.data_parallel_size(world_size)
    if config.parallel.zero_stage and replicas == config.parallel.num_distributed_optimizer_instances:
        yield f"{SHARDED} shards nothing here: each of {replicas} instances has one rank (DP {replicas})"
    if config.parallel.zero_stage == 2 and config.model.vocab_size is not None:
        yield from _zero2_traffic_note(config, world_size)
    if config.optimizer.optimizer != "muon" or not config.parallel.zero_stage:
        return
    if config.parallel.zero_stage == 2:
        yield (
            "--optimizer muon: buckets of whole matrices are large, and optim_grads keeps several of them at once; "
            "compare --data-parallel-sharding-strategy optim"
        )
    if config.model.vocab_size is not None and (waste := _padding(config, world_size)) > MAX_PADDING:
        yield (
            f"--optimizer muon: matrices are not sharded, so weight and gradient buffers are {1 + waste:.1f} times "
            "as large as their contents; more --num-distributed-optimizer-instances reduce the padding"
        )


def _zero2_traffic_note(config: RunConfig, world_size: int) -> Iterator[str]:
    """Yield a note if reducing every micro-batch separately sends more bytes."""
    count = get_num_microbatches(config.training, config.parallel.data_parallel_size(world_size))
    once = replace(config, parallel=replace(config.parallel, data_parallel_sharding_strategy="optim"))
    ours, theirs = (sum(data_parallel_traffic(c, world_size).values()) for c in (config, once))
    if ours > theirs:
        yield (
            f"optim_grads: each of {count} micro-batches is reduced separately, so a rank sends "
            f"{format_bytes(ours)} in a step; with optim {format_bytes(theirs)}"
        )


def _padding(config: RunConfig, world_size: int) -> float:
    """Return the padding of buckets of whole matrices, relative to their parameters; the largest of all stages."""
    layout = Layout.from_config(config.parallel, world_size)
    found = [0.0]
    for pp in range(layout.sizes["pp"]):
        uncut = [bucket for bucket in bucket_shapes(config, layout, pp) if bucket.key.uncut]
        held = sum(parameter.numel for bucket in uncut for parameter in bucket.parameters)
        if held:
            found.append(sum(bucket.packing.size for bucket in uncut) / held - 1)
    return max(found)


SHARDING_CHECKS = (check_strategy, check_instances, check_captured_update)
