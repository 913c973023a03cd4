"""The names of tensors in Megatron-LM's checkpoints, and ours."""

from __future__ import annotations

import re
from typing import NamedTuple

NAMES = (
    ("layers.{i}.input_layernorm.", "decoder.layers.{i}.self_attention.linear_qkv.layer_norm_"),
    ("layers.{i}.input_layernorm.", "decoder.layers.{i}.input_layernorm."),
    ("layers.{i}.pre_mlp_layernorm.", "decoder.layers.{i}.mlp.linear_fc1.layer_norm_"),
    ("layers.{i}.pre_mlp_layernorm.", "decoder.layers.{i}.pre_mlp_layernorm."),
    ("layers.{i}.mlp.experts.", "decoder.layers.{i}.mlp.experts.experts."),
    ("layers.{i}.mlp.experts.", "decoder.layers.{i}.mlp.experts.local_experts.{e}."),
    ("layers.{i}.", "decoder.layers.{i}."),
    ("final_layernorm.", "decoder.final_layernorm."),
    ("", ""),
)
"""Beginnings of our names and of theirs. ``{i}`` is the layer, which torch_dist leaves out, and ``{e}`` the expert of
the rank. The first row whose beginning of their name fits applies. Grouped experts are numbered at the end of their
name, as in ``weight3``."""


class Place(NamedTuple):
    """Our name of one of their tensors, and the layer and the expert in theirs."""

    name: str  # ours; the layer is a placeholder {i} if their name has none
    layer: int | None  # in their name: of the pipeline stage, or None
    expert: int | None  # of the rank; None for tensors that are no single expert's


_PATTERNS = tuple(
    (ours, re.compile(re.escape(theirs).replace(r"\.\{i\}", r"(?:\.(?P<i>\d+))?").replace(r"\{e\}", r"(?P<e>\d+)")))
    for ours, theirs in NAMES
)


def find_place(theirs: str) -> Place:
    """Return our name of the tensor ``theirs``, whether or not a model here has one of that name."""
    ours, match = next((row, match) for row, pattern in _PATTERNS if (match := pattern.match(theirs)))
    found, rest = match.groupdict(), theirs[match.end() :]
    expert = found.get("e")
    numbered = re.fullmatch(r"(linear_fc[12]\.[A-Za-z_]+)(\d+)", rest.removeprefix("mlp.experts."))
    if numbered and expert is None and rest.startswith("mlp.experts."):
        rest, expert = f"mlp.experts.{numbered[1]}", numbered[2]
    layer = found.get("i")
    return Place(ours + rest, None if layer is None else int(layer), None if expert is None else int(expert))


def their_names(ours: str, experts: bool) -> list[str]:
    """Return the names in torch_dist under which Megatron-LM looks for a tensor of ours, without layer.

    Its own layers and those of Transformer Engine use the same names, except for the norm before experts.

    Args:
        ours: our name, with ``{i}`` for the layer.
        experts: the model has experts in place of the MLP.
    """
    fitting = [row for row in NAMES if ours.startswith(row[0]) and "{e}" not in row[1]]
    count = 2 if experts and ours.startswith("layers.{i}.pre_mlp_layernorm.") else 1
    return [(theirs + ours.removeprefix(beginning)).replace(".{i}", "") for beginning, theirs in fitting[:count]]
