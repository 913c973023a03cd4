"""Offload on several ranks: state on the host and activations on the host change no bit of a step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from megatron.config.optimizer import OptimizerConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.precision import PrecisionConfig
from megatron.config.training import TrainingConfig
from megatron.layers.activation_offload import ActivationOffload
from megatron.optimizer.offload import OffloadedOptimizer
from megatron.training.build import build_trainer
from megatron.training.step import train_step
from tests.distributed.test_optimizer_shards import EXPERTS, GQA, noted
from tests.kit.cases import MODEL, RATES, Case, batches_of, pipeline
from tests.kit.pool import Pool
from tests.kit.short import one_in

STEPS = 5
FP32, BF16 = PrecisionConfig(params_dtype="fp32"), PrecisionConfig(params_dtype="bf16")
ADAM = OptimizerConfig(adam_eps=1e-5, ema_decay=0.9)
OPTIMIZERS = {
    "adam": ADAM,
    "lion": OptimizerConfig(optimizer="lion"),
    "sgd": OptimizerConfig(optimizer="sgd"),
    "bf16 moments": replace(ADAM, exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16"),
    "muon": OptimizerConfig(optimizer="muon"),
    "remainders": replace(ADAM, store_param_remainders=True),
}


def sharded(strategy: str, **changes: Any) -> ParallelConfig:
    return ParallelConfig(data_parallel_sharding_strategy=strategy, ddp_bucket_size=4000, **changes)


def steps_of(rank: int, size: int, case: Case) -> tuple[list[tuple[dict[str, Tensor], dict[str, Tensor]]], int, int]:
    """Saved tensors and gradients after every step, and bytes of offloaded state and activations."""
    trainer = build_trainer(case.config(), rank, size)
    found = []
    for step in range(case.steps):
        train_step(trainer, batches_of(trainer, case, step), RATES)
        found.append((noted(trainer), {name: grad.clone() for name, grad in trainer.optimizer.grads.items()}))
    memory = trainer.optimizer.memory if isinstance(trainer.optimizer, OffloadedOptimizer) else None
    held = sum(memory.weights[name].nbytes for name in memory.on_host) if memory else 0
    activations = next(iter(trainer.chunks.values())).context.offload
    return found, held, activations.pool.size if isinstance(activations, ActivationOffload) else 0


def differing(rank: int, size: int, case: Case, offloaded: Case) -> tuple[list[str], int, int]:
    plain, _, _ = steps_of(rank, size, case)
    moved, held, activations = steps_of(rank, size, offloaded)
    names = [
        f"{name} in step {step}"
        for step, (before, after) in enumerate(zip(plain, moved, strict=True))
        for these, those in zip(before, after)
        for name in these.keys() | those.keys()
        if name not in these or name not in those or not these[name].equal(those[name])
    ]
    return names, held, activations


def check(pool: Pool, case: Case, offloaded: Case) -> list[tuple[int, int]]:
    ranks = pool.run(case.world_size, differing, case, offloaded)
    assert [names for names, *_ in ranks] == [[]] * len(ranks)
    return [(held, activations) for _, held, activations in ranks]


CASES = {
    "zero 0": ("adam", sharded("no_shard"), 1.0, FP32),
    "zero 1, part": ("adam", sharded("optim"), 0.4, BF16),
    "zero 1, lion": ("lion", sharded("optim", overlap_param_gather=True), 0.4, BF16),
    "zero 1, instances": ("sgd", sharded("optim", num_distributed_optimizer_instances=2), 0.4, FP32),
    "zero 1, bf16 gradients": ("bf16 moments", sharded("optim", grad_reduce_in_bf16=True), 1.0, BF16),
    "zero 2": ("bf16 moments", sharded("optim_grads"), 0.4, BF16),
    "zero 2, no overlap": ("sgd", sharded("optim_grads", overlap_grad_reduce=False), 1.0, FP32),
    "zero 2, remainders": ("remainders", sharded("optim_grads"), 0.4, BF16),
    "zero 3": ("adam", sharded("optim_grads_params"), 0.4, BF16),
    "zero 3, weights": ("adam", sharded("optim_grads_params", param_cpu_offload=True), 1.0, BF16),
    "zero 3, fp32 weights": ("lion", sharded("optim_grads_params", param_cpu_offload=True), 1.0, FP32),
    "zero 3, muon": ("muon", sharded("optim_grads_params"), 1.0, FP32),
    "partial gradients": (
        "adam",
        sharded("optim", tensor_model_parallel_size=2, sequence_parallel=True),
        1.0,
        FP32,
    ),
    "tied stages": ("adam", sharded("optim", pipeline_model_parallel_size=2), 0.7, FP32),
}


@pytest.mark.parametrize("name", one_in(2, CASES))
def test_state_on_the_host_changes_no_bit(pool: Pool, name: str) -> None:
    optimizer, parallel, fraction, precision = CASES[name]
    model, dp = replace(GQA, add_bias_linear=True), 2 * parallel.num_distributed_optimizer_instances
    case = Case(model, parallel, precision, optimizer=OPTIMIZERS[optimizer], dp=dp, steps=STEPS)
    on_host = replace(case.optimizer, optimizer_cpu_offload=True, optimizer_offload_fraction=fraction)
    for held, _ in check(pool, case, replace(case, optimizer=on_host)):
        assert held > 0


ZERO3 = {"data_parallel_sharding_strategy": "optim_grads_params"}
ACTIVATIONS = {
    "1f1b": pipeline(2, samples=6, layers=4),
    "interleaved": pipeline(2, "interleaved", 2, layers=4),
    "zero bubble": pipeline(2, "zb-h1", samples=6, layers=4),
    "v": pipeline(2, "zb-v", 2, layers=4),
    "zero 3": replace(pipeline(1, layers=3, **ZERO3), dp=2),
    "experts": Case(replace(EXPERTS, num_layers=3), ParallelConfig(expert_model_parallel_size=2), dp=2),
    "context": Case(replace(MODEL, num_layers=3), ParallelConfig(context_parallel_size=2)),
    "tensor and sequence": Case(
        replace(GQA, num_layers=3), ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True)
    ),
}
RECOMPUTED = {
    "": {},
    "full": {"recompute_granularity": "full"},
    "selective": {
        "recompute_granularity": "selective",
        "recompute_modules": ("layernorm", "activation", "core_attn"),
    },
}


@pytest.mark.parametrize(
    ("name", "recomputed"),
    one_in(2, [*((name, "") for name in ACTIVATIONS), ("1f1b", "full"), ("zero 3", "full"), ("v", "selective")]),
)
def test_activations_on_the_host_change_no_bit(pool: Pool, name: str, recomputed: str) -> None:
    training = TrainingConfig(**RECOMPUTED[recomputed])  # type: ignore[arg-type]
    case = replace(ACTIVATIONS[name], precision=FP32, training=training, optimizer=ADAM)
    moved = replace(training, cpu_offloading_num_layers=2, min_offloaded_tensor_size=64)
    for _, activations in check(pool, case, replace(case, training=moved)):
        assert activations > 0
