"""Contexts in which layers are built and run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from megatron.config.attention_pattern import AttentionPattern
from megatron.config.model import ModelConfig, RotaryTable
from megatron.config.parallel import ParallelConfig
from megatron.distributed.comm import Group
from megatron.distributed.context_parallel import ContextParallel
from megatron.distributed.grad_accumulator import GradAccumulator
from megatron.distributed.mappings import TPComm
from megatron.distributed.mesh import Mesh
from megatron.distributed.micro_batch import MicroBatch
from megatron.distributed.random import initialize
from megatron.distributed.sharding import DenseSharding, ExpertSharding, Sharding, ShardSpec, Specs
from megatron.kernels.attention_mask import AttentionMask, Ranges
from megatron.kernels.fp8 import Float8Layers
from megatron.kernels.grouped_linear import GroupedLinearKernel
from megatron.kernels.linear import with_bias_gradient
from megatron.kernels.qkv import RotaryCosSin
from megatron.kernels.quantized import quantize
from megatron.kernels.registry import Kernels
from megatron.layers.adapter_parameters import AdapterSwitch
from megatron.layers.kv_cache import KVCache

if TYPE_CHECKING:
    from megatron.layers.activation_offload import ActivationOffload

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Dtypes by the choices of ``--params-dtype``."""


ProductProvider = Callable[["BuildContext", Any], Any]
"""Takes the context of a linear, and what a rank holds of it (:data:`megatron.layers.linear.Parallel`). Returns its
products, a :class:`megatron.layers.linear.LinearProduct`, or None if its weights are not declared as the provider's."""

GroupedProvider = Callable[["BuildContext"], GroupedLinearKernel | None]
"""The same for a grouped linear, the weights of experts."""


@dataclass(frozen=True)
class BuildContext:
    """Everything a layer needs to construct itself."""

    mesh: Mesh
    grad_accumulator: GradAccumulator
    # Of parameters and activations.
    dtype: torch.dtype = torch.float32
    # ``meta`` builds shapes only.
    device: torch.device = torch.device("cpu")
    # Of initialisation and dropout.
    seed: int = 1234
    # Shard activations over the sequence between tensor-parallel regions.
    sequence_parallel: bool = False
    # Distribution of sequences over ranks; None if every rank has whole sequences.
    cp: ContextParallel | None = None
    # Overlap of tensor-parallel communication with products; has no effect without sequence parallelism.
    tp_overlap: TPComm | None = None
    # Draw initial values; otherwise parameters are zero, to be loaded from a checkpoint.
    draw_initial_values: bool = True
    # Allocate parameters as they are built; otherwise a parameter store does, and calls :meth:`initialize`.
    allocate: bool = True
    kernels: Kernels = Kernels()
    fp8: Float8Layers = field(default_factory=Float8Layers)
    # Of the model that the layers belong to, and of its layout.
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    # Asked in order for the products of a linear; the last answer is a plain weight's.
    providers: Sequence[ProductProvider] = ()
    grouped_providers: Sequence[GroupedProvider] = ()
    # Shared by all chunks.
    adapters: AdapterSwitch = field(default_factory=AdapterSwitch)
    offload: ActivationOffload | None = None
    # The parameters declared, and those built so far, by global name.
    specs: Specs = field(default_factory=dict)
    params: dict[str, nn.Parameter] = field(default_factory=dict)
    # Dotted name of the module under construction, and the global index of the block that it is in.
    prefix: str = ""
    layer: int | None = None

    def submodule(self, name: str) -> BuildContext:
        """Return the context of the submodule ``name``."""
        return replace(self, prefix=self.name(name))

    @property
    def root(self) -> BuildContext:
        """Context of the whole model."""
        return replace(self, prefix="")

    def name(self, parameter: str) -> str:
        """Return the global name of a parameter or submodule of this module."""
        return f"{self.prefix}.{parameter}" if self.prefix else parameter

    def block(self, layer: int) -> BuildContext:
        """Return the context of a block, by its global index."""
        return replace(self.submodule(f"layers.{layer}"), layer=layer)

    @property
    def tp(self) -> Group:
        """Tensor-parallel peers."""
        return self.mesh.tp

    @property
    def sharding(self) -> Sharding:
        """Layout that determines this rank's part of a parameter."""
        here, sizes = self.mesh.coordinate, self.mesh.layout.sizes
        experts = ExpertSharding(here["ep"], sizes["ep"], here["etp"], sizes["etp"])
        return Sharding(DenseSharding(self.tp.rank, self.tp.size), experts, self.sequence_parallel)

    def declare(self, specs: Specs) -> BuildContext:
        """Declare the parameters of this module by local name (see :mod:`megatron.layers.parameters`); return self."""
        self.specs.update({self.name(name): spec for name, spec in specs.items()})
        return self

    def spec(self, name: str) -> ShardSpec:
        """Return the declaration of a parameter of this module."""
        return self.specs[self.name(name)]

    def parameter(self, name: str, autograd: bool = False) -> nn.Parameter:
        """Allocate and initialise a declared parameter; a tied one the first time.

        Args:
            name: local name; the global one is ``prefix.name``.
            autograd: its gradient is computed by plain autograd, not passed to the accumulator by its layer's backward.

        Returns:
            The local tensor ``spec.local_shape``.

        Raises:
            KeyError: when the name is not declared.
            ValueError: when the parameter is built already and not tied.
        """
        global_name, spec = self.name(name), self.spec(name)
        if global_name in self.params:
            if not spec.tied:
                raise ValueError(f"{global_name} is built twice, but not declared as tied")
            return self.params[global_name]
        dtype = self.dtype if spec.dense is None else torch.uint8
        if spec.wide:
            dtype = torch.promote_types(dtype, torch.float32)
        if self.allocate:
            values = torch.zeros(spec.local_shape, dtype=dtype, device=self.device)
            self.initialize(global_name, values)
        else:
            values = torch.empty((), dtype=dtype, device=self.device).expand(spec.local_shape)
        parameter = nn.Parameter(values, requires_grad=spec.has_gradient)
        if autograd and spec.has_gradient:
            self.grad_accumulator.attach(global_name, parameter, spec.contributions)
        self.params[global_name] = parameter
        return parameter

    def initialize(self, global_name: str, zeros: Tensor) -> None:
        """Write the initial values of a parameter into a zeroed tensor of its local shape."""
        spec = self.specs[global_name]
        if not self.draw_initial_values or self.device.type == "meta":
            return
        if spec.dense is None or spec.precision is None:
            initialize(zeros, spec, global_name, self.seed)
        else:
            values = torch.zeros(spec.dense.local_shape, dtype=torch.float32, device=zeros.device)
            initialize(values, spec.dense, global_name, self.seed)
            zeros.copy_(quantize(values, spec.precision))

    def bias(self, autograd: bool = False) -> nn.Parameter | None:
        """Allocate the parameter ``bias`` as :meth:`parameter` does, or return None if none is declared."""
        return self.parameter("bias", autograd) if self.name("bias") in self.specs else None


@dataclass(frozen=True)
class ForwardContext:
    """Inputs of a forward pass that all blocks share."""

    batch: MicroBatch
    # Of the whole sequence, by the attention patterns of the layers.
    masks: Mapping[AttentionPattern, AttentionMask]
    # By the tables that the mixers of the layers read.
    rotary: Mapping[RotaryTable, RotaryCosSin] = field(default_factory=dict)
    # Keys and values of earlier tokens; None outside generation.
    cache: KVCache | None = None
    # Of dropout, which is applied in training only.
    seed: int = 1234
    training: bool = False
    # Positions in the sequence of the rows of this rank's hidden state.
    rows: Ranges = ()
    kernels: Kernels = Kernels()

    @cached_property
    def row_positions(self) -> Tensor:
        """Positions of the rows, int64 ``[S(/cp/tp)]``."""
        device = self.batch.tokens.device
        return torch.cat([torch.arange(r.start, r.stop, device=device) for r in self.rows])


Losses = Mapping[str, Tensor]
"""Auxiliary losses by name, each a scalar, summed over layers."""


@runtime_checkable
class ExplainsNonFinite(Protocol):
    """A module with a limit, such as the size of a buffer. Beyond it, which the host does not see, outputs are NaN."""

    def repeated(self) -> AbstractContextManager[None]:
        """Return a context for a step that is run again: the limit does not apply, but is measured."""

    def nonfinite_reason(self) -> tuple[float, str] | None:
        """Return by how much the step that was run again exceeds the limit, and a clause with a fix, or None."""


class MixerOutput(NamedTuple):
    """Output of a mixer."""

    # ``[S(/tp), B, H]``, added to the residual stream.
    y: Tensor
    # The bias that y contains, if its gradient is still to be taken (:mod:`megatron.kernels.linear`).
    bias: Tensor | None = None
    # Auxiliary losses by name, as the mixer declares them: sums over this rank's tokens, times their coefficients.
    losses: Losses = MappingProxyType({})

    def sum(self) -> Tensor:
        """Return ``y`` with the gradient of its bias."""
        return with_bias_gradient(self.y, self.bias)
