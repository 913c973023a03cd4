"""Sharding between replicas changes no bit where the order of summing stays the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from megatron.config.model import ModelConfig
from megatron.config.optimizer import OptimizerConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.precision import PrecisionConfig
from megatron.config.training import TrainingConfig
from megatron.inference.generate import SamplingParams, generate
from megatron.optimizer.sharded_parameter_store import ShardedWeightBuffer
from megatron.training.build import build_trainer
from megatron.training.callbacks.health import check_weight_copies
from megatron.training.components.average import AverageWeights
from megatron.training.step import evaluate, train_step
from tests.distributed.grid import EXPERTS, choices
from tests.distributed.grid import RECOMPUTE as RECOMPUTED
from tests.kit.cases import FP64, MODEL, RATES, Case, batches_of, compare_with_twin, run_on
from tests.kit.pool import Pool
from tests.kit.runs import part_of
from tests.kit.short import one_in
from tools.lib.verify_parallel import StepTrace

STAGE_1: dict[str, Any] = {"data_parallel_sharding_strategy": "optim"}
STAGE_2: dict[str, Any] = {"data_parallel_sharding_strategy": "optim_grads"}
STAGE_3: dict[str, Any] = {"data_parallel_sharding_strategy": "optim_grads_params"}
TP2_SP: dict[str, Any] = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2: dict[str, Any] = {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zb-h1"}
WORDS = "embedding.word_embeddings.weight"
SHARED = replace(MODEL, num_query_groups=1, qk_layernorm=True)
MIXED = replace(MODEL, add_bias_linear=False, **EXPERTS["balanced"])


def case(dp: int, model: ModelConfig = MODEL, samples: int | None = None, **parallel: Any) -> Case:
    """Return a case with micro-batches of one sample, two per replica by default, and small buckets."""
    return Case(
        model,
        ParallelConfig(ddp_bucket_size=4000, **parallel),
        training=TrainingConfig(micro_batch_size=1),
        optimizer=OptimizerConfig(adam_eps=1e-5),
        dp=dp,
        samples=samples or 2 * dp,
    )


CASES = {
    "two": case(2),
    "three": case(3),
    "four": case(4),
    "two, TP": case(2, SHARED, **TP2_SP),
    "two, one large bucket": replace(case(2), parallel=ParallelConfig(overlap_grad_reduce=False)),
    "two, pipeline": case(2, SHARED, **PP2),
    "four, experts": case(4, MIXED, expert_model_parallel_size=2),
    "two, experts and TP": case(2, MIXED, expert_model_parallel_size=2, expert_tensor_parallel_size=1, **TP2_SP),
}


def strategy(case: Case, **parallel: Any) -> Case:
    """The same, cut in another way."""
    return replace(case, parallel=replace(case.parallel, **parallel))


def check_same(ours: Sequence[StepTrace], reference: Sequence[StepTrace]) -> None:
    """To the bit."""
    for a, b in zip(ours, reference, strict=True):
        assert a.drifted == b.drifted == []
        assert (a.loss, a.grad_norm) == (b.loss, b.grad_norm)
        for got, expected in ((a.grads, b.grads), (a.weights, b.weights)):
            same = {n: torch.allclose(got[n], x, rtol=0.0, atol=0.0, equal_nan=True) for n, x in expected.items()}
            assert [name for name, equal in same.items() if not equal] == []


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in ("two", "four") else ()) for n in CASES]
)
def test_stage_1_changes_no_bit(pool: Pool, name: str) -> None:
    """With weights gathered while the next forward runs, but on "two"."""
    whole = replace(CASES[name], precision=PrecisionConfig(params_dtype="fp32"))
    check_same(run_on(pool, strategy(whole, **STAGE_1, overlap_param_gather=name != "two")), run_on(pool, whole))


IN_BF16 = {
    "masters": OptimizerConfig(adam_eps=1e-5),
    "remainders": OptimizerConfig(adam_eps=1e-5, store_param_remainders=True),
    "moments in bf16": OptimizerConfig(adam_eps=1e-5, exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16", ema_decay=0.9),
    "lion": OptimizerConfig("lion", exp_avg_dtype="bf16", clip_grad=0.0),
}


@pytest.mark.parametrize("name", one_in(2, IN_BF16))
def test_stage_1_changes_no_bit_of_weights_in_bf16(pool: Pool, name: str) -> None:
    """Main params, remainders and moments are sharded; stochastic rounding depends on the position in the model."""
    whole = replace(CASES["three"], precision=PrecisionConfig(params_dtype="bf16"), optimizer=IN_BF16[name])
    check_same(run_on(pool, strategy(whole, **STAGE_1, overlap_param_gather=True)), run_on(pool, whole))


def test_stage_2_on_two_replicas_changes_no_bit_of_one_microbatch(pool: Pool) -> None:
    """Two numbers have one sum. With several micro-batches stage 2 adds up sums, where the others sum up what added.

    Unclipped: stage 2 packs its buckets in another way, so the norm is added up in another order.
    """
    whole = replace(case(2, SHARED, samples=2), optimizer=OptimizerConfig(adam_eps=1e-5, clip_grad=0.0))
    ours, reference = run_on(pool, strategy(whole, **STAGE_2, overlap_param_gather=True)), run_on(pool, whole)
    assert [s.grad_norm for s in ours] == pytest.approx([s.grad_norm for s in reference], rel=1e-14, abs=0.0)
    assert all(torch.equal(ours[0].grads[n], grad) for n, grad in reference[0].grads.items())


FREED = STAGE_3 | {"reshard_after_forward": True, "param_gather_prefetch": 2}
RECOMPUTE: dict[str, dict[str, Any]] = {
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
    "modules": {
        "recompute_granularity": "selective",
        "recompute_modules": choices("recompute_modules"),
    },
    "mlp in chunks": {"mlp_chunk_size": 2},
    "activations on the host": {"cpu_offloading_num_layers": 1, "min_offloaded_tensor_size": 1},
}
FP16 = PrecisionConfig(params_dtype="fp16", initial_loss_scale=2.0**22, hysteresis=1)
SPIKES = OptimizerConfig(adam_eps=1e-5, skip_spikes=1e-3, spike_window=2)
FP8 = PrecisionConfig(params_dtype="fp32", fp8_format="hybrid", fp8_recipe="rowwise")
UNCLIPPED: dict[str, Case] = {
    "several micro-batches": CASES["two"],
    "kept": strategy(CASES["two"], reshard_after_forward=False, param_gather_prefetch=0),
    "untied": case(2, replace(MODEL, untie_embeddings_and_output_weights=True)),
    "TP": CASES["two, TP"],
    "experts": CASES["two, experts and TP"],
    "deferred weight gradients": CASES["two, pipeline"],
    "two instances": strategy(case(4), num_distributed_optimizer_instances=2),
    "muon": replace(CASES["two"], optimizer=OptimizerConfig("muon", adam_eps=1e-5)),
    "spikes": replace(CASES["two"], optimizer=SPIKES, steps=5),
    "offloaded": replace(
        CASES["two"],
        optimizer=OptimizerConfig(adam_eps=1e-5, optimizer_cpu_offload=True, optimizer_offload_fraction=0.5),
    ),
    "fp16": replace(CASES["two"], precision=FP16, steps=4),
    "fp8": replace(CASES["two"], precision=FP8),
    **{name: replace(CASES["two"], precision=PrecisionConfig("bf16"), optimizer=o) for name, o in IN_BF16.items()},
    **{
        name: replace(case(2, replace(MODEL, num_layers=5)), training=TrainingConfig(micro_batch_size=1, **values))
        for name, values in RECOMPUTE.items()
    },
}
"""On two ranks that shard a parameter: their sums do not depend on which of them is first."""


@pytest.mark.parametrize("name", one_in(2, UNCLIPPED))
def test_stage_3_changes_no_bit_of_stage_2(pool: Pool, name: str) -> None:
    """Without clipping: the norm is added up in another order, because every block has buckets of its own."""
    chosen = UNCLIPPED[name]
    precision = replace(chosen.precision, params_dtype="fp32") if chosen.precision == FP64 else chosen.precision
    plain = replace(chosen, precision=precision, optimizer=replace(chosen.optimizer, clip_grad=0.0))
    kept = plain.parallel.reshard_after_forward is False
    ours, reference = (
        run_on(pool, strategy(plain, **STAGE_3 if kept else FREED)),
        run_on(pool, strategy(plain, **STAGE_2)),
    )
    assert [s.grad_norm for s in ours] == pytest.approx([s.grad_norm for s in reference], rel=1e-6, nan_ok=True)
    check_same([replace(s, grad_norm=0.0) for s in ours], [replace(s, grad_norm=0.0) for s in reference])
    moved = [not torch.equal(a.weights[WORDS], b.weights[WORDS]) for a, b in zip(ours, ours[1:])]
    assert all(moved) == (name not in ("spikes", "fp16")), "some steps are skipped"
    assert any(moved)


def test_stage_3_on_two_replicas_changes_no_bit_of_one_microbatch(pool: Pool) -> None:
    """Nor of what no replica shards."""
    whole = replace(case(2, SHARED, samples=2), optimizer=OptimizerConfig(adam_eps=1e-5, clip_grad=0.0))
    ours, reference = run_on(pool, strategy(whole, **FREED)), run_on(pool, whole)
    check_same([replace(s, grad_norm=0.0) for s in ours], [replace(s, grad_norm=0.0) for s in reference])


@pytest.mark.parametrize(
    "parallel", [{}, STAGE_1, STAGE_2, STAGE_1 | {"num_distributed_optimizer_instances": 2}], ids=str
)
def test_gradients_that_travel_as_bf16(pool: Pool, parallel: dict[str, Any]) -> None:
    """Every addend is rounded once, to 8 bits; where the sum travels on, it is too. All copies stay the same."""
    rounded = replace(case(4, grad_reduce_in_bf16=True, **parallel), optimizer=OptimizerConfig("sgd"), steps=1)
    steps = run_on(pool, rounded)
    assert [step.drifted for step in steps] == [[]]
    errors = [d.error for d in compare_with_twin(steps, rounded, gradient_floor=1e-2) if d.kind == "gradient"]
    assert 1e-5 < max(errors) < 2 * 2.0**-8


@dataclass
class Watched:
    """Observations of the weights of ZeRO-3 on one rank."""

    # Bytes of whole buffers between steps.
    between: set[int] = field(default_factory=set)
    # Every parameter reads as NaN between steps.
    unreadable: bool = True
    # Blocks in the order of their gathers in a step.
    gathers: list[str] = field(default_factory=list)
    # Largest number of transformer blocks whose weights exist at a time.
    blocks: int = 0
    # Weights inside of ``gathered``, and what the model generates from them.
    weights: dict[str, Tensor] = field(default_factory=dict)
    text: list[list[int]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


def watch(rank: int, size: int, case: Case) -> Watched:
    """Train two steps, evaluate with the average of the weights, generate, and compare copies."""
    config = replace(case.config(), training=replace(case.config().training, eval_iters=1))
    trainer, seen = build_trainer(config, rank, size), Watched()
    store, (chunk,) = trainer.optimizer.weights, trainer.chunks.values()
    block_of = {id(p): ".".join(name.split(".")[:2]) for name, p in trainer.params.items()}
    start = ShardedWeightBuffer.start_gather

    def start_gather(buffer: ShardedWeightBuffer) -> None:
        start(buffer)
        block = block_of[id(buffer.views[0][0])]
        if seen.gathers[-1:] != [block]:
            seen.gathers.append(block)
        whole = {block_of[id(b.views[0][0])] for b in store.buffers if b.whole.untyped_storage().nbytes()}
        seen.blocks = max(seen.blocks, sum(name.startswith("layers.") for name in whole))

    def rest() -> None:
        seen.between |= {buffer.whole.untyped_storage().nbytes() for buffer in store.buffers}
        seen.unreadable &= all(bool(p.detach().isnan().all()) for p in trainer.params.values())

    rest()
    for step in range(2):
        seen.gathers.clear()
        with patch.object(ShardedWeightBuffer, "start_gather", start_gather):
            seen.losses.append(train_step(trainer, batches_of(trainer, case, step), RATES).loss.item())
        rest()
    with part_of(trainer, AverageWeights).in_model():
        seen.losses.append(evaluate(trainer).item())
    rest()
    with store.gathered(chunk.parts):
        seen.weights = {name: p.detach().clone() for name, p in trainer.params.items()}
        chunk.eval()
        seen.text = generate(chunk, [[1, 2, 3], [4]], 8, SamplingParams())
    rest()
    check_weight_copies(trainer)
    rest()
    return seen


LAYERS = 5
WATCHED = replace(
    case(2, replace(MODEL, num_layers=LAYERS), samples=2), optimizer=OptimizerConfig(adam_eps=1e-5, ema_decay=0.5)
)


@pytest.mark.parametrize("recompute", ["nothing", "uniform 2"])
@pytest.mark.parametrize("prefetch", one_in(2, [0, 1, 2]))
def test_weights_exist_around_their_use_only(pool: Pool, prefetch: int, recompute: str) -> None:
    """Two ranks with one micro-batch each: all gathers of the second step, in order, and what is there at a time."""
    training = replace(WATCHED.training, **RECOMPUTED[recompute])
    whole = replace(WATCHED, training=training)
    cut = strategy(whole, **STAGE_3, param_gather_prefetch=prefetch)
    expected = pool.run(2, watch, whole)[0]
    layers = [f"layers.{i}" for i in range(LAYERS)]
    for seen in pool.run(2, watch, cut):
        assert (seen.between, seen.unreadable) == ({0}, True)
        assert seen.losses == pytest.approx(expected.losses, rel=1e-13)
        assert all(torch.allclose(seen.weights[n], w, rtol=1e-11, atol=0.0) for n, w in expected.weights.items())
        assert seen.text == expected.text
        uses = ["embedding.word_embeddings", "embedding.position_embeddings", *layers, "final_layernorm.bias"]
        again = layers[: LAYERS - prefetch]  # the last ones are kept for backward
        assert seen.gathers == [*uses, "embedding.word_embeddings", *reversed(again)]
        assert seen.blocks == max(1 + prefetch, training.recompute_num_layers or 1)
