"""FlexAttention: attention by a compiled kernel that skips the empty blocks of any mask."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from megatron.config.attention_pattern import AttentionPattern
from megatron.kernels.attention_mask import (
    FULL,
    PARTIAL,
    PLAIN_SCORES,
    TRIANGLE,
    AttentionKernel,
    AttentionMask,
    AttentionScores,
)
from megatron.kernels.block_attention import FLEX_BLOCK
from megatron.kernels.compile import compiled


def make() -> AttentionKernel:
    """Return the attention kernel, which is compiled once per pattern and shape."""
    kernel = compiled(_attend)()

    def attention(
        q_SBND: Tensor, k_TBGD: Tensor, v_TBGD: Tensor, mask: AttentionMask, scores: AttentionScores = PLAIN_SCORES
    ) -> Tensor:
        q_BNSD, k_BGTD, v_BGTD = (t.permute(1, 2, 0, 3) for t in (q_SBND, k_TBGD, v_TBGD))
        y_BNSD: Tensor = kernel(q_BNSD, k_BGTD, v_BGTD, block_mask(mask), scores.scale, _cap(scores.softcap))
        return y_BNSD.permute(2, 0, 1, 3)

    return attention


ScoreModifier = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def _attend(
    q_BNSD: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    blocks: BlockMask,
    scale: float | None,
    modifier: ScoreModifier | None,
) -> Any:
    grouped = k_BGTD.shape[1] < q_BNSD.shape[1]
    return flex_attention(q_BNSD, k_BGTD, v_BGTD, modifier, blocks, scale, grouped)


@lru_cache
def _cap(softcap: float | None) -> ScoreModifier | None:
    """Return the function that caps scores; the same object for the same cap, so that nothing is compiled again."""
    if softcap is None:
        return None

    def capped(score: Tensor, sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return capped


def block_mask(mask: AttentionMask) -> BlockMask:
    """Return the mask in blocks: kept across steps if it depends on positions only, otherwise by the micro-batch."""
    if mask.documents is None:
        return _by_position(mask.pattern, mask.queries[0], mask.keys[0], mask.device)
    key = "flex", mask.queries, mask.keys
    if key not in mask.cache:
        mask.cache[key] = _blocks_of(mask)
    blocks: BlockMask = mask.cache[key]
    return blocks


@lru_cache(maxsize=32)
def _by_position(pattern: AttentionPattern, queries: range, keys: range, device: torch.device) -> BlockMask:
    return _blocks_of(AttentionMask((queries,), (keys,), device, pattern))


def _blocks_of(mask: AttentionMask) -> BlockMask:
    (queries,), (keys,) = mask.queries, mask.keys
    pattern, documents, starts = mask.pattern, mask.documents, mask.starts
    first_query, first_key = queries.start, keys.start

    def allows(sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Any:
        at, of = query + first_query, key + first_key
        first = 0 if starts is None else starts[sample, at]
        seen = pattern.allows(at - first, of - first)
        return seen if documents is None else seen & (documents[sample, at] == documents[sample, of])

    blocks = (tuple(r[i : i + FLEX_BLOCK] for i in range(0, len(r), FLEX_BLOCK)) for r in (queries, keys))
    host = torch.from_numpy(mask.block_kinds(*blocks)).contiguous()  # the kernels ignore strides of the block mask
    kinds = (host.pin_memory() if mask.device.type == "cuda" else host).to(mask.device, non_blocking=True).unsqueeze(1)

    def ordered(chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Return how many blocks of each row are chosen, and all of them, these first."""
        return chosen.sum(-1, dtype=torch.int32), chosen.int().argsort(dim=-1, descending=True, stable=True).int()

    some, full = ordered((kinds == PARTIAL) | (kinds == TRIANGLE)), ordered(kinds == FULL)
    return BlockMask.from_kv_blocks(*some, *full, FLEX_BLOCK, allows, (len(queries), len(keys)))
