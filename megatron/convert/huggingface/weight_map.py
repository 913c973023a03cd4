"""Correspondence between our tensors and those of Hugging Face models, from the weight tables of `families`."""

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
from megatron.convert.huggingface.families import model_families
from megatron.distributed.grad_accumulator import GradAccumulator
from megatron.distributed.layout import Layout
from megatron.distributed.mesh import Mesh
from megatron.distributed.sharding import Box, ShardSpec
from megatron.layers.build import BuildContext
from megatron.model.gpt import GPTChunk, build_gpt


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


def map_tensors(kind: str, specs: Mapping[str, ShardSpec]) -> dict[str, tuple[TensorMapping, ...]]:
    """Return the Hugging Face tensors of which each of our tensors consists.

    Args:
        kind: key of `model_families`.
        specs: specs of our tensors; only their shapes matter.

    Raises:
        KeyError: naming our tensors that the family lacks.
    """
    rows = {ours: (axes, theirs) for ours, axes, theirs in model_families()[kind].weights.rows}
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
