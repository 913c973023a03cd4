"""Stream the weights of a run in Hugging Face names, tensor by tensor and without files, from any layout.

What reinforcement learning needs between two steps: an inference engine on the same machines takes the new weights.

    for name, tensor in stream_weights(trainer, torch.bfloat16):   # on all ranks; yields on rank 0
        engine.update(name, tensor)

:func:`refresh_weights` is the other end, for a model of this library.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Protocol, cast

import torch
from torch import Tensor

from megatron.checkpoint.errors import MAX_NAMES, CheckpointError
from megatron.checkpoint.format import intersect, relative_box
from megatron.config.model import ModelConfig
from megatron.config.text import listed
from megatron.convert.huggingface.config import model_type_for
from megatron.convert.huggingface.convert import raise_if_overflow, split_into_shards
from megatron.convert.huggingface.weights import TensorMapping, huggingface_tensors
from megatron.convert.saved_model import MergedWeights
from megatron.convert.weight_source import ModelSource
from megatron.distributed import comm
from megatron.distributed.launch import gather_results
from megatron.distributed.param_layout import ShardBox, shard_boxes
from megatron.distributed.sharding import Box, ShardSpec
from megatron.layers.context import DTYPES
from megatron.layers.parameters import gpt
from megatron.training.trainer import Trainer

BUCKET_BYTES = 64 << 20
"""Bytes of small tensors that are sent together."""


@torch.no_grad()
def stream_weights(
    trainer: Trainer,
    dtype: torch.dtype | None = None,
    *,
    everywhere: bool = False,
    model_type: str | None = None,
    merged: bool = True,
    bucket_bytes: int = BUCKET_BYTES,
) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of the model with its Hugging Face name, in the order of an export, on rank 0.

    Collective: all ranks iterate to the end, and no step is taken meanwhile. A rank that receives nothing passes its
    parts on and yields nothing. The values are those that the next step computes with, as the same bits that
    ``tools/convert_checkpoint.py --save-hf`` writes. Beside the model a rank needs memory for one bucket, or one larger
    tensor, and for the one before while the caller keeps it.

    Args:
        trainer: the run.
        dtype: of the tensors, but for those that are always in fp32; None for the data type that the run computes in.
        everywhere: yield the tensors on all ranks, as engines with tensor parallelism need.
        model_type: of transformers; None for the first that computes the same.
        merged: add adapters to the weights beside them; False to leave them out.
        bucket_bytes: bytes of small tensors that are sent together.

    Yields:
        Name and tensor on the device of the run; the tensor is the caller's.

    Raises:
        UserError: if no Hugging Face model computes the same.
        CheckpointError: if a value is too large for fp16.
        ValueError: if frozen weights are quantised.
    """
    model, world = trainer.config.model.base, trainer.mesh.world
    specs = gpt(model)
    tensors = huggingface_tensors(model_type_for(model, model_type), model, specs)
    dtype = DTYPES[trainer.config.precision.params_dtype] if dtype is None else dtype
    kinds = [torch.promote_types(torch.float32, dtype) if specs[parts[0].ours].wide else dtype for parts in tensors]
    sizes = [-(-prod(parts[0].stored) * kind.itemsize // 8) * 8 for parts, kind in zip(tensors, kinds)]
    weights, may_overflow = LayoutWeights(trainer), dtype == torch.float16
    added = (
        MergedWeights(cast("ModelSource", weights), weights, trainer.config.model)
        if merged and model != trainer.config.model
        else None
    )
    for group in split_into_shards(sizes, bucket_bytes):
        bucket = torch.zeros(sum(sizes[group]), dtype=torch.uint8, device=trainer.device)
        views = [
            part[: prod(parts[0].stored) * kind.itemsize].view(kind).view(parts[0].stored)
            for part, parts, kind in zip(bucket.split(sizes[group]), tensors[group], kinds[group])
        ]
        for parts, theirs in zip(tensors[group], views):
            for part in parts:
                ours = part.arrange(theirs)
                if added is None or not added.changes(part.ours):
                    weights.place(part.ours, part.box, ours)
                else:
                    found = added.read(part.ours, specs[part.ours].view, part.box)
                    raise_if_overflow(part.ours, found.to(ours.dtype), found)  # equal on all ranks
                    if world.rank == 0:
                        ours.copy_(found)
        if may_overflow:  # other ranks would wait for a rank that raises alone
            gather_results(weights.raise_if_overflow, world)
        if everywhere:
            comm.all_reduce(bucket, world)
        else:
            comm.start_reduce(bucket, world, 0).wait()
        if everywhere or world.rank == 0:
            yield from zip([parts[0].name for parts in tensors[group]], views)
        del bucket, views, theirs, ours


class LayoutWeights:
    """The weights of a run as a source of global tensors. Reading is collective, and all ranks read the same boxes."""

    def __init__(self, trainer: Trainer) -> None:
        """Find the boxes that this rank contributes; over all ranks, every element has one contributor."""
        self.world, self.device = trainer.mesh.world, trainer.device
        self.dtype = DTYPES[trainer.config.precision.params_dtype]
        self._held: dict[str, list[tuple[ShardBox, Tensor]]] = {}
        self._overflow: CheckpointError | None = None
        layouts = [*(bucket.layout for bucket in trainer.buckets.buckets), *trainer.buckets.without_gradients]
        for layout, buffer in zip(layouts, trainer.optimizer.weights.buffers, strict=True):
            for name, spec in layout.specs.items():
                share = layout.shard(name, over_copies=True)
                if spec.precision is not None:
                    raise ValueError(f"{name} is quantised to {spec.precision}, which Hugging Face models do not read")
                if share is not None:
                    part = layout.shard_view(buffer.part, name, share).view(-1)
                    self._held[name] = [(box, part) for box in shard_boxes(spec, share, spec.owned)]

    def place(self, name: str, box: Box, out: Tensor) -> None:
        """Copy the elements of ``box`` that this rank contributes into a tensor of shape ``box.size``."""
        for held, part in self._held.get(name, ()):
            inner = intersect(held.piece.global_box, box)
            if inner is not None:
                exact = held.view_in(part)[relative_box(inner, held.piece.global_box).slices]
                rounded = exact.to(out.device, out.dtype)
                try:
                    raise_if_overflow(name, rounded, exact)
                except CheckpointError as error:
                    self._overflow = self._overflow or error
                out[relative_box(inner, box).slices] = rounded

    def raise_if_overflow(self) -> None:
        """Raise the error of the first tensor that this rank has placed with a value too large for fp16."""
        if self._overflow is not None:
            raise self._overflow

    def read(self, name: str, view: tuple[int, ...], box: Box) -> Tensor:
        """Return the elements of ``box`` of a tensor, on the host of all ranks."""
        out = torch.zeros(box.size, dtype=torch.promote_types(self.dtype, torch.float32), device=self.device)
        self.place(name, box, out)
        comm.all_reduce(out.view(-1).view(torch.uint8), self.world)
        return out.cpu()


class RefreshedModel(Protocol):
    """A rank's part of a model whose weights are replaced, such as a :class:`megatron.model.gpt.GPTChunk`."""

    @property
    def config(self) -> ModelConfig:
        """Configuration of the whole model."""

    @property
    def specs(self) -> Mapping[str, ShardSpec]:
        """Of this rank's parameters, by global name."""

    @property
    def params(self) -> Mapping[str, Tensor]:
        """This rank's parameters, by global name."""


@torch.no_grad()
def refresh_weights(model: RefreshedModel, stream: Iterable[tuple[str, Tensor]], model_type: str | None = None) -> None:
    """Copy tensors with Hugging Face names into a model that computes, in any layout; values take its data type.

    Args:
        model: of the same architecture.
        stream: all tensors of the model, in any order; on every rank of the model.
        model_type: of transformers, whose names the stream has; None for the first that computes the same.

    Raises:
        ValueError: if tensors are missing, unknown, or of another shape. Then the model is half refreshed.
    """
    whole = gpt(model.config)
    found = huggingface_tensors(model_type_for(model.config, model_type), model.config, whole)
    missing, unknown, unlike = {parts[0].name: parts for parts in found}, [], []
    for name, tensor in stream:
        parts = missing.pop(name, None)
        if parts is None:
            unknown.append(name)
        elif tuple(tensor.shape) != parts[0].stored:
            unlike.append(f"{name} {list(tensor.shape)} instead of {list(parts[0].stored)}")
        else:
            _copy_parts(model, parts, tensor)
    wrong = {"lacks": [*missing], "has tensors that the model lacks:": unknown, "has tensors of another shape:": unlike}
    if findings := [f"{what} {listed(names, MAX_NAMES)}" for what, names in wrong.items() if names]:
        raise ValueError(f"the stream of weights {'; '.join(findings)}")


def _copy_parts(model: RefreshedModel, parts: Sequence[TensorMapping], tensor: Tensor) -> None:
    """Copy what this rank holds of a tensor of Hugging Face."""
    for part in parts:
        if part.ours in model.specs:
            spec, ours = model.specs[part.ours], part.arrange(tensor)
            local = model.params[part.ours].detach().view(spec.local_view)
            for piece in spec.pieces:
                inner = intersect(piece.global_box, part.box)
                if inner is not None:
                    place = relative_box(inner, piece.global_box)
                    start = tuple(a + b for a, b in zip(place.start, piece.local_box.start))
                    local[Box(start, place.size).slices] = ours[relative_box(inner, part.box).slices].to(local.dtype)
