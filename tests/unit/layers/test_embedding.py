"""Embeddings and their gradients against torch, with one rank and with a part of the rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.layers.embedding import EmbeddingShard
from tests.kit.solo import Gradients, Solo, tiny

CONFIG = tiny(max_position_embeddings=20)
WORDS, POSITIONS = "embedding.word_embeddings.weight", "embedding.position_embeddings.weight"


def tokens(seed: int) -> Tensor:
    """Few different ids, so that rows get many contributions."""
    return torch.randint(0, 9, (3, 16), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("given", [False, True], ids=["positions 0..s-1", "positions given"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_gradients_match_torch(dtype: torch.dtype, given: bool) -> None:
    """Over two micro-batches; what an earlier step left in the buffers is overwritten, in rows without a token too."""
    solo = Solo.build(CONFIG, dtype)
    embedding = solo.chunk.embedding
    assert embedding is not None
    for bucket in solo.buckets.buckets:
        bucket.shard.fill_(torch.nan)
    tables = {n: solo.params[n].detach().double().requires_grad_() for n in (WORDS, POSITIONS)}
    positions = (torch.arange(16) * 3 % 20).expand(3, 16) if given else None
    solo.buckets.start_step(2)
    with solo.buckets.without_reduction():
        for seed in (0, 1):
            ids = tokens(seed)
            dy = torch.randn(16, 3, 32, generator=torch.Generator().manual_seed(seed)).to(dtype)
            out = embedding(ids, positions)
            out.backward(dy)
            at = torch.arange(16).expand(3, 16) if positions is None else positions
            expected = F.embedding(ids.t(), tables[WORDS]) + F.embedding(at.t(), tables[POSITIONS])
            expected.backward(dy.double())
            tolerance = 1e-13 if dtype == torch.float64 else 1e-2
            torch.testing.assert_close(out.detach().double(), expected.detach(), rtol=tolerance, atol=tolerance)
    for name, table in tables.items():
        assert table.grad is not None
        tolerance = 1e-13 if dtype == torch.float64 else 1e-5
        torch.testing.assert_close(solo.buckets.accumulated(name).double(), table.grad, rtol=tolerance, atol=tolerance)


def test_parts_of_the_rows_add_up() -> None:
    """Rows of other ranks are 0, and get no gradient here."""
    ids, whole = tokens(0), torch.randn(9, 4, dtype=torch.float64)
    total = torch.zeros(3, 16, 4, dtype=torch.float64)
    for first, count in ((0, 5), (5, 4)):
        solo = Solo.build(CONFIG)
        part = EmbeddingShard.__new__(EmbeddingShard)
        torch.nn.Module.__init__(part)
        part.weight = torch.nn.Parameter(whole[first : first + count].clone())
        part.name, part.first, part.grad_accumulator = "w", first, solo.grad_accumulator
        gradient = torch.zeros(count, 4, dtype=torch.float64)
        solo.grad_accumulator.bind(Gradients({"w": gradient}))
        out = part(ids)
        out.backward(torch.ones_like(out))
        total += out.detach()
        counts = torch.stack([(ids == row).sum() for row in range(first, first + count)])
        assert torch.equal(gradient, counts.double().unsqueeze(1).expand(-1, 4))
    assert torch.equal(total, whole[ids])
