"""Stand-ins for packages that need a GPU: their real signatures, computed with torch, every call kept.

They show that we call what is there as it wants to be called. They do not show that the packages work.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor


def install(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    """Make a module importable, with the packages around it."""
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        path = ".".join(parts[:depth])
        if path not in sys.modules:
            monkeypatch.setitem(sys.modules, path, ModuleType(path))
    for key, value in members.items():
        monkeypatch.setattr(sys.modules[name], key, value, raising=False)


class ApexNorms:
    """``apex.normalization.fused_layer_norm``, whose functions take ``normalized_shape`` before ``eps``."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def fused_layer_norm_affine(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor,
        normalized_shape: Any,
        eps: float = 1e-6,
        memory_efficient: bool = False,
    ) -> Tensor:
        self.calls.append("layer")
        assert not memory_efficient
        wide = (t.float() for t in (weight, bias))  # as apex, sum their gradients in fp32
        return F.layer_norm(input.float(), list(normalized_shape), *wide, eps).to(input.dtype)

    def fused_rms_norm_affine(
        self, input: Tensor, weight: Tensor, normalized_shape: Any, eps: float = 1e-6, memory_efficient: bool = False
    ) -> Tensor:
        self.calls.append("rms")
        assert not memory_efficient
        return F.rms_norm(input, list(normalized_shape), weight, eps)


class FlashAttention:
    """``flash_attn`` 2: ``[batch, sequence, heads, channels]``, windows that do not count the query itself."""

    def __init__(self, too_wide: int = 0) -> None:
        self.calls: list[tuple[str, bool]] = []
        self.too_wide = too_wide

    def flash_attn_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
    ) -> Tensor:
        assert causal
        assert window_size[1] == 0
        assert (dropout_p, alibi_slopes, return_attn_probs) == (0.0, None, False)
        self.calls.append(("plain", deterministic))
        of = window_size, softmax_scale, softcap
        return torch.stack([self._attend(*each, *of) for each in zip(q, k, v)])

    def flash_attn_varlen_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        block_table: Tensor | None = None,
    ) -> Tensor:
        assert causal
        assert window_size[1] == 0
        assert (dropout_p, return_attn_probs, block_table) == (0.0, False, None)
        assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
        assert torch.equal(cu_seqlens_q, cu_seqlens_k)
        ends = cu_seqlens_q.tolist()
        assert (ends[0], ends[-1], q.dim()) == (0, len(q), 3)
        assert max(b - a for a, b in zip(ends, ends[1:])) <= min(max_seqlen_q, max_seqlen_k)
        self.calls.append(("documents", deterministic))
        of = window_size, softmax_scale, softcap
        return torch.cat([self._attend(q[a:b], k[a:b], v[a:b], *of) for a, b in zip(ends, ends[1:])])

    def aten(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cum_seq_q: Tensor | None,
        cum_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        return_debug_mask: bool,
        *,
        scale: float | None = None,
        window_size_left: int | None = None,
        window_size_right: int | None = None,
        seqused_k: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
    ) -> tuple[Tensor, None, None, None, None]:
        """``aten::_flash_attention_forward`` of torch 2.11; later releases add options at the end."""
        assert (return_debug_mask, window_size_right, seqused_k) == (False, None, None)
        window = (-1 if window_size_left is None else window_size_left, 0)
        options = (dropout_p, scale, is_causal, window, 0.0, alibi_slopes)
        if cum_seq_q is None or cum_seq_k is None:
            assert (max_q, max_k) == (query.shape[1], key.shape[1])
            y = self.flash_attn_func(query, key, value, *options)
        else:
            y = self.flash_attn_varlen_func(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, *options)
        return y, None, None, None, None

    def _attend(
        self,
        q_SND: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        window: tuple[int, int],
        scale: float | None,
        softcap: float,
    ) -> Tensor:
        (s, heads, width), t = q_SND.shape, k_TGD.shape[0]
        k, v = (t.repeat_interleave(heads // t.shape[1], dim=1) for t in (k_TGD, v_TGD))
        scores = torch.einsum("snd,tnd->nst", q_SND, k) * (width**-0.5 if scale is None else scale)
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        query, key = torch.arange(t - s, t).view(-1, 1), torch.arange(t)  # the last of both stand together
        seen = key <= query
        if window[0] != -1:
            seen = seen & (key >= query - window[0] - self.too_wide)
        return torch.einsum("nst,tnd->snd", scores.masked_fill(~seen, float("-inf")).softmax(-1), v)
