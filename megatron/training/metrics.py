"""From device scalars of single steps to one record per log line, with one wait for the device."""

from __future__ import annotations

import math
import os
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.training.records import TrainRecord


@dataclass(frozen=True)
class StepMetrics:
    """What one step reports: 0-d tensors on the device, the same on every rank.

    Attributes:
        loss: mean over the unmasked tokens of the global batch.
        grad_norm: global gradient norm before clipping.
        skipped: nonzero if the update was skipped.
        loss_scale: scale the step ran with.
    """

    loss: Tensor
    grad_norm: Tensor
    skipped: Tensor
    loss_scale: Tensor


class StepWindow:
    """The steps since the last log line. Make it right before the first step: its clock starts at once."""

    def __init__(self, device: torch.device, seq_length: int) -> None:
        self.device, self.seq_length = device, seq_length
        self._steps: list[Tensor] = []
        self._samples: list[int] = []
        self._since = time.perf_counter()

    def add(self, step: StepMetrics, samples: int) -> None:
        """Note a step of ``samples`` samples. Does not wait for the device."""
        scalars = (step.loss, step.grad_norm, step.skipped, step.loss_scale)
        self._steps.append(torch.stack([x.detach().to(self.device, torch.float64) for x in scalars]))
        self._samples.append(samples)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time spent inside (evaluation, say) is not counted as training."""
        self._wait()
        paused_at = time.perf_counter()
        yield
        self._wait()
        self._since += time.perf_counter() - paused_at

    def read(self, *, iteration: int, consumed_samples: int, learning_rate: float, weight_decay: float) -> TrainRecord:
        """The record of all steps since the last call, the last of which was ``iteration``. Waits for the device.

        Raises:
            ValueError: when there was no step.
        """
        if not self._steps:
            raise ValueError("no step since the last log line: read the window only after add")
        losses, norms, skips, scales = torch.stack(self._steps, dim=1).tolist()
        now = time.perf_counter()
        steps, samples, seconds = len(self._steps), sum(self._samples), now - self._since
        finite = [loss for loss in losses if math.isfinite(loss)]
        first = iteration - steps + 1
        memory, memory_total = memory_bytes(self.device)
        record = TrainRecord(
            iteration=iteration,
            consumed_samples=consumed_samples,
            consumed_tokens=consumed_samples * self.seq_length,
            loss=sum(finite) / len(finite) if finite else math.nan,
            grad_norm=norms[-1],
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            batch_size=self._samples[-1],
            loss_scale=scales[-1],
            seconds_per_step=seconds / steps,
            tokens_per_second=samples * self.seq_length / seconds,
            skipped=tuple(first + i for i, skip in enumerate(skips) if skip),
            memory_bytes=memory,
            memory_total_bytes=memory_total,
        )
        self._steps, self._samples, self._since = [], [], now
        return record

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def memory_bytes(device: torch.device) -> tuple[int, int]:
    """Peak use so far and capacity: of the GPU, or of this process and the machine on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device), torch.cuda.get_device_properties(device).total_memory
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak_bytes = peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux kibibytes
    return peak_bytes, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def device_name(device: torch.device) -> str:
    """What the device calls itself: ``NVIDIA H100 80GB HBM3``, or ``cpu``."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
