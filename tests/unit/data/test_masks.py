"""Masks and positions: against the definition written out token by token."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from megatron.data.loader import MaskBuilder, document_boundaries, document_ids, document_positions

EOD, PAD = 3, 4
FLAGS = ("reset_positions", "reset_attention", "mask_eod_loss")


def columns_by_hand(text: list[int], masks: MaskBuilder) -> dict[str, list[int]]:
    """What becomes of the ``s + 1`` ids of one sample; ``hidden`` says it of every query and key."""
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
    mask = [0 if label == masks.pad else m for label, m in zip(labels, mask)]
    tokens, labels = ([0 if t == masks.pad else t for t in ids] for ids in (tokens, labels))
    seen = [h for row in hidden for h in row]
    return {"tokens": tokens, "labels": labels, "mask": mask, "positions": positions, "hidden": seen}


texts = st.integers(1, 12).flatmap(
    lambda s: st.lists(st.lists(st.integers(0, 5), min_size=s + 1, max_size=s + 1), min_size=1, max_size=3)
)
all_masks = st.builds(
    MaskBuilder, eod=st.just(EOD), pad=st.sampled_from([None, PAD]), **{flag: st.booleans() for flag in FLAGS}
)


@settings(max_examples=300, derandomize=True, deadline=None)
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


def test_an_example() -> None:
    tokens = np.array([[7, EOD, 8, 9, EOD, EOD, 5]])
    assert document_ids(tokens, EOD).tolist() == [[0, 0, 1, 1, 1, 2, 3]]
    assert document_positions(tokens, EOD).tolist() == [[0, 1, 0, 1, 2, 0, 0]]


def test_forms() -> None:
    tokens, labels = (np.full((2, 5), fill, dtype=np.int64) for fill in (1, PAD))
    given: tuple[NDArray[np.int64], ...] = (tokens.copy(), labels.copy())
    got = MaskBuilder(EOD, PAD, True, True, True).build(tokens, labels)
    assert [column.dtype for column in got if column is not None] == [
        np.int64,
        np.int64,
        np.float32,
        np.int64,
        np.int64,
    ]
    assert got.loss_mask.sum() == 0
    assert (tokens.tolist(), labels.tolist()) == tuple(ids.tolist() for ids in given), "what was given is as it was"


@pytest.mark.parametrize("eod", [None, EOD])
def test_without_flags_special_ids_are_ids(eod: int | None) -> None:
    tokens = np.array([[EOD, 1, EOD]])
    got = MaskBuilder(eod=eod).build(tokens, tokens + 1)
    assert got.tokens is tokens
    assert (got.loss_mask.tolist(), got.positions, got.documents) == ([[1, 1, 1]], None, None)


def test_what_is_told() -> None:
    assert MaskBuilder(EOD, PAD).describe() is None
    printed = MaskBuilder(EOD, PAD, reset_attention=True, mask_eod_loss=True).describe()
    assert printed == "end with id 3: no attention across documents, no loss on the first token of each"


@pytest.mark.parametrize("flag", FLAGS)
def test_a_mask_of_documents_needs_their_end(flag: str) -> None:
    with pytest.raises(ValueError, match="end-of-document id"):
        MaskBuilder(**{flag: True})


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.lists(st.integers(0, 2), min_size=5, max_size=5), min_size=1, max_size=3))
def test_boundaries_are_where_documents_begin(rows: list[list[int]]) -> None:
    flat = [(row, id) for row, ids in enumerate(rows) for id in ids]
    begins = [i for i in range(len(flat)) if i == 0 or flat[i] != flat[i - 1]]
    found = document_boundaries(np.array(rows))
    assert (found.tolist(), found.dtype) == ([*begins, len(flat)], np.int32)
