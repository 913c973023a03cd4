"""Files of tiktoken: ids against the library with OpenAI's own definitions, and against Hugging Face."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
import tiktoken
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tiktoken_ext import openai_public
from transformers import AutoTokenizer

from megatron.data.errors import DataError
from megatron.data.tokenizers.engine import EDGE_CASE_TEXTS
from megatron.data.tokenizers.huggingface import TOKENIZER_JSON
from megatron.data.tokenizers.tiktoken import ENCODINGS, MEGATRON_VOCAB_SIZE, PATTERNS, TikTokenizer
from tests.unit.data.made_tokenizers import TEXT, apart, ranks, tiktoken_file

ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]))
NEARLY_WORDS = st.text(st.sampled_from("the CATs'LLd \t\n\r  12,.!/\u00c5\u01c5\u02b0\u0301\u6771\u2167\u00a0"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiktoken")


@pytest.mark.parametrize("name", ENCODINGS)
def test_named_encodings_are_openais(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = TikTokenizer(tiktoken_file(folder / f"{name}.tiktoken"))
    monkeypatch.setattr(openai_public, "load_tiktoken_bpe", lambda *where, **how: ranks())
    official = openai_public.ENCODING_CONSTRUCTORS[name]()
    theirs = tiktoken.Encoding(
        name,
        pat_str=official["pat_str"],
        mergeable_ranks=official["mergeable_ranks"],
        special_tokens=official["special_tokens"],
    )
    assert ours.special_ids == official["special_tokens"]
    assert ours.eod == theirs.eot_token
    texts = [*EDGE_CASE_TEXTS, *TEXT]
    assert apart(ours.encode_batch(texts)) == [theirs.encode_ordinary(text) for text in texts]


def test_megatrons_file_has_its_special_tokens_first(folder: Path) -> None:
    file = tiktoken_file(folder / "vocab.json")
    ours = TikTokenizer(file, num_special_tokens=20)
    theirs = tiktoken.Encoding("", pat_str=PATTERNS["v2"], mergeable_ranks=ranks(), special_tokens={})
    texts = [*EDGE_CASE_TEXTS, *TEXT]
    shifted = [[number + 20 for number in theirs.encode_ordinary(text)] for text in texts]
    assert apart(ours.encode_batch(texts)) == shifted
    assert (ours.vocab_size, ours.eod, ours.pad) == (len(ranks()) + 20, 2, 4)
    assert list(ours.special_ids.items())[5:9] == [("<cls>", 5), ("<sep>", 6), ("<SPECIAL_7>", 7), ("<SPECIAL_8>", 8)]
    assert ours.settings == {"tiktoken_pattern": "v2", "tiktoken_num_special_tokens": 20}
    same = TikTokenizer(tiktoken_file(folder / "other.tiktoken"), "v2", 20)
    assert apart(same.encode_batch(texts)) == shifted
    assert same.fingerprint == ours.fingerprint != TikTokenizer(file, "v1", 20).fingerprint


def test_the_patterns_of_megatron_differ(tmp_path: Path) -> None:
    """v1 keeps ``theC`` whole, v2 cuts it where the case changes; both take digits one by one."""
    words = [*(bytes((byte,)) for byte in range(256)), b"th", b"the", b"theC", b"42"]
    (tmp_path / "x.tiktoken").write_bytes(b"".join(b"%b %d\n" % (base64.b64encode(w), i) for i, w in enumerate(words)))
    cut = {"v1": [b"theC", b"4", b"2"], "v2": [b"the", b"C", b"4", b"2"]}
    for pattern, expected in cut.items():
        tokenizer = TikTokenizer(tmp_path / "x.tiktoken", pattern, 7)
        assert tokenizer.encode("theC42").tolist() == [words.index(word) + 7 for word in expected]


def test_a_size_keeps_the_first_ids(folder: Path) -> None:
    file = tiktoken_file(folder / "vocab.json")
    cut = TikTokenizer(file, num_special_tokens=10, vocab_size=310)
    fewer = {token: rank for token, rank in ranks().items() if rank < 300}
    theirs = tiktoken.Encoding("", pat_str=PATTERNS["v2"], mergeable_ranks=fewer, special_tokens={})
    assert cut.vocab_size == 310
    assert cut.encode(TEXT[0]).tolist() == [number + 10 for number in theirs.encode_ordinary(TEXT[0])]


# --- for Hugging Face ---

KINDS = [*(f"{name}.tiktoken" for name in ENCODINGS), "v1", "v2"]


def made(folder: Path, kind: str) -> TikTokenizer:
    if kind in PATTERNS:
        return TikTokenizer(tiktoken_file(folder / "vocab.json"), kind)
    return TikTokenizer(tiktoken_file(folder / kind))


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_gives_the_same_ids(folder: Path, kind: str, tmp_path: Path) -> None:
    ours = made(folder, kind)
    for name, content in ours.hugging_face_files().items():
        (tmp_path / name).write_bytes(content)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    texts = [text for text in [*EDGE_CASE_TEXTS, *TEXT] if not any(token in text for token in ours.special_ids)]
    assert theirs(texts).input_ids == apart(ours.encode_batch(texts))
    assert theirs.eos_token_id == ours.eod
    assert {token: theirs.convert_tokens_to_ids(token) for token in ours.special_ids} == ours.special_ids
    assert [theirs.decode(ids) for ids in theirs(texts).input_ids] == texts


@pytest.fixture(scope="module")
def pairs(folder: Path) -> list[tuple[TikTokenizer, tokenizers.Tokenizer]]:
    found = []
    for kind in KINDS:
        ours = made(folder, kind)
        theirs = tokenizers.Tokenizer.from_buffer(ours.hugging_face_files()[TOKENIZER_JSON])
        theirs.encode_special_tokens = True
        found.append((ours, theirs))
    return found


@settings(max_examples=100, deadline=None, derandomize=True)
@given(text=ANY_TEXT | NEARLY_WORDS)
def test_any_text_has_the_same_ids(pairs: list[tuple[TikTokenizer, tokenizers.Tokenizer]], text: str) -> None:
    for ours, theirs in pairs:
        ids = ours.encode(text).tolist()
        assert ids == theirs.encode(text).ids
        assert ours.decode(ids) == text


def test_a_word_that_no_joints_lead_to_is_still_that_word(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "cl100k_base.tiktoken"
    file.write_text((tiktoken_file(folder / "x.tiktoken")).read_text() + f"{base64.b64encode(b'zqzq').decode()} 9999\n")
    ours = TikTokenizer(file)
    theirs = tokenizers.Tokenizer.from_buffer(ours.hugging_face_files()[TOKENIZER_JSON])
    assert ours.encode("zqzq").tolist() == theirs.encode("zqzq").ids == [9999]
    assert ours.encode("zqzqz").tolist() == theirs.encode("zqzqz").ids


def test_a_special_token_that_is_also_a_word_has_no_files(folder: Path) -> None:
    file = folder / "clash.tiktoken"
    file.write_text((tiktoken_file(folder / "x.tiktoken")).read_text() + f"{base64.b64encode(b'</s>').decode()} 9999\n")
    assert TikTokenizer(file, "v1").hugging_face_files() == {}


# --- what is wrong ---


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.tiktoken", None, "there is no .*x.tiktoken"),
        ("x.tiktoken", "AA== 0\n", "has no pre-tokenization regex.*\n  fix: --tiktoken-pattern v1"),
        ("r50k_base.tiktoken", "AA== 0\n", "lacks 255 of the 256 bytes, first 0x01"),
        ("r50k_base.tiktoken", "AA== 0\nAA== 1\n", "has a duplicate token or rank"),
        ("r50k_base.tiktoken", "AA== 0\nAQ== 0\n", "has a duplicate token or rank"),
        ("r50k_base.tiktoken", "AA== 0\nxyz\n", "r50k_base.tiktoken:2 is not a base64 token and its rank"),
        ("r50k_base.tiktoken", "A 0\n", "r50k_base.tiktoken:1 is not a base64 token"),
        ("x.json", "{", "is not a list of"),
        ("x.json", '{"vocab": []}', "is not a list of"),
        ("x.json", '[{"rank": 1, "token_bytes": "AA=="}]', "ranks of .*x.json are not 0, 1, 2"),
    ],
)
def test_damage_is_named(tmp_path: Path, name: str, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        TikTokenizer(tmp_path / name)


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"num_special_tokens": 6}, "6 special tokens are too few for <unk> <s> </s>"),
        ({"vocab_size": 10**6}, r"make 1,\d+ ids, not 1,000,000\n  fix: --vocab-size 1\d+"),
        ({"vocab_size": 1100}, r"make 1,\d+ ids, not 1,100"),
        (
            {"num_special_tokens": MEGATRON_VOCAB_SIZE},
            r"Megatron-LM keeps the first 2\*\*17\n  fix: --vocab-size 131072",
        ),
        ({"pattern": "v3"}, "--tiktoken-pattern v1"),
    ],
)
def test_numbers_that_do_not_fit_are_told(folder: Path, told: dict[str, int], message: str) -> None:
    with pytest.raises(DataError, match=message):
        TikTokenizer(tiktoken_file(folder / "vocab.json"), **told)  # type: ignore[arg-type]


def test_a_file_of_another_name_is_found_again_beside_the_data(tmp_path: Path) -> None:
    """As Llama 3's ``tokenizer.model``, which is a file of ranks."""
    tokenizer = TikTokenizer(tiktoken_file(tmp_path / "tokenizer.model"), "v2")
    ((name, content),) = tokenizer.files.items()
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / name).write_bytes(content)
    assert TikTokenizer(tmp_path / "beside", "v2").fingerprint == tokenizer.fingerprint


def test_a_number_that_a_named_encoding_does_not_read_is_refused(folder: Path) -> None:
    with pytest.raises(DataError, match="special tokens of cl100k_base is fixed"):
        TikTokenizer(tiktoken_file(folder / "cl100k_base.tiktoken"), num_special_tokens=7)


def test_a_folder_holds_one_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds 0 files"):
        TikTokenizer(tmp_path)
    tiktoken_file(tmp_path / "r50k_base.tiktoken")
    assert TikTokenizer(tmp_path).eod == 50256
    (tmp_path / "other.json").write_text(json.dumps([]))
    with pytest.raises(DataError, match="holds 2 files"):
        TikTokenizer(tmp_path)


def test_the_files_for_others_are_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = TikTokenizer(tiktoken_file(tmp_path / "cl100k_base.tiktoken"))
    tokenizer.hugging_face_files().clear()  # each caller has a dictionary of its own
    monkeypatch.delattr("megatron.data.tokenizers.tiktoken.tiktoken_to_hugging_face")
    assert sorted(tokenizer.hugging_face_files()) == ["tokenizer.json", "tokenizer_config.json"]
