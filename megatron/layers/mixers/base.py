"""The declaration of a mixer: what is inside of a residual layer ``x + mixer(norm(x))``, without torch.

A mixer declares its parameters, the FLOPs of its matrix products and the activations that it keeps, and builds the
module that computes it. Initialisation, gradient reduction, checkpoints, conversion and the planner read the
declaration. A block is a list of residual layers, whose mixers the configuration names
(:meth:`megatron.config.model.ModelConfig.mixers`, :mod:`megatron.layers.mixers.registry`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from megatron.config.model import ModelConfig, RotaryTable
from megatron.distributed.sharding import UNSHARDED, Init, Sharding, ShardSpec, Specs
from megatron.layers.adapter_parameters import is_linear
from megatron.layers.mixers.activations import ActivationShape, KeptTensor, LinearShape
from megatron.layers.recompute_plan import RecomputePlan

if TYPE_CHECKING:
    from torch import nn

    from megatron.layers.context import BuildContext


class Matmul(NamedTuple):
    """A matrix product."""

    # FLOPs per token in forward.
    flops: float
    # One operand is a weight, which may be frozen.
    of_weight: bool = True
    # Times that selective recomputation computes it again in backward.
    again: int = 0
    # Gradients of its operands that backward computes.
    gradients: int = 2


class Exchanged(NamedTuple):
    """Elements of a token on a rank that context parallelism exchanges."""

    queries: int
    # Of keys and values together.
    keys: int
    # The result of attention.
    output: int
    # Key/value heads of the layer, on all ranks.
    groups: int


class Passed(NamedTuple):
    """Elements of a recurrence on a rank that context parallelism passes on (:mod:`megatron.layers.recurrence`)."""

    # Of a token, where ranks exchange heads for rows: inputs of the heads, those that heads of a group share, and the
    # output.
    inputs: int
    shared: int
    output: int
    # Groups of heads of the layer, on all ranks.
    groups: int
    # Of the inputs of the heads, those that a convolution takes, like all that are shared; and the rows before a chunk.
    convolved: int
    rows: int
    # Of a chunk and sample, in at least fp32: the state after it, and what it does to the state before.
    state: int


class Routed(NamedTuple):
    """Tokens of a micro-batch on a rank that are sent to experts, its own experts included."""

    # Rows, on average, and elements of a row.
    rows: float
    width: int
    # Values of the choices of a row, in at least fp32.
    choices: int
    # Bytes of the numbers of rows, which are exchanged before them.
    numbers: int


class Mixer:
    """The inside of a residual layer; subclasses are its kinds.

    The module maps the normalised rows of the residual stream ``[S(/tp), B, H]`` to what is added to it:
    ``module(n_SBH, ctx) -> MixerOutput``, ``ctx`` a :class:`megatron.layers.context.ForwardContext`.
    """

    # Names in the block: of the module, of the norms before and after it, and of the dropout of its output.
    module: str
    norm: str
    post_norm: str
    dropout: str
    # Name in --recompute-modules of computing it again as a whole, with the norm before it.
    recomputed_as: tuple[str, ...] = ()
    # What it is right with, beside training on whole sequences of one document: "context parallelism" (a rank has
    # rows of the sequence only), "documents" (nothing passes from one to the next), "generation" (token by token) and
    # "batch invariance" (its sums are those of batch-invariant kernels).
    supports: tuple[str, ...] = ()
    # Symbol in --hybrid-layer-pattern of a plugin's mixer; those of the built-in ones are in config/layer_pattern.py.
    letter: str | None = None
    # Its heads are those of --num-attention-heads, which must be given for a new model.
    uses_attention_heads: bool = True
    # Operations of :class:`megatron.kernels.registry.Kernels` that no other kind of mixer calls.
    operations: tuple[str, ...] = ()

    def __init_subclass__(cls) -> None:
        """Derive the names in the block from that of the module."""
        names = {"norm": f"pre_{cls.module}_layernorm", "post_norm": f"post_{cls.module}_layernorm"}
        for name, value in (names | {"dropout": f"{cls.module}_dropout"}).items():
            if not hasattr(cls, name):
                setattr(cls, name, value)

    def parameters(self, config: ModelConfig, sharding: Sharding) -> Specs:
        """Declare the parameters by local name, in the order in which the module takes them."""
        raise NotImplementedError

    def build(self, config: ModelConfig, context: BuildContext, layer: int, plan: RecomputePlan) -> nn.Module:
        """Build the module.

        Args:
            config: of the model.
            context: of the module.
            layer: global index of its block.
            plan: what is recomputed.
        """
        raise NotImplementedError

    def rotary(self, config: ModelConfig, layer: int) -> RotaryTable | None:
        """Return the table of rotary positions that it reads from ``ctx.rotary`` in a layer; None if it does not."""
        return None

    def exchanged(self, config: ModelConfig, tp: int) -> Exchanged | None:
        """Return what context parallelism exchanges.

        As :class:`megatron.distributed.context_parallel.ContextParallel` computes attention. None for
        a mixer that is no attention.
        """
        return None

    def passed(self, config: ModelConfig, tp: int) -> Passed | None:
        """Return what context parallelism passes on of a recurrence; None for a mixer that is none."""
        return None

    def shared_by_heads(self, config: ModelConfig, plan: RecomputePlan) -> tuple[int, int]:
        """Return the elements of a token, beside inputs of linears, that each TP rank needs of all rows.

        And how many times selective recomputation gathers them again.
        """
        return 0, 0

    def routed(self, shape: ActivationShape) -> Routed | None:
        """Return what travels to the ranks of experts; None for a mixer without experts."""
        return None

    def describe(self, config: ModelConfig) -> str:
        """Return its sizes in a few words, for people; empty to name the mixer alone."""
        return ""

    def losses(self, config: ModelConfig) -> dict[str, float]:
        """Return the coefficients of its auxiliary losses, by the names under which their means are logged."""
        return {}

    def matmuls(self, config: ModelConfig, plan: RecomputePlan, keys: float) -> dict[str, Matmul]:
        """Return the matrix products by name; by default those with the weight matrices.

        Args:
            config: of the model.
            plan: what is recomputed.
            keys: tokens that a token attends to, on average.
        """
        again = not plan.modules.isdisjoint(self.recomputed_as)
        return {name: Matmul(2.0 * size, again=again) for name, size in self.matrices(config).items()}

    def megatron_flops(self, config: ModelConfig) -> float:
        """Return the FLOPs per token in forward that Megatron-LM's count has more than :meth:`matmuls`."""
        return 0.0

    def matrices(self, config: ModelConfig) -> dict[str, int]:
        """Return the elements of the weight matrices that a token is multiplied with, by the names of their modules."""
        specs = self.parameters(config, UNSHARDED).items()
        matrices = ((n.removesuffix(".weight"), spec) for n, spec in specs if n.endswith(".weight") and spec.is_matrix)
        return {name: active_numel(config, spec) for name, spec in matrices}

    def recomputed(self, plan: RecomputePlan) -> bool:
        """Return True if the whole mixer and the norm before it are computed again in backward."""
        return not plan.modules.isdisjoint(self.recomputed_as)

    def linears(self, shape: ActivationShape) -> list[LinearShape]:
        """Return the linears of this rank; by default the weights whose modules are called ``linear_...``."""
        specs = self.parameters(shape.model, shape.sharding).items()
        return [shape.linear(spec) for name, spec in specs if is_linear(name)]

    def buffer_bytes(self, config: ModelConfig) -> int:
        """Return the bytes that are kept for it from step to step, beside its parameters."""
        return 0

    def kept(self, shape: ActivationShape) -> Iterator[KeptTensor]:
        """Yield the tensors that are kept from forward to backward if nothing is recomputed, the input first.

        By default what column-parallel linears give and row-parallel ones take.
        """
        again = self.recomputed_as
        yield shape.input("layernorm", *again)
        for linear in self.linears(shape):
            yield linear.kept(shape.width, *again)
        yield from shape.magnitudes(self.module, self.parameters(shape.model, shape.sharding), None, *again)

    def temporary(self, shape: ActivationShape) -> tuple[int, int]:
        """Return the most bytes besides, in the module's forward and in its backward.

        By default what enters and leaves the block and the module, and the gradient of the widest linear. Linears that
        are computed in chunks need the gradient of the whole input besides.
        """
        linears = self.linears(shape)
        widest = max((each.widest for each in linears), default=0)
        chunks = not all(each.deferred for each in linears)
        return 3 * shape.residual, (1 + chunks) * shape.residual + widest * shape.width


def active_numel(config: ModelConfig, spec: ShardSpec) -> int:
    """Return the elements of a parameter that one token uses."""
    return spec.numel * config.moe_router_topk // (config.num_experts or 1) if spec.expert else spec.numel


def under(**modules: Specs) -> Specs:
    """Prefix the parameters of submodules with their names."""
    return {f"{module}.{name}": spec for module, specs in modules.items() for name, spec in specs.items()}


def linear(weight: ShardSpec, bias: ShardSpec | None) -> Specs:
    """Declare a linear of a weight and, perhaps, a bias."""
    return {"weight": weight} if bias is None else {"weight": weight, "bias": bias}


def input_projection(
    config: ModelConfig,
    sharding: Sharding,
    view: tuple[int, ...],
    inputs: int | None = None,
    bias: bool | None = None,
) -> Specs:
    """Declare a column-parallel linear, by default of the hidden state and with a bias if linears have biases.

    The last dimension of its outputs ``view`` is sharded.
    """
    rows, dim, inputs = prod(view), len(view) - 1, inputs or config.hidden_size
    weight = sharding.dense.split((rows, inputs), dim, Init(config.init_method_std), (*view, inputs))
    has_bias = config.add_bias_linear if bias is None else bias
    of_rows = sharding.dense.split((rows,), dim, Init(), view) if has_bias else None
    return linear(replace(weight, matrices=dim), of_rows)


def replicated_projection(
    config: ModelConfig, sharding: Sharding, outputs: int, inputs: int | None = None, bias: bool | None = None
) -> Specs:
    """Declare a linear that every rank computes of its rows, such as a down-projection; defaults as above."""
    shape, partial = (outputs, inputs or config.hidden_size), sharding.sequence_parallel
    has_bias = config.add_bias_linear if bias is None else bias
    of_rows = sharding.dense.replicate((outputs,), Init(), partial) if has_bias else None
    return linear(sharding.dense.replicate(shape, Init(config.init_method_std), partial), of_rows)


def output_projection(config: ModelConfig, sharding: Sharding, inputs: int, has_bias: bool | None = None) -> Specs:
    """Declare a row-parallel linear that adds to the residual stream; default as above."""
    h = config.hidden_size
    weight = sharding.dense.split((h, inputs), 1, Init(output_std(config)))
    bias = sharding.dense.replicate((h,), Init(), partial=sharding.sequence_parallel)
    has_bias = config.add_bias_linear if has_bias is None else has_bias
    return linear(weight, bias if has_bias else None)


def channel_convolution(sharding: Sharding, parts: Sequence[int], width: int, has_bias: bool) -> Specs:
    """Declare a causal convolution of every channel: ``weight`` ``[channels, width]`` and, perhaps, ``bias``.

    Each of the consecutive parts of the channels is split over TP. Initial values are those of PyTorch's convolution.
    """
    bound = 1 / math.sqrt(width)
    init = Init(uniform=(-bound, bound))
    weight = replace(sharding.dense.parts(parts, (width,), init), matrices=1)
    return linear(weight, sharding.dense.parts(parts, (), init) if has_bias else None)


def output_std(config: ModelConfig) -> float:
    """Return the standard deviation of the initial weights of an output projection."""
    return config.init_method_std / math.sqrt(config.residual_layers)


def norm_init(config: ModelConfig) -> Init:
    """Return the initial value of the weight of a norm."""
    return Init(value=0.0 if config.apply_layernorm_1p else 1.0)


def norm(config: ModelConfig, sharding: Sharding, width: int, partial: bool) -> Specs:
    """Declare a norm; ``partial`` if each TP rank normalises only a part, so that gradients are summed over TP."""
    specs = {"weight": sharding.dense.replicate((width,), norm_init(config), partial)}
    if config.normalization == "LayerNorm":
        specs["bias"] = sharding.dense.replicate((width,), Init(), partial)
    return specs


def hidden_norm(config: ModelConfig, sharding: Sharding) -> Specs:
    """Declare a norm of the residual stream."""
    return norm(config, sharding, config.hidden_size, sharding.sequence_parallel)
