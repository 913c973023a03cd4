"""What the options of a pipeline amount to: its stages, its schedule, and a program that is proven."""

from __future__ import annotations

import time
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.arguments.cli import parse
from megatron.config.model import ModelConfig
from megatron.config.parallel import PIPELINE_SCHEDULES, ParallelConfig
from megatron.config.settings import SETTINGS
from megatron.pipeline import plan
from megatron.pipeline.actions import COMPUTE_KINDS, EVALUATION_KINDS, ScheduleError
from megatron.pipeline.partition import format_layout
from megatron.pipeline.schedules import make_schedule
from megatron.pipeline.validate import validate_program


def model(layers: int, **changes: Any) -> ModelConfig:
    return ModelConfig(num_layers=layers, vocab_size=257, **changes)


def pipeline(ranks: int, chunks: int | None = None, schedule: str | None = None, **changes: Any) -> ParallelConfig:
    return ParallelConfig(
        pipeline_model_parallel_size=ranks,
        num_virtual_stages_per_pipeline_rank=chunks,
        pipeline_schedule=schedule,
        **changes,
    )


def sizes(parallel: ParallelConfig, layers: int) -> list[int]:
    return [len(stage.layers) for stage in plan.stage_layers(model(layers), parallel)]


COUNTS = st.one_of(st.none(), st.integers(1, 6))


@settings(max_examples=400, derandomize=True, deadline=None)
@given(
    st.integers(1, 30),
    st.integers(1, 6),
    COUNTS,
    st.fixed_dictionaries(
        {},
        optional={
            "num_layers_per_virtual_pipeline_stage": COUNTS,
            "decoder_first_pipeline_num_layers": COUNTS,
            "decoder_last_pipeline_num_layers": COUNTS,
            "account_for_embedding_in_pipeline_split": st.booleans(),
            "account_for_loss_in_pipeline_split": st.booleans(),
            "pipeline_model_parallel_layout": st.sampled_from(["auto", "Et*2|tL", "E|(t|)*4tL"]),
            "pipeline_schedule": st.sampled_from([*plan.SCHEDULES]),
        },
    ),
)
def test_all_layers_are_built_once_or_the_options_are_refused(
    layers: int, ranks: int, chunks: int | None, said: dict[str, Any]
) -> None:
    parallel = replace(pipeline(ranks, chunks), **said)
    try:
        stages = plan.stage_layers(model(layers), parallel)
    except ScheduleError:
        return
    assert [layer for stage in stages for layer in stage.layers] == list(range(layers))
    assert len(stages) == ranks * plan.virtual_stages(model(layers), parallel)
    assert (stages[0].first, stages[-1].last) == (True, True)
    assert not any(stage.first for stage in stages[1:])
    assert not any(stage.last for stage in stages[:-1])
    assert all(stage.layers or stage.first or stage.last for stage in stages)


def test_nothing_said_is_one_stage_on_a_rank() -> None:
    assert sizes(pipeline(4), 12) == [3, 3, 3, 3]
    assert plan.resolve_pipeline(model(12), pipeline(4)).pipeline_schedule == "1f1b"


def test_stages_on_a_rank_follow_from_whatever_says_so() -> None:
    saying = (
        pipeline(2, 3),
        pipeline(2, num_layers_per_virtual_pipeline_stage=2),
        pipeline(2, pipeline_model_parallel_layout="E|(t*3|)*4L"),
        pipeline(2, account_for_loss_in_pipeline_split=False, num_layers_per_virtual_pipeline_stage=2),
    )
    for parallel in saying:
        assert plan.virtual_stages(model(12), parallel) == 3
        assert plan.resolve_pipeline(model(12), parallel).pipeline_schedule == "interleaved"
    accounted = pipeline(2, num_layers_per_virtual_pipeline_stage=2, account_for_loss_in_pipeline_split=True)
    assert sizes(accounted, 11) == [2, 2, 2, 2, 2, 1]
    assert plan.virtual_stages(model(12), pipeline(2, schedule="zb-v")) == 2
    assert plan.virtual_stages(model(12), pipeline(2, schedule="gpipe")) == 1


def test_resolved_options_resolve_to_themselves() -> None:
    for parallel in (pipeline(2), pipeline(2, 3), pipeline(2, num_layers_per_virtual_pipeline_stage=2)):
        once = plan.resolve_pipeline(model(12), parallel)
        assert plan.resolve_pipeline(model(12), once) == once


def test_layers_that_do_not_divide_are_dealt_out_by_cost() -> None:
    assert sizes(pipeline(4), 13) == [3, 3, 4, 3]  # the output layer is the rest of the last stage
    assert sizes(pipeline(4, pipeline_model_parallel_layout="auto"), 13) == sizes(pipeline(4), 13)
    large = replace(model(13), vocab_size=60_000)
    assert format_layout(plan.stage_layers(large, pipeline(4))) == "Et*4|t*4|t*5|L"
    assert plan.is_split_by_cost(large, pipeline(4))
    assert not plan.is_split_by_cost(large, pipeline(13))
    assert not plan.is_split_by_cost(large, pipeline(2, account_for_loss_in_pipeline_split=True))


def test_costs_are_the_weights_that_multiply() -> None:
    shape = model(2, hidden_size=64, add_bias_linear=False)
    costs = plan.layer_costs(shape)
    norms = 2 * 2 * 64
    assert costs.layer == 12 * 64 * 64 + norms
    assert (costs.embedding, costs.output) == (0, 257 * 64)


@pytest.mark.parametrize("name", plan.SCHEDULES)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_programs_are_the_schedules_by_name_and_are_proven(name: str, ranks: int) -> None:
    for chunks in (1, 2):
        if plan.SCHEDULES[name].chunks not in (None, chunks):
            continue
        parallel = plan.resolve_pipeline(model(16), pipeline(ranks, chunks, name))
        for count in (1, 2, 5, 8):
            program = plan.build_program(parallel, count)
            assert program.only(COMPUTE_KINDS) == make_schedule(name, ranks, chunks, count)
            assert plan.peak_counts(parallel, count) == validate_program(program)
            assert program.placement == plan.stage_placement(parallel, chunks)
            validate_program(program.only(EVALUATION_KINDS), evaluation=True)


@settings(max_examples=40, derandomize=True, deadline=None)
@given(st.sampled_from(["1f1b", "interleaved", "gpipe"]), st.integers(1, 6), st.integers(1, 3), st.integers(1, 4))
def test_the_bubble_is_that_of_the_formulas(name: str, ranks: int, chunks: int, rounds: int) -> None:
    chunks, count = (1 if name == "1f1b" else chunks), ranks * rounds
    parallel = plan.resolve_pipeline(model(30), pipeline(ranks, chunks, name))
    expected = Fraction(ranks - 1, chunks * count + ranks - 1)
    assert plan.simulated_bubble(parallel, count) == pytest.approx(float(expected), abs=1e-12)
    alike = plan.simulated_bubble(parallel, count, (7.0,) * ranks * chunks)
    assert alike == pytest.approx(float(expected), abs=1e-12)


def test_one_slow_stage_holds_all_up() -> None:
    count, slow = 1000, 3.0
    idle = plan.simulated_bubble(plan.resolve_pipeline(model(8), pipeline(4)), count, (1.0, 1.0, 1.0, slow))
    assert idle == pytest.approx(1 - (3 + slow) / (4 * slow), abs=0.01)


def test_groups_of_the_interleaved_schedule_are_those_asked_for() -> None:
    grouped = pipeline(2, 2, microbatch_group_size_per_virtual_pipeline_stage=4)
    parallel = plan.resolve_pipeline(model(8), grouped)
    assert plan.build_schedule(parallel, 8) == make_schedule("interleaved", 2, 2, 8, group=4)
    assert plan.build_schedule(parallel, 8) != make_schedule("interleaved", 2, 2, 8)


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_a_searched_schedule_is_as_good_as_any_in_its_memory(chunks: int) -> None:
    parallel = plan.resolve_pipeline(model(24), pipeline(4, chunks, "searched"))
    found = {count: plan.build_program(parallel, count) for count in (4, 8)}
    expected = (0, 1, 2, 3, 3, 2, 1, 0) if chunks == 2 else (0, 1, 2, 3) * chunks
    assert {program.placement for program in found.values()} == {plan.stage_placement(parallel, chunks)} == {expected}
    for count, program in found.items():
        assert max(validate_program(program).both) <= 4 * chunks
        rival = plan.resolve_pipeline(model(24), pipeline(4, chunks, None))
        assert plan.simulated_bubble(parallel, count) <= plan.simulated_bubble(rival, count)


def test_a_file_is_a_schedule(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    make_schedule("zb-v", 2, 2, 6).save(path)
    parallel = plan.resolve_pipeline(model(8), pipeline(2, schedule=str(path)))
    assert parallel.num_virtual_stages_per_pipeline_rank == 2
    assert plan.stage_placement(parallel, 2) == (0, 1, 1, 0)
    assert plan.build_program(parallel, 6).ranks == plan.build_program(pipeline(2, 2, "zb-v"), 6).ranks
    with pytest.raises(ScheduleError, match="for 6 micro-batches in a step, not 4"):
        plan.build_program(parallel, 4)
    with pytest.raises(ScheduleError, match="is for 2 ranks, not PP4"):
        plan.virtual_stages(model(8), pipeline(4, schedule=str(path)))


def test_a_file_has_equally_many_stages_on_each_rank(tmp_path: Path) -> None:
    path = tmp_path / "uneven.csv"
    path.write_text("0F0,2F0,2B0,0B0,3F0,3B0\n1F0,1B0\n")
    with pytest.raises(ScheduleError, match="rank 0 has 3 stages and rank 1 has 1: all ranks need equally many"):
        plan.virtual_stages(model(8), pipeline(2, schedule=str(path)))


def test_a_file_without_some_stage_is_named(tmp_path: Path) -> None:
    path = tmp_path / "gap.csv"
    path.write_text("0F0,0B0\n2F0,2B0\n")
    with pytest.raises(ScheduleError, match=r"gap\.csv: no rank has stage 1"):
        plan.virtual_stages(model(8), pipeline(2, schedule=str(path)))


def test_a_file_that_does_not_end_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "stuck.csv"
    path.write_text("0F0,0F1,0B1,0B0\n1F0,1B0,1F1,1B1\n")
    plan.build_program(pipeline(2, schedule=str(path)), 2)
    stuck = tmp_path / "circle.csv"
    stuck.write_text("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")
    with pytest.raises(ScheduleError, match="deadlock"):
        plan.build_program(pipeline(2, schedule=str(stuck)), 2)


@pytest.mark.parametrize("name", ["1F1B", "ZB-V", "zb_v"])
def test_a_name_in_other_letters_is_recognised(name: str) -> None:
    with pytest.raises(ScheduleError) as error:
        plan.required_virtual_stages(ParallelConfig(pipeline_schedule=name))
    assert error.value.fixes == (f"--pipeline-schedule {name.lower().replace('_', '-')}",)


def test_the_help_names_every_schedule() -> None:
    words = SETTINGS["pipeline_schedule"].help
    assert [name for name in PIPELINE_SCHEDULES if f" {name}," not in words] == []


LARGE = """--check-config --mock-data --vocab-size 51200 --train-samples 200000000 --world-size 1024 --bf16
    --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 --num-virtual-stages-per-pipeline-rank 3
    --num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --global-batch-size 1536"""
"""1024 ranks, 192 micro-batches."""


@pytest.mark.parametrize("rise", [384, pytest.param(32, marks=pytest.mark.slow)])
def test_a_long_ramp_on_a_long_pipeline_is_checked_in_seconds(rise: int) -> None:
    plan.peak_counts.cache_clear()
    plan.validated_program.cache_clear()
    start = time.process_time()
    printed = parse([*LARGE.split(), "--rampup-batch-size", str(rise), str(rise), "5859375"], {}).summary()
    assert time.process_time() - start < 10
    assert "bubble 2.5%" in printed


def test_the_names_of_the_flag_are_those_of_the_schedules() -> None:
    assert (*plan.SCHEDULES, plan.SEARCHED) == PIPELINE_SCHEDULES
