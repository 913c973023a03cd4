"""Stretches end to end: each as if it were alone, and nothing before changed by what is appended."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.blended_dataset import ConcatDataset, segments_of
from megatron.data.build import FileSegmentBuilder
from megatron.data.dataset import Dataset, MockDataset
from megatron.data.gpt_dataset import GPTDataset, build_sample_order
from megatron.data.indexed_dataset import IndexedDataset

GOLDEN = Path(__file__).parents[2] / "golden" / "megatron"
FILES = [IndexedDataset(GOLDEN / f"case{i}") for i in (0, 1)]


def alone(samples: int, seed: int) -> Dataset:
    return GPTDataset(FILES[0], build_sample_order(FILES[0].lengths, range(200), samples, 32, seed))


def blended(samples: int, seed: int) -> Dataset:
    return FileSegmentBuilder([(files, range(len(files))) for files in FILES], [2, 1], 32, seed, None)(samples)


def ids(dataset: Dataset) -> list[list[int]]:
    return [dataset[i].tokens.tolist() for i in range(len(dataset))]


@pytest.mark.parametrize("make", [alone, blended])
@settings(max_examples=15, deadline=None)
@given(counts=st.lists(st.integers(1, 300), min_size=1, max_size=4))
def test_it_is_its_segments_one_after_another(make: type[Dataset], counts: list[int]) -> None:
    segments = [make(count, 7 + i) for i, count in enumerate(counts)]
    chain = ConcatDataset(segments)
    assert len(chain) == sum(map(len, segments))
    assert ids(chain) == [text for segment in segments for text in ids(segment)]
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


@pytest.mark.parametrize("make", [alone, blended])
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


def test_generated_samples_go_on() -> None:
    whole = MockDataset(1000, 16, 12, 5, stream=1)
    chain = ConcatDataset([MockDataset(1000, 16, 7, 5, 1), MockDataset(1000, 16, 5, 5, 1, first=7)])
    assert ids(chain) == ids(whole)
    places = np.arange(12)
    assert np.array_equal(chain.sample_hashes(places), whole.sample_hashes(places))
    assert chain.fingerprint == whole.fingerprint
    assert chain.describe(160) == whole.describe(160) == "160 generated tokens over 256 ids"
    assert chain.source_usage(12) == ()


@pytest.mark.parametrize("i", [-1, 12])
def test_a_sample_outside_is_refused(i: int) -> None:
    chain = ConcatDataset([MockDataset(1000, 16, 7, 5), MockDataset(1000, 16, 5, 5)])
    with pytest.raises(IndexError, match=f"sample {i} of a dataset of 12"):
        chain[i]
