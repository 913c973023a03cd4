"""Inspect token files, or the samples of a run's steps.

``python tools/inspect_dataset.py PREFIX --verify --samples 3 --histogram lengths.png``;
``python tools/inspect_dataset.py --run RUN_DIR --step 120`` and ``--run RUN_DIR --spike --exclude FILE``.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # if this checkout is not installed

from megatron.config.files import add_links_flag
from megatron.config.text import counted, echo
from megatron.data.errors import DataError, ToolParser, disk_error
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.inspect import DatasetSummary, check_ids, sample_documents, summarize
from megatron.data.manifest import DatasetManifest
from megatron.data.prefixes import local_prefix
from megatron.data.progress import ByteProgress
from megatron.data.tokenizers.base import Tokenizer
from megatron.data.tokenizers.tokenizer import (
    TokenizerOptions,
    add_tokenizer_flags,
    build_tokenizer,
    load_recorded_tokenizer,
    read_tokenizer_record,
    was_written_with,
)

PICTURE_SUFFIXES = (".png", ".pdf", ".svg")
QUANTILES = {"p10": 0.1, "median": 0.5, "p90": 0.9, "p99": 0.99}
RECORD_FIELDS = ("tokenizer_type", "vocab_size", "eod", "parses_special_tokens")  # of the tokenizer, with --json
MAX_IDS_SHOWN = 12

RUN_FLAGS = ("--run", "--step", "--spike")
"""Flags that ask for the samples of a run."""


def build_parser() -> ToolParser:
    """Return the command-line parser."""
    parser = ToolParser(
        "inspect_dataset.py",
        description="Describe pairs of .bin and .idx. Every pointer in an .idx is always checked.",
        epilog="Exit status: 1 if one of the pairs is invalid, 2 for wrong flags.",
    )
    parser.add_argument("prefixes", nargs="+", metavar="PREFIX", help="pairs without .bin/.idx")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="check every id against the vocabulary size, and the files against their manifest",
    )
    parser.add_argument("--samples", type=int, default=0, metavar="N", help="show N documents, from first to last")
    parser.add_argument("--top", type=int, default=0, metavar="K", help="show the K most frequent ids (with --verify)")
    parser.add_argument("--histogram", type=Path, metavar="FILE", help="draw lengths of documents; .png, .pdf or .svg")
    parser.add_argument("--json", action="store_true", help="one JSON object per pair and line instead of text")
    parser.add_argument("--eod-id", type=int, metavar="N", help="end-of-document id of data without a record")
    add_tokenizer_flags(parser, required=False)
    add_links_flag(parser)
    return parser


def check_flags(args: argparse.Namespace) -> None:
    """Raise DataError if the flags are inconsistent."""
    if args.samples < 0 or args.top < 0:
        raise DataError("--samples and --top must be at least 0", "--samples 3")
    if args.top and not args.verify:
        raise DataError("--top needs --verify, which reads the ids", f"--verify --top {args.top}")
    if args.histogram is not None and args.histogram.suffix not in PICTURE_SUFFIXES:
        seen = f"--histogram {args.histogram}: the suffix must be one of {', '.join(PICTURE_SUFFIXES)}"
        raise DataError(seen, f"--histogram {args.histogram.with_suffix('.png')}")
    given = [name for name in ("tokenizer_model", "vocab_file", "merge_file") if getattr(args, name) is not None]
    if given and args.tokenizer_type is None:
        raise DataError(
            f"--{given[0].replace('_', '-')} needs --tokenizer-type", "--tokenizer-type HuggingFaceTokenizer"
        )


class Inspection(NamedTuple):
    """Findings on one pair."""

    summary: DatasetSummary
    tokenizer: Tokenizer | None  # read only if needed
    facts: dict[str, Any]  # output of --json

    @classmethod
    def of(cls, prefix: str, args: argparse.Namespace) -> Inspection:
        """Inspect a pair."""
        data = IndexedDataset(prefix, floats=True)
        record, tokenizer = read_tokenizer_record(prefix), None
        if args.tokenizer_type is not None:
            tokenizer = build_tokenizer(TokenizerOptions.from_args(args))
            if record is not None and not was_written_with(prefix, tokenizer):
                seen = f"{prefix} was written with another {record.tokenizer_type} than the one given by the flags"
                raise DataError(seen, "leave out the tokenizer flags: its files lie beside the pair")
        elif args.samples or args.verify:
            tokenizer = load_recorded_tokenizer(prefix)
        source = tokenizer or record
        size = args.vocab_size if args.vocab_size is not None or source is None else source.vocab_size
        eod = args.eod_id if args.eod_id is not None or source is None else source.eod
        summary = summarize(data)
        facts = {
            "prefix": data.prefix,
            **{name: value for name, value in vars(summary).items() if name != "lengths"},
            "fingerprint": data.fingerprint if args.json else None,
            "tokenizer": record and {name: getattr(record, name) for name in RECORD_FIELDS},
            "document_tokens": length_statistics(summary),
        }
        problem = None
        if (manifest := DatasetManifest.read(local_prefix(prefix))) is not None:
            facts["manifest"] = {"counts": manifest.counts, **manifest.facts}
            if args.verify:
                with closing(ByteProgress(sys.stderr, sum(file.bytes for file in manifest.files.values()))) as meter:
                    omit = () if data.remote is None else ("bin",)  # which is compared as it is read
                    manifest.check_files(local_prefix(prefix), meter.add, omit)
        if args.verify and data.dtype.kind == "f":
            problem = f"{data.prefix}: values of type {data.dtype} are not ids and cannot be trained on"
        elif args.verify:
            with closing(ByteProgress(sys.stderr, data.tokens.nbytes)) as meter:
                found = check_ids(data, size, eod, meter.add)
            facts["verified"] = {
                "vocab_size": size,
                "eod": eod,
                "wrong_ids": found.wrong,
                "documents_that_end": found.ended,
                "share_that_ends": None if found.ended is None else found.ended / max(summary.lengths.total, 1),
                "different_ids": len(found.ids.values),
            }
            facts["most_frequent_ids"] = found.ids.most(args.top)
            if found.wrong:
                below = "" if size is None else f" or not below {size}"
                wrong = f"{found.wrong:,} of {data.num_tokens:,} ids"
                problem = f"{data.prefix}: {wrong} are below 0{below}; the first: {found.first_wrong}"
        facts["samples"] = [asdict(sample) for sample in sample_documents(data, args.samples, tokenizer)]
        return cls(summary, tokenizer, facts | {"problem": problem})


def length_statistics(summary: DatasetSummary) -> dict[str, float]:
    """Return statistics of the lengths of nonempty documents, in tokens."""
    lengths = summary.lengths
    shares = {name: lengths.quantile(share) for name, share in QUANTILES.items()}
    return {"min": lengths.quantile(0), **shares, "max": lengths.quantile(1), "mean": round(lengths.mean, 1)}


def print_inspection(found: Inspection) -> None:
    """Print the findings as text, except the problem."""
    s, facts = found.summary, found.facts
    lengths = ", ".join(f"{name} {value:,}" for name, value in facts["document_tokens"].items())
    record = facts["tokenizer"]
    tokenizer = "no record"
    if record is not None:
        how = "; special tokens spelled out in texts became their ids" if record["parses_special_tokens"] else ""
        ids = f"{record['vocab_size']:,} ids, {record['eod']} ends a document"
        tokenizer = f"{record['tokenizer_type']}, {ids}{how}"
    echo(facts["prefix"])
    echo(f"  documents  {s.documents:,} ({s.empty_documents:,} empty)")
    echo(f"  sequences  {s.sequences:,} ({s.empty_sequences:,} empty)")
    echo(f"  tokens     {s.tokens:,} of type {s.dtype}")
    echo(f"  bytes      {s.bin_bytes:,} .bin, {s.idx_bytes:,} .idx")
    echo(f"  tokens of a document that is not empty: {lengths}")
    echo(f"  tokenizer  {tokenizer}")
    if (manifest := facts.get("manifest")) is not None:
        dropped = ", ".join(f"{count:,} {reason}" for reason, count in manifest.get("dropped", {}).items())
        checked = "; checksums of all files are right" if "verified" in facts else ""
        records = manifest.get("inputs") or ()
        inputs = len({record["file"] for record in records}) + sum(record.get("files", 1) - 1 for record in records)
        echo(f"  manifest   {counted(inputs, 'input file')}; dropped: {dropped or 'nothing'}{checked}")
    if "verified" in facts:
        print_verified(found, facts["verified"])
    for sample in facts["samples"]:
        ids = sample["ids"]
        part = "" if sample["tokens"] == len(ids) else f", of which the first {len(ids)}"
        echo(f"  document {sample['document']} of {s.documents:,}: {sample['tokens']:,} tokens{part}")
        if ids:
            more = " ..." if sample["tokens"] > MAX_IDS_SHOWN else ""
            echo(f"    ids  {' '.join(map(str, ids[:MAX_IDS_SHOWN]))}{more}")
        if sample["text"] is not None:
            echo(f"    text {json.dumps(sample['text'], ensure_ascii=False)}")
        elif found.tokenizer is not None:
            echo("    text none: some ids are not in the tokenizer")


def print_verified(found: Inspection, verified: Mapping[str, Any]) -> None:
    """Print the findings of ``--verify``."""
    size, ended, tokenizer = verified["vocab_size"], verified["documents_that_end"], found.tokenizer
    vocabulary = "the vocabulary size is unknown (--vocab-size N)" if size is None else f"the vocabulary has {size:,}"
    echo(f"  ids        {verified['different_ids']:,} different ids; {vocabulary}")
    if ended is None:
        echo("  ends       the end-of-document id is unknown (--eod-id N)")
    else:
        share = f"{ended:,} of {found.summary.lengths.total:,} ({verified['share_that_ends']:.1%})"
        echo(f"  ends       {share} of the documents that are not empty end with {verified['eod']}")
    for value, count in found.facts["most_frequent_ids"]:
        known = tokenizer is not None and 0 <= value < tokenizer.vocab_size
        text = f"  {json.dumps(tokenizer.decode([value]), ensure_ascii=False)}" if tokenizer and known else ""
        echo(f"    {value:>8}  {count:>14,} times{text}")


def main(argv: Sequence[str]) -> int:
    """Inspect the pairs.

    Returns:
        The exit status: 1 if one of them is invalid, 2 for wrong flags.
    """
    own, parser = argv[: argv.index("--")] if "--" in argv else argv, build_parser()
    of_run, of_help = any(word.split("=")[0] in RUN_FLAGS for word in own), not {"-h", "--help"}.isdisjoint(own)
    if "--" in argv or of_run or of_help:
        from tools.lib import inspect_run

        if of_help:
            echo(parser.format_help(), inspect_run.build_parser().format_help(), sep="\n\n")
            return 0
        return inspect_run.main(argv)
    args = parser.parse(argv)
    try:
        check_flags(args)
    except DataError as error:
        return parser.fail(error, 2)
    return inspect(parser, args)


def inspect(parser: ToolParser, args: argparse.Namespace) -> int:
    """Print the findings on the pairs; return the exit status."""
    status, inspections = 0, []
    for prefix in args.prefixes:
        try:
            found = Inspection.of(prefix, args)
        except (DataError, OSError) as error:
            status = parser.fail(error, 1)
            if args.json:
                echo(json.dumps({"prefix": prefix, "problem": str(error)}), flush=True)
            continue
        inspections.append(found)
        if args.json:
            echo(json.dumps(found.facts), flush=True)
        else:
            print_inspection(found)
        if found.facts["problem"] is not None:
            status = parser.fail(found.facts["problem"], 1)
    if args.histogram is not None and inspections:
        try:
            from tools.lib.plots import draw_lengths

            panels = [(Path(found.facts["prefix"]).name, found.summary) for found in inspections]
            draw_lengths(panels, args.histogram)
        except ValueError as error:
            return parser.fail(error, 1)
        except OSError as error:
            return parser.fail(disk_error(error, args.histogram, "--histogram"), 1)
        echo(f"lengths of documents: {args.histogram}", file=sys.stderr if args.json else sys.stdout)
    return status


if __name__ == "__main__":
    for ending in (signal.SIGPIPE, signal.SIGINT):
        signal.signal(ending, signal.SIG_DFL)  # exit quietly on Ctrl-C and when the reader of a pipe closes it
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    sys.exit(main(sys.argv[1:]))
