"""Concatenate token files: ``python tools/merge_datasets.py --input DIR --output-prefix data/all``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # if this checkout is not installed

from megatron.checkpoint.durable_files import checksum
from megatron.config.text import counted, echo, shell_word
from megatron.data.errors import DataError, StopSignal, ToolParser, run_tool
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.indexed_writer import (
    MergeInput,
    check_compatible,
    check_not_existing,
    check_output,
    find_prefixes,
    in_shard_order,
    merge_datasets,
)
from megatron.data.progress import ByteProgress
from megatron.data.remote_output import add_staging_flag, staged_output


def build_parser() -> ToolParser:
    """Return the command-line parser, with Megatron-LM's flag names."""
    parser = ToolParser(
        "merge_datasets.py",
        description="Concatenate pairs of .bin and .idx, as if all their text had been preprocessed at once.",
        epilog="The pairs of a folder are merged in the order of their names, shards of one corpus (preprocess_data.py "
        "--shard) in the order of their numbers. All must have been written with one "
        "tokenizer. To weight the corpora, do not merge them: pretrain_gpt.py --data-path W PREFIX ...",
    )
    parser.add_argument(
        "--input", required=True, nargs="+", metavar="DIR|PREFIX", help="folders of pairs, or pairs without .bin/.idx"
    )
    parser.add_argument("--output-prefix", required=True, metavar="PREFIX", help="path of the merged pair, no suffix")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing pair")
    add_staging_flag(parser)
    parser.add_argument("--multimodal", action="store_true", help="refused: multimodal data are not supported")
    return parser


def main(argv: Sequence[str]) -> int:
    """Merge the pairs.

    Returns:
        The exit status: 1 if the parts do not fit together or a file cannot be written, 2 for wrong flags or an
        existing output, 128 plus the signal number after SIGINT and SIGTERM.
    """
    parser = build_parser()
    args = parser.parse(argv)
    if args.multimodal:
        return parser.fail("--multimodal: multimodal data are not supported; merge text pairs only", 2)
    try:
        staged = staged_output(args, argv)
        if staged is not None:
            staged.check_not_existing([""], args.overwrite)
        else:
            check_not_existing((args.output_prefix,), args.overwrite)
    except DataError as error:
        return parser.fail(error, 2)

    def run(stop: StopSignal) -> None:
        if staged is None or not staged.is_complete([""], source_of(args)):
            merge_and_report(args)
        if staged is not None:
            staged.upload([""])
        shown = args.output_prefix if staged is None else staged.uri
        echo(f"for the next step, pretrain_gpt.py: --data-path {shell_word(shown)}")

    return run_tool(parser, run, args.output_prefix, "--output-prefix")


def source_of(args: argparse.Namespace) -> str:
    """Return a checksum of the pairs to merge."""
    pairs = [(prefix, IndexedDataset(prefix, floats=True).fingerprint) for prefix in find_prefixes(args.input)]
    return checksum(repr(pairs).encode())


def merge_and_report(args: argparse.Namespace) -> None:
    """Merge the pairs and print the result."""
    parts, note = in_shard_order([MergeInput.of(prefix) for prefix in find_prefixes(args.input)])
    if note is not None:
        echo(f"note: {note}")
    check_compatible(parts)
    check_output(args.input, parts, args.output_prefix)
    for part in parts:
        echo(f"{part.prefix}: {counted(part.documents, 'document')}, {counted(part.tokens, 'token')}")
    meter = ByteProgress(sys.stderr, sum(part.num_bytes for part in parts))
    with closing(meter):
        merge_datasets(parts, args.output_prefix, meter.add)
    documents, tokens = sum(part.documents for part in parts), sum(part.tokens for part in parts)
    echo(f"pairs: {len(parts):,}, documents: {documents:,}, tokens: {tokens:,}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
