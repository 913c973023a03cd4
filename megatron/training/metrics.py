"""Metrics of training steps: collected on the device, compared over ranks, reduced to one mapping per log line.

Each step adds its device scalars (`StepMetrics`) to a `MetricsWindow` without waiting for the device. At a log line
the window synchronises once, gathers times, traffic and memory of all ranks in one collective (`RankStats`), and
returns the metrics by the names of `megatron.training.loggers.base.METRICS`.
"""

from __future__ import annotations

import math
import os
import resource
import statistics
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron.data.dataset import SPLIT_LABELS, split_kind, validation_set_name
from megatron.distributed import comm
from megatron.distributed.comm import BUBBLE, Group
from megatron.distributed.timing import CUDA_GRAPH_PHASES, Timers
from megatron.optimizer.lr_scheduler import Rates
from megatron.training.loggers.base import MEMORY_CAPACITY
from megatron.training.throughput import Goodput


@dataclass(frozen=True)
class RankStats:
    """Times, traffic and memory of one rank."""

    seconds: float  # wall-clock time per step
    waits: Mapping[str, float]  # seconds per step blocked in collectives, by mesh axes; in the pipeline as BUBBLE
    phases: Mapping[str, float]  # seconds per step, by timer
    memory_bytes: int  # peak
    memory_total_bytes: int  # capacity
    sent: Mapping[str, float] = field(default_factory=dict)  # bytes sent per step, by mesh axes

    @property
    def own_seconds(self) -> float:
        """Seconds per step without the waits for other ranks."""
        return self.seconds - sum(self.waits.values())


def gather_rank_stats(mine: RankStats, world: Group, device: torch.device) -> list[RankStats]:
    """Return the statistics of all ranks, in rank order. One collective over ``world``.

    All ranks must have the same axes and phases.
    """
    if world.size == 1:
        return [mine]
    numbers = [
        mine.seconds,
        float(mine.memory_bytes),
        float(mine.memory_total_bytes),
        *mine.waits.values(),
        *mine.phases.values(),
        *mine.sent.values(),
    ]
    gathered = comm.all_gather(torch.tensor(numbers, dtype=torch.float64, device=device), world)
    ranks = []
    for seconds, used, total, *rest in gathered.view(world.size, -1).tolist():
        remaining = iter(rest)
        waits, phases, sent = (dict(zip(names, remaining)) for names in (mine.waits, mine.phases, mine.sent))
        ranks.append(RankStats(seconds, waits, phases, int(used), int(total), sent))
    return ranks


@dataclass(frozen=True)
class RankComparison:
    """Means and extremes over all ranks."""

    communication: Mapping[str, float]  # mean seconds per step blocked in collectives, by mesh axes
    communication_share: float  # of the step, 0 to 1
    bubble: float | None  # mean share of the step spent waiting for other pipeline stages; None without a pipeline
    data_wait: float  # seconds per step of the rank that waited longest for data
    phases: Mapping[str, tuple[float, ...]]  # seconds per step of every rank, by timer
    fullest_rank: int  # with the largest peak memory
    memory_bytes: int  # peak of the fullest rank
    memory_total_bytes: int  # capacity of the fullest rank
    slowest_rank: int  # with the largest own time
    slowest_excess: float  # its own time over the median rank's, less 1
    sent: Mapping[str, float]  # mean bytes sent per step, by mesh axes

    def timer_metrics(self, option: str, excluded: Collection[str] = ()) -> dict[str, Any]:
        """Return the timers that ran; ``--timing-log-option`` is ``max``, ``minmax`` or ``all``."""
        metrics: dict[str, Any] = {}
        for name, by_rank in self.phases.items():
            if max(by_rank) > 0 and name not in excluded:
                metrics[f"{name}-time"] = max(by_rank)
                if len(by_rank) > 1 and option == "minmax":
                    metrics[f"{name}-time-min"] = min(by_rank)
                if len(by_rank) > 1 and option == "all":
                    metrics[f"{name}-time-by-rank"] = list(by_rank)
        return metrics


def compare_ranks(ranks: Sequence[RankStats]) -> RankComparison:
    """Compare the statistics of all ranks."""
    own = [rank.own_seconds for rank in ranks]
    slowest = max(range(len(ranks)), key=own.__getitem__)
    fullest = max(range(len(ranks)), key=lambda r: ranks[r].memory_bytes)
    median = statistics.median(own)
    step = statistics.fmean(rank.seconds for rank in ranks)
    waits = {axes: statistics.fmean(rank.waits[axes] for rank in ranks) for axes in ranks[0].waits}
    communication = {axes: seconds for axes, seconds in waits.items() if axes != BUBBLE}
    phases = {name: tuple(rank.phases[name] for rank in ranks) for name in ranks[0].phases}
    return RankComparison(
        communication=communication,
        communication_share=sum(communication.values()) / step,
        bubble=waits[BUBBLE] / step if BUBBLE in waits else None,
        data_wait=max(phases.get("batch-generator", (0.0,))),
        phases=phases,
        fullest_rank=fullest,
        memory_bytes=ranks[fullest].memory_bytes,
        memory_total_bytes=ranks[fullest].memory_total_bytes,
        slowest_rank=slowest,
        slowest_excess=own[slowest] / median - 1.0 if median > 0 else 0.0,
        sent={axes: statistics.fmean(rank.sent[axes] for rank in ranks) for axes in ranks[0].sent},
    )


@dataclass(frozen=True)
class StepMetrics:
    """Results of one step: 0-d tensors on the device, equal on every rank."""

    loss: Tensor  # mean over the unmasked tokens of the global batch
    grad_norm: Tensor  # global, before clipping
    skipped: Tensor  # nonzero if the update was skipped
    loss_scale: Tensor  # used in this step
    nonfinite: Tensor  # nonzero if a gradient was not finite; any other skipped update is a spike
    # MoE router losses and metrics of the objective, by name; the same names in every step
    extra: Mapping[str, Tensor] = field(default_factory=dict)


class MetricsWindow:
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
        self._extra_names: tuple[str, ...] = ()
        self._barrier()
        self.world.meter.pop()  # discard waits and traffic from before the first step
        self.world.meter.pop_bytes_sent()
        self.timers.watch.pop()
        self._window_start = self._last_goodput_time = time.perf_counter()

    def add(self, step: StepMetrics, samples: int) -> None:
        """Add a step of ``samples`` samples, without waiting for the device."""
        scalars = (step.loss, step.grad_norm, step.skipped, step.loss_scale, step.nonfinite, *step.extra.values())
        self._extra_names = tuple(step.extra)
        self._steps.append(torch.stack([x.detach().to(self.device, torch.float64) for x in scalars]))
        self._samples.append(samples)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time inside the context, such as evaluation, from training time. Collective over ``world``."""
        self._synchronize()
        paused_at = self._add_goodput()
        try:
            with self.world.meter.paused(), self.timers.watch.paused():
                yield
                self._barrier()
        finally:  # after an error, the steps since the last log line are still read
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
    ) -> dict[str, Any]:
        """Return the metrics of the steps since the last call and start a new window. Waits for the device.

        Args:
            iteration: number of the last step.
            consumed_samples: samples of the whole run so far.
            rates: learning rates and weight decay of the last step.
            samples_digest: hexadecimal digest of the samples consumed so far.
            alone: report this rank only, without communication. Otherwise collective over ``world``.

        Returns:
            Values by the names of ``METRICS``, without those that do not apply, such as communication on one rank.

        """
        if not self._steps:
            raise ValueError("no step since the last log line: read the window only after add")
        losses, norms, skips, scales, nonfinite, *extra = torch.stack(self._steps, dim=1).tolist()
        now = self._add_goodput()
        steps = len(self._steps)
        seconds = now - self._window_start
        tokens_per_second = sum(self._samples) * self.seq_length / seconds
        skipped = [i for i, skip in enumerate(skips) if skip]
        ranks = self._gather_ranks(seconds / steps, Group() if alone else self.world)
        metrics = {
            "iteration": iteration,
            "consumed-samples": consumed_samples,
            "consumed-tokens": consumed_samples * self.seq_length,
            "lm loss": _mean_of_finite(losses),
            **{name: _mean_of_finite(values) for name, values in zip(self._extra_names, extra)},
            "grad-norm": norms[-1],
            "learning-rate": float(rates.lr),
            "weight-decay": rates.weight_decay,
            "batch-size": self._samples[-1],
            "loss-scale": scales[-1],
            "iteration-time": seconds / steps,
            "tokens-per-second": tokens_per_second,
            "tokens-per-second-per-gpu": tokens_per_second / self.world.size,
            "skipped-iterations": [iteration - steps + 1 + i for i in skipped],
            "skipped-iterations-count": len(skipped),
            "spikes-skipped": sum(not nonfinite[i] for i in skipped),
            "mem-max-allocated-bytes": ranks.memory_bytes,
            MEMORY_CAPACITY: ranks.memory_total_bytes,
            "decoupled-learning-rate": None if rates.decoupled_lr is None else float(rates.decoupled_lr),
            **self._rank_metrics(ranks, several=self.world.size > 1 and not alone),
            "goodput": self.goodput.value(),
            "run-seconds": self.goodput.run_seconds(),
            "starts": self.goodput.starts,
            "samples-digest": samples_digest,
            **(
                ranks.timer_metrics(self._timing_option, CUDA_GRAPH_PHASES[self._cuda_graph])
                if self.timers.level
                else {}
            ),
        }
        self._steps = []
        self._samples = []
        self._window_start = now
        return {name: value for name, value in metrics.items() if value is not None}

    def _gather_ranks(self, seconds_per_step: float, world: Group) -> RankComparison:
        """Compare times, traffic and memory of the ranks of ``world``; collective."""
        steps = len(self._steps)
        waits = {axes: seconds / steps for axes, seconds in self.world.meter.pop().items()}
        sent = dict.fromkeys((axes for axes in waits if axes != BUBBLE), 0.0)
        for (axes, _), count in self.world.meter.pop_bytes_sent().items():
            sent[axes] = sent.get(axes, 0.0) + count / steps
        mine = RankStats(seconds_per_step, waits, self.timers.read(steps), *peak_memory(self.device), sent)
        with self.world.meter.paused():
            return compare_ranks(gather_rank_stats(mine, world, self.device))

    def _rank_metrics(self, ranks: RankComparison, several: bool) -> dict[str, Any]:
        """Return the metrics of waits and ranks; ``several`` if more than one rank was compared."""
        metrics: dict[str, Any] = {}
        if several:
            metrics["mem-max-rank"] = ranks.fullest_rank
        metrics["data-wait"] = ranks.data_wait
        if self.world.size > 1 and self._cuda_graph != "step":  # waits inside a replayed graph cannot be measured
            metrics |= {f"communication-{axes}": seconds for axes, seconds in ranks.communication.items()}
            metrics["communication-share"] = ranks.communication_share
            metrics |= {f"sent-bytes-{axes}": count for axes, count in ranks.sent.items()}
            metrics["bubble"] = ranks.bubble
            if several:
                metrics |= {"slowest-rank": ranks.slowest_rank, "slowest-rank-excess": ranks.slowest_excess}
        return metrics

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


def evaluation_metrics(split: str, loss: float, average: float | None = None) -> dict[str, Any]:
    """Return the metrics of one evaluation.

    Args:
        split: ``valid``, ``valid:NAME`` of one of several validation sets, or ``test``.
        loss: mean loss per token in nats; NaN if all labels are masked.
        average: loss with the moving average of the weights, if one is kept.

    """
    name = f"lm loss {SPLIT_LABELS[split_kind(split)]}"
    validation_set = validation_set_name(split)
    try:
        perplexity = math.exp(loss)
    except OverflowError:
        perplexity = math.inf
    metrics = {"validation-set": validation_set} if validation_set else {}
    return {**metrics, name: loss, f"{name} ppl": perplexity} | ({} if average is None else {f"{name} ema": average})


def _mean_of_finite(values: list[float]) -> float:
    """Return the mean of the finite values, or NaN if there is none."""
    finite = [x for x in values if math.isfinite(x)]
    return sum(finite) / len(finite) if finite else math.nan


def peak_memory(device: torch.device) -> tuple[int, int]:
    """Return the peak use so far and the capacity, in bytes: of the GPU, or of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device), torch.cuda.get_device_properties(device).total_memory
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak_bytes = peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux kibibytes
    return peak_bytes, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def device_name(device: torch.device) -> str:
    """Return the device's product name, such as ``NVIDIA H100 80GB HBM3``, or ``cpu``."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
