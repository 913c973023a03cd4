"""Tokenizers, and the record that ties a dataset to the one that wrote it."""

from __future__ import annotations

import argparse
import json
import pickle
import shutil
from dataclasses import fields, replace
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models
from transformers import GPT2Tokenizer

from megatron.config.run import DataConfig
from megatron.data.dataset import fingerprint
from megatron.data.errors import DataError
from megatron.data.tokenizers import huggingface
from megatron.data.tokenizers.base import Tokenizer
from megatron.data.tokenizers.huggingface import ByteTokenizer, GPT2BPETokenizer, HuggingFaceTokenizer, NullTokenizer
from megatron.data.tokenizers.tokenizer import (
    FILES_SUFFIX,
    RECORD_SUFFIX,
    TOKENIZER_TYPES,
    TokenizerOptions,
    TokenizerRecord,
    add_tokenizer_flags,
    build_tokenizer,
    have_same_ids,
    hugging_face_files_of,
    load_recorded_tokenizer,
    read_tokenizer_record,
    was_written_with,
)
from tests.unit.data.made_tokenizers import apart, gpt2, options_for


@settings(deadline=None)
@given(st.text())
def test_bytes_of_any_text_and_back(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text).tolist()
    assert ids == list(text.encode("utf-8"))
    assert tokenizer.decode(ids) == text


@settings(deadline=None)
@given(st.binary())
def test_bytes_that_are_no_text_are_encoded_too(data: bytes) -> None:
    assert bytes(ByteTokenizer().encode(data).tolist()) == data


def test_byte_tokenizer_shows_ends_and_bad_bytes() -> None:
    tokenizer = ByteTokenizer()
    assert (tokenizer.vocab_size, tokenizer.eod) == (257, 256)
    assert tokenizer.decode([104, 105, 256, 255]) == "hi<|endoftext|>\ufffd"


@settings(deadline=None)
@given(st.lists(st.integers(0, 999)))
def test_ids_written_out_and_back(ids: list[int]) -> None:
    tokenizer = NullTokenizer(1000)
    text = " ".join(map(str, ids))
    assert tokenizer.encode(text).tolist() == tokenizer.encode(text.encode()).tolist() == ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.eod == 999


@pytest.mark.parametrize("text", ["1 2 x", "1000", "-1", "1.5", b"7 \xff", "\u00b2", "9" * 5000])
def test_text_that_is_no_ids_is_refused(text: str | bytes) -> None:
    with pytest.raises(DataError, match=r"NullTokenizer reads ids 0\.\.999 separated by spaces, not '"):
        NullTokenizer(1000).encode(text)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer of Hugging Face."""
    folder = tmp_path_factory.mktemp("model")
    for name, content in huggingface.make_tokenizer_files(huggingface.byte_tokenizer()).items():
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize("name", TOKENIZER_TYPES)
def test_every_name_builds_a_tokenizer_of_that_name(name: str, tmp_path: Path) -> None:
    printed = options_for(name, tmp_path)
    assert pickle.loads(pickle.dumps(printed)) == printed
    tokenizer = build_tokenizer(printed)
    assert type(tokenizer).__name__ == name
    assert 0 <= tokenizer.eod < tokenizer.vocab_size
    ids = tokenizer.encode("7 8")
    assert ids.dtype.kind in "iu"
    batch = tokenizer.encode_batch(["7 8", b"", "3"])
    assert batch.lengths.tolist() == [len(ids), 0, len(tokenizer.encode("3"))]
    assert batch.ids.tolist() == [*ids.tolist(), *tokenizer.encode("3").tolist()]
    assert np.iinfo(batch.ids.dtype).max >= tokenizer.vocab_size - 1
    assert tokenizer.decode(ids) == "7 8"
    assert apart(tokenizer.encode_batch([])) == []
    assert version(tokenizer.library)


TEXTUAL = [name for name in TOKENIZER_TYPES if name not in ("ByteTokenizer", "NullTokenizer")]


@pytest.mark.parametrize("name", TEXTUAL)
def test_special_tokens_spelled_out_are_text_unless_asked_for(name: str, tmp_path: Path) -> None:
    printed = options_for(name, tmp_path)
    tokenizer, parsing = build_tokenizer(printed), build_tokenizer(replace(printed, parse_special_tokens=True))
    assert tokenizer.special_ids
    assert tokenizer.fingerprint == parsing.fingerprint  # the same id means the same text
    for token, number in tokenizer.special_ids.items():
        text = f"so {token}{token} it is"
        ids, parsed = tokenizer.encode(text).tolist(), parsing.encode(text).tolist()
        assert not set(ids) & set(tokenizer.special_ids.values())
        assert parsed.count(number) == 2
        assert tokenizer.decode(ids) == parsing.decode(parsed) == text
    ends = tokenizer.decode([tokenizer.eod])
    assert tokenizer.special_ids[ends] == tokenizer.eod


@pytest.mark.parametrize("name", TEXTUAL)
@pytest.mark.parametrize("bad", [b"caf\xe9", "half a pair: \ud800"])
def test_what_is_no_unicode_is_refused(name: str, bad: str | bytes, tmp_path: Path) -> None:
    with pytest.raises(UnicodeError):
        build_tokenizer(options_for(name, tmp_path)).encode_batch(["good", bad])


def test_the_option_of_a_run_knows_the_same_names() -> None:
    (field,) = (f for f in fields(DataConfig) if f.name == "tokenizer_type")
    assert field.metadata["option"].choices == TOKENIZER_TYPES


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        ("GPT2BPE", None, "there is no GPT2BPE; tokenizers for text: HuggingFaceTokenizer, GPT2BPETokenizer, "),
        (
            "BertWordPieceCase",
            None,
            "Megatron-LM's BertWordPieceCase is not supported: it serves BERT",
        ),
        ("GPT2BPETokenizer", None, "needs two files\n  fix: --vocab-file vocab.json --merge-file merges.txt"),
        ("SentencePieceTokenizer", None, "needs --tokenizer-model\n  fix: --tokenizer-model FILE.model"),
        ("TikTokenizer", None, "needs --tokenizer-model\n  fix: --tokenizer-model FILE.tiktoken"),
        ("HuggingFaceTokenizer", None, "needs --tokenizer-model"),
        ("NullTokenizer", None, "needs --vocab-size"),
        ("NullTokenizer", 0, "needs --vocab-size"),
    ],
)
def test_what_cannot_be_built_is_refused(name: str, size: int | None, message: str) -> None:
    with pytest.raises(DataError) as caught:
        build_tokenizer(TokenizerOptions(name, vocab_size=size))
    assert message in str(caught.value)


@pytest.mark.parametrize("name", TEXTUAL)
def test_another_number_of_ids_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r" ids, not 9,?999\n  fix: .*leave out --vocab-size"):
        build_tokenizer(replace(options_for(name, tmp_path), vocab_size=9999))


@pytest.mark.parametrize(
    ("told", "message"),
    [
        (TokenizerOptions("ByteTokenizer", merge_file="m"), "ByteTokenizer does not use --merge-file"),
        (TokenizerOptions("HuggingFaceTokenizer", "m", vocab_file="v"), "does not use --vocab-file"),
        (TokenizerOptions("Llama2Tokenizer", "m", tiktoken_pattern="v1"), "does not use --tiktoken-pattern"),
        (TokenizerOptions("NullTokenizer", parse_special_tokens=True), "does not use --parse-special-tokens"),
        (TokenizerOptions("GPT2BPETokenizer", "m", vocab_file="v"), "either two files or a tokenizer.json, not both"),
        (TokenizerOptions("GPT2BPETokenizer", tiktoken_num_special_tokens=7), "--tiktoken-num-special-tokens"),
    ],
)
def test_a_flag_that_nothing_reads_is_refused(told: TokenizerOptions, message: str) -> None:
    with pytest.raises(DataError, match=message):
        build_tokenizer(told)


def test_flags_and_configuration_say_the_same() -> None:
    parser = argparse.ArgumentParser()
    add_tokenizer_flags(parser)
    words = "--tokenizer-type TikTokenizer --tokenizer-model m --tiktoken-pattern v1 --tiktoken-num-special-tokens 9"
    from_flags = TokenizerOptions.from_args(parser.parse_args([*words.split(), "--vocab-size", "500"]))
    data = DataConfig(
        tokenizer_type="TikTokenizer", tokenizer_model="m", tiktoken_pattern="v1", tiktoken_num_special_tokens=9
    )
    assert (
        from_flags == TokenizerOptions.of(data, 500) == TokenizerOptions("TikTokenizer", "m", None, None, 500, "v1", 9)
    )
    with pytest.raises(DataError, match="tokenizer of the data is not specified"):
        TokenizerOptions.of(DataConfig(), None)


def test_a_special_token_that_is_a_word_of_the_model_is_refused(tmp_path: Path) -> None:
    """A unigram model of Hugging Face finds its own ``</s>`` in a text, whatever it is told."""
    unigram = tokenizers.Tokenizer(models.Unigram([("<unk>", 0.0), ("</s>", 0.0), ("a", -1.0), ("b", -2.0)], unk_id=0))
    unigram.add_special_tokens(["</s>"])
    unigram.save(str(tmp_path / "tokenizer.json"))
    printed = TokenizerOptions("HuggingFaceTokenizer", str(tmp_path))
    with pytest.raises(DataError, match="'</s>' in plain text as the special token 1"):
        build_tokenizer(printed)
    assert build_tokenizer(replace(printed, parse_special_tokens=True)).encode("a</s>b").tolist() == [2, 1, 3]


def test_older_data_of_such_a_tokenizer_are_read_and_an_unknown_token_is_no_such(tmp_path: Path) -> None:
    words = tokenizers.Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1}, unk_token="<unk>"))
    words.add_special_tokens(["<unk>"])
    unigram = tokenizers.Tokenizer(models.Unigram([("<unk>", 0.0), ("</s>", 0.0)], unk_id=0))
    unigram.add_special_tokens(["</s>"])
    for name, library in {"words": words, "unigram": unigram}.items():
        (tmp_path / name).mkdir()
        library.save(str(tmp_path / name / "tokenizer.json"))
    printed = TokenizerOptions("HuggingFaceTokenizer", str(tmp_path / "words"))
    assert build_tokenizer(printed).encode("anything").tolist() == [0]
    prefix = record(tmp_path / "x", HuggingFaceTokenizer(tmp_path / "unigram"))
    assert load_recorded_tokenizer(prefix) is not None


@pytest.mark.parametrize("name", ["ByteTokenizer", "NullTokenizer"])
def test_a_model_that_nobody_reads_is_refused(name: str, model: Path) -> None:
    with pytest.raises(DataError, match=f"{name} does not use --tokenizer-model"):
        build_tokenizer(TokenizerOptions(name, str(model), vocab_size=300))


def test_fingerprints_tell_tokenizers_apart(model: Path) -> None:
    tokenizers: list[Tokenizer] = [
        ByteTokenizer(),
        NullTokenizer(257),
        NullTokenizer(258),
        HuggingFaceTokenizer(model),
    ]
    assert len({t.fingerprint for t in tokenizers}) == len(tokenizers)
    assert NullTokenizer(257).fingerprint == NullTokenizer(257).fingerprint


# --- the record beside a dataset ---


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    (tmp_path / f"x.{RECORD_SUFFIX}").write_bytes(TokenizerRecord.of(NullTokenizer(500)).to_bytes())
    return tmp_path / "x"


def test_the_recorded_tokenizer_is_built_again(prefix: Path) -> None:
    for name in (None, "NullTokenizer"):
        tokenizer = load_recorded_tokenizer(prefix, name)
        assert isinstance(tokenizer, NullTokenizer)
        assert tokenizer.vocab_size == 500


def test_no_record_is_no_error(tmp_path: Path) -> None:
    assert read_tokenizer_record(tmp_path / "x") is None
    assert load_recorded_tokenizer(tmp_path / "x", "ByteTokenizer") is None


def test_another_type_is_refused(prefix: Path) -> None:
    with pytest.raises(DataError, match="with NullTokenizer, not with ByteTokenizer\n  fix: --tokenizer-type N"):
        load_recorded_tokenizer(prefix, "ByteTokenizer")


@pytest.mark.parametrize(("field", "value"), [("fingerprint", "0" * 16), ("eod", 3)])
def test_a_tokenizer_that_changed_is_refused(prefix: Path, field: str, value: object) -> None:
    path = Path(f"{prefix}.{RECORD_SUFFIX}")
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(DataError, match="but that tokenizer is now"):
        load_recorded_tokenizer(prefix, None)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"vocab_size": 5}', "null", "\udcff"])
def test_a_damaged_record_is_named(prefix: Path, content: str) -> None:
    Path(f"{prefix}.{RECORD_SUFFIX}").write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(DataError, match=rf"x\.{RECORD_SUFFIX}: "):
        read_tokenizer_record(prefix)


@pytest.mark.parametrize("parse", [False, True])
@pytest.mark.parametrize("name", TOKENIZER_TYPES)
def test_every_type_is_built_again_from_what_lies_beside_the_data(name: str, parse: bool, tmp_path: Path) -> None:
    printed = options_for(name, tmp_path / "where it came from")
    if parse and name in TEXTUAL:
        printed = replace(printed, parse_special_tokens=True)
    written = build_tokenizer(printed)
    prefix = record(tmp_path / "x", written)
    shutil.rmtree(tmp_path / "where it came from", ignore_errors=True)
    again = load_recorded_tokenizer(prefix, name)
    assert again is not None
    assert TokenizerRecord.of(again) == TokenizerRecord.of(written) == read_tokenizer_record(prefix)
    text = "7 8" if name == "NullTokenizer" else "caf\u00e9 <|endoftext|> </s> 7"
    assert again.encode(text).tolist() == written.encode(text).tolist()


@pytest.mark.parametrize("name", ["HuggingFaceTokenizer", "ByteTokenizer", "NullTokenizer"])
def test_an_older_record_says_less_and_is_read(name: str, tmp_path: Path) -> None:
    prefix = record(tmp_path / "x", build_tokenizer(options_for(name, tmp_path / "files")))
    path = Path(f"{prefix}.{RECORD_SUFFIX}")
    older = {key: json.loads(path.read_text())[key] for key in ("tokenizer_type", "vocab_size", "eod", "fingerprint")}
    path.write_text(json.dumps(older))
    found = read_tokenizer_record(prefix)
    assert found is not None
    assert (found.pad, found.special_ids, found.settings) == (None, None, None)
    assert load_recorded_tokenizer(prefix) is not None


@pytest.mark.parametrize("parse", [False, True])
@pytest.mark.parametrize("name", TEXTUAL)
def test_a_record_with_an_earlier_fingerprint_is_of_the_same_tokenizer(name: str, parse: bool, tmp_path: Path) -> None:
    tokenizer = build_tokenizer(replace(options_for(name, tmp_path / "files"), parse_special_tokens=parse))
    prefix, today = record(tmp_path / "x", tokenizer), record(tmp_path / "y", tokenizer)
    path = Path(f"{prefix}.{RECORD_SUFFIX}")
    content = next(iter(tokenizer.files.values()))
    facts = [content.decode() if name in ("HuggingFaceTokenizer", "GPT2BPETokenizer") else sha256(content).hexdigest()]
    printed = fingerprint(*facts, *(["parse_special_tokens"] if parse else []))
    if name == "TikTokenizer":  # its facts are many
        printed = tokenizer.legacy_fingerprints[parse]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"fingerprint": printed}))
    again = load_recorded_tokenizer(prefix)
    assert again is not None
    assert again.settings == tokenizer.settings
    assert have_same_ids(prefix, today)
    assert have_same_ids(today, prefix)
    assert was_written_with(prefix, build_tokenizer(options_for(name, tmp_path / "files")))
    assert not was_written_with(prefix, ByteTokenizer())
    assert not have_same_ids(prefix, record(tmp_path / "z", ByteTokenizer()))


def test_gpt2_is_one_tokenizer_in_each_of_its_forms(tmp_path: Path) -> None:
    vocab, merges = gpt2(tmp_path / "two")
    GPT2Tokenizer(vocab=str(vocab), merges=str(merges)).save_pretrained(tmp_path / "one")
    two, one = GPT2BPETokenizer.from_vocabulary(vocab, merges), HuggingFaceTokenizer(tmp_path / "one")
    assert two.fingerprint == one.fingerprint
    assert set(two.legacy_fingerprints).isdisjoint(one.legacy_fingerprints)
    content = json.loads(one.files[huggingface.TOKENIZER_JSON])
    for change in (
        {"pre_tokenizer": content["pre_tokenizer"] | {"add_prefix_space": True}},
        {"normalizer": {"type": "NFC"}},
        {"model": content["model"] | {"merges": content["model"]["merges"][1:]}},
        {"added_tokens": [content["added_tokens"][0] | {"lstrip": True}]},
    ):
        (tmp_path / "one" / huggingface.TOKENIZER_JSON).write_text(json.dumps(content | change))
        assert HuggingFaceTokenizer(tmp_path / "one").fingerprint != two.fingerprint


@pytest.mark.parametrize("name", ["SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer"])
def test_three_names_are_one_type(name: str, tmp_path: Path) -> None:
    prefix = record(tmp_path / "x", build_tokenizer(options_for("Llama2Tokenizer", tmp_path / "files")))
    assert read_tokenizer_record(prefix, name) is not None
    with pytest.raises(DataError, match="was written with Llama2Tokenizer, not with HuggingFaceTokenizer"):
        read_tokenizer_record(prefix, "HuggingFaceTokenizer")


def test_a_pad_that_is_the_end_of_a_document_is_recorded_as_such(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "pads"
    shutil.copytree(model, folder)
    config = json.loads((folder / huggingface.TOKENIZER_CONFIG).read_text()) | {
        "pad_token": huggingface.END_OF_DOCUMENT
    }
    (folder / huggingface.TOKENIZER_CONFIG).write_text(json.dumps(config))
    found = read_tokenizer_record(record(tmp_path / "x", HuggingFaceTokenizer(folder)))
    assert found is not None
    assert (found.pad, found.eod, found.special_ids) == (256, 256, {"<|endoftext|>": 256})
    plain = read_tokenizer_record(record(tmp_path / "y", HuggingFaceTokenizer(model)))
    assert plain is not None
    assert plain.pad is None


@pytest.mark.parametrize(("field", "value"), [("pad", 7), ("special_ids", {"</s>": 3}), ("settings", {"colour": 1})])
def test_a_record_of_something_else_is_refused(model: Path, tmp_path: Path, field: str, value: object) -> None:
    prefix = record(tmp_path / "x", HuggingFaceTokenizer(model))
    path = Path(f"{prefix}.{RECORD_SUFFIX}")
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(DataError, match=r"that tokenizer is now|unexpected keyword argument 'colour'"):
        load_recorded_tokenizer(prefix)


# --- what goes with a model ---


def record(prefix: Path, tokenizer: Tokenizer) -> Path:
    """What preprocessing leaves beside a dataset."""
    Path(f"{prefix}.{RECORD_SUFFIX}").write_bytes(TokenizerRecord.of(tokenizer).to_bytes())
    for name, content in tokenizer.files.items():
        Path(f"{prefix}.{FILES_SUFFIX}").mkdir(exist_ok=True)
        Path(f"{prefix}.{FILES_SUFFIX}", name).write_bytes(content)
    return prefix


def test_a_tokenizer_of_hugging_face_lies_beside_its_data(model: Path, tmp_path: Path) -> None:
    prefix = record(tmp_path / "x", HuggingFaceTokenizer(model))
    for name in (None, "HuggingFaceTokenizer"):
        tokenizer = load_recorded_tokenizer(prefix, name)
        assert isinstance(tokenizer, HuggingFaceTokenizer)
        assert tokenizer.encode("hi").tolist() == [104, 105]
    assert hugging_face_files_of(prefix) == {file.name: file.read_bytes() for file in model.iterdir()}
    with open(f"{prefix}.{FILES_SUFFIX}/{huggingface.TOKENIZER_JSON}", "a") as file:
        file.write(" ")
    assert load_recorded_tokenizer(prefix) is not None  # says the same in other words
    with open(f"{prefix}.{FILES_SUFFIX}/{huggingface.TOKENIZER_JSON}", "rb+") as file:
        content = json.loads(file.read())
        vocabulary = content["model"]["vocab"]
        vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
        file.seek(0)
        file.write(json.dumps(content).encode())
        file.truncate()
    with pytest.raises(DataError, match="but that tokenizer is now"):
        hugging_face_files_of(prefix)
    shutil.rmtree(f"{prefix}.{FILES_SUFFIX}")
    with pytest.raises(DataError, match=rf"there is no {prefix}\.{FILES_SUFFIX}"):
        load_recorded_tokenizer(prefix)


def test_bytes_become_a_tokenizer_of_hugging_face(model: Path, tmp_path: Path) -> None:
    prefix = record(tmp_path / "x", ByteTokenizer())
    assert hugging_face_files_of(prefix) == {file.name: file.read_bytes() for file in model.iterdir()}


def test_ids_that_are_nobodys_have_no_files(tmp_path: Path) -> None:
    assert hugging_face_files_of(record(tmp_path / "x", NullTokenizer(9))) == {}
    assert hugging_face_files_of(tmp_path / "no record") == {}
