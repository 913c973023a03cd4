"""Sizes of a rank's part of a micro-batch, and the tensors that layers keep of it for backward, without torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

from megatron.config.model import ModelConfig
from megatron.config.run import RunConfig, kernel_choices
from megatron.distributed.sharding import Sharding, ShardSpec
from megatron.layers.adapter_parameters import ADAPTABLE

DTYPE_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes per element."""

INDEX_BYTES, MASK_BYTES = 8, 1
"""Bytes of an index, and of an element of a boolean mask."""

INPUT = "input"
"""Name of the input of a mixer among what it keeps: the output of the norm before it."""

CHUNKS = "chunks of the MLP"
"""Name of the recomputation by ``--mlp-chunk-size``, beside the names of ``--recompute-modules``."""


class KeptTensor(NamedTuple):
    """A tensor that a layer keeps for the backward of a micro-batch."""

    name: str
    elements: int
    # Of an element.
    bytes: int
    # The modules of ``--recompute-modules`` that compute it again instead.
    recomputed_by: tuple[str, ...] = ()
    # Input of a linear: a schedule that delays weight gradients keeps it until W.
    wgrad_input: bool = False

    @property
    def size(self) -> int:
        """In bytes."""
        return self.elements * self.bytes


class LinearShape(NamedTuple):
    """Elements of what a linear of this rank takes and gives in a micro-batch."""

    # The rows that it multiplies, and their products.
    inputs: int
    outputs: int
    # Its output after communication: with its input, the operand of the weight gradient.
    scattered: int
    # The gradient of that output, gathered; 0 without communication.
    gathered: int
    row_parallel: bool
    # A schedule may delay the weight gradient.
    deferred: bool

    def kept(self, width: int, *recomputed_by: str) -> KeptTensor:
        """Return the tensor that is kept beside an activation: what a row-parallel linear takes, or another gives."""
        if self.row_parallel:
            return KeptTensor("input of a linear", self.inputs, width, recomputed_by, self.deferred)
        return KeptTensor("output of a linear", self.outputs, width, recomputed_by)

    @property
    def widest(self) -> int:
        """Elements of the gradients that its backward has at a time."""
        return self.inputs + self.gathered if self.row_parallel else self.outputs


@dataclass(frozen=True)
class ActivationShape:
    """Sizes of a rank's part of a micro-batch, and what computes it. ``--device auto`` counts as a GPU."""

    config: RunConfig

    @property
    def model(self) -> ModelConfig:
        """The model."""
        return self.config.model

    @property
    def samples(self) -> int:
        """Samples of a micro-batch."""
        return self.config.training.micro_batch_size

    @property
    def tp(self) -> int:
        """Tensor-parallel size."""
        return self.config.parallel.tensor_model_parallel_size

    @property
    def row_ranks(self) -> int:
        """Ranks that share the rows of the residual stream: 1 without sequence parallelism."""
        return self.tp if self.config.parallel.sequence_parallel else 1

    @property
    def tokens(self) -> int:
        """Tokens on this rank."""
        return self.samples * self.config.training.seq_length // self.config.parallel.context_parallel_size

    @property
    def rows(self) -> int:
        """Rows of the residual stream on this rank."""
        return self.tokens // self.row_ranks

    @property
    def width(self) -> int:
        """Bytes of an element."""
        return DTYPE_BYTES[self.config.precision.params_dtype]

    @property
    def wide(self) -> int:
        """Bytes of an element of statistics and scores."""
        return max(self.width, DTYPE_BYTES["fp32"])

    @property
    def on_gpu(self) -> bool:
        """True for a GPU."""
        return self.config.training.device != "cpu"

    @cached_property
    def eager(self) -> frozenset[str]:
        """Operations that run as plain PyTorch, whose autograd keeps more."""
        plain = ("torch",) if self.on_gpu else ("torch", "auto")
        choices = kernel_choices(self.config.compute.kernels).items()
        return frozenset(operation for operation, choice in choices if choice.name in plain)

    @property
    def recomputed(self) -> frozenset[str]:
        """Modules recomputed within blocks, and :data:`CHUNKS`."""
        training = self.config.training
        selective = training.recompute_granularity == "selective"
        return frozenset(training.recompute_modules if selective else ()) | {CHUNKS}

    @cached_property
    def sharding(self) -> Sharding:
        """That of the parameters."""
        return Sharding.of_first_rank(self.config.parallel)

    @property
    def hidden(self) -> int:
        """Elements of this rank's rows of the residual stream."""
        return self.rows * self.model.hidden_size

    @property
    def residual(self) -> int:
        """Bytes of this rank's rows of the residual stream."""
        return self.hidden * self.width

    def gathered(self, rows: int) -> int:
        """Return the elements of rows of the residual stream that are gathered; 0 without communication."""
        return rows * self.model.hidden_size if self.row_ranks > 1 else 0

    def linear(self, weight: ShardSpec, rows: int | None = None, deferred: bool = True) -> LinearShape:
        """Return the sizes of a linear; ``rows`` that it multiplies at a time, by default all tokens."""
        rows = self.tokens if rows is None else rows
        outputs, inputs = rows * prod(weight.local_view[weight.expert : -1]), rows * weight.local_view[-1]
        scattered = self.hidden if weight.row_parallel and not weight.expert else outputs
        return LinearShape(inputs, outputs, scattered, self.gathered(rows), weight.row_parallel, deferred)

    def input(self, *recomputed_by: str, wgrad_input: bool = True) -> KeptTensor:
        """Return the output of the norm before a mixer; ``recomputed_by`` names what computes it again."""
        return KeptTensor(INPUT, self.hidden, self.width, recomputed_by, wgrad_input)

    def statistics(self, operation: str, rows: int, elements: int, *recomputed_by: str) -> Iterator[KeptTensor]:
        """Yield what an eager norm keeps beside its input; PyTorch computes RMSNorm in several operations."""
        if operation in self.eager:
            centred = self.model.normalization == "LayerNorm"
            yield KeptTensor("statistics of the norm", rows * (1 + centred), self.wide, recomputed_by)
            if centred and self.model.apply_layernorm_1p and self.width < self.wide:
                yield KeptTensor("x in fp32", elements, self.wide, recomputed_by)
            if not centred:
                copies = 1 + (self.width < self.wide)
                yield KeptTensor("x / rms(x), and x in fp32", elements * copies, self.wide, recomputed_by)

    def magnitudes(self, linear: str, elements: int, *recomputed_by: str) -> Iterator[KeptTensor]:
        """Yield the outputs of a linear that DoRA multiplies by its magnitudes, if it does in any layer."""
        model = self.model
        parts = ("", ".q", ".k", ".v") if linear.endswith("qkv") else ("", ".gate", ".up")
        names = (f"layers.{layer}.{linear}{part}" for layer in range(model.num_layers) for part in parts)
        may = model.lora_rank is not None and model.lora_dora and ADAPTABLE.fullmatch(f"layers.0.{linear}")
        if may and any(map(model.adapts, names)):
            yield KeptTensor(f"{linear}: output before its magnitudes", elements, self.width, recomputed_by)
