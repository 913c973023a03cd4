"""Ends that scripts rely on, on several ranks: a file that stops all, the proof of the end, the first failure."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from contextlib import ExitStack, redirect_stderr
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from megatron.config.run import RunConfig
from megatron.training import main
from megatron.training.trainer import Trainer
from tests.distributed.pool import Pool
from tests.distributed.sites import ROOT
from tests.runs import FLAGS, before_step, column, records, saved_steps, spoil_step, tiny_run

LAYOUTS = {
    "tp2-sp": "--tensor-model-parallel-size 2 --sequence-parallel",
    "dp2-async": "--async-save --save-interval 2",
    "pp2": "--pipeline-model-parallel-size 2",
}


def run_rank(rank: int, world_size: int, config: RunConfig, step: int, act: str = "") -> tuple[int, str]:
    """The exit status of a rank and what it says of errors; before a step the last one touches a file, or fails."""

    def happen(trainer: Trainer) -> None:
        if act == "stop":
            Path(str(config.training.stop_file)).touch()
        elif act == "fail":
            raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
        elif act == "nan":
            spoil_step(trainer)

    place = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    with ExitStack() as stack, redirect_stderr(io.StringIO()) as printed:
        stack.enter_context(patch.dict(os.environ, place | {"SLURMD_NODENAME": f"node{rank}"}))
        if rank == world_size - 1:
            stack.enter_context(before_step(step, happen))
        return main.run(config), printed.getvalue()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("layout", ["tp2-sp", "dp2-async", pytest.param("pp2", marks=pytest.mark.slow)])
def test_a_file_stops_all_ranks_after_the_same_step_and_they_end_well(pool: Pool, tmp_path: Path, layout: str) -> None:
    flags = f"--save {tmp_path}/saved {LAYOUTS[layout]} --stop-file {tmp_path}/stop"
    config = tiny_run(tmp_path / "run", flags, 2)
    assert pool.run(2, run_rank, config, 3, "stop") == [(0, ""), (0, "")]
    assert saved_steps(tmp_path / "saved")[-1] == 3
    assert not (tmp_path / "run/finished.json").exists()
    assert pool.run(2, run_rank, config, 0) == [(0, ""), (0, "")]
    assert column(tmp_path / "run", "iteration") == [1, 2, 3]  # the file is there still
    (tmp_path / "stop").unlink()
    assert pool.run(2, run_rank, config, 0) == [(0, ""), (0, "")]
    assert column(tmp_path / "run", "iteration") == [1, 2, 3, 4, 5, 6]
    proof = json.loads((tmp_path / "run/finished.json").read_text())
    assert proof["checkpoint"] == str(tmp_path / "saved/iter_0000006")


def test_the_first_cause_names_its_machine_once(pool: Pool, tmp_path: Path) -> None:
    """The other rank only loses contact, and says nothing."""
    config = tiny_run(tmp_path, f"{LAYOUTS['tp2-sp']} --distributed-timeout-minutes 0.1", 2)
    ranks = pool.run(2, run_rank, config, 3, "fail", check_collectives=False)
    assert [status for status, _ in ranks] == [1, 1]
    assert ranks[0][1] == ""
    assert ranks[1][1].startswith("error on rank 1 on node1: Traceback")
    (line,) = lines(tmp_path / "failures.jsonl")
    assert (line["rank"], line["host"], line["kind"]) == (1, "node1", "device")
    (error,) = [record for record in records(tmp_path, "event") if record["event"] == "error"]
    assert error["text"] == "rank 1 on node1: RuntimeError: CUDA error: uncorrectable ECC error encountered"


def test_a_failure_of_all_ranks_is_one_line(pool: Pool, tmp_path: Path) -> None:
    ranks = pool.run(2, run_rank, tiny_run(tmp_path, "", 2), 3, "nan")
    assert [status for status, _ in ranks] == [1, 1]
    assert len([text for _, text in ranks if text]) == 1
    (line,) = lines(tmp_path / "failures.jsonl")
    assert line["kind"] == "nonfinite"
    assert line["host"] in ("node0", "node1")


def test_an_evaluation_alone_is_that_of_any_layout(pool: Pool, tmp_path: Path) -> None:
    flags = f"--save {tmp_path}/saved --eval-iters 2"
    assert pool.run(2, run_rank, tiny_run(tmp_path / "run", flags, 2), 0) == [(0, ""), (0, "")]
    alone = tiny_run(tmp_path / "alone", f"{flags} --skip-train {LAYOUTS['pp2']}", 2)
    assert pool.run(2, run_rank, alone, 0) == [(0, ""), (0, "")]
    for kind in ("lm loss validation", "lm loss test"):
        assert column(tmp_path / "alone", kind, kind) == pytest.approx(column(tmp_path / "run", kind, kind), rel=1e-5)


@pytest.mark.slow
def test_torchrun_starts_nobody_again_that_a_file_has_stopped(tmp_path: Path) -> None:
    program = tmp_path / "stopping.py"
    program.write_text(
        "import sys, pathlib, pretrain_gpt\n"
        "from tests.runs import before_step\n"
        f"with before_step(3, lambda trainer: pathlib.Path({str(tmp_path / 'stop')!r}).touch()):\n"
        "    pretrain_gpt.exit_process(pretrain_gpt.main(sys.argv[1:]))\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "2", str(program), *FLAGS.split(), "--run-dir", str(tmp_path / "run")]
    command += ["--save", str(tmp_path / "saved"), "--stop-file", str(tmp_path / "stop")]
    environ = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    assert subprocess.run(command, env=environ, timeout=300).returncode == 0
    assert [r["event"] for r in records(tmp_path / "run", "event")].count("start") == 1
    assert column(tmp_path / "run", "iteration") == [1, 2, 3]
