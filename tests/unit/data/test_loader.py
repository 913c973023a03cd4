"""From configuration to micro-batches: the right samples, the same on any number of ranks, errors that help."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.config.data import DataConfig
from megatron.config.data_paths import DEFAULT_SPLIT
from megatron.config.training import TrainingConfig
from megatron.data.errors import DataError
from megatron.data.gpt_dataset import GPTDataset, build_sample_order
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.loader import DataSource, build_data, requested_samples
from megatron.data.tokenizers.tokenizer import TokenizerRecord
from megatron.distributed.micro_batch import MicroBatch
from tests.unit.data import pairs
from tests.unit.data.made_tokenizers import record

GOLDEN = Path(__file__).parents[2] / "golden" / "megatron" / "case0"
TRAINING = TrainingConfig(
    seq_length=32, micro_batch_size=2, global_batch_size=8, train_iters=50, eval_interval=20, eval_iters=3, seed=1234
)
FILES = DataConfig(data_path=(str(GOLDEN),), split="90,8,2")
BLEND = DataConfig(data_path=("0.7", str(GOLDEN), "0.3", str(GOLDEN.with_name("case1"))), split="8,1,1")
MOCK = DataConfig(mock_data=True)


def write(prefix: Path, documents: list[list[int]]) -> DataConfig:
    return DataConfig(data_path=(str(pairs.write(prefix, documents, np.int32)),), split="1")


def step_batches(
    source: DataSource, split: str, consumed: int, size: int, rank: int, ranks: int, step: int
) -> list[MicroBatch]:
    """A rank's micro-batches of a step."""
    return [
        source.micro_batch(split, places, step) for places in source.rank_places(split, consumed, size, rank, ranks)
    ]


def test_requested_samples_match_megatron() -> None:
    assert requested_samples(TRAINING, 2) == {"train": 50 * 8, "valid": (50 // 20 + 1) * 3 * 8, "test": 3 * 8}
    by_samples = replace(TRAINING, train_iters=None, train_samples=403)
    assert requested_samples(by_samples, 2) == {"train": 403, "valid": (50 // 20 + 1) * 3 * 8, "test": 3 * 8}
    at_the_end = replace(TRAINING, eval_interval=None)
    assert requested_samples(at_the_end, 2)["valid"] == 3 * 8
    assert requested_samples(replace(TRAINING, global_batch_size=None), 3)["train"] == 50 * 2 * 3


def test_the_stream_is_the_dataset_in_order() -> None:
    """Two steps on two ranks against the dataset of Megatron-LM's order, read directly."""
    source = build_data(FILES, TRAINING, 1000, 2)
    indexed = IndexedDataset(GOLDEN)
    dataset = GPTDataset(indexed, build_sample_order(indexed.lengths, range(180), 400, 32, 1234))
    for consumed in (0, 8):
        for rank in (0, 1):
            batches = step_batches(source, "train", consumed, 8, rank, 2, step=consumed // 8)
            assert len(batches) == 2
            for n, batch in enumerate(batches):
                places = [consumed + 4 * n + 2 * rank + i for i in range(2)]
                assert batch.sample_ids.tolist() == places
                assert batch.step == consumed // 8
                assert batch.tokens.tolist() == [dataset[i].tokens.tolist() for i in places]
                assert batch.labels.tolist() == [dataset[i].labels.tolist() for i in places]


@pytest.mark.parametrize("data", [FILES, MOCK], ids=["files", "mock"])
@pytest.mark.parametrize(("micro", "ranks"), [(1, 1), (2, 2), (4, 1), (1, 8)])
def test_any_layout_reads_the_same_global_batch(data: DataConfig, micro: int, ranks: int) -> None:
    def read(micro: int, ranks: int) -> dict[int, list[int]]:
        source = build_data(data, replace(TRAINING, micro_batch_size=micro), 1000, ranks)
        batches = [b for r in range(ranks) for b in step_batches(source, "train", 16, 8, r, ranks, step=2)]
        return {i: t for b in batches for i, t in zip(b.sample_ids.tolist(), b.tokens.tolist())}

    assert read(micro, ranks) == read(2, 1)
    assert sorted(read(micro, ranks)) == list(range(16, 24))


@pytest.mark.parametrize(("micro", "ranks"), [(1, 3), (3, 2), (1, 16)])
def test_padding_is_the_sample_before_it_and_does_not_count(micro: int, ranks: int) -> None:
    """Every rank has equally many whole micro-batches; what counts is the global batch, and so is what is digested."""
    source = build_data(FILES, replace(TRAINING, micro_batch_size=micro, pad_global_batch=True), 1000, ranks)
    plain = build_data(FILES, TRAINING, 1000, 1)
    text = [t for b in step_batches(plain, "train", 16, 8, 0, 1, step=2) for t in b.tokens.tolist()]
    by_rank = [step_batches(source, "train", 16, 8, rank, ranks, step=2) for rank in range(ranks)]
    assert {len(mine) for mine in by_rank} == {-(-8 // (micro * ranks))}
    counted, seen = [], 0
    for batch in (b for mine in by_rank for b in mine):
        assert batch.tokens.shape == (micro, 32)
        assert batch.tokens.tolist() == [text[i - 16] for i in batch.sample_ids.tolist()]
        counts = batch.loss_mask.sum(1) > 0
        assert batch.loss_mask[counts].all()
        assert set(batch.sample_ids[~counts].tolist()) <= {23}
        counted += batch.sample_ids[counts].tolist()
        seen += len(counts)
    assert sorted(counted) == list(range(16, 24))
    assert seen == len(by_rank[0]) * micro * ranks
    digests = [source.digest_places("train", source.rank_places("train", 16, 8, rank, ranks)) for rank in range(ranks)]
    assert sum(digests) % 2**64 == plain.digest("train", 16, 24)


def test_splits_are_different_text() -> None:
    for data in (FILES, MOCK):
        source = build_data(data, TRAINING, 1000, 1, ("train", "valid", "test"))
        assert list(source.datasets) == ["train", "valid", "test"]
        texts = {tuple(source.datasets[name][0].tokens.tolist()) for name in source.datasets}
        assert len(texts) == 3


def test_without_evaluation_no_validation_data_is_needed() -> None:
    source = build_data(replace(FILES, split="1,0,0"), replace(TRAINING, eval_iters=0), 1000, 1)
    assert list(source.datasets) == ["train"]
    with pytest.raises(DataError, match="no validation samples in this run: it has training"):
        step_batches(source, "valid", 0, 8, 0, 1, step=0)


def test_reading_past_the_end_is_refused() -> None:
    source = build_data(MOCK, TRAINING, 300, 1)
    assert len(step_batches(source, "train", 392, 8, 0, 1, step=49)) == 4
    with pytest.raises(DataError, match="training sample 400 is out of range"):
        step_batches(source, "train", 393, 8, 0, 1, step=50)


@pytest.mark.parametrize(
    ("split", "sequences", "missing", "fix"),
    [
        (None, 10, "validation", "--split 9,1,0"),  # no test data were requested
        ("969, 30, 1", 10, "validation", "--split 8,1,1"),
        (None, 1, "validation", "--eval-iters 0"),
        ("1,0,0", 10, "validation", "--split 9,1,0"),
        ("0,1,0", 10, "training", "--split 9,1,0"),
        ("8,1,1", 2, "validation", "--split 1,1,0"),  # without test data
        ("9,1,1", 2, "validation", "--split 1,1,0"),
        ("1,1,0", 1, "training", "a dataset of more documents than 1"),
    ],
)
def test_an_empty_split_is_named_and_the_fix_works(
    tmp_path: Path, split: str | None, sequences: int, missing: str, fix: str
) -> None:
    data = replace(write(tmp_path / "x", [[1] * 50] * sequences), split=split)
    with pytest.raises(DataError) as caught:
        build_data(data, TRAINING, 1000, 1)
    text = str(caught.value)
    cut = f"the default --split '{DEFAULT_SPLIT}'" if split is None else f"--split '{split}'"
    assert text.startswith(
        f"the {missing} data of {tmp_path / 'x'} have 0 tokens (0 of its {sequences} sequences with {cut})"
    )
    assert f"fix: {fix}" in text
    if fix.startswith("--split"):
        build_data(replace(data, split=fix.removeprefix("--split ")), TRAINING, 1000, 1)


# --- ids beyond the vocabulary ---


ONE_SAMPLE = replace(TRAINING, micro_batch_size=1, global_batch_size=1, train_iters=1, eval_iters=0)


@pytest.mark.parametrize("at", [0, 32], ids=["only in the tokens", "only in the labels"])
@pytest.mark.parametrize(("bad", "vocab_size"), [(99, 99), (-4, 200)])
def test_an_id_beyond_the_vocabulary_is_named(tmp_path: Path, at: int, bad: int, vocab_size: int) -> None:
    text = [1] * 33
    text[at] = bad
    data = write(tmp_path / "x", [text])
    with pytest.raises(
        DataError, match=f"training sample 0 holds id {bad}, but the vocabulary has ids 0..{vocab_size - 1}"
    ):
        step_batches(build_data(data, ONE_SAMPLE, vocab_size, 1), "train", 0, 1, 0, 1, step=0)


def test_the_last_id_of_the_vocabulary_passes_and_the_fix_works(tmp_path: Path) -> None:
    data = write(tmp_path / "x", [[99] * 33])
    (batch,) = step_batches(build_data(data, ONE_SAMPLE, 100, 1), "train", 0, 1, 0, 1, step=0)
    assert int(batch.labels.max()) == 99
    with pytest.raises(DataError, match="fix: --vocab-size 100 or more"):
        step_batches(build_data(data, ONE_SAMPLE, 99, 1), "train", 0, 1, 0, 1, step=0)


def test_summary_counts_epochs() -> None:
    indexed = IndexedDataset(GOLDEN)
    once = int(indexed.lengths[:180].sum())
    (train, valid, test) = build_data(FILES, TRAINING, 1000, 1).summary()
    assert train == f"train      400 samples, 12,800 tokens = {12800 / once:.2f} epochs of {once:,} in {GOLDEN}"
    assert valid.startswith("valid      24 samples, 768 tokens = "), "every evaluation reads the same 3 batches of 8"
    assert test.startswith("test       24 samples, 768 tokens = ")
    (train, _, _) = build_data(MOCK, TRAINING, 300, 1).summary()
    assert train == "train      400 samples, 12,800 generated tokens over 256 ids"


@pytest.mark.parametrize(("epochs", "expected"), [(4, []), (5, ["5.0 times"])])
def test_many_epochs_are_noted(tmp_path: Path, epochs: int, expected: list[str]) -> None:
    data = write(tmp_path / "x", [[1] * 32] * 8)
    training = replace(TRAINING, global_batch_size=8, train_iters=epochs, eval_iters=0)
    notes = build_data(data, training, 1000, 1).summary()[1:]
    assert len(notes) == len(expected)
    assert all(note.startswith("note       training reads") and words in note for note, words in zip(notes, expected))


# --- a run that goes on ---


def read(source: DataSource, places: range, split: str = "train") -> list[list[int]]:
    return source.micro_batch(split, places, step=0).tokens.tolist()


@pytest.mark.parametrize(
    "data",
    [FILES, BLEND, replace(BLEND, data_path=BLEND.data_path[1::2]), MOCK],
    ids=["files", "blend", "without weights", "mock"],
)
@pytest.mark.parametrize("iters", [10, 51, 400])
def test_a_run_of_another_length_keeps_its_samples(data: DataConfig, iters: int) -> None:
    source = build_data(data, TRAINING, 60_000, 1)
    assert source.segments == {"train": (400,), "valid": (72,), "test": (24,)}
    other = build_data(data, replace(TRAINING, train_iters=iters), 60_000, 1, segments=source.segments)
    common = range(min(400, 8 * iters))
    assert read(other, common) == read(source, common)
    assert other.digest("train", 0, len(common)) == source.digest("train", 0, len(common))
    assert other.fingerprints == source.fingerprints
    held = len(source.datasets["train"])
    more = (8 * iters - held,) if 8 * iters > held else ()
    assert other.segments == {"train": (400, *more), "valid": (72,), "test": (24,)}
    assert [note for note in other.notes if note.endswith(" follow")] == [
        f"the training data keep the order that was planned; {count:,} further samples follow" for count in more
    ]


def test_segments_are_frozen_in_their_turn() -> None:
    """As read back from JSON, twice extended; the third run reads what the second did."""
    segments = {"train": [40, 8], "valid": [24]}
    for data in (FILES, MOCK):
        second = build_data(data, replace(TRAINING, train_iters=300), 1000, 1, segments=segments)
        third = build_data(data, replace(TRAINING, train_iters=900), 1000, 1, segments=second.segments)
        assert second.segments["train"][:2] == (40, 8)
        assert third.segments["train"][:3] == second.segments["train"]
        assert read(third, range(2400)) == read(second, range(2400))


def test_evaluation_reads_the_same_after_an_extension() -> None:
    """Also where more of it is asked for than there was; and what is switched off is not forgotten."""
    source = build_data(FILES, TRAINING, 1000, 1)
    off = build_data(FILES, replace(TRAINING, eval_iters=0), 1000, 1, segments=source.segments)
    assert list(off.datasets) == ["train"]
    assert off.segments == source.segments
    longer = replace(TRAINING, eval_iters=200, train_iters=900)
    on = build_data(FILES, longer, 1000, 1, segments=off.segments)
    assert on.segments["valid"][0] == 72
    assert read(on, range(72), "valid") == read(source, range(72), "valid")
    assert len(on.datasets["valid"]) >= 1600


def test_a_run_that_goes_on_in_larger_batches_has_all_it_needs() -> None:
    """30 of 50 steps of 8 are behind it, the rest are steps of 64."""
    source = build_data(MOCK, TRAINING, 1000, 1)
    larger = replace(TRAINING, global_batch_size=64)
    on = build_data(MOCK, larger, 1000, 1, segments=source.segments, begin=(30, 240))
    assert on.used["train"] == 240 + 20 * 64
    assert on.segments["train"] == (400, on.used["train"] - 400)
    assert requested_samples(larger, 1, (30, 240))["train"] == 240 + 20 * 64
    assert len(step_batches(on, "train", 240 + 19 * 64, 64, 0, 1, step=49)) == 32


# --- what special ids do ---

DOCUMENTS = [5, 6, 7, 0, 8, 0, 9, 9, 0, 3, 3, 3, 1]
FLAGS = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
PACKED = replace(TRAINING, seq_length=12, micro_batch_size=1, global_batch_size=1, train_iters=1, eval_iters=0)


def only_batch(data: DataConfig, vocab_size: int = 10) -> MicroBatch:
    """The only sample of one sequence."""
    (batch,) = step_batches(build_data(data, PACKED, vocab_size, 1), "train", 0, 1, 0, 1, step=0)
    return batch


@pytest.fixture
def packed(tmp_path: Path) -> DataConfig:
    return replace(write(tmp_path / "x", [DOCUMENTS]), eod_id=0)


@pytest.mark.parametrize("flags", [(), FLAGS[:1], FLAGS[1:2], FLAGS[2:], FLAGS], ids=str)
def test_documents_of_a_sample(packed: DataConfig, flags: tuple[str, ...]) -> None:
    batch = only_batch(replace(packed, **dict.fromkeys(flags, True)))
    assert batch.tokens.tolist() == [[5, 6, 7, 0, 8, 0, 9, 9, 0, 3, 3, 3]]
    assert batch.loss_mask.dtype == torch.float32
    counts = [1, 1, 1, 0, 1, 0, 1, 1, 0, 1, 1, 1] if "eod_mask_loss" in flags else [1] * 12
    assert batch.loss_mask.tolist() == [counts]
    positions = [[0, 1, 2, 3, 0, 1, 0, 1, 2, 0, 1, 2]] if "reset_position_ids" in flags else None
    assert (None if batch.positions is None else batch.positions.tolist()) == positions
    documents = [[0, 0, 0, 0, 1, 1, 2, 2, 2, 3, 3, 3]] if "reset_attention_mask" in flags else None
    assert (None if batch.documents is None else batch.documents.tolist()) == documents
    assert (None if batch.boundaries is None else batch.boundaries.tolist()) == (documents and [0, 4, 6, 9, 12])


def with_record(data: DataConfig, eod: int, pad: int | None = None) -> DataConfig:
    """The data with a record of a tokenizer, from which the end of a document is known."""
    record(Path(data.data_path[0]), TokenizerRecord("HuggingFaceTokenizer", 10, eod, "0" * 16, pad))
    return replace(data, eod_id=None)


@pytest.mark.parametrize("flag", FLAGS)
def test_an_unknown_end_of_a_document_is_an_error(packed: DataConfig, flag: str) -> None:
    bare = replace(packed, eod_id=None)
    sentence = f"--{flag.replace('_', '-')} needs the id that ends a document"
    with pytest.raises(DataError, match=rf"{sentence}, and .*\n  fix: --eod-id ID"):
        only_batch(replace(bare, **{flag: True}))
    with pytest.raises(DataError, match="--eod-id 10, but the vocabulary has ids"):
        only_batch(replace(bare, eod_id=10))


def test_padding_is_neither_read_nor_learned(packed: DataConfig) -> None:
    batch = only_batch(with_record(packed, 0, pad=3))
    assert batch.tokens.tolist() == [[5, 6, 7, 0, 8, 0, 9, 9, 0, 0, 0, 0]]
    assert batch.labels.tolist() == [[6, 7, 0, 8, 0, 9, 9, 0, 0, 0, 0, 1]]
    assert batch.loss_mask.tolist() == [[1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 1]]


def test_padding_that_ends_documents_does_not_take_their_ends_away(packed: DataConfig) -> None:
    batch = only_batch(replace(with_record(packed, 0, pad=0), reset_attention_mask=True))
    plain = only_batch(replace(with_record(packed, 0), reset_attention_mask=True))
    assert batch.loss_mask.sum() == 12
    assert torch.equal(batch.labels, plain.labels)
    assert int(batch.documents[0, -1]) == 3 if batch.documents is not None else False


def test_ids_are_checked_before_padding_is_blanked(packed: DataConfig) -> None:
    with pytest.raises(DataError, match="training sample 0 holds id 9, but the vocabulary has ids"):
        only_batch(packed, vocab_size=9)
