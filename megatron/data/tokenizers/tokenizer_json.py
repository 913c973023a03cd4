"""Convert SentencePiece models and tiktoken ranks to the content of a ``tokenizer.json``, for export and for gigatoken.

The converters of ``transformers`` do not keep the ids: they strip and merge spaces, ignore ``add_dummy_prefix``, and
number special tokens anew. These functions return None unless the ids are equal for every text. Resuming compares the
file with that of the checkpoint, so equal models must give equal bytes.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, AnyStr

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from megatron.data.tokenizers.huggingface import bytes_to_unicode

ESCAPED_SPACE = "\u2581"


def from_sentencepiece(model: Any, special: Collection[str]) -> str | None:
    """Convert a SentencePiece ``ModelProto`` with these special tokens; None if the format cannot express it.

    The format differs from SentencePiece:

    * unigram scores are summed in another precision, so that near-ties differ;
    * a normalization table (NFKC) is applied to whole grapheme clusters: a character with its marks, or CR LF;
    * text on both sides of a matched symbol is normalized separately, with its own dummy prefix and removal of spaces;
    * two merges cannot have the same score, where SentencePiece takes the left one.
    """
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    if trainer.model_type != trainer.BPE or normalizer.precompiled_charsmap:
        return None
    if trainer.treat_whitespace_as_suffix or not normalizer.escape_whitespaces:
        return None
    scores = {piece.piece: piece.score for piece in model.pieces if piece.type == piece.NORMAL}
    symbols = [piece for piece in model.pieces if piece.type in (piece.CONTROL, piece.USER_DEFINED)]
    changes_edges = normalizer.add_dummy_prefix or normalizer.remove_extra_whitespaces
    if any(piece.type == piece.UNUSED for piece in model.pieces if piece.piece not in special):
        return None
    if changes_edges and any(symbol.piece not in special for symbol in symbols):
        return None
    merged = [score for text, score in scores.items() if len(text) > 1]
    if len(set(merged)) < len(merged) or not scores.keys() >= set("".join(scores)):
        return None

    ids = {piece.piece: number for number, piece in enumerate(model.pieces)}
    unknown = next(piece.piece for piece in model.pieces if piece.type == piece.UNKNOWN)
    known = {symbol.piece: ids[symbol.piece] for symbol in symbols}
    bpe = models.BPE(known, [], unk_token=unknown, fuse_unk=True, byte_fallback=trainer.byte_fallback)
    tokenizer = Tokenizer(bpe)
    steps: list[Any] = [normalizers.Replace(" ", ESCAPED_SPACE)]
    decoding: list[Any] = [decoders.Replace(ESCAPED_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if normalizer.add_dummy_prefix:
        steps.insert(0, normalizers.Prepend(ESCAPED_SPACE))
        decoding.append(decoders.Strip(" ", 1, 0))
    if normalizer.remove_extra_whitespaces:
        steps[:0] = [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(decoding)
    tokenizer.add_tokens([AddedToken(s.piece, special=s.piece in special, normalized=False) for s in symbols])
    merges = _merges(sorted(scores, key=lambda text: -scores[text]))  # SentencePiece's: best score first
    return _content(tokenizer, ids, merges)


def from_tiktoken(ranks: Mapping[bytes, int], pattern: str, special: Mapping[str, int]) -> str | None:
    """Convert tiktoken ranks, in merge order; None if a special token is spelled like a byte sequence."""
    letters = bytes_to_unicode()
    spelled = {token: "".join(letters[byte] for byte in token) for token in ranks}
    vocabulary = {spelled[token]: number for token, number in ranks.items()}
    if vocabulary.keys() & special.keys():
        return None
    merges = _merges(sorted(ranks, key=lambda token: ranks[token]))  # tiktoken's: the pair of lowest rank
    pairs = [(spelled[left], spelled[right]) for left, right in merges]
    # As in tiktoken, a word found in the vocabulary is not split.
    tokenizer = Tokenizer(models.BPE(dict(special), [], ignore_merges=True))
    words = pre_tokenizers.Split(Regex(pattern), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, byte_level])
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return _content(tokenizer, {**special, **vocabulary}, pairs, decoder=json.loads(byte_level.__getstate__()))


def _content(tokenizer: Tokenizer, vocabulary: Mapping[str, int], merges: Sequence[Any], **parts: Any) -> str:
    """Return the ``tokenizer.json`` with this vocabulary, which the library would sort in twice the time."""
    content = {**json.loads(tokenizer.to_str()), **parts}
    content["model"] |= {"vocab": vocabulary, "merges": merges}
    return json.dumps(content, ensure_ascii=False)


def _merges(tokens: Sequence[AnyStr]) -> list[tuple[AnyStr, AnyStr]]:
    """Return the merges of a BPE that forms tokens in this order: all splits of each token into two others."""
    known = frozenset(tokens)
    merges = []
    for token in tokens:
        splits = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        merges += [(left, right) for left, right in splits if left in known and right in known]
    return merges
