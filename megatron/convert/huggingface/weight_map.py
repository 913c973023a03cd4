"""Correspondence between our tensors and those of Hugging Face models: one table per family, used both ways.

A row names one of our tensors and the axes of its view, and the Hugging Face tensors that it consists of. These are
described by the same axes: commas separate the dimensions of the stored tensor, and brackets select a part of an
axis.
So ``"h, x g d"`` is stored as ``[h, x * g * d]``, and ``"g x[-1:] d, h"`` is the last element of each group's ``x``,
stored as ``[g * d, h]``. A name with ``{e}`` stands for one tensor per expert, which ``e[{e}]`` selects. Rows contain
only views, permutations and slices, so they are invertible, and a box of our tensor is a set of slices of theirs.

Axes: v vocabulary, t positions, h hidden, g key/value heads, x queries, key and value of a group, d channels of a
head,
o outputs of all heads, p gate and up, f width of the MLP, e experts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from megatron.config.model import ModelConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.run import TrainingConfig
from megatron.distributed.grad_accumulator import GradAccumulator
from megatron.distributed.layout import Layout
from megatron.distributed.mesh import Mesh
from megatron.distributed.sharding import Box, ShardSpec
from megatron.layers.build import BuildContext
from megatron.model.gpt import GPTChunk, build_gpt

WeightRow = tuple[str, str, tuple[tuple[str, str], ...]]
"""Our name, axes of our view, (name, axes) of each Hugging Face tensor. ``{i}`` is the layer, ``{e}`` the expert."""

_GPT2: tuple[WeightRow, ...] = (
    ("embedding.word_embeddings.weight", "v h", (("transformer.wte.weight", "v, h"),)),
    ("embedding.position_embeddings.weight", "t h", (("transformer.wpe.weight", "t, h"),)),
    ("layers.{i}.input_layernorm.weight", "h", (("transformer.h.{i}.ln_1.weight", "h"),)),
    ("layers.{i}.input_layernorm.bias", "h", (("transformer.h.{i}.ln_1.bias", "h"),)),
    ("layers.{i}.self_attention.linear_qkv.weight", "g x d h", (("transformer.h.{i}.attn.c_attn.weight", "h, x g d"),)),
    ("layers.{i}.self_attention.linear_qkv.bias", "g x d", (("transformer.h.{i}.attn.c_attn.bias", "x g d"),)),
    ("layers.{i}.self_attention.linear_proj.weight", "h o", (("transformer.h.{i}.attn.c_proj.weight", "o, h"),)),
    ("layers.{i}.self_attention.linear_proj.bias", "h", (("transformer.h.{i}.attn.c_proj.bias", "h"),)),
    ("layers.{i}.pre_mlp_layernorm.weight", "h", (("transformer.h.{i}.ln_2.weight", "h"),)),
    ("layers.{i}.pre_mlp_layernorm.bias", "h", (("transformer.h.{i}.ln_2.bias", "h"),)),
    ("layers.{i}.mlp.linear_fc1.weight", "f h", (("transformer.h.{i}.mlp.c_fc.weight", "h, f"),)),
    ("layers.{i}.mlp.linear_fc1.bias", "f", (("transformer.h.{i}.mlp.c_fc.bias", "f"),)),
    ("layers.{i}.mlp.linear_fc2.weight", "h f", (("transformer.h.{i}.mlp.c_proj.weight", "f, h"),)),
    ("layers.{i}.mlp.linear_fc2.bias", "h", (("transformer.h.{i}.mlp.c_proj.bias", "h"),)),
    ("final_layernorm.weight", "h", (("transformer.ln_f.weight", "h"),)),
    ("final_layernorm.bias", "h", (("transformer.ln_f.bias", "h"),)),
    ("output_layer.weight", "v h", (("lm_head.weight", "v, h"),)),
)

_LLAMA: tuple[WeightRow, ...] = (
    ("embedding.word_embeddings.weight", "v h", (("model.embed_tokens.weight", "v, h"),)),
    ("layers.{i}.input_layernorm.weight", "h", (("model.layers.{i}.input_layernorm.weight", "h"),)),
    (
        "layers.{i}.self_attention.linear_qkv.weight",
        "g x d h",
        (
            ("model.layers.{i}.self_attn.q_proj.weight", "g x[:-2] d, h"),
            ("model.layers.{i}.self_attn.k_proj.weight", "g x[-2:-1] d, h"),
            ("model.layers.{i}.self_attn.v_proj.weight", "g x[-1:] d, h"),
        ),
    ),
    (
        "layers.{i}.self_attention.linear_qkv.bias",
        "g x d",
        (
            ("model.layers.{i}.self_attn.q_proj.bias", "g x[:-2] d"),
            ("model.layers.{i}.self_attn.k_proj.bias", "g x[-2:-1] d"),
            ("model.layers.{i}.self_attn.v_proj.bias", "g x[-1:] d"),
        ),
    ),
    ("layers.{i}.self_attention.q_layernorm.weight", "d", (("model.layers.{i}.self_attn.q_norm.weight", "d"),)),
    ("layers.{i}.self_attention.k_layernorm.weight", "d", (("model.layers.{i}.self_attn.k_norm.weight", "d"),)),
    ("layers.{i}.self_attention.linear_proj.weight", "h o", (("model.layers.{i}.self_attn.o_proj.weight", "h, o"),)),
    ("layers.{i}.self_attention.linear_proj.bias", "h", (("model.layers.{i}.self_attn.o_proj.bias", "h"),)),
    ("layers.{i}.pre_mlp_layernorm.weight", "h", (("model.layers.{i}.post_attention_layernorm.weight", "h"),)),
    (
        "layers.{i}.mlp.linear_fc1.weight",
        "p f h",
        (
            ("model.layers.{i}.mlp.gate_proj.weight", "p[:1] f, h"),
            ("model.layers.{i}.mlp.up_proj.weight", "p[1:] f, h"),
        ),
    ),
    (
        "layers.{i}.mlp.linear_fc1.bias",
        "p f",
        (
            ("model.layers.{i}.mlp.gate_proj.bias", "p[:1] f"),
            ("model.layers.{i}.mlp.up_proj.bias", "p[1:] f"),
        ),
    ),
    ("layers.{i}.mlp.linear_fc2.weight", "h f", (("model.layers.{i}.mlp.down_proj.weight", "h, f"),)),
    ("layers.{i}.mlp.linear_fc2.bias", "h", (("model.layers.{i}.mlp.down_proj.bias", "h"),)),
    ("final_layernorm.weight", "h", (("model.norm.weight", "h"),)),
    ("output_layer.weight", "v h", (("lm_head.weight", "v, h"),)),
)


def _experts(module: str, gate: str, up: str, down: str) -> tuple[WeightRow, ...]:
    """Return the rows of the router and the experts in ``module`` of a layer, with these names of their matrices."""
    at = f"model.layers.{{i}}.{module}"
    return (
        ("layers.{i}.mlp.router.weight", "e h", ((f"{at}.gate.weight", "e, h"),)),
        (
            "layers.{i}.mlp.experts.linear_fc1.weight",
            "e p f h",
            (
                (f"{at}.experts.{{e}}.{gate}.weight", "e[{e}] p[:1] f, h"),
                (f"{at}.experts.{{e}}.{up}.weight", "e[{e}] p[1:] f, h"),
            ),
        ),
        (
            "layers.{i}.mlp.experts.linear_fc2.weight",
            "e h f",
            ((f"{at}.experts.{{e}}.{down}.weight", "e[{e}] h, f"),),
        ),
    )


@dataclass(frozen=True)
class WeightTable:
    """Stored tensors of a family of Hugging Face models."""

    rows: tuple[WeightRow, ...]  # all tensors that a model can have
    prefix: str  # of all names except the head's; missing in files of a model without head
    buffers: tuple[str, ...]  # patterns of names, without the prefix, that are not weights


_GPT2_TABLE = WeightTable(_GPT2, "transformer.", (r"h\.\d+\.attn\.bias", r"h\.\d+\.attn\.masked_bias"))
_ROTARY = (r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq", r"rotary_emb\.inv_freq")
_LLAMA_TABLE = WeightTable(_LLAMA, "model.", _ROTARY)
_MIXTRAL_TABLE = WeightTable((*_LLAMA, *_experts("block_sparse_moe", "w1", "w3", "w2")), "model.", _ROTARY)
_QWEN_MOE_TABLE = WeightTable((*_LLAMA, *_experts("mlp", "gate_proj", "up_proj", "down_proj")), "model.", _ROTARY)
WEIGHT_TABLES: dict[str, WeightTable] = {
    "gpt2": _GPT2_TABLE,
    "llama": _LLAMA_TABLE,
    "mistral": _LLAMA_TABLE,
    "qwen2": _LLAMA_TABLE,
    "qwen3": _LLAMA_TABLE,
    "mixtral": _MIXTRAL_TABLE,
    "qwen3_moe": _QWEN_MOE_TABLE,
}
"""Tables by transformers' ``model_type``, with the same keys as ``families.MODEL_FAMILIES``."""


@dataclass(frozen=True)
class TensorMapping:
    """One Hugging Face tensor as a part of one of ours."""

    name: str  # in the Hugging Face model
    shape: tuple[int, ...]  # as stored
    order: tuple[int, ...]  # its axes, as dimensions of our view
    box: Box  # the part of our view that it fills

    def arrange(self, theirs: Tensor) -> Tensor:
        """Return a stored tensor ``[*shape]`` as our box ``[*box.size]``, without copying."""
        unfolded = theirs.view([self.box.size[axis] for axis in self.order])
        return unfolded.permute([self.order.index(axis) for axis in range(len(self.order))])

    def restore(self, ours: Tensor) -> Tensor:
        """Return our box ``[*box.size]`` as a tensor to store ``[*shape]``, copied if the order of axes differs."""
        return ours.permute(self.order).reshape(self.shape)


def hf_slots(kind: str, specs: Mapping[str, ShardSpec]) -> dict[str, tuple[TensorMapping, ...]]:
    """Return the Hugging Face tensors of which each of our tensors consists.

    Args:
        kind: key of ``WEIGHT_TABLES``.
        specs: specs of our tensors; only their shapes matter.

    Raises:
        KeyError: naming our tensors that the table lacks.
    """
    rows = {ours: (axes, theirs) for ours, axes, theirs in WEIGHT_TABLES[kind].rows}
    patterns = {name: _split_layer(name) for name in specs}
    missing = [name for name, (pattern, _) in patterns.items() if pattern not in rows]
    if missing:
        raise KeyError(", ".join(missing))
    found = {}
    for name, spec in specs.items():
        pattern, layer = patterns[name]
        axes, theirs = rows[pattern][0].split(), rows[pattern][1]
        found[name] = tuple(
            _slot(their.replace("{i}", layer), their_axes, axes, spec.view)
            for row in theirs
            for their, their_axes in _expand_experts(*row, axes, spec.view)
        )
    return found


def _expand_experts(their: str, their_axes: str, axes: list[str], view: tuple[int, ...]) -> Iterator[tuple[str, str]]:
    """Yield name and axes of a Hugging Face tensor, once per expert if the name has an ``{e}``."""
    if "{e}" not in their:
        yield their, their_axes
        return
    for e in map(str, range(view[axes.index("e")])):
        yield their.replace("{e}", e), their_axes.replace("{e}", e)


def _split_layer(name: str) -> tuple[str, str]:
    """Return a name with ``{i}`` in place of its layer index, and the index."""
    match = re.match(r"layers\.(\d+)\.", name)
    return (name.replace(match[0], "layers.{i}.", 1), match[1]) if match else (name, "")


def _slot(name: str, their_axes: str, axes: list[str], view: tuple[int, ...]) -> TensorMapping:
    """Parse axes such as ``g x[:-2] d, h`` or ``e[3] h, f``."""
    start = [0] * len(view)
    size = list(view)
    order, shape = [], []
    for dimension in their_axes.split(","):
        parts = list(_parse_dimension(dimension))
        for letter, part in parts:
            axis = axes.index(letter)
            first, stop, _ = part.indices(view[axis])
            start[axis], size[axis] = first, stop - first
            order.append(axis)
        shape.append(prod(size[axes.index(letter)] for letter, _ in parts))
    return TensorMapping(name, tuple(shape), tuple(order), Box(tuple(start), tuple(size)))


def _parse_dimension(dimension: str) -> Iterator[tuple[str, slice]]:
    """Yield the axes of one stored dimension with the selected part: ``x[:-2]``, ``e[3]``, or all."""
    for letter, first, colon, stop in re.findall(r"(\w)(?:\[(-?\d*)(:?)(-?\d*)\])?", dimension):
        if first and not colon:
            yield letter, slice(int(first), int(first) + 1)
        else:
            yield letter, slice(int(first) if first else None, int(stop) if stop else None)


def build_on_meta(model: ModelConfig, training: TrainingConfig | None = None) -> GPTChunk:
    """Build the complete model on the meta device, as on a single rank; no memory is allocated."""
    mesh = Mesh(Layout.from_config(ParallelConfig(), 1), 0)
    context = BuildContext(mesh, GradAccumulator(), device=torch.device("meta"))
    return build_gpt(model, training or TrainingConfig(), context)
