"""The parameters of every layer, declared once: names, global shapes, shards and initial values, without torch.

A function per layer returns the specs of its parameters by local name, in order. The layers allocate what is declared
here (:meth:`megatron.layers.context.BuildContext.parameter`), and the planner sums it. To add a parameter, declare it
in the function of its layer and take it by name in the layer's constructor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod

from megatron.config.model import QUANTIZED_BLOCK, ModelConfig
from megatron.config.parallel import ParallelConfig
from megatron.distributed.sharding import Box, DenseSharding, ExpertSharding, Init, ShardSpec

Specs = dict[str, ShardSpec]
"""Specs by parameter name."""

Dims = tuple[int, ...]
"""A value per dimension of a tensor."""

WORD_EMBEDDINGS = "embedding.word_embeddings.weight"
"""Global name of the word embeddings; with tied embeddings also the weight of the output layer."""

ADAPTABLE = re.compile(r"layers\.\d+\.(self_attention|mlp|mlp\.shared_experts)\.linear_\w+")
"""Global names of the linears that may have adapters."""

ROW_PARALLEL = ("linear_proj", "linear_fc2")
"""Names of the linears whose inputs are sharded; the outputs of the others are."""


@dataclass(frozen=True)
class Sharding:
    """What determines a rank's part of every parameter."""

    dense: DenseSharding
    expert: ExpertSharding
    # Each TP rank computes a part of the rows, so gradients of replicated parameters are partial.
    sequence_parallel: bool = False

    @classmethod
    def of_first_rank(cls, parallel: ParallelConfig) -> Sharding:
        """Return that of rank 0 of TP, EP and expert-TP; shapes are the same on the others."""
        experts = ExpertSharding(0, parallel.expert_model_parallel_size, 0, parallel.expert_tp)
        return cls(DenseSharding(0, parallel.tensor_model_parallel_size), experts, parallel.sequence_parallel)


UNSHARDED = Sharding(DenseSharding(0, 1), ExpertSharding(0, 1, 0, 1))
"""That of a rank that holds the whole of every parameter."""


def gpt(
    config: ModelConfig,
    sharding: Sharding = UNSHARDED,
    layers: Iterable[int] | None = None,
    first: bool = True,
    last: bool = True,
) -> Specs:
    """Declare the model, or the stages of a pipeline rank, by global name.

    Args:
        config: of the whole model.
        sharding: the rank.
        layers: global indices of the rank's blocks, ascending; None for all.
        first: with the embeddings.
        last: with the final norm and the output layer.

    Raises:
        ValueError: when a dimension does not divide, or the vocabulary size is not known.
    """
    specs: Specs = {}
    tied = not config.untie_embeddings_and_output_weights
    if first or last:
        init, multiple = Init(config.init_method_std), config.make_vocab_size_divisible_by
        words = sharding.dense.vocabulary(config.vocab, config.hidden_size, multiple, init)
        if tied:
            words = replace(words, tied=True, contributions=first + last, counted_elsewhere=not first)
    if first:
        specs[WORD_EMBEDDINGS] = words
        if config.position_embedding_type == "learned_absolute":
            shape = config.max_position_embeddings or 0, config.hidden_size
            positions = sharding.dense.replicate(shape, init, partial=sharding.sequence_parallel)
            specs["embedding.position_embeddings.weight"] = positions
    of_block = block(config, sharding)
    for layer in range(config.num_layers) if layers is None else layers:
        specs |= {f"layers.{layer}.{name}": spec for name, spec in of_block.items()}
    if last:
        specs |= _under(final_layernorm=_hidden_norm(config, sharding))
        specs |= {WORD_EMBEDDINGS if tied else "output_layer.weight": words}
    return specs if config.lora_rank is None else _with_adapters(config, config.lora_rank, sharding, specs)


def trainable(specs: Mapping[str, ShardSpec]) -> Specs:
    """Return those of the parameters that are trained, which checkpoints hold."""
    return {name: spec for name, spec in specs.items() if not spec.frozen}


def num_parameters(config: ModelConfig, active: bool = False) -> int:
    """Return the number of parameters without vocabulary padding, frozen ones and adapters included.

    Args:
        config: of the model.
        active: count only the experts that one token uses.
    """
    ends = sum(spec.numel for spec in gpt(config.base, layers=()).values())
    adapters = num_trainable(config) if config.lora_rank is not None else 0
    return ends + config.num_layers * sum(block_sizes(config, active).values()) + adapters


def num_trainable(config: ModelConfig) -> int:
    """Return the number of parameters that a run trains, without vocabulary padding."""
    return sum(spec.numel for spec in trainable(gpt(config)).values())


def block_sizes(config: ModelConfig, active: bool = False) -> dict[str, int]:
    """Return the number of elements of a block's parameters by local name; ``active`` as in `num_parameters`."""
    used = (config.moe_router_topk, config.num_experts or 1) if active else (1, 1)
    return {n: spec.numel * used[0] // used[1] if spec.expert else spec.numel for n, spec in block(config).items()}


def block(config: ModelConfig, sharding: Sharding = UNSHARDED) -> Specs:
    """Declare a transformer block."""
    of_hidden, none = _hidden_norm(config, sharding), Specs()
    before = none if config.layernorm_placement == "post" else of_hidden
    after = none if config.layernorm_placement == "pre" else of_hidden
    return _under(
        input_layernorm=before,
        self_attention=self_attention(config, sharding),
        post_self_attn_layernorm=after,
        pre_mlp_layernorm=before,
        mlp=mlp(config, sharding, config.ffn) if config.num_experts is None else mixture_of_experts(config, sharding),
        post_mlp_layernorm=after,
    )


def norm(config: ModelConfig, sharding: Sharding, width: int, partial: bool) -> Specs:
    """Declare a norm; ``partial`` if each TP rank normalises only a part, so that gradients are summed over TP."""
    specs = {"weight": sharding.dense.replicate((width,), _norm_init(config), partial)}
    if config.normalization == "LayerNorm":
        specs["bias"] = sharding.dense.replicate((width,), Init(), partial)
    return specs


def self_attention(config: ModelConfig, sharding: Sharding) -> Specs:
    """Declare the QKV projection, the output projection, the norms of queries and keys, and the sinks of the heads."""
    heads, d = (config.kv_groups, config.heads_per_group), config.head_dim
    weight = sharding.dense.qkv(*heads, (d, config.hidden_size), Init(config.init_method_std))
    bias = sharding.dense.qkv(*heads, (d,), Init()) if config.qkv_bias else None
    output = _output_projection(config, sharding, config.num_attention_heads * d)
    specs = _under(linear_qkv=_linear(weight, bias), linear_proj=output)
    if config.qk_layernorm and config.qk_layernorm_scope == "all":
        q, k = sharding.dense.heads(config.num_attention_heads, heads[0], d, _norm_init(config))
        specs |= _under(q_layernorm={"weight": q}, k_layernorm={"weight": k})
    elif config.qk_layernorm:  # each rank computes its own heads only, so these gradients are always partial
        of_head = norm(config, sharding, d, partial=True)
        specs |= _under(q_layernorm=of_head, k_layernorm=of_head)
    if config.softmax_type == "learnable":
        offset = sharding.dense.split((config.num_attention_heads,), 0, Init(config.init_method_std))
        specs["core_attention.softmax_offset"] = offset
    return specs


def mlp(config: ModelConfig, sharding: Sharding, width: int) -> Specs:
    """Declare an MLP of hidden width ``width``; gate and up projection are fused."""
    view = (2, width) if config.gated else (width,)
    rows, dim, h = prod(view), len(view) - 1, config.hidden_size
    weight = sharding.dense.split((rows, h), dim, Init(config.init_method_std), (*view, h))
    bias = sharding.dense.split((rows,), dim, Init(), view) if config.add_bias_linear else None
    fc1 = _linear(replace(weight, matrices=dim), bias)
    return _under(linear_fc1=fc1, linear_fc2=_output_projection(config, sharding, width))


def mixture_of_experts(config: ModelConfig, sharding: Sharding) -> Specs:
    """Declare the router, the experts and the shared expert."""
    experts, h, ffn = config.num_experts or 0, config.hidden_size, config.expert_ffn
    init = Init(config.init_method_std)
    view = (experts, 2, ffn, h) if config.gated else (experts, ffn, h)
    fc1 = sharding.expert.split(view, len(view) - 2, init)
    fc2 = sharding.expert.split((experts, h, ffn), 2, Init(_output_std(config)))
    weight = sharding.dense.replicate((experts, h), init, partial=sharding.sequence_parallel)
    biases: list[ShardSpec | None] = [None] * 3
    if config.add_bias_linear:  # fc2's is sharded over its outputs, which ranks of expert-TP sum
        router = sharding.dense.replicate((experts,), Init(), partial=sharding.sequence_parallel)
        biases = [router, *(sharding.expert.split_bias(shape, Init()) for shape in (view[:-1], (experts, h)))]
    linears = _under(linear_fc1=_linear(fc1, biases[1]), linear_fc2=_linear(fc2, biases[2]))
    specs = _under(router=_linear(weight, biases[0]), experts=linears)
    if config.moe_shared_expert_intermediate_size:
        specs |= _under(shared_experts=mlp(config, sharding, config.moe_shared_expert_intermediate_size))
    return specs


def linear_parts(weight: ShardSpec) -> tuple[str, ...]:
    """Return the names of the linears that a weight ``[out, in]`` fuses; one name, empty, if it is a single linear."""
    if weight.fused:
        return ("q", "k", "v")
    return ("gate", "up") if weight.matrices else ("",)


def part_of_rows(weight: ShardSpec) -> tuple[int, ...]:
    """Return the index in :func:`linear_parts` of each local output row of a weight."""
    count, view = len(linear_parts(weight)), weight.local_view
    if count == 1:
        return (0,) * prod(view[:-1])
    if not weight.fused:
        return tuple(part for part in range(count) for _ in range(view[1]))
    per_group = tuple(max(0, head - view[1] + count) for head in range(view[1]) for _ in range(view[2]))
    return per_group * view[0]


def adapted_parts(config: ModelConfig, linear: str, weight: ShardSpec) -> tuple[int, ...]:
    """Return the indices of the parts of a linear that have adapters, ascending.

    Args:
        config: of the model.
        linear: global name.
        weight: of the linear.
    """
    if config.lora_rank is None or not ADAPTABLE.fullmatch(linear):
        return ()
    whole, parts = config.adapts(linear), linear_parts(weight)
    return tuple(i for i, part in enumerate(parts) if whole or (part and config.adapts(f"{linear}.{part}")))


def _with_adapters(config: ModelConfig, rank: int, sharding: Sharding, specs: Specs) -> Specs:
    """Add adapters after the parameters of each linear that has some, and freeze all others."""
    found: Specs = {}
    for name, spec in specs.items():
        linear, _, local = name.rpartition(".")
        found[name], size = replace(spec, frozen=True), config.quantized_block_bytes
        if size is not None and local == "weight" and ADAPTABLE.fullmatch(linear):
            found[name] = replace(_packed(found[name], size), precision=config.frozen_weights_precision)
        weight = specs.get(f"{linear}.weight", spec)
        last = local == "bias" or f"{linear}.bias" not in specs
        if last and (parts := adapted_parts(config, linear, weight)):
            adapters = _adapters(config, rank, sharding, linear, weight, len(parts))
            found |= {f"{linear}.{each}": adapter for each, adapter in adapters.items()}
    return found


def _packed(weight: ShardSpec, size: int) -> ShardSpec:
    """Return the spec of the bytes of a quantised weight; ``size`` are those of a block of inputs.

    Raises:
        ValueError: when a block is cut.
    """

    def in_bytes(dims: Dims) -> Dims:
        if dims[-1] % QUANTIZED_BLOCK:
            raise ValueError(f"{dims[-1]} inputs are not a multiple of {QUANTIZED_BLOCK}")
        return (*dims[:-1], dims[-1] // QUANTIZED_BLOCK * size)

    return replace(_with_inputs(weight, in_bytes, in_bytes), dense=weight)


def _adapters(config: ModelConfig, rank: int, sharding: Sharding, linear: str, weight: ShardSpec, parts: int) -> Specs:
    """Declare LoRA's matrices A ``[parts x rank, in]`` and B ``[out, rank]``, and DoRA's magnitudes ``[out]``.

    The variance of A is that of PEFT's uniform distribution. Its gradient is partial where the outputs are sharded,
    that of B where the inputs are.
    """
    (out, inputs), dense = weight.shape, sharding.dense
    init, view = Init(1 / math.sqrt(3 * inputs)), (parts, rank, inputs) if parts > 1 else (rank, inputs)
    row_parallel = linear.endswith(ROW_PARALLEL)
    if row_parallel:
        a = dense.split((rank, inputs), 1, init)
        b = dense.replicate((out, rank), Init(), partial=True)
        magnitude = dense.replicate((out,), Init(), partial=sharding.sequence_parallel)
    else:
        a = replace(dense.replicate(view, init, partial=True), shape=(parts * rank, inputs), matrices=len(view) - 2)
        b = replace(_with_inputs(weight, lambda size: (*size[:-1], rank), lambda start: (*start[:-1], 0)), init=Init())
        rows = _with_inputs(weight, lambda size: size[:-1], lambda start: start[:-1])
        magnitude = replace(rows, init=Init(), matrices=0, fused=())
    specs = {"lora_a": a, "lora_b": b}
    return specs | {"lora_magnitude": replace(magnitude, wide=True)} if config.lora_dora else specs


def _with_inputs(weight: ShardSpec, sizes: Callable[[Dims], Dims], starts: Callable[[Dims], Dims]) -> ShardSpec:
    """Return the spec of a tensor that has the outputs of a weight, and other inputs: those of ``sizes``."""

    def of_box(box: Box) -> Box:
        return Box(starts(box.start), sizes(box.size))

    pieces = tuple(replace(p, local_box=of_box(p.local_box), global_box=of_box(p.global_box)) for p in weight.pieces)
    shape, view, local_view = map(sizes, (weight.shape, weight.view, weight.local_view))
    return replace(weight, shape=shape, view=view, local_view=local_view, pieces=pieces)


def _norm_init(config: ModelConfig) -> Init:
    return Init(value=0.0 if config.apply_layernorm_1p else 1.0)


def _hidden_norm(config: ModelConfig, sharding: Sharding) -> Specs:
    return norm(config, sharding, config.hidden_size, sharding.sequence_parallel)


def _output_projection(config: ModelConfig, sharding: Sharding, inputs: int) -> Specs:
    """Declare a row-parallel linear layer that adds to the residual stream."""
    h = config.hidden_size
    weight = sharding.dense.split((h, inputs), 1, Init(_output_std(config)))
    bias = sharding.dense.replicate((h,), Init(), partial=sharding.sequence_parallel)
    return _linear(weight, bias if config.add_bias_linear else None)


def _output_std(config: ModelConfig) -> float:
    return config.init_method_std / math.sqrt(2 * config.num_layers)


def _linear(weight: ShardSpec, bias: ShardSpec | None) -> Specs:
    return {"weight": weight} if bias is None else {"weight": weight, "bias": bias}


def _under(**modules: Specs) -> Specs:
    """Prefix the parameters of submodules with their names."""
    return {f"{module}.{name}": spec for module, specs in modules.items() for name, spec in specs.items()}
