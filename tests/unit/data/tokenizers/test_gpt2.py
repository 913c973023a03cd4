"""GPT-2's two files, against transformers' reader of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, GPT2Tokenizer

from megatron.data.errors import DataError
from megatron.data.tokenizers.engine import EDGE_CASE_TEXTS
from megatron.data.tokenizers.huggingface import END_OF_DOCUMENT, GPT2BPETokenizer, HuggingFaceTokenizer
from tests.unit.data.made_tokenizers import TEXT, apart, gpt2


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[GPT2BPETokenizer, GPT2Tokenizer]:
    folder = tmp_path_factory.mktemp("gpt2")
    vocab, merges = gpt2(folder)
    return GPT2BPETokenizer.from_vocabulary(vocab, merges), GPT2Tokenizer(vocab=str(vocab), merges=str(merges))


def test_ids_are_those_of_transformers(pair: tuple[GPT2BPETokenizer, GPT2Tokenizer], tmp_path: Path) -> None:
    ours, theirs = pair
    texts = [*EDGE_CASE_TEXTS, *TEXT]
    assert apart(ours.encode_batch(texts)) == [theirs(text).input_ids for text in texts]
    assert (ours.vocab_size, ours.eod) == (len(theirs), theirs.convert_tokens_to_ids(END_OF_DOCUMENT))
    for name, content in ours.hugging_face_files().items():
        (tmp_path / name).write_bytes(content)
    exported = AutoTokenizer.from_pretrained(tmp_path)
    assert exported(texts).input_ids == apart(ours.encode_batch(texts))
    assert exported.eos_token_id == ours.eod


def test_a_folder_with_a_model_of_sentencepiece_is_offered_as_one(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(DataError, match=r"there is no .*tokenizer\.json") as printed:
        HuggingFaceTokenizer(tmp_path)
    assert printed.value.fixes[0] == f"--tokenizer-type SentencePieceTokenizer --tokenizer-model {tmp_path}"


def test_files_that_are_swapped_are_told(tmp_path: Path) -> None:
    vocab, merges = gpt2(tmp_path)
    with pytest.raises(DataError, match="files are swapped") as printed:
        GPT2BPETokenizer.from_vocabulary(merges, vocab)
    assert printed.value.fixes == (f"--vocab-file {vocab} --merge-file {merges}",)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_ids_of_any_text(pair: tuple[GPT2BPETokenizer, GPT2Tokenizer], text: str) -> None:
    ours, theirs = pair
    assert ours.encode(text).tolist() == theirs(text).input_ids
    assert ours.decode(ours.encode(text)) == text


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"vocab": None}, "there is no .*vocab.json"),
        ({"merges": None}, "there is no .*merges.txt"),
        ({"vocab": "{"}, "vocab.json is not JSON"),
        ({"vocab": "[]"}, "is not a JSON object from tokens"),
        ({"vocab": '{"a": 0, "b": 0}'}, "duplicate or negative id"),
        ({"vocab": '{"a": 0}'}, "lacks 256 of the 256 bytes and"),
        ({"merges": "a b c\n"}, "merges.txt:1 is not two tokens separated by a space: 'a b c'"),
        ({"merges": "#version: 0.2\nnot there\n"}, "merges.txt does not belong to .*vocab.json"),
    ],
)
def test_damage_is_named(tmp_path: Path, damage: dict[str, str | None], message: str) -> None:
    files = dict(zip(("vocab", "merges"), gpt2(tmp_path)))
    for name, content in damage.items():
        files[name].unlink()
        if content is not None:
            files[name].write_text(content)
    with pytest.raises(DataError, match=message):
        GPT2BPETokenizer.from_vocabulary(files["vocab"], files["merges"])


def test_a_vocabulary_without_an_end_is_refused(tmp_path: Path) -> None:
    vocab, merges = gpt2(tmp_path)
    entries = json.loads(vocab.read_text())
    del entries[END_OF_DOCUMENT]
    vocab.write_text(json.dumps(entries))
    with pytest.raises(DataError, match=r"lacks 1 of the 256 bytes and <\|endoftext\|>"):
        GPT2BPETokenizer.from_vocabulary(vocab, merges)
