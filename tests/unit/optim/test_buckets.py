"""Buckets: who shares one, where each parameter lies, and when it is reduced."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron.config.parallel import ParallelConfig
from megatron.optim import wire
from megatron.optim.buckets import GradBuckets
from megatron.parallel.comm import Group, Pending
from megatron.parallel.grads import GradSink
from megatron.parallel.mesh import Mesh
from megatron.parallel.ownership import ALIGNMENT
from megatron.parallel.shard import Init, Shard, ShardSpec
from tests.solo import one_rank_mesh

SHARD = Shard(0, 1)
SPECS = {
    "first": replace(SHARD.split((10, 7), 0, Init()), uses=2),
    "bias": SHARD.split((3,), 0, Init()),
    "middle": SHARD.split((64, 2), 0, Init()),
    "last": SHARD.split((5, 5), 0, Init()),
}


def build(
    specs: dict[str, ShardSpec] | None = None,
    dtypes: dict[str, torch.dtype] | None = None,
    size: int = 10_000,
    overlap: bool = True,
) -> tuple[GradBuckets, GradSink]:
    specs, sink = specs or SPECS, GradSink()
    dtypes = dict.fromkeys(specs, torch.float32) | (dtypes or {})
    config = ParallelConfig(ddp_bucket_size=size, overlap_grad_reduce=overlap)
    return GradBuckets(specs, dtypes, one_rank_mesh(), sink, torch.device("cpu"), config), sink


def names(buckets: GradBuckets) -> list[list[str]]:
    return [list(b.specs) for b in buckets.buckets]


def contribute(sink: GradSink, *parameters: str) -> None:
    for name in parameters:
        sink.accumulate(name, torch.ones(SPECS[name].local_shape))


def test_parameters_lie_apart_and_aligned() -> None:
    buckets, _ = build()
    (bucket,) = buckets.buckets
    marks = torch.zeros_like(bucket.own)
    for i, (name, grad) in enumerate(buckets.grads.items()):
        assert grad.shape == SPECS[name].local_shape
        assert grad.is_contiguous()
        offset = (grad.data_ptr() - bucket.own.data_ptr()) // bucket.own.element_size()
        assert offset == bucket.room.packing.offsets[name]
        assert offset % ALIGNMENT == 0
        grad.fill_(i + 1)
        marks[offset : offset + grad.numel()] += i + 1
    assert torch.equal(bucket.own, marks), "two parameters overlap"
    assert bucket.own.numel() == ALIGNMENT * (2 + 1 + 2 + 1)


def test_filled_in_reverse_order_of_use() -> None:
    assert names(build()[0]) == [["last", "middle", "bias", "first"]]


def test_a_tied_weight_is_alone_in_its_bucket() -> None:
    specs = SPECS | {"middle": replace(SPECS["middle"], tied=True)}
    assert names(build(specs)[0]) == [["last", "bias", "first"], ["middle"]]


def test_data_parallel_ranks_can_cut_a_bucket_into_equal_aligned_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mesh, "copies", lambda self, *axes: Group((0, 1, 2, 3)))
    (bucket,) = build()[0].buckets
    assert bucket.own.numel() == 8 * ALIGNMENT  # 6 are used
    assert bucket.own.numel() % (4 * ALIGNMENT) == 0


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (1, [["last"], ["middle"], ["bias"], ["first"]]),
        (65, [["last", "middle"], ["bias", "first"]]),
        (64 + 128, [["last", "middle"], ["bias", "first"]]),
        (64 + 129, [["last", "middle", "bias"], ["first"]]),
    ],
)
def test_cut_when_full(size: int, expected: list[list[str]]) -> None:
    assert names(build(size=size)[0]) == expected


def test_one_dtype_and_one_reduction_group_each() -> None:
    specs = SPECS | {"expert": replace(SPECS["last"], reduce_axes=("edp",))}
    buckets, _ = build(specs, {"middle": torch.bfloat16, "bias": torch.float64})
    assert sorted(map(sorted, names(buckets))) == [["bias"], ["expert"], ["first", "last"], ["middle"]]
    kinds = {name: b.own.dtype for b in buckets.buckets for name in b.specs}
    assert kinds["middle"] == torch.float32, "gradients of bf16 weights are summed in fp32"
    assert kinds["bias"] == torch.float64


class Reductions:
    """Stands in for the all-reduce: notes the order, and doubles as two equal ranks would."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started: list[int] = []
        monkeypatch.setattr(wire.comm, "start_all_reduce", self)

    def __call__(self, buffer: torch.Tensor, group: Group) -> Pending:
        self.started.append(buffer.data_ptr())
        return Pending(buffer.mul_(2))


def test_reduced_when_the_last_contribution_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    reductions = Reductions(monkeypatch)
    buckets, sink = build(size=65)
    early, late = (b.own.data_ptr() for b in buckets.buckets)
    buckets.start_step(2)
    contribute(sink, "last", "middle", "bias", "first", "first", "last")
    assert reductions.started == []
    contribute(sink, "middle")
    assert reductions.started == [early], "two contributions to each of last and middle complete the first bucket"
    contribute(sink, "bias", "first")
    assert reductions.started == [early], "a tied weight has two uses per micro-batch"
    contribute(sink, "first")
    assert reductions.started == [early, late]
    buckets.finish()
    assert reductions.started == [early, late]
    uses = {"first": 4.0, "bias": 2.0, "middle": 2.0, "last": 2.0}
    assert all((buckets.grads[name] == 2 * n).all() for name, n in uses.items())


def test_without_overlap_all_are_reduced_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    reductions = Reductions(monkeypatch)
    buckets, sink = build(size=65, overlap=False)
    for _ in range(2):  # nothing of a step may leak into the next
        reductions.started.clear()
        buckets.start_step(1)
        contribute(sink, "last", "middle", "bias", "first", "first")
        assert reductions.started == []
        buckets.finish()
        assert reductions.started == [b.own.data_ptr() for b in buckets.buckets]
        assert all((buckets.grads[n] == (4.0 if n == "first" else 2.0)).all() for n in SPECS)


WRONG = [
    pytest.param("last middle bias first", "first misses 1 contributions", id="too few"),
    pytest.param("last middle bias first first bias", "bias misses -1 contributions", id="too many"),
    pytest.param("last middle bias bias first", "first misses 1 contributions", id="the right number, wrongly spread"),
    pytest.param("", "first misses 2 contributions", id="none"),
]


@pytest.mark.parametrize(("given", "told"), WRONG)
def test_a_wrong_number_of_contributions_is_an_error(given: str, told: str) -> None:
    buckets, sink = build()
    buckets.start_step(1)
    contribute(sink, *given.split())
    with pytest.raises(RuntimeError, match=told):
        buckets.finish()


def test_start_step_forgets_the_last_step() -> None:
    buckets, sink = build()
    buckets.start_step(1)
    contribute(sink, "last", "middle")
    buckets.start_step(1)
    assert not any(grad.any() for grad in buckets.grads.values())
    contribute(sink, "last", "middle", "bias", "first", "first")
    buckets.finish()
