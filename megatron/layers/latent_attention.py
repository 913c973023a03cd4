"""Multi-head latent attention (MLA, DeepSeek-V2, arXiv 2405.04434).

Keys and values of all heads are projected from one latent per token, which generation caches in their place. A key also
has channels with rotary positions, which are projected from the hidden state and shared by all heads.

Shapes: S sequence, T cached tokens plus the sequence, B batch, H hidden, N this rank's heads, R width of a latent,
D channels of a query or key, V channels of a value, P rotated channels.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron.config.model import ModelConfig, RotaryTable
from megatron.distributed import mappings
from megatron.kernels.qkv import RotaryCosSin, rotate
from megatron.layers.attention import CoreAttention
from megatron.layers.context import BuildContext, ForwardContext, MixerOutput
from megatron.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from megatron.layers.mixers.core_attention import CORE
from megatron.layers.norm import Norm
from megatron.layers.recompute import recompute
from megatron.layers.recompute_plan import RecomputePlan


class LatentAttention(nn.Module):
    """Projections down to latents and up to heads, core attention, output: ``[S(/tp), B, H] -> [S(/tp), B, H]``.

    A tensor-parallel rank has some heads. The projections down are replicated: under sequence parallelism each rank
    computes the latents of its rows, and those up gather them.
    """

    def __init__(
        self,
        config: ModelConfig,
        context: BuildContext,
        layer: int,
        plan: RecomputePlan,
        rotary: RotaryTable | None,
    ) -> None:
        super().__init__()
        self.tp, self.rotary, self.name = context.tp, rotary, context.name("core_attention")
        self.share_rows = mappings.gather_rows if context.sequence_parallel else mappings.copy_to_region
        self.recompute_core = CORE in plan.modules
        self.key_widths = config.qk_head_dim, config.qk_pos_emb_head_dim
        self.value_widths = config.qk_head_dim, config.v_head_dim
        self.latent_widths = config.kv_lora_rank, config.qk_pos_emb_head_dim
        self.linear_q_down_proj: ReplicatedLinear | None = None
        if config.q_lora_rank is None:
            self.linear_q_proj = ColumnParallelLinear(context.submodule("linear_q_proj"))
        else:
            self.linear_q_down_proj = ReplicatedLinear(context.submodule("linear_q_down_proj"))
            self.linear_q_up_proj = ColumnParallelLinear(context.submodule("linear_q_up_proj"))
        self.linear_kv_down_proj = ReplicatedLinear(context.submodule("linear_kv_down_proj"))
        self.linear_kv_up_proj = ColumnParallelLinear(context.submodule("linear_kv_up_proj"))
        self.linear_proj = RowParallelLinear(context.submodule("linear_proj"))
        self.q_layernorm: Norm | None = None
        self.kv_layernorm: Norm | None = None
        if config.qk_layernorm:
            if config.q_lora_rank is not None:
                self.q_layernorm = Norm(config, context.submodule("q_layernorm"))
            self.kv_layernorm = Norm(config, context.submodule("kv_layernorm"))
        heads, pattern = config.num_attention_heads // self.tp.size, config.pattern(layer)
        self.core_attention = CoreAttention(config, context, pattern, heads, 1, config.latent_softmax_scale)

    def forward(self, x_SBH: Tensor, ctx: ForwardContext) -> MixerOutput:
        """Attend within each sample."""
        rotary = None if self.rotary is None else ctx.rotary[self.rotary]
        q_SBND = self._queries(x_SBH, rotary)
        kv_SBR, k_SBP = self.linear_kv_down_proj(x_SBH).split(self.latent_widths, dim=2)
        if self.kv_layernorm is not None:
            kv_SBR = self.kv_layernorm.normalize(kv_SBR)
        k_SB1P = self._rotate(self.share_rows(k_SBP, self.tp).unsqueeze(2), rotary)
        if ctx.cache is not None:
            kv_TB1R, k_SB1P = ctx.cache.extend(self.name, kv_SBR.unsqueeze(2), k_SB1P)
            kv_SBR = kv_TB1R.squeeze(2)
        k_TBND, v_TBNV = self._keys_and_values(kv_SBR, k_SB1P)
        if self.recompute_core:
            y_SBO = recompute(self.core_attention, q_SBND, k_TBND, v_TBNV, ctx)
        else:
            y_SBO = self.core_attention(q_SBND, k_TBND, v_TBNV, ctx)
        return MixerOutput(self.linear_proj(y_SBO), self.linear_proj.bias)

    def _queries(self, x_SBH: Tensor, rotary: RotaryCosSin | None) -> Tensor:
        if self.linear_q_down_proj is None:
            q_SBO = self.linear_q_proj(x_SBH)
        else:
            q_SBR = self.linear_q_down_proj(x_SBH)
            q_SBO = self.linear_q_up_proj(q_SBR if self.q_layernorm is None else self.q_layernorm.normalize(q_SBR))
        q_SBND = q_SBO.unflatten(2, (-1, sum(self.key_widths)))
        if rotary is None:
            return q_SBND
        plain, rotated = q_SBND.split(self.key_widths, dim=3)
        return torch.cat((plain, self._rotate(rotated, rotary)), dim=3)

    def _keys_and_values(self, kv_TBR: Tensor, k_TB1P: Tensor) -> tuple[Tensor, Tensor]:
        kv_TBNO = self.linear_kv_up_proj(kv_TBR).unflatten(2, (-1, sum(self.value_widths)))
        plain, v_TBNV = kv_TBNO.split(self.value_widths, dim=3)
        return torch.cat((plain, k_TB1P.expand(*plain.shape[:3], -1)), dim=3), v_TBNV

    def _rotate(self, x_SBNP: Tensor, rotary: RotaryCosSin | None) -> Tensor:
        return x_SBNP if rotary is None else rotate(x_SBNP, rotary.cos, rotary.sin, rotary.interleaved)
