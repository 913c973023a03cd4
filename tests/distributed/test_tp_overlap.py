"""Overlap of tensor-parallel communication with products, against the same layers and runs without it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from megatron.config.parallel import ParallelConfig
from megatron.distributed import comm
from megatron.distributed.comm import Pending
from megatron.distributed.mappings import PIPELINED, SYMMETRIC_MEMORY, TPComm
from megatron.kernels.linear import TORCH_LINEAR
from megatron.kernels.registry import Kernels
from megatron.training.build import build_trainer
from tests.distributed.grid import RECOMPUTE
from tests.distributed.test_adjoints import column, draw, make, row, rows_of, tp_mesh
from tests.distributed.test_layout_matrix import GQA, TOLERANCE_FP64, check
from tests.kit.cases import Case, compare_with_twin, run_on
from tests.kit.pool import Pool, RankError

OVERLAPS = {"pipelined": PIPELINED, "symmetric_memory": SYMMETRIC_MEMORY}
BATCH, WIDTH = 3, 12


@contextmanager
def symmetric_memory_on_cpus() -> Iterator[None]:
    """Serve the fused operations on CPUs by the reference of them that PyTorch has for tests."""
    library = torch.library.Library("symm_mem", "IMPL")
    for name in ("fused_all_gather_matmul", "fused_matmul_reduce_scatter"):
        library.impl(name, getattr(symmetric_memory, f"_{name}_fallback"), "CPU")
    try:
        yield
    finally:
        library._destroy()


def run_layer(rank: int, size: int, kind: str, overlap: TPComm | None, rows: int, dtype: torch.dtype) -> list[Tensor]:
    """Return output and gradients of a layer whose weight gradient is deferred."""
    layer = make(column if kind == "column" else row, tp_mesh(rank, size), True, overlap, dtype)
    x = draw(1, size * rows, BATCH, WIDTH).to(dtype)
    x = (rows_of(x, rank, size) if kind == "column" else x.chunk(size, -1)[rank]).clone().requires_grad_()
    with layer.context.grad_accumulator.deferring_wgrad(0, 0):
        out = layer.module(x)
        out.backward(draw(2 + rank, *out.shape).to(dtype))
    layer.context.grad_accumulator.run_deferred(0, 0)
    assert x.grad is not None
    return [out.detach(), x.grad, *layer.grads.values()]


def worst_differences(rank: int, size: int, name: str, rows: int, dtype: torch.dtype) -> list[float]:
    """Return the largest relative difference from the layer without overlap, of each kind of layer."""
    found = []
    for kind in ("column", "row"):
        plain = run_layer(rank, size, kind, None, rows, dtype)
        with symmetric_memory_on_cpus():
            overlapped = run_layer(rank, size, kind, OVERLAPS[name], rows, dtype)
        assert [a.shape for a in plain] == [b.shape for b in overlapped]
        found.append(max(((a - b).abs().max() / a.abs().max()).item() for a, b in zip(plain, overlapped)))
    return found


@pytest.mark.parametrize(
    ("size", "rows", "dtype", "tolerance"),
    [(2, 4, "float64", 1e-14), (4, 1, "float64", 1e-14), (4, 3, "float64", 1e-14), (2, 5, "bfloat16", 2**-7)],
)
@pytest.mark.parametrize("name", OVERLAPS)
def test_a_layer_computes_the_same(pool: Pool, name: str, size: int, rows: int, dtype: str, tolerance: float) -> None:
    for rank in pool.run(size, worst_differences, name, rows, getattr(torch, dtype), backend="gloo"):
        assert max(rank) <= tolerance


def order_of_events(rank: int, size: int) -> list[str]:
    """Return starts and waits of communication, and products, in the order of a row-parallel backward."""
    events: list[str] = []
    start, wait = comm.start_broadcast, Pending.wait

    def started(x: Tensor, group: comm.Group, source: int) -> Pending:
        events.append(f"start-{source}")
        return start(x, group, source)

    def waited(pending: Pending) -> Tensor:
        events.append("wait")
        return wait(pending)

    def product(dy: Tensor, weight: Tensor) -> Tensor:
        events.append("product")
        return TORCH_LINEAR.input_gradient(dy, weight)

    kernels = Kernels(linear=TORCH_LINEAR._replace(input_gradient=product))
    layer = make(row, tp_mesh(rank, size), True, PIPELINED, kernels=kernels)
    x = draw(1, 2 * size, BATCH, WIDTH).chunk(size, -1)[rank].clone().requires_grad_()
    out = layer.module(x)
    with patch.object(comm, "start_broadcast", started), patch.object(Pending, "wait", waited):
        out.backward(out.detach())
    return events[: events.index("wait", len(events) - 1 - events[::-1].index("product"))]


def test_the_next_rows_are_on_their_way_during_a_product(pool: Pool) -> None:
    """A rank multiplies its own rows first, and waits only for those that it multiplies next."""
    first, *_, last = (" ".join(events) for events in pool.run(4, order_of_events))
    assert first == "start-0 start-1 product start-2 wait product start-3 wait product wait product"
    assert last == "start-0 product start-1 wait product start-2 wait product start-3 wait product"


TP2 = ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True, tp_comm_overlap=True)
CASES = {
    "tp2": Case(replace(GQA, add_qkv_bias=True), TP2),
    "tp4": Case(GQA, replace(TP2, tensor_model_parallel_size=4)),
    "tp2-pp2-zb-h1": Case(GQA, replace(TP2, pipeline_model_parallel_size=2, pipeline_schedule="zb-h1")),
    "tp2-dp2-zero1": Case(GQA, replace(TP2, use_distributed_optimizer=True, overlap_param_gather=True), dp=2),
}


@pytest.mark.parametrize("name", CASES)
def test_a_run_trains_like_one_process(pool: Pool, name: str) -> None:
    case = CASES[name]
    training = replace(case.training, **RECOMPUTE["all modules" if name == "tp2" else "nothing"])
    case = replace(case, training=training)
    steps = run_on(pool, case)
    check(steps, compare_with_twin(steps, case), TOLERANCE_FP64)


def build_with(rank: int, size: int, flags: dict[str, str]) -> list[str]:
    case = Case(parallel=replace(TP2, **flags))
    return [note for note in build_trainer(case.config(), rank, size).notes if "overlap" in note]


def test_the_chosen_method_is_reported(pool: Pool) -> None:
    note = "tensor-parallel overlap: pipelined"
    assert pool.run(2, build_with, {"tp_comm_overlap_method": "pipelined"}) == [[note]] * 2
    assert pool.run(2, build_with, {}) == [[f"{note} (symmetric_memory: it needs GPUs)"]] * 2
    with pytest.raises(RankError, match="E930"):
        pool.run(2, build_with, {"tp_comm_overlap_method": "symmetric_memory"})
