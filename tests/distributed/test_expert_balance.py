"""Loads and biases of experts: the same bits in every layout, and those of a loop over the global batch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.config.parallel import ParallelConfig
from megatron.config.training import TrainingConfig
from megatron.training.build import build_trainer
from megatron.training.component import Component
from megatron.training.components.expert_loads import ExpertLoadBalance
from megatron.training.step import train_step
from tests.distributed.grid import RECOMPUTE
from tests.distributed.resume import run_rank
from tests.distributed.test_experts import EXPERTS, parallel
from tests.distributed.vitals import expert_balance, joined_balance
from tests.kit.cases import RATES, Case, batches_of, compare_with_twin, global_batch, run_on
from tests.kit.pool import Pool
from tests.kit.runs import checkpoint, differences, part_of, tiny_run
from tests.kit.short import one_in

RATE = 0.05
BALANCED = replace(
    EXPERTS,
    num_layers=2,
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
    moe_router_bias_update_rate=RATE,
    moe_router_num_groups=2,
    moe_router_group_topk=1,
    moe_router_topk_scaling_factor=2.5,
    moe_router_load_balancing_type=("seq_aux_loss", "global_aux_loss"),
    moe_aux_loss_coeff=(0.1, 0.2),
)
ONE_SAMPLE = TrainingConfig(micro_batch_size=1)
ZERO3 = ParallelConfig(data_parallel_sharding_strategy="optim_grads_params", expert_model_parallel_size=2)
RECOMPUTED = TrainingConfig(micro_batch_size=2, **RECOMPUTE["uniform 2"])
CASES = {
    "dp2, tp2, ep2": Case(BALANCED, parallel(tp=2, sp=True, ep=2, etp=1), dp=2, steps=3),
    "cp2, modules recomputed": Case(
        BALANCED,
        ParallelConfig(context_parallel_size=2),
        training=TrainingConfig(**RECOMPUTE["all modules"]),
        steps=3,
        late_labels=True,
    ),
    "pp2, everything recomputed, no experts on a stage": Case(
        replace(BALANCED, num_layers=4, moe_layer_freq="[0]*3+[1]"), parallel(pp=2), training=RECOMPUTED, steps=3
    ),
    "zero3, ep2": Case(BALANCED, ZERO3, dp=2, training=ONE_SAMPLE, steps=3),
}


@pytest.mark.parametrize("name", one_in(2, CASES))
def test_choices_and_biases_of_a_layout_are_those_of_one_process(pool: Pool, name: str) -> None:
    case = CASES[name]
    ranks = pool.run(case.world_size, expert_balance, case)
    assert joined_balance(ranks) == expert_balance(0, 1, case.twin())
    assert max(d.error for d in compare_with_twin(run_on(pool, case), case)) < 1e-10


def test_biases_follow_a_loop_over_the_global_batch() -> None:
    case = Case(BALANCED, training=ONE_SAMPLE, steps=4)
    biases = torch.zeros(2, 4, dtype=torch.float64)
    moved = set()
    for step, found in enumerate(expert_balance(0, 1, case)):
        for layer, bias in enumerate(biases):
            name, counts = f"layers.{layer}.mlp.router", [0] * 4
            for sample in global_batch(case, step).sample_ids.tolist():
                for position in range(case.length):
                    for expert in found[f"{name} sample {sample} position {position}"]:
                        counts[int(expert)] += 1
            assert found[f"{name} loads"] == [*counts, 0]
            for expert, count in enumerate(counts):
                bias[expert] += RATE * ((count < sum(counts) / 4) - (count > sum(counts) / 4))
            assert found[f"{name} bias"] == bias.tolist()
            moved |= {*bias.tolist()}
    assert moved == {-RATE, 0.0, RATE}, "some go up and down"


class SkipOdd(Component):
    """Skips every second update."""

    steps = 0

    def before_update(self, loss: Tensor | None, grad_norm: Tensor) -> Tensor:
        self.steps += 1
        return torch.tensor(float(self.steps % 2 == 0))


def test_a_skipped_step_moves_no_bias_and_is_not_reported() -> None:
    case = Case(BALANCED, steps=4)
    trainer = build_trainer(case.config(), 0, 1)
    trainer.components.append(SkipOdd())
    name = "layers.0.mlp.router.expert_bias"
    before = trainer.optimizer.main_params[name].clone()
    window, reported = part_of(trainer, ExpertLoadBalance).window, 0
    for step in range(case.steps):
        train_step(trainer, batches_of(trainer, case, step), RATES)
        now = trainer.optimizer.main_params[name].clone()
        assert torch.equal(now, before) == (step % 2 == 1)
        assert (window.sum().item() == reported) == (step % 2 == 1)
        before, reported = now, int(window.sum())


def test_no_optimizer_knows_a_bias() -> None:
    trainer = build_trainer(Case(BALANCED).config(), 0, 1)
    name = "layers.0.mlp.router.expert_bias"
    assert name in trainer.optimizer.main_params
    assert name not in {*trainer.optimizer.grads, *(n for group, _ in trainer.optimizer.groups for n in group.names)}
    assert not any(name in tensors for tensors in trainer.optimizer.state().values())
    assert name in part_of(trainer, ExpertLoadBalance).update_buffers(torch.zeros(()))


# ---- whole runs

FLAGS = (
    "--num-experts 4 --disable-bias-linear --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-bias-update-rate 0.002 --moe-router-load-balancing-type seq_aux_loss global_aux_loss "
    "--moe-aux-loss-coeff 0.1 0.1 --save-interval 3"
)
BIAS = "layers.1.mlp.router.expert_bias"


def finish(pool: Pool, folder: Path, flags: str, world_size: int, *happening: Any) -> Path:
    """The last checkpoint of a run of 6 steps, or the one before something happens."""
    config = tiny_run(folder, f"{FLAGS} --save {folder}/saved {flags}", world_size)
    outcomes = pool.run(world_size, run_rank, config, *happening)
    assert {outcome.status for outcome in outcomes} == ({None} if happening else {0}), outcomes[0].err
    return folder / f"saved/iter_{3 if happening else 6:07d}"


def test_a_resumed_run_continues_to_the_bit(pool: Pool, tmp_path: Path) -> None:
    flags = (
        "--bf16 --use-distributed-optimizer --expert-model-parallel-size 2 --ema-decay 0.5 "
        "--check-weight-hash-across-dp-replicas-interval 1"
    )
    whole = finish(pool, tmp_path / "whole", flags, 2)
    finish(pool, tmp_path / "parts", flags, 2, "kill", 5)
    assert differences(whole, finish(pool, tmp_path / "parts", flags, 2)) == []
    tensors, _ = checkpoint(whole)
    assert tensors[BIAS].dtype == torch.float32
    assert tensors[BIAS].abs().max() > 0.003, "it has moved"
    assert 0 < (tensors[f"optim.ema.{BIAS}"] - tensors[BIAS]).abs().max() < 0.005, "the average follows"
    assert tensors["optim.expert_loads.layers.1.mlp.router"].sum() == 4 * 8 * 2


def test_a_run_resumes_in_another_layout(pool: Pool, tmp_path: Path) -> None:
    whole, _ = checkpoint(finish(pool, tmp_path / "whole", "--fp64", 1))
    finish(pool, tmp_path / "parts", "--fp64 --tensor-model-parallel-size 2 --sequence-parallel", 2, "kill", 5)
    other, _ = checkpoint(finish(pool, tmp_path / "parts", "--fp64 --pipeline-model-parallel-size 2", 2))
    exact = [name for name in whole if name.endswith("expert_bias") or "expert_loads" in name]
    assert len(exact) == 4
    assert all(torch.equal(whole[name], other[name]) for name in exact)
    torch.testing.assert_close(dict(other), dict(whole), rtol=1e-9, atol=1e-12)
