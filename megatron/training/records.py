"""What a run reports, and the stable names under which it is kept."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron.data.splits import WORDS, kind_of, name_of


@dataclass(frozen=True)
class Timing:
    """A timer over all ranks, in seconds per step.

    Attributes:
        longest: of any rank.
        shortest: of any rank; None where that is not told.
        by_rank: of each rank; None where that is not told.
    """

    longest: float
    shortest: float | None = None
    by_rank: tuple[float, ...] | None = None

    def values(self, name: str) -> dict[str, object]:
        """Under the metric names of the timer ``name``."""
        low = {} if self.shortest is None else {f"{name}-time-min": self.shortest}
        each = {} if self.by_rank is None else {f"{name}-time-by-rank": list(self.by_rank)}
        return {f"{name}-time": self.longest, **low, **each}


@dataclass(frozen=True)
class TrainRecord:
    """The steps since the log line before.

    Attributes:
        iteration: number of the last step, from 1.
        consumed_samples: samples of all steps so far.
        consumed_tokens: tokens of all steps so far.
        loss: mean over the steps with a finite loss, skipped updates included; NaN if there is none.
        grad_norm: of the last step, before clipping.
        learning_rate: of the last step.
        weight_decay: of the last step.
        batch_size: samples of the last step.
        loss_scale: of the last step.
        seconds_per_step: mean wall-clock time.
        tokens_per_second: of all ranks together.
        skipped: iterations whose update was skipped.
        memory_bytes: peak allocated on the GPU of the fullest rank; on CPUs the peak resident size of its process.
        memory_total_bytes: what there is of it.
        memory_rank: the fullest rank; None where ranks were not compared.
        world_size: ranks.
        data_wait: seconds per step in which the rank that waited longest waited for its data.
        communication: seconds per step in which other ranks kept a rank waiting, by axes of the grid: the ranks' mean.
        communication_share: all of these, as a share of the step.
        sent: bytes per step that a rank sends, by axes of the grid: the ranks' mean.
        bubble: share of the step in which a rank waited for others of its pipeline, the ranks' mean; not in the
            two before. None without a pipeline.
        slowest_rank: with the longest own time, which is the step less what it waited for others.
        slowest_excess: by how much that is longer than the median rank's, as a share.
        timings: timers by name, seconds per step.
        goodput: share of the run's life that went into steps it still has.
        run_seconds: since the run's first start.
        starts: of the run so far.
        spikes: iterations among those skipped whose gradient was finite, but out of line.
        router_losses: of the routers of experts, without their coefficients, by their metric's name: mean as the loss.
        learning_rate_decoupled: of the embeddings and the output layer in the last step, where they have their own.
        samples_digest: of all samples consumed so far, as hexadecimal digits.
    """

    iteration: int
    consumed_samples: int
    consumed_tokens: int
    loss: float
    grad_norm: float
    learning_rate: float
    weight_decay: float
    batch_size: int
    loss_scale: float
    seconds_per_step: float
    tokens_per_second: float
    skipped: tuple[int, ...] = ()
    memory_bytes: int | None = None
    memory_total_bytes: int | None = None
    memory_rank: int | None = None
    world_size: int = 1
    data_wait: float | None = None
    communication: Mapping[str, float] = field(default_factory=dict)
    communication_share: float | None = None
    sent: Mapping[str, float] = field(default_factory=dict)
    bubble: float | None = None
    slowest_rank: int | None = None
    slowest_excess: float | None = None
    timings: Mapping[str, Timing] = field(default_factory=dict)
    goodput: float | None = None
    run_seconds: float | None = None
    starts: int | None = None
    spikes: tuple[int, ...] = ()
    samples_digest: str | None = None
    learning_rate_decoupled: float | None = None
    router_losses: Mapping[str, float] = field(default_factory=dict)

    def place(self) -> dict[str, int]:
        """How far the run is."""
        return {
            "iteration": self.iteration,
            "consumed-samples": self.consumed_samples,
            "consumed-tokens": self.consumed_tokens,
        }

    def values(self) -> dict[str, object]:
        """The record under Megatron-LM's metric names, and names like them for what it does not have.

        What does not apply, such as communication in a run of one rank, is left out.
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
            **self._where_it_applies(),
        }

    def _where_it_applies(self) -> dict[str, object]:
        known: dict[str, object] = {
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
            known |= timing.values(name)
        return {name: value for name, value in known.items() if value is not None}


@dataclass(frozen=True)
class EvaluationRecord:
    """One evaluation: the mean loss per token on held-out data.

    Attributes:
        iteration: steps taken before it.
        consumed_samples: samples of these.
        consumed_tokens: tokens of these.
        loss: in nats; NaN where no label counts.
        split: the data: ``valid``, ``valid:NAME`` of one of several validation sets, or ``test``.
        average: the loss with the moving average of the weights; None where none is kept.
    """

    iteration: int
    consumed_samples: int
    consumed_tokens: int
    loss: float
    split: str = "valid"
    average: float | None = None

    @property
    def kind(self) -> str:
        """``validation`` or ``test``."""
        return WORDS[kind_of(self.split)]

    @property
    def name(self) -> str:
        """Of the validation set; empty where there is one only."""
        return name_of(self.split)

    @property
    def title(self) -> str:
        """The kind and the name."""
        return f"{self.kind} {self.name}".strip()

    @property
    def perplexity(self) -> float:
        """exp(loss), infinite where that is no longer a float."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf

    def values(self) -> dict[str, object]:
        """The record under Megatron-LM's metric names, with ``validation-set`` where there are several."""
        return {
            "iteration": self.iteration,
            "consumed-samples": self.consumed_samples,
            "consumed-tokens": self.consumed_tokens,
            **({"validation-set": self.name} if self.name else {}),
            f"lm loss {self.kind}": self.loss,
            f"lm loss {self.kind} ppl": self.perplexity,
            **({} if self.average is None else {f"lm loss {self.kind} ema": self.average}),
        }
