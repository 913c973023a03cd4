"""Blends against what Megatron-LM's helper gave and against its rule followed step by step; segments end to end."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import megatron_order
from megatron.config.data_paths import MAX_BLEND_DATASETS
from megatron.data import blended_dataset
from megatron.data.blended_dataset import BlendedDataset, BlendIndex, ConcatDataset, build_blend_index, segments_of
from megatron.data.build import FileSegmentBuilder
from megatron.data.dataset import Dataset
from megatron.data.errors import DataError
from megatron.data.gpt_dataset import GPTDataset, build_sample_order
from megatron.data.indexed_dataset import IndexedDataset
from tests.unit.data.pairs import GOLDEN

BLENDS = json.loads((GOLDEN / "cases.json").read_text())["blends"]


def pairs(index: BlendIndex) -> list[tuple[int, int]]:
    datasets, samples = index
    assert (datasets.dtype, samples.dtype) == (np.int16, np.int64)
    return list(zip(datasets.tolist(), samples.tolist()))


@pytest.mark.parametrize("golden", BLENDS, ids=lambda golden: str(golden["weights"]))
def test_blends_of_megatron(golden: dict[str, Any]) -> None:
    expected = list(zip(golden["dataset_index"], golden["dataset_sample_index"]))
    assert pairs(build_blend_index(golden["weights"], golden["size"])) == expected


def compiled(worth: int) -> AbstractContextManager[object]:
    """Blends of ``worth`` comparisons or more are compiled."""
    return patch.object(blended_dataset, "COMPILE_ABOVE", worth)


WEIGHTS = st.one_of(
    st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=40),
    st.lists(st.integers(1, 6).map(float), min_size=1, max_size=40),  # many ties
)


@settings(max_examples=25, deadline=None)
@given(WEIGHTS, st.integers(1, 600))
def test_a_blend_equals_the_rule(weights: list[float], size: int) -> None:
    expected = megatron_order.interleaved(megatron_order.normalised(weights), size)
    for worth in (0, 10**9):
        with compiled(worth):
            assert pairs(build_blend_index(weights, size)) == expected


def test_a_blend_of_many_sources() -> None:
    weights = np.random.RandomState(3).random_sample(300) + 1e-3
    found = pairs(build_blend_index(weights, 1500))
    assert found == megatron_order.interleaved(megatron_order.normalised(weights.tolist()), 1500)
    datasets, _ = build_blend_index(np.ones(MAX_BLEND_DATASETS), 5000)
    assert np.array_equal(datasets, np.arange(5000))


@pytest.mark.parametrize(
    ("weights", "sentence"),
    [
        ([], "a blend has 1 to 32,766 sources, not 0"),
        ([1.0] * (MAX_BLEND_DATASETS + 1), "not 32,767"),
        ([1.0, 0.0], "weight 2 of a blend is 0.0, not a number above 0"),
        ([-1.0, 1.0], "weight 1 of a blend is -1.0"),
        ([1.0, float("nan")], "weight 2 of a blend is nan"),
        ([float("inf"), 1.0], "weight 1 of a blend is inf"),
    ],
)
def test_weights_that_are_none_are_refused(weights: list[float], sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        build_blend_index(weights, 10)


# --- samples ---


def blended(weights: list[float], size: int) -> tuple[BlendedDataset, list[GPTDataset]]:
    files = [IndexedDataset(GOLDEN / f"case{i}") for i in (0, 1)]
    parts = [GPTDataset(f, build_sample_order(f.lengths, range(len(f)), size, 16, 7)) for f in files]
    return BlendedDataset(parts, *build_blend_index(weights, size), weights), parts


def test_samples_come_from_their_datasets() -> None:
    dataset, parts = blended([0.7, 0.3], 50)
    expected = megatron_order.interleaved([0.7, 0.3], 50)
    assert len(dataset) == 50
    for i, (k, j) in enumerate(expected):
        assert dataset[i].tokens.tolist() == parts[k][j].tokens.tolist()
        assert dataset[i].labels.tolist() == parts[k][j].labels.tolist()
    for i in (-1, 50):
        with pytest.raises(IndexError, match=f"sample {i} of a blend of 50"):
            dataset[i]


def test_source_usage_count_each_source() -> None:
    dataset, parts = blended([0.7, 0.3], 50)
    one, other = dataset.source_usage(10)
    assert (one.tokens, other.tokens) == (7 * 16, 3 * 16)
    assert (one.source, one.once) == (parts[0].source, parts[0].tokens)
    assert (one.epochs, other.epochs) == (7 * 16 / one.once, 3 * 16 / other.once)
    lines = dataset.describe(160).splitlines()
    assert lines == [part.describe(n * 16) for part, n in zip(parts, (7, 3))]


def test_identities_separate_samples_and_datasets() -> None:
    dataset, _ = blended([0.7, 0.3], 500)
    places = np.arange(500)
    found = dataset.sample_hashes(places)
    assert len(set(found.tolist())) == 500
    mixed = np.random.RandomState(0).permutation(500)
    assert np.array_equal(dataset.sample_hashes(mixed), found[mixed])
    assert dataset.sample_hashes(places[:0]).shape == (0,)
    twice = blended([0.7, 0.3], 500)[0]
    assert np.array_equal(twice.sample_hashes(places), found)
    other, _ = blended([0.6, 0.4], 500)
    assert not np.array_equal(other.sample_hashes(places), found)


def test_the_same_files_twice_are_two_datasets() -> None:
    _, (part, _) = blended([1, 1], 50)
    dataset = BlendedDataset([part, part], *build_blend_index([1, 1], 50))
    assert dataset[0].tokens.tolist() == dataset[1].tokens.tolist()
    assert len(set(dataset.sample_hashes(np.arange(50)).tolist())) == 50


def test_a_dataset_asked_for_more_than_it_has_is_refused() -> None:
    files = IndexedDataset(GOLDEN / "case0")
    part = GPTDataset(files, build_sample_order(files.lengths, range(3), 2, 32, 7))
    size = len(part) + 1
    with pytest.raises(ValueError, match=f"{size} samples of {part.source}, which holds {size - 1}"):
        BlendedDataset([part], *build_blend_index([1.0], size))


FILES = [IndexedDataset(GOLDEN / f"case{i}") for i in (0, 1)]


def alone(samples: int, seed: int) -> Dataset:
    return GPTDataset(FILES[0], build_sample_order(FILES[0].lengths, range(200), samples, 32, seed))


def two_files(samples: int, seed: int) -> Dataset:
    return FileSegmentBuilder([(files, range(len(files))) for files in FILES], [2, 1], 32, seed, None)(samples)


def ids(dataset: Dataset) -> list[list[int]]:
    return [dataset[i].tokens.tolist() for i in range(len(dataset))]


@pytest.mark.parametrize("make", [alone, two_files])
@settings(max_examples=15, deadline=None)
@given(counts=st.lists(st.integers(1, 300), min_size=1, max_size=4))
def test_it_is_its_segments_one_after_another(make: type[Dataset], counts: list[int]) -> None:
    segments = [make(count, 7 + i) for i, count in enumerate(counts)]
    chain = ConcatDataset(segments)
    assert len(chain) == sum(map(len, segments))
    assert ids(chain) == [text for segment in segments for text in ids(segment)]
    files = {str(each.prefix): each for each in FILES}
    for i in range(len(chain)):
        read = [files[source].get(number, offset, n) for source, number, offset, n in chain.spans(i)]
        assert np.concatenate(read).tolist() == [*chain[i].tokens.tolist(), int(chain[i].labels[-1])]
    expected = np.concatenate([segment.sample_hashes(np.arange(len(segment))) for segment in segments])
    places = np.arange(len(chain))
    assert np.array_equal(chain.sample_hashes(places), expected)
    backwards = places[::-1].copy()
    assert np.array_equal(chain.sample_hashes(backwards), expected[::-1])
    assert chain.sample_hashes(places[:0]).shape == (0,)
    assert chain.fingerprint == segments[0].fingerprint == segments[-1].fingerprint
    assert chain.seq_length == 32
    assert segments_of(chain) == tuple(segments)
    assert segments_of(segments[0]) == (segments[0],)


@pytest.mark.parametrize("make", [alone, two_files])
def test_source_usage_add_up_over_segments(make: type[Dataset]) -> None:
    segments = [make(100, 7), make(50, 8)]
    chain, first = ConcatDataset(segments), len(segments[0])
    for samples in (0, 1, first - 1, first, first + 1, len(chain)):
        before, after = min(samples, first), max(0, samples - first)
        pairs = zip(segments[0].source_usage(before), segments[1].source_usage(after))
        expected = tuple(one._replace(tokens=one.tokens + other.tokens) for one, other in pairs)
        assert chain.source_usage(samples) == expected
        assert sum(reading.tokens for reading in expected) == samples * 32
    assert chain.describe(64) == segments[0].describe(64)
    assert len(chain.describe(64).splitlines()) == len(segments[0].source_usage(0))
