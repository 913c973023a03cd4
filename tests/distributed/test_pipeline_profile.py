"""Timelines of a pipeline's actions: in the chosen steps of a run, and asked from it while it goes on."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest

from megatron.config.run import RunConfig
from megatron.pipeline.actions import COMPUTE_KINDS
from megatron.pipeline.plan import build_program
from megatron.planner.timeline import read_trace
from megatron.training.trainer import Trainer
from tests.kit.pool import Pool
from tests.kit.runs import before_step, column, records, start, tiny_run
from tools.draw_schedule import main as draw_schedule

PP2 = "--num-layers 4 --pipeline-model-parallel-size 2"
LAYOUTS = {
    "interleaved": (2, f"{PP2} --num-virtual-stages-per-pipeline-rank 2"),
    "zb-v-dp2": (4, f"{PP2} --pipeline-schedule zb-v"),
}
CHOSEN = "--profile-pipeline --profile-step-start 2 --profile-step-end 4"


def run_rank(rank: int, world_size: int, config: RunConfig, request: str = "") -> tuple[int | None, str]:
    """Return a rank's exit status and stderr; ``request`` is written in step 2."""

    def ask(trainer: Trainer) -> None:
        (Path(str(config.logging.run_dir)) / "PROFILE").write_text(request)

    asking = before_step(2, ask) if request and rank == 0 else None
    with patch("megatron.training.stop.FILE_CHECK_SECONDS", 0.0):
        printed = start(config, asking, rank, world_size)
    return printed.status, printed.err


def kept(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "profiles").glob("*"))


@pytest.mark.parametrize("layout", ["zb-v-dp2"])
def test_chosen_steps_are_recorded_and_the_run_is_the_same(pool: Pool, tmp_path: Path, layout: str) -> None:
    ranks, flags = LAYOUTS[layout]
    config = tiny_run(tmp_path / "with", f"{flags} {CHOSEN}", ranks)
    assert pool.run(ranks, run_rank, config) == [(0, "")] * ranks
    assert pool.run(ranks, run_rank, tiny_run(tmp_path / "without", flags, ranks)) == [(0, "")] * ranks
    assert kept(tmp_path / "with") == ["step_000002_pipeline.json", "step_000003_pipeline.json"]
    assert kept(tmp_path / "without") == []
    for name in ("lm loss", "grad-norm"):
        assert column(tmp_path / "with", name) == column(tmp_path / "without", name)

    microbatches = 4 * 2 // ranks
    program = build_program(config.parallel, microbatches)
    printed = records(tmp_path / "with", "text")
    for step in (2, 3):
        path = tmp_path / "with" / "profiles" / f"step_{step:06d}_pipeline.json"
        timeline = read_trace(path)
        done = [[interval.action for interval in rank] for rank in timeline.intervals]
        assert done == [[action for action in rank if action.kind in COMPUTE_KINDS] for rank in program.ranks]
        assert 0.0 < timeline.makespan < column(tmp_path / "with", "iteration-time")[step - 1]
        assert f"timeline of the pipeline in step {step}: {path}" in [record["text"] for record in printed]


def test_a_running_job_is_asked_for_a_timeline_that_can_be_drawn(
    pool: Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks, flags = LAYOUTS["interleaved"]
    assert pool.run(ranks, run_rank, tiny_run(tmp_path, flags, ranks), "pipeline 1\n") == [(0, "")] * ranks
    assert kept(tmp_path) == ["step_000003_pipeline.json"]
    assert draw_schedule(["--measured", str(tmp_path / "profiles" / kept(tmp_path)[0])]) == 0
    assert "interleaved, measured" in capsys.readouterr().out


def test_a_timeline_that_cannot_be_kept_is_a_warning(pool: Pool, tmp_path: Path) -> None:
    ranks, flags = LAYOUTS["interleaved"]
    (tmp_path / "profiles").write_text("in the way")
    (status, printed), other = pool.run(ranks, run_rank, tiny_run(tmp_path, f"{flags} {CHOSEN}", ranks))
    assert (status, other) == (0, (0, ""))
    assert printed.count("warning: no timeline of step") == 2
    assert "training continues: " in printed
