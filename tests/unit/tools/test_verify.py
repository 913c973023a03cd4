"""Global tensors assembled from the shards of ranks, and refusals of incomplete ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron.distributed.param_layout import ParamShard
from megatron.distributed.sharding import DenseSharding, Init, ShardSpec
from tools.lib.verify_parallel import RankTrace, compare_traces, join_traces, trace_pieces

ROWS = torch.arange(8.0).view(4, 2)


def trace(spec: ShardSpec, *, loss: float = 1.0, first_replica: bool = True, error: float = 0.0) -> RankTrace:
    """Return the notes of a rank whose gradient and weight are its pieces of ``ROWS``, plus an error."""
    local = torch.full(spec.local_shape, float("nan"))
    for piece in spec.pieces:
        local.view(spec.local_view)[piece.local_box.slices] = ROWS.view(spec.view)[piece.global_box.slices] + error
    held = {"weight": trace_pieces(spec, ParamShard(0, local.numel()), local, first_replica)}
    return RankTrace(loss, 2.0, held, held)


def split(rank: int, size: int = 2) -> ShardSpec:
    return DenseSharding(rank, size).split((4, 2), 0, Init())


def padded(rank: int, size: int) -> ShardSpec:
    return DenseSharding(rank, size).vocabulary(4, 2, 3, Init())


def whole(rank: int) -> ShardSpec:
    return DenseSharding(rank, 2).replicate((4, 2), Init(), partial=False)


@pytest.mark.parametrize(
    "specs",
    [
        [split(0), split(1)],
        [split(1), split(0)],
        [padded(0, 2), padded(1, 2)],
        [padded(rank, 4) for rank in range(4)],
        [whole(0), whole(1)],
    ],
    ids=["rows", "in any order", "padding", "more ranks than rows", "copies"],
)
def test_pieces_are_put_where_they_belong(specs: list[ShardSpec]) -> None:
    step = join_traces([trace(spec) for spec in specs])
    assert torch.equal(step.grads["weight"], ROWS)
    assert torch.equal(step.weights["weight"], ROWS)
    assert (step.loss, step.grad_norm, step.drifted) == (1.0, 2.0, [])


def test_replicas_are_compared_but_not_added() -> None:
    replicas = [trace(split(rank), first_replica=first) for first in (True, False) for rank in (0, 1)]
    assert torch.equal(join_traces(replicas).grads["weight"], ROWS)
    replicas[3] = trace(split(1), first_replica=False, error=2.0**-20)
    assert join_traces(replicas).drifted == ["gradient of weight", "weight weight"]


def test_a_shared_piece_that_drifts_is_named() -> None:
    ranks = [trace(whole(0)), trace(whole(1), error=2.0**-20)]
    assert join_traces(ranks).drifted == ["gradient of weight", "weight weight"]
    assert join_traces([trace(split(0)), trace(split(1), loss=1.0 + 2.0**-52)]).drifted == ["loss"]


def test_a_layer_that_no_one_built_is_an_error() -> None:
    whole_model = join_traces([trace(whole(0))])
    for grads in ({}, whole_model.grads | {"layers.1": torch.zeros(1)}):
        with pytest.raises(ValueError, match="not in both models"):
            compare_traces(0, replace(whole_model, grads=grads), whole_model, 1e-5, 1e-2)


@pytest.mark.parametrize("specs", [[split(0)], [split(0), split(0)], [split(0), whole(0)]])
def test_an_element_held_by_none_or_answered_for_twice_is_refused(specs: list[ShardSpec]) -> None:
    with pytest.raises(ValueError, match="the pieces of weight do not cover each of its elements once"):
        join_traces([trace(spec) for spec in specs])
