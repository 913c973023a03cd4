"""Turn text into token files: ``python tools/preprocess_data.py --input corpus.jsonl --output-prefix data/corpus``."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence

from megatron.data.corpus import add_input_flags, find_files, read_documents
from megatron.data.errors import DataError
from megatron.data.preprocess import Progress, output_prefix, write_dataset
from megatron.data.tokenizer import TokenizerChoice, add_tokenizer_flags, build_tokenizer


def build_parser() -> argparse.ArgumentParser:
    """The flags, spelled as Megatron-LM's preprocessing spells them."""
    parser = argparse.ArgumentParser(
        description="Turn text into the token files PREFIX_KEY_document.{bin,idx} that training reads.",
        epilog="Files ending in .jsonl or .json hold one JSON object per line; any other file is one document.",
        allow_abbrev=False,
    )
    add_input_flags(parser)
    add_tokenizer_flags(parser)
    write = parser.add_argument_group("output")
    write.add_argument("--append-eod", action="store_true", help="end every document that is not empty with an end id")
    write.add_argument(
        "--output-prefix", required=True, metavar="PREFIX", help="path and beginning of the files' names"
    )
    write.add_argument(
        "--log-interval", type=int, default=1000, metavar="N", help="documents between progress lines (1000)"
    )
    return parser


def reporter(interval: int) -> Callable[[Progress], None]:
    """A function that prints a line to stderr after every ``interval`` documents."""
    start = time.monotonic()

    def report(progress: Progress) -> None:
        if interval > 0 and progress.documents % interval == 0:
            megabytes = progress.input_bytes / 1e6
            rate = megabytes / max(time.monotonic() - start, 1e-9)
            print(f"{progress.documents:,} documents, {megabytes:,.1f} MB, {rate:.1f} MB/s", file=sys.stderr)

    return report


def main(argv: Sequence[str]) -> int:
    """Write the files and print what and where they are.

    Returns:
        The exit status: 1 when the input is not what it should be, 2 for wrong flags.
    """
    args = build_parser().parse_args(argv)
    try:
        tokenizer = build_tokenizer(TokenizerChoice.from_args(args))
    except DataError as error:
        return _fail(error, 2)
    try:
        files = find_files(args.input, args.suffix, args.exclude)
        done = write_dataset(
            (document for file in files for document in read_documents(file, args.json_keys)),
            args.json_keys,
            args.output_prefix,
            tokenizer,
            args.append_eod,
            reporter(args.log_interval),
        )
    except (DataError, OSError) as error:
        return _fail(error, 1)
    print(
        f"files: {len(files):,}, documents: {done.documents:,}, "
        f"input bytes: {done.input_bytes:,}, tokens: {done.tokens:,}"
    )
    for key in args.json_keys:
        print(f"for the next step, pretrain_gpt.py: --data-path {output_prefix(args.output_prefix, key)}")
    return 0


def _fail(error: Exception, status: int) -> int:
    print(f"preprocess_data: {error}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
