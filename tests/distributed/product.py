"""The full product of the factors of model sharding: ``python -m tests.distributed.product``.

Takes four hours on two cores, ``--every 7`` half an hour. Six products: of layouts, every schedule on all grids of up
to eight ranks; of what replicas cut among themselves and of how experts are dealt out; of models, on few of these; of
context parallelism with masks; of experts with latent attention and multi-token prediction; and of hybrid models.
Writes what it found, row by row, to ``tests/golden/layout_product.txt``; one product alone, to a file of its own.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.distributed.grid import ATTENTION, FACTORS, MIXERS, ZERO, case_of, label, valid
from tests.distributed.pairwise import Choice
from tests.golden.provenance import provenance
from tests.kit.cases import compare_with_twin, run_on
from tests.kit.pool import Pool

FILE = Path(__file__).parents[1] / "golden" / "layout_product.txt"
TOLERANCE = 1e-10
KINDS = ("loss", "grad_norm", "gradient", "weight")

Row = tuple[str, ...]

LAYOUTS: dict[str, Sequence[Any]] = {
    **{name: FACTORS[name] for name in ("schedule", "pp", "vpp", "tp")},
    "dp": (1, 2),
    "samples": (6,),
    "micro_batch": (1, 2),
    "layers": (3, 5, 8),
    "untied": (False, True),
    "zero": ("0", "3 freed", "3 kept"),
}
"""Six, three or two micro-batches, on one to eight stages."""

SHARINGS: dict[str, Sequence[Any]] = {
    "schedule": ("1f1b", "zb-h1"),
    "pp": (1, 2),
    "tp": FACTORS["tp"],
    "dp": FACTORS["dp"],
    "zero": tuple(ZERO),
    "gather": (False, True),
    "experts": ("none", "balanced"),
    "ep": (1, 2, 4),
    "etp": FACTORS["etp"],
    "optimizer": ("adam", "muon"),
    "samples": (6, 8),
    "micro_batch": (1,),
    "biases": ("no",),
    "bucket": (4000,),
}
"""Six samples on three replicas, eight on the others."""

MODELS: dict[str, Sequence[Any]] = {
    "schedule": ("1f1b", "zb-h1"),
    "pp": (1, 2),
    "tp": FACTORS["tp"],
    "recompute": ("nothing", "layernorm", "uniform 2"),
    "untied": (False, True),
    "kv_heads": (4, 2, 1),
    "vocab": (128, 101),
    "norm": ("LayerNorm", "RMSNorm"),
    "biases": ("all", "no"),
}

CONTEXTS: dict[str, Sequence[Any]] = {
    "schedule": ("1f1b", "zb-h1"),
    "pp": (1, 2),
    "tp": FACTORS["tp"],
    "cp": (2, 3, 4),
    "cp_type": FACTORS["cp_type"],
    "micro_batch": (2,),
    "zero": ("0", "2", "3 freed", "3 kept"),
    "experts": ("none", "balanced"),
    "ep": (1, 2),
    "kv_heads": (4, 2, 1),
    "biases": ("no",),
    "pattern": FACTORS["pattern"],
    "documents": ("one", "attention"),
    "dropout": ("no", "attention"),
}
"""On one replica of two micro-batches."""

MIXTURES: dict[str, Sequence[Any]] = {
    "schedule": ("1f1b", "zb-h1"),
    "pp": (1, 2),
    "tp": ("1", "2sp"),
    "dp": (1, 2),
    "cp": (1, 2),
    "zero": ("0", "2", "3 freed"),
    "experts": ("balanced", "shared"),
    "ep": (1, 2),
    "etp": (None, 1),
    "attention": tuple(ATTENTION)[1:],
    "heads": (None, 2),
    "recompute": ("nothing", "all modules", "uniform 2"),
    "cp_type": ("p2p",),
    "micro_batch": (1,),
    "biases": ("no",),
    "positions": ("rope",),
    "norm": ("RMSNorm",),
    "bucket": (4000,),
}
"""Models of experts, whose attention is latent or gated, with and without multi-token prediction."""

HYBRIDS: dict[str, Sequence[Any]] = {
    "mixers": tuple(MIXERS)[2:],
    "schedule": ("1f1b", "interleaved", "zb-h1"),
    "pp": (1, 2),
    "vpp": (1, 2),
    "tp": FACTORS["tp"],
    "dp": (1, 2),
    "cp": (1, 2, 3, 4),
    "cp_type": FACTORS["cp_type"],
    "zero": ("0", "2", "3 freed"),
    "experts": ("none", "shared"),
    "documents": ("one", "attention", "conversations"),
    "recompute": ("nothing", "all modules", "uniform 2"),
    "samples": (4,),
    "micro_batch": (1, 2, 4),
    "layers": (5, 3),
    "biases": ("no",),
    "positions": ("none",),
    "norm": ("RMSNorm",),
    "bucket": (4000,),
}
"""Models with layer patterns, on every kind of context parallelism."""


@dataclass
class Findings:
    """The largest error of each kind, and the cases in which something is wrong."""

    cases: int = 0
    worst: dict[str, float] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    def add(self, pool: Pool, choice: Choice) -> None:
        """Run a case."""
        case = replace(case_of(choice), steps=3)
        steps = run_on(pool, case, backend="gloo")
        errors = compare_with_twin(steps, case)
        self.cases += 1
        for d in errors:
            self.worst[d.kind] = max(self.worst.get(d.kind, 0.0), d.error)
        if any(d.error > TOLERANCE for d in errors) or any(step.drifted for step in steps):
            self.failed.append(label(choice))


def layouts() -> Iterator[Choice]:
    """The product of ``LAYOUTS``; ZeRO-3 on two replicas."""
    for c in combinations(LAYOUTS):
        if c["zero"] == "0" or c["dp"] == 2:
            yield c


def sharings() -> Iterator[Choice]:
    """The product of ``SHARINGS``: 1F1B on one rank, ZB-H1 on two; adam gathers at once, Muon while it computes."""
    for c in combinations(SHARINGS):
        in_step = (c["schedule"] == "1f1b") == (c["pp"] == 1) and (c["samples"] == 6) == (c["dp"] == 3)
        if in_step and c["gather"] == (c["optimizer"] == "muon" and c["zero"] != "0"):
            yield c


def models() -> Iterator[Choice]:
    """The product of ``MODELS``: 1F1B on one rank, ZB-H1 on two; and one kind of biases with each norm."""
    for c in combinations(MODELS):
        if (c["schedule"] == "1f1b") == (c["pp"] == 1) and (c["norm"] == "LayerNorm") == (c["biases"] == "all"):
            yield c


def contexts() -> Iterator[Choice]:
    """The product of ``CONTEXTS``: 1F1B on one rank, ZB-H1 on two; dropout, and experts, where gradients are cut."""
    for c in combinations(CONTEXTS):
        in_step = (c["schedule"] == "1f1b") == (c["pp"] == 1) and (c["dropout"] == "no") == (c["zero"] == "0")
        if in_step and (c["experts"] == "none" or (c["ep"] == 2 and c["zero"] != "0")):
            yield c


def mixtures() -> Iterator[Choice]:
    """The product of ``MIXTURES``: 1F1B on one rank, ZB-H1 on two."""
    for c in combinations(MIXTURES):
        if (c["schedule"] == "1f1b") == (c["pp"] == 1):
            yield c


def hybrids() -> Iterator[Choice]:
    """The product of ``HYBRIDS``: 1F1B on one rank, ZeRO on two replicas, experts where gradients are cut.

    Few ranks have the larger model; without a pipeline they take whole batches, too.
    """
    for c in combinations(HYBRIDS):
        small = int(c["tp"][0]) * c["cp"] <= 4
        cut = (c["schedule"] == "1f1b") == (c["pp"] == 1) and (c["dp"] == 2) == (c["zero"] != "0")
        sized = (c["layers"] == 5) == small and (c["pp"] * c["vpp"] * c["dp"] == 1 or c["micro_batch"] == 1)
        if cut and sized and (c["experts"] == "none") == (c["zero"] == "0"):
            yield c


def combinations(factors: Mapping[str, Sequence[Any]]) -> Iterator[Choice]:
    """All that there can be; factors that are not named have their first value."""
    first = {name: values[0] for name, values in FACTORS.items()}
    for values in itertools.product(*factors.values()):
        choice = first | dict(zip(factors, values))
        if valid(choice):
            yield choice


def rows(choices: Iterator[Choice], names: Sequence[str]) -> dict[Row, list[Choice]]:
    """The choices by their values under ``names``."""
    by_row: dict[Row, list[Choice]] = defaultdict(list)
    for choice in choices:
        by_row[tuple(str(choice[name]) for name in names)].append(choice)
    return by_row


def run(pool: Pool, choices: Sequence[Choice]) -> Findings:
    """Run all of them."""
    findings = Findings()
    for choice in choices:
        findings.add(pool, choice)
    return findings


TABLES = {
    "layouts": (layouts, LAYOUTS, ("schedule", "pp", "vpp", "tp")),
    "sharings": (sharings, SHARINGS, ("schedule", "pp", "tp", "dp", "zero")),
    "models": (models, MODELS, ("schedule", "pp", "tp")),
    "contexts": (contexts, CONTEXTS, ("cp_type", "cp", "pp", "tp")),
    "hybrids": (hybrids, HYBRIDS, ("mixers", "cp_type", "cp", "tp")),
    "mixtures": (mixtures, MIXTURES, ("schedule", "pp", "tp", "cp", "zero")),
}
"""By name: the choices, their factors, and those that distinguish rows."""


def table(pool: Pool, name: str, every: int) -> Iterator[str]:
    """Run a product, line by line."""
    choices, factors, keys = TABLES[name]
    inside = [f"{key}: {', '.join(map(str, values))}" for key, values in factors.items() if key not in keys]
    yield f"{name}; every row crosses  {';  '.join(inside)}"
    widths = [max(len(str(value)) for value in (key, *factors[key])) for key in keys]
    heads = ("cases", "failed", *(f"{kind:>9}" for kind in KINDS))
    yield "  ".join([*(f"{key:>{width}}" for key, width in zip(keys, widths)), *heads])
    for row, members in rows(itertools.islice(choices(), 0, None, every), keys).items():
        found = run(pool, members)
        errors = (f"{found.worst[kind]:9.1e}" for kind in KINDS)
        counts = f"{found.cases:>5}", f"{len(found.failed):>6}"
        yield "  ".join([*(f"{value:>{width}}" for value, width in zip(row, widths)), *counts, *errors])
        yield from (f"failed: {case}" for case in found.failed)


def markdown_rows(log: str) -> list[str]:
    """Return the rows of the table in docs/performance.md, by schedule or kind of CP, from the log of :func:`main`."""
    by_schedule: dict[str, list[list[str]]] = defaultdict(list)
    for line in log.splitlines():
        first, *_ = words = [*line.split(), ""]
        if first in (*FACTORS["schedule"], *FACTORS["cp_type"]):
            by_schedule[first].append(words[-7:-1])
    out = []
    for schedule, found in by_schedule.items():
        cases, failed, *worst = zip(*found)
        if sum(map(int, failed)):
            raise ValueError(f"{schedule} has failed in {sum(map(int, failed))} cases")
        errors = (f"{max(map(float, kind)):.1e}" for kind in worst)
        out.append("| " + " | ".join([schedule, f"{sum(map(int, cases)):,}", *errors]) + " |")
    return out


def main() -> None:
    """Run all and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=1, help="Only every N-th case, where time is short.")
    parser.add_argument("--table", choices=tuple(TABLES), help="Only this product.")
    options, began, lines = parser.parse_args(), time.monotonic(), []
    every, only = options.every, options.table
    with Pool() as pool:
        for name in (only,) if only else TABLES:
            for line in table(pool, name, every):
                lines.append(line)
                print(line, flush=True)
    flags = f" --every {every}" * (every > 1) + (f" --table {only}" if only else "")
    command = f"python -m tests.distributed.product{flags}"
    head = [
        "Largest relative error against one process, fp64, 3 steps, by layout (sp: sequence parallel).",
        f"{command}: {provenance()}, {time.monotonic() - began:.0f} s",
    ]
    file = FILE.with_stem(f"{FILE.stem}_{only}") if only else FILE
    file.write_text("\n".join([*head, *lines]) + "\n")
    print("", "For docs/performance.md:", *markdown_rows(file.read_text()), sep="\n")


if __name__ == "__main__":
    main()
