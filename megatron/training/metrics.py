"""Metrics of training steps: collected on the device, compared over ranks, reduced to one mapping per log line.

Each step adds its device scalars (`StepMetrics`) to a `MetricsWindow` without waiting for the device. At a log line
the window synchronises once, gathers times, traffic and memory of all ranks in one collective (`RankStats`), and
returns the metrics by the names of `megatron.training.loggers.base.METRICS`. `ThroughputModel` adds FLOP/s, and
`Goodput` accounts the time of a run over all its starts.
"""

from __future__ import annotations

import math
import os
import resource
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import Tensor

from megatron.config.batch import WHOLE_RUN, Origin, final_consumed_samples, final_iteration
from megatron.config.run import RunConfig
from megatron.data.dataset import SPLIT_LABELS, split_kind, validation_set_name
from megatron.distributed import comm
from megatron.distributed.comm import BUBBLE, Group
from megatron.distributed.timing import CUDA_GRAPH_PHASES, PHASES, Timers
from megatron.optimizer.lr_scheduler import Rates
from megatron.planner.flops import FlopsPerToken
from megatron.planner.hardware import driver_accelerator
from megatron.training.loggers.base import Metrics
from megatron.training.loggers.console import MEMORY_CAPACITY, ON_GPU, SECONDS_LEFT, TOTAL_ITERATIONS


class Goodput:
    """Productive seconds of a run, divided by all seconds since its first start.

    Steps lost in a crash do not count, because this state is restored from the checkpoint; nor does the time of
    starting, loading, evaluating, saving, of a step that fails or stalls, of steps whose update is skipped, and between
    two starts. Waiting for data or for other ranks within a step does count.
    """

    def __init__(self, started: float | None = None) -> None:
        """Start counting for a new run, at ``started`` on the clock of ``time.monotonic()``; None for now."""
        elapsed = 0.0 if started is None else time.monotonic() - started
        self.first_start = time.time() - elapsed  # seconds since 1970
        self.productive_seconds = 0.0
        self.starts = 1  # of the run, this one included
        self.continues = False  # True in later phases of this start, whose checkpoints lag behind
        self.goes_back = False  # True if this start continues from an earlier step

    def run_seconds(self) -> float:
        """Return the seconds since the run's first start."""
        return time.time() - self.first_start

    def value(self) -> float | None:
        """Return the goodput, 0 to 1; None if the machine's clock was set back so far that it would exceed 1."""
        passed = self.run_seconds()
        return self.productive_seconds / passed if passed > 0 and self.productive_seconds <= passed else None

    def state_dict(self) -> dict[str, float | int]:
        """Return the values to save in a checkpoint."""
        return {"first_start": self.first_start, "productive_seconds": self.productive_seconds, "starts": self.starts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the run that saved ``state``, and count this start."""
        if self.goes_back:  # the seconds of steps that were undone do not count
            self.productive_seconds = float(state["productive_seconds"])
        if self.continues:
            return
        self.first_start = float(state["first_start"])
        self.productive_seconds = float(state["productive_seconds"])
        self.starts = int(state["starts"]) + 1


RankStats = Mapping[str, float]
"""Measurements of one rank by the names of their metrics, per step: ``iteration-time``, ``communication-AXES`` (with
the time blocked in the pipeline as ``communication-bubble``), ``sent-bytes-AXES``, ``TIMER-time``, and memory."""

BUBBLE_TIME, DATA_TIME = f"communication-{BUBBLE}", "batch-generator-time"


def gather_rank_stats(mine: RankStats, world: Group, device: torch.device) -> list[RankStats]:
    """Return the measurements of all ranks, which have the same names, in rank order. One collective over ``world``."""
    if world.size == 1:
        return [mine]
    values = torch.tensor([*mine.values()], dtype=torch.float64, device=device)
    gathered = comm.all_gather(values, world).view(world.size, -1).tolist()
    return [dict(zip(mine, of_rank)) for of_rank in gathered]


def compare_ranks(ranks: Sequence[RankStats]) -> dict[str, Any]:
    """Return the metrics of waits, traffic and memory, without those that do not apply or were not measured."""
    fullest = max(range(len(ranks)), key=lambda rank: ranks[rank]["mem-max-allocated-bytes"])
    metrics: dict[str, Any] = {
        "data-wait": max((rank[DATA_TIME] for rank in ranks if DATA_TIME in rank), default=None),
        "mem-max-allocated-bytes": int(ranks[fullest]["mem-max-allocated-bytes"]),
        MEMORY_CAPACITY: int(ranks[fullest][MEMORY_CAPACITY]),
    }
    if len(ranks) > 1:
        metrics["mem-max-rank"] = fullest
    averaged = [name for name in ranks[0] if name.startswith(("sent-bytes-", "communication-"))]
    mean = {name: statistics.fmean(rank[name] for rank in ranks) for name in averaged}
    metrics |= {name: sent for name, sent in mean.items() if name.startswith("sent-bytes-")}
    waits = {name: seconds for name, seconds in mean.items() if name.startswith("communication-")}
    if not waits:
        return metrics
    step = statistics.fmean(rank["iteration-time"] for rank in ranks)
    own = [rank["iteration-time"] - sum(rank[name] for name in waits) for rank in ranks]
    if BUBBLE_TIME in waits:
        metrics["bubble"] = waits.pop(BUBBLE_TIME) / step
    metrics |= waits
    metrics["communication-share"] = sum(waits.values()) / step
    if len(ranks) > 1:
        median = statistics.median(own)
        metrics["slowest-rank"] = own.index(max(own))
        metrics["slowest-rank-excess"] = max(own) / median - 1.0 if median > 0 else 0.0
    return metrics


def timer_metrics(ranks: Sequence[RankStats], option: str) -> dict[str, Any]:
    """Return the timers that ran; ``option`` is ``--timing-log-option``: ``max``, ``minmax`` or ``all``."""
    metrics: dict[str, Any] = {}
    for name in ranks[0]:
        if not name.endswith("-time") or name == "iteration-time":
            continue
        by_rank = [rank[name] for rank in ranks]
        longest = max(by_rank)
        if longest > 0:
            metrics[name] = longest
            if len(ranks) > 1 and option == "minmax":
                metrics[f"{name}-min"] = min(by_rank)
            if len(ranks) > 1 and option == "all":
                metrics[f"{name}-by-rank"] = by_rank
    return metrics


@dataclass(frozen=True)
class StepMetrics:
    """Results of one step: 0-d tensors on the device, equal on every rank."""

    loss: Tensor  # mean over the unmasked tokens of the global batch
    grad_norm: Tensor  # global, before clipping
    skipped: Tensor  # nonzero if the update was skipped
    loss_scale: Tensor  # used in this step
    nonfinite: Tensor  # nonzero if a gradient was not finite; any other skipped update is a spike
    # auxiliary losses and metrics of the objective, by name; the same names in every step
    extra: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of_nothing(cls, loss_scale: Tensor, extra: Sequence[str]) -> Self:
        """Return the results of a step that was not computed: its update is skipped, its metrics are NaN."""
        nan, one = torch.full((), torch.nan, device=loss_scale.device), torch.ones((), device=loss_scale.device)
        return cls(nan, nan, one, loss_scale.clone(), one, dict.fromkeys(extra, nan))


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
        origin: Origin = WHOLE_RUN,
    ) -> None:
        """Start an empty window. Collective over ``world``.

        Args:
            device: of this rank.
            seq_length: tokens per sample.
            world: all ranks; None for a single process.
            timers: of this rank; None for no timers.
            goodput: accounts the time spent in steps; None for a new run.
            timing_option: ``--timing-log-option``: ``max``, ``minmax`` or ``all``.
            origin: of the current phase of the run.
        """
        self.origin = origin
        self.device = device
        self.seq_length = seq_length
        self.world = world or Group()
        self.timers = timers or Timers(0, device)
        self.goodput = goodput or Goodput()
        self._timing_option = timing_option
        self._steps: list[Tensor] = []  # scalars of each
        self._samples: list[int] = []
        self.computed = 0  # samples of the steps that were computed
        self._last_computed = -1  # the last of these steps
        self._extra_names: tuple[str, ...] = ()
        self._barrier()
        self.world.meter.pop()  # discard waits and traffic from before the first step
        self.world.meter.pop_bytes_sent()
        self.timers.watch.pop()
        self._window_start = self._last_goodput_time = time.perf_counter()

    def add(self, step: StepMetrics, samples: int, computed: bool = True) -> None:
        """Add a step of ``samples`` samples, which was ``computed`` or not, without waiting for the device."""
        scalars = (step.loss, step.grad_norm, step.skipped, step.loss_scale, step.nonfinite, *step.extra.values())
        self._extra_names = tuple(step.extra)
        self._steps.append(torch.stack([x.detach().to(self.device, torch.float64) for x in scalars]))
        self._samples.append(samples)
        self._add_goodput()
        if computed:
            self.computed += samples
            self._last_computed = len(self._steps) - 1

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
        captured: str = "none",
        alone: bool = False,
    ) -> dict[str, Any]:
        """Return the metrics of the steps since the last call and start a new window. Waits for the device.

        Args:
            iteration: number of the last step.
            consumed_samples: samples of the whole run so far.
            rates: learning rates and weight decay of the last step.
            samples_digest: hexadecimal digest of the samples consumed so far.
            captured: what CUDA graphs replay, a value of ``--cuda-graph``: waits and phases inside a replayed graph
                cannot be measured and are left out.
            alone: report this rank only, without communication, after an error: the time since the last step, and waits
                and phases, which have those of the step that failed, are left out. Otherwise collective over ``world``.

        Returns:
            Values by the names of ``METRICS``, without those that do not apply, such as communication on one rank.
        """
        if not self._steps:
            raise ValueError("no step since the last log line: read the window only after add")
        losses, norms, skips, scales, nonfinite, *extra = torch.stack(self._steps, dim=1).tolist()
        now, steps = self._last_goodput_time if alone else self._add_goodput(), len(self._steps)
        seconds = now - self._window_start
        tokens_per_second = self.computed * self.seq_length / seconds
        skipped = [i for i, skip in enumerate(skips) if skip]
        self.goodput.productive_seconds -= seconds * len(skipped) / steps
        mine = self._rank_stats(seconds / steps, captured, alone)
        with self.world.meter.paused():
            ranks = gather_rank_stats(mine, Group() if alone else self.world, self.device)
        metrics = {
            "iteration": iteration,
            "consumed-samples": consumed_samples,
            "consumed-tokens": self.origin.tokens + (consumed_samples - self.origin.samples) * self.seq_length,
            "lm loss": _mean_of_finite(losses),
            **{name: _mean_of_finite(values) for name, values in zip(self._extra_names, extra)},
            "grad-norm": norms[self._last_computed],
            "learning-rate": float(rates.lr),
            "decoupled-learning-rate": None if rates.decoupled_lr is None else float(rates.decoupled_lr),
            "weight-decay": rates.weight_decay,
            "batch-size": self._samples[-1],
            "loss-scale": scales[-1],
            "iteration-time": seconds / steps,
            "tokens-per-second": tokens_per_second,
            "tokens-per-second-per-gpu": tokens_per_second / self.world.size,
            "skipped-iterations": [iteration - steps + 1 + i for i in skipped],
            "skipped-iterations-count": len(skipped),
            "spikes-skipped": sum(not nonfinite[i] for i in skipped),
            **compare_ranks(ranks),
            "goodput": self.goodput.value(),
            "run-seconds": self.goodput.run_seconds(),
            "starts": self.goodput.starts,
            "samples-digest": samples_digest,
            **(timer_metrics(ranks, self._timing_option) if self.timers.level else {}),
        }
        self._steps, self._samples, self._window_start = [], [], now
        self.computed, self._last_computed = 0, -1
        return {name: value for name, value in metrics.items() if value is not None}

    def _rank_stats(self, seconds_per_step: float, captured: str, alone: bool) -> RankStats:
        """Return the measurements of this rank since the last call."""
        steps = len(self._steps)
        waits = {axes: seconds / steps for axes, seconds in self.world.meter.pop().items()}
        sent = dict.fromkeys((axes for axes in waits if axes != BUBBLE), 0.0)
        for (axes, _), count in self.world.meter.pop_bytes_sent().items():
            sent[axes] = sent.get(axes, 0.0) + count / steps
        if self.world.size == 1 or captured == "step" or alone:
            waits, sent = {}, {}
        replayed = PHASES if alone else CUDA_GRAPH_PHASES[captured]
        used, capacity = peak_memory(self.device)
        return {
            "iteration-time": seconds_per_step,
            **{f"communication-{axes}": seconds for axes, seconds in waits.items()},
            **{f"sent-bytes-{axes}": count for axes, count in sent.items()},
            **{f"{name}-time": seconds for name, seconds in self.timers.read(steps).items() if name not in replayed},
            "mem-max-allocated-bytes": used,
            MEMORY_CAPACITY: capacity,
        }

    def _add_goodput(self) -> float:
        """Account the time since the last call as spent in steps, and return the current time."""
        now = time.perf_counter()
        self.goodput.productive_seconds += now - self._last_goodput_time
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


def evaluation_metrics(
    split: str,
    loss: float,
    others: Mapping[str, float] = MappingProxyType({}),
    further: Mapping[str, float] = MappingProxyType({}),
    is_cross_entropy: bool = True,
    seconds: float | None = None,
) -> dict[str, Any]:
    """Return the metrics of one evaluation.

    Args:
        split: ``valid``, ``valid:NAME`` of one of several validation sets, or ``test``.
        loss: mean loss per token in nats; NaN if all labels are masked.
        others: loss with other weights, such as their moving average, by metric suffix.
        further: metrics of the objective.
        is_cross_entropy: False without the perplexity, which only a cross-entropy has.
        seconds: that it took.
    """
    kind, validation_set = SPLIT_LABELS[split_kind(split)], validation_set_name(split)
    name = f"lm loss {kind}"
    metrics: dict[str, Any] = {"validation-set": validation_set} if validation_set else {}
    metrics[name] = loss
    if is_cross_entropy:
        try:
            metrics[f"{name} ppl"] = math.exp(loss)
        except OverflowError:
            metrics[f"{name} ppl"] = math.inf
    metrics |= {f"{name} {suffix}": of_others for suffix, of_others in others.items()}
    metrics |= {} if seconds is None else {f"{kind}-time": seconds}
    return metrics | {f"{of} {kind}": value for of, value in further.items()}


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


def peak_flops(device_name: str, params_dtype: str) -> float | None:
    """Return the dense peak of one device in FLOP/s, or None for unknown devices and dtypes of more than 16 bits.

    Products that share a name are unknown, because no MFU is better than a wrong one.
    """
    accelerator = driver_accelerator(device_name) if params_dtype in ("bf16", "fp16") else None
    return None if accelerator is None else accelerator.peak(params_dtype)


@dataclass(frozen=True)
class ThroughputModel:
    """Converts tokens per second into FLOP/s, utilisation and remaining time."""

    total_iterations: int  # of the whole run
    total_samples: int  # at the end of the phase
    seq_length: int  # tokens per sample
    world_size: int
    flops: FlopsPerToken
    peak_flops: float | None  # of one device in FLOP/s, if known
    on_gpu: bool
    tokens_of_later_phases: int = 0

    @classmethod
    def from_config(
        cls,
        config: RunConfig,
        world_size: int,
        device_name: str,
        iteration: int = 0,
        consumed_samples: int = 0,
        origin: Origin = WHOLE_RUN,
        later: tuple[int, int] = (0, 0),
    ) -> ThroughputModel:
        """Create the model of a run whose start begins after ``iteration`` steps and ``consumed_samples``.

        ``later`` are the steps and tokens of the phases after the one that begins at ``origin``.
        """
        data_parallel_size = world_size // config.parallel.model_ranks
        end = config.training, data_parallel_size, *origin.local(iteration, consumed_samples)
        return cls(
            total_iterations=origin.iteration + final_iteration(*end) + later[0],
            total_samples=origin.samples + final_consumed_samples(*end),
            tokens_of_later_phases=later[1],
            seq_length=config.training.seq_length,
            world_size=world_size,
            flops=FlopsPerToken.from_config(config),
            peak_flops=peak_flops(device_name, config.precision.params_dtype),
            on_gpu=device_name != "cpu",
        )

    def metrics(self, metrics: Metrics) -> dict[str, float | None]:
        """Return throughput, utilisation and, for the console, progress of a log line.

        ``throughput`` is TFLOP/s per rank as Megatron-LM counts it. ``mfu`` counts all attention scores
        (6N + 12Lhs), ``mfu-causal`` only the unmasked ones, and ``hfu`` adds recomputation to ``mfu``. Utilisations are
        0 to 1, or None for an unknown peak.
        """
        tokens_per_second = metrics["tokens-per-second"] / (self.world_size * metrics.get("elastic-replicas", 1))
        counts = {"mfu": self.flops.full, "mfu-causal": self.flops.causal, "hfu": self.flops.hardware}
        peak = self.peak_flops
        samples_left = max(0, self.total_samples - metrics["consumed-samples"])
        return {
            "throughput": tokens_per_second * self.flops.megatron / 1e12,
            "tokens-per-second-per-gpu": tokens_per_second,
            **{name: None if peak is None else tokens_per_second * x / peak for name, x in counts.items()},
            TOTAL_ITERATIONS: self.total_iterations,
            SECONDS_LEFT: (samples_left * self.seq_length + self.tokens_of_later_phases) / metrics["tokens-per-second"],
            ON_GPU: self.on_gpu,
        }
