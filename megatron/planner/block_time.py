"""Time of a block for one micro-batch: its matrix products, its attention, and the bytes that everything else moves.

A kernel takes the time of its arithmetic, of the bytes that it moves, and a gap before it starts:

    arithmetic = FLOPs / (peak x efficiency), moving = bytes / (bandwidth x efficiency)
    seconds = max(arithmetic, moving) + min(arithmetic, moving) / 2 + gap

A product ``[m, k] x [k, n]`` has 2mnk FLOPs and moves ``mk + kn + mn`` elements, so its rate falls as its sizes do. All
other operations are the tensors that layers keep for backward, each read and written a number of times
(:data:`FORWARD_PASSES`, :data:`BACKWARD_PASSES`).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from math import prod

from megatron.config.run import RunConfig
from megatron.distributed.sharding import ShardSpec
from megatron.layers.adapter_parameters import is_linear
from megatron.layers.mixers.activations import DTYPE_BYTES, MASK_BYTES, ActivationShape
from megatron.layers.mixers.base import Matmul, Mixer
from megatron.layers.mixers.core_attention import CoreAttentionMixer
from megatron.layers.mixers.registry import block_mixers
from megatron.layers.recompute_plan import RecomputePlan
from megatron.pipeline.actions import FORWARD, INPUT, WEIGHT
from megatron.planner.activations import residual_layer_tensors
from megatron.planner.communication import ATTENTION, EXPERTS, SHARED_EXPERT
from megatron.planner.hardware import Cluster

FORWARD_PASSES, BACKWARD_PASSES = 1.2, 1.7
"""Times that the elements of a kept tensor are read or written, outside matrix products and attention. A gated
activation reads two and writes one of three kept tensors, and reads three and writes two in backward; a norm with its
residual sum reads and writes two each. Fitted to the MB of a layer in ``benchmarks/results/launches.md``."""

FULL_RATE_WIDTH, HALF_RATE_WIDTH = 128, 64
"""Channels of a head from which on fused attention runs at its full rate; with half as many at 3/4 of it, as
``1.5 d / (d + 64)`` (cuDNN on an H100, arXiv:2407.08608, figures 5 and 6)."""

WHOLE_KEYS = 512
"""Keys of a sequence that fused attention pays for beside those that count: tiles on the diagonal are computed whole,
and a causal mask divides the work unequally. From the same figures: a mask costs 29% of the rate at 1,024 tokens, 10%
at 8,192."""

BACKWARD_ATTENTION = 0.85
"""Rate of fused attention in backward over that of forward (the same figures, head dimension 128, 8,192 tokens)."""

FUSED_AGAIN = 0.5
"""Share of the forward of fused attention that its backward computes again: one of two products."""

SOFTMAX_PASSES = 2, 3
"""Times that the softmax of unfused attention reads or writes each score, in forward and in backward."""

DROPOUT_PASSES = 2
"""The same of dropout, beside its mask."""


UNHIDDEN = 0.5
"""Share of the shorter one of arithmetic and bytes that a matrix product does not hide behind the other: writes of its
last tiles, reads of its first. Of 0, 1/4, 1/2, 3/4 and 1 the one with the smallest spread of predicted over measured
times of steps of 124M to 8B parameters on an H100 and an H200 (``benchmarks/results/{launches,gpu}.md``): 1.6%."""


@dataclass(frozen=True)
class KernelRates:
    """Rates that the kernels of a cluster's accelerators reach."""

    cluster: Cluster
    # Format of the operands of matrix products, those in FP8 excepted, and bytes of their elements.
    format: str
    width: int

    @classmethod
    def of(cls, config: RunConfig, cluster: Cluster) -> KernelRates:
        """Return the rates of a run."""
        dtype = config.precision.params_dtype
        return cls(cluster, dtype if dtype in ("bf16", "fp16") else "fp32", DTYPE_BYTES[dtype])

    def arithmetic(self, flops: float, share: float, format: str = "") -> float:
        """Return the seconds of some FLOPs at a share of the peak."""
        return flops / (self.cluster.accelerator.peak(format or self.format) * share)

    @property
    def bandwidth(self) -> float:
        """Bytes of device memory that kernels read and write per second."""
        return self.cluster.accelerator.bandwidth * self.cluster.efficiency.memory

    def moving(self, num_bytes: float, kernels: float = 1) -> float:
        """Return the seconds of kernels that read and write so many bytes."""
        return num_bytes / self.bandwidth + kernels * self.cluster.efficiency.launch

    def product(self, flops: float, num_bytes: float, format: str = "") -> float:
        """Return the seconds of a matrix product."""
        computing = self.arithmetic(flops, self.cluster.efficiency.matmul, format)
        moving = self.moving(num_bytes, 0)
        shorter, longer = sorted((computing, moving))
        return longer + UNHIDDEN * shorter + self.cluster.efficiency.launch


@dataclass
class PartTime:
    """Seconds of a part of a stage for one micro-batch."""

    # Forward; gradients of inputs; gradients of weights; what selective recomputation computes again.
    forward: float = 0.0
    input: float = 0.0
    weight: float = 0.0
    again: float = 0.0
    # Those of matrix products and of attention among them, by phase (F, I, W) and name, to hide communication behind.
    products: dict[tuple[str, str], float] = field(default_factory=dict)

    def __add__(self, other: PartTime) -> PartTime:
        """Return the sum of two parts."""
        return PartTime(
            self.forward + other.forward,
            self.input + other.input,
            self.weight + other.weight,
            self.again + other.again,
            self.products | other.products,
        )


@dataclass(frozen=True)
class ProductShape:
    """A matrix product of a rank: ``experts`` times ``[rows, inputs] x [inputs, outputs]``."""

    experts: int
    rows: float
    inputs: int
    outputs: int

    @classmethod
    def of(cls, spec: ShardSpec, flops: float) -> ProductShape:
        """Return the shape of the product with a weight, which takes so many FLOPs on the rank."""
        experts = spec.local_view[0] if spec.expert else 1
        inputs, outputs = spec.local_view[-1], prod(spec.local_view[spec.expert : -1])
        return cls(experts, flops / (2.0 * experts * inputs * outputs), inputs, outputs)

    @property
    def taken(self) -> float:
        """Elements of the input."""
        return self.experts * self.rows * self.inputs

    @property
    def given(self) -> float:
        """Elements of the output."""
        return self.experts * self.rows * self.outputs

    @property
    def weight(self) -> float:
        """Elements of the weight."""
        return float(self.experts * self.inputs * self.outputs)


FP8_BYTES = 5
"""Bytes that quantising an element of 16 bits moves: read for the largest magnitude, read again, written in 8 bits."""


def weight_product(
    rates: KernelRates, shape: ActivationShape, product: ProductShape, fp8: bool
) -> tuple[float, float, float]:
    """Return the seconds of a product with a weight: forward, gradient of the input, gradient of the weight.

    The gradient of the weight is added to a main gradient of at least fp32, which is read and written.
    """
    flops, wide = 2.0 * product.taken * product.outputs, shape.wide
    taken, given, weight = product.taken, product.given, product.weight
    if not fp8:
        moved = (taken + weight + given) * rates.width
        gradient = (taken + given) * rates.width + 2 * weight * wide
        return rates.product(flops, moved), rates.product(flops, moved), rates.product(flops, gradient)
    wgrad = "fp8" if shape.config.precision.fp8_wgrad else ""
    # ZeRO-3 that gathers weights again quantises them at every use; otherwise once per step, which is not counted.
    quantised = weight * shape.config.parallel.reshards_after_forward
    quantise = rates.moving((taken + quantised) * FP8_BYTES, 4)
    forward = rates.product(flops, taken + weight + given * rates.width, "fp8") + quantise
    back = rates.product(flops, given + weight + taken * rates.width, "fp8")
    back += rates.moving((given + quantised) * FP8_BYTES, 4)
    # The other layout of both operands, and a product that is added to the main gradient by a kernel of its own.
    gradient = rates.product(flops, taken + given + weight * wide, wgrad)
    gradient += rates.moving((taken + given) * FP8_BYTES + 3 * weight * wide, 5)
    return forward, back, gradient


def attention_seconds(rates: KernelRates, shape: ActivationShape, mixer: Mixer, flops: float, keys: float) -> float:
    """Return the seconds of fused attention for so many FLOPs of forward; ``keys`` of a query on average."""
    width = FULL_RATE_WIDTH
    if isinstance(mixer, CoreAttentionMixer):
        heads = mixer.heads(shape.model)
        width = min(FULL_RATE_WIDTH, heads.channels)
    length = min(2.0 * keys, shape.config.training.seq_length)
    of_width = 1.5 * width / (width + HALF_RATE_WIDTH)
    share = rates.cluster.efficiency.attention * of_width * length / (length + WHOLE_KEYS)
    return rates.arithmetic(flops, share)


def unfused_attention(rates: KernelRates, shape: ActivationShape, mixer: CoreAttentionMixer) -> tuple[float, float]:
    """Return the seconds of attention that writes its scores, masked ones included: forward and backward."""
    heads, length = mixer.heads(shape.model), shape.config.training.seq_length
    queries = shape.tokens * heads.queries / shape.tp
    scores, dropout = queries * length, shape.model.attention_dropout > 0

    def product(channels: int) -> float:
        # Tensor cores take operands whose rows are aligned to 16 bytes.
        format = "fp32" if channels * rates.width % 16 else ""
        return rates.product(2.0 * scores * channels, (scores + 2 * queries * channels) * rates.width, format)

    forward = product(heads.channels) + product(heads.value_channels)
    passes = [each + dropout * DROPOUT_PASSES for each in SOFTMAX_PASSES]
    moved = [scores * (each * rates.width + dropout * MASK_BYTES) for each in passes]
    return forward + rates.moving(moved[0], 1 + dropout), 2 * forward + rates.moving(moved[1], 1 + dropout)


Notes = list[str]
"""Formulas with their numbers, as they are computed."""


def mixer_time(
    rates: KernelRates, config: RunConfig, layer: int, mixer: Mixer, takers: list[Mixer], notes: Notes | None = None
) -> PartTime:
    """Return the time of a residual layer of a block.

    Args:
        rates: of the cluster.
        config: of the run.
        layer: global index of the block.
        mixer: of the residual layer.
        takers: mixers whose norms take the residual sum that is counted here.
        notes: to which the formulas are added.
    """
    shape, plan, time = ActivationShape.of(config), RecomputePlan.from_config(config.training, 1), PartTime()
    keys = shape.model.pattern(min(layer, shape.model.num_layers - 1)).mean_keys(config.training.seq_length)
    specs = mixer.parameters(shape.model, shape.sharding)
    fp8 = config.precision.layer_in_fp8(layer, shape.model.num_layers)
    products, together = mixer.matmuls(shape.model, plan, keys), defaultdict[tuple[str, str], float](float)
    for name, product in products.items():
        if not product.of_weight:
            continue
        flops = product.flops * shape.tokens / shape.tp
        spec = specs.get(f"{name}.weight")
        if spec is None:  # a vector, of which the bytes count with the activations
            once = rates.arithmetic(flops, rates.cluster.efficiency.matmul)
            seconds = once, once, once
        else:
            of_linear = fp8 and is_linear(f"{name}.weight")
            shape_of_product = ProductShape.of(spec, flops)
            seconds = weight_product(rates, shape, shape_of_product, of_linear)
            if notes is not None:
                notes.append(_of_product(rates, f"{mixer.module}.{name}", shape_of_product, of_linear, seconds))
        computing = _product_time(name, product, seconds, spec is not None and spec.frozen)
        if spec is not None and (spec.expert or is_linear(f"{name}.weight")):
            part = EXPERTS if spec.expert else SHARED_EXPERT
            for phase in (FORWARD, INPUT, WEIGHT):
                together[phase, part] += computing.products[phase, name]
        time = time + computing
    time.products.update(together)
    others = {name: product for name, product in products.items() if not product.of_weight}
    time = time + _between_activations(rates, shape, mixer, others, keys, notes)
    kept = [*residual_layer_tensors(mixer, shape, takers)]
    moved, again = (
        sum(t.size for t in some)
        for some in (kept, [t for t in kept if not shape.recomputed.isdisjoint(t.recomputed_by)])
    )
    count = len(kept)
    exchanges, exchange_kernels = _exchanges(shape, mixer)
    rest = PartTime(
        forward=rates.moving(FORWARD_PASSES * moved + exchanges, FORWARD_KERNELS * count + exchange_kernels),
        input=rates.moving(BACKWARD_PASSES * moved + exchanges, BACKWARD_KERNELS * count + exchange_kernels),
        again=rates.moving(FORWARD_PASSES * again, FORWARD_KERNELS * count * (again > 0)),
    )
    if mixer.recomputed(plan):
        rest.again += rates.moving(exchanges, exchange_kernels)
    if notes is not None:
        notes.append(
            f"{mixer.module}, other operations: kept {moved / 1e6:,.1f} MB x ({FORWARD_PASSES} + {BACKWARD_PASSES})"
            + (f" + 2 x {exchanges / 1e6:,.1f} MB of permuted rows" if exchanges else "")
            + f" / {rates.bandwidth / 1e9:,.0f} GB/s, {count} x ({FORWARD_KERNELS} + {BACKWARD_KERNELS})"
            f"{f' + 2 x {exchange_kernels}' if exchanges else ''} gaps: {_ms(rest.forward)} + {_ms(rest.input)}"
        )
    return time + rest


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"


def _of_product(rates: KernelRates, name: str, product: ProductShape, fp8: bool, seconds: tuple[float, ...]) -> str:
    """Return the formula of a matrix product."""
    accelerator, m, k, n = rates.cluster.accelerator, product.rows, product.inputs, product.outputs
    peak = accelerator.peak("fp8" if fp8 else rates.format) / 1e12
    many = f"{product.experts} x " if product.experts > 1 else ""
    return (
        f"{name}: {many}[{m:,.0f}, {k:,}] x [{k:,}, {n:,}], 2mnk = {2 * product.taken * n / 1e12:.3f} TFLOP / "
        f"({peak:,.0f} TFLOP/s x {rates.cluster.efficiency.matmul}), bytes / {rates.bandwidth / 1e9:,.0f} GB/s: "
        f"{_ms(seconds[0])}, gradients of the input {_ms(seconds[1])}, of the weight {_ms(seconds[2])}"
    )


FORWARD_KERNELS, BACKWARD_KERNELS = 1.0, 1.5
"""Kernels of a kept tensor. A Llama layer, which keeps 9, has 38 launches, 14 of them products and attention."""


ROW_PASSES = 1, 3
"""Times that a row on its way to an expert or back is read or written, on one rank and between ranks. With the kernels
below fitted to the layers of Mixtral, Qwen3 and DeepSeek-V3 in ``benchmarks/results/launches.md``."""

ROUTING_KERNELS = 12, 20
"""Kernels of routing and permuting, in forward and as many in backward, on one rank and between ranks."""


def _exchanges(shape: ActivationShape, mixer: Mixer) -> tuple[float, int]:
    """Return the bytes that permuting rows for experts and back moves in forward, or in backward, and its kernels."""
    routed, parallel = mixer.routed(shape), shape.config.parallel
    if routed is None:
        return 0.0, 0
    between = parallel.expert_model_parallel_size * parallel.expert_tp > 1
    return 2 * ROW_PASSES[between] * routed.rows * routed.width * shape.width, ROUTING_KERNELS[between]


def _product_time(name: str, product: Matmul, seconds: tuple[float, ...], frozen: bool) -> PartTime:
    forward, back, gradient = seconds
    return PartTime(
        forward=forward,
        input=back * (product.gradients > 0),
        weight=0.0 if frozen else gradient,
        again=forward * product.again,
        products={(FORWARD, name): forward, (INPUT, name): back, (WEIGHT, name): gradient},
    )


def _between_activations(
    rates: KernelRates,
    shape: ActivationShape,
    mixer: Mixer,
    products: dict[str, Matmul],
    keys: float,
    notes: Notes | None,
) -> PartTime:
    """Return the time of the products of activations with each other: of attention, or of a recurrence."""
    if not products:
        return PartTime()
    flops = sum(product.flops for product in products.values()) * shape.tokens / shape.tp
    again = max(product.again for product in products.values())
    attends = isinstance(mixer, CoreAttentionMixer)
    dropout = attends and shape.model.attention_dropout > 0
    unfused = attends and (dropout or "attention" in shape.eager)
    if isinstance(mixer, CoreAttentionMixer) and unfused:
        forward, backward = unfused_attention(rates, shape, mixer)
        again -= dropout  # kept by the time of backward, which reads the scores
    elif attends:
        forward = attention_seconds(rates, shape, mixer, flops, keys)
        backward = forward * (2 + FUSED_AGAIN) / BACKWARD_ATTENTION
    else:
        forward = rates.product(flops, 0.0)
        backward = forward * max(product.gradients for product in products.values())
    if notes is not None:
        kind = "recurrence" if not attends else "unfused attention" if unfused else "attention"
        notes.append(
            f"{mixer.module}, {kind}: {keys:,.0f} keys of {shape.tokens:,} queries, {flops / 1e12:.3f} TFLOP, "
            f"{flops / forward / 1e12:,.0f} TFLOP/s reached: {_ms(forward)}, backward {_ms(backward)}"
        )
    forward, backward = forward + _ring_steps(rates, shape, mixer, 1), backward + _ring_steps(rates, shape, mixer, 2)
    of_name = {(FORWARD, ATTENTION): forward, (INPUT, ATTENTION): backward}
    return PartTime(forward, backward, 0.0, forward * max(0, again), of_name)


STEP_BYTES = 10
"""Bytes per element of adding a result of 16 bits to one of 32 in memory."""


def _ring_steps(rates: KernelRates, shape: ActivationShape, mixer: Mixer, results: int) -> float:
    """Return the seconds of adding up what every step of a ring gives: outputs, or gradients of queries and keys."""
    parallel, exchanged = shape.config.parallel, mixer.exchanged(shape.model, shape.tp)
    ring = parallel.context_parallel_size // parallel.cp_head_ranks
    if exchanged is None or ring == 1 or parallel.cp_comm_type == "all_gather":
        return 0.0
    elements = exchanged.output if results == 1 else exchanged.queries + exchanged.keys
    return rates.moving(ring * shape.tokens * elements * STEP_BYTES, ring * results)


def residual_layer_time(
    rates: KernelRates, config: RunConfig, layer: int, place: int, notes: Notes | None = None
) -> PartTime:
    """Return the time of the residual layer at a place of a block; formulas are added to ``notes``."""
    mixers = block_mixers(config.model, layer)
    if config.model.parallel_attention:
        takers = [*mixers] if place == 0 else []
    else:
        takers = [mixers[place]]
    return mixer_time(rates, config, layer, mixers[place], takers, notes)
