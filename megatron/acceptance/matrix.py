"""Compare a few training steps in many layouts, under the cluster's own backend, with one process.

Every rank writes what it computed to a file. The files are compared afterwards, without the collectives under test.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.acceptance.layouts import EXPERTS, SIZE, LayoutCase, batch, layouts
from megatron.acceptance.report import FAILED, OK, SKIPPED, Part
from megatron.config.arguments import parse
from megatron.config.launch import Launch
from megatron.config.run import RunConfig
from megatron.parallel.mesh import leave_distributed
from megatron.training.first_cause import host
from megatron.training.setup import build, join
from megatron.training.verify import RankTrace, StepTrace, compare, trace_steps
from megatron.training.verify import join as together

STEPS, LR = 3, 1e-3
FLAGS = f"--lr {LR} --adam-eps 1e-3 --clip-grad 1.0 --train-iters 100 --distributed-timeout-minutes 5"
"""A large ``--adam-eps``, so that gradients that are only rounding errors move no weight."""

FORMATS = {"fp32": "--kernels torch", "bf16": "--bf16"}
"""fp32 with reference kernels compares the communication alone, bf16 a run with its usual kernels."""

TOLERANCE = {
    "fp32": {"loss": 1e-5, "grad_norm": 1e-5, "gradient": 1e-5, "weight": 1e-5},
    "bf16": {"loss": 1e-3, "grad_norm": 1e-2, "gradient": 1e-1, "weight": 1e-1},
}
"""Allowed relative errors, in the 2-norm for tensors: about ten times those measured on CPUs with gloo."""

FLOOR = 1e-2
"""Lower bound of a gradient's norm, relative to all gradients: some are zero up to rounding."""

MODELS = {False: "dense", True: "experts"}


@dataclass(frozen=True)
class Alone:
    """What one rank computed alone. Rank 0's is the reference; the others must agree with it."""

    host: str
    steps: list[RankTrace]


def configuration(flags: str, experts: bool, dtype: str, device: str, rank: int, ranks: int) -> RunConfig:
    """Return a rank's configuration with the layout ``flags``."""
    args = [SIZE, EXPERTS if experts else "", FLAGS, FORMATS[dtype], flags, "--device", device]
    return parse(" ".join(args).split(), {"RANK": str(rank), "WORLD_SIZE": str(ranks)}).config


def trace_chosen(folder: Path, dtype: str, device: str, numbers: str, per_node: str) -> None:
    """Run `trace_layouts` with command-line arguments; ``numbers`` are the layouts' indices, separated by commas."""
    launch = Launch.read(os.environ)
    cases = layouts(launch.world_size, int(per_node))
    selected = [cases[int(number)] for number in numbers.split(",")]
    trace(folder, dtype, device, selected, launch.rank, launch.world_size)
    leave_distributed()


def trace(folder: Path, dtype: str, device: str, cases: Sequence[LayoutCase], rank: int, ranks: int) -> None:
    """Trace the single-process reference and then the layouts on this rank; write each trace to ``folder``."""
    torch.set_float32_matmul_precision("highest")  # NVIDIA's images default to TF32, which has 10 bits
    for case in cases:
        path, flags = folder / f"alone.{MODELS[case.experts]}.{dtype}.{rank}.pt", batch(ranks)
        config = configuration(f"{flags} {case.flags}", case.experts, dtype, device, rank, ranks)
        join(config)
        if not path.exists():
            alone = build(configuration(flags, case.experts, dtype, device, 0, 1), 0, 1)
            keep(path, Alone(host(os.environ), without_values(trace_steps(alone, STEPS), rank == 0)))
        keep(folder / name_of(case, dtype, rank), trace_steps(build(config, rank, ranks), STEPS))


def without_values(steps: list[RankTrace], whole: bool) -> list[RankTrace]:
    """Return the steps; if not ``whole``, only loss and gradient norm, which suffice to compare devices."""
    return steps if whole else [RankTrace(step.loss, step.grad_norm, {}, {}) for step in steps]


def name_of(case: LayoutCase, dtype: str, rank: int) -> str:
    """Return the file name of a rank's trace in a layout."""
    name = "".join(letter if letter.isalnum() else "-" for letter in case.name)
    return f"layout.{name}.{dtype}.{rank}.pt"


def keep(path: Path, value: object) -> None:
    """Write a file atomically."""
    torch.save(value, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def is_done(folder: Path, case: LayoutCase, dtype: str, ranks: int) -> bool:
    """Return whether every rank finished a layout."""
    return all((folder / name_of(case, dtype, rank)).exists() for rank in range(ranks))


def load(path: Path) -> Any:
    """Read a file written by `save_atomic`."""
    return torch.load(path, weights_only=False)


def examine(part: Part, folder: Path, dtype: str, cases: Iterable[LayoutCase], ranks: int) -> None:
    """Compare the traces of the finished layouts with one process, and record the checks in ``part``."""
    rows: list[Sequence[str]] = [("layout", "", "loss", "gradient norm", "gradients", "weights")]
    done = [case for case in cases if is_done(folder, case, dtype, ranks)]
    for model in dict.fromkeys(MODELS[case.experts] for case in done):
        devices_agree(part, folder, model, dtype, ranks)
    for case in done:
        what = f"{case.name}, {dtype}"
        reference = [together([step]) for step in load(folder / f"alone.{MODELS[case.experts]}.{dtype}.0.pt").steps]
        try:
            steps = [together(step) for step in zip(*(load(folder / name_of(case, dtype, r)) for r in range(ranks)))]
            worst, errors = judge(dtype, steps, reference)
        except ValueError as error:  # the ranks' shards do not cover the tensors
            part.add(what, False, str(error))
            continue
        part.facts[what] = worst
        for sentence in errors:
            part.add(what, False, sentence)
        rows.append((case.name, FAILED if errors else OK, *(f"{worst[kind]:.1e}" for kind in TOLERANCE[dtype])))
    passed = sum(row[1] == OK for row in rows)
    if passed:
        limits = ", ".join(f"{kind.replace('_', ' ')} {limit:g}" for kind, limit in TOLERANCE[dtype].items())
        part.add(
            f"{passed} layouts in {dtype}", True, f"match one process (allowed: {limits}); replicas are bitwise equal"
        )
        part.tables[f"Largest relative errors of {STEPS} steps in {dtype}, against one process"] = rows


def judge(dtype: str, steps: Sequence[StepTrace], reference: Sequence[StepTrace]) -> tuple[dict[str, float], list[str]]:
    """Return a layout's largest errors by kind, and a sentence on each difference from one process."""
    pairs = zip(steps, reference, strict=True)
    differences = [d for i, (step, ref) in enumerate(pairs, 1) for d in compare(i, step, ref, FLOOR, LR)]
    allowed = TOLERANCE[dtype]
    worst = {kind: max(d.error for d in differences if d.kind == kind) for kind in allowed}
    excessive = [d for d in differences if d.error > allowed[d.kind]]
    sentences = []
    if excessive:
        first = excessive[0]
        name = f"{first.kind.replace('_', ' ')} {first.name}".strip()
        sentences.append(f"step {first.step}: {name} is off by {first.error:.1e} (allowed: {allowed[first.kind]:g})")
    drifted = [name for step in steps for name in step.drifted]
    if drifted:
        sentences.append(f"differs between the ranks that share it: {drifted[0]}")
    return worst, sentences


def devices_agree(part: Part, folder: Path, model: str, dtype: str, ranks: int) -> None:
    """Check that every rank, computing alone, agrees with rank 0; one that does not has a bad device."""
    by_rank: list[Alone] = [load(folder / f"alone.{model}.{dtype}.{rank}.pt") for rank in range(ranks)]
    allowed = TOLERANCE[dtype]["grad_norm"]
    first = by_rank[0].steps
    for rank, other in enumerate(by_rank):
        pairs = [(a, b) for x, y in zip(other.steps, first) for a, b in ((x.loss, y.loss), (x.grad_norm, y.grad_norm))]
        errors = [abs(a - b) / abs(b) for a, b in pairs]
        worst = max(errors, key=lambda error: (math.isnan(error), error))
        if not worst <= allowed:
            sentence = f"rank {rank} on {other.host} is off by {worst:.1e} (allowed: {allowed:g}) without communication"
            part.add(f"devices compute the same, {model}, {dtype}", False, sentence)
            return
    part.add(f"devices compute the same, {model}, {dtype}", True, "each rank alone, same model and samples")


def not_done(part: Part, case: LayoutCase, dtype: str, why: str) -> None:
    """Record a failed layout."""
    part.add(f"{case.name}, {dtype}", False, why)


def not_tried(part: Part, cases: Iterable[LayoutCase], dtype: str, why: str) -> None:
    """Record skipped layouts."""
    for case in cases:
        part.add(f"{case.name}, {dtype}", False, why, otherwise=SKIPPED)
