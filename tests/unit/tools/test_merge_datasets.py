"""The merging tool, as a person runs it."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.data.errors import DataError
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.progress import ByteProgress
from tests.unit.data.pairs import content, pair, write
from tools.merge_datasets import main
from tools.preprocess_data import main as preprocess

ROOT = Path(__file__).parents[3]


def preprocessed(folder: Path, name: str, texts: list[str]) -> Path:
    """What preprocessing makes of texts, in a folder of its own."""
    corpus = folder / f"{name}.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    flags = ["--tokenizer-type", "ByteTokenizer", "--append-eod", "--output-prefix", str(folder / name / name)]
    (folder / name).mkdir()
    assert preprocess(["--input", str(corpus), *flags]) == 0
    return folder / name


def test_merged_is_what_one_preprocessing_of_all_text_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = ["first", "", "zwölf", "x" * 300, "last"]
    inputs = [preprocessed(tmp_path, "a", texts[:2]), preprocessed(tmp_path, "b", texts[2:])]
    whole = preprocessed(tmp_path, "whole", texts)
    capsys.readouterr()
    assert main(["--input", *map(str, inputs), "--output-prefix", str(tmp_path / "out" / "whole_text_document")]) == 0
    assert content(tmp_path / "out") == content(whole)
    assert capsys.readouterr().out.splitlines() == [
        f"{inputs[0]}/a_text_document: 2 documents, 6 tokens",
        f"{inputs[1]}/b_text_document: 3 documents, 313 tokens",
        "pairs: 2, documents: 5, tokens: 319",
        f"for the next step, pretrain_gpt.py: --data-path {tmp_path}/out/whole_text_document",
    ]


def test_what_does_not_go_together_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inputs = [str(write(tmp_path / dtype, [[1]], dtype)) for dtype in ("u2", "i4")]
    assert main(["--input", *inputs, "--output-prefix", str(tmp_path / "all")]) == 1
    assert capsys.readouterr().err.startswith(f"merge_datasets: {inputs[0]} holds uint16, {inputs[1]} int32")
    assert not (tmp_path / "all.bin").exists()


def test_what_is_there_stays_unless_it_is_to_be_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--input", str(write(tmp_path / "a", [[1]])), "--output-prefix", str(write(tmp_path / "all", [[2]]))]
    before = content(tmp_path)
    assert main(flags) == 2
    assert "all.bin is there already, and 1 more\n  fix: --overwrite" in capsys.readouterr().err
    assert content(tmp_path) == before
    assert main([*flags, "--overwrite"]) == 0
    assert pair(tmp_path / "all") == pair(tmp_path / "a")
    assert "a: 1 document, 1 token\n" in capsys.readouterr().out


def test_multimodal_data_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--input", "x", "--output-prefix", "y", "--multimodal"]) == 2
    assert "multimodal data are not supported" in capsys.readouterr().err


def test_an_interrupt_is_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(meter: ByteProgress, num_bytes: int) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(ByteProgress, "add", interrupt)
    a = str(write(tmp_path / "a", [[1]]))
    assert main(["--input", a, "--output-prefix", str(tmp_path / "all")]) == 130
    assert capsys.readouterr().err == f"merge_datasets: stopped by SIGINT; nothing was written under {tmp_path}/all\n"
    assert sorted(os.listdir(tmp_path)) == ["a.bin", "a.idx"]


def test_a_full_disk_is_a_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    a = str(write(tmp_path / "a", [[1] * 500_000]))
    done = subprocess.run(
        [sys.executable, "-m", "tools.merge_datasets", "--input", a, "--output-prefix", str(tmp_path / "all")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)),
    )
    printed = f"merge_datasets: {tmp_path}/all cannot be written: File too large\n  fix: make room on that disk"
    assert (done.returncode, done.stderr) == (1, f"{printed} | another --output-prefix\n")
    assert sorted(os.listdir(tmp_path)) == ["a.bin", "a.idx"]


def test_killed_it_leaves_no_pair_and_can_be_run_again(tmp_path: Path) -> None:
    a, b = (str(write(tmp_path / name, [[1] * 1000])) for name in "ab")
    script = (
        "import os, signal, sys\n"
        "from tools import merge_datasets\n"
        "merge_datasets.ByteProgress.add = lambda meter, n: os.kill(os.getpid(), signal.SIGKILL)\n"
        "merge_datasets.main(sys.argv[1:])\n"
    )
    flags = ["--input", a, b, "--output-prefix", str(tmp_path / "all")]
    done = subprocess.run([sys.executable, "-c", script, *flags], cwd=ROOT, capture_output=True)
    assert done.returncode == -signal.SIGKILL
    with pytest.raises(DataError, match="No such file"):
        IndexedDataset(tmp_path / "all")
    assert main(flags) == 0
    assert sorted(os.listdir(tmp_path)) == ["a.bin", "a.idx", "all.bin", "all.idx", "b.bin", "b.idx"]
    assert pair(tmp_path / "all") == pair(write(tmp_path / "expected", [[1] * 1000] * 2))


def test_help_needs_no_torch() -> None:
    program = (
        "import sys\nfrom tools.merge_datasets import build_parser\nbuild_parser().format_help()\n"
        "print({'torch', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
