"""Small pipelines for tests: stages that need no model, ranks that are threads, and the plain loop they must equal."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from megatron.distributed import comm
from megatron.distributed.comm import Channel
from megatron.distributed.grad_accumulator import GradAccumulator, GradTarget, WgradOperand
from megatron.distributed.micro_batch import MicroBatch
from megatron.pipeline.actions import PipelineSchedule
from megatron.pipeline.communication import add_communication, channels
from megatron.pipeline.runtime import Chunk, Pipeline
from megatron.pipeline.schedules import SCHEDULES, make_schedule

WIDTH = 8
ROWS = 3
SEED = 0.5
"""Of backward: no power of the gradient hides that it is missing."""

SIZES = {name: recipe.chunks or (2 if name == "interleaved" else 1) for name, recipe in SCHEDULES.items()}
"""Stages on a rank, for each schedule."""


def program_of(name: str, ranks: int, microbatches: int) -> PipelineSchedule:
    """A schedule by name, with its communication."""
    return add_communication(make_schedule(name, ranks, SIZES[name], microbatches))


def batches_of(count: int) -> list[MicroBatch]:
    """Micro-batches whose tokens are all different."""
    return [MicroBatch.of_tokens(torch.arange(ROWS)[None] + ROWS * k) for k in range(count)]


class _Linear(torch.autograd.Function):
    """``y = x W^T``, whose weight gradient goes to a grad_accumulator like the gradients of the model's linears."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, name: str, grad_accumulator: GradAccumulator) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.name, ctx.grad_accumulator = name, grad_accumulator
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = ctx.grad_accumulator.wgrad_input(x, None)
        return dy @ weight, ctx.grad_accumulator.accumulate_wgrad(ctx.name, rows, WgradOperand(dy)), None, None


class LinearStage(nn.Module):
    """``x + tanh(x W^T)`` and an auxiliary loss; the first stage makes x from the tokens, the last one a loss."""

    def __init__(self, number: int, stages: int, grad_accumulator: GradAccumulator) -> None:
        super().__init__()
        self.number, self.first, self.last, self.grad_accumulator = (
            number,
            number == 0,
            number + 1 == stages,
            grad_accumulator,
        )
        values = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
        self.weight = nn.Parameter(values / WIDTH**0.5)

    def forward(self, x: Tensor | None, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """As a chunk of the model is called: ``[ROWS, 1, WIDTH]``, or the loss; and an auxiliary loss."""
        if x is None:
            x = torch.sin(batch.tokens.T[:, :, None].double() + torch.arange(WIDTH)).requires_grad_()
        y = _Linear.apply(x, self.weight, str(self.number), self.grad_accumulator)
        out = x + torch.tanh(y)
        aux = (y**2).sum() / 7
        return (out**2).sum() if self.last else out, aux


@dataclass
class Ends(GradTarget):
    """The result of a run of several ranks: gradients by name, and contributions to each."""

    gradients: dict[str, Tensor] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def grad_accumulator(self, numbers: Sequence[int]) -> GradAccumulator:
        """A grad_accumulator for the stages ``numbers``, which collects here."""
        grad_accumulator = GradAccumulator()
        for name in map(str, numbers):
            self.gradients[name] = torch.zeros(WIDTH, WIDTH, dtype=torch.float64)
            self.counts[name] = 0
        grad_accumulator.bind(self)
        return grad_accumulator

    def claim(self, name: str) -> tuple[Tensor, bool]:
        return self.gradients[name], False

    def contributed(self, name: str) -> None:
        self.counts[name] += 1


def plain_loop(stages: int, microbatches: int, left_out: Sequence[int] = ()) -> dict[str, Tensor]:
    """The gradients of all stages by one graph per micro-batch, without any of the project's pipeline.

    Args:
        stages: of the pipeline.
        microbatches: of a step.
        left_out: stages that do nothing.
    """
    ends = Ends()
    grad_accumulator = ends.grad_accumulator(range(stages))
    chunks = [LinearStage(number, stages, grad_accumulator) for number in range(stages) if number not in left_out]
    for batch in batches_of(microbatches):
        x, total = None, torch.zeros((), dtype=torch.float64)
        for chunk in chunks:
            x, aux = chunk(x, batch)
            total = total + aux
        assert x is not None
        ((x + total) * SEED).backward()
    return ends.gradients


def as_it_is(chunk: LinearStage) -> Chunk:
    """The stage itself."""
    return chunk


def pipeline_of(
    program: PipelineSchedule,
    rank: int,
    roads: Mapping[tuple[int, int], Channel],
    ends: Ends,
    dress: Callable[[LinearStage], Chunk] = as_it_is,
) -> Pipeline:
    """The part of ``rank``, of linear stages, each as ``dress`` returns it."""
    numbers = [stage for stage, place in enumerate(program.placement) if place == rank]
    grad_accumulator = ends.grad_accumulator(numbers)
    chunks = {number: dress(LinearStage(number, program.stages, grad_accumulator)) for number in numbers}
    return Pipeline(chunks, program.placement, rank, roads, empty, grad_accumulator)


def empty(batch: MicroBatch) -> Tensor:
    """A buffer for what a linear stage receives."""
    return torch.full((ROWS, 1, WIDTH), torch.nan, dtype=torch.float64)


@dataclass
class Letter:
    """A send or a receive between threads: over when both are posted, and what was posted before them is over."""

    result: Tensor
    over: threading.Event = field(default_factory=threading.Event)

    def is_done(self) -> bool:
        """Like :class:`comm.Pending`."""
        return self.over.is_set()

    def wait(self) -> Tensor:
        """Like :class:`comm.Pending`."""
        if not self.over.wait(20):
            raise TimeoutError("there is no other end")
        return self.result


class Post:
    """Channels between threads of one process, with rendezvous, in order."""

    def __init__(self) -> None:
        self._sent: dict[tuple[int, int], deque[Letter]] = defaultdict(deque)
        self._expected: dict[tuple[int, int], deque[Letter]] = defaultdict(deque)
        self._lock = threading.Lock()

    def start_send(self, x: Tensor, channel: Channel) -> Letter:
        """In the place of :func:`comm.start_send`."""
        assert not x.requires_grad
        assert x.is_contiguous()
        return self._put(Letter(x), self._sent, channel)

    def start_receive(self, out: Tensor, channel: Channel) -> Letter:
        """In the place of :func:`comm.start_receive`."""
        return self._put(Letter(out), self._expected, channel)

    def _put(self, letter: Letter, line: dict[tuple[int, int], deque[Letter]], channel: Channel) -> Letter:
        edge = (channel.source, channel.target)
        with self._lock:
            line[edge].append(letter)
            if self._sent[edge] and self._expected[edge]:
                sent, expected = self._sent[edge].popleft(), self._expected[edge].popleft()
                expected.result.copy_(sent.result)
                sent.over.set()
                expected.over.set()
        return letter


@contextmanager
def mailboxes() -> Iterator[Post]:
    """Channels hand over inside of this process."""
    post = Post()
    with patch.object(comm, "start_send", post.start_send), patch.object(comm, "start_receive", post.start_receive):
        yield post


def in_threads(program: PipelineSchedule, work: Callable[[int, Mapping[tuple[int, int], Channel]], Any]) -> list[Any]:
    """``work(rank, channels)`` for every rank of a program, each in a thread; what they return, in order."""
    ranks = len(program.ranks)
    roads = {edge: Channel(*edge) for edge in channels(program.placement)}
    with mailboxes(), ThreadPoolExecutor(ranks) as threads:
        return [done.result() for done in [threads.submit(work, rank, roads) for rank in range(ranks)]]
