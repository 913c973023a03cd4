"""Largest attention logit: a sign of instability that fused kernels do not expose.

Shapes: S sequence, B batch, G this rank's key/value heads, N this rank's query heads, D channels of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.kernels.attention import attention_mask

BLOCK = 1 << 25
"""Logits computed at a time: 128 MiB of fp32."""


@torch.no_grad()
def largest_logit(q_SBND: Tensor, k_SBGD: Tensor, window: int | None, documents_BS: Tensor | None) -> Tensor:
    """Return the largest ``q k / sqrt(D)`` over all pairs that the mask permits, 0-d, in at least fp32.

    Works on blocks of queries, so the S x S matrix is never stored.

    Args:
        q_SBND: queries.
        k_SBGD: keys; query heads ``i N/G`` to ``(i+1) N/G`` attend to key head ``i``.
        window: tokens that a query attends to, itself included; None for all before it.
        documents_BS: as in :class:`~megatron.parallel.microbatch.MicroBatch`.
    """
    s, b, n, d = q_SBND.shape
    dtype = torch.promote_types(q_SBND.dtype, torch.float32)
    q_BGXSD = q_SBND.unflatten(2, (k_SBGD.shape[2], -1)).permute(1, 2, 3, 0, 4)
    k_BGDS = k_SBGD.permute(1, 2, 3, 0).to(dtype)
    largest = torch.full((), -torch.inf, dtype=dtype, device=q_SBND.device)
    step = max(1, BLOCK // (b * n * s))
    for start in range(0, s, step):
        stop = min(start + step, s)
        documents = None if documents_BS is None else documents_BS[:, :stop]
        mask = attention_mask(stop, window, documents, q_SBND.device, first_query=start)
        rows = q_BGXSD[..., start:stop, :].to(dtype).flatten(2, 3)
        logits = rows.matmul(k_BGDS[..., :stop]).view(b, n, stop - start, stop)
        largest = torch.maximum(largest, logits.masked_fill_(~mask, -torch.inf).amax())
    return largest * d**-0.5
