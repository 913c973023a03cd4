"""Quality filters, against datatrove called directly."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.manifest import DatasetManifest
from megatron.data.preprocess.quality import FILTERS, PROSE
from tools.preprocess_data import main

datatrove = pytest.importorskip("datatrove.pipeline.filters")
pytest.importorskip("spacy")

SENTENCES = [
    "The river is wide and the boats that cross it with people are slow.",
    "They have to be there before the sun goes down, and it is a long way.",
    "Click here to read our terms of use",
    "A line with javascript in it is not kept.",
    "* a list of things",
    "buy now buy now buy now buy now buy now",
    "This and that of the other are with the same people as before.",
    "a { b }",
    "#### #### ####",
    "lorem ipsum dolor sit amet",
]


def texts() -> list[str]:
    """Return made-up pages, and parts of a page of this project."""
    draw, weights = Random(5), (9, 9, 1, 1, 1, 1, 9, 0.1, 1, 0.1)
    made = ["\n".join(draw.choices(SENTENCES, weights, k=draw.randrange(1, 25))) for _ in range(50)]
    paragraphs = (Path(__file__).parents[4] / "docs" / "checkpoints.md").read_text().split("\n\n")
    return made + ["\n".join(paragraphs[i : i + 6]) for i in range(0, 180, 6)]


@pytest.mark.parametrize("name", ["gopher", "c4", "fineweb"])
def test_decisions_are_those_of_the_library(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from datatrove.data import Document

    classes = {
        "gopher": [datatrove.GopherRepetitionFilter, datatrove.GopherQualityFilter],
        "c4": [datatrove.C4QualityFilter],
        "fineweb": [datatrove.FineWebQualityFilter],
    }
    filters = [quality() for quality in classes[name]]
    kept, reasons = [], Counter[str]()
    for text in texts():
        document = Document(text=text, id="0")
        results = ((quality, quality.filter(document)) for quality in filters)
        dropped = next((result[1] for _, result in results if result is not True), None)
        if dropped is None:
            kept.append(document.text)
        else:
            reasons[dropped] += 1
    assert kept
    assert reasons
    lines = tmp_path / "texts.jsonl"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts()))
    flags = ["--output-prefix", str(tmp_path / "out"), "--tokenizer-type", "ByteTokenizer", "--quality", name]
    assert main(["--input", str(lines), *flags]) == 0
    data = IndexedDataset(tmp_path / "out_text_document")
    assert [bytes(data[i].tolist()).decode() for i in range(len(data))] == kept
    manifest = DatasetManifest.read(tmp_path / "out_text_document")
    assert manifest is not None
    found = {reason.rpartition(": ")[2]: count for reason, count in manifest.facts["dropped"].items()}
    assert found == reasons


def test_options_of_a_filter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = tmp_path / "texts.jsonl"
    lines.write_text(json.dumps({"text": " ".join(SENTENCES[:2])}) + "\n")
    flags = ["--input", str(lines), "--output-prefix", str(tmp_path / "out"), "--tokenizer-type", "ByteTokenizer"]
    assert main([*flags, "--quality", "gopher-quality"]) == 1
    assert "no document of the input has text: 0 are empty, 1 were dropped" in capsys.readouterr().err
    assert main([*flags, "--quality", "gopher-quality:min_doc_words=20"]) == 0
    assert main([*flags, "--overwrite", "--quality", "gopher-quality:words=20"]) == 1
    printed = capsys.readouterr().err
    assert "--quality gopher-quality:words=20: gopher-quality has no option words; it has min_doc_words, " in printed
    assert "exclusion_writer" not in printed
    for given, said in {
        "goofer": "there is no such filter",
        "gopher:min_doc_words=20": "a group .*: --quality gopher-repetition gopher-quality:min_doc_words=20\n",
        "gopher:dup_line_frac=0.2": ".*: --quality gopher-repetition:dup_line_frac=0.2 gopher-quality\n",
        "gopher-quality:min_doc_words=": "'min_doc_words=' is not OPTION=VALUE",
        "c4:": "'' is not OPTION=VALUE",
    }.items():
        with pytest.raises(SystemExit):
            main([*flags, "--quality", given])
        assert re.search(f"(?s)--quality {given}: .*{said}", capsys.readouterr().err)
    wrong = ["c4:min_num_sentences=abc", "gopher-quality:max_avg_word_length=x", "gopher-repetition:top_n_grams=[3]"]
    for name in [*wrong, "gopher-quality:stop_words=5", "c4:language=zz", "fineweb:line_punct_thr=x"]:
        assert main([*flags, "--overwrite", "--quality", name]) == 1
        assert f"--quality {name}: wrong options: " in capsys.readouterr().err


@pytest.mark.parametrize("base", [*FILTERS])
def test_the_text_on_which_options_are_tried_is_kept(base: str) -> None:
    from datatrove.data import Document

    assert getattr(datatrove, FILTERS[base])().filter(Document(PROSE, "0")) is True


def test_a_text_at_which_the_library_fails_is_a_bad_document(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = tmp_path / "texts.jsonl"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in (PROSE, " ", PROSE)))
    flags = ["--input", str(lines), "--output-prefix", str(tmp_path / "out"), "--tokenizer-type", "ByteTokenizer"]
    flags += ["--quality", "gopher-quality:min_doc_words=0"]
    assert main(flags) == 1
    seen = f"{lines}:2: --quality gopher-quality:min_doc_words=0 raised ZeroDivisionError: division by zero"
    assert seen in capsys.readouterr().err
    assert main([*flags, "--on-bad-line", "skip"]) == 0
    assert len(IndexedDataset(tmp_path / "out_text_document")) == 2
