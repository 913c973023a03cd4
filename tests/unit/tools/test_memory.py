"""The command line of the tool, and the output in the documentation."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from megatron.config.parallel import ZERO_STAGES
from tools import preprocess_data
from tools.memory import main

ROOT = Path(__file__).parents[3]
ELEMENTS = 6_738_415_616
"""Parameters of Llama-2 7B."""


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(argv, {}) == 0
    return capsys.readouterr().out


def rows(text: str) -> dict[str, list[float]]:
    cells = re.findall(r"^(\w[\w -]*?) ((?: +(?:1/)?[\d.,]+){4})$", text, re.MULTILINE)
    return {name: [float(n.replace(",", "").removeprefix("1/")) for n in row.split()] for name, row in cells}


def test_zero_saves_the_bytes_of_its_paper_without_alignment(capsys: pytest.CaptureFixture[str]) -> None:
    found = rows(printed(capsys, "--preset", "llama2-7b", "--bf16", "--world-size", "4"))
    gb, ranks = ELEMENTS / 2**30, 4
    expected = {
        "weights": [*[2 * gb] * 3, 2 * gb / ranks],
        "gradients": [*[4 * gb] * 2, *[4 * gb / ranks] * 2],
        "main params": [4 * gb, *[4 * gb / ranks] * 3],
        "moments": [8 * gb, *[8 * gb / ranks] * 3],
        "sum": [18 * gb, (6 + 12 / ranks) * gb, (2 + 16 / ranks) * gb, 18 * gb / ranks],
        "of ZeRO-0": [1, 18 / 9, 18 / 6, ranks],
    }
    assert {name: found[name] for name in expected} == {
        name: pytest.approx(numbers, abs=0.006, rel=1e-3) for name, numbers in expected.items()
    }
    assert [*found][-1] == "peak of a step"
    added = (found[n] for n in ("gathered weights", "reduction", "activations", "logits", "NCCL estimate"))
    assert found["peak of a step"] == pytest.approx([sum(n) for n in zip(found["sum"], *added)], abs=0.03)
    assert len(ZERO_STAGES) == 4


def test_the_flags_of_a_run_count(capsys: pytest.CaptureFixture[str]) -> None:
    argv = "--preset llama2-7b --bf16 --world-size 8 --tensor-model-parallel-size 2"
    remainders = rows(printed(capsys, *argv.split(), "--store-param-remainders", "--ema-decay", "0.99"))
    assert remainders["main params"][0] == pytest.approx(2 * ELEMENTS / 2 / 2**30, rel=2e-3)
    assert remainders["average"][1] == pytest.approx(remainders["average"][0] / 4, rel=2e-3)
    text = printed(capsys, *argv.split(), "--use-distributed-optimizer", "--num-distributed-optimizer-instances", "2")
    assert "8 ranks: PP 1 x DP 4 x TP 2" in text
    halves = rows(text)["moments"]
    assert halves[1] == pytest.approx(halves[0] / 2, rel=2e-3)


def test_the_vocabulary_is_that_of_the_data(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """As in a run with the same flags: the data record their tokenizer."""
    text, data = tmp_path / "text.jsonl", str(tmp_path / "data")
    text.write_text(json.dumps({"text": "the quick brown fox"}) + "\n")
    tokenizer = ("--tokenizer-type", "ByteTokenizer")
    assert preprocess_data.main(["--input", str(text), "--output-prefix", data, "--append-eod", *tokenizer]) == 0
    capsys.readouterr()
    tiny = ("--preset", "tiny-gpt2")
    found = printed(capsys, *tiny, "--data-path", f"{data}_text_document")
    assert found == printed(capsys, *tiny, *tokenizer)
    assert found.splitlines()[0] == printed(capsys, *tiny, "--vocab-size", "257").splitlines()[0]


def test_errors_are_reported_as_by_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--preset", "llama2-7b", "--world-size", "3", "--tensor-model-parallel-size", "2"], {}) == 2
    assert "E202" in capsys.readouterr().err
    assert main(["--preset", "tiny-gpt2"], {}) == 2
    assert "--vocab-size" in capsys.readouterr().err
    assert main(["--help"], {}) == 0
    assert "tools/memory.py" in capsys.readouterr().out


def test_the_documentation_shows_the_printed_output(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    shown = re.findall(r"^```\n\$ python tools/memory\.py (.*)\n((?:.*\n)*?)```$", text, re.MULTILINE)
    assert shown
    for flags, output in shown:
        assert printed(capsys, *shlex.split(flags)) == output, flags


def test_one_replica_is_warned_that_it_shares_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    tiny = ("--preset", "tiny-llama", "--vocab-size", "256")
    assert printed(capsys, *tiny).endswith("with DP 1: more ranks are --world-size 2\n")
    assert "DP 1:" not in printed(capsys, *tiny, "--world-size", "2")
