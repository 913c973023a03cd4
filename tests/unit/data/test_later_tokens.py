"""Later tokens of each position against loops, and as context-parallel ranks read them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.config.model import ModelConfig
from megatron.config.multi_token import LATER_MASK, LATER_TOKENS
from megatron.data.dataset import MockDataset
from megatron.data.later_tokens import later_tokens
from megatron.data.loader import DataSource, MaskBuilder
from megatron.data.sample_columns import sample_columns
from megatron.distributed.layout import chunks_of

EOD, DEPTHS = 3, 3


def by_hand(ids: list[int], counts: list[int], document: list[int]) -> tuple[list[list[int]], list[list[int]]]:
    """Tokens and masks of one sample of ``s + 1`` ids, each in a document."""
    s = len(ids) - 1
    tokens, mask = [[0] * (DEPTHS + 1) for _ in range(s)], [[0] * DEPTHS for _ in range(s)]
    for i in range(s):
        for j in range(DEPTHS + 1):
            if i + j + 1 <= s and document[i + j + 1] == document[i]:
                tokens[i][j] = ids[i + j + 1]
                if j > 0:
                    mask[i][j - 1] = counts[i + j]
    return tokens, mask


IDS = st.lists(st.integers(0, 6), min_size=2, max_size=12)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(IDS, st.integers(0, 2**12), st.booleans())
def test_they_are_those_of_the_sample_and_the_document(ids: list[int], counted: int, several: bool) -> None:
    s = len(ids) - 1
    counts = [counted >> i & 1 for i in range(s)]
    document = [several * ids[:i].count(EOD) for i in range(s + 1)]
    text = np.array([ids])
    foreign = text[:, :-1] == EOD if several else None
    found = later_tokens(text[:, 1:], np.array([counts], np.float32), np.array([document[:-1]]), DEPTHS, foreign)
    tokens, mask = by_hand(ids, counts, document)
    assert found[LATER_TOKENS].tolist() == [tokens]
    assert found[LATER_MASK].tolist() == [mask]


def test_the_last_label_of_a_conversation_is_its_own() -> None:
    """Two conversations of ids 10 .. 13 and 20 .. 22: the label of a position is never that of another one."""
    labels, documents = np.array([[11, 12, 13, 21, 22]]), np.array([[0, 0, 0, 1, 1]])
    found = later_tokens(labels, np.ones((1, 5), np.float32), documents, 2)
    assert found[LATER_TOKENS][0].tolist() == [[11, 12, 13], [12, 13, 0], [13, 0, 0], [21, 22, 0], [22, 0, 0]]
    assert found[LATER_MASK][0].tolist() == [[1, 1], [1, 0], [0, 0], [1, 0], [0, 0]]


@pytest.mark.parametrize("several", [False, True])
def test_a_context_parallel_rank_reads_those_of_its_positions(several: bool) -> None:
    """Those after its last token are on another rank; a sample that pads a micro-batch predicts nothing."""
    masks = MaskBuilder(EOD, mask_eod_loss=True, reset_attention=True) if several else MaskBuilder()
    dataset = MockDataset(7, 16, 4, 0)
    model = ModelConfig(mtp_num_layers=DEPTHS)
    source = DataSource(
        {"train": dataset}, {}, {"train": 4}, 16, 3, 7, masks, padded=True, columns=sample_columns(model)
    )
    found = {LATER_TOKENS: torch.full((3, 16, DEPTHS + 1), -1), LATER_MASK: torch.full((3, 16, DEPTHS), -1.0)}
    for rank in range(2):
        rows = tuple(chunks_of(16, 2, rank))
        batch = source.micro_batch("train", range(2), 0, rows=rows)
        for name, whole in found.items():
            whole[:, torch.cat([torch.arange(r.start, r.stop) for r in rows])] = batch.extra[name].to(whole)
    for i, place in enumerate((0, 1, 1)):
        ids = [*dataset[place].tokens.tolist(), int(dataset[place].labels[-1])]
        document = [several * ids[:j].count(EOD) for j in range(17)]
        assert max(document) > 1 or not several
        counts = [int(i < 2 and not (several and each == EOD)) for each in ids[:-1]]
        assert [found[name][i].tolist() for name in found] == [*by_hand(ids, counts, document)]
