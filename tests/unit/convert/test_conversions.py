"""Whole conversions: bits, files, tokenizers, kills, full disks, and folders that are in the way."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import tokenizers
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tokenizers import models, trainers
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from megatron.checkpoint.durable_files import LockState, try_lock
from megatron.checkpoint.errors import CheckpointError, StorageError
from megatron.checkpoint.folder import CheckpointFolder
from megatron.checkpoint.format import Manifest, whole_box
from megatron.config.text import package_version
from megatron.convert.huggingface import convert
from megatron.convert.huggingface.check import SAMPLE_TEXTS, TOLERANCE, MismatchError
from megatron.convert.huggingface.convert import (
    PENDING_CONFIG_FILE,
    convert_from_huggingface,
    convert_to_huggingface,
    special_token_ids,
    split_into_shards,
)
from megatron.convert.huggingface.families import MODEL_FAMILIES, ModelFamily
from megatron.convert.saved_model import SavedModel
from megatron.convert.sources import open_checkpoint
from megatron.convert.staging import JOURNAL, ProgressCallback
from megatron.data.tokenizers.huggingface import (
    END_OF_DOCUMENT,
    HuggingFaceTokenizer,
    byte_level_bpe,
    byte_tokenizer,
    bytes_to_unicode,
    make_tokenizer_files,
)
from megatron.inference.text import TextCodec
from megatron.layers.context import DTYPES
from megatron.layers.parameters import num_parameters
from tests.kit.runs import records, start, tiny_run
from tests.kit.solo import Allocations, tiny
from tests.parity.families import from_gpt2, from_llama
from tests.unit.convert.folders import card_of, ignore, llama, opened, random_weights, write_checkpoint, write_folder
from tools.convert_checkpoint import main

MODELS = {"gpt2": tiny(), "llama": llama()}
TOKENIZER = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 2, "content": "<|endoftext|>"}]}
SETTINGS = {"eos_token": "<|endoftext|>", "bos_token": {"content": "b"}}
FILES = {
    "tokenizer/tokenizer.json": json.dumps(TOKENIZER).encode(),
    "tokenizer/tokenizer_config.json": json.dumps(SETTINGS).encode(),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return write_checkpoint(tmp_path_factory.mktemp("ckpt") / "iter_0000007", llama(), files=FILES)


def export(
    manifest: Manifest,
    folder: Path,
    dtype: torch.dtype = torch.float32,
    shard_bytes: int = 10**9,
    report: ProgressCallback = ignore,
    tokenizer: Path | None = None,
    checked: bool = False,
    workers: int = 1,
) -> Path:
    """Export without the check, unless asked for."""
    name = next(name for name, known in DTYPES.items() if known == dtype)
    convert_to_huggingface(
        SavedModel(manifest),
        folder,
        report,
        dtype=name,
        shard_bytes=shard_bytes,
        tokenizer=tokenizer,
        checked=checked,
        workers=workers,
    )
    return folder


def weights_of(folder: Path) -> dict[str, Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


# --- weights ---


@pytest.mark.parametrize("kind", MODELS)
def test_there_and_back_is_the_same_to_the_bit_and_checked(kind: str, tmp_path: Path) -> None:
    """And nothing larger than the largest tensor is allocated."""
    sizes = {"hidden_size": 128, "num_layers": 2, "vocab_size": 1024, "kv_channels": None}  # logits are smaller
    model = replace(MODELS[kind], **sizes)
    weights = random_weights(model, torch.bfloat16)
    folder = write_folder(tmp_path / "hf", model, weights, shards=3)
    largest = 4 * model.vocab * model.hidden_size
    with Allocations() as seen:
        there = convert_from_huggingface(opened(folder), tmp_path / "save", ignore)
        manifest = open_checkpoint(tmp_path / "save")[0]
        back = convert_to_huggingface(SavedModel(manifest), tmp_path / "back", ignore, shard_bytes=10**9)
        left = seen.alive
    assert seen.largest == largest
    assert left < largest / 10, "nothing is kept"
    assert there.path == tmp_path / "save" / "iter_0000000"
    assert there.differences
    assert back.differences[-1].what == "logits"
    assert all(d.relative <= TOLERANCE for d in (*there.differences, *back.differences))
    found = load_file(tmp_path / "back" / "model.safetensors")
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], value) for name, value in weights.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", MODELS)
def test_export_holds_the_masters_rounded_once(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = replace(MODELS[kind], make_vocab_size_divisible_by=64)
    saved = SavedModel(write_checkpoint(tmp_path / "iter_0000007", model))
    weights = weights_of(export(saved.manifest, tmp_path / "hf", dtype))
    assert all(value.dtype == dtype for value in weights.values())
    ours = (from_gpt2 if kind == "gpt2" else from_llama)(weights, saved.model)
    assert ours["embedding.word_embeddings.weight"].shape[0] == 101, "without padding of the vocabulary"
    for name, spec in saved.specs.items():
        exact = saved.read(name, spec.view, whole_box(spec.view)).reshape(spec.shape)
        assert torch.equal(ours[name], exact.to(dtype)), name


def test_numbers_that_the_format_does_not_hold_are_refused(tmp_path: Path) -> None:
    manifest = write_checkpoint(tmp_path / "iter_0000007", llama(), "fp64", std=30_000.0)
    with pytest.raises(CheckpointError, match=r"above 65504, too large for fp16[\s\S]*--dtype bf16"):
        export(manifest, tmp_path / "hf", torch.float16)
    with pytest.raises(CheckpointError, match=r"computed in fp64[\s\S]*--dtype fp32"):
        convert_to_huggingface(SavedModel(manifest), tmp_path / "hf", ignore, shard_bytes=10**9)
    assert [p.name for p in tmp_path.iterdir()] == ["iter_0000007"]


def with_swapped_halves() -> ModelFamily:
    """Llama with the two matrices of its MLP the other way round."""
    family = MODEL_FAMILIES["llama"]
    swaps = {"p[:1] f, h": "p[1:] f, h", "p[1:] f, h": "p[:1] f, h"}
    rows = {o: (axes, {n: swaps.get(a, a) for n, a in theirs.items()}) for o, (axes, theirs) in family.weights.items()}
    return replace(family, weights=rows)


def test_a_mistake_in_the_table_publishes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS["llama"]
    folder = write_folder(tmp_path / "hf", model, random_weights(model))
    manifest = write_checkpoint(tmp_path / "run" / "iter_0000007", model)
    monkeypatch.setitem(MODEL_FAMILIES, "llama", with_swapped_halves())
    with pytest.raises(MismatchError, match="block 0"):
        convert_from_huggingface(opened(folder), tmp_path / "save", ignore)
    assert list((tmp_path / "save").iterdir()) == []
    with pytest.raises(MismatchError, match="block 0"):
        export(manifest, tmp_path / "out", checked=True)
    assert {path.name for path in tmp_path.iterdir()} == {"hf", "run", "save"}
    assert convert_from_huggingface(opened(folder), tmp_path / "save", ignore, checked=False).differences == ()
    export(open_checkpoint(tmp_path / "save")[0], tmp_path / "out")


# --- files ---


def test_files_of_a_folder(saved: Manifest, tmp_path: Path) -> None:
    folder = export(saved, tmp_path / "hf", torch.bfloat16)
    names = {"tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json", "model.safetensors"}
    names |= {"README.md"}
    assert {path.name for path in folder.iterdir()} == names
    config = json.loads((folder / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, 2, None)
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    assert json.loads((folder / "generation_config.json").read_text()) == {"bos_token_id": 1, "eos_token_id": 2}
    assert (folder / "tokenizer.json").read_bytes() == FILES["tokenizer/tokenizer.json"]
    positions = {"model_max_length": llama().max_position_embeddings}
    assert json.loads((folder / "tokenizer_config.json").read_text()) == SETTINGS | positions
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert list(tmp_path.iterdir()) == [folder], "nothing is left beside it"


def test_shards_and_their_index(saved: Manifest, tmp_path: Path) -> None:
    folder = export(saved, tmp_path / "hf", shard_bytes=20_000)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 2
    assert [f.name for f in files] == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    assert index["weight_map"] == {name: file.name for file in files for name in load_file(file)}
    sizes = {file: sum(t.nbytes for t in load_file(file).values()) for file in files}
    assert max(sizes.values()) <= 20_000
    assert index["metadata"]["total_size"] == sum(sizes.values())
    whole = weights_of(export(saved, tmp_path / "whole"))
    assert all(torch.equal(whole[name], value) for name, value in weights_of(folder).items())
    items = [6, 6, 18, 2, 2, 2, 10]
    assert [items[shard] for shard in split_into_shards(items, 12)] == [[6, 6], [18], [2, 2, 2], [10]]


# --- folders in the way, kills and disks ---


def test_folders_in_the_way(saved: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    export(saved, tmp_path / "empty")
    (tmp_path / "file").write_text("x")
    (tmp_path / "here").mkdir()
    (tmp_path / "link").symlink_to("here")
    monkeypatch.chdir(tmp_path / "here")
    for name, message in [
        ("../empty", "exists and is not empty"),
        ("../file", "exists and is not empty"),
        ("..", "exists and is not empty"),
        (".", "is the current folder"),
        (str(tmp_path / "link"), f"is a link[^\n]*\n  fix: --save-hf {tmp_path}/here"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            export(saved, Path(name))
    assert {path.name for path in tmp_path.iterdir()} == {"empty", "file", "here", "link"}
    with pytest.raises(CheckpointError, match="holds checkpoints already"):
        convert_from_huggingface(opened(tmp_path / "empty"), saved.path.parent, ignore)


@pytest.mark.parametrize("empty", [False, True])
def test_an_export_killed_before_its_last_step_is_complete(saved: Manifest, empty: bool, tmp_path: Path) -> None:
    """It only lacks its name, and the error has the command that gives it."""
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


def test_only_leftovers_of_a_killed_export_are_replaced(saved: Manifest, tmp_path: Path) -> None:
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


def killed_at(number: int, run: Callable[[ProgressCallback], object]) -> None:
    """Run a conversion in a child that kills itself when ``number`` tensors are reported."""
    child = os.fork()
    if child == 0:
        reports = 0

        def report(name: str, done: int, total: int) -> None:
            nonlocal reports
            reports += 1
            if reports == number or done == total:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            run(report)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGKILL


@pytest.mark.parametrize("number", [1, 6, 10**9])
def test_a_kill_leaves_nothing_that_looks_complete(number: int, saved: Manifest, tmp_path: Path) -> None:
    out, save = tmp_path / "out", tmp_path / "save"
    killed_at(number, lambda report: export(saved, out, report=report, shard_bytes=20_000))
    assert not out.exists()
    assert not (tmp_path / "out.tmp" / "config.json").exists()
    export(saved, out, shard_bytes=20_000)
    assert not (tmp_path / "out.tmp").exists()
    killed_at(number, lambda report: convert_from_huggingface(opened(out), save, report, checked=False))
    assert CheckpointFolder(save).candidates() == []
    convert_from_huggingface(opened(out), save, ignore, checked=False)
    assert [path.name for path in save.iterdir()] == ["iter_0000000"]


def inodes(folder: Path) -> dict[str, tuple[int, int]]:
    """Number and time of the last change: numbers of deleted files are used again."""
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.glob("*.safetensors")}


def test_a_killed_export_continues(saved: Manifest, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only complete files are kept, from the same source with the same options."""
    whole = weights_of(export(saved, tmp_path / "whole"))
    out, staging = tmp_path / "out", tmp_path / "out.tmp"

    def kill() -> dict[str, tuple[int, int]]:
        shutil.rmtree(out, ignore_errors=True)
        killed_at(10, lambda report: export(saved, out, report=report, shard_bytes=10_000))
        return inodes(staging)

    def kept(**changes: Any) -> set[str]:
        export(saved, out, **{"shard_bytes": 10_000} | changes)
        expected = {name: value.to(changes.get("dtype", torch.float32)) for name, value in whole.items()}
        assert all(torch.equal(value, expected[name]) for name, value in weights_of(out).items())
        return {name for name, inode in inodes(out).items() if before.get(name) == inode}

    before = kill()
    *complete, _ = sorted(before)
    assert len(complete) > 2
    assert kept() == {*complete}
    assert not (out / JOURNAL).exists()
    before = kill()
    with (staging / complete[0]).open("r+b") as file:  # one flipped byte, in the last tensor
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    os.truncate(staging / complete[1], 500)
    (staging / "stranger").write_text("x")
    assert kept() == {*complete[2:]}
    assert not (out / "stranger").exists()
    kill()
    assert main(["--load", str(saved.path), "--save-hf", str(out), "--max-shard-size", "10KB", "--no-check"]) == 0
    assert re.match(r"continued: \d+ files of an interrupted conversion were complete\n", capsys.readouterr().out)
    before = kill()
    assert kept(dtype=torch.bfloat16) == set()
    before = kill()
    assert kept(shard_bytes=20_000) == set()
    before = kill()
    with patch.object(convert, "package_version", lambda: "another version"):
        assert kept() == set()
    before = kill()
    other = write_checkpoint(tmp_path / "iter_0000007", llama(), files=FILES, std=0.3)
    export(other, out, shard_bytes=10_000)
    assert inodes(out).items().isdisjoint(before.items()), "of another checkpoint"


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_an_export_that_is_withdrawn_is_replaced(renames: int, saved: Manifest, tmp_path: Path) -> None:
    """Also if it was killed before one of its renames; the folder has no config.json then, from the first one on."""
    out, left = tmp_path / "out", iter(range(renames))

    def rename(source: Path, target: Path) -> None:
        next(left)  # StopIteration after so many
        os.rename(source, target)

    export(saved, out)
    with patch.object(convert, "durable_rename", rename), suppress(StopIteration):
        convert.withdraw_export(out)
    assert (out / "config.json").exists() == (renames == 0)
    convert.withdraw_export(out)
    assert not out.exists()
    other = write_checkpoint(tmp_path / "iter_0000007", llama(), files=FILES, std=0.3)
    expected = weights_of(export(other, tmp_path / "whole"))
    found = weights_of(export(other, out))
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert not (tmp_path / "out.tmp").exists()


def test_a_killed_import_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "FILE_BYTES", 10_000)
    model = llama()
    weights = random_weights(model)
    folder = write_folder(tmp_path / "hf", model, weights)
    save = tmp_path / "save"

    def kill() -> dict[str, tuple[int, int]]:
        shutil.rmtree(save, ignore_errors=True)
        killed_at(10, lambda report: convert_from_huggingface(opened(folder), save, report, checked=False))
        assert CheckpointFolder(save).named() == []
        return inodes(save / "iter_0000000.unchecked" / convert.ATTEMPT)

    before = kill()
    *complete, _ = sorted(before)
    assert len(complete) > 2
    done = convert_from_huggingface(opened(folder), save, ignore)
    after = inodes(done.path / convert.ATTEMPT)
    assert {name for name, inode in after.items() if before.get(name) == inode} == {*complete}
    assert done.kept == len(complete)
    assert not list(save.rglob(JOURNAL))
    assert all(
        torch.equal(value, weights[name])
        for name, value in weights_of(export(Manifest.open(done.path), tmp_path / "back")).items()
    )
    before = kill()
    write_folder(tmp_path / "new", model, random_weights(model, seed=1))
    (tmp_path / "new" / "model.safetensors").rename(folder / "model.safetensors")  # of the same size
    assert convert_from_huggingface(opened(folder), save, ignore).kept == 0
    kill()
    assert convert_from_huggingface(opened(folder), save, ignore, dtype="bf16", checked=False).kept == 0
    kill()
    with patch.object(convert, "package_version", lambda: "another version"):
        assert convert_from_huggingface(opened(folder), save, ignore).kept == 0
    kill()
    with patch.dict(MODEL_FAMILIES, llama=with_swapped_halves()):
        assert convert_from_huggingface(opened(folder), save, ignore, checked=False).kept == 0


def test_two_conversions_do_not_write_to_one_folder(saved: Manifest, tmp_path: Path) -> None:
    def export_again(name: str, done: int, total: int) -> None:
        export(saved, tmp_path / "out")

    with pytest.raises(CheckpointError, match=rf"out\.tmp is being written by process {os.getpid()} of .*; wait"):
        export(saved, tmp_path / "out", report=export_again)


def test_a_failed_conversion_is_deleted_before_another_may_start(
    saved: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deletion after the lock is released could delete files of the next conversion."""
    rmtree, states = shutil.rmtree, []

    def delete(path: Path, *arguments: Any, **named: Any) -> None:
        for journal in Path(path).rglob(JOURNAL):
            with journal.open("rb") as file:
                states.append(try_lock(file))
        rmtree(path, *arguments, **named)

    def fail(name: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    folder = write_folder(tmp_path / "hf", llama(), random_weights(llama()))
    monkeypatch.setattr(shutil, "rmtree", delete)
    with pytest.raises(KeyboardInterrupt):
        export(saved, tmp_path / "out", report=fail)
    with pytest.raises(KeyboardInterrupt):
        convert_from_huggingface(opened(folder), tmp_path / "save", fail)
    assert states == [LockState.HELD, LockState.HELD]
    assert not (tmp_path / "out.tmp").exists()
    assert [*(tmp_path / "save").iterdir()] == []


def test_side_by_side(saved: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several threads write the same files as one; an error in one of them ends the others and leaves nothing."""
    one = export(saved, tmp_path / "one", shard_bytes=10_000)
    two = export(saved, tmp_path / "two", shard_bytes=10_000, workers=3)
    assert {p.name: p.read_bytes() for p in one.iterdir()} == {p.name: p.read_bytes() for p in two.iterdir()}
    monkeypatch.setattr(convert, "FILE_BYTES", 10_000)
    done = convert_from_huggingface(opened(two), tmp_path / "save", ignore, workers=3)
    assert len(list((done.path / convert.ATTEMPT).glob("*.safetensors"))) > 3

    def fail(name: str, done: int, total: int) -> None:
        if done > total // 2:
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(StorageError, match="No space left on device; nothing was exported"):
        export(saved, tmp_path / "hf", shard_bytes=10_000, workers=3, report=fail)
    with pytest.raises(StorageError, match="the disk is full"):
        convert_from_huggingface(opened(one), tmp_path / "full", fail, workers=3)
    assert {path.name for path in tmp_path.iterdir()} == {"one", "two", "save", "full"}
    assert list((tmp_path / "full").iterdir()) == []


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_weights_are_stored_in_the_data_type_that_is_asked_for(dtype: str, tmp_path: Path) -> None:
    """And compared with transformers on rounded weights."""
    weights = random_weights(llama())
    folder = write_folder(tmp_path / "hf", llama(), weights)
    done = convert_from_huggingface(opened(folder), tmp_path / "save", ignore, dtype=dtype)
    assert done.differences
    manifest = Manifest.open(done.path)
    assert {record.dtype for record in manifest.tensors.values()} == {dtype.upper()[:-2].replace("FP", "F") + "16"}
    convert_to_huggingface(SavedModel(manifest), tmp_path / "back", ignore, shard_bytes=10**9)
    back = weights_of(tmp_path / "back")
    assert all(torch.equal(back[name], value.to(DTYPES[dtype])) for name, value in weights.items())
    weights["model.norm.weight"][0] = 1e5
    if dtype == "fp16":
        folder = write_folder(tmp_path / "large", llama(), weights)
        with pytest.raises(
            CheckpointError, match=r"final_layernorm\.weight has values above 65504, too large for fp16"
        ):
            convert_from_huggingface(opened(folder), tmp_path / "other", ignore, dtype=dtype)


@pytest.mark.parametrize(("call", "number"), [("write", 1), ("write", 5), ("fsync", 2), ("rename", 1), ("rename", 2)])
def test_a_failing_disk_leaves_nothing(
    call: str, number: int, saved: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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


# --- tokenizers ---


def trained_bpe() -> dict[str, bytes]:
    """A byte-level BPE with GPT-2's words, whose digits and line ends are split differently from Qwen's."""
    tokenizer = byte_level_bpe(models.BPE(), words=True)
    special = [END_OF_DOCUMENT]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=bytes_to_unicode())
    tokenizer.train_from_iterator([*SAMPLE_TEXTS, "In 1234567 the year 2024 99.95"] * 3, trainer)
    return make_tokenizer_files(tokenizer)


def in_checkpoint(files: dict[str, bytes]) -> dict[str, bytes]:
    return {f"tokenizer/{name}": content for name, content in files.items()}


def test_a_tokenizer_that_transformers_reads_differently_is_refused(tmp_path: Path) -> None:
    qwen2 = llama(add_qkv_bias=True, vocab_size=512)
    manifest = write_checkpoint(tmp_path / "iter_0000007", qwen2, files=in_checkpoint(trained_bpe()))
    with pytest.raises(MismatchError, match=r"ids for \d+ of [\s\S]* model_type qwen2"):
        export(manifest, tmp_path / "out", checked=True)
    assert [path.name for path in tmp_path.iterdir()] == ["iter_0000007"], "nothing is written"
    export(manifest, tmp_path / "out")
    ours, text = HuggingFaceTokenizer(tmp_path / "out"), SAMPLE_TEXTS[1]
    assert AutoTokenizer.from_pretrained(tmp_path / "out")(text)["input_ids"] != list(ours.encode(text))
    assert PreTrainedTokenizerFast.from_pretrained(tmp_path / "out")(text)["input_ids"] == list(ours.encode(text))
    unigram = tokenizers.Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0))
    files = in_checkpoint(make_tokenizer_files(unigram))
    with pytest.raises(MismatchError, match="AutoTokenizer of transformers"):
        export(write_checkpoint(tmp_path / "iter_0000008", qwen2, files=files), tmp_path / "other", checked=True)


@pytest.mark.parametrize("named", [None, "Qwen2Tokenizer"])
def test_the_tokenizer_class_is_one_that_reads_the_same_ids(named: str | None, tmp_path: Path) -> None:
    files = trained_bpe()
    settings = json.loads(files["tokenizer_config.json"]) | {"tokenizer_class": named}
    files["tokenizer_config.json"] = json.dumps({k: v for k, v in settings.items() if v is not None}).encode()
    qwen3 = llama(qk_layernorm=True, vocab_size=512)
    manifest = write_checkpoint(tmp_path / "iter_0000007", qwen3, files=in_checkpoint(files))
    export(manifest, tmp_path / "out", checked=True)
    ours, theirs = HuggingFaceTokenizer(tmp_path / "out"), AutoTokenizer.from_pretrained(tmp_path / "out")
    assert all(theirs(text)["input_ids"] == list(ours.encode(text)) for text in SAMPLE_TEXTS)
    written = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    made = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": qwen3.max_position_embeddings}
    assert written == settings | made


def test_tokenizer_of_another_folder(saved: Manifest, tmp_path: Path) -> None:
    other = tmp_path / "tokenizer"
    other.mkdir()
    with pytest.raises(CheckpointError, match=re.escape("holds no tokenizer.json")):
        export(saved, tmp_path / "hf", tokenizer=other)
    (other / "tokenizer.json").write_text(json.dumps({"model": {"vocab": [["x", -1.0], ["</s>", -2.0]]}}))
    (other / "special_tokens_map.json").write_text(json.dumps({"eos_token": "</s>"}))
    export(saved, tmp_path / "hf", tokenizer=other)
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["eos_token_id"] == 1
    settings = json.loads((tmp_path / "hf" / "tokenizer_config.json").read_text())
    assert settings == {"model_max_length": llama().max_position_embeddings}, "the checkpoint's own is left out"


@pytest.mark.parametrize(("length", "written"), [(None, 16), (int(1e30), 16), (0, 16), (12, 12), (4096, 4096)])
def test_length_of_texts(length: int | None, written: int, tmp_path: Path) -> None:
    """transformers writes 1e30 for no limit; and files that are no JSON of a tokenizer travel as they are."""
    other = {"chat_template.jinja": b"{{ x }}", "spiece.model": b"\x00\xff", "added_tokens.json": b"{}"}
    settings = SETTINGS | ({} if length is None else {"model_max_length": length})
    given = {"tokenizer.json": TOKENIZER, "tokenizer_config.json": settings}
    files = in_checkpoint(other | {name: json.dumps(content).encode() for name, content in given.items()})
    folder = export(write_checkpoint(tmp_path / "iter_0000007", llama(), files=files), tmp_path / "hf")
    found = json.loads((folder / "tokenizer_config.json").read_text())
    assert found == SETTINGS | {"model_max_length": written}
    assert {name: (folder / name).read_bytes() for name in other} == other
    convert_from_huggingface(opened(folder), tmp_path / "save", ignore, checked=False)
    again = export(open_checkpoint(tmp_path / "save")[0], tmp_path / "again")
    assert {name: (again / name).read_bytes() for name in other} == other


# --- model cards ---


def test_the_card_of_a_run(tmp_path: Path) -> None:
    flags = f"--save {tmp_path}/saved --eval-iters 1 --lr-decay-style cosine --adam-beta2 0.95 --global-batch-size 4"
    assert start(tiny_run(tmp_path, flags)).status == 0
    manifest = open_checkpoint(tmp_path / "saved")[0]
    card = card_of(export(manifest, tmp_path / "hf"))
    assert card["architecture"].startswith("GPT2LMHeadModel: 2 layers, hidden 16, ")
    assert card["parameters"] == f"{num_parameters(SavedModel(manifest).model):,}, in float32"
    assert card["trained for"] == "6 steps, 24 samples, 192 tokens"
    assert card["last loss, train"] == f"{records(tmp_path)[-1]['lm loss']:.4f}"
    (evaluated,) = records(tmp_path, "lm loss validation")
    assert card["last loss, valid"] == f"{evaluated['lm loss validation']:.4f}"
    assert card["optimizer"].startswith("adam, learning rate 0.01 cosine to 0")
    assert "adam_beta2 0.95" in card["optimizer options"].split(", ")
    assert "lion" not in card["optimizer options"]
    assert card["data, train"] == f"generated tokens, fingerprint {manifest.state['data']['fingerprints']['train']}"
    assert card["trained with"] == f"{package_version()}, torch {torch.__version__}, 1 rank"
    data = {"mock_data": False, "train_data_path": ["0.3", "/elsewhere/me/a|b_document", "0.7", "/secret/wiki"]}
    manifest.config["data"] |= data | {"valid_data_path": ["/secret/x"]}
    card = card_of(export(manifest, tmp_path / "named"))
    assert card["data, train"].startswith(r"0.3 a\|b_document, 0.7 wiki, fingerprint ")
    text = (tmp_path / "named" / "README.md").read_text()
    assert not any(folder in text for folder in ("/elsewhere", "/secret", str(tmp_path)))
    manifest.config["optimizer"] |= {"lr": "high", "unknown": 3}
    manifest.state.update(losses={"train": "low"}, written_by={"layout": {"dp": "many"}})
    assert "last loss, train" not in card_of(export(manifest, tmp_path / "odd")), "what cannot be read is left out"


def test_a_card_of_the_tokenizer_is_kept(saved: Manifest, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export(saved, tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "README.md").write_text("theirs")
    flags = ["--save-hf", f"{tmp_path}/hf", "--tokenizer", f"{tmp_path}/tokenizer", "--no-check"]
    assert main(["--load", str(saved.path), *flags]) == 0
    assert (tmp_path / "hf" / "README.md").read_text() == "theirs"
    assert "| architecture | LlamaForCausalLM: 2 layers" in (tmp_path / "hf" / "TRAINING.md").read_text()
    assert "README.md is that of --tokenizer; how the model was trained is in TRAINING.md" in capsys.readouterr().out


def test_special_ids(tmp_path: Path) -> None:
    files = {name.removeprefix("tokenizer/"): content for name, content in FILES.items()}
    only = {"tokenizer.json": files["tokenizer.json"]}
    none = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    ends = {"eos_token_id": 2}
    for given, expected in [
        (files, none | ends | {"bos_token_id": 1}),
        ({}, none),
        (only, none | ends),  # as data ends with it
        ({"tokenizer.json": b'{"model": {"vocab": {"None": 0}}}'}, none),  # None is a word too
        (only | {"generation_config.json": b'{"eos_token_id": null}'}, none | ends),
        (only | {"generation_config.json": b'{"eos_token_id": [2, 0]}'}, none | {"eos_token_id": [2, 0]}),
    ]:
        assert special_token_ids(given, 3) == expected
    not_one = r"tokenizer\.json is not one of the tokenizers library: .*\n  fix: "
    for name, content, message in [
        ("tokenizer_config.json", b"{", r"tokenizer_config\.json is not a JSON object"),
        ("generation_config.json", b"[]", r"generation_config\.json is no JSON object"),
        ("tokenizer.json", b'{"model": {"vocab": null}}', not_one),
        ("tokenizer.json", b'{"added_tokens": [{}]}', not_one),
    ]:
        with pytest.raises(CheckpointError, match=message):
            special_token_ids(files | {name: content}, 3)
    with pytest.raises(CheckpointError, match="ids up to 2, but the model's vocabulary 2 entries"):
        special_token_ids(files, 2)
    given = FILES | {"generation_config.json": b'{"temperature": 0.7, "eos_token_id": null}'}
    folder = export(write_checkpoint(tmp_path / "iter_0000007", llama(), files=given), tmp_path / "hf")
    settings = json.loads((folder / "generation_config.json").read_text())
    assert settings == {"temperature": 0.7, "bos_token_id": 1, "eos_token_id": 2}, "settings of generation are kept"


@pytest.mark.parametrize("settings", [{}, {"tokenizer_config.json": SETTINGS}])
def test_data_generation_and_export_agree_on_the_end(settings: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(byte_tokenizer().to_str())
    for name, content in settings.items():
        (tmp_path / name).write_text(json.dumps(content))
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    ends = {HuggingFaceTokenizer(tmp_path).eod, TextCodec(files).end, special_token_ids(files, 257)["eos_token_id"]}
    assert ends == {256}
