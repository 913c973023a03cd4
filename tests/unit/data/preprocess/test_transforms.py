"""Steps that change or drop documents, against loops over the same documents."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from megatron.data.document_origins import DocumentOrigins
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.manifest import DatasetManifest
from megatron.data.preprocess.encode import PreprocessOptions
from megatron.data.preprocess.transforms import DocumentTransforms, Step
from tools import preprocess_data
from tools.preprocess_data import main

FUNCTIONS = """
def upper(text: str) -> str:
    return text.upper()

def even(record):
    return record["number"] % 2 == 0

def join(record):
    if record["number"] % 5 == 1:
        return None
    return {"text": f"{record['title']}|{record['text']}"}

def only_title(record):
    assert set(record) == {"text", "title"}, set(record)
    return len(record["title"]) > 1

only_title.columns = ["title"]

def short(text: "str") -> bool:
    return len(text) < 20

def fails(record):
    return 1 / (record["number"] - 7)

def wrong(record):
    return "a text"

def leaves(record):
    raise SystemExit(0)
"""

Record = dict[str, Any]


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Lines in small blocks, and a module of functions in the working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(preprocess_data, "PreprocessOptions", partial(PreprocessOptions, block_bytes=300))
    (tmp_path / "steps_of_test.py").write_text(FUNCTIONS)
    path = tmp_path / "c.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records()))
    yield path
    sys.modules.pop("steps_of_test", None)
    sys.path[:] = [entry for entry in sys.path if entry != str(tmp_path)]


def records() -> list[Record]:
    draw = Random(3)
    return [{"number": n, "title": f"t{n}", "text": "x" * draw.randrange(1, 30)} for n in range(100)]


def run(*flags: str) -> int:
    return main(["--output-prefix", "out", "--tokenizer-type", "ByteTokenizer", "--overwrite", *flags])


def texts() -> list[str]:
    data = IndexedDataset("out_text_document")
    return [bytes(data[i].tolist()).decode() for i in range(len(data))]


@pytest.mark.parametrize("workers", ["1", "2"])
def test_steps_are_applied_in_their_order(
    corpus: Path, workers: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = ["--filter", "steps_of_test:even", "--map", "steps_of_test:join", "steps_of_test:upper"]
    steps += ["--filter", "steps_of_test:short"]
    assert run("--input", str(corpus), *steps, "--workers", workers) == 0
    even = [each for each in records() if each["number"] % 2 == 0]
    joined = [each for each in even if each["number"] % 5 != 1]
    kept = [each for each in joined if len(f"{each['title']}|{each['text']}") < 20]
    assert texts() == [f"{each['title']}|{each['text']}".upper() for each in kept]
    lines = capsys.readouterr().out.splitlines()
    share = f"{100 * len(kept) / len(records()):.1f}%"
    assert f"documents: {len(kept)} of {len(records())} ({share}), " in lines[0]
    assert lines[1:5] == [
        "dropped: 50 by --filter steps_of_test:even",
        "dropped: 10 by --map steps_of_test:join",
        f"dropped: {len(joined) - len(kept)} by --filter steps_of_test:short",
        "note: most documents were dropped, 50 of 100 for one reason",
    ]
    manifest = DatasetManifest.read("out_text_document")
    assert manifest is not None
    assert manifest.facts["dropped"] == {
        "--filter steps_of_test:even": 50,
        "--map steps_of_test:join": 10,
        "--filter steps_of_test:short": len(joined) - len(kept),
    }
    assert [each["step"] for each in manifest.facts["steps"]][1] == "--map steps_of_test:join"
    origins = DocumentOrigins.open("out_text_document")
    assert origins is not None
    assert [origins.locate(i) for i in range(len(kept))] == [(str(corpus), each["number"] + 1) for each in kept]


def test_of_a_table_the_columns_are_read_that_a_function_names(corpus: Path, tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    table = tmp_path / "c.parquet"
    parquet.write_table(pa.Table.from_pylist([*records(), {"number": None, "title": "long", "text": "last"}]), table)
    assert run("--input", str(table), "--filter", "steps_of_test:only_title") == 0
    assert texts() == [each["text"] for each in records()] + ["last"]
    parquet.write_table(pa.Table.from_pylist(records()), table)
    assert run("--input", str(table), "--map", "steps_of_test:join", "--filter", "steps_of_test:short") == 0
    joined = [f"{each['title']}|{each['text']}" for each in records() if each["number"] % 5 != 1]
    assert texts() == [text for text in joined if len(text) < 20]
    origins = DocumentOrigins.open("out_text_document")
    assert origins is not None
    assert origins.files == [str(table)]


def test_an_exception_names_file_line_and_function(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--input", str(corpus), "--map", "steps_of_test:fails", "--on-bad-line", "skip") == 1
    err = capsys.readouterr().err
    assert f"{corpus}:8: --map steps_of_test:fails raised ZeroDivisionError: division by zero" in err
    assert f"{corpus}:1: --map steps_of_test:fails returned float, not dict or None" in err
    assert run("--input", str(corpus), "--map", "steps_of_test:wrong") == 1
    assert f"{corpus}:1: --map steps_of_test:wrong returned str, not dict or None" in capsys.readouterr().err
    assert run("--input", str(corpus), "--filter", "steps_of_test:wrong") == 1
    assert "returned str, not True or False" in capsys.readouterr().err
    assert run("--input", str(corpus), "--filter", "steps_of_test:leaves", "--workers", "1") == 1
    assert f"{corpus}:1: --filter steps_of_test:leaves raised SystemExit: 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("steps_of_test", "a function is named by its module, a colon and its name"),
        ("steps_of_nobody:f", "the import of steps_of_nobody failed: ModuleNotFoundError"),
        ("steps_of_test:nothing", "steps_of_test has no function nothing"),
    ],
)
def test_a_function_that_is_not_there(
    corpus: Path, capsys: pytest.CaptureFixture[str], name: str, message: str
) -> None:
    assert run("--input", str(corpus), "--filter", name) == 1
    assert f"--filter {name}: {message}" in capsys.readouterr().err


def test_a_run_is_not_continued_with_another_function(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = corpus.read_text()
    corpus.write_text(lines + "{\n")
    monkeypatch.setattr("megatron.data.preprocess.encode.SAVE_SECONDS", 0)
    flags = ["--input", str(corpus), "--filter", "steps_of_test:even"]
    assert main(["--output-prefix", "out", "--tokenizer-type", "ByteTokenizer", *flags]) == 1
    (tmp_path / "steps_of_test.py").write_text(FUNCTIONS.replace("% 2 == 0", "% 2 == 1"))
    assert main(["--output-prefix", "out", "--tokenizer-type", "ByteTokenizer", *flags]) == 1
    assert "an interrupted run had other --map, --filter, --quality" in capsys.readouterr().err


def test_the_fingerprint_covers_partials_and_imported_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    files = {
        "package/__init__.py": "",
        "package/steps.py": "from functools import partial\nfrom .inner import f\nshort = partial(f, limit=3)\n",
        "package/inner.py": "import deep\ndef f(text: str, limit: int) -> bool:\n    return len(text) < limit\n",
        "package/unused.py": "",
        "deep.py": "LIMIT = 3\n",
    }

    def fingerprint() -> str:
        (tmp_path / "package").mkdir(exist_ok=True)
        for name, content in files.items():
            (tmp_path / name).write_text(content)
        importlib.invalidate_caches()
        (step,) = DocumentTransforms([Step("--filter", "package.steps:short")], ["text"]).describe()
        for name in [name for name in sys.modules if name.partition(".")[0] in ("package", "deep")]:
            del sys.modules[name]
        return step["fingerprint"]

    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = fingerprint()
    seen = {before}
    for name in files:
        files[name] += "# changed\n"
        now = fingerprint()
        assert (now in seen) == (name == "package/unused.py"), name
        seen.add(now)
    files["package/steps.py"] = files["package/steps.py"].replace("limit=3", "limit=4")
    assert fingerprint() not in seen
