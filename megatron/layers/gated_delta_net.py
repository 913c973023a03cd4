"""Gated DeltaNet (arXiv 2412.06464): linear attention by the gated delta rule, as a mixer.

Queries, keys and values pass through a short causal convolution. Each value head has a state, a matrix that maps keys
to values, which decays, and in which a token replaces the value of its key (:mod:`megatron.kernels.delta_rule`). Its
outputs are normalised per head and multiplied by a gate. Context-parallel ranks pass states
(:mod:`megatron.layers.recurrence`).

Shapes: S this rank's tokens, T tokens of some heads, B batch, H hidden, N this rank's value heads, K its key heads, D
channels of a key, V of a value; C the channels of queries, keys and values together, ``2 K D + N V``. M chunks of L
tokens.
"""

from __future__ import annotations

from functools import partial
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.kernels.delta_rule import transition
from megatron.layers.context import BuildContext, ForwardContext, MixerOutput
from megatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from megatron.layers.norm import widened
from megatron.layers.recompute import recompute, recompute_producer
from megatron.layers.recompute_plan import RecomputePlan
from megatron.layers.recurrence import ChannelConvolution, Recurrence, RecurrentRows


class GatedDeltaNet(nn.Module):
    """Gated DeltaNet: ``[S(/tp), B, H] -> [S(/tp), B, H]``; a tensor-parallel rank has some of the heads."""

    def __init__(self, config: ModelConfig, context: BuildContext, plan: RecomputePlan) -> None:
        super().__init__()
        self.kernels, self.recompute_norm, tp = context.kernels, "layernorm" in plan.modules, context.tp.size
        self.recurrence = Recurrence(context, config.linear_conv_kernel_dim)
        keys, self.heads = config.linear_num_key_heads // tp, config.linear_num_value_heads // tp
        of_keys, of_values = (keys, config.linear_key_head_dim), (self.heads, config.linear_value_head_dim)
        self.convolved, self.gates = 2 * prod(of_keys) + prod(of_values), prod(of_values)
        self.linear_in = ColumnParallelLinear(context.submodule("linear_in"))
        self.conv = ChannelConvolution(context.submodule("conv"), (of_keys, of_keys, of_values))
        self.dt_bias = context.parameter("dt_bias", autograd=True)
        self.A_log = context.parameter("A_log", autograd=True)
        self.norm = GatedHeadNorm(config, context.submodule("norm"))
        self.linear_out = RowParallelLinear(context.submodule("linear_out"))

    def forward(self, x_SBH: Tensor, ctx: ForwardContext) -> MixerOutput:
        """Mix the tokens of each document."""
        rows = self.recurrence.rows(ctx)
        projected_SBO = self.linear_in(x_SBH)
        sizes = (self.convolved, self.gates, self.heads, self.heads)
        qkv_SBC, gate_SBO, beta_SBN, alpha_SBN = projected_SBO.split(sizes, dim=2)
        qkv_SBC, beta_SBN, alpha_SBN = self.conv.exchange_heads(rows, qkv_SBC, beta_SBN, alpha_SBN)
        convolve, attend = partial(self._convolve, rows), partial(self._attend, rows)
        y_SBNV = rows.scatter_rows(recompute_producer(convolve, attend, qkv_SBC, beta_SBN, alpha_SBN))
        if self.recompute_norm:
            y_SBH = recompute_producer(self.norm, self.linear_out, y_SBNV, gate_SBO)
        else:
            y_SBH = self.linear_out(recompute(self.norm, y_SBNV, gate_SBO))
        return MixerOutput(y_SBH, self.linear_out.bias)

    def _convolve(
        self, rows: RecurrentRows, qkv_TBC: Tensor, beta_TBN: Tensor, alpha_TBN: Tensor
    ) -> tuple[Tensor, ...]:
        """Return convolved queries, keys and values, logarithms of decays, and writing strengths, by chunks."""
        q, k, v = self.conv(rows, qkv_TBC)
        wide, rate_N, shift_N = self.A_log.dtype, rows.own_heads(self.A_log).exp(), rows.own_heads(self.dt_bias)
        log_decay_MLN = -rate_N * F.softplus(rows.fold(alpha_TBN).to(wide) + shift_N)
        return q, k, v, log_decay_MLN, rows.fold(beta_TBN).to(wide).sigmoid()

    def _attend(
        self,
        rows: RecurrentRows,
        q_MLKD: Tensor,
        k_MLKD: Tensor,
        v_MLNV: Tensor,
        log_decay_MLN: Tensor,
        beta_MLN: Tensor,
    ) -> Tensor:
        """Apply the gated delta rule."""
        rule, runs = self.kernels.gated_delta_rule, rows.own_runs
        continued = None if rows.seen is None else rows.seen[:, 0]

        def scan(state: Tensor | None) -> tuple[Tensor, Tensor]:
            return rule(q_MLKD, k_MLKD, v_MLNV, log_decay_MLN, beta_MLN, runs, state)

        y_MLNV = rows.carry(scan, partial(transition, rule, k_MLKD, v_MLNV, log_decay_MLN, beta_MLN, runs, continued))
        return rows.unfold(y_MLNV)


class GatedHeadNorm(nn.Module):
    """``norm(y) silu(gate)``: RMSNorm over the channels of a head, in at least fp32; all heads have one weight."""

    def __init__(self, config: ModelConfig, context: BuildContext) -> None:
        super().__init__()
        self.weight, self.eps = context.parameter("weight", autograd=True), config.norm_epsilon

    def forward(self, y_SBNV: Tensor, gate_SBO: Tensor) -> Tensor:
        """Return the product of all heads, ``[S, B, N V]``."""
        wide = torch.promote_types(y_SBNV.dtype, torch.float32)
        normed_SBNV = F.rms_norm(y_SBNV.to(wide), y_SBNV.shape[3:], widened(self.weight), self.eps)
        return (normed_SBNV.flatten(2) * F.silu(gate_SBO.to(wide))).to(y_SBNV.dtype)
