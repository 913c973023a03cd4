from __future__ import annotations

import errno
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from megatron.checkpoint.errors import CheckpointError, DamagedCheckpointError, StorageError
from megatron.checkpoint.format import Manifest
from megatron.config.errors import UserError
from megatron.convert.huggingface.convert import (
    PENDING_CONFIG_FILE,
    ProgressCallback,
    convert_to_huggingface,
    special_token_ids,
    split_into_shards,
)
from megatron.convert.saved_model import SavedModel
from megatron.data.tokenizers.huggingface import HuggingFaceTokenizer, byte_tokenizer
from megatron.distributed.sharding import Box
from megatron.inference.text import TextCodec
from megatron.layers.context import DTYPES
from tests.parity.families import from_gpt2, from_llama
from tests.solo import tiny
from tests.unit.convert.folders import ignore, llama, write_checkpoint

TOKENIZER = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 2, "content": "<|endoftext|>"}]}
SETTINGS = {"eos_token": "<|endoftext|>", "bos_token": {"content": "b"}}
FILES = {
    "tokenizer/tokenizer.json": json.dumps(TOKENIZER).encode(),
    "tokenizer/tokenizer_config.json": json.dumps(SETTINGS).encode(),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> SavedModel:
    return SavedModel(write_checkpoint(tmp_path_factory.mktemp("ckpt") / "iter_0000007", llama(), files=FILES))


def weights_of(folder: Path) -> dict[str, Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def export(
    saved: SavedModel,
    folder: Path,
    dtype: torch.dtype = torch.float32,
    shard_bytes: int = 10**9,
    report: ProgressCallback = ignore,
    tokenizer: Path | None = None,
) -> Path:
    name = next(name for name, known in DTYPES.items() if known == dtype)
    convert_to_huggingface(
        saved.manifest, folder, report, dtype=name, shard_bytes=shard_bytes, tokenizer=tokenizer, checked=False
    )
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_export_holds_the_masters_rounded_once(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = tiny(make_vocab_size_divisible_by=64) if kind == "gpt2" else llama(make_vocab_size_divisible_by=64)
    saved = SavedModel(write_checkpoint(tmp_path / "iter_0000007", model))
    weights = weights_of(export(saved, tmp_path / "hf", dtype))
    assert all(value.dtype == dtype for value in weights.values())
    ours = (from_gpt2 if kind == "gpt2" else from_llama)(weights, saved.model)
    assert ours["embedding.word_embeddings.weight"].shape[0] == 101, "padding of the vocabulary has left"
    for name, spec in saved.specs.items():
        exact = saved.read(name, spec.view, Box((0,) * len(spec.view), spec.view)).reshape(spec.shape)
        assert torch.equal(ours[name], exact.to(dtype)), name


def test_files_of_a_folder(saved: SavedModel, tmp_path: Path) -> None:
    folder = export(saved, tmp_path / "hf", torch.bfloat16)
    tokenizer = {"tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in folder.iterdir()} == tokenizer | {
        "config.json",
        "generation_config.json",
        "model.safetensors",
    }
    config = json.loads((folder / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, 2, None)
    assert config["torch_dtype"] == "bfloat16"
    assert json.loads((folder / "generation_config.json").read_text()) == {"bos_token_id": 1, "eos_token_id": 2}
    assert (folder / "tokenizer.json").read_bytes() == FILES["tokenizer/tokenizer.json"]
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert list(tmp_path.iterdir()) == [folder], "nothing is left beside it"


def test_shards_and_their_index(saved: SavedModel, tmp_path: Path) -> None:
    folder = export(saved, tmp_path / "hf", shard_bytes=20_000)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 2
    assert [f.name for f in files] == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    held = {name: file.name for file in files for name in load_file(file)}
    assert index["weight_map"] == held
    sizes = {file: sum(t.nbytes for t in load_file(file).values()) for file in files}
    assert max(sizes.values()) <= 20_000
    assert index["metadata"]["total_size"] == sum(sizes.values())
    whole = weights_of(export(saved, tmp_path / "whole"))
    assert all(torch.equal(whole[name], value) for name, value in weights_of(folder).items())


def test_shards_are_consecutive_and_small() -> None:
    sizes = [6, 6, 18, 2, 2, 2, 10]
    assert [sizes[shard] for shard in split_into_shards(sizes, 12)] == [[6, 6], [18], [2, 2, 2], [10]]


def test_values_too_large_for_fp16_are_refused(tmp_path: Path) -> None:
    saved = SavedModel(write_checkpoint(tmp_path / "iter_0000007", llama(), std=30_000.0))
    with pytest.raises(CheckpointError, match=r"above 65504, too large for fp16[\s\S]*--dtype bf16"):
        export(saved, tmp_path / "hf", torch.float16)
    assert not (tmp_path / "hf").exists()
    assert not (tmp_path / "hf.tmp").exists()


def test_only_an_empty_folder_may_be_there(saved: SavedModel, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    export(saved, tmp_path / "empty")
    with pytest.raises(CheckpointError, match="exists and is not empty"):
        export(saved, tmp_path / "empty")
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="exists and is not empty"):
        export(saved, tmp_path / "file")


def test_a_folder_is_not_taken_from_under_the_callers_feet(
    saved: SavedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "link").symlink_to("here")
    with pytest.raises(CheckpointError, match=f"is a link[^\n]*\n  fix: --save-hf {tmp_path}/here"):
        export(saved, tmp_path / "link")
    monkeypatch.chdir(tmp_path / "here")
    for name in (".", str(tmp_path / "here"), "../here"):
        with pytest.raises(CheckpointError, match="is the current folder"):
            export(saved, Path(name))
    with pytest.raises(CheckpointError, match="is not empty"):
        export(saved, Path(".."))
    assert {path.name for path in tmp_path.rglob("*")} == {"here", "link"}


@pytest.mark.parametrize("empty", [False, True])
def test_an_export_killed_before_its_last_step_is_whole(saved: SavedModel, empty: bool, tmp_path: Path) -> None:
    """It only lacks its name, and the command that gives it is told."""
    folder = export(saved, tmp_path / "a model")
    folder.rename(tmp_path / "a model.tmp")
    if empty:
        folder.mkdir()
    with pytest.raises(CheckpointError, match=r"holds a model; .* lacks its name") as caught:
        export(saved, folder)
    command = re.search(r"fix: (.*) \| --save-hf", str(caught.value))
    assert command is not None
    subprocess.run(command[1], shell=True, check=True)
    assert (folder / "config.json").exists()
    assert not (tmp_path / "a model.tmp").exists()


def test_what_a_killed_export_left_is_replaced_and_nothing_else(saved: SavedModel, tmp_path: Path) -> None:
    (tmp_path / "hf.tmp").mkdir()
    (tmp_path / "hf.tmp" / PENDING_CONFIG_FILE).write_text("{}")
    (tmp_path / "hf.tmp" / "stale").write_text("x")
    export(saved, tmp_path / "hf")
    assert not (tmp_path / "hf" / "stale").exists()
    (tmp_path / "other.tmp").mkdir()
    (tmp_path / "other.tmp" / "thesis.tex").write_text("x")
    with pytest.raises(CheckpointError, match="was not left by a conversion"):
        export(saved, tmp_path / "other")
    assert (tmp_path / "other.tmp" / "thesis.tex").exists()


@pytest.mark.parametrize(
    ("call", "number"), [(call, n) for call in ("write", "fsync") for n in (1, 2, 5)] + [("rename", 1), ("rename", 2)]
)
def test_disk_that_refuses_leaves_nothing(
    call: str, number: int, saved: SavedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = getattr(os, call), 0

    def refuse(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args)

    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(StorageError, match="No space left on device; nothing was exported"):
        export(saved, tmp_path / "hf", shard_bytes=20_000)
    assert list(tmp_path.iterdir()) == []


def test_flipped_byte_in_the_checkpoint_stops_the_export(tmp_path: Path) -> None:
    path = tmp_path / "iter_0000007"
    write_checkpoint(path, llama())
    file = next(path.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    start = Manifest.open(path).tensors["final_layernorm.weight"].chunks[0].offset
    content[start] ^= 1
    file.write_bytes(content)
    with pytest.raises(DamagedCheckpointError, match="flipped bytes"):
        export(SavedModel(Manifest.open(path)), tmp_path / "hf")
    assert [p.name for p in tmp_path.iterdir()] == ["iter_0000007"]


def test_model_without_a_family_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    saved = SavedModel(write_checkpoint(tmp_path / "iter_0000007", llama(activation="relu2")))
    with pytest.raises(UserError, match="activation relu2"):
        export(saved, tmp_path / "hf")
    assert [p.name for p in tmp_path.iterdir()] == ["iter_0000007"]


def test_tokenizer_of_another_folder(saved: SavedModel, tmp_path: Path) -> None:
    other = tmp_path / "tokenizer"
    other.mkdir()
    with pytest.raises(CheckpointError, match=re.escape("holds no tokenizer.json")):
        export(saved, tmp_path / "hf", tokenizer=other)
    (other / "tokenizer.json").write_text(json.dumps({"model": {"vocab": [["x", -1.0], ["</s>", -2.0]]}}))
    (other / "special_tokens_map.json").write_text(json.dumps({"eos_token": "</s>"}))
    export(saved, tmp_path / "hf", tokenizer=other)
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["eos_token_id"] == 1
    assert not (tmp_path / "hf" / "tokenizer_config.json").exists(), "the checkpoint's own is left out"


def test_special_ids() -> None:
    files = {name.removeprefix("tokenizer/"): content for name, content in FILES.items()}
    assert special_token_ids(files, 3) == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
    assert special_token_ids({}, 3) == {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    assert special_token_ids({"tokenizer.json": files["tokenizer.json"]}, 3)["eos_token_id"] == 2, (
        "as data ends with it"
    )
    words = {"model": {"vocab": {"None": 0}}}
    assert set(special_token_ids({"tokenizer.json": json.dumps(words).encode()}, 3).values()) == {None}, (
        "None is a word too"
    )
    unsaid = files | {"generation_config.json": b'{"eos_token_id": null}'}
    assert special_token_ids(unsaid, 3)["eos_token_id"] == 2
    several = files | {"generation_config.json": b'{"eos_token_id": [2, 0]}'}
    assert special_token_ids(several, 3)["eos_token_id"] == [2, 0], "what was said of generation comes first"
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json is not a JSON object"):
        special_token_ids(files | {"tokenizer_config.json": b"{"}, 3)
    with pytest.raises(CheckpointError, match=r"generation_config\.json is no JSON object"):
        special_token_ids(files | {"generation_config.json": b"[]"}, 3)
    with pytest.raises(CheckpointError, match="ids up to 2, but the model's vocabulary 2 entries"):
        special_token_ids(files, 2)


@pytest.mark.parametrize(
    "tokenizer", [{"model": None}, {"model": {"vocab": None}}, {"model": {"vocab": {"a": "b"}}}, {"added_tokens": [{}]}]
)
def test_a_file_that_is_no_tokenizer_is_told(tokenizer: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is not one of the tokenizers library: .*\n  fix: "):
        special_token_ids({"tokenizer.json": json.dumps(tokenizer).encode()}, 3)


@pytest.mark.parametrize("settings", [{"tokenizer_config.json": {}}, {"tokenizer_config.json": SETTINGS}])
def test_the_end_is_the_one_of_the_data_and_of_generation(settings: dict[str, Any], tmp_path: Path) -> None:
    """A tokenizer with and without a word on its end: preprocessing, our generation and the export agree."""
    tokenizer = byte_tokenizer()
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_str())
    for name, content in settings.items():
        (tmp_path / name).write_text(json.dumps(content))
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    ends = {HuggingFaceTokenizer(tmp_path).eod, TextCodec(files).end, special_token_ids(files, 257)["eos_token_id"]}
    assert ends == {256}


def test_settings_of_generation_are_kept_and_name_the_same_end(tmp_path: Path) -> None:
    given = FILES | {"generation_config.json": b'{"temperature": 0.7, "eos_token_id": null}'}
    saved = SavedModel(write_checkpoint(tmp_path / "iter_0000007", llama(), files=given))
    folder = export(saved, tmp_path / "hf")
    settings = json.loads((folder / "generation_config.json").read_text())
    assert settings == {"temperature": 0.7, "bos_token_id": 1, "eos_token_id": 2}
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == 2


def test_config_has_another_name_until_the_end(saved: SavedModel, tmp_path: Path) -> None:
    seen: list[set[str]] = []

    def stop_at_the_end(name: str, done: int, total: int) -> None:
        seen.append({path.name for path in (tmp_path / "hf.tmp").iterdir()})
        if done == total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export(saved, tmp_path / "hf", report=stop_at_the_end)
    assert all(PENDING_CONFIG_FILE in names and "config.json" not in names for names in seen)
    assert list(tmp_path.iterdir()) == []
