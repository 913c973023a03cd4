"""The pinned packages are exactly those that the package needs, with hashes; optional ones can be missing."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from tests import dependencies
from tests.kit.runs import records

ROOT = Path(__file__).parents[2]

OF_USERS = ("dev", "evaluate", "quality", "s3")
"""Extras that requirements.txt leaves out: requirements-dev.txt pins them."""

WITHOUT = """
import runpy, sys
from importlib.machinery import PathFinder
from importlib.metadata import Distribution, PackageNotFoundError
missing, find = sys.argv[1].split(","), PathFinder.find_spec
PathFinder.find_spec = lambda name, *rest: None if name.partition(".")[0] in missing else find(name, *rest)
from_name = Distribution.from_name
def from_name_unless_missing(name):
    if name.replace("-", "_") in missing:
        raise PackageNotFoundError(name)
    return from_name(name)
Distribution.from_name = from_name_unless_missing
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a program in an environment without some packages."""


def pins(name: str) -> dict[str, str]:
    """Version by package of a file of requirements; each has hashes."""
    text = (ROOT / name).read_text()
    found = re.findall(r"^([\w.-]+)==(\S+) \\\n(?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+", text, re.M)
    assert "".join(line for line in text.splitlines() if "==" in line).count("==") == len(found)
    return {canonicalize_name(package): version for package, version in found}


def test_the_pinned_packages_match_the_dependencies() -> None:
    extras, run = dependencies.by_extra(), pins("requirements.txt")
    wanted = set().union(*(names for extra, names in extras.items() if extra not in OF_USERS))
    assert wanted <= set(run)
    assert set(run) - wanted <= {"importlib-metadata", "lazy-importer", "zipp"}  # only before Python 3.12
    assert set(pins("requirements-dev.txt")) == set().union(*(extras[extra] for extra in OF_USERS)) - wanted


def test_a_run_needs_fifty_packages() -> None:
    core = dependencies.by_extra()["core"]
    assert len(core) <= 52  # two more than now, because requirements of a dependency change
    assert not {"wandb", "tensorboard", "gigatoken", "orjson", "matplotlib", "pyarrow", "grpcio"} & core


def without_extras(*command: str) -> subprocess.CompletedProcess[str]:
    """A program in an environment that has nothing but the packages of a run."""
    core = dependencies.by_extra()["core"] | {"megatron-pretrain"}
    modules = packages_distributions()
    missing = [name for name, owners in modules.items() if not {canonicalize_name(owner) for owner in owners} & core]
    assert {"wandb", "tensorboard", "gigatoken", "orjson", "matplotlib", "pandas", "pyarrow", "awkward"} <= {*missing}
    words = [sys.executable, "-c", WITHOUT, ",".join(missing), *command]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_a_run_without_any_extra_trains(tmp_path: Path) -> None:
    flags = "--preset tiny-llama --mock-data --vocab-size 64 --train-iters 2 --seq-length 32 --device cpu"
    trackers = ("--wandb-project", "p", "--tensorboard-dir", str(tmp_path / "board"), "--run-dir", str(tmp_path))
    done = without_extras("pretrain_gpt.py", *flags.split(), *trackers)
    assert done.returncode == 0, done.stderr
    assert "2/2" in done.stdout
    warned = [record["text"] for record in records(tmp_path, "text") if record["event"] == "warning"]
    for name in ("wandb", "tensorboard"):
        assert any(f"{name} is not installed: pip install 'megatron-pretrain[{name}]'" in text for text in warned)


@pytest.mark.parametrize("name", ["corpus.jsonl", "corpus.parquet"])
def test_without_any_extra_text_becomes_tokens_and_tables_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text('{"text": "one"}\n{"text": "two"}\n')
    where = ("--input", str(tmp_path / name), "--output-prefix", str(tmp_path / "out"))
    done = without_extras("tools/preprocess_data.py", *where, "--tokenizer-type", "ByteTokenizer")
    assert (done.returncode, (tmp_path / "out_text_document.bin").exists()) == (
        (0, True) if "json" in name else (1, False)
    )
    assert ("fix: pip install 'megatron-pretrain[tables]'" in done.stderr) == ("json" not in name)
