"""Read what a run has measured from its run folder, for the planner's calibration. Does not import torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.arguments.sources import from_dict
from megatron.config.batch import full_global_batch_size
from megatron.config.errors import Problem, UserError
from megatron.config.files import parse_yaml, read_small
from megatron.planner.calibrate import MeasuredRun
from megatron.training.loggers.run_folder import CONFIG_FILE, ENVIRONMENT_FILE, METRICS_FILE, read_json_lines

WAIT = "communication-"
"""Beginning of the names of metrics with the seconds of a step that a rank waits for others."""


def read_measured_run(folder: Path) -> MeasuredRun:
    """Return what the last start in a run folder has measured.

    The first log line of a start, which includes compilation, is left out if there are others, and so are steps of
    smaller batches. Of the rest, the line with the median step counts.

    Raises:
        UserError: if the folder is no run folder, or has no log line of a full batch.
    """
    try:
        config = from_dict(parse_yaml(read_small(folder / CONFIG_FILE)))
        environment = json.loads(read_small(folder / ENVIRONMENT_FILE))
        size, device = int(environment["world_size"]), str(environment["device"])
        batch = full_global_batch_size(config.training, config.parallel.data_parallel_size(size))
        lines = [line for line in read_json_lines(folder / METRICS_FILE) if line is not None]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        sentence = f"{folder} is not a run folder that can be read: {error}"
        raise UserError([Problem("E965", sentence, ("give the folder of --run-dir",))]) from error
    begun = max((number for number, line in enumerate(lines) if line.get("event") == "start"), default=-1)
    needed = {"lm loss", "iteration-time", *(("mem-max-allocated-bytes",) if device != "cpu" else ())}
    steps = [line for line in lines[begun + 1 :] if needed <= line.keys() and line.get("batch-size") == batch]
    steps = sorted(steps[1:] or steps, key=lambda line: float(line["iteration-time"]))
    if not steps:
        sentence = f"{folder} has no log line of a step with the batch of {batch:,} samples"
        raise UserError([Problem("E965", sentence, ("train for more steps than two times --log-interval",))])
    line = steps[len(steps) // 2]
    memory = None if device == "cpu" else int(line["mem-max-allocated-bytes"])
    return MeasuredRun(config, size, float(line["iteration-time"]), waits_of(line), memory, str(folder), device)


def waits_of(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds that a rank waits in a step of a log line, by ``bubble`` and the axes of a step's time.

    Those of the whole world, for the gradient norm, are waits for late ranks; they count as ``bubble``.
    """
    waits: dict[str, float] = {}
    for name, seconds in line.items():
        if name.startswith(WAIT) and name != f"{WAIT}share":
            axis = axis_of(name.removeprefix(WAIT).split("-"))
            waits[axis] = waits.get(axis, 0.0) + float(seconds)
    if "bubble" in line:
        waits["bubble"] = waits.get("bubble", 0.0) + line["bubble"] * line["iteration-time"]
    return waits


def axis_of(names: Sequence[str]) -> str:
    """Return the axis of a step's time to which a group of ranks belongs, by the axes of the group."""
    for axis, members in (("data", "dp edp"), ("expert", "ep etp"), ("tensor", "tp"), ("context", "cp")):
        if not {*members.split()}.isdisjoint(names):
            return axis
    return "bubble"
