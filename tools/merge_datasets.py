"""Put token files end to end: ``python tools/merge_datasets.py --input DIR --output-prefix data/all``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import closing

from megatron.data.errors import DataError
from megatron.data.files.merge import Part, check_output, check_parts, find_prefixes, merge
from megatron.data.files.meter import Meter


def build_parser() -> argparse.ArgumentParser:
    """The flags, spelled as Megatron-LM's merging spells them."""
    parser = argparse.ArgumentParser(
        description="Put pairs of .bin and .idx end to end, as if all their text had been preprocessed at once.",
        epilog="The pairs of a folder are taken in the order of their names. All must have been written with one "
        "tokenizer. Where the share of each corpus matters, leave them apart: pretrain_gpt.py --data-path W PREFIX ...",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--input", required=True, nargs="+", metavar="DIR|PREFIX", help="folders of pairs, or pairs without .bin/.idx"
    )
    parser.add_argument("--output-prefix", required=True, metavar="PREFIX", help="path of the merged pair, no suffix")
    parser.add_argument("--multimodal", action="store_true", help="refused: the modes of multimodal data are not read")
    return parser


def main(argv: Sequence[str]) -> int:
    """Write the pair and print what and where it is.

    Returns:
        The exit status: 1 when the parts do not go together or the disk refuses, 2 for wrong flags.
    """
    args = build_parser().parse_args(argv)
    if args.multimodal:
        return _fail("--multimodal: the modes of multimodal data are not read; text pairs only", 2)
    try:
        parts = [Part.of(prefix) for prefix in find_prefixes(args.input)]
        check_parts(parts)
        check_output(args.input, parts, args.output_prefix)
        for part in parts:
            print(f"{part.prefix}: {part.documents:,} documents, {part.tokens:,} tokens")
        meter = Meter(sys.stderr, sum(part.num_bytes for part in parts))
        with closing(meter):
            merge(parts, args.output_prefix, meter.add)
    except (DataError, OSError) as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        return _fail("interrupted, and nothing was written", 130)
    documents, tokens = sum(part.documents for part in parts), sum(part.tokens for part in parts)
    print(f"pairs: {len(parts):,}, documents: {documents:,}, tokens: {tokens:,}")
    print(f"for the next step, pretrain_gpt.py: --data-path {args.output_prefix}")
    return 0


def _fail(problem: object, status: int) -> int:
    print(f"merge_datasets: {problem}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
