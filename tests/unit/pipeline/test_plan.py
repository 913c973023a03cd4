"""Compare a pipeline's stages with every possible split, and its schedule and program with its options."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron.arguments.cli import parse
from megatron.config.model import ModelConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.training import TrainingConfig
from megatron.layers.parameters import block, num_parameters
from megatron.pipeline import plan
from megatron.pipeline.actions import COMPUTE_KINDS, EVALUATION_KINDS, ScheduleError
from megatron.pipeline.partition import (
    LayerCosts,
    StageLayers,
    expand_layout,
    format_layout,
    parse_layout,
    split_by_cost,
    split_by_rank,
    split_equally,
    stages_from_counts,
)
from megatron.pipeline.schedules import make_schedule
from megatron.pipeline.validate import validate_program
from megatron.planner.flops import causal_attention_keys, flop_table


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
    return [len(stage.layers) for stage in plan.stage_layers(model(layers), parallel, 64)]


COUNTS = st.one_of(st.none(), st.integers(1, 6))


@settings(max_examples=50, derandomize=True, deadline=None)
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
    layers: int, ranks: int, chunks: int | None, given: dict[str, Any]
) -> None:
    parallel = replace(pipeline(ranks, chunks), **given)
    try:
        stages = plan.stage_layers(model(layers), parallel, 64)
    except ScheduleError:
        return
    assert [layer for stage in stages for layer in stage.layers] == list(range(layers))
    assert len(stages) == ranks * plan.virtual_stages(model(layers), parallel)
    assert (stages[0].first, stages[-1].last) == (True, True)
    assert not any(stage.first for stage in stages[1:])
    assert not any(stage.last for stage in stages[:-1])
    assert all(stage.layers or stage.first or stage.last for stage in stages)


def test_stages_on_a_rank_follow_from_whatever_states_so() -> None:
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


def test_layers_that_do_not_divide_are_dealt_out_by_cost() -> None:
    assert sizes(pipeline(4), 13) == [3, 3, 4, 3]  # the output layer is the rest of the last stage
    assert sizes(pipeline(4, pipeline_model_parallel_layout="auto"), 13) == sizes(pipeline(4), 13)
    large = replace(model(13), vocab_size=60_000)
    assert format_layout(plan.stage_layers(large, pipeline(4), 64)) == "Et*4|t*4|t*5|L"
    assert plan.is_split_by_cost(large, pipeline(4), 64)
    assert not plan.is_split_by_cost(large, pipeline(13), 64)
    assert not plan.is_split_by_cost(large, pipeline(2, account_for_loss_in_pipeline_split=True), 64)


def test_costs_are_the_weights_that_multiply() -> None:
    shape = model(2, hidden_size=64, add_bias_linear=False)
    costs = plan.layer_costs(shape, 64)
    norms = 2 * 2 * 64
    assert costs.layers == (12 * 64 * 64 + norms,) * 2
    assert (costs.embedding, costs.output) == (0, 257 * 64)


DIFFERING: dict[str, dict[str, Any]] = {
    "a few dense layers first": {"num_experts": 8, "moe_ffn_hidden_size": 32, "moe_layer_freq": "[0]*3+[1]*9"},
    "a shared expert, heads": {
        "num_experts": 8,
        "moe_layer_freq": "2",
        "moe_shared_expert_intermediate_size": 64,
        "activation": "swiglu",
        "position_embedding_type": "rope",
        "mtp_num_layers": 2,
    },
    "two kinds of attention": {"token_mixers": ("attention", "latent-attention", "attention"), "window_size": 30},
    "layers alone": {"hybrid_layer_pattern": "M-MM-*-E*M", "num_experts": 4},
}


@pytest.mark.parametrize("changes", DIFFERING.values(), ids=DIFFERING)
def test_layers_that_differ_cost_their_flops(changes: dict[str, Any]) -> None:
    """As the planner counts them, forward and backward, and the weights of norms and other vectors."""
    shape = model(12, **{"add_bias_linear": False, **changes})
    if shape.layer_pattern is not None:
        shape = replace(shape, num_layers=len(shape.layer_pattern.blocks))
    table = flop_table(shape, TrainingConfig(), causal_attention_keys(shape, 500), shape.vocab)
    costs, each = plan.layer_costs(shape, 500), [sum(map(table.cost, layer.values())) / 6 for layer in table.layers]
    beside = [
        sum(s.numel for name, s in block(shape, shape.mixers(layer)).items() if len(s.shape) == 1 or "conv" in name)
        for layer in range(shape.num_layers)
    ]
    assert costs.layers == pytest.approx([cost + few for cost, few in zip(each, beside)], abs=1)
    assert not costs.alike
    assert plan.layer_costs(shape, 1000).layers > costs.layers
    stages = stages_from_counts([3, shape.num_layers - 3])
    assert sum(plan.stage_costs(shape, stages, 500)) == sum(costs.layers) + costs.output
    assert (
        costs.output >= shape.vocab * shape.hidden_size + sum(sum(map(table.cost, h.values())) for h in table.heads) / 6
    )


def hybrid(pattern: str, layers: int, **changes: Any) -> ModelConfig:
    return replace(model(layers, mamba_num_groups=1, mamba_state_dim=16), hybrid_layer_pattern=pattern, **changes)


def test_layers_that_differ_are_split_by_cost_unless_equal_numbers_cost_the_same() -> None:
    uneven = hybrid("*-*-*-*-MMMM", 8, vocab_size=8)
    assert counts(plan.stage_layers(uneven, pipeline(2), 64)) == [3, 5]
    assert counts(plan.stage_layers(uneven, pipeline(2), 8192)) == [2, 6]  # attention over more tokens costs more
    assert plan.is_split_by_cost(uneven, pipeline(2), 64)
    assert not plan.is_split_by_cost(uneven, pipeline(2, decoder_first_pipeline_num_layers=4), 64)
    even = hybrid("MM*-MMM*-MMM", 10, vocab_size=8)
    assert counts(plan.stage_layers(even, pipeline(2), 64)) == [5, 5]
    assert not plan.is_split_by_cost(even, pipeline(2), 64)
    alike = replace(model(8), vocab_size=10_000)  # an output layer that costs much changes nothing by itself
    assert counts(plan.stage_layers(alike, pipeline(2), 64)) == [4, 4]


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


@settings(max_examples=20, derandomize=True, deadline=None)
@given(st.sampled_from(["1f1b", "interleaved", "gpipe"]), st.integers(1, 6), st.integers(1, 3), st.integers(1, 4))
def test_the_bubble_matches_the_formulas(name: str, ranks: int, chunks: int, rounds: int) -> None:
    chunks, count = (1 if name == "1f1b" else chunks), ranks * rounds
    parallel = plan.resolve_pipeline(model(30), pipeline(ranks, chunks, name))
    expected = Fraction(ranks - 1, chunks * count + ranks - 1)
    assert plan.simulated_bubble(parallel, count) == pytest.approx(float(expected), abs=1e-12)
    alike = plan.simulated_bubble(parallel, count, (7.0,) * ranks * chunks)
    assert alike == pytest.approx(float(expected), abs=1e-12)


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


LARGE = """--check-config --mock-data --vocab-size 51200 --train-samples 200000000 --world-size 1024 --bf16
    --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 --num-virtual-stages-per-pipeline-rank 3
    --num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --global-batch-size 1536"""
"""1024 ranks, 192 micro-batches."""


@pytest.mark.parametrize("rise", [pytest.param(rise, marks=pytest.mark.slow) for rise in (384, 32)])
def test_a_long_ramp_on_a_long_pipeline_is_checked_in_seconds(rise: int) -> None:
    plan.peak_counts.cache_clear()
    plan.validated_program.cache_clear()
    start = time.process_time()
    printed = parse([*LARGE.split(), "--rampup-batch-size", str(rise), str(rise), "5859375"], {}).summary()
    assert time.process_time() - start < 10
    assert "bubble 2.5%" in printed


def counts(stages: Sequence[StageLayers]) -> list[int]:
    return [len(stage.layers) for stage in stages]


def check(stages: Sequence[StageLayers], layers: int) -> None:
    """Every layer once and in order; the embedding in front, the output layer behind, and nothing empty between."""
    assert [layer for stage in stages for layer in stage.layers] == list(range(layers))
    assert [stage.first for stage in stages] == [True] + [False] * (len(stages) - 1)
    assert [stage.last for stage in stages] == [False] * (len(stages) - 1) + [True]
    assert all(counts(stages)[1:-1])


def every_split(layers: int, stages: int) -> list[tuple[StageLayers, ...]]:
    sizes = (sizes for sizes in product(range(layers + 1), repeat=stages) if sum(sizes) == layers and all(sizes[1:-1]))
    return [stages_from_counts(found) for found in sizes]


LOOP, V = (0, 1, 2, 0, 1, 2), (0, 1, 2, 2, 1, 0)
PLACEMENTS = [(0,), (0, 1), (0, 1, 2, 3), (0, 0, 0), (0, 1, 0, 1), (0, 1, 1, 0), (0, 1, 2, 2, 1, 0), (0, 1, 0, 1, 0, 1)]


@settings(max_examples=50, derandomize=True, deadline=None)
@given(st.integers(1, 7), st.sampled_from(PLACEMENTS), st.integers(1, 4), st.integers(0, 9), st.integers(0, 9))
def test_no_split_is_better_balanced(
    layers: int, placement: tuple[int, ...], layer: int, embedding: int, output: int
) -> None:
    costs, stages = LayerCosts((layer,) * layers, embedding, output), len(placement)
    assume(stages <= layers + 2)
    found = split_by_cost(placement, costs)
    check(found, layers)

    def unevenness(split: Sequence[StageLayers]) -> tuple[float, ...]:
        each = [costs.of(stage) for stage in split]
        ranks = [sum(c for c, on in zip(each, placement) if on == rank) for rank in set(placement)]
        return max(ranks), sum(cost**2 for cost in ranks), sum(cost**2 for cost in each)

    assert unevenness(found) == min(map(unevenness, every_split(layers, stages)))


def test_a_large_output_layer_gets_its_own_stage() -> None:
    assert counts(split_by_cost((0, 1, 2, 3), LayerCosts((1,) * 6, 0, 5))) == [2, 2, 2, 0]
    assert counts(split_by_cost((0, 1, 2, 3), LayerCosts((1,) * 2))) == [0, 1, 1, 0]


@pytest.mark.parametrize(("embedding", "output"), [*product((False, True), repeat=2)])
def test_split_equally_counts_embedding_and_output(embedding: bool, output: bool) -> None:
    for layers, stages in product(range(1, 20), range(1, 7)):
        found = split_equally(layers, stages, embedding, output)
        total = layers + embedding + output
        assert (found is None) == bool(total % stages)
        if found is not None:
            check(found, layers)
            sizes = counts(found)
            sizes[0] += embedding
            sizes[-1] += output
            assert set(sizes) == {total // stages}


@pytest.mark.parametrize("placement", [(0,), (0, 1), (0, 1, 2), LOOP, V], ids=str)
@pytest.mark.parametrize("given", [(2, None), (None, 3), (2, 4)], ids=str)
def test_ranks_have_the_layers_that_were_stated(
    placement: tuple[int, ...], given: tuple[int | None, int | None]
) -> None:
    ranks = max(placement) + 1
    for layers in range(1, 20):
        try:
            found = split_by_rank(layers, placement, *given)
        except ScheduleError:
            continue
        check(found, layers)
        on_rank = [sum(n for n, r in zip(counts(found), placement) if r == rank) for rank in range(ranks)]
        assert given[0] in (None, on_rank[0])
        assert given[1] in (None, on_rank[-1])
        free = [
            n for rank, n in enumerate(on_rank) if not (given[0] and rank == 0) and not (given[1] and rank == ranks - 1)
        ]
        assert len(set(free)) <= 1
        for rank in range(ranks):
            assert len({n for n, r in zip(counts(found), placement) if r == rank}) == 1


def test_uneven_splits_are_refused_with_the_nearest_sizes() -> None:
    with pytest.raises(ScheduleError, match="10 layers do not fill PP4 x VPP1 equally") as caught:
        split_by_rank(10, range(4), 3, None)
    assert [fix.split()[1] for fix in caught.value.fixes[:2]] == ["1", "4"]
    with pytest.raises(ScheduleError) as caught:
        split_by_rank(10, LOOP, None, 3)
    assert [fix.split()[1] for fix in caught.value.fixes[:2]] == ["2", "6"]
    with pytest.raises(ScheduleError):
        split_by_rank(3, range(3), 2, 1)  # which leaves nothing for the rank between them


WRITTEN_OUT = {
    "Et*3|(tt|)*29L": "Ettt|" + "tt|" * 29 + "L",
    "Ettt | (tt|)*2, tL": "Ettt|tt|tt|tL",
    "E | t * 4 | L": "E|tttt|L",
    "((Et|)*1(t|)*2)tL": "Et|t|t|tL",
    "Et*2(|t)*3L": "Ett|t|t|tL",
    "E(t(|t)*2)*2L": "Et|t|tt|t|tL",
}


@pytest.mark.parametrize("layout", WRITTEN_OUT)
def test_layouts_mean_their_letters(layout: str) -> None:
    letters = WRITTEN_OUT[layout]
    assert expand_layout(layout) == letters
    found = parse_layout(layout, letters.count("t"))
    check(found, letters.count("t"))
    assert counts(found) == [stage.count("t") for stage in letters.split("|")]


def test_heads_are_in_the_stage_of_the_output_layer() -> None:
    assert parse_layout("Ett|t(m)*2L", 3, 2) == parse_layout("Ett|tL", 3, 2) == parse_layout("Ett|tL", 3)
    assert counts(parse_layout("Ett|tt|mL", 4, 1)) == [2, 2, 0]
    for layout, why in {
        "E|t|m|L": "last stage",
        "Etm|L": "last stage",
        "Et|mmL": "2 x m",
        "Et|Lm": "last stage",
    }.items():
        with pytest.raises(ScheduleError, match=why):
            parse_layout(layout, 1, 1)


def test_the_stage_with_the_heads_gets_fewer_layers() -> None:
    without, one, two = (model(9, position_embedding_type="rope", mtp_num_layers=n) for n in (None, 1, 2))
    head = num_parameters(one) - num_parameters(without)
    assert plan.layer_costs(two, 64).output == 2 * head + 3 * two.vocab * two.hidden_size
    assert plan.layer_costs(replace(two, mtp_use_repeated_layer=True), 64) == plan.layer_costs(two, 64)
    auto = pipeline(2, pipeline_model_parallel_layout="auto")
    assert [counts(plan.stage_layers(m, auto, 64)) for m in (without, one, two)] == [[5, 4], [5, 4], [6, 3]]


@settings(max_examples=50, derandomize=True, deadline=None)
@given(st.lists(st.integers(1, 5), max_size=8), st.integers(0, 4), st.integers(0, 4))
def test_a_split_reads_back_from_its_layout(middle: list[int], first: int, last: int) -> None:
    for split in (stages_from_counts([first, *middle, last]), stages_from_counts([first])):
        assert parse_layout(format_layout(split), sum(counts(split))) == split


REFUSED = {
    "E|t|tmL": "'m' is multi-token prediction, which needs --mtp-num-layers 1",
    "[['embedding'], ['decoder', 'loss']]": "'[' at character 1 is not part of a layout: lists of names",
    "Et||tL": "stage 1 is empty",
    "EttL|": "stage 1 is empty",
    "E*2ttL": "has more than one E, at character 1:",
    "Ett": "does not end with L: a layout is",
    "Et|L": "has 1 layer, and the model 2",
    "Et, |(tL": "'(' at character 6 is never closed",
    "Et|t)L": "')' at character 5 has no opening parenthesis",
    "E*|ttL": "'*' at character 2 has no number after it",
    "Et(*2)tL": "'*' at character 4 has no letter or parenthesis before it",
    "": "stage 0 is empty",
    "Et *2 *3|L": "'*' at character 7 follows another",
    "E((t*999)*999)*999L": "repeats more than any model",
    "E" + "t*99999|" * 50 + "L": "repeats more than any model",
    "E" + "(t" * 50_000 + ")" * 50_000 + "L": "150,002 letters is longer than that of any model",
    "Et*\u0662L": "'\u0662' at character 4 is not part",
}


@pytest.mark.parametrize("layout", REFUSED, ids=lambda layout: layout[:12])
def test_invalid_layouts_are_refused(layout: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        parse_layout(layout, 2)
    assert REFUSED[layout] in caught.value.sentence


MEANT = {
    "t|t": "Et|tL",
    "Ett": "EttL",
    "tt|L": "Ett|L",
    "ET*2|L": "Et*2|L",
    "e(t|*2": "E(t|)*2L",
}


@pytest.mark.parametrize("layout", MEANT)
def test_the_spelling_that_was_meant_is_offered(layout: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        parse_layout(layout, 2)
    assert caught.value.fixes[0] == f"--pipeline-model-parallel-layout '{MEANT[layout]}'"
    parse_layout(MEANT[layout], 2)


@pytest.mark.parametrize("layout", ["Et|t", "E(t(t|*2L", "Et|(t|*2", "Et|t)L", "Et||tL", "Et|mL"])
def test_no_spelling_is_offered_where_it_is_not_plain(layout: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        parse_layout(layout, 4)
    assert not any("'" in fix for fix in caught.value.fixes)


@settings(max_examples=50, derandomize=True, deadline=None)
@given(st.text("Etm|L()*12 ", max_size=12))
def test_whatever_is_written_is_spelled_out_or_refused(layout: str) -> None:
    with suppress(ScheduleError):
        assert set(expand_layout(layout)) <= set("Etm|L")


def test_a_file_without_some_stage_is_named(tmp_path: Path) -> None:
    path = tmp_path / "gap.csv"
    path.write_text("0F0,0B0\n2F0,2B0\n")
    with pytest.raises(ScheduleError, match=r"gap\.csv: no rank has stage 1"):
        plan.virtual_stages(model(8), pipeline(2, schedule=str(path)))


def test_groups_of_the_interleaved_schedule_follow_the_flag() -> None:
    grouped = pipeline(2, 2, microbatch_group_size_per_virtual_pipeline_stage=4)
    parallel = plan.resolve_pipeline(model(8), grouped)
    assert plan.build_schedule(parallel, 8) == make_schedule("interleaved", 2, 2, 8, group=4)
    assert plan.build_schedule(parallel, 8) != make_schedule("interleaved", 2, 2, 8)
