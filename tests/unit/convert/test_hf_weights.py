from __future__ import annotations

import json
import re
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.checkpoint.errors import CheckpointError, DamagedCheckpointError
from megatron.checkpoint.format import whole_box
from megatron.config.errors import UserError
from megatron.config.model import ModelConfig
from megatron.convert.huggingface.config import build_config_json, read_model_config
from megatron.convert.huggingface.weights import HuggingFaceWeights, build_on_meta, map_tensors
from megatron.distributed.sharding import Box
from tests.parity.families import from_gpt2, from_llama
from tests.solo import tiny
from tests.unit.convert.folders import llama, random_weights, write_folder

MODELS = {"gpt2": tiny(hidden_size=24, num_attention_heads=3), "llama": llama(kv_channels=6)}


@pytest.fixture(scope="module", params=MODELS)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceWeights:
    model = MODELS[request.param]
    folder = tmp_path_factory.mktemp("hf") / "model"
    return HuggingFaceWeights(write_folder(folder, model, random_weights(model, torch.bfloat16), shards=3), model)


@st.composite
def boxes(draw: st.DrawFn, view: tuple[int, ...]) -> Box:
    edges = [sorted(draw(st.lists(st.integers(0, n), min_size=2, max_size=2))) for n in view]
    return Box(tuple(a for a, _ in edges), tuple(b - a for a, b in edges))


@settings(max_examples=200, derandomize=True, deadline=None)
@given(data=st.data())
def test_any_box_is_the_slice_of_the_whole(source: HuggingFaceWeights, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(list(source.specs)))
    view = source.specs[name].view
    box = data.draw(boxes(view))
    part = source.read(name, view, box)
    assert part.shape == box.size
    assert part.dtype == source.dtype == torch.bfloat16
    assert torch.equal(part, source.read(name, view, whole_box(view))[box.slices])


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("shards", [1, 4])
def test_whole_tensors_are_the_mapping_written_by_hand(kind: str, shards: int, tmp_path: Path) -> None:
    model = MODELS[kind]
    weights = random_weights(model)
    source = HuggingFaceWeights(write_folder(tmp_path / "m", model, weights, shards), model)
    expected = (from_gpt2 if kind == "gpt2" else from_llama)(weights, model)
    assert set(source.specs) == set(expected)
    for name, spec in source.specs.items():
        assert torch.equal(source.read(name, spec.view, whole_box(spec.view)).reshape(spec.shape), expected[name]), name


def test_another_view_is_a_mistake(source: HuggingFaceWeights) -> None:
    name = next(iter(source.specs))
    view = source.specs[name].view
    with pytest.raises(ValueError, match="is viewed"):
        source.read(name, view[::-1], whole_box(view[::-1]))


@pytest.mark.parametrize("kind", MODELS)
def test_tensors_that_do_not_fit_are_all_named(kind: str, tmp_path: Path) -> None:
    model = MODELS[kind]
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
    assert "does not have: adapter.weight;" in message
    assert f"{misshapen} [" in message
    assert f"{mistyped} torch.float64" in message


def test_model_of_another_shape_is_refused(tmp_path: Path) -> None:
    model = MODELS["llama"]
    folder = write_folder(tmp_path / "m", model, random_weights(model))
    with pytest.raises(CheckpointError, match=r"lacks: .*model\.layers\.2\."):
        HuggingFaceWeights(folder, llama(kv_channels=6, num_layers=3))


def test_model_of_another_kind_is_refused(tmp_path: Path) -> None:
    model = MODELS["llama"]
    folder = write_folder(tmp_path / "m", model, random_weights(model))
    with pytest.raises(CheckpointError, match=r"is a llama, which has nothing for .*layers\.0\.input_layernorm\.bias"):
        HuggingFaceWeights(folder, llama(kv_channels=6, normalization="LayerNorm"))


def test_known_buffers_are_passed_over(tmp_path: Path) -> None:
    gpt2, other = MODELS["gpt2"], MODELS["llama"]
    buffers = {"transformer.h.0.attn.bias": torch.ones(1, 1, 4, 4), "transformer.h.1.attn.masked_bias": torch.ones(())}
    HuggingFaceWeights(write_folder(tmp_path / "gpt2", gpt2, random_weights(gpt2) | buffers), gpt2)
    old = {"model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(3)}
    HuggingFaceWeights(write_folder(tmp_path / "llama", other, random_weights(other) | old), other)


@pytest.mark.parametrize(("kind", "prefix"), [("gpt2", "transformer."), ("llama", "model.")])
def test_names_may_lack_the_prefix(kind: str, prefix: str, tmp_path: Path) -> None:
    model = MODELS[kind]
    weights = random_weights(model)
    source = HuggingFaceWeights(write_folder(tmp_path / "with", model, weights), model)
    bare = {name.removeprefix(prefix): value for name, value in weights.items()}
    if kind == "gpt2":
        bare["h.0.attn.bias"] = torch.ones(1, 1, 4, 4)
    other = HuggingFaceWeights(write_folder(tmp_path / "without", model, bare), model)
    for name, spec in source.specs.items():
        box = whole_box(spec.view)
        assert torch.equal(source.read(name, spec.view, box), other.read(name, spec.view, box))


def test_tied_head_may_be_stored_if_it_is_the_embedding(tmp_path: Path) -> None:
    model = MODELS["gpt2"]
    weights = random_weights(model)
    copy = weights["transformer.wte.weight"].clone()
    HuggingFaceWeights(write_folder(tmp_path / "same", model, weights | {"lm_head.weight": copy}), model)
    copy[-1, -1] += 1e-3
    with pytest.raises(CheckpointError, match=r"stores another: lm_head\.weight"):
        HuggingFaceWeights(write_folder(tmp_path / "other", model, weights | {"lm_head.weight": copy}), model)


def test_head_that_is_not_tied_must_be_there(tmp_path: Path) -> None:
    model = MODELS["llama"]
    weights = random_weights(model)
    del weights["lm_head.weight"]
    with pytest.raises(CheckpointError, match=r"lacks: lm_head\.weight"):
        HuggingFaceWeights(write_folder(tmp_path / "m", model, weights), model)


def test_pickled_weights_are_refused_with_a_way_out(tmp_path: Path) -> None:
    model = MODELS["llama"]
    folder = write_folder(tmp_path / "m", model, random_weights(model))
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pickled weights[\s\S]*fix: python -c .*save_pretrained"):
        HuggingFaceWeights(folder, model)
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

    def read_with(weight_map: object) -> None:
        index.write_text(json.dumps(content | {"weight_map": weight_map}))
        HuggingFaceWeights(folder, model)

    read_with(places)
    first, second = sorted(set(places.values()))
    name = next(name for name, file in places.items() if file == first)
    with pytest.raises(DamagedCheckpointError, match=f"do not match: {name} in {second}"):
        read_with(places | {name: second})
    with pytest.raises(DamagedCheckpointError, match=r"outside its folder: \.\./x"):
        read_with(places | {name: "../x"})
    for strange in ([], None, {name: 3}, {name: None}, {name: ["x"]}):
        with pytest.raises(DamagedCheckpointError, match="no index of weights"):
            read_with(strange)
    for strange in ("", "..", "."):
        with pytest.raises(DamagedCheckpointError, match=r"cannot be read|outside its folder"):
            read_with(places | {name: strange})
    (folder / second).unlink()
    with pytest.raises(DamagedCheckpointError, match=second):
        read_with(places)


def test_truncated_file_is_refused(tmp_path: Path) -> None:
    model = MODELS["llama"]
    folder = write_folder(tmp_path / "m", model, random_weights(model))
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(DamagedCheckpointError, match="is damaged"):
        HuggingFaceWeights(folder, model)


def test_a_box_of_a_huge_tensor_costs_only_its_own_bytes(tmp_path: Path) -> None:
    model = llama(vocab_size=4_000_000, hidden_size=256, num_layers=1)  # two tables of 4 GB, all holes
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(build_config_json(model)))
    _sparse_file(folder / "model.safetensors", model)
    before = _resident_bytes()
    source = HuggingFaceWeights(folder, model)
    spec = source.specs["output_layer.weight"]
    part = source.read("output_layer.weight", spec.view, Box((3_999_000, 0), (1000, 256)))
    assert not part.any()
    assert _resident_bytes() - before < 64e6


def _sparse_file(path: Path, model: ModelConfig) -> None:
    """A safetensors file of the right length in which nothing was written but the header."""
    table, end = {}, 0
    for found in map_tensors("llama", build_on_meta(model).specs).values():
        for slot in found:
            size = 4 * torch.Size(slot.shape).numel()
            table[slot.name] = {"dtype": "F32", "shape": slot.shape, "data_offsets": [end, end + size]}
            end += size
    header = json.dumps(table).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + end)


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def test_mixed_types_are_read_as_the_widest(tmp_path: Path) -> None:
    model = MODELS["llama"]
    weights = random_weights(model, torch.bfloat16)
    name = "model.layers.0.self_attn.q_proj.weight"
    weights[name] = weights[name].float()
    folder = write_folder(tmp_path / "m", model, weights)
    source = HuggingFaceWeights(folder, model)
    spec = source.specs["layers.0.self_attention.linear_qkv.weight"]
    whole_tensor = source.read("layers.0.self_attention.linear_qkv.weight", spec.view, whole_box(spec.view))
    assert source.dtype == whole_tensor.dtype == torch.float32


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": 0}, "E600 {0}: hidden_size 0: must be at least 1"),
        ({"num_attention_heads": 0}, "E600 {0}: num_attention_heads 0"),
        ({"num_key_value_heads": 3}, "E102 {0}: 4 query heads cannot share 3 key/value heads"),
        ({"head_dim": 7}, "E106 {0}: 7 of 7 channels per head"),
        ({"max_position_embeddings": 0}, "E600 {0}: max_position_embeddings 0"),
    ],
)
def test_numbers_that_do_not_fit_together_are_told(changes: dict[str, int], said: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(build_config_json(llama()) | changes))
    with pytest.raises(UserError, match=re.escape(said.format(path))):
        read_model_config(tmp_path)


def test_shape_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(build_config_json(llama())))
    assert build_config_json(read_model_config(tmp_path)) == build_config_json(llama())
