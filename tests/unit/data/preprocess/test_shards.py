"""Shards of a corpus, merged, against the corpus preprocessed at once."""

from __future__ import annotations

import gzip
import json
from functools import partial
from pathlib import Path
from random import Random

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.manifest import DatasetManifest
from megatron.data.preprocess.drop_list import ListedFile, publish_drop_list
from megatron.data.preprocess.encode import PreprocessOptions
from tools import preprocess_data
from tools.merge_datasets import main as merge
from tools.preprocess_data import main as preprocess

COMPARED = ("bin", "idx", "origins", "tokens.json")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preprocess_data, "PreprocessOptions", partial(PreprocessOptions, block_bytes=400))


def write_corpus(folder: Path, seed: int) -> Path:
    """Write files of every kind, some of them empty or without line ends."""
    draw = Random(seed)
    folder.mkdir()

    def records(name: str, count: int) -> list[dict[str, str]]:
        return [{"text": f"{name} {number} " + "x" * draw.choice((0, 5, 90))} for number in range(count)]

    for number in range(draw.randrange(1, 7)):
        kind = draw.choice((".jsonl", ".jsonl.gz", ".json", ".parquet", ".txt"))
        path = folder / f"{number}{kind}"
        some = records(path.name, draw.choice((1, 3, 40)))
        lines = "\n".join(map(json.dumps, some)) + draw.choice(("", "\n", "\n\n"))
        if kind == ".parquet":
            parquet.write_table(pa.Table.from_pylist(some), path)
        elif kind == ".json":
            path.write_text(json.dumps(some, indent=1))
        elif kind == ".jsonl.gz":
            path.write_bytes(gzip.compress(lines.encode()))
        else:
            path.write_text(lines if kind == ".jsonl" else draw.choice(("", "a text of its own")))
    (folder / "last.jsonl").write_text(json.dumps({"text": "at least one"}))
    return folder


def run(corpus: Path, prefix: Path, *flags: str) -> None:
    fixed = ["--tokenizer-type", "ByteTokenizer", "--append-eod", "--output-prefix", str(prefix)]
    assert preprocess(["--input", str(corpus), *fixed, *flags]) == 0


def files(prefix: Path) -> dict[str, bytes]:
    return {suffix: Path(f"{prefix}.{suffix}").read_bytes() for suffix in COMPARED}


@pytest.mark.parametrize("seed", [1, 2, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, *range(3, 24)))])
def test_merged_shards_have_the_bytes_of_the_whole(tmp_path: Path, seed: int) -> None:
    corpus = write_corpus(tmp_path / "corpus", seed)
    run(corpus, tmp_path / "whole")
    of = (1, 2, 3, 7, 16)[seed % 5]
    for number in range(of):
        run(corpus, tmp_path / "parts" / f"part{number}", "--shard", f"{number}/{of}")
    assert merge(["--input", str(tmp_path / "parts"), "--output-prefix", str(tmp_path / "merged")]) == 0
    assert files(tmp_path / "merged") == files(tmp_path / "whole_text_document")


def test_shards_leave_out_the_rows_of_a_drop_list(tmp_path: Path) -> None:
    corpus, listed, draw = write_corpus(tmp_path / "corpus", 2), tmp_path / "listed", Random(1)
    listed.mkdir()
    rows = [sorted(draw.sample(range(1, 41), 9)) if path.suffix != ".txt" else [] for path in sorted(corpus.iterdir())]
    (listed / "drop.rows").write_bytes(np.array([row for of_file in rows for row in of_file], "<u8").tobytes())
    files_of_list = [
        ListedFile(str(path), path.stat().st_size, 40, len(of_file))
        for path, of_file in zip(sorted(corpus.iterdir()), rows)
    ]
    publish_drop_list(listed, files_of_list, {})
    run(corpus, tmp_path / "whole", "--drop", str(listed))
    run(corpus, tmp_path / "all")
    assert files(tmp_path / "whole_text_document") != files(tmp_path / "all_text_document")
    for number in range(5):
        run(corpus, tmp_path / "parts" / f"part{number}", "--shard", f"{number}/5", "--drop", str(listed))
    assert merge(["--input", str(tmp_path / "parts"), "--output-prefix", str(tmp_path / "merged")]) == 0
    assert files(tmp_path / "merged") == files(tmp_path / "whole_text_document")
    manifests = [DatasetManifest.read(tmp_path / name) for name in ("merged", "whole_text_document")]
    assert len({str(manifest.facts["dropped"]) for manifest in manifests if manifest}) == 1


def test_lines_of_one_file_are_divided_equally(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    lines = tmp_path / "corpus" / "one.jsonl"
    lines.write_text("".join(json.dumps({"text": f"{number:05}"}) + "\n" for number in range(1000)))
    counts = []
    for number in range(7):
        run(lines, tmp_path / f"part{number}", "--shard", f"{number}/7")
        counts.append(IndexedDataset(tmp_path / f"part{number}_text_document").num_documents)
    assert sum(counts) == 1000
    assert max(counts) - min(counts) <= 1


def test_an_invalid_line_has_its_number_in_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = tmp_path / "one.jsonl"
    lines.write_text('{"text": "fine"}\n' * 90 + "{\n" + '{"text": "fine"}\n' * 9)
    flags = ["--tokenizer-type", "ByteTokenizer", "--output-prefix", str(tmp_path / "out"), "--shard", "3/4"]
    assert preprocess(["--input", str(lines), *flags]) == 1
    assert f"{lines}:91 is not JSON" in capsys.readouterr().err


def test_missing_and_repeated_shards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = write_corpus(tmp_path / "corpus", 1)
    for number in (2, 0):
        run(corpus, tmp_path / "parts" / f"part{number}", "--shard", f"{number}/3")
    assert merge(["--input", str(tmp_path / "parts"), "--output-prefix", str(tmp_path / "merged")]) == 0
    assert "note: of 3 shards, these are not there: 1" in capsys.readouterr().out
    run(corpus, tmp_path / "parts" / "again", "--shard", "2/3")
    assert merge(["--input", str(tmp_path / "parts"), "--output-prefix", str(tmp_path / "all")]) == 1
    assert "are both shard 2/3" in capsys.readouterr().err


def test_shards_of_another_corpus_or_with_other_options_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, parts = write_corpus(tmp_path / "corpus", 1), tmp_path / "parts"
    flags = ["--input", str(parts), "--output-prefix", str(tmp_path / "merged"), "--overwrite"]
    run(corpus, parts / "part0", "--shard", "0/2")
    run(corpus, parts / "part1", "--shard", "1/2", "--max-line-bytes", "1000")
    assert merge(flags) == 1
    assert "options is {'append_eod': True, 'json_keys': ['text'], 'max_line_bytes'" in capsys.readouterr().err
    (corpus / "z.jsonl").write_text("{}\n")
    run(corpus, parts / "part1", "--shard", "1/2", "--on-bad-line", "skip", "--overwrite")
    assert merge(flags) == 1
    assert "are not shards of the same corpus, preprocessed in the same way: corpus is" in capsys.readouterr().err
    run(corpus, parts / "part0", "--shard", "0/2", "--overwrite")
    assert merge(flags) == 0


@pytest.mark.parametrize("shard", ["3/3", "-1/3", "1", "0/0", "a/b"])
def test_a_shard_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str], shard: str) -> None:
    flags = ["--tokenizer-type", "ByteTokenizer", "--output-prefix", str(tmp_path / "out"), f"--shard={shard}"]
    with pytest.raises(SystemExit) as ended:
        preprocess(["--input", str(tmp_path), *flags])
    assert ended.value.code == 2
    assert "n shards are numbered 0/n to (n-1)/n" in capsys.readouterr().err
