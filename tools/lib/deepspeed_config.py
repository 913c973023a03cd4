"""Settings of DeepSpeed's JSON file, and what becomes of each here."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron.config.files import read_small

ADAM = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
"""Defaults of DeepSpeed's Adam."""

AUTO = "auto"
"""A value that the Trainer of transformers fills in from its own arguments."""


def table() -> Mapping[str, str | Mapping[str, str]]:
    """Return flags, or a verdict with a reason, by name or by name and value.

    ``{}`` in flags stands for the value, and ``name.*`` for all settings of a section that have no row.
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


def deepspeed_settings(file: Path, ranks: int | None) -> dict[str, Any]:
    """Return the settings of a JSON file of DeepSpeed as they take effect together, with its defaults.

    Args:
        file: to read.
        ranks: number of data-parallel ranks, to compute the global batch; None if it is unknown.

    Raises:
        ValueError: for another file.
    """
    tree = json.loads(read_small(file))
    known = {"train_batch_size", "train_micro_batch_size_per_gpu", "optimizer", "zero_optimization"}
    if not isinstance(tree, dict) or not known & tree.keys():
        raise ValueError(f"{file} is no configuration of DeepSpeed")
    for section in ("fp16", "bf16", "bfloat16"):
        if not tree.get(section, {}).get("enabled", False):
            tree.pop(section, None)
    found = with_rates({"gradient_clipping": 0.0, **dict(flattened(tree))})
    if "fp16" in tree:
        power = found.pop("fp16.initial_scale_power", 16)
        found["fp16.initial_scale_power"] = power if power == AUTO else 2**power
    micro, steps = (found.get(name, 1) for name in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"))
    if "train_batch_size" not in found and ranks and AUTO not in (micro, steps):
        found["train_batch_size"] = micro * steps * ranks
    return found


def with_rates(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with the defaults of the optimizer and the schedule, and rates where they are ratios."""
    found = dict(given)
    if str(found.get("optimizer.type", "")).lower().endswith(("adam", "adamw")):
        found = {f"optimizer.params.{name}": value for name, value in ADAM.items()} | found
    if str(found.get("scheduler.type", "")).lower().startswith("warmup"):
        found = {"scheduler.params.warmup_type": "log", "scheduler.params.warmup_num_steps": 1000} | found
    peak = found.get("optimizer.params.lr", AUTO)
    if found.get("scheduler.params.warmup_max_lr", AUTO) != AUTO:
        found.pop("optimizer.params.lr", None)
    if found.get("scheduler.type") == "WarmupCosineLR" and peak != AUTO:
        for ratio, rate, default in (("cos_min_ratio", "min_lr", 1e-4), ("warmup_min_ratio", "warmup_min_lr", 0.0)):
            found[f"scheduler.params.{rate}"] = found.pop(f"scheduler.params.{ratio}", default) * peak
    return found
