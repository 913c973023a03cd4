"""One rank of a large run, built here as the run would build it: nothing allocated, nobody to talk to.

Layout, groups, model, buckets and optimizer come from the code that a run takes; tensors are on torch's ``meta``
device, and groups on its ``fake`` backend. The other ranks of that rank's pipeline are built the same way, one after
the other, so that the whole model is accounted for.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from megatron.config.memory import rank_bytes, shown
from megatron.config.run import RunConfig
from megatron.parallel.layout import DENSE_AXES, EXPERT_AXES, Layout
from megatron.parallel.mesh import Groups, pretended
from megatron.parallel.stopwatch import Clock, Stopwatch, unmeasured
from megatron.pipeline.partition import StageLayers
from megatron.pipeline.plan import stage_layers
from megatron.training.setup import Trainer, build

STATE = ("weights", "gradients", "masters", "moments", "average")
"""What is counted, of the parts of :data:`megatron.config.memory.PARTS`."""

OTHERS = "the rest of its pipeline"
"""The phase in which the other ranks are built."""


@dataclass(frozen=True)
class BuiltRank:
    """What was built of one rank.

    Attributes:
        rank: global.
        stages: its part of the model, by the number of the stage.
        parameters: elements of its parameters, padding of the vocabulary included.
        whole: elements of the same parameters over all ranks that share them, without padding, by global name.
        state: bytes by :data:`STATE`.
        groups: of the whole world, which every rank knows of.
    """

    rank: int
    stages: Mapping[int, StageLayers]
    parameters: int
    whole: Mapping[str, int]
    state: Mapping[str, int]
    groups: tuple[Groups, ...]

    @property
    def layers(self) -> int:
        """Its transformer blocks."""
        return sum(stage.count for stage in self.stages.values())


@dataclass(frozen=True)
class FakeWorld:
    """A world of which one pipeline was built.

    Attributes:
        layout: the grids.
        rank: the rank that was asked about.
        pipeline: the ranks of its pipeline, in order.
        seconds: by phase.
    """

    layout: Layout
    rank: int
    pipeline: tuple[BuiltRank, ...]
    seconds: Mapping[str, float]

    @property
    def chosen(self) -> BuiltRank:
        """What was built of :attr:`rank`."""
        return next(built for built in self.pipeline if built.rank == self.rank)

    @property
    def parameters(self) -> int:
        """Of the whole model, each counted once: a tied weight too, which two ranks of a pipeline hold."""
        whole: dict[str, int] = {}
        for built in self.pipeline:
            whole |= built.whole
        return sum(whole.values())

    @property
    def layers(self) -> int:
        """Of the whole model."""
        return sum(built.layers for built in self.pipeline)

    def report(self) -> str:
        """A few lines, and one for every kind of groups and every rank of the pipeline."""
        here = self.layout.coordinate(self.rank)
        dense, expert = ([f"{axis} {here[axis]}" for axis in axes] for axes in (DENSE_AXES, EXPERT_AXES))
        place = ", ".join(dense) + (f"; of experts {', '.join(expert)}" if self.layout.sizes["ep"] > 1 else "")
        rows = {
            "fake world": [f"rank {self.rank:,} of {self.layout.world_size:,}, nothing allocated: {place}"],
            "groups": [*_group_rows(self.chosen.groups)],
            "pipeline": [*self._pipeline_rows()],
            "state": [_state_row(self.chosen)],
            "seconds": [", ".join(f"{name} {seconds:.1f}" for name, seconds in self.seconds.items())],
        }
        between = "\n".ljust(12)
        return "\n".join(f"{name:<11}{between.join(texts)}" for name, texts in rows.items())

    def _pipeline_rows(self) -> Iterator[str]:
        cells = [("rank", "pp", "layers", "parameters", "bytes", "stages")]
        for pp, built in enumerate(self.pipeline):
            stages = ", ".join(f"{number}: {_spoken(stage)}" for number, stage in built.stages.items())
            size = shown(sum(built.state.values()))
            cells.append((f"{built.rank:,}", str(pp), str(built.layers), f"{built.parameters:,}", size, stages))
        yield from _table(cells)
        yield f"together {self.layers:,} layers and {self.parameters:,} parameters, each counted once: the model's"


def fake_world(config: RunConfig, world_size: int, rank: int, started: float | None = None) -> FakeWorld:
    """Build one rank of a world, and the others of its pipeline.

    Args:
        config: validated and resolved, the vocabulary's size included.
        world_size: ranks.
        rank: the one to tell of.
        started: what ``time.monotonic()`` was when the process began; None for now.

    Raises:
        UserError: when a parameter that was asked for is not there.
        RuntimeError: when what was built is not what the configuration says: an error of this program.

    """
    layout, watch = Layout.from_config(config.parallel, world_size), Stopwatch()
    if started is not None:
        watch.add("flags and imports", time.monotonic() - started)
    members = layout.group_of(rank, ("pp",))
    chosen = _build(config, world_size, rank, lambda name: watch.span(name, False))
    with watch.span(OTHERS, False):
        pipeline = [chosen if other == rank else _build(config, world_size, other) for other in members]
    world = FakeWorld(layout, rank, tuple(pipeline), watch.take())
    found, wanted = (world.layers, world.parameters), (config.model.num_layers, config.model.num_parameters())
    if found != wanted:
        raise RuntimeError("built {} layers and {:,} parameters, configured {} and {:,}".format(*found, *wanted))
    return world


def _build(config: RunConfig, world_size: int, rank: int, clock: Clock = unmeasured) -> BuiltRank:
    with pretended(rank, world_size):
        trainer = build(config, rank, world_size, fresh=False, device=torch.device("meta"), clock=clock)
        stages = dict(enumerate(stage_layers(config.model, config.parallel)))
        built = BuiltRank(
            rank,
            {number: stages[number] for number in trainer.chunks},
            sum(prod(spec.local_shape) for spec in trainer.specs.values()),
            {name: spec.numel for name, spec in trainer.specs.items()},
            state_of(trainer),
            tuple(trainer.mesh.created),
        )
    foretold = {part: held for part, held in rank_bytes(config, world_size, rank).items() if part in STATE}
    if built.state != foretold:
        raise RuntimeError(f"rank {rank} holds {built.state} bytes, where {foretold} are foretold")
    return built


def state_of(trainer: Trainer) -> dict[str, int]:
    """Bytes by :data:`STATE` of the memory that tensors lie in, or would lie in; what parts share is the first's."""
    counted: set[int] = set()
    found = {}
    for part, tensors in _held(trainer).items():
        storages = {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)}
        found[part] = sum(storage.nbytes() for key, storage in storages.items() if key not in counted)
        counted |= set(storages)
    return found


def _held(trainer: Trainer) -> dict[str, Iterable[Tensor]]:
    """The tensors of every part of :data:`STATE`; fp32 weights are their own masters."""
    optimizer = trainer.optimizer
    masters, remainders = optimizer.masters, optimizer.masters.remainders
    moments = optimizer.moments().values()
    return {
        "weights": [parameter.detach() for parameter in trainer.params.values()],
        "gradients": [bucket.own for bucket in trainer.buckets.buckets],
        "masters": [remainders[name] if name in remainders else masters[name] for name in masters],
        "moments": [tensor for tensors in moments for tensor in tensors.values()],
        "average": optimizer.average.values(),
    }


def _group_rows(groups: tuple[Groups, ...]) -> Iterator[str]:
    if not groups:
        yield "none: the rank is alone"
        return
    cells = [("groups", "of ranks", "along"), *((f"{g.count:,}", f"{g.size:,}", g.name) for g in groups)]
    yield from _table(cells)
    yield f"together {sum(g.count for g in groups):,}"


def _state_row(built: BuiltRank) -> str:
    parts = ", ".join(f"{part} {held:,}" for part, held in built.state.items() if held)
    return f"rank {built.rank:,} holds, in bytes, as foretold: {parts}"


def _spoken(stage: StageLayers) -> str:
    """What a stage is made of: ``embedding + layers 0-1``."""
    layers = stage.layers
    several = f"layers {layers.start}-{layers.stop - 1}" if len(layers) > 1 else f"layer {layers.start}"
    parts = ["embedding"] * stage.first + [several] * bool(layers) + ["output layer"] * stage.last
    return " + ".join(parts)


def _table(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Lines of columns; all but the last are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    for *cells, last in rows:
        yield "  ".join([*(cell.rjust(width) for cell, width in zip(cells, widths)), last])
