"""Select, build and record tokenizers.

`TokenizerOptions` holds the flags of a tokenizer, and `build_tokenizer` builds it. `TokenizerRecord` describes the
tokenizer that wrote a dataset. It lies beside the dataset in ``<prefix>.tokens.json``, with the tokenizer's files in
``<prefix>.tokenizer/``, so that training, merging and export use the same ids.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, fields, replace
from inspect import signature
from pathlib import Path
from typing import Any

from megatron.config.data import UNSUPPORTED_TOKENIZER_TYPES, DataConfig
from megatron.config.files import FOLLOW_LINKS, describe_outside_links, parse_json, read_small
from megatron.config.settings import SETTINGS
from megatron.data.errors import DataError
from megatron.data.prefixes import local_prefix
from megatron.data.tokenizers.base import Tokenizer
from megatron.data.tokenizers.huggingface import (
    SPECIAL_TOKENS_MAP,
    TOKENIZER_CONFIG,
    ByteTokenizer,
    GPT2BPETokenizer,
    HuggingFaceTokenizer,
    NullTokenizer,
    resolve_tokenizer_path,
)
from megatron.data.tokenizers.sentencepiece import GPTSentencePieceTokenizer, Llama2Tokenizer, SentencePieceTokenizer
from megatron.data.tokenizers.tiktoken import TikTokenizer


@dataclass(frozen=True)
class TokenizerOptions:
    """Tokenizer settings, named as the command-line flags."""

    tokenizer_type: str  # one of `TOKENIZER_TYPES`
    tokenizer_model: str | None = None  # folder, file or Hugging Face hub name
    vocab_file: str | None = None  # GPT2BPETokenizer only
    merge_file: str | None = None  # GPT2BPETokenizer only
    vocab_size: int | None = None  # required by NullTokenizer; elsewhere it is only checked
    tiktoken_pattern: str | None = None  # pre-tokenization regex of TikTokenizer: ``v1`` or ``v2``
    tiktoken_num_special_tokens: int = 1000  # ids that TikTokenizer reserves before those of its file
    parse_special_tokens: bool = False  # encode special tokens spelled out in text as their ids
    follow_links: bool = False  # read files to which links lead out of the folder

    @classmethod
    def of(cls, data: DataConfig, vocab_size: int | None) -> TokenizerOptions:
        """Return the tokenizer settings of a run's configuration; raise DataError if it has no tokenizer type."""
        if data.tokenizer_type is None:
            raise DataError("the tokenizer of the data is not specified", "--tokenizer-type TYPE")
        shared = {field.name: getattr(data, field.name) for field in fields(cls) if hasattr(data, field.name)}
        return cls(**{**shared, "vocab_size": vocab_size})

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> TokenizerOptions:
        """Return the settings parsed by `add_tokenizer_flags`."""
        return cls(**{field.name: getattr(args, field.name) for field in fields(cls)})

    def local(self) -> TokenizerOptions:
        """Replace a hub name by its downloaded folder, so that worker processes need no network."""
        if self.tokenizer_type != "HuggingFaceTokenizer" or self.tokenizer_model is None:
            return self
        return replace(self, tokenizer_model=str(resolve_tokenizer_path(self.tokenizer_model)))


_TYPES: dict[str, Callable[..., Tokenizer]] = {
    "HuggingFaceTokenizer": HuggingFaceTokenizer,
    "GPT2BPETokenizer": GPT2BPETokenizer,
    "SentencePieceTokenizer": SentencePieceTokenizer,
    "GPTSentencePieceTokenizer": GPTSentencePieceTokenizer,
    "Llama2Tokenizer": Llama2Tokenizer,
    "TikTokenizer": TikTokenizer,
    "ByteTokenizer": ByteTokenizer,
    "NullTokenizer": NullTokenizer,
}
"""Constructors, whose arguments are fields of `TokenizerOptions`. Any other option but the size is refused."""
TOKENIZER_TYPES = tuple(_TYPES)
_EXAMPLES = {"HuggingFaceTokenizer": "DIR_OR_tokenizer.json", "TikTokenizer": "FILE.tiktoken"}


def build_tokenizer(options: TokenizerOptions) -> Tokenizer:
    """Build a tokenizer; a setting that its type does not use, or another vocabulary size than its own, is an error."""
    name = options.tokenizer_type
    if name not in _TYPES:
        unsupported = f"Megatron-LM's {name} is not supported: it {UNSUPPORTED_TOKENIZER_TYPES.get(name)}"
        seen = unsupported if name in UNSUPPORTED_TOKENIZER_TYPES else f"there is no {name}"
        raise DataError(
            f"{seen}; tokenizers for text: {', '.join(TOKENIZER_TYPES[:-1])}; ids made by another tool are read by "
            "NullTokenizer (as decimal numbers) or from the .bin and .idx of Megatron-LM's preprocessing",
            "--tokenizer-type HuggingFaceTokenizer --tokenizer-model DIR_OR_tokenizer.json",
            "--tokenizer-type ByteTokenizer",
            "--tokenizer-type NullTokenizer --vocab-size N",
            "pretrain_gpt.py --data-path PREFIX_OF_BIN_AND_IDX --vocab-size N",
        )
    parameters = signature(_TYPES[name]).parameters
    for field in fields(options):
        used = field.name in ("tokenizer_type", "vocab_size", "follow_links", *parameters)
        if not used and getattr(options, field.name) != field.default:
            flag = f"--{field.name.replace('_', '-')}"
            raise DataError(f"{name} does not use {flag}", f"leave out {flag}")
    model = parameters.get("tokenizer_model")
    if model is not None and model.default is model.empty and options.tokenizer_model is None:
        raise DataError(f"{name} needs --tokenizer-model", f"--tokenizer-model {_EXAMPLES.get(name, 'FILE.model')}")
    if options.tokenizer_model is not None and not options.follow_links:
        refuse_outside_links(Path(options.tokenizer_model), FOLLOW_LINKS, suffixes=(".json", ".model", ".tiktoken"))
    given = {field: value for field, value in vars(options).items() if field in parameters}
    tokenizer = _TYPES[name](**given)
    if type(tokenizer) is HuggingFaceTokenizer and not options.parse_special_tokens:
        tokenizer.check_special_tokens_stay_text()
    if options.vocab_size not in (None, tokenizer.vocab_size):
        seen = f"{name} has {tokenizer.vocab_size} ids, not {options.vocab_size}"
        raise DataError(seen, "leave out --vocab-size")
    return tokenizer


def refuse_outside_links(model: Path, *fixes: str, suffixes: Collection[str] = ()) -> None:
    """Raise DataError if links lead out of a tokenizer's folder, or among the files beside its file.

    In a folder, files without one of the ``suffixes``, if given, do not matter.
    """
    if model.is_dir():
        links = describe_outside_links(model, suffixes=suffixes)
    else:
        beside = [model.with_name(name) for name in (TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP)]
        links = describe_outside_links(model.parent, beside)
    if links:
        raise DataError(links, *fixes)


def add_tokenizer_flags(parser: argparse.ArgumentParser, required: bool = True) -> None:
    """Add the tokenizer flags of a data tool; read them with `TokenizerOptions.from_args`."""
    add = parser.add_argument_group("tokenizer").add_argument
    types = f"tokenizer class: {' or '.join(TOKENIZER_TYPES)}"
    model = "folder, file, or name of a model on the Hugging Face hub"
    number = "ids that TikTokenizer reserves for special tokens before those of its file (1000)"
    literal = "encode special tokens spelled out in text as their ids; by default they stay text"
    add("--tokenizer-type", required=required, metavar="TYPE", help=types)
    add("--tokenizer-model", metavar="PATH", help=model)
    add("--vocab-file", metavar="FILE", help="vocab.json of GPT2BPETokenizer")
    add("--merge-file", metavar="FILE", help="merges.txt of GPT2BPETokenizer")
    add("--vocab-size", type=int, metavar="N", help="number of ids, for NullTokenizer and TikTokenizer")
    add("--tiktoken-pattern", choices=("v1", "v2"), help="pre-tokenization regex of TikTokenizer")
    add("--tiktoken-num-special-tokens", type=int, default=1000, metavar="N", help=number)
    add("--parse-special-tokens", action="store_true", help=literal)


RECORD_SUFFIX = "tokens.json"  # <prefix>.tokens.json describes the tokenizer of <prefix>.bin
FILES_SUFFIX = "tokenizer"  # <prefix>.tokenizer/ holds its files, if it has any
CANONICAL_TYPES = {
    "GPTSentencePieceTokenizer": "SentencePieceTokenizer",
    "Llama2Tokenizer": "SentencePieceTokenizer",
    "GPT2BPETokenizer": "HuggingFaceTokenizer",  # kept as a tokenizer.json
}
"""Tokenizer types that give the same ids as another type when built from the same files."""
REWRITE_FIX = "rewrite the dataset with tools/preprocess_data.py"
COPY_FILES_FIX = "replace the links by the files, if you made them"


SETTING_TYPES = {"parse_special_tokens": bool, "tiktoken_pattern": str, "tiktoken_num_special_tokens": int}
"""The settings in a record; a record names no other file."""


@dataclass(frozen=True)
class TokenizerRecord:
    """Description of the tokenizer that wrote a dataset. Fields missing from older records are ``None``."""

    tokenizer_type: str
    vocab_size: int
    eod: int
    fingerprint: str
    pad: int | None = None
    special_ids: Mapping[str, int] | None = None
    settings: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> TokenizerRecord:
        """Return the record of a tokenizer."""
        facts = {field.name: getattr(tokenizer, field.name) for field in fields(cls)[1:]}
        return cls(type(tokenizer).__name__, **facts)

    def check(self) -> None:
        """Raise ValueError if a field has a value that no tokenizer has."""
        special_ids = {} if self.special_ids is None else self.special_ids
        settings = {} if self.settings is None else self.settings
        if type(self.vocab_size) is not int or not SETTINGS["vocab_size"].allows(self.vocab_size):
            limits = SETTINGS["vocab_size"].option.limits
            raise ValueError(f"vocab_size is {self.vocab_size!r}, not a whole number of {limits}")
        if not isinstance(special_ids, Mapping) or not isinstance(settings, Mapping):
            raise ValueError("special_ids and settings are objects or null")
        ids = {"eod": self.eod, "pad": 0 if self.pad is None else self.pad, **special_ids}
        for name, number in ids.items():
            if type(number) is not int or not 0 <= number < self.vocab_size:
                raise ValueError(f"the id of {name} is {number!r}, which is not below the vocab_size {self.vocab_size}")
        for name, value in settings.items():
            if type(value) is not SETTING_TYPES.get(name):
                raise ValueError(f"there is no setting {name} {value!r}")
        if not isinstance(self.tokenizer_type, str) or not isinstance(self.fingerprint, str):
            raise ValueError("tokenizer_type and fingerprint are texts")

    def to_bytes(self) -> bytes:
        """Return the contents of the record file."""
        return (json.dumps(asdict(self), indent=1) + "\n").encode()

    @property
    def parses_special_tokens(self) -> bool:
        """True if special tokens spelled out in text were encoded as their ids."""
        return bool((self.settings or {}).get("parse_special_tokens"))

    def matches_type(self, tokenizer_type: str) -> bool:
        """Return True if ``tokenizer_type`` is this type or an equivalent one."""
        canonical = CANONICAL_TYPES.get(self.tokenizer_type, self.tokenizer_type)
        if canonical == "SentencePieceTokenizer":
            tokenizer_type = CANONICAL_TYPES.get(tokenizer_type, tokenizer_type)
        return tokenizer_type in (self.tokenizer_type, canonical)


def have_same_ids(one: str | Path, other: str | Path) -> bool:
    """Return True if two datasets both have a record and an id means the same text in both."""
    a, b = read_tokenizer_record(one), read_tokenizer_record(other)
    if a is None or b is None or (a.vocab_size, a.eod) != (b.vocab_size, b.eod):
        return False
    if a.fingerprint == b.fingerprint:
        return True
    current = _current_fingerprint(one)
    return current is not None and current == _current_fingerprint(other)


def was_written_with(prefix: str | Path, tokenizer: Tokenizer) -> bool:
    """Return True if a dataset has a record and ``tokenizer`` gives the ids it was written with."""
    record = read_tokenizer_record(prefix)
    if record is None or (record.vocab_size, record.eod) != (tokenizer.vocab_size, tokenizer.eod):
        return False
    known = (tokenizer.fingerprint, *tokenizer.legacy_fingerprints)
    return record.fingerprint in known or _current_fingerprint(prefix) == tokenizer.fingerprint


def _current_fingerprint(prefix: str | Path) -> str | None:
    """Return the current fingerprint of the recorded tokenizer, or None if it can no longer be rebuilt."""
    try:
        tokenizer = load_recorded_tokenizer(prefix)
    except DataError:
        return None
    return None if tokenizer is None else tokenizer.fingerprint


def read_tokenizer_record(prefix: str | Path, tokenizer_type: str | None = None) -> TokenizerRecord | None:
    """Read the record of a dataset and check its type; return None if there is none, as for one of Megatron-LM."""
    path = Path(f"{local_prefix(prefix)}.{RECORD_SUFFIX}")
    try:
        record = TokenizerRecord(**parse_json(read_small(path)))
        record.check()
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError(f"{path}: {reason}", REWRITE_FIX) from error
    if tokenizer_type is not None and not record.matches_type(tokenizer_type):
        raise DataError(
            f"{prefix} was written with {record.tokenizer_type}, not with {tokenizer_type}",
            f"--tokenizer-type {record.tokenizer_type}",
        )
    return record


def load_recorded_tokenizer(prefix: str | Path, tokenizer_type: str | None = None) -> Tokenizer | None:
    """Rebuild the tokenizer that wrote a dataset; return None if there is no record.

    Raises:
        DataError: if the record names another type than ``tokenizer_type``, or the rebuilt tokenizer differs from it.
    """
    record = read_tokenizer_record(prefix, tokenizer_type)
    if record is None:
        return None
    folder, settings = Path(f"{local_prefix(prefix)}.{FILES_SUFFIX}"), record.settings or {}
    if folder.is_dir():
        refuse_outside_links(folder, COPY_FILES_FIX)
    model = None if record.tokenizer_type in ("ByteTokenizer", "NullTokenizer") else str(folder)
    size = record.vocab_size if record.tokenizer_type in ("NullTokenizer", "TikTokenizer") else None
    try:
        if record.tokenizer_type == "HuggingFaceTokenizer":
            # Not through build_tokenizer, which refuses some tokenizers that older data were written with.
            tokenizer: Tokenizer = HuggingFaceTokenizer(folder, **settings)
        else:
            tokenizer = build_tokenizer(TokenizerOptions(record.tokenizer_type, model, vocab_size=size, **settings))
    except TypeError as error:
        raise DataError(f"{prefix}.{RECORD_SUFFIX}: {error}", REWRITE_FIX) from error
    current = TokenizerRecord.of(tokenizer)
    if record.fingerprint in tokenizer.legacy_fingerprints:
        current = replace(current, fingerprint=record.fingerprint)
    if record.special_ids is None:  # an older record, without these fields
        current = replace(current, pad=None, special_ids=None, settings=None)
    if current != record:
        raise DataError(f"{prefix}.{RECORD_SUFFIX} records {record}, but that tokenizer is now {current}", REWRITE_FIX)
    return tokenizer
