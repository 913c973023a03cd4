"""Multi-head latent attention (MLA, DeepSeek-V2, arXiv 2405.04434).

Keys and values of all heads are projected from one latent per token, which generation caches in their place. A key also
has channels with rotary positions, which are projected from the hidden state and shared by all heads. A single token
attends to the latents themselves (2.1 there): the projection of the keys is applied to its queries, that of the values
to what it attends to, so that cached latents are not projected again.

Shapes: S sequence, T cached tokens plus the sequence, B batch, H hidden, N this rank's heads, R width of a latent,
D channels of a query or key, P of them rotated, C its others, V channels of a value.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from megatron.config.model import ModelConfig, RotaryTable
from megatron.distributed import mappings
from megatron.kernels.qkv import RotaryCosSin, rotate
from megatron.layers.attention import CoreAttention
from megatron.layers.context import BuildContext, ForwardContext, MixerOutput
from megatron.layers.kv_cache import KVCache
from megatron.layers.linear import ColumnParallelLinear, PlainProduct, ReplicatedLinear, RowParallelLinear
from megatron.layers.norm import Norm
from megatron.layers.recompute import recompute_producer
from megatron.layers.recompute_plan import RecomputePlan


class LatentAttention(nn.Module):
    """Latent attention: ``[S(/tp), B, H] -> [S(/tp), B, H]``.

    Hidden states are projected down to latents, and these up to queries, keys and values, for core attention. A
    tensor-parallel rank has some of the heads. The projections down are replicated: under sequence parallelism each
    rank computes the latents of its rows, and the projections up gather these.
    """

    def __init__(
        self, config: ModelConfig, context: BuildContext, layer: int, plan: RecomputePlan, rotary: RotaryTable | None
    ) -> None:
        super().__init__()
        self.kernels, self.tp, self.rotary = context.kernels, context.tp, rotary
        self.name = context.name("core_attention")
        self.share_rows = mappings.gather_rows if context.sequence_parallel else mappings.copy_to_region
        self.recompute_heads = "mla_up_proj" in plan.modules
        self.channels, self.latent_widths = config.qk_head_dim, (config.kv_lora_rank, config.qk_pos_emb_head_dim)
        self.linear_q_down_proj: ReplicatedLinear | None = None
        if config.q_lora_rank is None:
            self.linear_q_proj = ColumnParallelLinear(context.submodule("linear_q_proj"))
        else:
            self.linear_q_down_proj = ReplicatedLinear(context.submodule("linear_q_down_proj"))
            self.linear_q_up_proj = ColumnParallelLinear(context.submodule("linear_q_up_proj"))
        self.linear_kv_down_proj = ReplicatedLinear(context.submodule("linear_kv_down_proj"))
        self.linear_kv_up_proj = ColumnParallelLinear(context.submodule("linear_kv_up_proj"))
        plain = type(self.linear_kv_up_proj.product) is PlainProduct and self.linear_kv_up_proj.bias is None
        self.can_absorb = plain and not context.sequence_parallel and context.kernels.linear.reassociates
        self.linear_proj = RowParallelLinear(context.submodule("linear_proj"))
        self.q_layernorm: Norm | None = None
        self.kv_layernorm: Norm | None = None
        if config.qk_layernorm:
            if config.q_lora_rank is not None:
                self.q_layernorm = Norm(config, context.submodule("q_layernorm"))
            self.kv_layernorm = Norm(config, context.submodule("kv_layernorm"))
        heads, scale = config.num_attention_heads // self.tp.size, config.latent_softmax_scale
        self.core_attention = CoreAttention(config, context, layer, plan, heads, 1, scale)

    def forward(self, x_SBH: Tensor, ctx: ForwardContext) -> MixerOutput:
        """Attend within each sample."""
        q_SBR = x_SBH if self.linear_q_down_proj is None else self.linear_q_down_proj(x_SBH)
        kv_SBR, k_SBP = self.linear_kv_down_proj(x_SBH).split(self.latent_widths, dim=2)
        heads = partial(self._heads, ctx=ctx)
        if ctx.cache is not None and len(x_SBH) == 1 and self.can_absorb:
            y_SBO = self._attend_to_latents(q_SBR, kv_SBR, k_SBP, ctx.cache, ctx)
        elif self.recompute_heads:
            y_SBO = recompute_producer(heads, lambda *qkv: self.core_attention(*qkv, ctx), q_SBR, kv_SBR, k_SBP)
        else:
            y_SBO = self.core_attention(*heads(q_SBR, kv_SBR, k_SBP), ctx)
        return MixerOutput(self.linear_proj(y_SBO), self.linear_proj.bias)

    def _heads(self, q_SBR: Tensor, kv_SBR: Tensor, k_SBP: Tensor, ctx: ForwardContext) -> tuple[Tensor, ...]:
        """Return queries, keys and values of this rank's heads."""
        rotary = None if self.rotary is None else ctx.rotary[self.rotary]
        q_SBO = self._queries(q_SBR)
        kv_TBR = kv_SBR if self.kv_layernorm is None else self.kv_layernorm.normalize(kv_SBR)
        k_TBP, k_rotary = self.share_rows(k_SBP, self.tp), rotary
        if ctx.cache is not None:
            kv_TBR, k_TBP = self._extend(ctx.cache, kv_TBR, k_TBP, rotary)
            k_rotary = None
        kv_TBO = self.linear_kv_up_proj(kv_TBR)
        return self.kernels.latent_qkv(q_SBO, kv_TBO, k_TBP, self.channels, rotary, k_rotary)

    def _queries(self, q_SBR: Tensor) -> Tensor:
        """Return the queries of this rank's heads ``[S, B, N D]``, before the rotation."""
        if self.linear_q_down_proj is None:
            q_SBO: Tensor = self.linear_q_proj(q_SBR)
        else:
            q_SBO = self.linear_q_up_proj(q_SBR if self.q_layernorm is None else self.q_layernorm.normalize(q_SBR))
        return q_SBO

    def _attend_to_latents(
        self, q_SBR: Tensor, kv_SBR: Tensor, k_SBP: Tensor, cache: KVCache, ctx: ForwardContext
    ) -> Tensor:
        """Return the output of core attention, with the latents as keys and values that all heads share."""
        rotary = None if self.rotary is None else ctx.rotary[self.rotary]
        (latent, rotated), channels = self.latent_widths, self.channels
        kv_SBR = kv_SBR if self.kv_layernorm is None else self.kv_layernorm.normalize(kv_SBR)
        kv_TBR, k_TBP = self._extend(cache, kv_SBR, k_SBP, rotary)
        q_SBND = self._queries(q_SBR).unflatten(2, (-1, channels + rotated))
        q_SBNC, q_SBNP = q_SBND.split((channels, rotated), dim=3)
        if rotary is not None:
            q_SBNP = rotate(q_SBNP, rotary.cos, rotary.sin, rotary.interleaved)
        weight = self.linear_kv_up_proj.weight.view(q_SBND.shape[2], -1, latent)
        key_NCR, value_NVR = weight[:, :channels], weight[:, channels:]
        q_SBNR = torch.einsum("sbnc,ncr->sbnr", q_SBNC, key_NCR)
        k_TB1D = torch.cat((kv_TBR, k_TBP), dim=2).unsqueeze(2)
        y_SBO = self.core_attention(torch.cat((q_SBNR, q_SBNP), dim=3), k_TB1D, kv_TBR.unsqueeze(2), ctx)
        return torch.einsum("sbnr,nvr->sbnv", y_SBO.unflatten(2, (-1, latent)), value_NVR).flatten(2)

    def _extend(
        self, cache: KVCache, kv_SBR: Tensor, k_SBP: Tensor, rotary: RotaryCosSin | None
    ) -> tuple[Tensor, Tensor]:
        """Add latents and rotated channels of keys to the cache; return those of all tokens."""
        kv_SB1R, k_SB1P = kv_SBR.unsqueeze(2), k_SBP.unsqueeze(2)
        if rotary is not None:
            k_SB1P = rotate(k_SB1P, rotary.cos, rotary.sin, rotary.interleaved)
        kv_TB1R, k_TB1P = cache.extend(self.name, kv_SB1R, k_SB1P)
        return kv_TB1R.squeeze(2), k_TB1P.squeeze(2)
