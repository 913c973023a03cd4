"""Train a tokenizer: ``python tools/train_tokenizer.py --input corpus.jsonl --vocab-size 4096 --output bpe``."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # if this checkout is not installed

if __name__ == "__main__":  # until main has a handler of its own; the imports below take a while
    signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))

from megatron.config.text import echo, format_bytes, shell_word
from megatron.data.errors import DataError, ToolParser, run_tool
from megatron.data.preprocess.files import add_input_flags, find_text_files, spool_pipes
from megatron.data.preprocess.workers import run_in_subprocess
from megatron.data.progress import StageProgress
from tools.lib.tokenizer_training import (
    MODEL_TYPES,
    TokenizerTrainingOptions,
    TrainedTokenizer,
    check_output_folder,
    check_trained_size,
    save_tokenizer,
    train_tokenizer,
)

DEFAULT_SENTENCES = 2_000_000


def build_parser() -> ToolParser:
    """Return the command-line parser. Input flags are those of preprocess_data.py."""
    parser = ToolParser(
        "train_tokenizer.py",
        description="Train a tokenizer on text, for preprocess_data.py and the Hugging Face libraries.",
        epilog="The input is read as by preprocess_data.py. "
        "Exit status: 0 written, 1 not written, 2 wrong flags, 130 or 143 stopped.",
    )
    add_input_flags(parser)
    add = parser.add_argument_group("tokenizer").add_argument
    kinds = "byte-level BPE like GPT-2's (bpe, the default), or SentencePiece model like Llama's"
    entries = "entries, including the 256 bytes and the special tokens"
    how = f"algorithm of SentencePiece ({' or '.join(MODEL_TYPES)}; bpe)"
    most = f"lines that SentencePiece is trained on, kept in memory; sampled if there are more ({DEFAULT_SENTENCES:,})"
    add("--type", choices=("bpe", "sentencepiece"), default="bpe", help=kinds)
    add("--vocab-size", type=int, required=True, metavar="N", help=entries)
    add("--output", required=True, metavar="DIR", help="new folder for the tokenizer's files")
    add("--sentencepiece-model-type", choices=MODEL_TYPES, help=how)
    add("--input-sentence-size", type=int, metavar="N", help=most)
    return parser


def format_report(trained: TrainedTokenizer, files: int, vocab_size: int) -> str:
    """Return the statistics of the training, in a few lines."""
    full = trained.entries == vocab_size
    fewer = "" if full else f" (not {vocab_size:,}: the text has no more pairs that occur twice)"
    ratio = trained.sample_bytes / trained.sample_tokens
    sample = format_bytes(trained.sample_bytes)
    bad = f", passed over: {trained.bad:,}" if trained.bad else ""
    lines = [
        f"files: {files:,}, documents: {trained.documents:,}, text bytes: {trained.text_bytes:,}{bad}",
        f"entries: {trained.entries:,}{fewer}, bytes per token: {ratio:.2f} in the first {sample}",
    ]
    return "\n".join([*lines, *trained.notes])


def check_flags(args: argparse.Namespace) -> None:
    """Raise DataError for invalid flags."""
    check_trained_size(args.vocab_size, args.type == "bpe")
    for flag in ("sentencepiece_model_type", "input_sentence_size"):
        if args.type != "sentencepiece" and getattr(args, flag) is not None:
            raise DataError(f"--{flag.replace('_', '-')} applies only to SentencePiece", "--type sentencepiece")
    if args.input_sentence_size is not None and args.input_sentence_size < 1:
        raise DataError(f"--input-sentence-size {args.input_sentence_size} must be at least 1", "leave it out")
    check_output_folder(Path(args.output))


def main(argv: Sequence[str]) -> int:
    """Train the tokenizer, save it and print a summary; return the exit status."""
    parser = build_parser()
    args = parser.parse(argv)
    try:
        check_flags(args)
    except DataError as error:
        return parser.fail(error, 2)
    return run_tool(parser, lambda _: train_and_save(args), args.output, "--output")


def train_and_save(args: argparse.Namespace) -> None:
    """Train in a process that can be killed at any moment, because the libraries do not react to signals."""
    is_bpe = args.type == "bpe"
    with spool_pipes(args.input, args.output) as inputs, closing(StageProgress(sys.stderr)) as stages:
        files = find_text_files(inputs, args.suffix, args.exclude, args.follow_links)
        plan = TokenizerTrainingOptions(
            tuple(files),
            tuple(args.json_keys),
            args.vocab_size,
            None if is_bpe else args.sentencepiece_model_type or "bpe",
            DEFAULT_SENTENCES if args.input_sentence_size is None else args.input_sentence_size,
            args.on_bad_line == "skip",
            args.max_line_bytes,
        )
        trained = run_in_subprocess(train_tokenizer, plan, stages)
    save_tokenizer(trained.files, Path(args.output))
    echo(format_report(trained, len(files), args.vocab_size))
    kind = "HuggingFaceTokenizer" if is_bpe else "SentencePieceTokenizer"
    flags = f"--tokenizer-type {kind} --tokenizer-model {shell_word(str(args.output))}"
    echo(f"for the next step, preprocess_data.py: {flags}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
