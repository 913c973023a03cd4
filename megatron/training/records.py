"""Records of training and evaluation, and the metric names they are logged under."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron.data.splits import WORDS, kind_of, name_of


@dataclass(frozen=True)
class Timing:
    """Time of one timer over all ranks, in seconds per step."""

    longest: float
    shortest: float | None = None  # set for --timing-log-option minmax
    by_rank: tuple[float, ...] | None = None  # set for --timing-log-option all

    def values(self, name: str) -> dict[str, object]:
        """Return the metrics of the timer ``name``."""
        values: dict[str, object] = {f"{name}-time": self.longest}
        if self.shortest is not None:
            values[f"{name}-time-min"] = self.shortest
        if self.by_rank is not None:
            values[f"{name}-time-by-rank"] = list(self.by_rank)
        return values


@dataclass(frozen=True)
class TrainRecord:
    """Metrics of the steps since the previous log line."""

    iteration: int  # of the last step, counted from 1
    consumed_samples: int  # of the whole run so far
    consumed_tokens: int  # of the whole run so far
    loss: float  # mean over the steps with a finite loss, skipped updates included; NaN without any
    grad_norm: float  # of the last step, before clipping
    learning_rate: float  # of the last step
    weight_decay: float  # of the last step
    batch_size: int  # samples in the last step
    loss_scale: float  # of the last step
    seconds_per_step: float  # mean wall-clock time
    tokens_per_second: float  # of all ranks together
    skipped: tuple[int, ...] = ()  # iterations whose update was skipped
    memory_bytes: int | None = None  # peak on the fullest rank: allocated GPU memory; on CPUs the resident set size
    memory_total_bytes: int | None = None  # capacity of that rank's device
    memory_rank: int | None = None  # the fullest rank; None on one rank
    world_size: int = 1
    data_wait: float | None = None  # seconds per step spent waiting for data, on the rank that waited longest
    communication: Mapping[str, float] = field(default_factory=dict)  # waits for other ranks, s/step, by axes
    communication_share: float | None = None  # all communication as a share of the step, 0 to 1
    sent: Mapping[str, float] = field(default_factory=dict)  # bytes per step that a rank sends, by axes
    bubble: float | None = None  # share of the step spent waiting for other pipeline stages; not in communication
    slowest_rank: int | None = None  # rank with the largest own time: the step less its waits for other ranks
    slowest_excess: float | None = None  # how much longer that is than the median rank's, as a share
    timings: Mapping[str, Timing] = field(default_factory=dict)  # by timer name
    goodput: float | None = None  # share of the run's lifetime spent in steps that were not lost
    run_seconds: float | None = None  # since the run was first started
    starts: int | None = None  # of the run so far
    spikes: tuple[int, ...] = ()  # those skipped whose gradient was finite, but an outlier
    samples_digest: str | None = None  # hexadecimal digest of all samples consumed so far
    learning_rate_decoupled: float | None = None  # of embedding and output layer, if they have their own
    router_losses: Mapping[str, float] = field(default_factory=dict)  # means without coefficients, by metric name

    def place(self) -> dict[str, int]:
        """Return the progress of the run."""
        return {
            "iteration": self.iteration,
            "consumed-samples": self.consumed_samples,
            "consumed-tokens": self.consumed_tokens,
        }

    def values(self) -> dict[str, object]:
        """Return all metrics by name. Names are Megatron-LM's where it has the metric.

        Metrics that do not apply, such as communication on one rank, are left out.
        """
        return {
            **self.place(),
            "lm loss": self.loss,
            **self.router_losses,
            "grad-norm": self.grad_norm,
            "learning-rate": self.learning_rate,
            "weight-decay": self.weight_decay,
            "batch-size": self.batch_size,
            "loss-scale": self.loss_scale,
            "iteration-time": self.seconds_per_step,
            "tokens-per-second": self.tokens_per_second,
            "tokens-per-second-per-gpu": self.tokens_per_second / self.world_size,
            "skipped-iterations": list(self.skipped),
            "skipped-iterations-count": len(self.skipped),
            "spikes-skipped": len(self.spikes),
            "mem-max-allocated-bytes": self.memory_bytes,
            **self._optional_values(),
        }

    def _optional_values(self) -> dict[str, object]:
        values: dict[str, object] = {
            "decoupled-learning-rate": self.learning_rate_decoupled,
            "mem-max-rank": self.memory_rank,
            "data-wait": self.data_wait,
            **{f"communication-{axes}": seconds for axes, seconds in self.communication.items()},
            "communication-share": self.communication_share,
            **{f"sent-bytes-{axes}": count for axes, count in self.sent.items()},
            "bubble": self.bubble,
            "slowest-rank": self.slowest_rank,
            "slowest-rank-excess": self.slowest_excess,
            "goodput": self.goodput,
            "run-seconds": self.run_seconds,
            "starts": self.starts,
            "samples-digest": self.samples_digest,
        }
        for name, timing in self.timings.items():
            values |= timing.values(name)
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class EvaluationRecord:
    """Result of one evaluation: the mean loss per token on held-out data."""

    iteration: int  # steps taken before the evaluation
    consumed_samples: int  # in these steps
    consumed_tokens: int  # in these steps
    loss: float  # in nats; NaN if all labels are masked
    split: str = "valid"  # or valid:NAME of one of several validation sets, or test
    average: float | None = None  # loss with the moving average of the weights, if one is kept

    @property
    def kind(self) -> str:
        """Either ``validation`` or ``test``."""
        return WORDS[kind_of(self.split)]

    @property
    def name(self) -> str:
        """Name of the validation set; empty if there is only one."""
        return name_of(self.split)

    @property
    def title(self) -> str:
        """Kind and name, for display."""
        return f"{self.kind} {self.name}".strip()

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite on overflow."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf

    def values(self) -> dict[str, object]:
        """Return all metrics by Megatron-LM's names, with ``validation-set`` if there are several sets."""
        return {
            "iteration": self.iteration,
            "consumed-samples": self.consumed_samples,
            "consumed-tokens": self.consumed_tokens,
            **({"validation-set": self.name} if self.name else {}),
            f"lm loss {self.kind}": self.loss,
            f"lm loss {self.kind} ppl": self.perplexity,
            **({} if self.average is None else {f"lm loss {self.kind} ema": self.average}),
        }
