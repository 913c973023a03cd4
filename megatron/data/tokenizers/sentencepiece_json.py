"""Convert a SentencePiece model to a ``tokenizer.json``, for ``transformers`` and gigatoken.

Only models for which the ids are equal for every text are converted. The format differs from SentencePiece:

* unigram scores are summed in another precision, so that near-ties differ;
* a normalization table (NFKC) is applied to whole grapheme clusters: a character with its marks, or CR LF;
* text on both sides of a matched symbol is normalized separately, with its own dummy prefix and removal of spaces;
* two merges cannot have the same score, where SentencePiece takes the left one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from megatron.data.tokenizers.huggingface import CONFIG, TOKENIZER
from megatron.data.tokenizers.sentencepiece_file import Algorithm, Kind, Model

SPACE = "\u2581"


def hugging_face_files(model: Model, special: Mapping[str, int], roles: Mapping[str, str]) -> dict[str, bytes]:
    """Return the files of a tokenizer with the ids of ``model``; empty if the format cannot express it.

    Args:
        model: content of the model file.
        special: ids of its special tokens.
        roles: spelling of ``eos_token`` and other tokens for ``transformers``.
    """
    if not _is_convertible(model, special):
        return {}
    matching = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": number, "content": piece.text, **matching, "special": piece.text in special}
            for number, piece in enumerate(model.pieces)
            if piece.kind in (Kind.CONTROL, Kind.USER_DEFINED)
        ],
        "normalizer": {"type": "Sequence", "normalizers": list(_normalizers(model))},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": list(_decoders(model))},
        "model": _bpe(model),
    }
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **roles}
    return {
        TOKENIZER: json.dumps(tokenizer, ensure_ascii=False).encode(),
        CONFIG: (json.dumps(config, indent=2) + "\n").encode(),
    }


def _is_convertible(model: Model, special: Mapping[str, int]) -> bool:
    if model.algorithm is not Algorithm.BPE or model.charsmap or model.space_as_suffix or not model.escape_spaces:
        return False
    kinds = {piece.kind for piece in model.pieces if piece.text not in special}
    if Kind.UNUSED in kinds or (Kind.USER_DEFINED in kinds and (model.dummy_prefix or model.squeeze_spaces)):
        return False
    words = [piece for piece in model.pieces if piece.kind is Kind.NORMAL]
    scores = [piece.score for piece in words if len(piece.text) > 1]
    letters = {piece.text for piece in words if len(piece.text) == 1}
    return len(set(scores)) == len(scores) and letters.issuperset("".join(piece.text for piece in words))


def _normalizers(model: Model) -> Iterator[dict[str, Any]]:
    if model.squeeze_spaces:
        yield {"type": "Replace", "pattern": {"Regex": r"\A +| +\z"}, "content": ""}
        yield {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}
    if model.dummy_prefix:
        yield {"type": "Prepend", "prepend": SPACE}
    yield {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}


def _decoders(model: Model) -> Iterator[dict[str, Any]]:
    yield {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    yield {"type": "ByteFallback"}
    yield {"type": "Fuse"}
    if model.dummy_prefix:
        yield {"type": "Strip", "content": " ", "start": 1, "stop": 0}


def _bpe(model: Model) -> dict[str, Any]:
    unknown = next(piece.text for piece in model.pieces if piece.kind is Kind.UNKNOWN)
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unknown,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": model.byte_fallback,
        "ignore_merges": False,
        "vocab": {piece.text: number for number, piece in enumerate(model.pieces)},
        "merges": _merges(model),
    }


def _merges(model: Model) -> list[tuple[str, str]]:
    """Return all splits of each piece into two others, best score first: the order of SentencePiece's merges."""
    scores = {piece.text: piece.score for piece in model.pieces if piece.kind is Kind.NORMAL}
    found = []
    for piece, score in scores.items():
        for split in range(1, len(piece)):
            left, right = piece[:split], piece[split:]
            if left in scores and right in scores:
                found.append((-score, left, right))
    found.sort(key=lambda merge: merge[0])
    return [(left, right) for _, left, right in found]
