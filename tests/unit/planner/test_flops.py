"""The FLOP table against torch's count in a real forward and backward, and against explicit formulas."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from megatron.config.model import ModelConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.run import RunConfig
from megatron.config.training import TrainingConfig
from megatron.distributed.grad_accumulator import GradAccumulator
from megatron.layers.adapter_parameters import linear_parts
from megatron.layers.context import BuildContext
from megatron.layers.parameters import gpt
from megatron.model.gpt import build_chunks
from megatron.pipeline.plan import stage_layers
from megatron.planner.flops import (
    FlopsPerToken,
    FlopTable,
    causal_attention_keys,
    flop_table,
    full_attention_keys,
    matmul_parameters,
)
from tests.kit.solo import TINY, Gradients, Solo, one_rank_mesh, random_batch, tiny

SEQ, SAMPLES = 16, 2
PADDED = 104  # 101 entries, to a multiple of 8
FULL = {"recompute_granularity": "full"}
SELECTIVE = {"recompute_granularity": "selective"}

MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gqa": {"num_query_groups": 2},
    "wide heads": {"kv_channels": 24},
    "narrow heads": {"kv_channels": 2, "num_query_groups": 2},
    "gated": {"activation": "swiglu", "ffn_hidden_size": 48},
    "window": {"window_size": 4},
    "no biases": {"add_bias_linear": False},
    "qk norm": {"qk_layernorm": True, "normalization": "RMSNorm"},
    "dropout": {"hidden_dropout": 0.1, "attention_dropout": 0.1},
    "padding": {"vocab_size": 97},
    "multi-token": {"mtp_num_layers": 2, "position_embedding_type": "rope"},
    "one detached layer for further tokens": {"mtp_num_layers": 3, "position_embedding_type": "rope"}
    | {"mtp_use_repeated_layer": True, "mtp_detach_heads": True},
    "llama": {"num_query_groups": 2, "activation": "swiglu", "position_embedding_type": "rope", "kv_channels": 16},
}
NO_BIAS = {"add_bias_linear": False}
EXPERTS: dict[str, dict[str, Any]] = {
    "experts": NO_BIAS | {"num_experts": 4},
    "one of three": NO_BIAS | {"num_experts": 3, "moe_router_topk": 1, "moe_router_pre_softmax": True},
    "all of three": NO_BIAS | {"num_experts": 3, "moe_router_topk": 3},
    "narrow, gated": NO_BIAS | {"num_experts": 8, "moe_ffn_hidden_size": 12, "activation": "swiglu"},
    "shared expert": NO_BIAS | {"num_experts": 4, "moe_shared_expert_intermediate_size": 20},
    "multi-token": NO_BIAS | {"num_experts": 4, "moe_layer_freq": "[0,1]", **MODELS["multi-token"]},
    "gate on the shared expert": NO_BIAS
    | {"num_experts": 4, "moe_shared_expert_intermediate_size": 20, "moe_shared_expert_gate": True},
    "latent": NO_BIAS | {"num_experts": 4, "moe_latent_size": 12, "moe_shared_expert_intermediate_size": 20},
    "losses": NO_BIAS | {"num_experts": 4, "moe_aux_loss_coeff": (0.1,), "moe_z_loss_coeff": 0.1},
}
PLANS: dict[str, dict[str, Any]] = {
    "full": FULL,
    "uniform 2": FULL | {"recompute_method": "uniform", "recompute_num_layers": 2},
    "block 1": FULL | {"recompute_method": "block", "recompute_num_layers": 1},
    "default modules": SELECTIVE,
    **{name: SELECTIVE | {"recompute_modules": (name,)} for name in ("core_attn", "mlp")},
    "all modules": SELECTIVE | {"recompute_modules": ("layernorm", "activation", "core_attn", "mlp")},
    "mlp in chunks": {"mlp_chunk_size": 3},
    "mlp in chunks, all modules": SELECTIVE
    | {"recompute_modules": ("layernorm", "activation", "core_attn", "mlp"), "mlp_chunk_size": 3},
    "mlp in chunks, block 1": FULL | {"recompute_method": "block", "recompute_num_layers": 1, "mlp_chunk_size": 3},
}


def counted(model: ModelConfig, training: TrainingConfig, fused: bool = False) -> float:
    """FLOPs per token that torch counts in the matrix products of a forward and backward.

    Its counter does not know the fused attention kernel of CPUs. So attention runs as matrix products, or the kernel
    is counted here: both products over every key, and twice that in backward. Either way ``keys`` is the whole
    sequence, because neither leaves out what is masked.
    """
    solo, batch = Solo.build(model, torch.float32, training), random_batch(model, SAMPLES, SEQ)
    backends = [SDPBackend.FLASH_ATTENTION if fused else SDPBackend.MATH]
    aten: Any = torch.ops.aten
    kernel = {
        aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, *_, **__: attention_flops(q, k),
        aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda _, q, k, *__, **___: (
            2 * attention_flops(q, k)
        ),
    }
    if model.num_experts is not None:  # a token's weighted sum of its experts is written as a product, and is none
        kernel[aten.bmm] = lambda *_, **__: 0
    with sdpa_kernel(backends), FlopCounterMode(display=False, custom_mapping=kernel) as counter:
        solo.backward([batch])
    return counter.get_total_flops() / (SAMPLES * SEQ)


def attention_flops(q_BNSD: torch.Size, k_BGTD: torch.Size) -> int:
    """Of scores and values."""
    return 2 * 2 * q_BNSD.numel() * k_BGTD[2]


def table_of(model: ModelConfig, training: TrainingConfig) -> FlopTable:
    return flop_table(model, training, [SEQ] * model.num_layers, PADDED)


def expected(model: ModelConfig, training: TrainingConfig) -> float:
    table = table_of(model, training)
    return table.model + table.recomputed


@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS)
def test_flops_of_every_model_switch_match_torch(changes: dict[str, Any]) -> None:
    model = tiny(**changes)
    assert expected(model, TrainingConfig()) == counted(model, TrainingConfig())


@pytest.mark.parametrize("changes", EXPERTS.values(), ids=EXPERTS)
def test_flops_of_experts_match_torch(changes: dict[str, Any]) -> None:
    model = tiny(**changes)
    assert expected(model, TrainingConfig()) == counted(model, TrainingConfig(), fused=True)


def test_frozen_weights_have_two_products() -> None:
    """Torch counts adapter products too, three with A and three with B, but no product that is added in place."""
    model, rank = tiny(num_query_groups=2, activation="swiglu", lora_rank=3), 3
    linears = [spec for name, spec in gpt(model).items() if re.search(r"linear_\w+\.weight", name)]
    narrow = sum(6 * len(linear_parts(spec)) * rank * sum(spec.shape) for spec in linears)
    assert expected(model, TrainingConfig()) == counted(model, TrainingConfig()) - narrow


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_flops_of_every_recompute_plan_match_torch(plan: dict[str, Any], dropout: float) -> None:
    model = tiny(num_layers=3, num_query_groups=2, attention_dropout=dropout, hidden_dropout=dropout)
    training = TrainingConfig(**plan)
    assert expected(model, training) == counted(model, training, fused=True)


SHARED: dict[str, dict[str, Any]] = {
    "pp2 vpp2": {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2},
    "pp4, by cost": {"pipeline_model_parallel_size": 4, "pipeline_model_parallel_layout": "auto"},
    "written out": {"pipeline_model_parallel_size": 3, "pipeline_model_parallel_layout": "Et*3|t|ttL"},
}


@pytest.mark.parametrize("blocks", [None, 2])
@pytest.mark.parametrize("options", SHARED.values(), ids=SHARED)
def test_each_stage_of_a_pipeline_recomputes_its_first_blocks(options: dict[str, Any], blocks: int | None) -> None:
    model, parallel = tiny(num_layers=6), ParallelConfig(**options)
    training = TrainingConfig(**FULL, recompute_method="block", recompute_num_layers=blocks)
    context = BuildContext(one_rank_mesh(), GradAccumulator())
    chunks = build_chunks(model, training, context, dict(enumerate(stage_layers(model, parallel, SEQ))))
    sizes = {name: torch.zeros(spec.local_shape) for name, spec in context.specs.items()}
    context.grad_accumulator.bind(Gradients(sizes))
    batch = random_batch(model, SAMPLES, SEQ)
    x: torch.Tensor | None = None
    with sdpa_kernel([SDPBackend.MATH]), FlopCounterMode(display=False) as counter:
        for chunk in chunks.values():
            x, _ = chunk.train()(x, batch)
        assert x is not None
        x.backward()
    table = flop_table(model, training, [SEQ] * model.num_layers, PADDED, parallel)
    assert table.model + table.recomputed == counter.get_total_flops() / (SAMPLES * SEQ)


def test_weights_of_products_are_the_matrices_that_a_model_holds() -> None:
    model = tiny(num_query_groups=2, activation="swiglu", vocab_size=PADDED)  # tied, no row of padding
    held = Solo.build(model).params
    matrices = {name: p.numel() for name, p in held.items() if p.dim() == 2 and "position" not in name}
    assert matmul_parameters(model) == sum(matrices.values())
    more = replace(model, mtp_num_layers=2, position_embedding_type="rope")
    held = gpt(more)
    matrices = {name: spec.numel for name, spec in held.items() if len(spec.shape) == 2}
    assert matmul_parameters(more) == sum(matrices.values()) + 2 * PADDED * more.hidden_size  # of three predictions


PATTERNS = (
    "global",
    *(f"local:{window}" for window in (1, 4, 100, 256, 5000)),
    *("chunked:1", "chunked:64", "chunked:300", "chunked:5000"),
    *("dilated:1:9", "dilated:16:3", "dilated:5000:7"),
    *("prefix:1", "prefix:100", "prefix:999", "prefix:5000"),
    *("local:16+first:4", "local:16+first:5000", "chunked:64+first:100", "dilated:8:5+first:3"),
    *("local:100+chunked:64", "dilated:8:5+chunked:100", "local:16+prefix:100", "chunked:300+prefix:77+first:200"),
)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_causal_counts_the_keys_that_tokens_see(pattern: str) -> None:
    for seq in (1, 17, 256, 1000):
        model = tiny(attention_pattern=pattern, num_layers=1)
        at = torch.arange(seq)
        seen = model.pattern(0).allows(at[:, None], at).expand(seq, seq).sum(1)
        (mean,), (most,) = causal_attention_keys(model, seq), full_attention_keys(model, seq)
        assert mean == pytest.approx(seen.double().mean().item() - 0.5, rel=1e-12)  # the token itself is half a key
        assert mean <= most
        assert seen.max() <= most


def test_flops_of_layers_follow_their_patterns() -> None:
    model, training = tiny(num_layers=5, attention_pattern="local:8*2,global"), TrainingConfig(seq_length=64)
    one_each = [tiny(num_layers=1, attention_pattern=pattern) for pattern in ("local:8", "global")]
    for keys in (causal_attention_keys, full_attention_keys):
        (local,), (full,) = (keys(each, 64) for each in one_each)
        assert keys(model, 64) == (local, local, full, local, local)
        table = flop_table(model, training, keys(model, 64), PADDED)
        assert [layer["self_attention.scores"].flops for layer in table.layers] == [
            2 * 32 * n for n in (local, local, full, local, local)
        ]
    assert causal_attention_keys(tiny(window_size=8), 64) == causal_attention_keys(one_each[0], 64) * 2


def test_conventions_side_by_side() -> None:
    """Two layers written out: hidden size 32, MLP of 128, 101 entries padded to 64 x TP2."""
    training = TrainingConfig(seq_length=100, **FULL)
    run = RunConfig(
        model=tiny(window_size=10, make_vocab_size_divisible_by=64),
        parallel=ParallelConfig(tensor_model_parallel_size=2),
        training=training,
    )
    flops_per_token = FlopsPerToken.from_config(run)
    layers = 2 * (96 + 32 + 128 + 128) * 32
    assert flops_per_token.full == 6 * (layers + 101 * 32) + 12 * 2 * 32 * 10
    seen = 10 - 10 * 9 / 200 - 0.5  # the first 9 tokens see fewer, and a token is half a key of its own
    assert flops_per_token.causal == pytest.approx(6 * (layers + 101 * 32) + 12 * 2 * 32 * seen, rel=1e-12)
    assert flops_per_token.hardware == flops_per_token.full + 2 * layers + 4 * 2 * 32 * 10
    assert flops_per_token.megatron == 6 * (layers + 128 * 32) + 12 * 2 * 32 * 50


def megatrons(m: ModelConfig, seq: int, padded: int) -> float:
    """Its ``num_floating_point_operations`` per token of a dense model, by projections as it lists them."""
    query, key_value = m.head_dim * m.num_attention_heads, m.head_dim * m.kv_groups
    masked = seq / 2
    attention = m.hidden_size * (query + 2 * key_value) + query * masked + query * masked + query * m.hidden_size
    width = m.ffn
    if m.num_experts:
        width = m.expert_ffn * m.moe_router_topk + (m.moe_shared_expert_intermediate_size or 0)
    return 6 * (m.num_layers * (m.hidden_size * width * (3 if m.gated else 2) + attention) + m.hidden_size * padded)


@pytest.mark.parametrize("name", ["wide heads", "gated", "window", "padding", "shared expert"])
def test_throughput_counts_as_megatron_does(name: str) -> None:
    model = tiny(**(MODELS | EXPERTS)[name])
    run = RunConfig(model=model, training=TrainingConfig(seq_length=64))
    assert FlopsPerToken.from_config(run).megatron == megatrons(model, 64, PADDED)


FORGOTTEN = replace(TINY, num_layers=1, add_bias_linear=False, num_experts=4)


@pytest.mark.parametrize("forgotten", table_of(FORGOTTEN, TrainingConfig()).layers[0])
def test_a_forgotten_product_is_seen(forgotten: str) -> None:
    table = table_of(FORGOTTEN, TrainingConfig())
    rest = table.model - table.cost(table.layers[0][forgotten])
    assert rest < 0.999 * counted(FORGOTTEN, TrainingConfig(), fused=True)
