"""What a layer needs to construct itself."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import nn

from megatron.kernels.registry import Kernels
from megatron.parallel.comm import Group
from megatron.parallel.grads import GradSink
from megatron.parallel.mesh import Mesh
from megatron.parallel.random import initialize
from megatron.parallel.shard import ExpertShard, Shard, ShardSpec

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Number formats by the names of ``--params-dtype``."""


@dataclass(frozen=True)
class BuildContext:
    """Mesh, sink and number format, and the dotted name of the module under construction.

    Attributes:
        mesh: the rank grid.
        sink: where gradients go.
        dtype: of parameters and activations.
        device: where they live; ``meta`` builds shapes only.
        seed: of initialisation and dropout.
        sequence_parallel: whether activations between TP regions are sharded over the sequence.
        initialised: whether parameters start from their random values; otherwise they are zero, to be loaded.
        kernels: what computes norms, activations and the like.
        specs: filled with every parameter's spec, by global name.
        params: filled with the parameters themselves.
        prefix: dotted name of the module.
    """

    mesh: Mesh
    sink: GradSink
    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")
    seed: int = 1234
    sequence_parallel: bool = False
    initialised: bool = True
    kernels: Kernels = Kernels()
    specs: dict[str, ShardSpec] = field(default_factory=dict)
    params: dict[str, nn.Parameter] = field(default_factory=dict)
    prefix: str = ""

    def at(self, name: str) -> BuildContext:
        """The context of the submodule ``name``."""
        return replace(self, prefix=self.name(name))

    @property
    def root(self) -> BuildContext:
        """The context of the whole model."""
        return replace(self, prefix="")

    def name(self, parameter: str) -> str:
        """Global name of a parameter or submodule of this module."""
        return f"{self.prefix}.{parameter}" if self.prefix else parameter

    @property
    def tp(self) -> Group:
        """Tensor-parallel peers."""
        return self.mesh.tp

    @property
    def shard(self) -> Shard:
        """Factory of specs for this rank."""
        return Shard(self.tp.rank, self.tp.size)

    @property
    def expert_shard(self) -> ExpertShard:
        """Factory of specs of experts for this rank."""
        here, sizes = self.mesh.coordinate, self.mesh.layout.sizes
        return ExpertShard(here["ep"], sizes["ep"], here["etp"], sizes["etp"])

    def parameter(self, name: str, spec: ShardSpec, autograd: bool = False) -> nn.Parameter:
        """Declare, allocate and initialise a parameter; declared again, the same one with one more use (tied weights).

        Args:
            name: local name; the global one is ``prefix.name``.
            spec: global shape and this rank's pieces.
            autograd: its gradient comes from plain autograd instead of a ``sink.add`` of its layer.

        Returns:
            The local tensor ``spec.local_shape``.

        Raises:
            ValueError: when the name is taken by a parameter with another spec.

        """
        full = self.name(name)
        if full in self.params:
            return self._use_again(full, spec)
        if spec.tied and self.mesh.ends.size > 1 and self.mesh.coordinate["pp"] != self.mesh.placement[0]:
            spec = replace(spec, copy=True)
        self.specs[full] = spec
        parameter = nn.Parameter(torch.zeros(spec.local_shape, dtype=self.dtype, device=self.device))
        if self.initialised and self.device.type != "meta":
            initialize(parameter, spec, full, self.seed)
        if autograd:
            self.sink.attach(full, parameter)
        self.params[full] = parameter
        return parameter

    def _use_again(self, full: str, spec: ShardSpec) -> nn.Parameter:
        declared = self.specs[full]
        if not spec.tied or replace(declared, uses=spec.uses, copy=spec.copy) != spec:
            raise ValueError(f"{full} is declared twice, and not as one tied parameter")
        self.specs[full] = replace(declared, uses=declared.uses + spec.uses)
        return self.params[full]
