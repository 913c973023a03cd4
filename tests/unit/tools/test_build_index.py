"""The index tables of a run, built before it: the run finds them, and the tool lists them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron.arguments.cli import parse
from megatron.data.index_cache import IndexCache
from megatron.data.loader import build_data
from tools.build_index import main

ROOT = Path(__file__).parents[3]
CASES = [str(ROOT / "tests" / "golden" / "megatron" / f"case{i}") for i in (0, 1)]
RUN = ["--num-layers", "1", "--hidden-size", "8", "--num-attention-heads", "1", "--vocab-size", "60000"]
RUN += ["--seq-length", "32", "--train-iters", "50", "--eval-iters", "2", "--eval-interval", "20", "--split", "90,8,2"]
BLEND = ["--data-path", "0.7", CASES[0], "0.3", CASES[1]]


def table(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def entries(folder: Path) -> set[str]:
    """Return the names of the tables; `pairs` holds what is known of the files that were checked."""
    return {path.name for path in folder.iterdir() if path.is_dir() and path.name != "pairs"}


def test_every_split_is_built_and_then_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*RUN, *BLEND, "--data-cache-path", str(tmp_path), "--world-size", "2"]
    assert main(flags) == 0
    head, *rows = table(capsys.readouterr().out)
    assert head == ["split", "source", "sequences", "tokens", "epochs", "samples", "MB", "tables"]
    assert [row[0] for row in rows] == ["train"] * 3 + ["valid"] * 3 + ["test"] * 3
    assert [row[1] for row in rows] == [*CASES, "blend"] * 3
    assert rows[0][2:5] == ["180", "5,689", "1"]
    assert [row[-1] for row in rows] == ["built"] * 9
    assert rows[2][4] == "100", "50 steps of 2 ranks' micro-batches"
    built = entries(tmp_path)
    assert len(built) == 9
    assert main(flags) == 0
    assert [row[-1] for row in table(capsys.readouterr().out)[1:]] == ["found"] * 9
    assert entries(tmp_path) == built


def test_a_run_builds_nothing_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = [*RUN, *BLEND, "--data-cache-path", str(tmp_path)]
    assert main([*flags, "--world-size", "2"]) == 0
    config = parse([*flags, "--world-size", "2", "--check-config"]).config
    in_memory = build_data(parse([*RUN, *BLEND]).config.data, config.training, 60000, 2)
    monkeypatch.setattr(IndexCache, "_wait", lambda *args: pytest.fail("the run builds tables"))
    source = build_data(config.data, config.training, 60000, 2)
    for split, dataset in source.datasets.items():
        places = np.arange(len(dataset))
        assert np.array_equal(dataset.sample_hashes(places), in_memory.datasets[split].sample_hashes(places))
        assert dataset[0].tokens.tolist() == in_memory.datasets[split][0].tokens.tolist()


def test_only_missing_indexes_are_built(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*RUN, "--data-path", CASES[0], "--data-cache-path", str(tmp_path)]
    assert main(flags) == 0
    capsys.readouterr()
    assert main([*flags, "--train-iters", "59"]) == 0
    assert [(row[0], row[-1]) for row in table(capsys.readouterr().out)[1:]] == [
        ("train", "built"),
        ("valid", "found"),
        ("test", "found"),
    ]


def test_sources_used_up_are_laid_out_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without weights a segment is one epoch at most."""
    flags = [*RUN, "--data-path", *CASES, *CASES[:1], "--train-iters", "1500", "--eval-iters", "0"]
    assert main([*flags, "--data-cache-path", str(tmp_path)]) == 0
    rows = table(capsys.readouterr().out)[1:]
    assert [row[:2] for row in rows if row[2] == "blend"] == [["train", "1/2"], ["train", "2/2"]]


def test_a_folder_that_takes_nothing_is_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main([*RUN, "--data-path", CASES[0], "--data-cache-path", str(tmp_path / "file" / "folder")]) == 1
    shown = capsys.readouterr()
    assert [row[-2:] for row in table(shown.out)[1:]] == [["not", "kept"]] * 3
    assert "cannot be used (Not a directory)" in shown.err


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--data-path", CASES[0]], "--data-cache-path FOLDER"),
        (["--mock-data", "--data-cache-path", "x"], "--mock-data needs no tables"),
        (["--data-path", CASES[0], "--data-cache-path", "x", "--split", "99999,1,0"], "too few for one sample of"),
        (["--data-path", CASES[0], "--data-cache-path", "x", "--seq-length", "0"], "seq"),
    ],
)
def test_errors_are_reported(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    sentence: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*RUN, *flags]) == 2
    assert sentence in capsys.readouterr().err
