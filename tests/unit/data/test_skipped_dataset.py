"""Skipped samples against lists made place by place: over all datasets, from any position, and in the digest."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.config.data import DataConfig
from megatron.config.data_paths import data_sources
from megatron.config.errors import UserError
from megatron.config.model import ModelConfig
from megatron.config.run import RunConfig
from megatron.config.training import TrainingConfig
from megatron.data.dataset import Dataset
from megatron.data.errors import DataError
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.loader import DataSource, build_data
from megatron.data.preview import preview_data
from megatron.data.skipped_dataset import SKIPPED, PlaceRanges, SampleSkips
from tests.unit.data import pairs

TRAINING = TrainingConfig(seq_length=16, micro_batch_size=1, global_batch_size=4, train_iters=10, seed=5)
SAMPLES = 40

MIXTURE = """
sources: {{web: {{path: {web}}}, books: {{path: {books}}}}}
stages:
  - {{name: main, share: 60%, mix: {{web: {{share: 50%}}, books: {{share: 50%}}}}}}
  - {{name: end, mix: {{web: {{share: 80%}}, books: {{share: 20%}}}}}}
"""

KINDS = ["one", "several epochs", "blend", "by size", "packed", "mixture"]

RANGES = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=8)


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the prefixes of two datasets; the second has documents of several sequences, and empty ones."""
    folder, random = tmp_path_factory.mktemp("corpora"), np.random.default_rng(1)
    texts = [random.integers(0, 100, length) for length in random.integers(1, 50, 60)]
    first = pairs.write(folder / "web", texts)
    documents = [
        [(random.integers(0, 100, n) + 100).tolist() for n in random.integers(0, 30, k)] for k in [2, 0, 3] * 9
    ]
    documents[3][0], documents[6] = [], [[]]
    content, index = pairs.packed(documents, 8)
    (folder / "books.bin").write_bytes(content)
    (folder / "books.idx").write_bytes(index)
    (folder / "mixture.yaml").write_text(MIXTURE.format(web=first, books=folder / "books"))
    return [str(first), str(folder / "books")]


def sources(prefixes: Sequence[str]) -> dict[str, DataConfig]:
    web, books = prefixes
    return {
        "one": DataConfig(train_data_path=(web,)),
        "several epochs": DataConfig(train_data_path=(books,)),
        "blend": DataConfig(data_path=("0.7", web, "0.3", books), split="1"),
        "by size": DataConfig(data_path=(web, books), split="1"),
        "generated": DataConfig(mock_data=True),
        "packed": DataConfig(data_path=("0.7", web, "0.3", books), split="1", packing="best-fit"),
        "mixture": DataConfig(data_mixture=str(Path(web).with_name("mixture.yaml"))),
    }


def build(data: DataConfig, position: int = 0, segments: dict[str, list[int]] | None = None) -> DataSource:
    begin = position // 4, position
    return build_data(data, TRAINING, 500, 1, segments=segments, begin=begin)


def texts(dataset: Dataset, numbers: Sequence[int]) -> list[list[int]]:
    return [[*dataset[i].tokens.tolist(), int(dataset[i].labels[-1])] for i in numbers]


def unskipped(data: DataConfig, source: DataSource) -> Dataset:
    """The stream of ``data`` without skips, as far as ``source`` goes."""
    plain = replace(data, skip_samples=(), skip_tokens=(), skip_documents=())
    return build_data(plain, TRAINING, 500, 1, segments=source.segments).datasets["train"]


# ---- Sets of places


@given(RANGES, RANGES, st.integers(0, 30), st.integers(0, 30))
@settings(max_examples=60, deadline=None)
def test_sets_of_places(a: list[tuple[int, int]], b: list[tuple[int, int]], begin: int, size: int) -> None:
    first, second = ({place for x, y in ranges for place in range(x, y)} for ranges in (a, b))
    one, two = PlaceRanges(a), PlaceRanges(b)

    def members(ranges: PlaceRanges) -> set[int]:
        return {place for x, y in ranges for place in range(x, y)}

    assert members(one | two) == first | second
    assert members(one.minus(two)) == first - second
    assert members(one.clip(begin, begin + size)) == first & {*range(begin, begin + size)}
    assert one.count(begin, begin + size) == len(first & {*range(begin, begin + size)})
    assert PlaceRanges.from_list(one.to_list()).to_list() == one.to_list()
    assert PlaceRanges.of_places(np.array(sorted(first), dtype=np.int64)).to_list() == one.to_list()
    left = [place for place in range(200) if place not in first]
    assert one.places(np.arange(80)).tolist() == left[:80]
    assert [one.end(n) for n in range(80)] == [0, *(place + 1 for place in left[:79])]


# ---- Places and documents, over all datasets


@pytest.mark.parametrize("kind", [*KINDS, "generated"])
def test_the_stream_closes_up_over_skipped_places(prefixes: list[str], kind: str) -> None:
    data = replace(sources(prefixes)[kind], skip_samples=("3:9", "0:1", "8:12"), skip_tokens=("320:0.35K", "1.2K:10K"))
    source = build(data)
    skipped = {0, *range(3, 12), *range(20, 22), *range(75, 625)}  # tokens 320 to 349 and 1,200 to 9,999 by 16
    train = source.datasets["train"]
    whole = unskipped(data, source)
    left = [place for place in range(len(whole)) if place not in skipped]
    assert len(train) == len(left) >= SAMPLES
    assert texts(train, range(SAMPLES)) == texts(whole, left[:SAMPLES])
    assert [train.spans(i) for i in range(SAMPLES)] == [whole.spans(place) for place in left[:SAMPLES]]
    hashes = whole.sample_hashes(np.array(left[:SAMPLES]))
    assert train.sample_hashes(np.arange(SAMPLES)).tolist() == hashes.tolist()
    plain = build(sources(prefixes)[kind])
    assert texts(train, [0, 1]) == texts(plain.datasets["train"], [1, 2])  # skipping does not change the order
    assert source.digest("train", 0, SAMPLES) != plain.digest("train", 0, SAMPLES)


@pytest.mark.parametrize("kind", KINDS)
def test_samples_that_hold_a_document_are_skipped(prefixes: list[str], kind: str) -> None:
    web, books = prefixes
    words, numbers = [f"{web}:7-8", f"{books}:3", f"{books}:1"], [7, 8]  # document 1 of books is empty
    bounds = IndexedDataset(books).documents
    sequences = {web: np.array(numbers), books: np.arange(bounds[3], bounds[4])}
    held = data_sources(sources(prefixes)[kind])["train"].blend.prefixes
    words = [word for word in words if word.rpartition(":")[0] in held]
    source = build(replace(sources(prefixes)[kind], skip_documents=tuple(words)))
    train, whole = source.datasets["train"], unskipped(sources(prefixes)[kind], source)
    wanted = {(prefix, number) for prefix in held for number in sequences[prefix].tolist()}
    left = [
        place
        for place in range(len(whole))
        if not any((span.source, span.sequence) in wanted and span.tokens for span in whole.spans(place))
    ]
    assert len(whole) > len(left) == len(train) >= SAMPLES
    assert texts(train, range(SAMPLES)) == texts(whole, left[:SAMPLES])


@pytest.mark.parametrize("kind", KINDS)
def test_the_search_for_a_document_finds_what_all_samples_tell(prefixes: list[str], kind: str) -> None:
    longer = replace(TRAINING, train_iters=40)  # more than an epoch of books
    whole = build_data(sources(prefixes)[kind], longer, 500, 1).datasets["train"]
    samples = [{(s.source, s.sequence) for s in whole.spans(i) if s.tokens} for i in range(len(whole))]
    for prefix in prefixes:
        bounds = IndexedDataset(prefix).documents.tolist()
        for begin, end in pairwise(bounds):
            held = {(prefix, sequence) for sequence in range(begin, end)}
            found = [i for i, parts in enumerate(samples) if held & parts]
            assert whole.places_of({prefix: np.arange(begin, end)}).tolist() == found
    everything = {prefix: np.arange(5, 9) for prefix in prefixes}
    if kind not in ("packed", "mixture"):  # those find whole documents
        assert Dataset.places_of(whole, everything).tolist() == whole.places_of(everything).tolist()


# ---- Resuming


@pytest.mark.parametrize("kind", ["several epochs", "blend", "packed", "mixture", "generated"])
def test_a_run_resumes_from_any_position(prefixes: list[str], kind: str) -> None:
    documents = () if kind == "generated" else (f"{prefixes[1]}:3",)
    data = replace(sources(prefixes)[kind], skip_samples=("3:9", "20:22", "50:53"), skip_documents=documents)
    source = build(data)
    wanted = texts(source.datasets["train"], range(SAMPLES))
    for position in range(0, SAMPLES, 4):
        resumed = build(data, position, source.laid_out(position))
        assert texts(resumed.datasets["train"], range(SAMPLES)) == wanted
        assert resumed.digest("train", 0, position) == source.digest("train", 0, position)
        assert resumed.laid_out(SAMPLES) == source.laid_out(SAMPLES)


def test_more_is_skipped_from_a_position_on(prefixes: list[str]) -> None:
    web, _ = prefixes
    before = replace(sources(prefixes)["blend"], skip_samples=("2:5", "30:33"))
    source = build(before)
    state = source.laid_out(12)
    assert state[SKIPPED] == [2, 5]
    # the first 12 samples were at places below 15; document 7 of web is among them, and stays
    data = replace(before, skip_samples=("2:5", "18:20"), skip_documents=(f"{web}:7",))
    resumed = build(data, 12, state)
    whole = unskipped(data, resumed)
    held = set(whole.places_of({web: np.array([7])}).tolist())
    assert min(held) < 15
    skipped = {2, 3, 4, 18, 19} | {place for place in held if place >= 15}
    left = [place for place in range(len(whole)) if place not in skipped]
    assert texts(resumed.datasets["train"], range(SAMPLES)) == texts(whole, left[:SAMPLES])
    assert resumed.digest("train", 0, 12) == source.digest("train", 0, 12)
    # what was skipped stays skipped without the option, and the places ahead come back
    again = build(sources(prefixes)["blend"], 12, state)
    left = [place for place in range(60) if place not in {2, 3, 4}]
    assert texts(again.datasets["train"], range(SAMPLES)) == texts(whole, left[:SAMPLES])


def test_what_was_consumed_cannot_be_skipped(prefixes: list[str]) -> None:
    data = replace(sources(prefixes)["one"], skip_samples=("2:5",))
    state = build(data).laid_out(12)
    with pytest.raises(UserError) as refused:
        build(replace(data, skip_samples=("1:6", "10:20")), 12, state)
    (problem,) = refused.value.problems
    assert problem.code == "E542"
    assert "1:2, 5:6, 10:15" in problem.sentence
    assert problem.fixes[0] == "--skip-samples 15:20"
    build(replace(data, skip_samples=("2:5", "15:20")), 12, state)


def test_another_list_of_what_was_skipped_shows_in_the_digest(prefixes: list[str]) -> None:
    data = replace(sources(prefixes)["one"], skip_samples=("2:5",))
    source = build(data)
    state = source.laid_out(12)
    changed = build(replace(data, skip_samples=()), 12, {**state, SKIPPED: [3, 6]})
    assert changed.digest("train", 0, 12) != source.digest("train", 0, 12)
    assert changed.fingerprints == source.fingerprints


def test_a_long_range_takes_one_more_segment() -> None:
    source = build(DataConfig(mock_data=True, skip_samples=("10:100000",)))
    assert source.segments["train"] == (40, 99990)


# ---- Refusals


def test_documents_that_are_not_there(prefixes: list[str]) -> None:
    data = sources(prefixes)["one"]
    for words, said in {
        f"{prefixes[0]}:60": "has documents 0 to 59, no 60",
        f"{prefixes[1]}:0": "is not a source of the training data",
    }.items():
        with pytest.raises(UserError, match="E543") as refused:
            build(replace(data, skip_documents=(words,)))
        assert said in str(refused.value)
    with pytest.raises(DataError, match="leaves no sample"):
        build(replace(data, skip_documents=(f"{prefixes[0]}:0-59",)))


def test_lists_in_files(prefixes: list[str], tmp_path: Path) -> None:
    file = tmp_path / "skip.txt"
    file.write_text("# found at step 7\n3:9  # loss 11.2\n\n20:22\n")
    data = replace(sources(prefixes)["one"], skip_samples=(f"@{file}", "30:31"))
    assert SampleSkips(data, 16).ranges.to_list() == [3, 9, 20, 22, 30, 31]
    file.write_text("3:9\n9:3\n")
    with pytest.raises(UserError, match=r"E541.*line 2: '9:3' is not A:B"):
        SampleSkips(data, 16)
    with pytest.raises(UserError, match=r"E541.*No such file"):
        SampleSkips(replace(data, skip_samples=("@absent.txt",)), 16)


def test_notes(prefixes: list[str]) -> None:
    data = replace(sources(prefixes)["one"], skip_samples=("2:5", "100:200"), skip_documents=(f"{prefixes[0]}:0-9",))
    first, beyond, many = build(data).notes[-3:]
    assert first.startswith("skips ")
    assert beyond == "what is skipped from sample 100 on has no effect: this run ends before it"
    assert "preprocess the data again without these documents" in many


def test_the_check_of_a_configuration_counts_skipped_samples_and_finds_that_none_is_left(prefixes: list[str]) -> None:
    web, length = prefixes[0], IndexedDataset(prefixes[0]).num_tokens
    data = replace(sources(prefixes)["one"], skip_samples=("2:10002",))
    config = RunConfig(training=TRAINING, data=data, model=ModelConfig(vocab_size=500))
    rows = preview_data(config, 1)
    assert f"{10_040 * 16 / length:,.1f} epochs" in rows[0]
    assert rows[-2].endswith("more samples are skipped than read, 40: the epochs of the data count both")
    assert f"training reads {web} {10_040 * 16 / length:,.1f} times" in rows[-1]
    half = DataConfig(data_path=(web,), split="1,1", skip_documents=(f"{web}:0-28",))
    for data, left in ((half, True), (replace(half, skip_documents=(f"{web}:0-29",)), False)):
        with nullcontext() if left else pytest.raises(DataError, match="leaves no sample"):
            preview_data(replace(config, data=data), 1)
