"""The full product of the factors that decide how a model is cut: ``python -m tests.distributed.product``.

Takes half an hour on two cores. Writes what it found, layout by layout, to ``tests/golden/layout_product.txt``.
"""

from __future__ import annotations

import itertools
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tests.distributed.drive import compare_with_twin, run_on
from tests.distributed.grid import FACTORS, case_of, label, valid
from tests.distributed.pairwise import Choice
from tests.distributed.pool import Pool

FILE = Path(__file__).parents[1] / "golden" / "layout_product.txt"
TOLERANCE = 1e-10

LAYOUT = {name: FACTORS[name] for name in ("tp", "dp")}
PRODUCT = {
    "recompute": ("nothing", "layernorm", "uniform 2"),
    "micro_batch": (1, 2),
    "untied": (False, True),
    "kv_heads": (4, 2, 1),
    "vocab": (128, 101),
    "norm": ("LayerNorm", "RMSNorm"),
    "biases": ("all", "no"),
}


@dataclass
class Findings:
    """The largest error of each kind, and the cases in which something is wrong."""

    cases: int = 0
    worst: dict[str, float] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    def add(self, pool: Pool, choice: Choice) -> None:
        """Run a case."""
        case = case_of(choice)
        steps = run_on(pool, case)
        errors = compare_with_twin(steps, case)
        self.cases += 1
        for d in errors:
            self.worst[d.kind] = max(self.worst.get(d.kind, 0.0), d.error)
        if any(d.error > TOLERANCE for d in errors) or any(step.drifted for step in steps):
            self.failed.append(label(choice))


def choices(**fixed: object) -> Iterator[Choice]:
    """The part of the product with these values; factors that are in neither have their first."""
    first = {name: values[0] for name, values in FACTORS.items()}
    free = {name: values for name, values in PRODUCT.items() if name not in fixed}
    for values in itertools.product(*free.values()):
        choice = first | fixed | dict(zip(free, values))
        if valid(choice):
            yield choice


def run(pool: Pool, **fixed: object) -> Findings:
    """Run that part."""
    findings = Findings()
    for choice in choices(**fixed):
        findings.add(pool, choice)
    return findings


def main() -> None:
    """Run all and write the file."""
    began, lines, kinds = time.monotonic(), [], ("loss", "grad_norm", "gradient", "weight")
    with Pool() as pool:
        for tp, dp in itertools.product(*LAYOUT.values()):
            found = run(pool, tp=tp, dp=dp)
            errors = "  ".join(f"{found.worst[kind]:9.1e}" for kind in kinds)
            lines.append(f"{tp:>4}  {dp:>2}  {found.cases:>5}  {len(found.failed):>6}  {errors}")
            print(lines[-1], *found.failed, sep="\n", flush=True)
    head = [
        "Largest relative error against one process, fp64, 3 steps, by layout (sp: sequence parallel).",
        f"python -m tests.distributed.product: {time.strftime('%Y-%m-%d')}, torch {torch.__version__}, "
        f"{platform.machine()}, {time.monotonic() - began:.0f} s",
        *(f"{name}: {', '.join(map(str, values))}" for name, values in PRODUCT.items()),
        f"{'TP':>4}  {'DP':>2}  {'cases':>5}  {'failed':>6}  {'loss':>9}  {'norm':>9}  {'gradient':>9}  {'weight':>9}",
    ]
    FILE.write_text("\n".join([*head, *lines]) + "\n")


if __name__ == "__main__":
    main()
