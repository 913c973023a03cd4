from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron.config import plugins
from megatron.config.errors import UserError
from megatron.convert.huggingface.config import build_config_json, model_config_values, model_type_for
from megatron.convert.huggingface.convert import convert_from_huggingface, convert_to_huggingface
from megatron.convert.huggingface.families import MODEL_FAMILIES, ConfigKey, ModelFamily, model_families
from megatron.convert.saved_model import open_checkpoint
from tests.unit.convert.folders import ignore, llama, random_weights, write_folder

WINDOWED = llama(window_size=5, num_query_groups=2)


def cousin() -> ModelFamily:
    """Mistral under other names, tied unless config.json has another value."""
    base = MODEL_FAMILIES["mistral"]
    rows = tuple(
        (ours, axes, tuple((name.replace("self_attn", "attention"), at) for name, at in theirs))
        for ours, axes, theirs in base.weights.rows
    )
    keys = tuple(replace(key, theirs="depth") if key.ours == "num_layers" else key for key in base.keys)
    assert ConfigKey("num_layers", "depth", 32) in keys
    weights = replace(base.weights, rows=rows)
    return replace(base, architecture="CousinForCausalLM", keys=keys, weights=weights, tied_by_default=True)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(plugins._registered, "model_family", {})
    plugins.register("model_family", "cousin")(cousin())


@pytest.mark.usefixtures("registered")
def test_a_registered_family_is_read_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(model_families()) == [*MODEL_FAMILIES, "cousin"]
    monkeypatch.delitem(MODEL_FAMILIES, "mistral")  # which would be the first that can express the model
    weights = random_weights(WINDOWED, torch.bfloat16)
    assert "model.layers.0.attention.q_proj.weight" in weights
    folder = write_folder(tmp_path / "hf", WINDOWED, weights)
    config = json.loads((folder / "config.json").read_text())
    assert (config["model_type"], config["architectures"], config["depth"]) == ("cousin", ["CousinForCausalLM"], 2)
    done = convert_from_huggingface(folder, tmp_path / "save", ignore, checked=False)
    assert done.model.window_size == 5
    manifest, _ = open_checkpoint(tmp_path / "save")
    convert_to_huggingface(manifest, tmp_path / "back", ignore, shard_bytes=10**9, checked=False)
    written = load_file(tmp_path / "back" / "model.safetensors")
    assert written.keys() == weights.keys()
    assert all(torch.equal(written[name], weights[name]) for name in weights)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["depth"] == 2


@pytest.mark.usefixtures("registered")
def test_built_in_families_come_first_and_the_default_of_tying_is_the_familys() -> None:
    assert model_type_for(WINDOWED) == "mistral"
    config = build_config_json(WINDOWED)
    del config["tie_word_embeddings"]
    assert model_config_values(config, "here")["untie_embeddings_and_output_weights"]
    config |= {"model_type": "cousin", "architectures": ["CousinForCausalLM"]}
    config["depth"] = config.pop("num_hidden_layers")
    assert not model_config_values(config, "here")["untie_embeddings_and_output_weights"]


def test_an_unregistered_family_is_refused() -> None:
    with pytest.raises(UserError, match="E851"):
        model_config_values({"model_type": "cousin"}, "here")
