"""Commands import no heavy library that they do not use; workers, which are processes of their own, neither."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.data.tokenizers.huggingface import make_tokenizer_files
from tests.unit.data.made_tokenizers import bpe, write_files

ROOT = Path(__file__).parents[3]
HEAVY = {"torch", "transformers", "datasets", "pyarrow", "pandas", "numba", "awkward", "matplotlib", "huggingface_hub"}
HEAVY |= {"sentencepiece", "tiktoken", "scipy", "datatrove", "IPython", "wandb"}


def imported(folder: Path, *command: str, prints: str = "") -> set[str]:
    """The packages that a command, which ``prints`` this, and its child processes import."""
    words = [sys.executable, "-X", "importtime", *command]
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=folder, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert prints in done.stderr
    packages = set(re.findall(r"^import time: .*\| +([\w]+)", done.stderr, re.MULTILINE))
    assert "argparse" in packages
    return packages


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a corpus in ``text.jsonl`` and a tokenizer in ``bpe``."""
    folder = tmp_path_factory.mktemp("startup")
    (folder / "text.jsonl").write_text('{"text": "a tiny text"}\n{"text": "a tiny text"}\n')
    write_files(folder / "bpe", make_tokenizer_files(bpe()))
    return folder


def test_a_small_corpus_becomes_tokens_without_heavy_libraries(corpus: Path) -> None:
    """By gigatoken, in two workers, which read tables and large texts only with the libraries for them."""
    tools = ROOT / "tools"
    flags = "--input text.jsonl --output-prefix out --tokenizer-type HuggingFaceTokenizer --tokenizer-model bpe"
    engine = "engine: gigatoken 0"
    found = imported(corpus, str(tools / "preprocess_data.py"), *flags.split(), "--workers", "2", prints=engine)
    assert not found & HEAVY
    pair = "out_text_document"
    assert not imported(corpus, str(tools / "merge_datasets.py"), "--input", pair, "--output-prefix", "all") & HEAVY
    assert not imported(corpus, str(tools / "inspect_dataset.py"), pair) & HEAVY
    found = imported(corpus, str(tools / "deduplicate.py"), "--input", "text.jsonl", "--output", "list")
    assert not found & (HEAVY | {"gigatoken", "tokenizers"})


@pytest.mark.parametrize("program", ["preprocess_data.py", "train_tokenizer.py", "build_index.py"])
def test_help_needs_no_heavy_libraries(tmp_path: Path, program: str) -> None:
    assert not imported(tmp_path, str(ROOT / "tools" / program), "--help") & (HEAVY | {"gigatoken"})
