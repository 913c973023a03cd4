"""The loss of each source of the training data in log lines, with ``--log-loss-per-source``.

The last stage observes the losses of tokens in the output layer, and keeps the sums of each sample on the device. A log
line adds them up over all ranks, by the sources of the samples, in one collective; no step waits.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn

from megatron.distributed import comm
from megatron.distributed.micro_batch import MicroBatch
from megatron.training.component import Component
from megatron.training.loggers.base import Metrics
from megatron.training.trainer import Trainer

SOURCE_LOSS = "source loss "
"""Beginning of the names of the metrics."""


class SourceLosses(Component):
    """Adds the mean loss per token of each source since the last log line."""

    def __init__(self, trainer: Trainer) -> None:
        """Observe nothing yet."""
        self._trainer = trainer
        self._batch: MicroBatch | None = None  # whose loss is to come
        self._seen: list[Tensor] = []  # fp64 [3, b]: samples of a micro-batch, sums of their losses, and labels

    @classmethod
    def create(cls, trainer: Trainer) -> Self | None:
        """See :class:`Feature`."""
        return cls(trainer) if trainer.config.data.log_loss_per_source else None

    def on_train_start(self) -> None:
        """Observe the output layer, on one of the tensor-parallel ranks, which have the same losses."""
        for chunk in self._trainer.chunks.values():
            if chunk.output_layer is not None and self._trainer.mesh.coordinate["tp"] == 0:
                chunk.register_forward_pre_hook(self._enter)
                chunk.output_layer.losses.register_forward_hook(self._see)

    def _enter(self, chunk: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._batch = inputs[1] if chunk.training else None  # not those of evaluations

    @torch.no_grad()
    def _see(self, module: nn.Module, inputs: tuple[Any, ...], losses_T: Tensor) -> None:
        batch, self._batch = self._batch, None  # heads call the layer, too, after the objective
        if batch is not None:
            losses_SB = losses_T.view(-1, len(batch.tokens)).double()
            sums = losses_SB.sum(0), batch.loss_mask.sum(1, dtype=torch.float64)
            self._seen.append(torch.stack([batch.sample_ids.double(), *sums]))

    def metrics(self) -> Metrics:
        """Return the losses of the sources that were read since the last log line. Collective."""
        trainer = self._trainer
        dataset = trainer.data.datasets["train"]
        sources = dict.fromkeys(usage.source for usage in dataset.source_usage(0))
        names: dict[str | None, int] = {name: k for k, name in enumerate(sources)}
        sums = torch.zeros(2, len(names), dtype=torch.float64)
        if self._seen:
            samples, losses, labels = torch.cat(self._seen, 1).cpu()
            places = torch.tensor([names[dataset.source_of(int(i))] for i in samples.tolist()])
            sums.index_add_(1, places, torch.stack([losses, labels]))
            self._seen.clear()
        with trainer.mesh.world.meter.paused():
            total = comm.all_reduce(sums.to(trainer.device), trainer.mesh.world).cpu()
        means = zip(names, *total.tolist())
        return {f"{SOURCE_LOSS}{name}": loss / labels for name, loss, labels in means if labels}
