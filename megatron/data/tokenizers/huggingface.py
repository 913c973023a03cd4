"""Tokenizers of the Hugging Face ``tokenizers`` library, and tokenizers without files.

`HuggingFaceTokenizer` reads a ``tokenizer.json``; `GPT2BPETokenizer` converts GPT-2's ``vocab.json`` and
``merges.txt`` to one. `ByteTokenizer` encodes bytes, and `NullTokenizer` reads ids written as decimal numbers. All
give the ids of the text alone: no special tokens are added, and those spelled out in text stay text unless requested.
"""

from __future__ import annotations

import json
import re
import shlex
from base64 import b64decode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from megatron.config.files import SMALL_FILE_BYTES, parse_json
from megatron.config.text import escape_library_logs
from megatron.data.errors import DataError
from megatron.data.tokenizers.base import (
    EncodedBatch,
    LibraryTokenizer,
    Tokenizer,
    convert_library_errors,
    read_tokenizer_file,
)

TOKENIZER_JSON = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"
CHAT_TEMPLATE = "chat_template.jinja"
OTHER_FILES = ("added_tokens.json", CHAT_TEMPLATE)  # of no effect on ids here, but part of an exported model
SENTENCEPIECE_MODEL = "tokenizer.model"  # SentencePiece model in a Hugging Face folder
END_OF_DOCUMENT = "<|endoftext|>"
NO_EXPORT_NOTE = (
    "no tokenizer.json gives the same ids as this tokenizer: a model trained with it is exported without one"
)
DEFAULT_EOD_TOKENS = (END_OF_DOCUMENT, "</s>")  # tried if the files name no eos_token


MAX_TOKENS = 1 << 24
"""Limit of the ids in a tokenizer's files. The library saves a tokenizer through a list of all ids without a token."""

MAX_GROWTH = 4096
"""How many times as long as the text the result of a tokenizer's rules may be."""


def load_with_transformers(files: Mapping[str, bytes]) -> Any:
    """Return the tokenizer in the files of a Hugging Face folder, by name, as ``transformers`` loads it.

    Raises:
        Exception: of whatever class the tokenizer that transformers chooses raises.
    """
    from transformers import AutoTokenizer  # takes a second

    for name in (TOKENIZER_CONFIG, "config.json"):
        code = parse_json(files.get(name, b"{}")).get("auto_map") or ()
        if code and (name == TOKENIZER_CONFIG or "AutoTokenizer" in code):
            seen = f"{name} names code of its own in 'auto_map', which is never run"
            raise DataError(f"{seen}; without 'auto_map', {TOKENIZER_JSON} is read as a PreTrainedTokenizerFast")
    escape_library_logs()
    with TemporaryDirectory() as folder:
        for name, content in files.items():
            Path(folder, name).write_bytes(content)
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


class HuggingFaceTokenizer(LibraryTokenizer):
    """Tokenizer of the ``tokenizers`` library, without template, truncation and padding.

    No special token is added around a text. Special tokens spelled out in it stay text unless ``parse_special_tokens``,
    so that the words ``<|endoftext|>`` in a document do not end it. Added tokens not marked special are ordinary words.
    """

    library = "tokenizers"

    def __init__(
        self, tokenizer_model: str | Path, parse_special_tokens: bool = False, files: Mapping[str, bytes] | None = None
    ) -> None:
        """Read a ``tokenizer.json`` and the configuration files beside it.

        Args:
            tokenizer_model: file, folder, or ``org/name`` on the hub.
            parse_special_tokens: encode special tokens spelled out in text as their ids.
            files: contents of the files, by name, instead of those in ``tokenizer_model``.

        Raises:
            DataError: if the file is missing, damaged or non-deterministic, or nothing defines the end-of-document id.
        """
        path = resolve_tokenizer_path(tokenizer_model)
        self.files = files = _read_files(path) if files is None else files
        try:
            self._tokenizer, ids = parse_tokenizer(files[TOKENIZER_JSON])
        except ValueError as error:
            raise DataError(f"{path}: {error}", "copy it again") from error
        if getattr(self._tokenizer.model, "dropout", None):
            seen = f"{path} drops merges at random (BPE dropout): its ids are not reproducible"
            raise DataError(seen, 'set "dropout" to null')
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = not parse_special_tokens
        self.vocab_size = 1 + max(ids.values(), default=-1)
        try:
            eod, named = find_eod_id(files, ids), find_special_token(files, "eos_token")
        except DataError as error:
            raise DataError(f"{path}: {error}") from error
        if eod is None:
            seen = f"{path} names no eos_token" if named is None else f"{path} has no id for its eos_token '{named}'"
            fix = f'"eos_token": "..." in {TOKENIZER_CONFIG} beside {TOKENIZER_JSON}'
            raise DataError(f"{seen}, which ends a document", fix)
        self.eod = eod
        self.pad = ids.get(find_special_token(files, "pad_token") or "")
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_ids = {token.content: number for number, token in sorted(added.items()) if token.special}
        self.settings = {"parse_special_tokens": True} if parse_special_tokens else {}

    def _identity(self) -> tuple[str, ...]:
        """Return as JSON the parts of the tokenizer that affect ids, in a canonical form.

        Templates, decoders, truncation and padding do not affect ids. Null, ``false`` and ``""`` mean the default and
        are left out, because later versions of the library may write defaults that this one does not.
        """
        parts = json.loads(self._tokenizer.to_str())
        kept = {name: parts[name] for name in ("added_tokens", "normalizer", "pre_tokenizer", "model")}
        for token in kept["added_tokens"] if kept["normalizer"] is None else ():
            token["normalized"] = False  # no effect without a normalizer
        return (json.dumps(_without_defaults(kept), sort_keys=True),)

    def _legacy_identity(self) -> tuple[str, ...]:
        return (self.files[TOKENIZER_JSON].decode(),)

    def ids_of(self, texts: list[str]) -> list[list[int]]:
        """Encode, on as many threads as ``RAYON_NUM_THREADS`` and ``TOKENIZERS_PARALLELISM`` allow."""
        return [one.ids for one in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text, including special tokens; unknown ids are skipped."""
        with convert_library_errors(DataError, "the tokenizer cannot decode these ids"):
            return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def check_special_tokens_stay_text(self) -> None:
        """Raise DataError if the spelling of a special token, except the unknown token, is encoded as its id.

        A unigram model may have that spelling as an ordinary piece; text cannot be kept apart then.
        """
        unknown = getattr(self._tokenizer.model, "unk_token", None) or find_special_token(self.files, "unk_token")
        for token, number in self.special_ids.items():
            try:
                becomes_id = token != unknown and number in self.encode(token)
            except ValueError:  # without an unknown token; as part of a document it is an error too
                continue
            if becomes_id:
                seen = f"this tokenizer encodes '{token}' in plain text as the special token {number}"
                fix = "--parse-special-tokens, if that is intended for this corpus"
                raise DataError(f"{seen}, and this cannot be turned off", fix)

    def hugging_face_files(self) -> dict[str, bytes]:
        """Return the files it was read from."""
        return dict(self.files)


def parse_tokenizer(content: bytes) -> tuple[tokenizers.Tokenizer, dict[str, int]]:
    """Return the tokenizer in a ``tokenizer.json``, and the ids of its tokens.

    Raises:
        ValueError: if the library cannot read it, or it would take any amount of memory to save it or to encode a text.
    """
    with convert_library_errors(ValueError, "not a tokenizer.json that the library can read"):
        if re.search(rb'"continuing_subword_prefix"\s*:\s*"', content):
            _check_merges(json.loads(content)["model"])
        tokenizer = tokenizers.Tokenizer.from_str(content.decode())
        ids = tokenizer.get_vocab(with_added_tokens=True)
        encoding, decoding = (tokenizer.normalizer, tokenizer.pre_tokenizer), (tokenizer.decoder,)
        growth = max(
            _growth(json.loads(part.__getstate__()) for part in parts if part is not None)
            for parts in (encoding, decoding)
        )
    largest = max(ids.values(), default=0)
    if largest >= MAX_TOKENS:
        raise ValueError(f"it has a token with the id {largest:,}; ids are below {MAX_TOKENS:,}")
    if growth > MAX_GROWTH:
        raise ValueError(f"its rules make a text up to {growth:.3g} times as long; at most {MAX_GROWTH} is accepted")
    return tokenizer, ids


def _check_merges(model: Mapping[str, Any]) -> None:
    """Raise ValueError if the second part of a merge lacks the prefix, for which the library ends the process."""
    prefix = model["continuing_subword_prefix"]
    for merge in model.get("merges", ()):
        _, second = merge.split(" ") if isinstance(merge, str) else merge
        if not second.startswith(prefix):
            raise ValueError(f"the second part of the merge {merge} does not begin with {prefix!r}")


STEP_GROWTH = {"NFD": 4, "NFKC": 18, "NFKD": 18, "BertNormalizer": 4, "ByteLevel": 5, "Metaspace": 2, "WordPiece": 2}
"""Characters that a step makes of one, at most; other steps than these and those in `_step_growth` make one."""


def _growth(steps: Iterable[Mapping[str, Any]]) -> float:
    """Return how many times as long normalizers, pre-tokenizers or decoders in JSON may make a text, at most.

    Steps multiply, except replacements of characters that no step before may have inserted.
    """
    largest, everywhere = 1.0, 1.0
    by_character: dict[str, float] = {}  # the growth of what has been inserted with a character in it
    for step in _flat_steps(steps):
        pattern = step["pattern"].get("String", "") if step["type"] == "Replace" else ""
        before = max((by_character.get(letter, everywhere) for letter in pattern), default=largest)
        growth = before * _step_growth(step)
        if step["type"] == "Replace":
            by_character |= {letter: max(growth, by_character.get(letter, everywhere)) for letter in step["content"]}
        else:
            everywhere = growth
            by_character.clear()
        largest = max(largest, growth)
    return largest


def _step_growth(step: Mapping[str, Any]) -> float:
    match step["type"]:
        case "Replace":
            content, pattern = step["content"], step["pattern"].get("String")
            # a regular expression may match between characters
            return max(1.0, len(content) / len(pattern)) if pattern else 1.0 + len(content)
        case "Prepend":
            return 1.0 + len(step["prepend"])
        case "Precompiled":  # the size of a trie, the trie, and the replacements
            table = b64decode(step["precompiled_charsmap"])
            return max(map(len, table[4 + int.from_bytes(table[:4], "little") :].split(b"\0")))
    return STEP_GROWTH.get(step["type"], 1.0)


def _flat_steps(steps: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    for step in steps:
        if step["type"] == "Sequence":
            yield from _flat_steps(next(value for value in step.values() if isinstance(value, list)))
        else:
            yield step


def _without_defaults(value: Any) -> Any:
    """Remove default values, and ``trim_offsets``, which only affects offsets, from all objects."""
    if isinstance(value, list):
        return [_without_defaults(item) for item in value]
    if not isinstance(value, dict):
        return value
    kept = {name: _without_defaults(item) for name, item in value.items() if name != "trim_offsets"}
    return {name: item for name, item in kept.items() if item is not None and item is not False and item != ""}


def resolve_tokenizer_path(path: str | Path) -> Path:
    """Return ``path``, or the local folder that the tokenizer ``org/name`` was downloaded to from the hub."""
    return resolve_hub_name(path, (TOKENIZER_JSON, TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP), "--tokenizer-model DIR")


@cache
def resolve_hub_name(path: str | Path, files: tuple[str, ...], flag: str) -> Path:
    """Return ``path``, or the local folder that ``files`` (names or patterns) of ``org/name`` on the hub are in.

    The hub is queried once per process. ``HF_ENDPOINT``, ``HF_TOKEN``, ``HF_HOME`` and ``HF_HUB_OFFLINE`` apply.

    Raises:
        DataError: if the download fails; ``flag`` would take the folder.
    """
    name = str(path)
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name) or Path(path).exists():
        return Path(path)
    import huggingface_hub

    wanted = " ".join(f"--include '{file}'" for file in files)
    fix = f"where there is a network: hf download {name} {wanted} --local-dir DIR, then {flag}"
    failure = f"{name} is not a local folder, and downloading it from the hub failed"
    with convert_library_errors(DataError, failure, fix, "HF_TOKEN=... for a gated model"):
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=list(files)))


def _read_files(path: Path) -> dict[str, bytes]:
    """Read ``tokenizer.json`` and the configuration files present beside it."""
    main = path / TOKENIZER_JSON if path.is_dir() else path
    if not main.is_file():
        fetch = f"hf download ORG/{path.name} --include 'tokenizer*' --include 'special*' --local-dir DIR"
        load = f"t.AutoTokenizer.from_pretrained({str(path)!r}, trust_remote_code=False)"
        convert = f"import transformers as t; {load}.save_pretrained('DIR')"
        how = [f"python -c {shlex.quote(convert)}" if path.is_dir() else fetch]
        if (main.with_name(SENTENCEPIECE_MODEL)).is_file():
            how.insert(0, f"--tokenizer-type SentencePieceTokenizer --tokenizer-model {shlex.quote(str(path))}")
        raise DataError(f"there is no {main}", *how, "--tokenizer-model DIR")
    files = {TOKENIZER_JSON: read_tokenizer_file(main)}
    beside = {name: main.with_name(name) for name in (TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP, *OTHER_FILES)}
    found = {name: file for name, file in beside.items() if file.is_file()}
    return files | {name: read_tokenizer_file(file, limit=SMALL_FILE_BYTES) for name, file in found.items()}


def find_eod_id(files: Mapping[str, bytes], ids: Mapping[str, int]) -> int | None:
    """Return the id of the end-of-document token, for data, generation and export alike.

    It is the ``eos_token`` of ``tokenizer_config.json``, else of ``special_tokens_map.json``. If neither names one, it
    is ``<|endoftext|>`` or ``</s>``. None if that token has no id; a named token is never replaced by another.

    Raises:
        DataError: if a file is not JSON or its entry is not a token.
    """
    named = find_special_token(files, "eos_token")
    token = next((end for end in DEFAULT_EOD_TOKENS if end in ids), None) if named is None else named
    return None if token is None else ids.get(token)


def find_special_token(files: Mapping[str, bytes], role: str) -> str | None:
    """Return the token that the files define for a ``role`` such as ``eos_token``, or None."""
    for name in (TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP):
        try:
            token = parse_json(files.get(name, b"{}")).get(role)
        except (ValueError, AttributeError) as error:
            raise DataError(f"the tokenizer's {name} is not a JSON object: {error}", "copy it again") from error
        token = token.get("content") if isinstance(token, dict) else token
        if not isinstance(token, str | None):
            raise DataError(f"the tokenizer's {name}: {role} is {token!r}, not a string", "copy it again")
        if token is not None:
            return token
    return None


def make_tokenizer_files(tokenizer: tokenizers.Tokenizer) -> dict[str, bytes]:
    """Return the files, by name, for ``transformers.AutoTokenizer``, with `END_OF_DOCUMENT` as ``eos_token``."""
    config = {"eos_token": END_OF_DOCUMENT, "clean_up_tokenization_spaces": False}
    return files_with_config(tokenizer.to_str(pretty=True) + "\n", config)


def files_with_config(content: str, config: Mapping[str, Any]) -> dict[str, bytes]:
    """Return ``tokenizer.json`` of this content and a ``tokenizer_config.json`` of ``config``."""
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    return {TOKENIZER_JSON: content.encode(), TOKENIZER_CONFIG: (json.dumps(config, indent=2) + "\n").encode()}


def byte_level_bpe(model: models.BPE, words: bool) -> tokenizers.Tokenizer:
    """Return a byte-level BPE tokenizer around ``model``, whose vocabulary spells bytes as in `bytes_to_unicode`.

    With ``words``, text is first split into words as in GPT-2.
    """
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def bytes_to_unicode() -> list[str]:
    """Return the printable character for each of the 256 bytes in a byte-level vocabulary, as in GPT-2.

    Printable Latin-1 characters stand for themselves; the others are mapped to U+0100 and following.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in visible else next(others)) for byte in range(256)]


def byte_tokenizer() -> tokenizers.Tokenizer:
    """Return a tokenizer whose ids are the bytes of the text, and 256 for `END_OF_DOCUMENT`."""
    vocabulary = {letter: byte for byte, letter in enumerate(bytes_to_unicode())}
    tokenizer = byte_level_bpe(models.BPE(vocabulary, []), words=False)
    tokenizer.add_special_tokens([END_OF_DOCUMENT])
    return tokenizer


class GPT2BPETokenizer(HuggingFaceTokenizer):
    """Byte-level BPE with GPT-2's word splitting, of a ``tokenizer.json``, or of ``vocab.json`` and ``merges.txt``.

    Its ids equal those of ``transformers``' GPT2Tokenizer without special tokens; ``<|endoftext|>`` ends a document.
    """

    def __init__(
        self,
        tokenizer_model: str | Path | None = None,
        parse_special_tokens: bool = False,
        vocab_file: str | Path | None = None,
        merge_file: str | Path | None = None,
    ) -> None:
        """Read ``tokenizer_model``, or the two files.

        Raises:
            DataError: if a file is missing, damaged or swapped with the other, or lacks a byte or ``<|endoftext|>``.
        """
        fix = "--vocab-file vocab.json --merge-file merges.txt"
        if tokenizer_model:
            if vocab_file is not None or merge_file is not None:
                raise DataError("GPT2BPETokenizer takes either two files or a tokenizer.json, not both", fix)
            super().__init__(tokenizer_model, parse_special_tokens)
            return
        if vocab_file is None or merge_file is None:
            raise DataError("GPT2BPETokenizer needs two files", fix)
        files = make_tokenizer_files(_gpt2_tokenizer(Path(vocab_file), Path(merge_file)))
        super().__init__(vocab_file, parse_special_tokens, files)


def _gpt2_tokenizer(vocab: Path, merges: Path) -> tokenizers.Tokenizer:
    """Build the library's tokenizer from GPT-2's two files."""
    starts = [read_tokenizer_file(path, "--vocab-file vocab.json --merge-file merges.txt") for path in (vocab, merges)]
    is_json = [start.lstrip().startswith(b"{") for start in starts]
    if is_json == [False, True]:
        fix = f"--vocab-file {shlex.quote(str(merges))} --merge-file {shlex.quote(str(vocab))}"
        raise DataError(f"{merges} is a vocabulary and {vocab} is not: the two files are swapped", fix)
    with convert_library_errors(DataError, f"{vocab} and {merges} are not the files of one BPE", "download both again"):
        vocabulary, pairs = models.BPE.read_file(str(vocab), str(merges))
        tokenizer = byte_level_bpe(models.BPE(vocabulary, pairs), words=True)
    if len(set(vocabulary.values())) < len(vocabulary):
        raise DataError(f"{vocab} has a duplicate id", "download it again")
    missing = [token for token in (*bytes_to_unicode(), END_OF_DOCUMENT) if token not in vocabulary]
    if missing:
        seen = f"{vocab} lacks {len(missing)} of the 256 bytes and {END_OF_DOCUMENT}, first '{missing[0]}'"
        fixes = ("--vocab-file vocab.json of a byte-level BPE", f"--tokenizer-model DIR_WITH_{TOKENIZER_JSON}")
        raise DataError(seen, *fixes)
    tokenizer.add_special_tokens([END_OF_DOCUMENT])
    return tokenizer


MAX_DIGITS = 100  # digits of a number; int() rejects strings of thousands of digits


class ByteTokenizer(Tokenizer):
    """Tokenizer whose ids are the UTF-8 bytes of the text; 256 ends a document. Any bytes can be encoded."""

    library = "numpy"
    vocab_size = 257
    eod = 256
    special_ids: Mapping[str, int] = {END_OF_DOCUMENT: 256}

    def _identity(self) -> tuple[str, ...]:
        return "0..255 are bytes", f"256 is {END_OF_DOCUMENT}"

    def encode_batch(self, texts: Sequence[str | bytes]) -> EncodedBatch:
        """Return one id per byte of each text."""
        pieces = [text.encode() if isinstance(text, str) else text for text in texts]
        lengths = np.fromiter(map(len, pieces), dtype=np.int64, count=len(pieces))
        return EncodedBatch(np.frombuffer(b"".join(pieces), dtype=np.uint8).astype(np.uint16), lengths)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text; bytes that are not UTF-8 become U+FFFD."""
        pieces = (END_OF_DOCUMENT.encode() if i == self.eod else bytes((i,)) for i in ids)
        return b"".join(pieces).decode(errors="replace")

    def hugging_face_files(self) -> dict[str, bytes]:
        """Return a tokenizer of equal ids, except that ``transformers`` encodes ``<|endoftext|>`` in text as one id."""
        return make_tokenizer_files(byte_tokenizer())


class NullTokenizer(Tokenizer):
    """Tokenizer of text that consists of space-separated decimal ids; the last id ends a document."""

    library = "numpy"

    def __init__(self, vocab_size: int | None) -> None:
        if vocab_size is None or vocab_size < 1:
            raise DataError("NullTokenizer needs --vocab-size", "--vocab-size 50257")
        self.vocab_size = vocab_size
        self.eod = vocab_size - 1

    def _identity(self) -> tuple[str, ...]:
        return "decimal ids", str(self.vocab_size)

    def encode_batch(self, texts: Sequence[str | bytes]) -> EncodedBatch:
        """Return the numbers in each text; raise DataError if a word is not an id of the vocabulary."""
        lists = [[self._parse(word) for word in text.split()] for text in texts]
        lengths = np.fromiter(map(len, lists), dtype=np.int64, count=len(lists))
        return EncodedBatch(np.fromiter(chain.from_iterable(lists), np.int64), lengths)

    def _parse(self, word: str | bytes) -> int:
        is_number = word.isascii() and word.isdigit() and len(word) <= MAX_DIGITS
        if is_number and int(word) < self.vocab_size:
            return int(word)
        shown = word.decode(errors="replace") if isinstance(word, bytes) else word
        seen = f"NullTokenizer reads ids 0..{self.vocab_size - 1} separated by spaces, not '{shown[:40]}'"
        raise DataError(seen, "--tokenizer-type ByteTokenizer")

    def decode(self, ids: Iterable[int]) -> str:
        """Return the ids as decimal numbers."""
        return " ".join(str(i) for i in ids)
