"""Choosing a checkpoint, and reading its model: imports, tokenizer files, and contents that do not fit."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.arguments.compatibility import compare_configs
from megatron.arguments.sources import from_dict
from megatron.checkpoint.errors import CheckpointError, DamagedCheckpointError, NewerVersionError
from megatron.checkpoint.format import marker_content, whole_box
from megatron.config.errors import UserError
from megatron.config.run import RunConfig
from megatron.convert.huggingface.convert import convert_from_huggingface
from megatron.convert.huggingface.weights import HuggingFaceWeights
from megatron.convert.saved_model import SavedModel
from megatron.convert.sources import open_checkpoint
from megatron.convert.tokenizer_files import saved_tokenizer_files
from megatron.layers.parameters import num_parameters
from tests.kit.solo import tiny
from tests.unit.checkpoint.samples import attempt
from tests.unit.convert.folders import ignore, llama, opened, random_weights, write_checkpoint, write_folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_import_holds_the_weights_and_their_format(dtype: torch.dtype, tmp_path: Path) -> None:
    model, seen = llama(), []
    folder = write_folder(tmp_path / "hf", model, random_weights(model, dtype), shards=2)
    convert_from_huggingface(
        opened(folder), tmp_path, lambda name, done, total: seen.append((name, done, total)), checked=False
    )
    saved, source = SavedModel(open_checkpoint(tmp_path)[0]), HuggingFaceWeights(folder, model)
    assert saved.precision == {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    assert saved.manifest.state == {"iteration": 0, "consumed_samples": 0}
    assert {record.dtype for record in saved.manifest.tensors.values()} == {"F32"}
    for name, spec in source.specs.items():
        box = whole_box(spec.view)
        assert torch.equal(saved.read(name, spec.view, box), source.read(name, spec.view, box).float()), name
    assert {name for name, _, _ in seen} == set(source.specs)
    assert seen[-1][1] == seen[-1][2] == 4 * num_parameters(model)
    config = from_dict(saved.manifest.config)
    assert not compare_configs(saved.manifest.config, config, "weights-only").problems, "a run may start from it"
    assert compare_configs(saved.manifest.config, RunConfig(model=tiny()), "weights-only").problems
    with pytest.raises(ValueError, match="is viewed"):
        saved.read("final_layernorm.weight", (4, 8), whole_box((4, 8)))


def test_small_files_are_imported(tmp_path: Path) -> None:
    model = llama()
    folder = write_folder(tmp_path / "hf", model, random_weights(model))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": 7}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "README.md").write_text("x")
    convert_from_huggingface(opened(folder), tmp_path / "a", ignore, checked=False)
    manifest = open_checkpoint(tmp_path / "a")[0]
    assert manifest.read_file("tokenizer/tokenizer.json") == b"{}"
    assert json.loads(manifest.read_file("generation_config.json")) == {"eos_token_id": 7}
    assert "tokenizer/README.md" not in manifest.files
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    convert_from_huggingface(opened(folder), tmp_path / "b", ignore, checked=False)
    content = open_checkpoint(tmp_path / "b")[0].read_file("generation_config.json")
    assert json.loads(content) == {"eos_token_id": [7, 8]}


def test_only_files_of_a_tokenizer_are_taken_from_a_checkpoint(tmp_path: Path) -> None:
    strangers = {"tokenizer/install.sh": b"x", "tokenizer/more/tokenizer.json": b"x", "notes.txt": b"x"}
    known = {"tokenizer/tokenizer.json": b"{}", "generation_config.json": b"{}"}
    manifest = write_checkpoint(tmp_path / "iter_0000007", tiny(num_layers=1), files=known | strangers)
    assert strangers.keys() < manifest.files.keys()
    assert saved_tokenizer_files(manifest) == known


def rewritten(path: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A checkpoint with a changed manifest that fits its marker."""
    inner = attempt(path)
    content = json.loads((inner / "manifest.json").read_text())
    change(content)
    (inner / "manifest.json").write_text(json.dumps(content))
    (path / "COMPLETE").write_bytes(marker_content((inner / "manifest.json").read_bytes(), inner.name))
    return path


def test_a_checkpoint_is_found_by_folder_by_step_and_by_itself(tmp_path: Path) -> None:
    for step in (7, 9):
        write_checkpoint(tmp_path / f"iter_{step:07d}", tiny(num_layers=1))
    assert open_checkpoint(tmp_path)[0].path.name == "iter_0000009"
    assert open_checkpoint(tmp_path, 7)[0].path.name == "iter_0000007"
    assert open_checkpoint(tmp_path / "iter_0000007")[0].path.name == "iter_0000007"
    (tmp_path / "iter_0000009" / "COMPLETE").unlink()
    manifest, notes = open_checkpoint(tmp_path)
    assert (manifest.path.name, notes[0]) == ("iter_0000007", f"from {tmp_path}/iter_0000007, step 7")
    assert notes[1].startswith(f"passed over {tmp_path}/iter_0000009: ")
    assert len(open_checkpoint(tmp_path, 7)[1]) == 1
    with pytest.raises(CheckpointError, match=r"a checkpoint of step 9 that can be used:\n  iter_0000009: "):
        open_checkpoint(tmp_path, 9)
    with pytest.raises(CheckpointError, match="is the checkpoint of step 7, not 8"):
        open_checkpoint(tmp_path / "iter_0000007", 8)
    with pytest.raises(CheckpointError, match="does not hold a checkpoint"):
        open_checkpoint(tmp_path / "nothing")
    rewritten(tmp_path / "iter_0000009", lambda content: content.update(version=99))
    with pytest.raises(NewerVersionError, match="iter_0000009 was written by a newer version"):
        open_checkpoint(tmp_path)
    path = tmp_path / "iter_0000007"
    text = (attempt(path) / "manifest.json").read_bytes()
    (attempt(path) / "manifest.json").write_bytes(text.replace(b"F32", b"F64"))
    with pytest.raises(DamagedCheckpointError):
        open_checkpoint(path)


def test_unknown_options_are_noted_and_model_options_refused(tmp_path: Path) -> None:
    path = tmp_path / "iter_0000007"
    write_checkpoint(path, tiny(num_layers=1))
    rewritten(path, lambda content: content["config"]["precision"].update(fp4_recipe="nvfp4"))
    rewritten(path, lambda content: content["config"].update(telemetry={"endpoint": 3}))
    manifest, notes = open_checkpoint(path)
    options = "precision.fp4_recipe nvfp4, telemetry.endpoint 3"
    assert notes[1:] == [f"it has options that this version does not know: {options}"]
    assert SavedModel(manifest).precision == "fp32"
    rewritten(path, lambda content: content["config"]["model"].update(attn_logit_softcap=30.0))
    with pytest.raises(CheckpointError, match=r"does not know: model\.attn_logit_softcap 30\.0\n  fix: update"):
        SavedModel(open_checkpoint(path)[0])


def test_inconsistent_models_are_refused(tmp_path: Path) -> None:
    manifest = write_checkpoint(tmp_path / "iter_0000007", tiny())
    given: dict[str, Any] = dict(manifest.config["model"])
    manifest.config["model"]["vocab_size"] = None  # as when a tokenizer determines it
    assert SavedModel(manifest).model.vocab == 101
    for changes, error, message in [
        ({"num_layers": 3}, CheckpointError, "lacks: layers.2.input_layernorm.bias, "),
        ({"num_layers": 1}, CheckpointError, "does not have: layers.1.input_layernorm.bias, "),
        ({"ffn_hidden_size": 64}, CheckpointError, "another shape than its model's: layers.0.mlp.linear_fc1.bias, "),
        ({"num_query_groups": 2, "kv_channels": 12}, CheckpointError, "its model's: layers.0.self_attention.linear_"),
        ({"num_attention_heads": 0}, UserError, f"{manifest.path}: --num-attention-heads 0: must be at least 1"),
        ({"hidden_size": 33}, UserError, f"{manifest.path}: hidden size 33 does not divide into 4 heads"),
    ]:
        manifest.config["model"] = given | changes
        with pytest.raises(error, match=re.escape(message)):
            SavedModel(manifest)
    manifest.config["model"] = given
    for group in ("precision", "model"):
        manifest.config[group] = [1]
        message = f"{manifest.path} has in its manifest what is no group of options: config."
        with pytest.raises(CheckpointError, match=re.escape(message) + f".*{group}"):
            SavedModel(manifest)
