"""Health of a step: against a dense model written out, and the same on every layout."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.config.optimizer import OptimizerConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.precision import PrecisionConfig
from megatron.config.training import TrainingConfig
from megatron.distributed.sharding import ShardSpec
from megatron.layers.attention import largest_logit
from megatron.training.build import build_trainer
from megatron.training.callbacks import health
from megatron.training.callbacks.health import HealthReport, layer_name
from megatron.training.step import train_step
from tests.distributed.grid import DOCUMENTS, EXPERTS, RECOMPUTE
from tests.distributed.vitals import difference, report
from tests.kit.cases import GLOBAL_BATCH, LR, MODEL, RATES, SEQ_LENGTH, Case, batches_of, global_batch
from tests.kit.pool import Pool

BARE = replace(MODEL, add_bias_linear=False)
ALL = ("grad-norm", "zeros-share", "params-norm", "update-ratio")


# ---- a dense GPT in plain torch


class Dense:
    """GPT-2 as in the paper, from the weights of a chunk that holds all of them; its own gradients and update."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self.w = {name: weight.detach().clone().requires_grad_() for name, weight in weights.items()}
        self.rms: dict[str, float] = {}
        self.logit: dict[str, float] = {}

    def norm(self, x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, (MODEL.hidden_size,), self.w[f"{name}.weight"], self.w[f"{name}.bias"], 1e-5)

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.w[f"{name}.weight"], self.w.get(f"{name}.bias"))

    def attention(self, x_BSH: Tensor, layer: str) -> Tensor:
        b, s, h = x_BSH.shape
        qkv = self.linear(x_BSH, f"{layer}.self_attention.linear_qkv").view(b, s, 4, 3, h // 4)
        q, k, v = (qkv[:, :, :, i].transpose(1, 2) for i in range(3))
        future = torch.ones(s, s, dtype=torch.bool).triu(1)
        scores = (q @ k.transpose(2, 3) / (h // 4) ** 0.5).masked_fill(future, -torch.inf)
        self.logit[layer] = scores.max().item()
        return self.linear((scores.softmax(-1) @ v).transpose(1, 2).flatten(2), f"{layer}.self_attention.linear_proj")

    def loss(self, case: Case) -> Tensor:
        batch = global_batch(case, 0)
        words = self.w["embedding.word_embeddings.weight"]
        x = words[batch.tokens] + self.w["embedding.position_embeddings.weight"][: batch.tokens.shape[1]]
        self.rms["embedding"] = x.square().mean().sqrt().item()
        for i in range(MODEL.num_layers):
            layer = f"layers.{i}"
            x = x + self.attention(self.norm(x, f"{layer}.input_layernorm"), layer)
            inner = F.gelu(
                self.linear(self.norm(x, f"{layer}.pre_mlp_layernorm"), f"{layer}.mlp.linear_fc1"), approximate="tanh"
            )
            x = x + self.linear(inner, f"{layer}.mlp.linear_fc2")
            self.rms[layer] = x.square().mean().sqrt().item()
        logits = self.norm(x, "final_layernorm") @ words.t()
        losses = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="none")
        return (losses * batch.loss_mask.flatten()).sum() / batch.loss_mask.sum()

    def expect(self, case: Case) -> dict[str, float]:
        """Every number of the step."""
        self.loss(case).backward()
        gradients = {name: w.grad.clone() for name, w in self.w.items() if w.grad is not None}
        before = {name: w.detach().clone() for name, w in self.w.items()}
        if case.optimizer.clip_grad:
            torch.nn.utils.clip_grad_norm_(self.w.values(), case.optimizer.clip_grad)
        decayed, others = ([w for w in self.w.values() if (w.ndim > 1) is many] for many in (True, False))
        groups: list[dict[str, Any]] = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0}]
        torch.optim.AdamW(groups, lr=LR, betas=(0.9, case.optimizer.adam_beta2), eps=case.optimizer.adam_eps).step()
        after = {name: w.detach() for name, w in self.w.items()}
        change = {name: after[name] - before[name] for name in after}

        def norm(tensors: dict[str, Tensor], layer: str | None) -> float:
            return math.sqrt(sum(t.square().sum().item() for n, t in tensors.items() if layer in (None, layer_name(n))))

        def zeros(layer: str | None) -> int:
            return sum(int((g == 0).sum()) for n, g in gradients.items() if layer in (None, layer_name(n)))

        def elements(layer: str) -> int:
            return sum(w.numel() for n, w in self.w.items() if layer_name(n) == layer)

        layers = ["embedding", "layers.0", "layers.1", "head"]
        return {
            "health/grad-norm/total": norm(gradients, None),
            "health/update-ratio/total": norm(change, None) / norm(before, None),
            "params-norm": norm(after, None),
            "num-zeros": zeros(None),
            "max_attention_logit": max(self.logit.values()),
            **{f"health/grad-norm/{layer}": norm(gradients, layer) for layer in layers},
            **{f"health/zeros-share/{layer}": zeros(layer) / elements(layer) for layer in layers},
            **{f"health/params-norm/{layer}": norm(after, layer) for layer in layers},
            **{f"health/update-ratio/{layer}": norm(change, layer) / norm(before, layer) for layer in layers},
            **{f"health/activation-rms/{layer}": rms for layer, rms in self.rms.items()},
            **{f"health/attention-logit/{layer}": logit for layer, logit in self.logit.items()},
        }


@pytest.mark.parametrize("clip", [0.0, 0.1])
def test_reports_equal_a_dense_model(clip: float) -> None:
    case = Case(BARE, optimizer=OptimizerConfig(adam_eps=1e-5, clip_grad=clip), steps=1)
    trainer = build_trainer(case.config(), 0, 1)
    weights = {name: p.view(trainer.specs[name].local_shape) for name, p in trainer.params.items()}
    words = "embedding.word_embeddings.weight"
    dense = Dense({**weights, words: weights[words][: case.model.vocab]})
    (record,) = report(0, 1, case)
    assert record == pytest.approx(dense.expect(case), rel=1e-10)


# ---- layouts

GQA = replace(
    BARE,
    num_query_groups=2,
    normalization="RMSNorm",  # k_layernorm.bias would be one more bias of keys
    qk_layernorm=True,
    window_size=5,
    untie_embeddings_and_output_weights=True,
)
PATTERNS = replace(GQA, window_size=None, attention_pattern="chunked:6,local:3+first:2")


def parallel(tp: int, sequence: bool = False) -> ParallelConfig:
    return ParallelConfig(tensor_model_parallel_size=tp, sequence_parallel=sequence)


def pipeline(pp: int, schedule: str | None = None, vpp: int | None = None, **others: Any) -> ParallelConfig:
    return ParallelConfig(
        pipeline_model_parallel_size=pp,
        pipeline_schedule=schedule,
        num_virtual_stages_per_pipeline_rank=vpp,
        **others,
    )


CASES = {
    "dp2": Case(BARE, dp=2, steps=2),
    "dp3, padded": Case(
        replace(BARE, **EXPERTS["balanced"]),
        dp=3,
        samples=5,
        training=TrainingConfig(micro_batch_size=2, pad_global_batch=True),
        steps=2,
    ),
    "tp2": Case(parallel=parallel(2), training=TrainingConfig(micro_batch_size=4), steps=2),
    "tp2, kv copies": Case(replace(GQA, num_query_groups=1), parallel(2), documents=DOCUMENTS["attention"], steps=2),
    "tp2, sequence, dp2, everything recomputed": Case(
        GQA, parallel(2, sequence=True), dp=2, training=TrainingConfig(**RECOMPUTE["uniform 2"]), steps=2
    ),
    "cp3, patterns": Case(PATTERNS, ParallelConfig(context_parallel_size=3), documents=DOCUMENTS["attention"], steps=2),
    "cp4, tp2, sequence": Case(
        GQA,
        replace(
            parallel(2, sequence=True),
            context_parallel_size=4,
            cp_comm_type="a2a+p2p",
            hierarchical_context_parallel_sizes=(2, 2),
        ),
        training=TrainingConfig(micro_batch_size=2),
        steps=2,
    ),
    "pp2": Case(BARE, pipeline(2), steps=2),
    "pp2, patterns": Case(PATTERNS, pipeline(2), documents=DOCUMENTS["attention"], steps=2),
    "pp4, no layer on the first and the last": Case(MODEL, pipeline(4), steps=2),
    "pp2, interleaved, tp2, sequence": Case(
        replace(BARE, num_layers=5),
        pipeline(2, vpp=2, tensor_model_parallel_size=2, sequence_parallel=True),
        training=TrainingConfig(micro_batch_size=2, **RECOMPUTE["uniform 2"]),
        steps=2,
    ),
    "cp2": Case(BARE, ParallelConfig(context_parallel_size=2), steps=2),
    "cp2 by heads, patterns, padded": Case(
        PATTERNS,
        ParallelConfig(context_parallel_size=2, cp_comm_type="a2a"),
        dp=2,
        samples=5,
        training=TrainingConfig(micro_batch_size=2, pad_global_batch=True),
        documents=DOCUMENTS["attention"],
        steps=2,
    ),
    "cp4 by both, patterns, experts": Case(
        replace(PATTERNS, **EXPERTS["balanced"]),
        ParallelConfig(context_parallel_size=4, cp_comm_type="a2a+p2p", hierarchical_context_parallel_sizes=(2, 2)),
        documents=DOCUMENTS["attention"],
        steps=2,
    ),
    "pp2, in a v, dp2": Case(
        replace(GQA, num_layers=4), pipeline(2, "zb-v"), dp=2, documents=DOCUMENTS["attention"], steps=2
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_reports_of_a_layout_equal_one_process(pool: Pool, name: str) -> None:
    case = CASES[name]
    ranks = pool.run(case.world_size, report, case)
    assert all(records == ranks[0] for records in ranks)
    for got, expected in zip(ranks[0], report(0, 1, case.twin()), strict=True):
        assert difference(got, expected, zeros=not case.model.add_bias_linear) < 1e-10


@pytest.mark.parametrize("recompute", ["nothing", "core_attn", "uniform 2"])
def test_each_micro_batch_is_looked_at_once(recompute: str) -> None:
    case = Case(training=TrainingConfig(micro_batch_size=2, **RECOMPUTE[recompute]))
    trainer = build_trainer(case.config(), 0, 1)
    vitals = HealthReport(trainer)
    vitals.on_step_start()
    with patch.object(health, "largest_logit", wraps=largest_logit) as looked:
        metrics = train_step(trainer, batches_of(trainer, case, 0), RATES)
    rows = GLOBAL_BATCH * SEQ_LENGTH * MODEL.hidden_size
    assert vitals.sums[:, health.OUTPUT_ELEMENTS].tolist() == [rows, rows, rows, 0]
    assert looked.call_count == 2 * MODEL.num_layers
    vitals.report(metrics)
    assert not any(module._forward_hooks for module in trainer.chunks[0].modules())


def test_logits_match_the_patterns_and_the_documents() -> None:
    case = Case(PATTERNS, documents=DOCUMENTS["attention"])
    trainer = build_trainer(case.config(), 0, 1)
    batches = batches_of(trainer, case, 0)
    vitals = HealthReport(trainer)
    vitals.on_step_start()
    with patch.object(health, "largest_logit", wraps=largest_logit) as looked:
        vitals.report(train_step(trainer, batches, RATES))
    for at, ((q_SBND, k_SBGD, mask, _), _) in enumerate(looked.call_args_list):
        assert (q_SBND.shape[2], k_SBGD.shape[2]) == (4, 2)
        assert mask.pattern == PATTERNS.pattern(at % PATTERNS.num_layers)
        assert mask.documents is not None
        assert mask.documents is batches[at // PATTERNS.num_layers].documents


def test_bf16_is_near_fp64() -> None:
    case = Case(steps=1)
    (exact,), (rounded,) = (
        report(0, 1, case),
        report(0, 1, replace(case, precision=PrecisionConfig(params_dtype="bf16"))),
    )
    for kind in (*ALL, "activation-rms", "attention-logit"):
        values = {name: value for name, value in exact.items() if name.startswith(f"health/{kind}/layers.")}
        # the gradient of a key bias is 0 but for rounding: an element may be exactly 0
        absolute = 5e-4 if kind == "zeros-share" else None
        assert {name: rounded[name] for name in values} == pytest.approx(values, rel=0.1, abs=absolute)


def every_copy() -> AbstractContextManager[Any]:
    """All ranks count all pieces."""
    return patch.object(ShardSpec, "owned", property(lambda spec: spec.pieces))


def test_a_copy_counted_twice_is_noticed(pool: Pool) -> None:
    case = CASES["tp2"]
    got = pool.run(2, report, case, every_copy)[0][0]
    assert difference(got, report(0, 1, case.twin())[0], zeros=False) > 1e-3


def a_bad_query(rank: int, world_size: int, at: int) -> dict[str, float]:
    """Return a rank's report when the first layer of one has a NaN among its logits."""
    trainer = build_trainer(CASES["tp2"].config(), rank, world_size)
    vitals = HealthReport(trainer)
    vitals.on_step_start()
    metrics = train_step(trainer, batches_of(trainer, CASES["tp2"], 0), RATES)
    if rank == at:
        vitals.logits[vitals.rows["layers.0"]] = math.nan
    return vitals.report(metrics)


def test_a_nan_of_one_rank_is_not_lost(pool: Pool) -> None:
    for record in pool.run(2, a_bad_query, 1):
        assert record["health/attention-logit/layers.0"] == math.inf
        assert math.isfinite(record["health/attention-logit/layers.1"])
