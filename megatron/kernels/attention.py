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


@dataclass(frozen=True)
class AttentionMask:
    """Causal attention mask, optionally limited to a sliding window and to documents.

    It knows the positions of queries and keys in the sequence, so it is right for any part of it: new tokens after
    cached ones, or the queries of one context-parallel rank and the keys of another.
    Kernels that need no explicit mask read the fields; the others take :attr:`dense`.
    """

    # Positions of the queries and of the keys in the sequence: consecutive ranges, in the order of the rows.
    queries: tuple[range, ...]
    keys: tuple[range, ...]
    device: torch.device
    # Tokens that a query attends to, itself included; None for all before it.
    window: int | None = None
    # int64 [B, S] and [B, T]: documents of queries and keys, in runs of equal ids; None where every sample is one
    # document.
    query_documents: Tensor | None = None
    key_documents: Tensor | None = None
    # The value of :attr:`boundaries`, if known in advance.
    known_boundaries: Tensor | None = None

    @classmethod
    def of_sequence(
        cls,
        length: int,
        device: torch.device,
        window: int | None = None,
        documents: Tensor | None = None,
        first_query: int = 0,
        known_boundaries: Tensor | None = None,
    ) -> AttentionMask:
        """Return the mask of a whole sequence: keys are all its tokens, queries those from ``first_query`` on.

        Args:
            length: tokens of the sequence.
            device: of the mask.
            window: tokens that a query attends to, itself included; None for all before it.
            documents: int64 ``[B, length]``, as in :class:`~megatron.distributed.micro_batch.MicroBatch`.
            first_query: position of the first query.
            known_boundaries: starts of the documents, if known in advance.
        """
        query_documents = None if documents is None else documents[:, first_query:]
        queries, keys = (range(first_query, length),), (range(length),)
        return cls(queries, keys, device, window, query_documents, documents, known_boundaries)

    @property
    def aligned(self) -> bool:
        """True if queries and keys are the same consecutive tokens."""
        return len(self.keys) == 1 and self.queries == self.keys

    @property
    def is_causal(self) -> bool:
        """True for the plain causal mask, for which kernels need no tensor."""
        return self.aligned and self.window is None and self.key_documents is None

    @cached_property
    def query_positions(self) -> Tensor:
        """Positions of the queries, int64 ``[S]``."""
        return self._positions(self.queries)

    @cached_property
    def key_positions(self) -> Tensor:
        """Positions of the keys, int64 ``[T]``."""
        return self._positions(self.keys)

    def _positions(self, ranges: tuple[range, ...]) -> Tensor:
        return torch.cat([torch.arange(r.start, r.stop, device=self.device) for r in ranges])

    @cached_property
    def dense(self) -> Tensor:
        """Boolean mask ``[B or 1, 1, S, T]``, True where a query attends to a key. Made on first use: may be large."""
        query_S1, key_T = self.query_positions.unsqueeze(1), self.key_positions
        mask_ST = key_T <= query_S1
        if self.window is not None:
            mask_ST &= key_T > query_S1 - self.window
        if self.query_documents is None or self.key_documents is None:
            return mask_ST[None, None]
        same_document = self.query_documents[:, None, :, None] == self.key_documents[:, None, None, :]
        return same_document.logical_and_(mask_ST)

    @cached_property
    def boundaries(self) -> Tensor:
        """Starts of the documents in the concatenated samples, and the end of the last: int32 ``[documents + 1]``.

        Unless known in advance, synchronises host and device once per micro-batch, because the shape depends on data.
        """
        if self.known_boundaries is not None:
            return self.known_boundaries
        documents_BT = self.key_documents
        if documents_BT is None:
            raise ValueError("there are no documents")
        starts_BT = torch.ones_like(documents_BT, dtype=torch.bool)
        starts_BT[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
        end = torch.full((1,), starts_BT.numel(), device=starts_BT.device)
        return torch.cat((starts_BT.flatten().nonzero().flatten(), end)).int()


AttentionKernel = Callable[[Tensor, Tensor, Tensor, AttentionMask], Tensor]
"""``attention(q_SBND, k_TBGD, v_TBGD, mask) -> y_SBND``."""


def sdpa(q_SBND: Tensor, k_TBGD: Tensor, v_TBGD: Tensor, mask: AttentionMask) -> Tensor:
    """Compute attention with SDPA, which picks among PyTorch's kernels."""
    q_BNSD, k_BGTD, v_BGTD = (t.permute(1, 2, 0, 3) for t in (q_SBND, k_TBGD, v_TBGD))
    queries = q_BNSD.shape[1] // k_BGTD.shape[1]
    if queries > 1 and q_SBND.is_cuda and not (mask.is_causal and q_SBND.dtype in HALF_DTYPES):
        # CUDA's kernel for masks and fp32 lacks GQA; without copies torch would store the full score matrix.
        k_BGTD, v_BGTD = (t.repeat_interleave(queries, dim=1) for t in (k_BGTD, v_BGTD))
    grouped = k_BGTD.shape[1] < q_BNSD.shape[1]
    dense = None if mask.is_causal else mask.dense
    y_BNSD = F.scaled_dot_product_attention(q_BNSD, k_BGTD, v_BGTD, dense, is_causal=mask.is_causal, enable_gqa=grouped)
    return y_BNSD.permute(2, 0, 1, 3)


def cudnn(q_SBND: Tensor, k_TBGD: Tensor, v_TBGD: Tensor, mask: AttentionMask) -> Tensor:
    """Compute attention with cuDNN where it supports the inputs; dense masks go to :func:`sdpa`."""
    if not mask.is_causal:
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
        if not mask.aligned:
            return sdpa(q_SBND, k_TBGD, v_TBGD, mask)
        q, k, v = (t.transpose(0, 1) for t in (q_SBND, k_TBGD, v_TBGD))
        options = {
            "causal": True,
            "window_size": (-1, -1) if mask.window is None else (mask.window - 1, 0),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
        }
        if mask.key_documents is None:
            y: Tensor = package.flash_attn_func(q, k, v, **options)
            return y.transpose(0, 1)
        ends, longest = mask.boundaries, q.shape[1]
        flat = (t.flatten(0, 1) for t in (q, k, v))
        y = package.flash_attn_varlen_func(*flat, ends, ends, longest, longest, **options)
        return y.unflatten(0, q.shape[:2]).transpose(0, 1)

    return flash_attn


def _checks() -> Sequence[KernelCheck]:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(32, 2, 4, 64, generator=generator, dtype=torch.float64)
    k, v = torch.randn(2, 32, 2, 2, 64, generator=generator, dtype=torch.float64)
    documents = torch.tensor([[0] * 10 + [1] * 22, [0] * 32])

    def check(window: int | None, documents: Tensor | None) -> KernelCheck:
        def run(f: AttentionKernel, t: Sequence[Tensor]) -> Sequence[Tensor]:
            parts = None if documents is None else documents.to(t[0].device)
            return (f(t[0], t[1], t[2], AttentionMask.of_sequence(32, t[0].device, window, parts)),)

        return KernelCheck(run, (q, k, v))

    return [check(window, parts) for parts in (None, documents) for window in (None, 7)]


ATTENTION = Operation(
    {
        "flash_attn": Candidate(_flash, _flash_missing),
        "cudnn": Candidate(lambda: cudnn, _cudnn_missing, deterministic=False),
        "torch": Candidate(lambda: sdpa),
    },
    _checks,
)
