"""The runtime on ranks that are threads: gradients, evaluation, errors, and the memory that the simulator counts."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from megatron.distributed.comm import Channel, Group
from megatron.distributed.grad_accumulator import GradAccumulator
from megatron.distributed.micro_batch import MicroBatch
from megatron.pipeline.actions import COMPUTE_KINDS, EVALUATION_KINDS, Action, PipelineSchedule
from megatron.pipeline.communication import add_communication
from megatron.pipeline.recorder import record_timeline
from megatron.pipeline.runtime import Chunk, Pipeline, Stage
from megatron.pipeline.schedules import SCHEDULES
from megatron.pipeline.simulate import StageCosts, simulate
from megatron.pipeline.validate import validate_program
from tests.kit.pipelines import (
    SEED,
    Ends,
    Letter,
    LinearStage,
    Post,
    as_it_is,
    batches_of,
    empty,
    in_threads,
    pipeline_of,
    plain_loop,
    program_of,
)
from tests.kit.solo import Gradients

Roads = Mapping[tuple[int, int], Channel]


def run_all(
    program: PipelineSchedule, ends: Ends, dress: object = as_it_is, seed: float | None = SEED
) -> list[Pipeline]:
    """Every rank's part of a program."""

    def work(rank: int, roads: Roads) -> Pipeline:
        pipeline = pipeline_of(program, rank, roads, ends, dress)  # type: ignore[arg-type]
        batches = batches_of(program.microbatches)
        pipeline.run(program.ranks[rank], batches, None if seed is None else torch.tensor(seed))
        return pipeline

    return in_threads(program, work)


def assert_equal(ends: Ends, expected: Mapping[str, Tensor], microbatches: int) -> None:
    for stage, gradient in expected.items():
        torch.testing.assert_close(ends.gradients[stage], gradient, rtol=1e-12, atol=1e-12)
        assert ends.counts[stage] == microbatches


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 3), (3, 7), (4, 4)])
def test_gradients_match_a_plain_loop(name: str, ranks: int, microbatches: int) -> None:
    program, ends = program_of(name, ranks, microbatches), Ends()
    run_all(program, ends)
    assert_equal(ends, plain_loop(program.stages, microbatches), microbatches)


def test_stages_may_be_empty() -> None:
    """As where there are fewer layers than stages: the output is the input, and so are their gradients."""
    program, ends = program_of("interleaved", 2, 4), Ends()

    def dress(chunk: LinearStage) -> Chunk:
        return (lambda x, batch: (x, torch.zeros(()))) if chunk.number == 1 else chunk

    run_all(program, ends, dress)
    expected = plain_loop(program.stages, 4, left_out=(1,))
    del expected["1"]
    assert_equal(ends, expected, 4)


def any_schedule(chance: random.Random) -> PipelineSchedule:
    """Stages on any ranks, backwards whole or in halves, in any order in which everything finds what it needs."""
    ranks, microbatches = chance.randint(1, 4), chance.randint(1, 4)
    stages = chance.randint(ranks, 8)
    homes = [*range(ranks), *(chance.randrange(ranks) for _ in range(stages - ranks))]
    chance.shuffle(homes)
    needs: dict[Action, list[Action]] = {}
    for microbatch in range(microbatches):
        after: list[Action] = []
        for stage in range(stages):
            needs[forward := Action(stage, "F", microbatch)] = after
            after = [forward]
        for stage in reversed(range(stages)):
            kind = chance.choice("BI")
            needs[backward := Action(stage, kind, microbatch)] = [*after, Action(stage, "F", microbatch)]
            after = [backward]
            if kind == "I":
                needs[Action(stage, "W", microbatch)] = [backward]
    orders: list[list[Action]] = [[] for _ in range(ranks)]
    done: set[Action] = set()
    while len(done) < len(needs):
        action = chance.choice([a for a in needs if a not in done and done.issuperset(needs[a])])
        done.add(action)
        orders[homes[action.stage]].append(action)
    return PipelineSchedule("any", tuple(map(tuple, orders)))


@pytest.mark.parametrize("seed", range(15))
def test_any_valid_list_of_actions_runs(seed: int) -> None:
    program, ends = add_communication(any_schedule(random.Random(seed))), Ends()
    validate_program(program)
    run_all(program, ends)
    assert_equal(ends, plain_loop(program.stages, program.microbatches), program.microbatches)


def test_an_evaluation_goes_forward_only_and_makes_no_graph() -> None:
    program, ends, seen = program_of("zb-v", 2, 3).only(EVALUATION_KINDS), Ends(), []

    def dress(chunk: LinearStage) -> Chunk:
        def watched(x: Tensor | None, batch: MicroBatch) -> tuple[Tensor, Tensor]:
            out, aux = chunk(x, batch)
            seen.append((chunk.number, out))
            return out, aux

        return watched

    run_all(program, ends, dress, seed=None)
    assert [out.requires_grad for _, out in seen] == 12 * [False]
    assert [float(out) for number, out in seen if number == 3] == plain_losses(3)
    assert not any(ends.counts.values())


def plain_losses(microbatches: int) -> list[float]:
    chunks = [LinearStage(number, 4, Ends().grad_accumulator([number])) for number in range(4)]
    losses = []
    for batch in batches_of(microbatches):
        x: Tensor | None = None
        for chunk in chunks:
            x, _ = chunk(x, batch)
        assert x is not None
        losses.append(float(x.detach()))
    return losses


@pytest.mark.parametrize("name", ["zb-h1", "dualpipe-v"])
def test_weight_gradients_are_computed_in_their_own_action(name: str) -> None:
    program, ends = program_of(name, 2, 4), Ends()
    before: dict[int, list[tuple[Action, int]]] = {0: [], 1: []}

    def work(rank: int, roads: Roads) -> None:
        pipeline = pipeline_of(program, rank, roads, ends)
        own = [str(stage) for stage, place in enumerate(program.placement) if place == rank]

        def note(action: Action) -> AbstractContextManager[None]:
            before[rank].append((action, sum(ends.counts[stage] for stage in own)))
            return nullcontext()

        pipeline.record = note
        pipeline.run(program.ranks[rank], batches_of(4), torch.tensor(SEED))

    in_threads(program, work)
    for noted in before.values():
        for index, (_, contributions) in enumerate(noted):
            assert contributions == sum(action.kind in ("W", "B") for action, _ in noted[:index])
        assert any(action.kind == "W" for action, _ in noted)


def test_an_error_names_its_action_and_the_next_run_is_clean() -> None:
    program, ends, faults = program_of("1f1b", 1, 4), Ends(), [ValueError("too hot")]

    def dress(chunk: LinearStage) -> Chunk:
        def fails_once(x: Tensor | None, batch: MicroBatch) -> tuple[Tensor, Tensor]:
            if faults and int(batch.tokens[0, 0]) == 6:  # of micro-batch 2
                raise faults.pop()
            return chunk(x, batch)

        return fails_once

    def actions(text: str) -> Sequence[Action]:
        return [Action.parse(word) for word in text.split()]

    pipeline = pipeline_of(program, 0, {}, ends, dress)
    with pytest.raises(ValueError, match="too hot") as caught:
        pipeline.run(actions("0F0 0F1 0F2"), batches_of(4), torch.tensor(SEED))
    assert caught.value.__notes__ == ["in the pipeline at 0F2"]
    assert pipeline.at == Action(0, "F", 2)
    pipeline.run(program.ranks[0], batches_of(4), torch.tensor(SEED))
    assert pipeline.at is None
    assert_equal(ends, plain_loop(1, 4), 4)


def test_backward_without_a_seed_is_refused() -> None:
    program = program_of("1f1b", 1, 1)
    with pytest.raises(ValueError, match="0B0 needs the gradient of the loss"):
        pipeline_of(program, 0, {}, Ends()).run(program.ranks[0], batches_of(1), None)


def test_a_stage_keeps_no_output() -> None:
    """Its memory is free as soon as the send is over, as nothing that backward needs is in it."""
    weight = torch.ones(4, 4, requires_grad=True)
    stage = Stage(1, lambda x, batch: (x + torch.tanh(x @ weight), torch.zeros(())))  # type: ignore[operator]
    [batch] = batches_of(1)
    out = stage.forward(0, torch.ones(2, 4), batch)
    assert not out.requires_grad
    memory = weakref.ref(out.untyped_storage())
    tensor = weakref.ref(out)
    del out
    gc.collect()
    assert tensor() is None
    assert memory() is None
    dx = stage.backward(0, torch.ones(2, 4), torch.ones(()))
    slope = 4 * (1 - torch.tanh(torch.tensor(4.0)) ** 2)
    torch.testing.assert_close(dx, (1 + slope).expand(2, 4))


def test_a_stage_frees_its_input_after_backward() -> None:
    stage = Stage(1, lambda x, batch: ((x**2).sum(), torch.zeros(())))  # type: ignore[operator]
    [batch] = batches_of(1)
    x = torch.ones(3)
    memory = weakref.ref(x.untyped_storage())
    stage.forward(0, x, batch)
    del x
    assert memory() is not None
    stage.backward(0, torch.ones(()), torch.ones(()))
    assert memory() is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_gradient_seeds_take_the_dtype_of_the_outputs(dtype: torch.dtype) -> None:
    def chunk(x: Tensor | None, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        assert x is not None
        return (x * 2).sum(), x.float().sum() * 3

    stage = Stage(1, chunk)
    [batch] = batches_of(1)
    stage.forward(0, torch.ones(2, dtype=dtype), batch)
    dx = stage.backward(0, torch.tensor(0.5), torch.tensor(0.25))
    assert dx is not None
    assert dx.dtype == dtype
    assert dx.tolist() == [1.75, 1.75]


def test_an_output_that_does_not_depend_on_the_input_is_an_error() -> None:
    weight = torch.ones(2, requires_grad=True)
    stage = Stage(3, lambda x, batch: (weight * 2, torch.zeros(())))
    [batch] = batches_of(1)
    stage.forward(0, torch.ones(2), batch)
    with pytest.raises(RuntimeError, match="the output of stage 3 does not depend on its input"):
        stage.backward(0, torch.ones(2), torch.ones(()))


def test_the_recorded_timeline_follows_the_order_of_execution() -> None:
    program, ends = program_of("zb-h1", 1, 3), Ends()
    pipeline = pipeline_of(program, 0, {}, ends)
    with record_timeline(pipeline, Group(), torch.device("cpu")) as recorder:
        pipeline.run(program.ranks[0], batches_of(3), torch.tensor(SEED))
    pipeline.run(program.ranks[0], batches_of(3), torch.tensor(SEED))  # not recorded any more
    timeline = recorder.timeline(program.name)
    [intervals] = timeline.intervals
    assert tuple(interval.action for interval in intervals) == program.ranks[0]
    assert intervals[0].start == 0.0
    assert all(before.end <= after.start for before, after in zip(intervals, intervals[1:]))
    assert all(interval.start < interval.end for interval in intervals)


@pytest.mark.parametrize("reports_completion", [True, False])
def test_an_output_that_was_sent_is_kept_until_its_gradient_is_back(
    reports_completion: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A send that does not report completion is freed at the latest then; every send and receive is waited for."""
    program, ends, outputs, waits = program_of("1f1b", 2, 6), Ends(), [], []
    send, wait = Post.start_send, Letter.wait

    def start_send(post: Post, x: Tensor, channel: Channel) -> Letter:
        letter = send(post, x, channel)
        if channel.source == 0:
            outputs.append(weakref.ref(letter))
        return letter

    def counted(letter: Letter) -> Tensor:
        waits.append(1)
        return wait(letter)

    monkeypatch.setattr(Post, "start_send", start_send)
    monkeypatch.setattr(Letter, "wait", counted)
    if not reports_completion:
        monkeypatch.setattr(Letter, "is_done", lambda letter: False)

    def work(rank: int, roads: Roads) -> None:
        pipeline = pipeline_of(program, rank, roads, ends)

        def note(action: Action) -> AbstractContextManager[None]:
            if action.stage == 0 and action.kind == "B":
                assert all(output() is None for output in outputs[: action.microbatch + 1])
                assert reports_completion or all(output() is not None for output in outputs[action.microbatch + 1 :])
            return nullcontext()

        pipeline.record = note
        pipeline.run(program.ranks[rank], batches_of(6), torch.tensor(SEED))

    in_threads(program, work)
    assert len(outputs) == 6
    assert len(waits) == sum(action.kind not in COMPUTE_KINDS for actions in program.ranks for action in actions)


MICROBATCHES = 6
MEMORY_SEED = torch.tensor(0.5)
Held = tuple[int, int]
"""Bytes kept for B and I, and for W."""


class Ledger:
    """Count the bytes that backward needs: each storage once until it is freed, without ``lasting`` tensors."""

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

    def accumulate_wgrad(self, name: str, x: Any, dy: Any, *rest: Any, **named: Any) -> Tensor | None:
        if self._deferred_to is not None:
            for queued in (x, dy):
                self.ledger.note(queued.shard, queued=True)
        return super().accumulate_wgrad(name, x, dy, *rest, **named)


def linear_stages(numbers: Sequence[int], stages: int, grad_accumulator: WatchedSink) -> dict[int, nn.Module]:
    chunks: dict[int, nn.Module] = {number: LinearStage(number, stages, grad_accumulator) for number in numbers}
    grad_accumulator.bind(Gradients({str(number): torch.zeros(8, 8, dtype=torch.float64) for number in numbers}))
    return chunks


def lasting(chunks: Mapping[int, nn.Module], batches: Sequence[MicroBatch]) -> list[Tensor]:
    """Return the tensors that exist before a step and after it."""
    kept = [tensor for chunk in chunks.values() for tensor in (*chunk.parameters(), *chunk.buffers())]
    return kept + [tensor for b in batches for tensor in (b.tokens, b.labels, b.loss_mask, b.sample_ids)]


def watch(program: PipelineSchedule, rank: int, roads: Roads) -> list[Held]:
    """Return the bytes that a rank holds after each of its computing actions."""
    numbers = [stage for stage, place in enumerate(program.placement) if place == rank]
    grad_accumulator, batches, held = WatchedSink(), batches_of(program.microbatches), []
    chunks = linear_stages(numbers, program.stages, grad_accumulator)
    grad_accumulator.ledger = ledger = Ledger([*lasting(chunks, batches), MEMORY_SEED])
    pipeline = Pipeline(chunks, program.placement, rank, roads, empty, grad_accumulator)

    @contextmanager
    def note(action: Action) -> Iterator[None]:
        yield
        held.append(ledger.held)

    pipeline.record = note
    with saved_tensors_hooks(ledger.note, lambda saved: saved):
        pipeline.run(program.ranks[rank], batches, MEMORY_SEED)
    assert ledger.held == (0, 0)
    return held


def costs_of(stages: int) -> StageCosts:
    """Measure the bytes that one micro-batch of each stage holds, on one rank that has them all."""
    order = [Action(stage, "F", 0) for stage in range(stages)]
    order += [Action(stage, kind, 0) for stage in reversed(range(stages)) for kind in "IW"]
    schedule = PipelineSchedule("alone", (tuple(order),))
    [held] = in_threads(schedule, partial(watch, schedule))
    forward, backward = held[:stages], held[stages:]
    activation = [after[0] - before[0] for before, after in zip([(0, 0), *forward], forward)]
    weights = [after_input[1] for after_input in reversed(backward[::2])]
    return replace(StageCosts.uniform(stages), activation=tuple(activation), weight_memory=tuple(weights))


@pytest.mark.parametrize("name", SCHEDULES)
def test_bytes_are_the_simulated_count_times_the_bytes_of_an_action(name: str) -> None:
    program = program_of(name, 3, MICROBATCHES)
    costs = costs_of(program.stages)
    expected = simulate(program, costs)
    found = in_threads(program, partial(watch, program))
    for rank, held in enumerate(found):
        assert held == [(memory.activations, memory.weights) for memory in expected.memory[rank]]
        assert max(sum(now) for now in held) == expected.peak_memory[rank]
