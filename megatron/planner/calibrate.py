"""Fit the efficiency of a cluster to the times that runs have measured.

A run gives a few numbers, and an :class:`~megatron.planner.hardware.Efficiency` has as many: they are fitted together
with what is known before, as the maximum a posteriori (Bishop, Pattern Recognition and Machine Learning, section 3.3).
Measured times have errors of some percent. An efficiency is its default times two factors, which are near 1 unless the
times say otherwise: one of its own, and one that all that a device computes have in common. So a single run says how
fast the device is as a whole, further ones what makes it so, and efficiencies on which no run depends keep their
defaults. Does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.config.run import RunConfig
from megatron.config.text import format_bytes
from megatron.planner.communication import AXES
from megatron.planner.hardware import Cluster
from megatron.planner.memory import max_peak_bytes
from megatron.planner.stage_time import COMPUTE, RECOMPUTE
from megatron.planner.step_time import OFFLOAD, OPTIMIZER, StepTime, step_time

COMPUTING = (COMPUTE, RECOMPUTE, OFFLOAD, OPTIMIZER)
"""Parts of a step in which a rank waits for no other."""

STEP_ERROR, PART_ERROR, WAIT_ERROR = 0.01, 0.05, 0.3
"""Standard deviations of the logarithm of measured times: of a step, as its median over many; of the part in which a
rank computes; and of waits along an axis, to which late ranks add."""

LEAST_WAIT = 0.02
"""Share of a step below which waits along an axis are not fitted."""

OWN, COMMON = 0.3, 2.0
"""Standard deviations of the logarithms of the factors: of one efficiency, and of all of :data:`OF_DEVICE`. Published
runs on one kind of GPU differ by a third; other hardware, such as a laptop's, by any factor."""

OF_DEVICE, OF_LINKS = ("matmul", "attention", "memory", "launch"), ("link", "network")
"""Efficiencies of what a device computes, and of links, which have no factor in common."""

TIMES = ("launch",)
"""Efficiencies that are seconds, and not shares of at most 1: a slower device has more of them."""

STEP, MOST_STEPS, CONVERGED = 1e-3, 50, 1e-6
"""Difference for derivatives, most iterations, and the change of the parameters that ends them."""

CALIBRATED = "-calibrated"
"""End of the name of an accelerator whose efficiency was fitted."""

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class MeasuredRun:
    """Measurements of a run."""

    config: RunConfig
    world_size: int
    # Seconds of a step.
    seconds: float
    # Seconds of a step in which a rank waits for others, by ``bubble`` and :data:`AXES`; empty if not measured.
    waits: Mapping[str, float] = field(default_factory=dict)
    # Bytes allocated on the fullest rank at the peak; None if not measured.
    memory: int | None = None
    name: str = ""
    # As its driver calls it, or cpu.
    device: str = ""


@dataclass(frozen=True)
class Calibration:
    """The efficiency that runs have shown."""

    # As it was assumed, and with what was fitted.
    before: Cluster
    cluster: Cluster
    runs: tuple[MeasuredRun, ...]
    # By name of the efficiency: standard deviation of its logarithm over that before; 1 if no run depends on it.
    uncertainty: Mapping[str, float]

    def report(self) -> list[str]:
        """Return lines on what changed, and on measured against predicted numbers before and after."""
        old, new = asdict(self.before.efficiency), asdict(self.cluster.efficiency)
        lines = []
        for name, value in new.items():
            fitted = self.uncertainty[name] < 0.9
            how = "fitted" if fitted else "kept: these runs hardly depend on it"
            lines.append(f"{name}: {old[name]:.3g} -> {value:.3g} ({how})")
        for run in self.runs:
            times = [step_time(run.config, run.world_size, each).seconds for each in (self.before, self.cluster)]
            errors = ", ".join(f"{time / run.seconds - 1:+.1%}" for time in times)
            line = f"{run.name}: {run.seconds:.4g} s a step, predicted {times[0]:.4g} -> {times[1]:.4g} ({errors})"
            if run.memory is not None:
                size = sum(max_peak_bytes(run.config, run.world_size).values())
                line += f"; {format_bytes(run.memory)} at the peak, predicted {format_bytes(size)}"
                line += f" ({size / run.memory - 1:+.1%})"
            lines.append(line)
        return lines

    def to_yaml(self) -> str:
        """Return the fitted cluster as a file for ``--gpu`` and ``--plan-gpu``."""
        import yaml  # slow to import, and seldom needed

        name = f"{self.cluster.accelerator.name.removesuffix(CALIBRATED)}{CALIBRATED}"
        source = f"{self.cluster.accelerator.source}; calibrated by {', '.join(run.name for run in self.runs)}"
        row = accelerator_row(self.cluster) | {"source": source}
        return str(yaml.safe_dump({name: row}, sort_keys=False))


def accelerator_row(cluster: Cluster) -> dict[str, Any]:
    """Return the accelerators of a cluster as a row of the table: what ``read_accelerator`` reads."""
    accelerator = cluster.accelerator
    links = {"link": cluster.link, "network": cluster.network, "host": accelerator.host}
    return {
        "flops": {format: peak / 1e12 for format, peak in accelerator.flops.items()},
        "memory": accelerator.memory / 2**30,
        "bandwidth": accelerator.bandwidth / 1e9,
        "node_size": cluster.node_size,
        **{name: {"GB/s": to.bandwidth / 1e9, "latency_us": to.latency * 1e6} for name, to in links.items()},
        "watts": accelerator.watts,
        "efficiency": asdict(cluster.efficiency),
        "measured": [
            {"operation": operation, "ranks": group.size, "per_node": group.per_node}
            | {"bytes": [size for size, _ in curve], "us": [seconds * 1e6 for _, seconds in curve]}
            for (operation, group), curve in cluster.measured.items()
        ],
        "source": accelerator.source,
    }


def calibrate(cluster: Cluster, runs: Sequence[MeasuredRun]) -> Calibration:
    """Fit the efficiency of a cluster to the steps of runs on it.

    Where runs have allocated more than is predicted, the memory of an accelerator is reduced by the same factor.
    """
    names = (*OF_DEVICE, *OF_LINKS)
    errors_before = np.array([COMMON, *(OWN if name in OF_DEVICE else COMMON for name in names)])

    def cluster_of(values: Vector) -> Cluster:
        common, *own = values.tolist()
        fitted = {}
        for name, factor in zip(names, own):
            value = getattr(cluster.efficiency, name)
            faster = math.exp(factor + common * (name in OF_DEVICE))
            fitted[name] = value / faster if name in TIMES else min(1.0, value * faster)
        return replace(cluster, efficiency=replace(cluster.efficiency, **fitted))

    def residuals(values: Vector) -> Vector:
        fitted = cluster_of(values)
        errors = [error for run in runs for error in _errors(run, step_time(run.config, run.world_size, fitted))]
        return np.array([*errors, *(values / errors_before)])

    values = np.zeros(len(errors_before))
    error = residuals(values)
    jacobian = _derivatives(residuals, values, error)
    for _ in range(MOST_STEPS):
        change, scale = np.linalg.lstsq(jacobian, -error, rcond=None)[0], 1.0
        while scale > CONVERGED:  # a step that is too long makes the errors larger
            tried = residuals(values + scale * change)
            if tried @ tried <= error @ error:
                break
            scale /= 2
        else:
            break
        values, error = values + scale * change, tried
        jacobian = _derivatives(residuals, values, error)
        if np.abs(scale * change).max() < CONVERGED:
            break
    covariance = np.linalg.inv(jacobian.T @ jacobian)
    uncertainty = {}
    for place, name in enumerate(names, 1):
        members = [0, place] if name in OF_DEVICE else [place]  # of the sum of its factors
        before = math.sqrt(float((errors_before[members] ** 2).sum()))
        uncertainty[name] = math.sqrt(float(covariance[np.ix_(members, members)].sum())) / before
    fitted = cluster_of(values)
    beyond = [run.memory / sum(max_peak_bytes(run.config, run.world_size).values()) for run in runs if run.memory]
    memory = cluster.accelerator.memory / max([1.0, *beyond])
    fitted = replace(fitted, accelerator=replace(cluster.accelerator, memory=memory))
    return Calibration(cluster, fitted, tuple(runs), uncertainty)


def _errors(run: MeasuredRun, predicted: StepTime) -> list[float]:
    """Return the logarithms of predicted over measured times, in standard deviations."""
    errors = [math.log(predicted.seconds / run.seconds) / STEP_ERROR]
    own = run.seconds - sum(run.waits.values())
    if not run.waits or own <= 0:  # waits that overlap say nothing of what a rank computes
        return errors
    computing = sum(predicted.parts[part] for part in COMPUTING)
    errors.append(math.log(computing / own) / PART_ERROR)
    for axis in AXES:
        measured, exposed = run.waits.get(axis, 0.0), predicted.parts[axis]
        if measured > LEAST_WAIT * run.seconds and exposed > 0:
            errors.append(math.log(exposed / measured) / WAIT_ERROR)
    return errors


def _derivatives(function: Callable[[Vector], Vector], values: Vector, at: Vector) -> Vector:
    """Return the derivatives of a function by each of its parameters, whose value is ``at``; ``[outputs, inputs]``."""
    columns = []
    for place in range(len(values)):
        moved = values.copy()
        moved[place] += STEP
        columns.append((function(moved) - at) / STEP)
    return np.stack(columns, axis=1)
