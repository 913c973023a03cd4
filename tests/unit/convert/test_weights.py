"""Weights of Hugging Face folders: the tables against mappings written by hand, boxes, and files that do not fit."""

from __future__ import annotations

import errno
import json
import os
import shlex
import struct
import time
import tracemalloc
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron.arguments.checks.checkpoint import check_links
from megatron.checkpoint.errors import CheckpointError, DamagedCheckpointError
from megatron.checkpoint.format import partition_problem, whole_box
from megatron.checkpoint.tensor_file import TensorFile
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.data import DataConfig
from megatron.config.errors import UserError
from megatron.config.model import ModelConfig
from megatron.config.run import RunConfig
from megatron.config.training import TrainingConfig
from megatron.convert import weight_source
from megatron.convert.huggingface.config import build_config_json, refuse_outside_links
from megatron.convert.huggingface.families import MODEL_FAMILIES
from megatron.convert.huggingface.weights import HuggingFaceWeights, TensorMapping, build_on_meta, map_tensors
from megatron.convert.sources import SourceOptions
from megatron.convert.weight_source import fill_in_blocks, fill_weights
from megatron.distributed.comm import Group
from megatron.distributed.grad_accumulator import GradAccumulator
from megatron.distributed.sharding import Box
from megatron.evaluation.load import open_pretrained
from megatron.layers.context import BuildContext
from megatron.model.gpt import build_gpt
from tests.kit.solo import Solo, one_rank_mesh, tiny
from tests.parity.families import from_experts, from_gpt2, from_llama
from tests.unit.convert.folders import LLAMA, llama, random_weights, write_folder
from tools import convert_checkpoint

# --- the tables ---

UNTIED = {"untie_embeddings_and_output_weights": True}
TIED = {**LLAMA, "untie_embeddings_and_output_weights": False, "num_query_groups": None}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2-untied-odd": ("gpt2", {**UNTIED, "hidden_size": 21, "num_attention_heads": 3, "ffn_hidden_size": 13}),
    "llama": ("llama", LLAMA),
    "llama-tied-mqa-biases": ("llama", {**TIED, "num_query_groups": 1, "kv_channels": 6, "add_bias_linear": True}),
    "mixtral": ("mixtral", {**LLAMA, "num_experts": 3}),
    "qwen3-moe": (
        "qwen3_moe",
        {**TIED, "num_experts": 5, "moe_ffn_hidden_size": 7, "qk_layernorm": True, "kv_channels": 10},
    ),
    "qwen3-moe-dense-layers": (
        "qwen3_moe",
        {**LLAMA, "num_layers": 3, "num_experts": 3, "moe_layer_freq": "[0]*1+[1]*2", "qk_layernorm": True},
    ),
    "granite-moe": ("granitemoe", {**LLAMA, "num_experts": 3, "moe_ffn_hidden_size": 5, "embedding_multiplier": 2.0}),
    "phi3": ("phi3", {**LLAMA, "rotary_percent": 0.5}),
    "olmo2": (
        "olmo2",
        {**LLAMA, "layernorm_placement": "post", "qk_layernorm": True, "qk_layernorm_scope": "all"},
    ),
}


def theirs_like(found: Mapping[str, tuple[TensorMapping, ...]]) -> dict[str, Tensor]:
    """Random tensors by their names."""
    generator = torch.Generator().manual_seed(0)
    return {slot.name: torch.randn(slot.stored, generator=generator) for made in found.values() for slot in made}


def assemble(found: tuple[TensorMapping, ...], view: tuple[int, ...], theirs: Mapping[str, Tensor]) -> Tensor:
    out = torch.full(view, torch.nan)
    for slot in found:
        out[slot.box.slices] = slot.arrange(theirs[slot.name])
    return out


def by_hand(kind: str, theirs: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    if config.num_experts:
        return from_experts(theirs, config)
    return from_gpt2(theirs, config) if kind == "gpt2" else from_llama(theirs, config)


@pytest.mark.parametrize("name", FAMILIES)
def test_table_is_the_mapping_written_by_hand_and_invertible(name: str) -> None:
    kind, changes = FAMILIES[name]
    config = tiny(**changes)
    specs = build_on_meta(config).specs
    found = map_tensors(kind, config, specs)
    theirs = theirs_like(found)
    expected = by_hand(kind, theirs, config)
    assert found.keys() == expected.keys()
    slots = [slot for made in found.values() for slot in made]
    assert sum(slot.box.numel for slot in slots) == sum(t.numel() for t in theirs.values()), "each goes to one place"
    for ours, made in found.items():
        whole = assemble(made, specs[ours].view, theirs)
        assert torch.equal(whole.reshape(specs[ours].shape), expected[ours]), ours
        assert partition_problem(specs[ours].view, [slot.box for slot in made]) is None
        for slot in made:
            part = theirs[slot.name].narrow(slot.joined, slot.start, slot.shape[slot.joined])
            assert torch.equal(whole[slot.box.slices].permute(slot.order).reshape(slot.shape), part), slot.name
            assert slot.arrange(theirs[slot.name]).data_ptr() == part.data_ptr(), "nothing is copied"


def test_rows_of_every_family_are_unambiguous() -> None:
    """Except those of norms of different mixers, and of MLPs with and without experts, of which a layer has one."""
    for family in MODEL_FAMILIES.values():
        theirs = [name for _, made in family.weights.values() for name in made]
        twice = {name for name in theirs if theirs.count(name) > 1}
        assert all(name.endswith(("norm", "_linear")) for name in twice)


def mlp_mappings(monkeypatch: pytest.MonkeyPatch, parameter: str, stored: str) -> tuple[TensorMapping, ...]:
    """The mappings of an MLP's first layer in a GPT-2 that stores it by these axes."""
    family = MODEL_FAMILIES["gpt2"]
    rows = {**family.weights, "layers.{i}.mlp.linear_fc1": ("f h", {"transformer.h.{i}.mlp.c_fc": stored})}
    monkeypatch.setitem(MODEL_FAMILIES, "gpt2", replace(family, weights=rows))
    ours = f"layers.0.mlp.linear_fc1.{parameter}"
    return map_tensors("gpt2", tiny(), {ours: build_on_meta(tiny()).specs[ours]})[ours]


@pytest.mark.parametrize("parameter", ["weight", "bias"])
def test_rows_are_read_without_spaces_and_refused_with_unknown_axes(
    monkeypatch: pytest.MonkeyPatch, parameter: str
) -> None:
    expected = mlp_mappings(monkeypatch, parameter, "h, f")
    assert mlp_mappings(monkeypatch, parameter, "h,f") == mlp_mappings(monkeypatch, parameter, " h ,  f ") == expected
    for unknown in ("z, f", "h, f, z"):
        with pytest.raises(KeyError, match="z"):
            mlp_mappings(monkeypatch, parameter, unknown)


def test_rows_interleave_pieces_of_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two pieces of each of three parts, and the query heads of each key head beside a gate."""
    model = tiny(num_query_groups=2, attention_output_gate=True, hidden_size=24)
    family = MODEL_FAMILIES["gpt2"]
    fc1, qkv = "layers.0.mlp.linear_fc1.weight", "layers.0.self_attention.linear_qkv.weight"
    rows = {
        "layers.{i}.mlp.linear_fc1": ("f h", {"fc.{symbol}": "G*(f[:K] + f[K:V] + f[V:]), h"}),
        "layers.{i}.self_attention.linear_qkv": (
            "g x d h",
            {"q": "g*N*(x[:N] d + x[N:-2] d), h", "k": "g x[-2] d, h", "v": "g x[-1] d, h"},
        ),
    }
    numbers = {"G": 2, "K": 4, "V": 10, "N": model.heads_per_group}
    monkeypatch.setitem(MODEL_FAMILIES, "gpt2", replace(family, weights=rows, numbers=lambda model: numbers))
    specs = build_on_meta(model).specs
    found = map_tensors("gpt2", model, {name: specs[name] for name in (fc1, qkv)})
    ours = {name: torch.arange(specs[name].numel).view(specs[name].view) for name in found}
    theirs: dict[str, Tensor] = {}
    for name, slots in found.items():
        for slot in slots:
            out = theirs.setdefault(slot.name, torch.zeros(slot.stored, dtype=torch.long))
            slot.arrange(out).copy_(ours[name][slot.box.slices])
    f, x = ours[fc1], ours[qkv]
    pieces = (f[0:2], f[4:7], f[10 : 10 + (len(f) - 10) // 2], f[2:4], f[7:10], f[10 + (len(f) - 10) // 2 :])
    queries, gates, k, v = x.split((2, 2, 1, 1), dim=1)
    heads = torch.stack((queries, gates), dim=2)  # [groups, queries, query and gate, channels, hidden]
    expected = {
        "fc.1.weight": torch.cat(pieces),
        "q.weight": heads.flatten(0, 3),
        "k.weight": k.flatten(0, 2),
        "v.weight": v.flatten(0, 2),
    }
    assert theirs.keys() == expected.keys()
    assert all(torch.equal(theirs[name], value) for name, value in expected.items())


# --- reading ---

MODELS = {"gpt2": tiny(hidden_size=24, num_attention_heads=3), "llama": llama(kv_channels=6)}


@pytest.mark.parametrize("kind", MODELS)
def test_whole_tensors_and_any_boxes(kind: str, tmp_path: Path) -> None:
    """Whole tensors are the mapping written by hand, whatever the files; boxes are slices of them."""
    model = MODELS[kind]
    weights = random_weights(model, torch.bfloat16)
    expected = by_hand(kind, weights, model)
    one = HuggingFaceWeights(write_folder(tmp_path / "one", model, weights), model)
    prefix = "transformer." if kind == "gpt2" else "model."
    bare = {name.removeprefix(prefix): value for name, value in weights.items()}
    buffers = {"h.0.attn.bias": torch.ones(1, 1, 4, 4)} if kind == "gpt2" else {}
    source = HuggingFaceWeights(write_folder(tmp_path / "bare", model, bare | buffers, shards=4), model)
    assert set(source.specs) == set(expected)
    for name, spec in source.specs.items():
        for files in (one, source):
            whole = files.read(name, spec.view, whole_box(spec.view))
            assert torch.equal(whole.reshape(spec.shape), expected[name]), name
    assert whole.dtype == torch.bfloat16
    assert source.precision == "bf16"

    @settings(max_examples=50, derandomize=True, deadline=None)
    @given(data=st.data())
    def check_box(data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(list(source.specs)))
        view = source.specs[name].view
        edges = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in view]
        box = Box(tuple(a for a, _ in edges), tuple(b - a for a, b in edges))
        part = source.read(name, view, box)
        assert part.shape == box.size
        assert torch.equal(part, expected[name].view(view)[box.slices])

    check_box()
    with pytest.raises(ValueError, match="is viewed"):
        source.read(name, spec.view[::-1] + (1,), whole_box(spec.view))


def test_mixed_types_are_read_as_the_widest(tmp_path: Path) -> None:
    model = MODELS["llama"]
    weights = random_weights(model, torch.bfloat16)
    name = "model.layers.0.self_attn.q_proj.weight"
    weights[name] = weights[name].float()
    source = HuggingFaceWeights(write_folder(tmp_path / "m", model, weights), model)
    view = source.specs["layers.0.self_attention.linear_qkv.weight"].view
    whole = source.read("layers.0.self_attention.linear_qkv.weight", view, whole_box(view))
    assert whole.dtype == torch.float32
    assert source.precision == "fp32"


def test_a_box_of_a_huge_tensor_costs_only_its_own_bytes(tmp_path: Path) -> None:
    model = llama(vocab_size=4_000_000, hidden_size=256, num_layers=1)  # two tables of 4 GB, all holes
    table: dict[str, Any] = {}
    end = 0
    for found in map_tensors("llama", model, build_on_meta(model).specs).values():
        for slot in found:
            size = 4 * torch.Size(slot.shape).numel()
            table[slot.name] = {"dtype": "F32", "shape": slot.shape, "data_offsets": [end, end + size]}
            end += size
    header = json.dumps(table).encode()
    header += b" " * (-len(header) % 8)
    (tmp_path / "config.json").write_text(json.dumps(build_config_json(model)))
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + end)
    before = _resident_bytes()
    source = HuggingFaceWeights(tmp_path, model)
    view = source.specs["output_layer.weight"].view
    assert not source.read("output_layer.weight", view, Box((3_999_000, 0), (1000, 256))).any()
    assert _resident_bytes() - before < 64e6


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


class Recorded:
    """Tensors in memory, and the boxes that were read."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors, self.boxes = tensors, list[Box]()

    def read(self, name: str, view: tuple[int, ...], box: Box) -> Tensor:
        self.boxes.append(box)
        return self.tensors[name].view(view)[box.slices].double()


@pytest.mark.parametrize("limit", [1, 7, 24, 10**6])
def test_a_box_is_read_in_blocks_and_converted(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_source, "BLOCK_ELEMENTS", limit)
    source, box = Recorded({"x": torch.randn(6, 4, 5).to(torch.bfloat16)}), Box((1, 0, 2), (4, 3, 3))
    out = torch.empty(box.size)
    fill_in_blocks(source, "x", (6, 4, 5), box, out)
    assert torch.equal(out, source.tensors["x"][box.slices].float())
    assert sum(read.numel for read in source.boxes) == box.numel
    assert max(read.numel for read in source.boxes) <= limit


@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"position_embedding_type": "rope", "activation": "swiglu", "num_query_groups": 2},
        {"untie_embeddings_and_output_weights": True, "num_query_groups": 1},
    ],
    ids=["gpt2", "llama-gqa", "untied-mqa"],
)
def test_every_rank_gets_its_part(changes: dict[str, Any], tp: int) -> None:
    """Each rank gets the values that initialization would give it; padding is zero."""
    config = tiny(**changes)
    solo = Solo.build(config, torch.float32)
    whole = {n: p.detach()[: solo.chunk.specs[n].shape[0]] for n, p in solo.params.items()}
    for rank in range(tp):
        mesh = one_rank_mesh()
        mesh._groups[("tp",)] = Group(tuple(range(tp)), rank)
        chunk = build_gpt(config, TrainingConfig(), BuildContext(mesh, GradAccumulator(), torch.float32))
        expected = {n: p.detach().clone() for n, p in chunk.params.items()}
        for parameter in chunk.params.values():
            torch.nn.init.constant_(parameter, 7.0)
        fill_weights(chunk.specs, chunk.params, Recorded(whole))
        for n, parameter in chunk.params.items():
            assert torch.equal(parameter, expected[n]), n


# --- files that do not fit ---


def test_tensors_that_do_not_fit_are_all_named(tmp_path: Path) -> None:
    model = MODELS["gpt2"]
    weights = random_weights(model)
    missing, misshapen, mistyped, *_ = sorted(name for name in weights if "0" in name)
    del weights[missing]
    weights[misshapen] = weights[misshapen][..., :-1].contiguous()
    weights[mistyped] = weights[mistyped].to(torch.float64)
    weights["adapter.weight"] = torch.zeros(2)
    with pytest.raises(CheckpointError) as caught:
        HuggingFaceWeights(write_folder(tmp_path / "m", model, weights), model)
    message = str(caught.value)
    assert f"lacks: {missing};" in message
    assert "does not have: adapter.weight" in message
    assert f"{misshapen} [" in message
    assert f"{mistyped} torch.float64" in message


def test_another_model_is_refused(tmp_path: Path) -> None:
    model = MODELS["llama"]
    folder = write_folder(tmp_path / "m", model, random_weights(model))
    with pytest.raises(CheckpointError, match=r"lacks: model\.layers\.0\.input_layernorm\.bias"):
        HuggingFaceWeights(folder, replace(model, normalization="LayerNorm"))
    with pytest.raises(UserError, match=r"E852 Hugging Face's llama has nothing for .*position_embeddings\.weight"):
        HuggingFaceWeights(folder, replace(model, position_embedding_type="learned_absolute"))


def test_known_buffers_and_a_tied_head_are_passed_over(tmp_path: Path) -> None:
    gpt2, other = MODELS["gpt2"], MODELS["llama"]
    weights = random_weights(gpt2)
    buffers = {"transformer.h.0.attn.bias": torch.ones(1, 1, 4, 4), "transformer.h.1.attn.masked_bias": torch.ones(())}
    head = weights["transformer.wte.weight"].clone()
    HuggingFaceWeights(write_folder(tmp_path / "gpt2", gpt2, weights | buffers | {"lm_head.weight": head}), gpt2)
    head[-1, -1] += 1e-3
    with pytest.raises(CheckpointError, match=r"stores another: lm_head\.weight"):
        HuggingFaceWeights(write_folder(tmp_path / "other", gpt2, weights | {"lm_head.weight": head}), gpt2)
    old = random_weights(other) | {"model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(3)}
    HuggingFaceWeights(write_folder(tmp_path / "llama", other, old), other)
    del old["lm_head.weight"]
    with pytest.raises(CheckpointError, match=r"lacks: lm_head\.weight"):
        HuggingFaceWeights(write_folder(tmp_path / "headless", other, old), other)


def test_missing_and_pickled_files(tmp_path: Path) -> None:
    model = MODELS["llama"]
    folder = write_folder(tmp_path / "m", model, random_weights(model))
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    folder = folder.rename(tmp_path / "m'$(touch x)\"")
    with pytest.raises(CheckpointError, match=r"pickled weights[\s\S]*fix: python -c .*save_pretrained") as refused:
        HuggingFaceWeights(folder, model)
    *_, program = shlex.split(str(refused.value).rpartition("fix: ")[2])
    assert repr(str(folder)) in program
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(CheckpointError, match="holds neither"):
        HuggingFaceWeights(folder, model)
    (folder / "config.json").unlink()
    with pytest.raises(UserError, match="E850"):
        HuggingFaceWeights(folder, model)


def test_index_that_does_not_fit_its_files_is_refused(tmp_path: Path) -> None:
    model = MODELS["llama"]
    folder = write_folder(tmp_path / "m", model, random_weights(model), shards=2)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    places = content["weight_map"]
    name = next(iter(places))

    def refused(weight_map: object, message: str) -> None:
        index.write_text(json.dumps(content | {"weight_map": weight_map}))
        with pytest.raises(DamagedCheckpointError, match=message):
            HuggingFaceWeights(folder, model)

    for strange in ([], None, {name: 3}):
        refused(strange, "no index of weights")
    for outside in ("", "..", ".", "x\0", "/etc/passwd"):
        refused(places | {name: outside}, "outside its folder")
    refused("[" * 5000, "no index of weights")


@pytest.mark.parametrize(
    ("family", "sizes", "message"),
    [
        ("llama", {"num_layers": 10_000}, "10,000 layers, but .* 21 tensors"),
        ("llama", {"num_layers": 5}, "lacks: model.layers.2."),
        ("mixtral", {"num_experts": 10**9}, "2 layers of 1,000,000,000 experts, but"),
        (
            "llama",
            {"hidden_size": 10**9, "kv_channels": 8},
            r"another shape than its configuration asks for: lm_head\.weight",
        ),
        ("llama", {"vocab_size": 10**9}, r"instead of \[1000000000, "),
        ("gpt2-untied-odd", {"max_position_embeddings": 10**9}, r"instead of \[1000000000, "),
    ],
)
def test_sizes_are_compared_with_the_tensors_that_are_there(
    tmp_path: Path, family: str, sizes: dict[str, int], message: str
) -> None:
    """Before anything is built of that size."""
    model = tiny(**FAMILIES[family][1])
    folder = write_folder(tmp_path / "m", model, random_weights(model))
    tracemalloc.start()
    began = time.process_time()
    try:
        with pytest.raises(CheckpointError, match=message):
            HuggingFaceWeights(folder, replace(model, **sizes))
        assert tracemalloc.get_traced_memory()[1] < 30 << 20
    finally:
        tracemalloc.stop()
    assert time.process_time() - began < 5


def test_a_header_of_very_many_tensors_is_refused_at_once(tmp_path: Path) -> None:
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps({f"t{i}": entry for i in range(100_001)}, separators=(",", ":")).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    began = time.process_time()
    with pytest.raises(DamagedCheckpointError, match="its header has more than 100,000 tensors"):
        TensorFile(file)
    assert time.process_time() - began < 0.3


def refuse_to_list(folder: Path) -> NoReturn:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))


def test_links_out_of_the_folder_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their targets would be converted, and published with the next export."""
    model = MODELS["llama"]
    folder = write_folder(tmp_path / "m", model, random_weights(model))
    (tmp_path / "secret").write_text("password")
    (folder / "chat_template.jinja").symlink_to("../secret")
    with pytest.raises(UserError, match=r"E853 links lead out of .*chat_template\.jinja -> \.\./secret"):
        refuse_outside_links(folder)
    with pytest.raises(UserError, match="E853"):
        open_pretrained(f"hf:{folder}")
    assert open_pretrained(f"hf:{folder}", SourceOptions(follow_links=True)).model.num_layers == model.num_layers
    command = ["--load-hf", str(folder), "--save", str(tmp_path / "save"), "--no-check"]
    assert convert_checkpoint.main(command) == 1
    assert not (tmp_path / "save").exists()
    assert convert_checkpoint.main([*command, "--follow-links"]) == 0
    (folder / "chat_template.jinja").unlink()
    (folder / "model.safetensors").rename(tmp_path / "weights")
    (folder / "model.safetensors").symlink_to(tmp_path / "weights")
    with pytest.raises(UserError, match="E853"):
        open_pretrained(f"hf:{folder}")
    config = replace(RunConfig(), checkpoint=CheckpointConfig(load=f"hf:{folder}"))
    assert [problem.code for problem in check_links(config, 1)] == ["E853"]
    with monkeypatch.context() as patch:
        patch.setattr(Path, "iterdir", refuse_to_list)
        (problem,) = check_links(config, 1)
    assert "cannot be searched for links that lead out of it: Permission denied" in problem.sentence
    assert list(check_links(replace(config, data=DataConfig(follow_links=True)), 1)) == []
