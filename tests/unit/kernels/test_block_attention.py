"""Attention in tiles against softmax of the dense mask, whose gradients autograd computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.config import plugins
from megatron.config.attention_pattern import CAUSAL, KIND, AttentionPattern
from megatron.kernels import block_attention as module
from megatron.kernels.attention import sdpa
from megatron.kernels.attention_mask import PLAIN_SCORES, AttentionMask, AttentionScores, Ranges, Tile
from megatron.kernels.block_attention import AttentionDropout, KeyValues, LocalKeyValues, Use, block_attention
from megatron.kernels.dropout import keep_mask

CPU = torch.device("cpu")
LENGTH, BATCH, CHANNELS = 40, 3, 8
PATTERNS = (
    "global",
    "local:5",
    "chunked:16",
    "dilated:3:2",
    "local:6+first:3",
    "prefix:10",
    "even_keys",
)
DOCUMENTS = torch.tensor([[0] * 9 + [1] * 20 + [2] * 11, [0] * 40, [*range(40)]])
WHOLE = (range(LENGTH),)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a short sequence has many, and a pattern of a plugin."""
    monkeypatch.setattr(module, "BLOCK", 8)
    monkeypatch.setattr(module, "UNFUSED_BLOCK", 16)
    monkeypatch.setitem(plugins._registered[KIND], "even_keys", lambda query, key: (key % 2 == 0) | (query == key))


def draw(shape: Sequence[int], seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def inputs(mask: AttentionMask, heads: int = 4, groups: int = 2) -> list[Tensor]:
    queries, keys = (sum(map(len, ranges)) for ranges in (mask.queries, mask.keys))
    sizes = ((queries, heads), (keys, groups), (keys, groups))
    return [draw((rows, BATCH, n, CHANNELS), i).requires_grad_() for i, (rows, n) in enumerate(sizes)]


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask,
    dropout: AttentionDropout | None = None,
    key_values: KeyValues | None = None,
    of: AttentionScores = PLAIN_SCORES,
) -> Tensor:
    """Softmax of the whole matrix of scores, weights dropped one by one as documented."""
    k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], 2) for t in (k, v))
    scores = torch.einsum("sbnd,tbnd->bnst", q, k) * (CHANNELS**-0.5 if of.scale is None else of.scale)
    if of.softcap is not None:
        scores = of.softcap * torch.tanh(scores / of.softcap)
    scores = scores.masked_fill(~mask.dense(), -torch.inf)
    sinks = (
        torch.empty(*scores.shape[:3], 0) if of.sink is None else of.sink.view(-1, 1, 1).expand(*scores.shape[:3], 1)
    )
    weights = torch.cat((scores, sinks), -1).softmax(-1)[..., : scores.shape[-1]]
    if dropout is not None:
        samples = dropout.sample_ids.view(-1, 1, 1, 1)
        heads = torch.arange(q.shape[2]).view(-1, 1, 1) + dropout.first_head
        places = mask.query_positions.view(-1, 1), heads * dropout.length + mask.key_positions
        keep = keep_mask(dropout.probability, dropout.key, samples, *places)
        weights = weights * keep / (1 - dropout.probability)
    return torch.einsum("bnst,tbnd->sbnd", weights, v)


def results(attend: Any, leaves: list[Tensor], *rest: Any) -> list[Tensor]:
    """The output and the gradients."""
    y = attend(*leaves[:3], *rest)
    return [y.detach(), *torch.autograd.grad(y, leaves, draw(y.shape, 9).to(y.dtype))]


def check(mask: AttentionMask, *rest: Any, heads: int = 4, groups: int = 2) -> None:
    leaves = inputs(mask, heads, groups)
    leaves += [scores.sink.requires_grad_() for scores in rest[2:] if scores.sink is not None]
    found, expected = results(block_attention, leaves, mask, *rest), results(dense, leaves, mask, *rest)
    for ours, right in zip(found, expected):
        torch.testing.assert_close(ours, right, rtol=1e-12, atol=1e-12)


def mask_of(text: str, documents: Tensor | None = None, queries: Ranges = WHOLE) -> AttentionMask:
    return AttentionMask(queries, WHOLE, CPU, AttentionPattern.parse(text), documents)


QUERIES = {
    "all": WHOLE,
    "cached": (range(29, LENGTH),),
    "one": (range(LENGTH - 1, LENGTH),),
    "ring": (range(10), range(30, 40)),
}


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["one", "documents"])
@pytest.mark.parametrize("queries", QUERIES)
@pytest.mark.parametrize("text", PATTERNS)
def test_equals_the_dense_softmax(text: str, queries: str, documents: Tensor | None) -> None:
    check(mask_of(text, documents, QUERIES[queries]))


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 1), (6, 3), (1, 1)])
@pytest.mark.parametrize("text", ["global", "local:5"])
def test_any_number_of_key_heads(text: str, heads: int, groups: int) -> None:
    check(mask_of(text, DOCUMENTS), heads=heads, groups=groups)
    check(mask_of(text, DOCUMENTS), DROPOUT, heads=heads, groups=groups)


DROPOUT = AttentionDropout(0.3, 2**62 + 12345, torch.tensor([5, 2**33, 7]), first_head=2, length=LENGTH)


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["one", "documents"])
@pytest.mark.parametrize("queries", QUERIES)
@pytest.mark.parametrize("text", PATTERNS)
def test_dropout_drops_the_same_weights(text: str, queries: str, documents: Tensor | None) -> None:
    check(mask_of(text, documents, QUERIES[queries]), DROPOUT)


class InTwoParts(LocalKeyValues):
    """The keys arrive in two parts, the later ones first, so that early queries see none of the first part."""

    def forward(self, k: Tensor, v: Tensor, mask: AttentionMask, use: Use) -> None:
        """Use one part after the other."""
        for rows, keys in self.parts():
            use(k[rows], v[rows], mask.with_keys(keys))

    def backward(self, k: Tensor, v: Tensor, mask: AttentionMask, use: Use) -> tuple[Tensor, Tensor]:
        """Do so again."""
        later, earlier = (use(k[rows], v[rows], mask.with_keys(keys)) for rows, keys in self.parts())
        dk, dv = (torch.cat(pair) for pair in zip(earlier, later))
        return dk, dv

    def parts(self) -> list[tuple[slice, Ranges]]:
        """Rows and positions of the parts."""
        return [(slice(17, LENGTH), (range(17, LENGTH),)), (slice(17), (range(17),))]


@pytest.mark.parametrize("dropout", [None, DROPOUT], ids=["kept", "dropped"])
@pytest.mark.parametrize("text", PATTERNS)
def test_keys_may_arrive_in_parts_in_any_order(text: str, dropout: AttentionDropout | None) -> None:
    parts: KeyValues = InTwoParts()
    check(mask_of(text, DOCUMENTS), dropout, parts)


CAPPED = AttentionScores(0.7, 1.5)
SINK = draw((4,), 7)


@pytest.mark.parametrize(
    "scores",
    [AttentionScores(0.7), CAPPED, AttentionScores(sink=SINK), replace(CAPPED, sink=SINK)],
    ids=["scaled", "capped", "sink", "capped sink"],
)
@pytest.mark.parametrize("dropout", [None, DROPOUT], ids=["kept", "dropped"])
@pytest.mark.parametrize("text", PATTERNS)
def test_scores_and_sinks(text: str, dropout: AttentionDropout | None, scores: AttentionScores) -> None:
    parts: KeyValues = InTwoParts()
    check(mask_of(text, DOCUMENTS), dropout, parts, scores)
    check(mask_of(text, None, QUERIES["cached"]), dropout, LocalKeyValues(), scores, groups=1)


def test_large_and_very_negative_scores() -> None:
    mask = mask_of("local:5", DOCUMENTS)
    leaves = [(30 * t.detach()).requires_grad_() for t in inputs(mask)]
    for rest in ((), (None, LocalKeyValues(), AttentionScores(softcap=40.0))):
        for ours, right in zip(results(block_attention, leaves, mask, *rest), results(dense, leaves, mask, *rest)):
            assert ((ours - right).norm() / right.norm()).item() < 1e-12


@pytest.mark.parametrize("dropout", [None, DROPOUT], ids=["kept", "dropped"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("text", ["global", "local:6+first:3", "chunked:16"])
def test_narrow_formats_are_close(text: str, dtype: torch.dtype, dropout: AttentionDropout | None) -> None:
    mask, limit = mask_of(text, DOCUMENTS), 2e-6 if dtype == torch.float32 else 2e-2
    leaves = [t.detach().to(dtype).requires_grad_() for t in inputs(mask)]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    for ours, right in zip(results(block_attention, leaves, mask, dropout), results(dense, exact, mask, dropout)):
        assert ours.dtype == dtype
        assert ((ours.double() - right).norm() / right.norm()).item() < limit


def test_the_default_attention_uses_tiles_for_all_but_plain_causal_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[Tile]] = []
    tiles = module._tiles

    def noted(*arguments: Any) -> list[Tile]:
        seen.append(tiles(*arguments))
        return seen[-1]

    monkeypatch.setattr(module, "_tiles", noted)
    masks = (
        mask_of("global"),
        mask_of("local:5"),
        mask_of("global", DOCUMENTS),
        mask_of("global", None, (range(3, 40),)),
    )
    for mask in masks:
        leaves = inputs(mask)
        for of in (PLAIN_SCORES, AttentionScores(0.7), CAPPED, AttentionScores(sink=SINK)):
            expected = dense(*leaves, mask, of=of)
            torch.testing.assert_close(sdpa(*leaves, mask, of), expected, rtol=1e-12, atol=1e-12)
    assert len(seen) == 4 * 3 + 2, "capped scores and sinks too"


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("width", [5, 13])
def test_values_may_be_narrower_or_wider_than_keys(width: int, softcap: float | None) -> None:
    """With the default scale, that of keys without padding."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, dy = (
        torch.randn(20, 2, heads, channels, generator=generator, dtype=torch.float64).requires_grad_()
        for heads, channels in ((4, 8), (2, 8), (2, width), (4, width))
    )
    mask = AttentionMask.of_sequence(20, q.device, CAUSAL)
    y = sdpa(q, k, v, mask, AttentionScores(softcap=softcap))
    scores = torch.einsum("sbgxd,tbgd->bgxst", q.unflatten(2, (2, 2)), k) * 8**-0.5
    scores = scores if softcap is None else softcap * (scores / softcap).tanh()
    weights = scores.masked_fill(torch.ones(20, 20).triu(1).bool(), -torch.inf).softmax(-1)
    expected = torch.einsum("bgxst,tbgd->sbgxd", weights, v).flatten(2, 3)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    found, wanted = (torch.autograd.grad(each, (q, k, v), dy) for each in (y, expected))
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)
