"""Every command of docs/data.md runs, in order, and prints the output on the page."""

from __future__ import annotations

import importlib
import io
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest
import s3fs

from tests.unit.checkpoint.s3_server import serving

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "data.md"
FENCE = re.compile(r"^```(.*)\n((?:.*\n)*?)```$", re.MULTILINE)
OURS = re.compile(r"^python (?:tools/)?(\w+)\.py (.*)\n", re.MULTILINE)
"""A command of this project, without line continuations."""

MEASURED = re.compile(r"\d[\d.,]*[kKMG]?(?= ?(?:s|ms|MB/s|MB|tok/s|tokens/s)\b)|(?<=gigatoken )[\d.]+")
"""Numbers that differ from machine to machine: seconds, speeds, and the engine's version."""

ANY = "..."


@dataclass(frozen=True)
class Block:
    """Commands of the page: what they print (None: the page does not show it), and whether the last one is refused."""

    line: int
    commands: str
    output: str | None
    refused: bool


def blocks(text: str) -> Iterator[Block]:
    """The ``bash`` blocks; a block without a language right after one is its output."""
    fences = list(FENCE.finditer(text))
    for fence, following in zip(fences, [*fences[1:], None], strict=True):
        language, commands = fence.group(1), fence.group(2)
        if language.split()[:1] != ["bash"]:
            continue
        shown = following is not None and not following.group(1) and not text[fence.end() : following.start()].strip()
        output = following.group(2) if shown and following else None
        yield Block(text.count("\n", 0, fence.start()) + 1, commands, output, language == "bash refused")


def matches(shown: str, real: str) -> bool:
    """Return True if the output matches the page, where dots stand for any text and a line of dots for any lines."""
    lines = [MEASURED.sub("#", line) for line in shown.splitlines()]
    patterns = ["(?:.*\n)*?" if line == ANY else re.escape(line).replace(re.escape(ANY), ".*") + "\n" for line in lines]
    return re.fullmatch("".join(patterns), MEASURED.sub("#", real)) is not None


def run(commands: str) -> tuple[int, str]:
    """Return the last status and all output; commands of this project run in this process, others in bash."""
    status, printed = 0, io.StringIO()
    parts = OURS.split(re.sub(r" *\\\n *", " ", commands))
    for shell, name, flags in zip(parts[::3], [*parts[1::3], ""], [*parts[2::3], ""], strict=True):
        if shell.strip():
            subprocess.run(["bash", "-euo", "pipefail", "-c", shell], check=True)
        if name:
            assert status == 0, printed.getvalue()
            module = importlib.import_module(name if name == "pretrain_gpt" else f"tools.{name}")
            with redirect_stdout(printed), redirect_stderr(printed):
                status = module.main(shlex.split(flags))
    return status, printed.getvalue()


@pytest.fixture
def object_store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Have an object store on this machine be the one that the environment names."""
    s3fs.S3FileSystem.clear_instance_cache()
    names = {"AWS_ACCESS_KEY_ID": "none", "AWS_SECRET_ACCESS_KEY": "none", "AWS_EC2_METADATA_DISABLED": "true"}
    with serving() as (address, _):
        for name, value in {**names, "AWS_DEFAULT_REGION": "us-east-1", "AWS_ENDPOINT_URL": address}.items():
            monkeypatch.setenv(name, value)
        yield
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.mark.usefixtures("object_store")
def test_every_command_prints_the_output_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    monkeypatch.setattr("megatron.training.loggers.run_logger.draw_plots", lambda *arguments: None)
    found = list(blocks(PAGE.read_text()))
    assert sum(len(OURS.findall(block.commands.replace("\\\n", ""))) for block in found) >= 17
    for block in found:
        status, output = run(block.commands)
        printed = f"docs/data.md:{block.line}\n{block.commands}\nstatus {status}, printed:\n{output}"
        assert (status != 0) == block.refused, printed
        assert block.output is None or matches(block.output, output), f"{printed}\nshown:\n{block.output}"


def test_no_command_on_the_page_is_left_out() -> None:
    text = PAGE.read_text()
    fences = FENCE.findall(text)
    assert {language for language, _ in fences} <= {"bash", "bash refused", ""}
    outside = FENCE.sub("", text) + "".join(body for language, body in fences if not language)
    assert not re.search(r"^(\$ )?(python|bash|torchrun) ", outside, re.MULTILINE)


@pytest.mark.parametrize(
    ("shown", "real", "same"),
    [
        ("a 1\nb\n", "a 1\nb\n", True),
        ("a 1\nb\n", "a 2\nb\n", False),
        ("...\nb\n", "a\nc\n", False),
        ("a ...\nb\n", "a 1\n2\nb\n", False),
        ("took 1.2 s, 3 MB/s\n", "took 40 s, 1,234.5 MB/s\n", True),
        ("took 1.2 s, 3 documents\n", "took 1.2 s, 4 documents\n", False),
    ],
)
def test_output_is_compared(shown: str, real: str, same: bool) -> None:
    assert matches(shown, real) == same


def test_a_block_is_read_with_its_output() -> None:
    page = "text\n```bash\na\n```\n\n```\n1\n```\n```\nof nothing\n```\n```bash refused\nb\n```\nmore\n```\n2\n```\n"
    assert list(blocks(page)) == [Block(2, "a\n", "1\n", False), Block(12, "b\n", None, True)]
