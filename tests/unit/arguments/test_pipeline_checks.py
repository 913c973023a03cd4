"""What is refused of a pipeline, what is only remarked on, and what goes."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from megatron.arguments.cli import ParsedArguments, parse
from megatron.arguments.summary import summary
from megatron.config.errors import Problem, UserError
from megatron.config.parallel import PIPELINE_SCHEDULES
from megatron.pipeline import plan
from megatron.pipeline.actions import PipelineSchedule, ScheduleError
from megatron.pipeline.partition import AUTO
from megatron.pipeline.schedules import make_schedule

RUN = "--mock-data --vocab-size 257 --train-iters 100 --seq-length 64"


def parsed(flags: str, ranks: int) -> ParsedArguments:
    return parse(shlex.split(f"{RUN} {flags}"), {"RANK": "0", "WORLD_SIZE": str(ranks)})


def refused(flags: str, ranks: int) -> tuple[Problem, ...]:
    with pytest.raises(UserError) as caught:
        parsed(flags, ranks)
    return caught.value.problems


@pytest.mark.parametrize("name", PIPELINE_SCHEDULES)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_schedule_takes_every_batch_of_a_ramp(name: str, ranks: int) -> None:
    flags = f"--pipeline-model-parallel-size {ranks} --pipeline-schedule {name} --num-layers 12"
    ramp = "--global-batch-size 7 --rampup-batch-size 1 2 20"
    parallel = parsed(f"{flags} {ramp} --eval-iters 1", ranks).config.parallel
    assert parallel.pipeline_schedule == name
    assert parallel.num_virtual_stages_per_pipeline_rank == (plan.required_virtual_stages(parallel) or 1)


def test_a_resolved_configuration_passes_again() -> None:
    flags = "--pipeline-model-parallel-size 2 --num-layers 8 --num-layers-per-virtual-pipeline-stage 2"
    parallel = parsed(flags, 2).config.parallel
    chosen = (parallel.num_virtual_stages_per_pipeline_rank, parallel.pipeline_schedule)
    assert chosen == (2, "interleaved")
    again = f"--num-virtual-stages-per-pipeline-rank {chosen[0]} --pipeline-schedule {chosen[1]}"
    assert parsed(f"{flags} {again}", 2).config.parallel == parallel


def test_groups_are_for_stages_that_take_turns() -> None:
    group = "--pipeline-model-parallel-size 2 --num-layers 8 --microbatch-group-size-per-virtual-pipeline-stage 4"
    assert parsed(f"{group} --num-virtual-stages-per-pipeline-rank 2", 2).notes == ()
    assert [p.code for p in refused(group, 2)] == ["E601"]
    assert [p.code for p in refused(f"{group} --pipeline-schedule zb-v", 2)] == ["E601"]
    assert [p.code for p in refused(f"{group} --pipeline-schedule interleaved", 2)] == ["E601"]


@pytest.fixture
def file_for_four(tmp_path: Path) -> Path:
    path = tmp_path / "four.csv"
    make_schedule("1f1b", 2, 1, 4).save(path)
    return path


def test_the_batch_that_a_file_cannot_run_is_named_with_its_first_sample(file_for_four: Path) -> None:
    flags = f"--pipeline-model-parallel-size 2 --pipeline-schedule {file_for_four}"
    parsed(f"{flags} --global-batch-size 8", 4)
    (problem,) = refused(f"{flags} --global-batch-size 4", 4)
    assert problem.code == "E211"
    assert problem.sentence.startswith("global batch 4: ")
    assert problem.fixes == ("--global-batch-size 8",)
    (problem,) = refused(f"{flags} --global-batch-size 12 --rampup-batch-size 8 4 10", 4)
    assert problem.sentence.startswith("global batch 12 from sample 16 on: ")
    assert problem.fixes == ("--global-batch-size 8", "drop --rampup-batch-size")
    (problem,) = refused(f"{flags} --global-batch-size 8 --rampup-batch-size 4 4 10", 4)
    assert problem.sentence.startswith("global batch 4 from sample 0 on: ")
    assert problem.fixes == ("drop --rampup-batch-size",)


def test_what_an_evaluation_runs_is_proven_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(program: PipelineSchedule, evaluation: bool = False) -> None:
        if evaluation:
            raise ScheduleError("no way forward")

    monkeypatch.setattr(plan, "validate_program", refuse)
    plan.validated_program.cache_clear()
    flags = "--pipeline-model-parallel-size 2 --num-layers 2 --global-batch-size 3"
    monkeypatch.setattr(plan, "peak_counts", lambda parallel, count: None)
    assert "no way forward" in refused(f"{flags} --eval-iters 1", 2)[0].sentence
    plan.validated_program.cache_clear()


REMARKS = {
    "--pipeline-model-parallel-size 2 --num-layers 5": "5 layers do not divide over 2 stages",
    "--pipeline-model-parallel-size 2 --num-layers 5 --pipeline-model-parallel-layout auto": None,
    "--pipeline-model-parallel-size 2 --num-layers 6": None,
    "--pipeline-model-parallel-size 2 --pipeline-schedule interleaved": "interleaved with VPP 1 has the same bubble",
    "--pipeline-schedule gpipe": "--pipeline-schedule gpipe has no effect",
    "--num-virtual-stages-per-pipeline-rank 2": "--num-virtual-stages-per-pipeline-rank 2 has no effect",
    "--account-for-loss-in-pipeline-split": "--account-for-loss-in-pipeline-split has no effect without several stages",
    "": None,
}


@pytest.mark.parametrize("flags", REMARKS)
def test_what_is_worth_a_line_gets_one(flags: str) -> None:
    notes, expected = parsed(flags, 2 if "pipeline-model-parallel-size" in flags else 1).notes, REMARKS[flags]
    assert len(notes) == (expected is not None)
    assert expected is None or expected in notes[0]


LARGE_OUTPUT = (
    "--preset llama3-8b --tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 --global-batch-size 256 "
    "--micro-batch-size 1 --num-virtual-stages-per-pipeline-rank 4 --vocab-size 128256"
)


def test_the_layout_by_cost_is_named_where_it_saves_much() -> None:
    named = [note for note in parsed(LARGE_OUTPUT, 64).notes if AUTO in note]
    assert named == [f"{AUTO} reduces the bubble from 17.7% to 4.9%"]
    shown = summary(parsed(f"{LARGE_OUTPUT} {AUTO}", 64).config, 64)
    assert "(4.9% as these stages cost)" in shown
    assert "(17.7% as these stages cost)" in summary(parsed(LARGE_OUTPUT, 64).config, 64)


@pytest.mark.parametrize(
    "said",
    [AUTO, "--vocab-size 8192", "--account-for-loss-in-pipeline-split --num-layers 31", "--num-layers 33"],
)
def test_a_layout_is_not_named_where_one_was_chosen_or_little_is_saved(said: str) -> None:
    assert not [note for note in parsed(f"{LARGE_OUTPUT} {said}", 64).notes if "makes the bubble" in note]


NUMBER = 10**30 - 1
MISTYPED = (
    f"--pipeline-model-parallel-size {NUMBER}",
    f"--num-virtual-stages-per-pipeline-rank {NUMBER}",
    f"--num-layers {NUMBER} --num-virtual-stages-per-pipeline-rank 2",
    f"--num-layers {NUMBER} --num-virtual-stages-per-pipeline-rank {NUMBER}",
    f"--num-layers-per-virtual-pipeline-stage {NUMBER}",
    f"--decoder-first-pipeline-num-layers {NUMBER}",
    f"--global-batch-size {NUMBER}",
    f"--pipeline-model-parallel-layout Et*{NUMBER}L",
)


@pytest.mark.parametrize("flags", MISTYPED)
def test_a_mistyped_number_of_thirty_digits_is_answered(flags: str) -> None:
    assert {problem.code for problem in refused(flags, 1)} & {"E209", "E210", "E211"}
