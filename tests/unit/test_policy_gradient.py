"""The example of reinforcement learning learns, and trains the policy that has generated."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest
import torch

from megatron.arguments.cli import parse
from megatron.config import plugins
from megatron.inference.scoring import compute_logprobs
from megatron.optimizer.lr_scheduler import Rates
from megatron.training.build import build_trainer
from megatron.training.step import train_step


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The example, whose objective is registered for one test."""
    monkeypatch.setitem(plugins._registered, "objective", {})
    monkeypatch.delitem(sys.modules, "examples.policy_gradient", raising=False)
    return importlib.import_module("examples.policy_gradient")


def test_the_reward_rises_and_log_probabilities_are_the_same_bits(example: Any) -> None:
    rewards, same = example.main(10)
    assert same
    assert rewards[0] < 0.6 < 0.8 < rewards[-1]


def test_without_batch_invariance_bits_differ(example: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example, "FLAGS", example.FLAGS.replace("--batch-invariant", "--kernels torch"))
    assert not example.main(2)[1]


def test_the_loss_is_that_of_the_formula(example: Any) -> None:
    policy = build_trainer(parse(example.FLAGS.split(), {}).config, 0, 1)
    texts = torch.randint(0, 64, (4, 15), generator=torch.Generator().manual_seed(1))
    rewards, start = torch.tensor([0.1, 0.9, 0.4, 0.2]), len(example.PROMPT) - 1
    log_probs = compute_logprobs(policy, texts)[:, start:].sum(1)
    metrics = train_step(policy, [example.batch_of(texts, rewards)], Rates(1e-3, 0.0))
    torch.testing.assert_close(metrics.loss.float(), -((rewards - rewards.mean()) * log_probs).mean())
