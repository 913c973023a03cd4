"""The check of a conversion finds every fault of weights, tables and configuration, and agrees with equal models."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.convert.huggingface.check import (
    TOLERANCE,
    LazyWeightLoader,
    MismatchError,
    OutputDifference,
    check_model,
    sample_inputs,
    uncovered_by_check,
)
from megatron.convert.huggingface.weights import HuggingFaceWeights
from tests.kit.solo import tiny
from tests.unit.convert.folders import llama, random_weights, write_folder

MODELS = {
    "gpt2": tiny(max_position_embeddings=200),
    "gpt2-untied": tiny(untie_embeddings_and_output_weights=True, activation="gelu"),
    "llama": llama(),
    "llama-yarn": llama(
        position_embedding_type="yarn", rotary_scaling_factor=4.0, yarn_original_max_position_embeddings=64
    ),
    "llama3": llama(use_rope_scaling=True, rope_original_max_position=16, max_position_embeddings=4096),
    "qwen3-layers": llama(qk_layernorm=True, attention_pattern="local:5,global", max_position_embeddings=64),
    "ministral": llama(attention_pattern="global,local:5", max_position_embeddings=64),
    "qwen3-window": llama(qk_layernorm=True, window_size=5, kv_channels=6, max_position_embeddings=64),
}


def compare(folder: Path, model: ModelConfig, trusted: Path | None = None) -> list[OutputDifference]:
    """The folder through transformers against ourselves, fed from ``trusted`` (default: the same folder)."""
    return check_model(folder, folder / "config.json", model, HuggingFaceWeights(trusted or folder, model))


@pytest.mark.parametrize("name", MODELS)
def test_equal_models_are_equal_block_by_block(name: str, tmp_path: Path) -> None:
    model = MODELS[name]
    found = compare(write_folder(tmp_path / "m", model, random_weights(model), shards=2), model)
    rotary = ["rotary frequencies"] if model.rotary_dim else []
    assert [difference.what for difference in found] == [*rotary, "block 0", "block 1", "logits"]
    assert all(difference.relative <= TOLERANCE for difference in found)


@pytest.mark.parametrize("name", ["gpt2-untied", "qwen3-window"])
def test_one_changed_element_of_any_tensor_is_seen(name: str, tmp_path: Path) -> None:
    model = replace(MODELS[name], num_layers=1)
    weights = random_weights(model)
    good = write_folder(tmp_path / "good", model, weights)
    tokens, _ = sample_inputs(model)
    for i, key in enumerate(weights):
        changed = weights[key].clone()
        row = int(tokens[-1, -1]) if key.endswith(("wte.weight", "embed_tokens.weight")) else -1
        changed[row] += 0.1
        bad = write_folder(tmp_path / str(i), model, weights | {key: changed})
        with pytest.raises(MismatchError, match="the first to differ is"):
            compare(bad, model, good)


def test_faults_of_one_tensor_are_named(tmp_path: Path) -> None:
    model = MODELS["llama"]
    weights = random_weights(model)
    good = write_folder(tmp_path / "good", model, weights)
    key, norm = "model.layers.1.mlp.up_proj.weight", "model.norm.weight"
    other = write_folder(tmp_path / "other", model, weights | {key: weights[key] * 1.01})
    with pytest.raises(MismatchError, match=r"the first to differ is block 1 by .* logits by"):
        compare(other, model, good)
    more = write_folder(tmp_path / "more", model, weights | {"model.layers.0.adapter": torch.ones(1)})
    with pytest.raises(MismatchError, match=r"does not use these tensors .*: model\.layers\.0\.adapter"):
        compare(more, model, good)
    less = {name: value for name, value in weights.items() if name != key}
    with pytest.raises(MismatchError, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight"):
        compare(write_folder(tmp_path / "less", model, less), model, good)

    broken = weights[norm].clone().fill_(torch.nan)
    one_side = write_folder(tmp_path / "side", model, weights | {norm: broken})
    with pytest.raises(MismatchError, match="the first to differ is logits by inf"):
        compare(good, model, one_side)


@pytest.mark.parametrize(
    ("key", "value", "seen"),
    [
        ("rope_theta", 20000.0, "rotary frequencies"),
        ("rms_norm_eps", 0.1, "block 0"),
        ("rope_scaling", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}, "rotary"),
    ],
)
def test_changed_config_is_seen(key: str, value: object, seen: str, tmp_path: Path) -> None:
    model = MODELS["llama"]
    folder = write_folder(tmp_path / "m", model, random_weights(model))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(MismatchError, match=f"the first to differ is {seen}"):
        compare(folder, model)


def test_inputs_reach_the_last_learned_position() -> None:
    tokens, positions = sample_inputs(MODELS["gpt2"])
    assert tokens.shape == positions.shape == (2, 32)
    assert (positions[0, 0], positions[-1, -1]) == (0, 199)
    assert (positions.diff(dim=1) == 1).all()
    assert tokens.max() < 101
    assert sample_inputs(tiny())[0].shape == (2, 16), "no longer than the model's positions"


def test_rows_are_longer_than_a_window(tmp_path: Path) -> None:
    for window, rows in ((None, 32), (1, 33), (256, 288)):
        model = llama(window_size=window, max_position_embeddings=1000)
        assert sample_inputs(model)[0].shape == (2, rows)
        assert uncovered_by_check(model) is None
    long = llama(window_size=257, max_position_embeddings=1000)
    assert sample_inputs(long)[0].shape == (2, 32)
    assert uncovered_by_check(long) == "the window of 257 tokens, because the rows compared have 32"
    assert uncovered_by_check(llama(window_size=64, max_position_embeddings=64)) is None, "no text leaves it"
    model = llama(window_size=100, qk_layernorm=True, max_position_embeddings=1000)
    folder = write_folder(tmp_path / "m", model, random_weights(model))
    with pytest.raises(MismatchError, match="the first to differ is block 0"):
        compare(folder, replace(model, window_size=101))


# --- weights that are in memory only while a module runs ---


def test_weights_are_there_only_while_a_module_runs() -> None:
    real = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Sequential(nn.Linear(3, 3, bias=False)))
    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Sequential(nn.Linear(3, 3, bias=False)))
    loaded: list[str] = []
    alive: list[int] = []

    def load(name: str) -> Tensor:
        loaded.append(name)
        return real.get_parameter(name).detach()

    LazyWeightLoader(empty, load, {"2.0.weight": "0.weight"})  # tied
    for module in (empty[0], empty[2][0]):
        module.register_forward_hook(lambda *_: alive.append(sum(not p.is_meta for p in empty.parameters())))
    x = torch.randn(2, 3)
    real[2][0].weight = real[0].weight
    with torch.no_grad():
        assert torch.equal(empty(x), real(x))
    assert loaded == ["0.weight", "0.bias", "0.weight"]
    assert alive == [0, 0], "released before other hooks run"
    assert all(p.is_meta for p in empty.parameters())
    with torch.device("meta"):
        wrong = nn.Linear(3, 4)
    LazyWeightLoader(wrong, lambda name: torch.zeros(4, 4))
    with pytest.raises(ValueError, match=r"weight is \[4, 3\], its value \[4, 4\]"):
        wrong(torch.zeros(3))
