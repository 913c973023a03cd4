"""Checks of tensor, context, expert and data parallelism against the model and the number of ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from megatron.config.launch import Launch
from megatron.config.numbers import beside, divisors, multiples_beside, offers
from megatron.config.problems import Problem
from megatron.config.run import RunConfig
from megatron.config.settings import flag


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
        for fix in offers(flag(axis), _smaller(getattr(parallel, axis), parallel.model_ranks, world_size))
    ]
    enough = max(multiples_beside(world_size, parallel.model_ranks))
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
    enough = tuple(f"torchrun --nnodes {n}" for n in multiples_beside(nodes, each))
    return replace(
        problem,
        sentence=f"{problem.sentence}: {counted} of {launch.local_size}, and whole models need a multiple of {each}",
        fixes=(*enough, *(fix for fix in problem.fixes if fix.startswith("--"))),
    )


def _smaller(size: int, model_ranks: int, world_size: int) -> list[int]:
    """Return the largest smaller divisor of ``size`` with which whole models fill all ranks, if any."""
    others = model_ranks // size
    return [n for n in divisors(size) if n < size and world_size % (n * others) == 0][-1:]


def heads(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that TP divides the query heads, and that key/value heads and TP divide one another."""
    model = config.model
    tp = config.parallel.tensor_model_parallel_size
    if model.num_attention_heads % tp:
        sizes = offers(
            "--tensor-model-parallel-size",
            beside(tp, [n for n in divisors(model.num_attention_heads) if world_size % n == 0]),
        )
        counts = offers("--num-attention-heads", multiples_beside(model.num_attention_heads, tp))
        yield Problem("E203", f"{model.num_attention_heads} heads do not divide over TP {tp}", sizes + counts)
    elif model.kv_groups % tp and tp % model.kv_groups:
        fit = [n for n in divisors(model.num_attention_heads) if n % tp == 0 or tp % n == 0]
        sentence = f"{model.kv_groups} key/value heads and TP {tp}: neither is a multiple of the other"
        yield Problem("E203", sentence, offers("--num-query-groups", beside(model.kv_groups, fit)))


def widths(config: RunConfig, world_size: int) -> Iterator[Problem]:
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
        fixes = offers(option, multiples_beside(width, tp))
        yield Problem("E204", f"{module} of width {width} does not divide over TP {tp}", fixes)


def check_sequence_parallel(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that TP divides the sequence length under sequence parallelism."""
    parallel = config.parallel
    length = config.training.seq_length
    if parallel.sequence_parallel and length % parallel.tensor_model_parallel_size:
        fixes = offers("--seq-length", multiples_beside(length, parallel.tensor_model_parallel_size))
        sentence = f"samples of {length} tokens do not divide over TP {parallel.tensor_model_parallel_size}"
        yield Problem("E205", f"sequence parallelism: {sentence}", (*fixes, "--no-sequence-parallel"))


def check_backend(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that NCCL is used only on GPUs."""
    if config.parallel.distributed_backend == "nccl" and config.training.device == "cpu":
        fixes = ("--distributed-backend gloo", "--device cuda")
        yield Problem("E206", "the nccl backend cannot serve CPUs", fixes)


LAYOUT_CHECKS = (check_context_parallel, check_world_size, heads, widths, check_sequence_parallel, check_backend)
