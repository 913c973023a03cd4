"""The gradient accumulator: immediate and deferred gradients are equal, and a lost one is an error."""

from __future__ import annotations

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.distributed import comm
from megatron.distributed.comm import Group, Pending
from megatron.distributed.grad_accumulator import GradAccumulator, WgradOperand
from tests.kit.solo import Gradients, Solo, random_batch, tiny

CONFIG = tiny(num_query_groups=2, activation="swiglu", normalization="RMSNorm", ffn_hidden_size=48)
BATCHES = [random_batch(CONFIG, seed=seed) for seed in (1, 2)]


def input_gradients(solo: Solo) -> None:
    """The I actions of both micro-batches."""
    solo.buckets.start_step(len(BATCHES))
    for index, batch in enumerate(BATCHES):
        loss, _ = solo.chunk(None, batch)
        with solo.grad_accumulator.deferring_wgrad(0, index):
            (loss / sum(b.loss_mask.sum() for b in BATCHES)).backward()


def test_deferred_weight_gradients_are_the_same_bits() -> None:
    immediate, deferred = Solo.build(CONFIG), Solo.build(CONFIG)
    immediate.backward(BATCHES)
    input_gradients(deferred)
    weight = "layers.0.mlp.linear_fc1.weight"
    assert not deferred.buckets.grads[weight].any(), "a deferred gradient was computed at once"
    for index in range(len(BATCHES)):
        deferred.grad_accumulator.run_deferred(0, index)
    deferred.buckets.finish()
    for name, grad in immediate.buckets.grads.items():
        assert torch.equal(grad, deferred.buckets.grads[name]), name


@pytest.mark.parametrize("dropped", range(len(BATCHES)))
def test_a_dropped_w_is_noticed(dropped: int) -> None:
    solo = Solo.build(CONFIG)
    input_gradients(solo)
    solo.grad_accumulator.run_deferred(0, 1 - dropped)
    with pytest.raises(RuntimeError, match="misses"):
        solo.buckets.finish()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_queued_gradients_are_the_same_sums(dtype: torch.dtype) -> None:
    """Added before a bucket is reduced or read; nothing of an aborted step, and no earlier step, is added."""
    norm, bias = "final_layernorm.weight", "layers.1.mlp.linear_fc1.bias"
    gradients = [(n, torch.randn(n_elements).to(dtype)) for n, n_elements in ((norm, 32), (bias, 128)) * 4]
    at_once, queued = Solo.build(tiny(), torch.bfloat16), Solo.build(tiny(), torch.bfloat16)
    queued.grad_accumulator._queue_vectors = True
    for solo in (at_once, queued):
        for given in (gradients[:5], gradients):  # the first step is aborted
            solo.buckets.start_step(4)
            for name, gradient in given:
                solo.grad_accumulator.accumulate(name, gradient)
    for name in (norm, bias):
        expected = torch.stack([g.double() for n, g in gradients if n == name]).sum(0)
        for solo in (at_once, queued):
            torch.testing.assert_close(solo.buckets.accumulated(name).double(), expected, rtol=1e-6, atol=1e-6)
        assert torch.equal(at_once.buckets.accumulated(name), queued.buckets.accumulated(name))


def test_a_step_with_queued_gradients_is_that_without() -> None:
    """To the bit; the queue is empty when the gradients are reduced."""
    plain, queueing = Solo.build(CONFIG, torch.bfloat16), Solo.build(CONFIG, torch.bfloat16)
    queueing.grad_accumulator._queue_vectors = True
    for _ in range(2):
        for solo in (plain, queueing):
            solo.step(BATCHES)
    for name, grad in plain.buckets.grads.items():
        assert torch.equal(grad, queueing.buckets.grads[name]), name


def bound(**targets: torch.Tensor) -> tuple[GradAccumulator, list[str]]:
    """A grad_accumulator, and the list of contributions it reports."""
    grad_accumulator, gradients = GradAccumulator(), Gradients(targets)
    grad_accumulator.bind(gradients)
    return grad_accumulator, gradients.contributions


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_add_accumulates_the_outer_product(dtype: torch.dtype) -> None:
    target = torch.ones(5, 3, dtype=torch.promote_types(dtype, torch.float32))
    grad_accumulator, contributions = bound(w=target)
    x, dy = torch.randn(4, 2, 3, dtype=dtype), torch.randn(4, 2, 5, dtype=dtype)
    for _ in range(2):
        grad_accumulator.accumulate_wgrad("w", grad_accumulator.wgrad_input(x, None), WgradOperand(dy))
    expected = 1 + 2 * torch.einsum("sbi,sbo->oi", x.double(), dy.double())
    tolerance = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 1e-5}[dtype]
    torch.testing.assert_close(target.double(), expected, rtol=0, atol=tolerance)
    assert contributions == ["w", "w"]


def test_the_first_contribution_overwrites() -> None:
    """Of every kind; further ones add."""
    grad_accumulator = GradAccumulator()
    targets = {name: torch.full(shape, torch.nan) for name, shape in (("w", (2, 3)), ("rows", (4, 2)), ("b", (3,)))}
    targets["range"] = targets["rows"].clone()

    grad_accumulator.bind(Gradients(targets, stale=targets))
    x, dy = torch.randn(4, 3), torch.randn(4, 2)
    for _ in range(2):
        grad_accumulator.accumulate_wgrad("w", WgradOperand(x), WgradOperand(dy))
        grad_accumulator.accumulate_rows("rows", torch.tensor([1, 3, 1, 1]), torch.ones(4, 2))
        grad_accumulator.accumulate_rows("range", slice(1, 3), torch.ones(2, 2))
        grad_accumulator.accumulate("b", torch.ones(3))
    torch.testing.assert_close(targets["w"], 2 * dy.t() @ x)
    assert targets["rows"].tolist() == [[0, 0], [6, 6], [0, 0], [2, 2]]
    assert targets["range"].tolist() == [[0, 0], [2, 2], [2, 2], [0, 0]]
    assert targets["b"].tolist() == [2, 2, 2]


def test_small_contributions_survive_in_bf16() -> None:
    """The sum is kept in fp32: a bf16 sum would stop growing at 256."""
    target = torch.zeros(1, 1)
    grad_accumulator, _ = bound(w=target)
    one = torch.ones(1, 1, dtype=torch.bfloat16)
    for _ in range(300):
        grad_accumulator.accumulate_wgrad("w", WgradOperand(one), WgradOperand(one))
    assert target.item() == 300


def test_w_gathers_one_product_ahead_and_frees_used_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a column linear's input and of a row linear's output gradient, in turns."""
    group, events = Group((0, 1), 0), list[str]()
    alive, shards = list[int](), list[StorageWeakRef]()

    def gather(x: torch.Tensor, group: Group) -> Pending:
        events.append(f"gather {int(x[0, 0])}")
        return Pending(torch.cat((x, x)))

    def multiply(target: torch.Tensor, x: torch.Tensor, dy: torch.Tensor, beta: float) -> None:
        events.append(f"multiply {int(max(x[0, 0], dy[0, 0]))}")
        alive.append(sum(not storage.expired() for storage in shards))

    monkeypatch.setattr(comm, "start_all_gather", gather)
    grad_accumulator = GradAccumulator(multiply)
    grad_accumulator.bind(Gradients({"w": torch.zeros(3, 3)}))
    with grad_accumulator.deferring_wgrad(0, 0):
        for i in (1, 2, 3, 4):
            shard, whole = torch.full((2, 3), float(i)), torch.zeros(4, 3)
            shards.append(StorageWeakRef(shard.untyped_storage()))
            x, dy = (
                (WgradOperand(shard, group), WgradOperand(whole))
                if i % 2
                else (WgradOperand(whole), WgradOperand(shard, group))
            )
            grad_accumulator.accumulate_wgrad("w", x, dy)
            del shard, x, dy
    grad_accumulator.run_deferred(0, 0)
    turns = [("gather 1", "gather 2", "multiply 1"), ("gather 3", "multiply 2"), ("gather 4", "multiply 3")]
    assert events == [event for turn in turns for event in turn] + ["multiply 4"]
    assert alive == [4, 3, 2, 1]
