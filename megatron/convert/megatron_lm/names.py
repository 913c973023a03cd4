"""Names of tensors in Megatron-LM: those of GPTModel, whose layers are our blocks, and of HybridModel.

HybridModel counts every residual layer as a layer of its own, and has others around them. Both are one in our names.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from megatron.config.latent_attention import LATENT_ATTENTION
from megatron.config.model import ModelConfig
from megatron.layers.mixers.registry import find_mixer

GATED_DELTA_NET = "gated-delta-net"
HYBRID_MIXERS = ("mamba2",)
"""Mixers that HybridModel alone has."""

BLOCKS = (
    ("layers.{i}.", "decoder.layers.{i}."),
    ("mtp.layers.{d}.mtp_model_layer.", "mtp.layers.{d}.transformer_layer."),
    ("mtp.layers.{d}.mtp_model_layer.", "mtp.layers.{d}.mtp_model_layer.layers.{i}."),
    ("mtp.layers.{d}.mtp_model_layer.", "mtp.layers.{d}.mtp_model_layer."),
)
"""Beginnings of our names of the tensors of a block and of theirs. ``{i}`` is the layer, which torch_dist leaves out if
all layers have the same parameters. Blocks of multi-token prediction have one name in torch_dist, another in torch;
those of HybridModel are a stack of layers in both."""
INSIDE = (
    ("input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
    ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"),
    ("self_attention.q_layernorm.", "self_attention.linear_q_up_proj.layer_norm_"),
    ("self_attention.kv_layernorm.", "self_attention.linear_kv_up_proj.layer_norm_"),
    ("mlp.experts.", "mlp.experts.experts."),
    ("mlp.experts.", "mlp.experts.local_experts.{e}."),
    ("pre_mamba_layernorm.", "mixer.in_proj.layer_norm_"),
    ("mamba.linear_in.", "mixer.in_proj."),
    ("mamba.conv.", "mixer.conv1d."),
    ("mamba.linear_out.", "mixer.out_proj."),
    ("mamba.", "mixer."),
    ("pre_gated_delta_net_layernorm.", "self_attention.in_proj.layer_norm_"),
    ("gated_delta_net.linear_in.", "self_attention.in_proj."),
    ("gated_delta_net.conv.", "self_attention.conv1d."),
    ("gated_delta_net.norm.", "self_attention.out_norm."),
    ("gated_delta_net.linear_out.", "self_attention.out_proj."),
    ("gated_delta_net.dt_bias", "self_attention.dt_bias"),
    ("gated_delta_net.A_log", "self_attention.A_log"),
)
"""Names inside a block that differ: norms that belong to the linear after them, and experts, of which ``{e}`` is that
of the rank. Grouped experts are numbered at the end of their name, as in ``weight3``. The first row applies."""
ALSO_READ = (
    ("mamba.conv.", "mixer.conv1d_"),
    ("pre_mamba_layernorm.", "norm."),
)
"""Further names inside a block, in the format torch: of the convolution in newer releases, of the norm in older."""
OUTSIDE = (("final_layernorm.", "decoder.final_layernorm."), ("final_layernorm.", "decoder.final_norm."))
"""Other names that differ: those of GPTModel, then those of HybridModel."""

PARTS = {
    "mamba.linear_in.weight": ("z", "x", "B", "C", "dt"),
    "mamba.conv.weight": ("x", "B", "C"),
    "mamba.conv.bias": ("x", "B", "C"),
    "gated_delta_net.linear_in.weight": ("query", "key", "value", "z", "beta", "alpha"),
    "gated_delta_net.conv.weight": ("query", "key", "value"),
}
"""Tensors inside a block that torch_dist has in parts, as ``in_proj.weight.z``: our name, and the parts in order.
Tensor parallelism cuts each part, so that the shards of the whole are not its rows one after the other."""


class Place(NamedTuple):
    """Our name of one of their tensors, and the numbers in theirs."""

    name: str  # ours; the layer is a placeholder {i} if it is one of the model's
    layer: int | None  # in their name: of the pipeline stage, or of the block of a further token; or None
    expert: int | None  # of the rank; None for tensors that are no single expert's
    depth: int | None  # of the further token whose block it is part of
    part: str | None  # of a tensor of `PARTS`; empty for the whole of it, None for other tensors

    @property
    def part_index(self) -> int:
        """Index of the part."""
        return next(parts.index(self.part) for name, parts in PARTS.items() if self.name.endswith(f".{name}"))


def _patterns(rows: Sequence[tuple[str, str]]) -> list[tuple[str, re.Pattern[str]]]:
    numbers = {r"\.\{i\}": r"(?:\.(?P<i>\d+))?", r"\{d\}": r"(?P<d>\d+)", r"\{e\}": r"(?P<e>\d+)"}

    def pattern(theirs: str) -> str:
        text = re.escape(theirs)
        for placeholder, number in numbers.items():
            text = text.replace(placeholder, number)
        return text

    return [(ours, re.compile(pattern(theirs))) for ours, theirs in rows]


_BLOCKS, _INSIDE, _OUTSIDE = map(_patterns, (BLOCKS, (*ALSO_READ, *INSIDE), OUTSIDE))


def _first(rows: Sequence[tuple[str, re.Pattern[str]]], name: str) -> tuple[str, dict[str, str], str]:
    """Return what replaces the beginning of a name, the numbers in it, and the rest; the name itself if no row fits."""
    found = ((ours, match) for ours, pattern in rows if (match := pattern.match(name)))
    ours, match = next(found, ("", None))
    return (ours, match.groupdict(), name[match.end() :]) if match else ("", {}, name)


def find_place(theirs: str) -> Place:
    """Return our name of the tensor ``theirs``, whether or not a model here has one of that name."""
    block, numbers, rest = _first(_BLOCKS, theirs)
    begin, more, rest = _first(_INSIDE if block else _OUTSIDE, rest)
    expert = more.get("e")
    name = begin + rest
    numbered = re.fullmatch(r"(mlp\.experts\.linear_fc[12]\.[A-Za-z_]+)(\d+)", name)
    if block and numbered and expert is None:
        name, expert = numbered[1], numbered[2]
    part = "" if block and name in PARTS else None
    whole, _, last = name.rpartition(".")
    if block and last in PARTS.get(whole, ()):
        name, part = whole, last
    depth, layer, e = (None if n is None else int(n) for n in (numbers.get("d"), numbers.get("i"), expert))
    return Place(block.replace("{d}", str(depth)) + name, layer, e, depth, part)


# ---- Numbers of layers ----


def is_hybrid(model: ModelConfig) -> bool:
    """Return True for a model that is HybridModel there: one with a pattern of layers, or with a mixer of its own."""
    return model.hybrid_layer_pattern is not None or has_mixer(model, *HYBRID_MIXERS)


def has_mixer(model: ModelConfig, *names: str) -> bool:
    """Return True if a block has one of these mixers."""
    return any(name in mixers for mixers in model.kinds_of_layers for name in names)


def layers_numbered(model: ModelConfig) -> bool:
    """Return True if Megatron-LM numbers the layers in torch_dist, because their parameters differ."""
    several = model.dense_layers > 0 and model.num_experts is not None
    return several or is_hybrid(model) or has_mixer(model, GATED_DELTA_NET)


@lru_cache(maxsize=8)
def _hybrid_layers(model: ModelConfig) -> list[tuple[int, str]]:
    """Return the block and the mixer of each layer of HybridModel."""
    return [(block, mixer) for block in range(model.num_layers) for mixer in model.mixers(block)]


def our_name(place: Place, layer: int | None, model: ModelConfig) -> str | None:
    """Return our name of a tensor; None if the model has no such layer, or another kind of layer there.

    Args:
        place: of the tensor.
        layer: its number among all layers there.
        model: that has it.
    """
    if not is_hybrid(model) or (place.depth is None and "{i}" not in place.name):
        stacked = place.depth is not None and layer is not None  # as of HybridModel
        return None if stacked else place.name.replace("{i}", str(layer))
    if layer is None:
        return place.name if place.depth is not None and ".mtp_model_layer." not in place.name else None
    layers = _hybrid_layers(model)
    if place.depth is not None:
        layers = [(0, mixer) for mixer in model.mixers(model.num_layers)]
    if layer >= len(layers):
        return None
    block, name = layers[layer]
    mixer, inside = find_mixer(name), place.name.partition("mtp_model_layer." if place.depth is not None else "{i}.")[2]
    belongs = inside.startswith((f"{mixer.module}.", f"{mixer.norm}."))
    return place.name.replace("{i}", str(block)) if belongs else None


# ---- Their names ----


class Key(NamedTuple):
    """A tensor in torch_dist that has all or a part of one of ours."""

    name: str
    part: int | None = None  # its index, if ours is in parts there

    @property
    def whole(self) -> str:
        """The name without that of the part."""
        return self.name if self.part is None else self.name.rpartition(".")[0]

    @property
    def of_convolution(self) -> bool:
        """True for ``[channels, 1, width]``, which is ``[channels, width]`` here."""
        return self.whole.endswith(".conv1d.weight")


def their_keys(ours: str, model: ModelConfig) -> list[Key]:
    """Return the tensors in torch_dist in which Megatron-LM looks for one of ours.

    Its own layers, which do not have all mixers, and those of Transformer Engine use the same names, except for the
    norm before experts.

    Args:
        ours: our name; the layer is ``{i}`` if all layers have the same parameters.
        model: that has it.
    """
    hybrid = is_hybrid(model)
    where = re.match(r"(?:layers\.(?P<i>\d+|\{i\})|mtp\.layers\.(?P<d>\d+)\.mtp_model_layer)\.", ours)
    if where is None:
        fitting = [new + ours.removeprefix(old) for old, new in OUTSIDE if ours.startswith(old)]
        return [Key(fitting[hybrid] if fitting else ours)]
    layer, depth, name = where["i"], where["d"], ours[where.end() :]
    mixers = model.mixers(model.head_layers[int(depth)] if depth else 0 if layer == "{i}" else int(layer))
    if hybrid:
        modules = [find_mixer(mixer) for mixer in mixers]
        inside = next(n for n, m in enumerate(modules) if name.startswith((f"{m.module}.", f"{m.norm}.")))
        before = f"mtp.layers.{depth}.mtp_model_layer.layers.{inside}."
        if depth is None:
            before = f"decoder.layers.{model.residual_layer(int(layer)) + inside}."
    elif depth is None:
        before = "decoder.layers." if layer == "{i}" else f"decoder.layers.{layer}."
    else:
        before = f"mtp.layers.{depth}.transformer_layer."
    rows = [row for row in INSIDE if "{e}" not in row[1] and row[0] != "input_layernorm."]
    if LATENT_ATTENTION not in mixers:  # whose norm is no part of a linear, unlike those of its latents
        rows = [row for row in INSIDE if "{e}" not in row[1] and "_up_proj" not in row[1]]
    fitting = [new + name.removeprefix(old) for old, new in rows if name.startswith(old)][:1]
    if "experts" in mixers and name.startswith("pre_mlp_layernorm."):
        own_layers = not (model.has_latent_attention or model.moe_latent_size or model.mtp_num_layers)
        own_layers &= not hybrid and not has_mixer(model, GATED_DELTA_NET)
        fitting = [*fitting * own_layers, name]
    names = [before + each for each in fitting or [name]]
    if name in PARTS:
        return [Key(f"{each}.{part}", number) for each in names for number, part in enumerate(PARTS[name])]
    return [Key(each) for each in names]
