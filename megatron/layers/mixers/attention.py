"""Declaration of self-attention (:mod:`megatron.layers.attention`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import lcm
from typing import TYPE_CHECKING

from megatron.config.attention_pattern import CAUSAL
from megatron.config.compute import kernel_choices
from megatron.config.model import ModelConfig, RotaryTable
from megatron.distributed.sharding import Init, Sharding, Specs
from megatron.layers.mixers.activations import INDEX_BYTES, MASK_BYTES, ActivationShape, KeptTensor
from megatron.layers.mixers.base import Matmul, Mixer, linear, norm, norm_init, output_projection, under
from megatron.layers.recompute_plan import RecomputePlan

if TYPE_CHECKING:
    from torch import nn

    from megatron.layers.context import BuildContext

UNFUSED_TILE, FUSED_TILE = 1024, 256
"""Sides of the tiles of attention (:mod:`megatron.kernels.block_attention`)."""

UNFUSED_TENSORS, CAPPED_TENSORS = 6, 4
"""Tensors like the scores of a tile that are not fused, at a time: with dropout, whose hashes are three in int64, and
where scores are capped without dropout."""

CORE = "core_attn"
"""Name of core attention in ``--recompute-modules``."""


class AttentionMixer(Mixer):
    """Self-attention."""

    module = "self_attention"
    norm = "input_layernorm"
    post_norm = "post_self_attn_layernorm"
    dropout = "attention_dropout"
    supports = ("context parallelism", "documents", "generation")

    def parameters(self, config: ModelConfig, sharding: Sharding) -> Specs:
        """Declare the QKV and the output projection, the norms of queries and keys, and the sinks of the heads."""
        heads, d = (config.kv_groups, config.heads_per_group), config.head_dim
        weight = sharding.dense.qkv(*heads, (d, config.hidden_size), Init(config.init_method_std))
        bias = sharding.dense.qkv(*heads, (d,), Init()) if config.qkv_bias else None
        output = output_projection(config, sharding, config.num_attention_heads * d)
        specs = under(linear_qkv=linear(weight, bias), linear_proj=output)
        if config.qk_layernorm and config.qk_layernorm_scope == "all":
            q, k = sharding.dense.heads(config.num_attention_heads, heads[0], d, norm_init(config))
            specs |= under(q_layernorm={"weight": q}, k_layernorm={"weight": k})
        elif config.qk_layernorm:  # each rank computes its own heads only, so these gradients are always partial
            of_head = norm(config, sharding, d, partial=True)
            specs |= under(q_layernorm=of_head, k_layernorm=of_head)
        if config.softmax_type == "learnable":
            offset = sharding.dense.split((config.num_attention_heads,), 0, Init(config.init_method_std))
            specs["core_attention.softmax_offset"] = offset
        return specs

    def build(self, config: ModelConfig, context: BuildContext, layer: int, plan: RecomputePlan) -> nn.Module:
        """Build the module."""
        from megatron.layers.attention import SelfAttention

        return SelfAttention(config, context, layer, plan, self.rotary(config, layer))

    def rotary(self, config: ModelConfig, layer: int) -> RotaryTable | None:
        """Return the table of the layer, unless it has no rotary positions."""
        kind = config.rotary_kind(layer)
        return None if kind is None else RotaryTable(kind, config.rotary_dim)

    def exchanged(self, config: ModelConfig, tp: int) -> tuple[int, int]:
        """Return the elements of queries, and of keys and values."""
        groups = max(1, config.kv_groups // tp)
        return config.num_attention_heads * config.head_dim // tp, 2 * groups * config.head_dim

    def matmuls(self, config: ModelConfig, plan: RecomputePlan, keys: float) -> dict[str, Matmul]:
        """Return the products of the projections, and queries times keys and scores times values.

        Attention with dropout, which is not fused, keeps no scores and computes them again.
        """
        core = Matmul(2.0 * config.num_attention_heads * config.head_dim * keys, False, CORE in plan.modules)
        scores = core._replace(again=core.again + (config.attention_dropout > 0))
        return super().matmuls(config, plan, keys) | {"scores": scores, "values": core}

    def kept(self, shape: ActivationShape) -> Iterator[KeptTensor]:
        """Yield the input, q, k and v, and the output of core attention."""
        heads = HeadShape.of(shape)
        yield shape.input("layernorm")
        yield from _split_qkv(shape, heads)
        yield from shape.magnitudes(self.module, self.parameters(shape.model, shape.sharding))
        count = shape.model.num_attention_heads // shape.tp
        yield KeptTensor("logsumexp of attention", shape.tokens * count, shape.wide, (CORE,))
        if heads.ranks > 1:
            yield KeptTensor("output for some heads", heads.queries, shape.width, (CORE,))
        yield KeptTensor("output of attention", heads.queries, shape.width, (), True)

    def temporary(self, shape: ActivationShape) -> tuple[int, int]:
        """Return the most memory of core attention beside what is kept, in its forward and in its backward.

        With the residual stream in forward, and the gradients of it and of the output in backward.
        """
        heads = HeadShape.of(shape)
        queries, keys, width, wide = heads.queries, 2 * heads.exchanged_keys, shape.width, shape.wide
        forward, backward = shape.residual, shape.residual + queries * width
        if heads.ranks > 1:  # q, k and v of this rank's tokens, and the same as they are sent
            copies = keys if heads.exchanged_keys > heads.keys else 0
            forward += (2 * queries + 2 * heads.keys + keys + copies) * width
        if not heads.tiled:
            return forward, backward + (queries + keys) * width
        rounded = width if width < wide else 0  # results are summed in fp32, and rounded at the end
        forward += queries * wide * (rounded > 0)
        backward += queries * (wide + rounded)
        if heads.ring == 1:
            backward += keys * (wide + rounded)
        elif shape.config.parallel.cp_comm_type == "all_gather":
            forward += heads.ring * keys * width
            backward += heads.ring * keys * (width + wide + rounded)
        else:
            # Keys that are used and that arrive, each with what is sent meanwhile. In backward also the gradients of
            # this rank's keys and of those that are used, and the exchange of those of the step before.
            passed = 2 * min(2, heads.ring - 1) * keys * width
            forward += passed
            backward += passed + keys * (2 * wide + rounded) + 2 * min(1, heads.ring - 2) * keys * width
        # The runs of consecutive queries; the largest tile that is not fused, or the mask of a tile; and what a tile
        # gives.
        length, runs = shape.tokens * heads.ranks // shape.samples, 2 if heads.ring > 1 else 1
        count = shape.samples * shape.model.num_attention_heads // (shape.tp * heads.ranks)
        capped, dropout = shape.model.attn_logit_softcapping is not None, shape.model.attention_dropout > 0
        unfused = capped or dropout or (shape.on_gpu and width == wide)
        side = min(UNFUSED_TILE if unfused else FUSED_TILE, length // runs)
        score = max(UNFUSED_TENSORS * wide, 3 * INDEX_BYTES) if unfused else UNFUSED_TENSORS * wide * shape.on_gpu
        score = CAPPED_TENSORS * wide if capped and not dropout else score
        tile = side**2 * max(count * score, (INDEX_BYTES + 5 * MASK_BYTES) * heads.masked)
        part = (1 / runs if heads.ring > 1 and not unfused else side / length) * width
        return int(forward + tile + part * queries), int(backward + tile + part * (queries + keys))


@dataclass(frozen=True)
class HeadShape:
    """Elements of this rank's queries and keys, and how attention is computed."""

    # Of the queries, and of the output of attention; of the keys, and of the values.
    queries: int
    keys: int
    # The same as the attention of an a2a rank takes them, copied to enough heads.
    exchanged_keys: int
    # Key/value heads of this rank.
    groups: int
    # Context-parallel ranks that hold different chunks of the sequence, and those that exchange rows for heads.
    ring: int
    ranks: int
    # An attention is computed tile by tile, and tiles have masks.
    tiled: bool
    masked: bool

    @classmethod
    def of(cls, shape: ActivationShape) -> HeadShape:
        """Return that of a rank."""
        model, parallel, documents = shape.model, shape.config.parallel, shape.config.data.reset_attention_mask
        ranks, groups, eager = parallel.cp_head_ranks, max(1, model.kv_groups // shape.tp), "attention" in shape.eager
        keys, ring = shape.tokens * groups * model.head_dim, parallel.context_parallel_size // ranks
        patterns = {model.pattern(layer) for layer in range(model.num_layers)}
        covered = all(p.only_window and (not eager or (p == CAUSAL and not documents)) for p in patterns)
        if model.attn_logit_softcapping is not None:
            kernel = kernel_choices(shape.config.compute.kernels)["attention"].name
            covered &= shape.on_gpu and shape.width == 2 and kernel in ("auto", "flash_attn", "flex")
        return cls(
            queries=shape.tokens * model.num_attention_heads * model.head_dim // shape.tp,
            keys=keys,
            exchanged_keys=keys * lcm(groups, ranks) // groups,
            groups=groups,
            ring=ring,
            ranks=ranks,
            tiled=ring > 1 or model.attention_dropout > 0 or model.softmax_type != "vanilla" or not covered,
            masked=documents or patterns != {CAUSAL},
        )


def _split_qkv(shape: ActivationShape, heads: HeadShape) -> Iterator[KeptTensor]:
    """Yield q, k and v as attention keeps them, and what their norms keep."""
    model, queries, keys, width = shape.model, heads.queries, heads.keys, shape.width
    eager, rotary, normed = "split_qkv" in shape.eager, model.rotary_dim > 0, model.qk_layernorm
    if normed and model.qk_layernorm_scope == "all":
        yield KeptTensor("projection before its norms", queries + 2 * keys, shape.wide)
        yield KeptTensor("queries and keys over their RMS", queries + keys, shape.wide)
        normed = False
    copied = heads.groups > 1 and model.heads_per_group > 1  # the queries of one group are a view of the projection
    kept = True
    if heads.ranks > 1:
        yield KeptTensor("q, k, v for some heads", queries + 2 * heads.exchanged_keys, width, (CORE,))
        kept = CORE in shape.recomputed  # those that are sent are kept to compute the others again
    if normed:
        count = shape.tokens * (model.num_attention_heads // shape.tp + heads.groups)
        yield from shape.statistics("split_qkv", count, queries + keys)
        if eager and copied and not shape.widens("split_qkv"):
            yield KeptTensor("queries before their norm", queries, width)
    if rotary and not (eager or normed):
        if kept:
            yield KeptTensor("q, k, v", queries + 2 * keys, width)
        return
    if kept or normed:
        yield KeptTensor("output of the projection", queries + 2 * keys, width)  # v is a part of it
    if kept and (rotary or normed or copied):
        yield KeptTensor("q", queries, width)
    if kept and (rotary or normed):
        yield KeptTensor("k", keys, width)
