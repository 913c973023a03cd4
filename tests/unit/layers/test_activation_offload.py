"""Activation offload: offloaded tensors, the release of device memory, and unchanged gradients."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron.config.model import ModelConfig
from megatron.config.training import TrainingConfig
from megatron.layers.activation_offload import ActivationOffload
from tests.kit.solo import Allocations, Solo, random_batch
from tests.unit.layers.test_recompute import MODELS, full, selective

CPU = torch.device("cpu")
LAYERS, MICRO_BATCHES, LENGTH = 4, 3, 32
PLANS = {
    "none": TrainingConfig(),
    "full": full(None, None),
    "uniform 2": full("uniform", 2),
    "block 1": full("block", 1),
    "selective": selective("layernorm", "activation", "core_attn"),
    "mlp": selective("mlp"),
}


def step(model: ModelConfig, plan: str, offload: ActivationOffload | None) -> tuple[list[Tensor], int]:
    """Losses and gradients of a step with several micro-batches in flight; host bytes before its backward."""
    solo = Solo.build(replace(model, num_layers=LAYERS), training=PLANS[plan], offload=offload)
    solo.buckets.start_step(MICRO_BATCHES)
    batches = [random_batch(model, 2, LENGTH, seed=seed) for seed in range(MICRO_BATCHES)]
    losses = [solo.chunk(None, batch)[0] for batch in batches]
    held = offload.pool.size if offload is not None else 0
    for loss in losses:
        loss.backward()
    solo.buckets.finish()
    return [*(loss.detach() for loss in losses), *solo.buckets.grads.values()], held


@pytest.mark.parametrize(
    ("model", "plan"),
    [("llama", plan) for plan in PLANS]
    + [("gpt", "none"), ("gpt", "selective")]
    + [("switches", plan) for plan in ("none", "selective", "uniform 2")],
)
def test_changes_no_bit_and_returns_its_buffers(model: str, plan: str) -> None:
    expected, _ = step(MODELS[model], plan, None)
    for blocks in (1, 3, LAYERS):
        offload = ActivationOffload(CPU, blocks, 64)
        found, held = step(MODELS[model], plan, offload)
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
        assert held > 0
        gc.collect()
        assert sum(buffer.numel() for buffer in offload.pool._free) == offload.pool.size, "a buffer is lost"


@pytest.mark.parametrize("plan", ["none", "full", "mlp"])
def test_host_bytes_grow_by_the_bytes_of_a_block(plan: str) -> None:
    """With everything offloaded, they are what is alive on the device without offload, block by block."""
    model = MODELS["llama"]

    def alive(layers: int) -> int:
        solo = Solo.build(replace(model, num_layers=layers), training=PLANS[plan])
        solo.buckets.start_step(1)
        with Allocations() as made:
            kept = solo.chunk(None, random_batch(model, 2, LENGTH))
            bytes_alive = made.alive
        del kept
        return bytes_alive

    of_a_block = alive(3) - alive(2)
    one, two = (step(model, plan, ActivationOffload(CPU, blocks, 1))[1] // MICRO_BATCHES for blocks in (1, 2))
    assert two == 2 * one
    assert one == pytest.approx(of_a_block, rel=0.03)  # small tensors of autograd's own operations


def test_views_of_one_memory_are_copied_once_and_small_or_shared_memory_is_not() -> None:
    offload = ActivationOffload(CPU, 1, 1000)
    weight = torch.randn(100, 30, requires_grad=True)
    offload.leave_out([weight])
    x = torch.randn(90, 100, requires_grad=True)
    z, table, small = (torch.randn(rows, 30, requires_grad=rows < 100) for rows in (90, 100, 10))
    block = offload.blocks([table])(0)
    with block:
        y = (x @ weight).exp()  # keeps x and weight, and y
        q, k = y[:, :20], y[:, 20:]
        total = (q[:, :10] * k).sum() + (y * table[:90]).sum() + small.exp().sum()  # views of y, and y again
        total = total + (z[40:] ** 2).sum()  # keeps a part of z
    assert offload.pool.size == x.nbytes + y.nbytes + z[40:].nbytes
    total.backward()
    leaves = x, weight, small, z
    grads = [t.grad for t in leaves]
    for t in leaves:
        t.grad = None
    y = (x @ weight).exp()
    ((y[:, :10] * y[:, 20:]).sum() + (y * table[:90]).sum() + small.exp().sum() + (z[40:] ** 2).sum()).backward()
    assert all(a is not None and b is not None and torch.equal(a, b) for a, b in zip(grads, [t.grad for t in leaves]))


def test_device_memory_is_free_once_the_block_after_next_begins() -> None:
    offload = ActivationOffload(CPU, 3, 1)
    blocks = offload.blocks(())
    x = torch.randn(64, requires_grad=True)
    alive = []
    with Allocations() as made:
        y = x * 1.0
        for number in range(4):
            with blocks(number):
                y = y.sin().cos()  # keeps its input and the sine
            alive.append(made.alive - offload.pool.size)
    # beside the output: two tensors of each of the last two offloaded blocks, one of them the output of the one before
    sizes = [count // x.nbytes for count in alive]
    assert sizes[2] == sizes[1]
    y.sum().backward()
    expected = torch.zeros(64, requires_grad=True)
    expected.data.copy_(x.detach())
    z = expected * 1.0
    for _ in range(4):
        z = z.sin().cos()
    z.sum().backward()
    assert x.grad is not None
    assert expected.grad is not None
    assert torch.equal(x.grad, expected.grad)


def test_what_backward_does_not_reach_is_freed() -> None:
    offload = ActivationOffload(CPU, 1, 1000)
    x = torch.randn(50, 8, requires_grad=True)
    with Allocations() as made:
        blocks = offload.blocks(())
        y = x * 1.0
        for number in range(2):  # the block after the last offloaded one has hooks, too
            with blocks(number):
                y.softmax(-1)  # smaller than what is moved
                y = y * 2.0
        alive = made.alive
    assert alive == x.nbytes, "the result alone"
    total = y.sum()
    del y
    total.backward()
    assert made.alive == 0
