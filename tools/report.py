"""Write the page of a run, as one HTML file: ``python tools/report.py RUN_DIR``; ``--serve`` shows it live.

The file needs no network and no other file. It has the curves of the run over tokens with what happened, where the
hours went, speed, cost, experts, data, checkpoints, incidents, configuration and origin.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # if this checkout is not installed

from megatron.checkpoint.durable_files import publish_file
from megatron.config.errors import UserError
from megatron.config.text import echo, format_bytes, printable
from megatron.data.errors import DataError
from tools.lib.report_page import PageOptions, page_around, report_body, report_page
from tools.lib.report_server import LOOPBACK, LivePage, make_server
from tools.lib.run_differences import (
    changed_facts,
    changed_options,
    compare_steps,
    open_samples,
    read_run,
    report_facts,
    report_options,
    report_samples,
    report_steps,
)
from tools.lib.run_record import RunRecord, read_record

PAGE_FILE = "report.html"
UNREADABLE = 2
"""Exit status."""


def build_parser() -> argparse.ArgumentParser:
    """Return the command-line parser."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="--run-dir of a run, finished or not")
    parser.add_argument("--against", type=Path, metavar="RUN_DIR", help="another run: its loss, and what differs")
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"page to write (default: RUN_DIR/{PAGE_FILE})")
    parser.add_argument("--price", type=float, metavar="X", help="of an hour of one rank, in any currency")
    parser.add_argument("--open-data", action="store_true", help="open the data, and count what was read")
    parser.add_argument(
        "--serve",
        type=int,
        nargs="?",
        const=0,
        metavar="PORT",
        help="show the page live instead of writing it, at a free port or at PORT, until Ctrl-C",
    )
    parser.add_argument("--host", default=LOOPBACK, help=f"to serve at (default: {LOOPBACK}, this machine only)")
    return parser


def main(argv: Sequence[str]) -> int:
    """Write or serve the page, print where it is and return the exit status."""
    command_line = build_parser()
    arguments = command_line.parse_args(argv)
    if arguments.price is not None and not 0 <= arguments.price < 1e12:
        command_line.error(f"--price {arguments.price}: must be at least 0")
    if arguments.serve is not None and (arguments.out or not 0 <= arguments.serve < 65536):
        command_line.error("--serve takes a port from 1 to 65535, and writes no page to --out")
    try:
        record = read_record(arguments.run_dir)
        options = page_options(record, arguments)
    except ValueError as error:
        echo(f"report: {error}", file=sys.stderr)
        return UNREADABLE
    try:
        if arguments.serve is not None:
            return serve(arguments.run_dir, options, arguments.host, arguments.serve)
        out: Path = arguments.out or arguments.run_dir / PAGE_FILE
        page = report_page(record, options).encode()
        publish_file(out, page)
    except OSError as error:
        echo(f"report: {error.filename or error}: {error.strerror}", file=sys.stderr)
        return UNREADABLE
    echo(f"{out} ({format_bytes(len(page))})")
    return 0


def page_options(record: RunRecord, arguments: argparse.Namespace) -> PageOptions:
    """Return what the page shows besides the folder. Raises ValueError if the other run is none."""
    other, differences = None, list[str]()
    if arguments.against is not None:
        other = read_record(arguments.against)
        differences = [*differing(arguments.run_dir, arguments.against, arguments.open_data)]
    read = None
    if arguments.open_data:
        try:
            read = read_of_sources(arguments.run_dir)
        except (DataError, UserError, OSError, ValueError) as error:
            record.missing.append(f"the data cannot be opened: {printable(str(error))}")
    return PageOptions(arguments.price, other, differences, read)


def differing(folder: Path, other: Path, open_data: bool) -> Iterator[str]:
    """Yield the lines of tools/diff_runs.py. Raises ValueError if one is no run folder."""
    a, b = read_run(folder), read_run(other)
    yield from (f"note: {sentence}" for sentence in (*a.missing, *b.missing))
    steps = compare_steps(a, b)
    yield from report_options(a, b, changed_options(a, b))
    yield from report_steps(a, b, steps, 0.0)
    yield from report_samples(a, b, steps, open_data)
    yield from report_facts(changed_facts(a, b))


def read_of_sources(folder: Path) -> dict[str, int]:
    """Return the tokens that a run has read of each source."""
    run = read_run(folder)
    data = open_samples(run)
    samples = int(run.lines[max(run.lines)]["consumed-samples"]) if run.lines else 0
    return {usage.source: usage.tokens for usage in data.datasets["train"].source_usage(samples)}


def serve(folder: Path, options: PageOptions, host: str, port: int) -> int:
    """Serve the page until Ctrl-C. Raises OSError if the address cannot be had."""
    live = LivePage(
        folder,
        lambda: report_body(read_record(folder), options),
        lambda body: page_around(body, printable(folder.resolve().name)),
    )
    server, address = make_server(live, host, port)
    if host != LOOPBACK:
        echo("report: whoever knows this address can read the page; nothing is encrypted", file=sys.stderr)
    tunnel = f"{server.server_port}:{host}:{server.server_port}"
    echo(f"{address}\nCtrl-C ends it; from another machine: ssh -L {tunnel} USER@THIS_MACHINE", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
