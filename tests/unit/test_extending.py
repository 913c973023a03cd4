"""Every Python block of docs/extending.md runs and does what the page says."""

import re
import runpy
import time
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from megatron.arguments.cli import parse
from megatron.checkpoint.format import partition_problem
from megatron.config.errors import UserError
from megatron.config.model import ModelConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.run import KERNEL_CANDIDATES, MOMENTS_PER_PARAMETER, OptimizerConfig
from megatron.config.settings import SETTINGS
from megatron.data.build import build_split
from megatron.data.errors import DataError
from megatron.data.loader import DataSource
from megatron.distributed.grad_accumulator import GradAccumulator
from megatron.distributed.layout import Layout
from megatron.distributed.mesh import Mesh
from megatron.distributed.micro_batch import MicroBatch
from megatron.distributed.timing import PHASES, Timers
from megatron.kernels.activation import ACTIVATIONS
from megatron.kernels.operation import Candidate
from megatron.kernels.registry import OPERATIONS, select_kernels
from megatron.layers.build import BuildContext
from megatron.layers.moe import MixtureOfExperts
from megatron.optimizer.rules import RULES
from megatron.pipeline import plan
from megatron.pipeline.actions import PipelineSchedule
from megatron.pipeline.communication import add_communication
from megatron.pipeline.schedules import SCHEDULES, make_schedule
from megatron.pipeline.search import search_schedule
from megatron.pipeline.simulate import StageCosts, Timeline, simulate
from megatron.training.loggers.base import BackgroundLogger, LoggerCollection
from tests.distributed import grid
from tools import draw_schedule

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"
ON_MATRICES = ("muon",)
"""Rules that are made of the places of matrices, too, and so stand in no table."""


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    tables: tuple[tuple[Any, str], ...]
    tables = (ACTIVATIONS, "silu"), (RULES, "signum"), (PHASES, "optimizer-average"), (SCHEDULES, "eager")
    for table, name in tables:
        monkeypatch.setitem(table, name, None)  # so that what the page registers is undone
    names: dict[str, Any] = {"__name__": "page"}
    for block in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.S | re.M):
        exec(compile(block, str(PAGE), "exec"), names)
    return names


def test_tables_match_the_choices_of_the_flags() -> None:
    for names, setting in ((set(ACTIVATIONS), "activation"), ({*RULES, *ON_MATRICES}, "optimizer")):
        assert names == set(SETTINGS[setting].option.choices or ())


@pytest.mark.parametrize(
    ("name", "factor"),
    [
        ("activation", "activation"),
        ("normalization", "norm"),
        ("optimizer", "optimizer"),
        ("position_embedding_type", "positions"),
    ],
)
def test_what_is_added_to_the_choices_is_in_the_layout_matrix(
    monkeypatch: pytest.MonkeyPatch, name: str, factor: str
) -> None:
    setting = SETTINGS[name]
    more = replace(setting.option, choices=(*(setting.option.choices or ()), "new"))
    monkeypatch.setitem(SETTINGS, name, replace(setting, option=more))
    assert "new" in runpy.run_path(grid.__file__)["FACTORS"][factor]


def test_modules_that_are_recomputed_are_so_in_the_layout_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = SETTINGS["recompute_modules"]
    more = replace(setting.option, choices=(*(setting.option.choices or ()), "new"))
    monkeypatch.setitem(SETTINGS, "recompute_modules", replace(setting, option=more))
    known = runpy.run_path(grid.__file__)
    assert "all modules" in known["FACTORS"]["recompute"]
    assert "new" in known["RECOMPUTE"]["all modules"]["recompute_modules"]


def test_activation(page: dict[str, Any]) -> None:
    x = torch.randn(5)
    assert torch.equal(ACTIVATIONS["silu"](x), x * torch.sigmoid(x)) or torch.allclose(
        ACTIVATIONS["silu"](x), x * torch.sigmoid(x)
    )


def test_optimizer_keeps_as_many_moments_as_is_said(page: dict[str, Any]) -> None:
    for name, count in {**MOMENTS_PER_PARAMETER, "signum": 1}.items():
        if name in ON_MATRICES:
            continue
        state = RULES[name]([torch.zeros(3)], OptimizerConfig()).state
        assert sum(t.numel() == 3 for tensors in state.values() for t in tensors) == count


def test_router_weighs_by_scores_that_stand_alone(page: dict[str, Any]) -> None:
    context = BuildContext(Mesh(Layout.from_config(ParallelConfig(), 1), 0), GradAccumulator(), torch.float64)
    model = ModelConfig(hidden_size=8, num_experts=4, add_bias_linear=False)
    moe = MixtureOfExperts(model, context, 0.1, drop_activation=False).eval()
    moe.router = page["SigmoidRouter"](model, replace(context, params={}, specs={}).submodule("router"))
    x_SBH, batch = torch.randn(3, 2, 8, dtype=torch.float64), MicroBatch.of_tokens(torch.zeros(2, 3, dtype=torch.int64))
    experts, weights, losses = moe.router(x_SBH, batch)
    scores = (x_SBH.flatten(0, 1) @ moe.router.weight.t()).sigmoid()
    assert torch.equal(experts, scores.topk(2).indices)
    torch.testing.assert_close(weights, scores.gather(1, experts) / scores.gather(1, experts).sum(1, keepdim=True))
    assert losses.tolist() == [0, 0]
    assert moe(x_SBH, batch)[0].shape == x_SBH.shape


def test_optimizer_moves_by_the_sign_and_obeys_skips(page: dict[str, Any]) -> None:
    p, g = torch.zeros(3), torch.tensor([1.0, -2.0, 0.0])
    rule = page["Signum"]([p], OptimizerConfig())
    rule.update([torch.full((3,), float("nan"))], 0.1, 0.0, torch.ones(()))
    assert torch.equal(p, torch.zeros(3))
    rule.update([g], 0.1, 0.0, torch.zeros(()))
    assert torch.allclose(p, torch.tensor([-0.1, 0.1, 0.0]))


def test_layer_declares_its_parameter(page: dict[str, Any]) -> None:
    grad_accumulator = GradAccumulator()
    context = BuildContext(Mesh(Layout.from_config(ParallelConfig(), 1), 0), grad_accumulator, torch.float64)
    layer = page["LayerScale"](context.submodule("layers.0.scale"), 4, start=0.5)
    grads = {"layers.0.scale.factor": torch.zeros(4, dtype=torch.float64)}
    grad_accumulator.bind(grads.__getitem__, lambda name: None)
    x = torch.randn(3, 2, 4, dtype=torch.float64)
    layer(x).sum().backward()
    assert context.specs["layers.0.scale.factor"].numel == 4
    torch.testing.assert_close(grads["layers.0.scale.factor"], x.sum((0, 1)))


def test_layer_of_experts_declares_what_each_rank_has(page: dict[str, Any]) -> None:
    boxes = []
    for ep, etp in product(range(2), range(2)):
        place = SimpleNamespace(coordinate={"ep": ep, "etp": etp}, layout=SimpleNamespace(sizes={"ep": 2, "etp": 2}))
        context = BuildContext(cast(Mesh, place), GradAccumulator(), torch.float64, draw_initial_values=False)
        layer = page["ExpertGain"](context.submodule("layers.0.mlp"), experts=4, width=6)
        spec = context.specs["layers.0.mlp.gain"]
        assert layer.gain.shape == (2, 3)
        assert (spec.shape, spec.matrices, spec.reduce_axes) == ((4, 6), 1, ("edp",))
        boxes += [piece.global_box for piece in spec.owned]
    assert partition_problem((4, 1, 6), boxes) is None


def test_layer_of_experts_scales_rows_by_their_expert(page: dict[str, Any]) -> None:
    grad_accumulator = GradAccumulator()
    context = BuildContext(Mesh(Layout.from_config(ParallelConfig(), 1), 0), grad_accumulator, torch.float64)
    layer = page["ExpertGain"](context, experts=3, width=4)
    grads = {"gain": torch.zeros(3, 4, dtype=torch.float64)}
    grad_accumulator.bind(grads.__getitem__, lambda name: None)
    layer.gain.data.copy_(torch.arange(12.0).view(3, 4))
    x = torch.randn(5, 4, dtype=torch.float64)
    y = layer(x, (2, 0, 3))
    assert torch.equal(y, torch.cat((x[:2] * layer.gain[0], x[2:] * layer.gain[2])))
    y.sum().backward()
    torch.testing.assert_close(grads["gain"], torch.stack((x[:2].sum(0), torch.zeros(4).double(), x[2:].sum(0))))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_kernel_is_proven_and_chosen(page: dict[str, Any], monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    known = OPERATIONS["norm"]
    more = replace(known, candidates={"by_parts": page["BY_PARTS"], **known.candidates})
    monkeypatch.setitem(OPERATIONS, "norm", more)
    monkeypatch.setitem(KERNEL_CANDIDATES, "norm", ("by_parts", *KERNEL_CANDIDATES["norm"]))
    kernels, notes = select_kernels(("norm=by_parts", "rotary=torch"), torch.device("cpu"), dtype)
    assert kernels.norm is page["norm_by_parts"]
    assert notes[0].startswith("kernels: by_parts (norm); torch (")


def test_kernel_that_is_off_is_refused(page: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    known = OPERATIONS["norm"]
    off = Candidate(lambda: lambda x, weight, bias, eps: page["norm_by_parts"](x, weight, bias, 1e-2))
    monkeypatch.setitem(OPERATIONS, "norm", replace(known, candidates={"by_parts": off, **known.candidates}))
    with pytest.raises(UserError, match="differs from torch") as told:
        select_kernels(("norm=by_parts",), torch.device("cpu"), torch.float64)
    assert [problem.code for problem in told.value.problems] == ["E903"]


def test_sink_gets_what_a_run_reports(page: dict[str, Any], tmp_path: Path) -> None:
    warnings: list[str] = []
    sinks = LoggerCollection(warnings.append)
    sinks.add("the table", partial(BackgroundLogger, partial(page["LossTable"], tmp_path / "loss.tsv")))
    sinks.event(0, "start", {})
    sinks.log(1, {"lm loss": 2.5})
    sinks.log(1, {"lm loss validation": 3.5})
    sinks.close()
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


def simulated(name: str, latency: float) -> Timeline:
    return simulate(add_communication(make_schedule(name, 4, 1, 12)), StageCosts.uniform(4, latency=latency))


def test_schedule_hides_slow_links_in_more_memory(page: dict[str, Any]) -> None:
    assert simulated("eager", 0.0).makespan == simulated("1f1b", 0.0).makespan
    assert simulated("eager", 0.5).makespan < 0.9 * simulated("1f1b", 0.5).makespan
    assert [max(simulated(name, 0.5).peak_memory) for name in ("1f1b", "eager")] == [4, 7]
    best = search_schedule(4, 1, 12, StageCosts.uniform(4, latency=0.5), limit=7)
    assert (
        simulate(add_communication(best), StageCosts.uniform(4, latency=0.5)).makespan
        <= simulated("eager", 0.5).makespan
    )


def test_schedule_is_known_by_name_everywhere(page: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    chosen = ParallelConfig(pipeline_model_parallel_size=4, pipeline_schedule="eager")
    resolved = plan.resolve_pipeline(ModelConfig(num_layers=4), chosen)
    assert resolved.num_virtual_stages_per_pipeline_rank == 1
    assert plan.build_program(resolved, 6).only(("F", "B")).ranks == make_schedule("eager", 4, 1, 6).ranks
    main = runpy.run_path(draw_schedule.__file__)["main"]
    assert main(["--compare", "all", "--pipeline", "4", "--microbatches", "8"]) == 0
    assert "eager" in [line.split()[0] for line in capsys.readouterr().out.splitlines()]


def test_schedule_of_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (text,) = re.findall(r"^```csv\n(.*?)^```", PAGE.read_text(), re.S | re.M)
    mine = tmp_path / "mine.csv"
    mine.write_text(text)
    schedule = PipelineSchedule.load(mine)
    assert schedule.ranks[0] == make_schedule("gpipe", 2, 1, 3).ranks[0]
    flags = f"--pipeline-model-parallel-size 2 --pipeline-schedule {mine} --micro-batch-size 1 --global-batch-size 3"
    run = "--mock-data --vocab-size 257 --train-iters 10 --preset tiny-llama"
    config = parse(f"{run} {flags}".split(), {"RANK": "0", "WORLD_SIZE": "2"}).config
    assert plan.build_program(config.parallel, 3).only(("F", "B")).ranks == schedule.ranks
    assert draw_schedule.main(["--schedule", str(mine)]) == 0
    assert "mine.csv" in capsys.readouterr().out
    mine.with_name("missing.csv").write_text(text.replace("1B0,", ""))
    with pytest.raises(UserError, match=r"missing\.csv: .*1B0") as told:
        parse(f"{run} {flags.replace('mine', 'missing')}".split(), {"RANK": "0", "WORLD_SIZE": "2"})
    assert [problem.code for problem in told.value.problems] == ["E208"]


def test_dataset(page: dict[str, Any]) -> None:
    source = DataSource({"train": page["Counting"](10, 4, 100)}, {"train": (100,)}, {"train": 96}, 4, 2, 10)
    assert source.summary() == ["train      96 samples, 384 tokens, counted up to 10"]
    (places,) = source.rank_places("train", 8, 2, 0, 1)
    batch = source.micro_batch("train", places, step=4)
    assert batch.tokens.tolist() == [[8, 9, 0, 1], [9, 0, 1, 2]]
    assert batch.labels.tolist() == [[9, 0, 1, 2], [0, 1, 2, 3]]
    assert source.digest("train", 0, 9) == sum(source.digest("train", i, i + 1) for i in range(9)) % 2**64
    assert list(source.fingerprints) == ["train"]
    with pytest.raises(DataError, match="this run has 100"):
        source.rank_places("train", 99, 2, 0, 1)


def test_dataset_of_a_run_that_is_made_longer(page: dict[str, Any]) -> None:
    whole = page["Counting"](50, 8, 30)
    chain, segments = build_split("train", page["counting"], (20,), 30)
    assert segments == (20, 10)
    assert [chain[i].tokens.tolist() for i in range(30)] == [whole[i].tokens.tolist() for i in range(30)]
    assert chain.sample_hashes(np.arange(30)).tolist() == whole.sample_hashes(np.arange(30)).tolist()
    assert chain.fingerprint == whole.fingerprint
