"""FLOPs and memory of core attention (:class:`megatron.layers.attention.CoreAttention`), without torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import lcm
from typing import NamedTuple

from megatron.config.attention_pattern import CAUSAL, AttentionPattern
from megatron.config.compute import kernel_choices
from megatron.config.model import ModelConfig
from megatron.distributed.sharding import Init, Sharding, Specs
from megatron.layers.mixers.activations import INDEX_BYTES, MASK_BYTES, ActivationShape, KeptTensor
from megatron.layers.mixers.base import Exchanged, Matmul, Mixer
from megatron.layers.recompute_plan import RecomputePlan

UNFUSED_TILE, FUSED_TILE = 1024, 256
"""Sides of the tiles of attention (:mod:`megatron.kernels.block_attention`)."""

UNFUSED_TENSORS, CAPPED_TENSORS = 6, 4
"""Tensors like the scores of a tile that are not fused, at a time: with dropout, whose hashes are three in int64, and
where scores are capped without dropout."""

CORE = "core_attn"
"""Name of core attention in ``--recompute-modules``."""


class HeadSizes(NamedTuple):
    """The heads of a layer."""

    # Query heads, and key/value heads.
    queries: int
    groups: int
    # Channels of a query and of a key, and of a value.
    channels: int
    value_channels: int

    def exchanged(self, tp: int) -> Exchanged:
        """Return what a context-parallel rank exchanges."""
        queries, groups = self.queries // tp, max(1, self.groups // tp)
        keys = groups * (self.channels + self.value_channels)
        return Exchanged(queries * self.channels, keys, queries * self.value_channels, self.groups)

    def matmuls(self, config: ModelConfig, plan: RecomputePlan, keys: float) -> dict[str, Matmul]:
        """Return queries times keys and scores times values; a token attends to ``keys`` tokens.

        Attention with dropout, which is not fused, keeps no scores and computes them again.
        """
        again = int(CORE in plan.modules)
        scores = 2.0 * self.queries * self.channels * keys
        values = 2.0 * self.queries * self.value_channels * keys
        return {
            "scores": Matmul(scores, False, again + (config.attention_dropout > 0)),
            "values": Matmul(values, False, again),
        }


@lru_cache(maxsize=64)
def _patterns(model: ModelConfig) -> frozenset[AttentionPattern]:
    """Return the attention patterns of the layers."""
    return frozenset(model.pattern(layer) for layer in range(model.num_layers))


@dataclass(frozen=True)
class CoreShape:
    """Elements of this rank's queries, keys and values, and how attention is computed."""

    # Query heads and key/value heads of this rank.
    heads: int
    groups: int
    # Elements of the queries, of keys and values, and of the output.
    queries: int
    keys: int
    output: int
    # Of keys and values as the attention of an a2a rank takes them, copied to enough heads.
    exchanged_keys: int
    # Context-parallel ranks that hold different chunks of the sequence, and those that exchange rows for heads.
    ring: int
    ranks: int
    # An attention is computed tile by tile, and tiles have masks.
    tiled: bool
    masked: bool
    # Elements that kernels of equal widths add to queries, to keys and values, and to the output.
    padding: tuple[int, int, int]

    @classmethod
    def of(cls, shape: ActivationShape, heads: HeadSizes) -> CoreShape:
        """Compute the sizes of a rank's part of a micro-batch."""
        model, parallel, documents = shape.model, shape.config.parallel, shape.config.data.reset_attention_mask
        own = heads.exchanged(shape.tp)
        narrow = max(0, heads.value_channels - heads.channels), max(0, heads.channels - heads.value_channels)
        ranks, groups, eager = parallel.cp_head_ranks, max(1, heads.groups // shape.tp), "attention" in shape.eager
        ring = parallel.context_parallel_size // ranks
        patterns = _patterns(model)
        covered = all(p.only_window and (not eager or (p == CAUSAL and not documents)) for p in patterns)
        covered &= shape.on_gpu or heads.channels == heads.value_channels
        if model.attn_logit_softcapping is not None:
            kernel = kernel_choices(shape.config.compute.kernel_words)["attention"].name
            covered &= shape.on_gpu and shape.width == 2 and kernel in ("auto", "flash_attn", "flex")
        return cls(
            heads=heads.queries // shape.tp,
            groups=groups,
            queries=shape.tokens * own.queries,
            keys=shape.tokens * own.keys,
            output=shape.tokens * own.output,
            exchanged_keys=shape.tokens * own.keys * lcm(groups, ranks) // groups,
            ring=ring,
            ranks=ranks,
            tiled=ring > 1 or model.attention_dropout > 0 or model.softmax_type != "vanilla" or not covered,
            masked=documents or patterns != {CAUSAL},
            padding=(
                shape.tokens * heads.queries // shape.tp * narrow[0],
                shape.tokens * groups * (narrow[0] + narrow[1]) * lcm(groups, ranks) // groups,
                shape.tokens * heads.queries // shape.tp * narrow[1],
            ),
        )

    def kept(self, shape: ActivationShape, gated: bool = False) -> Iterator[KeptTensor]:
        """Yield what attention keeps besides q, k and v: its output, perhaps gated, and the logarithms of its sums."""
        yield KeptTensor("logsumexp of attention", shape.tokens * self.heads, shape.wide, (CORE,))
        if self.ranks > 1:
            yield KeptTensor("output for some heads", self.output, shape.width, (CORE,))
        yield KeptTensor("output of attention", self.output, shape.width, (), not gated)
        if gated:
            yield KeptTensor("gate", self.output, shape.width)
            yield KeptTensor("gated output", self.output, shape.width, (), True)

    def temporary(self, shape: ActivationShape) -> tuple[int, int]:
        """Return the most memory beside what is kept, in the forward and in the backward of a mixer.

        With the residual stream in forward, and the gradients of it and of the output in backward.
        """
        queries, keys, output, width, wide = self.queries, self.exchanged_keys, self.output, shape.width, shape.wide
        forward, backward = shape.residual, shape.residual + output * width
        if self.ranks > 1:  # q, k and v of this rank's tokens, and the same as they are sent
            copies = keys if self.exchanged_keys > self.keys else 0
            forward += (queries + output + self.keys + keys + copies) * width
        if not self.tiled:
            return forward, backward + (queries + keys) * width
        rounded = width if width < wide else 0  # results are summed in fp32, and rounded at the end
        forward += output * wide * (rounded > 0)
        backward += queries * (wide + rounded)
        if self.ring == 1:
            backward += keys * (wide + rounded)
        elif shape.config.parallel.cp_comm_type == "all_gather":
            forward += self.ring * keys * width
            backward += self.ring * keys * (width + wide + rounded)
        else:
            # Keys that are used and that arrive, each with what is sent meanwhile. In backward also the gradients of
            # this rank's keys and of those that are used, and the exchange of those of the step before.
            passed = 2 * min(2, self.ring - 1) * keys * width
            forward += passed
            backward += passed + keys * (2 * wide + rounded) + 2 * min(1, self.ring - 2) * keys * width
        # The runs of consecutive queries; the largest tile that is not fused, or the mask of a tile; and what a tile
        # gives.
        length, runs = shape.tokens * self.ranks // shape.samples, 2 if self.ring > 1 else 1
        count = shape.samples * self.heads // self.ranks
        capped, dropout = shape.model.attn_logit_softcapping is not None, shape.model.attention_dropout > 0
        unfused = capped or dropout or (shape.on_gpu and width == wide)
        side = min(UNFUSED_TILE if unfused else FUSED_TILE, length // runs)
        score = max(UNFUSED_TENSORS * wide, 3 * INDEX_BYTES) if unfused else UNFUSED_TENSORS * wide * shape.on_gpu
        score = CAPPED_TENSORS * wide if capped and not dropout else score
        score += width * (unfused and shape.copied > 0)  # of the operands of products in 16 bits, which are copied
        tile = side**2 * max(count * score, (INDEX_BYTES + 5 * MASK_BYTES) * self.masked)
        part = (1 / runs if not unfused and (self.ring > 1 or not self.masked) else side / length) * width
        of_queries, of_keys, of_output = (0, 0, 0) if unfused else self.padding
        forward += (of_queries + of_keys) * width
        backward += (of_queries + of_keys + 2 * of_output) * width
        padded = queries + keys + of_queries + of_keys
        return int(forward + tile + part * (output + of_output)), int(backward + tile + part * padded)


class CoreAttentionMixer(Mixer):
    """Core attention between projections to the heads of a layer and one of its output."""

    module = "self_attention"
    norm = "input_layernorm"
    post_norm = "post_self_attn_layernorm"
    dropout = "attention_dropout"
    supports = ("batch invariance", "context parallelism", "documents", "generation")

    def heads(self, config: ModelConfig) -> HeadSizes:
        """Return the heads of a layer."""
        raise NotImplementedError

    def sinks(self, config: ModelConfig, sharding: Sharding) -> Specs:
        """Declare the learnable sinks of the heads, if they have any."""
        if config.softmax_type != "learnable":
            return {}
        offset = sharding.dense.split((config.num_attention_heads,), 0, Init(config.init_method_std))
        return {"core_attention.softmax_offset": offset}

    def exchanged(self, config: ModelConfig, tp: int) -> Exchanged:
        """Return the elements of queries, keys and values, and the output."""
        return self.heads(config).exchanged(tp)

    def matmuls(self, config: ModelConfig, plan: RecomputePlan, keys: float) -> dict[str, Matmul]:
        """Return the products of the projections, and queries times keys and scores times values."""
        return super().matmuls(config, plan, keys) | self.heads(config).matmuls(config, plan, keys)

    def temporary(self, shape: ActivationShape) -> tuple[int, int]:
        """Return the most memory of core attention beside what is kept, in its forward and in its backward."""
        return CoreShape.of(shape, self.heads(shape.model)).temporary(shape)
