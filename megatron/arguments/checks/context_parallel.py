"""Checks of context parallelism, and notes where another method sends much less."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from megatron.arguments.checks.model import NODE_GPUS
from megatron.config.errors import Problem
from megatron.config.parallel import ParallelConfig
from megatron.config.run import RunConfig
from megatron.config.text import divisors, flag_fixes, format_bytes, multiples_as_fixes
from megatron.planner.communication import AttentionTraffic, attention_traffic


def check_context_parallel(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that the context-parallel ranks form the groups of the method, and that sequence and heads divide."""
    model, parallel, length = config.model, config.parallel, config.training.seq_length
    size, method = parallel.context_parallel_size, parallel.cp_comm_type
    sizes = parallel.hierarchical_context_parallel_sizes
    if size == 1:
        return
    if method == "a2a+p2p" and (len(sizes) != 2 or math.prod(sizes) != size or min(sizes) == 1):
        given = f", not {' '.join(map(str, sizes))}" if sizes else ""
        sentence = f"a2a+p2p needs the ranks of an a2a group and the number of groups, above 1 and with product {size}"
        fixes = sorted(_fixes(config), key=lambda fix: method not in fix)
        yield Problem("E201", sentence + given, tuple(fixes))
        return
    among = parallel.cp_head_ranks
    ring = size // among
    if length % replace(parallel, sequence_parallel=False).sequence_multiple:
        parts = f"{2 * ring} chunks, two per rank" if among == 1 else f"{size} parts"
        if 1 < among < size:
            parts = f"{2 * ring} chunks, of which two are shared by {among} ranks"
        sentence = f"CP {size} ({method}): samples of {length} tokens do not divide into {parts}"
        yield Problem("E201", sentence, multiples_as_fixes("--seq-length", length, parallel.sequence_multiple))
    tp = parallel.tensor_model_parallel_size
    heads = model.num_attention_heads // tp
    if heads % among and model.num_attention_heads % tp == 0:  # E203 reports the latter
        per_rank = " per TP rank" if tp > 1 else ""
        yield Problem("E201", f"{method}: {heads} heads{per_rank} do not divide over {among} ranks", _fixes(config))


def _fixes(config: RunConfig) -> tuple[str, ...]:
    return tuple(map(_flags, _methods(config, config.parallel.context_parallel_size)))


def _methods(config: RunConfig, most: int) -> list[ParallelConfig]:
    """Return the layout with each method that the heads allow: p2p, a2a+p2p and a2a.

    Args:
        config: of the run.
        most: largest number of ranks that exchange heads; a2a+p2p has as many as possible.

    """
    size, heads = config.parallel.context_parallel_size, config.model.num_attention_heads
    found = {}
    for among in divisors(size):
        method = "p2p" if among == 1 else "a2a" if among == size else "a2a+p2p"
        sizes = (among, size // among) if method == "a2a+p2p" else ()
        if among <= max(1, most) and heads // config.parallel.tensor_model_parallel_size % among == 0:
            found[method] = replace(config.parallel, cp_comm_type=method, hierarchical_context_parallel_sizes=sizes)
    return [*found.values()]


def _flags(parallel: ParallelConfig) -> str:
    sizes = parallel.hierarchical_context_parallel_sizes if parallel.cp_comm_type == "a2a+p2p" else ()
    groups = f" --hierarchical-context-parallel-sizes {' '.join(map(str, sizes))}" if sizes else ""
    return f"--cp-comm-type {parallel.cp_comm_type}{groups}"


FEW_TOKENS = 1024
"""Tokens of a sample on a rank below which context parallelism is noted: its work is too short to hide messages."""

MUCH_LESS = 0.5
"""Share of the bytes below which another method is clearly better: a2a is not hidden behind attention, p2p is."""

MAX_IMBALANCE = 1.25
"""Work of the slowest rank over the mean, above which a balanced method is clearly better."""


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
    own = attention_traffic(config)
    found = {}
    for other in _methods(config, NODE_GPUS // parallel.tensor_model_parallel_size):
        traffic = attention_traffic(replace(config, parallel=other))
        if other.cp_comm_type != parallel.cp_comm_type and _is_better(traffic, own, config):
            found[_flags(other)] = traffic
    if found:
        best = min(found, key=lambda flags: found[flags].sent)
        sent = f"{_flags(parallel)} sends {format_bytes(own.sent)} per layer and micro-batch{_reason(config, own)}"
        inside = ", and heads are exchanged inside a node" if _spans_nodes(parallel) and found[best].a2a else ""
        yield f"{sent}; with {best} it is {format_bytes(found[best].sent)}{inside}"


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
