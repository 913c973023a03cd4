"""Write learning rates of DeepSpeed's schedules to rates.json, in an environment with DeepSpeed.

    DS_ACCELERATOR=cpu python tests/golden/other_frameworks/rates.py

Each case has the schedule, its parameters, and the rates of some of 40 steps. The optimizer's rate is 2e-3.
"""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

STEPS = 0, 1, 2, 6, 12, 18, 24, 30, 36, 39
LINEAR = {"warmup_num_steps": 10, "warmup_type": "linear"}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("WarmupLR", LINEAR | {"warmup_max_lr": 1e-3}),
    ("WarmupLR", LINEAR | {"warmup_max_lr": 3e-3, "warmup_min_lr": 1e-4}),
    ("WarmupLR", LINEAR),
    ("WarmupLR", LINEAR | {"warmup_num_steps": 1}),
    ("WarmupDecayLR", LINEAR | {"total_num_steps": 40, "warmup_max_lr": 1e-3}),
    ("WarmupDecayLR", LINEAR | {"total_num_steps": 40, "warmup_max_lr": 1e-3, "warmup_min_lr": 1e-4}),
    ("WarmupDecayLR", LINEAR | {"total_num_steps": 40}),
    ("WarmupCosineLR", LINEAR | {"total_num_steps": 40, "cos_min_ratio": 0.1}),
    ("WarmupCosineLR", LINEAR | {"total_num_steps": 40, "warmup_min_ratio": 0.2}),
]


def rates(name: str, params: dict[str, Any]) -> list[float]:
    """Return the rates with which the optimizer takes ``STEPS``."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=2e-3)
    schedule = getattr(import_module("deepspeed.runtime.lr_schedules"), name)(optimizer, **params)
    found = []
    for _ in range(40):
        found.append(float(f"{optimizer.param_groups[0]['lr']:.9g}"))
        optimizer.step()
        schedule.step()
    return [found[step] for step in STEPS]


if __name__ == "__main__":
    cases = [{"schedule": name, "params": params, "rates": rates(name, params)} for name, params in CASES]
    found = {
        "deepspeed": import_module("deepspeed").__version__,
        "torch": torch.__version__,
        "steps": STEPS,
        "cases": cases,
    }
    Path(__file__).with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
