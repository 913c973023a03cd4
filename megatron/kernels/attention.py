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
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention, can_use_flash_attention

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
    def queries_end_keys(self) -> bool:
        """True if the queries are the last of the keys: all of them, or new tokens after cached ones."""
        return len(self.queries) == len(self.keys) == 1 and (
            self.keys[0].start <= self.queries[0].start and self.queries[0].stop == self.keys[0].stop
        )

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
    """Compute attention with SDPA, which picks among PyTorch's kernels other than cuDNN (see :func:`cudnn`)."""
    q_BNSD, k_BGTD, v_BGTD = (t.permute(1, 2, 0, 3) for t in (q_SBND, k_TBGD, v_TBGD))
    queries = q_BNSD.shape[1] // k_BGTD.shape[1]
    if queries > 1 and q_SBND.is_cuda and not (mask.is_causal and q_SBND.dtype in HALF_DTYPES):
        # CUDA's kernel for masks and fp32 lacks GQA; without copies torch would store the full score matrix.
        k_BGTD, v_BGTD = (t.repeat_interleave(queries, dim=1) for t in (k_BGTD, v_BGTD))
    grouped = k_BGTD.shape[1] < q_BNSD.shape[1]
    dense = None if mask.is_causal else mask.dense
    enabled = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)  # takes 1 us, sdpa_kernel() 25
    try:
        y_BNSD = F.scaled_dot_product_attention(
            q_BNSD, k_BGTD, v_BGTD, dense, is_causal=mask.is_causal, enable_gqa=grouped
        )
    finally:
        torch.backends.cuda.enable_cudnn_sdp(enabled)
    return y_BNSD.permute(2, 0, 1, 3)


def cudnn(q_SBND: Tensor, k_TBGD: Tensor, v_TBGD: Tensor, mask: AttentionMask) -> Tensor:
    """Compute plain causal attention with cuDNN, by the operator that SDPA calls when it picks cuDNN."""
    q_BNSD, k_BGSD, v_BGSD = (t.permute(1, 2, 0, 3) for t in (q_SBND, k_TBGD, v_TBGD))
    y_BNSD = torch._scaled_dot_product_cudnn_attention(q_BNSD, k_BGSD, v_BGSD, None, True, 0.0, True)[0]
    return y_BNSD.permute(2, 0, 1, 3)


def _cudnn_covers(q_SBND: Tensor, k_TBGD: Tensor, v_TBGD: Tensor, mask: AttentionMask) -> bool:
    """Return True for plain causal attention in training.

    Masks are left to others because their gradients can be NaN (https://github.com/pytorch/pytorch/issues/196678), and
    inference because cuDNN builds a plan for every new length.
    """
    return mask.is_causal and torch.is_grad_enabled() and _can_use(can_use_cudnn_attention, q_SBND)


def _cudnn_fast(device: torch.device) -> bool:
    """Return True for Hopper and data-centre Blackwell.

    Elsewhere FlashAttention 2 is as fast or faster (https://github.com/huggingface/transformers/pull/48163).
    """
    return torch.cuda.get_device_capability(device)[0] in (9, 10)


FlashKernel = Callable[[Tensor, Tensor, Tensor, Tensor | None, tuple[int, int], int], Tensor]
"""``flash(q, k, v, boundaries, longest, window) -> y`` for tensors ``[batch, sequence, heads, channels]``.

With the boundaries of documents they are ``[tokens, heads, channels]``. ``longest`` are the largest numbers of queries
and of keys, ``window`` is the number of visible tokens before a query, or -1 for all.
"""


def _flash_attention(flash: FlashKernel) -> AttentionKernel:
    """Return the attention of a FlashAttention kernel; documents become separate sequences."""

    def attention(q_SBND: Tensor, k_TBGD: Tensor, v_TBGD: Tensor, mask: AttentionMask) -> Tensor:
        q, k, v = (t.transpose(0, 1) for t in (q_SBND, k_TBGD, v_TBGD))
        longest, window = (q.shape[1], k.shape[1]), -1 if mask.window is None else mask.window - 1
        if mask.key_documents is None:
            return flash(q, k, v, None, longest, window).transpose(0, 1)
        flat_q, flat_k, flat_v = (t.flatten(0, 1) for t in (q, k, v))
        y = flash(flat_q, flat_k, flat_v, mask.boundaries, longest, window)
        return y.unflatten(0, q.shape[:2]).transpose(0, 1)

    return attention


def _flash_covers(q_SBND: Tensor, k_TBGD: Tensor, v_TBGD: Tensor, mask: AttentionMask) -> bool:
    return q_SBND.shape[3] <= 256 and (mask.queries_end_keys if mask.key_documents is None else mask.aligned)


def _flash_attn() -> AttentionKernel:
    """Load the flash-attn package (version 2)."""
    package: Any = importlib.import_module("flash_attn")

    def flash(
        q: Tensor, k: Tensor, v: Tensor, boundaries: Tensor | None, longest: tuple[int, int], window: int
    ) -> Tensor:
        options = {
            "causal": True,
            "window_size": (window, 0),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
        }
        if boundaries is None:
            y: Tensor = package.flash_attn_func(q, k, v, **options)
        else:
            y = package.flash_attn_varlen_func(q, k, v, boundaries, boundaries, *longest, **options)
        return y

    return _flash_attention(flash)


def _varlen(
    q: Tensor, k: Tensor, v: Tensor, boundaries: Tensor | None, longest: tuple[int, int], window: int
) -> Tensor:
    """Call PyTorch's FlashAttention 2 by the operator behind SDPA and :func:`torch.nn.attention.varlen.varlen_attn`.

    The former takes no window. The latter takes ten times as long on the host, needs copies of samples, and its
    arguments differ between releases.
    """
    y: Tensor = torch.ops.aten._flash_attention_forward(
        q, k, v, boundaries, boundaries, *longest, 0.0, True, False, window_size_left=window
    )[0]
    return y


def _varlen_covers(q_SBND: Tensor, k_TBGD: Tensor, v_TBGD: Tensor, mask: AttentionMask) -> bool:
    shape_fits = q_SBND.shape[3] % 8 == 0 and _flash_covers(q_SBND, k_TBGD, v_TBGD, mask)
    return shape_fits and _can_use(can_use_flash_attention, q_SBND)


def _can_use(kernel: Callable[[SDPAParams], bool], q_SBND: Tensor) -> bool:
    """Return True if SDPA could call a kernel on this GPU with these queries and as many keys.

    Limits of the numbers of keys and of key heads are those of SDPA, not of the kernels that are called here.
    """
    q_BNSD = q_SBND.permute(1, 2, 0, 3)
    return kernel(SDPAParams(q_BNSD, q_BNSD, q_BNSD, None, 0.0, True, False))


def _missing(kernel: str, can_use: Callable[[SDPAParams], bool]) -> Callable[[torch.device, torch.dtype], str | None]:
    def missing(device: torch.device, dtype: torch.dtype) -> str | None:
        if not half_on_gpu(device, dtype):
            return f"{kernel} needs bf16 or fp16 on a GPU"
        usable = _can_use(can_use, torch.empty(64, 1, 4, 64, device=device, dtype=dtype))
        return None if usable else f"{kernel} is not available on this GPU"

    return missing


def _flash_attn_missing(device: torch.device, dtype: torch.dtype) -> str | None:
    if not half_on_gpu(device, dtype):
        return "flash-attn needs bf16 or fp16 on a GPU"
    return missing_modules("flash_attn")


def _checks() -> Sequence[KernelCheck]:
    """Return calls with plain, windowed and document masks, and with cached keys; longer than a kernel's blocks."""
    length = 160
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(length, 2, 4, 64, generator=generator, dtype=torch.float64)
    k, v = torch.randn(2, length, 2, 2, 64, generator=generator, dtype=torch.float64)
    two_documents = torch.tensor([[0] * 10 + [1] * (length - 10), [0] * length])

    def check(window: int | None, documents: Tensor | None, first_query: int = 0) -> KernelCheck:
        def run(f: AttentionKernel, t: Sequence[Tensor]) -> Sequence[Tensor]:
            parts = None if documents is None else documents.to(t[0].device)
            mask = AttentionMask.of_sequence(length, t[0].device, window, parts, first_query)
            return (f(t[0], t[1], t[2], mask),)

        return KernelCheck(run, (q[first_query:], k, v))

    whole = [check(window, parts) for parts in (None, two_documents) for window in (None, 7)]
    return [*whole, check(None, None, length - 3), check(7, None, length - 3)]


ATTENTION = Operation(
    {
        "cudnn": Candidate(
            lambda: cudnn,
            _missing("cuDNN attention", can_use_cudnn_attention),
            deterministic=False,
            fast=_cudnn_fast,
            covers=_cudnn_covers,
        ),
        "flash_attn": Candidate(_flash_attn, _flash_attn_missing, covers=_flash_covers),
        "varlen": Candidate(
            lambda: _flash_attention(_varlen),
            _missing("FlashAttention of PyTorch", can_use_flash_attention),
            covers=_varlen_covers,
        ),
        "torch": Candidate(lambda: sdpa),
    },
    _checks,
)
