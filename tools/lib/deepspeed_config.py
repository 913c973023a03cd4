"""Settings of DeepSpeed's JSON file, and what becomes of each here."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.arguments.cli import flags_config, parse_flags
from megatron.config.files import read_small

AUTO = "auto"
"""A value that the Trainer of transformers fills in from its own arguments."""

ABSENT = "absent"
"""Stands in the table for a setting that is needed and is not in the file."""

ADAM = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adam": ADAM,
    "adamw": ADAM,
    "lion": {"lr": 1e-3, "betas": [0.9, 0.999], "weight_decay": 0.0},
    "sgd": {"lr": 1e-3, "momentum": 0.0, "weight_decay": 0.0},
}
"""Defaults of DeepSpeed's optimizers, and of torch's SGD, by type."""

SCHEDULES: dict[str, dict[str, Any]] = {
    "warmuplr": {"warmup_min_lr": 0.0, "warmup_max_lr": ABSENT},
    "warmupdecaylr": {"warmup_min_lr": 0.0, "warmup_max_lr": 1e-3},
    "warmupcosinelr": {"warmup_min_ratio": 0.0, "cos_min_ratio": 1e-4},
}
"""Defaults of DeepSpeed's schedules."""

BATCH, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


def table() -> Mapping[str, str | Mapping[str, str]]:
    """Return flags, or a verdict with a reason, by name or by name and value.

    ``{}`` in flags stands for the value, ``name.*`` and ``*.name`` for all settings of a section, or of one name, that
    have no row.
    """
    import yaml  # slow to import, and seldom needed

    found: dict[str, str | dict[str, str]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
    return found


def flattened(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the settings of nested sections by path; names may have hyphens."""
    for name, value in tree.items():
        path = above + str(name).replace("-", "_")
        if isinstance(value, dict):
            yield from flattened(value, f"{path}.")
        else:
            yield path, value


def deepspeed_settings(file: Path, ranks: int | None, flags: Sequence[str] = ()) -> dict[str, Any]:
    """Return the settings of a JSON file of DeepSpeed as they take effect together, with its defaults.

    Args:
        file: to read.
        ranks: number of all ranks, to compute the batch; None if it is unknown.
        flags: that follow the file. They count where the file leaves something open.

    Raises:
        ValueError: for another file, or a value of the wrong type.
    """
    tree = json.loads(read_small(file))
    known = {BATCH, MICRO, "optimizer", "zero_optimization"}
    if not isinstance(tree, dict) or not known & tree.keys():
        raise ValueError(f"{file} is no configuration of DeepSpeed")
    off = [name for name, section in tree.items() if isinstance(section, dict) and section.get("enabled") is False]
    found = {name: value for name, value in flattened(tree) if value is not None and name.partition(".")[0] not in off}
    found |= {f"{name}.enabled": False for name in off}
    command_line = parse_flags(flags)
    given = {flag.setting.name for flag in command_line.given}
    if "clip_grad" not in given:
        found.setdefault("gradient_clipping", ABSENT)
    if found.get("fp16.enabled"):
        power = found.pop("fp16.initial_scale_power", 16)
        found["fp16.initial_scale_power"] = power if power == AUTO else 2 ** _number(power)
    config = flags_config(command_line)
    found = with_rates(found, config.optimizer.lr if "lr" in given else None)
    if "lr" in given:
        found.pop("optimizer.params.lr", None)
    if "optimizer.type" in found and "lr_decay_style" not in given and found.get("optimizer.params.lr", AUTO) != AUTO:
        found.setdefault("scheduler.type", ABSENT)
    parallel = config.parallel
    size = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size * parallel.context_parallel_size
    for name in ("tensor_parallel.autotp_size", "sequence_parallel_size"):
        size *= max(1, int(_number(found.get(name, 1))))  # autotp_size 0 turns it off
    named = {"global_batch_size": BATCH, "micro_batch_size": MICRO}
    return with_batch(found, ranks // size if ranks else None, {named[name] for name in given & named.keys()})


def with_batch(given: Mapping[str, Any], ranks: int | None, elsewhere: set[str]) -> dict[str, Any]:
    """Return settings with the sizes of the batch that follow from the others.

    Args:
        given: settings.
        ranks: number of data-parallel ranks, if it is known.
        elsewhere: sizes that flags give.
    """
    found = dict(given)
    if AUTO in (sizes := [found.get(name) for name in (BATCH, MICRO, STEPS)]):
        return found
    whole, micro, steps = (None if size is None else int(_number(size)) for size in sizes)
    if whole is None and micro is None:
        return found if {BATCH, MICRO} <= elsewhere else found | {BATCH: ABSENT}
    if ranks is None:
        if BATCH not in elsewhere and (whole is None or micro is None):
            found[MICRO if whole else BATCH] = ABSENT
        return found
    if whole is None:
        found[BATCH] = (micro or 1) * (steps or 1) * ranks
        return found
    if micro is None:
        micro = found[MICRO] = max(1, whole // ranks // (steps or 1))
    if whole != micro * (steps or max(1, whole // micro // ranks)) * ranks:
        found[STEPS] = f"{micro} x {steps or 'steps'} x {ranks} is not {whole}"
    return found


def with_rates(given: Mapping[str, Any], peak: float | None) -> dict[str, Any]:
    """Return settings with the defaults of the optimizer and the schedule, and rates where they are ratios.

    Args:
        given: settings.
        peak: learning rate that flags give; None if they give none.
    """
    kind, style = (str(given.get(f"{name}.type", "")).lower() for name in ("optimizer", "scheduler"))
    found = {f"optimizer.params.{name}": value for name, value in OPTIMIZERS.get(kind, {}).items()}
    found |= {f"scheduler.params.{name}": value for name, value in SCHEDULES.get(style, {}).items()}
    if style in SCHEDULES:
        found |= {"scheduler.params.warmup_type": "log", "scheduler.params.warmup_num_steps": 1000}
    found |= given
    if kind == "adamw":
        found.pop("optimizer.params.adam_w_mode", None)  # without effect
    if kind == "lion":
        found["optimizer.params.betas of lion"] = found.pop("optimizer.params.betas")
    if isinstance(steps := found.get("scheduler.params.warmup_num_steps"), int):
        found["scheduler.params.warmup_num_steps"] = max(2, steps)
    if style == "warmupdecaylr":
        found["scheduler.params.min_lr"] = found["scheduler.params.warmup_min_lr"]  # where its decay ends, too
    if "scheduler.params.warmup_max_lr" in found:
        found.pop("optimizer.params.lr", None)
        if peak is not None:
            found.pop("scheduler.params.warmup_max_lr")
    rate = found.get("optimizer.params.lr", AUTO) if peak is None else peak
    if style == "warmupcosinelr" and rate != AUTO:
        for ratio, name in (("cos_min_ratio", "min_lr"), ("warmup_min_ratio", "warmup_min_lr")):
            share = found.pop(f"scheduler.params.{ratio}")
            found[f"scheduler.params.{name}"] = (
                share if share == AUTO else float(f"{_number(share) * _number(rate):.9g}")
            )
    return found


def _number(value: Any) -> int | float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"a number is expected, not {json.dumps(value)}")
    return value
