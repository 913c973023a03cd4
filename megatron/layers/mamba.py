"""Mamba-2, a mixer with a state of constant size (Dao and Gu 2024, arXiv 2405.21060).

A fused projection gives of each token a gate z, inputs x of the heads, vectors B and C that write to their states and
read from them, and step sizes dt. A short causal convolution mixes x, B and C of neighbouring tokens; the scan of
:mod:`megatron.kernels.state_space` does it over the whole document. Its output is gated, normalised by groups of
channels, and projected back.

Shapes: S sequence, B batch, H hidden, N this rank's heads, P channels of a head, G this rank's groups of heads, D
channels of a state, I = N P, W width of the convolution, C its channels; F sequences of L consecutive tokens, those of
all samples that this rank scans (:mod:`megatron.layers.recurrence`).
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.distributed import mappings
from megatron.kernels.linear import with_bias_gradient
from megatron.kernels.state_space import decay_of_all, read_state
from megatron.layers.context import BuildContext, ForwardContext, MixerOutput
from megatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from megatron.layers.norm import widened
from megatron.layers.recompute import recompute, recompute_producer
from megatron.layers.recompute_plan import RecomputePlan
from megatron.layers.recurrence import ChannelConvolution, Recurrence, RecurrentRows


class Mamba(nn.Module):
    """Mamba-2: ``[S(/tp), B, H] -> [S(/tp), B, H]``.

    A tensor-parallel rank has some of the heads, with their groups. For backward, beside what the linears keep, only
    the projection and the output of the scan are kept: the convolution and the norm are computed again, and the scan
    keeps its inputs, which the convolution gives.
    """

    def __init__(self, config: ModelConfig, context: BuildContext, plan: RecomputePlan) -> None:
        super().__init__()
        self.kernels, self.tp = context.kernels, context.tp
        self.linear_in = ColumnParallelLinear(context.submodule("linear_in"))
        size, channels, state = context.tp.size, config.mamba_head_dim, config.mamba_state_dim
        self.heads, groups = config.mamba_heads // size, config.mamba_num_groups // size
        shapes = (self.heads, channels), (groups, state), (groups, state)  # of x, B and C
        self.inner, self.conv = self.heads * channels, ChannelConvolution(context.submodule("conv"), shapes)
        self.dt_bias, self.A_log, self.D = (context.parameter(n, autograd=True) for n in ("dt_bias", "A_log", "D"))
        self.norm = GatedNorm(config, context.submodule("norm"))
        self.linear_out = RowParallelLinear(context.submodule("linear_out"))
        self.recurrence = Recurrence(context, config.mamba_conv_kernel_dim)
        self.limits, self.chunk = (config.mamba_dt_min, config.mamba_dt_max), config.mamba_chunk_size
        self.recompute_norm = "layernorm" in plan.modules

    def forward(self, x_SBH: Tensor, ctx: ForwardContext) -> MixerOutput:
        """Scan the documents of each sample."""
        projected_SBO = with_bias_gradient(self.linear_in(x_SBH), self.linear_in.bias)
        rows = self.recurrence.rows(ctx)
        ends = (self.inner, projected_SBO.shape[2] - self.heads)
        z_SBI, mixed_SBC, dt_SBN = projected_SBO.tensor_split(ends, dim=2)
        mixed_SBC, dt_SBN = self.conv.exchange_heads(rows, mixed_SBC, dt_SBN)
        inputs, scan = partial(self._scan_inputs, rows=rows), partial(self._scan, rows=rows)
        y_SBI = rows.scatter_rows(recompute_producer(inputs, scan, mixed_SBC, dt_SBN)).flatten(2)
        if self.recompute_norm:
            y_SBH = recompute_producer(self.norm, self.linear_out, y_SBI, z_SBI)
        else:
            y_SBH = self.linear_out(self.norm(y_SBI, z_SBI))
        return MixerOutput(y_SBH, self.linear_out.bias)

    def _scan_inputs(self, mixed_SBC: Tensor, dt_SBN: Tensor, rows: RecurrentRows) -> tuple[Tensor, ...]:
        """Return x ``[F, L, N, P]``, B and C ``[F, L, G, D]``, and the step sizes ``[F, L, N]`` in at least fp32."""
        x, b, c = self.conv(rows, mixed_SBC)
        return x, b, c, F.softplus(rows.fold(dt_SBN) + rows.own_heads(self.dt_bias)).clamp(*self.limits)

    def _scan(self, x_FLNP: Tensor, b_FLGD: Tensor, c_FLGD: Tensor, dt_FLN: Tensor, rows: RecurrentRows) -> Tensor:
        """Return the outputs of the heads ``[S, B, N, P]``."""
        a_N, skip_N1 = -rows.own_heads(self.A_log).exp(), rows.own_heads(self.D).unsqueeze(1)
        y_FLNP, state_FNPD = self.kernels.state_space(x_FLNP, dt_FLN, a_N, b_FLGD, c_FLGD, rows.own_runs, self.chunk)
        if rows.passes_states:
            before_FNPD = rows.state_before(decay_of_all(dt_FLN, a_N, rows.seen), state_FNPD)
            y_FLNP = y_FLNP + read_state(before_FNPD, dt_FLN, a_N, c_FLGD, rows.seen)
        return rows.unfold((y_FLNP + skip_N1 * x_FLNP).to(x_FLNP.dtype))


NORM_ROWS = 2048
"""Rows that a gated norm computes at a time."""


class GatedNorm(nn.Module):
    """``norm(y silu(z))``, or ``norm(y) silu(z)``: RMSNorm of groups of channels, in at least fp32.

    A rank has whole groups, or a part of the only one, whose sum of squares is that of all ranks. Only the inputs are
    kept for backward, which computes some rows at a time.
    """

    def __init__(self, config: ModelConfig, context: BuildContext) -> None:
        super().__init__()
        self.weight, self.eps = context.parameter("weight", autograd=True), config.norm_epsilon
        self.before_gate, self.tp = config.mamba_norm_before_gate, context.tp
        groups = config.mamba_norm_group_count
        self.groups, self.width = max(1, groups // context.tp.size), config.mamba_inner_size // groups

    def forward(self, y_SBI: Tensor, z_SBI: Tensor) -> Tensor:
        """Apply the gate and the norm."""
        scale, rows = widened(self.weight), max(1, NORM_ROWS // y_SBI.shape[1])
        parts = zip(y_SBI.split(rows), z_SBI.split(rows))
        return torch.cat([recompute(self._normalize, y, z, scale) for y, z in parts])

    def _normalize(self, y_SBI: Tensor, z_SBI: Tensor, scale: Tensor) -> Tensor:
        wide = torch.promote_types(y_SBI.dtype, torch.float32)
        gate_SBI = F.silu(z_SBI.to(wide))
        x_SBGC = (y_SBI.to(wide) if self.before_gate else y_SBI * gate_SBI).unflatten(2, (self.groups, -1))
        sums_SBG1 = x_SBGC.square().sum(3, keepdim=True)
        if x_SBGC.shape[3] < self.width:  # each rank uses the sum for its own channels, so its gradient is partial, too
            sums_SBG1 = mappings.copy_to_region(mappings.reduce_from_region(sums_SBG1, self.tp), self.tp)
        normed_SBGC = x_SBGC * (sums_SBG1 / self.width + self.eps).rsqrt()
        out_SBI = normed_SBGC.flatten(2) * scale
        return (out_SBI * gate_SBI if self.before_gate else out_SBI).to(y_SBI.dtype)
