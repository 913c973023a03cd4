"""A tokenizer made from text, against the algorithm written out and against what it promises."""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from megatron.data.errors import DataError
from megatron.data.preprocess.corpus import TextDocument
from megatron.data.tokenizers import train as learnt_module
from megatron.data.tokenizers.huggingface import (
    END_OF_DOCUMENT,
    TOKENIZER_JSON,
    HuggingFaceTokenizer,
    byte_tokenizer,
    bytes_to_unicode,
    make_tokenizer_files,
)
from megatron.data.tokenizers.train import MIN_BPE_SIZE, TrainedTokenizer, save_tokenizer, train_bpe

WORDS = ["the", "cat", "sat", "on", "a", "mat", "there", "then", "hat", "naïve", "x = x + 1", "\n\t"]


def documents(texts: list[str]) -> list[TextDocument]:
    return [TextDocument((text,), (Path("d"), i), len(text)) for i, text in enumerate(texts)]


FILES = make_tokenizer_files(byte_tokenizer())


def made(learnt: TrainedTokenizer) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(learnt.files[TOKENIZER_JSON].decode())


def some_texts(seed: int, count: int) -> list[str]:
    generator = random.Random(seed)
    return [" ".join(generator.choices(WORDS, k=12)) for _ in range(count)]


def merges_by_hand(texts: list[str], merges: int) -> list[tuple[str, str]]:
    """Sennrich et al., arXiv 1508.07909, algorithm 1; of equally frequent pairs the one with the smallest ids."""
    cut = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words = Counter(tuple(word) for text in texts for word, _ in cut.pre_tokenize_str(text))
    ids = {letter: i for i, letter in enumerate(sorted(bytes_to_unicode()))}
    found = []
    for _ in range(merges):
        pairs: Counter[tuple[str, str]] = Counter()
        for word, count in words.items():
            for pair in zip(word, word[1:]):
                pairs[pair] += count
        best = min(pairs, key=lambda pair: (-pairs[pair], ids[pair[0]], ids[pair[1]]), default=None)
        if best is None or pairs[best] < 2:
            break
        ids.setdefault("".join(best), len(ids))
        found.append(best)
        words = replaced(words, best)
    return found


def replaced(words: Counter[tuple[str, ...]], pair: tuple[str, str]) -> Counter[tuple[str, ...]]:
    new: Counter[tuple[str, ...]] = Counter()
    for word, count in words.items():
        new[merged(word, pair)] += count
    return new


def merged(word: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    out: list[str] = []
    for letter in word:
        if out and (out[-1], letter) == pair:
            out[-1] += letter
        else:
            out.append(letter)
    return tuple(out)


@pytest.mark.parametrize("seed", range(3))
def test_merges_are_those_of_the_algorithm(seed: int) -> None:
    texts = some_texts(seed, 30)
    trained = train_bpe(documents(texts), MIN_BPE_SIZE + 40)
    merges = [tuple(pair) for pair in json.loads(made(trained).to_str())["model"]["merges"]]
    assert merges == merges_by_hand(texts, 40)
    assert made(trained).get_vocab_size() == MIN_BPE_SIZE + len(merges)
    assert (trained.documents, trained.text_bytes) == (30, sum(len(t.encode()) for t in texts))


def test_it_depends_on_the_texts_and_not_on_their_order() -> None:
    texts = some_texts(1, 200)
    first, again, other = (
        train_bpe(documents(t), 400).files[TOKENIZER_JSON] for t in (texts, texts[::-1], some_texts(2, 200))
    )
    assert first == again != other


@settings(max_examples=30, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_comes_back(text: str) -> None:
    tokenizer = made(train_bpe(documents(["abc"]), 300))
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_bytes_per_token_are_those_of_the_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = some_texts(3, 50)
    trained = train_bpe(documents(texts), 300)
    assert trained.sample_bytes == trained.text_bytes
    assert trained.sample_tokens == sum(len(made(trained).encode(t).ids) for t in texts)
    monkeypatch.setattr(learnt_module, "SAMPLE_BYTES", len(texts[0].encode()))
    small = train_bpe(documents(texts), 300)
    assert (small.text_bytes, small.sample_bytes) == (trained.text_bytes, len(texts[0].encode()))
    assert small.sample_tokens == len(made(trained).encode(texts[0]).ids)


def test_what_nothing_can_be_learnt_from_is_named() -> None:
    with pytest.raises(DataError, match=r"the documents of the input are all empty \(1\)"):
        train_bpe([TextDocument(("",), (Path("d.txt"), 0), 9)], 300)


def test_a_vocabulary_holds_all_bytes() -> None:
    with pytest.raises(DataError, match="a vocabulary of 256 is too small for the 256 bytes"):
        train_bpe(documents(["text"]), MIN_BPE_SIZE - 1)
    smallest = made(train_bpe(documents(["text text text"]), MIN_BPE_SIZE))
    assert smallest.get_vocab_size() == MIN_BPE_SIZE
    assert sorted(smallest.get_vocab()) == sorted([*bytes_to_unicode(), END_OF_DOCUMENT])


# --- saving ---


def test_a_saved_tokenizer_is_read(tmp_path: Path) -> None:
    learnt = train_bpe(documents(some_texts(1, 40)), 300)
    tokenizer = made(learnt)
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "new" / "bpe", tmp_path / "empty"):
        save_tokenizer(learnt.files, folder)
        read = HuggingFaceTokenizer(folder)
        assert read.encode("the cat").tolist() == tokenizer.encode("the cat").ids
        assert read.eod == tokenizer.token_to_id(END_OF_DOCUMENT)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "new"]


@pytest.mark.parametrize(("name", "message"), [("tokenizer.json", "holds a tokenizer"), ("x", "is not an empty")])
def test_what_is_there_is_not_overwritten(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(DataError, match=f"already exists and {message}"):
        save_tokenizer(FILES, tmp_path)
    assert [p.read_text() for p in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize("failing", [0, 1, 2, 4])
def test_a_disk_that_refuses_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int) -> None:
    calls = iter(range(10))

    def full(number: int) -> None:
        if next(calls) == failing:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    if failing < 3:
        with pytest.raises(OSError, match="No space left"):
            save_tokenizer(FILES, tmp_path / "bpe")
        assert list(tmp_path.iterdir()) == []
    else:
        save_tokenizer(FILES, tmp_path / "bpe")
        assert len(list((tmp_path / "bpe").iterdir())) == 2
