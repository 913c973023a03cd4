"""The example of reinforcement learning learns, and trains the policy that has generated."""

from __future__ import annotations

import pytest
import torch

from examples import policy_gradient
from megatron.arguments.cli import parse
from megatron.inference.scoring import compute_logprobs
from megatron.optimizer.lr_scheduler import Rates
from megatron.training.build import build_trainer
from megatron.training.step import train_step


def test_the_reward_rises_and_log_probabilities_are_the_same_bits() -> None:
    rewards, same = policy_gradient.main(10)
    assert same
    assert rewards[0] < 0.6 < 0.8 < rewards[-1]


def test_without_batch_invariance_bits_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_gradient, "FLAGS", policy_gradient.FLAGS.replace("--batch-invariant", "--kernels torch"))
    assert not policy_gradient.main(2)[1]


def test_the_loss_is_that_of_the_formula() -> None:
    policy = build_trainer(parse(policy_gradient.FLAGS.split(), {}).config, 0, 1)
    texts = torch.randint(0, 64, (4, 15), generator=torch.Generator().manual_seed(1))
    rewards, start = torch.tensor([0.1, 0.9, 0.4, 0.2]), len(policy_gradient.PROMPT) - 1
    log_probs = compute_logprobs(policy, texts)[:, start:].sum(1)
    metrics = train_step(policy, [policy_gradient.batch_of(texts, rewards)], Rates(1e-3, 0.0))
    torch.testing.assert_close(metrics.loss.float(), -((rewards - rewards.mean()) * log_probs).mean())
