"""The AdamW kernel in Triton's interpreter on a CPU, against torch in fp64.

Needs Triton, which PyTorch's build for CPUs lacks: ``TRITON_INTERPRET=1 python -m pytest`` with this file.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":  # read when kernels are defined, Triton's own included
    pytest.skip("runs in Triton's interpreter only", allow_module_level=True)
pytest.importorskip("triton")

from triton.runtime import interpreter

from megatron.kernels import triton_adam
from megatron.kernels.adam import ADAM, AdamSettings, AdamState, adam
from megatron.kernels.operation import check_kernel

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def casts_to_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter truncates to bf16, where compiled kernels round to nearest."""
    convert = interpreter._convert_float

    def rounded(values: Any, source: Any, target: Any, mode: Any) -> Any:
        if (str(source), str(target)) != ("fp32", "bf16"):
            return convert(values, source, target, mode)
        return torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view("uint16")

    monkeypatch.setattr(interpreter, "_convert_float", rounded)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_kernel_passes_its_check(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Several programs per tensor, the last incomplete."""
    monkeypatch.setattr(triton_adam, "BLOCK", 16)
    assert check_kernel(ADAM, triton_adam.adam, CPU, dtype) is None


def test_a_kernel_that_leaves_the_weights_fails_the_check() -> None:
    def stale(state: AdamState, *inputs: Any) -> None:
        triton_adam.adam(replace(state, weights=()), *inputs)

    assert check_kernel(ADAM, stale, CPU, torch.bfloat16) is not None


@pytest.mark.parametrize("rate", [0.125, torch.tensor(0.125)])
@pytest.mark.parametrize("sizes", [(300, 20, 5), (40,) * 9])
def test_large_and_small_tensors_are_all_updated(sizes: tuple[int, ...], rate: Any) -> None:
    """By the kernel, by torch, or by both; a skipped step changes no bit."""
    outcomes = []
    for kernel, dtype in ((triton_adam.adam, torch.float32), (adam, torch.float64)):
        generator = torch.Generator().manual_seed(0)
        lists = [[torch.rand(n, generator=generator, dtype=torch.float64).to(dtype) for n in sizes] for _ in range(4)]
        params, exp_avgs, exp_avg_sqs, grads = lists
        weights = [param.bfloat16() for param in params]
        counts = [torch.full((), 2.0) for _ in sizes]
        state = AdamState(params, exp_avgs, exp_avg_sqs, counts, weights)
        settings = AdamSettings(0.9, 0.999, 1e-8)
        scale = torch.tensor(2.0)
        if dtype == torch.float64:  # torch does not scale these
            grads, scale = [grad / 2.0 for grad in grads], None
        kernel(state, grads, settings, rate, 0.1, torch.zeros(()), scale)
        outcomes.append([*params, *exp_avgs, *exp_avg_sqs, *counts])
        assert all(torch.equal(weight, param.bfloat16()) for weight, param in zip(weights, params))
        before = [t.clone() for t in (*outcomes[-1], *weights)]
        kernel(state, grads, settings, rate, 0.1, torch.ones(()), None)
        assert all(map(torch.equal, before, (*outcomes[-1], *weights)))
    for mine, right in zip(*outcomes, strict=True):
        torch.testing.assert_close(mine.double(), right.double(), rtol=1e-5, atol=1e-6)
