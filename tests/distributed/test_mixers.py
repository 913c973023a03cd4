"""The plugin of docs/mixers.md: layouts, checkpoints, documents, text, forecasts, and refusals."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from megatron.arguments.cli import parse
from megatron.arguments.sources import resolve
from megatron.checkpoint.format import Manifest, whole_box
from megatron.config import plugins
from megatron.config.errors import UserError
from megatron.config.model import ModelConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.training import TrainingConfig
from megatron.convert.saved_model import SavedModel, read_run_config
from megatron.data.loader import MaskBuilder
from megatron.inference.generate import SamplingParams, check_prompts, generate
from megatron.inference.text import InferenceError
from megatron.layers.context import ForwardContext
from megatron.layers.mixers.registry import find_mixer
from megatron.planner.activations import activation_memory, peak_activations
from tests.distributed.mixer_jobs import NAME, changes_in, module_of_the_page, plugin, with_plugin
from tests.distributed.resharding import loading, saving
from tests.distributed.resume import gathered, load_and_go_on, save_and_go_on
from tests.distributed.test_perturbation import context
from tests.distributed.test_perturbation import expected as seen_by
from tests.kit.cases import MODEL, Case, PackedConversations, assert_like_one_process, run_in_small_tiles
from tests.kit.pool import Pool
from tests.kit.solo import Solo, random_batch, tiny
from tests.unit.convert.folders import write_checkpoint
from tests.unit.inference.test_generate import reread
from tests.unit.planner.test_activations import LLAMA, LONG, config_of, measured
from tests.unit.planner.test_flops import counted, expected
from tools.convert_checkpoint import main as convert
from tools.edit_checkpoint import main as edit

PLAIN, MIXED = "L-L-L-L-", "L-*-L-*-"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Iterator[Path]:
    with plugin(tmp_path):
        yield tmp_path


@contextmanager
def without(name: str) -> Iterator[None]:
    """As before the import of a plugin."""
    kinds, module = plugins._registered, sys.modules.pop(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plugins, "_registered", {kind: {} for kind in kinds})
        yield
    sys.modules[name] = module


def test_the_module_is_short() -> None:
    assert len(module_of_the_page().splitlines()) <= 150


def case(
    pattern: str = PLAIN,
    dp: int = 1,
    training: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    documents: MaskBuilder | None = None,
    **parallel: Any,
) -> Case:
    config = replace(MODEL, hybrid_layer_pattern=pattern, normalization="RMSNorm", hidden_dropout=0.1, **(model or {}))
    return Case(
        config, ParallelConfig(**parallel), training=TrainingConfig(**training or {}), dp=dp,
        documents=documents or MaskBuilder(),
    )  # fmt: skip


TP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
FULL = {"recompute_granularity": "full"}
CASES = {
    "tp": case(tensor_model_parallel_size=4),
    "sp, pp, mixed, recomputed": case(
        MIXED,
        training={"recompute_granularity": "selective", "recompute_modules": ("layernorm", "mlp", "core_attn")},
        pipeline_model_parallel_size=2,
        **TP,
    ),
    "cp 4": case(context_parallel_size=4),
    "cp 4, documents, mixed": case(MIXED, documents=PackedConversations(), context_parallel_size=4),
    "cp 2, sp, documents": case(documents=PackedConversations(), context_parallel_size=2, **TP),
    "cp 2, pp": case("L-|*-L-", context_parallel_size=2, pipeline_model_parallel_size=2),
    "a2a, documents, mixed": case(MIXED, documents=PackedConversations(), context_parallel_size=2, cp_comm_type="a2a"),
    "a2a+p2p": case(
        context_parallel_size=4, cp_comm_type="a2a+p2p", hierarchical_context_parallel_sizes=(2, 2), training=FULL
    ),
    "cp 2, zero 3, documents": case(
        dp=2,
        context_parallel_size=2,
        data_parallel_sharding_strategy="optim_grads_params",
        documents=PackedConversations(),
    ),
    "zero 2, recomputed": case(
        MIXED, 2, FULL | {"recompute_num_layers": 2}, data_parallel_sharding_strategy="optim_grads"
    ),
    "lora, sp": case(model={"lora_rank": 2, "lora_target": ("linear_in", "linear_out", "mlp.*")}, **TP),
}


SLOW = ("tp", "cp 4", "cp 2, pp", "a2a+p2p", "zero 2, recomputed")
"""Cases whose parts are in others."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in CASES])
def test_every_layout_computes_the_same(pool: Pool, folder: Path, name: str) -> None:
    one = CASES[name]
    assert_like_one_process(pool.run(one.world_size, with_plugin, folder, run_in_small_tiles, one), one)


def test_a_checkpoint_goes_on_in_another_layout(pool: Pool, folder: Path) -> None:
    layouts = case(MIXED, **TP), case(MIXED, context_parallel_size=2, pipeline_model_parallel_size=2)
    before, after = (each.config() for each in layouts)
    before, after = (
        resolve(replace(each, training=replace(each.training, train_iters=4)), ranks)
        for each, ranks in ((before, 2), (after, 4))
    )
    whole = pool.run(2, with_plugin, folder, save_and_go_on, saving(before, folder))
    other = pool.run(4, with_plugin, folder, load_and_go_on, loading(after, folder))
    saved, loaded = gathered(whole).weights, gathered(other).weights
    assert any("linear_attention.linear_in" in name for name in saved)
    assert saved.keys() == loaded.keys()
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)
    assert other[0].losses == pytest.approx(whole[0].losses, rel=1e-10)


def model(**changes: Any) -> ModelConfig:
    return tiny(hybrid_layer_pattern="L-*-", **changes)


HEADS = (2, "a2a"), (4, "a2a+p2p")
"""Contexts that exchange heads for rows."""


CONTEXTS = [(1, "p2p"), (2, "p2p"), (4, "p2p"), *(pytest.param(*each, marks=pytest.mark.slow) for each in HEADS)]


@pytest.mark.parametrize(("size", "kind"), CONTEXTS)
def test_a_token_changes_later_ones_of_its_document_alone(pool: Pool, folder: Path, size: int, kind: str) -> None:
    found = pool.run(size, with_plugin, folder, changes_in, context(size, kind))
    for what in found[0]:
        assert set().union(*(of_rank[what] for of_rank in found)) == seen_by(*what), what


@pytest.mark.parametrize("chunk", [3, 64])
@pytest.mark.parametrize("documents", [False, True])
def test_chunks_compute_the_recurrence(chunk: int, documents: bool) -> None:
    """The state ``S_t = a_t S_(t-1) + k_t v_t^T``, read by ``q_t``, step by step, and all gradients."""
    module = Solo.build(tiny(token_mixers=("gated-linear",))).chunk.layers["0"].linear_attention
    ids = torch.tensor([[0] * 7 + [1] * 9, [3] * 16])
    batch = random_batch(tiny(), documents=ids if documents else None)
    heads, channels, generator = 4, 8, torch.Generator().manual_seed(1)
    x = torch.randn(16, 2, 3 * heads * channels + heads, dtype=torch.float64, generator=generator, requires_grad=True)
    y = module.attend(x, module.recurrence.rows(ForwardContext(batch, {})).split(chunk))
    q, k, v = (t.unflatten(2, (heads, channels)) for t in x[..., :-heads].chunk(3, 2))
    decay = x[..., -heads:].sigmoid() ** (1 / 16)
    outputs, state = [], torch.zeros(())
    for t in range(16):
        kept = decay[t] * (ids[:, t] == ids[:, t - 1] if documents else torch.ones(2))[:, None]
        state = k[t].unsqueeze(3) * v[t].unsqueeze(2) + (kept[..., None, None] * state if t else 0.0)
        outputs.append((q[t].unsqueeze(2) @ state).flatten(1) / channels**0.5)
    expected = torch.stack(outputs)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    gradients = (torch.autograd.grad(out.sin().sum(), x, retain_graph=True)[0] for out in (y, expected))
    torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("positions", ["rope", "none"])
def test_generation_from_states_matches_rereading(positions: str) -> None:
    chunk = Solo.build(model(position_embedding_type=positions)).chunk
    prompts, greedy = [[5, 6, 7, 8, 9], [1], [3, 2, 1]], SamplingParams(0.0)
    expected = [reread(chunk, prompt, number, greedy) for number, prompt in enumerate(prompts)]
    assert generate(chunk, prompts, 9, greedy) == expected


@pytest.mark.parametrize("more", ["", f"{LLAMA} --token-mixers gated-linear attention --num-layers 3", LONG])
def test_the_forecast_matches_the_tensors_of_a_step(more: str) -> None:
    flags = f"--plugin {NAME} --token-mixers gated-linear {more}"
    (((kept, _), peak),) = measured(0, 1, (flags,))
    (((forward, _)),) = activation_memory(config_of(flags), 1)
    assert kept == pytest.approx(forward.after, rel=0.02)
    (predicted,) = peak_activations(config_of(flags), 1)
    assert peak == pytest.approx(sum(predicted.values()), rel=0.1)


@pytest.mark.parametrize("plan", [{}, {"recompute_granularity": "full"}])
def test_products_match_the_count_of_torch(monkeypatch: pytest.MonkeyPatch, plan: dict[str, Any]) -> None:
    monkeypatch.setattr(sys.modules[NAME], "CHUNK", 8)
    training = TrainingConfig(**plan)
    assert expected(model(), training) == counted(model(), training, fused=True)


def test_features_a_mixer_does_not_support_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    run = "--mock-data --vocab-size 257 --train-iters 9 --seq-length 64 --preset tiny-gpt2"
    with pytest.raises(UserError, match="gated-linear does not divide over TP 3") as raised:
        parse(
            f"{run} --plugin {NAME} --token-mixers gated-linear --tensor-model-parallel-size 3".split(),
            {"RANK": "0", "WORLD_SIZE": "3"},
        )
    assert "E116" in [problem.code for problem in raised.value.problems]
    monkeypatch.setattr(type(find_mixer("gated-linear")), "supports", ())
    words = f"{run} --plugin {NAME} --token-mixers gated-linear --context-parallel-size 2"
    with pytest.raises(UserError, match="gated-linear does not support context parallelism") as raised:
        parse(words.split(), {"RANK": "0", "WORLD_SIZE": "2"})
    assert [problem.code for problem in raised.value.problems] == ["E115"]
    with pytest.raises(UserError, match="does not support documents"):
        parse([*words.split(), "--reset-attention-mask", "--eod-id", "0"], {"RANK": "0", "WORLD_SIZE": "2"})
    with pytest.raises(InferenceError, match="gated-linear does not support generation"):
        check_prompts(model(), [[1]], 1)


def test_programs_read_a_checkpoint_with_the_plugin(
    pool: Pool, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tools name the plugin that is missing; an export names the option that no family has."""
    config = saving(resolve(case(MIXED).config(), 1), folder)
    config = replace(config, compute=replace(config.compute, plugin=(NAME,)))
    pool.run(1, with_plugin, folder, save_and_go_on, config)
    edited = ["--load", str(folder), "--save", str(folder / "edited"), "--cast", "fp32"]
    with without(NAME):
        assert edit(edited) == 1
    assert f"fix: --plugin {NAME}\n" in capsys.readouterr().err
    assert edit([*edited, "--plugin", NAME]) == 0
    assert convert(["--plugin", NAME, "--load", str(folder), "--save-hf", str(folder / "hf"), "--dtype", "fp32"]) == 1
    assert re.search("gated_linear has no .*activation gelu_tanh", capsys.readouterr().err)


class StepByStep(nn.Module):
    """Gated linear attention in place of transformers' attention, token by token."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.heads, self.channels, h = config.num_attention_heads, config.head_dim, config.hidden_size
        self.in_proj = nn.Linear(h, self.heads * (3 * self.channels + 1), bias=False)
        self.out_proj = nn.Linear(self.heads * self.channels, h, bias=False)

    def forward(self, hidden_states: Tensor, **others: Any) -> tuple[Tensor, None]:
        *qkv, gate = self.in_proj(hidden_states).split((*3 * (self.heads * self.channels,), self.heads), 2)
        q, k, v = (t.unflatten(2, (self.heads, self.channels)) for t in qkv)
        state, outputs = torch.zeros(len(q), self.heads, self.channels, self.channels), []
        for t in range(q.shape[1]):
            state = gate[:, t].sigmoid()[..., None, None] ** (1 / 16) * state + k[:, t, :, :, None] * v[:, t, :, None]
            outputs.append((q[:, t, :, None] @ state).flatten(1) / self.channels**0.5)
        return self.out_proj(torch.stack(outputs, 1)), None


class GatedLinearConfig(LlamaConfig):
    model_type = "gated_linear"


class GatedLinearForCausalLM(LlamaForCausalLM):
    config_class = GatedLinearConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer, block in zip(self.model.layers, config.layer_pattern.split("-")):
            if block == "L":
                layer.self_attn = StepByStep(config)


LLAMA_LIKE = {
    "hybrid_layer_pattern": "L-L-*-",
    "add_bias_linear": False,
    "activation": "swiglu",
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "num_query_groups": 2,
    "untie_embeddings_and_output_weights": True,
}


def test_an_export_comes_back_to_the_bit(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And computes what transformers does, once it has classes for the type."""
    saved = write_checkpoint(folder / "run" / "iter_0000007", tiny(**LLAMA_LIKE))
    export = ["--plugin", NAME, "--load", str(folder / "run"), "--save-hf"]
    assert convert([*export, str(folder / "hf")]) == 0
    assert "not compared with transformers" in capsys.readouterr().out
    written = json.loads((folder / "hf" / "config.json").read_text())
    assert (written["model_type"], written["layer_pattern"], written["num_hidden_layers"]) == (
        "gated_linear", "L-L-*-", 3,
    )  # fmt: skip
    assert "4 linear heads of 8" in (folder / "hf" / "README.md").read_text()
    assert convert(["--plugin", NAME, "--load", f"hf:{folder / 'hf'}", "--save", str(folder / "back")]) == 0
    back = Manifest.open(folder / "back" / "iter_0000000")
    assert read_run_config(back).model.layer_pattern == read_run_config(saved).model.layer_pattern
    before, after = SavedModel(saved), SavedModel(back)
    assert before.specs.keys() == after.specs.keys()
    for name, spec in before.specs.items():
        a, b = (each.read(name, spec.view, whole_box(spec.view)) for each in (before, after))
        assert torch.equal(a, b), name
    AutoConfig.register("gated_linear", GatedLinearConfig)
    AutoModelForCausalLM.register(GatedLinearConfig, GatedLinearForCausalLM)
    try:
        assert convert([*export, str(folder / "compared")]) == 0
    finally:
        CONFIG_MAPPING._extra_content.pop("gated_linear")
    assert "transformers computes the same" in capsys.readouterr().out
