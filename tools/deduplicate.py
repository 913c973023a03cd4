"""List duplicate documents: ``python tools/deduplicate.py --input text --output data/duplicates``."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # if this checkout is not installed

if __name__ == "__main__":  # until main has a handler of its own; the imports below take a while
    signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))

from megatron.config.text import echo, format_bytes, shell_word
from megatron.data.errors import DataError, StopSignal, ToolParser, run_tool
from megatron.data.preprocess.corpus import BLOCK_BYTES
from megatron.data.preprocess.deduplicate import Deduplication, DeduplicationOptions
from megatron.data.preprocess.drop_list import LIST_NAME
from megatron.data.preprocess.files import add_input_flags, find_text_files, positive_int
from megatron.data.preprocess.minhash import MinHashOptions
from megatron.data.preprocess.workers import available_cores
from megatron.data.progress import ByteProgress

MEMORY_MB = 512
SIMILARITIES = (0.5, 0.6, 0.7, 0.8, 0.9)


def build_parser() -> ToolParser:
    """Return the command-line parser. Input flags are those of preprocess_data.py."""
    defaults = MinHashOptions()
    parser = ToolParser(
        "deduplicate.py",
        description="Find documents that are equal or nearly equal to an earlier one, for preprocess_data.py --drop.",
        epilog="The first document of each cluster of duplicates is kept. The same command continues an interrupted "
        "run. Exit status: 0 written, 1 not written, 2 wrong flags, 130 or 143 stopped.",
    )
    add_input_flags(parser)
    add = parser.add_argument_group("duplicates").add_argument
    method = "minhash (default): the same text, or an agreement in a band of MinHash values; exact: the same text only"
    add("--method", choices=("minhash", "exact"), default="minhash", help=method)
    add("--ngram", type=positive_int, metavar="N", help=f"words of an n-gram ({defaults.ngram})")
    add("--bands", type=positive_int, metavar="B", help=f"bands; agreement in any of them counts ({defaults.bands})")
    add("--rows", type=positive_int, metavar="R", help=f"values of a band, which all have to agree ({defaults.rows})")
    add("--seed", type=int, metavar="N", help=f"seed of the hash functions ({defaults.seed})")
    add = parser.add_argument_group("output and performance").add_argument
    memory = f"MiB for tables of all processes; {format_bytes(BLOCK_BYTES)} of text per worker come to it ({MEMORY_MB})"
    add("--output", required=True, metavar="DIR", help="new folder for the list, and until then for the work")
    add("--workers", type=positive_int, metavar="N", help="processes (the available cores)")
    add("--memory", type=positive_int, default=MEMORY_MB, metavar="MIB", help=memory)
    return parser


def minhash_options(args: argparse.Namespace) -> MinHashOptions | None:
    """Return the parameters of the signatures; raise DataError for flags without effect."""
    given = {name: getattr(args, name) for name in ("ngram", "bands", "rows", "seed")}
    given = {name: value for name, value in given.items() if value is not None}
    if args.method == "minhash":
        return MinHashOptions(**given)
    if given:
        raise DataError(f"--{next(iter(given))} applies only to MinHash", "--method minhash")
    return None


def format_report(report: dict[str, Any], minhash: MinHashOptions | None) -> str:
    """Return the counts, in a few lines."""
    documents, dropped = report["documents"], report["dropped"]
    size, dropped_size = report["text bytes"], report["dropped bytes"]
    exact, near = report["exact duplicates"], report["near duplicates"]
    clusters = sum(report["clusters by size"].values())
    lines = [
        f"documents: {documents:,}, text bytes: {size:,}, passed over: {report['bad documents']:,}",
        f"duplicates: {dropped:,} ({dropped / documents:.1%}) in {clusters:,} clusters, "
        f"{dropped_size:,} bytes ({dropped_size / max(1, size):.1%}); exact: {exact:,}, near: {near:,}",
    ]
    if minhash is not None:
        found = ", ".join(f"{similarity}: {minhash.probability(similarity):.2%}" for similarity in SIMILARITIES)
        lines.append(f"a pair is found by its similarity: {found}")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Find the duplicates, write the list and print a summary; return the exit status."""
    parser = build_parser()
    args = parser.parse(argv)
    try:
        minhash = minhash_options(args)
        if (Path(args.output) / LIST_NAME).exists():
            raise DataError(f"{args.output} holds a list already", "another --output")
    except DataError as error:
        return parser.fail(error, 2)

    def run(stop: StopSignal) -> None:
        files = find_text_files(args.input, args.suffix, args.exclude, args.follow_links)
        stop.wait_for_checks()
        stored = sum(file.stat().st_size for file in files)
        options = DeduplicationOptions(
            files,
            tuple(args.json_keys),
            Path(args.output),
            minhash,
            workers=args.workers or min(available_cores(), 1 + stored // BLOCK_BYTES),
            memory=args.memory << 20,
            skip_bad=args.on_bad_line == "skip",
            max_line_bytes=args.max_line_bytes,
        )
        with closing(ByteProgress(sys.stderr, stored)) as progress:
            report = Deduplication(options, progress.message).run(progress.add, stop.check)
        echo(format_report(report, minhash))
        echo(f"for the next step, preprocess_data.py: --drop {shell_word(args.output)}")

    return run_tool(parser, run, args.output, "--output")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
