"""Names in untrusted files reach a terminal without control characters."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.format import (
    MANIFEST,
    MARKER,
    FileRecord,
    TensorRecord,
    encode_manifest,
    marker_content,
)
from megatron.config.text import echo, escape_library_logs, printable
from megatron.inference.text import ContinuationPrinter, IdCodec
from megatron.training.loggers.console import print_line, print_warning
from megatron.training.loggers.run_folder import IncidentLogger
from tests.unit.convert.folders import llama, random_weights, write_folder
from tools import convert_checkpoint, diff_runs, generate, inspect_checkpoint, inspect_dataset, preprocess_data

EVIL = "\x1b]0;title\x07\x1b[2Jname\u202egnp\x9b31m\r"
SHOWN = r"\x1b]0;title\x07\x1b[2Jname\u202egnp\x9b31m\r"


@pytest.fixture(autouse=True)
def nothing_else_is_printed(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    yield
    out, err = capfd.readouterr()
    assert printable(out + err) == out + err


def printed(capfd: pytest.CaptureFixture[str]) -> str:
    out, err = capfd.readouterr()
    assert printable(out + err) == out + err
    return out + err


ORDINARY = "model.layers.0.weight|Größe|モデル|модель|שלום|مرحبا|नमस्ते|👩‍👩‍👧|e\u0301|a b|tab\tline\nend|"
ORDINARY += "\u00a0|\u200d|\ufeff|\ufffd|\\x1b|~"


@pytest.mark.parametrize("name", ORDINARY.split("|"))
def test_ordinary_names_are_unchanged(name: str) -> None:
    assert printable(name) == name


def test_characters_that_control_a_terminal_are_escaped(capfd: pytest.CaptureFixture[str]) -> None:
    assert printable(EVIL) == SHOWN
    assert printable("\x7f\x00\x85\u2066\u2069\ud800") == r"\x7f\x00\x85\u2066\u2069\ud800"
    echo("a", Path(EVIL), 5, sep=" | ", end="!\n")
    assert printed(capfd) == f"a | {SHOWN} | 5!\n"


def test_checkpoints(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def save(name: str, **config: Any) -> Path:
        path = tmp_path / name
        path.mkdir()
        tensors = {EVIL: TensorRecord("F32", (0,), (0,), ()), "a": TensorRecord("F32", (2,), (2,), ())}
        files = {f"tokenizer/{EVIL}": FileRecord(0, 0, "0" * 16)}
        (path / "tokenizer").mkdir()
        (path / "tokenizer" / EVIL).touch()
        content = encode_manifest(tensors, files, {EVIL: 1}, {EVIL: config})
        (path / MANIFEST).write_bytes(content)
        (path / MARKER).write_bytes(marker_content(content))
        return path

    one, other = save("iter_0000001", x=EVIL), save("iter_0000002", x=2)
    assert inspect_checkpoint.main(["show", str(one)]) == 0
    text = printed(capfd)
    assert text.count(SHOWN) == 4, "a tensor, a file, a key of the state and one of the options"
    assert inspect_checkpoint.main(["diff", str(one), str(other)]) == 1
    assert f"option {SHOWN}.x" in printed(capfd)
    assert inspect_checkpoint.main(["verify", str(one)]) == 1
    assert f"tokenizer/{SHOWN}" in printed(capfd)
    assert inspect_checkpoint.main(["show", str(one), EVIL]) == 0
    assert inspect_checkpoint.main(["show", str(tmp_path / EVIL)]) == 2
    assert inspect_checkpoint.main(["ls", str(tmp_path)]) == 0


def test_hugging_face_folders(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = llama()
    weights = random_weights(model)
    folder = write_folder(tmp_path / "tensors", model, weights | {EVIL: weights["model.norm.weight"].clone()})
    convert = ["--no-check", "--save", str(tmp_path / "save"), "--load-hf"]
    assert convert_checkpoint.main([*convert, str(folder)]) == 1
    assert f"holds tensors that the model does not have: {SHOWN}" in printed(capfd)
    assert generate.main(["--load", f"hf:{folder}", "--prompt", "1"]) == 1
    assert SHOWN in printed(capfd)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {EVIL: EVIL}))
    assert generate.main(["--load", f"hf:{folder}", "--prompt", "1"]) == 2
    assert f"{SHOWN} " in printed(capfd)
    assert convert_checkpoint.main([*convert, str(tmp_path / EVIL)]) == 1
    assert SHOWN in printed(capfd)


def test_corpora_and_records(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / f"{EVIL}.jsonl").write_text(json.dumps({EVIL: "x"}) + "\n")
    command = ["--input", str(corpus), "--output-prefix", str(tmp_path / "x"), "--tokenizer-type", "ByteTokenizer"]
    assert preprocess_data.main(command) == 1
    text = printed(capfd)
    assert text.count(SHOWN) >= 2, "the file and its key"
    (corpus / "good.jsonl").write_text('{"text": "a"}\n')
    assert preprocess_data.main([*command, "--on-bad-line", "skip"]) == 0
    assert "passed over: " in printed(capfd)
    prefix = tmp_path / "x_text_document"
    record = json.loads(Path(f"{prefix}.tokens.json").read_text())
    Path(f"{prefix}.tokens.json").write_text(json.dumps(record | {"tokenizer_type": EVIL}))
    assert inspect_dataset.main([str(prefix)]) == 0
    assert SHOWN in printed(capfd)
    assert inspect_dataset.main([str(prefix), "--samples", "1"]) == 1
    assert SHOWN in printed(capfd)


def test_runs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    line = {"iteration": 1, "lm loss": 2.0, "consumed-tokens": 8, "consumed-samples": 1, "batch-size": 1}
    for name, value in (("a", EVIL), ("b", "x")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps(line) + "\n")
        (tmp_path / name / "config.yaml").write_text(json.dumps({"model": {"unknown": value, EVIL: value}}))
        (tmp_path / name / "environment.json").write_text(json.dumps({EVIL: value}))
    assert diff_runs.main([str(tmp_path / "a"), str(tmp_path / "b"), "--no-data"]) == 1
    assert f"{SHOWN}: {SHOWN} | x" in printed(capfd)


def test_messages_of_a_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    print_line(f"note: {EVIL}")
    print_warning(EVIL)
    assert printed(capfd) == f"note: {SHOWN}\nwarning: {SHOWN}\n"
    log = IncidentLogger(tmp_path / "incidents.md")
    log.event(1, "warning", {"time": 0.0, "text": EVIL})
    log.close()
    text = (tmp_path / "incidents.md").read_text()
    assert printable(text) == text


@pytest.mark.parametrize("terminal", [True, False])
def test_generated_texts_are_escaped_on_a_terminal_only(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    out.isatty = lambda: terminal  # type: ignore[method-assign]
    monkeypatch.setattr(IdCodec, "decode", lambda self, ids: EVIL * len(ids))
    printer = ContinuationPrinter(out, IdCodec(), [EVIL], [[1]], (), live=True)
    printer.token(0, 5, last=True)
    assert out.getvalue() == (SHOWN if terminal else EVIL) * 2 + "\n"


def test_log_lines_of_libraries_are_escaped(capfd: pytest.CaptureFixture[str]) -> None:
    escape_library_logs()
    logger = logging.getLogger("a library")
    logger.addHandler(logging.StreamHandler())
    logger.warning("You are using a model of type %s", EVIL)
    assert SHOWN in printed(capfd)
