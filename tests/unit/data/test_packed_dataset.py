"""Packing: every conversation once an epoch, none cut, in few samples, in an order that only the seed decides."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.chat import Conversations
from megatron.data.packed_dataset import PackedDataset, best_fit_decreasing


def conversations(lengths: list[int], salt: int = 0) -> Conversations:
    """Conversations of these positions; the ids count on through all of them, and two of three are answers."""
    ends = np.cumsum([length + 1 for length in lengths])
    ids = np.arange(ends[-1], dtype=np.int32) + salt
    return Conversations(ids, (ids % 3 > 0).astype(np.uint8), np.array([0, *ends[:-1]]), ends, "file")


def packed(lengths: list[int], seq_length: int = 10, batch: int = 4, seed: int = 1, first: int = 0) -> PackedDataset:
    return PackedDataset(conversations(lengths), seq_length, batch, seed, 1000, first)


def plain_best_fit(lengths: list[int], capacity: int) -> list[int]:
    """The rooms that are left by the rule, bin by bin."""
    rooms: list[int] = []
    for length in lengths:
        fitting = [room for room in rooms if room >= length]
        if fitting:
            rooms.remove(min(fitting))
        rooms.append((min(fitting) if fitting else capacity) - length)
    return sorted(rooms)


length_lists = st.lists(st.integers(1, 10), min_size=1, max_size=60)


@settings(deadline=None)
@given(length_lists)
def test_items_fill_few_bins(lengths: list[int]) -> None:
    """By the rule of best fit; best-fit decreasing needs at most 11/9 of the fewest bins, and two thirds of one."""
    lengths.sort(reverse=True)
    bins = best_fit_decreasing(np.array(lengths), 10)
    assert sorted(item for items in bins for item in items) == list(range(len(lengths)))
    rooms = [10 - sum(lengths[item] for item in items) for items in bins]
    assert min(rooms) >= 0
    assert sorted(rooms) == plain_best_fit(lengths, 10)
    least = -(-sum(lengths) // 10)
    assert len(bins) <= 11 / 9 * max(least, sum(length > 5 for length in lengths)) + 6 / 9 or len(bins) == least + 1


def documents_of(dataset: PackedDataset, i: int) -> list[tuple[list[int], list[int], list[float]]]:
    """Inputs, labels and loss mask of each document of a sample that has a label."""
    sample = dataset[i]
    assert sample.loss_mask is not None
    assert sample.documents is not None
    cuts = [0, *(np.flatnonzero(np.diff(sample.documents)) + 1).tolist(), len(sample.tokens)]
    found = [
        tuple(c[a:b].tolist() for c in (sample.tokens, sample.labels, sample.loss_mask)) for a, b in pairwise(cuts)
    ]
    assert len(set(sample.documents.tolist())) == len(found), "every document is in one piece"
    padding = [c for c in found if not any(c[1])]
    assert padding in ([], [found[-1]])
    assert not any(sum(mask) for _, _, mask in padding)
    return [c for c in found if any(c[1])]


@settings(deadline=None, max_examples=40)
@given(length_lists, st.integers(1, 5), st.integers(0, 3))
def test_every_conversation_is_read_once_an_epoch_and_whole(lengths: list[int], batch: int, epoch: int) -> None:
    dataset = packed(lengths, batch=batch)
    assert dataset.epoch_samples % batch == 0
    assert dataset.packs <= dataset.epoch_samples < dataset.packs + batch
    samples = [documents_of(dataset, epoch * dataset.epoch_samples + i) for i in range(dataset.epoch_samples)]
    assert [found for found in samples[dataset.packs :] if found] == []
    data = dataset.conversations
    expected = []
    for start, stop in zip(data.starts, data.stops):
        ids, answers = data.ids[start:stop].tolist(), data.answers[start:stop].tolist()
        expected.append((ids[:-1], ids[1:], [float(answer) for answer in answers[1:]]))
    assert sorted(document for found in samples for document in found) == sorted(expected)


MANY = [3, 3, 5, 5, 5, 2, 9, 7, 1, 4, 6, 6, 8, 2, 2] * 4 + [10]


def test_the_order_depends_on_seed_and_epoch() -> None:
    dataset, size = packed(MANY), packed(MANY).epoch_samples
    epochs = [[dataset.members(size * epoch + i).tolist() for i in range(size)] for epoch in range(3)]
    assert all(a != b for a, b in pairwise(epochs))
    assert {tuple(sorted(m)) for m in epochs[0]} != {tuple(sorted(m)) for m in epochs[1]}, "packs change too"
    again, later, other = packed(MANY), packed(MANY, first=size), packed(MANY, seed=2)
    assert [again.members(i).tolist() for i in range(size)] == epochs[0]
    assert [later.members(i).tolist() for i in range(size)] == epochs[1]
    assert [other.members(i).tolist() for i in range(size)] != epochs[0]
    places = np.arange(3 * size)
    hashes = dataset.sample_hashes(places)
    assert np.array_equal(later.sample_hashes(places[: 2 * size]), hashes[size:])
    by_members = {tuple(dataset.members(int(i)).tolist()): int(h) for i, h in zip(places, hashes)}
    assert Counter(by_members.values())[0] == 1, "of empty samples"
    assert len(set(by_members.values())) == len(by_members)
    assert np.mean(other.sample_hashes(places) == hashes) < 0.2


def test_the_fingerprint_depends_on_content_and_order() -> None:
    base = packed(MANY).fingerprint
    assert base == packed(MANY, seed=2, first=8).fingerprint
    changed = PackedDataset(conversations(MANY, salt=1), 10, 4, 1, 1000)
    others = {packed(MANY, batch=9).fingerprint, packed(MANY, seq_length=11).fingerprint, changed.fingerprint}
    assert len(others | {base}) == 4


def test_usage_is_counted_in_epochs() -> None:
    dataset = packed(MANY)
    (usage,) = dataset.source_usage(3 * dataset.epoch_samples)
    assert (usage.source, usage.tokens, usage.once) == ("file", 3 * sum(MANY), sum(MANY))
    assert dataset.describe(dataset.epoch_samples * 10).startswith("1.00 epochs of 61 conversations in file, packed")
    assert "packed into 1 sample (90.0% full)" in packed([9]).describe(10)
    with pytest.raises(IndexError):
        dataset[1000]
