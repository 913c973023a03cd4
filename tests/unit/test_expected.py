"""What the scripts that train are expected to do: a file for each, true to the planner, losses with their source."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.expected import COMPOUND, COMPOUND_RANKS, ROOT, expectation_file, planned, scripts
from tools.lib.expected_curve import FOLDERS

FILES = {path: json.loads(path.read_text()) for folder in FOLDERS for path in (ROOT / folder).glob("*.json")}


def test_every_script_that_trains_has_a_file_and_every_file_a_script() -> None:
    assert {expectation_file(script) for script in scripts()} == FILES.keys()
    others = {"train.sh", "evaluate_checkpoint.sh"}
    assert {path.name for path in (ROOT / "examples").glob("*.sh")} - {path.name for path in scripts()} == others


@pytest.mark.parametrize("script", scripts(), ids=lambda script: f"{script.parent.name}/{script.stem}")
def test_predictions_and_options_are_those_of_today(script: Path) -> None:
    """``python -m tests.expected`` writes them anew."""
    content = FILES[expectation_file(script)]
    assert {name: value for name, value in content.items() if name != "loss"} == planned(script)


@pytest.mark.parametrize("name", COMPOUND)
def test_flags_of_a_compound_script_are_in_its_text(name: str) -> None:
    text = (ROOT / "examples" / f"{name}.sh").read_text()
    learnt = {"--vocab-size", "--max-position-embeddings", "--config", "--micro-batch-size", "--device"}
    flags = [word for word in COMPOUND[name].split() if word.startswith("--") and word not in learnt]
    assert [flag for flag in flags if flag not in text] == []
    processes = "--nproc-per-node 2" in text or "GPUS:-2" in text
    assert COMPOUND_RANKS[name] == 1 + processes


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parents[1].name}/{file.stem}")
def test_losses_have_a_source_or_a_reason(file: Path) -> None:
    loss: dict[str, Any] = FILES[file]["loss"]
    assert ("absent" in loss) != bool(loss.keys() & {"points", "published"})
    assert "absent" not in loss or len(loss["absent"]) > 20
    assert all({"tokens", "loss", "kind", "source"} == each.keys() for each in loss.get("published", ()))
    if "points" in loss:
        measured, points = loss["measured"], loss["points"]
        assert len({*measured["seeds"]}) >= 3
        assert measured["command"].startswith(f"python -m tests.expected --measure {file.stem} ")
        assert {"commit", "date", "device"} <= measured.keys()
        assert all(a["tokens"] < b["tokens"] for a, b in pairwise(points))
        assert all(point["low"] < point["mean"] < point["high"] for point in points)
