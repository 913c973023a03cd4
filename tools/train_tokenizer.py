"""A tokenizer from text: ``python tools/train_tokenizer.py --input corpus.jsonl --vocab-size 4096 --output bpe``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from megatron.data.errors import DataError
from megatron.data.text.corpus import Document, add_input_flags, find_files, read_documents
from megatron.data.tokenizers.huggingface import NO_FILES, TOKENIZER
from megatron.data.tokenizers.learnt import Learnt, check_folder, save_files
from megatron.data.tokenizers.train_bpe import check_size as check_bpe_size
from megatron.data.tokenizers.train_bpe import train_bpe
from megatron.data.tokenizers.train_sentencepiece import MODEL_TYPES, train_sentencepiece
from megatron.data.tokenizers.train_sentencepiece import check_size as check_sentencepiece_size

SIZES = {"bpe": check_bpe_size, "sentencepiece": check_sentencepiece_size}
MOST_SENTENCES = 2_000_000


def build_parser() -> argparse.ArgumentParser:
    """The flags; those of the input are spelled as in preprocess_data, those of SentencePiece as its own."""
    parser = argparse.ArgumentParser(
        description="Make a tokenizer from text, for preprocess_data and the Hugging Face libraries.",
        epilog="Files ending in .jsonl or .json hold one JSON object per line; any other file is one document.",
        allow_abbrev=False,
    )
    add_input_flags(parser)
    write = parser.add_argument_group("tokenizer")
    kinds = "a byte-level BPE as GPT-2's (bpe, the default), or a SentencePiece model as Llama's"
    write.add_argument("--type", choices=tuple(SIZES), default="bpe", help=kinds)
    size = "entries, with the 256 bytes and the special tokens"
    write.add_argument("--vocab-size", type=int, required=True, metavar="N", help=size)
    write.add_argument("--output", required=True, metavar="DIR", help="new folder for the tokenizer's files")
    how = f"how SentencePiece cuts text ({' or '.join(MODEL_TYPES)}; bpe)"
    write.add_argument("--sentencepiece-model-type", choices=MODEL_TYPES, help=how)
    most = f"lines that SentencePiece learns from and keeps in memory; of more it takes a sample ({MOST_SENTENCES:,})"
    write.add_argument("--input-sentence-size", type=int, metavar="N", help=most)
    return parser


def report(learnt: Learnt, files: int, asked: int) -> str:
    """What was read and made, in two lines."""
    fewer = "" if learnt.entries == asked else f" (not {asked:,}: the text has no more pairs that occur twice)"
    ratio = learnt.sample_bytes / learnt.sample_tokens
    return (
        f"files: {files:,}, documents: {learnt.documents:,}, text bytes: {learnt.text_bytes:,}\n"
        f"entries: {learnt.entries:,}{fewer}, bytes per token: {ratio:.2f} in the first "
        f"{learnt.sample_bytes / 1e6:.1f} MB"
    )


def learn(args: argparse.Namespace, documents: Iterable[Document]) -> tuple[Learnt, list[str]]:
    """The tokenizer that the flags ask for, and what else there is to say of it.

    Raises:
        DataError: when the documents do not give it.
    """
    if args.type == "bpe":
        return train_bpe(documents, args.vocab_size, show_progress=sys.stderr.isatty()), []
    most = MOST_SENTENCES if args.input_sentence_size is None else args.input_sentence_size
    learnt, sentences = train_sentencepiece(documents, args.vocab_size, args.sentencepiece_model_type or "bpe", most)
    kept = len(sentences.kept)
    how = "all of them" if kept == sentences.seen else f"a sample of {kept:,}; --input-sentence-size for more or fewer"
    notes = [f"lines: {sentences.seen:,}, learnt from {how}"]
    if TOKENIZER not in learnt.files:
        notes.append(NO_FILES)
    return learnt, notes


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
        The exit status: 1 when the input is not what it should be, 2 for wrong flags.
    """
    args = build_parser().parse_args(argv)
    try:
        check(args)
    except DataError as error:
        return _fail(error, 2)
    try:
        files = find_files(args.input, args.suffix, args.exclude)
        documents = (document for file in files for document in read_documents(file, args.json_keys))
        learnt, notes = learn(args, documents)
        save_files(learnt.files, Path(args.output))
    except (DataError, OSError) as error:
        return _fail(error, 1)
    print(report(learnt, len(files), args.vocab_size), *notes, sep="\n")
    kind = "HuggingFaceTokenizer" if args.type == "bpe" else "SentencePieceTokenizer"
    print(f"for the next step, preprocess_data.py: --tokenizer-type {kind} --tokenizer-model {args.output}")
    return 0


def _fail(error: Exception, status: int) -> int:
    print(f"train_tokenizer: {error}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
