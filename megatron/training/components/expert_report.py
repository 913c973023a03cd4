"""Metrics of the experts in log lines: how evenly they are chosen, dropped choices, biases, and losses by layer.

Routers count on the device (:mod:`megatron.training.components.expert_loads`). A log line adds up the counts of the
steps since the last one over all ranks, in one collective; no step waits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from megatron.distributed import comm
from megatron.distributed.micro_batch import MicroBatch
from megatron.layers.recompute import is_recomputing
from megatron.layers.router import Router, Routing
from megatron.training.component import Component
from megatron.training.components.expert_loads import ExpertLoadBalance
from megatron.training.loggers.base import BY_LAYER, Metrics
from megatron.training.trainer import Trainer

RECORDS = 100
"""Records of the loads of all experts in a run, by default."""


class ExpertReport(Component):
    """Adds metrics of the experts to log lines; the L rows of its tensors are all blocks, those of heads last."""

    def __init__(self, trainer: Trainer) -> None:
        """Report on the experts of all layers."""
        self._trainer, self._model, logging = trainer, trainer.config.model, trainer.config.logging
        self._per_layer, self._interval = logging.moe_per_layer_logging, logging.save_tokens_per_expert_interval
        self._losses = self._model.router_losses if self._per_layer else {}
        depths, heads = len(self._model.head_layers), self._model.head_blocks
        # Times that a step uses each block.
        self._uses = [1] * self._model.num_layers + [depths // len(heads) for _ in heads]
        self._blocks = len(self._uses)
        # Of this rank, since the last log line: losses of its tokens, and their number, as the losses count them.
        self._losses_LN = torch.zeros(self._blocks, len(self._losses), dtype=torch.float64, device=trainer.device)
        self._tokens = torch.zeros((), dtype=torch.float64, device=trainer.device)

    @classmethod
    def create(cls, trainer: Trainer) -> Self | None:
        """See :class:`Feature`."""
        return None if trainer.config.model.num_experts is None else cls(trainer)

    def on_train_start(self) -> None:
        """Find the counts and biases of this rank, and observe the losses of its routers if they are logged."""
        trainer = self._trainer
        (self._loads,) = (each for each in trainer.components if isinstance(each, ExpertLoadBalance))
        self._rows = [self._row(router) for router in self._loads.routers]
        biases = {f"{router}.expert_bias": self._row(router) for router in self._loads.routers}
        # Each element of a bias on one rank.
        counted = trainer.buckets.counted_shards().items()
        self._biases = {n: (biases[n], share) for n, share in counted if n in biases and trainer.specs[n].owned}
        self._recorded = trainer.iteration
        # Choices of all ranks since the last record.
        self._counts_LE = torch.zeros(self._blocks, self._model.num_experts or 0, dtype=torch.float64)
        for chunk in trainer.chunks.values() if self._losses else ():
            for module in chunk.modules():
                if isinstance(module, Router):
                    module.register_forward_hook(partial(self._see_losses, self._row(module.context.prefix)))

    def _row(self, router: str) -> int:
        """Return the row of a router by its name, ``layers.3.mlp.router``, or ``mtp.layers.0...`` of a head."""
        words = router.split(".")
        index = int(words[words.index("layers") + 1])
        return index if words[0] == "layers" else self._model.num_layers + index

    @torch.no_grad()
    def _see_losses(self, row: int, module: nn.Module, inputs: tuple[Any, ...], output: Routing) -> None:
        if output.losses and not is_recomputing():
            losses = torch.stack([output.losses[name].double() for name in self._losses])
            self._losses_LN[row] += losses / self._uses[row]

    def on_step_taken(self, batches: Sequence[MicroBatch]) -> None:
        """Count the tokens, on one of the ranks that have them."""
        here = self._trainer.mesh.coordinate
        if self._losses and here["tp"] == here["pp"] == 0:
            self._tokens += torch.stack([self._trainer.objective.weight(batch).double() for batch in batches]).sum()

    def metrics(self) -> Metrics:
        """Return the metrics of the steps since the last log line. Collective."""
        model, trainer = self._model, self._trainer
        counts_LE, dropped_L, biases_LE, losses_LN, tokens = self._totals()
        has_bias, drops = model.moe_router_enable_expert_bias, model.moe_expert_capacity_factor is not None
        by_layer = expert_metrics(counts_LE, dropped_L if drops else None, biases_LE if has_bias else None)
        metrics = summary_of_layers(by_layer, counts_LE.sum(1))
        metrics |= {f"{name}{BY_LAYER}": values for name, values in by_layer.items()}
        if model.head_blocks:
            metrics["expert-mtp-layers"] = len(model.head_blocks)
        if self._per_layer:
            for (name, coefficient), losses_L in zip(self._losses.items(), losses_LN.unbind(1)):
                by_layer[name] = rounded_by_layer(losses_L / tokens.clamp(min=1.0) / coefficient, counts_LE)
            for name, values in by_layer.items():
                metrics |= {f"moe/{name}_layer_{i}": x for i, x in enumerate(values) if x is not None}
        self._counts_LE += counts_LE
        interval = self._interval or max(1, trainer.total_steps // RECORDS)
        if trainer.iteration >= self._recorded + interval or trainer.iteration == trainer.total_steps:
            metrics["expert-loads"] = loads_in_percent(self._counts_LE)
            self._counts_LE.zero_()
            self._recorded = trainer.iteration
        return metrics

    @torch.no_grad()
    def _totals(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return and reset the sums over all ranks: counts, dropped choices, biases, losses and tokens."""
        trainer, (blocks, experts) = self._trainer, self._counts_LE.shape
        counts = torch.zeros(blocks, experts + 1, dtype=torch.float64, device=trainer.device)
        if self._rows:
            counts[self._rows] = self._loads.window.double()
        biases_LE = torch.zeros_like(counts[:, :-1])
        for name, (row, share) in self._biases.items():
            start = trainer.buckets.shards[name].start
            shard = trainer.optimizer.main_params[name].view(-1)[share.start - start : share.stop - start]
            biases_LE[row, share.start : share.stop] = shard.double()
        parts = [counts, biases_LE, self._losses_LN, self._tokens.view(1)]
        with trainer.mesh.world.meter.paused():
            total = comm.all_reduce(torch.cat([part.flatten() for part in parts]), trainer.mesh.world).cpu()
        for sums in (self._loads.window, self._losses_LN, self._tokens):
            sums.zero_()
        split = total.split([part.numel() for part in parts])
        counts, biases_LE, losses_LN, tokens = (values.view(part.shape) for values, part in zip(split, parts))
        return counts[:, :-1], counts[:, -1], biases_LE, losses_LN, tokens


ByLayer = dict[str, list[float | None]]
"""A value per block by name of the metric; None for blocks without experts."""


def expert_metrics(counts_LE: Tensor, dropped_L: Tensor | None, biases_LE: Tensor | None) -> ByLayer:
    """Return how evenly experts are chosen in each layer.

    Args:
        counts_LE: choices of each expert; 0 in layers without experts.
        dropped_L: choices beyond the capacity, which are counted too; None without one.
        biases_LE: biases of the experts; None without them.
    """
    total_L, experts = counts_LE.sum(1), counts_LE.shape[1]
    loads_LE = counts_LE * (experts / total_L.unsqueeze(1))
    values = {
        "expert-load-max": loads_LE.amax(1),
        "expert-load-min": loads_LE.amin(1),
        "expert-load-entropy": -torch.special.xlogy(loads_LE, loads_LE / experts).mean(1) / math.log(experts),
        "experts-dead": (counts_LE == 0).sum(1),
    }
    if dropped_L is not None:
        values["dropped-choices"] = dropped_L / total_L
    if biases_LE is not None:
        values["expert-bias-range"] = biases_LE.amax(1) - biases_LE.amin(1)
    return {name: rounded_by_layer(values_L, counts_LE) for name, values_L in values.items()}


def rounded_by_layer(values_L: Tensor, counts_LE: Tensor) -> list[float | None]:
    """Return values to four digits, None for layers without experts."""
    chosen = zip(values_L.tolist(), counts_LE.sum(1).tolist())
    return [float(f"{value:.4g}") if total else None for value, total in chosen]


def summary_of_layers(by_layer: ByLayer, total_L: Tensor) -> dict[str, Any]:
    """Return the value of the worst layer of each metric; of dead experts and dropped choices, that of all layers.

    Args:
        by_layer: as :func:`expert_metrics` gives it.
        total_L: choices in each layer.
    """
    found = {name: [x for x in values if x is not None] for name, values in by_layer.items()}
    if not found["expert-load-max"]:
        return {}
    most = max(found["expert-load-max"])
    metrics: dict[str, Any] = {
        "expert-load-max": most,
        "expert-load-max-layer": by_layer["expert-load-max"].index(most),
        "expert-load-min": min(found["expert-load-min"]),
        "expert-load-entropy": min(found["expert-load-entropy"]),
        "experts-dead": int(sum(found["experts-dead"])),
    }
    if "dropped-choices" in found:
        dropped = sum((x or 0.0) * total for x, total in zip(by_layer["dropped-choices"], total_L.tolist()))
        metrics["dropped-choices"] = float(f"{dropped / total_L.sum().item():.4g}")
    if "expert-bias-range" in found:
        metrics["expert-bias-range"] = max(found["expert-bias-range"])
    return metrics


def loads_in_percent(counts_LE: Tensor) -> list[list[int] | None]:
    """Return the choices of each expert in percent of the mean of its layer; None for layers without experts.

    Only an expert without any has 0.
    """
    percent_LE = (counts_LE * (100 * counts_LE.shape[1] / counts_LE.sum(1, keepdim=True))).round()
    percent_LE = percent_LE.maximum((counts_LE > 0).double())
    chosen = zip(percent_LE, counts_LE.sum(1).tolist())
    return [row.long().tolist() if total else None for row, total in chosen]
