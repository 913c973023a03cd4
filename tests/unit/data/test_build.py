"""Stretches of one or several sources against Megatron-LM's rules followed step by step, in memory and from a cache."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from benchmarks import megatron_order
from megatron.data.blended_dataset import BlendedDataset, ConcatDataset, segments_of
from megatron.data.build import TABLE_CHECKS, FileSegmentBuilder, SourceSlice
from megatron.data.dataset import Dataset
from megatron.data.errors import DataError
from megatron.data.gpt_dataset import GPTDataset
from megatron.data.index_cache import ABOUT, IndexCache
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.loader import DataSource
from tests.unit.data.pairs import GOLDEN, write_packed


def build_segment(
    parts: list[SourceSlice],
    weights: list[float] | None,
    size: int,
    seq_length: int,
    seed: int,
    cache: IndexCache | None,
) -> Dataset:
    return FileSegmentBuilder(parts, weights, seq_length, seed, cache)(size)


def written(folder: Path, lengths: list[list[int]]) -> tuple[list[SourceSlice], list[list[list[int]]]]:
    """Token files of sequences of the given lengths, all of whose ids differ; what they hold, file by file."""
    parts, texts = [], []
    for k, of_file in enumerate(lengths):
        texts.append([[10_000 * k + 100 * i + n for n in range(length)] for i, length in enumerate(of_file)])
        write_packed(folder / str(k), [[text] for text in texts[-1]])
        parts.append((IndexedDataset(folder / str(k)), range(len(of_file))))
    return parts, texts


def expected_samples(
    lengths: list[list[int]],
    texts: list[list[list[int]]],
    weights: list[float] | None,
    size: int,
    seq_length: int,
    seed: int,
) -> list[list[int]]:
    """The ids of every sample of a blend, from the description."""
    blend = megatron_order.Blend.of(weights, len(lengths), size)
    made = [
        megatron_order.tables(of_file, list(range(len(of_file))), asked, seq_length, seed)
        for of_file, asked in zip(lengths, blend.asked)
    ]
    places = blend.places(size, [len(tables.shuffle) for tables in made])
    return [megatron_order.item(texts[k], made[k], j) for k, j in places]


def ids(dataset: Dataset) -> list[list[int]]:
    return [[*sample.tokens.tolist(), int(sample.labels[-1])] for sample in (dataset[i] for i in range(len(dataset)))]


LENGTHS = st.lists(st.integers(0, 12), min_size=1, max_size=8)


@settings(max_examples=30, deadline=None)
@given(
    sources=st.lists(st.tuples(LENGTHS, st.sampled_from([0.1, 0.3, 1.0, 1.0, 7.0])), min_size=1, max_size=5),
    weighted=st.booleans(),
    size=st.integers(1, 60),
    seq_length=st.integers(1, 9),
    seed=st.integers(0, 2**32 - 1),
)
def test_blends_equal_the_description(
    tmp_path_factory: pytest.TempPathFactory,
    sources: list[tuple[list[int], float]],
    weighted: bool,
    size: int,
    seq_length: int,
    seed: int,
) -> None:
    lengths, weights = [lengths for lengths, _ in sources], [weight for _, weight in sources] if weighted else None
    assume(weighted or len(sources) > 1)
    assume(all(sum(of_file) > (0 if weighted else seq_length) for of_file in lengths))
    folder = tmp_path_factory.mktemp("blend")
    parts, texts = written(folder, lengths)
    expected = expected_samples(lengths, texts, weights, size, seq_length, seed)
    assert not weighted or len(expected) >= size
    for _ in range(2):  # built, then read
        cache = IndexCache(folder / "cache", TABLE_CHECKS)
        dataset = build_segment(parts, weights, size, seq_length, seed, cache)
        assert isinstance(dataset, BlendedDataset)
        assert ids(dataset) == expected
        assert cache.notes == []
    assert ids(build_segment(parts, weights, size, seq_length, seed, None)) == expected


def expected_segments(
    lengths: list[list[int]],
    texts: list[list[list[int]]],
    weights: list[float] | None,
    counts: list[int],
    seq_length: int,
    seed: int,
) -> list[list[int]]:
    """The ids of every sample of a blend that was made longer: each source goes on with its order, then a new one."""
    blend = megatron_order.Blend.of(weights, len(lengths), counts[0])
    streams: list[list[list[int]]] = [[] for _ in lengths]

    def lay_out(k: int, asked: int | None, seed: int) -> int:
        made = megatron_order.tables(lengths[k], list(range(len(lengths[k]))), asked, seq_length, seed)
        streams[k] += [megatron_order.item(texts[k], made, i) for i in range(len(made.shuffle))]
        return len(made.shuffle)

    held = [lay_out(k, asked, seed) for k, asked in enumerate(blend.asked)]
    shares = megatron_order.normalised(blend.shares or [float(n) for n in held])
    read: list[list[int]] = []
    taken = [0] * len(lengths)
    for number, count in enumerate(counts):
        places = megatron_order.interleaved(shares, count) if number else blend.places(count, held)
        for k in range(len(lengths)):
            missing = taken[k] + [source for source, _ in places].count(k) - len(streams[k])
            if missing > 0:
                lay_out(k, missing, seed + number)
        read += [streams[k][taken[k] + j] for k, j in places]
        taken = [before + [source for source, _ in places].count(k) for k, before in enumerate(taken)]
    return read


@settings(max_examples=20, deadline=None)
@given(
    sources=st.lists(st.tuples(LENGTHS, st.sampled_from([0.1, 1.0, 1.0, 7.0])), min_size=1, max_size=4),
    weighted=st.booleans(),
    counts=st.lists(st.integers(1, 40), min_size=2, max_size=4),
    seq_length=st.integers(1, 9),
    seed=st.integers(0, 2**31),
)
def test_a_longer_blend_reads_every_sample_before_any_again(
    tmp_path_factory: pytest.TempPathFactory,
    sources: list[tuple[list[int], float]],
    weighted: bool,
    counts: list[int],
    seq_length: int,
    seed: int,
) -> None:
    lengths, weights = [lengths for lengths, _ in sources], [weight for _, weight in sources] if weighted else None
    assume(weighted or len(sources) > 1)
    assume(all(sum(of_file) > (0 if weighted else seq_length) for of_file in lengths))
    folder = tmp_path_factory.mktemp("longer")
    parts, texts = written(folder, lengths)
    for cache in (IndexCache(folder / "cache", TABLE_CHECKS), None):
        build = FileSegmentBuilder(parts, weights, seq_length, seed, cache)
        segments: list[Dataset] = []
        for count in counts:
            segments.append(build(count, segments))
        blend = segments[-1]
        assert isinstance(blend, BlendedDataset)
        whole = ConcatDataset(segments)
        assert ids(whole) == expected_segments(lengths, texts, weights, counts, seq_length, seed)
        assert [len(segment) for segment in segments[1:]] == counts[1:]
        assert len({segment.fingerprint for segment in segments}) == 1
    for k, source in enumerate(blend.datasets):
        read = [text for text in ids(whole) if text[0] // 10_000 == k]
        assert whole.source_usage(len(whole))[k].tokens == len(read) * seq_length
        for order in map(ids, segments_of(source)):  # as often as it was laid out, and only then from the next order
            block, read = Counter(map(tuple, read[: len(order)])), read[len(order) :]
            assert not block - Counter(map(tuple, order))
            assert not read or block.total() == len(order)
        assert not read


def golden_parts(*cases: int) -> list[SourceSlice]:
    files = [IndexedDataset(GOLDEN / f"case{i}") for i in cases]
    return [(indexed, range(len(indexed))) for indexed in files]


def test_weights_are_divided_by_their_sum_twice() -> None:
    """The last bit of a weight decides ties: here at place 5 already."""
    weights = [2.8, 0.7]
    once = megatron_order.normalised(weights)
    dataset = build_segment(golden_parts(0, 1), weights, 20, 32, 1234, None)
    assert isinstance(dataset, BlendedDataset)
    assert dataset.dataset_index.tolist() == [
        k for k, _ in megatron_order.interleaved(megatron_order.normalised(once), 20)
    ]
    assert dataset.dataset_index.tolist() != [k for k, _ in megatron_order.interleaved(once, 20)]


def test_a_blend_of_many_sources_ends_with_a_source_and_holds_the_requested_shares(tmp_path: Path) -> None:
    """Shares rounded up are 1.5 times the 100 samples, of which the largest source would give more than it has."""
    lengths = [[9]] * 60
    parts, _ = written(tmp_path, lengths)
    weights = [30.0] + [0.5] * 59
    dataset = build_segment(parts, weights, 100, 4, 1, None)
    assert 100 <= len(dataset) < 34 + 86
    places = megatron_order.interleaved(megatron_order.normalised(megatron_order.normalised(weights)), len(dataset))
    assert isinstance(dataset, BlendedDataset)
    assert np.bincount([k for k, _ in places], minlength=60).tolist() == [
        r.tokens // 4 for r in dataset.source_usage(len(dataset))
    ]


def test_seeds_are_counted_modulo_the_largest() -> None:
    one = build_segment(golden_parts(0), None, 50, 32, 2**32 + 5, None)
    other = build_segment(golden_parts(0), None, 50, 32, 5, None)
    assert ids(one) == ids(other)


def test_splits_and_settings_have_entries_of_their_own(tmp_path: Path) -> None:
    (indexed, _), *_ = golden_parts(0)
    asked = [(range(180), 400, 32, 1), (range(180, 200), 400, 32, 1), (range(180), 401, 32, 1)]
    asked += [(range(180), 400, 33, 1), (range(180), 400, 32, 2)]
    for _ in range(2):
        for part, size, seq_length, seed in asked:
            cache = IndexCache(tmp_path, TABLE_CHECKS)
            cached = build_segment([(indexed, part)], None, size, seq_length, seed, cache)
            assert cache.notes == []
            assert ids(cached) == ids(build_segment([(indexed, part)], None, size, seq_length, seed, None))
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == len(asked)


def test_another_corpus_under_the_same_name_is_rebuilt(tmp_path: Path) -> None:
    one, _ = written(tmp_path, [[5, 9, 9, 4]])
    build_segment(one, None, 10, 4, 1, IndexCache(tmp_path / "cache", TABLE_CHECKS))
    other, texts = written(tmp_path, [[5, 9, 8, 5]])
    cache = IndexCache(tmp_path / "cache", TABLE_CHECKS)
    dataset = build_segment(other, None, 10, 4, 1, cache)
    made = megatron_order.tables([5, 9, 8, 5], [0, 1, 2, 3], 10, 4, 1)
    assert ids(dataset) == [megatron_order.item(texts[0], made, i) for i in range(len(dataset))]


FORGERIES: dict[str, Callable[[NDArray[Any]], NDArray[Any]]] = {
    "objects": lambda table: np.frombuffer(b"A" * 8 * table.size, "S8").reshape(table.shape),  # header: see `forge`
    "floats": lambda table: table.astype(np.float64),
    "wider": lambda table: table.astype(np.int64 if table.dtype.itemsize < 8 else np.int32),
    "texts": lambda table: table.astype("S8"),
    "shorter": lambda table: table[:-1],
    "negative": lambda table: np.concatenate([table[:-1].astype(np.int64), table[-1:] * 0 - 1]),
    "too large": lambda table: np.concatenate([table[:-1].astype(np.int64), table[-1:] * 0 + 10_000]),
    "flat": lambda table: table.reshape(1, *table.shape),
}


def forge(entry: Path, name: str, how: str) -> None:
    """Replace a table of a cache entry by another one with the right checksum."""
    table = np.load(entry / f"{name}.npy")
    forged = FORGERIES[how](table)
    if how in ("negative", "too large"):
        forged = forged.astype(table.dtype)
    np.save(entry / f"{name}.npy", forged)
    content = (entry / f"{name}.npy").read_bytes()
    if how == "objects":  # every eight bytes of the file would be the address of an object
        content = content.replace(b"'|S8'", b"'|O' ")
        (entry / f"{name}.npy").write_bytes(content)
    about = json.loads((entry / ABOUT).read_text())
    about["tables"][name] = len(content), xxhash.xxh3_64_hexdigest(content)
    (entry / ABOUT).write_text(json.dumps(about))


@pytest.mark.parametrize("how", FORGERIES)
@pytest.mark.parametrize(
    "name", ["order-documents", "order-samples", "order-shuffle", "blend-datasets", "blend-samples"]
)
def test_forged_tables_are_not_used(tmp_path: Path, name: str, how: str) -> None:
    """Whoever can write to the cache can make tables whose checksums are right."""
    parts, _ = written(tmp_path, [[5, 9, 9, 4], [8, 3, 7]])
    expected = ids(build_segment(parts, [1, 2], 20, 4, 1, IndexCache(tmp_path / "cache", TABLE_CHECKS)))
    kind, table = name.split("-")
    for entry in (tmp_path / "cache").glob(f"{kind}-*/"):
        forge(entry, table, how)
    cache = IndexCache(tmp_path / "cache", TABLE_CHECKS)
    assert ids(build_segment(parts, [1, 2], 20, 4, 1, cache)) == expected
    assert cache.notes
    assert all("are damaged and not used: " in note for note in cache.notes)


def test_an_offset_beyond_its_sequence_ends_the_run_with_a_sentence(tmp_path: Path) -> None:
    parts, _ = written(tmp_path, [[5, 9, 9, 4]])
    dataset = build_segment(parts, None, 10, 4, 1, None)
    assert isinstance(dataset, GPTDataset)
    samples = dataset.order.sample_index.copy()
    samples[:, 1] = 20
    forged = GPTDataset(parts[0][0], dataset.order._replace(sample_index=samples))
    source = DataSource({"train": forged}, {"train": (10,)}, {"train": 10}, 4, 1, 40_000)
    sentence = r"training sample \d cannot be read: tokens .*; its index table is not that of the data"
    with pytest.raises(DataError, match=sentence):
        source.micro_batch("train", range(10), 1)


def test_a_source_without_a_sample_is_named(tmp_path: Path) -> None:
    parts, _ = written(tmp_path, [[5, 6], [0], [3]])
    with pytest.raises(DataError, match=f"{tmp_path / '1'}: a part of the data with 0 tokens"):
        build_segment(parts, [1, 1, 1], 10, 4, 1, None)
    with pytest.raises(DataError, match=f"{tmp_path / '2'}: a part of the data with 3 tokens"):
        build_segment([parts[0], parts[2]], None, 10, 4, 1, None)
