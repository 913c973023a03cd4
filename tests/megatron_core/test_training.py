"""Training, against megatron-core itself: the same weights, data and options give the same losses and norms."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.kit.pool import Pool
from tests.megatron_core.beside import missing, run_case
from tests.megatron_core.cases import CASES, Case

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing())]
BY_NAME = {case.name: case for case in CASES}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_training_is_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pool: Pool, case: Case) -> None:
    monkeypatch.chdir(tmp_path)
    found = run_case(tmp_path, case, pool)
    assert found.steps >= 50
    assert found.loss <= case.loss
    assert found.grad_norm <= case.norm


FAULTS = {
    "second moment": ("Llama", "--adam-beta2 0.9501", ""),
    "epsilon of norms": ("Llama", "--norm-epsilon 2e-5", ""),
    "base of RoPE": ("RoPE, base 500000", "--rotary-base 10000", ""),
    "order of samples": ("GPT-2", "--seed 1235", ""),
    "warm-up": ("Llama", "--lr-warmup-iters 11", ""),
    "scale of the auxiliary loss": ("auxiliary loss", "--moe-aux-loss-coeff 0.0101", ""),
    "scale of the z-loss": ("z-loss", "--moe-z-loss-coeff 1.01e-3", ""),
    "update of biases": ("sigmoid, biases of experts", "--moe-router-bias-update-rate 0.0101", ""),
    "norms not summed over the sequence": (
        "TP 2, sequence parallel",
        "",
        "torch_layers.mark_sequence_parallel = lambda module, config: None",
    ),
    "context-parallel ranks attend to all tokens": (
        "CP 2",
        "",
        "attention = F.scaled_dot_product_attention\n"
        "F.scaled_dot_product_attention = lambda q, k, v, seen, **options: attention(q, k, v, **options)",
    ),
    "no auxiliary gradient": (
        "auxiliary loss, large",
        "",
        "from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler as scaler\n"
        "scaler.set_loss_scale = staticmethod(lambda scale: None)",
    ),
}
"""What is wrong, the case that finds it, and the flags or the Python that make megatron-core wrong."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_makes_a_case_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pool: Pool, fault: str) -> None:
    name, flags, code = FAULTS[fault]
    case = replace(BY_NAME[name], theirs=flags)
    monkeypatch.chdir(tmp_path)
    found = run_case(tmp_path, case, pool, code)
    assert found.loss > case.loss or found.grad_norm > case.norm
