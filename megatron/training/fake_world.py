"""Build one rank of a large run without allocating memory or communicating.

Layout, groups, model, buckets and optimizer come from the code of a real run; tensors are on torch's ``meta`` device,
and process groups use its ``fake`` backend. The other ranks of the same pipeline are built too, one after the other,
so that the whole model is accounted for.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from megatron.config.run import RunConfig
from megatron.config.text import format_bytes
from megatron.distributed.launch import fake_process_group
from megatron.distributed.layout import DENSE_AXES, EXPERT_AXES, Layout
from megatron.distributed.mesh import GroupInfo
from megatron.distributed.timing import Clock, Stopwatch, no_clock
from megatron.layers.parameters import num_parameters
from megatron.pipeline.partition import StageLayers
from megatron.pipeline.plan import stage_layers
from megatron.planner.memory import rank_state_bytes
from megatron.training.build import build_trainer
from megatron.training.trainer import Trainer


@dataclass(frozen=True)
class BuiltRank:
    """One rank after it was built."""

    rank: int  # global
    stages: Mapping[int, StageLayers]  # its layers, by stage number
    parameters: int  # elements of its parameters, vocabulary padding included
    whole: Mapping[str, int]  # elements of the same parameters over all ranks, without padding, by global name
    state: Mapping[str, int]  # bytes by those of ``planner.memory.STATE_KINDS`` that have tensors
    groups: tuple[GroupInfo, ...]  # process groups of the whole world

    @property
    def layers(self) -> int:
        """Number of transformer blocks of this rank."""
        return sum(stage.count for stage in self.stages.values())


@dataclass(frozen=True)
class FakeWorld:
    """A world of which one pipeline was built."""

    layout: Layout
    rank: int  # the rank to report on
    pipeline: tuple[BuiltRank, ...]  # the ranks of its pipeline, in order
    seconds: Mapping[str, float]  # by phase

    @property
    def chosen(self) -> BuiltRank:
        """The built rank number :attr:`rank`."""
        return next(built for built in self.pipeline if built.rank == self.rank)

    @property
    def parameters(self) -> int:
        """Number of parameters of the whole model; a tied weight, held by two pipeline ranks, counts once."""
        whole: dict[str, int] = {}
        for built in self.pipeline:
            whole |= built.whole
        return sum(whole.values())

    @property
    def layers(self) -> int:
        """Number of transformer blocks of the whole model."""
        return sum(built.layers for built in self.pipeline)

    def report(self) -> str:
        """Return the report as text, with tables of process groups and pipeline ranks."""
        coordinate = self.layout.coordinate(self.rank)
        position = ", ".join(f"{axis} {coordinate[axis]}" for axis in DENSE_AXES)
        if self.layout.sizes["ep"] > 1:
            position += "; of experts " + ", ".join(f"{axis} {coordinate[axis]}" for axis in EXPERT_AXES)
        groups = ["none: the rank is alone"]
        if created := self.chosen.groups:
            cells = [("groups", "of ranks", "along"), *((f"{g.count:,}", f"{g.size:,}", g.name) for g in created)]
            groups = [*_table(cells), f"together {sum(g.count for g in created):,}"]
        pipeline = [("rank", "pp", "layers", "parameters", "bytes", "stages")]
        for pp, built in enumerate(self.pipeline):
            stages = ", ".join(f"{number}: {_describe(stage)}" for number, stage in built.stages.items())
            size = format_bytes(sum(built.state.values()))
            pipeline.append((f"{built.rank:,}", str(pp), str(built.layers), f"{built.parameters:,}", size, stages))
        whole = f"{self.layers:,} layers and {self.parameters:,} parameters, each counted once: the model's"
        state = ", ".join(f"{part} {size:,}" for part, size in self.chosen.state.items() if size)
        rows = {
            "fake world": [f"rank {self.rank:,} of {self.layout.world_size:,}, nothing allocated: {position}"],
            "groups": groups,
            "pipeline": [*_table(pipeline), f"together {whole}"],
            "state": [f"rank {self.rank:,} holds, in bytes, as predicted: {state}"],
            "seconds": [", ".join(f"{name} {seconds:.1f}" for name, seconds in self.seconds.items())],
        }
        between = "\n".ljust(12)
        return "\n".join(f"{name:<11}{between.join(texts)}" for name, texts in rows.items())


def fake_world(config: RunConfig, world_size: int, rank: int, started: float | None = None) -> FakeWorld:
    """Build one rank of a world, and the other ranks of its pipeline.

    Args:
        config: validated and resolved configuration, vocabulary size included.
        world_size: number of ranks.
        rank: global rank to report on.
        started: start of the process on the clock of ``time.monotonic()``; None for now.

    Raises:
        UserError: if an option names a parameter that does not exist.
        RuntimeError: if the model differs from the configuration, which is a bug in this program.
    """
    layout = Layout.from_config(config.parallel, world_size)
    watch = Stopwatch()
    if started is not None:
        watch.add("flags and imports", time.monotonic() - started)
    members = layout.group_of(rank, ("pp",))
    chosen = _build(config, world_size, rank, lambda name: watch.span(name, False))
    with watch.span("the rest of its pipeline", False):
        pipeline = [chosen if other == rank else _build(config, world_size, other) for other in members]
    world = FakeWorld(layout, rank, tuple(pipeline), watch.pop())
    layers, parameters = config.model.num_layers, num_parameters(config.model)
    if (world.layers, world.parameters) != (layers, parameters):
        built = f"built {world.layers} layers and {world.parameters:,} parameters"
        raise RuntimeError(f"{built}, configured {layers} and {parameters:,}")
    return world


def _build(config: RunConfig, world_size: int, rank: int, clock: Clock = no_clock) -> BuiltRank:
    with fake_process_group(rank, world_size):
        trainer = build_trainer(config, rank, world_size, fresh=False, device=torch.device("meta"), clock=clock)
        stages = dict(enumerate(stage_layers(config.model, config.parallel, config.training.seq_length)))
        built = BuiltRank(
            rank,
            {number: stages[number] for number in trainer.chunks},
            sum(prod((spec.dense or spec).local_shape) for spec in trainer.specs.values()),
            {name: (spec.dense or spec).numel for name, spec in trainer.specs.items()},
            built_state_bytes(trainer),
            tuple(trainer.mesh.created),
        )
    predicted = {part: size for part, size in rank_state_bytes(config, world_size, rank).items() if part in built.state}
    if built.state != predicted:
        raise RuntimeError(f"rank {rank} holds {built.state} bytes, where {predicted} are predicted")
    return built


def state_tensors(trainer: Trainer) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of the state of a run, by those of ``planner.memory.STATE_KINDS`` that have any, and by name.

    fp32 weights, which are their own main parameters, are in both parts.
    """
    optimizer, buckets = trainer.optimizer, trainer.buckets.buckets
    main_params, remainders = optimizer.main_params, optimizer.main_params.remainders
    tensors: dict[str, dict[str, Tensor]] = {
        "weights": dict(zip(bucket_names(trainer), (buffer.part for buffer in optimizer.weights.buffers))),
        "gradients": dict(zip(bucket_names(trainer), (bucket.shard for bucket in buckets))),
        "main params": {name: remainders[name] if name in remainders else main_params[name] for name in main_params},
    }
    for component in trainer.components:
        if component.memory_part:
            kinds = component.tensors().items()
            of_part = {f"{kind} of {name}": tensor for kind, named in kinds for name, tensor in named.items()}
            tensors[component.memory_part] = of_part
    return tensors


def bucket_names(trainer: Trainer) -> list[str]:
    """Return a name for each buffer of weights, those with gradients first: its only parameter, or first and last."""
    buckets = trainer.buckets
    layouts = [*(bucket.layout for bucket in buckets.buckets), *buckets.without_gradients]
    names = ([*layout.specs] for layout in layouts)
    return [first if not others else f"{first} to {others[-1]}" for first, *others in names]


def built_state_bytes(trainer: Trainer) -> dict[str, int]:
    """Return the bytes of tensor storage of weights, gradients, main parameters and components.

    Storage shared by two parts counts for the first: fp32 weights, which are their own main parameters, are weights.
    """
    counted: set[int] = set()
    sizes = {}
    for part, of_part in state_tensors(trainer).items():
        storages = {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in of_part.values())}
        sizes[part] = sum(storage.nbytes() for key, storage in storages.items() if key not in counted)
        counted |= set(storages)
    return sizes


def _describe(stage: StageLayers) -> str:
    """Return the contents of a stage: ``embedding + layers 0-1``."""
    layers = stage.layers
    blocks = f"layers {layers.start}-{layers.stop - 1}" if len(layers) > 1 else f"layer {layers.start}"
    parts = ["embedding"] * stage.first + [blocks] * bool(layers) + ["output layer"] * stage.last
    return " + ".join(parts)


def _table(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Yield rows as lines; all columns but the last are right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    for *cells, last in rows:
        yield "  ".join([*(cell.rjust(width) for cell, width in zip(cells, widths)), last])
