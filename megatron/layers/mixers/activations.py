"""Sizes of a rank's part of a micro-batch, and the tensors that layers keep of it for backward, without torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from megatron.config.compute import kernel_choices
from megatron.config.model import ModelConfig
from megatron.config.run import RunConfig
from megatron.distributed.sharding import Sharding, ShardSpec, Specs
from megatron.layers.adapter_parameters import adapted_parts
from megatron.layers.recompute_plan import RecomputePlan

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
    # Experts, whose weight gradients are multiplied one after the other.
    experts: int = 1

    def kept(self, width: int, *recomputed_by: str) -> KeptTensor:
        """Return the tensor that is kept beside an activation: what a row-parallel linear takes, or another gives."""
        if self.row_parallel:
            return KeptTensor("input of a linear", self.inputs, width, recomputed_by, self.deferred)
        return KeptTensor("output of a linear", self.outputs, width, recomputed_by)

    @property
    def widest(self) -> int:
        """Elements of the gradients that its backward has at a time."""
        return self.inputs + self.gathered if self.row_parallel else self.outputs

    @property
    def operands(self) -> int:
        """Elements of the operands of a weight gradient that are multiplied at a time."""
        return (self.inputs + self.outputs) // self.experts

    @property
    def beside_operands(self) -> int:
        """Elements of gradients meanwhile, beside that of a kept output; experts compute that of the input later."""
        if not self.row_parallel:
            return 0
        return self.outputs if self.experts > 1 else self.inputs + self.gathered


@dataclass(frozen=True)
class ActivationShape:
    """Sizes of a rank's part of a micro-batch, and what computes it."""

    config: RunConfig
    model: ModelConfig
    tp: int
    # Samples of a micro-batch, their tokens on this rank, and ranks that share the rows of the residual stream.
    samples: int
    tokens: int
    row_ranks: int
    # Bytes of an element, and of one of statistics and scores.
    width: int
    wide: int
    on_gpu: bool
    # Operations that run as plain PyTorch, whose autograd keeps more.
    eager: frozenset[str]
    # Modules recomputed within blocks, and :data:`CHUNKS`.
    recomputed: frozenset[str]
    sharding: Sharding

    @classmethod
    def of(cls, config: RunConfig) -> ActivationShape:
        """Return the sizes of a run. ``--device auto`` counts as a GPU."""
        parallel, training, samples = config.parallel, config.training, config.training.micro_batch_size
        width, on_gpu = DTYPE_BYTES[config.precision.params_dtype], training.device != "cpu"
        plain, kernels = ("torch",) if on_gpu else ("torch", "auto"), kernel_choices(config.compute.kernel_words)
        return cls(
            config=config,
            model=config.model,
            tp=parallel.tensor_model_parallel_size,
            samples=samples,
            tokens=samples * training.seq_length // parallel.context_parallel_size,
            row_ranks=parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1,
            width=width,
            wide=max(width, DTYPE_BYTES["fp32"]),
            on_gpu=on_gpu,
            eager=frozenset(op for op, choice in kernels.items() if choice.name in plain),
            recomputed=RecomputePlan.from_config(training, 1).modules | {CHUNKS},
            sharding=Sharding.of_first_rank(parallel),
        )

    @property
    def hidden(self) -> int:
        """Elements of this rank's rows of the residual stream."""
        return self.rows * self.model.hidden_size

    @property
    def rows(self) -> int:
        """Rows of the residual stream on this rank."""
        return self.tokens // self.row_ranks

    @property
    def residual(self) -> int:
        """Bytes of this rank's rows of the residual stream."""
        return self.hidden * self.width

    @property
    def copied(self) -> int:
        """Bytes of an element of the operands of weight gradients that are copied: on CPUs, those of 16 bits."""
        return 0 if self.on_gpu or self.width == self.wide else self.wide

    def gathered(self, rows: int) -> int:
        """Return the elements of rows of the residual stream that are gathered; 0 without communication."""
        return rows * self.model.hidden_size if self.row_ranks > 1 else 0

    def linear(self, weight: ShardSpec, rows: int | None = None, deferred: bool = True) -> LinearShape:
        """Return the sizes of a linear; ``rows`` that it multiplies at a time, by default all tokens."""
        rows = self.tokens if rows is None else rows
        # A replicated linear multiplies the rows of the residual stream that a rank has.
        replicated = self.tp > 1 and weight.local_shape == weight.shape and not weight.expert
        rows = rows // self.row_ranks if replicated else rows
        outputs, inputs = rows * prod(weight.local_view[weight.expert : -1]), rows * weight.local_view[-1]
        if weight.expert or replicated:
            experts = weight.local_view[0] if weight.expert else 1
            return LinearShape(inputs, outputs, outputs, 0, weight.row_parallel, deferred, experts)
        scattered = self.hidden if weight.row_parallel else outputs
        return LinearShape(inputs, outputs, scattered, self.gathered(rows), weight.row_parallel, deferred)

    def input(self, *recomputed_by: str, wgrad_input: bool = True) -> KeptTensor:
        """Return the output of the norm before a mixer; ``recomputed_by`` names what computes it again."""
        return KeptTensor(INPUT, self.hidden, self.width, recomputed_by, wgrad_input)

    def widens(self, norm: str) -> bool:
        """Return True if an operation keeps a wide copy of its input, instead of the input."""
        centred = self.model.normalization == "LayerNorm" and not self.model.apply_layernorm_1p
        return norm in self.eager and self.width < self.wide and not centred

    def statistics(self, norm: str, rows: int, elements: int, *recomputed_by: str) -> Iterator[KeptTensor]:
        """Yield what an eager norm keeps beside its input; PyTorch computes RMSNorm in several operations."""
        centred, on_cpu = self.model.normalization == "LayerNorm", not self.on_gpu and self.width < self.wide
        if norm in self.eager:
            copies = self.widens(norm) + (not centred)
            yield KeptTensor("x / rms(x), and x in fp32", elements * copies, self.wide, recomputed_by)
            if not (centred and on_cpu and not self.widens(norm)):  # which computes them again
                yield KeptTensor("statistics of the norm", rows * (1 + centred), self.wide, recomputed_by)

    def magnitudes(self, module: str, specs: Specs, rows: int | None = None, *again: str) -> Iterator[KeptTensor]:
        """Yield the outputs of linears that DoRA multiplies by their magnitudes, if it does in any layer.

        Args:
            module: local name of the module of the linears in a block.
            specs: of its parameters.
            rows: that a linear multiplies at a time, by default all tokens.
            again: what computes them again.
        """
        model = self.model
        for name, weight in specs.items() if model.lora_dora else ():
            linear = f"{module}.{name}".removesuffix(".weight")
            if any(adapted_parts(model, f"layers.{layer}.{linear}", weight) for layer in range(model.num_layers)):
                elements = self.linear(weight, rows).scattered
                yield KeptTensor(f"{linear}: output before its magnitudes", elements, self.width, again)
