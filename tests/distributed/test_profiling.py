"""Profiles asked from a job of two ranks while it runs."""

from __future__ import annotations

import gzip
import json
import signal
from pathlib import Path
from unittest.mock import patch

import pytest

from megatron.config.run import RunConfig
from megatron.training.trainer import Trainer
from tests.kit.pool import Pool
from tests.kit.runs import before_step, column, start, tiny_run

REQUESTS = ("signal", "file", "nothing")


def run_rank(
    rank: int, world_size: int, config: RunConfig, request: str, requesting: int
) -> tuple[int | None, str, list[str]]:
    """Return a rank's exit status, stderr and notes on profiles; rank ``requesting`` requests one in step 2."""

    def ask(trainer: Trainer) -> None:
        if request == "signal" and rank == requesting:
            signal.raise_signal(signal.SIGUSR2)
        if request == "file" and rank == requesting:
            (Path(str(config.logging.run_dir)) / "PROFILE").touch()

    with patch("megatron.training.stop.FILE_CHECK_SECONDS", 0.0):
        outcome = start(config, before_step(2, ask), rank, world_size)
    lines = [line for line in outcome.out.splitlines() if line.startswith(("profile of", "profile requested"))]
    return outcome.status, outcome.err, [line.partition(":")[0] for line in lines]


def kept(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "profiles").glob("*.json.gz"))


def ranges(path: Path) -> set[str]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return {e["name"] for e in json.load(file)["traceEvents"] if e.get("cat") == "user_annotation"}


LAYOUTS = {
    "tp": "--tensor-model-parallel-size 2 --sequence-parallel",
    "bubble": "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --num-layers 4",
}
"""By what the ranks wait for."""


@pytest.mark.parametrize("axes", [pytest.param("tp", marks=pytest.mark.slow), "bubble"])
def test_ranks_agree_on_the_steps_and_the_run_is_the_same(pool: Pool, tmp_path: Path, axes: str) -> None:
    layout = LAYOUTS[axes] + " --global-batch-size 2"
    for request in REQUESTS:
        ranks = "0 1" if request == "signal" else "1"
        flags = f"--profile-ranks {ranks} {layout}"
        config = tiny_run(tmp_path / request, flags, world_size=2)
        requesting = 1 if request == "signal" else 0  # only rank 0 looks for the file
        recorded = "profile of steps 3 to 4"
        asked = f"profile requested of steps 3 to 4, recorded on --profile-ranks {ranks}"
        printed = {"signal": [[asked, recorded], [recorded]], "file": [[asked], [recorded]], "nothing": [[], []]}
        outcome = pool.run(2, run_rank, config, request, requesting)
        assert outcome == [(0, "", lines) for lines in printed[request]]
    assert kept(tmp_path / "signal") == [f"step_000003-000004_rank_{rank}.json.gz" for rank in (0, 1)]
    assert kept(tmp_path / "file") == ["step_000003-000004_rank_1.json.gz"]
    assert kept(tmp_path / "nothing") == []
    for name in ("lm loss", "grad-norm", "samples-digest"):
        with_signal, with_file, alone = (column(tmp_path / request, name) for request in REQUESTS)
        assert with_signal == with_file == alone

    found = ranges(tmp_path / "signal" / "profiles" / kept(tmp_path / "signal")[1])
    assert {"step 3", "step 4", "forward-compute", "optimizer", "layers.1", f"communication {axes}"} <= found
    assert {name for name in found if name.startswith("layers.")} == {
        f"layers.{i}" for i in ((1, 3) if axes == "bubble" else (0, 1))
    }
    table = (tmp_path / "signal" / "profiles" / "step_000003-000004_rank_1.txt").read_text()
    rows = [line.split() for line in table.splitlines() if line.split()[:2] == ["communication", axes]]
    assert 0.0 < float(rows[0][4].rstrip("%")) < 100.0  # of the time, with what it contains
