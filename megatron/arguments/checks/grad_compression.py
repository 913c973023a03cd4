"""Checks of gradient compression, and a note on what it sends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megatron.config.errors import Problem
from megatron.config.run import RunConfig
from megatron.config.text import divisors, format_bytes
from megatron.planner.memory import data_parallel_traffic

UNCOMPRESSED = "--grad-compression none"


def check_grad_compression(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Reject other lossy reductions, error feedback without an all-reduce, and errors whose unit changes."""
    parallel, compression = config.parallel, config.parallel.compression
    if compression is None:
        return
    name = f"--grad-compression {parallel.grad_compression}"
    if not compression.has_errors:
        return
    replicas = parallel.weight_replicas(world_size)
    if parallel.optimizer_instances == 1 and replicas > 1:
        sentence = (
            f"{name} compresses the all-reduce between optimizer instances, but there is one instance: its {replicas} "
            "ranks reduce by a reduce-scatter"
        )
        count = divisors(replicas)[1]
        without = "--data-parallel-sharding-strategy no_shard"
        instances = f"--num-distributed-optimizer-instances {count}"
        yield Problem("E216", sentence, (instances, without, "--grad-compression int8"))
    if config.precision.params_dtype == "fp16":
        sentence = f"{name} keeps errors of gradients, and the loss scale of fp16 changes their unit"
        yield Problem("E216", sentence, ("--bf16", "--grad-compression int8"))


def grad_compression_notes(config: RunConfig, world_size: int) -> Iterator[str]:
    """Yield a note with the bytes that compressed gradients take, weights of ZeRO included."""
    parallel = config.parallel
    if parallel.compression is None:
        return
    name = f"--grad-compression {parallel.grad_compression}"
    if parallel.weight_replicas(world_size) == 1:
        yield f"{name} has no effect: there is one data-parallel rank"
    elif config.model.vocab_size is not None:
        plain = replace(config, parallel=replace(parallel, grad_compression="none"))
        traffic, uncompressed = (data_parallel_traffic(each, world_size) for each in (config, plain))
        sent, before, where = sum(traffic.values()), sum(uncompressed.values()), "other replicas"
        if parallel.zero_stage and parallel.compression.has_errors:  # all that is saved
            where, shared = "other instances", before - uncompressed["all-reduce"]
            sent, before = sent - shared, before - shared
        yield (
            f"{name}: gradients are approximated, so the numbers depend on the layout; in a step a rank sends "
            f"{format_bytes(sent)} to {where} instead of {format_bytes(before)} ({before / sent:.1f} times less)"
        )
