"""Attention proper: softmax of scaled scores, times values, without dropout.

Shapes: S queries, T keys, B batch, N query heads, G key/value heads (N a multiple of G), D channels of a head.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.kernels.operation import HALF, Candidate, Operation, Trial, half_on_gpu, not_installed


def attention_mask(
    seq_length: int, window: int | None, documents_BS: Tensor | None, device: torch.device, first_query: int = 0
) -> Tensor:
    """Who may look at whom, boolean ``[B or 1, 1, S, T]``: causal, within the window, within the document.

    Queries are the tokens from ``first_query`` on, keys all ``seq_length``.
    """
    if documents_BS is None:
        mask = torch.ones(1, 1, seq_length - first_query, seq_length, dtype=torch.bool, device=device)
    else:
        mask = documents_BS[:, None, first_query:, None] == documents_BS[:, None, None, :]
    mask.tril_(first_query)  # in place: at long sequences the mask is large, and a second one would be too
    if window is not None:
        mask.triu_(first_query + 1 - window)
    return mask


@dataclass(frozen=True)
class Sight:
    """Who may look at whom: causal, within the window, within the document.

    Attributes:
        keys: how many tokens there are to look at; the queries are the last of them.
        device: of the mask.
        window: tokens that a query sees, itself the last; None for all before it.
        documents: int64 ``[B, keys]``, what each token belongs to, runs of equal ids; None where a sample is one.
        first_query: place of the first query among the keys.
        known: the :attr:`boundaries`, where somebody knows them already.
    """

    keys: int
    device: torch.device
    window: int | None = None
    documents: Tensor | None = None
    first_query: int = 0
    known: Tensor | None = None

    @cached_property
    def mask(self) -> Tensor | None:
        """:func:`attention_mask`, or None when plain causal says it all.

        Made only for those who ask, because at long sequences it is large.
        """
        if self.window is None and self.documents is None and self.first_query == 0:
            return None
        return attention_mask(self.keys, self.window, self.documents, self.device, self.first_query)

    @cached_property
    def boundaries(self) -> Tensor:
        """Where documents begin in the samples laid end to end, and where the last ends: int32 ``[documents + 1]``.

        Where they are not known, waits for the device, once per micro-batch: how many there are decides the shape.
        """
        if self.known is not None:
            return self.known
        if self.documents is None:
            raise ValueError("there are no documents")
        begins_BS = torch.ones_like(self.documents, dtype=torch.bool)
        begins_BS[:, 1:] = self.documents[:, 1:] != self.documents[:, :-1]
        end = torch.full((1,), begins_BS.numel(), device=begins_BS.device)
        return torch.cat((begins_BS.flatten().nonzero().flatten(), end)).int()


Attention = Callable[[Tensor, Tensor, Tensor, Sight], Tensor]
"""``attention(q_SBND, k_TBGD, v_TBGD, sight) -> y_SBND``."""


def sdpa(q_SBND: Tensor, k_TBGD: Tensor, v_TBGD: Tensor, sight: Sight) -> Tensor:
    """Torch's fused attention, whichever of its kernels takes the inputs."""
    q_BNSD, k_BGTD, v_BGTD = (t.permute(1, 2, 0, 3) for t in (q_SBND, k_TBGD, v_TBGD))
    queries = q_BNSD.shape[1] // k_BGTD.shape[1]
    if queries > 1 and q_SBND.is_cuda and not (sight.mask is None and q_SBND.dtype in HALF):
        # CUDA's kernel for masks and fp32 knows no groups; without copies torch would make the full score matrix.
        k_BGTD, v_BGTD = (t.repeat_interleave(queries, dim=1) for t in (k_BGTD, v_BGTD))
    grouped = k_BGTD.shape[1] < q_BNSD.shape[1]
    y_BNSD = F.scaled_dot_product_attention(
        q_BNSD, k_BGTD, v_BGTD, sight.mask, is_causal=sight.mask is None, enable_gqa=grouped
    )
    return y_BNSD.permute(2, 0, 1, 3)


def cudnn(q_SBND: Tensor, k_TBGD: Tensor, v_TBGD: Tensor, sight: Sight) -> Tensor:
    """Torch's fused attention by cuDNN where that takes the inputs; masks are left to the others."""
    if sight.mask is not None:
        return sdpa(q_SBND, k_TBGD, v_TBGD, sight)
    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(order, set_priority=True):
        return sdpa(q_SBND, k_TBGD, v_TBGD, sight)


def _cudnn_missing(device: torch.device, dtype: torch.dtype) -> str | None:
    if not half_on_gpu(device, dtype):
        return "cuDNN's attention takes bf16 and fp16 on GPUs"
    q = torch.empty(1, 4, 64, 64, device=device, dtype=dtype)
    k = q[:, :2]
    usable = torch.backends.cuda.can_use_cudnn_attention(torch.backends.cuda.SDPAParams(q, k, k, None, 0.0, True, True))
    return None if usable else "cuDNN's attention does not run here"


def _flash_missing(device: torch.device, dtype: torch.dtype) -> str | None:
    if not half_on_gpu(device, dtype):
        return "flash-attn takes bf16 and fp16 on GPUs"
    return not_installed("flash_attn")


def _flash() -> Attention:
    """The flash-attn package (version 2), with documents as sequences of their own."""
    package: Any = importlib.import_module("flash_attn")

    def flash_attn(q_SBND: Tensor, k_TBGD: Tensor, v_TBGD: Tensor, sight: Sight) -> Tensor:
        if sight.first_query > 0:
            return sdpa(q_SBND, k_TBGD, v_TBGD, sight)
        q, k, v = (t.transpose(0, 1) for t in (q_SBND, k_TBGD, v_TBGD))
        options = {
            "causal": True,
            "window_size": (-1, -1) if sight.window is None else (sight.window - 1, 0),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
        }
        if sight.documents is None:
            y: Tensor = package.flash_attn_func(q, k, v, **options)
            return y.transpose(0, 1)
        ends, longest = sight.boundaries, q.shape[1]
        flat = (t.flatten(0, 1) for t in (q, k, v))
        y = package.flash_attn_varlen_func(*flat, ends, ends, longest, longest, **options)
        return y.unflatten(0, q.shape[:2]).transpose(0, 1)

    return flash_attn


def _trials() -> Sequence[Trial]:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(32, 2, 4, 64, generator=generator, dtype=torch.float64)
    k, v = torch.randn(2, 32, 2, 2, 64, generator=generator, dtype=torch.float64)
    documents = torch.tensor([[0] * 10 + [1] * 22, [0] * 32])

    def trial(window: int | None, documents: Tensor | None) -> Trial:
        def run(f: Attention, t: Sequence[Tensor]) -> Sequence[Tensor]:
            parts = None if documents is None else documents.to(t[0].device)
            return (f(t[0], t[1], t[2], Sight(32, t[0].device, window, parts)),)

        return Trial(run, (q, k, v))

    return [trial(window, parts) for parts in (None, documents) for window in (None, 7)]


ATTENTION = Operation(
    {
        "flash_attn": Candidate(_flash, _flash_missing),
        "cudnn": Candidate(lambda: cudnn, _cudnn_missing, deterministic=False),
        "torch": Candidate(lambda: sdpa),
    },
    _trials,
)
