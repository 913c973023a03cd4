"""Split of the fused projection into queries, keys and values, with their norms and rotary positions.

Rotary position embeddings (RoPE, Su et al. 2021) are plain, Llama-3 scaled or YaRN.

Shapes: S sequence, B batch, G key/value heads, X query heads per key/value head, N = G X, D channels of a head,
O = G (X + 2) D: of each key/value head its queries, then its key, then its value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.config.latent_attention import yarn_mscale
from megatron.config.model import ModelConfig, RotaryTable
from megatron.kernels.compile import compiled, compiler_missing, triton_missing, triton_region
from megatron.kernels.linear import with_bias_gradient
from megatron.kernels.norm import norm
from megatron.kernels.operation import Candidate, KernelCheck, Operation


@dataclass(frozen=True)
class RotaryCosSin:
    """Cosines and sines of the rotation angles, ``[S, B or 1, 1, channels]``."""

    cos: Tensor
    sin: Tensor
    # Rotate channel pairs (0, 1), (2, 3).. instead of (i, i + channels/2).
    interleaved: bool


class RotaryEmbedding:
    """Rotary frequencies of a table, which some layers of a model share.

    Angles are computed in at least fp32, cosines and sines returned in ``dtype``.
    """

    def __init__(self, config: ModelConfig, table: RotaryTable, dtype: torch.dtype, device: torch.device) -> None:
        self.interleaved = table.interleaved
        self.dtype = dtype
        frequencies, self.scale = _frequencies(config, table)
        self.frequencies = frequencies.to(device, torch.promote_types(dtype, torch.float32))

    def __call__(self, seq_length: int, positions_BS: Tensor | None) -> RotaryCosSin:
        """Return cosines and sines of positions 0..seq_length-1, or of the given ones."""
        if positions_BS is None:
            positions_BS = torch.arange(seq_length, device=self.frequencies.device).unsqueeze(0)
        angles = positions_BS.t()[..., None, None] * self.frequencies
        angles = angles.repeat_interleave(2, -1) if self.interleaved else torch.cat((angles, angles), -1)
        cos, sin = angles.cos() * self.scale, angles.sin() * self.scale
        return RotaryCosSin(cos.to(self.dtype), sin.to(self.dtype), self.interleaved)


def _frequencies(config: ModelConfig, table: RotaryTable) -> tuple[Tensor, float]:
    """Return angular frequencies ``[channels/2]`` in fp64, and the factor on cosine and sine."""
    exponents = torch.arange(0, table.channels, 2, dtype=torch.float64) / table.channels
    if table.kind == "local" and config.rotary_base_local is not None:
        return config.rotary_base_local**-exponents, 1.0
    frequencies = config.rotary_base**-exponents
    if table.scaling == "yarn":
        factor = config.rotary_scaling_factor
        return _yarn(config, frequencies), yarn_mscale(factor, config.mscale) / yarn_mscale(
            factor, config.mscale_all_dim
        )
    frequencies = frequencies / config.rotary_seq_len_interpolation_factor
    return (_llama3(config, frequencies) if config.use_rope_scaling else frequencies), 1.0


def _llama3(config: ModelConfig, frequencies: Tensor) -> Tensor:
    """Apply Llama 3.1's scaling: long wavelengths are stretched, short ones kept, with a ramp in between."""
    wavelengths = 2 * math.pi / frequencies
    low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
    kept = ((config.rope_original_max_position / wavelengths - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / config.rope_scaling_factor)


def _yarn(config: ModelConfig, frequencies: Tensor) -> Tensor:
    """Apply YaRN (Peng et al. 2023, eq. 17-23): interpolate channels with few rotations over the original context."""
    original, dim = config.yarn_original_length, 2 * len(frequencies)
    if original is None:
        raise ValueError("yarn needs yarn_original_max_position_embeddings")

    def channel(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(config.rotary_base))

    low, high = channel(config.yarn_beta_fast), channel(config.yarn_beta_slow)
    if config.yarn_correction_range_round_to_int:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float64) - low) / max(high - low, 1e-3)).clamp(0, 1)
    return frequencies * ((1 - ramp) + ramp / config.rotary_scaling_factor)


def rotate(x_SBND: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate the first channels of every head.

    Args:
        x_SBND: ``[sequence, batch, heads, channels]``.
        cos: of the angles, ``[S, B or 1, 1, channels to rotate]``.
        sin: likewise.
        interleaved: rotate channel pairs (0,1),(2,3).. instead of (i, i + width/2).
    """
    width = cos.shape[-1]
    x = x_SBND[..., :width]
    if interleaved:
        rotated_90 = torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)
    else:
        rotated_90 = torch.cat((-x[..., width // 2 :], x[..., : width // 2]), dim=-1)
    rotated = x * cos + rotated_90 * sin
    return rotated if width == x_SBND.shape[-1] else torch.cat((rotated, x_SBND[..., width:]), dim=-1)


class HeadNorms(NamedTuple):
    """Norms of every query head and of every key head, ``[D]``: RMSNorm, or with biases LayerNorm."""

    q_weight: Tensor
    q_bias: Tensor | None
    k_weight: Tensor
    k_bias: Tensor | None
    eps: float


SplitQKVKernel = Callable[
    [Tensor, Tensor | None, tuple[int, int], HeadNorms | None, RotaryCosSin | None], tuple[Tensor, Tensor, Tensor]
]
"""``split_qkv(qkv_SBO, bias_O, (G, D), norms, rotary) -> (q_SBND, k_SBGD, v_SBGD)``."""


def split_qkv(
    qkv_SBO: Tensor, bias_O: Tensor | None, heads: tuple[int, int], norms: HeadNorms | None, rotary: RotaryCosSin | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Split, normalise and rotate.

    Args:
        qkv_SBO: output of the projection, which contains ``bias_O`` (see :mod:`megatron.kernels.linear`).
        bias_O: of the projection.
        heads: number of key/value heads, and channels of a head.
        norms: None for no norms.
        rotary: None for no rotary positions.
    """
    groups, channels = heads
    qkv_SBGXD = with_bias_gradient(qkv_SBO, bias_O).unflatten(2, (groups, -1, channels))
    q, k, v = qkv_SBGXD.split((qkv_SBGXD.shape[3] - 2, 1, 1), dim=3)
    q_SBND, k_SBGD, v_SBGD = q.flatten(2, 3), k.squeeze(3), v.squeeze(3)
    if norms is not None:
        q_SBND = norm(q_SBND, norms.q_weight, norms.q_bias, norms.eps)
        k_SBGD = norm(k_SBGD, norms.k_weight, norms.k_bias, norms.eps)
    if rotary is not None:
        q_SBND, k_SBGD = (rotate(x, rotary.cos, rotary.sin, rotary.interleaved) for x in (q_SBND, k_SBGD))
    return q_SBND, k_SBGD, v_SBGD


compiled_split_qkv = cache(compiled(split_qkv))


def _checks() -> Sequence[KernelCheck]:
    generator = torch.Generator().manual_seed(0)
    half = 6.0 * torch.rand(300, 1, 1, 4, generator=generator, dtype=torch.float64)
    qkv = torch.randn(300, 2, 2 * 4 * 12, generator=generator, dtype=torch.float64)
    bias, weights = qkv[0, 0], torch.randn(4, 12, generator=generator, dtype=torch.float64)

    def rotary(interleaved: bool, like: Tensor) -> RotaryCosSin:
        # Cosines and sines are constants of a model, so they are computed here and have no gradient.
        angles = half.repeat_interleave(2, -1) if interleaved else torch.cat((half, half), -1)
        return RotaryCosSin(angles.cos().to(like), angles.sin().to(like), interleaved)

    def normed(f: SplitQKVKernel, t: Sequence[Tensor]) -> Sequence[Tensor]:
        return f(t[0], None, (2, 12), HeadNorms(t[1], None, t[2], None, 1e-5), rotary(False, t[0]))

    return [
        KernelCheck(lambda f, t: f(t[0], t[1], (2, 12), None, rotary(True, t[0])), (qkv, bias)),
        KernelCheck(lambda f, t: f(t[0], t[1], (2, 12), None, None), (qkv, bias)),
        KernelCheck(normed, (qkv, weights[0], weights[1])),
    ]


SPLIT_QKV = Operation(
    {
        "triton": Candidate(triton_region("split_qkv"), triton_missing),
        "compiled": Candidate(compiled_split_qkv, compiler_missing),
        "torch": Candidate(lambda: split_qkv),
    },
    _checks,
)
