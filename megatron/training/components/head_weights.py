"""Weights of the losses of multi-token prediction, which count fewer predictions than the objective."""

from __future__ import annotations

from dataclasses import replace
from typing import Self

import torch

from megatron.config.multi_token import LATER_MASK, LATER_WEIGHTS
from megatron.distributed import comm
from megatron.distributed.micro_batch import MicroBatch
from megatron.training.component import Component
from megatron.training.trainer import Trainer


class HeadWeights(Component):
    """Adds the weights of the losses of all depths to the micro-batches of a step.

    The step divides every sum by N, the objective's weight of the global batch. Depth k counts N_k predictions in it:
    those whose labels are in the sample and in the document. Its loss is their mean, so its sum is multiplied by
    N / N_k. N and N_k are sums over all micro-batches and ranks, so the loss does not depend on the layout. A mean over
    each micro-batch would, because micro-batches count different numbers of predictions.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    @classmethod
    def create(cls, trainer: Trainer) -> Self | None:
        """Return the component of a model with multi-token prediction."""
        return cls(trainer) if trainer.config.model.prediction_depths else None

    def on_batches(self, batches: list[MicroBatch]) -> list[MicroBatch]:
        """Return the micro-batches with the weights ``[depths]``, fp64. Collective."""
        counted = (batch.extra[LATER_MASK].sum((0, 1), dtype=torch.float64) for batch in batches)
        weight = self._trainer.objective.weight
        sums = torch.stack([torch.cat((weight(b).double().view(1), n)) for b, n in zip(batches, counted)]).sum(0)
        whole, *depths = comm.all_reduce(sums, self._trainer.mesh.dp_cp).clamp(min=1.0).split(1)
        weights = whole / torch.cat(depths)
        return [replace(batch, extra={**batch.extra, LATER_WEIGHTS: weights}) for batch in batches]
