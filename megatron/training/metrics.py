"""From device scalars of single steps to one record per log line, with one wait for the device."""

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
    """What one step reports: 0-d tensors on the device, the same on every rank.

    Attributes:
        loss: mean over the unmasked tokens of the global batch.
        grad_norm: global gradient norm before clipping.
        skipped: nonzero if the update was skipped.
        loss_scale: scale the step ran with.
        nonfinite: nonzero if a gradient was not finite; other reasons for a skip are spikes.
        router: losses of the routers of experts, by their metric's name; the same names in every step.
    """

    loss: Tensor
    grad_norm: Tensor
    skipped: Tensor
    loss_scale: Tensor
    nonfinite: Tensor
    router: Mapping[str, Tensor] = field(default_factory=dict)


class StepWindow:
    """The steps since the last log line. Make it right before the first step: its clock starts at once.

    Clocks of all ranks start together, after a pause too. One that started while its rank still waits for others that
    come later would count this as a wait in a step that they have not begun.
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
        """Begin a window; collective over ``world``.

        Args:
            device: of this rank.
            seq_length: tokens of a sample.
            world: all ranks, as the mesh knows them; None for one alone.
            timers: of this rank; None for those that cost nothing.
            goodput: is told of the time that goes into steps; None for that of a run that begins.
            timing_option: what is told of each timer: ``max``, ``minmax`` or ``all``.
            recorded: what is replayed as a graph, by ``--cuda-graph``: its waits and phases are not seen, and not told.

        """
        self.device, self.seq_length, self.world = device, seq_length, world or Group()
        self.timers, self.goodput = timers or Timers(0, device), goodput or Goodput()
        self._timing_option, self._recorded = timing_option, recorded
        self._steps: list[Tensor] = []
        self._samples: list[int] = []
        self._router: tuple[str, ...] = ()
        self._meet()
        self.world.meter.take()  # what was waited for, and sent, before the first step
        self.world.meter.take_sent()
        self.timers.watch.take()
        self._since = self._counted = time.perf_counter()

    def add(self, step: StepMetrics, samples: int) -> None:
        """Note a step of ``samples`` samples. Does not wait for the device."""
        scalars = (step.loss, step.grad_norm, step.skipped, step.loss_scale, step.nonfinite, *step.router.values())
        self._router = tuple(step.router)
        self._steps.append(torch.stack([x.detach().to(self.device, torch.float64) for x in scalars]))
        self._samples.append(samples)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time spent inside (evaluation, say) is not counted as training; collective over ``world``."""
        self._wait()
        paused_at = self._count()
        with self.world.meter.paused(), self.timers.watch.paused():
            yield
            self._meet()
        self._counted = time.perf_counter()
        self._since += self._counted - paused_at

    def read(
        self,
        *,
        iteration: int,
        consumed_samples: int,
        rates: Rates,
        samples_digest: str | None = None,
        alone: bool = False,
    ) -> TrainRecord:
        """The record of all steps since the last call, the last of which was ``iteration``. Waits for the device.

        Collective over ``world``, unless told to be ``alone``: then it tells of this rank what it else tells of all.

        Raises:
            ValueError: when there was no step.
        """
        if not self._steps:
            raise ValueError("no step since the last log line: read the window only after add")
        losses, norms, skips, scales, nonfinite, *router = torch.stack(self._steps, dim=1).tolist()
        now = self._count()
        steps, samples, seconds = len(self._steps), sum(self._samples), now - self._since
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
            tokens_per_second=samples * self.seq_length / seconds,
            skipped=tuple(first + i for i, skip in enumerate(skips) if skip),
            spikes=tuple(first + i for i, skip in enumerate(skips) if skip and not nonfinite[i]),
            samples_digest=samples_digest,
            router_losses={name: _mean_of_finite(values) for name, values in zip(self._router, router)},
            goodput=self.goodput.value(),
            run_seconds=self.goodput.run_seconds(),
            starts=self.goodput.starts,
        )
        record = self._with_ranks(record, Group() if alone else self.world)
        self._steps, self._samples, self._since = [], [], now
        return record

    def _with_ranks(self, record: TrainRecord, world: Group) -> TrainRecord:
        """The record with what the ranks of ``world`` say of time and memory."""
        steps = len(self._steps)
        waits = {axes: seconds / steps for axes, seconds in self.world.meter.take().items()}
        sent = dict.fromkeys((axes for axes in waits if axes != BUBBLE), 0.0)
        for (axes, _), count in self.world.meter.take_sent().items():
            sent[axes] = sent.get(axes, 0.0) + count / steps
        mine = RankTimes(record.seconds_per_step, waits, self.timers.read(steps), *memory_bytes(self.device), sent)
        with self.world.meter.paused():
            ranks = compare(gather(mine, world, self.device))
        several, seen = world.size > 1, self.world.size > 1 and self._recorded != "step"
        timings = ranks.timings(self._timing_option) if self.timers.level else {}
        return replace(
            record,
            memory_bytes=ranks.memory_bytes,
            memory_total_bytes=ranks.memory_total_bytes,
            memory_rank=ranks.fullest_rank if several else None,
            world_size=self.world.size,
            data_wait=ranks.data_wait,
            communication=ranks.communication if seen else {},
            communication_share=ranks.communication_share if seen else None,
            sent=ranks.sent if seen else {},
            bubble=ranks.bubble if seen else None,
            slowest_rank=ranks.slowest_rank if several and seen else None,
            slowest_excess=ranks.slowest_excess if several and seen else None,
            timings={name: timing for name, timing in timings.items() if name not in RECORDED[self._recorded]},
        )

    def _count(self) -> float:
        """Count what has passed as spent in steps; returns the time."""
        now = time.perf_counter()
        self.goodput.add(now - self._counted)
        self._counted = now
        return now

    def _meet(self) -> None:
        """Wait for the device and for all ranks; nobody's step is charged for it."""
        with self.world.meter.paused():
            comm.all_reduce(torch.zeros((), device=self.device), self.world)
        self._wait()

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _mean_of_finite(values: list[float]) -> float:
    """The mean of those that are finite; NaN where none is."""
    finite = [x for x in values if math.isfinite(x)]
    return sum(finite) / len(finite) if finite else math.nan


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
