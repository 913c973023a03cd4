"""Declaration of the MLP (:mod:`megatron.layers.mlp`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron.config.model import ModelConfig
from megatron.distributed.sharding import Sharding, Specs
from megatron.layers.adapter_parameters import is_linear
from megatron.layers.mixers.activations import CHUNKS, ActivationShape, KeptTensor, LinearShape
from megatron.layers.mixers.base import Matmul, Mixer, input_projection, output_projection, under
from megatron.layers.recompute_plan import RecomputePlan

if TYPE_CHECKING:
    from torch import nn

    from megatron.layers.context import BuildContext


class FeedForwardMixer(Mixer):
    """The MLP; in chunks it computes itself again."""

    module = "mlp"
    recomputed_as = ("mlp",)
    supports = ("batch invariance", "context parallelism", "documents", "generation")

    def parameters(self, config: ModelConfig, sharding: Sharding) -> Specs:
        """Declare both linears."""
        return mlp_parameters(config, sharding, config.ffn)

    def build(self, config: ModelConfig, context: BuildContext, layer: int, plan: RecomputePlan) -> nn.Module:
        """Build the module."""
        from megatron.layers.mlp import MLP

        return MLP(config, context, layer, plan)

    def matmuls(self, config: ModelConfig, plan: RecomputePlan, keys: float) -> dict[str, Matmul]:
        """Return the products with the weights, computed again with the module or chunk by chunk."""
        products = super().matmuls(config, plan, keys)
        in_chunks = plan.mlp_chunk_size is not None
        return {name: each._replace(again=each.again or in_chunks) for name, each in products.items()}

    def recomputed(self, plan: RecomputePlan) -> bool:
        """Return True if the whole MLP is recomputed at once."""
        return plan.mlp_chunk_size is None and super().recomputed(plan)

    def linears(self, shape: ActivationShape) -> list[LinearShape]:
        """Return both linears, of one chunk."""
        return mlp_linears(shape, self.parameters(shape.model, shape.sharding))

    def kept(self, shape: ActivationShape) -> Iterator[KeptTensor]:
        """Yield the input, what fc1 gives and what fc2 takes."""
        yield shape.input("layernorm", "mlp")
        specs = self.parameters(shape.model, shape.sharding)
        yield from mlp_kept(shape, "mlp", specs, mlp_linears(shape, specs))


def chunk_tokens(shape: ActivationShape) -> int | None:
    """Return the tokens of a chunk of the MLP; None where it is not computed in chunks."""
    size = shape.config.training.mlp_chunk_size
    return None if size is None else min(size * shape.samples * shape.row_ranks, shape.tokens)


def mlp_parameters(config: ModelConfig, sharding: Sharding, width: int) -> Specs:
    """Declare an MLP of hidden width ``width``; gate and up projection are fused."""
    fc1 = input_projection(config, sharding, (2, width) if config.gated else (width,))
    return under(linear_fc1=fc1, linear_fc2=output_projection(config, sharding, width))


def mlp_linears(shape: ActivationShape, specs: Specs) -> list[LinearShape]:
    """Return the linears of an MLP, of one chunk, whose weight gradients are not delayed."""
    chunk = chunk_tokens(shape)
    return [shape.linear(spec, chunk, chunk is None) for name, spec in specs.items() if is_linear(name)]


def mlp_kept(shape: ActivationShape, module: str, specs: Specs, linears: list[LinearShape]) -> Iterator[KeptTensor]:
    """Yield what an MLP keeps between its linears; ``specs`` of those that may have adapters."""
    model, width, (fc1, fc2) = shape.model, shape.width, linears
    again = ("mlp",) if fc1.deferred else (CHUNKS,)
    yield fc1.kept(width, *again)
    if model.gated and "activation" in shape.eager:
        _, limit, offset = model.activation_options  # the limited halves, the offset one, and the sigmoid
        tensors = 1 + (model.activation == "quick_geglu") + (limit is not None) + (limit is not None or offset != 0)
        yield KeptTensor("parts of the gated product", tensors * fc2.inputs, width, ("activation", *again))
    yield fc2.kept(width, "activation", *again)
    yield from shape.magnitudes(module, specs, chunk_tokens(shape), *again)
