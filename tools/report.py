"""Write the page of a run, as one HTML file: ``python tools/report.py RUN_DIR``; ``--serve`` shows it live.

The file needs no network and no other file. It has the curves of the run over tokens with what happened, where the
hours went, speed, cost, experts, data, checkpoints, incidents, configuration and origin.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # if this checkout is not installed

from megatron.checkpoint.durable_files import publish_file
from megatron.config.text import echo, format_bytes
from tools.lib.report_page import PageOptions, report_page
from tools.lib.run_record import read_record

PAGE_FILE = "report.html"


def build_parser() -> argparse.ArgumentParser:
    """Return the command-line parser."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="--run-dir of a run, finished or not")
    parser.add_argument("--against", type=Path, metavar="RUN_DIR", help="another run: its loss, and what differs")
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"page to write (default: RUN_DIR/{PAGE_FILE})")
    parser.add_argument("--price", type=float, metavar="X", help="of an hour of one rank, in any currency")
    return parser


def main(argv: Sequence[str]) -> int:
    """Write the page, print its path and return the exit status."""
    command_line = build_parser()
    arguments = command_line.parse_args(argv)
    try:
        record = read_record(arguments.run_dir)
    except ValueError as error:
        echo(f"report: {error}", file=sys.stderr)
        return 2
    out: Path = arguments.out or arguments.run_dir / PAGE_FILE
    page = report_page(record, PageOptions(price=arguments.price)).encode()
    try:
        publish_file(out, page)
    except OSError as error:
        echo(f"report: {out} cannot be written: {error.strerror}", file=sys.stderr)
        return 2
    echo(f"{out} ({format_bytes(len(page))})")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
