"""FlexAttention's blocks and rule against the dense mask. It runs uncompiled here: no GPU, and every block computed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron.config import plugins
from megatron.config.attention_pattern import AttentionPattern
from megatron.kernels import flex_attention, registry
from megatron.kernels.attention import sdpa
from megatron.kernels.attention_mask import PLAIN_SCORES, AttentionMask, AttentionScores

ATTENTION = registry.OPERATIONS["attention"]
CPU = torch.device("cpu")

PATTERNS = {
    "chunked": AttentionPattern(chunk=50),
    "dilated": AttentionPattern(window=40, dilation=3),
    "first": AttentionPattern(window=30, first=3),
    "prefix": AttentionPattern(prefix=70),
    "plugin": AttentionPattern(plugin="even_distance"),
    "all": AttentionPattern(window=90, dilation=2, chunk=150, plugin="even_distance", first=2, prefix=5),
}


@pytest.fixture(autouse=True)
def plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = {"even_distance": lambda query, key: (query - key) % 2 == 0}
    monkeypatch.setitem(plugins._registered, "attention_pattern", rules)


def masks(name: str, documents: bool | str, length: int = 200, first_query: int = 0) -> AttentionMask:
    ids = (torch.rand(2, length, generator=torch.Generator().manual_seed(1)) < 0.03).long().cumsum(1)
    mask = AttentionMask.of_sequence(length, CPU, PATTERNS[name], ids if documents else None, first_query)
    return replace(mask, restarts=documents == "restarting")


@pytest.mark.parametrize("block", [16, 128])
@pytest.mark.parametrize("first_query", [0, 37])
@pytest.mark.parametrize("documents", [False, True, "restarting"])
@pytest.mark.parametrize("name", PATTERNS)
def test_blocks_hold_the_mask(
    monkeypatch: pytest.MonkeyPatch, name: str, documents: bool | str, first_query: int, block: int
) -> None:
    """Full blocks are full, absent blocks empty, and the rule is right in the others; by rows and by columns."""
    monkeypatch.setattr(flex_attention, "FLEX_BLOCK", block)
    flex_attention._by_position.cache_clear()
    mask = masks(name, documents, first_query=first_query)
    made, samples = flex_attention.block_mask(mask), 2 if documents else 1
    dense = mask.dense().expand(samples, -1, -1, -1)
    s, t = dense.shape[2:]
    assert made.shape == (samples, 1, s, t)
    places = (range(samples), range(1), range(s), range(t))
    rule = made.mask_mod(*torch.meshgrid(*map(torch.tensor, map(list, places)), indexing="ij"))
    assert torch.equal(rule.expand_as(dense), dense)

    def pixels(counts: torch.Tensor | None, indices: torch.Tensor | None, rows: int, columns: int) -> torch.Tensor:
        assert counts is not None
        assert indices is not None
        found = torch.zeros(samples, 1, rows, columns, dtype=torch.bool)
        for sample in range(samples):
            for row, count in enumerate(counts[sample, 0].tolist()):
                for column in indices[sample, 0, row, :count].tolist():
                    found[sample, 0, row * block : (row + 1) * block, column * block : (column + 1) * block] = True
        return found

    some, full = (
        pixels(*each, s, t)
        for each in ((made.kv_num_blocks, made.kv_indices), (made.full_kv_num_blocks, made.full_kv_indices))
    )
    assert not (some & full).any()
    assert dense[full].all()
    assert not dense[~(some | full)].any()
    for pair, right in (
        ((made.q_num_blocks, made.q_indices), some),
        ((made.full_q_num_blocks, made.full_q_indices), full),
    ):
        assert torch.equal(pixels(*pair, t, s).transpose(2, 3), right)
    flex_attention._by_position.cache_clear()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("name", PATTERNS)
def test_attention_matches_torch(monkeypatch: pytest.MonkeyPatch, name: str, documents: bool) -> None:
    """In fp64, with grouped heads and queries after cached keys; gradients only exist on GPUs (tests/gpu)."""
    monkeypatch.setattr(flex_attention, "compiled", lambda function: lambda: function)
    attend, mask = flex_attention.make(), masks(name, documents, first_query=20)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(180, 2, 4, 16, dtype=torch.float64, generator=generator)
    k, v = torch.randn(2, 200, 2, 2, 16, dtype=torch.float64, generator=generator)
    for scores in (PLAIN_SCORES, AttentionScores(0.7), AttentionScores(0.7, 1.5)):
        torch.testing.assert_close(attend(q, k, v, mask, scores), sdpa(q, k, v, mask, scores), rtol=0, atol=1e-12)


def test_masks_of_positions_are_kept_across_steps_and_of_documents_in_a_micro_batch() -> None:
    first, second = (masks("chunked", False) for _ in range(2))
    assert flex_attention.block_mask(first) is flex_attention.block_mask(second)
    first, second = (masks("chunked", True) for _ in range(2))
    assert flex_attention.block_mask(first) is flex_attention.block_mask(first)
    assert flex_attention.block_mask(first) is not flex_attention.block_mask(second)


def test_flex_supports_masks_that_flash_attention_does_not() -> None:
    covers = ATTENTION.candidates["flex"].covers
    assert covers is not None

    def taken(mask: AttentionMask, queries: int, channels: int = 64, scores: AttentionScores = PLAIN_SCORES) -> bool:
        return covers(torch.empty(queries, 1, 2, channels), *torch.empty(2, 200, 1, 2, channels), mask, scores)

    for name in PATTERNS:
        for documents in (False, True):
            assert taken(masks(name, documents), 200)
            assert taken(masks(name, documents, first_query=80), 120)
            assert not taken(masks(name, documents), 200, channels=8)
            with torch.no_grad():
                assert not taken(masks(name, documents), 200), "each length of generation would be compiled"
                assert taken(masks(name, documents, first_query=72), 128)
    for pattern in (AttentionPattern(), AttentionPattern(window=7)):
        assert not taken(AttentionMask.of_sequence(200, CPU, pattern), 200)
        assert taken(AttentionMask.of_sequence(200, CPU, pattern), 200, scores=AttentionScores(softcap=2.0))
    pieces = (range(100), range(100, 200))
    assert not taken(AttentionMask(pieces, pieces, CPU, PATTERNS["chunked"]), 200), "a context-parallel rank"


def test_auto_compiles_flex_only_for_patterns_that_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    candidates = {n: replace(c, missing=lambda device, dtype: None) for n, c in ATTENTION.candidates.items()}
    candidates["flash_attn"] = replace(candidates["flash_attn"], missing=lambda device, dtype: "it is absent")
    monkeypatch.setitem(registry.OPERATIONS, "attention", replace(ATTENTION, candidates=candidates))
    monkeypatch.setattr(registry, "check_kernel", lambda *inputs: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    local = AttentionPattern(window=7)
    for word, patterns, softcap, expected in (
        ("auto", (), False, "varlen+torch"),
        ("auto", (local,), False, "varlen+torch"),
        ("auto", (local,), True, "varlen+flex+torch"),
        ("auto", (local, PATTERNS["chunked"]), False, "varlen+flex+torch"),
        ("flex", (), False, "flex+torch"),
    ):
        words, device = ("torch", f"attention={word}"), torch.device("cuda")
        (line,) = registry.select_kernels(words, device, torch.bfloat16, patterns=patterns, softcap=softcap)[1]
        assert f"; {expected} (attention)" in line
