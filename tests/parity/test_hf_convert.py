"""Random odd shapes through `transformers`' own files: bitwise there and back, the same logits, the same gradients."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from megatron.checkpoint.errors import CheckpointError
from megatron.checkpoint.format import Manifest
from megatron.config.model import ModelConfig
from megatron.config.training import TrainingConfig
from megatron.convert.huggingface.convert import convert_from_huggingface, convert_to_huggingface
from megatron.convert.saved_model import SavedModel
from megatron.convert.sources import open_checkpoint
from megatron.convert.weight_source import fill_weights
from megatron.distributed.micro_batch import MicroBatch
from tests.kit.checkpoints import save_model
from tests.kit.solo import Solo, random_batch
from tests.parity.families import EXPERT_BIAS, everything_in_double, randomise, tensors_of, translate
from tests.parity.test_hf import BY_NAME, EXPERT_COUNTS, Case
from tests.unit.convert.folders import ignore, opened

transformers = pytest.importorskip("transformers")
MtpModel = pytest.importorskip("transformers.modeling_layers").MtpModel

IGNORED = -100  # the label `transformers` leaves out
SAME = {"attn_implementation": "eager"}  # which caps scores
EAGER = {"experts_implementation": "eager"}  # the others want widths that are multiples of 16 bytes


def build(case: Case, seed: int) -> nn.Module:
    """A model of transformers with random weights, in fp32."""
    torch.manual_seed(seed)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(case.their_config(), **SAME)
    randomise(model)
    return model.eval()


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


HEAD_DIM = words(
    "Llama Mistral Ministral Qwen3 Mixtral Qwen3Moe GptOss Gemma2 Gemma3Text Qwen2Moe Glm4Moe Dots1 Ernie4_5_Moe"
)
"""Families whose heads need not split the hidden size."""


PAIRS = ("Glm4Moe", "Ernie4_5_Moe")
"""Families with at least two pairs of channels in a head: half of them turn, or which ones are a pair matters."""


def resized(case: Case, seed: int) -> Case:
    """The architecture with random sizes."""
    rng = random.Random(f"{case.name} {seed}")
    groups = rng.randint(1, 3)
    heads = groups * rng.randint(1, 4)
    shared: dict[str, Any] = {
        "vocab_size": rng.randint(30, 260),
        "tie_word_embeddings": rng.random() < 0.5,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if case.family == "GPT2":
        sizes = {"n_layer": rng.randint(1, 4), "n_head": heads, "n_embd": heads * rng.randint(3, 11)}
        sizes |= {"n_inner": rng.choice([None, rng.randint(5, 70)]), "n_positions": rng.randint(16, 90)}
        return replace(case, theirs=case.theirs | shared | sizes)
    sizes = {
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "hidden_size": 8 * heads,
        "intermediate_size": rng.randint(5, 70),
        "max_position_embeddings": max(case.theirs.get("max_position_embeddings", 0), rng.randint(64, 90)),
    }
    if case.family in HEAD_DIM:
        sizes |= {"head_dim": (4 if case.family in PAIRS else 2) * rng.randint(1, 7)}
        if not case.theirs.get("attention_bias"):
            exact = case.family.startswith("Gemma")  # whose embedding is multiplied by the root of the hidden size
            sizes["hidden_size"] = 4 * heads**2 if exact else heads * rng.randint(3, 9)
    if case.family == "GPTNeoX":
        del sizes["num_key_value_heads"]
        sizes["use_parallel_residual"] = rng.random() < 0.5
    if not {"layer_types", "no_rope_layers"} & case.theirs.keys():
        sizes["num_hidden_layers"] = rng.randint(1, 4)
    for count in EXPERT_COUNTS & case.theirs.keys():
        experts = rng.randint(2, 6)
        topk = "moe_k" if count == "moe_num_experts" else "num_experts_per_tok"
        sizes |= {count: experts, topk: rng.randint(1, experts)}
    if "n_routed_experts" in case.theirs:
        # a greedy router does not use groups
        groups, dense = (1 if case.name == "deepseek-v2" else 3, 1) if seed == 1 else (1, 0)
        chosen, experts = min(groups, rng.randint(1, 2)), groups * rng.randint(2, 4)
        sizes |= {"n_routed_experts": experts, "n_group": groups, "topk_group": chosen}
        sizes |= {"num_experts_per_tok": rng.randint(2, chosen * experts // groups), "first_k_dense_replace": dense}
        sizes["num_hidden_layers"] = len(case.theirs.get("layer_types", "")) or rng.randint(2, 4)
        sizes |= {"moe_intermediate_size": rng.randint(3, 20), "n_shared_experts": rng.randint(1, 3)}
    if "kv_lora_rank" in case.theirs:
        sizes |= {"num_key_value_heads": heads, "kv_lora_rank": rng.randint(3, 20), "v_head_dim": rng.randint(3, 9)}
        sizes |= {"qk_nope_head_dim": rng.randint(1, 9), "qk_rope_head_dim": 2 * rng.randint(1, 4)}
        sizes |= {"q_lora_rank": rng.choice([None, rng.randint(3, 20)])}
        if case.family == "DeepseekV2":  # views channels as complex numbers
            sizes |= {name: 2 * sizes[name] for name in ("kv_lora_rank", "qk_nope_head_dim")}
    return replace(case, theirs=case.theirs | shared | sizes)


CASES = {
    f"{name}-{seed}": resized(case, seed)
    for name, case in BY_NAME.items()
    for seed in (1, 2)
    if not case.ours  # which no config.json has
}
PUBLISHED = words("moe_layer_freq scoring_func topk_method")
UNUSED = {
    "DeepseekV2": words("moe_layer_freq scoring_func"),
    "DeepseekV3": PUBLISHED,
    "Dots1": PUBLISHED | {"max_window_layers"},
    "Ernie4_5_Moe": words("moe_layer_start_index moe_layer_end_index moe_layer_interval"),
    "Phi3": words("partial_rotary_factor"),
    "Qwen2": words("max_window_layers"),
    "Qwen2Moe": words("max_window_layers"),
}
"""Keys that mean nothing where others are set, have several equal values, or are not transformers' own."""


def solo(saved: SavedModel) -> Solo:
    """Our model with the weights of a checkpoint, in fp64."""
    made = Solo.build(saved.model, torch.float64, TrainingConfig(cross_entropy_chunk_size=7))
    fill_weights(made.chunk.specs, made.chunk.params, saved)
    return made


def assert_same_numbers(case: Case, ours: Solo, theirs: nn.Module) -> None:
    """In fp64, logits and loss within 1e-11, and gradients of all parameters within 1e-10 of their norms."""
    batch = random_batch(ours.chunk.config, samples=3, length=16, seed=3)
    with everything_in_double():
        twin = twin_of(theirs)
        expected_BSV = twin(batch.tokens, use_cache=False).logits
        expected = their_backward(twin, batch)
    ours.chunk.eval()
    logits_BSV = ours.chunk.logits(batch.tokens).transpose(0, 1)
    assert (logits_BSV - expected_BSV).abs().max() <= 1e-11 * expected_BSV.abs().max().clamp(min=1)
    ours.chunk.train()
    assert ours.backward([batch]).item() == pytest.approx(expected.item(), rel=1e-11)
    grads = {name: parameter.grad for name, parameter in twin.named_parameters() if parameter.grad is not None}
    reference = translate(case.family, grads, ours.chunk.config)
    assert reference.keys() == ours.buckets.grads.keys()
    scale = max(grad.norm() for grad in reference.values())
    for name, grad in reference.items():  # a key bias has no gradient but rounding: hence the floor
        error = (ours.buckets.grads[name][: len(grad)] - grad).norm()
        assert error <= 1e-10 * max(grad.norm(), 1e-3 * scale), name


def twin_of(theirs: nn.Module) -> nn.Module:
    """The same model, wholly in double inside `everything_in_double`."""
    config = transformers.AutoConfig.for_model(**theirs.config.to_dict())
    twin: nn.Module = transformers.AutoModelForCausalLM.from_config(config, **EAGER, **SAME).double().eval()
    twin.load_state_dict(theirs.state_dict())
    return twin


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


TRAINED = words(
    """gpt2 llama-gqa qwen3-qk-norm mixtral qwen3-moe gpt-oss gpt-neox olmo2 olmo3 gemma2 gemma3 phi3 smollm3 starcoder2
    granite qwen3-moe-dense-layers olmoe granite-moe qwen2-moe glm4-moe dots1 ernie-moe deepseek-v2 deepseek-v2-groups
    deepseek-v3"""
)
SLOW = [n for n in CASES if n.endswith("2") or (BY_NAME[n[:-2]].has_experts and n[:-2] not in TRAINED)]


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in CASES])
def test_there_and_back(name: str, tmp_path: Path) -> None:
    case, number = CASES[name], list(CASES).index(name)
    theirs = build(case, seed=number)
    dtype = (torch.float32, torch.bfloat16, torch.float16)[number % 3]
    theirs.to(dtype)
    for name, value in tensors_of(theirs).items():
        if name.endswith(EXPERT_BIAS):  # is in fp32 in all published models
            module, _, last = name.rpartition(".")
            getattr(theirs.get_submodule(module), last).data = value.float()
    theirs.save_pretrained(tmp_path / "hf", max_shard_size="20KB")
    convert_from_huggingface(opened(tmp_path / "hf"), tmp_path / "save", ignore, checked=False)
    saved = SavedModel(open_checkpoint(tmp_path / "save")[0])
    kind = theirs.config.model_type  # another may compute the same
    convert_to_huggingface(saved, tmp_path / "back", ignore, shard_bytes=30_000, checked=False, model_type=kind)
    before, after = (weights_of(tmp_path / folder) for folder in ("hf", "back"))
    assert before.keys() == after.keys()
    for key, value in before.items():
        assert value.dtype == after[key].dtype == (torch.float32 if key.endswith(EXPERT_BIAS) else dtype)
        assert torch.equal(value, after[key]), key
    assert_same_numbers(case, solo(saved), load(tmp_path / "back"))
    configs = [transformers.AutoConfig.from_pretrained(tmp_path / folder).to_dict() for folder in ("hf", "back")]
    for config in configs:
        unused = {"sliding_window"} if set(config.get("layer_types") or ()) == {"full_attention"} else set()
        for key in {"_name_or_path", "use_cache"} | unused | UNUSED.get(case.family, frozenset()):
            config.pop(key, None)
    assert case.family not in OTHERS or configs[0] == configs[1]
    assert configs[0].get("rope_parameters") == configs[1].get("rope_parameters")


OTHERS = words(
    """GPTNeoX Olmo2 Olmo3 Gemma2 Gemma3Text Phi3 SmolLM3 Starcoder2 Granite Olmoe GraniteMoe Qwen2Moe Glm4Moe Dots1
    Ernie4_5_Moe DeepseekV3 DeepseekV2"""
)
"""Families whose config.json has a key for each option in either direction."""


def weights_of(folder: Path) -> dict[str, Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


SHORT = words("gpt2 qwen3-qk-norm gpt-oss gemma2 phi3 glm4-moe deepseek-v3")
"""Of those that are trained; ``test_there_and_back`` converts each."""


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in SHORT else pytest.mark.slow) for n in sorted(TRAINED)]
)
def test_export_of_a_trained_model(name: str, tmp_path: Path) -> None:
    case = CASES[f"{name}-1"]
    build(case, seed=1).save_pretrained(tmp_path / "hf")
    convert_from_huggingface(opened(tmp_path / "hf"), tmp_path / "save", ignore, checked=False)
    ours = solo(SavedModel(open_checkpoint(tmp_path / "save")[0]))
    for step in range(3):
        ours.step([random_batch(ours.chunk.config, seed=step)], lr=1e-2)
    with torch.no_grad():
        for weight in ours.params.values():
            weight.copy_(weight.float())  # the export is in fp32
    manifest = Manifest.open(save_model(ours.chunk, tmp_path / "run", files={}))
    done = convert_to_huggingface(SavedModel(manifest), tmp_path / "out", ignore, shard_bytes=10**9)
    assert done.differences
    exported = load(tmp_path / "out")
    assert_same_numbers(case, ours, exported)
    before = dict(load(tmp_path / "hf").named_parameters())
    same = [name for name, value in exported.named_parameters() if torch.equal(value, before[name])]
    assert all(name.endswith(EXPERT_BIAS) for name in same), "training moved every tensor but these"


HEADS = {"num_mtp_layers": 2, "num_hidden_layers": 2}


@pytest.mark.parametrize("name", ["deepseek-v3", "glm4-moe"])
def test_layers_for_further_tokens(name: str, tmp_path: Path) -> None:
    case = replace(BY_NAME[name], theirs=BY_NAME[name].theirs | HEADS)
    ours = Solo.build(case.config(), torch.float64, TrainingConfig(cross_entropy_chunk_size=7))
    randomise_ours(ours)
    manifest = Manifest.open(save_model(ours.chunk, tmp_path / "run", files={}))
    convert_to_huggingface(SavedModel(manifest), tmp_path / "hf", ignore, shard_bytes=30_000)
    batch = random_batch(ours.chunk.config, seed=3)
    total = ours.backward([batch])
    single = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32, **EAGER, **SAME)
    single._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{layer}.*" for layer in (2, 3)]  # theirs names one
    with everything_in_double():
        main = twin_of(single)
        heads = MtpModel(main, 2).double()
    heads.load_state_dict(MtpModel.from_pretrained(single).state_dict())
    with everything_in_double():
        expected = loss_with_heads(main, heads, batch, ours.chunk.config.mtp_loss_scaling_factor)
        expected.backward()
    assert total.item() == pytest.approx(expected.item(), rel=1e-11)
    grads = {n: p.grad for n, p in main.named_parameters() if p.grad is not None}
    for key, parameter in heads.layers.named_parameters():
        layer, _, rest = key.partition(".")
        place = f"model.layers.{2 + int(layer)}"
        grads[f"{place}.{rest.removeprefix('mtp_block.').replace('post_norm', 'shared_head.norm')}"] = parameter.grad
    reference = translate_with_heads(case.family, grads, ours.chunk.config)
    assert reference.keys() == ours.buckets.grads.keys()
    scale = max(grad.norm() for grad in reference.values())
    for key, grad in reference.items():
        error = (ours.buckets.grads[key][: len(grad)] - grad).norm()
        assert error <= 1e-10 * max(grad.norm(), 1e-3 * scale), key

    convert_from_huggingface(opened(tmp_path / "hf"), tmp_path / "back", ignore)
    back = SavedModel(open_checkpoint(tmp_path / "back")[0])
    assert back.model.mtp_num_layers == 2
    again = solo(back)
    for key, value in ours.chunk.params.items():
        assert torch.equal(again.chunk.params[key].float(), value.float()), key
    weights = weights_of(tmp_path / "hf")
    changed = "model.layers.3.embed_tokens.weight"
    assert torch.equal(weights[changed], weights["model.embed_tokens.weight"])
    rewrite(tmp_path / "hf", weights | {changed: weights[changed] + 1})
    with pytest.raises(CheckpointError, match=f"must be equal.*{changed}"):
        opened(tmp_path / "hf")
    heads_of = ("model.layers.2.", "model.layers.3.")
    rewrite(tmp_path / "hf", {key: value for key, value in weights.items() if not key.startswith(heads_of)})
    assert opened(tmp_path / "hf").model.mtp_num_layers is None, "as transformers saves it"


def test_kimi_k2_is_deepseek_v3_by_another_name(tmp_path: Path) -> None:
    ours = Solo.build(BY_NAME["deepseek-v3"].config(), torch.float64)
    randomise_ours(ours)
    saved = SavedModel(Manifest.open(save_model(ours.chunk, tmp_path / "run", files={})))
    for kind in ("deepseek_v3", "kimi_k2"):
        done = convert_to_huggingface(saved, tmp_path / kind, ignore, shard_bytes=10**9, model_type=kind)
        assert done.differences
    deepseek, kimi = (weights_of(tmp_path / kind) for kind in ("deepseek_v3", "kimi_k2"))
    assert deepseek.keys() == kimi.keys()
    assert all(torch.equal(value, kimi[name]) for name, value in deepseek.items())
    assert json.loads((tmp_path / "kimi_k2" / "config.json").read_text())["model_type"] == "kimi_k2"
    convert_from_huggingface(opened(tmp_path / "kimi_k2"), tmp_path / "back", ignore)


@torch.no_grad()
def randomise_ours(ours: Solo) -> None:
    """Weights that hide no mistake, exact in fp32."""
    generator = torch.Generator().manual_seed(5)
    for name, value in ours.params.items():
        mean = float(value.dim() == 1 and not name.endswith("expert_bias"))
        value.copy_(torch.randn(value.shape, generator=generator) * 0.2 + mean)
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        ours.params[name][ours.chunk.config.vocab :] = 0


def loss_with_heads(main: nn.Module, heads: nn.Module, batch: MicroBatch, factor: float) -> Tensor:
    """The mean of the main loss, and of each depth over the positions that have its label, by transformers' modules."""
    S = batch.tokens.shape[1]
    positions = torch.arange(S)[None]
    mask = torch.full((1, 1, S, S), -torch.inf).triu(1)
    h_BSH = main.model(batch.tokens, use_cache=False).last_hidden_state
    labels = batch.labels.where(batch.loss_mask > 0, IGNORED)
    losses = [nn.functional.cross_entropy(main.lm_head(h_BSH).flatten(0, 1), labels.flatten())]
    tokens = torch.cat((batch.tokens, batch.labels[:, -1:]), 1)
    for depth, layer in enumerate(heads.layers, 1):
        shifted = torch.cat((tokens[:, depth : depth + S], torch.zeros_like(tokens[:, : max(0, depth - 1)])), 1)
        e_BSH = heads.embed_tokens(shifted)
        angles = heads.rotary_emb(e_BSH, position_ids=positions)
        h_BSH = layer(e_BSH, h_BSH, angles, mask, positions, None)
        logits = heads.shared_head(h_BSH[:, : S - depth])
        losses.append(nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, depth:].flatten()))
    return losses[0] + factor * torch.stack(losses[1:]).mean()


def translate_with_heads(family: str, tensors: dict[str, Any], config: ModelConfig) -> dict[str, Tensor]:
    """The layers for further tokens as blocks after the last."""
    layers, depths = config.num_layers, config.prediction_depths
    freq = str([int(config.has_experts(min(layer, layers - 1))) for layer in range(layers + depths)])
    out = translate(family, tensors, replace(config, num_layers=layers + depths, moe_layer_freq=freq))
    for depth in range(depths):
        theirs, name = f"model.layers.{layers + depth}", f"mtp.layers.{depth}"
        block = {key: out.pop(key) for key in [*out] if key.startswith(f"layers.{layers + depth}.")}
        out |= {f"{name}.mtp_model_layer.{key.split('.', 2)[2]}": value for key, value in block.items()}
        places = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "final_layernorm": "shared_head.norm"}
        out |= {f"{name}.{ours}.weight": tensors[f"{theirs}.{place}.weight"] for ours, place in places.items()}
    return out


def rewrite(folder: Path, weights: dict[str, Tensor]) -> None:
    """Replace the weights of a folder."""
    for file in folder.glob("model*"):
        file.unlink()
    save_file(weights, folder / "model.safetensors")
