"""Every split of every way to name datasets, read through the loader, and the data that a longer run appends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.config.data import DataConfig
from megatron.config.training import TrainingConfig
from megatron.data.blended_dataset import ConcatDataset, build_blend_index
from megatron.data.build import build_split
from megatron.data.dataset import Dataset, MockDataset
from megatron.data.errors import DataError
from megatron.data.gpt_dataset import GPTDataset, build_sample_order, split_ranges
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.loader import DataSource, build_data, find_source
from tests.unit.data import pairs

TRAINING = TrainingConfig(
    seq_length=16, micro_batch_size=2, global_batch_size=8, train_iters=10, eval_interval=5, eval_iters=1, seed=5
)
SEQ = TRAINING.seq_length
SIZES = {"wiki": 60, "code": 45, "tiny": 5}


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return prefixes of datasets with distinct ids: 100.., 200.., 300.."""
    folder, random, prefixes = tmp_path_factory.mktemp("corpora"), np.random.default_rng(1), {}
    for number, (name, documents) in enumerate(SIZES.items(), start=1):
        lengths = random.integers(1, 50, documents)
        texts = (random.integers(0, 100, length) + 100 * number for length in lengths)
        prefixes[name] = str(pairs.write(folder / name, texts))
    return prefixes


def build(data: DataConfig, segments: dict[str, tuple[int, ...]] | None = None, **changes: object) -> DataSource:
    return build_data(data, replace(TRAINING, **changes), 500, 1, segments=segments)


def texts(dataset: Dataset, count: int) -> list[list[int]]:
    return [dataset[i].tokens.tolist() for i in range(count)]


def read(source: DataSource, split: str, count: int) -> list[list[int]]:
    """The first samples of a split, as the model gets them."""
    return source.micro_batch(split, range(count), step=0).tokens.tolist()


def plain(prefix: str, samples: int | None, number: int = 0, split: str = "1", part: int = 0) -> GPTDataset:
    """The samples of one dataset, made without the loader."""
    indexed = IndexedDataset(prefix)
    sequences = split_ranges(split, len(indexed))[part]
    return GPTDataset(indexed, build_sample_order(indexed.lengths, sequences, samples, SEQ, TRAINING.seed + number))


def blended(prefixes: list[str], weights: list[float], samples: int, split: str, part: int) -> list[list[int]]:
    """The blend of the rule, sample by sample."""
    shares = np.array(weights) / np.sum(weights)
    targets = [ceil(samples * share) for share in shares.tolist()]
    sources = [plain(p, ceil(n * 1.005), 0, split, part) for p, n in zip(prefixes, targets)]
    which, sample = build_blend_index(shares, sum(targets))
    return [sources[k][j].tokens.tolist() for k, j in zip(which.tolist(), sample.tolist())]


# --- where each split comes from ---


def test_a_blend_is_cut_source_by_source(corpora: dict[str, str]) -> None:
    prefixes, weights = [corpora["wiki"], corpora["code"]], [0.7, 0.3]
    source = build(DataConfig(data_path=("0.7", prefixes[0], "0.3", prefixes[1]), split="8,1,1"))
    assert list(source.used.items()) == [("train", 80), ("valid", 8), ("test", 8)]
    for part, (split, requested) in enumerate({"train": 80, "valid": 24, "test": 8}.items()):
        wanted = blended(prefixes, weights, requested, "8,1,1", part)
        assert texts(source.datasets[split], len(wanted)) == wanted
        assert len(source.datasets[split]) == len(wanted)
    train = [text[0] // 100 for text in read(source, "train", 80)]
    assert (train.count(1), train.count(2)) == (56, 24)


def test_without_weights_every_source_is_read_once_per_epoch(corpora: dict[str, str]) -> None:
    source = build(DataConfig(train_data_path=tuple(corpora.values())), train_iters=30, eval_iters=0)
    epoch = [text for prefix in corpora.values() for text in texts(plain(prefix, None), len(plain(prefix, None)))]
    assert source.segments == {"train": (240, 240 - len(epoch))}
    assert sorted(read(source, "train", len(epoch))) == sorted(epoch)
    assert source.notes == (), "a fresh run has used up no data"


def test_paths_of_their_own_are_read_whole(corpora: dict[str, str]) -> None:
    wiki, code, tiny = corpora.values()
    data = DataConfig(train_data_path=("3", wiki, "1", code), valid_data_path=("0.5", tiny), test_data_path=(code,))
    source = build(data)
    assert read(source, "train", 80) == blended([wiki, code], [3, 1], 80, "1", 0)[:80]
    assert read(source, "valid", 8) == texts(plain(tiny, 24), 8), "a single prefix is no blend, whatever its weight"
    assert read(source, "test", 8) == texts(plain(code, 8), 8)


def test_the_source_of_an_id_beyond_the_vocabulary_is_named(corpora: dict[str, str]) -> None:
    wiki, code, _ = corpora.values()
    source = build_data(DataConfig(data_path=("1", wiki, "9", code), split="8,1,1"), TRAINING, 200, 1)
    wrong = next(i for i in range(80) if source.datasets["train"][i].tokens[0] >= 200)
    with pytest.raises(DataError, match=rf"sample {wrong} holds id 2\d\d, but the vocabulary .*; it is from {code}\n"):
        source.micro_batch("train", range(wrong, wrong + 1), step=0)
    right = next(i for i in range(80) if source.datasets["train"][i].tokens[0] < 200)
    assert (find_source(source.datasets["train"], right), find_source(MockDataset(9, 4, 5, 0), 0)) == (wiki, None)


@pytest.mark.parametrize("names", [(), ("a", "b")])
def test_several_validation_sets_each_get_all_samples(corpora: dict[str, str], names: tuple[str, ...]) -> None:
    wiki, code, tiny = corpora.values()
    several = {"multiple_validation_sets": True, "validation_set_names": names}
    cut = build(DataConfig(data_path=("0.7", wiki, "0.3", code), split="8,2", **several))
    whole = build(DataConfig(train_data_path=(tiny,), valid_data_path=(wiki, code), **several))
    first, second = (f"valid:{name}" for name in names or ("wiki", "code"))
    for source in (cut, whole):
        assert [*source.used.items()][1:] == [(first, 8), (second, 8)]
        assert source.segments[first] == source.segments[second] == (24,)
    assert read(cut, second, 8) == texts(plain(code, 24, 0, "8,2", 1), 8)
    assert read(whole, second, 8) == texts(plain(code, 24), 8)
    with pytest.raises(
        DataError, match=rf"there are no validation samples in this run: it has .* and validation \({second[6:]}\)"
    ):
        cut.rank_places("valid", 0, 8, 0, 1)


def test_files_are_opened_once(corpora: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    def opening(prefix: str, **options: Any) -> IndexedDataset:
        opened.append(prefix)
        return IndexedDataset(prefix, **options)

    monkeypatch.setattr("megatron.data.build.IndexedDataset", opening)
    wiki, code, _ = corpora.values()
    build(DataConfig(data_path=("1", wiki, "1", code, "2", wiki), split="8,1,1"))
    assert sorted(opened) == sorted([wiki, code])


def test_the_summary_has_a_line_per_source(corpora: dict[str, str]) -> None:
    wiki, code, _ = corpora.values()
    source = build(DataConfig(data_path=("3", wiki, "7", code), split="8,1,1", eod_id=3, eod_mask_loss=True))
    once = [plain(prefix, None, 0, "8,1,1").tokens for prefix in (wiki, code)]
    assert source.summary()[:3] == [
        "train      80 samples of 2 sources",
        f"             {56 * SEQ:,} tokens = {56 * SEQ / once[1]:.2f} epochs of {once[1]:,} in {code}",
        f"             {24 * SEQ:,} tokens = {24 * SEQ / once[0]:.2f} epochs of {once[0]:,} in {wiki}",
    ]
    assert source.summary()[3].startswith("valid      8 samples of 2 sources")
    assert "documents  end with id 3: no loss on the first token of each" in source.summary()


def test_the_summary_of_many_sources_is_short(corpora: dict[str, str]) -> None:
    source = build(DataConfig(train_data_path=tuple(corpora.values()) * 5), eval_iters=0)
    lines = source.summary()
    assert lines[0] == "train      80 samples of 15 sources"
    assert len(lines) == 12
    tokens = [int(line.split()[0].replace(",", "")) for line in lines[1:]]
    assert sum(tokens) == 80 * SEQ
    assert lines[-1] == f"             {tokens[-1]:,} tokens of 5 others"


# --- splits that round to nothing ---


def test_the_source_without_a_part_is_named_and_the_fix_works(corpora: dict[str, str]) -> None:
    wiki, _, tiny = corpora.values()
    data = DataConfig(data_path=("1", wiki, "1", tiny), split="48,1,1")
    with pytest.raises(DataError) as printed:
        build(data)
    assert str(printed.value) == (
        f"the validation data of {tiny} have 0 tokens (0 of its 5 sequences with --split '48,1,1'), "
        "too few for one sample of 17 tokens, but 8 samples are needed\n  fix: --split 3,1,1"
    )
    assert list(build(replace(data, split="3,1,1")).used) == ["train", "valid", "test"]


def test_test_data_may_be_missing_with_the_default_split(corpora: dict[str, str]) -> None:
    """With the default split there is a note; an explicit split must give the data that it names."""
    wiki, code, tiny = corpora.values()
    data = DataConfig(data_path=("1", wiki, "1", code))
    source = build(data)
    assert list(source.used) == ["train", "valid"]
    seen = f"the test data of {wiki} have 0 tokens (0 of its 60 sequences with the default --split '969, 30, 1'), "
    seen += "too few for one sample of 17 tokens"
    assert f"{seen}; a new run has enough with --split 43,1,1" in source.notes
    assert list(build(replace(data, split="43,1,1")).used) == ["train", "valid", "test"]
    with pytest.raises(DataError, match=r"the test data of .* 60 sequences with --split '969, 30, 1'"):
        build(replace(data, split="969, 30, 1"))
    with pytest.raises(DataError, match=r"the validation data of .* 5 sequences with the default .*\n  fix"):
        build(DataConfig(data_path=(tiny,)))
    assert build(data, eval_iters=0).notes == (), "no evaluation needs any"


@pytest.fixture
def uneven(tmp_path: Path) -> list[str]:
    """Prefixes of which the default split leaves 12 sequences, one and 2 to validate on, of 10 tokens each."""
    prefixes = [str(tmp_path / name) for name in ("large", "short", "small")]
    for prefix, documents in zip(prefixes, (400, 40, 70)):
        pairs.write(Path(prefix), [[number] * 10 for number in range(documents)])
    return prefixes


def test_a_source_too_short_for_a_sample_is_named_and_the_fix_works(uneven: list[str]) -> None:
    data = DataConfig(data_path=tuple(uneven))
    with pytest.raises(DataError) as printed:
        build(data)
    sentence, split = str(printed.value).split("\n  fix: --split ")
    assert sentence == (
        f"the validation data of {uneven[1]} have 10 tokens (1 of its 40 sequences with the default "
        "--split '969, 30, 1'), too few for one sample of 17 tokens, but 8 samples are needed"
    )
    assert list(build(replace(data, split=split)).used) == ["train", "valid"]


def test_files_too_short_for_a_sample(uneven: list[str], tmp_path: Path) -> None:
    pairs.write(tmp_path / "tiny", [[1] * 10])
    with pytest.raises(DataError) as printed:
        build(DataConfig(train_data_path=(uneven[0], str(tmp_path / "tiny"))), eval_iters=0)
    sentence, fix = str(printed.value).split("\n  fix: ")
    assert sentence.startswith(f"the training data of {tmp_path}/tiny have 10 tokens (1 of its 1 sequences), too few")
    assert fix == f"leave out {tmp_path}/tiny"
    build(DataConfig(train_data_path=("1", uneven[0], "1", str(tmp_path / "tiny"))), eval_iters=0)


def test_datasets_too_small_for_any_split_are_refused(corpora: dict[str, str], tmp_path: Path) -> None:
    pairs.write(tmp_path / "none", [])
    with pytest.raises(DataError, match=f"validation data of {tmp_path}/none have 0 tokens .0 of its 0 sequences"):
        build(DataConfig(train_data_path=(corpora["wiki"],), valid_data_path=(str(tmp_path / "none"),)))
    with pytest.raises(DataError, match="there are no validation data\n  fix: --valid-data-path PREFIX"):
        build(DataConfig(train_data_path=(corpora["wiki"],)))


# --- a run that goes on ---


def test_the_fingerprint_depends_on_every_part_of_a_blend(corpora: dict[str, str]) -> None:
    wiki, code, tiny = corpora.values()
    blends = [
        ("7", wiki, "3", code),
        ("7", wiki, "4", code),
        ("3", code, "7", wiki),
        ("7", wiki, "3", tiny),
        (wiki, code),
    ]
    sources = [build(DataConfig(data_path=blend, split="3,1,1")) for blend in blends]
    assert len({source.fingerprints["train"] for source in sources}) == len(blends)
    assert len({source.digest("train", 0, 8) for source in sources}) == len(blends)
    scaled = build(DataConfig(data_path=("70", wiki, "30", code), split="3,1,1"))
    assert scaled.fingerprints == sources[0].fingerprints, "weights are shares"


def test_segments_lie_end_to_end() -> None:
    asked: list[tuple[int, list[int]]] = []

    def make(samples: int, before: Sequence[Dataset]) -> Dataset:
        asked.append((samples, [len(segment) for segment in before]))
        return MockDataset(9, 4, min(samples, 30), 0, 0, sum(map(len, before)))

    dataset, counts = build_split("train", make, (10, 100), 75)
    assert isinstance(dataset, ConcatDataset)
    assert counts == (10, 100, 35, 5)
    assert asked == [(10, []), (100, [10]), (35, [10, 30]), (5, [10, 30, 30])]
    assert texts(dataset, 75) == texts(MockDataset(9, 4, 75, 0), 75)
    with pytest.raises(DataError, match="the training data hold no sample"):
        build_split("train", lambda samples, before: MockDataset(9, 4, 0, 0), (10,), 10)
