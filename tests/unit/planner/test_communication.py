"""Chunks that ranks of a ring see, and their work, against the masks that attention uses."""

from __future__ import annotations

import random

import pytest
import torch

from megatron.config.attention_pattern import AttentionPattern
from megatron.distributed.context_parallel import chunks_of
from megatron.kernels.attention_mask import AttentionMask
from megatron.planner.communication import chunks_seen, ring_work


def random_pattern(dice: random.Random) -> AttentionPattern:
    forms = ("local:{}", "chunked:{}", "dilated:{}:{}", "prefix:{}", "local:{}+chunked:{}", "chunked:{}+first:{}")
    form = dice.choice(forms)
    return AttentionPattern.parse(form.format(*(dice.randint(1, 40) for _ in range(form.count("{}")))))


@pytest.mark.parametrize("seed", range(40))
def test_chunks_and_work_match_the_mask(seed: int) -> None:
    dice = random.Random(seed)
    pattern, ring = random_pattern(dice), dice.choice((2, 3, 4))
    length = 2 * ring * dice.randint(4, 24)
    mask = AttentionMask.of_sequence(length, torch.device("cpu"), pattern)
    visible = mask.dense()[0, 0]
    chunks = [chunks_of(length, ring, rank) for rank in range(ring)]
    sent, seen, work = [], [], []
    for mine in chunks:
        others = [chunk for theirs in chunks if theirs != mine for chunk in theirs]
        sent.append(sum(mask.sees(mine, (chunk,)) for chunk in others))
        seen.append(sum(any(visible[q.start : q.stop, k.start : k.stop].any() for q in mine) for k in others))
        work.append(sum(int(visible[q.start : q.stop].sum()) for q in mine))
    assert [*chunks_seen(pattern, length, ring)] == sent
    assert all(least <= most for least, most in zip(seen, sent))
    assert ring_work(pattern, length, ring) == pytest.approx(work, rel=0.05)


def test_causal_ranks_see_three_quarters_of_the_other_chunks_and_work_equally() -> None:
    for ring in (2, 3, 8, 32):
        assert sum(chunks_seen(AttentionPattern(), 768 * ring, ring)) / ring == 3 / 4 * 2 * (ring - 1)
        work = ring_work(AttentionPattern(), 768 * ring, ring)
        assert max(work) == pytest.approx(min(work))


def test_work_of_many_queries_is_sampled() -> None:
    pattern = AttentionPattern.parse("chunked:40000")
    cuts = [i * 131072 // 8 for i in range(9)]
    by_chunk = [sum(q % 40000 + 1 for q in range(start, stop)) for start, stop in zip(cuts, cuts[1:])]
    work = [by_chunk[rank] + by_chunk[7 - rank] for rank in range(4)]
    sampled = ring_work(pattern, 131072, 4)
    assert max(sampled) * 4 / sum(sampled) == pytest.approx(max(work) * 4 / sum(work), rel=0.02)
