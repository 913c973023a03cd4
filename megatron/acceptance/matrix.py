"""The same steps in many layouts, under the cluster's own backend, against one process.

Every rank notes what it computed in a file; what the layouts did is put together from these, outside of the collectives
that are tried.
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
"""``--adam-eps`` is large, so that a gradient that is rounding and nothing else moves no weight."""

FORMATS = {"fp32": "--kernels torch", "bf16": "--bf16"}
"""What is compared: the communication, in exact arithmetic, and a run as it is; with the kernels that it takes."""

TOLERANCE = {
    "fp32": {"loss": 1e-5, "grad_norm": 1e-5, "gradient": 1e-5, "weight": 1e-5},
    "bf16": {"loss": 1e-3, "grad_norm": 1e-2, "gradient": 1e-1, "weight": 1e-1},
}
"""Relative errors that are allowed, in the 2-norm for tensors: some ten times what was seen on CPUs and gloo."""

FLOOR = 1e-2
"""A gradient counts as at least this share of all gradients: some are zero in exact arithmetic and rounding here."""

MODELS = {False: "dense", True: "experts"}


@dataclass(frozen=True)
class Alone:
    """What one rank computed by itself: of all ranks, the reference is the first; the others must say the same."""

    host: str
    steps: list[RankTrace]


def configuration(flags: str, experts: bool, dtype: str, device: str, rank: int, ranks: int) -> RunConfig:
    """Of a rank: ``flags`` are those of a layout."""
    words = [SIZE, EXPERTS if experts else "", FLAGS, FORMATS[dtype], flags, "--device", device]
    return parse(" ".join(words).split(), {"RANK": str(rank), "WORLD_SIZE": str(ranks)}).config


def trace_chosen(folder: Path, dtype: str, device: str, numbers: str, per_node: str) -> None:
    """:func:`trace` for the words of a command line; ``numbers`` are those of layouts, with commas."""
    launch = Launch.read(os.environ)
    fitting = layouts(launch.world_size, int(per_node))
    chosen = [fitting[int(number)] for number in numbers.split(",")]
    trace(folder, dtype, device, chosen, launch.rank, launch.world_size)
    leave_distributed()


def trace(folder: Path, dtype: str, device: str, cases: Sequence[LayoutCase], rank: int, ranks: int) -> None:
    """One rank: compute the twins alone, then the layouts together with the others, and note each in ``folder``."""
    torch.set_float32_matmul_precision("highest")  # NVIDIA's images have TF32 as the default: 10 bits for fp32
    for case in cases:
        path, flags = folder / f"alone.{MODELS[case.experts]}.{dtype}.{rank}.pt", batch(ranks)
        config = configuration(f"{flags} {case.flags}", case.experts, dtype, device, rank, ranks)
        join(config)
        if not path.exists():
            twin = build(configuration(flags, case.experts, dtype, device, 0, 1), 0, 1)
            keep(path, Alone(host(os.environ), without_values(trace_steps(twin, STEPS), rank == 0)))
        keep(folder / name_of(case, dtype, rank), trace_steps(build(config, rank, ranks), STEPS))


def without_values(steps: list[RankTrace], whole: bool) -> list[RankTrace]:
    """The steps; not ``whole``, only loss and gradient norm, which are enough to compare devices."""
    return steps if whole else [RankTrace(step.loss, step.grad_norm, {}, {}) for step in steps]


def name_of(case: LayoutCase, dtype: str, rank: int) -> str:
    """File of what a rank did in a layout."""
    words = "".join(letter if letter.isalnum() else "-" for letter in case.name)
    return f"layout.{words}.{dtype}.{rank}.pt"


def keep(path: Path, value: object) -> None:
    """Write a file at once: where it is, it is whole."""
    torch.save(value, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def is_done(folder: Path, case: LayoutCase, dtype: str, ranks: int) -> bool:
    """Whether every rank has come to the end of a layout."""
    return all((folder / name_of(case, dtype, rank)).exists() for rank in range(ranks))


def load(path: Path) -> Any:
    """What :func:`keep` has written; of this program alone."""
    return torch.load(path, weights_only=False)


def examine(part: Part, folder: Path, dtype: str, cases: Iterable[LayoutCase], ranks: int) -> None:
    """Compare what was noted of the layouts that are done, and tell of it in ``part``."""
    rows: list[Sequence[str]] = [("layout", "", "loss", "gradient norm", "gradients", "weights")]
    done = [case for case in cases if is_done(folder, case, dtype, ranks)]
    for model in dict.fromkeys(MODELS[case.experts] for case in done):
        devices_agree(part, folder, model, dtype, ranks)
    for case in done:
        what = f"{case.name}, {dtype}"
        reference = [together([step]) for step in load(folder / f"alone.{MODELS[case.experts]}.{dtype}.0.pt").steps]
        try:
            steps = [together(step) for step in zip(*(load(folder / name_of(case, dtype, r)) for r in range(ranks)))]
            worst, bad = judge(dtype, steps, reference)
        except ValueError as error:  # the ranks' parts make no whole
            part.add(what, False, str(error))
            continue
        part.facts[what] = worst
        for sentence in bad:
            part.add(what, False, sentence)
        rows.append((case.name, FAILED if bad else OK, *(f"{worst[kind]:.1e}" for kind in TOLERANCE[dtype])))
    good = sum(row[1] == OK for row in rows)
    if good:
        limits = ", ".join(f"{kind.replace('_', ' ')} {limit:g}" for kind, limit in TOLERANCE[dtype].items())
        part.add(f"{good} layouts in {dtype}", True, f"as one process (allowed: {limits}), and copies equal to the bit")
        part.tables[f"Largest relative errors of {STEPS} steps in {dtype}, against one process"] = rows


def judge(dtype: str, steps: Sequence[StepTrace], reference: Sequence[StepTrace]) -> tuple[dict[str, float], list[str]]:
    """The largest errors of a layout by kind, and sentences on what is not as one process did it."""
    pairs = zip(steps, reference, strict=True)
    found = [d for i, (got, ref) in enumerate(pairs, 1) for d in compare(i, got, ref, FLOOR, LR)]
    allowed = TOLERANCE[dtype]
    worst = {kind: max(d.error for d in found if d.kind == kind) for kind in allowed}
    bad = [d for d in found if d.error > allowed[d.kind]]
    sentences = []
    if bad:
        first = bad[0]
        name = f"{first.kind.replace('_', ' ')} {first.name}".strip()
        sentences.append(f"step {first.step}: {name} is off by {first.error:.1e} (allowed: {allowed[first.kind]:g})")
    drifted = [name for step in steps for name in step.drifted]
    if drifted:
        sentences.append(f"not the same on all ranks that share it: {drifted[0]}")
    return worst, sentences


def devices_agree(part: Part, folder: Path, model: str, dtype: str, ranks: int) -> None:
    """Whether every rank, computing alone, came to the numbers of the first: one that does not has a bad device."""
    told: list[Alone] = [load(folder / f"alone.{model}.{dtype}.{rank}.pt") for rank in range(ranks)]
    allowed = TOLERANCE[dtype]["grad_norm"]
    first = told[0].steps
    for rank, other in enumerate(told):
        pairs = [(a, b) for x, y in zip(other.steps, first) for a, b in ((x.loss, y.loss), (x.grad_norm, y.grad_norm))]
        errors = [abs(a - b) / abs(b) for a, b in pairs]
        off = max(errors, key=lambda error: (math.isnan(error), error))
        if not off <= allowed:
            sentence = f"rank {rank} on {other.host} is off by {off:.1e} (allowed: {allowed:g}) before it communicates"
            part.add(f"devices compute the same, {model}, {dtype}", False, sentence)
            return
    part.add(f"devices compute the same, {model}, {dtype}", True, "each by itself, the same model on the same samples")


def not_done(part: Part, case: LayoutCase, dtype: str, why: str) -> None:
    """Say of a layout that it did not come to its end."""
    part.add(f"{case.name}, {dtype}", False, why)


def not_tried(part: Part, cases: Iterable[LayoutCase], dtype: str, why: str) -> None:
    """Say of layouts that nobody tried them."""
    for case in cases:
        part.add(f"{case.name}, {dtype}", False, why, otherwise=SKIPPED)
