"""A tokenizer from text: ``python tools/train_tokenizer.py --input corpus.jsonl --vocab-size 4096 --output bpe``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from megatron.config.numbers import format_bytes
from megatron.data.command_line import Parser, ended
from megatron.data.errors import DataError
from megatron.data.text.child import in_child
from megatron.data.text.corpus import add_input_flags, find_files
from megatron.data.text.progress import Stages
from megatron.data.tokenizers.learnt import check_folder, save_files
from megatron.data.tokenizers.train import Trained, Training, train
from megatron.data.tokenizers.train_bpe import check_size as check_bpe_size
from megatron.data.tokenizers.train_sentencepiece import MODEL_TYPES
from megatron.data.tokenizers.train_sentencepiece import check_size as check_sentencepiece_size

SIZES = {"bpe": check_bpe_size, "sentencepiece": check_sentencepiece_size}
MOST_SENTENCES = 2_000_000


def build_parser() -> Parser:
    """The flags; those of the input are spelled as in preprocess_data, those of SentencePiece as its own."""
    parser = Parser(
        "train_tokenizer.py",
        description="Make a tokenizer from text, for preprocess_data and the Hugging Face libraries.",
        epilog="Files ending in .jsonl or .json hold one JSON object per line; any other file is one document. "
        "Exit status: 0 written, 1 not written, 2 wrong flags, 130 or 143 stopped.",
    )
    add_input_flags(parser)
    write = parser.add_argument_group("tokenizer")
    kinds = "a byte-level BPE as GPT-2's (bpe, the default), or a SentencePiece model as Llama's"
    write.add_argument("--type", choices=tuple(SIZES), default="bpe", help=kinds)
    entries = "entries, with the 256 bytes and the special tokens"
    write.add_argument("--vocab-size", type=int, required=True, metavar="N", help=entries)
    write.add_argument("--output", required=True, metavar="DIR", help="new folder for the tokenizer's files")
    how = f"how SentencePiece cuts text ({' or '.join(MODEL_TYPES)}; bpe)"
    write.add_argument("--sentencepiece-model-type", choices=MODEL_TYPES, help=how)
    most = f"lines that SentencePiece learns from and keeps in memory; of more it takes a sample ({MOST_SENTENCES:,})"
    write.add_argument("--input-sentence-size", type=int, metavar="N", help=most)
    return parser


def report(trained: Trained, files: int, asked: int) -> str:
    """What was read and made, in a few lines."""
    learnt = trained.learnt
    fewer = "" if learnt.entries == asked else f" (not {asked:,}: the text has no more pairs that occur twice)"
    ratio = learnt.sample_bytes / learnt.sample_tokens
    sample = format_bytes(learnt.sample_bytes)
    bad = f", passed over: {trained.bad:,}" if trained.bad else ""
    return "\n".join(
        (
            f"files: {files:,}, documents: {learnt.documents:,}, text bytes: {learnt.text_bytes:,}{bad}",
            f"entries: {learnt.entries:,}{fewer}, bytes per token: {ratio:.2f} in the first {sample}",
            *trained.notes,
        )
    )


def check(args: argparse.Namespace) -> None:
    """Refuse flags that cannot be.

    Raises:
        DataError: when they cannot.
    """
    SIZES[args.type](args.vocab_size)
    for flag in ("sentencepiece_model_type", "input_sentence_size"):
        if args.type != "sentencepiece" and getattr(args, flag) is not None:
            raise DataError(f"--{flag.replace('_', '-')} is of SentencePiece", "--type sentencepiece")
    if args.input_sentence_size is not None and args.input_sentence_size < 1:
        raise DataError(f"--input-sentence-size {args.input_sentence_size} is no number of lines", "leave it out")
    check_folder(Path(args.output))


def main(argv: Sequence[str]) -> int:
    """Make the tokenizer, write it, and print what it is.

    Returns:
        The exit status: 1 when the input is not what it should be, 2 for wrong flags, 128 and the
        signal's number after SIGINT and SIGTERM.
    """
    args = build_parser().parse(argv)
    try:
        check(args)
    except DataError as error:
        return _fail(error, 2)
    return ended(lambda: run(args), _fail, args.output, "--output")


def run(args: argparse.Namespace) -> None:
    """Make the tokenizer, in a process that can be ended at any moment: libraries do not heed signals.

    Raises:
        DataError: when the input is not what it should be.
        OSError: when a file cannot be read or written.
    """
    files = find_files(args.input, args.suffix, args.exclude)
    is_bpe = args.type == "bpe"
    plan = Training(
        tuple(files),
        tuple(args.json_keys),
        args.vocab_size,
        None if is_bpe else args.sentencepiece_model_type or "bpe",
        MOST_SENTENCES if args.input_sentence_size is None else args.input_sentence_size,
        args.on_bad_line == "skip",
    )
    with closing(Stages(sys.stderr)) as stages:
        trained = in_child(train, plan, stages)
    save_files(trained.learnt.files, Path(args.output))
    print(report(trained, len(files), args.vocab_size))
    kind = "HuggingFaceTokenizer" if is_bpe else "SentencePieceTokenizer"
    print(f"for the next step, preprocess_data.py: --tokenizer-type {kind} --tokenizer-model {args.output}")


def _fail(error: object, status: int) -> int:
    print(f"train_tokenizer: {error}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
