"""Declaration of multi-head latent attention (:mod:`megatron.layers.latent_attention`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron.config.model import ModelConfig, RotaryTable
from megatron.distributed.sharding import Sharding, Specs
from megatron.layers.mixers.activations import ActivationShape, KeptTensor
from megatron.layers.mixers.base import Matmul, input_projection, norm, output_projection, replicated_projection, under
from megatron.layers.mixers.core_attention import CORE, CoreAttentionMixer, CoreShape, HeadSizes
from megatron.layers.recompute_plan import RecomputePlan

if TYPE_CHECKING:
    from torch import nn

    from megatron.layers.context import BuildContext


UP_PROJECTIONS = "mla_up_proj"
"""Name in ``--recompute-modules`` of the norms of the latents, the projections up, and the rotation."""


class LatentAttentionMixer(CoreAttentionMixer):
    """Multi-head latent attention."""

    operations = ("latent_qkv",)

    def parameters(self, config: ModelConfig, sharding: Sharding) -> Specs:
        """Declare the projections of queries, keys and values, that of the output, the norms of latents, and sinks."""
        heads, rank, latent = self.heads(config), config.q_lora_rank, config.kv_lora_rank
        queries, partial = (heads.queries * heads.channels,), sharding.sequence_parallel
        if rank is None:
            specs = under(linear_q_proj=input_projection(config, sharding, queries, bias=False))
        else:
            specs = under(
                linear_q_down_proj=replicated_projection(config, sharding, rank, bias=False),
                linear_q_up_proj=input_projection(config, sharding, queries, rank, bias=False),
            )
        down = latent + config.qk_pos_emb_head_dim
        up = (heads.queries * (config.qk_head_dim + config.v_head_dim),)
        specs |= under(
            linear_kv_down_proj=replicated_projection(config, sharding, down, bias=False),
            linear_kv_up_proj=input_projection(config, sharding, up, latent, bias=False),
            linear_proj=output_projection(config, sharding, heads.queries * heads.value_channels),
        )
        if config.qk_layernorm:
            specs |= under(q_layernorm={} if rank is None else norm(config, sharding, rank, partial))
            specs |= under(kv_layernorm=norm(config, sharding, latent, partial))
        return specs | self.sinks(config, sharding)

    def build(self, config: ModelConfig, context: BuildContext, layer: int, plan: RecomputePlan) -> nn.Module:
        """Build the module."""
        from megatron.layers.latent_attention import LatentAttention

        return LatentAttention(config, context, layer, plan, self.rotary(config, layer))

    def rotary(self, config: ModelConfig, layer: int) -> RotaryTable | None:
        """Return the table of the layer, unless it has no rotary positions."""
        kind = config.rotary_kind(layer)
        return None if kind is None else RotaryTable(kind, config.qk_pos_emb_head_dim, config.latent_rope_type, True)

    def heads(self, config: ModelConfig) -> HeadSizes:
        """Return the heads, which all have a key and a value of their own."""
        channels = config.qk_head_dim + config.qk_pos_emb_head_dim
        return HeadSizes(config.num_attention_heads, config.num_attention_heads, channels, config.v_head_dim)

    def shared_by_heads(self, config: ModelConfig, plan: RecomputePlan) -> tuple[int, int]:
        """Return the channels of a key with rotary positions."""
        return config.qk_pos_emb_head_dim, int(UP_PROJECTIONS in plan.modules)

    def describe(self, config: ModelConfig) -> str:
        """Return the heads and the latents."""
        heads, rank = self.heads(config), config.q_lora_rank
        latents = f"latents {config.kv_lora_rank}" + (f" and {rank}" if rank else "")
        return f"{heads.queries} heads of {heads.channels}, values {heads.value_channels}, {latents}"

    def matmuls(self, config: ModelConfig, plan: RecomputePlan, keys: float) -> dict[str, Matmul]:
        """Return the products of the projections and of core attention."""
        products = super().matmuls(config, plan, keys)
        for name in ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj"):
            if name in products and UP_PROJECTIONS in plan.modules:
                products[name] = products[name]._replace(again=products[name].again + 1)
        return products

    def kept(self, shape: ActivationShape) -> Iterator[KeptTensor]:
        """Yield the input, the latents, q, k and v, and the output of core attention."""
        model, core, width = shape.model, CoreShape.of(shape, self.heads(shape.model)), shape.width
        yield shape.input("layernorm")
        if model.q_lora_rank is not None:
            yield from _latent(shape, model.q_lora_rank)
        yield from _latent(shape, model.kv_lora_rank, model.qk_pos_emb_head_dim)
        if core.ranks > 1:
            yield KeptTensor("q, k, v for some heads", core.queries + core.exchanged_keys, width, (CORE,))
        if core.ranks == 1 or CORE in shape.recomputed:
            yield KeptTensor("q, k, v", core.queries + core.keys, width, (UP_PROJECTIONS,))
        yield from shape.magnitudes(self.module, self.parameters(model, shape.sharding))
        yield from core.kept(shape)


def _latent(shape: ActivationShape, rank: int, beside: int = 0) -> Iterator[KeptTensor]:
    """Yield a latent, which lies beside channels of the keys, and what its norm keeps."""
    latent, projected = shape.rows * rank, shape.rows * (rank + beside)
    normed = shape.model.qk_layernorm
    if not (normed and shape.widens("norm")) or UP_PROJECTIONS in shape.recomputed:
        yield KeptTensor("latent", projected, shape.width, (), not normed)
    if normed:
        yield from shape.statistics("norm", shape.rows, latent, UP_PROJECTIONS)
        yield KeptTensor("normalised latent", latent, shape.width, (UP_PROJECTIONS,), True)
