"""Optimizer offload: shards of main parameters, moments and averages in host memory, updated by the CPU.

The device keeps weights and gradients. Of the parameters in :attr:`OptimizerOffload.weights`:

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

import torch
from torch import Tensor

from megatron.distributed.host_memory import CopyStream, host_buffer
from megatron.distributed.sharding import ShardSpec
from megatron.optimizer.grad_buffer import GradBuffer, adjacent_runs, flat_runs
from megatron.optimizer.lr_scheduler import Rates

Copies = list[tuple[Tensor, Tensor]]
"""Pairs of a device tensor and its host copy, both flat."""


class OptimizerOffload:
    """Host copies of the gradients and weights that the CPU updates, and the copies between host and device."""

    def __init__(
        self,
        names: Collection[str],
        specs: Mapping[str, ShardSpec],
        buckets: GradBuffer,
        shards: Mapping[str, Tensor],
        shards_on_host: bool = False,
    ) -> None:
        """Allocate the host memory and copy the weights there.

        Args:
            names: of the parameters to offload.
            specs: by name.
            buckets: of the gradients; :attr:`GradBuffer.on_reduced` is set.
            shards: this rank's shards of the weights, by name.
            shards_on_host: they are in host memory, so they are updated in place and not copied.

        """
        self.device = buckets.device
        self._copies = CopyStream(self.device)
        self._shards = {} if shards_on_host else {name: shards[name] for name in names}
        # By name, shaped like the shards.
        self.grads: dict[str, Tensor] = {}
        self.weights = {name: shards[name] for name in names} if shards_on_host else {}
        # Gradients by id of their bucket; under 0 those that are summed once more after the reduction.
        self._grads: dict[int, Copies] = defaultdict(list)
        for bucket in buckets.buckets:
            mine = [name for name in bucket.specs if name in names]
            late = [name for name in mine if specs[name].tied or any(p.partial for p in specs[name].pieces)]
            for key, some in ((0, late), (id(bucket), [name for name in mine if name not in late])):
                self._grads[key] += _mirror({name: buckets.grads[name] for name in some}, self.grads)
            for shard, weight in _mirror({n: self._shards[n] for n in mine if n in self._shards}, self.weights):
                weight.copy_(shard)
        buckets.on_reduced = lambda bucket: self._fetch(self._grads.get(id(bucket), []))
        self._scalars = host_buffer(4, torch.float64, self.device)

    def fetch_late(self) -> None:
        """Start copying the gradients that were summed after their bucket was reduced."""
        self._fetch(self._grads[0])

    def _fetch(self, copies: Copies) -> None:
        if copies:
            with self._copies.ordered():
                for grad, host in copies:
                    host.copy_(grad, non_blocking=True)

    def start_scalars(self, rates: Rates, skip: Tensor, factor: Tensor) -> None:
        """Start copying the device scalars that the host needs."""
        rate = [x for x in (rates.lr, rates.decoupled_lr) if isinstance(x, Tensor)]
        scalars = torch.stack([x.double() for x in (skip, factor, *rate)])
        with self._copies.ordered():
            self._scalars[: len(scalars)].copy_(scalars, non_blocking=True)
            if scalars.is_cuda:
                scalars.record_stream(torch.cuda.current_stream(self.device))

    def wait_scalars(self, rates: Rates, skip: Tensor, factor: Tensor) -> tuple[Rates, Tensor, Tensor]:
        """Wait for the gradients and scalars; return the scalars as numbers and host tensors of the same dtypes."""
        self._copies.synchronize()
        host_skip, host_factor, *rate = self._scalars.clone()
        lr = rate.pop(0).item() if isinstance(rates.lr, Tensor) else rates.lr
        decoupled_lr = rate[0].item() if isinstance(rates.decoupled_lr, Tensor) else rates.decoupled_lr
        return Rates(lr, rates.weight_decay, decoupled_lr), host_skip.to(skip.dtype), host_factor.to(factor.dtype)

    def upload(self, names: Sequence[str]) -> None:
        """Start copying weights to the device."""
        with self._copies.ordered():
            for name in (name for name in names if name in self._shards):
                self._shards[name].copy_(self.weights[name], non_blocking=True)

    def wait(self) -> None:
        """Let the device wait for the copies."""
        self._copies.wait()

    def synchronize(self) -> None:
        """Let the host wait for all copies, those of the parameter store too, before it changes :attr:`weights`."""
        with self._copies.ordered():  # the current stream has waited for those
            pass
        self._copies.synchronize()


def _mirror(tensors: Mapping[str, Tensor], views: dict[str, Tensor]) -> Copies:
    """Allocate host memory for device tensors, and add views of it to ``views``; adjacent tensors stay adjacent."""
    names, copies = [*tensors], []
    for run in adjacent_runs([*tensors.values()]):
        of_run = {names[index]: tensors[names[index]] for index in run}
        (flat,) = flat_runs([*of_run.values()])
        host = host_buffer(flat.numel(), flat.dtype, flat.device)
        copies.append((flat.view(-1), host))
        for (name, tensor), part in zip(of_run.items(), host.split([t.numel() for t in of_run.values()])):
            views[name] = part.view(tensor.shape)
    return copies
