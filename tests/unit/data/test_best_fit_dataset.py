"""Best-fit packing: every token once an epoch, no document cut but the long ones, as few samples as the rule gives."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from megatron.data.best_fit_dataset import BestFitDataset, Bins, pack
from megatron.data.blended_dataset import BlendedDataset, ConcatDataset
from megatron.data.build import TABLE_CHECKS, FileSegmentBuilder, SourceSlice, build_split
from megatron.data.dataset import Dataset, Sample
from megatron.data.errors import DataError
from megatron.data.index_cache import IndexCache
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.loader import MaskBuilder
from tests.unit.data.pairs import write_packed

Lengths = list[list[int]]
"""The tokens of the sequences of every document."""

SHORT = [5, 3, 9, 9, 2, 7, 14, 1, 4, 4, 6, 31, 11, 8, 3, 3, 2, 20]
ONE_SEQUENCE: Lengths = [[length] for length in SHORT]
documents = st.lists(st.lists(st.integers(0, 25), max_size=3), min_size=1, max_size=12)


def lists(dataset: Dataset, samples: range) -> list[Sample]:
    return [dataset[i] for i in samples]


def text_of(lengths: Lengths, base: int = 0) -> list[list[list[int]]]:
    """Ids that differ everywhere, from 1."""
    ids = iter(range(base + 1, 10**6))
    return [[[next(ids) for _ in range(length)] for length in document] for document in lengths]


def files(folder: Path, lengths: Lengths, base: int = 0) -> SourceSlice:
    write_packed(folder / f"data{base}", text_of(lengths, base))
    indexed = IndexedDataset(folder / f"data{base}")
    return indexed, range(len(indexed))


def packed(
    parts: list[SourceSlice],
    size: int,
    seq_length: int = 8,
    seed: int = 1,
    weights: list[float] | None = None,
    cache: IndexCache | None = None,
) -> Dataset:
    return FileSegmentBuilder(parts, weights, seq_length, seed, cache, "best-fit")(size)


def one_epoch(part: SourceSlice, seq_length: int = 8, seed: int = 1) -> BestFitDataset:
    dataset = packed([part], 1, seq_length, seed)
    assert isinstance(dataset, BestFitDataset)
    return dataset


def pieces_of(sample: Sample) -> list[list[int]]:
    """The ids of every piece, read from the labels that count: runs in which the documents stay the same."""
    assert sample.loss_mask is not None
    assert sample.documents is not None
    ids = [*sample.tokens.tolist(), int(sample.labels[-1])]
    assert ids[1:] == sample.labels.tolist()
    found = [[ids[0]]]
    for i, counts in enumerate(sample.loss_mask):
        if counts:
            found[-1].append(ids[i + 1])
        else:
            found.append([ids[i + 1]])
    pieces = [piece for piece in found if piece != [0]]
    starts = [0, *np.flatnonzero(np.diff(sample.documents)) + 1]
    assert all(sample.documents[i] == sample.documents[i + 1] for i in np.flatnonzero(sample.loss_mask[:-1]))
    assert len(starts) == len(pieces) + (sum(map(len, pieces)) < len(ids) - 1)  # and the padding
    assert ids == [id for piece in pieces for id in piece] + [0] * (len(ids) - sum(map(len, pieces)))
    return pieces


def rooms_of_plain_best_fit(lengths: list[int], capacity: int) -> list[int]:
    """The rooms that are left by the rule, item by item and bin by bin."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [room for room in rooms if room >= length]
        if fitting:
            rooms.remove(min(fitting))
        rooms.append((min(fitting) if fitting else capacity) - length)
    return sorted(rooms)


def contents(bins: Bins) -> list[NDArray[np.int64]]:
    return [bins.items(i) for i in range(len(bins))]


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 30).flatmap(lambda c: st.tuples(st.just(c), st.lists(st.integers(1, c), min_size=1, max_size=90)))
)
def test_bins_are_those_of_the_rule(drawn: tuple[int, list[int]]) -> None:
    capacity, lengths = drawn
    lengths.sort(reverse=True)
    bins = pack(np.bincount(lengths, minlength=capacity + 1))
    items = contents(bins)
    assert sorted(int(item) for each in items for item in each) == list(range(len(lengths)))
    rooms = [capacity - sum(lengths[item] for item in each) for each in items]
    assert sorted(rooms) == rooms_of_plain_best_fit(lengths, capacity)
    assert bins.padding(capacity - 1) == pytest.approx(sum(rooms) / (capacity * len(rooms)))
    first, last = bins.ends(np.arange(len(bins)))
    assert [(each[0], each[-1]) for each in items] == list(zip(first, last))


@settings(max_examples=40, deadline=None)
@given(lengths=documents, seq_length=st.integers(1, 12), epoch=st.integers(0, 2), seed=st.integers(0, 2**32 - 1))
def test_every_token_once_an_epoch_and_no_document_cut(
    tmp_path_factory: pytest.TempPathFactory, lengths: Lengths, seq_length: int, epoch: int, seed: int
) -> None:
    assume(any(sum(document) > 1 for document in lengths))
    part = files(tmp_path_factory.mktemp("packed"), lengths)
    size = len(one_epoch(part, seq_length))
    dataset = packed([part], 3 * size, seq_length, seed)
    assert len(dataset) == 3 * size
    found = [pieces_of(dataset[i]) for i in range(epoch * size, (epoch + 1) * size)]
    whole = [[id for sequence in document for id in sequence] for document in text_of(lengths)]
    expected = []
    for document in whole:
        cuts = range(0, max(len(document) - 1, 0), seq_length)
        expected += [document[at : at + seq_length + 1] for at in cuts]
    assert sorted(piece for pieces in found for piece in pieces) == sorted(expected)
    predicted = Counter(id for pieces in found for piece in pieces for id in piece[1:])
    assert predicted == Counter(id for document in whole for id in document[1:]), "each token is a label once"
    assert sorted(seq_length + 1 - sum(map(len, pieces)) for pieces in found) == rooms_of_plain_best_fit(
        [len(piece) for piece in expected], seq_length + 1
    )


@settings(max_examples=20, deadline=None)
@given(lengths=documents, ends=st.tuples(st.integers(0, 30), st.integers(0, 30)))
def test_a_document_of_several_sequences_is_in_one_split(
    tmp_path_factory: pytest.TempPathFactory, lengths: Lengths, ends: tuple[int, int]
) -> None:
    indexed, whole = files(tmp_path_factory.mktemp("splits"), lengths)
    cuts = [0, *sorted(min(end, len(whole)) for end in ends), len(whole)]
    found = []
    for start, stop in pairwise(cuts):
        try:
            dataset = one_epoch((indexed, range(start, stop)), 100)
        except DataError:
            continue
        found += [piece for i in range(len(dataset)) for piece in pieces_of(dataset[i])]
    expected = [[id for sequence in document for id in sequence] for document in text_of(lengths)]
    assert sorted(found) == sorted(document for document in expected if len(document) > 1)


def test_spans_name_the_tokens(tmp_path: Path) -> None:
    lengths = [[5, 3, 0, 9], [4], [], [2, 2], [30]]
    indexed, part = files(tmp_path, lengths)
    dataset = one_epoch((indexed, part))
    for i in range(len(dataset)):
        spans = dataset.spans(i)
        assert {span.source for span in spans} == {indexed.prefix}
        read = [id for _, sequence, offset, n in spans for id in indexed.get(sequence, offset, n).tolist()]
        assert read == [id for piece in pieces_of(dataset[i]) for id in piece]


def test_the_order_depends_on_seed_and_epoch_only(tmp_path: Path) -> None:
    part = files(tmp_path, ONE_SEQUENCE * 3)
    size = len(one_epoch(part))
    dataset, other, short = packed([part], 3 * size), packed([part], 3 * size, seed=2), packed([part], size + 1)
    texts = [[sample.tokens.tolist() for sample in lists(each, range(2 * size))] for each in (dataset, other, short)]
    assert texts[0] == texts[2], "a longer run reads the same samples"
    assert texts[0] != texts[1]
    assert texts[0][:size] != texts[0][size:]
    assert {map(tuple, texts[0][:size])} != {map(tuple, texts[0][size:])}, "pieces of equal length change places"
    assert [dataset.epoch_of(i) for i in (0, size - 1, size)] == [0, 0, 1] if isinstance(dataset, BestFitDataset) else 0
    with pytest.raises(IndexError):
        dataset[3 * size]
    hashes = dataset.sample_hashes(np.arange(3 * size))
    assert len({(int(h), str(t)) for h, t in zip(hashes, texts[0])}) == len(set(map(str, texts[0])))
    assert np.array_equal(hashes[5:9], dataset.sample_hashes(np.arange(5, 9)))
    assert np.mean(hashes == other.sample_hashes(np.arange(3 * size))) < 0.3
    assert dataset.fingerprint == short.fingerprint == other.fingerprint
    assert dataset.fingerprint != FileSegmentBuilder([part], None, 8, 1, None)(4).fingerprint


def test_samples_that_hold_documents_are_found(tmp_path: Path) -> None:
    lengths = [[5, 3], [9, 0], [], [31], [2], [1], *ONE_SEQUENCE]
    part = files(tmp_path, lengths)
    dataset = packed([part], 2 * len(one_epoch(part)))
    for sequences in ([0], [1, 4], [2, 3], [5, 6], []):
        wanted = {part[0].prefix: np.array(sequences, dtype=np.int64)}
        assert dataset.places_of(wanted).tolist() == Dataset.places_of(dataset, wanted).tolist()
    assert not len(dataset.places_of({}))


def test_padding_and_usage(tmp_path: Path) -> None:
    dataset = one_epoch(files(tmp_path, [[9], [5], [2], [7], [1], []]))
    assert len(dataset) == 3
    assert dataset.padding == pytest.approx(1 - 23 / 27)  # 9, 7 + 2, 5
    (usage,) = dataset.source_usage(3)
    assert (usage.tokens, usage.once) == (24, 24)
    assert str(usage).endswith("data0, 14.81% padding")


def test_blends_and_longer_runs(tmp_path: Path) -> None:
    """Sources keep their share of the samples, and one is repeated only when all its samples are read."""
    parts = [files(tmp_path, ONE_SEQUENCE, base) for base in (0, 1000)]
    size = len(one_epoch(parts[0]))
    for weights in (None, [3.0, 1.0]):
        builder = FileSegmentBuilder(parts, weights, 8, 1, IndexCache(tmp_path / "cache", TABLE_CHECKS), "best-fit")
        dataset, counts = build_split("train", builder, (size,), 3 * size)
        assert isinstance(dataset, ConcatDataset)
        assert len(dataset.segments) == len(counts) == 2
        assert isinstance(dataset.segments[0], BlendedDataset)
        texts = [sample.tokens for sample in lists(dataset, range(3 * size))]
        of_first = [text for text in texts if text[0] <= 1000]
        share = 0.75 if weights else 0.5
        assert abs(len(of_first) - share * 3 * size) <= 2
        assert len(set(map(bytes, of_first[:size]))) == size
        assert builder.fingerprint == dataset.fingerprint
        assert {span.source for span in dataset.spans(0)} <= {part[0].prefix for part in parts}
        plain = FileSegmentBuilder(parts, weights, 8, 1, None, "best-fit")
        again, _ = build_split("train", plain, counts, 3 * size)
        assert [bytes(sample.tokens) for sample in lists(again, range(3 * size))] == list(map(bytes, texts))


def test_tables_are_checked_when_they_are_read(tmp_path: Path) -> None:
    part = files(tmp_path, ONE_SEQUENCE)
    cache = IndexCache(tmp_path / "cache", TABLE_CHECKS)
    dataset = packed([part], 4, cache=cache)
    again = IndexCache(tmp_path / "cache", TABLE_CHECKS)
    assert packed([part], 4, cache=again)[3].tokens.tolist() == dataset[3].tokens.tolist()
    assert again.notes == []
    tables = {name: np.load(path) for path in (tmp_path / "cache").glob("packing-*/*.npy") for name in [path.stem]}
    facts = {"seq_length": 8}
    TABLE_CHECKS["packing"](facts, tables)
    for name, table in tables.items():
        for wrong in (table + table.max() + 1, table[:-1], table.astype(np.float64), np.roll(table, 1, axis=0)):
            if (
                name in ("rows", "by_length")
                and sorted(wrong.flat) == sorted(table.flat)
                and wrong.dtype == table.dtype
            ):
                continue  # any order is one
            with pytest.raises(ValueError, match=r"(first|by_length|runs|kinds|rows) has"):
                TABLE_CHECKS["packing"](facts, tables | {name: wrong})


def test_data_without_anything_to_predict(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="data0: 2 documents, none of which has two tokens"):
        one_epoch(files(tmp_path, [[1], [1]]))


@pytest.mark.parametrize("resets", [False, True])
def test_masks_follow_the_options(tmp_path: Path, resets: bool) -> None:
    """Documents are those of the pieces, whether or not they end with an id; labels across them never count."""
    dataset = one_epoch(files(tmp_path, [[3], [4], [8]]))
    i = next(i for i in range(2) if len(pieces_of(dataset[i])) == 2)
    arrays = MaskBuilder(None, None, resets, resets).build_samples([dataset[i]])
    assert arrays.loss_mask.tolist() == [[1, 1, 1, 0, 1, 1, 0, 0]]
    if resets:
        assert arrays.positions is not None
        assert arrays.boundaries is not None
        assert arrays.positions.tolist() == [[0, 1, 2, 3, 0, 1, 2, 0]]
        assert arrays.boundaries.tolist() == [0, 4, 7, 8]
    else:
        assert (arrays.positions, arrays.documents) == (None, None)
