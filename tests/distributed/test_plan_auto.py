"""Runs whose layout is planned: every rank plans alone, and a resumed run keeps the layout or plans for other ranks."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import pytest

from megatron.arguments.planning import layout_flags
from megatron.config.run import RunConfig
from megatron.planner.hardware import Cluster, accelerators
from megatron.planner.step_time import step_time
from megatron.training.measured_run import read_measured_run
from megatron.training.start import read_start
from tests.kit.pool import Pool
from tests.kit.runs import FLAGS, Outcome, saved_steps, start, steps, tiny_run
from tools.plan import main as plan

AUTO = "--plan auto --plan-gpu h100-80g"


class Planned(NamedTuple):
    """One start of a rank: the layout that it planned, what it noted about that, and how it ended."""

    layout: str
    notes: list[str]
    status: int | None
    error: str


def plan_and_train(rank: int, world_size: int, flags: str) -> Planned:
    place = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
    with patch.dict(os.environ, place | {"LOCAL_WORLD_SIZE": str(world_size)}):
        parsed = read_start(shlex.split(f"{FLAGS} {flags}")).parsed
    outcome = start(parsed.config, None, rank, world_size)
    notes = [note for note in parsed.notes if note.startswith("plan")]
    return Planned(layout_flags(parsed.config), notes, outcome.status, outcome.err)


def one_start(pool: Pool, ranks: int, flags: str) -> Planned:
    """Start the run, and require that all ranks planned and ended alike."""
    first, *others = pool.run(ranks, plan_and_train, flags)
    assert first.status == 0, first.error
    assert all((other.layout, other.notes, other.status) == first[:3] for other in others)
    return first


def test_a_planned_run_keeps_its_layout_and_plans_again_for_other_ranks(pool: Pool, tmp_path: Path) -> None:
    assert start(tiny_run(tmp_path / "alone")).status == 0
    flags = f"{AUTO} --save {tmp_path}/saved --save-interval 2 --run-dir {tmp_path}/run"
    first = one_start(pool, 2, f"{flags} --tensor-model-parallel-size 2 --exit-interval 2")
    (note,) = first.notes
    assert note.startswith("plan for 2 ranks on h100-80g: --tensor-model-parallel-size 2 ")
    again = one_start(pool, 2, f"{flags} --exit-interval 4")  # not given now, but kept
    assert again.layout == first.layout
    assert again.notes[0].startswith(f"plan: kept from {tmp_path}/saved/iter_0000002: --tensor-model-parallel-size 2 ")
    fewer = one_start(pool, 1, flags)
    assert fewer.notes[0] == f"plan: {tmp_path}/saved/iter_0000004 was written by 2 ranks: planned again for 1"
    assert fewer.notes[1].startswith("plan for 1 rank on h100-80g: ")
    assert saved_steps(tmp_path / "saved") == [2, 4, 6]
    alone, planned = steps(tmp_path / "alone"), steps(tmp_path / "run")
    assert planned.keys() == alone.keys() == {*range(1, 7)}
    for step, numbers in alone.items():
        assert planned[step]["lm loss"] == pytest.approx(numbers["lm loss"], rel=1e-5)
        assert planned[step]["grad-norm"] == pytest.approx(numbers["grad-norm"], rel=1e-4)


def test_the_hardware_fitted_to_a_run_forecasts_its_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On a CPU, whose speed the planner's table does not know."""
    assert (
        start(tiny_run(tmp_path / "run", "--hidden-size 64 --seq-length 32 --max-position-embeddings 32")).status == 0
    )
    run = read_measured_run(tmp_path / "run")
    assert step_time(run.config, 1, Cluster.of(accelerators()["cpu"], 1)).seconds != pytest.approx(run.seconds, rel=0.1)
    file, shape = tmp_path / "own.yaml", "--preset tiny-llama --vocab-size 512 --global-batch-size 4"
    assert plan(f"--gpus 1 --gpu cpu --calibrate {tmp_path}/run --calibrated {file} {shape}".split()) == 0
    assert f"{tmp_path}/run: {run.seconds:.4g} s a step, predicted " in capsys.readouterr().out
    config = tmp_path / "run" / "config.yaml"
    parsed = read_start(["--config", str(config), "--check-config", "--plan-gpu", str(file)]).parsed
    row = re.search(r"^forecast +(\S+) s a step on cpu-calibrated, ", parsed.summary(), re.M)
    assert row is not None
    assert float(row[1]) == pytest.approx(run.seconds, rel=0.05)


def begin_from_own(rank: int, world_size: int, configs: tuple[RunConfig, ...]) -> Outcome:
    return start(configs[rank], None, rank, world_size)


def test_ranks_that_plan_differently_do_not_start(pool: Pool, tmp_path: Path) -> None:
    """As on machines with other hardware."""
    sizes = (f"{AUTO} --micro-batch-size {size} --tensor-model-parallel-size 1" for size in (1, 2))
    ranks = pool.run(2, begin_from_own, tuple(tiny_run(tmp_path, flags, 2) for flags in sizes))
    assert [(printed.status, printed.samples) for printed in ranks] == [(2, {}), (2, {})]
    (message,) = [printed.err for printed in ranks if printed.err]
    assert "E963 --plan auto chose different layouts, because machines differ: rank 0 (" in message
    assert "--micro-batch-size 2" in message
