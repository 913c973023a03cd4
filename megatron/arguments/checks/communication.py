"""Notes on what a layout sends, and where another one sends much less."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megatron.config.batch import get_num_microbatches
from megatron.config.parallel import ParallelConfig
from megatron.config.run import RunConfig
from megatron.config.text import divisors, flag_fixes, format_bytes
from megatron.distributed.layout import Layout
from megatron.planner.communication import AttentionTraffic, attention_traffic
from megatron.planner.memory import data_parallel_traffic
from megatron.planner.rank_state import bucket_shapes

NODE_GPUS = 8
"""GPUs of a node that notes assume."""

MAX_PADDING = 0.25
"""Padding of a bucket, relative to its parameters, above which a note is printed."""

FEW_TOKENS = 1024
"""Tokens of a sample on a rank below which context parallelism is noted: its work is too short to hide messages."""

MUCH_LESS = 0.5
"""Share of the bytes below which another method is clearly better: a2a is not hidden behind attention, p2p is."""

MAX_IMBALANCE = 1.25
"""Work of the slowest rank over the mean, above which a balanced method is clearly better."""


def sharding_notes(config: RunConfig, world_size: int) -> Iterator[str]:
    """Yield notes about bf16 gradient reduction and ZeRO sharding."""
    if config.parallel.grad_reduce_in_bf16:
        yield "--grad-reduce-in-bf16: gradients are rounded before the reduction, so the numbers depend on the layout"
    replicas = config.parallel.weight_replicas(world_size)
    on_a_node = NODE_GPUS // config.parallel.tensor_model_parallel_size
    if config.parallel.grad_reduce_in_bf16 and config.training.device != "cpu" and 1 < on_a_node < replicas:
        yield (
            f"--grad-reduce-in-bf16: {on_a_node} of {replicas} data-parallel ranks share a node of {NODE_GPUS}; all of "
            "them send to all other nodes, while in a ring in fp32 only one does"
        )
    if config.parallel.zero_stage and replicas == config.parallel.num_distributed_optimizer_instances:
        each = f"each of {replicas} instances has one rank ({config.parallel.replica_axes} {replicas})"
        yield f"--use-distributed-optimizer shards nothing here: {each}"
    if config.parallel.zero_stage >= 2 and config.model.vocab_size is not None:
        yield from _traffic_note(config, world_size)
    if config.parallel.zero_stage == 3 and config.parallel.overlap_param_gather:
        yield "--overlap-param-gather has no effect with optim_grads_params, which always overlaps (ZeRO-3)"
    if config.optimizer.optimizer != "muon" or config.parallel.zero_stage not in (1, 2):
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


def _traffic_note(config: RunConfig, world_size: int) -> Iterator[str]:
    """Yield a note if communicating for every micro-batch separately sends more bytes."""
    parallel = config.parallel
    count = get_num_microbatches(config.training, parallel.data_parallel_size(world_size))
    others = {"optim": replace(parallel, data_parallel_sharding_strategy="optim")}
    if parallel.reshards_after_forward:
        others = {"--no-reshard-after-forward": replace(parallel, reshard_after_forward=False), **others}
    ours, *theirs = (
        sum(data_parallel_traffic(replace(config, parallel=p), world_size).values())
        for p in (parallel, *others.values())
    )
    if count > 1 and ours > theirs[-1]:
        what = "is reduced separately"
        if parallel.reshards_after_forward:
            what = "gathers the weights twice and is reduced separately"
        compared = " and ".join(f"with {name} {format_bytes(sent)}" for name, sent in zip(others, theirs))
        yield (
            f"{parallel.data_parallel_sharding_strategy}: each of {count} micro-batches {what}, so a rank sends "
            f"{format_bytes(ours)} in a step; {compared}"
        )


def _padding(config: RunConfig, world_size: int) -> float:
    """Return the padding of buckets of whole matrices, relative to their parameters; the largest of all stages."""
    layout = Layout.from_config(config.parallel, world_size)
    found = [0.0]
    for pp in range(layout.sizes["pp"]):
        uncut = [bucket for bucket in bucket_shapes(config, layout, pp) if bucket.key.uncut]
        held = sum(sum(bucket.sizes.values()) for bucket in uncut)
        if held:
            found.append(sum(bucket.packing.size for bucket in uncut) / held - 1)
    return max(found)


def context_parallel_notes(config: RunConfig, world_size: int) -> Iterator[str]:
    """Yield a note if more data parallelism or another method is clearly better."""
    parallel, length = config.parallel, config.training.seq_length
    size = parallel.context_parallel_size
    if size == 1:
        return
    if length // size < FEW_TOKENS:
        fewer = max(n for n in divisors(size) if n == 1 or length // n >= FEW_TOKENS)
        instead = flag_fixes("--context-parallel-size", (fewer,))[0]
        few = f"CP {size} leaves a rank {length // size:,} tokens of a sample, too few to hide messages behind"
        yield f"{few}: {instead} uses the ranks for more samples"
        return
    own, found, heads = attention_traffic(config), {}, config.model.num_attention_heads
    for other in parallel.context_parallel_methods(heads, NODE_GPUS // parallel.tensor_model_parallel_size):
        traffic = attention_traffic(replace(config, parallel=other))
        if other.cp_comm_type != parallel.cp_comm_type and _is_better(traffic, own, config):
            found[other.context_parallel_flags] = traffic
    if found:
        best = min(found, key=lambda flags: found[flags].sent)
        sent = f"{parallel.context_parallel_flags} sends {format_bytes(own.sent)} per layer and micro-batch"
        inside = ", and heads are exchanged inside a node" if _spans_nodes(parallel) and found[best].a2a else ""
        yield f"{sent}{_reason(config, own)}; with {best} it is {format_bytes(found[best].sent)}{inside}"


def _is_better(other: AttentionTraffic, own: AttentionTraffic, config: RunConfig) -> bool:
    """Return True if another method is clearly better than that of a run."""
    if other.balance > max(own.balance, MAX_IMBALANCE):
        return False
    if other.balance < MAX_IMBALANCE < own.balance:
        return other.sent <= own.sent
    if config.data.reset_attention_mask and own.p2p and not own.a2a:
        return False  # between documents p2p sends nothing
    if other.a2a and _spans_nodes(config.parallel):
        return True
    return other.sent < own.sent * (1.0 if config.parallel.kv_copies(config.model.kv_groups) > 1 else MUCH_LESS)


def _reason(config: RunConfig, own: AttentionTraffic) -> str:
    """Return what is wrong with a method besides the bytes it sends, or why it sends them."""
    parallel, groups = config.parallel, config.model.kv_groups
    if _spans_nodes(parallel):
        return f", also between nodes of {NODE_GPUS}, while attention waits"
    if (copies := parallel.kv_copies(groups)) > 1:
        return f", because every key/value head is repeated {copies} times"
    return f", and its slowest rank computes {own.balance:.2f} times the mean" if own.balance > MAX_IMBALANCE else ""


def _spans_nodes(parallel: ParallelConfig) -> bool:
    """Return True if ranks of several nodes exchange heads."""
    return parallel.cp_head_ranks * parallel.tensor_model_parallel_size > NODE_GPUS


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
