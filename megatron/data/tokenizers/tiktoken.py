"""Tokenizers stored as byte sequences with ranks: OpenAI's ``.tiktoken`` files, and Megatron-LM's JSON.

`TikTokenizer` reads both and encodes with the ``tiktoken`` library.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from megatron.config.files import parse_json
from megatron.data.errors import DataError
from megatron.data.tokenizers.base import (
    LibraryTokenizer,
    convert_library_errors,
    num_encoder_threads,
    read_tokenizer_file,
)
from megatron.data.tokenizers.huggingface import END_OF_DOCUMENT, MAX_TOKENS, files_with_config

RANKS_SUFFIX, JSON_SUFFIX = ".tiktoken", ".json"
MEGATRON_VOCAB_SIZE = 1 << 17
DEFAULT_NUM_SPECIAL_TOKENS = 1000  # default of --tiktoken-num-special-tokens
NAMED_SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
"""Megatron-LM's named special tokens; ``<SPECIAL_7>`` and following fill up the number."""

GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CL100K_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
    r"|%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERNS = {
    "v1": r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": _CASED % ("", "", r"\p{N}"),
}
"""Megatron-LM's two pre-tokenization regexes."""


class TiktokenEncoding(NamedTuple):
    """Pre-tokenization regex and special tokens, which a file of ranks does not contain."""

    pattern: str
    special_ids: Mapping[str, int]


ENCODINGS = {
    "r50k_base": TiktokenEncoding(GPT2_PATTERN, {END_OF_DOCUMENT: 50256}),
    "p50k_base": TiktokenEncoding(GPT2_PATTERN, {END_OF_DOCUMENT: 50256}),
    "cl100k_base": TiktokenEncoding(
        CL100K_PATTERN,
        {
            END_OF_DOCUMENT: 100257,
            "<|fim_prefix|>": 100258,
            "<|fim_middle|>": 100259,
            "<|fim_suffix|>": 100260,
            "<|endofprompt|>": 100276,
        },
    ),
    "o200k_base": TiktokenEncoding(
        _CASED % (_CONTRACTION, _CONTRACTION, r"\p{N}{1,3}"), {END_OF_DOCUMENT: 199999, "<|endofprompt|>": 200018}
    ),
}
"""OpenAI's encodings, by file name."""


class TikTokenizer(LibraryTokenizer):
    """Tokenizer of the ``tiktoken`` library.

    A file named as one of `ENCODINGS` is that encoding, and ``<|endoftext|>`` ends a document. Any other file, or one
    with an explicit pattern, is read as by Megatron-LM: special tokens come first (``<unk>``, ``<s>``, ``</s>``, which
    ends a document, and so on), followed by the ids of the file.

    Special tokens spelled out in text stay text unless ``parse_special_tokens``.
    """

    library = "tiktoken"

    def __init__(
        self,
        tokenizer_model: str | Path,
        tiktoken_pattern: str | None = None,
        tiktoken_num_special_tokens: int = DEFAULT_NUM_SPECIAL_TOKENS,
        vocab_size: int | None = None,
        parse_special_tokens: bool = False,
    ) -> None:
        """Read a ``.tiktoken`` or ``.json`` file, or the only one in a folder.

        Args:
            tokenizer_model: file or folder.
            tiktoken_pattern: ``v1`` or ``v2``; by default the encoding named by the file, ``v2`` for ``.json``.
            tiktoken_num_special_tokens: ids before those of the file, if special tokens come first.
            vocab_size: ids to keep, if special tokens come first; by default all. Megatron-LM keeps at most 2**17.
            parse_special_tokens: encode special tokens spelled out in text as their ids.

        Raises:
            DataError: if the file is missing or damaged, or the sizes do not fit it.
        """
        file = _find_file(Path(tokenizer_model))
        content = read_tokenizer_file(file, f"--tokenizer-model FILE{RANKS_SUFFIX}")
        self.files = {file.name if file.suffix == JSON_SUFFIX else file.stem + RANKS_SUFFIX: content}
        self.settings = {"parse_special_tokens": True} if parse_special_tokens else {}
        if file.suffix == RANKS_SUFFIX and file.stem in ENCODINGS and tiktoken_pattern is None:
            if tiktoken_num_special_tokens != DEFAULT_NUM_SPECIAL_TOKENS:
                given = f"{tiktoken_num_special_tokens} cannot be used"
                seen = f"the number of special tokens of {file.stem} is fixed, so {given}"
                raise DataError(seen, "leave out --tiktoken-num-special-tokens", "--tiktoken-pattern v2")
            encoding = ENCODINGS[file.stem]
            self._ranks, self._pattern, self.special_ids = _parse_ranks(content, file), *encoding
        else:
            name = _pattern_name(tiktoken_pattern, file)
            self.settings |= {"tiktoken_pattern": name, "tiktoken_num_special_tokens": tiktoken_num_special_tokens}
            self._pattern, ranks = PATTERNS[name], _parse_ranks(content, file)
            first = _special_tokens_first(ranks, tiktoken_num_special_tokens, vocab_size, file)
            self._ranks, self.special_ids = first
        self._known = frozenset(self._ranks.values()) | frozenset(self.special_ids.values())
        self.vocab_size = 1 + max(self._known)
        self.eod = self.special_ids.get(END_OF_DOCUMENT, self.special_ids.get("</s>", -1))
        self.pad = self.special_ids.get("<pad>")
        import tiktoken

        with convert_library_errors(DataError, f"{file}: not ranks that tiktoken can use", "copy it again"):
            self._encoding = tiktoken.Encoding(
                file.stem, pat_str=self._pattern, mergeable_ranks=self._ranks, special_tokens=dict(self.special_ids)
            )

    def _identity(self) -> tuple[str, ...]:
        table = hashlib.sha256(b"".join(b"%d %b\n" % (number, token) for token, number in self._ranks.items()))
        return table.hexdigest(), self._pattern, json.dumps(dict(self.special_ids))

    def ids_of(self, texts: list[str]) -> list[list[int]]:
        """Encode, on all cores unless in a worker process."""
        if self.settings.get("parse_special_tokens"):
            return self._encoding.encode_batch(texts, num_threads=num_encoder_threads(), allowed_special="all")
        return self._encoding.encode_ordinary_batch(texts, num_threads=num_encoder_threads())

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text, including special tokens; unknown ids are skipped."""
        return self._encoding.decode([int(number) for number in ids if number in self._known])

    def hugging_face_files(self) -> dict[str, bytes]:
        """Return a ``tokenizer.json`` of equal ids, except that ``transformers`` parses special tokens in text."""
        return self._hugging_face_files

    @cached_property
    def _hugging_face_files(self) -> dict[str, bytes]:
        from megatron.data.tokenizers.tokenizer_json import from_tiktoken

        content = from_tiktoken(self._ranks, self._pattern, self.special_ids)
        config = {"eos_token": self.decode([self.eod]), "clean_up_tokenization_spaces": False}
        return {} if content is None else files_with_config(content, config)


def _find_file(path: Path) -> Path:
    """Return the file itself, or the only file of ranks in a folder."""
    if not path.is_dir():
        return path
    found = [entry for entry in sorted(path.iterdir()) if entry.suffix in (RANKS_SUFFIX, JSON_SUFFIX)]
    if len(found) != 1:
        seen = f"{path} holds {len(found)} files ending in {RANKS_SUFFIX} or {JSON_SUFFIX}, not one"
        raise DataError(seen, f"--tokenizer-model {path}/FILE{RANKS_SUFFIX}")
    return found[0]


def _pattern_name(pattern: str | None, file: Path) -> str:
    if pattern is None and file.suffix == JSON_SUFFIX:
        return "v2"
    if pattern not in PATTERNS:
        seen = f"{file.name} has no pre-tokenization regex, and its name is not that of one of OpenAI's encodings"
        names = " or ".join(name + RANKS_SUFFIX for name in ENCODINGS)
        raise DataError(f"{seen} ({names})", "--tiktoken-pattern v1", "--tiktoken-pattern v2")
    return pattern


def _parse_ranks(content: bytes, file: Path) -> dict[bytes, int]:
    """Parse byte sequences and their ranks."""
    pairs: list[tuple[bytes, int]] = []
    if file.suffix == JSON_SUFFIX:
        try:
            for entry in parse_json(content):
                pairs.append((base64.b64decode(entry["token_bytes"], validate=True), entry["rank"]))
        except (ValueError, TypeError, KeyError) as error:
            seen = f'{file} is not a list of {{"rank": 0, "token_bytes": "AA==", "token_str": "..."}}: {error!r}'
            raise DataError(seen, f"--tokenizer-model FILE{RANKS_SUFFIX}") from error
        if [rank for _, rank in pairs] != list(range(len(pairs))):
            raise DataError(f"the ranks of {file} are not 0, 1, 2 and so on", "copy it again")
        pairs = [(token, number) for number, (token, _) in enumerate(pairs)]  # 1.0 and true are equal to 1
    else:
        for number, line in enumerate(content.splitlines(), 1):
            try:
                token, rank = line.split()
                pairs.append((base64.b64decode(token, validate=True), int(rank)))
            except ValueError as error:  # also of base64
                seen = f"{file}:{number} is not a base64 token and its rank: {line[:40]!r}"
                raise DataError(seen, "copy it again") from error
    ranks = dict(pairs)
    if len(ranks) < len(pairs) or len(set(ranks.values())) < len(pairs):
        raise DataError(f"{file} has a duplicate token or rank", "copy it again")
    if not 0 <= min(ranks.values(), default=0) <= max(ranks.values(), default=0) < MAX_TOKENS:
        raise DataError(f"{file} has a rank that is not from 0 to {MAX_TOKENS - 1:,}", "copy it again")
    missing = [byte for byte in range(256) if bytes((byte,)) not in ranks]
    if missing:
        raise DataError(f"{file} lacks {len(missing)} of the 256 bytes, first 0x{missing[0]:02X}", "copy it again")
    return ranks


def _special_tokens_first(
    ranks: dict[bytes, int], num_special_tokens: int, vocab_size: int | None, file: Path
) -> tuple[dict[bytes, int], dict[str, int]]:
    """Shift ranks behind the special tokens, keep ``vocab_size`` ids in all, and add the ids of the special tokens."""
    if num_special_tokens < len(NAMED_SPECIAL_TOKENS):
        seen = f"{num_special_tokens} special tokens are too few for {' '.join(NAMED_SPECIAL_TOKENS)}"
        raise DataError(seen, "--tiktoken-num-special-tokens 1000")
    full_size = num_special_tokens + 1 + max(ranks.values())
    if vocab_size is None and full_size > MEGATRON_VOCAB_SIZE:
        raise DataError(
            f"{file} and {num_special_tokens} special tokens make {full_size:,} ids; Megatron-LM keeps the first 2**17",
            f"--vocab-size {MEGATRON_VOCAB_SIZE}",
            f"--vocab-size {full_size}",
        )
    size = full_size if vocab_size is None else vocab_size
    if not num_special_tokens + 256 <= size <= full_size:
        seen = f"{file} and {num_special_tokens} special tokens make {full_size:,} ids, not {size:,}"
        raise DataError(seen, f"--vocab-size {full_size}", "leave out --vocab-size")
    kept = {token: num_special_tokens + rank for token, rank in ranks.items() if num_special_tokens + rank < size}
    fillers = (f"<SPECIAL_{number}>" for number in range(len(NAMED_SPECIAL_TOKENS), num_special_tokens))
    special_ids = {name: number for number, name in enumerate((*NAMED_SPECIAL_TOKENS, *fillers))}
    return kept, special_ids
