"""Losses of routers against transformers' own, and a mixture's files through a check that finds a swapped expert."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron.checkpoint.errors import CheckpointError
from megatron.convert.huggingface.check import MismatchError, check_model
from megatron.convert.huggingface.config import CONFIG_FILE, read_model_config
from megatron.convert.huggingface.weights import HuggingFaceWeights
from megatron.distributed.sharding import Box
from tests.kit.solo import random_batch
from tests.parity.test_hf import BY_NAME, Case, Pair, precision
from tests.parity.test_hf_convert import build

transformers = pytest.importorskip("transformers")

COEFFICIENT = 0.3


BALANCED = ("mixtral", "mixtral-three-of-five", "qwen3-moe", "qwen3-moe-shares-of-all", "qwen2-moe", "olmoe", "gpt-oss")
"""Families with experts in the first layer, and a balancing loss in transformers."""


@pytest.mark.parametrize("name", BALANCED)
def test_balancing_loss_of_a_batch_is_transformers(name: str) -> None:
    """Of one layer: theirs takes all layers as one, and counts a token's choices without dividing by their number."""
    case = BY_NAME[name]
    changes = {"moe_router_load_balancing_type": ("aux_loss",), "moe_aux_loss_coeff": (COEFFICIENT,)}
    theirs = {"num_hidden_layers": 1, "output_router_logits": True, "router_aux_loss_coef": COEFFICIENT}
    theirs |= {name: value[:1] for name, value in case.theirs.items() if name == "layer_types"}
    pair = Pair.build(replace(case, ours=case.ours | changes, theirs=case.theirs | theirs), torch.float64)
    batch = random_batch(pair.config, samples=3)
    batch = replace(batch, labels=batch.labels.contiguous(), loss_mask=torch.ones_like(batch.loss_mask))
    with precision(torch.float64):
        out = pair.theirs(input_ids=batch.tokens, labels=batch.labels, shift_labels=batch.labels)
    _, losses = pair.ours.chunk(None, batch)
    mean = losses / batch.loss_mask.sum() * pair.config.moe_router_topk
    assert mean.item() == pytest.approx(COEFFICIENT * out.aux_loss.item(), rel=1e-12)
    assert out.aux_loss > 1


SMALL = {"num_key_value_heads": 2, "intermediate_size": 40, "num_local_experts": 3, "num_experts_per_tok": 2}
SHAPES = [
    Case("mixtral", "Mixtral", SMALL),
    Case("qwen3-moe", "Qwen3Moe", SMALL | {"head_dim": 12, "moe_intermediate_size": 20, "norm_topk_prob": True}),
]
GPT_OSS = Case("gpt-oss", "GptOss", SMALL | {"head_dim": 12, "sliding_window": 5})


def checked(folder: Path) -> float:
    """The largest relative difference that the check of a conversion finds."""
    model = read_model_config(folder)
    return max(d.relative for d in check_model(folder, folder / CONFIG_FILE, model, HuggingFaceWeights(folder, model)))


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("shape", [*SHAPES, GPT_OSS], ids=lambda shape: shape.family)
def test_the_check_of_a_conversion_reads_experts_as_transformers_does(
    shape: Case, stacked: bool, tmp_path: Path
) -> None:
    """Stored one by one or as one tensor for all of a layer."""
    build(shape, seed=3).save_pretrained(tmp_path, save_original_format=not stacked)
    names = load_file(tmp_path / "model.safetensors")
    assert any(name.endswith("experts.gate_up_proj") for name in names) == (stacked or shape is GPT_OSS)
    assert checked(tmp_path) < 2e-6


class Swapped(HuggingFaceWeights):
    """Experts 0 and 1 of every layer in each other's place."""

    def read(self, name: str, view: tuple[int, ...], box: Box) -> Tensor:
        values = super().read(name, view, box)
        if ".experts." not in name:
            return values
        assert box.size == view, "all experts at once"
        return values[[1, 0, *range(2, len(values))]]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.family)
def test_swapped_experts_are_found(shape: Case, tmp_path: Path) -> None:
    build(shape, seed=3).save_pretrained(tmp_path)
    model = read_model_config(tmp_path)
    with pytest.raises(MismatchError, match="block 0"):
        check_model(tmp_path, tmp_path / CONFIG_FILE, model, Swapped(tmp_path, model))


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.family)
def test_a_missing_expert_is_named(shape: Case, tmp_path: Path) -> None:
    build(shape, seed=3).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    lost = next(name for name in tensors if ".experts.2." in name)
    save_file({name: x for name, x in tensors.items() if name != lost}, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=f"lacks.*{lost}"):
        checked(tmp_path)
