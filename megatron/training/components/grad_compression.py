"""State of gradient compression in checkpoints: errors, which differ between replicas, and PowerSGD's factors.

``optim.grad_error_{i}.{parameter}`` is what replica ``i`` has not sent yet: a global tensor in the view of the
parameter, like its moments. A tied weight on two pipeline stages has twice as many, those of the last stage at the end.
With as many replicas as before, each loads its own; otherwise all start with an equal share of the sum, so that what
was not sent is neither lost nor counted twice. ``optim.powersgd_q_{i}.{parameter}@{box}`` is the factor of matrices
that a rank holds as a whole (``i`` is 1 on the last stage of a tied weight, else 0). A rank that holds other boxes, or
another rank of approximation, starts with random factors again.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from megatron.checkpoint.format import Manifest
from megatron.checkpoint.load import load_sharded
from megatron.checkpoint.tensor_file import GlobalTensor, TensorPart
from megatron.distributed.mesh import Mesh
from megatron.distributed.param_layout import ParamShard, shard_boxes
from megatron.distributed.sharding import Box, ShardSpec
from megatron.optimizer.distributed_optimizer import UpdateResult
from megatron.optimizer.grad_buffer import GradBuffer
from megatron.training.component import Component
from megatron.training.trainer import Trainer

ERROR_KIND = "grad_error_"
ERROR_NAME = re.compile(rf"optim\.{ERROR_KIND}(\d+)\.(.*)")
FACTOR_PREFIX = "optim.powersgd_q_"


@dataclass(frozen=True)
class ReplicaErrors:
    """Error feedback of one parameter on this rank: the part of its gradient that is not sent yet."""

    # Index of the replica, and number of all.
    source: int
    sources: int
    # In the layout of the rank's shard.
    error: Tensor


class CompressionState(Component):
    """Errors and factors that the reductions of this rank's gradient buckets keep."""

    def __init__(self, buckets: GradBuffer, specs: Mapping[str, ShardSpec], mesh: Mesh) -> None:
        """Save and load what ``buckets`` keep of parameters with ``specs``."""
        self._buckets, self._specs, self._mesh = buckets, specs, mesh

    @classmethod
    def create(cls, trainer: Trainer) -> Self | None:
        """See :class:`Feature`."""
        compression = trainer.config.parallel.compression
        keeps_errors = compression is not None and compression.has_errors
        return cls(trainer.buckets, trainer.specs, trainer.mesh) if keeps_errors else None

    def after_step(self, outcome: UpdateResult) -> None:
        """See :class:`Component`."""
        with torch.no_grad():
            for bucket in self._buckets.buckets:
                bucket.reduction.commit(outcome.skipped)

    def errors(self) -> dict[str, ReplicaErrors]:
        """Return the errors of this rank by parameter."""
        found = {}
        for name in self._buckets.grads:
            reduction = self._buckets.reduction_of(name)
            if reduction.error is not None:
                spec, copies = self._specs[name], reduction.copies
                stages = self._mesh.embedding_group.size if spec.tied else 1
                source = copies.rank + copies.size * spec.counted_elsewhere
                error = self._buckets.shard_view(reduction.error, name)
                found[name] = ReplicaErrors(source, copies.size * stages, error)
        return found

    def _parts(self, name: str, error: Tensor, loading: bool) -> GlobalTensor:
        """Return the boxes that this rank saves or loads of ``error``.

        A box that several tensor-parallel ranks hold is saved by the first. Where their gradients are summed, it is
        also the only one to load it.
        """
        spec = self._specs[name]
        pieces = [p for p in spec.pieces if p.tp_ranks[0] == spec.tp_rank or (loading and not p.partial)]
        boxes = shard_boxes(spec, self._buckets.shards[name], pieces)
        parts = tuple(TensorPart(box.piece.global_box, box.view_in(error)) for box in boxes)
        return GlobalTensor(spec.shape, spec.view, error.dtype, parts)

    def _factors(self) -> dict[str, Tensor]:
        """Return PowerSGD's factors by name, ``[matrices, columns, rank]``; the same on ranks of all replicas."""
        found = {}
        for bucket in self._buckets.buckets:
            for block, q in bucket.reduction.factors():
                spec = self._specs[block.name]
                boxes = shard_boxes(spec, ParamShard(block.first, block.first + block.numel))
                if boxes:  # none if all rows are padding of the vocabulary
                    start = ",".join(map(str, boxes[0].piece.global_box.start))
                    box = f"{start}+{block.count}x{block.rows}x{block.columns}"
                    found[f"{FACTOR_PREFIX}{int(spec.counted_elsewhere)}.{block.name}@{box}"] = q
        return found

    def stored_tensors(self) -> Mapping[str, GlobalTensor]:
        """See :class:`Component`."""
        tensors = {
            f"optim.grad_error_{own.source}.{name}": self._parts(name, own.error, loading=False)
            for name, own in self.errors().items()
        }
        for name, q in self._factors().items():
            group = self._mesh.optimizer_replica_group(*self._specs[_parameter(name)].reduce_axes)
            tensors[name] = _whole(q, write=group.rank == 0)
        return tensors

    def tensors_to_load(self, manifest: Manifest) -> Mapping[str, GlobalTensor]:
        """See :class:`Component`."""
        saved = _saved_sources(manifest)
        found = {name: _whole(q) for name, q in self._factors().items() if _fits(manifest, name, q)}
        for name, own in self.errors().items():
            keeps = len(saved.get(name, [])) == own.sources
            for source in [own.source] if keeps else saved.get(name, []):
                found[f"optim.grad_error_{source}.{name}"] = self._parts(name, own.error, loading=True)
        return found

    def load(self, manifest: Manifest) -> Sequence[str]:
        """Load errors and factors by the rule of this module; see :class:`Component`."""
        saved = _saved_sources(manifest)
        for bucket in self._buckets.buckets:  # a checkpoint that turned out to be damaged may have been loaded in part
            bucket.reduction.reset()
        errors, factors, world = self.errors(), self._factors(), self._mesh.world
        found = self.tensors_to_load(manifest)
        merged = {name: own for name, own in errors.items() if len(saved.get(name, [])) != own.sources}
        load_sharded(manifest, {n: t for n, t in found.items() if _error_of(n) not in merged}, world)
        for place in range(max(map(len, saved.values()), default=0)):  # as often on every rank
            added, tensors = {}, {}
            for name, own in merged.items():
                if place < len(saved.get(name, [])):
                    added[name] = torch.zeros_like(own.error)
                    tensor = f"optim.grad_error_{saved[name][place]}.{name}"
                    tensors[tensor] = self._parts(name, added[name], loading=True)
            load_sharded(manifest, tensors, world)
            for name, part in added.items():
                merged[name].error.add_(part)
        for own in merged.values():
            own.error.div_(own.sources)
        notes = []  # of this rank's part
        if not saved:
            notes.append("the checkpoint has no errors of compressed gradients: they start at zero")
        elif merged:
            changed = "the replicas are not as many"
            notes.append(f"errors of compressed gradients are added up and divided equally: {changed}")
        if any(name not in found for name in factors):
            notes.append("PowerSGD starts with random factors where the checkpoint has none for this layout and rank")
        return notes


def _whole(x: Tensor, write: bool = True) -> GlobalTensor:
    shape = tuple(x.shape)
    return GlobalTensor(shape, shape, x.dtype, (TensorPart(Box((0,) * len(shape), shape), x),) if write else ())


def _parameter(factor: str) -> str:
    return factor.removeprefix(FACTOR_PREFIX).partition(".")[2].rpartition("@")[0]


def _saved_sources(manifest: Manifest) -> dict[str, list[int]]:
    """Return the replicas of whose errors a checkpoint has those of a parameter, ascending."""
    found = defaultdict[str, list[int]](list)
    for match in filter(None, map(ERROR_NAME.fullmatch, manifest.tensors)):
        found[match[2]].append(int(match[1]))
    return {name: sorted(sources) for name, sources in found.items()}


def _error_of(tensor: str) -> str:
    match = ERROR_NAME.fullmatch(tensor)
    return match[2] if match else ""


def _fits(manifest: Manifest, name: str, q: Tensor) -> bool:
    return name in manifest.tensors and manifest.tensors[name].shape == tuple(q.shape)
