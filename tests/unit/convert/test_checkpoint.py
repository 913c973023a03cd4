from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from megatron.checkpoint.boxes import whole
from megatron.checkpoint.errors import CheckpointError, DamagedError
from megatron.config.compare import compare
from megatron.config.run import RunConfig
from megatron.config.sources import from_dict
from megatron.convert.checkpoint import SavedModel, import_hf, open_checkpoint
from megatron.convert.hf_folder import HFSource
from tests.solo import tiny
from tests.unit.convert.folders import ignore, llama, random_weights, write_checkpoint, write_folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_import_holds_the_weights_as_masters_and_says_their_format(dtype: torch.dtype, tmp_path: Path) -> None:
    model = llama()
    folder = write_folder(tmp_path / "hf", model, random_weights(model, dtype), shards=2)
    import_hf(folder, tmp_path / "iter_0000000", ignore)
    saved, source = SavedModel(open_checkpoint(tmp_path)), HFSource(folder, model)
    assert saved.precision == {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    assert saved.manifest.state == {"iteration": 0, "consumed_samples": 0}
    assert {record.dtype for record in saved.manifest.tensors.values()} == {"F32"}
    for name, spec in source.specs.items():
        box = whole(spec.view)
        assert torch.equal(saved.read(name, spec.view, box), source.read(name, spec.view, box).float()), name


def test_a_run_of_the_same_shape_may_begin_with_it(tmp_path: Path) -> None:
    model = llama()
    import_hf(write_folder(tmp_path / "hf", model, random_weights(model)), tmp_path / "iter_0000000", ignore)
    manifest = open_checkpoint(tmp_path)
    config = from_dict(manifest.config)
    assert not compare(manifest.config, config, "weights-only").problems
    assert compare(manifest.config, RunConfig(model=tiny()), "weights-only").problems


def test_progress_is_told_and_ends_at_all(tmp_path: Path) -> None:
    model, seen = llama(), []
    folder = write_folder(tmp_path / "hf", model, random_weights(model))
    import_hf(folder, tmp_path / "iter_0000000", lambda name, done, total: seen.append((name, done, total)))
    assert {name for name, _, _ in seen} == set(HFSource(folder, model).names)
    assert seen[-1][1] == seen[-1][2] == model.num_parameters()


def test_small_files_come_along(tmp_path: Path) -> None:
    model = llama()
    folder = write_folder(tmp_path / "hf", model, random_weights(model))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": 7}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "README.md").write_text("x")
    import_hf(folder, tmp_path / "a" / "iter_0000000", ignore)
    manifest = open_checkpoint(tmp_path / "a")
    assert manifest.read_file("tokenizer/tokenizer.json") == b"{}"
    assert json.loads(manifest.read_file("generation_config.json")) == {"eos_token_id": 7}
    assert "tokenizer/README.md" not in manifest.files
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    import_hf(folder, tmp_path / "b" / "iter_0000000", ignore)
    content = open_checkpoint(tmp_path / "b").read_file("generation_config.json")
    assert json.loads(content) == {"eos_token_id": [7, 8]}


def test_checkpoints_are_found_by_folder_by_step_and_by_themselves(tmp_path: Path) -> None:
    for step in (7, 9):
        write_checkpoint(tmp_path / f"iter_{step:07d}", tiny(num_layers=1))
    assert open_checkpoint(tmp_path).path.name == "iter_0000009"
    assert open_checkpoint(tmp_path, 7).path.name == "iter_0000007"
    assert open_checkpoint(tmp_path / "iter_0000007").path.name == "iter_0000007"
    (tmp_path / "iter_0000009" / "COMPLETE").unlink()
    assert open_checkpoint(tmp_path).path.name == "iter_0000007"
    with pytest.raises(CheckpointError, match=r"a checkpoint of step 9 that can be used: iter_0000009: "):
        open_checkpoint(tmp_path, 9)
    with pytest.raises(CheckpointError, match="is the checkpoint of step 7, not 8"):
        open_checkpoint(tmp_path / "iter_0000007", 8)
    with pytest.raises(CheckpointError, match="does not hold a checkpoint"):
        open_checkpoint(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_layers": 3}, "lacks: layers.2.input_layernorm.bias, "),
        ({"num_layers": 1}, "does not have: layers.1.input_layernorm.bias, "),
        ({"ffn_hidden_size": 64}, "another shape than its model's: layers.0.mlp.linear_fc1.bias, "),
        ({"num_query_groups": 2, "kv_channels": 12}, "its model's: layers.0.self_attention.linear_"),
    ],
)
def test_tensors_that_are_not_the_models_are_named(changes: dict[str, int], said: str, tmp_path: Path) -> None:
    manifest = write_checkpoint(tmp_path / "iter_0000007", tiny())
    manifest.config["model"] |= changes
    with pytest.raises(CheckpointError, match=re.escape(said)):
        SavedModel(manifest)


def test_vocabulary_is_that_of_the_embedding(tmp_path: Path) -> None:
    manifest = write_checkpoint(tmp_path / "iter_0000007", tiny())
    manifest.config["model"]["vocab_size"] = None  # as when a tokenizer says it
    assert SavedModel(manifest).model.vocab == 101


def test_another_view_is_a_mistake(tmp_path: Path) -> None:
    saved = SavedModel(write_checkpoint(tmp_path / "iter_0000007", tiny()))
    with pytest.raises(ValueError, match="is viewed"):
        saved.read("final_layernorm.weight", (4, 8), whole((4, 8)))


def test_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "iter_0000007"
    write_checkpoint(path, tiny())
    (path / "manifest.json").write_bytes((path / "manifest.json").read_bytes().replace(b"F32", b"F64"))
    with pytest.raises(DamagedError):
        open_checkpoint(path)
