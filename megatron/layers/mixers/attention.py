"""Declaration of self-attention (:mod:`megatron.layers.attention`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron.config.model import ModelConfig, RotaryTable
from megatron.distributed.sharding import Init, Sharding, Specs
from megatron.layers.mixers.activations import ActivationShape, KeptTensor
from megatron.layers.mixers.base import linear, norm, norm_init, output_projection, under
from megatron.layers.mixers.core_attention import CORE, CoreAttentionMixer, CoreShape, HeadSizes
from megatron.layers.recompute_plan import RecomputePlan

if TYPE_CHECKING:
    from torch import nn

    from megatron.layers.context import BuildContext


class AttentionMixer(CoreAttentionMixer):
    """Self-attention."""

    def parameters(self, config: ModelConfig, sharding: Sharding) -> Specs:
        """Declare the QKV and the output projection, the norms of queries and keys, and the sinks of the heads."""
        heads, d = (config.kv_groups, config.heads_per_group), config.head_dim
        gated = config.attention_output_gate
        weight = sharding.dense.qkv(*heads, (d, config.hidden_size), Init(config.init_method_std), gated)
        bias = sharding.dense.qkv(*heads, (d,), Init(), gated) if config.qkv_bias else None
        output = output_projection(config, sharding, config.num_attention_heads * d)
        specs = under(linear_qkv=linear(weight, bias), linear_proj=output)
        if config.qk_layernorm and config.qk_layernorm_scope == "all":
            q, k = sharding.dense.heads(config.num_attention_heads, heads[0], d, norm_init(config))
            specs |= under(q_layernorm={"weight": q}, k_layernorm={"weight": k})
        elif config.qk_layernorm:  # each rank computes its own heads only, so these gradients are always partial
            of_head = norm(config, sharding, d, partial=True)
            specs |= under(q_layernorm=of_head, k_layernorm=of_head)
        return specs | self.sinks(config, sharding)

    def build(self, config: ModelConfig, context: BuildContext, layer: int, plan: RecomputePlan) -> nn.Module:
        """Build the module."""
        from megatron.layers.attention import SelfAttention

        return SelfAttention(config, context, layer, plan, self.rotary(config, layer))

    def rotary(self, config: ModelConfig, layer: int) -> RotaryTable | None:
        """Return the table of the layer, unless it has no rotary positions."""
        kind = config.rotary_kind(layer)
        if kind is None:
            return None
        return RotaryTable(kind, config.rotary_dim, config.position_embedding_type, config.rotary_interleaved)

    def heads(self, config: ModelConfig) -> HeadSizes:
        """Return query heads and key/value heads, of equal widths."""
        return HeadSizes(config.num_attention_heads, config.kv_groups, config.head_dim, config.head_dim)

    def describe(self, config: ModelConfig) -> str:
        """Return the heads."""
        heads = f"{config.num_attention_heads} heads of {config.head_dim}"
        heads += f" on {config.kv_groups} key/value heads" if config.kv_groups != config.num_attention_heads else ""
        return heads + (", gated" if config.attention_output_gate else "")

    def kept(self, shape: ActivationShape) -> Iterator[KeptTensor]:
        """Yield the input, q, k and v, and the output of core attention."""
        core = CoreShape.of(shape, self.heads(shape.model))
        yield shape.input("layernorm")
        yield from _split_qkv(shape, core)
        yield from shape.magnitudes(self.module, self.parameters(shape.model, shape.sharding))
        yield from core.kept(shape, shape.model.attention_output_gate)


def _split_qkv(shape: ActivationShape, heads: CoreShape) -> Iterator[KeptTensor]:
    """Yield q, k and v as attention keeps them, and what their norms keep."""
    model, queries, keys, width = shape.model, heads.queries, heads.keys, shape.width
    eager, rotary, normed = "split_qkv" in shape.eager, model.rotary_dim > 0, model.qk_layernorm
    if normed and model.qk_layernorm_scope == "all":
        yield KeptTensor("projection before its norms", queries + keys, shape.wide)
        yield KeptTensor("queries and keys over their RMS", queries + keys // 2, shape.wide)
        normed = False
    copied = heads.groups > 1 and model.heads_per_group > 1  # the queries of one group are a view of the projection
    kept = True
    if heads.ranks > 1:
        yield KeptTensor("q, k, v for some heads", queries + heads.exchanged_keys, width, (CORE,))
        kept = CORE in shape.recomputed  # those that are sent are kept to compute the others again
    if normed:
        count = shape.tokens * (heads.heads + heads.groups)
        yield from shape.statistics("split_qkv", count, queries + keys // 2)
        if eager and copied and not shape.widens("split_qkv"):
            yield KeptTensor("queries before their norm", queries, width)
    if rotary and not (eager or normed):
        if kept:
            yield KeptTensor("q, k, v", queries + keys, width)
        return
    if kept or normed:
        yield KeptTensor("output of the projection", queries + keys, width)  # v is a part of it
    if kept and (rotary or normed or copied):
        yield KeptTensor("q", queries, width)
    if kept and (rotary or normed):
        yield KeptTensor("k", keys // 2, width)
