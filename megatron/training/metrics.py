"""Collect the device scalars of each step and reduce them to one record per log line, with one device sync."""

from __future__ import annotations

import math
import os
import resource
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megatron.optim.schedule import Rates
from megatron.parallel import comm
from megatron.parallel.comm import BUBBLE, Group
from megatron.training.goodput import Goodput
from megatron.training.ranks import RankTimes, compare, gather
from megatron.training.records import TrainRecord
from megatron.training.timers import RECORDED, Timers


@dataclass(frozen=True)
class StepMetrics:
    """Results of one step: 0-d tensors on the device, equal on every rank."""

    loss: Tensor  # mean over the unmasked tokens of the global batch
    grad_norm: Tensor  # global, before clipping
    skipped: Tensor  # nonzero if the update was skipped
    loss_scale: Tensor  # used in this step
    nonfinite: Tensor  # nonzero if a gradient was not finite; any other skipped update is a spike
    router: Mapping[str, Tensor] = field(default_factory=dict)  # MoE router losses by metric name, same in every step


class StepWindow:
    """Accumulates the metrics of the steps since the last log line.

    Create it right before the first step: the clock starts in the constructor. All ranks start their clocks together,
    also after a pause, so that a late rank does not appear as waiting time in the other ranks' next step.
    """

    def __init__(
        self,
        device: torch.device,
        seq_length: int,
        *,
        world: Group | None = None,
        timers: Timers | None = None,
        goodput: Goodput | None = None,
        timing_option: str = "minmax",
        recorded: str = "none",
    ) -> None:
        """Start an empty window. Collective over ``world``.

        Args:
            device: device of this rank.
            seq_length: tokens per sample.
            world: group of all ranks; None for a single process.
            timers: timers of this rank; None for no timers.
            goodput: accounts the time spent in steps; None for a new run.
            timing_option: ``--timing-log-option``: ``max``, ``minmax`` or ``all``.
            recorded: ``--cuda-graph``: waits and phases inside a replayed graph cannot be measured and are left out.

        """
        self.device = device
        self.seq_length = seq_length
        self.world = world or Group()
        self.timers = timers or Timers(0, device)
        self.goodput = goodput or Goodput()
        self._timing_option = timing_option
        self._cuda_graph = recorded
        self._steps: list[Tensor] = []
        self._samples: list[int] = []
        self._router_names: tuple[str, ...] = ()
        self._barrier()
        self.world.meter.take()  # discard waits and traffic from before the first step
        self.world.meter.take_sent()
        self.timers.watch.take()
        self._window_start = self._last_goodput_time = time.perf_counter()

    def add(self, step: StepMetrics, samples: int) -> None:
        """Add a step of ``samples`` samples, without waiting for the device."""
        scalars = (step.loss, step.grad_norm, step.skipped, step.loss_scale, step.nonfinite, *step.router.values())
        self._router_names = tuple(step.router)
        self._steps.append(torch.stack([x.detach().to(self.device, torch.float64) for x in scalars]))
        self._samples.append(samples)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time inside the context, such as evaluation, from training time. Collective over ``world``."""
        self._synchronize()
        paused_at = self._add_goodput()
        with self.world.meter.paused(), self.timers.watch.paused():
            yield
            self._barrier()
        self._last_goodput_time = time.perf_counter()
        self._window_start += self._last_goodput_time - paused_at

    def read(
        self,
        *,
        iteration: int,
        consumed_samples: int,
        rates: Rates,
        samples_digest: str | None = None,
        alone: bool = False,
    ) -> TrainRecord:
        """Return the record of the steps since the last call and start a new window. Waits for the device.

        Args:
            iteration: number of the last step.
            consumed_samples: samples of the whole run so far.
            rates: learning rates and weight decay of the last step.
            samples_digest: digest of the samples consumed so far.
            alone: report this rank only, without communication. Otherwise collective over ``world``.

        """
        if not self._steps:
            raise ValueError("no step since the last log line: read the window only after add")
        losses, norms, skips, scales, nonfinite, *router = torch.stack(self._steps, dim=1).tolist()
        now = self._add_goodput()
        steps = len(self._steps)
        seconds = now - self._window_start
        first = iteration - steps + 1
        record = TrainRecord(
            iteration=iteration,
            consumed_samples=consumed_samples,
            consumed_tokens=consumed_samples * self.seq_length,
            loss=_mean_of_finite(losses),
            grad_norm=norms[-1],
            learning_rate=float(rates.lr),
            learning_rate_decoupled=None if rates.decoupled_lr is None else float(rates.decoupled_lr),
            weight_decay=rates.weight_decay,
            batch_size=self._samples[-1],
            loss_scale=scales[-1],
            seconds_per_step=seconds / steps,
            tokens_per_second=sum(self._samples) * self.seq_length / seconds,
            skipped=tuple(first + i for i, skip in enumerate(skips) if skip),
            spikes=tuple(first + i for i, skip in enumerate(skips) if skip and not nonfinite[i]),
            samples_digest=samples_digest,
            router_losses={name: _mean_of_finite(values) for name, values in zip(self._router_names, router)},
            goodput=self.goodput.value(),
            run_seconds=self.goodput.run_seconds(),
            starts=self.goodput.starts,
        )
        record = self._add_rank_stats(record, Group() if alone else self.world)
        self._steps = []
        self._samples = []
        self._window_start = now
        return record

    def _add_rank_stats(self, record: TrainRecord, world: Group) -> TrainRecord:
        """Add times, traffic and memory of the ranks of ``world``."""
        steps = len(self._steps)
        waits = {axes: seconds / steps for axes, seconds in self.world.meter.take().items()}
        sent = dict.fromkeys((axes for axes in waits if axes != BUBBLE), 0.0)
        for (axes, _), count in self.world.meter.take_sent().items():
            sent[axes] = sent.get(axes, 0.0) + count / steps
        mine = RankTimes(record.seconds_per_step, waits, self.timers.read(steps), *memory_bytes(self.device), sent)
        with self.world.meter.paused():
            ranks = compare(gather(mine, world, self.device))
        several = world.size > 1
        waits_measured = self.world.size > 1 and self._cuda_graph != "step"
        timings = ranks.timings(self._timing_option) if self.timers.level else {}
        return replace(
            record,
            memory_bytes=ranks.memory_bytes,
            memory_total_bytes=ranks.memory_total_bytes,
            memory_rank=ranks.fullest_rank if several else None,
            world_size=self.world.size,
            data_wait=ranks.data_wait,
            communication=ranks.communication if waits_measured else {},
            communication_share=ranks.communication_share if waits_measured else None,
            sent=ranks.sent if waits_measured else {},
            bubble=ranks.bubble if waits_measured else None,
            slowest_rank=ranks.slowest_rank if several and waits_measured else None,
            slowest_excess=ranks.slowest_excess if several and waits_measured else None,
            timings={name: timing for name, timing in timings.items() if name not in RECORDED[self._cuda_graph]},
        )

    def _add_goodput(self) -> float:
        """Account the time since the last call as spent in steps, and return the current time."""
        now = time.perf_counter()
        self.goodput.add(now - self._last_goodput_time)
        self._last_goodput_time = now
        return now

    def _barrier(self) -> None:
        """Wait for all ranks and the device, outside the measured times."""
        with self.world.meter.paused():
            comm.all_reduce(torch.zeros((), device=self.device), self.world)
        self._synchronize()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _mean_of_finite(values: list[float]) -> float:
    """Return the mean of the finite values, or NaN if there is none."""
    finite = [x for x in values if math.isfinite(x)]
    return sum(finite) / len(finite) if finite else math.nan


def memory_bytes(device: torch.device) -> tuple[int, int]:
    """Return the peak use so far and the capacity, in bytes: of the GPU, or of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device), torch.cuda.get_device_properties(device).total_memory
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak_bytes = peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux kibibytes
    return peak_bytes, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def device_name(device: torch.device) -> str:
    """Return the device's product name, such as ``NVIDIA H100 80GB HBM3``, or ``cpu``."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
