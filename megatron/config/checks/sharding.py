"""Checks of ZeRO: the sharding of optimizer state, gradients and weights over data-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megatron.config.batch import microbatches
from megatron.config.memory import buckets, shown
from megatron.config.numbers import beside, divisors, offers
from megatron.config.problems import Problem
from megatron.config.run import RunConfig
from megatron.config.traffic import replica_traffic
from megatron.parallel.layout import Layout

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
            yield Problem("E215", sentence, offers("--num-distributed-optimizer-instances", beside(count, fit)))


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
    count = microbatches(config.training, config.parallel.data_parallel_size(world_size))
    once = replace(config, parallel=replace(config.parallel, data_parallel_sharding_strategy="optim"))
    ours, theirs = (sum(replica_traffic(c, world_size).values()) for c in (config, once))
    if ours > theirs:
        yield (
            f"optim_grads: each of {count} micro-batches is reduced separately, so a rank sends "
            f"{shown(ours)} in a step; with optim {shown(theirs)}"
        )


def _padding(config: RunConfig, world_size: int) -> float:
    """Return the padding of buckets of whole matrices, relative to their parameters; the largest of all stages."""
    layout = Layout.from_config(config.parallel, world_size)
    found = [0.0]
    for pp in range(layout.sizes["pp"]):
        uncut = [bucket for bucket in buckets(config, layout, pp) if bucket.key.uncut]
        held = sum(parameter.numel for bucket in uncut for parameter in bucket.parameters)
        if held:
            found.append(sum(bucket.packing.size for bucket in uncut) / held - 1)
    return max(found)


SHARDING_CHECKS = (check_strategy, check_instances, check_captured_update)
