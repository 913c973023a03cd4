"""The library that turns a tokenizer's texts into ids: the fastest one that is proven to give the same.

gigatoken is tens of times as fast as the library a tokenizer was made for, and reimplements it; so it is used where,
before the work starts, both give the same ids for the beginning of the corpus, for texts around every added token, and
for those of `ODD`, which are chosen to be where tokenizers differ.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.config.numbers import format_bytes
from megatron.data.errors import DataError
from megatron.data.tokenizers.encoded import Encoded, Tokenizer, unicode_text
from megatron.data.tokenizers.failures import failures_as
from megatron.data.tokenizers.huggingface import TOKENIZER

FAST = "gigatoken"
OWN = "hf"
MOST_OVERLAPS = 20_000  # thousands of added tokens may overlap in every pair
WISHES = ("auto", FAST, OWN)
"""What a person may ask for: the fastest that is proven, or one of the two."""

EncodeBatch = Callable[[Sequence[str | bytes]], Encoded]

ODD: tuple[str, ...] = (
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
"""Texts in which tokenizers have been seen to differ: white space, digits, marks, joiners, unassigned characters."""


@dataclass(frozen=True)
class Engine:
    """What encodes a tokenizer's texts.

    Attributes:
        name: library and version; for `build_engine`, and for people.
        reason: why it was chosen, in a sentence.
        encode_batch: texts to ids, equal to those of the tokenizer's own ``encode_batch``; bytes, where all texts are,
            must be UTF-8, which is not looked at.
    """

    name: str
    reason: str
    encode_batch: EncodeBatch


class _NotFastError(Exception):
    """gigatoken is not to be used; the text says why."""


def choose_engine(tokenizer: Tokenizer, sample: Sequence[str], wish: str = "auto") -> Engine:
    """The engine for a corpus that begins with ``sample``: about 1 MB of it is a proof worth having.

    Args:
        tokenizer: whose ids are wanted.
        sample: the first texts of the corpus.
        wish: one of `WISHES`; ``hf`` is the tokenizer's own library, whichever that is.

    Raises:
        DataError: when ``gigatoken`` is asked for and cannot be used, or there is no such wish.
    """
    if wish not in WISHES:
        raise DataError(f"there is no engine '{wish}'", *(f"--engine {name}" for name in WISHES))
    if wish == OWN:
        return _own(tokenizer, "asked for")
    try:
        file = _file(tokenizer)
        encode_batch = _fast(tokenizer, file)
        _prove(tokenizer, encode_batch, [*ODD, *_spelled_out(_added_tokens(file)), *sample])
    except _NotFastError as error:
        if wish == FAST:
            raise DataError(str(error), "--engine auto", "--engine hf") from error
        return _own(tokenizer, str(error))
    proof = format_bytes(sum(len(text.encode()) for text in sample))
    reason = f"it gives the ids of {tokenizer.library} for the first {proof} and for {len(ODD)} odd texts"
    return Engine(_named(FAST), reason, encode_batch)


def build_engine(tokenizer: Tokenizer, name: str) -> Engine:
    """The engine that `choose_engine` gave this name, without a second proof.

    Raises:
        DataError: when it cannot be built here.
    """
    if name.split()[0] != FAST:
        return _own(tokenizer, "chosen before")
    try:
        return Engine(_named(FAST), "chosen before", _fast(tokenizer, _file(tokenizer)))
    except _NotFastError as error:
        raise DataError(str(error), "--engine hf") from error


def _own(tokenizer: Tokenizer, reason: str) -> Engine:
    name = _named(tokenizer.library) if tokenizer.files else type(tokenizer).__name__
    return Engine(name, reason, tokenizer.encode_batch)


def _named(library: str) -> str:
    return f"{library} {version(library)}"


def _file(tokenizer: Tokenizer) -> dict[str, Any]:
    """What the ``tokenizer.json`` of a tokenizer says."""
    if not tokenizer.files:
        raise _NotFastError("it needs no library")
    content = tokenizer.hugging_face_files().get(TOKENIZER)
    if content is None:
        raise _NotFastError("this tokenizer has no tokenizer.json, which gigatoken reads")
    return dict(json.loads(content))


def _fast(tokenizer: Tokenizer, file: Mapping[str, Any]) -> EncodeBatch:
    """What gigatoken makes of a tokenizer."""
    try:
        import_module("awkward")  # gigatoken does so with the first texts, and hides what a signal raises meanwhile
        import gigatoken
    except ImportError:
        raise _NotFastError("gigatoken is not installed (pip install gigatoken)") from None
    if not tokenizer.settings.get("parse_special_tokens"):
        file = _without_special_tokens(file)
    _refuse_added_tokens(file)
    with failures_as(lambda said: _NotFastError(f"gigatoken does not read this tokenizer: {said}")):
        fast = gigatoken.Tokenizer.from_json(json.dumps(file).encode())
    return lambda texts: _encode_batch(fast, texts)


def _without_special_tokens(file: Mapping[str, Any]) -> dict[str, Any]:
    """The same, so that special tokens that are spelled out in a text are text."""
    return {**file, "added_tokens": [token for token in file.get("added_tokens") or () if not token["special"]]}


def _refuse_added_tokens(file: Mapping[str, Any]) -> None:
    """gigatoken finds added tokens in the text as it is written, and in the middle of words too."""
    for token in file.get("added_tokens") or ():
        if token["single_word"]:
            seen = "only where it is a word of its own"
        elif token["normalized"] and file.get("normalizer") is not None:
            seen = "in the normalised text"
        else:
            continue
        raise _NotFastError(f"this tokenizer looks for {_shown(token['content'])} {seen}, which gigatoken does not")


def _encode_batch(fast: Any, texts: Sequence[str | bytes]) -> Encoded:
    """Ids of the texts.

    Raises:
        UnicodeError: when one is no Unicode text.
        DataError: when gigatoken fails for another reason.
    """
    if not all(isinstance(text, bytes) for text in texts):
        texts = [text.decode() if isinstance(text, bytes) else text for text in texts]
    try:
        with failures_as(lambda said: DataError(f"gigatoken cannot encode these texts: {said}", f"--engine {OWN}")):
            return _flat(fast.encode_batch(texts).layout)
    except DataError:
        for text in texts:
            unicode_text(text)  # half of a surrogate pair is what it refuses
        raise


def _flat(layout: Any) -> Encoded:
    offsets: NDArray[np.int64] = layout.offsets.data
    return Encoded(layout.content.data[offsets[0] : offsets[-1]], np.diff(offsets))


def _prove(tokenizer: Tokenizer, encode_batch: EncodeBatch, texts: Sequence[str]) -> None:
    """Compare ids, text by text."""
    try:
        ours, fast = tokenizer.encode_batch(texts), encode_batch(texts)
    except ValueError as error:
        raise _NotFastError(str(error).partition("\n")[0]) from error
    if np.array_equal(ours.ids, fast.ids) and np.array_equal(ours.lengths, fast.lengths):
        return
    pairs = zip(texts, _apart(ours), _apart(fast))
    different = next(text for text, one, other in pairs if not np.array_equal(one, other))
    raise _NotFastError(f"gigatoken gives other ids than {tokenizer.library}, the first time for {_shown(different)}")


def _apart(encoded: Encoded) -> list[NDArray[Any]]:
    return np.split(encoded.ids, np.cumsum(encoded.lengths))[:-1]


def _added_tokens(file: Mapping[str, Any]) -> list[str]:
    """How the added tokens of a ``tokenizer.json`` are spelled, special or not."""
    return [token["content"] for token in file.get("added_tokens") or ()]


def _spelled_out(tokens: Sequence[str]) -> list[str]:
    """Texts in which every token is spelled out: alone, in words, between spaces, and with the others."""
    forms = list(dict.fromkeys(form for token in tokens for form in _forms(token)))
    around = [text for form in forms for text in (form, f"so{form} ends {form}it", f"a  {form}\n {form}{form} .")]
    return [*around, *_overlaps(tokens), "".join(tokens), " ".join(tokens)]


def _forms(token: str) -> list[str]:
    """A token, and texts that a normaliser may take for it."""
    composed, apart = (unicodedata.normalize(form, token) for form in ("NFC", "NFD"))
    return [token, token.upper(), token.lower(), composed, apart]


def _overlaps(tokens: Sequence[str]) -> list[str]:
    """Texts in which a token begins before another has ended, so that one of them must be chosen; not all of many."""
    beginning: dict[str, list[str]] = {}
    for token in tokens:
        for size in range(1, len(token)):
            beginning.setdefault(token[:size], []).append(token)
    ends = [(token, token[cut:]) for token in tokens for cut in range(1, len(token))]
    texts = (token + other[len(end) :] for token, end in ends for other in beginning.get(end, ()))
    return list(islice(texts, MOST_OVERLAPS))


def _shown(text: str) -> str:
    return ascii(text if len(text) <= 60 else text[:60] + "...")
