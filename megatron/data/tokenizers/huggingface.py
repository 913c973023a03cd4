"""Tokenizers of Hugging Face: a ``tokenizer.json``, read and written."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from megatron.data.digest import fingerprint
from megatron.data.errors import DataError
from megatron.data.tokenizers.encoded import LibraryTokenizer, earlier_fingerprints
from megatron.data.tokenizers.hub import fetch, is_hub_name
from megatron.data.tokenizers.reading import read_file

TOKENIZER, CONFIG, SPECIAL = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
PIECES = "tokenizer.model"  # how folders of Hugging Face call a model of SentencePiece
END_OF_DOCUMENT = "<|endoftext|>"
NO_FILES = "Hugging Face cannot read this tokenizer to the same ids: a model trained with it is exported without one"
ENDS = (END_OF_DOCUMENT, "</s>")  # what ends a document where the files do not say it


class HuggingFaceTokenizer(LibraryTokenizer):
    """The ids that the library ``tokenizers`` gives, of nothing but the text.

    No special token is put around a text, and one that is spelled out in it stays text unless it is told otherwise:
    the words ``<|endoftext|>`` in a document about tokenizers do not end it. (The library does so for the added tokens
    that are marked special; others are ordinary words to it.) Lengths and padding that the file asks for are switched
    off.

    Attributes:
        files: contents by name of the files it was read from.
        vocab_size: the largest id, added tokens included, plus one.
        eod: the id that ends a document, as `end_of_text` says.
        pad: the id of the files' ``pad_token``; None when they name none.
        special_ids: ids of the added tokens that are marked special, by how each is spelled.
        settings: ``parse_special_tokens`` where it is on.
    """

    library = "tokenizers"

    def __init__(self, path: str | Path, parse_special_tokens: bool = False) -> None:
        """Read a ``tokenizer.json``, the one in a folder, or that of ``org/name`` on the hub, and the files beside it.

        Args:
            path: of the file, or of the folder; or the name on the hub.
            parse_special_tokens: a special token that is spelled out in a text becomes its id.

        Raises:
            DataError: when there is none, it is damaged or random, or nothing says which id ends a document.
        """
        folder = local_folder(path)
        self._load(_read_files(folder), folder, parse_special_tokens)

    def _load(self, files: Mapping[str, bytes], path: Path, parse_special_tokens: bool) -> None:
        """Take the files, which came from ``path``."""
        self.files = files
        self._tokenizer = _parse(files[TOKENIZER], path)
        self._tokenizer.encode_special_tokens = not parse_special_tokens
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = 1 + max(ids.values(), default=-1)
        self.eod = _end_of_document(files, ids, path)
        self.pad = ids.get(special_token(files, "pad_token") or "")
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_ids = {token.content: number for number, token in sorted(added.items()) if token.special}
        self.settings: Mapping[str, Any] = {"parse_special_tokens": True} if parse_special_tokens else {}

    @cached_property
    def fingerprint(self) -> str:
        """Of what decides ids, in whatever words the file says it."""
        return fingerprint(deciding(self._tokenizer))

    @property
    def earlier_fingerprints(self) -> tuple[str, ...]:
        """Of the text of ``tokenizer.json``, and the setting."""
        return earlier_fingerprints(self.files[TOKENIZER].decode())

    def ids_of(self, texts: list[str]) -> list[list[int]]:
        """Ids, on as many threads as ``RAYON_NUM_THREADS`` and ``TOKENIZERS_PARALLELISM`` allow."""
        return [one.ids for one in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: Iterable[int]) -> str:
        """Text, special tokens spelled out; ids that the tokenizer does not have are left out."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def found_in_text(self) -> list[str]:
        """Special tokens whose ids a text gets in which they are spelled out, the unknown token aside."""
        unknown = getattr(self._tokenizer.model, "unk_token", None) or special_token(self.files, "unk_token")
        ids = {token: self.encode(token) for token in self.special_ids if token != unknown}
        return [token for token, found in ids.items() if self.special_ids[token] in found]

    def hugging_face_files(self) -> dict[str, bytes]:
        """The files it was read from."""
        return dict(self.files)


def deciding(tokenizer: tokenizers.Tokenizer) -> str:
    """What of a tokenizer decides which ids a text has, as JSON: equal where only the words of the files differ.

    Templates, decoders, lengths and padding do not decide it. Nothing, ``false`` and ``""`` are the same to the
    library, so that they are left out, as a later version may say a default that this one does not.
    """
    parts = json.loads(tokenizer.to_str())
    kept = {name: parts[name] for name in ("added_tokens", "normalizer", "pre_tokenizer", "model")}
    for token in kept["added_tokens"] if kept["normalizer"] is None else ():
        token["normalized"] = False  # nothing is changed in a text before the token is looked for
    return json.dumps(_said(kept), sort_keys=True)


def _said(value: Any) -> Any:
    """A JSON value without the defaults of its objects."""
    if isinstance(value, list):
        return [_said(item) for item in value]
    if not isinstance(value, dict):
        return value
    silent = ("trim_offsets",)  # where a token lies in the text, which nobody asks for
    told = {name: _said(item) for name, item in value.items() if name not in silent}
    return {name: item for name, item in told.items() if item is not None and item is not False and item != ""}


def _end_of_document(files: Mapping[str, bytes], ids: Mapping[str, int], path: Path) -> int:
    try:
        end, named = end_of_text(files, ids), special_token(files, "eos_token")
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
    if end is not None:
        return end
    seen = f"{path} names no eos_token" if named is None else f"{path} has no id for its eos_token '{named}'"
    raise DataError(f"{seen}: nothing says what ends a document", f'"eos_token": "..." in {CONFIG} beside {TOKENIZER}')


def local_folder(path: str | Path) -> Path:
    """The path, or the folder of this machine with the files of ``org/name`` on the hub.

    Raises:
        DataError: when the hub does not give them.
    """
    return fetch(str(path), (TOKENIZER, CONFIG, SPECIAL)) if is_hub_name(str(path)) else Path(path)


def _read_files(path: Path) -> dict[str, bytes]:
    """The files of a tokenizer by name: ``tokenizer.json``, and the others if they are there."""
    main = path / TOKENIZER if path.is_dir() else path
    if not main.is_file():
        fetch = f"hf download {path} --include 'tokenizer*' 'special*' --local-dir DIR"
        convert = f"import transformers as t; t.AutoTokenizer.from_pretrained({str(path)!r}).save_pretrained('DIR')"
        how = [f"python -c {shlex.quote(convert)}" if path.is_dir() else fetch]
        if (main.with_name(PIECES)).is_file():
            how.insert(0, f"--tokenizer-type SentencePieceTokenizer --tokenizer-model {shlex.quote(str(path))}")
        raise DataError(f"there is no {main}", *how, "--tokenizer-model DIR")
    files = {TOKENIZER: read_file(main)}
    beside = {name: main.with_name(name) for name in (CONFIG, SPECIAL)}
    return files | {name: read_file(file) for name, file in beside.items() if file.is_file()}


def _parse(content: bytes, path: Path) -> tokenizers.Tokenizer:
    try:
        tokenizer = tokenizers.Tokenizer.from_str(content.decode())
    except Exception as error:  # the library raises no other class
        raise DataError(f"{path} is no tokenizer.json that the library can read: {error}", "copy it again") from error
    if getattr(tokenizer.model, "dropout", None):
        raise DataError(f"{path} drops merges at random, so that ids differ from time to time", 'set "dropout" to null')
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def end_of_text(files: Mapping[str, bytes], ids: Mapping[str, int]) -> int | None:
    """The id of the token that ends a document: the one rule, for data, generation and export.

    It is the ``eos_token`` of ``tokenizer_config.json``, else of ``special_tokens_map.json``; where neither names one,
    ``<|endoftext|>`` or ``</s>``. None when none of these has an id; one that is named is not replaced by another.

    Args:
        files: of the tokenizer, by name.
        ids: of all its tokens.

    Raises:
        DataError: when a file is no JSON, or names what is no token.
    """
    named = special_token(files, "eos_token")
    token = next((end for end in ENDS if end in ids), None) if named is None else named
    return None if token is None else ids.get(token)


def special_token(files: Mapping[str, bytes], role: str) -> str | None:
    """The token that a tokenizer's files name for a ``role`` such as ``eos_token``; None when they name none.

    Raises:
        DataError: when a file is no JSON, or names what is no token.
    """
    for name in (CONFIG, SPECIAL):
        try:
            token = json.loads(files.get(name, b"{}")).get(role)
        except (ValueError, AttributeError) as error:
            raise DataError(f"the tokenizer's {name} is no JSON object: {error}", "copy it again") from error
        token = token.get("content") if isinstance(token, dict) else token
        if not isinstance(token, str | None):
            raise DataError(f"the tokenizer's {name}: {role} is {token!r}, not a string", "copy it again")
        if token is not None:
            return token
    return None


def tokenizer_files(tokenizer: tokenizers.Tokenizer) -> dict[str, bytes]:
    """The files, by name, from which ``transformers.AutoTokenizer`` makes a tokenizer with `END_OF_DOCUMENT`."""
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_DOCUMENT}
    settings: dict[str, Any] = {**config, "clean_up_tokenization_spaces": False}
    content = tokenizer.to_str(pretty=True) + "\n"
    return {TOKENIZER: content.encode(), CONFIG: (json.dumps(settings, indent=2) + "\n").encode()}


def byte_level_bpe(model: models.BPE, words: bool) -> tokenizers.Tokenizer:
    """A tokenizer of the bytes of UTF-8 text, to which ``model`` knows them as the letters of `byte_letters`.

    ``words``: cut the text into words first, as GPT-2 does.
    """
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_letters() -> list[str]:
    """The visible letter that stands for each of the 256 bytes in the vocabulary of a byte-level tokenizer.

    Source: GPT-2's ``bytes_to_unicode``: printable Latin-1 stands for itself, the others follow from U+0100 on.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in visible else next(others)) for byte in range(256)]


def bytes_as_ids() -> tokenizers.Tokenizer:
    """The tokenizer whose ids are the bytes of the text, and 256 for `END_OF_DOCUMENT`."""
    vocabulary = {letter: byte for byte, letter in enumerate(byte_letters())}
    tokenizer = byte_level_bpe(models.BPE(vocabulary, []), words=False)
    tokenizer.add_special_tokens([END_OF_DOCUMENT])
    return tokenizer
