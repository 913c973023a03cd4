"""Counts, lengths, samples and faults of token files, against brute force."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data import inspect
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.inspect import (
    SAMPLE_TOKENS,
    ValueCounts,
    check_ids,
    describe_position,
    document_bounds,
    sample_documents,
    summarize,
)
from megatron.data.tokenizers.huggingface import ByteTokenizer
from tests.unit.data.pairs import NAMES, packed, write


@pytest.fixture(autouse=True)
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspect, "DOCUMENT_BLOCK", 3)
    monkeypatch.setattr(inspect, "TOKEN_BLOCK", 5)


def dataset(folder: Path, documents: list[list[list[int]]], code: int = 4) -> IndexedDataset:
    """Of documents of sequences."""
    for suffix, data in zip(("bin", "idx"), packed(documents, code)):
        (folder / f"x.{suffix}").write_bytes(data)
    return IndexedDataset(folder / "x", floats=True)


# --- counts ---


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    batches=st.lists(st.lists(st.integers(-3, 20) | st.integers(-(2**62), 2**62), max_size=8), max_size=5),
    share=st.floats(0, 1),
)
def test_counts_are_those_of_a_dictionary(batches: list[list[int]], share: float) -> None:
    counts, numbers = ValueCounts(), sorted(number for batch in batches for number in batch)
    for batch in batches:
        counts.add(np.array(batch, dtype=np.int64))
    expected = Counter(numbers)
    assert dict(zip(counts.values.tolist(), counts.counts.tolist())) == expected
    assert counts.values.tolist() == sorted(expected)
    assert counts.total == len(numbers)
    if numbers:
        assert counts.quantile(share) == numbers[max(math.ceil(share * len(numbers)) - 1, 0)]
        assert (counts.quantile(0), counts.quantile(1)) == (numbers[0], numbers[-1])
    assert counts.most(3) == sorted(expected.items(), key=lambda item: (-item[1], item[0]))[:3]


def test_means() -> None:
    counts = ValueCounts()
    assert (counts.mean, counts.quantile(0.5)) == (0.0, 0)
    counts.add(np.array([1, 1, 4], dtype=np.uint16))
    assert counts.mean == 2.0


# --- what an index says ---

DOCUMENTS = st.lists(st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=3), max_size=9)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(documents=DOCUMENTS)
def test_a_summary_counts_documents_sequences_and_tokens(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[list[int]]]
) -> None:
    data = dataset(tmp_path_factory.mktemp("any"), documents)
    lengths = [sum(map(len, document)) for document in documents]
    summary = summarize(data)
    assert summary.documents == len(documents)
    assert summary.empty_documents == lengths.count(0)
    assert summary.sequences == sum(map(len, documents))
    assert summary.empty_sequences == sum(sequence == [] for document in documents for sequence in document)
    assert (summary.tokens, summary.dtype) == (sum(lengths), "int32")
    assert (summary.bin_bytes, summary.idx_bytes) == tuple(map(len, packed(documents, 4)))
    assert dict(zip(summary.lengths.values, summary.lengths.counts)) == Counter(n for n in lengths if n)
    segments = list(document_bounds(data))
    assert [n for segment in segments for n in np.diff(segment).tolist()] == lengths
    assert all(before[-1] == after[0] for before, after in zip(segments, segments[1:]))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(documents=DOCUMENTS)
def test_every_token_has_a_place(tmp_path_factory: pytest.TempPathFactory, documents: list[list[list[int]]]) -> None:
    data = dataset(tmp_path_factory.mktemp("any"), documents)
    lengths = [sum(map(len, document)) for document in documents]
    expected = [f"token {token} of document {document}" for document, n in enumerate(lengths) for token in range(n)]
    assert [describe_position(data, token) for token in range(data.num_tokens)] == expected


# --- ids ---


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    documents=st.lists(st.lists(st.lists(st.integers(-2, 9), max_size=4), max_size=3), max_size=9),
    vocab_size=st.none() | st.integers(5, 12),
    eod=st.none() | st.integers(0, 9),
)
def test_every_id_is_looked_at(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[list[int]]], vocab_size: int | None, eod: int | None
) -> None:
    data = dataset(tmp_path_factory.mktemp("any"), documents)
    whole = [[i for sequence in document for i in sequence] for document in documents]
    wrong = [
        f"{number} is token {token} of document {document}"
        for document, ids in enumerate(whole)
        for token, number in enumerate(ids)
        if number < 0 or (vocab_size is not None and number >= vocab_size)
    ]
    seen: list[int] = []
    findings = check_ids(data, vocab_size, eod, seen.append)
    assert findings.wrong == len(wrong)
    assert findings.first_wrong == (wrong[0] if wrong else None)
    assert findings.ended == (None if eod is None else sum(ids[-1] == eod for ids in whole if ids))
    assert dict(zip(findings.ids.values, findings.ids.counts)) == Counter(i for ids in whole for i in ids)
    assert sum(seen) == 4 * data.num_tokens


@pytest.mark.parametrize("code", [1, 2, 3, 4, 5, 8])
def test_ids_of_every_type_are_looked_at(tmp_path: Path, code: int) -> None:
    data = dataset(tmp_path, [[[0, 7, np.iinfo(NAMES[code]).max]]], code)
    assert check_ids(data, 8, None).first_wrong == f"{np.iinfo(NAMES[code]).max} is token 2 of document 0"
    assert check_ids(data, None, None).wrong == 0


# --- samples ---


def test_samples_lie_from_the_first_to_the_last_document(tmp_path: Path) -> None:
    data = dataset(tmp_path, [[list(b"ab"), list(b"c")], [], [list(b"d") + [256]], [list(b"ef")], [list(b"xyz")]])
    chosen = sample_documents(data, 3, ByteTokenizer())
    assert [(s.document, s.tokens, s.ids, s.text) for s in chosen] == [
        (0, 3, [97, 98, 99], "abc"),
        (2, 2, [100, 256], "d<|endoftext|>"),
        (4, 3, [120, 121, 122], "xyz"),
    ]
    assert [s.document for s in sample_documents(data, 99, None)] == [0, 1, 2, 3, 4]
    assert [(s.tokens, s.ids, s.text) for s in sample_documents(data, 99, None)][1] == (0, [], None)
    assert sample_documents(data, 0, None) == []
    assert sample_documents(data, 1, None)[0].document == 0


def test_a_long_sample_is_cut_and_a_strange_one_not_decoded(tmp_path: Path) -> None:
    write(tmp_path / "x", [[97] * (SAMPLE_TOKENS + 1), [97, 257]])
    long, strange = sample_documents(IndexedDataset(tmp_path / "x"), 2, ByteTokenizer())
    assert (long.tokens, long.ids, long.text) == (SAMPLE_TOKENS + 1, [97] * SAMPLE_TOKENS, "a" * SAMPLE_TOKENS)
    assert (strange.ids, strange.text) == ([97, 257], None)


def test_numbers_that_are_no_ids_are_not_decoded(tmp_path: Path) -> None:
    write(tmp_path / "x", [[97.0, 0.5]], np.float32)
    (sample,) = sample_documents(IndexedDataset(tmp_path / "x", floats=True), 1, ByteTokenizer())
    assert (sample.ids, sample.text) == ([97.0, 0.5], None)
