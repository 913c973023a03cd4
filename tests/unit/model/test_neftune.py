"""NEFTune's noise: uniform, of the documented size, in training only, and new in every step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron.config.training import TrainingConfig
from megatron.distributed.micro_batch import MicroBatch
from tests.kit.solo import Solo, random_batch, tiny

ALPHA = 5.0
CONFIG = tiny(position_embedding_type="rope", hidden_size=64)


def embedded(alpha: float, batch: MicroBatch, training: bool = True) -> Tensor:
    """The input of the first block ``[S, B, H]``."""
    chunk = Solo.build(CONFIG, training=TrainingConfig(neftune_alpha=alpha)).chunk.train(training)
    found: list[Tensor] = []
    chunk.layers["0"].register_forward_pre_hook(lambda _, inputs: found.append(inputs[0].sum()))
    chunk(None, batch)
    return found[0].detach()


@pytest.mark.parametrize("documents", [None, torch.tensor([[0] * 4 + [1] * 12, [3] * 8 + [0] * 7 + [1]])])
def test_noise_is_uniform_and_as_large_as_documented(documents: Tensor | None) -> None:
    """Its bound is alpha / sqrt(L H) for a token of a document of L tokens."""
    batch = random_batch(CONFIG, documents=documents)
    lengths = (
        torch.full((2, 16), 16) if documents is None else torch.tensor([[4] * 4 + [12] * 12, [8] * 8 + [7] * 7 + [1]])
    )
    bound = ALPHA / (lengths * 64.0).sqrt().double()
    noise = (embedded(ALPHA, batch) - embedded(0.0, batch)) / bound.t().unsqueeze(-1)
    assert noise.abs().max() <= 1 + 1e-6
    assert noise.abs().amax(-1).min() > 0.9, "every token has its own bound"
    assert noise.mean().item() == pytest.approx(0, abs=0.04)
    assert noise.square().mean().item() == pytest.approx(1 / 3, abs=0.03)
    assert len(noise.unique()) > 2000, "tokens, samples and channels have their own noise"


def test_noise_depends_on_step_and_sample_and_is_off_in_evaluation() -> None:
    batch = random_batch(CONFIG)
    first = embedded(ALPHA, batch)
    assert torch.equal(embedded(ALPHA, batch), first)
    assert not torch.isclose(embedded(ALPHA, replace(batch, step=9)), first).any(-1).all()
    swapped = embedded(ALPHA, replace(batch, tokens=batch.tokens.flip(0), sample_ids=batch.sample_ids.flip(0)))
    assert torch.equal(swapped.flip(1), first)
    assert torch.equal(embedded(ALPHA, batch, training=False), embedded(0.0, batch))


def test_gradients_are_taken_at_the_noisy_embeddings() -> None:
    """By central differences along the gradient."""
    solo = Solo.build(CONFIG, training=TrainingConfig(neftune_alpha=ALPHA))
    batch, weight = random_batch(CONFIG), solo.params["embedding.word_embeddings.weight"]
    solo.backward([batch])
    gradient = solo.buckets.grads["embedding.word_embeddings.weight"].view_as(weight).clone()
    step = 1e-5 * gradient / gradient.norm()
    losses = []
    for sign in (1, -1):
        with torch.no_grad():
            weight += sign * step
            losses.append(solo.chunk(None, batch)[0] / batch.loss_mask.sum())
            weight -= sign * step
    assert ((losses[0] - losses[1]) / 2e-5).item() == pytest.approx(gradient.norm().item(), rel=1e-5)
