"""Encode text to token files: ``python tools/preprocess_data.py --input corpus.jsonl --output-prefix data/corpus``."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # if this checkout is not installed

if __name__ == "__main__":  # until main has a handler of its own; the imports below take a while
    signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))

from megatron.checkpoint.durable_files import checksum
from megatron.config.text import echo, shell_word
from megatron.data.errors import DataError, StopSignal, ToolParser, run_tool
from megatron.data.indexed_writer import check_not_existing, id_dtype
from megatron.data.preprocess.corpus import BLOCK_BYTES
from megatron.data.preprocess.drop_list import DropList
from megatron.data.preprocess.encode import PreprocessOptions, RunState, output_prefix, write_dataset
from megatron.data.preprocess.files import add_input_flags, find_text_files, spool_pipes
from megatron.data.preprocess.quality import FILTERS, GROUPS, expand_groups
from megatron.data.preprocess.remote import InputFile
from megatron.data.preprocess.sentences import LANGUAGES, SentenceSplitter
from megatron.data.preprocess.shards import FilesPart, Shard, select_part
from megatron.data.preprocess.transforms import FILTER, MAP, QUALITY, DocumentTransforms, Step
from megatron.data.preprocess.workers import available_cores
from megatron.data.progress import PreprocessProgress, PreprocessTotals
from megatron.data.remote_output import add_staging_flag, staged_output
from megatron.data.tokenizers.base import Tokenizer
from megatron.data.tokenizers.engine import ENGINES
from megatron.data.tokenizers.huggingface import NO_EXPORT_NOTE
from megatron.data.tokenizers.tokenizer import TokenizerOptions, TokenizerRecord, add_tokenizer_flags, build_tokenizer

IGNORED_FLAGS = {
    "--partitions": (True, "the input is never copied into partitions"),
    "--keep-sequential-samples": (False, "documents always keep their order"),
    "--use-gigatoken": (False, "--engine auto uses gigatoken if its ids are equal"),
    "--legacy-tokenizer": (False, "there is one implementation of each tokenizer"),
    "--tokenizer-hf-no-use-fast": (False, "a tokenizer.json gives the same ids whatever reads it"),
}
"""Megatron-LM's flags without effect here: whether each takes a value, and the reason."""

REFUSED_FLAGS = {
    "--find-optimal-num-workers": "--workers defaults to the number of cores, and more is never faster",
    "--workers-to-check": "--workers defaults to the number of cores, and more is never faster",
    "--max-documents": "all documents are read; `head -n N` makes a smaller input",
    "--performance-dir": "the speed is printed, not written to a file",
    "--vocab-extra-ids": "ids without text are for T5; add tokens to the tokenizer.json instead",
    "--tokenizer-metadata": "use --tokenizer-type and --tokenizer-model",
    "--null-tokenizer-eod-id": "NullTokenizer ends documents with its last id, --vocab-size less one",
    "--trust-remote-code": "code that comes with a model is not run; use a folder with a tokenizer.json",
}
"""Megatron-LM's unsupported flags: the reason and the alternative."""


class _AddSteps(argparse.Action):
    """Appends the values of all flags of steps to one list, in their order."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, *_: object) -> None:
        flag = self.option_strings[0]
        try:
            names = [name for value in values for name in (expand_groups(value) if flag == QUALITY else (value,))]
        except DataError as error:
            parser.exit(2, f"preprocess_data: {error}\n")
        namespace.steps = [*getattr(namespace, "steps", ()), *(Step(flag, name) for name in names)]


def build_parser() -> ToolParser:
    """Return the command-line parser, with Megatron-LM's flag names."""
    parser = ToolParser(
        "preprocess_data.py",
        description="Encode text into the token files PREFIX_KEY_document.{bin,idx} that training reads.",
        epilog="Files ending in .jsonl, .json or .ndjson, and .gz, .zst, .bz2 or .xz after it, standard input and "
        "pipes hold one JSON object per line, .parquet and .arrow files one document per row; another file is one "
        "document. The output does not depend on --workers and --engine. The same command continues an interrupted "
        "run. Exit status: 0 written, 1 not written, 2 wrong flags, 130 or 143 stopped.",
    )
    add_input_flags(parser)
    add_tokenizer_flags(parser)
    add = parser.add_argument_group("steps, in the order in which they are given; each may be repeated").add_argument
    mapped = (
        "change documents: takes a document's text (annotated str) or record (a dict), returns it, or None to drop it"
    )
    filtered = "keep the documents for which it returns True"
    for flag, text in ((MAP, mapped), (FILTER, filtered)):
        add(flag, nargs="+", action=_AddSteps, metavar="MODULE:FUNCTION", help=text)
    rules = f"drop documents by published rules: {', '.join((*GROUPS, *FILTERS))}; with options: NAME:OPTION=VALUE,..."
    add(QUALITY, nargs="+", action=_AddSteps, metavar="NAME", help=rules)
    add = parser.add_argument_group("output").add_argument
    prefix = "path and beginning of the files' names"
    add("--drop", metavar="DIR", type=Path, help="leave out the documents that deduplicate.py listed in this folder")
    add("--append-eod", action="store_true", help="append the end-of-document id to nonempty documents")
    add("--output-prefix", required=True, metavar="PREFIX", help=prefix)
    add("--overwrite", action="store_true", help="replace existing files of this prefix")
    sentences = "write a sequence for each sentence, into PREFIX_KEY_sentence.{bin,idx}"
    language = f"language of the sentences: its code, or {', '.join(LANGUAGES)} (english)"
    add("--split-sentences", action="store_true", help=sentences)
    add("--lang", metavar="NAME", help=language)
    add("--keep-newlines", action="store_true", help="keep the white space between sentences, at the end of each")
    add_staging_flag(parser)
    shard = "write only the documents of part I of N, from 0 on; merged in order, all parts are the whole"
    add("--shard", type=Shard.parse, metavar="I/N", help=shard)
    add = parser.add_argument_group("performance").add_argument
    engine = "encoding library: gigatoken, the tokenizer's own (hf), or gigatoken if its ids are equal (auto)"
    interval = "documents between progress lines in a file (a line every 10 seconds); 0 for none"
    add("--workers", type=int, metavar="N", help="processes or threads that encode (the available cores)")
    add("--engine", choices=ENGINES, default="auto", help=engine)
    add("--log-interval", type=int, metavar="N", help=interval)
    add = parser.add_argument_group("flags of Megatron-LM without effect").add_argument
    for flag, (has_value, why) in IGNORED_FLAGS.items():
        if has_value:
            add(flag, metavar="X", help=why)
        else:
            add(flag, action="store_const", const=True, help=why)
    return parser


def step_of(steps: Sequence[Step], reason: str) -> int:
    """Return the number of the step that drops documents for a reason; that of a list, which comes first, is -1."""
    names = [f"{step.flag} {step.name.partition(':')[0] if step.flag == QUALITY else step.name}" for step in steps]
    return next((number for number, name in enumerate(names) if f"{reason}: ".startswith(f"{name}: ")), -1)


def summary(plan: PreprocessOptions, totals: PreprocessTotals, dtype: str, engine: str, seconds: float) -> str:
    """Return the statistics of the run, in a few lines."""
    ratio = totals.text_bytes / max(1, totals.tokens)
    lost = sum(totals.dropped.values())
    found = totals.documents + lost
    reasons = sorted(totals.dropped, key=partial(step_of, [*plan.steps]))
    dropped = "".join(f"dropped: {totals.dropped[reason]:,} by {reason}\n" for reason in reasons)
    if 2 * lost > found:
        dropped += f"note: most documents were dropped, {max(totals.dropped.values()):,} of {found:,} for one reason\n"
    share = f" of {found:,} ({totals.documents / found:.1%})" if lost else ""
    return (
        f"files: {len(plan.files):,}, documents: {totals.documents:,}{share}, empty texts: {totals.empty:,}, "
        f"passed over: {totals.bad:,}\n{dropped}"
        f"text bytes: {totals.text_bytes:,}, tokens: {totals.tokens:,} ({dtype}), bytes per token: {ratio:.2f}\n"
        f"time: {seconds:.1f}s, {totals.rates(seconds)}, workers: {plan.workers}, engine: {engine}"
    )


def splitter_of(args: argparse.Namespace) -> SentenceSplitter | None:
    """Return what splits documents into sentences, if anything does."""
    return SentenceSplitter(args.lang or "english", args.keep_newlines) if args.split_sentences else None


def source_of(args: argparse.Namespace, files: Sequence[InputFile], tokenizer: Tokenizer) -> str:
    """Return a checksum of everything that the command names and the output depends on."""
    inputs = [(str(file), stat.st_size, stat.st_mtime_ns) for file, stat in zip(files, (file.stat() for file in files))]
    steps = DocumentTransforms(getattr(args, "steps", ()), args.json_keys).describe()
    drop = None if args.drop is None else DropList.open(args.drop).digest
    return checksum(repr((inputs, TokenizerRecord.of(tokenizer), steps, drop)).encode())


def preprocess(
    args: argparse.Namespace, inputs: Sequence[str], files: list[InputFile], tokenizer: Tokenizer, stop: StopSignal
) -> None:
    """Write the files from ``files``, which are those of ``inputs``, and print a summary."""
    started = time.monotonic()
    stop.wait_for_checks()
    sizes = [file.stat().st_size for file in files]
    shard = args.shard
    part = FilesPart(files, 0, None) if shard is None else select_part(files, sizes, shard)
    names = {copy: name for copy, name in zip(inputs, args.input) if copy != name}
    corpus = [(names.get(str(file), str(file)), size) for file, size in zip(files, sizes)]
    stored_bytes = sum(sizes) // (1 if shard is None else shard.of)
    blocks = 1 + stored_bytes // BLOCK_BYTES
    plan = PreprocessOptions(
        part.files,
        keys=tuple(args.json_keys),
        prefix=args.output_prefix,
        tokenizer_options=TokenizerOptions.from_args(args),
        append_eod=args.append_eod,
        engine=args.engine,
        workers=args.workers or min(available_cores(), blocks),
        skip_bad=args.on_bad_line == "skip",
        max_line_bytes=args.max_line_bytes,
        overwrite=args.overwrite,
        shard=shard,
        corpus=checksum(repr(corpus).encode()),
        start=part.start,
        stop=part.stop,
        steps=getattr(args, "steps", ()),
        drop=args.drop,
        sentences=splitter_of(args),
        names=names,
    )
    if plan.workers == 1:
        os.environ.setdefault("RAYON_NUM_THREADS", "1")  # the default of Rust libraries is one thread per core
    progress = PreprocessProgress(sys.stderr, stored_bytes, args.log_interval)
    try:
        totals, engine = write_dataset(plan, tokenizer, progress, stop.check)
    except BaseException:
        if RunState.path(plan.prefix, plan.keys, args.split_sentences).exists():
            progress.message("the same command continues after the documents read so far")
        raise
    finally:
        progress.close()
    dtype = id_dtype(tokenizer.vocab_size).name
    echo(summary(plan, totals, dtype, engine.name, time.monotonic() - started))
    if tokenizer.files and not tokenizer.hugging_face_files():
        echo(NO_EXPORT_NOTE)


def main(argv: Sequence[str]) -> int:
    """Encode text into token files, and return the exit status."""
    parser = build_parser()
    given = {word.split("=")[0] for word in argv}
    for flag, why in REFUSED_FLAGS.items():
        if flag in given:
            parser.error(f"{flag}: {why}")
    args = parser.parse(argv)
    if args.workers is not None and args.workers < 1:
        parser.error(f"--workers is {args.workers}, must be at least 1")
    for flag, (_, why) in IGNORED_FLAGS.items():
        if getattr(args, flag[2:].replace("-", "_")) is not None:
            echo(f"{flag} has no effect: {why}", file=sys.stderr)
    if not args.split_sentences and (args.lang or args.keep_newlines):
        flags = " and ".join(["--lang"] * bool(args.lang) + ["--keep-newlines"] * args.keep_newlines)
        echo(f"{flags} has no effect without --split-sentences", file=sys.stderr)

    return run_tool(parser, lambda stop: run(parser, args, argv, stop), args.output_prefix, "--output-prefix")


def run(parser: ToolParser, args: argparse.Namespace, argv: Sequence[str], stop: StopSignal) -> int:
    """Write the files and, for a store, upload them; return the exit status."""
    names = [output_prefix("", key, args.split_sentences) for key in args.json_keys]
    try:
        if splitter := splitter_of(args):
            splitter.check()
        staged = staged_output(args, argv)
        if staged is not None:
            staged.check_not_existing(names, args.overwrite)
        state = RunState.load(RunState.path(args.output_prefix, args.json_keys, args.split_sentences))
        overwrite = args.overwrite or (state is not None and state.complete)  # ended while it published its files
        if staged is None:
            check_not_existing((f"{args.output_prefix}{name}" for name in names), overwrite)
        tokenizer = build_tokenizer(TokenizerOptions.from_args(args))
    except DataError as error:
        return parser.fail(error, 2)
    with spool_pipes(args.input, args.output_prefix) as inputs:
        files = find_text_files(inputs, args.suffix, args.exclude, args.follow_links)
        if staged is None or not staged.is_complete(names, source_of(args, files, tokenizer)):
            preprocess(args, inputs, files, tokenizer, stop)
    if staged is not None:
        staged.upload(names)
    for name in names:
        shown = shell_word(f"{args.output_prefix if staged is None else staged.uri}{name}")
        echo(f"for the next step, pretrain_gpt.py: --data-path {shown}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
