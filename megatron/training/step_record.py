"""The record of a step: what it computed, and from what. Incidents hold one, and tools/replay_step.py compares with it.

Components call :func:`gather_step_record` after a step that went wrong. Digests do not depend on the layout: they are
sums over all elements of a global tensor, each times a number that depends on its place, modulo 2^64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.arguments.sources import to_dict
from megatron.config.privacy import redact_json
from megatron.data.document_finder import DocumentFinder
from megatron.data.errors import DataError
from megatron.distributed import comm
from megatron.distributed.micro_batch import MicroBatch
from megatron.distributed.param_layout import ParamShard, shard_boxes
from megatron.distributed.sharding import Box
from megatron.training.callbacks.health import layer_name, square_sum
from megatron.training.digests import box_digest
from megatron.training.trainer import Trainer

MODULUS = 2**64
TOKENS_SHOWN = 32
MOST_DOCUMENTS = 256
"""Documents that a rank describes, so that a record stays small; all sample ids are recorded."""


class TensorSummary(NamedTuple):
    """Digest and 2-norm of a global tensor, or of one rank's part of it."""

    digest: int
    squares: float

    @property
    def text(self) -> str:
        """The digest as 16 hexadecimal digits."""
        return f"{self.digest:016x}"

    def __add__(self, other: Any) -> TensorSummary:
        """Return the summary of two disjoint parts."""
        return TensorSummary((self.digest + other.digest) % MODULUS, self.squares + other.squares)


@torch.no_grad()
def summarize_tensors(trainer: Trainer, tensors: Mapping[str, Tensor]) -> dict[str, TensorSummary]:
    """Return the summaries of global tensors, on rank 0 in forward order, and nothing on the others. Collective.

    Args:
        trainer: the run.
        tensors: of this rank's shards, by parameter, such as ``optimizer.grads`` or ``optimizer.main_params``.
    """
    counted, mine = trainer.buckets.counted_shards(), dict[str, TensorSummary]()
    for name, tensor in tensors.items():
        if name in counted:
            for box, values in _counted_boxes(trainer, name, counted[name], tensor):
                canonical = values.where(~values.isnan(), torch.nan)  # bits of a NaN carry no value
                digest = int(box_digest(canonical, box))
                mine[name] = mine.get(name, TensorSummary(0, 0.0)) + TensorSummary(digest, float(square_sum(values)))
    places = {name: place for place, name in enumerate(trainer.specs)}  # all ranks with a layer have it in this order
    found: dict[str, TensorSummary] = {}
    order: dict[str, int] = {}
    rows: list[Any] = [[name, places[name], part.digest, as_json(part.squares)] for name, part in mine.items()]
    for of_rank in comm.gather_objects(rows, trainer.mesh.world):
        for name, place, digest, squares in of_rank:
            found[name] = found.get(name, TensorSummary(0, 0.0)) + TensorSummary(digest, float(squares))
            order[name] = place
    return {name: found[name] for name in sorted(found, key=lambda name: (_place_in_model(name), order[name]))}


def _place_in_model(name: str) -> tuple[int, int]:
    layer = layer_name(name)
    number = layer.removeprefix("layers.")
    return (1, int(number)) if number.isdecimal() else (0 if layer == "embedding" else 2, 0)


def _counted_boxes(trainer: Trainer, name: str, counted: ParamShard, tensor: Tensor) -> Iterator[tuple[Box, Tensor]]:
    """Yield the boxes of the global view that this rank counts, with their values in ``tensor``, its whole shard."""
    spec, start = trainer.specs[name], trainer.buckets.shards[name].start
    values = tensor.detach().reshape(-1)[counted.start - start : counted.stop - start]
    for slot in shard_boxes(spec, counted, spec.owned):
        yield slot.piece.global_box, slot.view_in(values)


def gather_step_record(
    trainer: Trainer, batches: Sequence[MicroBatch], numbers: Mapping[str, float | None], intact: bool
) -> dict[str, Any]:
    """Return the record of the step that was just taken, as JSON, on rank 0, and {} on the others. Collective.

    Numbers that are not finite are texts (``"nan"``).

    Args:
        trainer: the run.
        batches: this rank's micro-batches of the step.
        numbers: ``loss`` and ``grad_norm`` of the step, as far as they are known; the same on every rank.
        intact: the step changed no weight, and no later step has begun, so the reduced gradients are still there. Then
            the record has digests of all gradients and weights, and the norms of layers.
    """
    late = trainer.iteration > batches[0].step  # results are read after the next step
    record: dict[str, Any] = {
        "step": batches[0].step + 1,
        **{name: as_json(value) for name, value in numbers.items()},
        "loss_scale": float(trainer.scaler.scale),
        "learning_rate": None if late else float(trainer.schedule.rates(trainer.consumed_samples).lr),
        "consumed_samples": None if late else trainer.consumed_samples,
    }
    if intact:
        record |= record_tensors(trainer)
    by_rank = comm.gather_objects(record_samples(trainer, batches), trainer.mesh.world)
    record["samples"] = [sample for samples in by_rank for sample in samples]
    return record | record_run(trainer) if trainer.mesh.world.rank == 0 else {}


def record_tensors(trainer: Trainer) -> dict[str, Any]:
    """Return digests of gradients and main parameters, and gradient norms by layer before clipping. Collective."""
    loss_scale = float(trainer.scaler.scale)
    trainer.optimizer.weights.wait()
    gradients = summarize_tensors(trainer, trainer.optimizer.grads)
    weights = summarize_tensors(trainer, trainer.optimizer.main_params)
    layers: dict[str, float] = {}
    for name, summary in gradients.items():
        layers[layer_name(name)] = layers.get(layer_name(name), 0.0) + summary.squares
    return {
        "layers": {layer: as_json(math.sqrt(squares) / loss_scale) for layer, squares in layers.items()},
        "gradients": {name: summary.text for name, summary in gradients.items()},
        "gradient_norms": {
            name: as_json(math.sqrt(summary.squares) / loss_scale) for name, summary in gradients.items()
        },
        "weights": {name: summary.text for name, summary in weights.items()},
    }


def record_samples(trainer: Trainer, batches: Sequence[MicroBatch]) -> list[dict[str, Any]]:
    """Return the samples of this rank's micro-batches, with documents and first words, if it is the first to read them.

    Documents are those of token files; generated samples have ids only.
    """
    coordinate, dataset = trainer.mesh.coordinate, trainer.data.datasets["train"]
    if any(coordinate[axis] for axis in ("tp", "cp", "pp")):
        return []
    finder, found, described = DocumentFinder(TOKENS_SHOWN), list[dict[str, Any]](), 0
    for i, batch in enumerate(batches):
        for number in dict.fromkeys(batch.sample_ids.tolist()):
            entry: dict[str, Any] = {"sample": number, "rank": trainer.mesh.world.rank, "micro_batch": i}
            with suppress(DataError, OSError):  # the ids are enough to find the text later
                spans = [span for span in dataset.spans(number) if span.tokens][: MOST_DOCUMENTS - described]
                described += len(spans)
                if documents := [asdict(finder.part(span)) for span in spans]:
                    entry["documents"] = redact_json(documents)
            found.append(entry)
    return found


def record_run(trainer: Trainer) -> dict[str, Any]:
    """Return what is needed to take the step again: rewinds, layout, what decides bits, and configuration."""
    rewinds = [component.state_dict() for component in trainer.components if component.name == "rewinds"]
    return {
        "rewinds": [rewind["id"] for state in rewinds for rewind in state["list"]],
        "layout": dict(trainer.mesh.layout.sizes),
        "world_size": trainer.mesh.world.size,
        "device": trainer.device.type,
        "torch": torch.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "folder": str(Path.cwd()),
        "config": redact_json(to_dict(trainer.config)),
    }


def as_json(value: Any) -> Any:
    """Return a number as JSON, which has neither NaN nor infinity: these become texts that ``float`` reads."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
