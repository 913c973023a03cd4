"""Memory of a rank's activations in bytes, computed from the configuration without torch.

:func:`block_tensors` lists what a block keeps from forward to backward. For a GPT-2 block in 16 bits with fused kernels
it adds up to ``32 sbh`` bytes: each norm keeps its input and its output (8), attention q, k, v and its output (8), the
MLP what its activation takes and gives (16). Korthikanti et al. (2022, arXiv 2205.05198) count ``sbh (34 + 5as/h)``:
the same, 2 for the masks of hidden dropout, which are computed again here, and 5as/h for the scores of attention, which
are not stored. A rank keeps these for every micro-batch between its forward and its backward; the schedule determines
their number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import lcm
from typing import NamedTuple

from megatron.config.attention_pattern import CAUSAL
from megatron.config.batch import get_num_microbatches, loss_chunk_tokens
from megatron.config.compute import kernel_choices
from megatron.config.model import ModelConfig
from megatron.config.run import RunConfig
from megatron.distributed.sharding import padded_vocab_size
from megatron.pipeline.actions import COMPUTE_KINDS, FORWARD, INPUT, WEIGHT, Action
from megatron.pipeline.partition import StageLayers
from megatron.pipeline.plan import build_program, resolve_pipeline, stage_layers

DTYPE_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes per element."""

INDEX_BYTES, MASK_BYTES = 8, 1
"""Bytes of an index, and of an element of a boolean mask."""


CHUNKS = "chunks of the MLP"
"""Name of the recomputation by ``--mlp-chunk-size``, beside the names of ``--recompute-modules``."""


class KeptTensor(NamedTuple):
    """A tensor that a block keeps for the backward of a micro-batch."""

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


@dataclass(frozen=True)
class ActivationShape:
    """Sizes of a rank's part of a micro-batch, and what computes it."""

    model: ModelConfig
    # Samples of a micro-batch, their tokens on this rank, and rows of the residual stream: fewer with sequence
    # parallelism.
    samples: int
    tokens: int
    rows: int
    tp: int
    # Context-parallel ranks that hold different chunks of the sequence, and those that exchange rows for heads.
    ring: int
    head_ranks: int
    gathers_keys: bool
    # An attention is computed tile by tile, and tiles have masks.
    tiled: bool
    masked: bool
    # Cosines and sines are those of each sample's positions.
    own_positions: bool
    # Rows that the experts of this rank receive if every expert is chosen equally often, and the ranks of an expert.
    expert_rows: int
    expert_tp: int
    # Bytes of an element, and of one of statistics and scores.
    width: int
    wide: int
    on_gpu: bool
    # Operations that run as plain PyTorch, whose autograd keeps more.
    eager: frozenset[str]
    # Modules recomputed within blocks, and :data:`CHUNKS`.
    recomputed: frozenset[str]
    # Tokens of a chunk of the MLP; None where it is not computed in chunks.
    mlp_chunk: int | None
    loss_chunk: int | None
    # A plugin's loss may be scaled before backward, so the weight gradient of the output layer waits for it.
    keeps_loss_wgrad: bool

    @classmethod
    def of(cls, config: RunConfig) -> ActivationShape:
        """Return the sizes of a run. ``--device auto`` counts as a GPU."""
        model, parallel, training = config.model, config.parallel, config.training
        samples, tp, cp = training.micro_batch_size, parallel.tensor_model_parallel_size, parallel.context_parallel_size
        tokens, row_ranks = samples * training.seq_length // cp, tp if parallel.sequence_parallel else 1
        rows, chunk = tokens // row_ranks, training.mlp_chunk_size
        width, on_gpu = DTYPE_BYTES[config.precision.params_dtype], training.device != "cpu"
        plain = ("torch",) if on_gpu else ("torch", "auto")
        kernels = kernel_choices(config.compute.kernels)
        eager = {op for op, choice in kernels.items() if choice.name in plain}
        selective = training.recompute_granularity == "selective"
        ring, documents = cp // parallel.cp_head_ranks, config.data.reset_attention_mask
        patterns = {model.pattern(layer) for layer in range(model.num_layers)}
        covered = all(p.only_window and ("attention" not in eager or (p == CAUSAL and not documents)) for p in patterns)
        if model.attn_logit_softcapping is not None:
            covered &= on_gpu and width == 2 and kernels["attention"].name in ("auto", "flash_attn", "flex")
        return cls(
            model=model,
            samples=samples,
            tokens=tokens,
            rows=rows,
            tp=tp,
            ring=ring,
            head_ranks=parallel.cp_head_ranks,
            gathers_keys=parallel.cp_comm_type == "all_gather",
            tiled=ring > 1 or model.attention_dropout > 0 or model.softmax_type != "vanilla" or not covered,
            masked=documents or patterns != {CAUSAL},
            own_positions=cp > 1 or config.data.reset_position_ids,
            expert_rows=rows * model.moe_router_topk * parallel.expert_tp,
            expert_tp=parallel.expert_tp,
            width=width,
            wide=max(width, DTYPE_BYTES["fp32"]),
            on_gpu=on_gpu,
            eager=frozenset(eager),
            recomputed=frozenset(training.recompute_modules if selective else ()) | {CHUNKS},
            mlp_chunk=None if chunk is None else min(chunk * samples * row_ranks, tokens),
            loss_chunk=training.cross_entropy_chunk_size,
            keeps_loss_wgrad=training.objective != "next_token",
        )

    @property
    def residual(self) -> int:
        """Bytes of this rank's rows of the residual stream."""
        return self.rows * self.model.hidden_size * self.width

    @property
    def gathered(self) -> int:
        """Bytes of all rows of the residual stream, gathered for a linear; 0 without sequence parallelism."""
        return self.tokens * self.model.hidden_size * self.width if self.rows < self.tokens else 0

    @property
    def queries(self) -> int:
        """Elements of this rank's queries, and of the output of its attention."""
        return self.tokens * self.model.num_attention_heads * self.model.head_dim // self.tp

    @property
    def keys(self) -> int:
        """Elements of this rank's keys, and of its values."""
        return self.tokens * self.groups * self.model.head_dim

    @property
    def groups(self) -> int:
        """Key/value heads of this rank."""
        return max(1, self.model.kv_groups // self.tp)

    @property
    def exchanged_keys(self) -> int:
        """Elements of the keys, and of the values, that the attention of an a2a rank takes: copied to enough heads."""
        return self.keys * lcm(self.groups, self.head_ranks) // self.groups

    @property
    def mlps(self) -> tuple[tuple[str, int, int], ...]:
        """Name, rows (of a chunk) and local hidden width of the MLPs of a block."""
        model, rows = self.model, self.mlp_chunk or self.tokens
        if model.num_experts is None:
            return (("mlp", rows, model.ffn // self.tp),)
        experts = ("experts", self.expert_rows, model.expert_ffn // self.expert_tp)
        shared = model.moe_shared_expert_intermediate_size
        return (experts, ("shared expert", rows, shared // self.tp)) if shared else (experts,)


def block_tensors(shape: ActivationShape) -> tuple[list[KeptTensor], list[KeptTensor]]:
    """Return what the attention and the MLP of a block keep, with their norms, if nothing is recomputed.

    Layers without rotary embedding count as the others.
    """
    model, elements = shape.model, shape.residual // shape.width
    common = []
    if model.layernorm_placement != "pre":
        common.append(KeptTensor("output before its norm", elements, shape.width))
        common += _statistics(shape, "norm", shape.rows, elements)
    if model.hidden_dropout and "dropout" in shape.eager:
        common.append(KeptTensor("mask of hidden dropout", elements, MASK_BYTES))
    x = KeptTensor("residual sum", elements, shape.width, (), model.layernorm_placement == "post")
    of_mlp = [x] if not model.parallel_attention else [x._replace(elements=0)]  # that of attention
    return [x, *common, *_attention_half(shape)], [*of_mlp, *common, *_mlp_half(shape)]


def _norm_before(shape: ActivationShape, again: tuple[str, ...], has_linear: bool) -> Iterator[KeptTensor]:
    """Yield the norm of attention or MLP, the input of a linear, and its statistics."""
    if shape.model.layernorm_placement == "post":
        return
    elements = shape.residual // shape.width
    for kept in _statistics(shape, "add_norm", shape.rows, elements):
        yield kept._replace(recomputed_by=("layernorm", *again))
    yield KeptTensor("norm", elements, shape.width, ("layernorm", *again), has_linear)


def _attention_half(shape: ActivationShape) -> Iterator[KeptTensor]:
    model, width = shape.model, shape.width
    heads = model.num_attention_heads // shape.tp
    yield from _norm_before(shape, (), True)
    yield from _split_qkv(shape)
    yield from _magnitudes(shape, "self_attention.linear_qkv", shape.queries + 2 * shape.keys)
    yield from _magnitudes(shape, "self_attention.linear_proj", shape.residual // width)
    yield KeptTensor("logsumexp of attention", shape.tokens * heads, shape.wide, ("core_attn",))
    if shape.head_ranks > 1:
        yield KeptTensor("output for some heads", shape.queries, width, ("core_attn",))
    yield KeptTensor("output of attention", shape.queries, width, (), True)


def _magnitudes(shape: ActivationShape, linear: str, elements: int, *again: str) -> Iterator[KeptTensor]:
    """Yield the outputs of a linear that DoRA multiplies by its magnitudes, if it does in any layer."""
    model = shape.model
    parts = ("", ".q", ".k", ".v") if linear.endswith("qkv") else ("", ".gate", ".up")
    names = (f"layers.{layer}.{linear}{part}" for layer in range(model.num_layers) for part in parts)
    if model.lora_rank is not None and model.lora_dora and any(map(model.adapts, names)):
        yield KeptTensor(f"{linear}: output before its magnitudes", elements, shape.width, again)


def _split_qkv(shape: ActivationShape) -> Iterator[KeptTensor]:
    """Yield q, k and v as attention keeps them, and what their norms keep."""
    model, queries, keys, width = shape.model, shape.queries, shape.keys, shape.width
    eager, rotary, normed = "split_qkv" in shape.eager, model.rotary_dim > 0, model.qk_layernorm
    if normed and model.qk_layernorm_scope == "all":
        yield KeptTensor("projection before its norms", queries + 2 * keys, shape.wide)
        yield KeptTensor("queries and keys over their RMS", queries + keys, shape.wide)
        normed = False
    copied = shape.groups > 1 and model.heads_per_group > 1  # the queries of one group are a view of the projection
    kept = True
    if shape.head_ranks > 1:
        yield KeptTensor("q, k, v for some heads", queries + 2 * shape.exchanged_keys, width, ("core_attn",))
        kept = "core_attn" in shape.recomputed  # those that are sent are kept to compute the others again
    if normed:
        heads = shape.tokens * (model.num_attention_heads // shape.tp + shape.groups)
        yield from _statistics(shape, "split_qkv", heads, queries + keys)
        if eager and copied:
            yield KeptTensor("queries before their norm", queries, width)
    if rotary and not (eager or normed):
        if kept:
            yield KeptTensor("q, k, v", queries + 2 * keys, width)
        return
    if kept or normed:
        yield KeptTensor("output of the projection", queries + 2 * keys, width)  # v is a part of it
    if kept and (rotary or normed or copied):
        yield KeptTensor("q", queries, width)
    if kept and (rotary or normed):
        yield KeptTensor("k", keys, width)


def _mlp_half(shape: ActivationShape) -> Iterator[KeptTensor]:
    model, width = shape.model, shape.width
    has_linear = shape.mlps[-1][0] != "experts"  # the experts take copies of the rows
    for kept in _norm_before(shape, ("mlp",), has_linear):
        if kept.name != "norm":
            yield kept
        elif has_linear or width == shape.wide:  # a router keeps a wide one
            wide_router = model.num_experts is not None and width == shape.wide
            yield kept._replace(recomputed_by=("mlp",)) if wide_router else kept
    if model.num_experts is not None:
        for kept in _routing(shape, model.num_experts):
            yield kept._replace(recomputed_by=("mlp",))
    for name, rows, ffn in shape.mlps:
        again = (CHUNKS,) if shape.mlp_chunk and name != "experts" else ("mlp",)
        yield KeptTensor(f"{name}: output of fc1", (1 + model.gated) * rows * ffn, width, again)
        if model.gated and "activation" in shape.eager:
            _, limit, offset = model.activation_options  # the limited halves, the offset one, and the sigmoid
            tensors = 1 + (model.activation == "quick_geglu") + (limit is not None) + (limit is not None or offset != 0)
            yield KeptTensor(f"{name}: parts of the gated product", tensors * rows * ffn, width, ("activation", *again))
        yield KeptTensor(f"{name}: activation", rows * ffn, width, ("activation", *again), CHUNKS not in again)
        if name != "experts":
            module = "mlp" if name == "mlp" else "mlp.shared_experts"
            yield from _magnitudes(shape, f"{module}.linear_fc1", (1 + model.gated) * rows * ffn, *again)
            yield from _magnitudes(shape, f"{module}.linear_fc2", shape.residual // width, *again)


def _routing(shape: ActivationShape, experts: int) -> Iterator[KeptTensor]:
    h, choices = shape.model.hidden_size, shape.rows * shape.model.moe_router_topk
    if shape.width < shape.wide:
        yield KeptTensor("router: input", shape.rows * h, shape.wide)
        yield KeptTensor("router: weight", experts * h, shape.wide)
    yield KeptTensor("router: probabilities", shape.rows * experts, shape.wide)
    yield KeptTensor("router: choices", choices, INDEX_BYTES)
    yield KeptTensor("router: weights of the choices", 2 * choices, shape.wide)
    yield KeptTensor("dispatch: permutations", 4 * shape.expert_rows, INDEX_BYTES)
    yield KeptTensor("experts: input", shape.expert_rows * h, shape.width, (), True)
    yield KeptTensor("experts: output", shape.expert_rows * h, shape.wide)


def _statistics(shape: ActivationShape, operation: str, rows: int, elements: int) -> Iterator[KeptTensor]:
    """Yield what an eager norm keeps beside its input; PyTorch computes RMSNorm in several operations."""
    if operation in shape.eager:
        centred = shape.model.normalization == "LayerNorm"
        yield KeptTensor("statistics of the norm", rows * (1 + centred), shape.wide)
        if centred and shape.model.apply_layernorm_1p and shape.width < shape.wide:
            yield KeptTensor("x in fp32", elements, shape.wide)
        if not centred:
            copies = 1 + (shape.width < shape.wide)
            yield KeptTensor("x / rms(x), and x in fp32", elements * copies, shape.wide)


@dataclass(frozen=True)
class StageMemory:
    """Bytes of a stage for one micro-batch."""

    # Kept from F to B or I; those of the loss are freed when backward begins.
    kept: int
    kept_loss: int
    # Operands of weight gradients, kept from I to W.
    wgrad: int
    # Most memory beside these in F, and in B or I.
    forward: int
    backward: int
    # Kept on the host from F to B or I, instead of the device.
    host: int

    @classmethod
    def of(cls, config: RunConfig, stage: StageLayers) -> StageMemory:
        """Return that of a stage."""
        shape = ActivationShape.of(config)
        blocks, forward, backward, host = _blocks(config, shape, stage.count) if stage.count else (0, 0, 0, 0)
        kept = blocks + (_embedding(shape) if stage.first else 0)
        rows = shape.tokens if shape.own_positions else shape.tokens // shape.samples
        kinds = len(shape.model.rotary_kinds(stage.layers))
        kept += kinds * 2 * rows * shape.model.rotary_dim * shape.width  # cosines and sines
        loss, loss_forward = _loss(shape) if stage.last else (0, 0)
        wgrad = stage.count * _wgrad_operands(shape)
        return cls(kept, loss, wgrad, max(loss_forward, forward - loss), backward, host)


BLOCKS_IN_TRANSIT = 2
"""Most offloaded blocks whose activations are on the device at a time."""


def _blocks(config: RunConfig, shape: ActivationShape, count: int) -> tuple[int, int, int, int]:
    """Return what ``count`` blocks keep, and the most beside it in the forward and in the backward of a block.

    The last number is what they keep on the host.
    """
    training, halves = config.training, block_tensors(shape)
    attention, mlp = (sum(t.size for t in half) for half in halves)
    kept_attention, kept_mlp = (
        sum(t.size for t in half if not shape.recomputed & {*t.recomputed_by}) for half in halves
    )
    core_forward, core_backward = _core_attention(shape)
    # Beside what the block keeps: attention runs before its MLP in forward, after it in backward. In forward the
    # outputs of the block before, of attention and of the MLP exist until the block ends.
    forward = max(
        attention - kept_attention + core_forward + shape.residual - kept_mlp, mlp - kept_mlp + 3 * shape.residual
    )
    backward = max(attention - kept_attention + core_backward - kept_mlp, mlp - kept_mlp + _mlp_backward(shape))
    block = kept_attention + kept_mlp
    kept = [t for half in halves for t in half if not shape.recomputed & {*t.recomputed_by}]
    moved = sum(t.size for t in kept if t.elements >= training.min_offloaded_tensor_size)
    offloaded = min(training.cpu_offloading_num_layers, count)
    if training.recompute_granularity != "full":
        # With blocks left on the device, the peak is where all of them are, after the last offloaded one.
        transit = min(offloaded, BLOCKS_IN_TRANSIT if offloaded == count else 1) * moved
        return count * block - offloaded * moved, forward + transit, backward + transit, offloaded * moved
    if training.recompute_method == "block":
        done = min(training.recompute_num_layers or count, count)
        groups, rest = [1] * done, count - done
    else:
        size = training.recompute_num_layers or 1
        groups, rest = [min(size, count - start) for start in range(0, count, size)], 0
    is_moved = shape.residual // shape.width >= training.min_offloaded_tensor_size
    inputs = [is_moved and sum(groups[:number]) < offloaded for number in range(len(groups))]
    moved_blocks = max(0, offloaded - (count - rest))
    host = sum(inputs) * shape.residual + moved_blocks * moved
    held = len(groups) * shape.residual + rest * block - host
    transit = sum(sorted([shape.residual] * sum(inputs) + [moved] * moved_blocks)[-BLOCKS_IN_TRANSIT:])
    # When a group is recomputed, those after it are freed; its input is the first residual sum of its blocks.
    peaks = [
        inputs[:number].count(False) * shape.residual + group * block + max(forward, backward)
        for number, group in enumerate(groups)
    ]
    if not rest:  # the attention of the last block is gone when its MLP is computed
        forward = max(attention + core_forward, mlp + 2 * shape.residual)
    return held, forward + transit, max([backward + held * (rest > 0), *peaks]) - held + transit, host


def _embedding(shape: ActivationShape) -> int:
    ids = shape.tokens * (INDEX_BYTES + MASK_BYTES) if shape.tp > 1 else 0
    dropped = shape.model.hidden_dropout and "dropout" in shape.eager
    return ids + (shape.residual // shape.width * MASK_BYTES if dropped else 0)


def _wgrad_operands(shape: ActivationShape) -> int:
    """Return the bytes of the inputs and output gradients of a block's linears; those of chunks are used at once."""
    inputs = sum(tensor.size for half in block_tensors(shape) for tensor in half if tensor.wgrad_input)
    gradients = (shape.queries + 2 * shape.keys) * shape.width + shape.residual
    for name, rows, width in shape.mlps:
        if name == "experts" or not shape.mlp_chunk:
            out = rows if name == "experts" else shape.rows
            gradients += ((1 + shape.model.gated) * rows * width + out * shape.model.hidden_size) * shape.width
    return inputs + gradients


def _mlp_backward(shape: ActivationShape) -> int:
    """Return the most memory of the backward of a block's MLP beside what is kept.

    The gradients of the residual stream and of what the linears take and give.
    """
    wide = max(rows * width for _, rows, width in shape.mlps) * shape.width
    gathered, dx = shape.gathered, 0
    if shape.mlp_chunk:
        gathered, dx = gathered * shape.mlp_chunk // shape.tokens, shape.residual
    return shape.residual + dx + max((1 + shape.model.gated) * wide, wide + gathered)


UNFUSED_TILE, FUSED_TILE = 1024, 256
"""Sides of the tiles of attention (:mod:`megatron.kernels.block_attention`)."""

UNFUSED_TENSORS, CAPPED_TENSORS = 6, 4
"""Tensors like the scores of a tile that are not fused, at a time: with dropout, whose hashes are three in int64, and
where scores are capped without dropout."""


def _core_attention(shape: ActivationShape) -> tuple[int, int]:
    """Return the most memory of core attention beside what is kept, in its forward and in its backward.

    The gradients of the residual stream and of the output are a part of the latter.
    """
    queries, keys, width, wide = shape.queries, 2 * shape.exchanged_keys, shape.width, shape.wide
    forward, backward = 0, shape.residual + queries * width
    if shape.head_ranks > 1:  # q, k and v of this rank's tokens, and the same as they are sent
        copies = keys if shape.exchanged_keys > shape.keys else 0
        forward += (2 * queries + 2 * shape.keys + keys + copies) * width
    if not shape.tiled:
        return forward, backward + (queries + keys) * width
    rounded = width if width < wide else 0  # results are summed in fp32, and rounded at the end
    forward += queries * wide * (rounded > 0)
    backward += queries * (wide + rounded)
    if shape.ring == 1:
        backward += keys * (wide + rounded)
    elif shape.gathers_keys:
        forward += shape.ring * keys * width
        backward += shape.ring * keys * (width + wide + rounded)
    else:
        # Keys that are used and that arrive, each with what is sent meanwhile. In backward also the gradients of this
        # rank's keys and of those that are used, and the exchange of those of the step before.
        passed = 2 * min(2, shape.ring - 1) * keys * width
        forward += passed
        backward += passed + keys * (2 * wide + rounded) + 2 * min(1, shape.ring - 2) * keys * width
    # The runs of consecutive queries; the largest tile that is not fused, or the mask of a tile; and what a tile gives.
    length, runs = shape.tokens * shape.head_ranks // shape.samples, 2 if shape.ring > 1 else 1
    heads = shape.samples * shape.model.num_attention_heads // (shape.tp * shape.head_ranks)
    capped = shape.model.attn_logit_softcapping is not None
    unfused = capped or shape.model.attention_dropout > 0 or (shape.on_gpu and width == wide)
    side = min(UNFUSED_TILE if unfused else FUSED_TILE, length // runs)
    score = max(UNFUSED_TENSORS * wide, 3 * INDEX_BYTES) if unfused else UNFUSED_TENSORS * wide * shape.on_gpu
    score = CAPPED_TENSORS * wide if capped and not shape.model.attention_dropout else score
    tile = side**2 * max(heads * score, (INDEX_BYTES + 5 * MASK_BYTES) * shape.masked)
    part = (1 / runs if shape.ring > 1 and not unfused else side / length) * width
    return int(forward + tile + part * queries), int(backward + tile + part * (queries + keys))


def _loss(shape: ActivationShape) -> tuple[int, int]:
    """Return what the final norm and the loss keep until backward, and what they need besides in forward."""
    model, hidden = shape.model, shape.model.hidden_size * shape.width
    norm = shape.residual + sum(
        t.size for t in _statistics(shape, "add_norm", shape.rows, shape.residual // shape.width)
    )
    rows = padded_vocab_size(model.vocab, model.make_vocab_size_divisible_by, shape.tp) // shape.tp
    copied = shape.wide if "cross_entropy" in shape.eager and shape.width < shape.wide else 0
    default = loss_chunk_tokens(shape.tokens, rows * (copied or shape.width), shape.on_gpu)
    chunk = min(shape.tokens, shape.loss_chunk or default)
    uncapped = shape.width if model.final_logit_softcapping is not None else 0
    logits = chunk * (rows * (shape.width + copied + uncapped) + hidden)
    wgrad = rows * model.hidden_size * shape.wide if shape.keeps_loss_wgrad else 0
    logits += shape.residual if model.logits_scaling != 1.0 else 0  # the scaled hidden states
    return norm + shape.tokens * hidden + wgrad, shape.residual + shape.gathered + logits


class ActionMemory(NamedTuple):
    """Bytes of a rank's activations in and after an action."""

    action: Action
    # Kept for B or I of all micro-batches in flight, and operands of delayed weight gradients.
    kept: int
    wgrad: int
    # The most that exists besides, within the action.
    temporary: int
    # Kept after the action.
    after: int
    # Kept on the host for B or I of all micro-batches in flight.
    host: int


def activation_memory(config: RunConfig, dp: int) -> list[list[ActionMemory]]:
    """Return the memory of all computing actions of a step, by pipeline rank.

    Args:
        config: of the run.
        dp: data-parallel size.
    """
    parallel = resolve_pipeline(config.model, config.parallel)
    stages = [StageMemory.of(config, stage) for stage in stage_layers(config.model, parallel)]
    program = build_program(parallel, get_num_microbatches(config.training, dp))
    # A stage's output that is being sent, and a gradient that is being received.
    messages = 2 * ActivationShape.of(config).residual if len(program.ranks) > 1 else 0
    ranks = []
    for actions in program.ranks:
        kept, wgrad, host, memory = 0, 0, 0, []
        for action in (action for action in actions if action.kind in COMPUTE_KINDS):
            stage = stages[action.stage]
            if action.kind == FORWARD:
                kept += stage.kept + stage.kept_loss
                host += stage.host
                memory.append(ActionMemory(action, kept, wgrad, stage.forward + messages, kept + wgrad, host))
                continue
            if action.kind == WEIGHT:
                after = wgrad - stage.wgrad
                memory.append(ActionMemory(action, kept, wgrad, 0, kept + after, host))
                wgrad = after
                continue
            kept -= stage.kept_loss
            after = wgrad + (stage.wgrad if action.kind == INPUT else 0)
            temporary = max(stage.backward, after - wgrad - stage.kept) + messages
            memory.append(ActionMemory(action, kept, wgrad, temporary, kept - stage.kept + after, host))
            kept, wgrad, host = kept - stage.kept, after, host - stage.host
        ranks.append(memory)
    return ranks


def peak_activations(config: RunConfig, dp: int) -> list[dict[str, int]]:
    """Return the bytes at the peak of every pipeline rank; arguments as for :func:`activation_memory`."""
    peaks = (max(memory, key=lambda at: at.kept + at.wgrad + at.temporary) for memory in activation_memory(config, dp))
    return [{"activations": at.kept, "delayed gradients": at.wgrad, "temporary": at.temporary} for at in peaks]


def peak_host_activations(config: RunConfig, dp: int) -> list[int]:
    """Return the most bytes of activations on the host by pipeline rank; arguments: :func:`activation_memory`."""
    if not config.training.cpu_offloading_num_layers:
        return [0] * config.parallel.pipeline_model_parallel_size
    return [max(at.host for at in memory) for memory in activation_memory(config, dp)]
