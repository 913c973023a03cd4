"""GPT-2's original tokenizer files, ``vocab.json`` and ``merges.txt``."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from tokenizers import models

from megatron.data.errors import DataError
from megatron.data.tokenizers.huggingface import (
    END_OF_DOCUMENT,
    TOKENIZER,
    HuggingFaceTokenizer,
    byte_letters,
    byte_level_bpe,
    tokenizer_files,
)
from megatron.data.tokenizers.reading import read_file

TWO = "--vocab-file vocab.json --merge-file merges.txt"


class GPT2BPETokenizer(HuggingFaceTokenizer):
    """Byte-level BPE with GPT-2's word splitting, stored as a ``tokenizer.json``.

    Its ids equal those of ``transformers``' GPT2Tokenizer without special tokens; ``<|endoftext|>`` ends a document.
    """

    @classmethod
    def from_vocabulary(cls, vocab: Path, merges: Path, parse_special_tokens: bool = False) -> GPT2BPETokenizer:
        """Build the tokenizer from ``vocab.json`` and ``merges.txt``.

        Raises:
            DataError: if a file is missing, damaged or swapped with the other, or lacks a byte or ``<|endoftext|>``.
        """
        first, second = (read_file(path, TWO).lstrip()[:1] for path in (vocab, merges))
        if first != b"{" and second == b"{":
            fix = f"--vocab-file {shlex.quote(str(merges))} --merge-file {shlex.quote(str(vocab))}"
            raise DataError(f"{merges} is a vocabulary and {vocab} is not: the two files are swapped", fix)
        vocabulary, pairs = _read_vocabulary(vocab), _read_merges(merges)
        try:
            tokenizer = byte_level_bpe(models.BPE(vocabulary, pairs), words=True)
        except Exception as error:  # the library raises no other class
            raise DataError(f"{merges} does not belong to {vocab}: {error}", "download both again") from error
        tokenizer.add_special_tokens([END_OF_DOCUMENT])
        new = cls.__new__(cls)
        new._load(tokenizer_files(tokenizer), vocab, parse_special_tokens)
        return new


def _read_vocabulary(path: Path) -> dict[str, int]:
    content = read_file(path, "--vocab-file vocab.json")
    try:
        vocabulary = json.loads(content)
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}", "download it again") from error
    if not isinstance(vocabulary, dict) or not all(type(number) is int for number in vocabulary.values()):
        raise DataError(f"{path} is not a JSON object from tokens to ids", "--vocab-file vocab.json")
    if len(set(vocabulary.values())) < len(vocabulary) or min(vocabulary.values(), default=0) < 0:
        raise DataError(f"{path} has a duplicate or negative id", "download it again")
    missing = [token for token in (*byte_letters(), END_OF_DOCUMENT) if token not in vocabulary]
    if missing:
        seen = f"{path} lacks {len(missing)} of the 256 bytes and {END_OF_DOCUMENT}, first '{missing[0]}'"
        raise DataError(seen, "--vocab-file vocab.json of a byte-level BPE", f"--tokenizer-model DIR_WITH_{TOKENIZER}")
    return vocabulary


def _read_merges(path: Path) -> list[tuple[str, str]]:
    """Return the merges in order of priority; a first line ``#version`` is skipped."""
    content = read_file(path, "--merge-file merges.txt")
    try:
        lines = content.decode().replace("\r\n", "\n").split("\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error.reason}", "--merge-file merges.txt") from error
    start = 1 if lines[0].startswith("#version") else 0
    pairs = []
    for number, line in enumerate(lines[start:], 1 + start):
        words = line.split(" ")
        if len(words) == 2:
            pairs.append((words[0], words[1]))
        elif line:
            raise DataError(
                f"{path}:{number} is not two tokens separated by a space: '{line[:40]}'", "download it again"
            )
    return pairs
