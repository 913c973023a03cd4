"""Run the cases beside megatron-core, and write the table of their differences.

``python -m tests.megatron_core`` runs what the table lacks, in order, and writes it after each case; ``CASE ...`` runs
these. With ``--array I/N`` it runs every N-th case from the I-th (from 0), as a Slurm array does. ``--markdown`` prints
the table of the page instead.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.golden.provenance import provenance
from tests.kit.pool import Pool
from tests.megatron_core.beside import missing, run_case
from tests.megatron_core.cases import CASES, Case

TABLE = Path(__file__).parents[1] / "golden" / "megatron_core.txt"
HEAD = """The largest relative differences between megatron-core 0.16.1 and this package over a run of training, from
the same weights with the same data and options. Each line was written by `python -m tests.megatron_core CASE`.
"""

Row = Mapping[str, Any]


def key(case: Case) -> str:
    """Name of a case in the table."""
    return f"{case.group}: {case.name}"


def read() -> dict[str, dict[str, Any]]:
    """Return the rows of the table, by case."""
    if not TABLE.exists():
        return {}
    lines = [line for line in TABLE.read_text().splitlines() if line.startswith("{")]
    return {row["case"]: row for row in map(json.loads, lines)}


def write(row: dict[str, Any]) -> None:
    """Add a row to the table, which other processes write, too."""
    with TABLE.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        rows = read() | {row["case"]: row}
        order = [key(case) for case in CASES]
        kept = sorted(
            rows.values(), key=lambda each: order.index(each["case"]) if each["case"] in order else len(order)
        )
        TABLE.write_text("\n".join([HEAD, *map(json.dumps, kept), ""]))


def run(case: Case, pool: Pool) -> dict[str, Any]:
    """Run a case; return its row, with the reason if one of the programs fails."""
    row: dict[str, Any] = {"case": key(case), "flags": case.flags, "ranks": case.ranks}
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        try:
            found = run_case(Path(folder), case, pool)
        except (RuntimeError, ValueError) as error:
            return row | {"failed": str(error).strip()[-1500:]}
    row |= {"steps": found.steps, "loss": f"{found.loss:.1e}", "norm": f"{found.grad_norm:.1e}"}
    return row | {"seconds": round(time.monotonic() - begun), "by": provenance()}


def markdown(rows: Mapping[str, Row]) -> str:
    """Return the tables of the page: a part for each kind of option."""
    parts = []
    for group in dict.fromkeys(case.group for case in CASES):
        cases = [case for case in CASES if case.group == group and "loss" in rows.get(key(case), {})]
        if cases:
            parts.append(f"| {group} | loss | gradient norm |\n|---|---|---|")
            parts += [f"| {case.name} | {rows[key(case)]['loss']} | {rows[key(case)]['norm']} |" for case in cases]
            parts.append("")
    return "\n".join(parts)


def main() -> int:
    """Run the cases; return 1 if one of them differs by more than its limits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help="names of cases, or the beginnings of them")
    parser.add_argument("--array", default="0/1", help="I/N: every N-th case from the I-th")
    parser.add_argument("--markdown", action="store_true", help="print the table of the page")
    args = parser.parse_args()
    if args.markdown:
        print(markdown(read()))
        return 0
    if why := missing():
        sys.exit(why)
    first, every = map(int, args.array.split("/"))
    chosen = [case for case in CASES if any(key(case).startswith(name) or case.name == name for name in args.cases)]
    differ = 0
    with Pool() as pool:
        for case in (chosen if args.cases else CASES)[first::every]:
            old = read().get(key(case), {})
            if not args.cases and old.get("flags") == case.flags and "loss" in old:
                continue
            row = run(case, pool)
            print(key(case), row.get("loss"), row.get("norm"), row.get("failed", "")[-300:], flush=True)
            if "loss" in row:
                write(row)
            differ += "loss" not in row or float(row["loss"]) > case.loss or float(row["norm"]) > case.norm
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main())
