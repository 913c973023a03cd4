"""Attention masks: every block and tile beside the dense mask, which is compared with the rule spelled out."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.config import plugins
from megatron.config.attention_pattern import KIND, AttentionPattern
from megatron.distributed.context_parallel import chunks_of
from megatron.kernels.attention_mask import EMPTY, FULL, PARTIAL, TRIANGLE, AttentionMask, Ranges

CPU = torch.device("cpu")
LENGTH = 48
PATTERNS = (
    "global",
    "local:1",
    "local:7",
    "local:40",
    "chunked:4",
    "chunked:12",
    "dilated:3:2",
    "dilated:5:7",
    "prefix:5",
    "prefix:12",
    "even_keys",
    "all_keys",
    "local:9+first:3",
    "chunked:16+first:8",
    "dilated:2:4+first:1",
    "even_keys+first:2",
    "local:6+prefix:4",
    "local:12+chunked:16",
)


@pytest.fixture(autouse=True)
def rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patterns of plugins, one of which keeps every key."""
    monkeypatch.setitem(plugins._registered[KIND], "even_keys", lambda query, key: (key % 2 == 0) | (query == key))
    monkeypatch.setitem(plugins._registered[KIND], "all_keys", lambda query, key: query >= key)


def visible(p: AttentionPattern, query: int, key: int) -> bool:
    """Return True if a query sees a key of its document: the definition of patterns, condition by condition."""
    distance = query - key
    conditions = [
        distance >= 0,
        p.window is None or distance < p.window,
        distance % p.dilation == 0,
        p.chunk is None or query // p.chunk == key // p.chunk,
        p.rule is None or bool(p.rule(query, key)),
    ]
    return all(conditions) or (distance >= 0 and key < p.first) or key < p.prefix


def documents_of(dice: random.Random, samples: int) -> Tensor | None:
    """Runs of ids, which need not grow; None for half of the masks."""
    if dice.random() < 0.5:
        return None
    ids = torch.zeros(samples, LENGTH, dtype=torch.int64)
    for row in ids:
        starts = sorted(dice.sample(range(LENGTH), dice.choice([1, 3, 9])))
        for start, name in zip(starts, dice.sample(range(1, 100), len(starts))):
            row[start:] = name
    return ids


def ranges_of(dice: random.Random) -> Ranges:
    """The whole sequence, a part of it, or the chunks of a context-parallel rank."""
    start, size = dice.randrange(LENGTH), dice.choice([2, 3, 4])
    return dice.choice(
        [
            (range(LENGTH),),
            (range(start, dice.randint(start + 1, LENGTH)),),
            chunks_of(LENGTH, size, dice.randrange(size)),
            tuple(chunk for rank in range(size) for chunk in chunks_of(LENGTH, size, rank)),
        ]
    )


def masks(text: str, count: int) -> Iterator[tuple[random.Random, AttentionMask]]:
    for seed in range(count):
        dice = random.Random(seed)
        pattern, documents, same = AttentionPattern.parse(text), documents_of(dice, 3), dice.random() < 0.5
        queries = ranges_of(dice) if seed % 4 else (range(LENGTH),)
        keys = ranges_of(dice) if seed % 4 and not same else queries
        yield dice, AttentionMask(queries, keys, CPU, pattern, documents, restarts=dice.random() < 0.5)


@pytest.mark.parametrize("text", PATTERNS)
def test_dense_is_the_rule_spelled_out(text: str) -> None:
    for _, mask in masks(text, 4):
        dense, queries, keys = mask.dense(), positions(mask.queries), positions(mask.keys)
        for b in range(len(dense)):
            ids = [0] * LENGTH if mask.documents is None else mask.documents[b].tolist()
            first = [ids.index(name) if mask.restarts else 0 for name in ids]
            expected = [
                [visible(mask.pattern, q - first[q], k - first[q]) and ids[q] == ids[k] for k in keys] for q in queries
            ]
            assert dense[b, 0].tolist() == expected
        rows, columns, samples = slice(1, 9), slice(2, 5), slice(1, None) if len(dense) > 1 else slice(None)
        assert torch.equal(mask.dense(samples, rows, columns), dense[samples, :, rows, columns])


def positions(ranges: Ranges) -> list[int]:
    return [i for part in ranges for i in part]


def same_tokens(mask: AttentionMask, queries: slice, keys: slice) -> bool:
    return positions(mask.queries)[queries] == positions(mask.keys)[keys]


@pytest.mark.parametrize("text", PATTERNS)
def test_tiles_cover_the_mask_once(text: str) -> None:
    for dice, mask in masks(text, 40):
        block, whole, dense = dice.choice([3, 4, 4, 8, 16, 64]), dice.random() < 0.8, mask.dense()
        covered = torch.zeros(dense.shape, dtype=torch.int64)
        for tile in mask.tiles(block, whole):
            covered[tile.samples, :, tile.queries, tile.keys] += 1
            part = dense[tile.samples, :, tile.queries, tile.keys]
            rows, columns = part.shape[2:]
            assert tile.kind != EMPTY
            if tile.kind == FULL:
                assert part.all()
            elif tile.kind == TRIANGLE:
                assert same_tokens(mask, tile.queries, tile.keys)
                assert torch.equal(part, torch.ones(rows, columns, dtype=torch.bool).tril().expand_as(part))
            else:
                assert max(rows, columns) <= block
            if not whole:
                assert max(rows, columns) <= block
        assert covered.max() <= 1
        assert not (dense & (covered == 0)).any()


def exact_kind(part: Tensor, same: bool) -> int:
    if not part.any():
        return EMPTY
    if part.all():
        return FULL
    return TRIANGLE if same and torch.equal(part, torch.ones_like(part).tril()) else PARTIAL


@pytest.mark.parametrize("text", PATTERNS)
def test_blocks_are_of_the_kind_that_the_dense_mask_shows(text: str) -> None:
    """Only partial blocks may be others: where a pattern's part of a document, or of first tokens, makes them so."""
    simple = "+" not in text and "dilated" not in text
    for dice, mask in masks(text, 20):
        queries, keys = ranges_of(dice), ranges_of(dice)
        kinds = mask.block_kinds(queries, keys)
        assert mask.sees(queries, keys) == bool((kinds != EMPTY).any())
        for i, q in enumerate(queries):
            for j, k in enumerate(keys):
                dense = mask.part((q,), (k,)).dense()
                for b in range(len(kinds)):
                    kind, exact = kinds[b, i, j], exact_kind(dense[b, 0], q == k)
                    assert kind in (PARTIAL, exact), (q, k, kind, exact)
                    if mask.documents is None and simple and len(q) > 1 and len(k) > 1:
                        assert kind == exact, (q, k, kind, exact)


def test_long_masks_have_few_tiles() -> None:
    """Time and memory follow what is visible: nothing of the length's square is made for a window."""
    length, block = 1 << 17, 256

    def tiles_of(text: str, documents: Tensor | None = None) -> list[Any]:
        return AttentionMask.of_sequence(length, CPU, AttentionPattern.parse(text), documents).tiles(block)

    assert len(tiles_of("global")) == 1
    window = tiles_of("local:1024")
    area = sum((t.queries.stop - t.queries.start) * (t.keys.stop - t.keys.start) for t in window)
    assert area < length * (1024 + 2 * block)
    assert len(window) < 4 * length / block
    two = torch.zeros(1, length, dtype=torch.int64)
    two[:, length // 2 :] = 1
    assert sum(tile.kind == PARTIAL for tile in tiles_of("global", two)) <= 2


def test_a_device_is_asked_for_documents_only_where_they_are_not_on_the_host() -> None:
    ids = torch.zeros(1, LENGTH, dtype=torch.int64)
    host = AttentionMask((range(LENGTH),), (range(LENGTH),), CPU, documents=ids.to("meta"), host_documents=ids)
    assert len(host.tiles(8)) == 1
    with pytest.raises(NotImplementedError):
        AttentionMask((range(LENGTH),), (range(LENGTH),), CPU, documents=ids.to("meta")).tiles(8)


def test_the_rule_of_a_plugin_is_computed_for_small_blocks_only(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    def recent(query: Tensor, key: Tensor) -> Tensor:
        sizes.append(query.numel() * key.numel())
        return query - key < 300

    monkeypatch.setitem(plugins._registered[KIND], "recent", recent)
    length = 8192
    chunks = chunks_of(length, 2, 0)
    mask = AttentionMask(chunks, chunks, torch.device("cpu"), AttentionPattern(plugin="recent"))
    covered = sum(
        int(mask.dense(tile.samples, tile.queries, tile.keys).sum())
        for tile in mask.tiles(256)
        if mask.sees(*(chunks,) * 2)
    )
    assert covered == 2 * (300 * 301 // 2 + (length // 4 - 300) * 300)
    assert max(sizes) <= 256 * 256
