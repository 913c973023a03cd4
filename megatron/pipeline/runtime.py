"""Run one rank's part of a pipeline program: a loop over actions, whatever the schedule.

Sends and receives are posted in program order without blocking; only a computing action waits, for its input.
:mod:`megatron.pipeline.communication` defines this model of communication, :mod:`megatron.pipeline.validate` proves
that a program cannot deadlock under it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron.distributed import comm
from megatron.distributed.comm import Channel, Pending
from megatron.distributed.grad_accumulator import GradAccumulator
from megatron.distributed.micro_batch import MicroBatch
from megatron.distributed.places import ACTION, PLACE
from megatron.distributed.timing import Clock, no_clock, profiler_range
from megatron.pipeline.actions import BACKWARD, FORWARD, INPUT, RECV_B, RECV_F, SEND_B, SEND_F, WEIGHT, Action
from megatron.pipeline.communication import PEER_STAGE_OFFSET

Chunk = Callable[[Tensor | None, MicroBatch], tuple[Tensor, Tensor]]
"""``chunk(x, micro_batch) -> (out, aux)``: ``x`` is None in the first stage, ``out`` the summed loss in the last."""

Record = Callable[[Action], AbstractContextManager[object]]
"""Returns a context that measures the action computed inside."""

action_name = cache(str)
"""The text of an action, formatted once."""

action_number = cache(Action.to_number)
"""The number of an action, for the place of this process."""


class Stage:
    """A chunk, run one micro-batch at a time."""

    def __init__(self, number: int, chunk: Chunk) -> None:
        """Create the stage.

        Args:
            number: among the stages of the pipeline, from 0.
            chunk: the module to run.
        """
        self.number, self.chunk = number, chunk
        # By micro-batch, what backward needs: the input, and the gradient edge and dtype of output and auxiliary loss
        # (None without gradient). An edge does not hold its tensor, so the memory of the output can be freed.
        self._kept: dict[int, tuple[Tensor | None, list[tuple[GradientEdge, torch.dtype] | None]]] = {}

    def forward(self, microbatch: int, x: Tensor | None, batch: MicroBatch) -> Tensor:
        """Run the chunk and return its detached output; if gradients are enabled, keep what backward needs.

        Args:
            microbatch: index in the step.
            x: input ``[S(/tp), B, H]``; None in the first stage.
            batch: the micro-batch.
        """
        if x is not None:
            x = x.detach().requires_grad_(torch.is_grad_enabled())
        out, aux = self.chunk(x, batch)
        if torch.is_grad_enabled():
            roots = [(get_gradient_edge(y), y.dtype) if y.requires_grad else None for y in (out, aux)]
            self._kept[microbatch] = x, roots
        return out.detach()

    def backward(self, microbatch: int, dy: Tensor, loss_grad: Tensor) -> Tensor | None:
        """Run backward of a micro-batch and free what was kept for it.

        Args:
            microbatch: index in the step.
            dy: gradient of the output; in the last stage, that of the loss.
            loss_grad: factor of the auxiliary loss in the global objective, 0-d.

        Returns:
            The gradient of the input; None in the first stage.

        Raises:
            RuntimeError: if the output does not depend on the input.
        """
        x, roots = self._kept.pop(microbatch)
        edges, grads = [], []
        for root, grad in zip(roots, (dy, loss_grad)):
            if root is not None:
                edge, dtype = root
                edges.append(edge)
                grads.append(grad.to(dtype))
        torch.autograd.backward(edges, grads)
        if x is not None and x.grad is None:
            raise RuntimeError(f"the output of stage {self.number} does not depend on its input")
        return None if x is None else x.grad

    def discard(self) -> None:
        """Forget the micro-batches that wait for their backward."""
        self._kept.clear()


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
            INPUT: self._backward_input,
            WEIGHT: self._backward_weight,
            SEND_F: self._send,
            SEND_B: self._send,
            RECV_F: self._receive,
            RECV_B: self._receive,
        }

    def run(
        self,
        actions: Sequence[Action],
        batches: Sequence[MicroBatch],
        loss_grad: Tensor | None,
        clock: Clock = no_clock,
    ) -> None:
        """Run all actions and wait for all sends to complete.

        Args:
            actions: this rank's, of a valid program.
            batches: micro-batches by index.
            loss_grad: factor of the summed losses in the global objective, 0-d; None to evaluate without autograd.
            clock: measures ``forward-compute`` and ``backward-compute``, without waiting.

        Raises:
            Exception: that of an action, with a note that names the action.
        """
        self._batches = [replace(batch, loss_grad=loss_grad) for batch in batches]
        self._loss_grad, self._clock = loss_grad, clock
        self._received: dict[Action, Pending] = {}  # by RECV, also for tensors from a stage on this rank
        self._to_send: dict[Action, Tensor] = {}  # by the SEND that follows
        self._sends: dict[int, dict[Action, Pending]] = defaultdict(dict)  # by target rank, in order
        try:
            with torch.set_grad_enabled(loss_grad is not None):
                for action in actions:
                    self.at = action
                    PLACE.slots[ACTION] = action_number(action)
                    with profiler_range(action_name(action)):
                        self._do[action.kind](action)
            for sends in self._sends.values():
                while sends:
                    _complete_oldest(sends)
        except Exception as error:
            error.add_note(f"in the pipeline at {self.at}")
            raise
        self.at = None
        PLACE.slots[ACTION] = 0

    def discard(self) -> None:
        """Forget what a run that raised an error has left behind."""
        for stage in self._stages.values():
            stage.discard()
        self._received, self._to_send, self._sends = {}, {}, defaultdict(dict)

    def _forward(self, action: Action) -> None:
        number, _, microbatch = action
        x = self._received.pop(Action(number, RECV_F, microbatch)).wait() if number > 0 else None
        with self._clock("forward-compute"), self.record(action):
            out = self._stages[number].forward(microbatch, x, self._batches[microbatch])
        if number + 1 < len(self._placement):
            self._hand_over(out, Action(number, SEND_F, microbatch), Action(number + 1, RECV_F, microbatch))

    def _backward(self, action: Action) -> None:
        number, _, microbatch = action
        if self._loss_grad is None:
            raise ValueError(f"{action} needs the gradient of the loss; an evaluation has only forwards")
        dy = self._loss_grad
        if number + 1 < len(self._placement):
            dy = self._received.pop(Action(number, RECV_B, microbatch)).wait()
            # The gradient is back, so the output and all earlier sends of its channel have arrived. Gloo does not
            # report when a send is complete: it keeps gradients until the end of the step if nothing comes back.
            sends = self._sends[self._placement[number + 1]]
            while Action(number, SEND_F, microbatch) in sends:
                _complete_oldest(sends)
        with self._clock("backward-compute"), self.record(action):
            dx = self._stages[number].backward(microbatch, dy, self._loss_grad)
        if dx is not None:
            self._hand_over(dx, Action(number, SEND_B, microbatch), Action(number - 1, RECV_B, microbatch))

    def _backward_input(self, action: Action) -> None:
        with self._grad_accumulator.deferring_wgrad(action.stage, action.microbatch):
            self._backward(action)

    def _backward_weight(self, action: Action) -> None:
        with self._clock("backward-compute"), self.record(action):
            self._grad_accumulator.run_deferred(action.stage, action.microbatch)

    def _hand_over(self, tensor: Tensor, sent: Action, received: Action) -> None:
        """Pass a result to the neighbouring stage: directly on the same rank, else through the SEND that follows."""
        if self._placement[received.stage] == self._rank:
            self._received[received] = Pending(tensor)
        else:
            self._to_send[sent] = tensor

    def _send(self, action: Action) -> None:
        target = self._placement[action.stage + PEER_STAGE_OFFSET[action.kind]]
        sends = self._sends[target]
        while sends and next(iter(sends.values())).is_done():
            _complete_oldest(sends)
        tensor = self._to_send.pop(action).contiguous()
        sends[action] = comm.start_send(tensor, self._channels[self._rank, target])

    def _receive(self, action: Action) -> None:
        source = self._placement[action.stage + PEER_STAGE_OFFSET[action.kind]]
        buffer = self._buffers(self._batches[action.microbatch])
        self._received[action] = comm.start_receive(buffer, self._channels[source, self._rank])


def _complete_oldest(sends: dict[Action, Pending]) -> None:
    """Wait for a send, which orders the GPU's streams and does not block once it is complete, and drop its tensor."""
    sends.pop(next(iter(sends))).wait()
