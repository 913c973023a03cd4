"""Muon: momentum whose singular values are all brought near one (Jordan et al. 2024, arXiv 2502.16982).

A *logical* matrix is what maps one vector to another: of the fused projections, queries, keys, values, gate and up are
each one, and every expert has its own. Where tensor parallelism cuts it, ranks sum their parts of its Gram matrix, so
that each iterates on its part of the whole. ZeRO never cuts one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from megatron.config.run import OptimizerConfig
from megatron.optim.rules import Rate
from megatron.parallel import comm
from megatron.parallel.comm import Group
from megatron.parallel.mesh import Mesh
from megatron.parallel.shard import ShardSpec

QUINTIC = (3.4445, -4.7750, 2.0315)
"""Coefficients of the iteration: they raise small singular values fastest, and leave all near one, not at it."""


def is_muons(name: str, spec: ShardSpec) -> bool:
    """Whether Muon moves a parameter: a matrix of a block, not of the embeddings or the output layer."""
    return name.startswith("layers.") and len(spec.shape) == 2


@dataclass(frozen=True)
class Part:
    """A rank's part of a logical matrix, or of several that lie in one tensor.

    Attributes:
        local: its rows, as an index into the rank's tensor seen as ``local_view``.
        shape: of the whole matrix, ``(m, n)``.
        count: of matrices.
        cut: dimension of the matrix that ranks share, 0 or 1; None when each has all of it.
        copied: so many of the rows here, at their end, several ranks may have.
        copies: how many ranks have these.
    """

    local: tuple[slice, ...]
    shape: tuple[int, int]
    count: int
    cut: int | None
    copied: int = 0
    copies: int = 1

    def of(self, tensor: Tensor, spec: ShardSpec) -> Tensor:
        """The part, ``[count, m(/tp), n(/tp)]``."""
        part = tensor.view(spec.local_view)[self.local]
        return part.reshape(self.count, -1, part.shape[-1])

    def once(self, x: Tensor) -> Tensor:
        """``x`` so that over all ranks every row counts once: those that several have, in equal shares."""
        if self.copies == 1:
            return x
        own, copied = x.split((x.shape[1] - self.copied, self.copied), dim=1)
        return torch.cat((own, copied / self.copies), dim=1)


def parts_of(spec: ShardSpec, split: bool) -> list[Part]:
    """The logical matrices that a parameter consists of; ``split``: queries, keys and values are apart."""
    local, whole, lead = spec.local_view, spec.view, spec.matrices
    count = prod(local[:lead])
    rows_cut = any(a != b for a, b in zip(local[lead:-1], whole[lead:-1]))
    cut = 1 if local[-1] != whole[-1] else 0 if rows_cut else None
    if not spec.fused:
        return [Part((), (prod(whole[lead:-1]), whole[-1]), count, cut)]
    groups, width, shared = whole[0], prod(whole[2:-1]), len(spec.fused) - 1
    queries, rows, copies = local[1] - shared, local[0] * width, len(spec.pieces[-1].replicas)
    if not split:
        return [Part((), (prod(whole[:-1]), whole[-1]), 1, cut, shared * rows, copies)]
    found = [Part((slice(None), slice(0, queries)), (groups * spec.fused[0] * width, whole[-1]), 1, cut)]
    for i in range(queries, local[1]):
        found.append(Part((slice(None), slice(i, i + 1)), (groups * width, whole[-1]), 1, cut, rows, copies))
    return found


def orthogonalized(x: Tensor, part: Part, group: Group, steps: int) -> Tensor:
    """``x`` with its singular values near one, by Newton-Schulz iterations on whole matrices.

    With the Gram matrix of the side that is not cut, ``X <- a X + X (b G + c G^2)``, ``G = X^T X = sum_i X_i^T X_i``,
    or the same from the left: every rank needs its part of X and all of G.

    Args:
        x: ``[count, m(/tp), n(/tp)]``, at least fp32.
        part: which part of the matrices that is.
        group: the ranks that have the others.
        steps: iterations.

    """
    a, b, c = QUINTIC
    rows_inside = part.cut == 0 or (part.cut is None and x.shape[1] > x.shape[2])
    if part.cut is None:
        group = Group()
    square = comm.all_reduce((part.once(x) * x).sum((1, 2), keepdim=True), group)
    x = x / (square.sqrt() + 1e-7)
    for _ in range(steps):
        gram = comm.all_reduce(part.once(x).mT @ x if rows_inside else x @ x.mT, group)
        factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, x, factor, beta=a) if rows_inside else torch.baddbmm(x, factor, x, beta=a)
    return x


def scale_of(shape: tuple[int, int], mode: str) -> float:
    """What the update of an ``[m, n]`` matrix is multiplied by; see ``muon_scale_mode``."""
    m, n = shape
    return {"spectral": max(m, n), "unit_rms_norm": m / n, "shape_scaling": max(1.0, m / n)}[mode] ** 0.5


class Muon:
    """``m = beta m + (1 - beta) g``, ``w -= lr (scale * orthogonalized(m) + weight_decay w)``."""

    def __init__(
        self,
        params: Sequence[Tensor],
        names: Sequence[str],
        specs: Mapping[str, ShardSpec],
        mesh: Mesh,
        config: OptimizerConfig,
    ) -> None:
        """Make the state.

        Args:
            params: to move, of their local shapes.
            names: theirs.
            specs: by name.
            mesh: the groups.
            config: momentum, iterations and scale.

        """
        self.params, self.config = list(params), config
        self.state = {"exp_avg": [torch.zeros_like(p) for p in self.params]}
        self.step_counts: list[Tensor] = []
        self._specs = [specs[name] for name in names]
        self._parts = [parts_of(spec, config.muon_split_qkv) for spec in self._specs]
        self._groups = [mesh.group("etp") if spec.expert else mesh.tp for spec in self._specs]

    @torch.no_grad()
    def update(self, grads: Sequence[Tensor], lr: Rate, weight_decay: float, skip: Tensor) -> None:
        """One step of :class:`megatron.optim.rules.Rule`."""
        c, go = self.config, skip == 0
        for i, (param, grad, momentum) in enumerate(zip(self.params, grads, self.state["exp_avg"], strict=True)):
            given = grad.where(go, momentum)  # a skipped step leaves the momentum as it is
            momentum.lerp_(given, 1.0 - c.muon_momentum)
            direction = given.lerp(momentum, c.muon_momentum) if c.muon_nesterov else momentum
            moved = param * (1.0 - lr * weight_decay)
            for part in self._parts[i]:
                step = orthogonalized(part.of(direction, self._specs[i]), part, self._groups[i], c.muon_num_ns_steps)
                target = moved.view(self._specs[i].local_view)[part.local]
                target.sub_(
                    step.view(target.shape) * (lr * scale_of(part.shape, c.muon_scale_mode) * c.muon_extra_scale_factor)
                )
            param.copy_(moved.where(go, param))
