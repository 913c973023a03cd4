from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron.checkpoint.format import Manifest
from megatron.checkpoint.object_store import RemotePath
from megatron.convert.huggingface.check import OutputDifference
from megatron.convert.huggingface.convert import ConversionResult
from megatron.data import progress
from megatron.layers.parameters import num_parameters
from tests.unit.convert.folders import llama, random_weights, write_checkpoint, write_folder
from tests.unit.convert.test_saved_model import rewritten
from tools.convert_checkpoint import ProgressPrinter, main, parse_size


def test_there_and_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = llama()
    write_folder(tmp_path / "hf", model, random_weights(model))
    assert main(["--load-hf", f"{tmp_path}/hf", "--save", f"{tmp_path}/save"]) == 0
    out, err = capsys.readouterr()
    assert f"wrote {tmp_path}/save/iter_0000000: {num_parameters(model):,} parameters" in out
    assert "transformers computes the same: logits by " in out
    assert "%" not in err
    back = [
        "--load",
        f"{tmp_path}/save",
        "--save-hf",
        f"{tmp_path}/back",
        "--dtype",
        "bf16",
        "--max-shard-size",
        "20KB",
    ]
    assert main([*back, "--no-check"]) == 0
    out, err = capsys.readouterr()
    assert "not compared with transformers" in out
    assert err == f"convert_checkpoint: from {tmp_path}/save/iter_0000000, step 0\n"
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 2


def test_from_an_object_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(RemotePath("memory://convert/run/iter_0000007"), llama())
    assert main(["--load", "memory://convert/run", "--save-hf", f"{tmp_path}/hf", "--no-check"]) == 0
    assert "from memory://convert/run/iter_0000007, step 7" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--load-hf", f"{tmp_path}/hf", "--save", "s3://bucket/run"])
    assert "s3://bucket/run is in an object store" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--load", "memory://convert/run", "--save", f"hf:{tmp_path}/b"])
    assert f"; --save-hf {tmp_path}/b writes that format" in capsys.readouterr().err


def test_skipped_checkpoints_and_comparisons_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = llama(window_size=500, max_position_embeddings=1000)
    for step in (7, 9):
        write_checkpoint(tmp_path / "save" / f"iter_{step:07d}", model)
    (tmp_path / "save" / "iter_0000009" / "COMPLETE").unlink()
    assert main(["--load", f"{tmp_path}/save", "--save-hf", f"{tmp_path}/hf"]) == 0
    out, err = capsys.readouterr()
    assert "not compared: the window of 500 tokens, because the rows compared have 32\n" in out
    first, second = err.splitlines()
    assert first == f"convert_checkpoint: from {tmp_path}/save/iter_0000007, step 7"
    assert second.startswith(f"convert_checkpoint: passed over {tmp_path}/save/iter_0000009: ")


@pytest.mark.parametrize(
    ("rotary", "logits", "message"),
    [
        (0.0, 0.0, "logits by 0.0e+00 (0.0e+00 of the largest)"),
        (1e-7, 2e-7, "logits by 2.0e-07 (2.0e-07 of the largest)"),
        (3e-7, 2e-7, "logits by 2.0e-07 (2.0e-07 of the largest); at worst rotary by 3.0e-07 (3.0e-07 of the largest)"),
    ],
)
def test_the_worst_difference_is_printed_beside_the_logits(
    rotary: float, logits: float, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    differences = [OutputDifference("rotary", rotary, rotary), OutputDifference("logits", logits, logits)]
    done = ConversionResult(Path("x"), llama(), differences)
    monkeypatch.setattr("tools.convert_checkpoint.convert", lambda args: done)
    assert main(["--load", "a", "--save-hf", "x"]) == 0
    assert capsys.readouterr().out.splitlines()[1] == f"transformers computes the same: {message}"


def test_errors_are_sentences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--load-hf", f"{tmp_path}/none", "--save", f"{tmp_path}/save"]) == 1
    assert capsys.readouterr().err.startswith(f"convert_checkpoint: E850 {tmp_path}/none holds no config.json")
    assert main(["--load", f"{tmp_path}/none", "--save-hf", f"{tmp_path}/out"]) == 1
    assert capsys.readouterr().err == f"convert_checkpoint: {tmp_path}/none does not hold a checkpoint\n"
    model = llama()
    weights = random_weights(model)
    del weights["model.norm.weight"]
    write_folder(tmp_path / "hf", model, weights)
    assert main(["--load-hf", f"{tmp_path}/hf", "--save", f"{tmp_path}/save"]) == 1
    assert capsys.readouterr().err == f"convert_checkpoint: {tmp_path}/hf lacks: model.norm.weight\n"
    assert not (tmp_path / "save").exists()
    assert main(["--plugin", "no_such_module", "--load", "a", "--save-hf", "b"]) == 1
    assert "E914" in capsys.readouterr().err


def changed_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def changed_tensors(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


def flipped(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


NORM, HEAD = "model.norm.weight", "lm_head.weight"
SHARDS = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
INDEX = "model.safetensors.index.json"
BROKEN_MODELS: dict[str, tuple[Callable[[Path], object], str]] = {
    "shard cut in a tensor": (lambda f: os.truncate(f / SHARDS[1], 4000), SHARDS[1]),
    "shard cut in its header": (lambda f: os.truncate(f / SHARDS[0], 100), SHARDS[0]),
    "shard empty": (lambda f: os.truncate(f / SHARDS[0], 0), SHARDS[0]),
    "shard too long": (lambda f: (f / SHARDS[0]).open("ab").write(b"more"), SHARDS[0]),
    "shard missing": (lambda f: (f / SHARDS[1]).unlink(), SHARDS[1]),
    "shard with another shape": (
        lambda f: changed_tensors(f / SHARDS[0], lambda t: t.update({NORM: torch.zeros(5)})),
        rf"{NORM} \[5\] instead of \[32\]",
    ),
    "shard with an integer type": (
        lambda f: changed_tensors(f / SHARDS[0], lambda t: t.update({NORM: torch.zeros(32, dtype=torch.int64)})),
        rf"unsupported data type: {NORM} torch.int64",
    ),
    "shard without a tensor": (
        lambda f: changed_tensors(f / SHARDS[0], lambda t: t.pop(NORM)),
        rf"{INDEX} .* do not match: {NORM} in {SHARDS[0]}",
    ),
    "shard with a tensor more": (
        lambda f: changed_tensors(f / SHARDS[0], lambda t: t.update(extra=torch.zeros(5))),
        "tensors that the model does not have: extra",
    ),
    "shard with a value that is not finite": (
        lambda f: changed_tensors(f / SHARDS[0], lambda t: t[NORM].fill_(torch.nan)),
        f"NaN or infinite: {NORM}",
    ),
    "index cut": (lambda f: os.truncate(f / INDEX, 50), INDEX),
    "index of another model": (lambda f: changed_json(f / INDEX, weight_map={NORM: "../x"}), "outside its folder"),
    "index with another file": (
        lambda f: (f / INDEX).write_text(re.sub(rf'({NORM}": ")[^"]*', rf"\1{SHARDS[1]}", (f / INDEX).read_text())),
        f"{NORM} in {SHARDS[1]}",
    ),
    "config cut": (lambda f: os.truncate(f / "config.json", 20), "config.json"),
    "config empty": (lambda f: (f / "config.json").write_text("[]"), "config.json"),
    "config with more layers": (lambda f: changed_json(f / "config.json", num_hidden_layers=3), r"layers\.2\."),
    "config with less layers": (lambda f: changed_json(f / "config.json", num_hidden_layers=1), r"layers\.1\."),
    "config with a larger vocabulary": (lambda f: changed_json(f / "config.json", vocab_size=102), HEAD),
    "config of another type": (lambda f: changed_json(f / "config.json", model_type="gpt2"), "config.json"),
    "config with another function": (lambda f: changed_json(f / "config.json", hidden_act="relu"), "hidden_act"),
    "generation cut": (
        lambda f: (f / "generation_config.json").write_text("{"),
        r"hf/generation_config\.json is no JSON",
    ),
    "generation no object": (lambda f: (f / "generation_config.json").write_text("3"), r"is no JSON object"),
    "tokenizer cut": (lambda f: (f / "tokenizer.json").write_text('{"model'), r"tokenizer\.json is no JSON"),
    "tokenizer settings cut": (
        lambda f: (f / "tokenizer_config.json").write_text("{"),
        r"hf/tokenizer_config\.json is no",
    ),
}


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in two shards, with files of a tokenizer."""
    folder = tmp_path_factory.mktemp("m") / "hf"
    write_folder(folder, llama(), random_weights(llama()), shards=2)
    vocabulary = {"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}, "added_tokens": []}
    for name, content in {"tokenizer": vocabulary, "tokenizer_config": {}, "generation_config": {}}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("name", BROKEN_MODELS)
def test_a_broken_model_is_refused_by_name_and_leaves_nothing(
    name: str, sharded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(sharded, tmp_path / "hf")
    damage, named = BROKEN_MODELS[name]
    damage(tmp_path / "hf")
    assert main(["--load-hf", f"{tmp_path}/hf", "--save", f"{tmp_path}/save"]) == 1
    assert_refused(capsys.readouterr().err, named)
    assert not [*(tmp_path / "save").glob("*")]


def assert_refused(err: str, named: str) -> None:
    """One sentence, perhaps with a fix, that names what is wrong."""
    other = ("  fix: ", "convert_checkpoint: from ", "1 problem; ")
    (sentence,) = [line for line in err.splitlines() if not line.startswith(other)]
    assert re.match(rf"convert_checkpoint: .*{named}", sentence), sentence


TENSORS, WORDS = "tensors_00000.safetensors", "embedding.word_embeddings.weight"


def twice(chunks: list[Any]) -> None:
    chunks += chunks


def tensor_start(save: Path, name: str) -> int:
    return Manifest.open(save / "iter_0000000").tensors[name].chunks[0].offset


BROKEN_CHECKPOINTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "tensors cut": (lambda s: os.truncate(next(s.rglob(TENSORS)), 4000), rf"{TENSORS} is truncated"),
    "tensors missing": (lambda s: next(s.rglob(TENSORS)).unlink(), rf"{TENSORS} is missing"),
    "tensors too long": (lambda s: next(s.rglob(TENSORS)).open("ab").write(b"x"), rf"{TENSORS} is too long"),
    "header flipped": (lambda s: flipped(next(s.rglob(TENSORS)), 20), rf"{TENSORS} has flipped bytes \(header\)"),
    "tensor flipped": (
        lambda s: flipped(next(s.rglob(TENSORS)), tensor_start(s, WORDS)),
        rf"{TENSORS} has flipped bytes \(tensor {WORDS}\)",
    ),
    "manifest cut": (
        lambda s: os.truncate(next(s.rglob("manifest.json")), 90),
        "COMPLETE does not match manifest.json",
    ),
    "marker missing": (lambda s: next(s.rglob("COMPLETE")).unlink(), "has no COMPLETE"),
    "tokenizer flipped": (lambda s: flipped(next(s.rglob("tokenizer.json")), 4), r"tokenizer\.json has flipped bytes"),
    "more layers": (
        lambda s: rewritten(s / "iter_0000000", lambda c: c["config"]["model"].update(num_layers=3)),
        r"lacks: layers\.2\.",
    ),
    "another shape": (
        lambda s: rewritten(s / "iter_0000000", lambda c: c["tensors"][WORDS].update(shape=[32, 101])),
        "iter_0000000",
    ),
    "overlapping chunks": (
        lambda s: rewritten(
            s / "iter_0000000", lambda c: c["tensors"][WORDS]["chunks"].append(c["tensors"][WORDS]["chunks"][0])
        ),
        f"chunks of {WORDS} are not a partition",
    ),
    "a tensor less": (
        lambda s: rewritten(s / "iter_0000000", lambda c: c["tensors"].pop(WORDS)),
        rf"lacks: {WORDS}",
    ),
}


@pytest.mark.parametrize("name", BROKEN_CHECKPOINTS)
def test_a_broken_checkpoint_is_refused_by_name_and_leaves_nothing(
    name: str, sharded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, named = BROKEN_CHECKPOINTS[name]
    assert main(["--load-hf", str(sharded), "--save", f"{tmp_path}/save", "--no-check"]) == 0
    damage(tmp_path / "save")
    capsys.readouterr()
    assert main(["--load", f"{tmp_path}/save", "--save-hf", f"{tmp_path}/out", "--no-check"]) == 1
    assert_refused(capsys.readouterr().err.replace("\n  iter_", " iter_"), named)
    assert [path.name for path in tmp_path.iterdir()] == ["save"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "one of the arguments --load --load-hf --load-megatron --load-peft is required"),
        (["--load-hf", "a"], "one of the arguments --save --save-megatron --save-hf --save-peft is required"),
        (["--load-hf", "a", "--save-hf", "b"], "nanotron: go with --save"),
        (["--load", "a", "--save", "b"], "--load with --save-hf"),
        (["--load-hf", "a", "--save", "b", "--workers", "0"], "'0' is not a number of at least 1"),
        (["--load-megatron", "a", "--save-megatron", "b"], "--load megatron: with --save or --save-hf"),
        (
            ["--load-megatron", "a", "--save", "b", "--dtype", "bf16"],
            "--dtype: only with --save-hf or --save-peft or --load hf:",
        ),
        (["--load-megatron", "a", "--save", "b", "--no-check"], "--no-check: only with --save-hf or --load hf:"),
        (["--load-megatron", "a", "--save", "b", "--plugin", "os"], "--plugin: only with --save-hf"),
        (["--load-hf", "a", "--save", "b", "--ckpt-step", "3"], "--ckpt-step: only with --load or --load megatron:"),
        (["--load-hf", "a", "--save", "b", "--ema"], "--ema: only with --save-hf or --save-peft"),
        (["--load", "a", "--save-hf", "b", "--max-shard-size", "5XB"], "'5XB' is not a size such as 5GB"),
    ],
)
def test_wrong_flags(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("target", ["--save", "--save-hf"])
def test_our_checkpoint_is_not_taken_for_megatron_lms(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_checkpoint(tmp_path / "run" / "iter_0000007", llama()).path
    for path in (source, source.parent):
        assert main(["--load", f"megatron:{path}", target, f"{tmp_path}/out"]) == 1
        seen = f"--load megatron:{source} is not a checkpoint of Megatron-LM\n  fix: --load {path}\n"
        assert capsys.readouterr().err == f"convert_checkpoint: {seen}"
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_sizes() -> None:
    assert [parse_size(text) for text in ("5GB", "1.5kb", "2MiB", "7", "7B")] == [5 * 10**9, 1500, 2 * 2**20, 7, 7]
    for text in ("0", "GB", "-1MB", "1 TB"):
        with pytest.raises(argparse.ArgumentTypeError):
            parse_size(text)


@pytest.mark.parametrize("terminal", [False, True])
def test_bytes_rate_and_time_left_are_shown(
    terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "TERMINAL_INTERVAL", 1e-9)
    monkeypatch.setattr(progress, "FILE_INTERVAL", 1e-9)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    show = ProgressPrinter()
    for done in (1, 5, 9):
        show("x", done << 20, 10 << 20)
    written = capsys.readouterr().err
    assert re.search(r"5\.00M of 10\.0M, +\S+B/s, \d\d:\d\d left", written)
    assert written.count("\n") == (0 if terminal else 3)
