"""Layer patterns: every layout, checkpoints and resumed runs of a GPT in both spellings, forecasts, and text."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.arguments.sources import build_config, resolve
from megatron.config.model import ModelConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.text import flag
from megatron.config.training import TrainingConfig
from megatron.inference.generate import SamplingParams, generate
from megatron.planner.activations import activation_memory, peak_activations
from tests.distributed.resharding import loading, saving
from tests.distributed.resume import gathered, load_and_go_on, save_and_go_on
from tests.kit.cases import (
    FP64,
    MODEL,
    Case,
    PackedConversations,
    assert_like_one_process,
    run_in_small_tiles,
    selective,
)
from tests.kit.pool import Pool
from tests.kit.runs import before_step, differences, kill, start, steps, tiny_run
from tests.kit.solo import Solo, random_batch, tiny
from tests.unit.inference.test_generate import reread
from tests.unit.planner.test_activations import LLAMA, LONG, config_of, measured
from tests.unit.planner.test_flops import counted, expected

LATENT = {"kv_lora_rank": 10, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 6, "rope_type": "rope"}
SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
CP = {"context_parallel_size": 2}
EXPERTS = {"num_experts": 4, "moe_ffn_hidden_size": 16, "add_bias_linear": False}


def case(pattern: str, parallel: dict[str, Any], training: dict[str, Any] | None = None, **rest: Any) -> Case:
    """A case of a pattern; its cuts become a layout."""
    of_model = {name: rest.pop(name) for name in [*rest] if name in ModelConfig.__dataclass_fields__}
    experts = EXPERTS if "E" in pattern else {}
    latent = LATENT if "+" in pattern else {"position_embedding_type": "rope"}
    cut = build_config({"hybrid_layer_pattern": pattern}).parallel.pipeline_model_parallel_layout
    model = replace(MODEL, hybrid_layer_pattern=pattern.replace("|", ""), **experts | latent | of_model)
    parallel = parallel | ({"pipeline_model_parallel_layout": cut} if cut else {})
    return Case(model, ParallelConfig(**parallel), training=TrainingConfig(**training or {}), **rest)


def some(cases: Iterable[str], *in_ci: str) -> list[Any]:
    """Names of cases, of which CI runs some."""
    return [name if name in in_ci else pytest.param(name, marks=pytest.mark.slow) for name in cases]


def full(count: int) -> dict[str, Any]:
    return {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": count}


CASES = {
    "tp": case("**--*-", {"tensor_model_parallel_size": 4}),
    "sp, experts": case("**E-E*E-", SP, hidden_dropout=0.1),
    "sp, latent, selective recomputation": case(
        "++E-+-", SP, selective("layernorm", "mlp", "core_attn", "mla_up_proj")
    ),
    "pp, uneven cuts": case("*-*|-*E", {"pipeline_model_parallel_size": 2}),
    "zb-h1, empty first stage": case(
        "|*-**|-", {"pipeline_model_parallel_size": 3, "pipeline_schedule": "zb-h1"}, selective("mlp", "layernorm")
    ),
    "interleaved, further tokens of attention alone": case(
        "*-|*|-*|*E/*", {"pipeline_model_parallel_size": 2}, samples=4
    ),
    "further tokens of other layers, one for all, sp": case("*-*/E*/E*", SP, mtp_use_repeated_layer=True, **EXPERTS),
    "cp, documents, lists of layers": case(
        "**-*--",
        CP,
        documents=PackedConversations(),
        attention_pattern="local:5,global,local:9",
        no_rope_freq="[0,0,1]",
    ),
    "cp and sp, full recomputation": case("*-*--*", {**CP, **SP}, full(3)),
    "zero 3": case("*-*--*E", {"data_parallel_sharding_strategy": "optim_grads_params"}, dp=2),
    "zero 3, offload": case(
        "*-*--*",
        {"data_parallel_sharding_strategy": "optim_grads_params"},
        {"cpu_offloading_num_layers": 3, "min_offloaded_tensor_size": 1},
        dp=2,
    ),
    "experts over ranks": case("*E*-EE", {"expert_model_parallel_size": 2}, dp=2),
    "sandwich": case("*-*--*", SP, layernorm_placement="sandwich", residual_multiplier=0.5, hidden_dropout=0.2),
    "lora": case("*-*--*", SP, lora_rank=2),
    "fp8, first and last in bf16": replace(
        case("*-*-*--*-", {}, hidden_size=32, ffn_hidden_size=64, dp=2),
        precision=replace(FP64, fp8_format="hybrid", fp8_recipe="rowwise", first_last_layers_bf16=True),
    ),
}


IN_CI = (
    *("sp, experts", "pp, uneven cuts", "interleaved, further tokens of attention alone"),
    *("cp, documents, lists of layers", "zero 3", "sandwich"),
)


@pytest.mark.parametrize("name", some(CASES, *IN_CI))
def test_every_layout_computes_the_same(pool: Pool, name: str) -> None:
    one = CASES[name]
    assert_like_one_process(pool.run(one.world_size, run_in_small_tiles, one), one)


@pytest.mark.slow
def test_a_checkpoint_goes_on_in_another_layout(pool: Pool, tmp_path: Path) -> None:
    pattern = "*-**--*"
    cases = case(pattern, SP), case("*-**-|-|*|", {"pipeline_model_parallel_size": 2}, dp=2)
    before, after = (
        resolve(replace(each.config(), training=replace(each.config().training, train_iters=4)), each.world_size)
        for each in cases
    )
    whole = pool.run(2, save_and_go_on, saving(before, tmp_path))
    other = pool.run(4, load_and_go_on, loading(after, tmp_path))
    saved, loaded = gathered(whole).weights, gathered(other).weights
    assert saved.keys() == loaded.keys()
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)
    assert other[0].losses == pytest.approx(whole[0].losses, rel=1e-10)


MAMBA = "--mamba-state-dim 4 --mamba-head-dim 8 --mamba-num-groups 2"
SPELLINGS = {
    "dense": ("*-*-", "--num-layers 2"),
    "experts": ("*-*E", "--num-layers 2 --num-experts 4 --moe-layer-freq [0,1]"),
    "experts, further tokens": ("*E*E/*E", "--num-layers 2 --num-experts 4 --mtp-num-layers 1"),
    "latent": ("+-+-", "--num-layers 2 --multi-latent-attention --kv-lora-rank 8 --rope-type rope"),
    "mamba": ("M-*-", f"--num-layers 2 --token-mixers mamba2 attention {MAMBA}"),
}
"""A pattern, and flags without one for the same."""


SHAPES = ("--num-layers", "--moe-layer-freq", "--mtp-num-layers", "--multi-latent-attention", "--token-mixers")
"""Flags that a pattern replaces."""


@pytest.mark.parametrize("name", some(SPELLINGS, "experts, further tokens"))
def test_a_gpt_is_the_same_in_both_spellings_and_resumes_as_the_other(tmp_path: Path, name: str) -> None:
    pattern, gpt = SPELLINGS[name]
    shared = " ".join(each for each in re.findall(r"--[\w-]+(?: [^-\s]\S*)*", gpt) if not each.startswith(SHAPES))
    flags = {
        "gpt": f"{gpt} --position-embedding-type none",
        "pattern": f"--hybrid-layer-pattern {pattern} {shared}",
    }

    def run(folder: str, spelling: str, stop: int = 0) -> str:
        save = f"--save {tmp_path}/{folder}/saved --save-interval 2 --params-dtype fp64"
        config = tiny_run(tmp_path / folder, f"{save} {flags[spelling]}")
        done = start(config, before_step(stop, kill))
        assert (done.status, done.err) == (None if stop else 0, "")
        return done.out

    run("gpt", "gpt")
    run("pattern", "pattern")
    for folder, first, second in (("there", "gpt", "pattern"), ("back", "pattern", "gpt")):
        run(folder, first, stop=4)
        assert "resumed from" in run(folder, second)
    for folder in ("pattern", "there", "back"):
        ends = (tmp_path / each / "saved/iter_0000006" for each in ("gpt", folder))
        assert differences(*ends) == []
        assert steps(tmp_path / folder) == steps(tmp_path / "gpt")


PATTERNS = {
    "plain": "--hybrid-layer-pattern **-*--",
    "llama": f"{LLAMA} --hybrid-layer-pattern=-*-**",
    "dropout": "--hybrid-layer-pattern **--* --hidden-dropout 0.1",
    "experts": f"{LLAMA} --hybrid-layer-pattern **E-E --num-experts 4 --moe-ffn-hidden-size 24",
    "further tokens": f"{LLAMA} --hybrid-layer-pattern *--*/*",
    "further tokens of an MLP": f"{LLAMA} --hybrid-layer-pattern *-*/-",
    "selective": f"{LLAMA} --hybrid-layer-pattern **--* --recompute-granularity selective "
    "--recompute-modules layernorm mlp",
    "full": f"{LLAMA} --hybrid-layer-pattern **--* --recompute-granularity full --recompute-method block "
    "--recompute-num-layers 2",
    "long": f"{LONG} --hybrid-layer-pattern **--*",
}


@pytest.mark.parametrize("name", some(PATTERNS, "experts", "further tokens of an MLP", "selective"))
def test_the_forecast_matches_the_tensors_of_a_step(name: str) -> None:
    flags = PATTERNS[name]
    (((kept, _), peak),) = measured(0, 1, (flags,))
    ((forward, _),) = activation_memory(config_of(flags), 1)
    assert kept == pytest.approx(forward.after, rel=1e-3)  # numbers such as the loss are not counted
    (predicted,) = peak_activations(config_of(flags), 1)
    assert peak == pytest.approx(sum(predicted.values()), rel=0.1)


@pytest.mark.parametrize("pattern", ["**--*", "-*E*", "*-*/*"])
@pytest.mark.parametrize("plan", [{}, {"recompute_granularity": "full"}])
def test_products_match_the_count_of_torch(pattern: str, plan: dict[str, Any]) -> None:
    model = tiny(hybrid_layer_pattern=pattern, position_embedding_type="none", **EXPERTS if "E" in pattern else {})
    training = TrainingConfig(**plan)
    assert expected(model, training) == counted(model, training, fused=True)


def test_generation_matches_rereading() -> None:
    chunk = Solo.build(tiny(hybrid_layer_pattern="**--*E", position_embedding_type="rope", num_experts=4)).chunk
    prompts, greedy = [[5, 6, 7, 8, 9], [1], [3, 2, 1]], SamplingParams(0.0)
    expected = [reread(chunk, prompt, number, greedy) for number, prompt in enumerate(prompts)]
    assert generate(chunk, prompts, 9, greedy) == expected


@pytest.mark.parametrize(
    ("pattern", "gpt"),
    [
        ("*-*-", {"num_layers": 2}),
        ("*E*-*E", {"num_layers": 3, "num_experts": 4, "moe_layer_freq": "2"}),
        ("*-*-/*-", {"num_layers": 2, "mtp_num_layers": 1}),
        ("+-+-", {"num_layers": 2, "multi_latent_attention": True, **LATENT}),
    ],
)
def test_blocks_of_a_pattern_are_those_of_a_gpt_to_the_bit(pattern: str, gpt: dict[str, Any]) -> None:
    """Of the models themselves: a run stores the pattern of a GPT as a GPT."""
    shared = {name: value for name, value in gpt.items() if flag(name) not in SHAPES}
    models = (
        tiny(**gpt, position_embedding_type="none"),
        tiny(hybrid_layer_pattern=pattern, **shared, position_embedding_type="none"),
    )
    batch = random_batch(models[0])
    (losses, gradients), others = ((solo.backward([batch]), solo.snapshot()) for solo in map(Solo.build, models))
    assert (losses, gradients.keys()) == (others[0], others[1].keys())
    assert len(gradients) > 20
    assert all(torch.equal(gradient, others[1][name]) for name, gradient in gradients.items())
