"""Gated DeltaNet in every layout, and from its state."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from megatron.config.model import ModelConfig
from megatron.config.optimizer import OptimizerConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.training import TrainingConfig
from megatron.inference.generate import SamplingParams, generate
from megatron.kernels.registry import Kernels
from megatron.layers.kv_cache import KVCache
from megatron.planner.activations import activation_memory, peak_activations
from megatron.planner.flops import FlopsPerToken
from tests.kit.cases import MODEL, Case, PackedConversations, assert_like_one_process, run_in_small_tiles, selective
from tests.kit.cases import context_parallel as cp
from tests.kit.pool import Pool
from tests.kit.solo import Solo, random_batch, tiny
from tests.unit.inference.test_generate import reread
from tests.unit.planner.test_activations import LONG, config_of, measured
from tests.unit.planner.test_flops import expected

DELTA: dict[str, Any] = {
    "token_mixers": ("gated-delta-net",),
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
}
MIXED: dict[str, Any] = {"token_mixers": ("gated-delta-net", "attention"), "position_embedding_type": "rope"}
SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
FULL = {"recompute_granularity": "full", "recompute_num_layers": 2}
PACKED = PackedConversations()


def case(
    parallel: dict[str, Any], model: dict[str, Any] | None = None, training: dict[str, Any] | None = None, **rest: Any
) -> Case:
    delta = replace(MODEL, **DELTA | (model or {}))
    return Case(delta, ParallelConfig(**parallel), training=TrainingConfig(**training or {}), **rest)


CASES = {
    "tp": case({"tensor_model_parallel_size": 4}),
    "sp, documents": case(SP, MIXED, documents=PACKED),
    "p2p 4, documents": case(cp("p2p", ranks=4), documents=PACKED),
    "a2a+p2p, documents": case(cp("a2a+p2p", 2, 2, ranks=4), documents=PACKED),
}


def all_layouts() -> dict[str, Case]:
    """Every method of context parallelism with every tensor layout, documents or not, and other parallelism beside."""
    contexts = {
        "cp 1": {},
        **{f"{method} {ranks}": cp(method, ranks=ranks) for method in ("p2p", "all_gather", "a2a") for ranks in (2, 4)},
        "p2p 3": cp("p2p", ranks=3),
        "a2a+p2p": cp("a2a+p2p", 2, 2, ranks=4),
    }
    tensors = {"": {}, "tp": {"tensor_model_parallel_size": 2}, "sp": SP}
    kinds = {"": {}, "documents": {"documents": PACKED}}
    found = {
        f"{context}, {tensor}, {kind}": case(
            contexts[context] | tensors[tensor], MIXED | {"num_attention_heads": 8}, **kinds[kind]
        )
        for context, tensor, kind in product(contexts, tensors, kinds)
    }
    beside = {
        "pipeline": {"pipeline_model_parallel_size": 2, "pipeline_schedule": "1f1b"},
        "zb-h1": {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zb-h1"},
        "zero 1": {"use_distributed_optimizer": True},
        "zero 2": {"data_parallel_sharding_strategy": "optim_grads"},
        "zero 3": {"data_parallel_sharding_strategy": "optim_grads_params"},
    }
    for name, parallel in beside.items():
        for context in ("cp 1", "p2p 2", "a2a 2"):
            rest = {"dp": 2} if "zero" in name else {}
            found[f"{name}, {context}"] = case(contexts[context] | parallel, training=FULL, documents=PACKED, **rest)
    for name, training in {"full": FULL, "layernorm": selective("layernorm", "mlp", "core_attn")}.items():
        for context in ("cp 1", "p2p 4", "a2a 2"):
            found[f"{name}, {context}, sp"] = case(contexts[context] | SP, MIXED, training, documents=PACKED)
    offload = selective("layernorm", cpu_offloading_num_layers=1, min_offloaded_tensor_size=1)
    one_head = {"linear_num_key_heads": 1, "linear_num_value_heads": 4}
    found |= {
        "offload": case(SP, {}, offload),
        "one key head, a2a 4": case(contexts["a2a 4"], one_head, documents=PACKED),
        "one key head, a2a+p2p": case(contexts["a2a+p2p"], one_head),
        "long convolution": case(contexts["p2p 4"], {"linear_conv_kernel_dim": 9}, documents=PACKED),
        "no convolution": case(contexts["p2p 2"], {"linear_conv_kernel_dim": 1}),
        "lora": case(SP, {"lora_rank": 2, "lora_target": ("linear_in", "linear_out")}),
        "dora": case(SP, {"lora_rank": 2, "lora_dora": True}),
        "muon": case({"tensor_model_parallel_size": 4}, optimizer=OptimizerConfig(optimizer="muon", adam_eps=1e-5)),
        "experts": case(SP, {"num_experts": 4, "moe_router_topk": 2}),
        "layers": case(
            {"pipeline_model_parallel_size": 2},
            {
                "token_mixers": ("attention",),
                "num_layers": 4,
                "experimental_attention_variant": "gdn",
                "linear_attention_freq": "2",
            },
        ),
        "pattern": case(SP, {"token_mixers": ("attention",), "hybrid_layer_pattern": "G-GE*-", "num_experts": 4}),
    }
    return found


SLOW = all_layouts()


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_every_layout_computes_the_same(pool: Pool, name: str) -> None:
    one = CASES.get(name) or SLOW[name]
    assert_like_one_process(pool.run(one.world_size, run_in_small_tiles, one), one)


def delta(**changes: Any) -> ModelConfig:
    return tiny(**DELTA | changes)


GENERATED = {
    "alone": delta(linear_num_key_heads=2),
    "beside attention": delta(**MIXED, num_query_groups=2, linear_conv_kernel_dim=3),
    "beside latent attention": delta(
        token_mixers=("latent-attention", "gated-delta-net"), kv_lora_rank=8, qk_head_dim=8, qk_pos_emb_head_dim=4
    ),
}


@pytest.mark.parametrize("name", GENERATED)
def test_text_from_the_state_is_that_of_reading_again(name: str) -> None:
    """Of prompts of different lengths, which begin with padding, and of tokens that are read in parts."""
    chunk = Solo.build(GENERATED[name]).chunk
    prompts, greedy = [[5, 6, 7, 8, 9], [1], [3, 2, 1]], SamplingParams(0.0)
    expected = [reread(chunk, prompt, number, greedy) for number, prompt in enumerate(prompts)]
    assert generate(chunk, prompts, 9, greedy) == expected
    cache, tokens = KVCache(12), torch.arange(24).view(2, 12)
    parts = [chunk.logits(part, cache) for part in tokens.split((6, 1, 2, 3), dim=1)]
    torch.testing.assert_close(torch.cat(parts), chunk.logits(tokens), rtol=1e-11, atol=1e-11)
    sizes = [state.shape[1:].numel() for name, state in cache.states.items() if "gated_delta_net" in name]
    assert {*sizes} <= {8 * 6 * 5, *((width - 1) * (2 * keys * 6 + 8 * 5) for width in (3, 4) for keys in (2, 4))}
    assert sizes, "the state and the last rows are kept, whatever the number of tokens"


HEADS = "--linear-key-head-dim 8 --linear-value-head-dim 8 --linear-num-key-heads 2 --linear-num-value-heads 4"
FLAGS = f"--token-mixers gated-delta-net --normalization RMSNorm --disable-bias-linear {HEADS}"
WIDE = "--linear-key-head-dim 32 --linear-value-head-dim 64 --linear-num-value-heads 4"
FORECAST = [
    FLAGS,
    f"{FLAGS} --reset-attention-mask --recompute-granularity selective --recompute-modules layernorm",
    f"{FLAGS} --linear-conv-kernel-dim 2 --bf16",
    pytest.param(f"{LONG} {FLAGS} {WIDE} --mlp-chunk-size 100", marks=pytest.mark.slow),
    pytest.param(f"{LONG} {FLAGS} {WIDE} --mlp-chunk-size 100 --reset-attention-mask --bf16", marks=pytest.mark.slow),
    pytest.param(f"{LONG} {FLAGS} {WIDE} --mlp-chunk-size 100 --seq-length 4096", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("flags", FORECAST)
def test_the_forecast_matches_the_tensors_of_a_step(flags: str) -> None:
    (((kept, _), peak),) = measured(0, 1, (flags,))
    (((forward, _)),) = activation_memory(config_of(flags), 1)
    assert kept == pytest.approx(forward.after, rel=1e-4)
    (predicted,) = peak_activations(config_of(flags), 1)
    assert peak == pytest.approx(sum(predicted.values()), rel=0.1)


def by_products(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, *others: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The recurrence, each of its products of a state as one of matrices."""
    copies = v.shape[2] // k.shape[2]
    q, k = (F.normalize(t, dim=3).repeat_interleave(copies, 2).unsqueeze(3) for t in (q, k))
    state, outputs = v.new_zeros(len(v), v.shape[2], k.shape[4], v.shape[3], requires_grad=True), []
    now: Tensor = state
    for t in range(v.shape[1]):
        now = now * log_decay[:, t, :, None, None].exp()
        change = beta[:, t, :, None, None] * (v[:, t].unsqueeze(2) - k[:, t] @ now)
        now = now + k[:, t].mT @ change
        outputs.append(q[:, t] @ now)
    return torch.cat(outputs, 2).transpose(1, 2), now


def test_products_match_the_count_of_torch() -> None:
    config = delta(**MIXED)
    solo, batch = Solo.build(config, kernels=Kernels(gated_delta_rule=by_products)), random_batch(config, 2, 16)
    with sdpa_kernel([SDPBackend.MATH]), FlopCounterMode(display=False) as counter:
        solo.backward([batch])
    assert counter.get_total_flops() / 32 == expected(config, TrainingConfig())


def test_megatron_lm_counts_square_states_and_the_convolution() -> None:
    """Of a layer its linears, W multiplications for each channel, and four squares of the value channels for a head."""
    mixers = f"{FLAGS} --linear-key-head-dim 4"
    ours, theirs = (FlopsPerToken.from_config(config_of(flags)) for flags in (mixers, f"{mixers} --num-layers 3"))
    keys, values, heads, hidden, mlp = 2 * 4, 4 * 8, 4, 32, 2 * 128
    linears = hidden * (2 * keys + 2 * values + 2 * heads) + values * hidden + hidden * mlp
    rule, convolution = heads * 8**2 * 4, 4 * (2 * keys + values)
    assert theirs.megatron - ours.megatron == 6 * (linears + rule + convolution)
    assert theirs.full - ours.full == 6 * (linears + 3 * heads * 4 * 8)
