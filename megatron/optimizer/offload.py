"""Optimizer offload: shards of main parameters, moments and averages in host memory, updated by the CPU.

The device keeps weights and gradients. Of the parameters that :class:`HostMemory` mirrors:

1. Their reduced gradients are copied to the host while backward continues, as buckets complete.
2. The norm and the clip factor are computed on the device from all gradients, as without offload.
3. The device updates its own parameters. Meanwhile the host waits for the gradients and a few scalars (the only
   synchronisation of a step), updates its parameters and rounds them to the weights' dtype.
4. Every group's weights are copied back while the host updates the next group.

Per element and step a rank copies the gradient (at least fp32) to the host, and the weight to the device.
The design is that of ZeRO-Offload (Ren et al. 2021, arXiv 2101.06840), without its delayed update.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron.distributed.host_memory import CopyStream, host_buffer
from megatron.distributed.sharding import ShardSpec
from megatron.optimizer.distributed_optimizer import DistributedOptimizer, UpdateHook
from megatron.optimizer.grad_buffer import Bucket, GradBuffer, ReductionListener
from megatron.optimizer.lr_scheduler import Rates
from megatron.optimizer.main_params import copy_runs
from megatron.optimizer.param_groups import ParamGroup
from megatron.optimizer.parameter_store import ParameterStore
from megatron.optimizer.rules import UpdateArgs, UpdateRule

Copies = list[tuple[Tensor, Tensor]]
"""Pairs of a device tensor and its host copy, both flat."""


class HostMemory(ReductionListener):
    """Host copies of the gradients and weights that the CPU updates, and the copies between host and device."""

    def __init__(
        self,
        names: Collection[str],
        specs: Mapping[str, ShardSpec],
        buckets: GradBuffer,
        store: ParameterStore,
        norm_groups: int = 1,
    ) -> None:
        """Allocate the host memory and copy the weights there.

        Args:
            names: of the parameters that the host updates.
            specs: by name.
            buckets: of the gradients; they report each bucket that is reduced.
            store: of the weights. Those that it has in host memory are updated in place and not copied.
            norm_groups: number of groups of parameters that are clipped apart.
        """
        self.on_host, self._device = frozenset(names), buckets.device
        self._copies = CopyStream(self._device)
        # Shards on the device by name, to which updated weights are copied.
        self._uploaded = {} if store.on_host else {name: store.shards[name] for name in names}
        weights, grads = dict(store.shards), dict(buckets.grads)
        # Gradients by id of their bucket; under 0 those that are summed once more after the reduction.
        self._grads: dict[int, Copies] = defaultdict(list)
        for bucket in buckets.buckets:
            mine = [name for name in bucket.specs if name in names]
            late = [name for name in mine if specs[name].tied or any(p.partial for p in specs[name].pieces)]
            for key, some in ((0, late), (id(bucket), [name for name in mine if name not in late])):
                copies, on_host = copy_runs({name: buckets.grads[name] for name in some}, _host_memory)
                self._grads[key] += copies
                grads |= on_host
            copies, on_host = copy_runs({n: self._uploaded[n] for n in mine if n in self._uploaded}, _host_memory)
            weights |= on_host
            for shard, weight in copies:
                weight.copy_(shard)
        # Of this rank's shards by name, where they are updated. A gradient on the host is that of the last update.
        self.weights, self.grads = weights, grads
        buckets.report_to(self)
        self._scalars = host_buffer(1 + norm_groups, torch.float64, self._device)
        # The scalars of the step, once they are on the host.
        self._host_scalars: tuple[Tensor, list[Tensor]] | None = None

    def on_reduced(self, bucket: Bucket) -> None:
        """Start copying the gradients of a bucket to the host."""
        self._fetch(self._grads.get(id(bucket), []))

    def _fetch(self, copies: Copies) -> None:
        if copies:
            with self._copies.ordered():
                for grad, host in copies:
                    host.copy_(grad, non_blocking=True)

    def start(self, skip: Tensor, factors: Sequence[Tensor]) -> None:
        """Start copying what the host still needs."""
        self._fetch(self._grads[0])
        self._host_scalars = None
        scalars = torch.stack([skip.double(), *(factor.double() for factor in factors)])
        with self._copies.ordered():
            self._scalars.copy_(scalars, non_blocking=True)
            if scalars.is_cuda:
                scalars.record_stream(torch.cuda.current_stream(self._device))

    def local(self, args: UpdateArgs, group: ParamGroup) -> UpdateArgs:
        """Wait for the gradients and scalars, if the host updates the group; return the arguments there."""
        if self.on_host.isdisjoint(group.names):
            return args
        if self._host_scalars is None:
            self._copies.synchronize()
            skip, *factors = self._scalars.clone()
            self._host_scalars = skip.to(args.skip.dtype), factors
        skip, factors = self._host_scalars
        grads = [self.grads[name] for name in group.names]
        return replace(args, grads=grads, skip=skip, factor=factors[group.norm_group])

    def upload(self, names: Collection[str] | None = None) -> None:
        """Start copying weights to the device, all by default."""
        moved = [name for name in (self._uploaded if names is None else names) if name in self._uploaded]
        if moved:
            with self._copies.ordered():
                for name in moved:
                    self._uploaded[name].copy_(self.weights[name], non_blocking=True)

    def wait(self) -> None:
        """Let the device wait for the copies."""
        self._copies.wait()

    def synchronize(self) -> None:
        """Let the host wait for all copies, those of the parameter store too, before it changes :attr:`weights`."""
        with self._copies.ordered():  # the current stream has waited for those
            pass
        self._copies.synchronize()


class OffloadedOptimizer(DistributedOptimizer):
    """Updates some shards in host memory."""

    def __init__(self, memory: HostMemory, *arguments: Any) -> None:
        """Create the optimizer from ``arguments`` of :class:`DistributedOptimizer`."""
        super().__init__(*arguments)
        self.memory, self.grads = memory, memory.grads

    def _update(self, rates: Rates, skip: Tensor, factors: Sequence[Tensor], hooks: Sequence[UpdateHook]) -> None:
        self.memory.start(skip, factors)
        super()._update(rates, skip, factors, hooks)

    def _update_group(self, group: ParamGroup, rule: UpdateRule, args: UpdateArgs, hooks: Sequence[UpdateHook]) -> None:
        super()._update_group(group, rule, self.memory.local(args, group), hooks)
        self.memory.upload(group.names)

    def wait(self) -> None:
        """Wait until the weights are complete, so that main parameters may be changed."""
        super().wait()
        self.memory.synchronize()

    @torch.no_grad()
    def write_weights(self) -> None:
        """Round the main parameters to the weights, and gather these on all ranks."""
        self.main_params.write_weights()
        self.memory.upload()
        self._publish_weights()

    def _publish_weights(self) -> None:
        self.memory.wait()
        super()._publish_weights()


def _host_memory(flat: Tensor) -> Tensor:
    return host_buffer(flat.numel(), flat.dtype, flat.device)
