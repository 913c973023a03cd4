"""Adapters in PEFT's format: the logits of PEFT's model, merged and not, and files that are equal there and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from megatron.checkpoint.format import Manifest, whole_box
from megatron.config.training import TrainingConfig
from megatron.convert.saved_model import SavedModel
from megatron.convert.sources import open_saved
from megatron.convert.weight_source import fill_weights
from megatron.distributed.grad_accumulator import GradAccumulator
from megatron.distributed.sharding import Box
from megatron.evaluation.load import open_pretrained
from megatron.layers.context import BuildContext
from megatron.model.gpt import build_gpt
from tests.kit.solo import one_rank_mesh
from tests.parity.families import everything_in_double
from tests.unit.convert.folders import write_adapters
from tools.convert_checkpoint import main as convert
from tools.edit_checkpoint import main as edit

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 24, "vocab_size": 61}
GROUPED = {**SIZES, "num_key_value_heads": 2, "intermediate_size": 20, "pad_token_id": None}
GPT2 = {"n_layer": 2, "n_head": 4, "n_embd": 24, "vocab_size": 61, "n_positions": 32}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": GROUPED,
    "Qwen2": GROUPED,
    "Phi3": GROUPED,
    "GPTNeoX": {**SIZES, "hidden_size": 32, "intermediate_size": 20},
    "GPT2": GPT2,
}
"""A family of transformers -> keys of its config.json."""

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "all": ("Llama", {"target_modules": "all-linear"}),
    "queries and values": ("Llama", {"target_modules": ["q_proj", "v_proj"], "lora_alpha": 7}),
    "DoRA of a part": ("Llama", {"target_modules": ["k_proj", "up_proj", "o_proj"], "use_dora": True}),
    "ranks": (
        "Qwen2",
        {"target_modules": ["q_proj", "k_proj"], "rank_pattern": {"k_proj": 2, "^model.layers.0.self_attn.q_proj": 5}},
    ),
    "alphas": ("Qwen2", {"target_modules": ["gate_proj", "o_proj"], "alpha_pattern": {"gate_proj": 20}}),
    "rank-stabilised": ("Qwen2", {"target_modules": "all-linear", "use_rslora": True, "use_dora": True}),
    "one layer": ("Llama", {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [1]}),
    "fused": ("Phi3", {"target_modules": ["qkv_proj", "gate_up_proj", "down_proj"]}),
    "fused DoRA": ("Phi3", {"target_modules": "all-linear", "use_dora": True}),
    "interleaved": ("GPTNeoX", {"target_modules": ["query_key_value", "dense_h_to_4h"]}),
    "interleaved DoRA": ("GPTNeoX", {"target_modules": "all-linear", "use_dora": True}),
    "transposed": ("GPT2", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "transposed DoRA": ("GPT2", {"target_modules": ["attn.c_proj", "c_fc"], "fan_in_fan_out": True, "use_dora": True}),
}
"""Cases: a family of transformers, and options of PEFT."""


QUICK = {"all", "ranks", "fused", "interleaved DoRA", "transposed", "interleaved", "Phi3-lora", "Llama-dora"}
"""Cases of each arrangement of weights, scale and kind of adapter; the others are slow."""


def cases(*names: str) -> list[Any]:
    return [pytest.param(n, id=n, marks=() if n in QUICK else pytest.mark.slow) for n in names]


def randomise(model: nn.Module, only: str = "") -> None:
    for name, parameter in model.named_parameters():
        if only in name:
            parameter.data += 0.2 * torch.randn_like(parameter)


def make_base(folder: Path, family: str) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(use_cache=False, **MODELS[family])
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    randomise(model)
    model.save_pretrained(folder)
    return model


def make_adapter(tmp_path: Path, case: str) -> None:
    """A folder ``hf`` with a model, and a folder ``peft`` with an adapter."""
    family, options = CASES[case]
    options = {"r": 3, "lora_alpha": 6, "task_type": "CAUSAL_LM", **options}
    adapted = peft.get_peft_model(make_base(tmp_path / "hf", family), peft.LoraConfig(**options))
    randomise(adapted, only="lora_")
    adapted.save_pretrained(tmp_path / "peft")


def logits_of_peft(hf: Path, adapter: Path) -> Tensor:
    """The logits of PEFT in fp64, from files."""
    weights = transformers.AutoModelForCausalLM.from_pretrained(hf).state_dict()
    adapters = load_file(adapter / "adapter_model.safetensors")
    with everything_in_double(), torch.no_grad():  # in which neither of the packages reads files
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(hf)).double()
        model.load_state_dict(weights)
        adapted = peft.get_peft_model(model, peft.PeftConfig.from_pretrained(adapter)).double().eval()
        loaded = peft.set_peft_model_state_dict(adapted, adapters)
        assert not loaded.unexpected_keys
        assert not [name for name in loaded.missing_keys if "lora_" in name], (
            "target_modules selects the file's linears"
        )
        found: Tensor = adapted(tokens()).logits
    return found


def imported(tmp_path: Path, name: str = "imported") -> Path:
    flags = ["--load-peft", tmp_path / "peft", "--pretrained-checkpoint", f"hf:{tmp_path / 'hf'}"]
    assert convert([*map(str, flags), "--save", f"{tmp_path / name}"]) == 0
    return tmp_path / name / "iter_0000000"


def tokens() -> Tensor:
    return torch.randint(0, 61, (2, 12), generator=torch.Generator().manual_seed(1))


class Unmerged:
    """The frozen weights and the adapters of a checkpoint."""

    def __init__(self, saved: SavedModel) -> None:
        assert saved.merged is not None
        self.merged = saved.merged

    def read(self, name: str, view: tuple[int, ...], box: Box) -> Tensor:
        source = self.merged.base if self.merged.specs[name].frozen else self.merged.adapters
        return source.read(name, view, box)

    def logits(self) -> Tensor:
        model = self.merged.model
        context = BuildContext(one_rank_mesh(), GradAccumulator(), torch.float64)
        chunk = build_gpt(model, TrainingConfig(), context).eval()
        fill_weights(chunk.specs, chunk.params, self)
        with torch.no_grad():
            return chunk.logits(tokens()).transpose(0, 1)


MIXED = ("ranks", "alphas")
"""Cases with several scales, of which the adapters here have one: B is rounded."""


def assert_close(found: Tensor, expected: Tensor, rounded: bool = False) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6 if rounded else 1e-11)


@pytest.mark.parametrize("case", cases(*CASES))
def test_an_adapter_computes_the_same_here_and_is_written_as_it_was(case: str, tmp_path: Path) -> None:
    make_adapter(tmp_path, case)
    expected = logits_of_peft(tmp_path / "hf", tmp_path / "peft")
    saved = open_saved(Manifest.open(imported(tmp_path)))
    merged = open_pretrained(str(tmp_path / "imported")).build(one_rank_mesh(), "fp64", torch.device("cpu"))
    with torch.no_grad():
        assert_close(merged.logits(tokens()).transpose(0, 1), expected, case in MIXED)
    assert_close(Unmerged(saved).logits(), expected, case in MIXED)

    assert convert(["--load", f"{tmp_path / 'imported'}", "--save-peft", f"{tmp_path / 'back'}"]) == 0
    assert_close(logits_of_peft(tmp_path / "hf", tmp_path / "back"), expected, case in MIXED)
    config = json.loads((tmp_path / "back" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "hf")
    if case not in MIXED:
        files = [load_file(tmp_path / name / "adapter_model.safetensors") for name in ("peft", "back")]
        assert files[0].keys() == files[1].keys()
        for name, tensor in files[0].items():
            assert torch.equal(files[1][name], tensor), name
        assert config["fan_in_fan_out"] is (CASES[case][0] == "GPT2")
        assert not config["rank_pattern"]


@pytest.mark.parametrize("case", cases("DoRA of a part", "interleaved", "transposed DoRA"))
def test_merged_models_match_peft(case: str, tmp_path: Path) -> None:
    make_adapter(tmp_path, case)
    imported(tmp_path)
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    expected = peft.PeftModel.from_pretrained(base, tmp_path / "peft").merge_and_unload().state_dict()
    assert convert(["--load", f"{tmp_path / 'imported'}", "--save-hf", f"{tmp_path / 'merged'}"]) == 0
    assert edit(["--load", f"{tmp_path / 'imported'}", "--merge", "--save", f"{tmp_path / 'edited'}"]) == 0
    assert convert(["--load", f"{tmp_path / 'edited'}", "--save-hf", f"{tmp_path / 'of-edited'}"]) == 0
    for folder in ("merged", "of-edited"):
        found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder).state_dict()
        assert found.keys() == expected.keys()
        for name, weight in expected.items():
            torch.testing.assert_close(found[name], weight, rtol=1e-6, atol=1e-7)


PARTS: dict[str, tuple[str, ...]] = {
    "Llama": ("linear_qkv.k", "layers.1.mlp.linear_fc1.gate", "layers.0.mlp.*"),
    "Phi3": ("linear_qkv.q", "linear_qkv.v", "linear_fc1.up"),
    "GPTNeoX": ("linear_qkv.k", "linear_qkv.v", "layers.1.self_attention.linear_proj"),
    "GPT2": ("layers.0.*.linear_qkv", "linear_qkv.v"),
}
"""Parts of linears with adapters, in families whose linears hold several of them or one."""


@pytest.mark.parametrize("case", cases(*(f"{family}-{kind}" for family in PARTS for kind in ("lora", "dora"))))
def test_adapters_of_parts_go_to_peft_and_back(case: str, tmp_path: Path) -> None:
    family, dora = case.split("-")[0], case.endswith("dora")
    make_base(tmp_path / "hf", family)
    options = {"lora_alpha": 5.0, "lora_target": PARTS[family], "lora_dora": dora}
    saved = open_saved(write_adapters(tmp_path / "ours" / "iter_0000007", tmp_path / "hf", **options))
    assert convert(["--load", f"{tmp_path / 'ours'}", "--save-peft", f"{tmp_path / 'peft'}"]) == 0
    assert_close(Unmerged(saved).logits(), logits_of_peft(tmp_path / "hf", tmp_path / "peft"), rounded=dora)
    back = open_saved(Manifest.open(imported(tmp_path)))
    for name, spec in saved.specs.items():
        box = whole_box(spec.view)
        found, expected = (model.read(name, spec.view, box) for model in (back, saved))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6 if dora else 0)
    ours, theirs = (model.merged for model in (saved, back))
    assert ours is not None
    assert theirs is not None
    if not dora:  # for which PEFT has a magnitude of all rows, here their norm in fp32
        for name in {name for name, spec in ours.specs.items() if not spec.frozen and name.endswith("lora_a")}:
            assert torch.equal(ours.adapter(name), theirs.adapter(name)), name
        assert ours.model.lora_rank == theirs.model.lora_rank
