"""Steps recorded once and repeated as CUDA graphs: the GPU gets a whole step in one launch instead of thousands.

A graph repeats the same kernels on the same memory, so whatever changes between steps must be *in* that memory: the
batch and the learning rate are copied into fixed buffers, and whoever keeps something from step to step (optimizer,
loss scale) changes it in place. The first steps of every shape run eagerly, as the steps of training that they are.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields, replace
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from megatron.config.checks.graphs import EAGERLY, no_gpu
from megatron.config.problems import Problem, UserError
from megatron.kernels.operation import first_line
from megatron.optim.optimizer import Outcome
from megatron.optim.schedule import Rates
from megatron.parallel.microbatch import MicroBatch
from megatron.training.metrics import StepMetrics
from megatron.training.setup import Trainer
from megatron.training.step import train_step

WARM_UP = 3
"""Eager steps before a recording: they compile, choose algorithms and allocate what lives on."""

COLUMNS = tuple(f.name for f in fields(MicroBatch) if f.name not in ("step", "boundaries"))
"""The fields of a micro-batch that are tensors of a fixed shape; what would read the other one is refused (E910)."""

Inputs = Sequence[Any]
"""Tensors, some of which may be None."""

T = TypeVar("T")


class Recorder(Protocol):
    """Records the kernels that a function launches."""

    def aside(self) -> AbstractContextManager[Any]:
        """Inside, work runs where the recording will be made."""

    def record(self, work: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        """What ``work`` returns, its tensors not yet computed, and what computes them, as often as it is called."""


class CudaRecorder:
    """CUDA graphs. One at a time is kept, so all may use the same memory."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """On the stream of the recording, before and after everything else."""
        around = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(around)
        with torch.cuda.stream(self._stream):
            yield
        around.wait_stream(self._stream)

    def record(self, work: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        """Capture ``work``. Only this thread is watched: NCCL's own looks at its events at any time.

        Raises:
            UserError: when something in it cannot be captured, or the memory does not suffice.

        """
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                result = work()
        except RuntimeError as error:
            sentence = f"--cuda-graph could not record what it shall repeat: {first_line(error)}"
            raise UserError([Problem("E911", sentence, (EAGERLY,))]) from error
        return result, graph.replay


class Recording(Generic[T]):
    """A function of tensors that is recorded when it has been called a few times with the same shapes.

    The latest recording is kept. What it returned is copied after every repetition, so results stay what they are.
    """

    def __init__(self, work: Callable[[Any, Inputs], T], recorder: Recorder) -> None:
        """Record later.

        Args:
            work: of constants and tensors; returns a dataclass, of whose fields the tensors are its results.
            recorder: for the device.

        """
        self._work, self._recorder = work, recorder
        self._key: Hashable = None
        self._eager = 0
        self._buffers: list[Tensor | None] = []
        self._result: T | None = None
        self._replay: Callable[[], None] | None = None

    @property
    def recorded(self) -> bool:
        """Whether the next call with the same shapes and constants is a repetition."""
        return self._replay is not None

    def __call__(self, constants: Hashable, inputs: Inputs) -> T:
        """``work(constants, inputs)``, by way of a recording where there is one for such inputs."""
        key = constants, tuple(None if t is None else (t.shape, t.dtype) for t in inputs)
        if key != self._key:
            self._forget()
            self._key = key
        if self._eager < WARM_UP:
            self._eager += 1
            with self._recorder.aside():
                return self._work(constants, inputs)
        if self._replay is None:
            self._buffers = [None if t is None else t.clone() for t in inputs]
            self._result, self._replay = self._recorder.record(lambda: self._work(constants, self._buffers))
        for buffer, given in zip(self._buffers, inputs):
            if buffer is not None and given is not None:
                buffer.copy_(given)
        self._replay()
        return _copied(self._result)

    def _forget(self) -> None:
        """Give the memory of the recording back before another is made."""
        self._replay, self._result, self._buffers, self._eager = None, None, [], 0


def _copied(result: Any) -> Any:
    """A dataclass whose tensors are copies."""
    tensors = {f.name: value.clone() for f in fields(result) if isinstance(value := getattr(result, f.name), Tensor)}
    return replace(result, **tensors)


class StepRunner:
    """Takes the steps of a run as ``--cuda-graph`` says: eagerly, with a recorded update, or recorded whole.

    On GPUs learning rates lie in GPU memory, as fp32, in any case: so recorded steps equal eager ones to the bit.
    """

    def __init__(self, trainer: Trainer, recorder: Recorder | None = None) -> None:
        """Choose how.

        Args:
            trainer: whose steps.
            recorder: in place of CUDA's.

        Raises:
            UserError: when a GPU is needed and this run has none.

        """
        self.trainer, self.mode = trainer, trainer.config.compute.cuda_graph
        self.recording: Recording[Any] | None = None
        if self.mode != "none":
            recorder = recorder or _cuda_recorder(trainer.device, self.mode)
            self.recording = Recording({"optimizer": self._update, "step": self._step}[self.mode], recorder)

    def __call__(self, batches: Sequence[MicroBatch], rates: Rates, eager: bool = False) -> StepMetrics:
        """:func:`megatron.training.step.train_step`; ``eager`` where somebody watches modules, as health reports do."""
        t, recording = self.trainer, self.recording
        if recording is not None or t.device.type == "cuda":
            rates = self._on_device(rates)
        if recording is None or eager:
            return train_step(t, batches, rates)
        if self.mode == "step":
            return recording(rates.weight_decay, [*_tensors(rates), *(x for b in batches for x in _columns(b))])

        def update(rates: Rates, loss_scale: Tensor, loss: Tensor) -> Outcome:
            return recording(rates.weight_decay, [*_tensors(rates), loss_scale, loss])

        return train_step(t, batches, rates, update)

    def _on_device(self, rates: Rates) -> Rates:
        """Learning rates where the update reads them anew each time; written there by the device: nobody waits."""

        def place(rate: float | Tensor) -> Tensor:
            return torch.full((), float(rate), dtype=torch.float32, device=self.trainer.device)

        decoupled_lr = None if rates.decoupled_lr is None else place(rates.decoupled_lr)
        return replace(rates, lr=place(rates.lr), decoupled_lr=decoupled_lr)

    def _step(self, weight_decay: float, inputs: Inputs) -> StepMetrics:
        lr, decoupled_lr, *columns = inputs
        batches = [_batch(columns[at : at + len(COLUMNS)]) for at in range(0, len(columns), len(COLUMNS))]
        return train_step(self.trainer, batches, Rates(lr, weight_decay, decoupled_lr))

    def _update(self, weight_decay: float, inputs: Inputs) -> Outcome:
        lr, decoupled_lr, loss_scale, loss = inputs
        return self.trainer.optimizer.update(Rates(lr, weight_decay, decoupled_lr), loss_scale, loss)


def _cuda_recorder(device: torch.device, mode: str) -> Recorder:
    if device.type != "cuda":
        raise UserError([no_gpu(mode)])
    return CudaRecorder(device)


def _tensors(rates: Rates) -> list[Any]:
    return [rates.lr, rates.decoupled_lr]


def _columns(batch: MicroBatch) -> list[Tensor | None]:
    return [getattr(batch, name) for name in COLUMNS]


def _batch(columns: Inputs) -> MicroBatch:
    """What :func:`_columns` took apart; the number of the step is lost."""
    return MicroBatch(**dict(zip(COLUMNS, columns)))
