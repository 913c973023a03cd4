"""Declaration of the mixture of experts (:mod:`megatron.layers.moe`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from megatron.config.dispatch import ExchangeBuffers, ranks_of_token
from megatron.config.model import ModelConfig
from megatron.distributed.sharding import UNSHARDED, Init, Sharding, ShardSpec, Specs
from megatron.layers.adapter_parameters import is_linear
from megatron.layers.mixers.activations import (
    DTYPE_BYTES,
    INDEX_BYTES,
    MASK_BYTES,
    ActivationShape,
    KeptTensor,
    LinearShape,
)
from megatron.layers.mixers.base import Mixer, Routed, linear, output_std, replicated_projection, under
from megatron.layers.mixers.feed_forward import mlp_kept, mlp_linears, mlp_parameters
from megatron.layers.recompute_plan import RecomputePlan

if TYPE_CHECKING:
    from torch import nn

    from megatron.layers.context import BuildContext

GATE = "shared_experts.gate_weight"
"""Name of the weight of the gate of the shared expert."""


class ExpertsMixer(Mixer):
    """Router, experts and shared expert; the chunks of that one, computed again, are no part of the products."""

    module = "mlp"
    recomputed_as = ("mlp",)
    supports = ("batch invariance", "context parallelism", "documents", "generation")
    operations = ("grouped_linear", "grouped_fp8", "rows")

    def parameters(self, config: ModelConfig, sharding: Sharding) -> Specs:
        """Declare the router, the projections around the experts, these, and the shared expert."""
        experts, h, ffn = config.num_experts or 0, config.expert_hidden, config.expert_ffn
        init = Init(config.init_method_std)
        view = (experts, 2, ffn, h) if config.gated else (experts, ffn, h)
        fc1 = sharding.expert.split(view, len(view) - 2, init)
        fc2 = sharding.expert.split((experts, h, ffn), 2, Init(output_std(config)))
        routed = experts, config.hidden_size
        weight = sharding.dense.replicate(routed, init, partial=sharding.sequence_parallel)
        biases: list[ShardSpec | None] = [None] * 3
        if config.add_bias_linear:  # fc2's is sharded over its outputs, which ranks of expert-TP sum
            bias = sharding.dense.replicate((experts,), Init(), partial=sharding.sequence_parallel)
            biases = [bias, *(sharding.expert.split_bias(shape, Init()) for shape in (view[:-1], (experts, h)))]
        linears = under(linear_fc1=linear(fc1, biases[1]), linear_fc2=linear(fc2, biases[2]))
        router = linear(weight, biases[0])
        if config.moe_router_enable_expert_bias:
            router["expert_bias"] = replace(sharding.dense.replicate((experts,), Init(), False), buffer=True, wide=True)
        modules = {"router": router} | _latent_projections(config, sharding)
        return under(**modules, experts=linears, shared_experts=_shared(config, sharding))

    def build(self, config: ModelConfig, context: BuildContext, layer: int, plan: RecomputePlan) -> nn.Module:
        """Build the module."""
        from megatron.layers.moe import MixtureOfExperts

        return MixtureOfExperts(config, context, layer, plan)

    def losses(self, config: ModelConfig) -> dict[str, float]:
        """Return the coefficients of the losses of the router."""
        return config.router_losses

    def matrices(self, config: ModelConfig) -> dict[str, int]:
        """Return the elements of the weight matrices, and of the weight of the shared expert's gate."""
        specs = self.parameters(config, UNSHARDED)
        return super().matrices(config) | {name: specs[name].numel for name in (GATE,) if name in specs}

    def linears(self, shape: ActivationShape) -> list[LinearShape]:
        """Return the linears of the experts, if each is chosen equally often, and of the shared expert."""
        specs, rows = self.parameters(shape.model, shape.sharding).items(), _Dispatched.of(shape).expert_rows
        experts = [shape.linear(spec, rows) for name, spec in specs if is_linear(name) and spec.expert]
        return experts + mlp_linears(shape, _shared(shape.model, shape.sharding))

    def routed(self, shape: ActivationShape) -> Routed:
        """Return the rows that are sent, each with its choices and their weights."""
        model, parallel = shape.model, shape.config.parallel
        sent, exact = (
            _Dispatched.of(shape).sent,
            parallel.expert_model_parallel_size > 1 and parallel.moe_exchange == "exact",
        )
        ranks = parallel.expert_model_parallel_size * parallel.expert_tp
        return Routed(sent, model.expert_hidden, 2 * model.moe_router_topk, 2 * 4 * ranks * exact)

    def buffer_bytes(self, config: ModelConfig) -> int:
        """Return the bytes of the loads: of a step, of the step before, and of the steps since the last log line."""
        kinds = 3 + config.has_global_loss  # the last one with the choices that were dropped
        return (kinds * (config.num_experts or 0) + 1) * INDEX_BYTES

    def kept(self, shape: ActivationShape) -> Iterator[KeptTensor]:
        """Yield what the router, the dispatch, the experts and the shared expert keep.

        A router keeps a wide input, and the experts copies of rows.
        """
        model, h, dispatched = shape.model, shape.model.expert_hidden, _Dispatched.of(shape)
        wide = max(shape.wide, DTYPE_BYTES[model.moe_router_dtype])
        experts, choices, again = model.num_experts or 0, shape.rows * model.moe_router_topk, ("mlp",)
        linears = self.linears(shape)
        multiplied = len(linears) > 2 or model.moe_latent_size is not None
        if shape.width == wide:
            yield shape.input("layernorm", *again, wgrad_input=multiplied)
        else:
            if multiplied:
                yield shape.input("layernorm", *again)
            yield KeptTensor("router: input", shape.hidden, wide, again)
            yield KeptTensor("router: weight", experts * model.hidden_size, wide, again)
        yield KeptTensor("router: logits and scores", shape.rows * experts * _kept_scores(model), wide, again)
        yield KeptTensor("router: choices", choices, INDEX_BYTES, again)
        yield KeptTensor("router: weights and sums", shape.rows * _kept_weights(model), wide, again)
        if model.moe_expert_capacity_factor is not None:
            yield KeptTensor("router: choices within the capacity", choices, MASK_BYTES, again)
        yield KeptTensor("experts: weights of the rows", dispatched.expert_rows, shape.wide, again)
        yield KeptTensor("dispatch: numbers of rows", dispatched.numbers, INDEX_BYTES, again)
        yield KeptTensor("experts: input", dispatched.expert_rows * h, shape.width, again, True)
        yield from mlp_kept(shape, "mlp.experts", {}, linears[:2])
        if "activation" in shape.eager:
            unweighted = linears[1].inputs
            yield KeptTensor("experts: activation before its weights", unweighted, shape.width, ("activation", *again))
        if model.moe_latent_size is not None:
            yield KeptTensor("experts: sum, the input of fc2_latent_proj", shape.rows * h, shape.width, again, True)
        if len(linears) > 2:
            yield from mlp_kept(shape, "mlp.shared_experts", _shared(model, shape.sharding), linears[2:])
            if model.moe_shared_expert_gate:
                yield KeptTensor("shared expert: output, and its gate", shape.hidden + shape.rows, shape.width, again)


def _kept_scores(model: ModelConfig) -> int:
    """Return how many of logits and scores the router keeps: what weights and losses are computed of."""
    sinkhorn, losses = "sinkhorn" in model.moe_router_load_balancing_type, model.router_losses
    kept = {"scores"}
    if model.moe_router_score_function == "sqrtsoftplus":
        kept = {"logits", "scores"}
    elif model.moe_router_score_function == "softmax" and not (model.moe_router_pre_softmax or sinkhorn):
        kept = {"logits", "scores"} if losses.keys() - {"z_loss"} else {"logits"}
    return len(kept | {"logits"} if "z_loss" in losses else kept)


def _kept_weights(model: ModelConfig) -> int:
    """Return the elements that the router keeps of a token, of those that weights are divided by and losses made of."""
    topk, softmax = model.moe_router_topk, model.moe_router_score_function == "softmax"
    kept = int("z_loss" in model.router_losses)  # the log-partition
    if softmax and not model.moe_router_pre_softmax:
        weights = topk
    else:
        weights = topk + 1 if topk > 1 and not softmax else 0
    balanced = len(model.router_losses) - kept
    return kept + balanced * (not softmax) + weights * ("sinkhorn" not in model.moe_router_load_balancing_type)


def _shared(config: ModelConfig, sharding: Sharding) -> Specs:
    """Declare the shared expert, if there is one."""
    width, shape = config.moe_shared_expert_intermediate_size, (1, config.hidden_size)
    if not width:
        return {}
    gate = {}
    if config.moe_shared_expert_gate:
        init, partial = Init(config.init_method_std), sharding.sequence_parallel
        gate = {"gate_weight": sharding.dense.replicate(shape, init, partial)}
    return mlp_parameters(config, sharding, width) | gate


def _latent_projections(config: ModelConfig, sharding: Sharding) -> dict[str, Specs]:
    """Declare the projections to the space of the experts and back, if it is another one."""
    if config.moe_latent_size is None:
        return {}
    h, replicate, partial = config.hidden_size, sharding.dense.replicate, sharding.sequence_parallel
    down = replicated_projection(config, sharding, config.moe_latent_size)
    weight = replicate((h, config.moe_latent_size), Init(output_std(config)), partial)
    bias = replicate((h,), Init(), partial) if config.add_bias_linear else None
    return {"fc1_latent_proj": down, "fc2_latent_proj": linear(weight, bias)}


class _Dispatched(NamedTuple):
    """Sizes of the dispatch of a rank, if every expert is chosen equally often."""

    # Rows of the experts of the rank.
    expert_rows: int
    # Indices that are kept: the rows of every token and the tokens of every row, at both ends.
    numbers: int
    # Rows that are sent to all ranks, this one included, on average.
    sent: float

    @classmethod
    def of(cls, shape: ActivationShape) -> _Dispatched:
        parallel, model, tokens = shape.config.parallel, shape.model, shape.rows
        topk, ep, etp = model.moe_router_topk, parallel.expert_model_parallel_size, parallel.expert_tp
        choices, experts = tokens * topk, model.num_experts or 0
        if ep * etp == 1:
            return cls(choices, 2 * choices, choices)
        if ep == 1 or parallel.moe_exchange != "exact":
            bound = parallel.moe_exchange_bound if ep > 1 else 1.0
            block, expert_rows = ExchangeBuffers.of(bound, tokens, topk, experts // ep, ep, etp)
            room = ep * etp * block
            rows = float(room)
        else:
            rows, room = tokens * etp * ranks_of_token(experts, topk, ep), tokens * etp * min(topk, ep)
            expert_rows = choices * etp
        return cls(expert_rows, room + choices * etp + round(rows) * topk + expert_rows, rows)
