"""LoRA and DoRA against peft on the same Llama of transformers, in fp64, and the trained parameters."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import peft
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from megatron.config.optimizer import OptimizerConfig
from megatron.config.training import TrainingConfig
from megatron.convert.huggingface.config import read_model_config
from megatron.convert.huggingface.weights import HuggingFaceWeights
from megatron.convert.weight_source import fill_weights
from megatron.distributed.micro_batch import MicroBatch
from megatron.layers.adapters import adapted_row_norms
from megatron.layers.parameters import gpt, trainable
from tests.kit.solo import Solo, random_batch
from tests.parity.families import everything_in_double
from tests.parity.test_hf import Case

KINDS = {"A": "a", "B": "b", "magnitude_vector": "magnitude"}
GROUPS, HEADS, WIDTH, RANK = 2, 4, 8, 3
TARGETS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "all": (("linear_*",), ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")),
    "some": (("linear_qkv.q", "linear_qkv.v", "mlp.linear_fc1.up"), ("q_proj", "v_proj", "up_proj")),
}
"""Our patterns and the modules of peft that they stand for."""

FUSED = {
    "self_attn.q_proj": ("self_attention.linear_qkv", 0),
    "self_attn.k_proj": ("self_attention.linear_qkv", 1),
    "self_attn.v_proj": ("self_attention.linear_qkv", 2),
    "self_attn.o_proj": ("self_attention.linear_proj", 0),
    "mlp.gate_proj": ("mlp.linear_fc1", 0),
    "mlp.up_proj": ("mlp.linear_fc1", 1),
    "mlp.down_proj": ("mlp.linear_fc2", 0),
}
"""Our linear and the part of it that a module of Llama is."""


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    sizes = {"num_key_value_heads": GROUPS, "max_position_embeddings": 16, "initializer_range": 0.2}
    folder = tmp_path_factory.mktemp("llama")
    Case("llama", "Llama", sizes).reference().save_pretrained(folder)
    return folder


def build(folder: Path, target: tuple[str, ...], dora: bool, empty: str | None = None) -> Solo:
    """The model in the folder with adapters of random values; magnitudes are the norms of the frozen rows.

    The fourth row of the weight ``empty`` is 0.
    """
    base = replace(read_model_config(folder), hidden_dropout=0.0, attention_dropout=0.0)
    model = replace(base, lora_rank=RANK, lora_alpha=5.0, lora_target=target, lora_dora=dora)
    solo = Solo.build(model, training=TrainingConfig(), optimizer=OptimizerConfig(clip_grad=0.0, adam_eps=1e-8))
    frozen = {name: param for name, param in solo.chunk.params.items() if not param.requires_grad}
    fill_weights(solo.chunk.specs, frozen, HuggingFaceWeights(folder, base))
    if empty is not None:
        frozen[empty].data[3] = 0.0
    for name, norms in adapted_row_norms(solo.chunk).items():
        solo.chunk.params[name].data.copy_(norms)
    return solo


NAME = re.compile(r".*layers\.(\d+)\.(\w+\.\w+)\.lora_(A|B|magnitude_vector)\.default\.weight")


def pairs(solo: Solo, theirs: Mapping[str, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Each tensor of peft's adapters, and a view of the elements of ours that stand for it."""
    adapted = {NAME.fullmatch(name)[2] for name in theirs}
    for name, tensor in theirs.items():
        layer, module, kind = NAME.fullmatch(name).groups()
        linear, part = FUSED[module]
        ours = solo.chunk.params[f"layers.{layer}.{linear}.lora_{KINDS[kind]}"].data
        if kind == "A":
            index = sum(of == linear and other < part for m, (of, other) in FUSED.items() if m in adapted)
            yield tensor, ours[index * RANK :][:RANK]
        elif linear.endswith("linear_qkv"):
            heads = (slice(0, -2), slice(-2, -1), slice(-1, None))[part]
            yield tensor, ours.view(GROUPS, -1, WIDTH, *ours.shape[1:])[:, heads]
        else:
            yield tensor, ours.chunk(2 if linear.endswith("linear_fc1") else 1)[part]


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("target", TARGETS)
def test_trains_as_peft_does(llama: Path, target: str, dora: bool) -> None:
    """20 steps of AdamW: the losses and every element of the adapters."""
    (ours, modules), weights = TARGETS[target], safetensors.torch.load_file(llama / "model.safetensors")
    solo, generator = build(llama, ours, dora), torch.Generator().manual_seed(1)
    for name, param in solo.chunk.params.items():  # B also where parts have no adapter: it has no effect there
        if name.endswith(("lora_a", "lora_b")):
            param.data.copy_(0.1 * torch.randn(param.shape, generator=generator))
    with everything_in_double():
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_pretrained(llama)).double()
        model.load_state_dict(weights)
        config = peft.LoraConfig(r=RANK, lora_alpha=5, target_modules=list(modules), use_dora=dora)
        theirs = peft.get_peft_model(model, config).double()
    trained = {name: p for name, p in theirs.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for tensor, view in pairs(solo, trained):
            if tensor.dim() == 1:  # both are the norms of the frozen rows
                torch.testing.assert_close(view.flatten(), tensor, rtol=1e-12, atol=0)
            tensor.copy_(view.reshape(tensor.shape))
    batches = [random_batch(solo.chunk.config, seed=step) for step in range(20)]
    losses = [solo.step([batch], lr=1e-2, weight_decay=0.1)[0] for batch in batches]
    with everything_in_double():
        expected = train(theirs, batches)
    torch.testing.assert_close(torch.stack(losses), torch.stack(expected), rtol=1e-10, atol=0)
    for tensor, view in pairs(solo, trained):
        torch.testing.assert_close(view.reshape(tensor.shape), tensor.detach(), rtol=1e-9, atol=1e-10)


def train(model: nn.Module, batches: Sequence[MicroBatch]) -> list[Tensor]:
    """The losses of a step of AdamW on each batch; vectors have no weight decay."""
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices, vectors = ([p for p in trained if (p.dim() > 1) is wide] for wide in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer, losses = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.999), eps=1e-8), []
    for batch in batches:
        logits, mask = model(batch.tokens).logits, batch.loss_mask.flatten().double()
        entropy = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="none")
        loss = (entropy * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def test_freezes_all_but_adapters(llama: Path) -> None:
    """No gradient, no main parameter, no state; and without its adapters the model computes what the base does."""
    solo = build(llama, ("linear_qkv.q", "layers.1.*"), dora=True)
    names = {name for name in solo.chunk.params if "lora" in name}
    assert {name.split(".")[1] for name in names if "fc1" in name} == {"1"}
    assert names == {*solo.buckets.grads} == {*solo.optimizer.main_params} == {*trainable(gpt(solo.chunk.config))}
    assert {name for tensors in solo.optimizer.state().values() for name in tensors} == names
    batch = random_batch(solo.chunk.config)
    before = {name: p.detach().clone() for name, p in solo.chunk.params.items()}
    base, _ = solo.chunk(None, batch)
    solo.step([batch], lr=0.1, weight_decay=0.0)
    changed = {name for name, p in solo.chunk.params.items() if not torch.equal(p, before[name])}
    assert changed == names - {name for name in names if name.endswith("lora_a")}, "A has no gradient where B is 0"
    adapted, _ = solo.chunk(None, batch)
    with solo.chunk.context.adapters.off():
        assert torch.equal(solo.chunk(None, batch)[0], base)
    assert not torch.allclose(adapted, base)


def test_initial_values_have_the_variance_of_peft(llama: Path) -> None:
    """A is uniform between -1/sqrt(in) and 1/sqrt(in), and B is 0."""
    config = replace(read_model_config(llama), hidden_size=256, ffn_hidden_size=512, lora_rank=64)
    for name, values in Solo.build(config).chunk.params.items():
        if name.endswith("lora_a"):
            assert values.mean().item() == pytest.approx(0.0, abs=0.05 / values.shape[1] ** 0.5)
            assert values.var().item() == pytest.approx(1 / (3 * values.shape[1]), rel=0.05)
        elif name.endswith("lora_b"):
            assert not values.any()


def test_a_row_of_norm_0_starts_as_it_is(llama: Path) -> None:
    """Its magnitude over its norm, 0/0, is not a number in PEFT; here the factor is 1 until B has a value."""
    linear = "layers.0.mlp.linear_fc2"
    solo = build(llama, ("linear_*",), dora=True, empty=f"{linear}.weight")
    assert solo.chunk.params[f"{linear}.lora_magnitude"][3] == 0.0
    batch = random_batch(solo.chunk.config)
    with solo.chunk.context.adapters.off():
        base, _ = solo.chunk(None, batch)
    torch.testing.assert_close(solo.chunk(None, batch)[0], base, rtol=1e-12, atol=0)
    solo.step([batch], lr=0.01, weight_decay=0.0)
    for params in (solo.buckets.grads, solo.chunk.params):
        assert all(values.isfinite().all() for values in params.values())
    assert solo.chunk.params[f"{linear}.lora_b"][3].any()
    assert solo.chunk(None, batch)[0].isfinite()
