"""Find spikes of the loss and of the gradient norm in a run's log, and the command that goes on without their samples.

A log line is compared with up to ``window`` lines before it that are not part of a spike. With the median m of a
metric over these lines, and their median absolute deviation MAD, its robust z-score is ::

    z = (x - m) / max(1.4826 MAD, 0.001 |m|)

where 1.4826 makes the deviation that of a normal distribution (Rousseeuw and Croux 1993). A line is an outlier if a z
exceeds ``deviations``, or if the loss is not finite. Outliers in a row are one spike. What it leaves out are the
samples from its first line to the one with the largest z: after that, the loss recovers on samples that are good.
"""

from __future__ import annotations

import math
import re
import shlex
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from megatron.checkpoint.folder import CheckpointFolder
from megatron.checkpoint.location import parse_location
from megatron.config.files import read_small
from megatron.config.run import RunConfig
from megatron.training.loggers.run_folder import COMMAND_FILE, HistoryPoint

NORMAL = 1.4826
LEAST_DEVIATION = 0.001
LEAST_LINES = 8
"""Lines before the first one that is compared."""

SPIKE_METRICS = ("lm loss", "grad-norm")


@dataclass(frozen=True)
class Spike:
    """A run of outlying log lines."""

    first: int  # step
    peak: int  # last step of the line with the largest z-score
    last: int  # step of the last outlying line
    scores: Mapping[str, float]  # largest z-score by metric; infinite for a loss that is not finite
    values: Mapping[str, float]  # at that line

    def __str__(self) -> str:
        found = ", ".join(f"{name} {self.values[name]:.4g} (z {z:.1f})" for name, z in self.scores.items())
        steps = f"step {self.first}" if self.first == self.peak else f"steps {self.first} to {self.peak}"
        return f"spike at {steps}: {found}" + (f"; it lasts until step {self.last}" if self.last > self.peak else "")


def find_spikes(lines: Sequence[HistoryPoint], deviations: float, window: int) -> list[Spike]:
    """Return the spikes in log lines, in order."""
    before: deque[tuple[float, ...]] = deque(maxlen=window)
    spikes: list[Spike] = []
    open_spike: Spike | None = None
    previous = 0
    for line in lines:
        values = tuple(math.nan if (x := line.line.get(name)) is None else float(x) for name in SPIKE_METRICS)
        scores = {
            name: _score(value, [row[k] for row in before])
            for k, (name, value) in enumerate(zip(SPIKE_METRICS, values))
        }
        if len(before) >= LEAST_LINES and max(scores.values()) > deviations:
            if open_spike is None or max(scores.values()) > max(open_spike.scores.values()):
                first = previous + 1 if open_spike is None else open_spike.first
                open_spike = Spike(first, line.iteration, line.iteration, scores, dict(zip(SPIKE_METRICS, values)))
            else:
                open_spike = Spike(**{**vars(open_spike), "last": line.iteration})
        else:
            spikes += [] if open_spike is None else [open_spike]
            open_spike = None
            if all(map(math.isfinite, values)):
                before.append(values)
        previous = line.iteration
    return spikes + ([] if open_spike is None else [open_spike])


def tail_probability(hits: int, trials: int, share: float) -> float:
    """Return the probability of at least ``hits`` successes in ``trials`` independent trials, each with ``share``."""
    if hits <= 0 or share >= 1:
        return 1.0
    hit, miss, ways = math.log(share), math.log1p(-share), math.lgamma(trials + 1)
    return math.fsum(
        math.exp(ways - math.lgamma(k + 1) - math.lgamma(trials - k + 1) + k * hit + (trials - k) * miss)
        for k in range(hits, trials + 1)
    )


def _score(value: float, before: Sequence[float]) -> float:
    """Return the robust z-score of a value; infinite if it is not finite."""
    if not math.isfinite(value):
        return math.inf
    if not before:
        return 0.0
    middle = median(before)
    deviation = NORMAL * median(abs(x - middle) for x in before)
    return (value - middle) / max(deviation, LEAST_DEVIATION * abs(middle), 1e-12)


def resume_command(folder: Path, config: RunConfig, begin: int, step: int, words: Sequence[str]) -> tuple[str, int]:
    """Return the command that goes on before a step with ``words`` in ``--skip-samples``, and the steps taken there.

    It starts from the newest checkpoint before the step. If there are newer ones, which would take precedence, it saves
    and logs in other folders: the old ones stay as they are. ``begin`` are the steps taken before the phase of the
    newest start, whose ``config`` and command are used.

    Raises:
        OSError: if the run has not left its command.
    """
    script = read_small(folder / COMMAND_FILE).decode().strip().splitlines()[-1]
    save = config.checkpoint.save
    found = [] if save is None else CheckpointFolder(parse_location(save)).candidates()
    valid = [checkpoint.iteration for checkpoint in found if checkpoint.manifest is not None]
    taken = max((iteration for iteration in valid if iteration < step), default=0)
    flags = []
    if any(iteration > taken for iteration in valid):
        number = 1
        while Path(f"{folder}-skip{number}").exists():
            number += 1
        if taken:
            flags += ["--load", str(save), "--ckpt-step", str(taken)]
            if taken > begin and begins_phase(config):  # which has begun
                flags += ["--resume-mode", "exact"]
        flags += ["--save", f"{save}-skip{number}", "--run-dir", f"{folder}-skip{number}"]
    return f"{script} {shlex.join([*flags, '--skip-samples', *words])}", taken


def begins_phase(config: RunConfig) -> bool:
    """Return True if the command of a run is that of one phase, begun by hand."""
    return config.checkpoint.resume_mode == "new-phase" and config.training.phases is None


def exclusion_file(ranges: Sequence[tuple[str, str]]) -> str:
    """Return the content of a file for ``--skip-samples``: ranges of places, each with a comment."""
    lines = [f"{places}  # {re.sub(r'[^ -~]', '?', why)}" for places, why in ranges]
    return "\n".join(["# places of samples to leave out: --skip-samples @THIS_FILE", *lines, ""])
