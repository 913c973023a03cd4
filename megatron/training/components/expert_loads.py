"""Loads of experts over the global batch, and what follows from them: the expert bias, the global balancing loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Self

import torch
from torch import Tensor

from megatron.checkpoint.format import Manifest
from megatron.checkpoint.load import load_sharded
from megatron.checkpoint.tensor_file import GlobalTensor, TensorPart
from megatron.distributed import comm
from megatron.distributed.sharding import Box
from megatron.layers.router import ExpertLoads, Router
from megatron.training.component import Component
from megatron.training.trainer import Trainer

KIND = "expert_loads"
"""Kind of the tensors in checkpoints: loads of the step before, which the global balancing loss needs."""


class ExpertLoadBalance(Component):
    """Sums the choices of a step over its micro-batches and ranks, and moves the biases of the routers by them.

    ``bias += rate * sign(mean load - load)`` (arXiv 2408.15664). Loads are whole numbers, so all ranks and layouts get
    the same bits. Choices that a capacity drops count, too. A skipped step moves nothing.
    """

    def __init__(self, trainer: Trainer, loads: Mapping[str, ExpertLoads]) -> None:
        """Count for the routers of this rank, by the global names of their modules."""
        self._trainer, self._loads, model = trainer, loads, trainer.config.model
        self._rate, self._global_loss = model.moe_router_bias_update_rate, model.has_global_loss
        # Names of the biases that this rank updates, at least in part, by router.
        biases = {router: f"{router}.expert_bias" for router in loads}
        self._biases = {router: name for router, name in biases.items() if name in trainer.optimizer.main_params}
        self._sums = self._global_loss or (model.moe_router_enable_expert_bias and model.lora_rank is None)
        # Choices of each expert, and those that were dropped, of this rank's tokens in the steps since a reader has set
        # them to 0; int64 [routers, E + 1], in the order of ``routers``.
        self.routers, experts = tuple(loads), model.num_experts or 0
        self.window = torch.zeros(len(loads), experts + 1, dtype=torch.int64, device=trainer.device)

    @classmethod
    def create(cls, trainer: Trainer) -> Self | None:
        """See :class:`Feature`."""
        if trainer.config.model.num_experts is None:
            return None
        routers = (m for chunk in trainer.chunks.values() for m in chunk.modules() if isinstance(m, Router))
        return cls(trainer, {router.context.prefix: router.loads for router in routers})

    @contextmanager
    def while_computing(self) -> Iterator[None]:
        """Count from 0; see :class:`Component`."""
        if counts := [count for loads in self._loads.values() for count in loads.counted()]:  # none in some stages
            torch._foreach_zero_(counts)
        yield

    @torch.no_grad()
    def update_buffers(self, skipped: Tensor) -> Sequence[str]:
        """Move the biases; see :class:`UpdateHook`. Collective."""
        if not self._loads:
            return ()
        chosen_LE = torch.stack([loads.chosen for loads in self._loads.values()])
        dropped_L1 = torch.stack([loads.dropped for loads in self._loads.values()]).unsqueeze(1)
        self.window.add_(torch.cat([chosen_LE, dropped_L1], 1).where(skipped == 0, 0))
        if self._sums:
            best = [loads.chosen if loads.best is None else loads.best for loads in self._loads.values()]
            mesh, totals = self._trainer.mesh, torch.stack([chosen_LE, torch.stack(best)])
            comm.all_reduce(totals, mesh.dp_cp)
            chosen_LE, best_LE = comm.all_reduce(totals, mesh.tp)
            self._move_biases(chosen_LE, skipped)
            for loads, best_E in zip(self._loads.values(), best_LE):
                loads.before.copy_(torch.where(skipped == 0, best_E, loads.before))
        return [*self._biases.values()]

    def _move_biases(self, loads_LE: Tensor, skipped: Tensor) -> None:
        """Move this rank's shards of the biases by the loads of the global batch."""
        optimizer, shards = self._trainer.optimizer, self._trainer.buckets.shards
        directions_LE = (loads_LE.sum(-1, keepdim=True) - loads_LE.shape[-1] * loads_LE).sign()
        moves_LE = directions_LE.double() * self._rate * (skipped == 0)
        for router, move_E in zip(self._loads, moves_LE):
            if (name := self._biases.get(router)) is not None:
                bias, shard = optimizer.main_params[name], shards[name]
                bias.add_(move_E[shard.start : shard.stop].to(bias))

    # ---- Checkpoints

    def _tensors(self, writes: bool) -> dict[str, GlobalTensor]:
        tensors = {}
        for router, loads in self._loads.items() if self._global_loss else ():
            shape = tuple(loads.before.shape)
            part = TensorPart(Box((0,), shape), loads.before)
            tensors[f"optim.{KIND}.{router}"] = GlobalTensor(shape, shape, loads.before.dtype, (part,) * writes)
        return tensors

    def stored_tensors(self) -> Mapping[str, GlobalTensor]:
        """See :class:`Component`."""
        mesh = self._trainer.mesh
        return self._tensors(writes=mesh.dp_cp.rank == 0 and mesh.tp.rank == 0)

    def tensors_to_load(self, manifest: Manifest) -> Mapping[str, GlobalTensor]:
        """See :class:`Component`."""
        return {name: tensor for name, tensor in self._tensors(True).items() if name in manifest.tensors}

    def load(self, manifest: Manifest) -> Sequence[str]:
        """See :class:`Component`."""
        self.on_weights_loaded()
        load_sharded(manifest, self.tensors_to_load(manifest), self._trainer.mesh.world)
        return ()

    def on_weights_loaded(self) -> None:
        """See :class:`Component`."""
        for loads in self._loads.values():
            loads.before.zero_()
