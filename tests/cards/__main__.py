"""Measure verification cards: ``python -m tests.cards [CARD...]``, or list what is old, or write the page.

A result is written as soon as it is there. The same command continues where it was stopped: cells that have a current
result are kept unless ``--cells`` names them. The exit status is 1 if a cell fails.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from tests.cards import results
from tests.cards.card import CARDS
from tests.cards.cell import Measures
from tests.cards.cells import CELLS
from tests.kit.pool import Pool


def measure(card: str, cell: str, pool: Pool) -> tuple[Measures, str]:
    """Measure one cell; return what was found, and why it failed if it did."""
    found: Measures = {}
    try:
        with tempfile.TemporaryDirectory(prefix="card-") as folder:
            found = CELLS[cell].measure(CARDS[card], Path(folder), pool)
    except Exception as error:
        return found, f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    return found, CELLS[cell].failure(found)


def part_of_array(given: str | None) -> tuple[int, int]:
    """Number from 0 and count of this task: of ``--array I/N``, of a Slurm array, or the only one."""
    if given:
        number, count = map(int, given.split("/"))
        return number % count, count
    first = int(os.environ.get("SLURM_ARRAY_TASK_MIN", 0))
    return int(os.environ.get("SLURM_ARRAY_TASK_ID", first)) - first, int(os.environ.get("SLURM_ARRAY_TASK_COUNT", 1))


def parsed(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.cards", description="Measure verification cards.")
    parser.add_argument("cards", nargs="*", metavar="CARD", help=f"of {', '.join(CARDS)}; all by default")
    parser.add_argument("--cells", metavar="A,B", help=f"measure these again; of {', '.join(CELLS)}")
    parser.add_argument("--array", metavar="I/N", help="each N-th card, from the I-th; a Slurm array's by default")
    parser.add_argument("--list", action="store_true", help="list the cells that would be measured")
    parser.add_argument("--stale", action="store_true", help="list cells that are empty, failed or older than the code")
    parser.add_argument(
        "--write", action="store_true", help="write docs/cards.md, with marks at cells older than the code"
    )
    args = parser.parse_args(argv)
    for name in {*args.cards} - CARDS.keys():
        parser.error(f"there is no card {name}; there are {', '.join(CARDS)}")
    for name in {*(args.cells.split(",") if args.cells else ())} - CELLS.keys():
        parser.error(f"there is no cell {name}; there are {', '.join(CELLS)}")
    return args


def main(argv: Sequence[str]) -> int:
    """Do what the command line asks for; return 1 if a cell failed."""
    args = parsed(argv)
    if args.stale:
        verdicts = [*results.verdicts()]
        for card, cell, verdict in verdicts:
            if verdict != "current" and not (verdict == "empty" and CELLS[cell].missing()):
                print(f"{card} {cell}: {verdict}")
        print(", ".join(f"{count} {verdict}" for verdict, count in Counter(v for *_, v in verdicts).most_common()))
        return 0
    if args.write:
        results.mark_older()
        results.PAGE.write_text(results.page())
        print(results.PAGE)
        return 0
    number, count = part_of_array(args.array)
    cards = (args.cards or [*CARDS])[number::count]
    wanted = [(card, cell) for card in cards for cell in (args.cells.split(",") if args.cells else CELLS)]
    if not args.cells:
        current = {(card, cell) for card, cell, verdict in results.verdicts() if verdict == "current"}
        wanted = [pair for pair in wanted if pair not in current]
    failed = 0
    torch.set_num_threads(1)
    with Pool() as pool:
        for card, cell in wanted:
            missing = CELLS[cell].missing()
            if args.list or missing:
                print(f"{card} {cell}" + (f": {missing}" if missing else ""), flush=True)
                continue
            began = time.monotonic()
            found, failure = measure(card, cell, pool)
            failed += bool(failure)
            results.write(card, cell, results.record_of(card, cell, found, failure, time.monotonic() - began))
            print(f"{card} {cell}: {f'FAILED {failure}' if failure else 'passed'} {found}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main(sys.argv[1:]))
