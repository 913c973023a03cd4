"""Counter-based dropout: right rate, independent, and the same for any division of the work."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron.config.attention_pattern import CAUSAL
from megatron.distributed.micro_batch import MicroBatch
from megatron.distributed.random import stable_hash
from megatron.kernels.attention_mask import FULL, AttentionMask, Tile
from megatron.kernels.block_attention import AttentionDropout
from megatron.layers import attention
from megatron.layers.context import ForwardContext
from megatron.model import block
from megatron.model.block import hidden_dropout
from tests.kit.solo import Solo, random_batch, tiny

S, B, H = 64, 6, 96
P = 0.3
SIGMAS = 5.0


def batch_of(ids: Tensor, step: int = 3) -> MicroBatch:
    empty = torch.zeros(len(ids), S, dtype=torch.int64)
    return MicroBatch(empty, empty, empty, ids, step)


def context_of(batch: MicroBatch, seed: int = 1, rows: tuple[range, ...] = (range(S),)) -> ForwardContext:
    mask = AttentionMask.of_sequence(S, torch.device("cpu"))
    return ForwardContext(batch, {CAUSAL: mask}, seed=seed, training=True, rows=rows)


IDS = torch.tensor([0, 1, 2, 1000, 1001, 2**32 - 1])
ONES = torch.ones(S, B, H, dtype=torch.float64)


def kept(probability: float = P, batch: MicroBatch | None = None, seed: int = 1, site: str = "a") -> Tensor:
    out = hidden_dropout(ONES, probability, context_of(batch or batch_of(IDS), seed), site)
    assert set(out.unique().tolist()) == {0.0, 1.0 / (1.0 - probability)}
    return out != 0


@pytest.mark.parametrize("probability", [0.05, 0.3, 0.5, 0.9])
def test_rate(probability: float) -> None:
    """Within five standard deviations: overall, and for every sample, position and channel."""
    keep = kept(probability).double()
    for dims in ((0, 1, 2), (0, 2), (1, 2), (0, 1)):
        mean = keep.mean(dims)
        deviation = (probability * (1 - probability) * mean.numel() / keep.numel()) ** 0.5
        assert (mean - (1 - probability)).abs().max() < SIGMAS * deviation


def correlation(a: Tensor, b: Tensor) -> float:
    """Of two masks, in standard deviations of what independent ones have."""
    a, b = (x.double().flatten() - (1 - P) for x in (a, b))
    return ((a * b).mean() / (P * (1 - P)) * a.numel() ** 0.5).abs().item()


def test_independent_of_step_site_and_seed() -> None:
    here = kept()
    others = [kept(batch=batch_of(IDS, step=4)), kept(site="b"), kept(seed=2), kept(batch=batch_of(IDS + 3000))]
    assert all(correlation(here, other) < SIGMAS for other in others)
    assert correlation(here, kept()) > 100


def test_slices_of_a_micro_batch_drop_the_same() -> None:
    whole = hidden_dropout(ONES, P, context_of(batch_of(IDS)), "a")
    quarters = [range(i * S // 4, (i + 1) * S // 4) for i in range(4)]
    for mine in (quarters[:2], quarters[2:], (quarters[0], quarters[3])):
        rows = hidden_dropout(ONES[: S // 2], P, context_of(batch_of(IDS), rows=tuple(mine)), "a")
        assert torch.equal(rows, whole[[i for part in mine for i in part]])
    samples = [hidden_dropout(ONES[:, :2], P, context_of(batch_of(IDS[i : i + 2])), "a") for i in (0, 2, 4)]
    assert torch.equal(torch.cat(samples, 1), whole)
    assert torch.equal(hidden_dropout(ONES[..., :10], P, context_of(batch_of(IDS)), "a"), whole[..., :10])


def test_slices_of_attention_drop_the_same() -> None:
    dropout = AttentionDropout(P, 12345, IDS, first_head=0, length=16)
    cpu, every, (low, middle, high) = torch.device("cpu"), slice(None), (range(4), range(4, 12), range(12, 16))
    whole = dropout.scale(AttentionMask.of_sequence(16, cpu), Tile(every, every, every, FULL), 8, torch.float64)
    assert set(whole.unique().tolist()) == {0.0, 1.0 / (1.0 - P)}
    assert abs((whole != 0).double().mean().item() - (1 - P)) < SIGMAS * (P * (1 - P) / whole.numel()) ** 0.5
    part = AttentionMask((low, high), (high, middle), cpu)
    tile = Tile(slice(1, 3), slice(2, 8), slice(3, 12), FULL)
    scale = replace(dropout, first_head=2).scale(part, tile, 4, torch.float64)
    queries, keys = [2, 3, *high], [15, *middle]
    assert torch.equal(scale, whole[1:3, 2:6, queries][..., keys])


DROPPING = tiny(hidden_dropout=0.2, attention_dropout=0.2)


def test_every_site_drops_and_evaluation_does_not() -> None:
    batch = random_batch(DROPPING)
    losses = {}
    for name, changes in {
        "none": (0.0, 0.0),
        "hidden": (0.2, 0.0),
        "attention": (0.0, 0.2),
        "both": (0.2, 0.2),
    }.items():
        solo = Solo.build(replace(DROPPING, hidden_dropout=changes[0], attention_dropout=changes[1]))
        losses[name] = solo.chunk(None, batch)[0].item()  # differences of rounding do not count below
        solo.chunk.eval()
        losses[f"{name}, evaluated"] = solo.chunk(None, batch)[0].item()
    assert len({round(losses[name], 6) for name in ("none", "hidden", "attention", "both")}) == 4
    for name in ("hidden", "attention", "both"):
        assert losses[f"{name}, evaluated"] == pytest.approx(losses["none"], rel=1e-12)


def test_every_site_has_a_key_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = []

    def recording(*parts: object) -> int:
        keys.append(stable_hash(*parts))
        return keys[-1]

    for module in (attention, block):
        monkeypatch.setattr(module, "stable_hash", recording)
    Solo.build(DROPPING).chunk(None, random_batch(DROPPING))
    assert len(set(keys)) == len(keys) == 1 + 3 * DROPPING.num_layers, (
        "embedding; attention, its output and MLP per block"
    )
