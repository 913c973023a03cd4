"""Objectives: what training minimises.

The loss of a step is a sum over the global batch divided by the sum of its weights, so it does not depend on how
samples are split into micro-batches and over ranks. A plugin adds an objective with ``register("objective", name)`` on
a subclass of :class:`Objective`; ``--objective name`` selects it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from megatron.config.model import ModelConfig
from megatron.config.plugins import registered
from megatron.config.run import TrainingConfig
from megatron.distributed.micro_batch import MicroBatch
from megatron.layers.context import BuildContext
from megatron.layers.loss import OutputLayer


class Objective(ABC):
    """The loss of a micro-batch, computed by the last stage from the hidden states after the final norm."""

    # Further metrics that calls return, logged by these names as means: their sums divided by the sum of weights.
    metric_names: tuple[str, ...] = ()

    def __init__(self, config: ModelConfig, training: TrainingConfig, context: BuildContext) -> None:
        """Keep what the loss depends on.

        Args:
            config: of the model.
            training: options of objectives.
            context: the groups of ranks; ``context.cp`` is set if each holds a part of every sample.

        """
        self.config, self.training, self.context = config, training, context

    def weight(self, batch: MicroBatch) -> Tensor:
        """Return the weight of a micro-batch in the global loss, 0-d and fp64: its number of unmasked tokens.

        All ranks call it, on the same micro-batches as the last stage. MoE router losses are divided by the same sum
        of weights, so with another weight than tokens their coefficients mean something else.
        """
        return batch.loss_mask.sum(dtype=torch.float64)

    @abstractmethod
    def __call__(
        self, hidden_SBH: Tensor, batch: MicroBatch, output_layer: OutputLayer
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the summed loss, 0-d, and the metrics.

        Args:
            hidden_SBH: hidden states ``[S(/tp), B, H]``.
            batch: labels, loss mask and ``extra`` tensors.
            output_layer: call it once, for the summed cross-entropy of labels, or once its ``token_losses``.

        Returns:
            The loss, equal on all tensor-parallel ranks, and detached sums by name: those of ``metric_names``, and
            ``lm loss`` if the logged loss is not the loss itself.

        """


class NextTokenPrediction(Objective):
    """Cross-entropy of the next token, and the z-loss; the logged loss omits the latter."""

    def __call__(
        self, hidden_SBH: Tensor, batch: MicroBatch, output_layer: OutputLayer
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the summed loss, and the cross-entropy."""
        loss, cross_entropy = output_layer(
            hidden_SBH, batch.labels, batch.loss_mask, self.config.z_loss_coeff, is_objective=True
        )
        return loss, {"lm loss": cross_entropy}


OBJECTIVES: dict[str, type[Objective]] = {"next_token": NextTokenPrediction}
"""Built-in objectives by the choices of ``--objective``."""


def make_objective(config: ModelConfig, training: TrainingConfig, context: BuildContext) -> Objective:
    """Create the objective ``training.objective``, built-in or registered by a plugin."""
    chosen = {**registered("objective"), **OBJECTIVES}[training.objective]
    objective: Objective = chosen(config, training, context)
    return objective
