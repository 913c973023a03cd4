"""Look into token files: ``python tools/inspect_dataset.py PREFIX --verify --samples 3 --histogram lengths.png``."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron.data.command_line import Parser, refused
from megatron.data.errors import DataError
from megatron.data.files.indexed import IndexedDataset
from megatron.data.files.inspect import Findings, Sample, Summary, samples, summarize, verify
from megatron.data.files.meter import Meter
from megatron.data.tokenizers.tokenizer import (
    Tokenizer,
    TokenizerChoice,
    TokenizerRecord,
    add_tokenizer_flags,
    build_tokenizer,
    read_record,
    recorded_tokenizer,
    wrote,
)

PICTURES = (".png", ".pdf", ".svg")
SHARES = {"p10": 0.1, "median": 0.5, "p90": 0.9, "p99": 0.99}
RECORDED = ("tokenizer_type", "vocab_size", "eod", "parses_special_tokens")  # of the tokenizer, with --json
SHOWN_IDS = 12


def build_parser() -> Parser:
    """The command line."""
    parser = Parser(
        "inspect_dataset.py",
        description="Say what pairs of .bin and .idx hold. Every pointer is checked in any case.",
        epilog="Exit status: 1 when something is wrong with one of the pairs, 2 for wrong flags.",
    )
    parser.add_argument("prefixes", nargs="+", metavar="PREFIX", help="pairs without .bin/.idx")
    parser.add_argument("--verify", action="store_true", help="read every id: is it below the vocabulary's size")
    parser.add_argument("--samples", type=int, default=0, metavar="N", help="show N documents, from first to last")
    parser.add_argument("--top", type=int, default=0, metavar="K", help="show the K most frequent ids (with --verify)")
    parser.add_argument("--histogram", type=Path, metavar="FILE", help="draw lengths of documents; .png, .pdf or .svg")
    parser.add_argument("--json", action="store_true", help="one JSON object per pair and line instead of text")
    parser.add_argument("--eod-id", type=int, metavar="N", help="the id that ends a document, where no record says it")
    add_tokenizer_flags(parser, required=False)
    return parser


def check_flags(args: argparse.Namespace) -> None:
    """Whether the flags go together.

    Raises:
        DataError: when they do not.
    """
    if args.samples < 0 or args.top < 0:
        raise DataError("--samples and --top are numbers of things to show", "--samples 3")
    if args.top and not args.verify:
        raise DataError("--top counts ids, which only --verify reads", f"--verify --top {args.top}")
    if args.histogram is not None and args.histogram.suffix not in PICTURES:
        seen = f"--histogram {args.histogram}: pictures end in {', '.join(PICTURES)}"
        raise DataError(seen, f"--histogram {args.histogram.with_suffix('.png')}")
    given = [name for name in ("tokenizer_model", "vocab_file", "merge_file") if getattr(args, name) is not None]
    if given and args.tokenizer_type is None:
        raise DataError(f"--{given[0].replace('_', '-')} says no type", "--tokenizer-type HuggingFaceTokenizer")


@dataclass(frozen=True)
class Meaning:
    """What is known of the ids of a pair; None for what nobody says."""

    record: TokenizerRecord | None
    tokenizer: Tokenizer | None
    vocab_size: int | None
    eod: int | None

    @classmethod
    def of(cls, prefix: str, args: argparse.Namespace) -> Meaning:
        """From the flags, else from the record beside the pair; its tokenizer is only read where it is needed.

        Raises:
            DataError: when record or tokenizer are damaged, or the flags name another tokenizer than the record.
        """
        record, tokenizer = read_record(prefix), None
        if args.tokenizer_type is not None:
            tokenizer = build_tokenizer(TokenizerChoice.from_args(args))
            if record is not None and not wrote(prefix, tokenizer):
                seen = f"{prefix} was written with another {record.tokenizer_type} than the flags name"
                raise DataError(seen, "leave out the flags of the tokenizer: its files lie beside the pair")
        elif args.samples or args.verify:
            tokenizer = recorded_tokenizer(prefix)
        says = tokenizer or record
        vocab_size, eod = (says.vocab_size, says.eod) if says else (None, None)
        return cls(
            record,
            tokenizer,
            vocab_size if args.vocab_size is None else args.vocab_size,
            eod if args.eod_id is None else args.eod_id,
        )


@dataclass(frozen=True)
class Inspection:
    """What was found in one pair."""

    data: IndexedDataset
    meaning: Meaning
    summary: Summary
    findings: Findings | None
    samples: list[Sample]

    @classmethod
    def of(cls, prefix: str, args: argparse.Namespace) -> Inspection:
        """Look at a pair.

        Raises:
            DataError: when a file of it is damaged, and as `Meaning.of`.
        """
        data = IndexedDataset(prefix, floats=True)
        meaning, findings = Meaning.of(prefix, args), None
        if args.verify and data.dtype.kind != "f":
            with closing(Meter(sys.stderr, data.tokens.nbytes)) as meter:
                findings = verify(data, meaning.vocab_size, meaning.eod, meter.add)
        return cls(data, meaning, summarize(data), findings, samples(data, args.samples, meaning.tokenizer))

    def problem(self, args: argparse.Namespace) -> str | None:
        """The sentence of what is wrong; None when nothing is known to be."""
        if args.verify and self.findings is None:
            return f"{self.data.prefix}: {self.data.dtype} are no ids, and training refuses them"
        if self.findings is not None and self.findings.wrong:
            below = "" if self.meaning.vocab_size is None else f" or not below {self.meaning.vocab_size}"
            return (
                f"{self.data.prefix}: {self.findings.wrong:,} of {self.data.num_tokens:,} ids are below 0{below}; "
                f"the first: {self.findings.first_wrong}"
            )
        return None


def facts(found: Inspection, args: argparse.Namespace) -> dict[str, Any]:
    """What ``--json`` prints."""
    record, findings = found.meaning.record, found.findings
    result = {
        "prefix": found.data.prefix,
        **{name: value for name, value in vars(found.summary).items() if name != "lengths"},
        "fingerprint": found.data.fingerprint,
        "tokenizer": record and {name: getattr(record, name) for name in RECORDED},
        "document_tokens": statistics(found.summary),
    }
    if findings is not None:
        nonempty = found.summary.lengths.total
        result["verified"] = {
            "vocab_size": found.meaning.vocab_size,
            "eod": found.meaning.eod,
            "wrong_ids": findings.wrong,
            "documents_that_end": findings.ended,
            "share_that_ends": None if findings.ended is None else findings.ended / max(nonempty, 1),
            "different_ids": len(findings.ids.values),
        }
        result["most_frequent_ids"] = findings.ids.most(args.top)
    return result | {"samples": [asdict(sample) for sample in found.samples], "problem": found.problem(args)}


def statistics(summary: Summary) -> dict[str, float]:
    """Of the tokens of a document that is not empty."""
    lengths = summary.lengths
    shares = {name: lengths.quantile(share) for name, share in SHARES.items()}
    return {"min": lengths.quantile(0), **shares, "max": lengths.quantile(1), "mean": round(lengths.mean, 1)}


def tell(found: Inspection, args: argparse.Namespace) -> None:
    """Print what people want to know."""
    s, record = found.summary, found.meaning.record
    print(found.data.prefix)
    print(f"  documents  {s.documents:,} ({s.empty_documents:,} empty)")
    print(f"  sequences  {s.sequences:,} ({s.empty_sequences:,} empty)")
    print(f"  tokens     {s.tokens:,} of type {s.dtype}")
    print(f"  bytes      {s.bin_bytes:,} .bin, {s.idx_bytes:,} .idx")
    lengths = ", ".join(f"{name} {value:,}" for name, value in statistics(s).items())
    print(f"  tokens of a document that is not empty: {lengths}")
    said = record and f"{record.tokenizer_type}, {record.vocab_size:,} ids, {record.eod} ends a document"
    parsed = record is not None and record.parses_special_tokens
    how = "; special tokens spelled out in texts became their ids" if parsed else ""
    print(f"  tokenizer  {said or 'no record'}{how}")
    if found.findings is not None:
        tell_findings(found, found.findings, args.top)
    for sample in found.samples:
        tell_sample(sample, found)


def tell_findings(found: Inspection, findings: Findings, top: int) -> None:
    """Print what ``--verify`` found; what is wrong is said elsewhere."""
    size, eod, documents = found.meaning.vocab_size, found.meaning.eod, found.summary.lengths.total
    different = f"{len(findings.ids.values):,} different ids"
    unknown = "nobody says how many the vocabulary has (--vocab-size N)"
    print(f"  ids        {different}; {unknown if size is None else f'the vocabulary has {size:,}'}")
    if findings.ended is None:
        print("  ends       nobody says which id ends a document (--eod-id N)")
    else:
        share = f"{findings.ended:,} of {documents:,} ({findings.ended / max(documents, 1):.1%})"
        print(f"  ends       {share} of the documents that are not empty end with {eod}")
    tokenizer = found.meaning.tokenizer
    for value, count in findings.ids.most(top):
        known = tokenizer is not None and 0 <= value < tokenizer.vocab_size
        text = f"  {json.dumps(tokenizer.decode([value]), ensure_ascii=False)}" if tokenizer and known else ""
        print(f"    {value:>8}  {count:>14,} times{text}")


def tell_sample(sample: Sample, found: Inspection) -> None:
    """Print a document, or its beginning."""
    part = "" if sample.tokens == len(sample.ids) else f", of which the first {len(sample.ids)}"
    print(f"  document {sample.document} of {found.summary.documents:,}: {sample.tokens:,} tokens{part}")
    if sample.ids:
        more = " ..." if sample.tokens > SHOWN_IDS else ""
        print(f"    ids  {' '.join(map(str, sample.ids[:SHOWN_IDS]))}{more}")
    if sample.text is not None:
        print(f"    text {json.dumps(sample.text, ensure_ascii=False)}")
    elif found.meaning.tokenizer is not None:
        print("    text none: the tokenizer does not have all of these ids")


def main(argv: Sequence[str]) -> int:
    """Say what the pairs hold.

    Returns:
        The exit status: 1 when something is wrong with one of them, 2 for wrong flags.
    """
    args = build_parser().parse(argv)
    try:
        check_flags(args)
    except DataError as error:
        return _fail(error, 2)
    status, inspections = 0, []
    for prefix in args.prefixes:
        try:
            found = Inspection.of(prefix, args)
        except (DataError, OSError) as error:
            status = _fail(error, 1)
            if args.json:
                print(json.dumps({"prefix": prefix, "problem": str(error)}), flush=True)
            continue
        inspections.append(found)
        if args.json:
            print(json.dumps(facts(found, args)), flush=True)
        else:
            tell(found, args)
        if problem := found.problem(args):
            status = _fail(problem, 1)
    if args.histogram is not None and inspections:
        try:
            from megatron.training.length_plot import draw_lengths

            draw_lengths([(Path(found.data.prefix).name, found.summary) for found in inspections], args.histogram)
        except ValueError as error:
            return _fail(error, 1)
        except OSError as error:
            return _fail(refused(error, args.histogram, "--histogram"), 1)
        print(f"lengths of documents: {args.histogram}", file=sys.stderr if args.json else sys.stdout)
    return status


def _fail(problem: object, status: int) -> int:
    print(f"inspect_dataset: {problem}", file=sys.stderr)
    return status


if __name__ == "__main__":
    for ending in (signal.SIGPIPE, signal.SIGINT):
        signal.signal(ending, signal.SIG_DFL)  # ends quietly when nobody reads on, and on Ctrl-C
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    sys.exit(main(sys.argv[1:]))
