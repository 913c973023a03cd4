"""Core attention without dropout: softmax of scaled scores, times values.

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

from megatron.kernels.operation import HALF_DTYPES, Candidate, KernelCheck, Operation, half_on_gpu, missing_modules


def make_attention_mask(
    seq_length: int, window: int | None, documents_BS: Tensor | None, device: torch.device, first_query: int = 0
) -> Tensor:
    """Return a boolean mask ``[B or 1, 1, S, T]``: causal, within the sliding window, within the document.

    Keys are all ``seq_length`` tokens, queries those from ``first_query`` on. True where a query attends to a key.
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
class AttentionMask:
    """Causal attention mask, optionally limited to a sliding window and to documents.

    Kernels that need no explicit mask read the fields; the others take :attr:`dense`.
    """

    # Number of keys; the queries are the last of them.
    keys: int
    device: torch.device
    # Tokens that a query attends to, itself included; None for all before it.
    window: int | None = None
    # int64 [B, keys]: document of each token, in runs of equal ids; None where every sample is one document.
    documents: Tensor | None = None
    # Index of the first query among the keys.
    first_query: int = 0
    # The value of :attr:`boundaries`, if known in advance.
    known_boundaries: Tensor | None = None

    @cached_property
    def dense(self) -> Tensor | None:
        """The mask as a boolean tensor, or None for a plain causal mask. Made on first use: it may be large."""
        if self.window is None and self.documents is None and self.first_query == 0:
            return None
        return make_attention_mask(self.keys, self.window, self.documents, self.device, self.first_query)

    @cached_property
    def boundaries(self) -> Tensor:
        """Starts of the documents in the concatenated samples, and the end of the last: int32 ``[documents + 1]``.

        Unless known in advance, synchronises host and device once per micro-batch, because the shape depends on data.
        """
        if self.known_boundaries is not None:
            return self.known_boundaries
        if self.documents is None:
            raise ValueError("there are no documents")
        starts_BS = torch.ones_like(self.documents, dtype=torch.bool)
        starts_BS[:, 1:] = self.documents[:, 1:] != self.documents[:, :-1]
        end = torch.full((1,), starts_BS.numel(), device=starts_BS.device)
        return torch.cat((starts_BS.flatten().nonzero().flatten(), end)).int()


AttentionKernel = Callable[[Tensor, Tensor, Tensor, AttentionMask], Tensor]
"""``attention(q_SBND, k_TBGD, v_TBGD, mask) -> y_SBND``."""


def sdpa(q_SBND: Tensor, k_TBGD: Tensor, v_TBGD: Tensor, mask: AttentionMask) -> Tensor:
    """Compute attention with SDPA, which picks among PyTorch's kernels."""
    q_BNSD, k_BGTD, v_BGTD = (t.permute(1, 2, 0, 3) for t in (q_SBND, k_TBGD, v_TBGD))
    queries = q_BNSD.shape[1] // k_BGTD.shape[1]
    if queries > 1 and q_SBND.is_cuda and not (mask.dense is None and q_SBND.dtype in HALF_DTYPES):
        # CUDA's kernel for masks and fp32 lacks GQA; without copies torch would store the full score matrix.
        k_BGTD, v_BGTD = (t.repeat_interleave(queries, dim=1) for t in (k_BGTD, v_BGTD))
    grouped = k_BGTD.shape[1] < q_BNSD.shape[1]
    y_BNSD = F.scaled_dot_product_attention(
        q_BNSD, k_BGTD, v_BGTD, mask.dense, is_causal=mask.dense is None, enable_gqa=grouped
    )
    return y_BNSD.permute(2, 0, 1, 3)


def cudnn(q_SBND: Tensor, k_TBGD: Tensor, v_TBGD: Tensor, mask: AttentionMask) -> Tensor:
    """Compute attention with cuDNN where it supports the inputs; dense masks go to :func:`sdpa`."""
    if mask.dense is not None:
        return sdpa(q_SBND, k_TBGD, v_TBGD, mask)
    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(order, set_priority=True):
        return sdpa(q_SBND, k_TBGD, v_TBGD, mask)


def _cudnn_missing(device: torch.device, dtype: torch.dtype) -> str | None:
    if not half_on_gpu(device, dtype):
        return "cuDNN attention needs bf16 or fp16 on a GPU"
    q = torch.empty(1, 4, 64, 64, device=device, dtype=dtype)
    k = q[:, :2]
    usable = torch.backends.cuda.can_use_cudnn_attention(torch.backends.cuda.SDPAParams(q, k, k, None, 0.0, True, True))
    return None if usable else "cuDNN attention is not available on this GPU"


def _flash_missing(device: torch.device, dtype: torch.dtype) -> str | None:
    if not half_on_gpu(device, dtype):
        return "flash-attn needs bf16 or fp16 on a GPU"
    return missing_modules("flash_attn")


def _flash() -> AttentionKernel:
    """Load the flash-attn package (version 2); documents become separate sequences."""
    package: Any = importlib.import_module("flash_attn")

    def flash_attn(q_SBND: Tensor, k_TBGD: Tensor, v_TBGD: Tensor, mask: AttentionMask) -> Tensor:
        if mask.first_query > 0:
            return sdpa(q_SBND, k_TBGD, v_TBGD, mask)
        q, k, v = (t.transpose(0, 1) for t in (q_SBND, k_TBGD, v_TBGD))
        options = {
            "causal": True,
            "window_size": (-1, -1) if mask.window is None else (mask.window - 1, 0),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
        }
        if mask.documents is None:
            y: Tensor = package.flash_attn_func(q, k, v, **options)
            return y.transpose(0, 1)
        ends, longest = mask.boundaries, q.shape[1]
        flat = (t.flatten(0, 1) for t in (q, k, v))
        y = package.flash_attn_varlen_func(*flat, ends, ends, longest, longest, **options)
        return y.unflatten(0, q.shape[:2]).transpose(0, 1)

    return flash_attn


def _trials() -> Sequence[KernelCheck]:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(32, 2, 4, 64, generator=generator, dtype=torch.float64)
    k, v = torch.randn(2, 32, 2, 2, 64, generator=generator, dtype=torch.float64)
    documents = torch.tensor([[0] * 10 + [1] * 22, [0] * 32])

    def trial(window: int | None, documents: Tensor | None) -> KernelCheck:
        def run(f: AttentionKernel, t: Sequence[Tensor]) -> Sequence[Tensor]:
            parts = None if documents is None else documents.to(t[0].device)
            return (f(t[0], t[1], t[2], AttentionMask(32, t[0].device, window, parts)),)

        return KernelCheck(run, (q, k, v))

    return [trial(window, parts) for parts in (None, documents) for window in (None, 7)]


ATTENTION = Operation(
    {
        "flash_attn": Candidate(_flash, _flash_missing),
        "cudnn": Candidate(lambda: cudnn, _cudnn_missing, deterministic=False),
        "torch": Candidate(lambda: sdpa),
    },
    _trials,
)
