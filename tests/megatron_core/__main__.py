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
Row = Mapping[str, Any]


def key(case: Case) -> str:
    """Name of a case in the table."""
    return f"{case.group}: {case.name}"


def read() -> dict[str, dict[str, Any]]:
    """Return the rows of the table, by case."""
    return {row["case"]: row for row in map(json.loads, filter(is_row, TABLE.read_text().splitlines()))}


def is_row(line: str) -> bool:
    """Return True for a row of a case; the table has other lines, too."""
    return line.startswith('{"case"')


def write(row: Row) -> None:
    """Put a row into the table, which other processes write, too."""
    order = {key(case): place for place, case in enumerate(CASES)}
    with TABLE.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        lines = file.read().splitlines()
        rows = {each["case"]: each for each in (*map(json.loads, filter(is_row, lines)), row)}
        kept = sorted((each for each in rows.values() if each["case"] in order), key=lambda each: order[each["case"]])
        file.seek(0)
        file.truncate()
        file.write("\n".join([*(line for line in lines if not is_row(line)), *map(json.dumps, kept), ""]))


def run(case: Case, pool: Pool) -> Row:
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


def within(row: Row, case: Case) -> bool:
    """Return True if a row is inside of the limits of its case."""
    return float(row["loss"]) <= case.loss and float(row["norm"]) <= case.norm


def markdown(rows: Mapping[str, Row]) -> str:
    """Return the tables of the page: a part for each kind of option."""
    parts = []
    for group in dict.fromkeys(case.group for case in CASES):
        parts.append(f"| {group} | ranks | loss | gradient norm |\n|---|---|---|---|")
        parts += [line_of(case, rows[key(case)]) for case in CASES if case.group == group and key(case) in rows]
        parts.append("")
    return "\n".join(parts)


def line_of(case: Case, row: Row) -> str:
    """Return the line of a case in the table."""
    notes = "; ".join([f"with {case.stand_in}"] * bool(case.stand_in) + [case.why] * bool(case.why))
    return f"| {case.name}{f' ({notes})' if notes else ''} | {case.ranks} | {row['loss']} | {row['norm']} |"


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
            if not args.cases and read().get(key(case), {}).get("flags") == case.flags:
                continue
            row = run(case, pool)
            print(key(case), row.get("loss"), row.get("norm"), row.get("failed", "")[-300:], flush=True)
            if "failed" not in row:
                write(row)
            differ += not within(row, case)
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main())
