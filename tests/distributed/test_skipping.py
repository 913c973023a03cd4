"""Skipped samples, documents and steps in other layouts: the same samples and losses as on one rank."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megatron.data.indexed_writer import IndexedDatasetWriter
from tests.distributed.resume import run_rank
from tests.kit.pool import Pool
from tests.kit.runs import column, start, tiny_run
from tools import inspect_dataset

LONG = pytest.mark.slow
LAYOUTS = {
    "dp2": "--micro-batch-size 2",
    "tp2-sp": "--tensor-model-parallel-size 2 --sequence-parallel",
    "pp2": "--pipeline-model-parallel-size 2",
    "cp2": "--context-parallel-size 2 --cp-comm-type p2p",
}


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder, random = tmp_path_factory.mktemp("corpora"), np.random.default_rng(2)
    for name in ("wiki", "code"):
        with IndexedDatasetWriter(folder / name, np.uint16) as writer:
            for length in random.integers(1, 12, 60):
                writer.add_document(random.integers(0, 31, length).tolist())
    skips = f"--skip-samples 2:5 9:10 --skip-documents {folder}/wiki:7 --iterations-to-skip 3"
    data = f"--set data.mock_data=false --data-path 0.7 {folder}/wiki 0.3 {folder}/code --split 1"
    return f"{data} {skips} --fp64 --position-embedding-type rope"


@pytest.mark.parametrize("layout", ["dp2", *(pytest.param(name, marks=LONG) for name in ("tp2-sp", "pp2", "cp2"))])
def test_every_layout_reads_the_samples_of_one_rank(
    pool: Pool, flags: str, tmp_path: Path, layout: str, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = start(tiny_run(tmp_path / "alone", flags))
    outcomes = pool.run(2, run_rank, tiny_run(tmp_path / "run", f"{flags} {LAYOUTS[layout]}", 2))
    assert [outcome.status for outcome in (alone, *outcomes)] == [0, 0, 0]
    for name in ("samples-digest", "iteration", "skipped-iterations"):
        assert column(tmp_path / "run", name) == column(tmp_path / "alone", name)
    assert column(tmp_path / "run", "lm loss") == pytest.approx(column(tmp_path / "alone", "lm loss"), rel=1e-10)
    for step, samples in alone.samples.items():
        capsys.readouterr()
        assert inspect_dataset.main(["--run", str(tmp_path / "run"), "--step", str(step), "--json"]) == 0
        found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [facts["sample"] for facts in found] == [number for number, _ in samples]
        for rank, outcome in enumerate(outcomes):
            assert [facts["sample"] for facts in found if rank in facts["ranks"]] == [
                i for i, _ in outcome.samples[step]
            ]
