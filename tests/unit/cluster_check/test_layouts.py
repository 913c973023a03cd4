from __future__ import annotations

import re
from math import prod

import pytest

from megatron.distributed.layout import Layout
from tools.cluster_check.checks import (
    LAYOUT_FORMATS,
    batch_flags,
    layout_cases,
    trace_config,
    widest_divisor,
)
from tools.cluster_check.run import killed_run_layout, resumed_run_layout

CLUSTERS = [(2, 1), (2, 2), (3, 3), (4, 2), (4, 4), (5, 1), (6, 3), (8, 4), (12, 4), (16, 8), (24, 8)]
"""Ranks, and ranks of a node."""


@pytest.mark.parametrize(("ranks", "per_node"), CLUSTERS)
def test_all_fit_the_ranks_and_are_what_their_names_say(ranks: int, per_node: int) -> None:
    for case in layout_cases(ranks, per_node):
        config = trace_config(f"{batch_flags(ranks)} {case.flags}", case.experts, "bf16", "cpu", 0, ranks)
        named = {axis.lower(): int(size) for axis, size in re.findall(r"\b(TP|PP|DP)(\d+)", case.name)}
        sizes = Layout.from_config(config.parallel, ranks).sizes
        assert {axis: size for axis, size in sizes.items() if axis in ("tp", "pp", "dp") and size > 1} == named
        assert prod(named.values()) == ranks
        assert config.parallel.sequence_parallel == (" SP" in case.name)
        assert config.parallel.zero_stage == int(*re.findall(r"ZeRO-(\d)", case.name) or "0")
        assert (config.parallel.expert_model_parallel_size, bool(config.model.num_experts)) == (
            (2, True) if case.name.startswith("EP2") else (1, False)
        )


@pytest.mark.parametrize(("ranks", "per_node"), CLUSTERS)
def test_no_tensor_parallel_group_leaves_its_node(ranks: int, per_node: int) -> None:
    for case in layout_cases(ranks, per_node):
        tp = int(*re.findall(r"TP(\d+)", case.name) or "1")
        assert per_node % tp == 0 or (tp == 2 and "PP2" in case.name) or case.experts


def test_what_is_tried_on_four_ranks_of_two_nodes() -> None:
    assert [case.name for case in layout_cases(4, 2)] == [
        "DP4",
        "DP4, ZeRO-1",
        "DP4, ZeRO-2",
        "TP2 SP DP2",
        "PP2 DP2",
        "PP2 VPP2 DP2, ZeRO-1",
        "EP2 DP4",
        "TP2 SP PP2 VPP2, ZeRO-2",
        "EP2 TP2 SP DP2, ZeRO-1",
    ]


def test_one_rank_has_no_layouts() -> None:
    assert layout_cases(1, 1) == []


def test_the_widest_tensor_parallel_size() -> None:
    assert [widest_divisor(ranks) for ranks in (1, 2, 3, 4, 6, 8, 16, 72)] == [1, 2, 1, 4, 2, 8, 8, 8]


@pytest.mark.parametrize("ranks", range(1, 17))
@pytest.mark.parametrize("dtype", LAYOUT_FORMATS)
def test_the_run_that_is_killed_and_its_other_layout_fit_any_ranks(ranks: int, dtype: str) -> None:
    for flags in (killed_run_layout(ranks), resumed_run_layout(ranks)):
        trace_config(f"{batch_flags(ranks)} {flags}", False, dtype, "cpu", 0, ranks)
