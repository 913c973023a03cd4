"""Select and build a tokenizer from command-line flags or a run's configuration."""

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
    """Tokenizer settings, named as the command-line flags."""

    tokenizer_type: str  # one of `TOKENIZER_TYPES`
    tokenizer_model: str | None = None  # folder, file or Hugging Face hub name
    vocab_file: str | None = None  # GPT2BPETokenizer only
    merge_file: str | None = None  # GPT2BPETokenizer only
    vocab_size: int | None = None  # required by NullTokenizer; elsewhere it is only checked
    tiktoken_pattern: str | None = None  # pre-tokenization regex of TikTokenizer: ``v1`` or ``v2``
    tiktoken_num_special_tokens: int = 1000  # ids that TikTokenizer reserves before those of its file
    parse_special_tokens: bool = False  # encode special tokens spelled out in text as their ids

    @classmethod
    def of(cls, data: DataConfig, vocab_size: int | None) -> TokenizerChoice:
        """Return the tokenizer settings of a run's configuration.

        Raises:
            DataError: if the configuration has no tokenizer type.
        """
        if data.tokenizer_type is None:
            raise DataError("the tokenizer of the data is not specified", "--tokenizer-type TYPE")
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
        """Return the settings parsed by `add_tokenizer_flags`."""
        return cls(**{field.name: getattr(args, field.name) for field in fields(cls)})

    def local(self) -> TokenizerChoice:
        """Replace a hub name by its downloaded folder, so that worker processes need no network."""
        if self.tokenizer_type != "HuggingFaceTokenizer" or self.tokenizer_model is None:
            return self
        return replace(self, tokenizer_model=str(local_folder(self.tokenizer_model)))


def _hugging_face(choice: TokenizerChoice) -> Tokenizer:
    if choice.tokenizer_model is None:
        raise DataError("HuggingFaceTokenizer needs --tokenizer-model", "--tokenizer-model DIR_OR_tokenizer.json")
    tokenizer = HuggingFaceTokenizer(choice.tokenizer_model, choice.parse_special_tokens)
    # A unigram model may have the spelling of a special token as an ordinary piece; text cannot be kept apart then.
    found = [] if choice.parse_special_tokens else tokenizer.found_in_text()
    if found:
        number = tokenizer.special_ids[found[0]]
        seen = f"this tokenizer encodes '{found[0]}' in plain text as the special token {number}"
        fix = "--parse-special-tokens, if that is intended for this corpus"
        raise DataError(f"{seen}, and this cannot be turned off", fix)
    return tokenizer


def _gpt2(choice: TokenizerChoice) -> Tokenizer:
    files = "--vocab-file vocab.json --merge-file merges.txt"
    if choice.tokenizer_model is not None:
        if choice.vocab_file is not None or choice.merge_file is not None:
            raise DataError("GPT2BPETokenizer takes either two files or a tokenizer.json, not both", files)
        return GPT2BPETokenizer(choice.tokenizer_model, choice.parse_special_tokens)
    if choice.vocab_file is None or choice.merge_file is None:
        raise DataError("GPT2BPETokenizer needs two files", files)
    return GPT2BPETokenizer.from_vocabulary(
        Path(choice.vocab_file), Path(choice.merge_file), choice.parse_special_tokens
    )


def _sentencepiece(cls: type[SentencePieceTokenizer]) -> Callable[[TokenizerChoice], Tokenizer]:
    def build(choice: TokenizerChoice) -> Tokenizer:
        if choice.tokenizer_model is None:
            raise DataError(f"{cls.__name__} needs --tokenizer-model", "--tokenizer-model FILE.model")
        return cls(choice.tokenizer_model, choice.parse_special_tokens)

    return build


def _tiktoken(choice: TokenizerChoice) -> Tokenizer:
    if choice.tokenizer_model is None:
        raise DataError("TikTokenizer needs --tokenizer-model", "--tokenizer-model FILE.tiktoken")
    return TikTokenizer(
        choice.tokenizer_model,
        choice.tiktoken_pattern,
        choice.tiktoken_num_special_tokens,
        choice.vocab_size,
        choice.parse_special_tokens,
    )


def _null(choice: TokenizerChoice) -> Tokenizer:
    if choice.vocab_size is None or choice.vocab_size < 1:
        raise DataError("NullTokenizer needs --vocab-size", "--vocab-size 50257")
    return NullTokenizer(choice.vocab_size)


BUILDERS: dict[str, Callable[[TokenizerChoice], Tokenizer]] = {
    "HuggingFaceTokenizer": _hugging_face,
    "GPT2BPETokenizer": _gpt2,
    "SentencePieceTokenizer": _sentencepiece(SentencePieceTokenizer),
    "GPTSentencePieceTokenizer": _sentencepiece(GPTSentencePieceTokenizer),
    "Llama2Tokenizer": _sentencepiece(Llama2Tokenizer),
    "TikTokenizer": _tiktoken,
    "ByteTokenizer": lambda choice: ByteTokenizer(),
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
"""Settings used by each type besides its name and size. Any other setting is refused."""


def build_tokenizer(choice: TokenizerChoice) -> Tokenizer:
    """Build the tokenizer of a choice.

    Raises:
        DataError: if the type is unknown, a setting is missing or unused by this type, a file is missing or damaged, or
            the vocabulary size differs from ``choice.vocab_size``.
    """
    if choice.tokenizer_type not in BUILDERS:
        raise _unknown_type(choice.tokenizer_type)
    used = {"tokenizer_type", "vocab_size", *READS[choice.tokenizer_type]}
    for field in fields(choice):
        if field.name not in used and getattr(choice, field.name) != field.default:
            flag = f"--{field.name.replace('_', '-')}"
            raise DataError(f"{choice.tokenizer_type} does not use {flag}", f"leave out {flag}")
    tokenizer = BUILDERS[choice.tokenizer_type](choice)
    if choice.vocab_size not in (None, tokenizer.vocab_size):
        seen = f"{choice.tokenizer_type} has {tokenizer.vocab_size} ids, not {choice.vocab_size}"
        raise DataError(seen, "leave out --vocab-size")
    return tokenizer


def _unknown_type(tokenizer_type: str) -> DataError:
    if tokenizer_type in OTHER_TOKENIZERS:
        seen = f"Megatron-LM's {tokenizer_type} is not supported: it {OTHER_TOKENIZERS[tokenizer_type]}"
    else:
        seen = f"there is no {tokenizer_type}"
    return DataError(
        f"{seen}; tokenizers for text: {', '.join(TOKENIZER_TYPES[:-1])}; ids made by another tool are read by "
        "NullTokenizer (as decimal numbers) or from the .bin and .idx of Megatron-LM's preprocessing",
        "--tokenizer-type HuggingFaceTokenizer --tokenizer-model DIR_OR_tokenizer.json",
        "--tokenizer-type ByteTokenizer",
        "--tokenizer-type NullTokenizer --vocab-size N",
        "pretrain_gpt.py --data-path PREFIX_OF_BIN_AND_IDX --vocab-size N",
    )


def add_tokenizer_flags(parser: argparse.ArgumentParser, required: bool = True) -> None:
    """Add the tokenizer flags of a data tool; read them with `TokenizerOptions.from_args`."""
    tokens = parser.add_argument_group("tokenizer")
    types = f"tokenizer class: {' or '.join(TOKENIZER_TYPES)}"
    tokens.add_argument("--tokenizer-type", required=required, metavar="TYPE", help=types)
    model = "folder, file, or name of a model on the Hugging Face hub"
    tokens.add_argument("--tokenizer-model", metavar="PATH", help=model)
    tokens.add_argument("--vocab-file", metavar="FILE", help="vocab.json of GPT2BPETokenizer")
    tokens.add_argument("--merge-file", metavar="FILE", help="merges.txt of GPT2BPETokenizer")
    tokens.add_argument("--vocab-size", type=int, metavar="N", help="number of ids, for NullTokenizer and TikTokenizer")
    tokens.add_argument("--tiktoken-pattern", choices=("v1", "v2"), help="pre-tokenization regex of TikTokenizer")
    number = "ids that TikTokenizer reserves for special tokens before those of its file (1000)"
    tokens.add_argument("--tiktoken-num-special-tokens", type=int, default=1000, metavar="N", help=number)
    literal = "encode special tokens spelled out in text as their ids; by default they stay text"
    tokens.add_argument("--parse-special-tokens", action="store_true", help=literal)
