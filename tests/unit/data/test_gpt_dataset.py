"""The sample order against Megatron-LM's own tables, and against its loop written out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from megatron.data.errors import DataError
from megatron.data.gpt_dataset import SPLITS, GPTDataset, build_order, extend_order, split_ranges
from megatron.data.indexed import IndexedDataset, IndexedDatasetWriter

GOLDEN = Path(__file__).parents[2] / "golden" / "megatron" / "case0"
A = np.array([5, 3, 8, 1, 7, 4, 6, 2, 9, 5], dtype=np.int32)


# --- what Megatron-LM gave ---


@pytest.mark.parametrize(("split", "samples"), [("train", 400), ("valid", 20), ("test", 5)])
def test_tables_and_samples_of_megatron(split: str, samples: int) -> None:
    golden = np.load(GOLDEN.with_suffix(".npz"))
    indexed = IndexedDataset(GOLDEN)
    part = split_ranges("90,8,2", len(indexed))[SPLITS.index(split)]
    order = build_order(indexed.lengths, part, samples, 32, 1234)
    for name, table in (("document", order.documents), ("sample", order.samples), ("shuffle", order.shuffle)):
        expected = golden[f"{split}_{name}_index"]
        assert table.dtype == expected.dtype
        np.testing.assert_array_equal(table, expected)
    dataset = GPTDataset(indexed, order)
    for i, tokens in zip(golden[f"{split}_probe"], golden[f"{split}_probe_tokens"]):
        np.testing.assert_array_equal(dataset[int(i)].tokens, tokens)


def test_order_of_one_epoch() -> None:
    order = build_order(A, range(10), None, 8, 1234)
    assert order.documents.tolist() == [7, 2, 9, 1, 0, 8, 4, 5, 6, 3]
    assert order.samples.tolist() == [[0, 0], [1, 6], [3, 1], [5, 1], [6, 0], [7, 1], [8, 5]]
    assert order.shuffle.tolist() == [5, 0, 3, 4, 2, 1]


def test_order_of_two_epochs_shuffled_together() -> None:
    order = build_order(A, range(10), 12, 8, 1234)
    assert order.epochs == 2
    assert order.documents.tolist() == [3, 3, 2, 6, 4, 5, 4, 0, 8, 8, 7, 1, 0, 9, 7, 1, 9, 2, 6, 5]
    assert order.shuffle.tolist() == [4, 7, 1, 10, 9, 3, 8, 6, 11, 5, 0, 2]
    assert order.samples[:5].tolist() == [[0, 0], [2, 6], [4, 0], [5, 1], [6, 5]]
    assert order.samples[5:].tolist() == [[8, 1], [9, 0], [9, 8], [12, 2], [14, 0], [16, 3], [17, 6], [19, 0]]


def test_order_with_a_last_epoch_shuffled_apart() -> None:
    order = build_order(A, range(10), 20, 8, 1234)
    assert order.epochs == 4
    head = [7, 0, 4, 1, 8, 8, 3, 3, 4, 3, 2, 4, 0, 2, 7, 6, 8, 5, 6, 5, 1, 9, 7, 9, 0, 2, 1, 6, 9, 5]
    assert order.documents.tolist() == [*head, 0, 6, 9, 7, 5, 8, 1, 4, 3, 2]
    head = [8, 2, 17, 3, 13, 6, 5, 9, 0, 4, 16, 1, 15, 11, 10, 12, 7, 14]
    assert order.shuffle.tolist() == [*head, 20, 21, 18, 23, 22, 19]


# --- the format description, step by step ---


def walk(lengths: list[int], samples: int, seq_length: int) -> list[list[int]]:
    """Sample starts by walking from document to document, as the description's loop does."""
    rows, place, offset = [[0, 0]], 0, 0
    for _ in range(samples):
        remaining = seq_length + 1
        while remaining:
            length = lengths[place] - offset
            remaining -= length
            if remaining <= 0:
                offset += remaining + length - 1
                remaining = 0
            else:
                place, offset = place + 1, 0
        rows.append([place, offset])
    return rows


def smallest_epochs(tokens: int, needed: int) -> int:
    epochs = 1
    while epochs * tokens < needed:
        epochs += 1
    return epochs


@settings(max_examples=300, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=12),
    samples=st.one_of(st.none(), st.integers(1, 40)),
    seq_length=st.integers(1, 20),
    seed=st.integers(0, 2**32 - 1),
)
def test_tables_equal_the_description(lengths: list[int], samples: int | None, seq_length: int, seed: int) -> None:
    tokens = sum(lengths)
    assume(tokens > (seq_length if samples is None else 0))
    order = build_order(np.array(lengths, dtype=np.int32), range(len(lengths)), samples, seq_length, seed)

    epochs = 1 if samples is None else smallest_epochs(tokens, samples * seq_length + 1)
    apart = None
    if samples is not None and epochs > 1:
        before = ((epochs - 1) * tokens - 1) // seq_length
        assert 0 <= samples - before <= (tokens - 1) // seq_length + 1
        if samples - before < int(0.80 * ((tokens - 1) // seq_length)):
            apart = before
    random = np.random.RandomState(seed)
    documents = np.tile(np.arange(len(lengths), dtype=np.int32), epochs if apart is None else epochs - 1)
    random.shuffle(documents)
    if apart is not None:
        last = np.arange(len(lengths), dtype=np.int32)
        random.shuffle(last)
        documents = np.concatenate([documents, last])
    count = (epochs * tokens - 1) // seq_length
    first, rest = np.arange(0, count if apart is None else apart), np.arange(count if apart is None else apart, count)
    random.shuffle(first)
    if len(rest):
        random.shuffle(rest)

    assert order.epochs == epochs
    assert order.documents.tolist() == documents.tolist()
    assert order.samples.tolist() == walk([lengths[d] for d in documents], count, seq_length)
    assert order.shuffle.tolist() == [*first, *rest]
    assert samples is None or len(order.shuffle) >= samples


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=2, max_size=12),
    samples=st.integers(1, 30),
    seq_length=st.integers(1, 20),
)
def test_samples_are_the_stretches_of_the_line(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], samples: int, seq_length: int
) -> None:
    """Sample j is ids [j*s, j*s + s + 1) of all documents end to end; labels are tokens one further on."""
    prefix = tmp_path_factory.mktemp("line") / "x"
    with IndexedDatasetWriter(prefix, np.int32) as writer:
        for i, length in enumerate(lengths):
            writer.add_document(np.arange(length) + 100 * i)
    indexed = IndexedDataset(prefix)
    part = range(1, len(lengths))
    dataset = GPTDataset(indexed, build_order(indexed.lengths, part, samples, seq_length, 7))
    line = np.concatenate([indexed[d] for d in dataset.order.documents])
    assert set(dataset.order.documents) == set(part)
    for i in range(len(dataset)):
        start = int(dataset.order.shuffle[i]) * seq_length
        tokens, labels = dataset[i]
        assert tokens.dtype == labels.dtype == np.int64
        assert tokens.tolist() == line[start : start + seq_length].tolist()
        assert labels.tolist() == line[start + 1 : start + 1 + seq_length].tolist()


def test_a_sample_outside_is_refused() -> None:
    indexed = IndexedDataset(GOLDEN)
    dataset = GPTDataset(indexed, build_order(indexed.lengths, range(200), None, 32, 1))
    for i in (-1, len(dataset)):
        with pytest.raises(IndexError, match=f"sample {i} of a dataset of {len(dataset)}"):
            dataset[i]


@pytest.mark.parametrize(("lengths", "samples"), [([0, 0], 5), ([0, 0], None), ([3, 5], None)])
def test_too_few_tokens_are_refused(lengths: list[int], samples: int | None) -> None:
    with pytest.raises(DataError, match=f"with {sum(lengths)} tokens holds no sample of 8 \\+ 1"):
        build_order(np.array(lengths, dtype=np.int32), range(2), samples, 8, 1)


def test_a_tiny_split_is_repeated_as_often_as_needed() -> None:
    order = build_order(np.array([1], dtype=np.int32), range(1), 3, 8, 1)
    assert (order.epochs, len(order.shuffle)) == (25, 3)


# --- an order that grows ---


def starts_by_hand(lengths: list[int], stretches: list[int], seq_length: int, seed: int) -> list[list[int]]:
    """Ids of all samples in the order of the stream, each stretch read from its own tables."""
    texts = [[1000 * d + i for i in range(length)] for d, length in enumerate(lengths)]
    samples = []
    for index, count in enumerate(stretches):
        order = build_order(np.array(lengths, dtype=np.int32), range(len(lengths)), count, seq_length, seed + index)
        line = [token for d in order.documents for token in texts[d]]
        samples += [line[j * seq_length : (j + 1) * seq_length] for j in order.shuffle.tolist()]
    return samples


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=8),
    begun=st.lists(st.integers(1, 20), min_size=1, max_size=3),
    used=st.integers(1, 120),
    seq_length=st.integers(1, 9),
)
def test_a_longer_run_appends_and_changes_nothing_before(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], begun: list[int], used: int, seq_length: int
) -> None:
    prefix = tmp_path_factory.mktemp("grow") / "x"
    with IndexedDatasetWriter(prefix, np.int32) as writer:
        for i, length in enumerate(lengths):
            writer.add_document(np.arange(length) + 1000 * i)
    indexed = IndexedDataset(prefix)
    part = range(len(lengths))
    before, same = extend_order(indexed.lengths, part, begun, 1, seq_length, 7)
    order, stretches = extend_order(indexed.lengths, part, begun, used, seq_length, 7)
    held = len(before.shuffle)
    assert same == tuple(begun)
    assert stretches == tuple(begun) + ((used - held,) if used > held else ())
    dataset = GPTDataset(indexed, order)
    assert len(dataset) >= used
    expected = starts_by_hand(lengths, list(stretches), seq_length, 7)
    assert [dataset[i].tokens.tolist() for i in range(len(dataset))] == expected
    first = GPTDataset(indexed, before)
    assert [first[i].tokens.tolist() for i in range(held)] == expected[:held]
    places = np.arange(held)
    assert first.identities(places).tolist() == dataset.identities(places).tolist()
    again, kept = extend_order(indexed.lengths, part, stretches, used, seq_length, 7)
    assert kept == stretches, "what was appended is frozen in its turn"
    assert all(np.array_equal(a, b) for a, b in zip(order[:3], again[:3]))
    assert [t.dtype for t in order[:3]] == [np.int32, np.int32, np.uint32]


def test_a_longer_run_first_reads_what_is_left_of_the_epoch() -> None:
    order, stretches = extend_order(A, range(10), (2,), 6, 8, 1234)
    assert stretches == (2,)
    assert np.array_equal(order.shuffle, build_order(A, range(10), 2, 8, 1234).shuffle)
    order, stretches = extend_order(A, range(10), (2,), 7, 8, 1234)
    assert stretches == (2, 1)
    assert order.epochs == 2
    last, _ = extend_order(A, range(10), (1, 1), 7, 8, 2**32 - 1)  # the last seed there is, and the one after it
    assert np.array_equal(last.documents[10:], build_order(A, range(10), 1, 8, 0).documents)


# --- splits ---


def ends_by_hand(weights: list[float], sequences: int) -> list[tuple[int, int]]:
    weights = (weights + [0.0, 0.0])[:3]
    total = (weights[0] + weights[1]) + weights[2]
    shares: NDArray[np.float64] = np.array(weights) / total
    a, b, c = 0.0 + shares[0], 0.0 + shares[0] + shares[1], 0.0 + shares[0] + shares[1] + shares[2]
    cuts = [0, *(round(float(e) * float(sequences)) for e in (a, b, c))]
    return list(zip(cuts, cuts[1:]))


@pytest.mark.parametrize(
    ("split", "sequences", "expected"),
    [
        ("949,50,1", 10, [(0, 9), (9, 10), (10, 10)]),
        ("969, 30, 1", 10, [(0, 10), (10, 10), (10, 10)]),
        ("90,8,2", 200, [(0, 180), (180, 196), (196, 200)]),
        ("1,1,1", 9, [(0, 3), (3, 6), (6, 9)]),
        ("1/1", 5, [(0, 2), (2, 5), (5, 5)]),  # 2.5 rounds to even
        ("1", 7, [(0, 7), (7, 7), (7, 7)]),
        (".5 .25 .25", 8, [(0, 4), (4, 6), (6, 8)]),
    ],
)
def test_split(split: str, sequences: int, expected: list[tuple[int, int]]) -> None:
    assert [(r.start, r.stop) for r in split_ranges(split, sequences)] == expected


@settings(deadline=None)
@given(st.lists(st.integers(0, 1000), min_size=1, max_size=3), st.integers(0, 10**7))
def test_split_covers_everything_once(weights: list[int], sequences: int) -> None:
    assume(any(weights))
    ranges = split_ranges(",".join(map(str, weights)), sequences)
    assert [(r.start, r.stop) for r in ranges] == ends_by_hand([float(w) for w in weights], sequences)
    assert ranges[0].start == 0
    assert ranges[-1].stop == sequences
    assert all(a.stop == b.start for a, b in zip(ranges, ranges[1:]))
    assert all(len(r) == 0 for r, w in zip(ranges, weights) if w == 0)


@pytest.mark.parametrize("split", ["", "a,b,c", "1,2,3,4", "0,0,0", "-1,1", "1.2.3,1", "1e3,1", "nan", "90%"])
def test_a_split_that_is_no_split_is_refused(split: str) -> None:
    with pytest.raises(DataError, match="is not one to three weights"):
        split_ranges(split, 10)
