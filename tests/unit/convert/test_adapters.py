"""Checkpoints with adapters and folders of PEFT: merging, against a formula, and refusals."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron.checkpoint.errors import CheckpointError
from megatron.checkpoint.format import Manifest, split_box, whole_box
from megatron.checkpoint.load import CheckpointReader
from megatron.convert.base_model import BaseModel
from megatron.convert.huggingface.weights import HuggingFaceWeights
from megatron.convert.saved_model import SavedModel
from megatron.convert.sources import SourceOptions, open_saved
from tests.unit.convert.folders import llama, random_weights, write_adapters, write_folder
from tests.unit.tools.test_convert_checkpoint import assert_refused, changed_json, changed_tensors
from tools.convert_checkpoint import main
from tools.edit_checkpoint import main as edit

PARTS = ("linear_qkv.q", "linear_qkv.v", "linear_fc1.up", "layers.1.*.linear_proj")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "hf", llama(), random_weights(llama()))


def merge_by_hand(saved: SavedModel, name: str, dora: bool) -> Tensor:
    """A weight ``[out, in]`` of a Llama with 2 groups of 2 queries of width 8, in fp64."""
    assert saved.merged is not None
    spec = saved.specs[name]
    weight = saved.merged.base.read(name, spec.view, whole_box(spec.view)).double().reshape(spec.shape)
    linear = name.removesuffix(".weight")
    if f"{linear}.lora_a" not in saved.merged.specs:
        return weight
    a, b = (saved.merged.adapter(f"{linear}.lora_{each}").double() for each in "ab")
    rows = torch.arange(len(weight))
    part_of = torch.zeros_like(rows)
    if "linear_qkv" in name:  # of each group two queries, a key, which has no adapter, and a value
        part_of = torch.tensor([0, 0, -1, 1])[rows // 8 % 4]
    elif "linear_fc1" in name:  # the gate has no adapter
        part_of = torch.where(rows < len(rows) // 2, -1, 0)
    merged = weight.clone()
    for row in rows[part_of >= 0].tolist():
        merged[row] += 5.0 / 3 * (b[row] @ a[3 * part_of[row] : 3 * part_of[row] + 3])
        if dora:
            merged[row] *= saved.merged.adapter(f"{linear}.lora_magnitude")[row] / merged[row].norm()
    return merged


def test_a_row_of_norm_0_is_merged_as_it_is(tmp_path: Path) -> None:
    """DoRA's factor, a magnitude over a norm of 0, is 1 there."""
    zeros = {name: torch.zeros_like(values) for name, values in random_weights(llama()).items()}
    base = write_folder(tmp_path / "zeros", llama(), zeros)
    saved = open_saved(write_adapters(tmp_path / "iter_0000007", base, lora_dora=True, lora_target=PARTS))
    assert saved.merged is not None
    saved.merged.model = replace(saved.merged.model, lora_alpha=0.0)
    for name, spec in saved.specs.items():
        assert not saved.read(name, spec.view, whole_box(spec.view)).any(), name


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_a_box_of_a_merged_weight(base: Path, dora: bool, tmp_path: Path) -> None:
    manifest = write_adapters(tmp_path / "iter_0000007", base, lora_alpha=5.0, lora_target=PARTS, lora_dora=dora)
    saved, weights = open_saved(manifest), HuggingFaceWeights(base, llama())
    assert saved.model.lora_rank is None
    assert {name: spec.view for name, spec in saved.specs.items()} == {n: s.view for n, s in weights.specs.items()}
    changed = set()
    for name, spec in saved.specs.items():
        expected = merge_by_hand(saved, name, dora).view(spec.view)
        for box in split_box(whole_box(spec.view), 600):
            torch.testing.assert_close(
                saved.read(name, spec.view, box).double(), expected[box.slices], rtol=1e-14, atol=1e-14
            )
        out = torch.empty(spec.view)
        saved.fill(name, spec.view, whole_box(spec.view), out)
        torch.testing.assert_close(out, expected.float(), rtol=1e-6, atol=1e-7)
        if not torch.equal(expected, weights.read(name, spec.view, whole_box(spec.view)).double()):
            changed.add(name.partition(".")[2].partition(".")[2])
    names = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1")
    assert changed == {f"{name}.weight" for name in names}


def test_the_average_of_adapters(base: Path, tmp_path: Path) -> None:
    manifest, name = write_adapters(tmp_path / "save" / "iter_0000007", base), "layers.0.mlp.linear_fc2.lora_b"
    assert main(["--load", f"{tmp_path}/save", "--ema", "--save-peft", f"{tmp_path}/peft"]) == 0
    average = CheckpointReader(manifest).read(f"optim.ema.{name}")
    saved = open_saved(manifest, SourceOptions(average=True))
    assert saved.merged is not None
    assert torch.equal(saved.merged.adapter(name), average)
    written = load_file(tmp_path / "peft" / FILE)["base_model.model.model.layers.0.mlp.down_proj.lora_B.weight"]
    assert torch.equal(written, average)


def test_the_base_may_move_but_not_change(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_adapters(tmp_path / "save" / "iter_0000007", base)
    base.rename(tmp_path / "moved")
    export = ["--load", f"{tmp_path}/save", "--save-hf", f"{tmp_path}/out", "--no-check"]
    assert main(export) == 1
    assert_refused(capsys.readouterr().err, rf".*/save/iter_0000007 holds adapters of a model .* {base}")
    assert main([*export, "--pretrained-checkpoint", f"hf:{tmp_path}/moved"]) == 0
    other = write_folder(tmp_path / "other", llama(), random_weights(llama(), seed=1))
    for tool, target in ((main, "--save-peft"), (main, "--save-megatron"), (edit, "--merge --save")):
        capsys.readouterr()
        flags = ["--load", f"{tmp_path}/save", *target.split(), f"{tmp_path}/out-2", "--pretrained-checkpoint"]
        assert tool([*flags, f"hf:{other}"]) == 1
        assert f"holds adapters of hf:{base}, whose weights are not those of hf:{other}" in capsys.readouterr().err
        assert tool([*flags, f"hf:{tmp_path}/moved"]) == 0
        shutil.rmtree(tmp_path / "out-2")


def test_a_folder_is_recognised_by_its_tensors(tmp_path: Path) -> None:
    """By the middle of each of them, but not by files, or by what config.json notes."""
    model = llama(vocab_size=20_000)
    weights = random_weights(model)

    def digest(name: str, changed: dict[str, Tensor], shards: int = 1, **config: Any) -> str:
        folder = write_folder(tmp_path / name, model, weights | changed, shards)
        changed_json(folder / "config.json", **config)
        return BaseModel.find(f"hf:{folder}").digest

    base = digest("base", {})
    assert digest("again", {}, shards=3, transformers_version="9.0") == base
    others = {digest("epsilon", {}, rms_norm_eps=0.5)}
    for name in ("lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"):
        tensor = weights[name].clone()
        tensor.view(-1)[tensor.numel() // 2].neg_()
        others.add(digest(name, {name: tensor}))
    assert len(others - {base}) == 4


def test_only_adapters_are_merged_or_written_for_peft(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--load-hf", str(base), "--save", f"{tmp_path}/save", "--no-check"]) == 0
    assert edit(["--load", f"{tmp_path}/save", "--merge", "--save", f"{tmp_path}/out"]) == 1
    assert main(["--load", f"{tmp_path}/save", "--save-peft", f"{tmp_path}/out"]) == 1
    assert capsys.readouterr().err.count("iter_0000000 holds no adapters") == 2
    for tool, target in ((main, "--save-hf"), (main, "--save-megatron"), (edit, "--cast bf16 --save")):
        flags = ["--load", f"{tmp_path}/save", *target.split(), f"{tmp_path}/out"]
        assert tool([*flags, "--pretrained-checkpoint", f"hf:{base}"]) == 1
        assert "iter_0000000 holds no adapters\n  fix: drop --pretrained-checkpoint" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_adapters_without_their_model(base: Path, tmp_path: Path) -> None:
    manifest = write_adapters(tmp_path / "iter_0000007", base)
    for record in ({}, {"location": 3, "digest": "x"}):
        manifest.state["base"] = record
        with pytest.raises(CheckpointError, match="iter_0000007 holds adapters, but its manifest does not name"):
            open_saved(manifest)


A = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
FILE = "adapter_model.safetensors"
BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda f: (f / "adapter_config.json").unlink(), "E850 .* holds no adapter_config.json"),
    "config cut": (lambda f: os.truncate(f / "adapter_config.json", 30), "E850 .*adapter_config.json cannot be read"),
    "config a list": (lambda f: (f / "adapter_config.json").write_text("[]"), "E850 .* holds list, not an object"),
    "no weights": (lambda f: (f / FILE).unlink(), f"holds no {FILE}"),
    "pickled": (lambda f: (f / FILE).rename(f / "adapter_model.bin"), "holds pickled weights"),
    "weights cut": (lambda f: os.truncate(f / FILE, 3000), f"{FILE} is not a safetensors file, or is damaged"),
    "weights empty": (lambda f: os.truncate(f / FILE, 0), f"{FILE} is not a safetensors file, or is damaged"),
    "nothing": (lambda f: changed_tensors(f / FILE, dict.clear), f"{FILE} lacks: base_model"),
    "a tensor less": (lambda f: changed_tensors(f / FILE, lambda t: t.pop(A)), f"{FILE} lacks: {A}"),
    "a linear less": (
        lambda f: changed_tensors(f / FILE, lambda t: [t.pop(A), t.pop(A.replace("_A", "_B"))]),
        f"{FILE} lacks: {A}, {A.replace('_A', '_B')}",
    ),
    "another shape": (
        lambda f: changed_tensors(f / FILE, lambda t: t.update({A: torch.zeros(3, 5)})),
        rf"{FILE} holds tensors of another shape .*{A} \[3, 5\] instead of \[3, 32\]",
    ),
    "another type": (
        lambda f: changed_tensors(f / FILE, lambda t: t.update({A: torch.zeros(3, 32, dtype=torch.int64)})),
        f"{FILE} holds tensors of an unsupported data type: {A} torch.int64",
    ),
    "another layer": (
        lambda f: changed_tensors(f / FILE, lambda t: t.update({A.replace(".1.", ".2."): torch.zeros(3, 32)})),
        f"{FILE} holds tensors that no adapter of this model has: {A.replace('.1.', '.2.')}",
    ),
    "an embedding": (
        lambda f: changed_tensors(
            f / FILE, lambda t: t.update({"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(3, 101)})
        ),
        f"{FILE} holds tensors that no adapter of this model has: .*embed_tokens.lora_embedding_A",
    ),
    "a head": (
        lambda f: changed_tensors(
            f / FILE, lambda t: t.update({"base_model.model.lm_head.lora_A.weight": torch.zeros(3, 32)})
        ),
        f"{FILE} holds tensors that no adapter of this model has: .*lm_head.lora_A.weight",
    ),
    "a magnitude": (
        lambda f: changed_json(f / "adapter_config.json", use_dora=True),
        f"{FILE} lacks: .*lora_magnitude_vector",
    ),
}


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    write_adapters(tmp_path / "save" / "iter_0000007", base, lora_target=PARTS)
    assert main(["--load", f"{tmp_path}/save", "--save-peft", f"{tmp_path}/peft"]) == 0
    return tmp_path / "peft"


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_adapter_is_refused_by_name(
    name: str, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, named = BROKEN[name]
    damage(adapter)
    capsys.readouterr()
    assert (
        main(["--load-peft", str(adapter), "--save", f"{tmp_path}/out", "--pretrained-checkpoint", f"hf:{tmp_path}/hf"])
        == 1
    )
    assert_refused(capsys.readouterr().err, named)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "LOHA"}, 'peft_type "LOHA" is not supported, only "LORA"'),
        ({"task_type": "SEQ_CLS"}, 'task_type "SEQ_CLS" is not supported, only "CAUSAL_LM" or null'),
        ({"bias": "lora_only"}, 'bias "lora_only" is not supported, only "none"'),
        ({"modules_to_save": ["lm_head"]}, 'modules_to_save ["lm_head"] is not supported'),
        ({"lora_bias": True}, "lora_bias true is not supported"),
        ({"init_lora_weights": "pissa_niter_4"}, 'init_lora_weights "pissa_niter_4" is not supported'),
        ({"layer_replication": [[0, 2]]}, "layer_replication [[0, 2]] is not supported"),
        ({"some_later_option": 3}, "some_later_option 3 is not supported"),
        ({"r": 2.5}, "r is 2.5, not a whole number above 0"),
        ({"r": 10**8}, "holds tensors of another shape"),
        ({"lora_alpha": float("nan")}, "lora_alpha is NaN, not a number above 0"),
        ({"lora_alpha": None}, "lora_alpha is null, not a number above 0"),
        (
            {"rank_pattern": {"q_proj": True}},
            'rank_pattern is {"q_proj": true}, not an object of whole numbers above 0',
        ),
        ({"rank_pattern": [3]}, "rank_pattern is [3], not an object of whole numbers above 0"),
        ({"alpha_pattern": {"(x+x+)+y": 3}}, "not an object with ends of names, without regular expressions"),
        ({"rank_pattern": {"v_proj": 2}}, "v_proj.lora_A.weight [3, 32] instead of [2, 32]"),
    ],
)
def test_options_that_are_not_supported(
    changes: dict[str, Any], message: str, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed_json(adapter / "adapter_config.json", **changes)
    capsys.readouterr()
    assert main(["--load-peft", str(adapter), "--save", f"{tmp_path}/out"]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_adapter_needs_its_model_and_its_folders(
    adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--load-peft", str(adapter), "--save", f"{tmp_path}/out"]
    changed_json(adapter / "adapter_config.json", base_model_name_or_path=None)
    assert main(flags) == 1
    assert "does not name its base\n  fix: --pretrained-checkpoint hf:DIR" in capsys.readouterr().err
    flags += ["--pretrained-checkpoint", f"hf:{tmp_path}/hf"]
    assert main(flags) == 0
    assert main(flags) == 1
    assert "holds checkpoints already" in capsys.readouterr().err
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    assert main(["--load", f"{tmp_path}/out", "--save-peft", f"{tmp_path}/full"]) == 1
    assert "is not empty\n  fix: --save-peft A_NEW_FOLDER" in capsys.readouterr().err
    shutil.copy(adapter / FILE, tmp_path / "elsewhere.safetensors")
    (adapter / FILE).unlink()
    (adapter / FILE).symlink_to(tmp_path / "elsewhere.safetensors")
    flags[3] = f"{tmp_path}/other"
    assert main(flags) == 1
    assert "E853" in capsys.readouterr().err
    assert main([*flags, "--follow-links"]) == 0


def test_an_adapter_brings_its_tokenizer(adapter: Path, tmp_path: Path) -> None:
    (tmp_path / "hf" / "tokenizer.json").write_text('{"of": "base"}')
    flags = ["--load-peft", str(adapter), "--save"]
    assert main([*flags, f"{tmp_path}/a"]) == 0
    (adapter / "tokenizer.json").write_text('{"of": "adapter"}')
    assert main([*flags, f"{tmp_path}/b"]) == 0
    read = [Manifest.open(tmp_path / name / "iter_0000000").read_file("tokenizer/tokenizer.json") for name in "ab"]
    assert [json.loads(content)["of"] for content in read] == ["base", "adapter"]


def test_a_written_adapter_is_rounded(adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--load", f"{tmp_path}/save", "--save-peft", f"{tmp_path}/half", "--dtype", "bf16"]) == 0
    exact, half = (load_file(folder / FILE) for folder in (adapter, tmp_path / "half"))
    assert all(torch.equal(half[name], tensor.bfloat16()) for name, tensor in exact.items())
    exact[A][0, 0] = 1e6
    save_file(exact, adapter / FILE)
    assert main(["--load-peft", str(adapter), "--save", f"{tmp_path}/large"]) == 0
    assert main(["--load", f"{tmp_path}/large", "--save-peft", f"{tmp_path}/fp16", "--dtype", "fp16"]) == 1
    assert f"{A} has values above 65504, too large for fp16" in capsys.readouterr().err
    assert not (tmp_path / "fp16").exists()


@pytest.mark.parametrize("location", ["http://127.0.0.1:{port}/x", "s3://bucket/x", "ftp://127.0.0.1:{port}/x"])
def test_a_checkpoint_does_not_choose_where_requests_go(
    location: str,
    base: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        place = location.format(port=listener.getsockname()[1])
        monkeypatch.setattr(BaseModel, "record", property(lambda own: {"location": place, "digest": own.digest}))
        write_adapters(tmp_path / "save" / "iter_0000007", base)
        assert main(["--load", f"{tmp_path}/save", "--save-hf", f"{tmp_path}/out", "--no-check"]) == 1
        assert "that only the checkpoint names" in capsys.readouterr().err
        with pytest.raises(BlockingIOError):
            listener.accept()
