"""Multi-token prediction in every layout."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from megatron.arguments.sources import resolve
from megatron.config.model import ModelConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.training import TrainingConfig
from megatron.data.loader import MaskBuilder
from megatron.kernels import block_attention
from megatron.pipeline.plan import resolve_pipeline
from megatron.training.build import build_trainer
from megatron.training.step import train_step
from tests.distributed.resharding import loading, saving
from tests.distributed.resume import gathered, load_and_go_on, save_and_go_on
from tests.kit.cases import MODEL, RATES, Case, PackedConversations, batch_of, batches_of, compare_with_twin, evaluation
from tests.kit.pool import Pool
from tests.kit.runs import column, start, tiny_run
from tests.kit.short import one_in
from tools.lib.verify_parallel import RankTrace, join_traces, trace_step

EOD = 7
DOCUMENTS = MaskBuilder(eod=EOD, reset_positions=True, reset_attention=True)
ROPE = replace(MODEL, position_embedding_type="rope", normalization="RMSNorm")


def case(
    model: dict[str, Any] | None = None, dp: int = 1, training: dict[str, Any] | None = None, **parallel: Any
) -> Case:
    changed: ModelConfig = replace(ROPE, **({"mtp_num_layers": 2} | (model or {})))
    layout = resolve_pipeline(changed, ParallelConfig(**parallel))
    return Case(changed, layout, training=TrainingConfig(**training or {}), dp=dp)


TP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP = {"pipeline_model_parallel_size": 2}
UNTIED = {"untie_embeddings_and_output_weights": True}
SHARDED = {"data_parallel_sharding_strategy": "optim_grads_params"}
EXPERTS = {
    "num_experts": 4,
    "moe_layer_freq": "[0,1]",
    "add_bias_linear": False,
    "activation": "swiglu",
    "moe_router_load_balancing_type": ("seq_aux_loss", "global_aux_loss"),
    "moe_aux_loss_coeff": (0.1, 0.1),
    "moe_z_loss_coeff": 0.1,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}
LATENT = {
    "multi_latent_attention": True,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,
}
REPEATED = {"mtp_use_repeated_layer": True, "mtp_num_layers": 3}
DETACHED = {"mtp_detach_heads": True}
MODULES = {"recompute_granularity": "selective", "recompute_modules": ("layernorm", "mlp", "core_attn")}
SCALED = {
    "final_logit_softcapping": 3.0,
    "logits_scaling": 2.0,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "layernorm_placement": "sandwich",
    "parallel_attention": True,
    "z_loss_coeff": 0.1,
}
PLAIN = {"position_embedding_type": "none", "normalization": "LayerNorm", "mtp_num_layers": 1}
LOCAL = {"attention_pattern": "global,local:3", "rotary_base_local": 100.0, "num_layers": 3}
CASES = {
    "tp, dropout": case({"hidden_dropout": 0.1}, tensor_model_parallel_size=2),
    "tp, sp, scaled": case(SCALED, **TP),
    "pp, tied, offload": case({}, 1, {"cpu_offloading_num_layers": 1, "min_offloaded_tensor_size": 1}, **PP),
    "pp, untied, zb": case(UNTIED, **PP, pipeline_schedule="zb-h1"),
    "vpp, dropout": case({"num_layers": 4, "hidden_dropout": 0.1}, **PP, num_virtual_stages_per_pipeline_rank=2),
    "both ends on a rank, tied": case({"num_layers": 4}, **PP, pipeline_schedule="zb-v"),
    "both ends on a rank, untied": case(UNTIED | {"num_layers": 4}, **PP, pipeline_schedule="dualpipe-v"),
    "a stage of their own": case(UNTIED, **PP, pipeline_model_parallel_layout="Ett|mmL"),
    "one, without positions": case(PLAIN, **PP),
    "dp, micro-batches": case(dp=2),
    "dp, padded": replace(case({}, 2, {"pad_global_batch": True, "micro_batch_size": 2}), samples=5),
    "cp, p2p": case(context_parallel_size=2),
    "cp, a2a, documents": replace(case(context_parallel_size=2, cp_comm_type="a2a"), documents=DOCUMENTS),
    "cp, all-gather, conversations": replace(
        case(context_parallel_size=2, cp_comm_type="all_gather"), documents=PackedConversations()
    ),
    "sp, cp, pp, windows": case(LOCAL, context_parallel_size=2, **PP, **TP),
    "zero 3, untied": case(UNTIED, 2, **SHARDED, param_gather_prefetch=0),
    "zero 3, tied, recomputed": case({}, 2, {"recompute_granularity": "full"}, **SHARDED),
    "zero 3, pp": case(UNTIED, 2, **SHARDED, **PP),
    "zero 2, recomputed, documents": replace(
        case({}, 2, MODULES, data_parallel_sharding_strategy="optim_grads"), documents=DOCUMENTS
    ),
    "experts, recomputed": case(EXPERTS, 2, {"recompute_granularity": "full"}, expert_model_parallel_size=2),
    "latent attention, cp, experts, pp": case(LATENT | EXPERTS, context_parallel_size=2, **PP),
    "experts, etp, pp": case(EXPERTS, 2, expert_model_parallel_size=2, **PP, **TP),
    "one layer, tp, sp, dropout": case(REPEATED | {"hidden_dropout": 0.1}, 1, {"mlp_chunk_size": 4}, **TP),
    "one layer, untied, zb, a stage of its own": case(
        REPEATED | UNTIED, **PP, pipeline_schedule="zb-h1", pipeline_model_parallel_layout="Ett|mmmL"
    ),
    "one layer, zero 3": case(REPEATED | UNTIED, 2, **SHARDED),
    "one layer, zero 3, recomputed": case(REPEATED, 2, {"recompute_granularity": "full"}, **SHARDED),
    "one layer, detached, experts, zero 2, recomputed": case(
        REPEATED | DETACHED | EXPERTS,
        2,
        MODULES,
        expert_model_parallel_size=2,
        data_parallel_sharding_strategy="optim_grads",
    ),
    "detached, untied, zero 3, pp": case(DETACHED | UNTIED, 2, **SHARDED, **PP),
    "detached, untied, zero 2, pp": case(DETACHED | UNTIED, 2, **PP, data_parallel_sharding_strategy="optim_grads"),
    "detached, tied, cp, recomputed": case(
        DETACHED, 1, {"recompute_granularity": "full"}, context_parallel_size=2, cp_comm_type="a2a"
    ),
    "detached, both ends on a rank": case(DETACHED | {"num_layers": 4}, **PP, pipeline_schedule="zb-v"),
}


def steps_of(rank: int, ranks: int, one: Case) -> list[tuple[RankTrace, dict[str, float]]]:
    """Train on this rank; return of each step its trace, and the losses of the depths."""
    with patch.multiple(block_attention, BLOCK=8, UNFUSED_BLOCK=8):  # several tiles
        trainer, steps = build_trainer(one.config(), rank, ranks), []
        for step in range(one.steps):
            metrics = train_step(trainer, trainer.complete(batches_of(trainer, one, step)), RATES)
            steps.append((trace_step(trainer, metrics), {name: x.item() for name, x in metrics.extra.items()}))
    return steps


@cache
def alone(twin: Case) -> list[tuple[RankTrace, dict[str, float]]]:
    return steps_of(0, 1, twin)


SLOW = (
    "tp, dropout",
    "pp, untied, zb",
    "a stage of their own",
    "cp, p2p",
    "zero 3, untied",
    "experts, recomputed",
    "one layer, zero 3",
    "one layer, zero 3, recomputed",
    "detached, untied, zero 3, pp",
    "detached, untied, zero 2, pp",
    "detached, both ends on a rank",
)
"""Cases whose features others have, too."""


@pytest.mark.parametrize("name", one_in(2, CASES, SLOW))
def test_every_layout_computes_the_same(pool: Pool, name: str) -> None:
    one = CASES[name]
    ranks = pool.run(one.world_size, steps_of, one)
    deviations = compare_with_twin([join_traces([trace for trace, _ in step]) for step in zip(*ranks)], one)
    assert any(deviation.name.startswith("mtp.layers.0.mtp_model_layer") for deviation in deviations)
    for deviation in deviations:
        assert deviation.error <= 1e-10, deviation
    for step, (_, expected) in zip(zip(*ranks), alone(one.twin()), strict=True):
        assert sum("mtp loss" in each for each in expected) == one.model.mtp_num_layers
        assert all(losses == pytest.approx(expected, rel=1e-10) for _, losses in step)


def seen(rank: int, ranks: int, given: tuple[Case, list[Tensor]]) -> list[list[tuple[Tensor, Tensor, Tensor, Tensor]]]:
    """Return for each set of samples, by depth, positions, hidden states, labels and masks of this rank."""
    one, samples = given
    trainer, calls = build_trainer(one.config(), rank, ranks), list[Any]()
    (chunk,) = trainer.chunks.values()
    assert chunk.output_layer is not None
    chunk.output_layer.register_forward_pre_hook(lambda _, inputs: calls.append(inputs[:3]))
    chunk.train()
    cp, found = trainer.reader.cp, []
    rows = (range(one.length),) if cp is None else cp.rows(one.length)
    positions = torch.tensor([i for part in rows for i in part])
    for ids in samples:
        batches = batches_of(trainer, one, 0, batch_of(one, ids, torch.ones(ids[:, 1:].shape)))
        calls.clear()
        with torch.no_grad():
            chunk(None, trainer.complete(batches)[0])
        states = [(x.transpose(0, 1).clone(), labels.clone(), mask > 0) for x, labels, mask in calls]
        found.append([(positions, *each) for each in states])
    return found


SEEN = {
    "alone": (1, {}),
    "cp, p2p": (2, {"context_parallel_size": 2}),
    "cp, a2a": (2, {"context_parallel_size": 2, "cp_comm_type": "a2a"}),
}


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("name", one_in(2, SEEN))
def test_a_token_changes_the_predictions_that_see_it(pool: Pool, name: str, documents: bool) -> None:
    """Of depth k at position i: those with the token among ``t_0 .. t_{i+k}`` of their document, or as the label."""
    ranks, parallel = SEEN[name]
    one = replace(case({"num_layers": 1}, **parallel), samples=1, length=16)
    ids = torch.randint(EOD + 1, one.model.vocab, (1, 17), generator=torch.Generator().manual_seed(0))
    if documents:
        one, ids[0, [4, 10]] = replace(one, documents=DOCUMENTS), EOD
    document = [ids[0, :i].tolist().count(EOD) for i in range(17)]
    places = [j for j in range(17) if ids[0, j] != EOD]
    changed = [ids.where(torch.arange(17) != j, EOD + 1 + ids % 90) for j in places]
    found = pool.run(ranks, seen, (one, [ids, *changed]))
    for before, *others in found:
        counted = 0
        for j, after in zip(places, others, strict=True):
            for k, (old, new) in enumerate(zip(before, after, strict=True)):
                positions, states, labels, mask = old
                assert torch.equal(mask, new[3])
                for row, i in enumerate(positions.tolist()):
                    if not mask[0, row]:
                        continue
                    counted += 1
                    sees = j <= i + k and document[j] == document[i]
                    assert torch.equal(states[0, row], new[1][0, row]) != sees, (j, k, i)
                    assert bool(labels[0, row] != new[2][0, row]) == (j == i + k + 1)
        assert counted > 100
    for k in range(3):  # all predictions whose label is in the sample and, of a depth, in the document count
        expected = {i for i in range(16 - k) if k == 0 or document[i + k + 1] == document[i]}
        of_ranks = [before[k] for before, *_ in found]
        assert expected == {i for at, _, _, mask in of_ranks for i in at[mask[0]].tolist()}


def test_a_checkpoint_goes_on_in_another_layout(pool: Pool, tmp_path: Path) -> None:
    last = {"pipeline_model_parallel_layout": "Ett|mmL"}
    before, after = (each.config() for each in (case(UNTIED, **TP), case(UNTIED, 2, **PP, **last)))
    before, after = (
        resolve(replace(each, training=replace(each.training, train_iters=4)), ranks)
        for each, ranks in ((before, 2), (after, 4))
    )
    whole = pool.run(2, save_and_go_on, saving(before, tmp_path))
    other = pool.run(4, load_and_go_on, loading(after, tmp_path))
    saved, loaded = gathered(whole).weights, gathered(other).weights
    assert "mtp.layers.1.mtp_model_layer.mlp.linear_fc2.weight" in saved
    assert saved.keys() == loaded.keys()
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)
    assert other[0].losses == pytest.approx(whole[0].losses, rel=1e-10)


def test_evaluation_does_without_the_heads(pool: Pool) -> None:
    """The loss of the same weights; before a step, in which the heads change them."""
    with_heads = case(UNTIED, **PP)
    without = replace(with_heads, model=replace(with_heads.model, mtp_num_layers=None))
    (one, _), *_ = pool.run(2, evaluation, with_heads)
    (other, _), *_ = pool.run(2, evaluation, without)
    assert one == pytest.approx(other, rel=1e-13)


@pytest.mark.parametrize("more", [pytest.param("", marks=pytest.mark.slow), "--lora-rank 2"])
def test_a_model_is_tuned_without_its_heads(tmp_path: Path, more: str) -> None:
    """At a learning rate near 0, the validation loss is that of the model."""
    flags = "--position-embedding-type rope --eval-interval 6 --eval-iters 2 --split 80,20,0"
    model, tuned = tmp_path / "model", tmp_path / "tuned"
    start(tiny_run(model, f"{flags} --mtp-num-layers 2 --save {model}/saved --save-interval 6"))
    start(tiny_run(tuned, f"{flags} --lr 1e-30 --pretrained-checkpoint {model}/saved {more}"))
    losses = [column(folder, "lm loss validation", "lm loss validation")[-1] for folder in (model, tuned)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
