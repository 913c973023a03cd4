"""The tool that compares runs, on folders of real runs."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import yaml
from numpy.typing import NDArray

from megatron.arguments.sources import from_dict
from megatron.data.dataset import Dataset
from megatron.data.loader import build_data
from tests.kit.runs import before_step, kill, start, tiny_run
from tests.unit.data.pairs import write
from tools.diff_runs import main
from tools.lib.run_differences import first_different_index, open_samples, read_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of runs that differ in one thing."""
    root = tmp_path_factory.mktemp("runs")
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 31, 40).tolist() for _ in range(12)]
    write(root / "x", documents)
    write(root / "y", [*documents[:-1], [(number + 1) % 31 for number in documents[-1]]])
    data = f"--set data.mock_data=false --split 1 --data-path {root}"
    for name, flags in {
        "plain": f"{data}/x",
        "again": f"{data}/x --log-interval 2",
        "lr": f"{data}/x --lr 1.1e-2",
        "seed": f"{data}/x --seed 7",
        "twice": f"{data}/x --micro-batch-size 2",
        "other": f"{data}/y",
    }.items():
        start(tiny_run(root / name, flags))
    resumed = f"{data}/x --save {root}/saved --save-interval 2"
    start(tiny_run(root / "resumed", resumed), before_step(4, kill))
    start(tiny_run(root / "resumed", resumed))
    for length in (4, 30):
        longer = f"{data}/x --lr-decay-style constant --save {root}/longer --train-iters {length}"
        start(tiny_run(root / "extended", longer))
    start(tiny_run(root / "planned", f"{data}/x --lr-decay-style constant --train-iters 30"))
    return root


def reported(runs: Path, a: str, b: str, capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, list[str]]:
    status = main([str(runs / a), str(runs / b), *flags])
    return status, capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("other", "steps"),
    [
        ("plain", "steps: equal to the bit up to step 6, in 6 log lines"),
        ("resumed", "steps: equal to the bit up to step 6, in 6 log lines"),
        ("again", "steps: equal to the bit up to step 6, in 3 log lines"),
    ],
)
def test_equal_runs(runs: Path, capsys: pytest.CaptureFixture[str], other: str, steps: str) -> None:
    status, lines = reported(runs, "plain", other, capsys)
    assert steps in lines
    assert any(line.startswith("samples: the same up to step") for line in lines)
    assert status == 0
    assert ("  not counted: --log-interval: 1 | 2" in lines) is (other == "again")


def test_another_way_to_compute_is_equal_within_a_tolerance(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its options are shown and do not count; its numbers do, as far as they are apart."""
    status, lines = reported(runs, "plain", "twice", capsys, "--tolerance", "1e-4")
    assert lines[:3] == [
        "options: equal",
        "  not counted: --micro-batch-size: 1 | 2",
        "  of one start, not counted: --run-dir",
    ]
    assert status == 0
    assert reported(runs, "plain", "twice", capsys)[0] == 1
    assert reported(runs, "twice", "lr", capsys, "--tolerance", "1.0")[0] == 1  # for --lr


@pytest.mark.parametrize("other", ["plain", "lr"])
def test_without_a_step_in_common_there_is_nothing_to_compare(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], other: str
) -> None:
    shutil.copytree(runs / other, tmp_path / "late")
    path = tmp_path / "late" / "metrics.jsonl"
    late = [text for text in path.read_text().splitlines() if json.loads(text)["iteration"] > 3]
    path.write_text("\n".join(late) + "\n")
    shutil.copytree(runs / "plain", tmp_path / "early")
    early = tmp_path / "early" / "metrics.jsonl"
    early.write_text("".join(t for t in early.read_text().splitlines(True) if json.loads(t)["iteration"] <= 3))
    status, lines = reported(tmp_path, "early", "late", capsys)
    assert status == 2
    assert "steps: not compared, no log line is of the same step; the last are of 3 | 6" in lines


def test_another_learning_rate(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, lines = reported(runs, "plain", "lr", capsys)
    assert status == 1
    assert lines[:2] == ["options: 1 differ", "  --lr: 0.01 | 0.011 (relative 9.1e-02)"]
    assert "steps: the log line of step 1 is the first that differs" in lines
    assert "samples: the same up to step 6" in lines
    assert reported(runs, "plain", "lr", capsys, "--tolerance", "0.5")[1][3].startswith(
        "steps: equal to 0.5 up to step 6"
    )


class Reordered:
    """A dataset in another order."""

    def __init__(self, fingerprint: str, known: NDArray[np.uint64]) -> None:
        self.fingerprint, self.known = fingerprint, known

    def __len__(self) -> int:
        return len(self.known)

    def sample_hashes(self, places: NDArray[np.int64]) -> NDArray[np.uint64]:
        return self.known[places]


def by_tokens(a: Dataset, b: Dataset) -> int:
    return next(i for i in range(len(a)) if not np.array_equal(a[i].tokens, b[i].tokens))


def train_data(folder: Path) -> Dataset:
    config = from_dict(yaml.safe_load((folder / "config.yaml").read_text()))
    return build_data(config.data, config.training, 31, 1).datasets["train"]


@pytest.mark.parametrize("other", ["seed", "other"])
def test_other_samples(runs: Path, capsys: pytest.CaptureFixture[str], other: str) -> None:
    """The first sample that differs, by its tokens, where the order of the data is another, and where their content."""
    by_hand = by_tokens(train_data(runs / "plain"), train_data(runs / other))
    status, lines = reported(runs, "plain", other, capsys)
    assert status == 1
    assert any(line.startswith(f"samples: sample {by_hand} (from 0) is the first that differs") for line in lines)
    assert "samples: their digests differ from the log line of step 1 on" in lines
    if other == "other":  # trained on the same until then
        assert any(f"the log line of step {by_hand // 4 + 1} is the first that differs" in line for line in lines)


def test_a_run_that_was_made_longer_has_its_own_order(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The order of samples is frozen in segments; an extended run has other segments than one planned as long."""
    config = from_dict(yaml.safe_load((runs / "extended" / "config.yaml").read_text()))
    laid_out = json.loads((runs / "extended" / "data.json").read_text())["train"]["laid_out_for_samples"]
    assert len(laid_out) > 1
    extended = build_data(config.data, config.training, 31, 1, segments={"train": laid_out}).datasets["train"]
    by_hand = by_tokens(train_data(runs / "planned"), extended)
    _, lines = reported(runs, "planned", "extended", capsys)
    assert any(line.startswith(f"samples: sample {by_hand} (from 0) is the first that differs") for line in lines)


def test_without_digests_and_without_the_data(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Lines of an older version have no digest of samples; the data are compared if they can be opened."""
    for name in ("plain", "lr"):
        shutil.copytree(runs / name, tmp_path / name)
        path = tmp_path / name / "metrics.jsonl"
        lines = [json.loads(text) for text in path.read_text().splitlines()]
        path.write_text(
            "\n".join(json.dumps({k: v for k, v in line.items() if k != "samples-digest"}) for line in lines)
        )
    assert "samples: samples 0 to 23 are the same" in reported(tmp_path, "plain", "lr", capsys)[1]
    assert "samples: the data were not opened" in reported(tmp_path, "plain", "lr", capsys, "--no-data")[1]


def test_data_that_changed_since_are_reported(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("plain", "seed"):
        shutil.copytree(runs / name, tmp_path / name)
        config = tmp_path / name / "config.yaml"
        config.write_text(config.read_text().replace(f"{runs}/x", f"{runs}/y"))
    _, lines = reported(tmp_path, "plain", "seed", capsys)
    assert any(f"the training data that {tmp_path / 'plain'} names are not those that it has read" in x for x in lines)


def test_an_order_that_changes_late_is_found_block_by_block(runs: Path) -> None:
    """Of the same content, orders are compared by what identifies a sample."""
    a, b = open_samples(read_run(runs / "plain")), open_samples(read_run(runs / "plain"))
    numbers, place = np.arange(24), 13
    known = a.datasets["train"].sample_hashes(numbers)
    other = Reordered(a.datasets["train"].fingerprint, np.where(numbers == place, known + np.uint64(1), known))
    with patch("tools.lib.run_differences.DIGEST_BLOCK", 5):
        assert first_different_index(a, b, 0, 24) is None
        assert first_different_index(a, replace(b, datasets={"train": other}), 0, 24) == place
        assert first_different_index(a, replace(b, datasets={"train": other}), 14, 24) is None


@pytest.mark.parametrize("flags", [("--tolerance", "-1"), ("--tolerance", "nan")])
def test_a_tolerance_is_a_distance(runs: Path, flags: tuple[str, str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([str(runs / "plain"), str(runs / "plain"), *flags])


def test_a_folder_that_is_no_run_is_refused(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(runs / "plain"), str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"diff_runs: {tmp_path} is not a run folder: ")
    assert main([str(runs / "plain"), str(tmp_path / "nowhere")]) == 2
    assert "nowhere is not a folder: pass the folders given to the runs as --run-dir" in capsys.readouterr().err
    (tmp_path / "new").mkdir()
    shutil.copy(runs / "plain" / "config.yaml", tmp_path / "new")
    status, lines = reported(tmp_path, "new", str(runs / "plain"), capsys)
    assert status == 2
    assert "steps: not compared, no log line is of the same step; the last are of 0 | 6" in lines
