"""Bands of attention masks, and attention by a double of FlashAttention that computes them. No GPU runs here."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.config.attention_pattern import AttentionPattern
from megatron.kernels import block_attention as tiled
from megatron.kernels.attention_mask import AttentionMask, Ranges

CPU = torch.device("cpu")


class FlashDouble:
    """``aten::_flash_attention_forward`` and ``_backward`` of torch 2.10 to 2.13, windows as FlashAttention 2 has them.

    A window as wide as the keys counts as none, and one that is open on one side ends at the number of keys there.
    """

    def __init__(self) -> None:
        self.calls = 0

    def seen(self, s: int, t: int, causal: bool, left: int) -> Tensor:
        left, right = -1 if left >= t else left, 0 if causal else -1
        if left >= 0 and right < 0:
            right = t
        last = torch.arange(s).view(-1, 1) + t - s
        seen = torch.ones(s, t, dtype=torch.bool)
        if right >= 0:
            seen &= torch.arange(t) <= last + right
        return seen & (torch.arange(t) >= last - left) if left >= 0 else seen

    def forward(
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
    ) -> tuple[Tensor, ...]:
        self.calls += 1
        assert dropout_p == 0.0
        assert not return_debug_mask
        left = -1 if window_size_left is None else window_size_left
        if cum_seq_q is None or cum_seq_k is None:
            assert (max_q, max_k) == (query.shape[1], key.shape[1])
            y, lse = self._attend(query, key, value, self.seen(max_q, max_k, is_causal, left), scale)
            return y, lse, torch.empty(0), torch.empty(0), torch.empty(0)
        ends = cum_seq_q.tolist()
        assert cum_seq_q.dtype == torch.int32
        assert (ends, ends[-1], ends[-1]) == (cum_seq_k.tolist(), query.shape[0], key.shape[0])
        parts = []
        for a, b in zip(ends, ends[1:]):
            assert b - a <= min(max_q, max_k)
            rows = (t[a:b].unsqueeze(0) for t in (query, key, value))
            parts.append(self._attend(*rows, self.seen(b - a, b - a, is_causal, left), scale))
        y, lse = (torch.cat(found, axis) for found, axis in zip(zip(*parts), (1, 2)))
        return y[0], lse[0], torch.empty(0), torch.empty(0), torch.empty(0)

    def backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        cum_seq_q: Tensor | None,
        cum_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        philox_seed: Tensor,
        philox_offset: Tensor,
        *,
        scale: float | None = None,
        window_size_left: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Weights follow ``logsumexp``, which covers more than these keys."""
        assert logsumexp.is_contiguous()
        left, places = -1 if window_size_left is None else window_size_left, [slice(None)]
        tensors = [grad_out, query, key, value, out]
        if cum_seq_q is None:
            lse = logsumexp
        else:
            lse, tensors = logsumexp.unsqueeze(0), [t.unsqueeze(0) for t in tensors]
            ends = cum_seq_q.tolist()
            places = [slice(a, b) for a, b in zip(ends, ends[1:])]
        parts = []
        for rows in places:
            dy, q, k, v, y = (t[:, rows] for t in tensors)
            queries = q.shape[2] // k.shape[2]
            wide_k, wide_v = (t.repeat_interleave(queries, 2) for t in (k, v))
            seen = self.seen(q.shape[1], k.shape[1], is_causal, left)
            factor = scale or q.shape[3] ** -0.5
            scores = torch.einsum("bsnd,btnd->bnst", q, wide_k) * factor
            p = (scores - lse[..., rows].unsqueeze(-1)).exp().masked_fill(~seen, 0.0)
            dp = torch.einsum("bsnd,btnd->bnst", dy, wide_v) - (dy * y).sum(-1).transpose(1, 2).unsqueeze(-1)
            ds = p * dp * factor
            dk, dv = (torch.einsum("bnst,bsnd->btnd", *pair) for pair in ((ds, q), (p, dy)))
            dk, dv = (t.unflatten(2, (k.shape[2], queries)).sum(3) for t in (dk, dv))
            parts.append((torch.einsum("bnst,btnd->bsnd", ds, wide_k), dk, dv))
        dq, dk, dv = (torch.cat(grads, 1) for grads in zip(*parts))
        return (dq, dk, dv) if cum_seq_q is None else (dq[0], dk[0], dv[0])

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
        k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], 2) for t in (k, v))
        factor = scale or q.shape[3] ** -0.5
        scores = (torch.einsum("bsnd,btnd->bnst", q, k) * factor).masked_fill(~seen, -torch.inf)
        lse = scores.logsumexp(-1)
        y = torch.einsum("bnst,btnd->bsnd", (scores - lse.unsqueeze(-1)).exp().nan_to_num(0.0), v)
        return y, lse.masked_fill(lse == -torch.inf, torch.inf)


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> Iterator[FlashDouble]:
    double = FlashDouble()
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", double.forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", double.backward)
    monkeypatch.setattr(tiled, "_flash_covers_tiles", lambda *_: True)
    yield double
    assert double.calls


def random_mask(seed: int, longest: int, samples: int) -> AttentionMask:
    """A mask of ranges in any order, some of them the same for queries and keys."""
    draw = random.Random(seed)
    length = draw.randint(2, longest)

    def ranges() -> Ranges:
        cuts = sorted(draw.sample(range(length + 1), draw.choice([2, 2, min(4, length + 1)])))
        found = [range(*pair) for pair in zip(cuts, cuts[1:])]
        return tuple(draw.sample(found, draw.randint(1, len(found))))

    def maybe(least: int, usual: Any) -> Any:
        return draw.choice([usual, usual, draw.randint(least, length)])

    sizes: dict[str, Any] = {"window": maybe(1, None), "chunk": maybe(1, None), "first": maybe(1, 0)}
    pattern = AttentionPattern(**sizes, prefix=maybe(1, 0), dilation=draw.choice([1, 1, 2, 3]))
    documents = None
    if draw.random() < 0.5:
        ends = [[draw.random() < 0.2 for _ in range(length)] for _ in range(samples)]
        documents = torch.tensor(ends).long().cumsum(1)
    queries = ranges()
    keys = draw.choice([queries, ranges()])
    return AttentionMask(queries, keys, CPU, pattern, documents, restarts=draw.random() < 0.5)


@pytest.mark.parametrize("seed", range(0, 800, 100))
def test_bands_cover_the_mask_once(seed: int) -> None:
    double = FlashDouble()
    for each in range(seed, seed + 100):
        mask = random_mask(each, 40, samples=2)
        dense = mask.dense().expand(2, -1, -1, -1)
        count = torch.zeros(dense.shape, dtype=torch.int64)
        for tile in mask.bands():
            part = count[tile.samples, :, tile.queries, tile.keys]
            ends = [0, part.shape[2]] if tile.boundaries is None else tile.boundaries[0].tolist()
            for a, b in zip(ends, ends[1:]):
                rows = slice(a, b)
                keys = slice(None) if tile.boundaries is None else rows
                part[:, :, rows, keys] += double.seen(b - a, part[:, :, rows, keys].shape[3], tile.causal, tile.left)
        assert torch.equal(count, dense.long()), each


def test_bands_are_few() -> None:
    """Attention of a context-parallel rank to its own keys, to another's and to all; and of packed documents."""
    chunks = (range(2048), range(6144, 8192)), (range(2048, 4096), range(4096, 6144))
    every = (*chunks[0], *chunks[1])
    for pattern, most in {
        AttentionPattern(): (3, 1, 5),
        AttentionPattern(window=300): (2, 1, 3),
        AttentionPattern(chunk=4096): (2, 1, 3),
        AttentionPattern(chunk=512): (8, 0, 8),
        AttentionPattern(window=300, first=4): (5, 1, 6),
        AttentionPattern(prefix=100): (4, 1, 6),
    }.items():
        found = [len(AttentionMask(chunks[0], keys, CPU, pattern).bands()) for keys in (*chunks, every)]
        assert all(count <= limit for count, limit in zip(found, most, strict=True)), (pattern, found)
    documents = (torch.arange(8192) // 50).expand(1, -1)
    assert len(AttentionMask(chunks[0], chunks[0], CPU, documents=documents).bands()) == 1


@pytest.mark.parametrize("seed", range(0, 200, 25))
def test_attention_in_bands_matches_the_dense_mask(flash: FlashDouble, seed: int) -> None:
    """Forward and gradients, in fp64; keys and queries of any positions, values also narrower and wider than keys."""
    for each in range(seed, seed + 25):
        mask = random_mask(1000 + each, 24, samples=2)
        if not mask.dense().any(-1).all():
            continue
        torch.manual_seed(each)
        queries, keys = (sum(map(len, ranges)) for ranges in (mask.queries, mask.keys))
        width = (8, 5, 11)[each % 3]
        q, dy = (torch.randn(queries, 2, 4, each, dtype=torch.float64) for each in (8, width))
        k, v = (torch.randn(keys, 2, 2, each, dtype=torch.float64) for each in (8, width))
        leaves = [t.requires_grad_() for t in (q, k, v)]
        wide_k, wide_v = (t.repeat_interleave(2, 2) for t in (k, v))
        scores = torch.einsum("sbnd,tbnd->bnst", q, wide_k) * 8**-0.5
        right = torch.einsum("bnst,tbnd->sbnd", scores.masked_fill(~mask.dense(), -torch.inf).softmax(-1), wide_v)
        found = tiled.block_attention(q, k, v, mask)
        torch.testing.assert_close(found, right, rtol=0, atol=1e-12)
        for ours, theirs in zip(torch.autograd.grad(found, leaves, dy), torch.autograd.grad(right, leaves, dy)):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_layers_and_ranks_share_the_results_of_a_mask() -> None:
    documents = (torch.arange(64) // 9).expand(1, -1)
    whole = AttentionMask.of_sequence(64, CPU, documents=documents)
    for _ in range(2):
        part = whole.part((range(16),), (range(16, 32),))
        assert part is whole.part((range(16),), (range(16, 32),))
        assert part.tiles(8) is part.tiles(8) is not whole.tiles(8)
        assert part.bands() is part.bands()
