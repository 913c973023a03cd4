"""Digests of what a rank computes, gives to other ranks and gets from them in a step, in the order of events.

On a GPU a digest reads a tensor once, and nothing waits for the device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from megatron.distributed.comm import Channel, CommObserver, Group
from megatron.optimizer.grad_buffer import BucketLayout, ReduceHandle, Reduction
from megatron.training.digests import digest
from megatron.training.trainer import Trainer

BLOCK_DIGESTS = 1024
"""Digests in a tensor: small tensors that are kept between large ones fragment memory, which slows the step down."""

FORWARD, BACKWARD, GRADIENT, GIVEN, GOT, REDUCED = "forward", "backward", "gradient", "given", "got", "reduced"
"""Kinds of events: output of a module, gradient of it, local gradient of a parameter, tensor given to other ranks or
got from them, and reduced gradient of a parameter."""


class Event(NamedTuple):
    """One digest of a step."""

    # One of the kinds above.
    kind: str
    # Module or parameters; operation and axes of a communication.
    place: str
    # Pipeline action in which it happened, such as ``F0.2``; empty outside of the pipeline.
    action: str = ""
    # Of a communication, the same on all of its ranks.
    label: str = ""


class StepRecord:
    """Events of a step with their digests."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._blocks: list[Tensor] = []

    def add(self, event: Event, x: Tensor) -> None:
        """Append an event with the digest of a tensor."""
        place = len(self.events) % BLOCK_DIGESTS
        if place == 0:
            self._blocks.append(torch.zeros(BLOCK_DIGESTS, dtype=torch.int64, device=x.device))
        self._blocks[-1][place] = digest(x)
        self.events.append(event)

    def digests(self, device: torch.device) -> Tensor:
        """Return all digests, int64 ``[events]``."""
        blocks = self._blocks or [torch.zeros(0, dtype=torch.int64, device=device)]
        return torch.cat(blocks)[: len(self.events)]

    def values(self) -> list[int]:
        """Return all digests as numbers; waits for the device."""
        return self.digests(torch.device("cpu")).tolist()

    def differences(self, other: StepRecord, device: torch.device) -> Tensor:
        """Return the events that differ, bool ``[events]``; all of them if the two steps had other events."""
        if self.events != other.events:
            return torch.ones(max(1, len(self.events)), dtype=torch.bool, device=device)
        return self.digests(device) != other.digests(device)


class StepRecorder(CommObserver):
    """Records a step, from the start of its pipeline to its reduced gradients."""

    def __init__(self, trainer: Trainer) -> None:
        """Observe the reductions of all buckets; nothing else costs anything until :meth:`start`."""
        self._trainer = trainer
        self._record: StepRecord | None = None
        self._hooks = ExitStack()
        for bucket in trainer.buckets.buckets:
            bucket.reduction = ObservedReduction(bucket.reduction, partial(self._see_gradients, bucket.layout))
        trainer.optimizer.partial_grads.before_reduce = self._see_partial
        self._muted = False

    def start(self) -> None:
        """Record what happens from now on."""
        self.stop()
        self._record, self._used = StepRecord(), Counter[str]()
        self._trainer.mesh.meter.observer = self
        for chunk in self._trainer.chunks.values():
            for name, module in chunk.named_modules():
                if name and next(module.children(), None) is None:
                    self._hooks.enter_context(module.register_forward_hook(partial(self._see_output, name)))

    def finish(self) -> StepRecord:
        """Return the record since :meth:`start`, and the reduced gradients last."""
        record = self._record or StepRecord()
        self.stop()
        self.record_reduced(record)
        return record

    def stop(self) -> None:
        """Record nothing from now on."""
        self._record = self._trainer.mesh.meter.observer = None
        self._hooks.close()

    def record_reduced(self, record: StepRecord) -> None:
        """Append the reduced gradients of this rank's shards."""
        for name, gradient in self._trainer.optimizer.grads.items():
            record.add(Event(REDUCED, name), gradient)

    def _add(self, kind: str, place: str, x: Tensor, label: str = "") -> None:
        if self._record is not None:
            at = self._trainer.pipeline.at
            self._record.add(Event(kind, place, "" if at is None else str(at), label), x)

    def _see_output(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        for x in tree_leaves(output):
            if isinstance(x, Tensor) and x.numel():
                self._add(FORWARD, name, x)
                if x.requires_grad and x.grad_fn is not None:
                    x.register_hook(partial(self._add, BACKWARD, name))

    @contextmanager
    def _see_gradients(self, layout: BucketLayout, buffer: Tensor | None) -> Iterator[None]:
        """Record local gradients one by one, and no communication inside: buffers contain padding, of any value."""
        if self._record is not None and buffer is not None:
            for name in layout.specs:
                self._add(GRADIENT, name, layout.view(buffer, name))
        self._muted = True
        try:
            yield
        finally:
            self._muted = False

    def _see_partial(self) -> None:
        """Record gradients before their last reduction, in whose sum a small difference may vanish."""
        if self._record is not None:
            for name in self._trainer.optimizer.partial_grads.names:
                self._record.add(Event(REDUCED, name), self._trainer.optimizer.grads[name])

    def on_input(self, operation: str, tensors: Sequence[Tensor], group: Group | Channel) -> str:
        """See :class:`CommObserver`."""
        if self._muted:
            return ""
        if isinstance(group, Channel):
            place, key = f"message from rank {group.source} to rank {group.target}", f"{group.source}>{group.target}"
        else:
            place, key = f"{operation} over {group.axes}", f"{operation} {group.axes} {group.ranks}"
        self._used[key] += 1
        label = f"{key} {self._used[key]}"
        for x in tensors:
            self._add(GIVEN, place, x, label)
        return label

    def on_output(self, label: str, x: Tensor) -> None:
        """See :class:`CommObserver`."""
        operation = label.split(" ", 2)
        place = f"message {operation[0]}" if ">" in operation[0] else f"{operation[0]} over {operation[1]}"
        self._add(GOT, place, x, label)


class ObservedReduction(Reduction):
    """A reduction whose local gradients are observed."""

    def __init__(self, reduction: Reduction, observe: Callable[[Tensor | None], AbstractContextManager[None]]) -> None:
        """Start reductions inside ``observe``, called with the buffer of local gradients; None for sums of them."""
        super().__init__(reduction.shards, reduction.copies)
        self._reduction, self._observe = reduction, observe
        self.copies_gradients = reduction.copies_gradients

    def start_reduce_scatter(self, x: Tensor) -> ReduceHandle:
        """See :class:`Reduction`."""
        with self._observe(x):
            return self._reduction.start_reduce_scatter(x)

    def start_all_reduce(self, part: Tensor) -> ReduceHandle:
        """See :class:`Reduction`."""
        with self._observe(part if self.shards.size == 1 else None):
            return self._reduction.start_all_reduce(part)
