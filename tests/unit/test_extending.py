"""Every Python block of docs/extending.md runs and does what the page says."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.config.model import ModelConfig
from megatron.config.run import OptimizerConfig, ParallelConfig, RunConfig
from megatron.layers.mlp import ACTIVATIONS
from megatron.optim.rules import RULES
from megatron.parallel.build import BuildContext
from megatron.parallel.grads import GradSink
from megatron.parallel.layout import Layout
from megatron.parallel.mesh import Mesh

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    for table in (ACTIVATIONS, RULES):
        for name in ("silu", "lion"):
            monkeypatch.setitem(table, name, None)  # so that what the page registers is undone
    names: dict[str, Any] = {"__name__": "page"}
    for block in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.S | re.M):
        exec(compile(block, str(PAGE), "exec"), names)
    return names


def test_tables_match_the_choices_of_the_flags() -> None:
    def choices(config: Any, name: str) -> set[str]:
        return set(config.__dataclass_fields__[name].metadata["option"].choices)

    assert set(ACTIVATIONS) == choices(ModelConfig, "activation")
    assert set(RULES) == choices(RunConfig().optimizer.__class__, "optimizer")


def test_activation(page: dict[str, Any]) -> None:
    x = torch.randn(5)
    assert torch.equal(ACTIVATIONS["silu"](x), x * torch.sigmoid(x)) or torch.allclose(
        ACTIVATIONS["silu"](x), x * torch.sigmoid(x)
    )


def test_optimizer_moves_by_the_sign_and_obeys_skips(page: dict[str, Any]) -> None:
    p, g = torch.zeros(3), torch.tensor([1.0, -2.0, 0.0])
    rule = page["Lion"]([p], OptimizerConfig())
    rule.update([torch.full((3,), float("nan"))], 0.1, 0.0, torch.ones(()))
    assert torch.equal(p, torch.zeros(3))
    rule.update([g], 0.1, 0.0, torch.zeros(()))
    assert torch.allclose(p, torch.tensor([-0.1, 0.1, 0.0]))


def test_layer_declares_its_parameter(page: dict[str, Any]) -> None:
    sink = GradSink()
    context = BuildContext(Mesh(Layout.from_config(ParallelConfig(), 1), 0), sink, torch.float64)
    layer = page["LayerScale"](context.at("layers.0.scale"), 4, start=0.5)
    grads = {"layers.0.scale.factor": torch.zeros(4, dtype=torch.float64)}
    sink.bind(grads, lambda name: None)
    x = torch.randn(3, 2, 4, dtype=torch.float64)
    layer(x).sum().backward()
    assert context.specs["layers.0.scale.factor"].numel == 4
    torch.testing.assert_close(grads["layers.0.scale.factor"], x.sum((0, 1)))


def test_dataset(page: dict[str, Any]) -> None:
    sample = page["Counting"](10, 4, 100)[8]
    assert sample.tokens.tolist() == [8, 9, 0, 1]
    assert sample.labels.tolist() == [9, 0, 1, 2]
