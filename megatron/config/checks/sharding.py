"""Whether what data-parallel ranks cut among themselves can be cut so."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.numbers import beside, divisors, offers
from megatron.config.problems import Problem
from megatron.config.run import RunConfig

CUT = "--use-distributed-optimizer"


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
            yield Problem("E215", sentence, offers("--num-distributed-optimizer-instances", beside(count, fit)))


def recorded(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """A recorded update that gathers weights was never tried."""
    what = config.compute.cuda_graph
    if what != "none" and config.parallel.zero_stage:
        sentence = f"--cuda-graph {what} has not been tried where data-parallel ranks cut the optimizer's state"
        yield Problem("E913", sentence, ("--cuda-graph none", "--data-parallel-sharding-strategy no_shard"))


def remarks(config: RunConfig) -> Iterator[str]:
    """A line on what is rounded."""
    if config.parallel.grad_reduce_in_bf16:
        yield "--grad-reduce-in-bf16: gradients are rounded on the wire, so the numbers depend on the layout"


CHECKS = (strategy, instances, recorded)
