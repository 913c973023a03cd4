"""The order of a mixture's samples, against documents that are shuffled and laid out one by one."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from megatron.config.batch import WHOLE_RUN, Origin
from megatron.config.mixture import Mixture, MixtureStage, Quota, Source
from megatron.data import interleave, mixture
from megatron.data.blended_dataset import ConcatDataset
from megatron.data.index_cache import IndexCache
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.interleave import Interleave
from megatron.data.mixture import DocumentStream, MixtureSegmentBuilder
from megatron.data.permutation import permute
from tests.unit.data.pairs import write_packed

Token = tuple[str, int, int]
"""Prefix, sequence and offset."""


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take parts of the order so small that the samples of a test are in many."""
    monkeypatch.setattr(mixture, "DOCUMENTS_PER_SUM", 4)
    monkeypatch.setattr(mixture, "CACHED_ABOVE", 1)
    monkeypatch.setattr(interleave, "BLOCK", 16)
    monkeypatch.setattr(interleave, "STATES_KEPT", 2)


def made_source(folder: Path, name: str, draw: random.Random, cache: IndexCache | None = None) -> DocumentStream:
    """A source of up to three files; documents are empty, of one token, or of several sequences."""
    files = []
    for number in range(draw.randint(1, 3)):
        documents = [
            [[draw.randrange(1, 1000) for _ in range(draw.choice([0, 1, 1, 4, 9, 30]))] for _ in range(sequences)]
            for sequences in draw.choices([0, 1, 1, 1, 3], k=draw.randint(1, 12))
        ]
        files.append(IndexedDataset(write_packed(folder / f"{name}-{number}", [*documents, [[7]]])))
    return DocumentStream(name, files, 11, cache)


def tokens_of(stream: DocumentStream, begin: int, tokens: int) -> list[Token]:
    spans = (span for _, span in stream.spans(begin, tokens))
    return [(span.source, span.sequence, span.offset + i) for span in spans for i in range(span.tokens)]


def epochs_of(stream: DocumentStream) -> Iterator[list[Token]]:
    """Yield the tokens of each epoch, from the order of the documents."""
    documents = [
        [(file.prefix, s, i) for s in range(begin, end) for i in range(file.lengths[s])]
        for file in stream.files
        for begin, end in pairwise(file.documents.tolist())
    ]
    epoch = 0
    while True:
        order = stream.order(epoch, range(len(documents))).tolist()
        assert sorted(order) == [*range(len(documents))]
        yield [token for document in order for token in documents[document]]
        epoch += 1


@pytest.mark.parametrize("seed", range(6))
def test_a_source_is_its_documents_shuffled_in_every_epoch(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    stream = made_source(tmp_path, "web", draw)
    epochs = epochs_of(stream)
    expected = [token for _ in range(5) for token in next(epochs)]
    assert len(expected) == 5 * stream.tokens
    for _ in range(20):
        begin = draw.randrange(3 * stream.tokens)
        count = draw.randint(1, 2 * stream.tokens)
        assert tokens_of(stream, begin, count) == expected[begin : begin + count]


def test_epochs_and_sources_have_orders_of_their_own(tmp_path: Path) -> None:
    prefix = write_packed(tmp_path / "many", [[[i]] for i in range(1, 200)])
    orders = [
        tuple(DocumentStream(name, [IndexedDataset(prefix)], seed, None).order(epoch, range(199)).tolist())
        for name, seed, epoch in [("a", 1, 0), ("a", 1, 1), ("a", 2, 0), ("b", 1, 0)]
    ]
    assert len(set(orders)) == 4
    displaced = [abs(place - document) for order in orders for place, document in enumerate(order)]
    assert 55 < sum(displaced) / len(displaced) < 78  # a third of the documents, for a shuffle


def builder(
    streams: Sequence[DocumentStream], stages: Sequence[MixtureStage], length: int, origin: Origin = WHOLE_RUN
) -> MixtureSegmentBuilder:
    found = Mixture("file", {stream.name: Source(stream.name, ()) for stream in streams}, tuple(stages))
    return MixtureSegmentBuilder(found, streams, length, origin, 0)


def made_stages(draw: random.Random, names: Sequence[str]) -> list[MixtureStage]:
    def mix() -> dict[str, Quota]:
        chosen = draw.sample(names, draw.randint(1, len(names)))
        return {name: Quota("share", Fraction(draw.randint(1, 9))) for name in chosen}

    return [MixtureStage(f"s{i}", mix(), share=Fraction(1, 3)) for i in range(3)]


@pytest.mark.parametrize("seed", range(8))
def test_no_token_is_read_again_before_all_others(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    streams = [made_source(tmp_path, name, draw) for name in "abc"[: draw.randint(1, 3)]]
    names = [stream.name for stream in streams]
    stages, length = made_stages(draw, names), draw.choice([1, 3, 8, 50])
    first = builder(streams, stages, length)(draw.randint(20, 120))
    longer = ConcatDataset([first, builder(streams, stages, length)(30, [first])])
    later = Origin(sources={usage.source: usage.tokens for usage in longer.source_usage(len(longer))})
    # another phase continues with another length of samples
    phase = builder(streams, stages, 5, later)(40)
    read = {name: Counter[Token]() for name in names}
    for dataset, i in [*((longer, i) for i in range(len(longer))), *((phase, i) for i in range(len(phase)))]:
        spans = dataset.spans(i)
        tokens = [(span.source, span.sequence, span.offset + k) for span in spans for k in range(span.tokens)][:-1]
        assert len(tokens) == dataset.seq_length
        (source,) = {Path(token[0]).name.partition("-")[0] for token in tokens}
        read[source].update(tokens)
        counts = read[source].values()
        complete = len(counts) == streams[names.index(source)].tokens
        assert max(counts) - (min(counts) if complete else 0) <= 1


def test_samples_are_what_their_spans_hold(tmp_path: Path) -> None:
    draw = random.Random(5)
    streams = [made_source(tmp_path, name, draw) for name in "ab"]
    dataset = builder(streams, made_stages(draw, "ab"), 7)(60)
    for i in range(60):
        parts = [IndexedDataset(s.source).get(s.sequence, s.offset, s.tokens) for s in dataset.spans(i)]
        held = np.concatenate(parts).tolist()
        assert [held[:-1], held[1:]] == [column.tolist() for column in dataset[i][:2]]
    with pytest.raises(IndexError):
        dataset[60]


def test_usage_counts_the_samples_of_each_source(tmp_path: Path) -> None:
    draw = random.Random(7)
    streams = [made_source(tmp_path, name, draw) for name in "abc"]
    dataset = builder(streams, made_stages(draw, "abc"), 6)(100)
    sources, _ = dataset.places(np.arange(100))
    for samples in (0, 1, 16, 33, 50, 99, 100):
        expected = [6 * int((sources[:samples] == k).sum()) for k in range(3)]
        assert [usage.tokens for usage in dataset.source_usage(samples)] == expected
        planned = [usage.tokens for usage in dataset.planned_usage(samples)]
        assert all(abs(a - b) <= 6 * 3 for a, b in zip(planned, expected))  # a sample of each stage


def test_hashes_tell_samples_seeds_and_sources_apart(tmp_path: Path) -> None:
    draw = random.Random(8)
    stream = made_source(tmp_path, "web", draw)
    places, hashes = np.arange(80), []
    for name, seed in [("web", 11), ("web", 12), ("code", 11)]:
        other = DocumentStream(name, stream.files, seed, None)
        stage = MixtureStage("main", {name: Quota("share", Fraction(1))})
        hashes += builder([other], [stage], 3)(80).sample_hashes(places).tolist()
    assert len(set(hashes)) == 240


def test_tables_in_the_cache_give_the_same_order(tmp_path: Path) -> None:
    cache = IndexCache(tmp_path / "cache")
    plain, cached = (made_source(tmp_path, "web", random.Random(9), each) for each in (None, cache))
    for _ in range(2):
        assert tokens_of(cached, 0, 3 * cached.tokens) == tokens_of(plain, 0, 3 * plain.tokens)
        cached = made_source(tmp_path, "web", random.Random(9), cache)
    assert len([*(tmp_path / "cache").glob("epoch-*/about.json")]) == 3


def exact_shares(counts: Sequence[int]) -> None:
    total, found = sum(counts), Interleave(counts)
    sources, numbers = found.sources(np.arange(total))
    taken = [0] * len(counts)
    for place, (source, number) in enumerate(zip(sources.tolist(), numbers.tolist()), 1):
        assert number == taken[source]
        taken[source] += 1
        assert all(abs(Fraction(count * place, total) - n) < 1 for count, n in zip(counts, taken))
    assert taken == [*counts]


def test_every_prefix_of_a_stage_has_its_shares_within_a_sample() -> None:
    draw = random.Random(10)
    for _ in range(60):
        sizes = draw.choices([0, 1, 2, 7, 40, 150], k=draw.randint(1, 9))
        exact_shares([*sizes, draw.randint(1, 90)])


def test_places_are_found_in_any_order() -> None:
    counts = [3, 100, 41, 0, 17]
    expected = Interleave(counts).sources(np.arange(161))
    found = Interleave(counts)
    for place in random.Random(11).sample(range(161), 60):
        source, number = found.sources(np.array([place]))
        assert (source[0], number[0]) == (expected[0][place], expected[1][place])


@pytest.mark.slow
def test_compiled_code_gives_the_same_order(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = [random.Random(12).randint(1, 3000) for _ in range(50)]
    places = np.array([sum(counts) - 1, 5, 30_000])
    expected = Interleave(counts).sources(places)
    monkeypatch.setattr(interleave, "COMPILE_ABOVE", 0)
    assert [column.tolist() for column in Interleave(counts).sources(places)] == [c.tolist() for c in expected]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 97, 1000, 20_000])
def test_a_permutation_is_a_bijection(size: int) -> None:
    images = permute(np.arange(size), size, 5)
    assert sorted(images.tolist()) == [*range(size)]
    sizes, keys = np.full(size, size), np.full(size, 5)
    assert (permute(np.arange(size), sizes, keys) == images).all()


def test_permutations_by_many_keys_are_uniform() -> None:
    keys = np.repeat(np.arange(4000), 7)
    images = permute(np.tile(np.arange(7), 4000), 7, keys).reshape(4000, 7)
    expected = 4000 / 7
    for column in images.T:  # where each number goes
        chi2 = ((np.bincount(column, minlength=7) - expected) ** 2 / expected).sum()
        assert chi2 < 30  # 6 degrees of freedom: 1 in 25,000
