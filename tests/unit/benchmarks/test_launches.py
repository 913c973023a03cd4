"""The counts and predictions of `benchmarks.launches`, without a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import launches
from benchmarks.record import RESULTS
from benchmarks.roofline import H200, attention_seconds, gemm_seconds, gpu_seconds, step_seconds
from benchmarks.traffic import Traffic

KB = 1024
A, B = torch.ones(2, 16, 16)  # 1 KiB each
TABLE, IDS = torch.ones(1000, 32), torch.tensor([3, 3, 5])


def lists() -> tuple[list[Tensor], list[Tensor]]:
    return [torch.ones(256), torch.ones(256)], [torch.ones(256), torch.ones(256)]


@pytest.mark.parametrize(
    ("work", "moved"),
    [
        (lambda: A + B, 3 * KB),
        (lambda: A + A, 2 * KB),  # distinct inputs
        (lambda: A + A[:, :1].expand(16, 16), 2 * KB + 64),
        (lambda: A.clone().add_(B), 5 * KB),  # 2 for the copy, then reads two and writes one
        (lambda: A.clone().copy_(B), 4 * KB),
        (lambda: torch.zeros(16, 16), KB),
        (lambda: torch.empty(16, 16), 0),
        (lambda: A.t().flatten(0, 0)[:4].detach(), 0),
        (lambda: A.sum(), KB + 4),
        (lambda: torch.add(A, B, out=torch.empty(16, 16)), 3 * KB),
        (lambda: torch._foreach_add_(*lists()), 10 * KB),  # four are made; four are read, two written
        (lambda: F.embedding(IDS, TABLE), 2 * 3 * 128 + 24),  # only the chosen rows
        (lambda: A @ B, 0),
    ],
)
def test_bytes_count_distinct_inputs_and_outputs(work: Callable[[], Any], moved: int) -> None:
    traffic = Traffic(set(), "cpu")
    with traffic:
        work()
    assert traffic.bytes == moved


def test_matrix_products_and_attention_are_counted_apart() -> None:
    q, k = torch.ones(2, 4, 8, 16, requires_grad=True), torch.ones(2, 4, 8, 16)
    x, w = torch.ones(6, 10), torch.ones(10, 20)
    traffic = Traffic(set(), "cpu")
    with traffic:
        y = torch.addmm(torch.ones(20), x, w)
        torch.bmm(torch.ones(3, 6, 10), torch.ones(3, 10, 20))
        F.scaled_dot_product_attention(q, k, k, is_causal=True).sum().backward()
    assert traffic.matmuls == {
        (2 * 6 * 10 * 20, 4 * (20 + 60 + 200 + y.numel()), "float32"): 1,
        (3 * 2 * 6 * 10 * 20, 4 * 3 * (60 + 200 + 120), "float32"): 1,
    }
    assert traffic.attention == {("forward", 8, 8, 16): 1, ("backward", 8, 8, 16): 1}


def test_arguments_of_triton_kernels() -> None:
    names = {"in_ptr0": "*fp32", "in_out_ptr0": "*fp32", "out_ptr0": "*fp32", "xnumel": "i32"}
    kernel = SimpleNamespace(triton_meta={"signature": names}, fn=SimpleNamespace(__name__="fused"))
    traffic = Traffic({TABLE.shape}, "cpu")
    traffic.inductor_kernel(kernel, [A, B, torch.ones(16), 256])
    assert traffic.by_op == {"triton fused": 3 * KB + 64}
    traffic.inductor_kernel(kernel, [TABLE, torch.ones(3, 32), IDS, 96])
    assert traffic.bytes == 3 * KB + 64 + 3 * 384 + 24  # of the table three rows
    traffic.triton_kernel(SimpleNamespace(__name__="other", arg_names=["x", "y", "z", "n"]), [A, A, B, 16])
    assert traffic.by_op["triton other"] == 2 * KB
    traffic.triton_kernel(SimpleNamespace(__name__="_adam", arg_names=["param", "weight"]), [A, B])
    assert traffic.by_op["triton _adam"] == 3 * KB  # the parameter is read and overwritten


def test_grouped_products_of_triton_are_matrix_products() -> None:
    x, dy, target = torch.ones(10, 6), torch.ones(10, 4), torch.ones(3, 4, 6)
    kernel = SimpleNamespace(__name__="_accumulate_products", arg_names=["x_RI", "dy_RO", "target_EOI", "BETA"])
    traffic = Traffic(set(), "cpu")
    for beta in (False, True):
        traffic.triton_kernel(kernel, [x, dy, target, beta])
    assert traffic.matmuls == {
        (2 * 10 * 6 * 4, 4 * (60 + 40 + 72), "float32"): 1,  # overwrites the target
        (2 * 10 * 6 * 4, 4 * (60 + 40 + 2 * 72), "float32"): 1,  # adds to it
    }
    assert not traffic.bytes


def test_a_step_takes_the_time_of_its_parts() -> None:
    flops, moved = 10**12, 10**9
    assert gemm_seconds(flops, moved, "bfloat16", H200) == pytest.approx(1 / 720)
    assert gemm_seconds(flops, 100 * moved, "bfloat16", H200) == pytest.approx(0.1 / 4.0)  # bytes take longer
    assert attention_seconds("forward", 32, 8192, 128) == pytest.approx(2 * 32 * 8192**2 * 128 / 529e12)
    counts = {
        "matmuls": [[flops, moved, "bfloat16", 2]],
        "attention": [["forward", 32, 8192, 128, 3]],
        "bytes": 8 * 10**9,
        "launches": 100,
        "kernels": 100,
        "host_ms": 1.0,
    }
    parts = 2 / 720 + 3 * attention_seconds("forward", 32, 8192, 128) + 2e-3
    assert gpu_seconds(counts, H200) == pytest.approx(parts + 100 * 2.5e-6)
    assert gpu_seconds(counts | {"launches": 5}, H200) == pytest.approx(parts + 100 * 1.2e-6)  # in a graph
    assert step_seconds(counts | {"host_ms": 500.0}, H200) == 0.5


def test_the_page_matches_the_figures() -> None:
    figures = json.loads((RESULTS / "launches.json").read_text())
    assert launches.page(figures) + "\n" == (RESULTS / "launches.md").read_text()
