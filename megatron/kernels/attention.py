"""Core attention without dropout: softmax of scaled scores, times values.

Shapes: S queries, T keys, B batch, N query heads, G key/value heads (N a multiple of G), D channels of a head, which
may differ between keys and values.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention, can_use_flash_attention

from megatron.config.attention_pattern import CAUSAL, AttentionPattern
from megatron.kernels.attention_mask import PLAIN_SCORES, AttentionKernel, AttentionMask, AttentionScores
from megatron.kernels.block_attention import FLEX_BLOCK, block_attention, cudnn_is_fast
from megatron.kernels.compile import compiler_missing
from megatron.kernels.operation import HALF_DTYPES, Candidate, KernelCheck, Operation, half_on_gpu, missing_modules


def sdpa(
    q_SBND: Tensor, k_TBGD: Tensor, v_TBGD: Tensor, mask: AttentionMask, scores: AttentionScores = PLAIN_SCORES
) -> Tensor:
    """Compute plain causal attention with SDPA (without cuDNN, see :func:`cudnn`), any other tile by tile.

    Where keys and values differ in width SDPA would store the full score matrix.
    """
    if not (mask.is_causal and scores.plain and k_TBGD.shape[3] == v_TBGD.shape[3]):
        return block_attention(q_SBND, k_TBGD, v_TBGD, mask, scores=scores)
    q_BNSD, k_BGTD, v_BGTD = (t.permute(1, 2, 0, 3) for t in (q_SBND, k_TBGD, v_TBGD))
    queries = q_BNSD.shape[1] // k_BGTD.shape[1]
    if queries > 1 and q_SBND.is_cuda and q_SBND.dtype not in HALF_DTYPES:
        # CUDA's kernel for fp32 lacks GQA; without copies torch would store the full score matrix.
        k_BGTD, v_BGTD = (t.repeat_interleave(queries, dim=1) for t in (k_BGTD, v_BGTD))
    grouped = k_BGTD.shape[1] < q_BNSD.shape[1]
    enabled = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)  # takes 1 us, sdpa_kernel() 25
    try:
        y_BNSD = F.scaled_dot_product_attention(
            q_BNSD, k_BGTD, v_BGTD, is_causal=True, scale=scores.scale, enable_gqa=grouped
        )
    finally:
        torch.backends.cuda.enable_cudnn_sdp(enabled)
    return y_BNSD.permute(2, 0, 1, 3)


def cudnn(
    q_SBND: Tensor, k_TBGD: Tensor, v_TBGD: Tensor, mask: AttentionMask, scores: AttentionScores = PLAIN_SCORES
) -> Tensor:
    """Compute plain causal attention with cuDNN, by the operator that SDPA calls when it picks cuDNN."""
    q_BNSD, k_BGSD, v_BGSD = (t.permute(1, 2, 0, 3) for t in (q_SBND, k_TBGD, v_TBGD))
    y_BNSD = torch._scaled_dot_product_cudnn_attention(
        q_BNSD, k_BGSD, v_BGSD, None, True, 0.0, True, scale=scores.scale
    )[0]
    return y_BNSD.permute(2, 0, 1, 3)


def _cudnn_covers(
    q_SBND: Tensor, k_TBGD: Tensor, v_TBGD: Tensor, mask: AttentionMask, scores: AttentionScores = PLAIN_SCORES
) -> bool:
    """Return True for plain causal attention in training.

    Masks are left to others because their gradients can be NaN (https://github.com/pytorch/pytorch/issues/196678), and
    inference because cuDNN builds a plan for every new length.
    """
    trained = mask.is_causal and scores.plain and torch.is_grad_enabled()
    return trained and _can_use(can_use_cudnn_attention, q_SBND, v_TBGD.shape[3])


FlashKernel = Callable[[Tensor, Tensor, Tensor, Tensor | None, tuple[int, int], int, AttentionScores], Tensor]
"""``flash(q, k, v, boundaries, longest, window, scores) -> y`` for tensors ``[batch, sequence, heads, channels]``.

With the boundaries of documents they are ``[tokens, heads, channels]``. ``longest`` are the largest numbers of queries
and of keys, ``window`` is the number of visible tokens before a query, or -1 for all.
"""


def _flash_attention(flash: FlashKernel) -> AttentionKernel:
    """Return the attention of a FlashAttention kernel; documents become separate sequences."""

    def attention(
        q_SBND: Tensor, k_TBGD: Tensor, v_TBGD: Tensor, mask: AttentionMask, scores: AttentionScores = PLAIN_SCORES
    ) -> Tensor:
        q, k, v = (t.transpose(0, 1) for t in (q_SBND, k_TBGD, v_TBGD))
        longest, window = (q.shape[1], k.shape[1]), -1 if mask.pattern.window is None else mask.pattern.window - 1
        if mask.documents is None:
            return flash(q, k, v, None, longest, window, scores).transpose(0, 1)
        flat_q, flat_k, flat_v = (t.flatten(0, 1) for t in (q, k, v))
        y = flash(flat_q, flat_k, flat_v, mask.boundaries, longest, window, scores)
        return y.unflatten(0, q.shape[:2]).transpose(0, 1)

    return attention


def _flash_covers(
    q_SBND: Tensor, k_TBGD: Tensor, v_TBGD: Tensor, mask: AttentionMask, scores: AttentionScores = PLAIN_SCORES
) -> bool:
    shape_fits = (
        q_SBND.shape[3] == v_TBGD.shape[3] <= 256
        and scores.sink is None
        and (mask.queries_end_keys if mask.documents is None else mask.aligned)
    )
    return shape_fits and mask.pattern.only_window


def _flash_attn() -> AttentionKernel:
    """Load the flash-attn package (version 2)."""
    package: Any = importlib.import_module("flash_attn")

    def flash(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        boundaries: Tensor | None,
        longest: tuple[int, int],
        window: int,
        scores: AttentionScores,
    ) -> Tensor:
        options = {
            "softmax_scale": scores.scale,
            **({} if scores.softcap is None else {"softcap": scores.softcap}),  # since version 2.6
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
    q: Tensor,
    k: Tensor,
    v: Tensor,
    boundaries: Tensor | None,
    longest: tuple[int, int],
    window: int,
    scores: AttentionScores,
) -> Tensor:
    """Call PyTorch's FlashAttention 2 by the operator behind SDPA and :func:`torch.nn.attention.varlen.varlen_attn`.

    The former takes no window. The latter takes ten times as long on the host, needs copies of samples, and its
    arguments differ between releases.
    """
    y: Tensor = torch.ops.aten._flash_attention_forward(
        q, k, v, boundaries, boundaries, *longest, 0.0, True, False, scale=scores.scale, window_size_left=window
    )[0]
    return y


def _varlen_covers(
    q_SBND: Tensor, k_TBGD: Tensor, v_TBGD: Tensor, mask: AttentionMask, scores: AttentionScores = PLAIN_SCORES
) -> bool:
    shape_fits = q_SBND.shape[3] % 8 == 0 and _flash_covers(q_SBND, k_TBGD, v_TBGD, mask, scores)
    return shape_fits and scores.plain and _can_use(can_use_flash_attention, q_SBND, v_TBGD.shape[3])


def _flex() -> AttentionKernel:
    from megatron.kernels.flex_attention import make  # imports torch's compiler

    return make()


FLEX_LONGEST = 1 << 18
"""Most keys of FlexAttention: its tables then take 64 MiB per sample."""


def _flex_covers(
    q_SBND: Tensor, k_TBGD: Tensor, v_TBGD: Tensor, mask: AttentionMask, scores: AttentionScores = PLAIN_SCORES
) -> bool:
    """Return True for patterns that FlashAttention has no option for, and for capped scores.

    In inference lengths are whole blocks, as they are in evaluation: each length of generation would be compiled. Very
    long sequences are left to bands, because the tables of blocks grow with the square of the length.
    """
    widths = q_SBND.shape[3], v_TBGD.shape[3]
    shape_fits = min(widths) >= 16 and max(widths) <= 256 and k_TBGD.shape[0] <= FLEX_LONGEST and scores.sink is None
    shape_fits = shape_fits and (torch.is_grad_enabled() or q_SBND.shape[0] % FLEX_BLOCK == 0)
    needed = not mask.pattern.only_window or scores.softcap is not None
    return shape_fits and needed and (mask.aligned or mask.queries_end_keys)


def _flex_missing(device: torch.device, dtype: torch.dtype) -> str | None:
    return (
        compiler_missing(device, dtype) if half_on_gpu(device, dtype) else "FlexAttention needs bf16 or fp16 on a GPU"
    )


def _can_use(kernel: Callable[[SDPAParams], bool], q_SBND: Tensor, value_width: int) -> bool:
    """Return True if SDPA could call a kernel on this GPU with these queries, as many keys, and values.

    Limits of the numbers of keys and of key heads are those of SDPA, not of the kernels that are called here.
    """
    q_BNSD = q_SBND.permute(1, 2, 0, 3)
    v_BNSD = q_BNSD
    if value_width != q_BNSD.shape[3]:
        v_BNSD = q_BNSD.new_empty(value_width).expand(*q_BNSD.shape[:3], value_width)
    return kernel(SDPAParams(q_BNSD, q_BNSD, v_BNSD, None, 0.0, True, False))


def _missing(kernel: str, can_use: Callable[[SDPAParams], bool]) -> Callable[[torch.device, torch.dtype], str | None]:
    def missing(device: torch.device, dtype: torch.dtype) -> str | None:
        if not half_on_gpu(device, dtype):
            return f"{kernel} needs bf16 or fp16 on a GPU"
        usable = _can_use(can_use, torch.empty(64, 1, 4, 64, device=device, dtype=dtype), 64)
        return None if usable else f"{kernel} is not available on this GPU"

    return missing


def _flash_attn_missing(device: torch.device, dtype: torch.dtype) -> str | None:
    if not half_on_gpu(device, dtype):
        return "flash-attn needs bf16 or fp16 on a GPU"
    return missing_modules("flash_attn")


def _checks() -> Sequence[KernelCheck]:
    """Return calls with plain, windowed and document masks, cached keys, a pattern of all kinds, and capped scores.

    They are longer than a kernel's blocks.
    """
    length = 160
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(length, 2, 4, 64, generator=generator, dtype=torch.float64)
    k, v = torch.randn(2, length, 2, 2, 64, generator=generator, dtype=torch.float64)
    two_documents = torch.tensor([[0] * 10 + [1] * (length - 10), [0] * length])

    def check(
        pattern: AttentionPattern,
        documents: Tensor | None,
        first_query: int = 0,
        scores: AttentionScores = PLAIN_SCORES,
    ) -> KernelCheck:
        def run(f: AttentionKernel, t: Sequence[Tensor]) -> Sequence[Tensor]:
            parts = None if documents is None else documents.to(t[0].device)
            mask = AttentionMask.of_sequence(length, t[0].device, pattern, parts, first_query)
            sink = None if scores.sink is None else scores.sink.to(t[0])
            return (f(t[0], t[1], t[2], mask, replace(scores, sink=sink)),)

        return KernelCheck(run, (q[first_query:], k, v))

    patterns = CAUSAL, AttentionPattern(window=7)
    whole = [check(pattern, parts) for parts in (None, two_documents) for pattern in patterns]
    cached = [check(pattern, None, length - 3) for pattern in patterns]
    every = AttentionPattern(window=70, dilation=3, chunk=100, first=2, prefix=5)
    others = (
        AttentionScores(scale=0.3),
        AttentionScores(scale=0.3, softcap=2.0),
        AttentionScores(sink=2.0 * q[0, 0, :, 0]),
    )
    changed = [check(CAUSAL, None, 0, scores) for scores in others]
    return [*whole, *cached, check(every, two_documents), check(every, None, 10), *changed]


ATTENTION = Operation(
    {
        "cudnn": Candidate(
            lambda: cudnn,
            _missing("cuDNN attention", can_use_cudnn_attention),
            deterministic=False,
            fast=cudnn_is_fast,
            covers=_cudnn_covers,
        ),
        "flash_attn": Candidate(_flash_attn, _flash_attn_missing, covers=_flash_covers),
        "varlen": Candidate(
            lambda: _flash_attention(_varlen),
            _missing("FlashAttention of PyTorch", can_use_flash_attention),
            covers=_varlen_covers,
        ),
        "flex": Candidate(_flex, _flex_missing, covers=_flex_covers),
        "torch": Candidate(lambda: sdpa),
    },
    _checks,
)
