"""Samples of a rank, their masks, and generated samples."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import log
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.dataset import MOCK_ALPHABET_SIZE, MOCK_JUMP_PROBABILITY, MockDataset, Sample
from megatron.data.loader import MaskBuilder, document_boundaries, rank_micro_batches
from megatron.training.build import build_trainer
from tests.kit.runs import tiny_run


def sequential(total: int, consumed: int, micro: int, rank: int, size: int) -> list[list[int]]:
    """Megatron-LM's sampler in its own terms: fill a batch of micro x DP indices, hand each rank its slice."""
    given_out, batch = [], []
    for index in range(consumed, total):
        batch.append(index)
        if len(batch) == micro * size:
            given_out.append(batch[rank * micro : rank * micro + micro])
            batch = []
    return given_out


SHAPE = st.tuples(st.integers(0, 1000), st.integers(1, 5), st.integers(1, 4), st.integers(1, 5))


@settings(max_examples=50, deadline=None)
@given(SHAPE)
def test_order_of_megatron_and_every_sample_once(shape: tuple[int, int, int, int]) -> None:
    consumed, micro, size, groups = shape
    batch = micro * size * groups
    by_rank = [rank_micro_batches(consumed, batch, micro, rank, size) for rank in range(size)]
    for rank, mine in enumerate(by_rank):
        assert [list(m) for m in mine] == sequential(consumed + batch, consumed, micro, rank, size)
    assert sorted(i for mine in by_rank for m in mine for i in m) == list(range(consumed, consumed + batch))


@pytest.mark.parametrize("batch", [7, 5, 0, -6])
def test_a_batch_that_groups_do_not_fill_is_refused(batch: int) -> None:
    with pytest.raises(ValueError, match=f"{batch} is not a multiple of micro-batch 2 x DP 3 = 6"):
        rank_micro_batches(0, batch, 2, 0, 3)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 40), st.integers(1, 4), st.integers(1, 5))
def test_a_padded_batch_is_a_full_one_cut_off(consumed: int, batch: int, micro: int, size: int) -> None:
    """Places stay where a full batch has them; ranks have equally many micro-batches, and all places once."""
    unit = micro * size
    full = -(-batch // unit) * unit
    by_rank = [rank_micro_batches(consumed, batch, micro, rank, size, padded=True) for rank in range(size)]
    for rank, mine in enumerate(by_rank):
        whole = rank_micro_batches(consumed, full, micro, rank, size)
        assert [list(m) for m in mine] == [[i for i in m if i < consumed + batch] for m in whole]
        assert all(m.stop <= consumed + batch and m.step == 1 for m in mine)
    assert sorted(i for mine in by_rank for m in mine for i in m) == list(range(consumed, consumed + batch))


EOD, PAD = 3, 4
FLAGS = ("reset_positions", "reset_attention", "mask_eod_loss")


def columns_by_hand(text: list[int], masks: MaskBuilder) -> dict[str, list[int]]:
    """Compute what follows from the ``s + 1`` ids of one sample; ``hidden`` is for every query and key."""
    tokens, labels = text[:-1], text[1:]
    s = len(tokens)
    mask, positions = [1] * s, list(range(s))
    hidden = [[key > query for key in range(s)] for query in range(s)]
    start = 0
    for i in [i for i in range(s) if tokens[i] == EOD]:
        after = range(i + 1, s)
        mask[i] = 0 if masks.mask_eod_loss else 1
        for j in after if masks.reset_positions else ():
            positions[j] -= i + 1 - start
        start = i + 1
        for query in after if masks.reset_attention else ():
            hidden[query][: i + 1] = [True] * (i + 1)
    mask = [0 if label == masks.pad or i + 1 < masks.prefix else m for i, (label, m) in enumerate(zip(labels, mask))]
    tokens, labels = ([0 if t == masks.pad else t for t in ids] for ids in (tokens, labels))
    seen = [h for row in hidden for h in row]
    return {"tokens": tokens, "labels": labels, "mask": mask, "positions": positions, "hidden": seen}


texts = st.integers(1, 12).flatmap(
    lambda s: st.lists(st.lists(st.integers(0, 5), min_size=s + 1, max_size=s + 1), min_size=1, max_size=3)
)
all_masks = st.builds(
    MaskBuilder,
    eod=st.just(EOD),
    pad=st.sampled_from([None, PAD]),
    prefix=st.sampled_from([0, 1, 2, 5]),
    **{flag: st.booleans() for flag in FLAGS},
)


@settings(max_examples=50, derandomize=True, deadline=None)
@given(texts, all_masks)
def test_every_rule_one_token_at_a_time(rows: list[list[int]], masks: MaskBuilder) -> None:
    text = np.array(rows, dtype=np.int64)
    got = masks.build(text[:, :-1], text[:, 1:])
    s = text.shape[1] - 1
    assert (got.positions is None, got.documents is None) == (not masks.reset_positions, not masks.reset_attention)
    positions = np.tile(np.arange(s), (len(rows), 1)) if got.positions is None else got.positions
    documents = np.zeros_like(got.tokens) if got.documents is None else got.documents
    for i, row in enumerate(rows):
        wanted = columns_by_hand(row, masks)
        assert got.tokens[i].tolist() == wanted["tokens"]
        assert got.labels[i].tolist() == wanted["labels"]
        assert got.loss_mask[i].tolist() == wanted["mask"]
        assert positions[i].tolist() == wanted["positions"]
        hidden = [k > q or documents[i, k] != documents[i, q] for q in range(s) for k in range(s)]
        assert hidden == wanted["hidden"]


def test_the_labels_of_the_longest_prefix_do_not_count() -> None:
    pattern = "--attention-pattern prefix:3,local:2+prefix:5"
    trainer = build_trainer(tiny_run(Path("unused"), pattern), 0, 1)
    for batch in trainer.next_batches():
        assert batch.loss_mask.tolist() == [[0.0] * 4 + [1.0] * 4] * len(batch.tokens)
    plain = build_trainer(tiny_run(Path("unused"), "--attention-pattern local:2"), 0, 1)
    assert all(batch.loss_mask.all() for batch in plain.next_batches())
    assert plain.data.masks.describe() is None
    assert trainer.data.masks.describe() == "no loss on the first 4 labels, which the prefix shows"
    both = MaskBuilder(EOD, mask_eod_loss=True, prefix=2).describe()
    first = "end with id 3: no loss on the first token of each"
    assert both == f"{first}; no loss on the first 1 label, which the prefix shows"


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.lists(st.integers(0, 2), min_size=5, max_size=5), min_size=1, max_size=3))
def test_boundaries_are_where_documents_begin(rows: list[list[int]]) -> None:
    flat = [(row, id) for row, ids in enumerate(rows) for id in ids]
    begins = [i for i in range(len(flat)) if i == 0 or flat[i] != flat[i - 1]]
    found = document_boundaries(np.array(rows))
    assert (found.tolist(), found.dtype) == ([*begins, len(flat)], np.int32)


def ids(dataset: MockDataset, i: int) -> list[int]:
    tokens, labels = dataset[i][:2]
    assert tokens[1:].tolist() == labels[:-1].tolist()
    return [*tokens.tolist(), int(labels[-1])]


def test_a_sample_depends_on_its_key_only() -> None:
    first, again = MockDataset(1000, 64, 50, 7), MockDataset(1000, 64, 9999, 7)
    assert ids(first, 49) == ids(again, 49)
    assert len(ids(first, 0)) == 65
    assert first[0].tokens.dtype == np.int64


def test_a_later_part_of_a_stream() -> None:
    whole, rest = MockDataset(1000, 64, 50, 7, 1), MockDataset(1000, 64, 10, 7, 1, first=40)
    assert [ids(rest, i) for i in range(10)] == [ids(whole, 40 + i) for i in range(10)]
    assert rest.sample_hashes(np.arange(10)).tolist() == list(range(40, 50))
    assert rest.fingerprint == whole.fingerprint
    assert rest.seq_length == 64


def test_index_seed_and_stream_change_the_sample() -> None:
    keys = [(7, 0, 0), (7, 0, 1), (7, 1, 0), (8, 0, 0)]
    samples = {tuple(ids(MockDataset(1000, 64, 5, seed, stream), i)) for seed, stream, i in keys}
    assert len(samples) == len(keys)


@pytest.mark.parametrize("vocab", [1, 2, 100, 257, 50257])
def test_ids_are_of_the_vocabulary(vocab: int) -> None:
    dataset = MockDataset(vocab, 200, 20, 1)
    seen = {i for n in range(20) for i in ids(dataset, n)}
    assert seen <= set(dataset.alphabet.tolist()) <= set(range(vocab))
    assert len(dataset.alphabet) == min(vocab, MOCK_ALPHABET_SIZE)
    if vocab == 50257:  # all of an embedding that is cut over ranks is used
        assert {i * 8 // vocab for i in seen} == set(range(8))


def test_a_table_of_successors_predicts_it_as_well_as_documented() -> None:
    """Cross-entropy of a bigram table, counted on training samples, on validation samples."""
    train, valid = MockDataset(5000, 512, 400, 3), MockDataset(5000, 512, 40, 3, stream=1)
    pairs: Counter[tuple[int, int]] = Counter()
    for i in range(len(train)):
        text = ids(train, i)
        pairs.update(zip(text, text[1:]))
    totals: Counter[int] = Counter()
    for (a, _), n in pairs.items():
        totals[a] += n
    steps = [pair for i in range(len(valid)) for pair in zip(ids(valid, i), ids(valid, i)[1:])]
    loss = -sum(log((pairs[a, b] + 0.1) / (totals[a] + 0.1 * MOCK_ALPHABET_SIZE)) for a, b in steps) / len(steps)
    p = MOCK_JUMP_PROBABILITY
    entropy = -(1 - p) * log(1 - p) - p * log(p / MOCK_ALPHABET_SIZE)
    assert entropy == pytest.approx(1.07, abs=0.01)
    assert loss == pytest.approx(entropy, abs=0.15)


@pytest.mark.parametrize("masks", [MaskBuilder(), MaskBuilder(2, None, True, True, True)])
def test_context_parallel_ranks_read_their_tokens_of_the_same_samples(tmp_path: Path, masks: MaskBuilder) -> None:
    """Documents stay whole: each rank has the keys of all ranks."""
    data = replace(build_trainer(tiny_run(tmp_path), 0, 1).data, masks=masks)
    rows, ids = (range(2, 4), range(4, 6)), [*range(2, 6)]
    whole, part = (data.micro_batch("train", range(2, 4), 5, rows=r) for r in (None, rows))
    for name in ("tokens", "labels", "loss_mask"):
        assert torch.equal(getattr(part, name), getattr(whole, name)[:, ids])
    positions = torch.arange(8).expand(2, 8) if whole.positions is None else whole.positions
    assert torch.equal(part.positions, positions[:, ids])
    assert torch.equal(part.sample_ids, whole.sample_ids)
    assert (part.documents is None) == (whole.documents is None) == (masks.eod is None)
    if whole.documents is not None:
        assert torch.equal(part.documents, whole.documents)
    assert (part.seq_length, part.length, whole.seq_length, whole.length) == (8, 8, None, 8)


class OwnMasks(MockDataset):
    """Samples of 8 tokens that bring their masks along."""

    def __getitem__(self, i: int) -> Sample:
        tokens, labels = super().__getitem__(i)[:2]
        documents, numbers = np.array([4, 4, 4, 0, 0, 7, 7, 7]), np.arange(8.0)
        return Sample(tokens, labels, np.float32(numbers % 3 > 0), documents, {"scores": numbers - 900 * i})


@pytest.mark.parametrize("rows", [None, (range(2, 4), range(6, 8))])
def test_samples_bring_their_own_masks_and_further_tensors(tmp_path: Path, rows: tuple[range, ...] | None) -> None:
    """Their ids are checked, their other values are not; padding has loss mask 0."""
    data = build_trainer(tiny_run(tmp_path), 0, 1).data
    sizes = {"seq_length": 8, "micro_batch_size": 3, "padded": True, "masks": MaskBuilder(2, 0, True, True, True, 4)}
    data = replace(data, datasets={"train": OwnMasks(data.vocab_size, 8, 9, 1)}, **sizes)
    batch = data.micro_batch("train", range(4, 6), 0, rows=rows)
    held = [*range(8)] if rows is None else [2, 3, 6, 7]
    expected = {
        "loss_mask": [[0, 1, 1, 0, 1, 1, 0, 1]] * 2 + [[0] * 8],
        "positions": [[0, 1, 2, 0, 1, 0, 1, 2]] * 3,
        "scores": [[j - 900.0 * i for j in range(8)] for i in (4, 5, 5)],
    }
    for name, values in expected.items():
        found = batch.extra[name] if name == "scores" else getattr(batch, name)
        assert found.tolist() == [[row[j] for j in held] for row in values], name
    assert torch.equal(batch.documents, torch.tensor([[4, 4, 4, 0, 0, 7, 7, 7]] * 3))
    assert torch.equal(batch.boundaries, torch.tensor([0, 3, 5, 8, 11, 13, 16, 19, 21, 24], dtype=torch.int32))
    assert batch.loss_mask.dtype == torch.float32
