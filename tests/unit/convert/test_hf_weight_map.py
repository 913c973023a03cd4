from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.checkpoint.format import partition_problem
from megatron.config.model import ModelConfig
from megatron.convert.huggingface.families import MODEL_FAMILIES
from megatron.convert.huggingface.weights import TensorMapping, build_on_meta, map_tensors
from tests.parity.families import from_experts, from_gpt2, from_llama
from tests.solo import tiny

LLAMA = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "activation": "swiglu",
    "add_bias_linear": False,
    "ffn_hidden_size": 48,
}
UNTIED = {"untie_embeddings_and_output_weights": True}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {"num_layers": 3}),
    "gpt2-untied-odd": ("gpt2", {**UNTIED, "hidden_size": 21, "num_attention_heads": 3, "ffn_hidden_size": 13}),
    "llama": ("llama", {**LLAMA, **UNTIED}),
    "llama-tied-mqa": ("llama", {**LLAMA, "num_query_groups": 1, "kv_channels": 6}),
    "llama-biases": ("llama", {**LLAMA, "add_bias_linear": True, "num_query_groups": 2}),
    "qwen2": ("qwen2", {**LLAMA, "add_qkv_bias": True}),
    "mixtral": ("mixtral", {**LLAMA, **UNTIED, "num_experts": 3, "num_query_groups": 2}),
    "qwen3-moe": (
        "qwen3_moe",
        {**LLAMA, "num_experts": 5, "moe_ffn_hidden_size": 7, "qk_layernorm": True, "kv_channels": 10},
    ),
    "qwen3": ("qwen3", {**LLAMA, **UNTIED, "qk_layernorm": True, "num_query_groups": 2, "kv_channels": 10}),
}


def theirs_like(found: Mapping[str, tuple[TensorMapping, ...]], seed: int = 0) -> dict[str, Tensor]:
    """Random tensors by their names."""
    generator = torch.Generator().manual_seed(seed)
    return {slot.name: torch.randn(slot.shape, generator=generator) for made in found.values() for slot in made}


def assemble(found: tuple[TensorMapping, ...], view: tuple[int, ...], theirs: Mapping[str, Tensor]) -> Tensor:
    out = torch.full(view, torch.nan)
    for slot in found:
        out[slot.box.slices] = slot.arrange(theirs[slot.name])
    return out


def by_hand(kind: str, theirs: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    if config.num_experts:
        return from_experts(theirs, config)
    return from_gpt2(theirs, config) if kind == "gpt2" else from_llama(theirs, config)


@pytest.mark.parametrize("name", MODELS)
def test_table_is_the_mapping_written_by_hand(name: str) -> None:
    kind, changes = MODELS[name]
    config = tiny(**changes)
    specs = build_on_meta(config).specs
    found = map_tensors(kind, specs)
    theirs = theirs_like(found)
    expected = by_hand(kind, theirs, config)
    assert found.keys() == expected.keys()
    for ours, made in found.items():
        assert torch.equal(assemble(made, specs[ours].view, theirs).reshape(specs[ours].shape), expected[ours]), ours


@pytest.mark.parametrize("name", MODELS)
def test_every_row_is_undone_to_the_bit(name: str) -> None:
    kind, changes = MODELS[name]
    specs = build_on_meta(tiny(**changes)).specs
    found = map_tensors(kind, specs)
    theirs = theirs_like(found)
    for ours, made in found.items():
        assembled = assemble(made, specs[ours].view, theirs)
        for slot in made:
            assert torch.equal(slot.restore(assembled[slot.box.slices]), theirs[slot.name]), slot.name


@pytest.mark.parametrize("name", MODELS)
def test_slots_make_up_each_tensor_and_nothing_is_copied(name: str) -> None:
    kind, changes = MODELS[name]
    specs = build_on_meta(tiny(**changes)).specs
    found = map_tensors(kind, specs)
    names = [slot.name for made in found.values() for slot in made]
    assert len(names) == len(set(names)), "a tensor of theirs goes to one place"
    for ours, made in found.items():
        assert partition_problem(specs[ours].view, [slot.box for slot in made]) is None
        for slot in made:
            theirs = torch.empty(slot.shape)
            assert slot.arrange(theirs).data_ptr() == theirs.data_ptr()


def test_rows_of_every_family_are_unambiguous() -> None:
    for family in MODEL_FAMILIES.values():
        ours = [row[0] for row in family.weights.rows]
        theirs = [name for _, _, made in family.weights.rows for name, _ in made]
        assert len(set(ours)) == len(ours)
        assert len(set(theirs)) == len(theirs)


def test_a_swapped_row_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    kind, changes = MODELS["llama"]
    family = MODEL_FAMILIES[kind]
    row = next(row for row in family.weights.rows if row[0].endswith("linear_qkv.weight"))
    (q, at_q), (k, at_k), v = row[2]
    swapped = (row[0], row[1], ((q, at_k), (k, at_q), v))
    rows = tuple(swapped if r is row else r for r in family.weights.rows)
    monkeypatch.setitem(MODEL_FAMILIES, kind, replace(family, weights=replace(family.weights, rows=rows)))
    config = tiny(**changes)
    specs = build_on_meta(config).specs
    found = map_tensors(kind, specs)
    name = "layers.0.self_attention.linear_qkv.weight"
    theirs = theirs_like(found)
    expected = by_hand(kind, theirs, config)[name]
    assert not torch.equal(assemble(found[name], specs[name].view, theirs).reshape(expected.shape), expected)


def test_shapes_only_holds_no_memory() -> None:
    model = build_on_meta(tiny())
    assert all(parameter.is_meta for parameter in model.parameters())
