"""Muon: orthogonalised momentum (Jordan et al. 2024, arXiv 2502.16982).

Every *logical* matrix is orthogonalised by itself: queries, keys and values of a fused projection, gate and up
projection, and each expert. A matrix that is sharded over tensor-parallel ranks is not gathered: the ranks sum its Gram
matrix, and each iterates on its shard. ZeRO-1 and 2 never divide a matrix. ZeRO-3 does: the ranks that update a part of
a matrix gather its momentum, and each orthogonalises all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from megatron.config.optimizer import RULE_STATE, OptimizerConfig
from megatron.distributed import comm
from megatron.distributed.comm import Group
from megatron.distributed.mesh import Mesh
from megatron.distributed.sharding import ShardSpec
from megatron.optimizer.rules import UpdateArgs, UpdateRule

NEWTON_SCHULZ_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the Newton-Schulz iteration: small singular values grow fastest, and all end near one."""

GatherShards = Callable[[Callable[[str], Tensor]], Iterable[tuple[str, slice, Tensor]]]
"""Gathers tensors of the parameters' shapes, of which a function computes this rank's shards by name. Returns name,
shard and whole tensor of those of which this rank has a shard; collective."""


@dataclass(frozen=True)
class MatrixShard:
    """A rank's shard of one logical matrix, or of several of one shape in the same tensor."""

    # Index of its rows in the rank's tensor, viewed as ``local_view``.
    local: tuple[slice, ...]
    # (m, n) of the whole matrix.
    shape: tuple[int, int]
    # Number of matrices.
    count: int
    # Dimension that is sharded over tensor-parallel ranks, 0 or 1; None if every rank holds the whole matrix.
    sharded_dim: int | None
    # The last ``shared_rows`` rows are held by ``holders`` ranks (key and value heads of a shared group).
    shared_rows: int = 0
    holders: int = 1

    def view_in(self, tensor: Tensor, spec: ShardSpec) -> Tensor:
        """Return the shard as ``[count, m(/tp), n(/tp)]``."""
        rows = tensor.view(spec.local_view)[self.local]
        return rows.reshape(self.count, -1, rows.shape[-1])

    def once(self, x: Tensor) -> Tensor:
        """Divide rows that several ranks hold by their number, so that sums over ranks count every row once."""
        if self.holders == 1:
            return x
        own, shared = x.split((x.shape[1] - self.shared_rows, self.shared_rows), dim=1)
        return torch.cat((own, shared / self.holders), dim=1)


def matrix_shards(spec: ShardSpec, split: bool) -> list[MatrixShard]:
    """Return the logical matrices of a parameter; with ``split``, queries, keys and values are separate."""
    local, whole, lead = spec.local_view, spec.view, spec.matrices
    count = prod(local[:lead])
    rows_sharded = any(a != b for a, b in zip(local[lead:-1], whole[lead:-1]))
    sharded_dim = 1 if local[-1] != whole[-1] else 0 if rows_sharded else None
    if not spec.fused:
        return [MatrixShard((), (prod(whole[lead:-1]), whole[-1]), count, sharded_dim)]
    groups, head_dim, kv = whole[0], prod(whole[2:-1]), 2
    wide = len(spec.fused) - kv  # queries, and gates
    queries = (local[1] - kv) // wide
    rows = local[0] * head_dim  # of one key or value head per group
    holders = len(spec.pieces[-1].tp_ranks)
    if not split:
        return [MatrixShard((), (prod(whole[:-1]), whole[-1]), 1, sharded_dim, kv * rows, holders)]
    q_shape, kv_shape = (groups * spec.fused[0] * head_dim, whole[-1]), (groups * head_dim, whole[-1])
    parts = (slice(i * queries, (i + 1) * queries) for i in range(wide))
    matrices = [MatrixShard((slice(None), part), q_shape, 1, sharded_dim) for part in parts]
    for i in range(wide * queries, local[1]):
        matrices.append(MatrixShard((slice(None), slice(i, i + 1)), kv_shape, 1, sharded_dim, rows, holders))
    return matrices


def orthogonalize(x: Tensor, part: MatrixShard, group: Group, steps: int, dtype: torch.dtype | None = None) -> Tensor:
    """Bring the singular values of ``x`` near one, by Newton-Schulz iterations on whole matrices.

    With the Gram matrix of the side that is not sharded, ``X <- a X + X (b G + c G^2)``,
    ``G = X^T X = sum_i X_i^T X_i``, or the same from the left. Every rank needs its shard of X and all of G.

    Args:
        x: ``[count, m(/tp), n(/tp)]``, at least fp32.
        part: describes the shard.
        group: the ranks that hold the other shards.
        steps: number of iterations.
        dtype: of the iterations; that of ``x`` by default. They tolerate bf16, as Muon's authors show.
    """
    a, b, c = NEWTON_SCHULZ_COEFFICIENTS
    from_right = part.sharded_dim == 0 or (part.sharded_dim is None and x.shape[1] > x.shape[2])
    if part.sharded_dim is None:
        group = Group()
    square = comm.all_reduce((part.once(x) * x).sum((1, 2), keepdim=True), group)
    result_dtype = x.dtype
    x = (x / (square.sqrt() + 1e-7)).to(dtype)
    for _ in range(steps):
        gram = comm.all_reduce(part.once(x).mT @ x if from_right else x @ x.mT, group)
        factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, x, factor, beta=a) if from_right else torch.baddbmm(x, factor, x, beta=a)
    return x.to(result_dtype)


def update_scale(shape: tuple[int, int], mode: str) -> float:
    """Return the factor on the update of an ``[m, n]`` matrix; see ``muon_scale_mode``."""
    m, n = shape
    return {"spectral": max(m, n), "unit_rms_norm": m / n, "shape_scaling": max(1.0, m / n)}[mode] ** 0.5


class Muon(UpdateRule):
    """``m = beta m + (1 - beta) g``, ``w -= lr (scale * orthogonalized(m) + weight_decay w)``."""

    state_kinds = RULE_STATE["muon"]

    def __init__(
        self,
        params: Sequence[Tensor],
        names: Sequence[str],
        specs: Mapping[str, ShardSpec],
        mesh: Mesh,
        config: OptimizerConfig,
        gather: GatherShards | None = None,
    ) -> None:
        """Allocate the state.

        Args:
            params: to update: whole, of their local shapes, or shards if there is ``gather``.
            names: of these parameters.
            specs: by name.
            mesh: the groups.
            config: momentum, iterations and scale.
            gather: :meth:`GradBuffer.gather_shards` of the parameters of all ranks.
        """
        self.params, self.config, self._gather = list(params), config, gather
        self.state = {"exp_avg": [torch.zeros_like(p) for p in self.params]}
        self.step_counts: list[Tensor] = []
        self._index = {name: i for i, name in enumerate(names)}
        self._specs = {name: specs[name] for name in names}
        self._parts = {name: matrix_shards(specs[name], config.muon_split_qkv) for name in names}
        self._groups = {name: mesh.group("etp") if specs[name].expert else mesh.tp for name in names}

    @torch.no_grad()
    def update(self, args: UpdateArgs) -> None:
        """Apply one step."""
        args, config, keep = args.scaled(), self.config, args.skip == 0
        dtype = None
        fp32 = all(param.dtype == torch.float32 for param in self.params)
        if args.skip.is_cuda and fp32 and config.muon_fp32_matmul_prec == "medium":
            dtype = torch.bfloat16

        def direction_of(name: str) -> Tensor:
            momentum = self.state["exp_avg"][self._index[name]]
            grad = args.grads[self._index[name]].where(keep, momentum)  # so a skipped step does not change the momentum
            momentum.lerp_(grad, 1.0 - config.muon_momentum)
            return grad.lerp(momentum, config.muon_momentum) if config.muon_nesterov else momentum

        whole = ((name, slice(None), direction_of(name)) for name in self._index)
        for name, shard, direction in whole if self._gather is None else self._gather(direction_of):
            i, spec = self._index[name], self._specs[name]
            step = torch.empty_like(direction)
            for part in self._parts[name]:
                of_part = orthogonalize(
                    part.view_in(direction, spec), part, self._groups[name], config.muon_num_ns_steps, dtype
                )
                scale = update_scale(part.shape, config.muon_scale_mode) * config.muon_extra_scale_factor
                target = step.view(spec.local_view)[part.local]
                torch.mul(of_part.view(target.shape), args.lr * scale, out=target)
            param = self.params[i]
            updated = param * (1.0 - args.lr * args.weight_decay)
            updated.sub_(step.flatten()[shard].view(param.shape))
            updated = updated.where(keep, param)
            if args.observe is not None:
                args.observe(i, 0, param, updated)
            param.copy_(updated)
        args.write_weights(self.params)
