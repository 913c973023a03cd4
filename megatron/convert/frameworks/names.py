"""Names of parameters in other programs, as tables, and the same weights by the names of Hugging Face.

``{i}`` stands for the layer. Names of a wrapper around the model are found and dropped: what comes before the
embedding's name comes before all others.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from megatron.checkpoint.errors import CheckpointError
from megatron.config.model import ModelConfig
from megatron.config.text import clipped, listed
from megatron.convert.frameworks.pieces import ElementOf, PartialTensor, PartialTensors, RotaryHalves, RowsOf

WRAPPERS = re.compile(r"(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
"""Names of modules that torch puts around others: of torch.compile, FSDP1 and activation checkpoints."""

USUAL = {"", "model", "module", "app", "state", "state_dict"}
"""Words before the names of the model that is trained, beside an average of it or a second model."""

TORCHTITAN = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "layers.{i}.attention_norm.weight": "model.layers.{i}.input_layernorm.weight",
    "layers.{i}.attention.wq.weight": "model.layers.{i}.self_attn.q_proj.weight",
    "layers.{i}.attention.wk.weight": "model.layers.{i}.self_attn.k_proj.weight",
    "layers.{i}.attention.wv.weight": "model.layers.{i}.self_attn.v_proj.weight",
    "layers.{i}.attention.wo.weight": "model.layers.{i}.self_attn.o_proj.weight",
    "layers.{i}.attention.q_norm.weight": "model.layers.{i}.self_attn.q_norm.weight",
    "layers.{i}.attention.k_norm.weight": "model.layers.{i}.self_attn.k_norm.weight",
    "layers.{i}.ffn_norm.weight": "model.layers.{i}.post_attention_layernorm.weight",
    "layers.{i}.feed_forward.w1.weight": "model.layers.{i}.mlp.gate_proj.weight",
    "layers.{i}.feed_forward.w2.weight": "model.layers.{i}.mlp.down_proj.weight",
    "layers.{i}.feed_forward.w3.weight": "model.layers.{i}.mlp.up_proj.weight",
    "layers.{i}.moe.router.gate.weight": "model.layers.{i}.mlp.gate.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
"""torchtitan's names, and those of Llama's original code -> Hugging Face's of Llama and Qwen3."""

TORCHTITAN_NEW = (("attention.qkv_linear.", "attention."), ("moe.routed_experts.inner_experts.", "moe.experts."))
"""Parts of names that newer versions of torchtitan have -> those of older ones."""

TORCHTITAN_EXPERTS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
"""Stacked experts in torchtitan, ``moe.experts.w1`` or ``w1_EFD`` -> linears of one in Hugging Face."""

PAIRED_ROTARY = ("llama",)
"""Model types whose queries and keys torchtitan stores with rotary pairs as neighbours."""

NANOTRON = {
    "model.token_position_embeddings.pp_block.token_embedding.weight": "model.embed_tokens.weight",
    "model.decoder.{i}.pp_block.input_layernorm.weight": "model.layers.{i}.input_layernorm.weight",
    "model.decoder.{i}.pp_block.attn.o_proj.weight": "model.layers.{i}.self_attn.o_proj.weight",
    "model.decoder.{i}.pp_block.post_attention_layernorm.weight": "model.layers.{i}.post_attention_layernorm.weight",
    "model.decoder.{i}.pp_block.mlp.down_proj.weight": "model.layers.{i}.mlp.down_proj.weight",
    "model.final_layer_norm.pp_block.weight": "model.norm.weight",
    "model.lm_head.pp_block.weight": "lm_head.weight",
}
"""nanotron's names -> Hugging Face's of Llama."""

NANOTRON_FUSED = {
    "model.decoder.{i}.pp_block.attn.qkv_proj.weight": "model.layers.{i}.self_attn.{part}_proj.weight",
    "model.decoder.{i}.pp_block.mlp.gate_up_proj.weight": "model.layers.{i}.mlp.{part}_proj.weight",
}
"""nanotron's names of weights that join rows -> Hugging Face's of each part."""


def huggingface_names(
    tensors: PartialTensors, kind: str, model: ModelConfig, prefix: str, where: str
) -> PartialTensors:
    """Return the tensors of a torch.distributed.checkpoint or of DeepSpeed by the names of Hugging Face.

    Args:
        tensors: tensors of a model by the names of its parameters, and maybe others.
        kind: model type of transformers.
        model: architecture.
        prefix: beginning of Hugging Face's names but the head's.
        where: location, for messages.

    Raises:
        CheckpointError: if no name is that of an embedding of a known program, or there are several models.
    """
    plain = {WRAPPERS.sub("", key): tensor for key, tensor in tensors.items()}
    if len(plain) < len(tensors):
        raise CheckpointError(f"{where} holds names that differ only in the names of wrappers, such as _orig_mod")
    titan = without_prefix(plain, ("tok_embeddings.weight",))
    if titan is not None:
        return _from_torchtitan(titan, kind, model)
    words = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "embeddings.weight")
    named = without_prefix(plain, tuple(f"{prefix}{word}" for word in words)) or without_prefix(plain, words)
    if named is None:
        seen = (
            f"{where} holds no embedding with a name of Hugging Face or torchtitan, but {min(plain, default='nothing')}"
        )
        raise CheckpointError(seen, "give the state of one model, saved by its parameters' names")
    return named


def without_prefix(tensors: PartialTensors, marks: Collection[str]) -> PartialTensors | None:
    """Return the tensors that have the prefix of one of ``marks``, without it; None if there is none.

    Raises:
        CheckpointError: if there are several, and not one whose words are all `USUAL`.
    """
    found = [key.removesuffix(mark) for key in tensors for mark in marks if key == mark or key.endswith(f".{mark}")]
    if not found:
        return None
    shortest = min(found, key=len)
    models = {shortest, *(prefix for prefix in found if not prefix.startswith(shortest))}
    usual = {prefix for prefix in models if USUAL.issuperset(prefix.split("."))}
    if len(models) > 1 and len(usual) != 1:
        seen = f"the checkpoint holds several models, {listed([f'{clipped(prefix)}*' for prefix in sorted(models)])}"
        raise CheckpointError(seen, "save the state of one model alone")
    prefix = usual.pop() if usual else shortest
    return {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}


def _numbered(name: str) -> tuple[str, str]:
    """Return a name with ``{i}`` for its first number, and the number."""
    match = re.search(r"(?<=\.)\d+(?=\.)", name)
    return (f"{name[: match.start()]}{{i}}{name[match.end() :]}", match[0]) if match else (name, "")


def _from_torchtitan(tensors: PartialTensors, kind: str, model: ModelConfig) -> PartialTensors:
    """Return the tensors of torchtitan's Llama or Qwen3 by the names of Hugging Face."""
    found: dict[str, PartialTensor] = {}
    for key, tensor in tensors.items():
        old = key
        for new, before in TORCHTITAN_NEW:
            old = old.replace(new, before)
        pattern, layer = _numbered(old)
        experts = re.fullmatch(r"layers\.\{i\}\.moe\.experts\.(w[123])(?:_\w+)?", pattern)
        if experts is not None:
            linear = TORCHTITAN_EXPERTS[experts[1]]
            for expert in range(tensor.shape(key)[0]):
                found[f"model.layers.{layer}.mlp.experts.{expert}.{linear}.weight"] = ElementOf(tensor, expert)
            continue
        name = TORCHTITAN.get(pattern, key).replace("{i}", layer)
        paired = kind in PAIRED_ROTARY and pattern.endswith(("attention.wq.weight", "attention.wk.weight"))
        found[name] = RotaryHalves(tensor, model.head_dim) if paired else tensor
    return found


def from_nanotron(tensors: PartialTensors, model: ModelConfig, paired: bool) -> PartialTensors:
    """Return the tensors of nanotron's Llama by the names of Hugging Face.

    Args:
        tensors: by nanotron's names.
        model: architecture.
        paired: the channels of a rotary pair are neighbours, as without ``rope_interleaved: false``.
    """
    found: dict[str, PartialTensor] = {}
    groups = model.kv_groups * model.head_dim
    queries = model.num_attention_heads * model.head_dim
    parts: Mapping[str, Mapping[str, int]] = {
        "qkv_proj": {"q": queries, "k": groups, "v": groups},
        "gate_up_proj": {"gate": model.ffn, "up": model.ffn},
    }
    for key, tensor in tensors.items():
        pattern, layer = _numbered(key)
        if pattern not in NANOTRON_FUSED:
            found[NANOTRON.get(pattern, key).replace("{i}", layer)] = tensor
            continue
        start = 0
        for part, count in parts[pattern.split(".")[-2]].items():
            rows: PartialTensor = RowsOf(tensor, start, count)
            if paired and part in "qk":
                rows = RotaryHalves(rows, model.head_dim)
            found[NANOTRON_FUSED[pattern].format(i=layer, part=part)] = rows
            start += count
    return found
