"""SentencePiece models made from text: against the library told the same, and what they promise."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.errors import DataError
from megatron.data.preprocess.corpus import TextDocument
from megatron.data.tokenizers import train as module
from megatron.data.tokenizers.huggingface import TOKENIZER_CONFIG, TOKENIZER_JSON
from megatron.data.tokenizers.sentencepiece import (
    MODEL_FILE,
    PieceType,
    SegmentationAlgorithm,
    SentencePieceTokenizer,
    parse_model,
)
from megatron.data.tokenizers.train import MIN_SENTENCEPIECE_SIZE, SentenceSample, train_sentencepiece
from tests.unit.data.made_tokenizers import TEXT


def documents(texts: list[str]) -> list[TextDocument]:
    return [TextDocument((text,), (Path("d"), i), len(text)) for i, text in enumerate(texts)]


def model(texts: list[str], vocab_size: int = 400, model_type: str = "bpe", most: int = 10**6) -> bytes:
    return train_sentencepiece(documents(texts), vocab_size, model_type, most)[0].files[MODEL_FILE]


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_what_is_made(model_type: str) -> None:
    learnt, sentences = train_sentencepiece(documents(TEXT), 360, model_type, 10**6)
    content = learnt.files[MODEL_FILE]
    made = parse_model(content)
    assert made.algorithm.name.lower() == model_type
    assert (made.byte_fallback, made.charsmap, made.squeeze_spaces) == (True, b"", False)
    assert learnt.entries == len(made.pieces) <= 360
    assert sum(piece.kind is PieceType.BYTE for piece in made.pieces) == 256
    assert [piece.text for piece in made.pieces[:3]] == ["<unk>", "<s>", "</s>"]
    assert not any(len(p.text) > 1 and any(map(str.isdigit, p.text)) for p in made.pieces if p.kind is PieceType.NORMAL)
    assert set(learnt.files) == (
        {MODEL_FILE, TOKENIZER_JSON, TOKENIZER_CONFIG} if made.algorithm is SegmentationAlgorithm.BPE else {MODEL_FILE}
    )
    assert (learnt.documents, learnt.text_bytes) == (len(TEXT), sum(len(text.encode()) for text in TEXT))
    theirs = sentencepiece.SentencePieceProcessor(model_proto=content)
    assert learnt.sample_tokens == sum(len(ids) for ids in theirs.encode(TEXT))
    assert sentences.seen == len(sentences.kept) == sum(text.count("\n") + 1 for text in TEXT if text) - _empty(TEXT)


def _empty(texts: list[str]) -> int:
    return sum(line == "" for text in texts for line in text.split("\n"))


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_equal_texts_give_equal_files(model_type: str) -> None:
    assert model(TEXT, 360, model_type) == model(TEXT, 360, model_type) != model(TEXT, 340, model_type)


def test_pieces_are_those_of_frequent_words() -> None:
    """Of 'ab' often, 'cd' seldom, the first piece joined is 'ab'."""
    made = parse_model(model(["ab ab ab ab cd cd"] * 5, MIN_SENTENCEPIECE_SIZE + 20)).pieces
    joined = [piece.text for piece in made if piece.kind is PieceType.NORMAL and len(piece.text) > 1]
    assert joined[0] in ("ab", "\u2581a")
    assert joined.index("\u2581ab") < joined.index("\u2581cd")


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581")))
def test_any_text_comes_back(text: str) -> None:
    tokenizer = SentencePieceTokenizer.of(MADE, Path(MODEL_FILE))
    assert tokenizer.decode(tokenizer.encode(text)) == text


MADE = model(["abc abd"], 300)


# --- what is learnt from ---


def test_a_sample_of_lines_is_fair_and_in_order() -> None:
    lines = [str(number) for number in range(3000)]
    chosen = SentenceSample(["\n".join(lines)], 600)
    numbers = [int(line) for line in chosen.kept]
    assert chosen.seen == 3000
    assert numbers == sorted(set(numbers))
    thirds = Counter(number // 1000 for number in numbers)
    assert all(150 < thirds[third] < 250 for third in range(3))  # 200 expected, give or take four times 10.3
    assert SentenceSample(iter(lines), 3000).kept == lines


def test_long_lines_are_cut_and_none_is_passed_over() -> None:
    line = "word " * (3 * module.MAX_SENTENCE_CHARS // 5 + 1)
    assert "".join(SentenceSample([line], 100).kept) == line
    assert max(map(len, SentenceSample([line], 100).kept)) == module.MAX_SENTENCE_CHARS
    assert "\u2581word" in [piece.text for piece in parse_model(model([line], 280)).pieces]


def test_fewer_lines_are_learnt_from_than_there_are() -> None:
    texts = ["common words here"] * 50 + ["xylophone"] * 3
    learnt, sentences = train_sentencepiece(documents(texts), 300, "bpe", 10)
    assert (sentences.seen, len(sentences.kept), learnt.documents) == (53, 10, 53)


@pytest.mark.parametrize(
    ("texts", "size", "message"),
    [
        (["text"], MIN_SENTENCEPIECE_SIZE - 1, "a vocabulary of 258 is too small for the 256 bytes"),
        (["".join(map(chr, range(0x4E00, 0x4F00)))], 300, r"of the text\n  fix: --vocab-size 5\d\d or more"),
        (["", ""], 300, r"all empty \(2\)"),
    ],
)
def test_what_cannot_be_is_told(texts: list[str], size: int, message: str) -> None:
    with pytest.raises(DataError, match=message):
        model(texts, size)


def test_a_machine_without_the_library_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(DataError, match=r"sentencepiece is needed for .*\n  fix: pip install sentencepiece"):
        model(["text"])
