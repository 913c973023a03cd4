"""Prompts to ids and back, and text that appears token by token."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from io import StringIO
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from megatron.inference.text import (
    REPLACEMENT,
    Codec,
    ContinuationPrinter,
    IdCodec,
    IncrementalDecoder,
    InferenceError,
    TextCodec,
    open_codec,
)

CORPUS = ["The quick brown fox. Καλημέρα κόσμε! 你好,世界 😀😀 naïve café\n\n\tdef f(x): return x"] * 3


@cache
def byte_level() -> Tokenizer:
    """As GPT-2: a character's bytes may be in different tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


@cache
def sentencepiece_like() -> Tokenizer:
    """As Llama 2: words begin with a mark, unknown characters fall back to bytes, prompts begin with <s>."""
    special = ["<unk>", "<s>", "</s>"]
    vocabulary = {token: i for i, token in enumerate([*special, *(f"<0x{byte:02X}>" for byte in range(256))])}
    for piece in ["\u2581", *"abcdefghijklmnopqrstuvwxyz", "\u2581the", "th", "he", "\u2581t"]:
        vocabulary.setdefault(piece, len(vocabulary))
    merges = [("t", "h"), ("h", "e"), ("\u2581", "t"), ("\u2581t", "he")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


TOKENIZERS = {"byte-level": byte_level, "sentencepiece": sentencepiece_like}


def codec(name: str) -> TextCodec:
    return TextCodec({"tokenizer.json": TOKENIZERS[name]().to_str().encode()})


def streamed(codec: Codec, prompt: Sequence[int], ids: Sequence[int]) -> list[str]:
    stream = IncrementalDecoder(codec, prompt)
    return [*(stream.push(token) for token in ids), stream.flush()]


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=50, derandomize=True, deadline=None)
@given(text=st.text(max_size=30), prompt=st.text(max_size=10), cut=st.integers(0, 30))
def test_streamed_text_is_the_text(name: str, text: str, prompt: str, cut: int) -> None:
    """Whatever the prompt, and wherever generation stops: no replacement character that the whole does not have."""
    tokenizer = codec(name)
    before, everything = tokenizer.encode(prompt), tokenizer.encode(prompt + text)
    if everything[: len(before)] != before:  # the tokens of the text begin inside the prompt
        before = []
    ids = everything[len(before) : len(before) + cut]
    pieces = streamed(tokenizer, before, ids)
    whole = tokenizer.decode(before + ids)
    if name == "byte-level" or REPLACEMENT not in whole:  # byte fallback spoils a whole run of bytes for an odd one
        assert tokenizer.decode(before) + "".join(pieces) == whole
    assert REPLACEMENT in text or not any(REPLACEMENT in piece for piece in pieces[:-1])


@settings(max_examples=50, derandomize=True, deadline=None)
@given(ids=st.lists(st.integers(0, 299), max_size=25))
def test_any_ids_can_be_streamed(ids: list[int]) -> None:
    """An untrained model writes bytes that make no characters, and special tokens."""
    tokenizer = codec("byte-level")
    assert "".join(streamed(tokenizer, [], ids)) == tokenizer.decode(ids)


def test_a_character_appears_when_it_is_whole() -> None:
    tokenizer = codec("byte-level")
    ids = [tokenizer._tokenizer.token_to_id(token) for token in ("ð", "Ł", "ĺ", "Ģ", "x")]  # F0 9F 98 80, x
    assert streamed(tokenizer, [], ids) == ["", "", "", "\U0001f600", "x", ""]


def test_arguments_keep_their_blanks() -> None:
    tokenizer = codec("sentencepiece")
    prompt = tokenizer.encode("the")
    assert prompt[0] == 1
    ids = tokenizer.encode("the the x")[len(prompt) :]
    assert "".join(streamed(tokenizer, prompt, ids)) == " the x"


def test_the_end_is_the_one_that_the_configuration_names() -> None:
    """The rules match the data's tokenizers, whose tests list them."""
    files = {"tokenizer.json": byte_level().to_str().encode()}
    for named, end in ((None, "<|endoftext|>"), ("x", "x"), ({"content": "x"}, "x")):
        given = files | {"tokenizer_config.json": json.dumps({"eos_token": named}).encode()}
        assert open_codec(given).end == byte_level().token_to_id(end)


def test_padding_and_truncation_of_training_are_off() -> None:
    tokenizer = byte_level()
    other = Tokenizer.from_str(tokenizer.to_str())
    other.enable_truncation(3)
    other.enable_padding(length=50)
    text = "The quick brown fox."
    assert TextCodec({"tokenizer.json": other.to_str().encode()}).encode(text) == tokenizer.encode(text).ids


def test_ids_and_text_match_transformers(tmp_path: Path) -> None:
    for name, build in TOKENIZERS.items():
        PreTrainedTokenizerFast(tokenizer_object=build()).save_pretrained(tmp_path / name)
        theirs = AutoTokenizer.from_pretrained(tmp_path / name)
        ours = open_codec({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()})
        for text in (*CORPUS, "the fox <|endoftext|> </s> \u2581 ", " a  b"):
            ids = ours.encode(text)
            assert ids == theirs(text).input_ids
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_ids_in_decimal() -> None:
    ids = open_codec({})
    assert isinstance(ids, IdCodec)
    assert ids.encode(" 3 14\n1 ") == [3, 14, 1]
    assert "".join(streamed(ids, [3, 14], [1, 5, 9])) == " 1 5 9"
    for word in ("x", "-1", "\u0663"):
        with pytest.raises(InferenceError, match="a prompt is token ids"):
            ids.encode(f"1 {word}")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"", b"[]", b"\xff"])
def test_a_broken_file_is_named(name: str, content: bytes) -> None:
    files = {"tokenizer.json": byte_level().to_str().encode()} | {name: content}
    with pytest.raises(InferenceError, match=name.replace(".", r"\.")):
        open_codec(files)


# --- several texts that grow at once, printed one after the other ---


def printer(out: StringIO, prompts: list[list[int]], live: bool) -> ContinuationPrinter:
    codec = IdCodec()
    return ContinuationPrinter(out, codec, [codec.decode(ids) for ids in prompts], prompts, {0}, live)


@pytest.mark.parametrize("live", [True, False])
def test_one_text_appears_as_it_grows_or_when_it_is_complete(live: bool) -> None:
    out = StringIO()
    shown = printer(out, [[7, 8]], live)
    states = [out.getvalue()]
    for token, last in ((9, False), (5, False), (0, True)):
        shown.token(0, token, last)
        states.append(out.getvalue())
    growing = ["7 8 9", "7 8 9 5"] if live else ["7 8", "7 8"]
    assert states == ["7 8", *growing, "7 8 9 5\n"]


@settings(max_examples=50, derandomize=True, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 4), min_size=2, max_size=5),
    order=st.randoms(use_true_random=False),
    live=st.booleans(),
)
def test_several_follow_one_another_whatever_order_they_grow_in(lengths: list[int], order: Random, live: bool) -> None:
    out = StringIO()
    prompts = [[100 + number] for number in range(len(lengths))]
    shown = printer(out, prompts, live)
    turns = [number for number, length in enumerate(lengths) for _ in range(length)]
    order.shuffle(turns)
    grown = [0 for _ in lengths]
    for number in turns:
        grown[number] += 1
        shown.token(number, grown[number], grown[number] == lengths[number])
    blocks = [
        f"--- {number + 1} of {len(lengths)}\n{' '.join(map(str, (100 + number, *range(1, length + 1))))}\n"
        for number, length in enumerate(lengths)
    ]
    assert out.getvalue() == "\n".join(blocks)
