"""The cache of keys and values, and the masks and positions of what it holds."""

from __future__ import annotations

import pytest
import torch

from megatron.kernels.attention import AttentionMask
from megatron.layers.kv_cache import KVCache

BATCH, HEADS, CHANNELS, CAPACITY = 3, 2, 4, 11


def keys_and_values(tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(tokens, BATCH, HEADS, CHANNELS, generator=generator).double() for _ in "kv")
    return k, v


def test_gives_back_everything_in_order() -> None:
    cache, read = KVCache(CAPACITY), {"a": keys_and_values(0, 0), "b": keys_and_values(0, 0)}
    for seed, tokens in enumerate((4, 1, 5, 1)):
        for layer in read:
            new = keys_and_values(tokens, 10 * seed + ord(layer))
            k, v = read[layer]
            read[layer] = torch.cat((k, new[0])), torch.cat((v, new[1]))
            for kept, expected in zip(cache.extend(layer, *new), read[layer]):
                assert torch.equal(kept, expected)
        cache.advance(tokens)
    assert cache.length == CAPACITY
    with pytest.raises(ValueError, match="room for 11 tokens, not for 12"):
        cache.extend("a", *keys_and_values(1, 99))


@pytest.mark.parametrize("read", [0, 5])
def test_positions_and_padding(read: int) -> None:
    padding = [0, 2, 6]
    cache = KVCache(CAPACITY, torch.tensor(padding))
    cache.advance(read)
    tokens = torch.zeros(BATCH, 4, dtype=torch.long)
    documents = cache.documents(tokens)
    assert documents is not None
    for row, pad in enumerate(padding):
        assert cache.positions(tokens)[row].tolist() == [max(0, slot - pad) for slot in range(read, read + 4)]
        assert documents[row].tolist() == [int(slot >= pad) for slot in range(read + 4)]


def test_without_padding_prompts_begin_at_0() -> None:
    cache = KVCache(CAPACITY)
    cache.advance(3)
    tokens = torch.zeros(BATCH, 2, dtype=torch.long)
    assert cache.positions(tokens).tolist() == [[3, 4]] * BATCH
    assert cache.documents(tokens) is None


@pytest.mark.parametrize("documents", [None, torch.tensor([[0, 0, 1, 1, 1, 2], [0, 1, 1, 1, 1, 1]])])
@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("first", [1, 3, 5])
def test_later_queries_see_what_they_see_in_the_whole(
    first: int, window: int | None, documents: torch.Tensor | None
) -> None:
    cpu = torch.device("cpu")
    whole = AttentionMask.of_sequence(6, cpu, window, documents).dense
    later = AttentionMask.of_sequence(6, cpu, window, documents, first).dense
    assert torch.equal(later, whole[:, :, first:])
