"""Gradient buckets: their parameters, the time of their reduction, and its rounding."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron.config.parallel import ParallelConfig
from megatron.distributed import comm
from megatron.distributed.comm import Group, Pending
from megatron.distributed.grad_accumulator import GradAccumulator
from megatron.distributed.layout import Layout
from megatron.distributed.mesh import Mesh
from megatron.distributed.param_layout import ALIGNMENT, MAX_REDUCTIONS_IN_FLIGHT
from megatron.distributed.sharding import DenseSharding, Init, ShardSpec
from megatron.optimizer.grad_buffer import GradBuffer, ReduceHandle, Reduction, ShardedBucket
from megatron.optimizer.grad_compression import RoundedReduction
from tests.kit.pool import Pool
from tests.kit.solo import grad_buffer_of

SHARD = DenseSharding(0, 1)
SPECS = {
    "first": replace(SHARD.split((10, 7), 0, Init()), contributions=2),
    "bias": SHARD.split((3,), 0, Init()),
    "middle": SHARD.split((64, 2), 0, Init()),
    "last": SHARD.split((5, 5), 0, Init()),
}


def build(
    specs: dict[str, ShardSpec] | None = None,
    dtypes: dict[str, torch.dtype] | None = None,
    size: int = 10_000,
    overlap: bool = True,
    uncut: Collection[str] = (),
    **changes: Any,
) -> tuple[GradBuffer, GradAccumulator]:
    specs, grad_accumulator = specs or SPECS, GradAccumulator()
    config = ParallelConfig(ddp_bucket_size=size, overlap_grad_reduce=overlap, **changes)
    dtypes = dict.fromkeys(specs, torch.float32) | (dtypes or {})
    return grad_buffer_of(specs, dtypes, config, grad_accumulator, uncut), grad_accumulator


def names(buckets: GradBuffer) -> list[list[str]]:
    return [list(b.specs) for b in buckets.buckets]


def contribute(grad_accumulator: GradAccumulator, *parameters: str) -> None:
    for name in parameters:
        grad_accumulator.accumulate(name, torch.ones(SPECS[name].local_shape))


@pytest.mark.parametrize(("ranks", "expected"), [(1, 40_000_000), (40, 40_000_000), (64, 64_000_000)])
def test_buckets_grow_with_the_ranks_that_share_them(ranks: int, expected: int) -> None:
    """As in Megatron-LM, so that the parts of a ring do not become small."""
    assert ParallelConfig().bucket_size(ranks) == expected
    assert ParallelConfig(ddp_bucket_size=5).bucket_size(ranks) == 5


def test_parameters_lie_apart_and_aligned() -> None:
    buckets, _ = build()
    (bucket,) = buckets.buckets
    marks = torch.zeros_like(bucket.shard)
    for i, (name, grad) in enumerate(buckets.grads.items()):
        assert grad.shape == SPECS[name].local_shape
        assert grad.is_contiguous()
        offset = (grad.data_ptr() - bucket.shard.data_ptr()) // bucket.shard.element_size()
        assert offset == bucket.layout.packing.offsets[name]
        assert offset % ALIGNMENT == 0
        grad.fill_(i + 1)
        marks[offset : offset + grad.numel()] += i + 1
    assert torch.equal(bucket.shard, marks), "two parameters overlap"
    assert bucket.shard.numel() == ALIGNMENT * (2 + 1 + 2 + 1)


def test_one_dtype_and_one_reduction_group_each() -> None:
    specs = SPECS | {"expert": replace(SPECS["last"], reduce_axes=("edp",))}
    buckets, _ = build(specs, {"middle": torch.bfloat16, "bias": torch.float64})
    assert sorted(map(sorted, names(buckets))) == [["bias"], ["expert"], ["first", "last"], ["middle"]]
    kinds = {name: b.shard.dtype for b in buckets.buckets for name in b.specs}
    assert kinds["middle"] == torch.float32, "gradients of bf16 weights are summed in fp32"
    assert kinds["bias"] == torch.float64


class Reductions:
    """Stands in for the all-reduce: notes the order, and doubles as two equal ranks would."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started: list[int] = []
        monkeypatch.setattr(Mesh, "optimizer_replica_group", lambda self, *axes: Group((0, 1), 0))
        monkeypatch.setattr(comm, "start_all_reduce", self)

    def __call__(self, buffer: torch.Tensor, group: Group) -> Pending:
        self.started.append(buffer.data_ptr())
        return Pending(buffer.mul_(2))


def test_reduced_when_the_last_contribution_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    reductions = Reductions(monkeypatch)
    buckets, grad_accumulator = build(size=65)
    early, late = (b.shard.data_ptr() for b in buckets.buckets)
    buckets.start_step(2)
    contribute(grad_accumulator, "last", "middle", "bias", "first", "first", "last")
    assert reductions.started == []
    contribute(grad_accumulator, "middle")
    assert reductions.started == [early], "two contributions to each of last and middle complete the first bucket"
    contribute(grad_accumulator, "bias", "first")
    assert reductions.started == [early], "a tied weight has two uses per micro-batch"
    contribute(grad_accumulator, "first")
    assert reductions.started == [early, late]
    buckets.finish()
    assert reductions.started == [early, late]
    uses = {"first": 4.0, "bias": 2.0, "middle": 2.0, "last": 2.0}
    assert all((buckets.grads[name] == 2 * n).all() for name, n in uses.items())


def test_without_overlap_all_are_reduced_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    reductions = Reductions(monkeypatch)
    buckets, grad_accumulator = build(size=65, overlap=False)
    for _ in range(2):  # nothing of a step may leak into the next
        reductions.started.clear()
        buckets.start_step(1)
        contribute(grad_accumulator, "last", "middle", "bias", "first", "first")
        assert reductions.started == []
        buckets.finish()
        assert reductions.started == [b.shard.data_ptr() for b in buckets.buckets]
        assert all((buckets.grads[n] == (4.0 if n == "first" else 2.0)).all() for n in SPECS)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("shards", [1, 3])
def test_few_sums_of_rounded_addends_are_on_their_way(
    monkeypatch: pytest.MonkeyPatch, shards: int, overlap: bool
) -> None:
    """Each needs as much memory as the gradients of its bucket."""
    pending, most = 0, 0

    def start(x: Tensor, group: Group) -> ReduceHandle:
        nonlocal pending, most
        pending, part = pending + 1, x.view(group.size, -1)[group.rank].clone()
        most = max(most, pending)

        def finish(_: Tensor) -> Tensor:
            nonlocal pending
            pending -= 1
            return 2 * part

        return ReduceHandle(Pending(x), finish)

    monkeypatch.setattr(Mesh, "optimizer_shard_group", lambda self, *axes: Group(tuple(range(shards)), 0))
    monkeypatch.setattr(RoundedReduction, "start_reduce_scatter", lambda self, x: start(x, self.shards))
    monkeypatch.setattr(RoundedReduction, "start_all_reduce", lambda self, x: start(x, Group()))
    specs = {f"{name} {i}": spec for i in range(3) for name, spec in SPECS.items()}
    buckets, grad_accumulator = build(specs, size=1, overlap=overlap, grad_reduce_in_bf16=True)
    for _ in range(2):  # nothing of a step may leak into the next
        buckets.start_step(1)
        for name in reversed(specs):
            for _ in range(specs[name].contributions):
                grad_accumulator.accumulate(name, torch.ones(specs[name].local_shape))
        buckets.finish()
        doubled = 2 if shards == 1 else 4
        assert all((grad == doubled * specs[name].contributions).all() for name, grad in buckets.grads.items())
        assert pending == 0
    assert most <= MAX_REDUCTIONS_IN_FLIGHT + 1


WRONG = [
    pytest.param("last middle bias first", "first misses 1 contributions", id="too few"),
    pytest.param("last middle bias first first bias", "bias misses -1 contributions", id="too many"),
    pytest.param("last middle bias bias first", "first misses 1 contributions", id="the right number, wrongly spread"),
    pytest.param("", "first misses 2 contributions", id="none"),
]


def test_a_sum_of_a_step_that_was_given_up_comes_before_the_next_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = []

    class Late:
        """Writes the sum when it is waited for, as a device would at any time before."""

        def wait(self) -> None:
            waits.append(bucket.shard.fill_(7.0))

    monkeypatch.setattr(Mesh, "optimizer_replica_group", lambda self, *axes: Group((0, 1), 0))
    buckets, grad_accumulator = build()
    (bucket,) = buckets.buckets
    monkeypatch.setattr(comm, "start_all_reduce", lambda x, group: Pending(x, [Late()]))  # type: ignore[list-item]
    buckets.start_step(1)
    contribute(grad_accumulator, "last", "middle", "bias", "first", "first")
    buckets.start_step(1)
    assert len(waits) == 1
    monkeypatch.setattr(comm, "start_all_reduce", lambda x, group: Pending(x))
    contribute(grad_accumulator, "last", "middle", "bias", "first", "first")
    buckets.finish()
    assert (buckets.grads["last"] == 1).all()


RANKS, RANK = 3, 1


@dataclass
class Scattered:
    """Stands in for the reduce-scatter of ZeRO-2 among equal ranks: what is on its way must not change.

    Attributes:
        started: buffers of all sums, in order.
        pending: sums that have not been waited for.
        most: so many were on their way at once.
    """

    started: list[Tensor] = field(default_factory=list)
    pending: int = 0
    most: int = 0

    def start(self, buffer: Tensor, group: Group) -> ReduceHandle:
        assert group.size == RANKS
        self.started.append(buffer)
        self.pending += 1
        self.most = max(self.most, self.pending)
        given = buffer.clone()

        def finish(sent: Tensor) -> Tensor:
            assert torch.equal(sent, given), "a buffer was written to while it was on its way"
            self.pending -= 1
            return sent.view(RANKS, -1)[RANK] * RANKS

        return ReduceHandle(Pending(buffer), finish)


@contextmanager
def streaming(size: int = 65, overlap: bool = True) -> Iterator[tuple[GradBuffer, GradAccumulator, Scattered]]:
    """ZeRO-2 of several ranks, as one of them sees it."""
    scattered = Scattered()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Mesh, "optimizer_shard_group", lambda self, *axes: Group(tuple(range(RANKS)), RANK))
        patch.setattr(Mesh, "optimizer_replica_group", lambda self, *axes: Group())
        patch.setattr(Reduction, "start_reduce_scatter", lambda self, x: scattered.start(x, self.shards))
        buckets, grad_accumulator = build(size=size, overlap=overlap, data_parallel_sharding_strategy="optim_grads")
        yield buckets, grad_accumulator, scattered


def contributions(microbatches: int) -> list[str]:
    return [name for name, spec in SPECS.items() for _ in range(microbatches * spec.contributions)]


def value_of(name: str, number: int) -> Tensor:
    """The ``number``-th contribution to a gradient: whole numbers, of which sums are exact."""
    generator = torch.Generator().manual_seed(97 * number + len(name))
    return torch.randint(-9, 10, SPECS[name].local_shape, generator=generator).float()


def check_sums(buckets: GradBuffer, counts: dict[str, int]) -> None:
    """This rank has its parts of the sums over all ranks, which are all equal."""
    held = 0
    for bucket in buckets.buckets:
        whole = torch.zeros(bucket.layout.packing.size)
        held_here = torch.zeros_like(whole, dtype=torch.bool)  # what lies between parameters may have any content
        for name in bucket.specs:
            total = sum((value_of(name, i) for i in range(counts[name])), torch.zeros(SPECS[name].local_shape))
            first = bucket.layout.packing.offsets[name]
            whole[first : first + total.numel()] = RANKS * total.flatten()
            held_here[first : first + total.numel()] = True
        here = held_here.view(RANKS, -1)[RANK]
        assert torch.equal(bucket.shard[here], whole.view(RANKS, -1)[RANK][here])
        held += bucket.shard.numel()
    assert sum(grad.numel() for grad in buckets.grads.values()) <= held


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(1, 4), st.booleans(), st.sampled_from((1, 65, 10_000)), st.data())
def test_a_streamed_sum_is_whole_in_whatever_order_gradients_come(
    microbatches: int, overlap: bool, size: int, data: st.DataObject
) -> None:
    """As where weight gradients of some layers are put off, and micro-batches are at several places at once."""
    order = data.draw(st.permutations(contributions(microbatches)))
    with streaming(size, overlap) as (buckets, grad_accumulator, scattered):
        for _ in range(2):  # nothing of a step may leak into the next
            buckets.start_step(microbatches)
            counts = dict.fromkeys(SPECS, 0)
            for name in order:
                grad_accumulator.accumulate(name, value_of(name, counts[name]))
                counts[name] += 1
            buckets.finish()
            check_sums(buckets, counts)
            assert scattered.pending == 0
        assert scattered.most <= (MAX_REDUCTIONS_IN_FLIGHT if overlap else 0) + 1


@pytest.mark.parametrize("overlap", [True, False])
def test_every_micro_batch_is_reduced_and_its_buffer_used_again(overlap: bool) -> None:
    with streaming(10_000, overlap) as (buckets, grad_accumulator, scattered):
        assert [list(bucket.specs) for bucket in buckets.buckets] == [["last", "middle", "first"], ["bias"]], (
            "vectors are apart: their gradients are never put off"
        )
        assert all(isinstance(bucket, ShardedBucket) for bucket in buckets.buckets)
        for _ in range(3):
            buckets.start_step(4)
            for i in range(4):
                for name, spec in reversed(SPECS.items()):
                    for use in range(spec.contributions):
                        grad_accumulator.accumulate(name, value_of(name, i * spec.contributions + use))
            buckets.finish()
            check_sums(buckets, {name: 4 * spec.contributions for name, spec in SPECS.items()})
        sizes = {bucket.layout.packing.size for bucket in buckets.buckets}
        assert len(scattered.started) == 3 * 4 * 2
        for size in sizes:
            used = {buffer.data_ptr() for buffer in scattered.started if buffer.numel() == size}
            assert len(used) <= (MAX_REDUCTIONS_IN_FLIGHT if overlap else 0) + 1


UNIT = 2.0**-8
"""Half of a step of bf16, relative to the number: what rounding to the nearest may cost."""


def addend(rank: int, elements: int, dtype: torch.dtype) -> Tensor:
    """Numbers of all sizes and both signs: sums that cancel."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(elements, generator=generator, dtype=torch.float64)
    return (x * 10 ** (4 * torch.rand(elements, generator=generator, dtype=torch.float64) - 2)).to(dtype)


def sums(rank: int, size: int, dtype: torch.dtype, elements: int) -> tuple[Tensor, Tensor, bool]:
    """The part of a reduce-scatter, an all-reduce, and whether the addends are as they were after the former."""
    group = Mesh(Layout.from_config(ParallelConfig(), size), rank).dp_cp
    x = addend(rank, elements, dtype)
    given = x.clone()
    reduction = RoundedReduction(group, group, torch.bfloat16)
    part = reduction.start_reduce_scatter(x).wait()
    untouched = torch.equal(x, given)
    return part, reduction.start_all_reduce(x).wait(), untouched


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_narrow_wire_rounds_every_addend_once(pool: Pool, size: int, dtype: torch.dtype) -> None:
    """Parts are sums in the order of the ranks, to the bit; a whole sum is rounded once more on its way back."""
    elements = 64 * size * 3
    ranks = pool.run(size, sums, dtype, elements)
    addends = [addend(r, elements, dtype) for r in range(size)]
    expected = addends[0].bfloat16().to(dtype)
    for x in addends[1:]:
        expected = expected + x.bfloat16().to(dtype)
    parts = torch.cat([part for part, *_ in ranks])
    assert torch.equal(parts, expected)
    assert all(untouched for *_, untouched in ranks)
    assert all(torch.equal(whole, expected.bfloat16().to(dtype)) for _, whole, _ in ranks)
    exact = torch.stack([x.double() for x in addends]).sum(0)
    bound = UNIT * torch.stack([x.double().abs() for x in addends]).sum(0) * (1 + 1e-6)
    assert ((parts.double() - exact).abs() <= bound).all()
    assert ((ranks[0][1].double() - exact).abs() <= bound + UNIT * (exact.abs() + bound)).all()


def test_uncut_parameters_are_whole_on_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mesh, "optimizer_replica_group", lambda self, *axes: Group())
    found: dict[str, int] = dict.fromkeys(SPECS, 0)
    for rank in range(RANKS):
        monkeypatch.setattr(
            Mesh, "optimizer_shard_group", lambda self, *axes, here=rank: Group(tuple(range(RANKS)), here)
        )
        buckets, _ = build(uncut={"first", "middle", "last"}, use_distributed_optimizer=True)
        for name, grad in buckets.grads.items():
            found[name] += 1
            assert name == "bias" or grad.shape == SPECS[name].local_shape
    assert found == dict.fromkeys(SPECS, 1)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("given_names", "message"), WRONG)
def test_a_wrong_number_of_contributions_is_an_error(given_names: str, message: str, streamed: bool) -> None:
    """And the next step is not disturbed by it."""
    with streaming() if streamed else nullcontext((*build(), None)) as (buckets, grad_accumulator, _):
        buckets.start_step(1)
        contribute(grad_accumulator, *given_names.split())
        with pytest.raises(RuntimeError, match=message):
            buckets.finish()
        buckets.start_step(1)
        for name, spec in SPECS.items():
            for use in range(spec.contributions):
                grad_accumulator.accumulate(name, value_of(name, use))
        buckets.finish()
        if streamed:
            check_sums(buckets, {name: spec.contributions for name, spec in SPECS.items()})
        else:
            assert torch.equal(buckets.grads["bias"], value_of("bias", 0))


def test_gradients_that_are_looked_at_are_not_sent() -> None:
    with streaming() as (buckets, grad_accumulator, scattered):
        buckets.start_step(1)
        with buckets.without_reduction():
            contribute(grad_accumulator, *SPECS, "first")
        assert scattered.started == []
        assert all((buckets.accumulated(name) == spec.contributions).all() for name, spec in SPECS.items())
