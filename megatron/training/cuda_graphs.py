"""Capture training steps as CUDA graphs, so that one launch replaces thousands.

A graph replays the same kernels on the same memory. Values that change between steps must therefore live in that
memory: the batch and the learning rate are copied into fixed buffers, and the optimizer and the loss scaler update
their state in place. The first steps of every shape run eagerly and are normal steps of training.

A capture computes nothing. So if it fails, a step that is taken again eagerly starts from the same values.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from megatron.arguments.validate import choose_cuda_graph
from megatron.config.compute import NO_CUDA_GRAPH, no_gpu_problem
from megatron.config.errors import Problem, UserError
from megatron.distributed import comm
from megatron.distributed.micro_batch import MicroBatch
from megatron.kernels.operation import error_summary
from megatron.optimizer.distributed_optimizer import UpdateResult
from megatron.optimizer.lr_scheduler import Rates
from megatron.training.loggers.console import print_warning
from megatron.training.metrics import StepMetrics
from megatron.training.step import rates_on, train_step
from megatron.training.trainer import Trainer

WARM_UP_STEPS = 3
"""Eager steps before a capture: they compile, tune and allocate persistent memory."""

OTHER_FIELDS = ("step", "host_documents", "boundaries", "pattern_restarts", "seq_length", "loss_grad", "extra")
TENSOR_FIELDS = tuple(f.name for f in fields(MicroBatch) if f.name not in OTHER_FIELDS)
"""Fields of a micro-batch that are device tensors of fixed shape; options that need others are refused (E910, E917)."""

Inputs = Sequence[Any]
"""Tensors or None."""

T = TypeVar("T")


class CudaGraphRecorder:
    """Capture CUDA graphs on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """Run the work inside on the capture stream, ordered with the current stream."""
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)

    def record(self, work: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        """Capture ``work``; return its result, with tensors not computed yet, and a function that computes them.

        Raises:
            Exception: of any kind, if part of it cannot be captured, or memory runs out.
        """
        graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        try:
            # thread-local, because NCCL's watchdog thread queries events at any time
            with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
                result = work()
        except Exception:
            with suppress(RuntimeError):  # if PyTorch has ended the capture in order, there is nothing to end here
                torch._C._cuda_endAllocateToPool(self._stream.device_index, pool)
                torch._C._cuda_releasePool(self._stream.device_index, pool)
            raise
        return result, graph.replay


class CaptureError(RuntimeError):
    """A step could not be captured on all ranks."""

    def __init__(self, rank: int, reason: str | None) -> None:
        """Keep the highest rank that failed, and why this one has, if it has."""
        super().__init__(reason or f"rank {rank} failed")
        self.rank = rank


class GraphedCallable(Generic[T]):
    """A function of tensors that is captured after a few calls with the same shapes.

    Only the latest graph is kept. Results are copied after every replay, so that the next one does not change them.
    """

    def __init__(
        self,
        work: Callable[[Any, Inputs], T],
        recorder: CudaGraphRecorder,
        capture: Callable[[Callable[[], Any]], Any] = lambda record: record(),
    ) -> None:
        """Wrap ``work``.

        Args:
            work: function of constants and tensors that returns a dataclass; its tensor fields are the results.
            recorder: captures it.
            capture: calls its argument, which captures ``work``, and returns the result.
        """
        self._work = work
        self._recorder = recorder
        self._capture = capture
        self._key: Hashable = None
        self._eager_calls = 0
        self._buffers: list[Tensor | None] = []
        self._result: T | None = None
        self._replay: Callable[[], None] | None = None

    @property
    def recorded(self) -> bool:
        """True if the next call with the same shapes and constants is a replay."""
        return self._replay is not None

    def __call__(self, constants: Hashable, inputs: Inputs) -> T:
        """Return ``work(constants, inputs)``, by replaying a graph if one exists for these shapes and constants."""
        key = constants, tuple(None if t is None else (t.shape, t.dtype) for t in inputs)
        if key != self._key:
            self._key = key
            self._eager_calls = 0
            # free the memory of the old graph before another is captured
            self._replay = self._result = None
            self._buffers = []
        if self._eager_calls < WARM_UP_STEPS:
            self._eager_calls += 1
            with self._recorder.on_stream():
                return self._work(constants, inputs)
        if self._replay is None:
            self._buffers = [None if t is None else t.clone() for t in inputs]
            self._result, self._replay = self._capture(
                lambda: self._recorder.record(lambda: self._work(constants, self._buffers))
            )
        for buffer, value in zip(self._buffers, inputs):
            if buffer is not None and value is not None:
                buffer.copy_(value)
        self._replay()
        return _clone_tensors(self._result)


def _clone_tensors(value: Any) -> Any:
    """Return a copy of a dataclass with cloned tensors, also in its dicts of tensors."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {name: _clone_tensors(item) for name, item in value.items()}
    return replace(value, **{f.name: _clone_tensors(getattr(value, f.name)) for f in fields(value)})


class StepRunner:
    """Take steps according to ``--cuda-graph``: eagerly, with a captured optimizer update, or captured as a whole.

    On GPUs learning rates are always fp32 scalars in GPU memory (:func:`~megatron.training.step.rates_on`), so with
    ``--deterministic`` captured steps equal eager ones to the bit.
    """

    def __init__(self, trainer: Trainer, recorder: CudaGraphRecorder | None = None) -> None:
        """Prepare for ``--cuda-graph``; ``recorder`` None captures CUDA graphs.

        Raises:
            UserError: if a GPU is needed and this run has none.
        """
        self.trainer = trainer
        cuda, option = trainer.device.type == "cuda", trainer.config.compute.cuda_graph
        self._is_optional = option == "auto"
        # What is captured: none, optimizer or step. Changes to none after an optional capture has failed.
        mode, why = choose_cuda_graph(trainer.config, trainer.mesh.world.size, cuda or recorder is not None)
        self.mode = mode
        # Lines for the start of the log.
        self.notes = [f"cuda graph: {mode}, because {why}"] if self._is_optional and cuda else []
        self.recording: GraphedCallable[Any] | None = None
        if mode != "none":
            if recorder is None:
                if not cuda:
                    raise UserError([no_gpu_problem(mode)])
                recorder = CudaGraphRecorder(trainer.device)
            work: Callable[[Any, Inputs], Any] = self._update if mode == "optimizer" else self._step
            self.recording = GraphedCallable(work, recorder, self._capture)

    def __call__(self, batches: Sequence[MicroBatch], rates: Rates) -> StepMetrics:
        """Run :func:`megatron.training.step.train_step`.

        Raises:
            UserError: if the capture that an option asks for fails.
        """
        recording = self.recording
        if recording is None:
            return train_step(self.trainer, batches, rates)
        rates = rates_on(self.trainer.device, rates)
        try:
            if self.mode == "step":
                return self._replay_step(recording, batches, rates)

            def update(rates: Rates, loss_scale: Tensor, loss: Tensor) -> UpdateResult:
                return recording(rates.weight_decay, [rates.lr, rates.decoupled_lr, loss_scale, loss])

            return train_step(self.trainer, batches, rates, update)
        except CaptureError as error:
            sentence = f"--cuda-graph {self.mode} could not capture it: {error}"
            if not self._is_optional:
                raise UserError([Problem("E911", sentence, (NO_CUDA_GRAPH,))]) from error
            if self.trainer.mesh.world.rank == error.rank:  # it knows why
                print_warning(f"{sentence}; all steps are taken eagerly")
            self.mode, self.recording = "none", None
        self.trainer.discard_step()
        return train_step(self.trainer, batches, rates)

    def _capture(self, record: Callable[[], T]) -> T:
        """Call ``record`` on all ranks; collective, because a graph must be replayed by all of them or by none.

        Raises:
            CaptureError: if it fails on any rank.
        """
        world, failure = self.trainer.mesh.world, None
        with world.meter.paused():
            try:
                captured = record()
            except Exception as error:  # of any kind: the other ranks wait for the outcome
                failure = error
            highest = 0 if failure is None else world.rank + 1
            if world.size > 1:
                highest = int(comm.all_reduce(torch.tensor(highest, device=self.trainer.device), world, op="max"))
        if highest:
            raise CaptureError(highest - 1, None if failure is None else error_summary(failure)) from failure
        return captured

    def _replay_step(
        self, recording: GraphedCallable[StepMetrics], batches: Sequence[MicroBatch], rates: Rates
    ) -> StepMetrics:
        extra = tuple(batches[0].extra)
        inputs: list[Any] = [rates.lr, rates.decoupled_lr]
        for batch in batches:
            inputs += [getattr(batch, name) for name in TENSOR_FIELDS]
            inputs += [batch.extra[name] for name in extra]
        return recording((rates.weight_decay, extra), inputs)

    def _step(self, constants: tuple[float, tuple[str, ...]], inputs: Inputs) -> StepMetrics:
        (weight_decay, extra), (lr, decoupled_lr, *columns) = constants, inputs
        batches = []
        while columns:
            named = {name: columns.pop(0) for name in TENSOR_FIELDS}
            batches.append(MicroBatch(**named, extra={name: columns.pop(0) for name in extra}))
        return train_step(self.trainer, batches, Rates(lr, weight_decay, decoupled_lr))

    def _update(self, weight_decay: float, inputs: Inputs) -> UpdateResult:
        lr, decoupled_lr, loss_scale, loss = inputs
        rates = Rates(lr, weight_decay, decoupled_lr)
        return self.trainer.optimizer.update(rates, loss_scale, loss, hooks=self.trainer.components)
