"""Context parallelism in numbers: bytes on the wire, balance of attention, and keys and values in flight.

Per layer, micro-batch and rank, forward and backward, with R ranks of a ring and A ranks that exchange heads (see
:mod:`megatron.distributed.context_parallel`), and k, q: the bytes of this rank's keys and values, and of its queries:

==============  ==================================================================================================
p2p             3 k x (chunks of other ranks that a rank's queries see, on average) / 2; 3 k x 3/4 (R - 1) for plain
                causal attention. Keys and values are sent in forward and in backward, and their gradients once.
all_gather      3 k (R - 1): gathered in forward and in backward, and the gradients reduced and scattered.
a2a             2 (A - 1) / A x (2 q + c k): queries, keys, values and output in forward, and their gradients. Where A
                does not divide the key/value heads, each is sent c = lcm(heads, A) / heads times.
a2a+p2p         both, p2p with c k instead of k.
==============  ==================================================================================================

Recurrences pass on states, of a size that does not depend on the sequence: with s the bytes of the states after this
rank's chunks and of their transitions, and t those of the rows that the convolution reads before a chunk, all-gathers
and their adjoints send (R - 1) x (2 s + 3 t). Heads are exchanged as in a2a.

Recomputation repeats what forward sends, that of core attention without its output. Packed documents are ignored: with
them p2p sends less.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from megatron.config.attention_pattern import AttentionPattern
from megatron.config.run import RunConfig
from megatron.distributed.layout import chunks_of
from megatron.layers.mixers.activations import DTYPE_BYTES
from megatron.layers.mixers.core_attention import CORE
from megatron.layers.mixers.registry import block_mixers
from megatron.layers.recompute_plan import RecomputePlan
from megatron.pipeline.plan import stage_layers

SAMPLED_QUERIES = 64
"""Queries of a chunk whose keys are counted for the balance."""


@dataclass(frozen=True)
class AttentionTraffic:
    """Messages, balance and memory of context-parallel attention, per layer and micro-batch: means over the layers."""

    # Bytes sent per layer, forward and backward; mean over the ranks.
    p2p: float
    all_gather: float
    a2a: float
    # Work of the slowest rank over the mean.
    balance: float
    # Bytes of other ranks' keys and values that a rank holds at a time.
    in_flight: float

    @property
    def sent(self) -> float:
        """Bytes sent per layer, forward and backward."""
        return self.p2p + self.all_gather + self.a2a


def attention_traffic(config: RunConfig) -> AttentionTraffic:
    """Return the cost of context parallelism of a run."""
    model, parallel, training = config.model, config.parallel, config.training
    tp, cp, heads_ranks = parallel.tensor_model_parallel_size, parallel.context_parallel_size, parallel.cp_head_ranks
    ring, gathers = cp // heads_ranks, parallel.cp_comm_type == "all_gather"
    tokens = training.micro_batch_size * training.seq_length // cp
    of_element = tokens * DTYPE_BYTES[config.precision.params_dtype]
    p2p = all_gather = a2a = in_flight = 0.0
    work = [0.0] * ring
    stages = stage_layers(model, parallel, training.seq_length)
    plans = [(stage, RecomputePlan.from_config(training, stage.count)) for stage in stages]
    places = [(layer, layer - stage.layers.start < plan.blocks) for stage, plan in plans for layer in stage.layers]
    places += [(layer, RecomputePlan.from_config(training, 1).blocks > 0) for layer in model.head_layers]
    core = CORE in plans[0][1].modules
    wide = max(DTYPE_BYTES["fp32"], DTYPE_BYTES[config.precision.params_dtype])
    recurrent = [
        (again, passed)
        for layer, again in places
        for mixer in block_mixers(model, layer)
        if (passed := mixer.passed(model, tp)) is not None
    ]
    for again, passed in recurrent:
        shared, chunks = passed.shared * parallel.kv_copies(passed.groups), 2 * training.micro_batch_size
        rows = min(passed.rows, training.seq_length // (2 * ring)) * (passed.convolved + shared) // heads_ranks
        of_rows = chunks * rows * DTYPE_BYTES[config.precision.params_dtype]
        of_states = chunks * passed.state // heads_ranks * wide
        all_gather += (ring - 1) * ((3 + again) * of_rows + (2 + again) * of_states)
        sent = of_element * (passed.inputs + shared + passed.output)
        a2a += (2 + again) * sent * (heads_ranks - 1) / heads_ranks
    attending = [
        (layer, again, exchanged)
        for layer, again in places
        for mixer in block_mixers(model, layer)
        if (exchanged := mixer.exchanged(model, tp)) is not None
    ]
    for layer, again, exchanged in attending:
        queries, output = of_element * exchanged.queries, of_element * exchanged.output
        keys = of_element * exchanged.keys * parallel.kv_copies(exchanged.groups)
        in_flight = max(in_flight, keys * (ring if gathers else min(2, ring - 1)))
        pattern = model.pattern(layer)
        passes = 3 + (again or core)
        if gathers:
            all_gather += passes * keys * (ring - 1)
        else:
            p2p += passes * keys * sum(chunks_seen(pattern, training.seq_length, ring)) / ring / 2
        repeated = queries + keys + output if again else queries + keys if core else 0
        a2a += (2 * (queries + keys + output) + repeated) * (heads_ranks - 1) / heads_ranks
        work = [total + more for total, more in zip(work, ring_work(pattern, training.seq_length, ring))]
    layers = len(attending) + len(recurrent) or 1
    return AttentionTraffic(
        p2p=p2p / layers,
        all_gather=all_gather / layers,
        a2a=a2a / layers,
        balance=max(work) * ring / sum(work) if attending else 1.0,
        in_flight=in_flight,
    )


@lru_cache(maxsize=256)
def chunks_seen(pattern: AttentionPattern, length: int, ring: int) -> tuple[int, ...]:
    """Return how many chunks of other ranks the queries of each rank of a ring may see."""
    ranks = [chunks_of(length, ring, rank) for rank in range(ring)]
    return tuple(
        sum(any(_sees(pattern, q, k) for q in mine) for theirs in ranks if theirs != mine for k in theirs)
        for mine in ranks
    )


@lru_cache(maxsize=256)
def ring_work(pattern: AttentionPattern, length: int, ring: int) -> tuple[float, ...]:
    """Return the number of keys that the queries of each rank of a ring see, from a sample of them."""
    if ring == 1:
        return (1.0,)
    return tuple(
        sum(_visible_keys(pattern, q) for chunk in mine for q in chunk[:: -(-len(chunk) // SAMPLED_QUERIES)])
        for mine in (chunks_of(length, ring, rank) for rank in range(ring))
    )


def _sees(pattern: AttentionPattern, queries: range, keys: range) -> bool:
    """Return True if one of the queries may see one of the keys; a plugin's rule is ignored."""
    least, most = max(0, queries[0] - keys[-1]), queries[-1] - keys[0]
    if keys[0] < pattern.prefix or (keys[0] < pattern.first and most >= 0):
        return True
    if pattern.window is not None:
        most = min(most, pattern.window - 1)
    if pattern.chunk is not None and not (
        queries[0] // pattern.chunk <= keys[-1] // pattern.chunk
        and keys[0] // pattern.chunk <= queries[-1] // pattern.chunk
    ):
        return False
    return -(-least // pattern.dilation) * pattern.dilation <= most


def _visible_keys(pattern: AttentionPattern, query: int) -> int:
    """Return the number of keys that a query sees, without a plugin's rule."""
    near = max(0, query + 1 - (pattern.window or query + 1))
    if pattern.chunk is not None:
        near = max(near, query // pattern.chunk * pattern.chunk)
    if query < pattern.prefix:
        return pattern.prefix
    shown = min(max(pattern.first, pattern.prefix), query + 1)  # keys that all later tokens see
    return shown + max(0, (query - max(near, shown)) // pattern.dilation + 1)
