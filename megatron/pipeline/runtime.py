"""Runs a rank's part of a pipeline's program: a loop over actions, which knows no schedule.

Computing waits for what it needs and for nothing else: sends and receives are posted, in the order of the program,
and the rank goes on. What the model of communication is, :mod:`megatron.pipeline.comms` says; that no program blocks
under it, :mod:`megatron.pipeline.validate` proves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import islice, takewhile

import torch
from torch import Tensor

from megatron.parallel import comm
from megatron.parallel.comm import Channel, Pending
from megatron.parallel.grads import GradSink
from megatron.parallel.microbatch import MicroBatch
from megatron.parallel.ranges import span
from megatron.parallel.stopwatch import Clock, unmeasured
from megatron.pipeline.actions import BACKWARD, FORWARD, INPUT, RECV_B, RECV_F, SEND_B, SEND_F, WEIGHT, Action
from megatron.pipeline.comms import channel_of
from megatron.pipeline.stage import Chunk, Stage

Record = Callable[[Action], AbstractContextManager[object]]
"""Notes when an action computes, inside."""


class Pipeline:
    """The stages of one rank, and its channels to the ranks that have their neighbours.

    Attributes:
        at: the action that this rank is in, or in which it failed; None outside of a run.
        record: told of every action that computes, without its waiting.
    """

    def __init__(
        self,
        chunks: Mapping[int, Chunk],
        placement: Sequence[int],
        rank: int,
        channels: Mapping[tuple[int, int], Channel],
        buffers: Callable[[MicroBatch], Tensor],
        sink: GradSink,
    ) -> None:
        """Nothing runs yet.

        Args:
            chunks: of this rank, by stage.
            placement: the pipeline rank of every stage.
            rank: this pipeline rank.
            channels: by (source, target) pipeline ranks.
            buffers: an empty tensor for what a stage receives of a micro-batch, ``[S(/tp), B, H]``.
            sink: where the chunks' weight gradients go.
        """
        self._stages = {number: Stage(number, chunk) for number, chunk in chunks.items()}
        self._placement, self._rank, self._channels = tuple(placement), rank, channels
        self._buffers, self._sink = buffers, sink
        self.at: Action | None = None
        self.record: Record = unmeasured
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
        clock: Clock = unmeasured,
    ) -> None:
        """Do all actions, and wait until what was sent is there.

        Args:
            actions: this rank's, of a valid program.
            batches: the micro-batches, by number.
            seed: factor of the summed losses in the global objective, 0-d; None to evaluate, without any graph.
            clock: measures ``forward-compute`` and ``backward-compute``, without waiting.

        Raises:
            Exception: whatever an action raises, with a note that names the action.
        """
        self._begin(batches, seed, clock)
        try:
            with torch.set_grad_enabled(seed is not None):
                for action in actions:
                    self.at = action
                    with span(str(action)):
                        self._do[action.kind](action)
            self._finish()
        except Exception as error:
            error.add_note(f"in the pipeline at {self.at}")
            raise
        self.at = None

    def _begin(self, batches: Sequence[MicroBatch], seed: Tensor | None, clock: Clock) -> None:
        self._batches, self._seed, self._clock = batches, seed, clock
        self._arriving: dict[Action, Pending] = {}  # under the RECV_F or RECV_B that it is, or would be
        self._leaving: dict[Action, Tensor] = {}  # under the SEND_F or SEND_B that is next
        self._sent: dict[tuple[int, int], dict[Action, Pending]] = defaultdict(dict)  # by channel, in order

    def _finish(self) -> None:
        for line in self._sent.values():
            _let_go(line, line)

    def _forward(self, action: Action) -> None:
        number, _, microbatch = action
        x = self._take(Action(number, RECV_F, microbatch)) if number > 0 else None
        with self._clock("forward-compute"), self.record(action):
            out = self._stages[number].forward(microbatch, x, self._batches[microbatch])
        if number + 1 < len(self._placement):
            self._hand_over(out, Action(number, SEND_F, microbatch), Action(number + 1, RECV_F, microbatch))

    def _backward(self, action: Action) -> None:
        number, _, microbatch = action
        if self._seed is None:
            raise ValueError(f"{action} needs a seed; without one a run goes forward only")
        last = number + 1 == len(self._placement)
        dy = self._seed if last else self._take(Action(number, RECV_B, microbatch))
        if not last:
            self._arrived(Action(number, SEND_F, microbatch))
        with self._clock("backward-compute"), self.record(action):
            dx = self._stages[number].backward(microbatch, dy, self._seed)
        if dx is not None:
            self._hand_over(dx, Action(number, SEND_B, microbatch), Action(number - 1, RECV_B, microbatch))

    def _input(self, action: Action) -> None:
        with self._sink.deferring(action.stage, action.microbatch):
            self._backward(action)

    def _weight(self, action: Action) -> None:
        with self._clock("backward-compute"), self.record(action):
            self._sink.run(action.stage, action.microbatch)

    def _take(self, received: Action) -> Tensor:
        """What a receive, or a stage of this rank, has for a stage; the one wait of a rank that computes."""
        return self._arriving.pop(received).wait()

    def _hand_over(self, tensor: Tensor, sent: Action, received: Action) -> None:
        """Give a result to the neighbour: at once on the same rank, else to the send that follows."""
        if self._placement[received.stage] == self._rank:
            self._arriving[received] = Pending(tensor)
        else:
            self._leaving[sent] = tensor

    def _send(self, action: Action) -> None:
        edge = channel_of(action, self._placement)
        line = self._sent[edge]
        _let_go(line, takewhile(lambda sent: line[sent].done(), line))
        line[action] = comm.start_send(self._leaving.pop(action).contiguous(), self._channels[edge])

    def _receive(self, action: Action) -> None:
        channel = self._channels[channel_of(action, self._placement)]
        buffer = self._buffers(self._batches[action.microbatch])
        self._arriving[action] = comm.start_receive(buffer, channel)

    def _arrived(self, action: Action) -> None:
        """Let go of an output whose gradient has come back, and of all that went through the channel before it.

        Gloo does not tell when a send is over. There, gradients stay until the end of the step where nothing comes
        back through their channel.
        """
        if self._placement[action.stage] != self._placement[action.stage + 1]:
            line = self._sent[channel_of(action, self._placement)]
            while action in line:
                _let_go(line, islice(line, 1))


def _let_go(line: dict[Action, Pending], sent: Iterable[Action]) -> None:
    """Drop sends once they are over. To wait takes no time where they are known to be, and tells the GPU's stream."""
    for action in [*sent]:
        line.pop(action).wait()
