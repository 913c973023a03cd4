"""The words and numbers of a health report, and of a comparison of weight copies.

What is measured on several ranks is tested in tests/distributed.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.distributed.sharding import Box
from megatron.training.callbacks.health import (
    WeightCopy,
    describe_difference,
    layer_name,
    square_sum,
    summarize_health,
)
from megatron.training.digests import box_digest, digest
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


# ---- Copies of the weights

BITS = {torch.bfloat16: torch.int16, torch.float32: torch.int32, torch.float64: torch.int64}


@pytest.mark.parametrize("dtype", BITS)
def test_a_digest_follows_from_the_bits_in_memory(dtype: torch.dtype) -> None:
    x = torch.randn(8, 8192, generator=torch.Generator().manual_seed(0)).to(dtype)
    whole = digest(x)
    assert digest(x.t()) == whole
    assert digest(torch.cat([x[0, :1], x.flatten()])[1:]) == whole, "wherever it begins in memory"
    assert digest(x.flip(0)) != whole
    assert digest(x.flatten()[:-1]) != whole
    assert digest(torch.empty(0, 4)) == 0


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.sampled_from(list(BITS)), st.integers(0, 99), st.integers(0, 63))
def test_one_bit_changes_it(dtype: torch.dtype, at: int, bit: int) -> None:
    x = torch.randn(100, generator=torch.Generator().manual_seed(1)).to(dtype)
    before = box_digest(x, Box((7,), (100,)))
    words = x.view(BITS[dtype])
    words[at] ^= torch.tensor(1, dtype=words.dtype) << bit % (8 * x.element_size())
    assert box_digest(x, Box((7,), (100,))) != before


def test_digests_of_boxes_add_up_and_know_their_places() -> None:
    x = torch.randn(4, 3, 6)
    whole = box_digest(x, Box((0, 0, 0), (4, 3, 6)))
    assert whole == sum(
        box_digest(x[i : i + 2, :, j : j + 3], Box((i, 0, j), (2, 3, 3))) for i in (0, 2) for j in (0, 3)
    )
    places = [(i, j, k) for i in range(4) for j in range(3) for k in range(6)]
    for first, second in itertools.combinations(places, 2):
        y = x.clone()
        y[first], y[second] = x[second], x[first]
        assert box_digest(y, Box((0, 0, 0), (4, 3, 6))) != whole


HERE, THERE = "here", "there"
WORDS: dict[str, tuple[list[list[WeightCopy]], str]] = {
    "two": ([[WeightCopy("w", HERE, 1)], [WeightCopy("w", HERE, 2)]], "is not the same on ranks 0, 1"),
    "most": (
        [[WeightCopy("w", HERE, 1)], [WeightCopy("w", HERE, 2)], [], [WeightCopy("w", HERE, 1)]],
        "on rank 1 differs from ranks 0, 3",
    ),
    "another parameter": (
        [[WeightCopy("v", HERE, 3), WeightCopy("w", HERE, 1)], [WeightCopy("v", HERE, 4)], [WeightCopy("w", HERE, 2)]],
        "is not the same on ranks 0, 2",
    ),
    "two places": (
        [
            [WeightCopy("w", HERE, 1), WeightCopy("w", THERE, 5)],
            [WeightCopy("w", HERE, 1), WeightCopy("w", THERE, 6)],
            [WeightCopy("w", HERE, 2)],
        ],
        "is not the same on ranks 0, 1, 2",
    ),
    "three of three": (
        [[WeightCopy("w", HERE, 1)], [WeightCopy("w", HERE, 2)], [WeightCopy("w", HERE, 3)]],
        "on ranks 0, 1, 2",
    ),
}


@pytest.mark.parametrize("name", WORDS)
def test_the_ranks_are_named(name: str) -> None:
    copies, printed = WORDS[name]
    assert describe_difference("w", copies).endswith(printed)
