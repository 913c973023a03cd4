"""The digest of samples: against the sum written out, and its dependence on all inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.config.data import DataConfig
from megatron.config.training import TrainingConfig
from megatron.data.dataset import DIGEST_BLOCK, sample_digest, splitmix64
from megatron.data.errors import DataError
from megatron.data.gpt_dataset import GPTDataset
from megatron.data.indexed_dataset import FINGERPRINT_BLOCK_BYTES, FINGERPRINT_BLOCKS, IndexedDataset
from megatron.data.loader import DataSource, build_data
from tests.unit.data import pairs

TRAINING = TrainingConfig(
    seq_length=8, micro_batch_size=2, global_batch_size=8, train_iters=10, eval_interval=5, eval_iters=1, seed=7
)
MOCK = DataConfig(mock_data=True)
MASK = 2**64 - 1


def write(prefix: Path, lengths: list[int], first_id: int = 0) -> DataConfig:
    documents = ((np.arange(length) + 31 * i + first_id) % 500 for i, length in enumerate(lengths))
    return DataConfig(data_path=(str(pairs.write(prefix, documents)),), split="9,3,0")


@pytest.fixture
def files(tmp_path: Path) -> DataConfig:
    return write(tmp_path / "x", [5, 30, 9, 1, 44, 12, 80, 3, 17, 20, 40, 25])


def build(data: DataConfig, **changes: object) -> DataSource:
    return build_data(data, replace(TRAINING, **changes), 500, 1)


# --- the numbers ---


def mix_by_hand(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2**62), st.integers(0, MASK))), st.integers(0, MASK))
def test_the_sum_written_out(hashed: list[tuple[int, int]], salt: int) -> None:
    places = np.array([place for place, _ in hashed], dtype=np.int64)
    identities = np.array([identity for _, identity in hashed], dtype=np.uint64)
    expected = sum(mix_by_hand(mix_by_hand(place ^ salt) ^ identity) for place, identity in hashed) & MASK
    assert sample_digest(places, identities, salt) == expected


def test_mixing_is_splitmix64() -> None:
    """The first outputs of the generator for seed 1234567, as its authors publish them."""
    steps = np.arange(1, 4, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(1234567)
    assert splitmix64(steps).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def identity_by_hand(dataset: GPTDataset, i: int) -> int:
    order = dataset.order
    j = int(order.shuffle_index[i])
    (first, offset), (last, _) = order.sample_index[j].tolist(), order.sample_index[j + 1].tolist()
    return mix_by_hand(int(order.document_index[first]) << 32 | offset) ^ int(order.document_index[last])


def only_segment(source: DataSource) -> GPTDataset:
    """The training data of a run that was not extended."""
    dataset = source.datasets["train"]
    assert isinstance(dataset, GPTDataset)
    return dataset


def test_sample_hashes_match_the_tables(files: DataConfig) -> None:
    dataset = only_segment(build(files))
    places = np.arange(len(dataset))
    assert dataset.sample_hashes(places).tolist() == [identity_by_hand(dataset, i) for i in places]


# --- a sum over parts ---


@pytest.mark.parametrize("mock", [False, True])
def test_digests_of_parts_add_up_for_any_number_of_ranks(files: DataConfig, mock: bool) -> None:
    """Three steps of four ranks, each summing its own micro-batches, against one number for all."""
    source = build(MOCK if mock else files, train_iters=6)
    whole = source.digest("train", 8, 32)
    for ranks in (1, 2, 4):
        read = 0
        for consumed in (24, 8, 16):
            for rank in range(ranks):
                read += source.digest_places("train", source.rank_places("train", consumed, 8, rank, ranks))
        assert read % 2**64 == whole
    assert source.digest("train", 8, 8) == 0
    assert (source.digest("train", 8, 9) + source.digest("train", 9, 32)) % 2**64 == whole


def test_blocks_change_nothing() -> None:
    source = build(MOCK, train_iters=DIGEST_BLOCK // 4)
    places = range(3, DIGEST_BLOCK + 77)
    assert source.digest("train", places.start, places.stop) == source.digest_places("train", [places])


# --- what changes it ---


def swapped(source: DataSource) -> DataSource:
    """The same samples with the first two in each other's place."""
    dataset = only_segment(source)
    shuffle = dataset.order.shuffle_index.copy()
    shuffle[[0, 1]] = shuffle[[1, 0]]
    return replace(
        source, datasets={"train": GPTDataset(dataset._indexed, dataset.order._replace(shuffle_index=shuffle))}
    )


CHANGES: dict[str, Callable[[DataConfig, Path], DataSource]] = {
    "swapped": lambda data, folder: swapped(build(data)),
    "seed": lambda data, folder: build(data, seed=8),
    "ids": lambda data, folder: build(write(folder / "y", [5, 30, 9, 1, 44, 12, 80, 3, 17, 20, 40, 25], first_id=1)),
    "lengths": lambda data, folder: build(write(folder / "y", [5, 30, 9, 1, 44, 12, 80, 3, 17, 20, 41, 24])),
    "split": lambda data, folder: build(replace(data, split="8,4,0")),
    "sequence length": lambda data, folder: build(data, seq_length=7),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_changes_it(files: DataConfig, tmp_path: Path, change: str) -> None:
    assert CHANGES[change](files, tmp_path).digest("train", 0, 80) != build(files).digest("train", 0, 80)


def test_a_name_does_not_change_it(files: DataConfig, tmp_path: Path) -> None:
    moved = write(tmp_path / "elsewhere", [5, 30, 9, 1, 44, 12, 80, 3, 17, 20, 40, 25])
    before, after = build(files), build(moved)
    assert before.digest("train", 0, 80) == after.digest("train", 0, 80)
    assert before.fingerprints == after.fingerprints


def test_places_that_are_not_there_are_refused(files: DataConfig) -> None:
    source = build(files)
    held = len(source.datasets["train"])
    for first, stop in ((-1, 3), (held - 1, held + 1)):
        with pytest.raises(DataError, match=f"training sample {-1 if first < 0 else held} is out of range"):
            source.digest("train", first, stop)


# --- fingerprints ---


def test_every_byte_of_a_small_file_counts(files: DataConfig, tmp_path: Path) -> None:
    before = IndexedDataset(tmp_path / "x").fingerprint
    path = tmp_path / "x.bin"
    content = path.read_bytes()
    for at in range(0, len(content), 37):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        assert IndexedDataset(tmp_path / "x").fingerprint != before
    path.write_bytes(content)
    assert IndexedDataset(tmp_path / "x").fingerprint == before


def test_boundaries_of_sequences_count(tmp_path: Path) -> None:
    """The same ids, cut elsewhere."""
    marks = set()
    for lengths in ([10, 20], [20, 10]):
        marks.add(IndexedDataset(pairs.write(tmp_path / "x", [[1] * length for length in lengths])).fingerprint)
    assert len(marks) == 2


def test_of_a_large_file_first_and_last_bytes_and_documents_count(tmp_path: Path) -> None:
    size = 4 * FINGERPRINT_BLOCKS * FINGERPRINT_BLOCK_BYTES

    def mark(ids: np.ndarray, documents: int) -> str:
        return IndexedDataset(pairs.write(tmp_path / "x", np.split(ids, documents))).fingerprint

    ids = np.random.default_rng(1).integers(0, 500, size // 2)
    changed = []
    for at in (0, size // 2 - 1):
        other = ids.copy()
        other[at] += 1
        changed.append(other)
    marks = {mark(ids, 8), mark(ids, 16), *(mark(other, 8) for other in changed)}
    assert len(marks) == 4
