"""Costs of a run: days, accelerator-hours, money, energy, and the interval of its checkpoints.

Does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from megatron.planner.flops import FlopsPerToken
from megatron.planner.hardware import Cluster
from megatron.planner.memory import checkpoint_bytes
from megatron.planner.search import Plan
from megatron.planner.step_time import StepTime

HOURS_BETWEEN_FAILURES = 54 * 24 * 16384 / 419
"""Hours of one accelerator between failures: 419 unexpected interruptions of 16,384 H100 in 54 days (Llama 3, arXiv
2407.21783, section 3.3.4)."""

STORAGE_BANDWIDTH = 2e12 / (16384 / 8)
"""Bytes per second that a node writes to shared storage: sustained 2 TB/s for 16,384 H100 (arXiv 2407.21783, section
3.3.1)."""


@dataclass(frozen=True)
class Terms:
    """Assumptions about a run and its cluster, besides hardware and layout."""

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
    # FLOPs per token, as ``mfu`` counts them.
    flops: float
    # Bytes.
    checkpoint: int
    # Seconds until a save is written, that training waits for it, between saves, and between failures.
    write: float
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
        write, mtbf = size / (nodes * terms.storage), terms.mtbf * 3600 / world_size
        save = write
        if plan.config.checkpoint.async_save:  # training waits for the copy to the host
            save = size / world_size / cluster.accelerator.host.bandwidth
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
            flops=flops.full,
            checkpoint=size,
            write=write,
            save=save,
            interval=max(write, best_save_interval(save, mtbf)),
            mtbf=mtbf,
        )

    @property
    def days_with_failures(self) -> float:
        """Days with saves, and with what a failure costs: half an interval, and to write or read a checkpoint."""
        lost = self.save / self.interval + (self.interval / 2 + self.write) / self.mtbf
        return self.days * (1 + lost)

    def explain(self, time: StepTime, world_size: int, cluster: Cluster, terms: Terms) -> Iterator[str]:
        """Yield the formulas of the costs with their numbers."""
        nodes = math.ceil(world_size / cluster.node_size)
        peak, rate, lost = cluster.accelerator.peak("bf16"), self.tokens_per_second, self.days_with_failures / self.days
        yield f"tokens/s = tokens of a step / seconds = {time.tokens:,} / {time.seconds:.4f} = {rate:,.0f}"
        yield (
            f"MFU = (6N + 12Lhs) x tokens/s / (GPUs x peak) = {self.flops:.4g} x {rate:,.0f} / "
            f"({world_size:,} x {peak:.4g}) = {self.mfu:.3f}"
        )
        yield f"steps = tokens / tokens of a step = {terms.tokens:,.0f} / {time.tokens:,} = {self.steps:,}"
        yield f"days = steps x seconds / 86,400 = {self.steps:,} x {time.seconds:.4f} / 86,400 = {self.days:.2f}"
        yield f"GPU-hours = 24 x days x GPUs = 24 x {self.days:.2f} x {world_size:,} = {self.gpu_hours:,.0f}"
        yield f"energy = watts x GPU-hours = {terms.watts:,.0f} x {self.gpu_hours:,.0f} = {self.energy:,.0f} kWh"
        yield (
            f"MTBF = {terms.mtbf:,.0f} hours of a GPU x 3,600 / GPUs = {terms.mtbf * 3600:,.0f} / {world_size:,} = "
            f"{self.mtbf:,.0f} s"
        )
        yield (
            f"write = bytes / (nodes x storage) = {self.checkpoint:,} / ({nodes:,} x {terms.storage:.4g}) = "
            f"{self.write:.1f} s; a save takes {self.save:.1f} s of training"
        )
        yield (
            f"interval = sqrt(2 x save x MTBF) (1 + sqrt(save / 2 MTBF) / 3 + save / 18 MTBF) - save = "
            f"{self.interval:,.0f} s, of which sqrt(2 x {self.save:.1f} x {self.mtbf:,.0f}) = "
            f"{math.sqrt(2 * self.save * self.mtbf):,.0f} s is Young's"
        )
        yield f"time with failures / time = 1 + save / interval + (interval / 2 + write) / MTBF = {lost:.4f}"


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
