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
    the same bits. Choices that a capacity drops count, too. A skipped step changes nothing.
    """

    def __init__(self, trainer: Trainer, loads: Mapping[str, ExpertLoads]) -> None:
        """Count for the routers of this rank, by the global names of their modules."""
        self._trainer, self._loads, model = trainer, loads, trainer.config.model
        self._rate = model.moe_router_bias_update_rate
        self._keeps_loads = bool(model.balancing_losses.get("global_aux_loss"))
        names = {router: f"{router}.expert_bias" for router in loads}
        # Names of the biases that this rank updates, at least in part.
        self._biases = {router: name for router, name in names.items() if name in trainer.optimizer.main_params}

    @classmethod
    def create(cls, trainer: Trainer) -> Self | None:
        """See :class:`Feature`."""
        if not trainer.config.model.needs_expert_loads:
            return None
        routers = (m for chunk in trainer.chunks.values() for m in chunk.modules() if isinstance(m, Router))
        return cls(trainer, {router.context.prefix: router.loads for router in routers if router.loads is not None})

    @contextmanager
    def while_computing(self) -> Iterator[None]:
        """Count from zero; see :class:`Component`."""
        for loads in self._loads.values():
            loads.chosen.zero_()
            loads.best.zero_()
        yield

    @torch.no_grad()
    def update_buffers(self, skipped: Tensor) -> Sequence[str]:
        """Move the biases; see :class:`UpdateHook`. Collective."""
        if not self._loads:
            return ()
        mesh, optimizer = self._trainer.mesh, self._trainer.optimizer
        totals_L2E = torch.stack([torch.stack([loads.chosen, loads.best]) for loads in self._loads.values()])
        comm.all_reduce(comm.all_reduce(totals_L2E, mesh.dp_cp), mesh.tp)
        chosen_LE, best_LE = totals_L2E.unbind(1)
        directions_LE = (chosen_LE.sum(-1, keepdim=True) - chosen_LE.shape[-1] * chosen_LE).sign()
        steps_LE = directions_LE.double() * (self._rate * (skipped == 0))
        for (router, loads), best_E, step_E in zip(self._loads.items(), best_LE, steps_LE):
            loads.before.copy_(torch.where(skipped == 0, best_E, loads.before))
            if (name := self._biases.get(router)) is not None:
                shard, bias = self._trainer.buckets.shards[name], optimizer.main_params[name]
                bias.add_(step_E[shard.start : shard.stop].to(bias))
        return [*self._biases.values()]

    # ---- Checkpoints

    def _tensors(self, writes: bool) -> dict[str, GlobalTensor]:
        tensors = {}
        for router, loads in self._loads.items() if self._keeps_loads else ():
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
