"""Compare a parallel run with the same run on one process: loss, gradient norm, every gradient and every weight.

Each rank traces what it holds (`trace_step`). The traces are collected without the collectives under test, and
`join_traces` assembles them to global tensors, independent of the layout. `compare_traces` returns the error of each
quantity.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron.distributed.param_layout import ParamShard, shard_boxes
from megatron.distributed.sharding import Box, ShardSpec
from megatron.training.metrics import StepMetrics
from megatron.training.step import train_step
from megatron.training.trainer import Trainer


@dataclass(frozen=True)
class TracedPiece:
    """A rank's part of a gradient or weight."""

    shape: tuple[int, ...]  # global shape
    view: tuple[int, ...]  # global shape of the view that `place` refers to
    place: Box  # in the view
    digest: str  # checksum of its bits, to compare copies
    values: Tensor | None  # only on one of the ranks that hold a copy


@dataclass(frozen=True)
class RankTrace:
    """Results of one step on one rank."""

    loss: float
    grad_norm: float
    grads: dict[str, list[TracedPiece]]  # as used by the update
    weights: dict[str, list[TracedPiece]]  # after the update


@dataclass(frozen=True)
class StepTrace:
    """Results of one step as global tensors, independent of the layout."""

    loss: float  # mean over the global batch's unmasked tokens
    grad_norm: float  # before clipping
    grads: dict[str, Tensor]  # global, by name in forward order
    weights: dict[str, Tensor]  # global, by name in forward order
    drifted: list[str]  # quantities that are not bitwise equal on all ranks that hold them


@dataclass(frozen=True)
class StepDeviation:
    """Error of one compared quantity."""

    step: int
    kind: str  # loss, grad_norm, gradient or weight
    name: str  # of the parameter
    error: float  # relative to the size of the reference, or to a floor if that is larger


def trace_steps(trainer: Trainer, steps: int) -> list[RankTrace]:
    """Take and trace ``steps`` steps at the peak learning rate, since warm-up would start with a rate of 0."""
    traces = []
    for _ in range(steps):
        samples = trainer.reader.next_batch_size
        rates = replace(trainer.schedule.rates(trainer.consumed_samples), lr=trainer.config.optimizer.lr)
        metrics = train_step(trainer, trainer.next_batches(), rates)
        traces.append(trace_step(trainer, metrics))
        trainer.progress.iteration += 1
        trainer.progress.consumed_samples += samples
    return traces


def trace_step(trainer: Trainer, metrics: StepMetrics) -> RankTrace:
    """Trace the step just taken, without communication."""

    def trace(tensors: Mapping[str, Tensor]) -> dict[str, list[TracedPiece]]:
        pieces = {}
        for name, tensor in tensors.items():
            spec = trainer.specs[name]
            first = trainer.mesh.optimizer_replica_group(*spec.reduce_axes).rank == 0
            pieces[name] = trace_pieces(spec, trainer.buckets.shards[name], tensor, first)
        return pieces

    grads, weights = trace(trainer.optimizer.grads), trace(trainer.optimizer.main_params)
    return RankTrace(metrics.loss.item(), metrics.grad_norm.item(), grads, weights)


def trace_pieces(spec: ShardSpec, share: ParamShard, tensor: Tensor, first: bool) -> list[TracedPiece]:
    """Return a rank's parts of a gradient or weight; values are kept on one rank per part.

    Args:
        spec: sharding of the parameter.
        share: element range that this rank updates.
        tensor: values of that range.
        first: whether this is the first of the ranks with the same range.
    """
    flat = tensor.detach().cpu()
    out = []
    for slot in shard_boxes(spec, share):
        values = slot.view_in(flat).clone()
        digest = hashlib.blake2b(values.flatten().view(torch.uint8).numpy().tobytes(), digest_size=16).hexdigest()
        mine = first and slot.piece.tp_ranks[0] == spec.tp_rank and not spec.counted_elsewhere
        out.append(TracedPiece(spec.shape, spec.view, slot.piece.global_box, digest, values if mine else None))
    return out


def join_traces(ranks: Sequence[RankTrace]) -> StepTrace:
    """Assemble the traces of all ranks. Raise ValueError if an element is held by no rank, or counted twice."""
    grads, differing_grads = _join([rank.grads for rank in ranks])
    weights, differing_weights = _join([rank.weights for rank in ranks])
    drifted = [what for what in ("loss", "grad_norm") if len({float(getattr(r, what)).hex() for r in ranks}) > 1]
    drifted += [f"gradient of {name}" for name in differing_grads]
    drifted += [f"weight {name}" for name in differing_weights]
    return StepTrace(ranks[0].loss, ranks[0].grad_norm, grads, weights, drifted)


def _join(ranks: Sequence[Mapping[str, list[TracedPiece]]]) -> tuple[dict[str, Tensor], list[str]]:
    """Return the global tensors in forward order, and the names of those with copies that differ."""
    tensors, differing = {}, []
    for name in in_forward_order(ranks):
        pieces = [piece for rank in ranks for piece in rank.get(name, ())]
        copies = {(piece.place, piece.digest) for piece in pieces}
        if len(copies) > len({place for place, _ in copies}):
            differing.append(name)
        owned = [(piece.place, piece.values) for piece in pieces if piece.values is not None]
        shape, view = pieces[0].shape, pieces[0].view
        covered = torch.zeros(view, dtype=torch.int8)
        values = torch.zeros(view, dtype=owned[0][1].dtype)
        for place, part in owned:
            covered[place.slices] += 1
            values[place.slices] = part
        if not bool((covered == 1).all()):
            raise ValueError(f"the pieces of {name} do not cover each of its elements once: its spec is wrong")
        tensors[name] = values.view(shape)
    return tensors, differing


def in_forward_order(ranks: Iterable[Iterable[str]]) -> list[str]:
    """Return the names of all ranks sorted by layer, since interleaved pipeline ranks hold layers in turn."""

    def layer(name: str) -> int:
        first, *rest = name.split(".")
        return int(rest[0]) if first == "layers" else -1 if first == "embedding" else sys.maxsize

    return sorted(dict.fromkeys(name for names in ranks for name in names), key=layer)


def compare_traces(
    step: int, got: StepTrace, reference: StepTrace, gradient_floor: float, lr: float
) -> list[StepDeviation]:
    """Compare every quantity of a step with its reference; errors are ``|d|/|ref|``, for tensors in the 2-norm.

    A gradient that is zero in exact arithmetic, such as that of a key bias, has no relative error, and Adam amplifies
    such noise in the weights. The floors prevent this.

    Args:
        step: step number to report.
        got: trace of the run.
        reference: trace of the run on one process.
        gradient_floor: lower bound of a reference gradient's norm, as a share of the norm of all gradients.
        lr: learning rate; lower bound of a reference weight's root mean square.

    Raises:
        ValueError: if the models have different parameters.
    """
    unmatched = sorted(got.grads.keys() ^ reference.grads.keys())
    if unmatched:
        raise ValueError(f"{', '.join(unmatched)}: not in both models")
    total = math.sqrt(sum(_norm(g) ** 2 for g in reference.grads.values()))
    out = [
        StepDeviation(step, "loss", "", _relative(got.loss - reference.loss, abs(reference.loss))),
        StepDeviation(step, "grad_norm", "", _relative(got.grad_norm - reference.grad_norm, abs(reference.grad_norm))),
    ]
    for name, ref in reference.grads.items():
        size = max(_norm(ref), gradient_floor * total)
        out.append(StepDeviation(step, "gradient", name, _relative(_norm(got.grads[name] - ref), size)))
    for name, ref in reference.weights.items():
        size = max(_norm(ref), lr * math.sqrt(ref.numel()))
        out.append(StepDeviation(step, "weight", name, _relative(_norm(got.weights[name] - ref), size)))
    return out


def _norm(x: Tensor) -> float:
    return x.double().norm().item()


def _relative(difference: float, size: float) -> float:
    """Return ``|difference| / size``; NaN becomes infinity, because comparisons with NaN are false."""
    error = abs(difference) / size if size else abs(difference)
    return math.inf if math.isnan(error) else error
