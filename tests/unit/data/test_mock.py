"""Generated samples: the same for everyone, and worth learning."""

from __future__ import annotations

from collections import Counter
from math import log

import numpy as np
import pytest

from megatron.data.dataset import MOCK_ALPHABET_SIZE, MOCK_JUMP_PROBABILITY, MockDataset


def ids(dataset: MockDataset, i: int) -> list[int]:
    tokens, labels = dataset[i]
    assert tokens[1:].tolist() == labels[:-1].tolist()
    return [*tokens.tolist(), int(labels[-1])]


def test_a_sample_depends_on_its_key_only() -> None:
    first, again = MockDataset(1000, 64, 50, 7), MockDataset(1000, 64, 9999, 7)
    assert ids(first, 49) == ids(again, 49)
    assert len(ids(first, 0)) == 65
    assert first[0].tokens.dtype == np.int64


def test_a_later_part_of_a_stream() -> None:
    whole, rest = MockDataset(1000, 64, 50, 7, 1), MockDataset(1000, 64, 10, 7, 1, first=40)
    assert [ids(rest, i) for i in range(10)] == [ids(whole, 40 + i) for i in range(10)]
    assert rest.sample_hashes(np.arange(10)).tolist() == list(range(40, 50))
    assert rest.fingerprint == whole.fingerprint
    assert rest.seq_length == 64


def test_index_seed_and_stream_change_the_sample() -> None:
    keys = [(7, 0, 0), (7, 0, 1), (7, 1, 0), (8, 0, 0)]
    samples = {tuple(ids(MockDataset(1000, 64, 5, seed, stream), i)) for seed, stream, i in keys}
    assert len(samples) == len(keys)


def test_streams_share_the_language_and_seeds_do_not() -> None:
    assert MockDataset(1000, 64, 5, 7, 0).alphabet.tolist() == MockDataset(1000, 64, 5, 7, 1).alphabet.tolist()
    assert MockDataset(1000, 64, 5, 7).alphabet.tolist() != MockDataset(1000, 64, 5, 8).alphabet.tolist()


@pytest.mark.parametrize("vocab", [1, 2, 100, 257, 50257])
def test_ids_are_of_the_vocabulary(vocab: int) -> None:
    dataset = MockDataset(vocab, 200, 20, 1)
    seen = {i for n in range(20) for i in ids(dataset, n)}
    assert seen <= set(dataset.alphabet.tolist()) <= set(range(vocab))
    assert len(dataset.alphabet) == min(vocab, MOCK_ALPHABET_SIZE)
    if vocab == 50257:  # all of an embedding that is cut over ranks is used
        assert {i * 8 // vocab for i in seen} == set(range(8))


def test_a_table_of_successors_predicts_it_as_well_as_documented() -> None:
    """Cross-entropy of a bigram table, counted on training samples, on validation samples."""
    train, valid = MockDataset(5000, 512, 400, 3), MockDataset(5000, 512, 40, 3, stream=1)
    pairs: Counter[tuple[int, int]] = Counter()
    for i in range(len(train)):
        text = ids(train, i)
        pairs.update(zip(text, text[1:]))
    totals: Counter[int] = Counter()
    for (a, _), n in pairs.items():
        totals[a] += n
    steps = [pair for i in range(len(valid)) for pair in zip(ids(valid, i), ids(valid, i)[1:])]
    loss = -sum(log((pairs[a, b] + 0.1) / (totals[a] + 0.1 * MOCK_ALPHABET_SIZE)) for a, b in steps) / len(steps)
    p = MOCK_JUMP_PROBABILITY
    entropy = -(1 - p) * log(1 - p) - p * log(p / MOCK_ALPHABET_SIZE)
    assert entropy == pytest.approx(1.07, abs=0.01)
    assert loss == pytest.approx(entropy, abs=0.15)


@pytest.mark.parametrize("i", [-1, 5])
def test_a_sample_outside_is_refused(i: int) -> None:
    with pytest.raises(IndexError, match=f"sample {i} of a mock dataset of 5"):
        MockDataset(100, 8, 5, 1)[i]
