"""Comparing a run with its one-process twin: loss, gradient norm, every gradient and every weight.

Each rank notes what it holds (:func:`trace_step`), the notes travel to one place outside the collectives under test,
and :func:`join` puts them together to global tensors without a trace of the layout.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron.parallel.ownership import Share, slots
from megatron.parallel.shard import Box, ShardSpec
from megatron.training.metrics import StepMetrics
from megatron.training.setup import Trainer
from megatron.training.step import train_step


@dataclass(frozen=True)
class Held:
    """A piece of a parameter's gradient or weight.

    Attributes:
        shape: global stored shape.
        view: the same elements as the view that ``place`` refers to.
        place: where the piece lies in the view.
        digest: checksum of its bits, to compare copies.
        values: the piece; None on all ranks but the one that answers for it.
    """

    shape: tuple[int, ...]
    view: tuple[int, ...]
    place: Box
    digest: str
    values: Tensor | None


@dataclass(frozen=True)
class RankTrace:
    """What one step computed on one rank; gradients are as the update rule saw them, weights after the update."""

    loss: float
    grad_norm: float
    grads: dict[str, list[Held]]
    weights: dict[str, list[Held]]


@dataclass(frozen=True)
class StepTrace:
    """What one step computed, free of the layout that computed it.

    Attributes:
        loss: mean over the global batch's unmasked tokens.
        grad_norm: before clipping.
        grads: global, by name in forward order.
        weights: global, by name in forward order.
        drifted: what should be the same on several ranks and is not, to the bit.
    """

    loss: float
    grad_norm: float
    grads: dict[str, Tensor]
    weights: dict[str, Tensor]
    drifted: list[str]


@dataclass(frozen=True)
class Difference:
    """One compared quantity: ``loss``, ``grad_norm``, or ``gradient``/``weight`` of the parameter ``name``.

    Attributes:
        error: distance from the reference, relative to its size (or to a floor, where that is larger).
    """

    step: int
    kind: str
    name: str
    error: float


def trace_steps(trainer: Trainer, steps: int) -> list[RankTrace]:
    """Take the run's first ``steps`` steps at its peak learning rate (a warm-up would start without a change)."""
    t, traces = trainer, []
    for _ in range(steps):
        samples = t.next_batch_size
        rates = replace(t.schedule.rates(t.consumed_samples), lr=t.config.optimizer.lr)
        metrics = train_step(t, t.next_batches(), rates)
        traces.append(trace_step(t, metrics))
        t.iteration += 1
        t.consumed_samples += samples
    return traces


def trace_step(trainer: Trainer, metrics: StepMetrics) -> RankTrace:
    """Note the step just taken. No communication."""
    t = trainer

    def held(tensors: Mapping[str, Tensor]) -> dict[str, list[Held]]:
        firsts = {name: t.mesh.copies(*t.specs[name].reduce_axes).rank == 0 for name in tensors}
        return {name: hold(t.specs[name], t.buckets.shares[name], x, firsts[name]) for name, x in tensors.items()}

    return RankTrace(metrics.loss.item(), metrics.grad_norm.item(), held(t.buckets.grads), held(t.optimizer.masters))


def hold(spec: ShardSpec, share: Share, tensor: Tensor, first: bool) -> list[Held]:
    """What a rank has of a parameter's gradient or weight, with the values where this rank answers for them.

    Args:
        spec: of the parameter.
        share: what of it this rank updates.
        tensor: the values of that share.
        first: of the ranks that have the same share.

    """
    flat, out = tensor.detach().cpu(), []
    for slot in slots(spec, share):
        values = slot.of(flat).clone()
        digest = hashlib.blake2b(values.flatten().view(torch.uint8).numpy().tobytes(), digest_size=16).hexdigest()
        mine = first and slot.piece.replicas[0] == spec.tp_rank and not spec.copy
        out.append(Held(spec.shape, spec.view, slot.piece.place, digest, values if mine else None))
    return out


def join(ranks: Sequence[RankTrace]) -> StepTrace:
    """Put the notes of all ranks together.

    Raises:
        ValueError: when some element of a parameter is held by no rank, or answered for by two.
    """
    grads, weights = [r.grads for r in ranks], [r.weights for r in ranks]
    of_grads, of_weights = in_forward_order(grads), in_forward_order(weights)
    drifted = [what for what in ("loss", "grad_norm") if len({float(getattr(r, what)).hex() for r in ranks}) > 1]
    drifted += [f"gradient of {name}" for name in of_grads if _differ(_pieces(grads, name))]
    drifted += [f"weight {name}" for name in of_weights if _differ(_pieces(weights, name))]
    return StepTrace(
        ranks[0].loss,
        ranks[0].grad_norm,
        {name: _assemble(name, _pieces(grads, name)) for name in of_grads},
        {name: _assemble(name, _pieces(weights, name)) for name in of_weights},
        drifted,
    )


def in_forward_order(ranks: Iterable[Iterable[str]]) -> list[str]:
    """The names that any rank has, by layers, which the ranks of a pipeline have in turns."""

    def layer(name: str) -> int:
        first, *rest = name.split(".")
        return int(rest[0]) if first == "layers" else -1 if first == "embedding" else sys.maxsize

    return sorted(dict.fromkeys(name for names in ranks for name in names), key=layer)


def _pieces(ranks: Sequence[Mapping[str, list[Held]]], name: str) -> list[Held]:
    return [held for rank in ranks for held in rank.get(name, ())]


def _differ(pieces: Sequence[Held]) -> bool:
    """Whether copies of the same piece are not the same."""
    digests: dict[Box, set[str]] = {}
    for held in pieces:
        digests.setdefault(held.place, set()).add(held.digest)
    return any(len(copies) > 1 for copies in digests.values())


def _assemble(name: str, pieces: Sequence[Held]) -> Tensor:
    owned = [(held.place, held.values) for held in pieces if held.values is not None]
    first = pieces[0]
    covered = torch.zeros(first.view, dtype=torch.int8)
    out = torch.zeros(first.view, dtype=owned[0][1].dtype)
    for place, values in owned:
        covered[place.slices] += 1
        out[place.slices] = values
    if not bool((covered == 1).all()):
        raise ValueError(f"the pieces of {name} do not cover each of its elements once: its spec is wrong")
    return out.view(first.shape)


def compare(step: int, got: StepTrace, reference: StepTrace, gradient_floor: float, lr: float) -> list[Difference]:
    """Every quantity of a step against its reference; errors are ``|d|/|ref|``, for tensors in the 2-norm.

    A gradient that is zero in exact arithmetic (a key bias, say) has no relative error, and Adam makes such noise
    visible in the weights. Hence the floors.

    Args:
        step: number to report.
        got: the run.
        reference: its twin.
        gradient_floor: a reference gradient counts as at least this share of the norm of all gradients.
        lr: learning rate; a reference weight counts as at least this in the root mean square.

    Raises:
        ValueError: when one of them has a parameter that the other has not.

    """
    apart = sorted(got.grads.keys() ^ reference.grads.keys())
    if apart:
        raise ValueError(f"{', '.join(apart)}: not in both models")
    total = math.sqrt(sum(_norm(g) ** 2 for g in reference.grads.values()))
    out = [
        Difference(step, "loss", "", _relative(got.loss - reference.loss, abs(reference.loss))),
        Difference(step, "grad_norm", "", _relative(got.grad_norm - reference.grad_norm, abs(reference.grad_norm))),
    ]
    for name, ref in reference.grads.items():
        size = max(_norm(ref), gradient_floor * total)
        out.append(Difference(step, "gradient", name, _relative(_norm(got.grads[name] - ref), size)))
    for name, ref in reference.weights.items():
        size = max(_norm(ref), lr * math.sqrt(ref.numel()))
        out.append(Difference(step, "weight", name, _relative(_norm(got.weights[name] - ref), size)))
    return out


def _norm(x: Tensor) -> float:
    return x.double().norm().item()


def _relative(difference: float, size: float) -> float:
    """``|difference| / size``, where NaN, which no comparison would notice, counts as infinite."""
    error = abs(difference) / size if size else abs(difference)
    return math.inf if math.isnan(error) else error
