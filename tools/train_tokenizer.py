"""A tokenizer from text: ``python tools/train_tokenizer.py --input corpus.jsonl --vocab-size 4096 --output bpe``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.data.corpus import add_input_flags, find_files, read_documents
from megatron.data.errors import DataError
from megatron.data.train_bpe import Trained, check_folder, check_size, save_tokenizer, train_bpe


def build_parser() -> argparse.ArgumentParser:
    """The flags; those of the input are spelled as in preprocess_data."""
    parser = argparse.ArgumentParser(
        description="Make a byte-level BPE tokenizer from text, for preprocess_data and the Hugging Face libraries.",
        epilog="Files ending in .jsonl or .json hold one JSON object per line; any other file is one document.",
        allow_abbrev=False,
    )
    add_input_flags(parser)
    write = parser.add_argument_group("tokenizer")
    write.add_argument(
        "--vocab-size", type=int, required=True, metavar="N", help="entries, with the 256 bytes and <|endoftext|>"
    )
    write.add_argument("--output", required=True, metavar="DIR", help="new folder for tokenizer.json and its settings")
    return parser


def report(trained: Trained, files: int, asked: int) -> str:
    """What was read and made, in two lines."""
    entries = trained.tokenizer.get_vocab_size()
    fewer = "" if entries == asked else f" (not {asked:,}: the text has no more pairs that occur twice)"
    ratio = trained.sample_bytes / trained.sample_tokens
    return (
        f"files: {files:,}, documents: {trained.documents:,}, text bytes: {trained.text_bytes:,}\n"
        f"entries: {entries:,}{fewer}, bytes per token: {ratio:.2f} in the first {trained.sample_bytes / 1e6:.1f} MB"
    )


def main(argv: Sequence[str]) -> int:
    """Train the tokenizer, write it, and print what it is.

    Returns:
        The exit status: 1 when the input is not what it should be, 2 for wrong flags.
    """
    args = build_parser().parse_args(argv)
    folder = Path(args.output)
    try:
        check_size(args.vocab_size)
        check_folder(folder)
    except DataError as error:
        return _fail(error, 2)
    try:
        files = find_files(args.input, args.suffix, args.exclude)
        documents = (document for file in files for document in read_documents(file, args.json_keys))
        trained = train_bpe(documents, args.vocab_size, show_progress=sys.stderr.isatty())
        save_tokenizer(trained.tokenizer, folder)
    except (DataError, OSError) as error:
        return _fail(error, 1)
    print(report(trained, len(files), args.vocab_size))
    print(f"for the next step, preprocess_data.py: --tokenizer-type HuggingFaceTokenizer --tokenizer-model {folder}")
    return 0


def _fail(error: Exception, status: int) -> int:
    print(f"train_tokenizer: {error}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
