"""Fill-in-the-middle: what is changed can be changed back, at the rates, by seed, epoch and document only."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from megatron.config.data import DataConfig
from megatron.data.build import FileSegmentBuilder, SourceSlice
from megatron.data.dataset import Dataset, Sample
from megatron.data.errors import DataError
from megatron.data.fim_dataset import FillInMiddle, FimDataset
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.tokenizers.base import Tokenizer
from megatron.data.tokenizers.huggingface import END_OF_DOCUMENT, make_tokenizer_files
from megatron.data.tokenizers.tokenizer import TokenizerOptions, build_tokenizer
from tests.unit.data.made_tokenizers import bpe, write_files
from tests.unit.data.pairs import write
from tools import inspect_dataset, preprocess_data

NAMES = ("<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>", "<file_sep>")


@cache
def tokenizer_files() -> dict[str, bytes]:
    files = dict(make_tokenizer_files(bpe()))
    content = json.loads(files["tokenizer.json"])
    first = max(token["id"] for token in content["added_tokens"])
    first = max(first, *content["model"]["vocab"].values()) + 1
    shared = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    content["added_tokens"] += [{"id": first + i, "content": name, **shared} for i, name in enumerate(NAMES)]
    return files | {"tokenizer.json": json.dumps(content).encode()}


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = write_files(tmp_path_factory.mktemp("fim") / "bpe", tokenizer_files())
    return build_tokenizer(TokenizerOptions("HuggingFaceTokenizer", str(folder)))


def fill(tokenizer: Tokenizer, **options: object) -> FillInMiddle:
    rates = {"fim_rate": 1.0} | options
    return FillInMiddle.of(DataConfig(fim_data=True, **rates), tokenizer)  # type: ignore[arg-type]


def restored(tokenizer: Tokenizer, ids: Sequence[int]) -> tuple[str, str]:
    """The form of a changed document, and its text; by the tokens alone. Without a prefix, both forms are SPM."""
    prefix, middle, suffix = (tokenizer.special_ids[name] for name in NAMES[:3])
    ids = list(ids)
    if ids[:1] != [prefix]:
        assert not {prefix, middle, suffix} & {*ids}
        return "none", tokenizer.decode(ids)
    at, end = ids.index(suffix), ids.index(middle)
    assert [ids.count(token) for token in (prefix, middle, suffix)] == [1, 1, 1]
    assert at < end
    parts = ids[1:at], ids[end + 1 :], ids[at + 1 : end]
    return "SPM" if at == 1 else "PSM", tokenizer.decode([id for part in parts for id in part])


texts = st.text(st.sampled_from("abcé 京\n.,fo\U0001f600"), min_size=1, max_size=40)


@settings(max_examples=100, deadline=None)
@given(
    text=texts, key=st.integers(0, 2**64 - 1), spm_rate=st.sampled_from([0.0, 1.0]), spare=st.sampled_from([None, 3])
)
@example("a", 0, 1.0, None)
def test_a_changed_text_can_be_changed_back(
    tokenizer: Tokenizer, text: str, key: int, spm_rate: float, spare: int | None
) -> None:
    ids = tokenizer.encode(text).astype(np.int64)
    changed = fill(tokenizer, fim_spm_rate=spm_rate).change(ids, key, spare)
    form, found = restored(tokenizer, changed.tolist())
    assert found == text
    assert form == "SPM" or not spm_rate
    assert spare is None or len(changed) <= len(ids) + spare


def test_texts_are_cut_at_any_character(tokenizer: Tokenizer) -> None:
    """Also inside of words that are one token, and at both ends; every pair of places is about as likely."""
    text, fim = "area", fill(tokenizer, fim_spm_rate=0.0)
    ids = tokenizer.encode(text).astype(np.int64)
    middle, suffix = (tokenizer.special_ids[name] for name in NAMES[1:3])
    counts: dict[tuple[int, int], int] = {}
    for key in range(4000):
        changed = fim.change(ids, key << 20, None).tolist()
        at, end = changed.index(suffix), changed.index(middle)
        first = len(tokenizer.decode(changed[1:at]))
        place = first, first + len(tokenizer.decode(changed[end + 1 :]))
        counts[place] = counts.get(place, 0) + 1
    assert {*counts} == {(a, b) for a in range(5) for b in range(a, 5)}
    for (a, b), count in counts.items():
        expected = 4000 * (1 if a == b else 2) / 25
        assert abs(count - expected) < 5 * expected**0.5, (a, b)


def test_the_rates_are_those_of_the_options(tokenizer: Tokenizer) -> None:
    fim = fill(tokenizer, fim_rate=0.3, fim_spm_rate=0.2)
    ids = tokenizer.encode("The cat sat on the mat").astype(np.int64)
    forms = [restored(tokenizer, fim.change(ids, key * 1000, None).tolist())[0] for key in range(4000)]
    changed = [form for form in forms if form != "none"]
    assert abs(len(changed) / 4000 - 0.3) < 5 * (0.3 * 0.7 / 4000) ** 0.5
    without_prefix = 1 - (22 / 23) ** 2  # of 22 characters
    expected = 0.2 + 0.8 * without_prefix
    assert abs(changed.count("SPM") / len(changed) - expected) < 5 * (0.2 * 0.8 / len(changed)) ** 0.5


def test_ids_that_are_no_text_are_cut_between_tokens(tokenizer: Tokenizer) -> None:
    """A character that is cut, and special tokens in a document, keep their ids."""
    smile = tokenizer.encode("\U0001f600").astype(np.int64)
    assert len(smile) > 1
    special = np.array([tokenizer.special_ids["<file_sep>"]])
    letters = tokenizer.encode("mat bat").astype(np.int64)
    for ids in (np.append(smile[1:], letters), np.concatenate([letters, special, letters])):
        for key in range(200):
            changed = fill(tokenizer).change(ids, key << 30, None)
            rest = changed[~np.isin(changed, [tokenizer.special_ids[name] for name in NAMES[:3]])]
            assert sorted(rest) == sorted(ids)
            assert len(changed) == len(ids) + 3


def test_documents_fragments_and_excluded_texts(tokenizer: Tokenizer) -> None:
    eod, separator = tokenizer.eod, tokenizer.special_ids["<file_sep>"]
    parts = [tokenizer.encode(text).tolist() for text in ("def a", "the mat", "", "walk on")]
    ids = np.array([*parts[0], separator, *parts[1], eod, eod, *parts[3], separator, eod], dtype=np.int64)
    fim = fill(tokenizer, fim_split_sample="<file_sep>", fim_fragment_rate=1.0, fim_no_prefix="the")
    changed = fim.change(ids, 12345, None).tolist()
    cuts = [-1, *(i for i, each in enumerate(changed) if each in (eod, separator)), len(changed)]
    assert [changed[cut] for cut in cuts[1:-1]] == [separator, eod, eod, separator, eod], "every end is kept"
    found = [restored(tokenizer, changed[a + 1 : b]) for a, b in pairwise(cuts)]
    assert [text for _, text in found] == ["def a", "the mat", "", "walk on", "", ""]
    assert [form != "none" for form, _ in found] == [True, False, False, True, False, False]
    kept = fill(tokenizer, fim_split_sample="<file_sep>", fim_fragment_rate=0.0)
    assert kept.change(ids, 12345, None).tolist() == ids.tolist()
    few = fill(tokenizer, fim_rate=0.5, fim_split_sample="<file_sep>", fim_fragment_rate=1.0)
    first = ids[: ids.tolist().index(eod)]
    counts = [few.change(first, key << 32, None).tolist().count(fim.prefix) for key in range(400)]
    assert {*counts} == {0, 2}, "a document is changed in all of its fragments, or in none"
    assert 0.35 < counts.count(2) / 400 < 0.65


# --- datasets ---


def corpus(folder: Path, tokenizer: Tokenizer, salt: str = "") -> tuple[SourceSlice, list[str]]:
    words = ["the cat", "walk", "mat, bat", "form é", "width\n", "of 12", "hello", "京"]
    random = np.random.RandomState(3)
    documents = [salt + " ".join(random.choice(words, random.randint(1, 9))) for _ in range(60)]
    prefix = write(folder / f"data{salt}", [[*tokenizer.encode(text).tolist(), tokenizer.eod] for text in documents])
    indexed = IndexedDataset(prefix)
    return (indexed, range(len(indexed))), documents


def built(
    parts: list[SourceSlice],
    fim: FillInMiddle | None,
    size: int,
    packing: str = "concat",
    seed: int = 1,
    weights: list[float] | None = None,
    seq_length: int = 48,
) -> Dataset:
    return FileSegmentBuilder(parts, weights, seq_length, seed, None, packing, fim)(size)


def ids_of(sample: Sample) -> list[int]:
    return [*sample.tokens.tolist(), int(sample.labels[-1])]


def documents_in(ids: Sequence[int], eod: int) -> list[list[int]]:
    cuts = [-1, *np.flatnonzero(np.array(ids) == eod).tolist(), len(ids)]
    return [list(ids[a + 1 : b]) for a, b in pairwise(cuts)]


def test_samples_of_concatenated_documents(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Each part of a document in a sample is changed by itself; the sample keeps its length, cut at its end."""
    part, _ = corpus(tmp_path, tokenizer)
    plain, changed = built([part], None, 30), built([part], fill(tokenizer), 30)
    for i in range(30):
        old, new = ids_of(plain[i]), ids_of(changed[i])
        assert len(old) == len(new) == 49
        assert plain.spans(i) == changed.spans(i)
        before, after = documents_in(old, tokenizer.eod), documents_in(new, tokenizer.eod)
        whole = [restored(tokenizer, ids)[1] for ids in after[:-1]]
        assert whole == [tokenizer.decode(ids) for ids in before[: len(whole)]]
        assert sum(map(len, before[: len(whole)])) < sum(map(len, after[: len(whole)]))
        mask = changed[i].loss_mask
        assert mask is not None
        assert mask.all()
    assert np.array_equal(plain.sample_hashes(np.arange(30)), changed.sample_hashes(np.arange(30)))
    assert plain.fingerprint != changed.fingerprint


def test_samples_that_become_shorter_are_padded(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """A text that was not encoded as the tokenizer does it takes fewer ids when it is encoded again."""
    letters = [tokenizer.encode(letter).tolist()[0] for letter in "The cat sat on the mat, and the hat sat on the cat;"]
    indexed = IndexedDataset(write(tmp_path / "letters", [letters]))
    pad = tokenizer.special_ids["<fim_pad>"]
    dataset = built([(indexed, range(1))], fill(tokenizer, fim_pad_token="<fim_pad>"), 1)
    ids, mask = ids_of(dataset[0]), dataset[0].loss_mask
    text = [each for each in ids if each != pad]
    assert len(text) < len(ids) == 49
    assert ids[len(text) :] == [pad] * (49 - len(text))
    assert mask is not None
    assert mask.tolist() == [1.0] * (len(text) - 1) + [0.0] * (49 - len(text))
    assert restored(tokenizer, text)[1] == tokenizer.decode(letters[:49])


def test_packed_documents_stay_whole(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Every document once an epoch, changed or not, and none cut."""
    part, documents = corpus(tmp_path, tokenizer)
    for rate in (0.0, 0.5, 1.0):
        dataset = built([part], fill(tokenizer, fim_rate=rate), 1, "best-fit", seq_length=128)
        found, forms = [], []
        for i in range(len(dataset)):
            sample = dataset[i]
            assert sample.documents is not None
            assert sample.loss_mask is not None
            ids, ends = np.array(ids_of(sample)), np.flatnonzero(np.diff(sample.documents)) + 1
            for piece, counts in zip(np.split(ids[:-1], ends), np.split(sample.loss_mask, ends)):
                if not counts.any():
                    continue
                piece = np.append(piece, sample.labels[-1]) if counts.all() else piece
                assert piece[-1] == tokenizer.eod
                form, text = restored(tokenizer, piece[:-1].tolist())
                forms.append(form)
                found.append(text)
        assert sorted(found) == sorted(documents)
        assert abs(forms.count("none") / len(forms) - 1 + rate) < 0.3
        assert (rate > 0) == ("SPM" in forms) == ("PSM" in forms)


def first_parts(dataset: Dataset, size: int, eod: int) -> dict[tuple[str, int], list[int]]:
    """The first document of each sample, by file and sequence, where it begins with the sequence and ends in it."""
    found = {}
    for i in range(size):
        span, ids = dataset.spans(i)[0], ids_of(dataset[i])
        if span.offset == 0 and eod in ids:
            found[span.source, span.sequence] = ids[: ids.index(eod)]
    return found


def test_changes_depend_on_seed_epoch_and_document(tmp_path: Path, tokenizer: Tokenizer) -> None:
    parts = [corpus(tmp_path, tokenizer, salt)[0] for salt in ("", "b")]
    fim = fill(tokenizer, fim_rate=0.7)
    alone, other = (built([parts[0]], fim, 1, "best-fit", seed) for seed in (1, 2))
    blend = built(parts, fim, 2 * len(alone), "best-fit", weights=[1, 2])
    again = built([parts[0]], fim, 90, "best-fit")
    eod, source = tokenizer.eod, parts[0][0].prefix
    of_alone, of_blend = first_parts(alone, len(alone), eod), first_parts(blend, 2 * len(alone), eod)
    shared = [key for key in of_alone if key in of_blend]
    assert len(shared) > 3
    assert [of_alone[key] for key in shared] == [of_blend[key] for key in shared]
    assert {source} == {name for name, _ in shared}
    one_epoch = len(alone)
    assert [ids_of(alone[i]) for i in range(one_epoch)] == [ids_of(again[i]) for i in range(one_epoch)]
    assert [ids_of(alone[i]) for i in (5, 5)] == [ids_of(alone[5])] * 2, "in any order of reading"
    of_other = first_parts(other, len(other), eod)
    common = [key for key in of_alone if key in of_other]
    assert sum(of_alone[key] == of_other[key] for key in common) < 0.6 * len(common)
    assert isinstance(again, FimDataset)
    later: NDArray[np.int64] = np.array([again.epoch_of(i) for i in range(len(again))])
    assert later.tolist() == sorted(later.tolist())
    assert later[0] == 0 < later[-1]


def test_changes_do_not_depend_on_the_order(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """The same part of a document in another sample is changed as it is in the first."""
    part, fim = corpus(tmp_path, tokenizer)[0], fill(tokenizer, fim_rate=0.7)
    found: list[dict[tuple[int, int], list[int]]] = []
    for size in (20, 300):
        dataset, parts = built([part], fim, size), {}
        assert isinstance(dataset, FimDataset)
        for i in (i for i in range(len(dataset)) if dataset.epoch_of(i) == 0):
            documents = documents_in(ids_of(dataset[i]), tokenizer.eod)
            parts |= {(span.sequence, span.offset): ids for span, ids in zip(dataset.spans(i), documents[:-1])}
        found.append(parts)
    shared = {*found[0]} & {*found[1]}
    assert len(shared) > 5
    assert [found[0][key] for key in shared] == [found[1][key] for key in shared]


def test_tokens_that_the_tokenizer_lacks(tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError) as error:
        fill(tokenizer, fim_suffix_token="<|fim_suffix|>")
    assert str(error.value).splitlines() == [
        "--fim-suffix-token <|fim_suffix|> is no token of the data's tokenizer",
        "  fix: --fim-suffix-token '<fim_suffix>'",
    ]
    with pytest.raises(DataError, match="drop --fim-data"):
        fill(build_tokenizer(TokenizerOptions("ByteTokenizer")))
    with pytest.raises(DataError, match="have no tokenizer record"):
        FillInMiddle.of(DataConfig(fim_data=True), None)
    numbers = build_tokenizer(TokenizerOptions("NullTokenizer", vocab_size=10))
    options = {"fim_prefix_token": "5", "fim_middle_token": "6", "fim_suffix_token": "7"}
    found = fill(numbers, **options)
    assert (found.prefix, found.middle, found.suffix, found.pad, found.eod) == (5, 6, 7, 9, 9)
    assert tokenizer.special_ids[END_OF_DOCUMENT] == tokenizer.eod


def test_the_samples_of_a_step_are_shown_as_they_are_read(
    tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Changed; their documents are shown as they are in the token files."""
    folder = write_files(tmp_path / "bpe", tokenizer_files())
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "{"abc. fo, " * n}"}}\n' for n in range(2, 9)))
    flags = f"--input {tmp_path}/a.jsonl --output-prefix {tmp_path}/a --append-eod"
    kind = f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {folder}"
    assert preprocess_data.main(f"{flags} {kind}".split()) == 0
    capsys.readouterr()
    run = f"--preset tiny-llama --data-path {tmp_path}/a_text_document --seq-length 64 --train-iters 2 --eval-iters 0"
    run += " --global-batch-size 2 --packing best-fit --fim-data --fim-rate 1"
    show = ["--step", "1", "--samples", "0", "--tokens", "64"]
    assert inspect_dataset.main(["--json", *show, "--", *run.split()]) == 0
    facts = json.loads(capsys.readouterr().out)
    whole = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert facts["text"] == whole.decode(facts["ids"], skip_special_tokens=False)
    assert facts["text"].count("<fim_middle>") == len(facts["documents"])
    assert not any("<fim_middle>" in part["text"] for part in facts["documents"])
    assert inspect_dataset.main([*show, "--", *run.split()]) == 0
    printed = capsys.readouterr().out
    assert printed.count(f"{tmp_path}/a.jsonl:") == printed.count(", before --fim-data\n") == len(facts["documents"])
    assert f"  read by the model, with --fim-data:\n    {json.dumps(facts['text'])}\n" in printed
