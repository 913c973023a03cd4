from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers
import torch
from safetensors.torch import load_file
from tokenizers import models, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from megatron.checkpoint.errors import CheckpointError
from megatron.checkpoint.folder import CheckpointFolder
from megatron.config.model import ModelConfig
from megatron.convert.huggingface.check import SAMPLE_TEXTS, TOLERANCE, MismatchError
from megatron.convert.huggingface.convert import convert_from_huggingface, convert_to_huggingface
from megatron.convert.huggingface.families import MODEL_FAMILIES
from megatron.convert.saved_model import open_checkpoint
from megatron.data.tokenizers.huggingface import (
    END_OF_DOCUMENT,
    HuggingFaceTokenizer,
    byte_level_bpe,
    bytes_to_unicode,
    make_tokenizer_files,
)
from tests.solo import Allocations, tiny
from tests.unit.convert.folders import ignore, llama, random_weights, write_checkpoint, write_folder

MODELS = {"gpt2": tiny(), "llama": llama()}


def swap_rows(monkeypatch: pytest.MonkeyPatch, kind: str, first: str, second: str) -> None:
    """Let two axes descriptions of a family's table change places."""
    family = MODEL_FAMILIES[kind]
    swaps = {first: second, second: first}
    rows = tuple((o, axes, tuple((n, swaps.get(a, a)) for n, a in theirs)) for o, axes, theirs in family.weights.rows)
    monkeypatch.setitem(MODEL_FAMILIES, kind, replace(family, weights=replace(family.weights, rows=rows)))


@pytest.mark.parametrize("kind", MODELS)
def test_there_and_back_is_the_same_to_the_bit_and_checked(kind: str, tmp_path: Path) -> None:
    model = MODELS[kind]
    weights = random_weights(model, torch.bfloat16)
    there = convert_from_huggingface(write_folder(tmp_path / "hf", model, weights, shards=3), tmp_path / "save", ignore)
    assert there.path == tmp_path / "save" / "iter_0000000"
    assert there.differences
    back = convert_to_huggingface(open_checkpoint(tmp_path / "save")[0], tmp_path / "back", ignore, shard_bytes=10**9)
    assert back.differences[-1].what == "logits"
    assert all(d.relative <= TOLERANCE for d in (*there.differences, *back.differences))
    found = load_file(tmp_path / "back" / "model.safetensors")
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], value) for name, value in weights.items())


def test_a_mistake_in_the_table_publishes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS["llama"]
    folder = write_folder(tmp_path / "hf", model, random_weights(model))
    write_checkpoint(tmp_path / "run" / "iter_0000007", model)
    swap_rows(monkeypatch, "llama", "p[:1] f, h", "p[1:] f, h")
    with pytest.raises(MismatchError, match="block 0"):
        convert_from_huggingface(folder, tmp_path / "save", ignore)
    assert list((tmp_path / "save").iterdir()) == []
    with pytest.raises(MismatchError, match="block 0"):
        convert_to_huggingface(open_checkpoint(tmp_path / "run")[0], tmp_path / "out", ignore, shard_bytes=10**9)
    assert {path.name for path in tmp_path.iterdir()} == {"hf", "run", "save"}


def test_unchecked_conversions_compare_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS["llama"]
    folder = write_folder(tmp_path / "hf", model, random_weights(model))
    swap_rows(monkeypatch, "llama", "p[:1] f, h", "p[1:] f, h")
    assert convert_from_huggingface(folder, tmp_path / "save", ignore, checked=False).differences == ()
    done = convert_to_huggingface(
        open_checkpoint(tmp_path / "save")[0], tmp_path / "out", ignore, shard_bytes=10**9, checked=False
    )
    assert done.differences == ()


def test_folder_with_checkpoints_is_left_alone(tmp_path: Path) -> None:
    model = MODELS["llama"]
    write_checkpoint(tmp_path / "save" / "iter_0000007", model)
    with pytest.raises(CheckpointError, match="holds checkpoints already"):
        convert_from_huggingface(write_folder(tmp_path / "hf", model, random_weights(model)), tmp_path / "save", ignore)


def test_fp64_is_not_rounded_unasked(tmp_path: Path) -> None:
    manifest = write_checkpoint(tmp_path / "iter_0000007", MODELS["llama"], "fp64")
    with pytest.raises(CheckpointError, match=r"computed in fp64[\s\S]*--dtype fp32"):
        convert_to_huggingface(manifest, tmp_path / "out", ignore, shard_bytes=10**9)
    convert_to_huggingface(manifest, tmp_path / "out", ignore, dtype="bf16", shard_bytes=10**9, checked=False)


def killed_at(number: int, convert: Callable[[Callable[[str, int, int], None]], object]) -> None:
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
            convert(report)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGKILL


@pytest.mark.parametrize("number", [1, 6, 10**9])
def test_a_kill_leaves_nothing_that_looks_complete(number: int, tmp_path: Path) -> None:
    model: ModelConfig = MODELS["llama"]
    manifest = write_checkpoint(tmp_path / "run" / "iter_0000007", model)
    out = tmp_path / "out"
    killed_at(number, lambda report: convert_to_huggingface(manifest, out, report, shard_bytes=20_000, checked=False))
    assert not out.exists()
    assert not (tmp_path / "out.tmp" / "config.json").exists()
    convert_to_huggingface(manifest, out, ignore, shard_bytes=20_000, checked=False)
    assert not (tmp_path / "out.tmp").exists()

    save = tmp_path / "save"
    killed_at(number, lambda report: convert_from_huggingface(out, save, report, checked=False))
    assert CheckpointFolder(save).candidates() == []
    convert_from_huggingface(out, save, ignore, checked=False)
    assert [path.name for path in save.iterdir()] == ["iter_0000000"]


@pytest.mark.parametrize("kind", MODELS)
def test_no_memory_larger_than_the_largest_tensor_is_asked_for(kind: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "num_layers": 3, "vocab_size": 2048, "kv_channels": None}  # logits are smaller
    model = replace(MODELS[kind], **sizes)
    folder = write_folder(tmp_path / "hf", model, random_weights(model, torch.bfloat16))
    largest = 4 * model.vocab * model.hidden_size
    with Allocations() as seen:
        convert_from_huggingface(folder, tmp_path / "save", ignore)
        convert_to_huggingface(open_checkpoint(tmp_path / "save")[0], tmp_path / "back", ignore, shard_bytes=10**9)
        left = seen.alive
    assert seen.largest == largest
    assert left < largest / 10, "nothing is kept"


def trained_bpe() -> dict[str, bytes]:
    """A byte-level BPE with GPT-2's words, whose digits and line ends are cut otherwise than Qwen's."""
    tokenizer = byte_level_bpe(models.BPE(), words=True)
    special = [END_OF_DOCUMENT]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=bytes_to_unicode())
    tokenizer.train_from_iterator([*SAMPLE_TEXTS, "In 1234567 the year 2024 99.95"] * 3, trainer)
    return make_tokenizer_files(tokenizer)


def test_a_tokenizer_that_transformers_reads_otherwise_is_refused(tmp_path: Path) -> None:
    files = {f"tokenizer/{name}": content for name, content in trained_bpe().items()}
    qwen2 = llama(add_qkv_bias=True, vocab_size=512)
    manifest = write_checkpoint(tmp_path / "iter_0000007", qwen2, files=files)
    with pytest.raises(MismatchError, match=r"ids for \d+ of [\s\S]* model_type qwen2"):
        convert_to_huggingface(manifest, tmp_path / "out", ignore, shard_bytes=10**9)
    assert [path.name for path in tmp_path.iterdir()] == ["iter_0000007"], "nothing is written"

    convert_to_huggingface(manifest, tmp_path / "out", ignore, shard_bytes=10**9, checked=False)
    ours, text = HuggingFaceTokenizer(tmp_path / "out"), SAMPLE_TEXTS[1]
    assert AutoTokenizer.from_pretrained(tmp_path / "out")(text)["input_ids"] != list(ours.encode(text))
    assert PreTrainedTokenizerFast.from_pretrained(tmp_path / "out")(text)["input_ids"] == list(ours.encode(text))


@pytest.mark.parametrize("named", [None, "Qwen2Tokenizer"])
def test_the_tokenizer_class_is_one_that_reads_the_same_ids(named: str | None, tmp_path: Path) -> None:
    files = trained_bpe()
    settings = json.loads(files["tokenizer_config.json"]) | {"tokenizer_class": named}
    files["tokenizer_config.json"] = json.dumps({k: v for k, v in settings.items() if v is not None}).encode()
    carried = {f"tokenizer/{name}": content for name, content in files.items()}
    qwen3 = llama(qk_layernorm=True, vocab_size=512)
    manifest = write_checkpoint(tmp_path / "iter_0000007", qwen3, files=carried)
    convert_to_huggingface(manifest, tmp_path / "out", ignore, shard_bytes=10**9)
    ours, theirs = HuggingFaceTokenizer(tmp_path / "out"), AutoTokenizer.from_pretrained(tmp_path / "out")
    assert all(theirs(text)["input_ids"] == list(ours.encode(text)) for text in SAMPLE_TEXTS)
    written = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert written == settings | {"tokenizer_class": "PreTrainedTokenizerFast"}


def test_a_tokenizer_that_transformers_cannot_load_is_refused(tmp_path: Path) -> None:
    tokenizer = tokenizers.Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0))
    files = {f"tokenizer/{name}": content for name, content in make_tokenizer_files(tokenizer).items()}
    qwen2 = write_checkpoint(tmp_path / "iter_0000007", llama(add_qkv_bias=True), files=files)
    with pytest.raises(MismatchError, match="AutoTokenizer of transformers"):
        convert_to_huggingface(qwen2, tmp_path / "out", ignore, shard_bytes=10**9)
