"""Policy gradient on a tiny model: generate, reward, take a step, refresh the weights that generate.

Run it with ``python examples/policy_gradient.py``. The reward of a continuation is the share of its tokens that are
even. With ``--batch-invariant`` the log-probabilities of generation and of training are the same bits, so the policy
that is trained is the one that has generated. Another engine takes ``stream_weights`` in place of `refresh_weights`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megatron.arguments.cli import parse
from megatron.config.plugins import register
from megatron.distributed.micro_batch import MicroBatch
from megatron.inference.generate import Continuation, SamplingParams, generate_scored
from megatron.inference.scoring import compute_logprobs
from megatron.layers.loss import OutputLayer
from megatron.model.objective import Objective
from megatron.optimizer.lr_scheduler import Rates
from megatron.training.build import build_trainer
from megatron.training.step import train_step
from megatron.training.weight_stream import refresh_weights, stream_weights

FLAGS = (
    "--preset tiny-llama --num-layers 2 --vocab-size 64 --mock-data --train-iters 1 --device cpu --batch-invariant "
    "--objective policy-gradient"
)
PROMPT, SAMPLES, NEW_TOKENS, LR = [1, 2, 3], 16, 12, 3e-3


@register("objective", "policy-gradient")
class PolicyGradient(Objective):
    """Advantage times negative log-probability of the new tokens, a mean over samples."""

    is_cross_entropy = False

    def weight(self, batch: MicroBatch) -> Tensor:
        """Return the number of samples."""
        return torch.tensor(float(len(batch.tokens)), dtype=torch.float64)

    def __call__(
        self, hidden_SBH: Tensor, batch: MicroBatch, output_layer: OutputLayer
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the summed loss."""
        losses_BS = output_layer.token_losses(hidden_SBH, batch.labels.unsqueeze(-1))
        loss = (losses_BS * batch.loss_mask * batch.extra["advantages"]).sum()
        return loss, {"lm loss": loss.detach()}


def batch_of(texts: Tensor, rewards: Tensor) -> MicroBatch:
    """Return texts ``[b, s + 1]`` as a micro-batch whose new tokens count with their advantage ``[b]``."""
    new = torch.zeros(texts[:, 1:].shape)
    new[:, len(PROMPT) - 1 :] = 1.0
    advantages = (rewards - rewards.mean()).unsqueeze(1).expand_as(new)
    ids = torch.arange(len(texts))
    return MicroBatch(texts[:, :-1], texts[:, 1:], new, ids, extra={"advantages": advantages})


def main(steps: int = 30) -> tuple[list[float], bool]:
    """Train; return the mean reward of every step, and whether all log-probabilities were the same bits."""
    config = parse(FLAGS.split(), {}).config
    policy, engine = build_trainer(config, 0, 1), build_trainer(config, 0, 1)
    history, same = [], True
    for step in range(steps):
        refresh_weights(engine.chunks[0], stream_weights(policy))
        sampling = SamplingParams(seed=step)
        found: Sequence[Continuation] = generate_scored(engine.chunks[0], [PROMPT] * SAMPLES, NEW_TOKENS, sampling)
        texts = torch.tensor([PROMPT + each.tokens for each in found])
        trained = compute_logprobs(policy, texts)[:, len(PROMPT) - 1 :]
        same &= torch.equal(trained, torch.tensor([each.log_probs for each in found]))
        rewards = (texts[:, len(PROMPT) :] % 2 == 0).float().mean(1)
        train_step(policy, [batch_of(texts, rewards)], Rates(LR, 0.0))
        history.append(rewards.mean().item())
        print(f"step {step}: reward {history[-1]:.2f}, log-probabilities {'equal' if same else 'differ'}")
    return history, same


if __name__ == "__main__":
    main()
