"""Triton kernel of :mod:`megatron.kernels.latent_qkv`: a launch forward and one backward.

A program has some heads of a token. Backward has all of them, and sums the gradient of the channels that they share.

Shapes: as in :mod:`megatron.kernels.latent_qkv`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.kernels.qkv import RotaryCosSin
from megatron.kernels.triton_regions import TILE, _angles, _partner, _turned


@triton.jit
def _latent_forward(
    q_in, kv_in, k_in, q, k, v, cos, sin, batch, angles_batch, k_s, k_b, heads,
    C: tl.constexpr, P: tl.constexpr, V: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, channel = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)[None, :]
    s, b = row // batch, row % batch
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    inside, number = head < heads, row * heads + head
    plain, shared, of_value = inside & (channel < C), inside & (channel >= C) & (channel < C + P), channel < V
    turned, shifted = channel - C, k_in + s * k_s + b * k_b
    query = tl.load(q_in + number * (C + P) + channel, plain | shared, 0.0).to(tl.float32)
    key = tl.load(kv_in + number * (C + V) + channel, plain, 0.0).to(tl.float32)
    key += tl.load(shifted + turned, shared, 0.0).to(tl.float32)
    if ROTARY:
        partner, sign = _partner(turned, ROTARY, INTERLEAVED)
        angle = (s * angles_batch + b % angles_batch) * ROTARY + turned
        cosine = tl.load(cos + angle, shared, 1.0).to(tl.float32)
        sine = sign * tl.load(sin + angle, shared, 0.0).to(tl.float32)
        other = tl.load(q_in + number * (C + P) + C + partner, shared, 0.0).to(tl.float32)
        query = query * cosine + other * sine
        key = key * cosine + tl.load(shifted + partner, shared, 0.0).to(tl.float32) * sine
    tl.store(q + number * (C + P) + channel, query, plain | shared)
    tl.store(k + number * (C + P) + channel, key, plain | shared)
    value = tl.load(kv_in + number * (C + V) + C + channel, inside & of_value, 0.0)
    tl.store(v + number * V + channel, value, inside & of_value)


@triton.jit
def _latent_backward(
    dq, dk, dv, dq_in, dkv_in, dk_in, cos, sin, batch, angles_batch, q_s, q_b, q_n, k_s, k_b, k_n, v_s, v_b, v_n,
    heads,
    C: tl.constexpr, P: tl.constexpr, V: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, channel = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)[None, :]
    s, b = row // batch, row % batch
    is_shared, of_value, turned = (channel >= C) & (channel < C + P), channel < V, channel - C
    total = tl.zeros((BLOCK,), tl.float32)
    if ROTARY:  # the adjoint of a rotation, for any cosines and sines
        partner, sign = _partner(turned, ROTARY, INTERLEAVED)
        angle = (s * angles_batch + b % angles_batch) * ROTARY
        cosine = tl.load(cos + angle + turned, is_shared, 1.0).to(tl.float32)
        sine = sign * tl.load(sin + angle + partner, is_shared, 0.0).to(tl.float32)
    for first in range(0, heads, HEADS):
        head = first + tl.arange(0, HEADS)[:, None]
        inside, number = head < heads, row * heads + head
        plain, shared = inside & (channel < C), inside & is_shared
        at_q, at_k = dq + s * q_s + b * q_b + head * q_n, dk + s * k_s + b * k_b + head * k_n
        query = tl.load(at_q + channel, plain | shared, 0.0).to(tl.float32)
        key = tl.load(at_k + channel, plain | shared, 0.0).to(tl.float32)
        if ROTARY:
            query = query * cosine - tl.load(at_q + C + partner, shared, 0.0).to(tl.float32) * sine
            key = key * cosine - tl.load(at_k + C + partner, shared, 0.0).to(tl.float32) * sine
        tl.store(dq_in + number * (C + P) + channel, query, plain | shared)
        tl.store(dkv_in + number * (C + V) + channel, key, plain)
        value = tl.load(dv + s * v_s + b * v_b + head * v_n + channel, inside & of_value, 0.0)
        tl.store(dkv_in + number * (C + V) + C + channel, value, inside & of_value)
        total += tl.sum(tl.where(shared, key, 0.0), 0)
    channel = tl.arange(0, BLOCK)
    tl.store(dk_in + row * P + channel - C, total, (channel >= C) & (channel < C + P))


class _LatentQKV(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_SBO: Tensor, kv_SBO: Tensor, k_SBP: Tensor, channels: int, rotary: RotaryCosSin | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        q_SBO, kv_SBO = q_SBO.contiguous(), kv_SBO.contiguous()
        k_SBP = k_SBP if k_SBP.stride(2) == 1 else k_SBP.contiguous()
        s, b, rotated = k_SBP.shape
        heads = q_SBO.shape[2] // (channels + rotated)
        ctx.sizes = channels, rotated, kv_SBO.shape[2] // heads - channels
        ctx.rotary, (_, _, width) = rotary, ctx.sizes
        q, k, v = (q_SBO.new_empty(s, b, heads, n) for n in (channels + rotated, channels + rotated, width))
        block = triton.next_power_of_2(max(channels + rotated, width))
        tile = max(1, min(TILE // block, triton.next_power_of_2(heads)))
        _latent_forward[s * b, triton.cdiv(heads, tile)](
            q_SBO, kv_SBO, k_SBP, q, k, v, *_angles(rotary, b), *k_SBP.stride()[:2], heads,
            *ctx.sizes, *_turned(rotary), tile, block,
        )  # fmt: skip
        return q, k, v

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dq, dk, dv = (dy if dy.stride(3) == 1 else dy.contiguous() for dy in grads)
        (s, b, heads, _), (channels, rotated, width), rotary = dq.shape, ctx.sizes, ctx.rotary
        parts = heads * (channels + rotated), heads * (channels + width), rotated
        dq_in, dkv_in, dk_in = (dq.new_empty(s, b, n) for n in parts)
        block = triton.next_power_of_2(max(channels + rotated, width))
        tile = max(1, min(TILE // block, triton.next_power_of_2(heads)))
        strides = (stride for dy in (dq, dk, dv) for stride in dy.stride()[:3])
        _latent_backward[s * b,](
            dq, dk, dv, dq_in, dkv_in, dk_in, *_angles(rotary, b), *strides, heads,
            *ctx.sizes, *_turned(rotary), tile, block,
        )  # fmt: skip
        return dq_in, dkv_in, dk_in, None, None


def latent_qkv(
    q_SBO: Tensor,
    kv_SBO: Tensor,
    k_SBP: Tensor,
    channels: int,
    q_rotary: RotaryCosSin | None,
    k_rotary: RotaryCosSin | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`megatron.kernels.latent_qkv.latent_qkv`, for keys at the positions of the queries."""
    return _LatentQKV.apply(q_SBO, kv_SBO, k_SBP, channels, q_rotary)
