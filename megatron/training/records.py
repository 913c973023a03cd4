"""What a run reports, and the stable names under which it is kept."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron.data.splits import WORDS, kind_of, name_of


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
        memory_bytes: peak allocated on this rank's GPU; on a CPU the peak resident size of this rank's process.
        memory_total_bytes: what there is of it.
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

    def place(self) -> dict[str, int]:
        """How far the run is."""
        return {
            "iteration": self.iteration,
            "consumed-samples": self.consumed_samples,
            "consumed-tokens": self.consumed_tokens,
        }

    def values(self) -> dict[str, object]:
        """The record under Megatron-LM's metric names, and names like them for what it does not have."""
        return {
            **self.place(),
            "lm loss": self.loss,
            "grad-norm": self.grad_norm,
            "learning-rate": self.learning_rate,
            "weight-decay": self.weight_decay,
            "batch-size": self.batch_size,
            "loss-scale": self.loss_scale,
            "iteration-time": self.seconds_per_step,
            "tokens-per-second": self.tokens_per_second,
            "skipped-iterations": list(self.skipped),
            "mem-max-allocated-bytes": self.memory_bytes,
        }


@dataclass(frozen=True)
class EvaluationRecord:
    """One evaluation: the mean loss per token on held-out data.

    Attributes:
        iteration: steps taken before it.
        consumed_samples: samples of these.
        consumed_tokens: tokens of these.
        loss: in nats; NaN where no label counts.
        split: the data: ``valid``, ``valid:NAME`` of one of several validation sets, or ``test``.
    """

    iteration: int
    consumed_samples: int
    consumed_tokens: int
    loss: float
    split: str = "valid"

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
        }
