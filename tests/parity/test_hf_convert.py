"""Random odd shapes through `transformers`' own files: bitwise there and back, the same logits, the same gradients."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from megatron.arguments.sources import to_dict
from megatron.checkpoint.format import Manifest
from megatron.checkpoint.save import save_sharded
from megatron.checkpoint.tensor_file import GlobalTensor, TensorPart
from megatron.config.model import ModelConfig
from megatron.config.precision import PrecisionConfig
from megatron.config.run import RunConfig
from megatron.config.training import TrainingConfig
from megatron.convert.huggingface.convert import convert_from_huggingface, convert_to_huggingface
from megatron.convert.saved_model import SavedModel
from megatron.convert.sources import open_checkpoint
from megatron.convert.weight_source import fill_weights
from megatron.distributed.comm import Group
from megatron.distributed.micro_batch import MicroBatch
from tests.kit.solo import Solo, random_batch
from tests.parity.families import everything_in_double, from_experts, from_gpt2, from_gpt_oss, from_llama, from_neox
from tests.unit.convert.folders import ignore, opened

transformers = pytest.importorskip("transformers")

IGNORED = -100  # the label `transformers` leaves out
SHAPES = 8  # of each family
SAME = {"attn_implementation": "eager"}  # which caps scores
EAGER = {"experts_implementation": "eager"}  # the others want widths that are multiples of 16 bytes


@dataclass(frozen=True)
class Shape:
    """A model of transformers: its family and the keys of its config.json."""

    family: str
    keys: dict[str, Any]

    def build(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        config = getattr(transformers, f"{self.family}Config")(use_cache=False, **EAGER, **self.keys)
        model = transformers.AutoModelForCausalLM.from_config(config, **({} if self.family == "GPT2" else SAME))
        for parameter in model.parameters():  # their initial biases are 0 and their norms 1: both would hide mistakes
            nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.2)
        return model.eval()

    def translate(self, tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
        if config.num_experts:
            return (from_gpt_oss if self.family == "GptOss" else from_experts)(tensors, config)
        return {"GPT2": from_gpt2, "GPTNeoX": from_neox}.get(self.family, from_llama)(tensors, config)


def gpt2_shape(rng: random.Random) -> Shape:
    heads = rng.randint(1, 5)
    return Shape(
        "GPT2",
        {
            "n_layer": rng.randint(1, 4),
            "n_head": heads,
            "n_embd": heads * rng.randint(3, 11),
            "n_inner": rng.choice([None, rng.randint(5, 70)]),
            "vocab_size": rng.randint(30, 260),
            "n_positions": rng.randint(16, 90),
            "tie_word_embeddings": rng.random() < 0.5,
            "activation_function": rng.choice(["gelu_new", "gelu"]),
            "layer_norm_epsilon": rng.choice([1e-5, 1e-3]),
            "bos_token_id": 1,
            "eos_token_id": 2,
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        },
    )


def llama_shape(rng: random.Random, family: str = "Llama") -> Shape:
    groups, shared = rng.randint(1, 3), rng.randint(1, 4)
    heads = groups * shared
    scaling = rng.choice([None, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}])
    keys: dict[str, Any] = {
        "num_hidden_layers": rng.randint(1, 4),
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "hidden_size": heads * rng.randint(3, 9),
        "head_dim": 2 * rng.randint(1, 7),
        "intermediate_size": rng.randint(5, 70),
        "vocab_size": rng.randint(30, 260),
        "max_position_embeddings": rng.randint(64, 90),
        "tie_word_embeddings": rng.random() < 0.5,
        "rms_norm_eps": rng.choice([1e-6, 1e-3]),
        "rope_parameters": {"rope_type": "default", **(scaling or {}), "rope_theta": rng.choice([100.0, 10000.0])},
    }
    if family == "Llama":
        biases = rng.random() < 0.4
        keys |= {"attention_bias": biases, "mlp_bias": biases}
    if family in ("Mistral", "Mixtral", "GptOss"):
        keys["sliding_window"] = rng.randint(2, 9)
    if family.startswith("Qwen"):
        windowed = rng.random() < 0.5
        keys |= {"use_sliding_window": windowed, "sliding_window": 5, "max_window_layers": 0 if windowed else 9}
    if family in ("Qwen2", "Qwen3", "Ministral") and rng.random() < 0.7:
        kinds = rng.choices(["sliding_attention", "full_attention"], k=keys["num_hidden_layers"])
        keys |= {"use_sliding_window": True, "sliding_window": 5, "layer_types": kinds}
        if family == "Ministral":
            del keys["use_sliding_window"]
    if family in ("Mixtral", "Qwen3Moe", "GptOss"):
        experts = rng.randint(2, 6)
        keys |= {"num_local_experts": experts, "num_experts_per_tok": rng.randint(1, experts)}
    if family == "Qwen3Moe":
        keys |= {"moe_intermediate_size": rng.randint(3, 20), "norm_topk_prob": rng.random() < 0.5}
        del keys["max_window_layers"]
    return Shape(family, keys)


def other_shape(rng: random.Random, family: str) -> Shape:
    """Of a family with norms, rotary positions, biases or factors of its own."""
    keys = dict(llama_shape(rng).keys)
    layers, heads = keys["num_hidden_layers"], keys["num_attention_heads"]
    theta = {"rope_type": "default", "rope_theta": rng.choice([100.0, 10000.0])}
    keys |= {"sliding_window": rng.randint(2, 9), "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
    kinds = rng.choices(["sliding_attention", "full_attention"], k=layers)
    scaled = theta | rng.choice([{}, {"rope_type": "linear", "factor": 2.0}])
    of_kinds = {"full_attention": scaled, "sliding_attention": theta | {"rope_theta": rng.choice([50.0, 500.0])}}
    scores = {"query_pre_attn_scalar": rng.randint(3, 30), "layer_types": kinds}
    own: dict[str, dict[str, Any]] = {
        "GPTNeoX": {
            "use_parallel_residual": rng.random() < 0.7,
            "hidden_act": rng.choice(["gelu", "gelu_new"]),
            "layer_norm_eps": 1e-3,
            "hidden_size": 8 * heads,
            "rope_parameters": scaled | {"partial_rotary_factor": rng.choice([0.25, 0.5, 1.0])},
        },
        "Olmo2": {"rope_parameters": scaled},
        "Olmo3": {"rope_parameters": of_kinds | {"sliding_attention": theta}, "layer_types": kinds},
        "Gemma2": scores | {"attn_logit_softcapping": rng.choice([None, 2.0]), "final_logit_softcapping": 3.0},
        "Gemma3Text": scores | {"rope_parameters": of_kinds, "final_logit_softcapping": rng.choice([None, 3.0])},
        "Phi3": {"rope_parameters": theta | {"partial_rotary_factor": rng.choice([0.5, 1.0])}},
        "SmolLM3": {"no_rope_layers": [*rng.choices([0, 1], k=layers - 1), 0]},
        "Starcoder2": {"use_bias": rng.random() < 0.5, "norm_epsilon": 1e-3, "num_attention_heads": 2 * heads},
        "Granite": {
            name: rng.uniform(0.3, 3.0)
            for name in ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling")
        },
    }
    biased, has_head_dim = family in ("SmolLM3", "Granite"), family.startswith("Gemma")
    dropped = {*(() if biased else ("attention_bias", "mlp_bias")), *(() if has_head_dim else ("head_dim",))}
    if not has_head_dim and "hidden_size" not in own[family]:
        own[family]["hidden_size"] = 8 * heads
    if "rope_parameters" not in own[family]:
        own[family]["rope_parameters"] = scaled
    if family in ("Olmo2", "SmolLM3", "GPTNeoX", "Granite"):
        dropped.add("sliding_window")
    if family in ("GPTNeoX", "Starcoder2"):
        dropped |= {"rms_norm_eps", *(("num_key_value_heads",) if family == "GPTNeoX" else ())}
    return Shape(family, {name: value for name, value in (keys | own[family]).items() if name not in dropped})


OTHERS = ("GPTNeoX", "Olmo2", "Olmo3", "Gemma2", "Gemma3Text", "Phi3", "SmolLM3", "Starcoder2", "Granite")


def shapes() -> dict[str, Shape]:
    """By family and number: ``GPT2-0``, ``GPT2-1``, ..."""
    rng = random.Random(20)
    found = {f"GPT2-{n}": gpt2_shape(rng) for n in range(SHAPES)}
    found |= {f"Llama-{n}": llama_shape(rng) for n in range(SHAPES)}
    for family in ("Mistral", "Ministral", "Qwen2", "Qwen3", "Mixtral", "Qwen3Moe"):
        found |= {f"{family}-{n}": llama_shape(rng, family) for n in range(3)}
    for family in OTHERS:
        found |= {f"{family}-{n}": other_shape(rng, family) for n in range(3)}
    return found | {f"GptOss-{n}": llama_shape(rng, "GptOss") for n in range(3)}


CASES = shapes()
UNUSED: dict[str, tuple[str, ...]] = {"Phi3": ("partial_rotary_factor",)}
"""Keys that mean nothing where others are set."""


def solo(saved: SavedModel) -> Solo:
    """Our model with the weights of a checkpoint, in fp64."""
    made = Solo.build(saved.model, torch.float64, TrainingConfig(cross_entropy_chunk_size=7))
    fill_weights(made.chunk.specs, made.params, saved)
    return made


def assert_same_numbers(shape: Shape, ours: Solo, theirs: nn.Module) -> None:
    """In fp64, logits and loss within 1e-11, and gradients of all parameters within 1e-10 of their norms."""
    batch = random_batch(ours.chunk.config, samples=3, length=16, seed=3)
    with everything_in_double():
        config = transformers.AutoConfig.for_model(**theirs.config.to_dict())
        twin = transformers.AutoModelForCausalLM.from_config(config, **EAGER, **SAME).double().eval()
        twin.load_state_dict(theirs.state_dict())
        expected_BSV = twin(batch.tokens, use_cache=False).logits
        expected = their_backward(twin, batch)
    ours.chunk.eval()
    logits_BSV = ours.chunk.logits(batch.tokens).transpose(0, 1)
    assert (logits_BSV - expected_BSV).abs().max() <= 1e-11 * expected_BSV.abs().max().clamp(min=1)
    ours.chunk.train()
    assert ours.backward([batch]).item() == pytest.approx(expected.item(), rel=1e-11)
    grads = {name: parameter.grad for name, parameter in twin.named_parameters() if parameter.grad is not None}
    reference = shape.translate(grads, ours.chunk.config)
    assert reference.keys() == ours.buckets.grads.keys()
    scale = max(grad.norm() for grad in reference.values())
    for name, grad in reference.items():  # a key bias has no gradient but rounding: hence the floor
        error = (ours.buckets.grads[name][: len(grad)] - grad).norm()
        assert error <= 1e-10 * max(grad.norm(), 1e-3 * scale), name


def their_backward(theirs: nn.Module, batch: MicroBatch) -> Tensor:
    labels = batch.labels.where(batch.loss_mask > 0, IGNORED)
    loss = theirs(input_ids=batch.tokens, labels=labels, shift_labels=labels, use_cache=False).loss
    loss.backward()
    return loss.detach()


def load(folder: Path) -> nn.Module:
    """A folder as a person loads it, in fp32; transformers must find every tensor, and no other."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, dtype=torch.float32, **EAGER, **SAME
    )
    assert not any(info.values()), info
    return model.eval()


@pytest.mark.parametrize("name", CASES)
def test_there_and_back(name: str, tmp_path: Path) -> None:
    shape, number = CASES[name], list(CASES).index(name)
    theirs = shape.build(seed=number)
    dtype = (torch.float32, torch.bfloat16, torch.float16)[number % 3]
    theirs.to(dtype).save_pretrained(tmp_path / "hf", max_shard_size="20KB")
    convert_from_huggingface(opened(tmp_path / "hf"), tmp_path / "save", ignore, checked=False)
    saved = SavedModel(open_checkpoint(tmp_path / "save")[0])
    kind = theirs.config.model_type  # another may compute the same
    convert_to_huggingface(saved, tmp_path / "back", ignore, shard_bytes=30_000, checked=False, model_type=kind)
    before, after = (weights_of(tmp_path / folder) for folder in ("hf", "back"))
    assert before.keys() == after.keys()
    for key, value in before.items():
        assert value.dtype == after[key].dtype == dtype
        assert torch.equal(value, after[key]), key
    assert_same_numbers(shape, solo(saved), load(tmp_path / "back"))
    configs = [transformers.AutoConfig.from_pretrained(tmp_path / folder).to_dict() for folder in ("hf", "back")]
    for config in configs:
        unused = {"sliding_window"} if set(config.get("layer_types") or ()) == {"full_attention"} else set()
        for name in ("_name_or_path", "use_cache", *unused, *UNUSED.get(shape.family, ())):
            config.pop(name, None)
    assert shape.family not in OTHERS or configs[0] == configs[1]


def weights_of(folder: Path) -> dict[str, Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


@pytest.mark.parametrize(
    "name",
    ["GPT2-2", "Llama-1", "Qwen3-1", "Mixtral-0", "Qwen3Moe-1", "GptOss-1", *(f"{family}-1" for family in OTHERS)],
)
def test_export_of_a_trained_model(name: str, tmp_path: Path) -> None:
    shape = CASES[name]
    shape.build(seed=1).save_pretrained(tmp_path / "hf")
    convert_from_huggingface(opened(tmp_path / "hf"), tmp_path / "save", ignore, checked=False)
    ours = solo(SavedModel(open_checkpoint(tmp_path / "save")[0]))
    for step in range(3):
        ours.step([random_batch(ours.chunk.config, seed=step)], lr=1e-2)
    with torch.no_grad():
        for weight in (*ours.params.values(), *ours.optimizer.main_params.values()):
            weight.copy_(weight.float())  # the export is in fp32
    manifest = write_trained(tmp_path / "run" / "iter_0000003", ours)
    done = convert_to_huggingface(SavedModel(manifest), tmp_path / "out", ignore, shard_bytes=10**9)
    assert done.differences
    exported = load(tmp_path / "out")
    assert_same_numbers(shape, ours, exported)
    changed = [not torch.equal(a, b) for a, b in zip(exported.parameters(), load(tmp_path / "hf").parameters())]
    assert all(changed), "training moved every tensor"


def write_trained(path: Path, ours: Solo) -> Manifest:
    """Write a checkpoint of weights and moments without the padding of the vocabulary, as the specs require."""
    tensors = {}
    held = {"": dict(ours.optimizer.main_params)} | {f"optim.{k}.": t for k, t in ours.optimizer.state().items()}
    for prefix, values in held.items():
        for name, value in values.items():
            spec = ours.chunk.specs[name]
            local = value.detach().view(spec.local_view)
            parts = tuple(TensorPart(piece.global_box, local[piece.local_box.slices]) for piece in spec.pieces)
            tensors[prefix + name] = GlobalTensor(spec.shape, spec.view, value.dtype, parts)
    config = RunConfig(model=ours.chunk.config, precision=PrecisionConfig(params_dtype="fp32"))
    save_sharded(path, tensors, {"iteration": 3}, to_dict(config), Group())
    return Manifest.open(path)
