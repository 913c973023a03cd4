"""Convert tiktoken ranks to a ``tokenizer.json``, for ``transformers`` and gigatoken."""

from __future__ import annotations

import json
from collections.abc import Mapping

from megatron.data.tokenizers.huggingface import CONFIG, TOKENIZER, byte_letters


def hugging_face_files(
    ranks: Mapping[bytes, int], pattern: str, special: Mapping[str, int], end: int
) -> dict[str, bytes]:
    """Return the files of a tokenizer with equal ids; empty if a special token is spelled like a byte sequence.

    Args:
        ranks: byte sequences and their ids, in merge order.
        pattern: pre-tokenization regex.
        special: special tokens and their ids.
        end: id that ends a document.
    """
    letters = byte_letters()
    spelled = {token: "".join(letters[byte] for byte in token) for token in ranks}
    vocabulary = {spelled[token]: number for token, number in ranks.items()}
    if vocabulary.keys() & special.keys():
        return {}
    words = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    matching = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": number, "content": token, **matching, "special": True}
            for token, number in sorted(special.items(), key=lambda item: item[1])
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [words, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,  # as in tiktoken: a word found in the vocabulary is not split
            "vocab": {**special, **vocabulary},
            "merges": [(spelled[left], spelled[right]) for left, right in _merges(ranks)],
        },
    }
    named = {number: token for token, number in special.items()}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": named[end],
        "clean_up_tokenization_spaces": False,
    }
    return {
        TOKENIZER: json.dumps(tokenizer, ensure_ascii=False).encode(),
        CONFIG: (json.dumps(config, indent=2) + "\n").encode(),
    }


def _merges(ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Return all splits of each token into two others, by rank: tiktoken merges the pair of lowest rank."""
    found = []
    for token in sorted(ranks, key=lambda token: ranks[token]):
        cuts = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        found += [(left, right) for left, right in cuts if left in ranks and right in ranks]
    return found
