"""Whether what data-parallel ranks cut among themselves can be cut so."""

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

CUT = "--use-distributed-optimizer"
PADDING = 0.25
"""Of a bucket, relative to its parameters: a run that has more is told."""


def strategy(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """One strategy is said, and what belongs to a strategy goes with one."""
    p = config.parallel
    if p.use_distributed_optimizer and p.data_parallel_sharding_strategy == "no_shard":
        fixes = ("drop --use-distributed-optimizer", "--data-parallel-sharding-strategy optim")
        yield Problem("E215", "use_distributed_optimizer and no_shard contradict each other", fixes)
    if p.zero_stage:
        return
    if p.overlap_param_gather:
        sentence = "overlap_param_gather: every rank updates all weights, so none are gathered"
        yield Problem("E215", sentence, (CUT, "--no-overlap-param-gather"))
    if p.num_distributed_optimizer_instances > 1:
        sentence = f"{p.num_distributed_optimizer_instances} instances of the optimizer, and none is cut"
        yield Problem("E215", sentence, (CUT, "--num-distributed-optimizer-instances 1"))


def instances(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Data-parallel ranks fall into equal groups; so do those that have the same experts."""
    p = config.parallel
    count = p.num_distributed_optimizer_instances
    if not p.zero_stage or world_size % p.model_ranks:
        return
    replicas = world_size // (p.model_ranks // p.context_parallel_size)
    sizes = {"DP": replicas}
    experts = p.expert_model_parallel_size * p.expert_tp * p.pipeline_model_parallel_size
    if config.model.num_experts is not None and world_size % experts == 0:
        sizes["the copies of each expert"] = world_size // experts
    for what, size in sizes.items():
        if size % count:
            sentence = f"{count} instances of the optimizer do not divide {what}, of which there are {size} ranks"
            fit = [n for n in divisors(size) if all(other % n == 0 for other in sizes.values())]
            fit = [n for n in fit if n < replicas] or fit  # as many as there are copies would cut nothing
            yield Problem("E215", sentence, offers("--num-distributed-optimizer-instances", beside(count, fit)))


def recorded(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """A recorded update that gathers weights was never tried."""
    what = config.compute.cuda_graph
    if what != "none" and config.parallel.zero_stage:
        sentence = f"--cuda-graph {what} has not been tried where data-parallel ranks cut the optimizer's state"
        yield Problem("E913", sentence, ("--cuda-graph none", "--data-parallel-sharding-strategy no_shard"))


def remarks(config: RunConfig, world_size: int) -> Iterator[str]:
    """A line on what is rounded, on what is not cut, on what ZeRO-2 sends, and on matrices that nobody cuts."""
    if config.parallel.grad_reduce_in_bf16:
        yield "--grad-reduce-in-bf16: gradients are rounded on the wire, so the numbers depend on the layout"
    replicas = config.parallel.data_parallel_size(world_size)
    if config.parallel.zero_stage and replicas == config.parallel.num_distributed_optimizer_instances:
        yield f"{CUT} cuts nothing here: one rank holds each of {replicas} instances (DP {replicas})"
    if config.parallel.zero_stage == 2 and config.model.vocab_size is not None:
        yield from _resent(config, world_size)
    if config.optimizer.optimizer != "muon" or not config.parallel.zero_stage:
        return
    if config.parallel.zero_stage == 2:
        yield (
            "--optimizer muon: buckets of matrices that nobody cuts are large, and optim_grads has several of them at "
            "once; compare --data-parallel-sharding-strategy optim"
        )
    if config.model.vocab_size is not None and (waste := _padding(config, world_size)) > PADDING:
        yield (
            f"--optimizer muon: no matrix is cut, so buffers of weights and gradients are {1 + waste:.1f} times as "
            "large as what they hold; with more --num-distributed-optimizer-instances fewer ranks share them"
        )


def _resent(config: RunConfig, world_size: int) -> Iterator[str]:
    """What summing every micro-batch by itself costs on the wire."""
    count = microbatches(config.training, config.parallel.data_parallel_size(world_size))
    once = replace(config, parallel=replace(config.parallel, data_parallel_sharding_strategy="optim"))
    ours, theirs = (sum(replica_traffic(c, world_size).values()) for c in (config, once))
    if ours > theirs:
        yield (
            f"optim_grads: each of {count} micro-batches is summed over the ranks by itself, so that a rank sends "
            f"{shown(ours)} to others in a step; with optim {shown(theirs)}"
        )


def _padding(config: RunConfig, world_size: int) -> float:
    """What buckets of uncut matrices have besides these, relative to them, on the pipeline rank that has most."""
    layout = Layout.from_config(config.parallel, world_size)
    found = [0.0]
    for pp in range(layout.sizes["pp"]):
        uncut = [bucket for bucket in buckets(config, layout, pp) if bucket.key.uncut]
        held = sum(parameter.numel for bucket in uncut for parameter in bucket.parameters)
        if held:
            found.append(sum(bucket.packing.size for bucket in uncut) / held - 1)
    return max(found)


CHECKS = (strategy, instances, recorded)
