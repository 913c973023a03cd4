"""Counts, lengths, samples and faults of token files, against brute force; and the tool that shows them."""

from __future__ import annotations

import json
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
    ValueCounts,
    check_ids,
    document_bounds,
    sample_documents,
    summarize,
)
from megatron.data.tokenizers.huggingface import ByteTokenizer
from megatron.data.tokenizers.tokenizer import RECORD_SUFFIX, TokenizerRecord
from tests.unit.data.pairs import packed, write
from tools.inspect_dataset import main

ROOT = Path(__file__).parents[3]
TEXTS = [b"first", b"", b"a \xe2\x82\xac", b"x" * 300]


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    """Four documents of bytes, all but the last ended, with a record."""
    documents = [[*text, 256] if text else [] for text in TEXTS[:-1]] + [list(TEXTS[-1])]
    return str(
        write(tmp_path / "x", documents, extra_files={RECORD_SUFFIX: TokenizerRecord.of(ByteTokenizer()).to_bytes()})
    )


def spoil(prefix: str, number: int) -> None:
    """Another id for the second token of the last document."""
    path = Path(f"{prefix}.bin")
    data = bytearray(path.read_bytes())
    data[-598:-596] = number.to_bytes(2, "little")
    path.write_bytes(data)


def test_counts(prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([prefix]) == 0
    assert capsys.readouterr() == (
        f"{prefix}\n"
        "  documents  4 (1 empty)\n"
        "  sequences  3 (0 empty)\n"
        "  tokens     312 of type uint16\n"
        "  bytes      624 .bin, 110 .idx\n"
        "  tokens of a document that is not empty: min 6, p10 6, median 6, p90 300, p99 300, max 300, mean 104.0\n"
        "  tokenizer  ByteTokenizer, 257 ids, 256 ends a document\n",
        "",
    )


def test_ids_and_samples(prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([prefix, "--verify", "--top", "2", "--samples", "4"]) == 0
    out = capsys.readouterr().out.splitlines()[7:]
    assert out[:4] == [
        "  ids        12 different ids; the vocabulary has 257",
        "  ends       2 of 3 (66.7%) of the documents that are not empty end with 256",
        '         120             300 times  "x"',
        '         256               2 times  "<|endoftext|>"',
    ]
    assert out[4:] == [
        "  document 0 of 4: 6 tokens",
        "    ids  102 105 114 115 116 256",
        '    text "first<|endoftext|>"',
        "  document 1 of 4: 0 tokens",
        '    text ""',
        "  document 2 of 4: 6 tokens",
        "    ids  97 32 226 130 172 256",
        '    text "a €<|endoftext|>"',
        "  document 3 of 4: 300 tokens, of which the first 256",
        "    ids  120 120 120 120 120 120 120 120 120 120 120 120 ...",
        f'    text "{"x" * 256}"',
    ]


def test_an_id_that_is_none_is_reported_with_its_place(prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    spoil(prefix, 257)
    assert main([prefix]) == 0
    assert main([prefix, "--verify", "--samples", "4"]) == 1
    out, err = capsys.readouterr()
    assert "    text none: some ids are not in the tokenizer\n" in out
    sentence = "1 of 312 ids are below 0 or not below 257; the first: 257 is token 1 of document 3"
    assert err == f"inspect_dataset: {prefix}: {sentence}\n"
    assert main([prefix, "--verify", "--vocab-size", "258"]) == 0


def test_for_machines(prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    spoil(prefix, 257)
    flags = ["--json", "--verify", "--top", "1", "--samples", "1"]
    assert main([f"{prefix}-none", prefix, *flags]) == 1
    missing, found = map(json.loads, capsys.readouterr().out.splitlines())
    assert missing.keys() == {"prefix", "problem"}
    assert missing["problem"].startswith(f"{prefix}-none.idx: No such file")
    assert found.pop("problem").startswith(f"{prefix}: 1 of 312 ids")
    assert found == {
        "prefix": prefix,
        "documents": 4,
        "empty_documents": 1,
        "sequences": 3,
        "empty_sequences": 0,
        "tokens": 312,
        "dtype": "uint16",
        "bin_bytes": 624,
        "idx_bytes": 110,
        "fingerprint": IndexedDataset(prefix).fingerprint,
        "tokenizer": {
            "tokenizer_type": "ByteTokenizer",
            "vocab_size": 257,
            "eod": 256,
            "parses_special_tokens": False,
        },
        "document_tokens": {"min": 6, "p10": 6, "median": 6, "p90": 300, "p99": 300, "max": 300, "mean": 104.0},
        "verified": {
            "vocab_size": 257,
            "eod": 256,
            "wrong_ids": 1,
            "documents_that_end": 2,
            "share_that_ends": pytest.approx(2 / 3),
            "different_ids": 13,
        },
        "most_frequent_ids": [[120, 299]],
        "samples": [{"document": 0, "tokens": 6, "ids": [102, 105, 114, 115, 116, 256], "text": "first<|endoftext|>"}],
    }


def test_data_without_a_record_are_read_by_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = str(write(tmp_path / "x", [[104, 105, 0]]))
    assert main([prefix, "--verify", "--samples", "1"]) == 0
    out = capsys.readouterr().out
    for line in (
        "  tokenizer  no record\n",
        "  ids        3 different ids; the vocabulary size is unknown (--vocab-size N)\n",
        "  ends       the end-of-document id is unknown (--eod-id N)\n",
        "    ids  104 105 0\n",
    ):
        assert line in out
    assert "text" not in out
    assert main([prefix, "--verify", "--samples", "1", "--tokenizer-type", "ByteTokenizer", "--eod-id", "0"]) == 0
    out = capsys.readouterr().out
    assert "the vocabulary has 257\n  ends       1 of 1 (100.0%)" in out
    assert '    text "hi\\u0000"\n' in out


def test_one_damaged_pair_does_not_hide_the_others(prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"{prefix}-none", prefix]) == 1
    out, err = capsys.readouterr()
    assert out.startswith(f"{prefix}\n")
    assert err.startswith(f"inspect_dataset: {prefix}-none.idx: No such file or directory\n  fix: ")


def test_floats_are_no_ids(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = str(write(tmp_path / "x", [[0.5, 2.0]], np.float32))
    assert main([prefix, "--samples", "1"]) == 0
    assert "    ids  0.5 2.0\n" in capsys.readouterr().out
    assert main([prefix, "--verify"]) == 1
    assert "x: values of type float32 are not ids and cannot be trained on\n" in capsys.readouterr().err


def test_another_tokenizer_than_recorded_is_refused(prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([prefix, "--tokenizer-type", "NullTokenizer", "--vocab-size", "257"]) == 1
    assert "was written with another ByteTokenizer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--samples", "-1"], "--samples and --top must be at least 0"),
        (["--top", "3"], "--top needs --verify"),
        (["--tokenizer-model", "x"], "--tokenizer-model needs --tokenizer-type"),
    ],
)
def test_flags_that_do_not_go_together(flags: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["x", *flags]) == 2
    assert sentence in capsys.readouterr().err


def test_a_picture(prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([prefix, prefix, "--histogram", str(tmp_path / "h.png")]) == 0
    assert capsys.readouterr().out.endswith(f"lengths of documents: {tmp_path}/h.png\n")
    assert (tmp_path / "h.png").read_bytes().startswith(b"\x89PNG")
    assert main([prefix, "--histogram", str(tmp_path / "h.gif")]) == 2
    assert (
        f"h.gif: the suffix must be one of .png, .pdf, .svg\n  fix: --histogram {tmp_path}/h.png"
        in capsys.readouterr().err
    )
    assert main([prefix, "--json", "--histogram", str(tmp_path / "none" / "h.png")]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["problem"] is None
    assert "No such file" in err


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


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    batches=st.lists(st.lists(st.integers(-3, 20) | st.integers(-(2**62), 2**62), max_size=8), max_size=5),
    share=st.floats(0, 1),
)
def test_counts_match_a_dictionary(batches: list[list[int]], share: float) -> None:
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


# --- text of an index ---

DOCUMENTS = st.lists(st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=3), max_size=9)


@settings(max_examples=40, deadline=None, derandomize=True)
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


# --- ids ---


@settings(max_examples=50, deadline=None, derandomize=True)
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


def test_numbers_that_are_no_ids_are_not_decoded(tmp_path: Path) -> None:
    write(tmp_path / "x", [[97.0, 0.5]], np.float32)
    (sample,) = sample_documents(IndexedDataset(tmp_path / "x", floats=True), 1, ByteTokenizer())
    assert (sample.ids, sample.text) == ([97.0, 0.5], None)
