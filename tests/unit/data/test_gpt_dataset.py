"""The sample order against Megatron-LM's own tables, and against its description followed step by step."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from benchmarks import megatron_order
from megatron.config.data_paths import SPLITS
from megatron.data.errors import DataError
from megatron.data.gpt_dataset import GPTDataset, SampleOrder, build_sample_order, split_ranges
from megatron.data.indexed_dataset import IndexedDataset
from tests.unit.data.pairs import GOLDEN, write_packed

CASES = {f"case{case['case']}": case for case in json.loads((GOLDEN / "cases.json").read_text())["cases"]}
ASKED = {"train": "n", "valid": "nv", "test": "nt"}


# --- what Megatron-LM gave ---


@pytest.mark.parametrize(
    ("name", "split"), [(name, split) for name, case in CASES.items() for split in SPLITS if case[ASKED[split]]]
)
def test_tables_and_samples_of_megatron(name: str, split: str) -> None:
    case: dict[str, Any] = CASES[name]
    golden = np.load(GOLDEN / f"{name}.npz")
    indexed = IndexedDataset(GOLDEN / name)
    part = split_ranges(case["split"], len(indexed))[SPLITS.index(split)]
    order = build_sample_order(indexed.lengths, part, case[ASKED[split]], case["seq"], case["seed"])
    for name, table in (
        ("document", order.document_index),
        ("sample", order.sample_index),
        ("shuffle", order.shuffle_index),
    ):
        expected = golden[f"{split}_{name}_index"]
        assert table.dtype == expected.dtype
        np.testing.assert_array_equal(table, expected)
    dataset = GPTDataset(indexed, order)
    for i, tokens in zip(golden[f"{split}_probe"], golden[f"{split}_probe_tokens"]):
        np.testing.assert_array_equal(dataset[int(i)].tokens, tokens)


# --- the format description, step by step ---


def equal(order: SampleOrder, expected: megatron_order.Tables) -> bool:
    return (
        order.epochs == expected.epochs
        and order.document_index.tolist() == expected.documents.tolist()
        and order.sample_index.tolist() == [list(row) for row in expected.samples]
        and order.shuffle_index.tolist() == expected.shuffle
        and [table.dtype for table in order[:3]] == [np.int32, np.int32, np.uint32]
    )


@settings(max_examples=50, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=12),
    ends=st.tuples(st.integers(0, 12), st.integers(0, 12)),
    samples=st.one_of(st.none(), st.integers(1, 40)),
    seq_length=st.integers(1, 20),
    seed=st.integers(0, 2**32 - 1),
)
def test_tables_equal_the_description(
    lengths: list[int], ends: tuple[int, int], samples: int | None, seq_length: int, seed: int
) -> None:
    part = range(min(*ends, len(lengths)), min(max(ends), len(lengths)))
    assume(sum(lengths[i] for i in part) > (seq_length if samples is None else 0))
    order = build_sample_order(np.array(lengths, dtype=np.int32), part, samples, seq_length, seed)
    assert equal(order, megatron_order.tables(lengths, list(part), samples, seq_length, seed))
    assert samples is None or len(order.shuffle_index) >= samples


@pytest.mark.parametrize(("size", "apart"), [(179, True), (180, False)])
def test_a_last_epoch_is_shuffled_apart_below_four_fifths(size: int, apart: bool) -> None:
    """100 samples to an epoch, so 79 and 80 of the second one."""
    order = build_sample_order(np.array([1001], dtype=np.int32), range(1), size, 10, 3)
    assert order.epochs == 2
    assert (set(order.shuffle_index[:100].tolist()) == set(range(100))) == apart
    assert equal(order, megatron_order.tables([1001], [0], size, 10, 3))


@pytest.mark.parametrize("seq_length", [3, 100])
def test_tables_of_more_sequences_than_are_counted_at_once(seq_length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.data.gpt_dataset.SEQUENCES_AT_ONCE", 500)
    lengths = np.random.RandomState(5).randint(0, 9, 1007).astype(np.int32)
    part, size = range(3, len(lengths) - 2), int(lengths.sum()) // seq_length + 5
    order = build_sample_order(lengths, part, size, seq_length, 7)
    assert order.epochs == 2
    assert equal(order, megatron_order.tables(lengths.tolist(), list(part), size, seq_length, 7))


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 12), min_size=2, max_size=12),
    samples=st.integers(1, 30),
    seq_length=st.integers(1, 20),
)
def test_samples_equal_the_description(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], samples: int, seq_length: int
) -> None:
    assume(sum(lengths))
    texts = [[100 * i + n for n in range(length)] for i, length in enumerate(lengths)]
    prefix = tmp_path_factory.mktemp("text") / "x"
    write_packed(prefix, [[text] for text in texts])
    indexed = IndexedDataset(prefix)
    dataset = GPTDataset(indexed, build_sample_order(indexed.lengths, range(len(lengths)), samples, seq_length, 7))
    expected = megatron_order.tables(lengths, list(range(len(lengths))), samples, seq_length, 7)
    for i in range(len(dataset)):
        ids = megatron_order.item(texts, expected, i)
        assert dataset[i].tokens.tolist() == ids[:-1]
        assert dataset[i].labels.tolist() == ids[1:]


def test_a_sample_outside_is_refused() -> None:
    indexed = IndexedDataset(GOLDEN / "case0")
    dataset = GPTDataset(indexed, build_sample_order(indexed.lengths, range(200), None, 32, 1))
    for i in (-1, len(dataset)):
        with pytest.raises(IndexError, match=f"sample {i} of a dataset of {len(dataset)}"):
            dataset[i]


@pytest.mark.parametrize(("lengths", "samples"), [([0, 0], 5), ([0, 0], None), ([3, 5], None)])
def test_too_few_tokens_are_refused(lengths: list[int], samples: int | None) -> None:
    with pytest.raises(DataError, match=f"with {sum(lengths)} tokens holds no sample of 8 \\+ 1"):
        build_sample_order(np.array(lengths, dtype=np.int32), range(2), samples, 8, 1)


def test_places_beyond_32_bits() -> None:
    """Sequences of almost 2**31 tokens, whose ends are counted in 64 bits."""
    length = 2**31 - 8
    order = build_sample_order(np.array([length] * 4, dtype=np.int32), range(4), None, 2**30, 1)
    starts = [divmod(j * 2**30, length) for j in range(len(order.shuffle_index))]
    assert order.sample_index[:-1].tolist() == [list(start) for start in starts]
    assert len(starts) == 7


def test_more_places_than_32_bits_count_have_64(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = np.array([5] * 10, dtype=np.int32)
    narrow = build_sample_order(lengths, range(10), None, 8, 1)
    monkeypatch.setattr("megatron.data.gpt_dataset.PLACES_IN_32_BITS", 10)
    wide = build_sample_order(lengths, range(10), None, 8, 1)
    assert (narrow.sample_index.dtype, wide.sample_index.dtype) == (np.int32, np.int64)
    assert np.array_equal(narrow.sample_index, wide.sample_index)
    assert build_sample_order(lengths, range(9), None, 8, 1).sample_index.dtype == np.int32


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
        ("1,1", 5, [(0, 2), (2, 5), (5, 5)]),  # 2.5 rounds to even
        ("1", 7, [(0, 7), (7, 7), (7, 7)]),
        (".5, .25 ,.25", 8, [(0, 4), (4, 6), (6, 8)]),
    ],
)
def test_split(split: str, sequences: int, expected: list[tuple[int, int]]) -> None:
    assert [(r.start, r.stop) for r in split_ranges(split, sequences)] == expected


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 1000), min_size=1, max_size=3), st.integers(0, 10**7))
def test_split_covers_everything_once(weights: list[int], sequences: int) -> None:
    assume(any(weights))
    ranges = split_ranges(",".join(map(str, weights)), sequences)
    assert [(r.start, r.stop) for r in ranges] == ends_by_hand([float(w) for w in weights], sequences)
    assert ranges[0].start == 0
    assert ranges[-1].stop == sequences
    assert all(a.stop == b.start for a, b in zip(ranges, ranges[1:]))
    assert all(len(r) == 0 for r, w in zip(ranges, weights) if w == 0)
