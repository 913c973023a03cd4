"""Sentences: sequences of the library's own sentences, in documents that every tool reads as such."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import sentencex
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.best_fit_dataset import BestFitDataset
from megatron.data.build import FileSegmentBuilder
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.inspect import summarize
from megatron.data.preprocess.encode import last_sequences
from megatron.data.preprocess.sentences import SentenceSplitter
from tests.unit.data.pairs import content
from tools import merge_datasets, preprocess_data

EOD = 256
TEXTS = [
    'Dr. Smith went to Washington.  He arrived at 3 p.m. on Jan. 5. "Really?" she asked.\nA line. Another!\n\nEnd',
    "",
    "One sentence only.",
    "  \n ",
    "京都に行った。東京も。 x",
] * 3


def split(text: str) -> list[str]:
    """The library's sentences without white space around them."""
    return [sentence.strip() for sentence in sentencex.segment("en", text) if sentence.strip()]


def written(folder: Path, *flags: str, texts: list[str] = TEXTS, name: str = "out") -> IndexedDataset:
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "in.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    argv = ["--input", str(source), "--output-prefix", str(folder / name), "--tokenizer-type", "ByteTokenizer"]
    assert preprocess_data.main([*argv, "--split-sentences", *flags]) == 0
    return IndexedDataset(folder / f"{name}_text_sentence")


def documents(data: IndexedDataset) -> list[list[list[int]]]:
    return [[data[i].tolist() for i in range(a, b)] for a, b in zip(data.documents, data.documents[1:])]


def test_each_sentence_is_a_sequence(tmp_path: Path) -> None:
    found = documents(written(tmp_path, "--append-eod"))
    expected = [[[*sentence.encode()] for sentence in split(text)] for text in TEXTS]
    for sentences in expected:
        if sentences:
            sentences[-1].append(EOD)
    assert found == expected
    assert len(found[0]) > 3
    plain = documents(written(tmp_path / "plain"))
    assert plain == [[[id for id in each if id != EOD] for each in sentences] for sentences in expected]


def test_white_space_is_kept(tmp_path: Path) -> None:
    found = documents(written(tmp_path, "--keep-newlines", "--lang", "en"))
    assert ["".join(bytes(ids).decode() for ids in sentences) for sentences in found] == TEXTS
    assert all(bytes(ids).strip() for ids in found[0])


@settings(max_examples=50, deadline=None)
@given(st.text(st.sampled_from("aB. \n!?。"), max_size=30))
def test_sentences_that_keep_white_space_are_the_text(text: str) -> None:
    kept = SentenceSplitter(keep_newlines=True).split(text)
    assert "".join(kept) == text
    assert [sentence.strip() for sentence in kept if sentence.strip()] == SentenceSplitter().split(text) == split(text)
    assert len(kept) == max(len(split(text)), bool(text))


def test_workers_and_parts_do_not_change_the_files(tmp_path: Path) -> None:
    flags = ("--append-eod", "--lang", "german")
    many = [f"Satz {i} ist kurz. Am {i}. Mai folgt z. B. der nächste! Ja?" for i in range(300)]
    written(tmp_path / "one", *flags, texts=many, name="x")
    written(tmp_path / "two", *flags, "--workers", "2", texts=many, name="x")
    one, two = ({n: b for n, b in content(tmp_path / f).items() if n[-4:] in (".bin", ".idx")} for f in ("one", "two"))
    assert one == two
    assert len(one) == 2
    written(tmp_path / "a", *flags, texts=many[:120], name="x")
    written(tmp_path / "b", *flags, texts=many[120:], name="x")
    parts = [str(tmp_path / part / "x_text_sentence") for part in ("a", "b")]
    assert merge_datasets.main(["--input", *parts, "--output-prefix", str(tmp_path / "all")]) == 0
    for suffix in ("bin", "idx"):
        whole = (tmp_path / "one" / f"x_text_sentence.{suffix}").read_bytes()
        assert (tmp_path / f"all.{suffix}").read_bytes() == whole
    summary = summarize(IndexedDataset(tmp_path / "all"))
    assert (summary.documents, summary.empty_documents) == (300, 0)
    assert summary.sequences == sum(len(SentenceSplitter("german").split(text)) for text in many)
    assert summary.lengths.total == 300


def test_packed_documents_hold_all_their_sentences(tmp_path: Path) -> None:
    data = written(tmp_path, "--append-eod")
    dataset = FileSegmentBuilder([(data, range(len(data)))], None, 200, 1, None, "best-fit")(1)
    assert isinstance(dataset, BestFitDataset)
    found = [piece.ids.tolist() for i in range(len(dataset)) for piece in dataset.pieces(i)]
    whole = [[id for sentence in document for id in sentence] for document in documents(data)]
    assert sorted(found) == sorted(document for document in whole if document)


def test_the_last_sequence_of_a_document_with_ids_ends_it() -> None:
    lengths = np.array([3, 0, 2, 0, 0, 5, 0])
    assert last_sequences(lengths, np.array([2, 0, 3, 1, 1])).tolist() == [0, 2, 5]


def test_unusable_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "A. B."}\n')
    argv = ["--input", str(tmp_path / "in.jsonl"), "--output-prefix", str(tmp_path / "x")]
    argv += ["--tokenizer-type", "ByteTokenizer"]
    assert preprocess_data.main([*argv, "--lang", "en", "--keep-newlines"]) == 0
    assert "--lang and --keep-newlines has no effect without --split-sentences" in capsys.readouterr().err
    assert preprocess_data.main([*argv, "--split-sentences", "--lang", "English!"]) == 2
    assert "--lang English! is neither the code of a language nor one of czech" in capsys.readouterr().err
    monkeypatch.setattr("megatron.data.preprocess.sentences.find_spec", lambda name: None)
    assert preprocess_data.main([*argv, "--split-sentences"]) == 2
    assert "fix: pip install sentencex" in capsys.readouterr().err
