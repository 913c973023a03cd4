"""What a run costs: days, accelerator-hours, money, energy, and the interval of its checkpoints.

Does not import torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron.planner.flops import FlopsPerToken
from megatron.planner.hardware import Cluster
from megatron.planner.memory import checkpoint_bytes
from megatron.planner.search import Plan

HOURS_BETWEEN_FAILURES = 54 * 24 * 16384 / 419
"""Hours of one accelerator between failures: 419 unexpected interruptions of 16,384 H100 in 54 days (Llama 3, arXiv
2407.21783, section 3.3.4)."""

STORAGE_BANDWIDTH = 2e12 / (16384 / 8)
"""Bytes per second that a node writes to shared storage: sustained 2 TB/s for 16,384 H100 (arXiv 2407.21783, section
3.3.1)."""


@dataclass(frozen=True)
class Terms:
    """What is stated of a run and of its cluster, besides hardware and layout."""

    # Of the whole run.
    tokens: float
    # Of an accelerator-hour, in any currency; None if unknown.
    price: float | None
    # Drawn by an accelerator, with its share of whatever else is to be counted.
    watts: float
    # Hours of one accelerator between failures.
    mtbf: float = HOURS_BETWEEN_FAILURES
    # Bytes per second that a node writes to the storage of checkpoints.
    storage: float = STORAGE_BANDWIDTH


@dataclass(frozen=True)
class RunCosts:
    """The costs of a run with a plan."""

    steps: int
    tokens_per_second: float
    # Fractions of the bf16 peak: 6N + 12Lhs FLOPs per token (PaLM, arXiv 2204.02311), only unmasked scores, and with
    # recomputation; as in the metrics of a run.
    mfu: float
    mfu_causal: float
    hfu: float
    # FLOP/s of an accelerator as Megatron-LM counts them.
    throughput: float
    # Of training alone, without saves and failures.
    days: float
    gpu_hours: float
    price: float | None
    # kWh.
    energy: float
    checkpoint: int
    # Seconds of training that a save takes, between saves, and between failures of any accelerator.
    save: float
    interval: float
    mtbf: float

    @classmethod
    def of(cls, plan: Plan, world_size: int, cluster: Cluster, terms: Terms) -> RunCosts:
        """Compute the costs of a run."""
        time, flops = plan.time, FlopsPerToken.from_config(plan.config)
        steps = math.ceil(terms.tokens / time.tokens)
        rate = time.tokens / time.seconds
        seconds = steps * time.seconds
        hours = seconds / 3600 * world_size
        size, nodes = checkpoint_bytes(plan.config, world_size), math.ceil(world_size / cluster.node_size)
        save, mtbf = size / (nodes * terms.storage), terms.mtbf * 3600 / world_size
        share = rate / world_size / cluster.accelerator.peak("bf16")
        return cls(
            steps=steps,
            tokens_per_second=rate,
            mfu=flops.full * share,
            mfu_causal=flops.causal * share,
            hfu=flops.hardware * share,
            throughput=flops.megatron * rate / world_size,
            days=seconds / 86400,
            gpu_hours=hours,
            price=None if terms.price is None else terms.price * hours,
            energy=terms.watts * hours / 1000,
            checkpoint=size,
            save=save,
            interval=best_save_interval(save, mtbf),
            mtbf=mtbf,
        )

    @property
    def days_with_failures(self) -> float:
        """Days with saves, and with the work that is lost at failures: half an interval and a save each."""
        lost = self.save / self.interval + (self.interval / 2 + self.save) / self.mtbf
        return self.days * (1 + lost)


def best_save_interval(save: float, mtbf: float) -> float:
    """Return the seconds between saves that lose the least time.

    The higher-order estimate of Daly (2006, doi 10.1016/j.future.2004.11.016), whose first term is that of Young
    (1974), ``sqrt(2 * save * mtbf)``.

    Args:
        save: seconds that training waits for a save.
        mtbf: seconds between failures.
    """
    if save >= 2 * mtbf:
        return mtbf
    part = save / (2 * mtbf)
    return math.sqrt(2 * save * mtbf) * (1 + math.sqrt(part) / 3 + part / 9) - save
