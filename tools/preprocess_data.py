"""Turn text into token files: ``python tools/preprocess_data.py --input corpus.jsonl --output-prefix data/corpus``."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from megatron.config.numbers import format_bytes
from megatron.data.command_line import Parser, StoppedError, refused
from megatron.data.errors import DataError
from megatron.data.files.indexed import id_dtype
from megatron.data.files.output import check_new
from megatron.data.text.blocks import BLOCK_BYTES
from megatron.data.text.corpus import add_input_flags, find_files
from megatron.data.text.preprocess import Plan, output_prefix, write_dataset
from megatron.data.text.progress import Progress, Totals, short
from megatron.data.text.stop import Stop, signals_noted
from megatron.data.tokenizers.engine import WISHES
from megatron.data.tokenizers.huggingface import NO_FILES
from megatron.data.tokenizers.tokenizer import Tokenizer, TokenizerChoice, add_tokenizer_flags, build_tokenizer

HARMLESS = {
    "--partitions": (True, "the input is never copied into partitions"),
    "--keep-sequential-samples": (False, "documents always keep their order"),
    "--keep-newlines": (False, "documents are not split, so newlines are kept"),
    "--lang": (True, "documents are not split into sentences, so their language does not matter"),
    "--use-gigatoken": (False, "--engine auto uses gigatoken where its ids are proven to be the same"),
    "--legacy-tokenizer": (False, "there is one way to make each tokenizer"),
    "--tokenizer-hf-no-use-fast": (False, "a tokenizer.json gives the same ids whatever reads it"),
}
"""Megatron-LM's flags that change nothing here: whether each has a value, and why."""

REFUSED = {
    "--split-sentences": "sentences are for BERT and T5; the models of this project read documents",
    "--find-optimal-num-workers": "--workers is the number of cores unless it is given, and more is never faster",
    "--workers-to-check": "--workers is the number of cores unless it is given, and more is never faster",
    "--max-documents": "all documents are read; `head -n N` makes a smaller input",
    "--performance-dir": "the speed is printed, and not kept in a file",
    "--vocab-extra-ids": "ids without text are for T5; add tokens to the tokenizer.json instead",
    "--tokenizer-metadata": "the type is said with --tokenizer-type, and where it is with --tokenizer-model",
    "--null-tokenizer-eod-id": "NullTokenizer ends documents with its last id, --vocab-size less one",
    "--trust-remote-code": "code that comes with a model is not run; give a folder with a tokenizer.json",
}
"""Megatron-LM's flags that ask for what is not done here, and what to do instead."""


def build_parser() -> Parser:
    """The flags, spelled as Megatron-LM's preprocessing spells them."""
    parser = Parser(
        "preprocess_data.py",
        description="Turn text into the token files PREFIX_KEY_document.{bin,idx} that training reads.",
        epilog="Files ending in .jsonl, .json or .ndjson, and .gz, .zst, .bz2 or .xz after it, hold one JSON object "
        "per line; any other file is one document. The files are the same for any number of workers and any engine. "
        "Exit status: 0 written, 1 not written, 2 wrong flags, 130 or 143 stopped.",
    )
    add_input_flags(parser)
    add_tokenizer_flags(parser)
    write = parser.add_argument_group("output")
    write.add_argument("--append-eod", action="store_true", help="end every document that is not empty with an end id")
    write.add_argument(
        "--output-prefix", required=True, metavar="PREFIX", help="path and beginning of the files' names"
    )
    write.add_argument("--overwrite", action="store_true", help="take the place of what is there under this prefix")
    run = parser.add_argument_group("work")
    run.add_argument("--workers", type=int, metavar="N", help="processes that encode (the cores of this process)")
    run.add_argument(
        "--engine",
        choices=WISHES,
        default="auto",
        help="the library that encodes: gigatoken where it is proven to give the same ids (auto), or one of the two",
    )
    run.add_argument(
        "--log-interval",
        type=int,
        metavar="N",
        help="documents between progress lines in a file (a line every 10 seconds); 0 for none",
    )
    theirs = parser.add_argument_group("of Megatron-LM, without effect")
    for flag, (has_value, why) in HARMLESS.items():
        if has_value:
            theirs.add_argument(flag, metavar="X", help=why)
        else:
            theirs.add_argument(flag, action="store_const", const=True, help=why)
    return parser


def cores() -> int:
    """How many cores this process may keep busy: of those that it is bound to, as many as its control group allows."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return bound
    return bound if quota == "max" else max(1, min(bound, round(int(quota) / int(period))))


def useful_workers(files: Sequence[Path], wanted: int | None) -> int:
    """As many processes as were asked for, or as there are cores and blocks for them; at least one."""
    if wanted is not None:
        return wanted
    blocks = 1 + sum(file.stat().st_size for file in files) // BLOCK_BYTES
    return min(cores(), blocks)


def summary(plan: Plan, totals: Totals, dtype: str, engine: str, seconds: float) -> str:
    """What was read and written, in a few lines."""
    ratio = totals.text_bytes / totals.tokens
    return (
        f"files: {len(plan.files):,}, documents: {totals.documents:,}, empty texts: {totals.empty:,}, "
        f"passed over: {totals.bad:,}\n"
        f"text bytes: {totals.text_bytes:,}, tokens: {totals.tokens:,} ({dtype}), bytes per token: {ratio:.2f}\n"
        f"time: {seconds:.1f}s, {format_bytes(totals.text_bytes / seconds)}/s, "
        f"{short(totals.tokens / seconds)} tokens/s, workers: {plan.workers}, engine: {engine}"
    )


def run(args: argparse.Namespace, tokenizer: Tokenizer, stop: Stop) -> None:
    """Write the files and print what and where they are.

    Raises:
        DataError: when the input is not what it should be.
        OSError: when a file cannot be read or written.
    """
    started = time.monotonic()
    stop.wait_for_checks()
    files = find_files(args.input, args.suffix, args.exclude)
    plan = Plan(
        files,
        tuple(args.json_keys),
        args.output_prefix,
        TokenizerChoice.from_args(args),
        args.append_eod,
        args.engine,
        useful_workers(files, args.workers),
        args.on_bad_line == "skip",
    )
    if plan.workers == 1:
        os.environ.setdefault("RAYON_NUM_THREADS", "1")  # the libraries that encode would start one per core
    progress = Progress(sys.stderr, sum(file.stat().st_size for file in files), args.log_interval)
    try:
        totals, engine = write_dataset(plan, tokenizer, progress, stop.check)
    finally:
        progress.close()
    dtype = id_dtype(tokenizer.vocab_size).name
    print(summary(plan, totals, dtype, engine.name, time.monotonic() - started))
    if tokenizer.files and not tokenizer.hugging_face_files():
        print(NO_FILES)
    for key in args.json_keys:
        print(f"for the next step, pretrain_gpt.py: --data-path {output_prefix(args.output_prefix, key)}")


def main(argv: Sequence[str]) -> int:
    """Turn text into token files.

    Returns:
        The exit status: 1 when the input is not what it should be or the disk refuses, 2 for wrong flags, 128 and the
        signal's number after SIGINT and SIGTERM.
    """
    parser = build_parser()
    theirs = next((flag for flag in REFUSED if any(a.split("=")[0] == flag for a in argv)), None)
    if theirs is not None:
        parser.error(f"{theirs}: {REFUSED[theirs]}")
    args = parser.parse(argv)
    if args.workers is not None and args.workers < 1:
        parser.error(f"--workers is {args.workers}, must be at least 1")
    for flag, (_, why) in HARMLESS.items():
        if getattr(args, flag[2:].replace("-", "_")) is not None:
            print(f"{flag} has no effect: {why}", file=sys.stderr)
    try:
        with signals_noted() as stop:
            return _write(args, stop)
    except StoppedError as stopped:
        return _fail(f"stopped by {stopped}; nothing was written under {args.output_prefix}", stopped.status)


def _write(args: argparse.Namespace, stop: Stop) -> int:
    """The exit status of a run that no signal ends."""
    try:
        check_new((output_prefix(args.output_prefix, key) for key in args.json_keys), args.overwrite)
        tokenizer = build_tokenizer(TokenizerChoice.from_args(args))
    except DataError as error:
        return _fail(str(error), 2)
    try:
        run(args, tokenizer, stop)
    except DataError as error:
        return _fail(str(error), 1)
    except OSError as error:
        return _fail(str(refused(error, args.output_prefix, "--output-prefix")), 1)
    return 0


def _fail(sentence: str, status: int) -> int:
    print(f"preprocess_data: {sentence}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
