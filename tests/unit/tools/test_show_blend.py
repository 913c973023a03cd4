"""The blend of a run is shown before it trains."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.data.pairs import write
from tools.show_blend import main

MODEL = "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --vocab-size 31"
FLAGS = [*MODEL.split(), "--seq-length", "10", "--global-batch-size", "5", "--train-iters", "20"]
MIXTURE = """
sources: {web: web, code: {path: [code, more], max_epochs: 3}}
stages:
  - {name: early, share: 40%, mix: {web: {share: 3}, code: {share: 1}}}
  - {name: long, seq_length: 50, mix: {code: {epochs: 2}, web: 1}}
"""


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, tokens in {"web": 1000, "code": 60, "more": 40}.items():
        write(tmp_path / name, [[1, 2, 3, 4]] * (tokens // 4))
    (tmp_path / "mixture.yaml").write_text(MIXTURE)


def test_stages_of_a_mixture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*FLAGS, "--data-mixture", "mixture.yaml", "--data-mixture-stages", "early"]
    assert main([*flags, "--json", "out.json"]) == 0
    (stage,) = json.loads((tmp_path / "out.json").read_text())["stages"]
    # 100 samples of 10 tokens; 250 tokens of code are 2.5 epochs of 100
    assert (stage["name"], stage["samples"], stage["tokens"]) == ("early", 100, 1000)
    web, code = stage["sources"]
    assert (web["samples"], web["epochs"], web["repeated"]) == (75, 0.75, 0)
    assert (code["samples"], code["epochs"], code["repeated"]) == (25, 2.5, 150)
    assert main(flags) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines] == [
        ["stage", "length", "source", "share", "tokens", "samples", "epochs", "in", "all", "repeated"],
        ["early", "10", "web", "75.00%", "750", "75", "0.75", "0.75", "0"],
        ["code", "25.00%", "250", "25", "2.5", "2.5", "150"],
    ]


def test_a_blend_is_one_stage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FLAGS, "--data-path", "3", "web", "1", "code", "--split", "1", "--json", "out.json"]) == 0
    (stage,) = json.loads((tmp_path / "out.json").read_text())["stages"]
    assert {use["name"]: (use["samples"], use["epochs"]) for use in stage["sources"]} == {
        "web": (75, 0.75),
        "code": (25, pytest.approx(250 / 60)),
    }
    assert main([*FLAGS, "--train-data-path", "web", "code"]) == 0  # in proportion to their sizes
    shares = [line.split()[-6] for line in capsys.readouterr().out.splitlines()[1:]]
    assert shares == ["94.34%", "5.66%"]


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    assert main([*FLAGS, "--data-mixture", "mixture.yaml", "--data-mixture-stages", "early", "--png", "x.png"]) == 0
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_shown_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    longer = [*FLAGS, "--data-mixture", "mixture.yaml", "--data-mixture-stages", "early", "--train-iters", "30"]
    assert main(longer) == 2
    assert "the run reads code 3.70 times (370 tokens of 100), but its max_epochs is 3" in capsys.readouterr().err
    assert main([*FLAGS, "--mock-data"]) == 2
    assert "there are no token files to blend" in capsys.readouterr().err


def test_the_stages_of_all_phases_are_shown(tmp_path: Path) -> None:
    """Stages of several lengths: 400 tokens of early, 600 of long, of which 200 are 2 epochs of code."""
    flags = [*FLAGS, "--max-position-embeddings", "50", "--data-mixture", "mixture.yaml", "--save", "s"]
    assert main([*flags, "--json", "out.json"]) == 0
    early, long = json.loads((tmp_path / "out.json").read_text())["stages"]
    assert [(stage["name"], stage["seq_length"], stage["samples"]) for stage in (early, long)] == [
        ("early", 10, 40),
        ("long", 50, 15),
    ]
    counts = {use["name"]: (use["begin"], use["tokens"]) for use in long["sources"]}
    assert counts == {"web": (300, 550), "code": (100, 200)}


def test_the_stages_of_a_file_of_phases_are_shown(tmp_path: Path) -> None:
    """Each phase takes the stages of the mixture, and continues its sources."""
    (tmp_path / "phases.yaml").write_text(
        "[{name: p, tokens: 500, data_mixture_stages: [early]}, {name: q, tokens: 100, data_mixture_stages: [early]}]"
    )
    flags = [*FLAGS[:-2], "--data-mixture", "mixture.yaml", "--save", "s", "--phases", "phases.yaml"]
    assert main([*flags, "--json", "out.json"]) == 0
    stages = json.loads((tmp_path / "out.json").read_text())["stages"]
    assert [stage["name"] for stage in stages] == ["p", "q"]
    assert [(use["begin"], use["tokens"]) for use in stages[1]["sources"]] == [(380, 80), (120, 20)]


def test_torch_is_not_imported(tmp_path: Path) -> None:
    program = "import sys; from tools.show_blend import main; main(sys.argv[1:]); assert 'torch' not in sys.modules"
    flags = [*FLAGS, "--data-mixture", "mixture.yaml", "--data-mixture-stages", "early"]
    root = Path(__file__).parents[3]
    environ = {"PYTHONPATH": str(root), "PATH": ""}
    subprocess.run([sys.executable, "-c", program, *flags], check=True, env=environ, cwd=tmp_path)
