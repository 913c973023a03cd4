"""Router statistics are the same on every layout, and match a loop over tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron.config.model import ModelConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.training import TrainingConfig
from megatron.layers.router import Router, Routing
from megatron.training.build import build_trainer
from megatron.training.loggers.console import health_line
from megatron.training.step import train_step
from tests.distributed.grid import RECOMPUTE
from tests.distributed.vitals import difference, report, router_losses
from tests.kit.cases import MODEL, RATES, Case, batches_of, compare_with_twin, global_batch, run_on
from tests.kit.pool import Pool

EXPERTS = replace(
    MODEL,
    num_layers=4,
    add_bias_linear=False,
    normalization="RMSNorm",
    num_experts=4,
    moe_ffn_hidden_size=24,
    moe_aux_loss_coeff=(0.3,),
    moe_z_loss_coeff=0.02,
)


def parallel(**sizes: int | bool) -> ParallelConfig:
    names = {"tp": "tensor_model_parallel_size", "pp": "pipeline_model_parallel_size", "sp": "sequence_parallel"}
    names |= {"ep": "expert_model_parallel_size", "etp": "expert_tensor_parallel_size"}
    return ParallelConfig(**{names[name]: size for name, size in sizes.items()})  # type: ignore[arg-type]


ONE_SAMPLE = TrainingConfig(micro_batch_size=1)
CASES = {
    "dp4, ep4": Case(EXPERTS, parallel(ep=4), dp=4, steps=2),
    "dp2, tp2, ep2, etp2": Case(EXPERTS, parallel(tp=2, sp=True, ep=2, etp=2), dp=2, steps=2),
    "pp2, dp2, ep2, everything recomputed": Case(
        EXPERTS, parallel(pp=2, ep=2), dp=2, training=TrainingConfig(**RECOMPUTE["uniform 2"]), steps=2
    ),
    "tp2, ep2, modules recomputed": Case(
        EXPERTS, parallel(tp=2, sp=True, ep=2, etp=1), training=TrainingConfig(**RECOMPUTE["all modules"]), steps=2
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_router_losses_of_a_layout_equal_one_process(pool: Pool, name: str) -> None:
    case = CASES[name]
    ranks = pool.run(case.world_size, router_losses, case)
    assert all(steps == ranks[0] for steps in ranks)
    for got, expected in zip(ranks[0], router_losses(0, 1, case.twin()), strict=True):
        assert [*got] == ["lm loss", "seq_load_balancing_loss", "z_loss"]
        assert got == pytest.approx(expected, rel=1e-10)


def expert_loads(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name.startswith("health/expert-load/")}


@pytest.mark.parametrize("name", ["dp2, tp2, ep2, etp2", "pp2, dp2, ep2, everything recomputed"])
def test_health_of_experts_matches_one_process(pool: Pool, name: str) -> None:
    case = CASES[name]
    ranks = pool.run(case.world_size, report, case)
    assert all(records == ranks[0] for records in ranks)
    for got, expected in zip(ranks[0], report(0, 1, case.twin()), strict=True):
        assert difference(got, expected) < 1e-10
        assert [*expert_loads(got)] == [f"health/expert-load/layers.{i}" for i in range(4)]
        assert "busiest expert" in health_line(1, got)


# ---- dense layers, a narrower space, a gate on the shared expert

LATENT = replace(
    EXPERTS,
    add_bias_linear=True,
    activation="swiglu",
    moe_layer_freq="[0]+[1]*2",
    moe_latent_size=12,
    moe_shared_expert_intermediate_size=16,
    moe_shared_expert_gate=True,
)
MODULES = TrainingConfig(micro_batch_size=1, **RECOMPUTE["all modules"])
LAYOUTS = {
    "tp4, ep4": Case(LATENT, parallel(tp=4, sp=True, ep=4, etp=1), steps=2),
    "tp2, dp2, ep2, etp2, zero 2": Case(
        LATENT,
        replace(parallel(tp=2, sp=True, ep=2, etp=2), data_parallel_sharding_strategy="optim_grads"),
        dp=2,
        steps=2,
    ),
    "pp2, cp2, ep2, modules recomputed": Case(
        LATENT,
        replace(parallel(pp=2, ep=2), context_parallel_size=2, pipeline_schedule="zb-h1"),
        training=MODULES,
        steps=2,
    ),
    "pp2, tp2, lora": Case(replace(LATENT, lora_rank=2), parallel(pp=2, tp=2, sp=True, ep=2, etp=1), steps=2),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_structures_train_the_same_in_every_layout(pool: Pool, name: str) -> None:
    case = LAYOUTS[name]
    steps = run_on(pool, case)
    assert [step.drifted for step in steps] == [[], []]
    for deviation in compare_with_twin(steps, case):
        assert deviation.error <= 1e-10, deviation


# ---- ranks without tokens


def all_the_same(rank: int, world_size: int, case: Case) -> tuple[float, float]:
    """Loss and norm of a step in which the routers score all experts alike: most ranks have nothing to compute."""
    trainer = build_trainer(case.config(), rank, world_size)
    for name, parameter in trainer.params.items():
        if name.endswith("router.weight"):
            torch.nn.init.zeros_(parameter)
    metrics = train_step(trainer, batches_of(trainer, case, 0), RATES)
    return metrics.loss.item(), metrics.grad_norm.item()


@pytest.mark.parametrize("name", ["dp4, ep4", "tp2, ep2, modules recomputed"])
def test_ranks_without_tokens_keep_up(pool: Pool, name: str) -> None:
    case = CASES[name]
    ranks = pool.run(case.world_size, all_the_same, case)
    assert ranks == [ranks[0]] * len(ranks)
    assert ranks[0] == pytest.approx(all_the_same(0, 1, case.twin()), rel=1e-10)


# ---- one process against loops


def by_hand(model: ModelConfig, logits_SBE: Sequence[Tensor], mask_BS: Tensor) -> tuple[float, float, list[float]]:
    """Balancing loss and z-loss, mean over layers, and the load of every layer's busiest expert."""
    balance, z, loads = 0.0, 0.0, []
    for logits in logits_SBE:
        chosen_of_all = [0] * logits.shape[2]
        for b in range(logits.shape[1]):
            chosen, probability = [0] * logits.shape[2], torch.zeros(logits.shape[2], dtype=torch.float64)
            for s in range(logits.shape[0]):
                for e in logits[s, b].argsort(descending=True)[: model.moe_router_topk].tolist():
                    chosen[e] += 1
                    chosen_of_all[e] += 1
                probability += logits[s, b].exp() / logits[s, b].exp().sum()
                z += logits[s, b].exp().sum().log().item() ** 2 * mask_BS[b, s].item()
            shares = [n / (model.moe_router_topk * logits.shape[0]) for n in chosen]
            mean = (probability / logits.shape[0]).tolist()
            of_sequence = logits.shape[2] * sum(f * p for f, p in zip(shares, mean))
            balance += of_sequence * mask_BS[b].sum().item()
        loads.append(max(chosen_of_all) / (sum(chosen_of_all) / len(chosen_of_all)))
    count = mask_BS.sum().item() * len(logits_SBE)
    return balance / count, z / count, loads


@pytest.mark.parametrize(("topk", "layers"), [(1, None), (2, None), (3, "[0,1,1]")])
def test_router_losses_equal_a_loop_over_tokens(topk: int, layers: str | None) -> None:
    model = replace(EXPERTS, moe_router_topk=topk, moe_router_pre_softmax=topk == 1, moe_layer_freq=layers)
    case, logits = Case(model, training=TrainingConfig(micro_batch_size=4), steps=1), []
    trainer = build_trainer(case.config(), 0, 1)

    def note(router: Router, inputs: tuple[Tensor, ...], output: Routing) -> None:
        logits.append(inputs[0].detach() @ router.weight.detach().double().t())

    for module in trainer.chunks[0].modules():
        if isinstance(module, Router):
            module.register_forward_hook(note)
    metrics = train_step(trainer, batches_of(trainer, case, 0), RATES)
    balance, z, loads = by_hand(model, logits, global_batch(case, 0).loss_mask)
    assert metrics.extra["seq_load_balancing_loss"].item() == pytest.approx(balance, rel=1e-12)
    assert metrics.extra["z_loss"].item() == pytest.approx(z, rel=1e-12)
    assert [*expert_loads(report(0, 1, case)[0]).values()] == pytest.approx(loads, rel=1e-12)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"moe_aux_loss_coeff": (0.0,)}, ["z_loss"]),
        ({"moe_z_loss_coeff": None}, ["seq_load_balancing_loss"]),
        ({"moe_router_load_balancing_type": ("aux_loss",)}, ["load_balancing_loss", "z_loss"]),
        ({"moe_router_load_balancing_type": ("none",)}, ["z_loss"]),
        ({"moe_aux_loss_coeff": (0.0,), "moe_z_loss_coeff": 0.0}, []),
        ({"num_experts": None}, []),
    ],
)
def test_losses_that_are_not_in_use_are_not_router_losses(changes: dict[str, object], names: list[str]) -> None:
    case = Case(replace(EXPERTS, **changes), steps=1)  # type: ignore[arg-type]
    assert [*router_losses(0, 1, case)[0]] == ["lm loss", *names]


def test_balance_of_a_micro_batch_matches_its_joined_sequences() -> None:
    """With one sequence in a micro-batch both kinds of the loss are the same."""
    both = [
        router_losses(
            0, 1, Case(replace(EXPERTS, moe_router_load_balancing_type=(kind,)), training=ONE_SAMPLE, masked=False)
        )
        for kind in ("seq_aux_loss", "aux_loss")
    ]
    for sequence, batch in zip(*both, strict=True):
        assert sequence["seq_load_balancing_loss"] == pytest.approx(batch["load_balancing_loss"], rel=1e-12)
