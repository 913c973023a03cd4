"""Run one rank's part of a pipeline program: a loop over actions that knows no schedule.

Sends and receives are posted in program order without blocking; only a computing action waits, for its input.
:mod:`megatron.pipeline.communication` defines this model of communication, :mod:`megatron.pipeline.validate` proves
that a program cannot deadlock under it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import islice, takewhile

import torch
from torch import Tensor

from megatron.distributed import comm
from megatron.distributed.comm import Channel, Pending
from megatron.distributed.grad_accumulator import GradAccumulator
from megatron.distributed.micro_batch import MicroBatch
from megatron.distributed.timing import Clock, no_clock, profiler_range
from megatron.pipeline.actions import BACKWARD, FORWARD, INPUT, RECV_B, RECV_F, SEND_B, SEND_F, WEIGHT, Action
from megatron.pipeline.communication import channel_of
from megatron.pipeline.stage import Chunk, Stage

Record = Callable[[Action], AbstractContextManager[object]]
"""Returns a context that measures the action computed inside."""


class Pipeline:
    """The stages of one rank, and its channels to the ranks with neighbouring stages."""

    def __init__(
        self,
        chunks: Mapping[int, Chunk],
        placement: Sequence[int],
        rank: int,
        channels: Mapping[tuple[int, int], Channel],
        buffers: Callable[[MicroBatch], Tensor],
        grad_accumulator: GradAccumulator,
    ) -> None:
        """Create the pipeline.

        Args:
            chunks: of this rank, by stage.
            placement: pipeline rank of every stage.
            rank: this pipeline rank.
            channels: by (source, target) pipeline ranks.
            buffers: allocates the receive buffer for a stage's input, ``[S(/tp), B, H]``.
            grad_accumulator: accumulates the chunks' weight gradients.
        """
        self._stages = {number: Stage(number, chunk) for number, chunk in chunks.items()}
        self._placement, self._rank, self._channels = tuple(placement), rank, channels
        self._buffers, self._grad_accumulator = buffers, grad_accumulator
        self.at: Action | None = None  # the current or failed action; None outside of a run
        self.record: Record = no_clock  # measures every computing action, without the time it waits for input
        self._do: dict[str, Callable[[Action], None]] = {
            FORWARD: self._forward,
            BACKWARD: self._backward,
            INPUT: self._input,
            WEIGHT: self._weight,
            SEND_F: self._send,
            SEND_B: self._send,
            RECV_F: self._receive,
            RECV_B: self._receive,
        }

    def run(
        self,
        actions: Sequence[Action],
        batches: Sequence[MicroBatch],
        seed: Tensor | None,
        clock: Clock = no_clock,
    ) -> None:
        """Run all actions and wait for all sends to complete.

        Args:
            actions: this rank's, of a valid program.
            batches: micro-batches by index.
            seed: factor of the summed losses in the global objective, 0-d; None to evaluate without autograd.
            clock: measures ``forward-compute`` and ``backward-compute``, without waiting.

        Raises:
            Exception: that of an action, with a note that names the action.
        """
        self._batches, self._seed, self._clock = batches, seed, clock
        self._received: dict[Action, Pending] = {}  # by RECV, also for tensors from a stage on this rank
        self._to_send: dict[Action, Tensor] = {}  # by the SEND that follows
        self._sends: dict[tuple[int, int], dict[Action, Pending]] = defaultdict(dict)  # by channel, in order
        self._grad_accumulator.loss_seed = seed
        try:
            with torch.set_grad_enabled(seed is not None):
                for action in actions:
                    self.at = action
                    with profiler_range(str(action)):
                        self._do[action.kind](action)
            for sends in self._sends.values():
                _complete(sends, sends)
        except Exception as error:
            error.add_note(f"in the pipeline at {self.at}")
            raise
        finally:
            self._grad_accumulator.loss_seed = None
        self.at = None

    def _forward(self, action: Action) -> None:
        number, _, microbatch = action
        x = self._wait_for(Action(number, RECV_F, microbatch)) if number > 0 else None
        with self._clock("forward-compute"), self.record(action):
            out = self._stages[number].forward(microbatch, x, self._batches[microbatch])
        if number + 1 < len(self._placement):
            self._hand_over(out, Action(number, SEND_F, microbatch), Action(number + 1, RECV_F, microbatch))

    def _backward(self, action: Action) -> None:
        number, _, microbatch = action
        if self._seed is None:
            raise ValueError(f"{action} needs a seed; without one a run has only forwards")
        last = number + 1 == len(self._placement)
        dy = self._seed if last else self._wait_for(Action(number, RECV_B, microbatch))
        if not last:
            self._release_sends(Action(number, SEND_F, microbatch))
        with self._clock("backward-compute"), self.record(action):
            dx = self._stages[number].backward(microbatch, dy, self._seed)
        if dx is not None:
            self._hand_over(dx, Action(number, SEND_B, microbatch), Action(number - 1, RECV_B, microbatch))

    def _input(self, action: Action) -> None:
        with self._grad_accumulator.deferring_wgrad(action.stage, action.microbatch):
            self._backward(action)

    def _weight(self, action: Action) -> None:
        with self._clock("backward-compute"), self.record(action):
            self._grad_accumulator.run_deferred(action.stage, action.microbatch)

    def _wait_for(self, received: Action) -> Tensor:
        """Wait for the tensor of a receive, or take that of a stage on this rank."""
        return self._received.pop(received).wait()

    def _hand_over(self, tensor: Tensor, sent: Action, received: Action) -> None:
        """Pass a result to the neighbouring stage: directly on the same rank, else through the SEND that follows."""
        if self._placement[received.stage] == self._rank:
            self._received[received] = Pending(tensor)
        else:
            self._to_send[sent] = tensor

    def _send(self, action: Action) -> None:
        edge = channel_of(action, self._placement)
        sends = self._sends[edge]
        _complete(sends, takewhile(lambda sent: sends[sent].is_done(), sends))
        sends[action] = comm.start_send(self._to_send.pop(action).contiguous(), self._channels[edge])

    def _receive(self, action: Action) -> None:
        channel = self._channels[channel_of(action, self._placement)]
        buffer = self._buffers(self._batches[action.microbatch])
        self._received[action] = comm.start_receive(buffer, channel)

    def _release_sends(self, action: Action) -> None:
        """Release an output whose gradient has come back, and all earlier sends of its channel.

        Gloo does not report when a send is complete. There, gradients are kept until the end of the step if nothing
        comes back through their channel.
        """
        if self._placement[action.stage] != self._placement[action.stage + 1]:
            sends = self._sends[channel_of(action, self._placement)]
            while action in sends:
                _complete(sends, islice(sends, 1))


def _complete(sends: dict[Action, Pending], done: Iterable[Action]) -> None:
    """Wait for completed sends, which does not block but orders the GPU's streams, and drop their tensors."""
    for action in [*done]:
        sends.pop(action).wait()
