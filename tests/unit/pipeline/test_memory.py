"""What a pipeline keeps alive, in bytes: after every action exactly what the simulator says, for every schedule."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from megatron.config.model import ModelConfig
from megatron.config.run import TrainingConfig
from megatron.distributed.comm import Channel
from megatron.distributed.grad_accumulator import GradAccumulator, WgradOperand
from megatron.distributed.micro_batch import MicroBatch
from megatron.layers.context import BuildContext
from megatron.model.gpt import GPTChunk
from megatron.pipeline.actions import Action, PipelineSchedule
from megatron.pipeline.partition import StageLayers
from megatron.pipeline.runtime import Pipeline
from megatron.pipeline.schedules import SCHEDULES
from megatron.pipeline.simulate import StageCosts, simulate
from tests.pipelines import LinearStage, batches_of, empty, in_threads, program_of
from tests.solo import one_rank_mesh

MICROBATCHES = 6
SEED = torch.tensor(0.5)
Held = tuple[int, int]
"""Bytes kept for B and I, and for W."""


class Ledger:
    """What backward needs, in bytes: each storage once and until it is freed, without those of ``lasting`` tensors."""

    def __init__(self, lasting: Sequence[Tensor]) -> None:
        self._lasting = {tensor.untyped_storage().data_ptr() for tensor in lasting}
        self._alive: dict[int, int] = {}
        self._queued: set[int] = set()

    def note(self, tensor: Tensor, queued: bool = False) -> Tensor:
        """Count a tensor; ``queued`` ones wait for W."""
        storage = tensor.untyped_storage()
        place = storage.data_ptr()
        if place in self._lasting or not storage.nbytes():
            return tensor.detach()
        if place not in self._alive:
            self._alive[place] = storage.nbytes()
            weakref.finalize(storage, self._freed, place)
        if queued:
            self._queued.add(place)
        return tensor.detach()

    def _freed(self, place: int) -> None:
        del self._alive[place]
        self._queued.discard(place)

    @property
    def held(self) -> Held:
        """Now."""
        queued = sum(self._alive[place] for place in self._queued)
        return sum(self._alive.values()) - queued, queued


class WatchedSink(GradAccumulator):
    """Notes what it queues."""

    ledger: Ledger

    def accumulate_wgrad(
        self, name: str, x: WgradOperand, dy: WgradOperand, rows: Sequence[int] | None = None
    ) -> Tensor | None:
        if self._deferred_to is not None:
            for queued in (x, dy):
                self.ledger.note(queued.shard, queued=True)
        return super().accumulate_wgrad(name, x, dy, rows)


Build = Callable[[Sequence[int], int, WatchedSink], dict[int, nn.Module]]


def linear_stages(numbers: Sequence[int], stages: int, grad_accumulator: WatchedSink) -> dict[int, nn.Module]:
    chunks: dict[int, nn.Module] = {number: LinearStage(number, stages, grad_accumulator) for number in numbers}
    targets = {str(number): torch.zeros(8, 8, dtype=torch.float64) for number in numbers}
    grad_accumulator.bind(targets.__getitem__, lambda name: None)
    return chunks


def gpt_stages(numbers: Sequence[int], stages: int, grad_accumulator: WatchedSink) -> dict[int, nn.Module]:
    """One block each, in the first after the embedding, in the last before the loss."""
    model = ModelConfig(
        num_layers=stages,
        hidden_size=16,
        num_attention_heads=2,
        ffn_hidden_size=32,
        vocab_size=32,
        max_position_embeddings=8,
    )
    context = BuildContext(one_rank_mesh(), grad_accumulator, torch.float64)
    chunks: dict[int, nn.Module] = {}
    for number in numbers:
        stage = StageLayers(range(number, number + 1), number == 0, number + 1 == stages)
        chunks[number] = GPTChunk(model, TrainingConfig(), context, stage)
    grad_accumulator.bind(
        {name: torch.zeros_like(p) for name, p in context.params.items()}.__getitem__, lambda name: None
    )
    return chunks


def lasting(chunks: Mapping[int, nn.Module], batches: Sequence[MicroBatch]) -> list[Tensor]:
    """What is there before a step and after it."""
    kept = [tensor for chunk in chunks.values() for tensor in (*chunk.parameters(), *chunk.buffers())]
    return kept + [tensor for b in batches for tensor in (b.tokens, b.labels, b.loss_mask, b.sample_ids)]


def watch(program: PipelineSchedule, rank: int, roads: Mapping[tuple[int, int], Channel], build: Build) -> list[Held]:
    """What a rank holds after each of its computing actions."""
    numbers = [stage for stage, place in enumerate(program.placement) if place == rank]
    grad_accumulator, batches, held = WatchedSink(), batches_of(program.microbatches), []
    chunks = build(numbers, program.stages, grad_accumulator)
    grad_accumulator.ledger = ledger = Ledger([*lasting(chunks, batches), SEED])
    buffers = empty if build is linear_stages else buffer
    pipeline = Pipeline(chunks, program.placement, rank, roads, buffers, grad_accumulator)

    @contextmanager
    def note(action: Action) -> Iterator[None]:
        yield
        held.append(ledger.held)

    pipeline.record = note
    with saved_tensors_hooks(ledger.note, lambda saved: saved):
        pipeline.run(program.ranks[rank], batches, SEED)
    assert ledger.held == (0, 0)
    return held


def buffer(batch: MicroBatch) -> Tensor:
    return torch.empty(3, 1, 16, dtype=torch.float64)


def costs_of(stages: int, build: Build) -> StageCosts:
    """What one micro-batch of each stage holds, measured on one rank that has them all."""
    order = [Action(stage, "F", 0) for stage in range(stages)]
    order += [Action(stage, kind, 0) for stage in reversed(range(stages)) for kind in "IW"]
    schedule = PipelineSchedule("alone", (tuple(order),))
    [held] = in_threads(schedule, partial(watch, schedule, build=build))
    forward, backward = held[:stages], held[stages:]
    activation = [after[0] - before[0] for before, after in zip([(0, 0), *forward], forward)]
    weights = [after_input[1] for after_input in reversed(backward[::2])]
    return replace(StageCosts.uniform(stages), activation=tuple(activation), weight_memory=tuple(weights))


@pytest.mark.parametrize("build", [linear_stages, gpt_stages])
@pytest.mark.parametrize("name", SCHEDULES)
def test_bytes_are_the_simulators_count_times_those_of_an_action(name: str, build: Build) -> None:
    program = program_of(name, 3, MICROBATCHES)
    costs = costs_of(program.stages, build)
    expected = simulate(program, costs)
    found = in_threads(program, partial(watch, program, build=build))
    for rank, held in enumerate(found):
        assert held == [(memory.activations, memory.weights) for memory in expected.memory[rank]]
        assert max(sum(now) for now in held) == expected.peak_memory[rank]
