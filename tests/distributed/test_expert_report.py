"""Metrics of experts are the same in every layout, and match counts by hand."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.config.training import TrainingConfig
from megatron.layers.router import Router, Routing
from megatron.training.build import build_trainer
from megatron.training.components.expert_report import (
    ExpertReport,
    expert_metrics,
    loads_in_percent,
    summary_of_layers,
)
from megatron.training.loggers.console import TOTAL_ITERATIONS, progress_line
from megatron.training.step import train_step
from megatron.training.trainer import Trainer
from tests.distributed.grid import RECOMPUTE
from tests.distributed.test_experts import EXPERTS, parallel
from tests.kit.cases import RATES, Case, batches_of
from tests.kit.pool import Pool

MODEL = replace(
    EXPERTS,
    moe_layer_freq="[0]+[1]*3",
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
    moe_router_bias_update_rate=0.01,
)
MODULES = TrainingConfig(micro_batch_size=1, **RECOMPUTE["all modules"])
EVERYTHING = TrainingConfig(micro_batch_size=2, **RECOMPUTE["uniform 2"])
CASES = {
    "tp2, dp2, ep2, etp2": Case(
        MODEL,
        replace(parallel(tp=2, sp=True, ep=2, etp=2), use_distributed_optimizer=True),
        training=MODULES,
        dp=2,
        steps=2,
    ),
    "pp2, cp2, ep2": Case(
        replace(MODEL, mtp_num_layers=2, mtp_use_repeated_layer=True, position_embedding_type="rope"),
        replace(parallel(pp=2, ep=2), context_parallel_size=2, data_parallel_sharding_strategy="optim_grads"),
        training=EVERYTHING,
        steps=2,
    ),
}


def report(rank: int, world_size: int, case: Case) -> list[dict[str, Any]]:
    """The metrics of two log lines, of a step each."""
    return [*metrics_of(made(rank, world_size, case), case)]


def made(rank: int, world_size: int, case: Case) -> Trainer:
    config = case.config()
    logging = replace(config.logging, moe_per_layer_logging=True, save_tokens_per_expert_interval=2)
    return build_trainer(replace(config, logging=logging), rank, world_size)


def metrics_of(trainer: Trainer, case: Case) -> Iterator[dict[str, Any]]:
    (experts,) = (each for each in trainer.components if isinstance(each, ExpertReport))
    experts.on_train_start()
    for step in range(case.steps):
        batches = trainer.complete(batches_of(trainer, case, step))
        metrics = train_step(trainer, batches, RATES)
        experts.on_step_taken(batches)
        trainer.progress.iteration += 1
        yield {**experts.metrics(), "losses": {name: x.item() for name, x in metrics.extra.items()}}


@pytest.mark.parametrize("name", CASES)
def test_metrics_of_a_layout_equal_one_process(pool: Pool, name: str) -> None:
    case = CASES[name]
    ranks = pool.run(case.world_size, report, case)
    assert all(lines == ranks[0] for lines in ranks)
    for got, expected in zip(ranks[0], report(0, 1, case.twin()), strict=True):
        losses, losses_of_one = got.pop("losses"), expected.pop("losses")
        assert losses == pytest.approx(losses_of_one, rel=1e-10)
        assert got == expected
        of_layers = [x for name, x in expected.items() if name.startswith("moe/seq_load_balancing_loss_layer_")]
        assert sum(of_layers) / len(of_layers) == pytest.approx(losses["seq_load_balancing_loss"], rel=1e-3)
    assert [("expert-loads" in line) for line in ranks[0]] == [False, True]
    assert ranks[0][0]["expert-bias-range"] == 0.02
    assert ranks[0][0].get("expert-mtp-layers", 0) == case.model.prediction_layers


def test_metrics_match_counts_by_hand() -> None:
    case = Case(replace(MODEL, moe_expert_capacity_factor=1.25), training=TrainingConfig(micro_batch_size=2), steps=2)
    trainer, chosen, dropped = made(0, 1, case), Counter[tuple[int, int]](), Counter[int]()

    def note(router: Router, inputs: tuple[Tensor, ...], output: Routing) -> None:
        layer, counts = int(router.context.prefix.split(".")[1]), [0] * 4
        assert router.expert_bias is not None
        keys_TE = (inputs[0].detach().flatten(0, 1) @ router.weight.detach().t()).sigmoid() + router.expert_bias
        for keys in keys_TE.tolist():
            for e in sorted(range(4), key=lambda e: -keys[e])[:2]:
                counts[e] += 1
        chosen.update({(layer, e): count for e, count in enumerate(counts)})
        capacity = math.ceil(1.25 * len(keys_TE) * 2 / 4)
        dropped[layer] += sum(max(0, count - capacity) for count in counts)

    for module in trainer.chunks[0].modules():
        if isinstance(module, Router):
            module.register_forward_hook(note)
    before = Counter[tuple[int, int]]()
    for step, line in enumerate(metrics_of(trainer, case), start=1):
        total = 2 * case.samples * case.length
        loads = {n: [4 * (chosen[n, e] - before[n, e]) / total for e in range(4)] for n in (1, 2, 3)}
        most = {n: max(each) for n, each in loads.items()}
        assert line["expert-load-max-by-layer"] == [None, *(pytest.approx(most[n], rel=1e-3) for n in most)]
        assert line["moe/expert-load-max_layer_2"] == pytest.approx(most[2], rel=1e-3)
        assert line["expert-load-max"] == pytest.approx(max(most.values()), rel=1e-3)
        assert most[line["expert-load-max-layer"]] == max(most.values())
        assert line["expert-load-min"] == pytest.approx(min(map(min, loads.values())), rel=1e-3)
        entropies = [-sum(x / 4 * math.log(x / 4, 4) for x in each if x) for each in loads.values()]
        assert line["expert-load-entropy"] == pytest.approx(min(entropies), rel=1e-3)
        assert line["experts-dead"] == sum(x == 0 for each in loads.values() for x in each)
        assert line["dropped-choices"] == pytest.approx(sum(dropped.values()) / (3 * total), rel=1e-3)
        assert dropped.total() > 0
        assert line["expert-bias-range"] == pytest.approx(0.02 * step), "some rise by 0.01, others fall"
        per_layer = [line[f"moe/seq_load_balancing_loss_layer_{n}"] for n in (1, 2, 3)]
        assert sum(per_layer) / 3 == pytest.approx(line["losses"]["seq_load_balancing_loss"], rel=1e-3)
        if step == 2:
            in_all = {n: [chosen[n, e] / (2 * total) * 4 for e in range(4)] for n in loads}
            assert line["expert-loads"] == [None, *([round(100 * x) for x in each] for each in in_all.values())]
        before, dropped = chosen.copy(), Counter[int]()


def test_the_console_shows_the_busiest_expert() -> None:
    counts = torch.tensor([[0.0, 0, 0, 0], [10, 10, 0, 20], [0, 30, 0, 10]])
    by_layer = expert_metrics(counts, torch.tensor([0.0, 1.0, 0.0]), None)
    assert by_layer["expert-load-max"] == [None, 2.0, 3.0]
    metrics = summary_of_layers(by_layer, counts.sum(1))
    assert metrics["expert-load-min"] == 0.0
    assert metrics["expert-load-entropy"] == pytest.approx(
        -0.75 * math.log(0.75, 4) - 0.25 * math.log(0.25, 4), rel=1e-3
    )
    assert loads_in_percent(counts) == [None, [100, 100, 0, 200], [0, 300, 0, 100]]
    lists = {f"{name}-by-layer": values for name, values in by_layer.items()}
    line = {TOTAL_ITERATIONS: 9, "lm loss": 2.0, **metrics, **lists}
    assert progress_line(3, line) == "3/9 | loss 2.0000 load 3.00 L2 dead 3 dropped 1.2%"
    fine = dict(line, **{"experts-dead": 0, "dropped-choices": 0.0})
    assert progress_line(3, fine).endswith(" load 3.00 L2")
    assert progress_line(3, fine | {"expert-mtp-layers": 1}).endswith(" load 3.00 MTP1")
    assert progress_line(3, fine | {"expert-mtp-layers": 2}).endswith(" load 3.00 MTP2")


def test_no_expert_with_a_token_counts_as_dead() -> None:
    assert loads_in_percent(torch.tensor([[0.0, 1, 999, 1000]])) == [[0, 1, 200, 200]]
