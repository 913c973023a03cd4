"""Tokenizers stored as a Hugging Face ``tokenizer.json``."""

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
PIECES = "tokenizer.model"  # SentencePiece model in a Hugging Face folder
END_OF_DOCUMENT = "<|endoftext|>"
NO_FILES = "no tokenizer.json gives the same ids as this tokenizer: a model trained with it is exported without one"
ENDS = (END_OF_DOCUMENT, "</s>")  # end-of-document tokens tried if the files have no eos_token


class HuggingFaceTokenizer(LibraryTokenizer):
    """Tokenizer of the ``tokenizers`` library, without template, truncation and padding.

    No special token is added around a text. Special tokens spelled out in it stay text unless ``parse_special_tokens``,
    so that the words ``<|endoftext|>`` in a document do not end it. Added tokens not marked special are ordinary words.
    """

    library = "tokenizers"

    def __init__(self, path: str | Path, parse_special_tokens: bool = False) -> None:
        """Read a ``tokenizer.json`` and the configuration files beside it.

        Args:
            path: file, folder, or ``org/name`` on the hub.
            parse_special_tokens: encode special tokens spelled out in text as their ids.

        Raises:
            DataError: if the file is missing, damaged or non-deterministic, or nothing defines the end-of-document id.
        """
        folder = local_folder(path)
        self._load(_read_files(folder), folder, parse_special_tokens)

    def _load(self, files: Mapping[str, bytes], path: Path, parse_special_tokens: bool) -> None:
        """Initialize from file contents; ``path`` is used in messages."""
        self.files = files
        self._tokenizer = _parse(files[TOKENIZER], path)
        self._tokenizer.encode_special_tokens = not parse_special_tokens
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = 1 + max(ids.values(), default=-1)
        self.eod = _eod_id(files, ids, path)
        self.pad = ids.get(special_token(files, "pad_token") or "")
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_ids = {token.content: number for number, token in sorted(added.items()) if token.special}
        self.settings: Mapping[str, Any] = {"parse_special_tokens": True} if parse_special_tokens else {}

    @cached_property
    def fingerprint(self) -> str:
        """Digest of everything that affects ids, however the file spells it."""
        return fingerprint(deciding(self._tokenizer))

    @property
    def earlier_fingerprints(self) -> tuple[str, ...]:
        """Digests of the text of ``tokenizer.json``, without and with the setting."""
        return earlier_fingerprints(self.files[TOKENIZER].decode())

    def ids_of(self, texts: list[str]) -> list[list[int]]:
        """Encode, on as many threads as ``RAYON_NUM_THREADS`` and ``TOKENIZERS_PARALLELISM`` allow."""
        return [one.ids for one in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text, including special tokens; unknown ids are skipped."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def found_in_text(self) -> list[str]:
        """Return the special tokens, except the unknown token, whose spelling is encoded as their id."""
        unknown = getattr(self._tokenizer.model, "unk_token", None) or special_token(self.files, "unk_token")
        ids = {token: self.encode(token) for token in self.special_ids if token != unknown}
        return [token for token, found in ids.items() if self.special_ids[token] in found]

    def hugging_face_files(self) -> dict[str, bytes]:
        """Return the files it was read from."""
        return dict(self.files)


def deciding(tokenizer: tokenizers.Tokenizer) -> str:
    """Return as JSON the parts of a tokenizer that affect ids, in a canonical form.

    Templates, decoders, truncation and padding do not affect ids. Null, ``false`` and ``""`` mean the default and are
    left out, because later versions of the library may write defaults that this one does not.
    """
    parts = json.loads(tokenizer.to_str())
    kept = {name: parts[name] for name in ("added_tokens", "normalizer", "pre_tokenizer", "model")}
    for token in kept["added_tokens"] if kept["normalizer"] is None else ():
        token["normalized"] = False  # no effect without a normalizer
    return json.dumps(_without_defaults(kept), sort_keys=True)


def _without_defaults(value: Any) -> Any:
    """Remove default values, and ``trim_offsets``, which only affects offsets, from all objects."""
    if isinstance(value, list):
        return [_without_defaults(item) for item in value]
    if not isinstance(value, dict):
        return value
    kept = {name: _without_defaults(item) for name, item in value.items() if name != "trim_offsets"}
    return {name: item for name, item in kept.items() if item is not None and item is not False and item != ""}


def _eod_id(files: Mapping[str, bytes], ids: Mapping[str, int], path: Path) -> int:
    try:
        end, named = end_of_text(files, ids), special_token(files, "eos_token")
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
    if end is not None:
        return end
    seen = f"{path} names no eos_token" if named is None else f"{path} has no id for its eos_token '{named}'"
    raise DataError(f"{seen}, which ends a document", f'"eos_token": "..." in {CONFIG} beside {TOKENIZER}')


def local_folder(path: str | Path) -> Path:
    """Return ``path``, or the local folder that a hub name was downloaded to.

    Raises:
        DataError: if it cannot be downloaded.
    """
    return fetch(str(path), (TOKENIZER, CONFIG, SPECIAL)) if is_hub_name(str(path)) else Path(path)


def _read_files(path: Path) -> dict[str, bytes]:
    """Read ``tokenizer.json`` and the configuration files present beside it."""
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
        raise DataError(f"{path}: not a tokenizer.json that the library can read: {error}", "copy it again") from error
    if getattr(tokenizer.model, "dropout", None):
        raise DataError(
            f"{path} drops merges at random (BPE dropout): its ids are not reproducible", 'set "dropout" to null'
        )
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def end_of_text(files: Mapping[str, bytes], ids: Mapping[str, int]) -> int | None:
    """Return the id of the end-of-document token, for data, generation and export alike.

    It is the ``eos_token`` of ``tokenizer_config.json``, else of ``special_tokens_map.json``. If neither names one, it
    is ``<|endoftext|>`` or ``</s>``. None if that token has no id; a named token is never replaced by another.

    Args:
        files: contents of the tokenizer's files, by name.
        ids: ids of all its tokens.

    Raises:
        DataError: if a file is not JSON or its entry is not a token.
    """
    named = special_token(files, "eos_token")
    token = next((end for end in ENDS if end in ids), None) if named is None else named
    return None if token is None else ids.get(token)


def special_token(files: Mapping[str, bytes], role: str) -> str | None:
    """Return the token that the files define for a ``role`` such as ``eos_token``, or None.

    Raises:
        DataError: if a file is not JSON or its entry is not a token.
    """
    for name in (CONFIG, SPECIAL):
        try:
            token = json.loads(files.get(name, b"{}")).get(role)
        except (ValueError, AttributeError) as error:
            raise DataError(f"the tokenizer's {name} is not a JSON object: {error}", "copy it again") from error
        token = token.get("content") if isinstance(token, dict) else token
        if not isinstance(token, str | None):
            raise DataError(f"the tokenizer's {name}: {role} is {token!r}, not a string", "copy it again")
        if token is not None:
            return token
    return None


def tokenizer_files(tokenizer: tokenizers.Tokenizer) -> dict[str, bytes]:
    """Return the files, by name, for ``transformers.AutoTokenizer``, with `END_OF_DOCUMENT` as ``eos_token``."""
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_DOCUMENT}
    settings: dict[str, Any] = {**config, "clean_up_tokenization_spaces": False}
    content = tokenizer.to_str(pretty=True) + "\n"
    return {TOKENIZER: content.encode(), CONFIG: (json.dumps(settings, indent=2) + "\n").encode()}


def byte_level_bpe(model: models.BPE, words: bool) -> tokenizers.Tokenizer:
    """Return a byte-level BPE tokenizer around ``model``, whose vocabulary spells bytes as in `bytes_to_unicode`.

    With ``words``, text is first split into words as in GPT-2.
    """
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_letters() -> list[str]:
    """Return the printable character for each of the 256 bytes in a byte-level vocabulary.

    Source: GPT-2's ``bytes_to_unicode``. Printable Latin-1 characters stand for themselves; the others are mapped to
    U+0100 and following.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in visible else next(others)) for byte in range(256)]


def bytes_as_ids() -> tokenizers.Tokenizer:
    """Return a tokenizer whose ids are the bytes of the text, and 256 for `END_OF_DOCUMENT`."""
    vocabulary = {letter: byte for byte, letter in enumerate(byte_letters())}
    tokenizer = byte_level_bpe(models.BPE(vocabulary, []), words=False)
    tokenizer.add_special_tokens([END_OF_DOCUMENT])
    return tokenizer
