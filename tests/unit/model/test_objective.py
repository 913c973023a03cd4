"""Objectives of plugins against next-token prediction, through the model, a step and a captured step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor

from megatron.config import plugins
from megatron.config.training import TrainingConfig
from megatron.distributed.micro_batch import MicroBatch
from megatron.layers.loss import OutputLayer
from megatron.model.objective import Objective
from megatron.optimizer.lr_scheduler import Rates
from megatron.training.build import build_trainer
from megatron.training.cuda_graphs import WARM_UP_STEPS, StepRunner
from megatron.training.step import train_step
from megatron.training.trainer import Trainer
from tests.kit.runs import tiny_run
from tests.kit.solo import Solo, random_batch, tiny
from tests.unit.training.test_cuda_graphs import recorded


class WeightedTokens(Objective):
    """Half the cross-entropy of tokens with the weights ``extra["weights"]``."""

    metric_names = ("whole loss",)

    def weight(self, batch: MicroBatch) -> Tensor:
        """Return the sum of the weights."""
        return batch.extra["weights"].sum(dtype=torch.float64)

    def __call__(
        self, hidden_SBH: Tensor, batch: MicroBatch, output_layer: OutputLayer
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return half the weighted cross-entropy, and all of it as a metric."""
        loss, cross_entropy = output_layer(hidden_SBH, batch.labels, batch.extra["weights"])
        return 0.5 * loss, {"whole loss": cross_entropy}


@pytest.fixture(autouse=True)
def plugin() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(plugins._registered, "objective", {})
        plugins.register("objective", "weighted")(WeightedTokens)
        yield


def weighted(batch: MicroBatch) -> MicroBatch:
    """The same weights of tokens, as a named tensor instead of the loss mask."""
    return replace(batch, loss_mask=torch.ones_like(batch.loss_mask), extra={"weights": batch.loss_mask})


def test_a_plugins_objective_has_its_loss_and_gradients() -> None:
    batch = random_batch(tiny())
    plain, other = Solo.build(tiny()), Solo.build(tiny(), training=TrainingConfig(objective="weighted"))
    for solo, micro_batch in ((plain, batch), (other, weighted(batch))):
        solo.buckets.start_step(1)
        loss, _ = solo.chunk(None, micro_batch)
        loss.backward()
        solo.buckets.finish()
    sums = other.chunk.sums.pop()
    assert sums["lm loss"].item() == pytest.approx(0.5 * sums["whole loss"].item(), rel=1e-14)
    assert sums["whole loss"].item() == pytest.approx(plain.chunk.sums.pop()["lm loss"].item(), rel=1e-14)
    for name, grad in plain.buckets.grads.items():
        torch.testing.assert_close(other.buckets.grads[name], 0.5 * grad, rtol=1e-12, atol=1e-14)


class GivenLosses:
    """An output layer whose token losses are given."""

    def __init__(self, losses_BS: Tensor) -> None:
        self.losses_BS = losses_BS

    def token_losses(self, *_: Tensor) -> Tensor:
        """Return them."""
        return self.losses_BS


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("loss", "lead"), [(3.0, 1e-2), (1e-9, 1e-2), (1e-9, 1e-3)])
def test_roundings_of_logits_prefer_no_answer(dtype: torch.dtype, loss: float, lead: float) -> None:
    """Two pairs of answers of 8 tokens: of the first only rounding differs, of the second also a token."""
    solo = Solo.build(tiny(), training=TrainingConfig(objective="dpo"))
    pairs = torch.tensor([[1, *[0] * 15, 1, *[0] * 15]])
    answers = torch.arange(4).repeat_interleave(8)[None]
    losses_BS = torch.full(answers.shape, loss, dtype=dtype)
    extra = {"answer": answers, "pairs": pairs, "reference_logps": -losses_BS}
    losses_BS = losses_BS + 16 * torch.finfo(dtype).eps * (answers % 2)  # logits of about 16
    losses_BS[0, 31] += lead
    batch = MicroBatch(answers, answers, torch.ones_like(losses_BS), torch.tensor([0]), extra=extra)
    objective = solo.chunk.objective
    _, metrics = objective(losses_BS, batch, cast("OutputLayer", GivenLosses(losses_BS)))
    assert metrics["rewards/margins"].item() > 0
    assert metrics["rewards/accuracies"].item() == 1


def trainer_of(folder: Path, objective: str) -> Trainer:
    flags = f"--hidden-dropout 0 --attention-dropout 0 --fp64 --objective {objective}"
    return build_trainer(tiny_run(folder, flags), 0, 1)


def test_a_step_divides_by_the_objectives_weight_and_reports_its_metrics(tmp_path: Path) -> None:
    """The micro-batches have different weights, so a mean of means would differ."""
    plain, other = trainer_of(tmp_path / "plain", "next_token"), trainer_of(tmp_path / "other", "weighted")
    batches = [random_batch(plain.config.model, 2, 8, seed=seed) for seed in range(2)]
    expected = train_step(plain, batches, Rates(1e-3, 0.0))
    found = train_step(other, [weighted(batch) for batch in batches], Rates(1e-3, 0.0))
    assert found.extra.keys() == {"whole loss"}
    assert found.extra["whole loss"].item() == pytest.approx(expected.loss.item(), rel=1e-13)
    assert found.loss.item() == pytest.approx(0.5 * expected.loss.item(), rel=1e-13)
    assert found.grad_norm.item() == pytest.approx(0.5 * expected.grad_norm.item(), rel=1e-10)


def test_named_tensors_are_inputs_of_a_captured_step(tmp_path: Path) -> None:
    """Every step has other weights, so a step that replays the captured ones has another loss."""
    eager, captured = trainer_of(tmp_path / "eager", "weighted"), trainer_of(tmp_path / "captured", "weighted")
    run, tape = recorded(captured, "step")
    for step in range(WARM_UP_STEPS + 3):
        batches = [weighted(random_batch(eager.config.model, 2, 8, seed=10 * step + i)) for i in range(2)]
        rates = Rates(torch.tensor(1e-2), 0.1)
        expected, found = StepRunner(eager)(batches, rates), run(batches, rates)
        assert found.loss.item() == expected.loss.item()
    assert tape.repetitions > 0
