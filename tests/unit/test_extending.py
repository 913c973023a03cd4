"""Every Python block of docs/extending.md runs and does what the page says."""

import re
import runpy
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.config.kernels import CANDIDATES
from megatron.config.parallel import ParallelConfig
from megatron.config.problems import UserError
from megatron.config.run import MOMENTS, OptimizerConfig
from megatron.config.settings import SETTINGS
from megatron.data.errors import DataError
from megatron.data.loader import DataSource
from megatron.data.stretches import lay_out
from megatron.kernels.activation import ACTIVATIONS
from megatron.kernels.operation import Candidate
from megatron.kernels.registry import OPERATIONS, choose
from megatron.optim.rules import RULES
from megatron.parallel.build import BuildContext
from megatron.parallel.grads import GradSink
from megatron.parallel.layout import Layout
from megatron.parallel.mesh import Mesh
from megatron.training.sinks import Background, Sinks
from megatron.training.timers import PHASES, Timers
from tests.distributed import grid

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    tables: tuple[tuple[dict[str, Any], str], ...]
    tables = (ACTIVATIONS, "silu"), (RULES, "signum"), (PHASES, "optimizer-average")
    for table, name in tables:
        monkeypatch.setitem(table, name, None)  # so that what the page registers is undone
    names: dict[str, Any] = {"__name__": "page"}
    for block in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.S | re.M):
        exec(compile(block, str(PAGE), "exec"), names)
    return names


def test_tables_match_the_choices_of_the_flags() -> None:
    for table, name in ((ACTIVATIONS, "activation"), (RULES, "optimizer")):
        assert set(table) == set(SETTINGS[name].option.choices or ())


@pytest.mark.parametrize(
    ("name", "factor"),
    [
        ("activation", "activation"),
        ("normalization", "norm"),
        ("optimizer", "optimizer"),
        ("position_embedding_type", "positions"),
        ("recompute_modules", "recompute"),
    ],
)
def test_what_is_added_to_the_choices_is_in_the_layout_matrix(
    monkeypatch: pytest.MonkeyPatch, name: str, factor: str
) -> None:
    setting = SETTINGS[name]
    more = replace(setting.option, choices=(*(setting.option.choices or ()), "new"))
    monkeypatch.setitem(SETTINGS, name, replace(setting, option=more))
    assert "new" in runpy.run_path(grid.__file__)["FACTORS"][factor]


def test_activation(page: dict[str, Any]) -> None:
    x = torch.randn(5)
    assert torch.equal(ACTIVATIONS["silu"](x), x * torch.sigmoid(x)) or torch.allclose(
        ACTIVATIONS["silu"](x), x * torch.sigmoid(x)
    )


def test_optimizer_keeps_as_many_moments_as_is_said(page: dict[str, Any]) -> None:
    for name, count in {**MOMENTS, "signum": 1}.items():
        state = RULES[name]([torch.zeros(3)], OptimizerConfig()).state
        assert sum(t.numel() == 3 for tensors in state.values() for t in tensors) == count


def test_optimizer_moves_by_the_sign_and_obeys_skips(page: dict[str, Any]) -> None:
    p, g = torch.zeros(3), torch.tensor([1.0, -2.0, 0.0])
    rule = page["Signum"]([p], OptimizerConfig())
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


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_kernel_is_proven_and_chosen(page: dict[str, Any], monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    known = OPERATIONS["norm"]
    more = replace(known, candidates={"by_parts": page["BY_PARTS"], **known.candidates})
    monkeypatch.setitem(OPERATIONS, "norm", more)
    monkeypatch.setitem(CANDIDATES, "norm", ("by_parts", *CANDIDATES["norm"]))
    kernels, notes = choose(("norm=by_parts", "rotary=torch"), torch.device("cpu"), dtype)
    assert kernels.norm is page["norm_by_parts"]
    assert notes[0].startswith("kernels: by_parts (norm); torch (")


def test_kernel_that_is_off_is_refused(page: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    known = OPERATIONS["norm"]
    off = Candidate(lambda: lambda x, weight, bias, eps: page["norm_by_parts"](x, weight, bias, 1e-2))
    monkeypatch.setitem(OPERATIONS, "norm", replace(known, candidates={"by_parts": off, **known.candidates}))
    with pytest.raises(UserError, match="differs from torch") as told:
        choose(("norm=by_parts",), torch.device("cpu"), torch.float64)
    assert [problem.code for problem in told.value.problems] == ["E903"]


def test_sink_gets_what_a_run_reports(page: dict[str, Any], tmp_path: Path) -> None:
    warnings: list[str] = []
    sinks = Sinks(warnings.append)
    sinks.add("the table", partial(Background, partial(page["LossTable"], tmp_path / "loss.tsv")))
    sinks.event({"event": "start", "iteration": 0})
    sinks.record({"iteration": 1, "lm loss": 2.5})
    sinks.record({"iteration": 1, "lm loss validation": 3.5})
    sinks.close(failed=False)
    assert (tmp_path / "loss.tsv").read_text() == "1\t2.5\n"
    sinks.add("the table", partial(page["LossTable"], tmp_path / "nowhere" / "loss.tsv"))
    assert len(warnings) == 1


def test_timer_is_read_with_the_others(page: dict[str, Any]) -> None:
    timers = Timers(2, torch.device("cpu"))
    with timers("optimizer-average"):
        time.sleep(0.01)
    times = timers.read(steps=2)
    assert times.keys() == PHASES.keys()
    assert times["optimizer-average"] >= 0.005


def test_dataset(page: dict[str, Any]) -> None:
    source = DataSource({"train": page["Counting"](10, 4, 100)}, {"train": (100,)}, {"train": 96}, 4, 2, 10)
    assert source.summary() == ["train      96 samples, 384 tokens, counted up to 10"]
    (places,) = source.share("train", 8, 2, 0, 1)
    batch = source.micro_batch("train", places, step=4)
    assert batch.tokens.tolist() == [[8, 9, 0, 1], [9, 0, 1, 2]]
    assert batch.labels.tolist() == [[9, 0, 1, 2], [0, 1, 2, 3]]
    assert source.digest("train", 0, 9) == sum(source.digest("train", i, i + 1) for i in range(9)) % 2**64
    assert list(source.fingerprints) == ["train"]
    with pytest.raises(DataError, match="this run has 100"):
        source.share("train", 99, 2, 0, 1)


def test_dataset_of_a_run_that_is_made_longer(page: dict[str, Any]) -> None:
    whole = page["Counting"](50, 8, 30)
    chain, stretches = lay_out("train", page["counting"], (20,), 30)
    assert stretches == (20, 10)
    assert [chain[i].tokens.tolist() for i in range(30)] == [whole[i].tokens.tolist() for i in range(30)]
    assert chain.identities(np.arange(30)).tolist() == whole.identities(np.arange(30)).tolist()
    assert chain.fingerprint == whole.fingerprint
