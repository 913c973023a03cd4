"""The words and numbers of a health report; its measurements are tested in tests/distributed/test_health.py."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.training.callbacks.health import layer_name, square_sum, summarize_health
from megatron.training.loggers.console import health_line
from megatron.training.metrics import StepMetrics

NAN = math.nan
REPORT = {
    "health/grad-norm/embedding": 0.41,
    "health/grad-norm/layers.0": 0.03,
    "health/grad-norm/head": 1.5,
    "health/update-ratio/embedding": 1e-3,
    "health/update-ratio/layers.0": 2.5e-2,
    "health/update-ratio/head": 1e-4,
    "health/update-ratio/total": 1.2e-3,
    "health/activation-rms/embedding": 0.5,
    "health/activation-rms/layers.0": 12.0,
    "health/attention-logit/layers.0": 31.5,
    "params-norm": 20.0,
}


def test_a_line_names_outlying_layers() -> None:
    line = health_line(1240, REPORT)
    assert line == (
        "health at 1240: gradient .03 layers.0 to 1.50 head | update 1.2e-3, most 2.5e-2 layers.0"
        " | activations 12.0 layers.0 | attention logit 31.5 layers.0"
    )


def test_nan_is_highlighted() -> None:
    bad = {"health/activation-rms/layers.0": NAN, "health/activation-rms/layers.1": 7.0}
    assert "activations nan layers.0 |" in health_line(1, REPORT | bad)


def test_layers_by_name() -> None:
    names = [
        "embedding.word_embeddings.weight",
        "layers.12.mlp.linear_fc1.weight",
        "final_layernorm.bias",
        "output_layer.weight",
    ]
    assert [layer_name(name) for name in names] == ["embedding", "layers.12", "head", "head"]


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (7,), (3, 4, 5)])
def test_squares(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert square_sum(x).item() == pytest.approx(x.square().sum().item(), rel=1e-12)


def test_many_small_squares_in_fp32_keep_their_digits() -> None:
    assert square_sum(torch.full((4096, 1024), 0.1)).item() == pytest.approx(4096 * 1024 * 0.01, rel=1e-6)


def metrics(grad_norm: float, loss_scale: float) -> StepMetrics:
    one, norm, scale = (torch.tensor(x, dtype=torch.float64) for x in (1.0, grad_norm, loss_scale))
    return StepMetrics(one, norm, one, scale, one)


def grad_norms(sums: torch.Tensor, step: StepMetrics) -> dict[str, float]:
    values = summarize_health(["embedding", "layers.0", "head"], sums, torch.zeros(3), torch.zeros(3, 0), step)
    prefix = "health/grad-norm/"
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}


def test_a_nonfinite_gradient_is_reported_for_its_layer_alone() -> None:
    sums = torch.ones(3, 8, dtype=torch.float64)
    sums[0, 0], sums[1, 0] = 64.0, math.inf
    assert grad_norms(sums, metrics(math.inf, 4.0)) == {
        "embedding": 2.0,
        "layers.0": math.inf,
        "head": 0.25,
        "total": math.inf,
    }


def test_no_gradient_at_all_is_zero() -> None:
    sums = torch.ones(3, 8, dtype=torch.float64)
    sums[:, 0] = 0.0
    assert grad_norms(sums, metrics(0.0, 1.0)) == dict.fromkeys(("embedding", "layers.0", "head", "total"), 0.0)
