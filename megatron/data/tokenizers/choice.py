"""Which tokenizer a person asked for, and the tokenizer."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path

from megatron.config.run import OTHER_TOKENIZERS, DataConfig
from megatron.data.errors import DataError
from megatron.data.tokenizers.encoded import Tokenizer
from megatron.data.tokenizers.gpt2 import GPT2BPETokenizer
from megatron.data.tokenizers.huggingface import HuggingFaceTokenizer, local_folder
from megatron.data.tokenizers.plain import ByteTokenizer, NullTokenizer
from megatron.data.tokenizers.sentencepiece_model import (
    GPTSentencePieceTokenizer,
    Llama2Tokenizer,
    SentencePieceTokenizer,
)
from megatron.data.tokenizers.tiktoken_file import TikTokenizer


@dataclass(frozen=True)
class TokenizerChoice:
    """What the flags say of a tokenizer.

    Attributes:
        tokenizer_type: one of `TOKENIZER_TYPES`.
        tokenizer_model: folder, file or hub name that it is read from.
        vocab_file: of GPT2BPETokenizer.
        merge_file: of GPT2BPETokenizer.
        vocab_size: what NullTokenizer needs to be told; others know it themselves.
        tiktoken_pattern: how TikTokenizer cuts text into words: ``v1`` or ``v2``.
        tiktoken_num_special_tokens: ids that TikTokenizer puts before those of its file.
        parse_special_tokens: a special token that is spelled out in a text becomes its id.
    """

    tokenizer_type: str
    tokenizer_model: str | None = None
    vocab_file: str | None = None
    merge_file: str | None = None
    vocab_size: int | None = None
    tiktoken_pattern: str | None = None
    tiktoken_num_special_tokens: int = 1000
    parse_special_tokens: bool = False

    @classmethod
    def of(cls, data: DataConfig, vocab_size: int | None) -> TokenizerChoice:
        """What a run's configuration says.

        Raises:
            DataError: when it names no tokenizer.
        """
        if data.tokenizer_type is None:
            raise DataError("nothing names the tokenizer of the data", "--tokenizer-type TYPE")
        return cls(
            data.tokenizer_type,
            data.tokenizer_model,
            data.vocab_file,
            data.merge_file,
            vocab_size,
            data.tiktoken_pattern,
            data.tiktoken_num_special_tokens,
        )

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> TokenizerChoice:
        """What the flags of `add_tokenizer_flags` say."""
        return cls(**{field.name: getattr(args, field.name) for field in fields(cls)})

    def local(self) -> TokenizerChoice:
        """The same with a folder of this machine for a name on the hub, so that other processes need not ask it.

        Raises:
            DataError: when the hub does not give it.
        """
        if self.tokenizer_type != "HuggingFaceTokenizer" or self.tokenizer_model is None:
            return self
        return replace(self, tokenizer_model=str(local_folder(self.tokenizer_model)))


def _hugging_face(choice: TokenizerChoice) -> Tokenizer:
    if choice.tokenizer_model is None:
        raise DataError("HuggingFaceTokenizer must be told where it is", "--tokenizer-model DIR_OR_tokenizer.json")
    return _literal_text(HuggingFaceTokenizer(choice.tokenizer_model, choice.parse_special_tokens))


def _gpt2(choice: TokenizerChoice) -> Tokenizer:
    two = "--vocab-file vocab.json --merge-file merges.txt"
    if choice.tokenizer_model is not None:
        if choice.vocab_file is not None or choice.merge_file is not None:
            raise DataError("GPT2BPETokenizer is read from two files or from a tokenizer.json, not both", two)
        return GPT2BPETokenizer(choice.tokenizer_model, choice.parse_special_tokens)
    if choice.vocab_file is None or choice.merge_file is None:
        raise DataError("GPT2BPETokenizer reads two files", two)
    return GPT2BPETokenizer.from_vocabulary(
        Path(choice.vocab_file), Path(choice.merge_file), choice.parse_special_tokens
    )


def _sentencepiece(kind: type[SentencePieceTokenizer]) -> Callable[[TokenizerChoice], Tokenizer]:
    def build(choice: TokenizerChoice) -> Tokenizer:
        if choice.tokenizer_model is None:
            raise DataError(f"{kind.__name__} must be told where it is", "--tokenizer-model FILE.model")
        return kind(choice.tokenizer_model, choice.parse_special_tokens)

    return build


def _tiktoken(choice: TokenizerChoice) -> Tokenizer:
    if choice.tokenizer_model is None:
        raise DataError("TikTokenizer must be told where it is", "--tokenizer-model FILE.tiktoken")
    return TikTokenizer(
        choice.tokenizer_model,
        choice.tiktoken_pattern,
        choice.tiktoken_num_special_tokens,
        choice.vocab_size,
        choice.parse_special_tokens,
    )


def _bytes(choice: TokenizerChoice) -> Tokenizer:
    return ByteTokenizer()


def _null(choice: TokenizerChoice) -> Tokenizer:
    if choice.vocab_size is None or choice.vocab_size < 1:
        raise DataError("NullTokenizer must be told how many ids there are", "--vocab-size 50257")
    return NullTokenizer(choice.vocab_size)


BUILDERS: dict[str, Callable[[TokenizerChoice], Tokenizer]] = {
    "HuggingFaceTokenizer": _hugging_face,
    "GPT2BPETokenizer": _gpt2,
    "SentencePieceTokenizer": _sentencepiece(SentencePieceTokenizer),
    "GPTSentencePieceTokenizer": _sentencepiece(GPTSentencePieceTokenizer),
    "Llama2Tokenizer": _sentencepiece(Llama2Tokenizer),
    "TikTokenizer": _tiktoken,
    "ByteTokenizer": _bytes,
    "NullTokenizer": _null,
}
TOKENIZER_TYPES = tuple(BUILDERS)

_FILE = ("tokenizer_model", "parse_special_tokens")
READS: dict[str, tuple[str, ...]] = {
    "HuggingFaceTokenizer": _FILE,
    "GPT2BPETokenizer": (*_FILE, "vocab_file", "merge_file"),
    "SentencePieceTokenizer": _FILE,
    "GPTSentencePieceTokenizer": _FILE,
    "Llama2Tokenizer": _FILE,
    "TikTokenizer": (*_FILE, "tiktoken_pattern", "tiktoken_num_special_tokens"),
    "ByteTokenizer": (),
    "NullTokenizer": (),
}
"""What each type reads of a choice, besides its name and size; any other setting is refused."""


def build_tokenizer(choice: TokenizerChoice) -> Tokenizer:
    """The tokenizer of a choice.

    Raises:
        DataError: when the name is not known, or what it needs is missing or damaged, or it is told what it does not
            read, or has another number of ids than the choice says.
    """
    if choice.tokenizer_type not in BUILDERS:
        raise _unknown(choice.tokenizer_type)
    _refuse_what_is_not_read(choice)
    tokenizer = BUILDERS[choice.tokenizer_type](choice)
    if choice.vocab_size not in (None, tokenizer.vocab_size):
        seen = f"{choice.tokenizer_type} has {tokenizer.vocab_size} ids, not {choice.vocab_size}"
        raise DataError(seen, "leave out --vocab-size")
    return tokenizer


def _refuse_what_is_not_read(choice: TokenizerChoice) -> None:
    read = {"tokenizer_type", "vocab_size", *READS[choice.tokenizer_type]}
    for field in fields(choice):
        if field.name in read or getattr(choice, field.name) == field.default:
            continue
        flag = f"--{field.name.replace('_', '-')}"
        what = "reads no file" if field.name == "tokenizer_model" else f"does not read {flag}"
        raise DataError(f"{choice.tokenizer_type} {what}", f"leave out {flag}")


def _literal_text(tokenizer: HuggingFaceTokenizer) -> HuggingFaceTokenizer:
    """The tokenizer, if a special token that is spelled out in a text stays text to it.

    That is not so where its model has the token's letters as one of its words, as unigram models do.
    """
    found = [] if tokenizer.settings.get("parse_special_tokens") else tokenizer.found_in_text()
    if found:
        number = tokenizer.special_ids[found[0]]
        seen = f"this tokenizer makes the special token {number} of '{found[0]}' spelled out in a text"
        fix = "--parse-special-tokens, if that is right for these texts"
        raise DataError(f"{seen}, and cannot be told not to", fix)
    return tokenizer


def _unknown(tokenizer_type: str) -> DataError:
    if tokenizer_type in OTHER_TOKENIZERS:
        seen = f"{tokenizer_type} of Megatron-LM is not here: it {OTHER_TOKENIZERS[tokenizer_type]}"
    else:
        seen = f"there is no {tokenizer_type}"
    return DataError(
        f"{seen}; text is read by {', '.join(TOKENIZER_TYPES[:-1])}; ids that another tool made, by NullTokenizer (as "
        "decimal numbers) or from the .bin and .idx of Megatron-LM's preprocessing",
        "--tokenizer-type HuggingFaceTokenizer --tokenizer-model DIR_OR_tokenizer.json",
        "--tokenizer-type ByteTokenizer",
        "--tokenizer-type NullTokenizer --vocab-size N",
        "pretrain_gpt.py --data-path PREFIX_OF_BIN_AND_IDX --vocab-size N",
    )


def add_tokenizer_flags(parser: argparse.ArgumentParser, required: bool = True) -> None:
    """The flags of a tool that turns text into ids, for `TokenizerChoice.from_args`."""
    tokens = parser.add_argument_group("tokenizer")
    types = f"how text becomes ids: {' or '.join(TOKENIZER_TYPES)}"
    tokens.add_argument("--tokenizer-type", required=required, metavar="TYPE", help=types)
    model = "what it is read from: a folder, a file, or the name of a model on the Hugging Face hub"
    tokens.add_argument("--tokenizer-model", metavar="PATH", help=model)
    tokens.add_argument("--vocab-file", metavar="FILE", help="vocab.json of GPT2BPETokenizer")
    tokens.add_argument("--merge-file", metavar="FILE", help="merges.txt of GPT2BPETokenizer")
    tokens.add_argument("--vocab-size", type=int, metavar="N", help="number of ids, for NullTokenizer and TikTokenizer")
    tokens.add_argument("--tiktoken-pattern", choices=("v1", "v2"), help="how TikTokenizer cuts text into words")
    number = "ids that TikTokenizer puts before those of its file (1000)"
    tokens.add_argument("--tiktoken-num-special-tokens", type=int, default=1000, metavar="N", help=number)
    literal = "a special token spelled out in a text becomes its id; without this it stays text"
    tokens.add_argument("--parse-special-tokens", action="store_true", help=literal)
