"""Choose the library that encodes a corpus: gigatoken if it gives the same ids, else the tokenizer's own.

gigatoken reimplements other libraries and is tens of times faster. Before it is used, its ids are compared with those
of the tokenizer's own library on the beginning of the corpus, on texts around every added token, and on
`EDGE_CASE_TEXTS`.
"""

from __future__ import annotations

import json
import sys
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.config.text import clipped, format_bytes
from megatron.data.errors import DataError
from megatron.data.tokenizers.base import EncodedBatch, Tokenizer, convert_library_errors, unicode_text
from megatron.data.tokenizers.huggingface import TOKENIZER_JSON

GIGATOKEN = "gigatoken"
OWN_LIBRARY = "hf"
MAX_OVERLAPS = 20_000  # limit for tokenizers with thousands of added tokens, whose pairs may all overlap
MAX_OVERLAP_CHARACTERS = 10**8  # of the beginnings and ends of all added tokens
SMALL_BATCH = 1 << 18  # characters encoded text by text, slower than as a batch, whose library takes a while to import
ENGINES = ("auto", GIGATOKEN, OWN_LIBRARY)
"""Values of ``--engine``. ``auto`` is gigatoken if its ids are equal; ``hf`` is the tokenizer's own library."""

EncodeBatch = Callable[[Sequence[str | bytes]], EncodedBatch]

EDGE_CASE_TEXTS: tuple[str, ...] = (
    "",
    " ",
    "   three before and after   ",
    "tabs\t\tand\n\n\nlines \n \n  indented\r\ncarriage\r\rreturns\r\n\r\n",
    "no-break\u00a0space, em\u2003space, ideographic\u3000space, zero\u200bwidth, \u2028line and \u2029paragraph\u0085",
    "1 12 123 1234 12345 1234567890123 3.14159 1,000,000 0x7f \u0661\u0662\u0663 \u00bd \u00b2 \u2167 \u0967\u0968",
    "it's they'll I'VE we'D you\u2019re 'tis 's 'S don't'll",
    "e\u0301 \u00e9 a\u0300\u0301\u0302\u0303 \u0301alone \u1e9b\u0323 \uac00\u1100\u1161 \u0915\u094d\u0937\u093f",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 \U0001f3f3\ufe0f\u200d\U0001f308",
    "\U0001f44d\U0001f3fd \U0001f1e9\U0001f1ea",
    "\u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627 \u202ereversed\u202c \u200fmark \u0640\u0640",
    "\u6771\u4eac\u90fd\u3067\u3059\u3002 \u3053\u3093\u306b\u3061\u306f \uff21\uff22\uff23\uff11\uff12 \ufb01",
    "\u0130\u0131 \u00df \u1e9e \u01c5",
    "\u0378\u0379 \U0001fbff \U000e0100 \U000f0000 \U0010fffd \ufdd0 \uffff \ue000 \ufeffmark \ufffd",
    "nul\x00 bell\x07 escape\x1b delete\x7f unit\x1f next\x85",
    "x" * 3000,
    "ab" * 2000 + " " + "\u00e4" * 700 + " " + "9" * 700 + " " + "!?" * 700,
    " " * 500 + "\n" * 500 + "\t" * 500,
    'for (int i=0;i<n;++i){a[i]+=b[i]*c_d;}  // x != y && z->w\n\t\treturn "\\n";\n',
    "https://example.org/a_b-c?d=e&f=%20#g user@example.org C:\\dir\\file.txt snake_case camelCase HTTPServer",
    "<0x0A> <unk> <s> </s> \u2581 \u2581\u2581x \u0120 \u010a [CLS] <|im_start|> <pad>",
)
"""Texts on which tokenizers have differed: white space, digits, marks, joiners, unassigned characters."""


@dataclass(frozen=True)
class EncodeEngine:
    """Library that encodes a tokenizer's texts."""

    name: str  # library and version, shown to the user and passed to `build_engine`
    reason: str  # why it was chosen
    encode_batch: EncodeBatch  # same ids as ``Tokenizer.encode_batch``. Bytes must be UTF-8, which is not checked.


class _GigatokenError(Exception):
    """gigatoken cannot be used, for the reason in the message."""


def choose_engine(tokenizer: Tokenizer, sample: Sequence[str], engine: str = "auto") -> EncodeEngine:
    """Choose the engine for a corpus that begins with ``sample``; about 1 MB makes a meaningful comparison."""
    if engine == OWN_LIBRARY:
        return _own_library(tokenizer, "requested")
    try:
        encode_batch, added = _load_gigatoken(tokenizer)
        _compare(tokenizer, encode_batch, [*EDGE_CASE_TEXTS, *_texts_around(added), *sample])
    except _GigatokenError as error:
        if engine == GIGATOKEN:
            raise DataError(str(error), "--engine auto", "--engine hf") from error
        return _own_library(tokenizer, str(error))
    proof = format_bytes(sum(len(text.encode()) for text in sample))
    reason = f"its ids equal those of {tokenizer.library} on the first {proof} and on {len(EDGE_CASE_TEXTS)} edge cases"
    return EncodeEngine(f"{GIGATOKEN} {version(GIGATOKEN)}", reason, encode_batch)


def build_engine(tokenizer: Tokenizer, name: str) -> EncodeEngine:
    """Build the engine of this name, which `choose_engine` returned in another process."""
    reason = "chosen by the main process"
    if name.split()[0] != GIGATOKEN:
        return _own_library(tokenizer, reason)
    try:
        return EncodeEngine(name, reason, _load_gigatoken(tokenizer)[0])
    except _GigatokenError as error:
        raise DataError(str(error), "--engine hf") from error


def _own_library(tokenizer: Tokenizer, reason: str) -> EncodeEngine:
    library = tokenizer.library
    name = f"{library} {version(library)}" if tokenizer.files else type(tokenizer).__name__
    return EncodeEngine(name, reason, tokenizer.encode_batch)


def _load_gigatoken(tokenizer: Tokenizer) -> tuple[EncodeBatch, list[str]]:
    """Load a tokenizer's ``tokenizer.json`` into gigatoken; return its encoder, and the added tokens."""
    content = tokenizer.hugging_face_files().get(TOKENIZER_JSON)
    if not tokenizer.files:
        raise _GigatokenError("this tokenizer needs no library")
    if content is None:
        raise _GigatokenError("gigatoken needs a tokenizer.json, and this tokenizer has none")
    try:
        import gigatoken
    except ImportError:
        raise _GigatokenError("gigatoken is not installed (pip install 'megatron-pretrain[fast]')") from None
    with convert_library_errors(_GigatokenError, "gigatoken cannot read this tokenizer"):
        file = json.loads(content)
        added = [token["content"] for token in file.get("added_tokens") or ()]
        if not tokenizer.settings.get("parse_special_tokens"):
            file = _without_special_tokens(file)
    _refuse_added_tokens(file)
    with convert_library_errors(_GigatokenError, "gigatoken cannot read this tokenizer"):
        fast = gigatoken.Tokenizer.from_json(json.dumps(file).encode())
    return (lambda texts: _encode_batch(fast, texts)), added


def _without_special_tokens(file: Mapping[str, Any]) -> dict[str, Any]:
    """Remove special tokens, so that their spelling stays text."""
    return {**file, "added_tokens": [token for token in file.get("added_tokens") or () if not token["special"]]}


def _refuse_added_tokens(file: Mapping[str, Any]) -> None:
    """Reject added tokens that gigatoken matches differently: in the raw text, and inside words too."""
    for token in file.get("added_tokens") or ():
        if token["single_word"]:
            seen = "as a whole word"
        elif token["normalized"] and file.get("normalizer") is not None:
            seen = "in the normalized text"
        else:
            continue
        word = clipped(token["content"], 60)
        raise _GigatokenError(f"this tokenizer matches {word!a} {seen}, which gigatoken does not")


def _encode_batch(fast: Any, texts: Sequence[str | bytes]) -> EncodedBatch:
    """Return the ids of the texts, on this thread: others encode other blocks.

    Raises:
        UnicodeError: if one is not Unicode text.
        DataError: if gigatoken fails for another reason.
    """
    if set(map(type, texts)) - {bytes}:
        texts = [text.decode() if isinstance(text, bytes) else text for text in texts]
    try:
        with convert_library_errors(DataError, "gigatoken cannot encode these texts", f"--engine {OWN_LIBRARY}"):
            if "awkward" not in sys.modules and sum(map(len, texts)) < SMALL_BATCH:
                ids = [np.empty(0, np.uint32), *map(fast.encode, texts)]
                return EncodedBatch(np.concatenate(ids), np.array([*map(len, ids[1:])], np.int64))
            import_module("awkward")  # else gigatoken imports it lazily and swallows exceptions of signal handlers
            return _from_ragged(fast.encode_batch(texts, parallel=False).layout)
    except DataError:
        for text in texts:
            unicode_text(text)  # an unpaired surrogate is the usual reason
        raise


def _from_ragged(layout: Any) -> EncodedBatch:
    offsets: NDArray[np.int64] = layout.offsets.data
    return EncodedBatch(layout.content.data[offsets[0] : offsets[-1]], np.diff(offsets))


def _compare(tokenizer: Tokenizer, encode_batch: EncodeBatch, texts: Sequence[str]) -> None:
    """Raise _GigatokenError unless gigatoken gives the tokenizer's own ids for all texts."""
    try:
        own, fast = tokenizer.encode_batch(texts), encode_batch(texts)
    except ValueError as error:
        raise _GigatokenError(str(error).partition("\n")[0]) from error
    if np.array_equal(own.ids, fast.ids) and np.array_equal(own.lengths, fast.lengths):
        return
    own_ids, fast_ids = (np.split(encoded.ids, np.cumsum(encoded.lengths))[:-1] for encoded in (own, fast))
    different = next(text for text, one, other in zip(texts, own_ids, fast_ids) if not np.array_equal(one, other))
    raise _GigatokenError(f"gigatoken and {tokenizer.library} give different ids, first for {clipped(different, 60)!a}")


def _texts_around(tokens: Sequence[str]) -> list[str]:
    """Return texts that contain each token: alone, inside words, between spaces, and next to the others."""
    forms: dict[str, None] = {}  # each token, and variants that a normalizer may map to it
    for token in tokens:
        composed, decomposed = (unicodedata.normalize(form, token) for form in ("NFC", "NFD"))
        forms |= dict.fromkeys([token, token.upper(), token.lower(), composed, decomposed])
    around = [text for form in forms for text in (form, f"so{form} ends {form}it", f"a  {form}\n {form}{form} .")]
    return [*around, *_overlaps(tokens), "".join(tokens), " ".join(tokens)]


def _overlaps(tokens: Sequence[str]) -> list[str]:
    """Return up to `MAX_OVERLAPS` texts in which two tokens overlap, so that only one of them can match."""
    if sum(len(token) ** 2 for token in tokens) > MAX_OVERLAP_CHARACTERS:
        raise _GigatokenError("this tokenizer has too many or too long added tokens to compare")
    by_prefix: dict[str, list[str]] = {}
    for token in tokens:
        for size in range(1, len(token)):
            by_prefix.setdefault(token[:size], []).append(token)
    suffixes = [(token, token[start:]) for token in tokens for start in range(1, len(token))]
    texts = (token + other[len(suffix) :] for token, suffix in suffixes for other in by_prefix.get(suffix, ()))
    return list(islice(texts, MAX_OVERLAPS))
