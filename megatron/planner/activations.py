"""Memory of a rank's activations in bytes, computed from the configuration without torch.

:func:`block_tensors` lists what a block keeps from forward to backward. For a GPT-2 block in 16 bits with fused kernels
it adds up to ``32 sbh`` bytes: each norm keeps its input and its output (8), attention q, k, v and its output (8), the
MLP what its activation takes and gives (16). Korthikanti et al. (2022, arXiv 2205.05198) count ``sbh (34 + 5as/h)``:
the same, 2 for the masks of hidden dropout, which are computed again here, and 5as/h for the scores of attention, which
fused attention does not store. A rank keeps these for every micro-batch between its forward and its backward; the
schedule determines their number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron.config.batch import get_num_microbatches, loss_chunk_tokens
from megatron.config.model import ModelConfig
from megatron.config.run import RunConfig, kernel_choices
from megatron.distributed.sharding import padded_vocab_size
from megatron.pipeline.actions import COMPUTE_KINDS, FORWARD, INPUT, WEIGHT, Action
from megatron.pipeline.partition import StageLayers
from megatron.pipeline.plan import build_program, resolve_pipeline, stage_layers

DTYPE_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes per element."""

INDEX_BYTES, MASK_BYTES = 8, 1
"""Bytes of an index, and of an element of a boolean mask."""


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
    # Sequence length.
    length: int
    # Tokens of a micro-batch, and rows of the residual stream: fewer with sequence parallelism.
    tokens: int
    rows: int
    tp: int
    # Rows that the experts of this rank receive if every expert is chosen equally often, and the ranks of an expert.
    expert_rows: int
    expert_tp: int
    # Bytes of an element, and of one of statistics and scores.
    width: int
    wide: int
    on_gpu: bool
    # Operations that run as plain PyTorch, whose autograd keeps more.
    eager: frozenset[str]
    # Modules recomputed within blocks.
    recomputed: frozenset[str]
    loss_chunk: int | None
    # A plugin's loss may be scaled before backward, so the weight gradient of the output layer waits for it.
    keeps_loss_wgrad: bool

    @classmethod
    def of(cls, config: RunConfig) -> ActivationShape:
        """Return the sizes of a run. ``--device auto`` counts as a GPU."""
        model, parallel, training = config.model, config.parallel, config.training
        tokens, tp = training.micro_batch_size * training.seq_length, parallel.tensor_model_parallel_size
        rows = tokens // tp if parallel.sequence_parallel else tokens
        width, on_gpu = DTYPE_BYTES[config.precision.params_dtype], training.device != "cpu"
        plain = ("torch",) if on_gpu else ("torch", "auto")
        eager = {op for op, choice in kernel_choices(config.compute.kernels).items() if choice.name in plain}
        selective = training.recompute_granularity == "selective"
        return cls(
            model=model,
            length=training.seq_length,
            tokens=tokens,
            rows=rows,
            tp=tp,
            expert_rows=rows * model.moe_router_topk * parallel.expert_tp,
            expert_tp=parallel.expert_tp,
            width=width,
            wide=max(width, DTYPE_BYTES["fp32"]),
            on_gpu=on_gpu,
            eager=frozenset(eager),
            recomputed=frozenset(training.recompute_modules if selective else ()),
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
        return self.tokens * self.model.kv_groups * self.model.head_dim // self.tp

    @property
    def mlps(self) -> tuple[tuple[str, int, int], ...]:
        """Name, rows and local hidden width of the MLPs of a block."""
        model = self.model
        if model.num_experts is None:
            return (("mlp", self.tokens, model.ffn // self.tp),)
        experts = ("experts", self.expert_rows, model.expert_ffn // self.expert_tp)
        shared = model.moe_shared_expert_intermediate_size
        return (experts, ("shared expert", self.tokens, shared // self.tp)) if shared else (experts,)


def block_tensors(shape: ActivationShape) -> tuple[list[KeptTensor], list[KeptTensor]]:
    """Return what the attention and the MLP of a block keep, with their norms, if nothing is recomputed."""
    residual = [KeptTensor("residual sum", shape.residual // shape.width, shape.width)]
    if shape.model.hidden_dropout and "dropout" in shape.eager:
        residual.append(KeptTensor("mask of hidden dropout", shape.residual // shape.width, MASK_BYTES))
    return [*residual, *_attention_half(shape)], [*residual, *_mlp_half(shape)]


def _attention_half(shape: ActivationShape) -> Iterator[KeptTensor]:
    model, width = shape.model, shape.width
    heads = model.num_attention_heads // shape.tp
    for kept in _statistics(shape, "add_norm", shape.rows, shape.residual // width):
        yield kept._replace(recomputed_by=("layernorm",))
    yield KeptTensor("norm", shape.residual // width, width, ("layernorm",), True)
    unfused = model.attention_dropout > 0 and "core_attn" not in shape.recomputed
    yield from _split_qkv(shape, unfused)
    if unfused:
        scores = shape.tokens * shape.length * heads
        yield KeptTensor("k, v of every head", 2 * shape.queries, width)
        yield KeptTensor("mask of attention", shape.length**2, MASK_BYTES)
        yield KeptTensor("softmax", scores, shape.wide)
        yield KeptTensor("mask of attention dropout", scores, MASK_BYTES)
        yield KeptTensor("softmax after dropout", scores, width)
    elif not model.attention_dropout:
        yield KeptTensor("logsumexp of attention", shape.tokens * heads, shape.wide, ("core_attn",))
    yield KeptTensor("output of attention", shape.queries, width, (), True)


def _split_qkv(shape: ActivationShape, unfused: bool) -> Iterator[KeptTensor]:
    """Yield q, k and v, as attention keeps them unless it copies them (``unfused``), and what their norms keep."""
    model, queries, keys, width = shape.model, shape.queries, shape.keys, shape.width
    eager, rotary, normed = "split_qkv" in shape.eager, model.rotary_dim > 0, model.qk_layernorm
    if normed:
        heads = shape.tokens * (model.num_attention_heads + model.kv_groups) // shape.tp
        yield from _statistics(shape, "split_qkv", heads, queries + keys)
        if eager and model.heads_per_group > 1:
            yield KeptTensor("queries before their norm", queries, width)
    if rotary and not (eager or normed):
        yield KeptTensor("q, k, v", queries + 2 * keys * (not unfused), width)
        return
    split = rotary or normed or model.heads_per_group > 1  # q is not a view of the projection
    if normed or not (unfused and split):
        yield KeptTensor("output of the projection", queries + 2 * keys, width)  # v is a part of it
    if split:
        yield KeptTensor("q", queries, width)
    if not unfused and (rotary or normed):
        yield KeptTensor("k", keys, width)


def _mlp_half(shape: ActivationShape) -> Iterator[KeptTensor]:
    model, width = shape.model, shape.width
    for kept in _statistics(shape, "add_norm", shape.rows, shape.residual // width):
        yield kept._replace(recomputed_by=("layernorm", "mlp"))
    has_linear = shape.mlps[-1][0] != "experts"  # the experts take copies of the rows
    if has_linear or width == shape.wide:
        again = ("mlp",) if model.num_experts is not None and width == shape.wide else ("layernorm", "mlp")
        yield KeptTensor("norm", shape.residual // width, width, again, has_linear)  # a router keeps a wide one
    if model.num_experts is not None:
        for kept in _routing(shape, model.num_experts):
            yield kept._replace(recomputed_by=("mlp",))
    for name, rows, ffn in shape.mlps:
        yield KeptTensor(f"{name}: output of fc1", (1 + model.gated) * rows * ffn, width, ("mlp",))
        if model.gated and "activation" in shape.eager:
            yield KeptTensor(f"{name}: silu(gate)", rows * ffn, width, ("activation", "mlp"))
        yield KeptTensor(f"{name}: activation", rows * ffn, width, ("activation", "mlp"), True)


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

    @classmethod
    def of(cls, config: RunConfig, stage: StageLayers) -> StageMemory:
        """Return that of a stage."""
        shape = ActivationShape.of(config)
        attention, mlp = block_tensors(shape)
        kept, again = _kept_by_blocks(config, shape, stage.count)
        if shape.model.rotary_dim:
            kept += 2 * shape.length * shape.model.rotary_dim * shape.width  # cosines and sines
        kept += _embedding(shape) if stage.first else 0
        loss, forward = _loss(shape) if stage.last else (0, 0)
        if stage.count:  # the last block's attention, before its MLP
            forward = max(forward, _dropout_hashes(shape) - loss - sum(t.size for t in mlp))
        wgrad = stage.count * _wgrad_operands(shape, [*attention, *mlp])
        return cls(kept, loss, wgrad, forward, again + _block_backward(shape) if stage.count else 0)


def _kept_by_blocks(config: RunConfig, shape: ActivationShape, count: int) -> tuple[int, int]:
    """Return what ``count`` blocks keep, and the most that is recomputed at a time, beyond what is freed by then."""
    training, halves = config.training, block_tensors(shape)
    attention, mlp = (sum(t.size for t in half) for half in halves)
    if training.recompute_granularity != "full":
        kept = [sum(t.size for t in half if not shape.recomputed & {*t.recomputed_by}) for half in halves]
        if "core_attn" in shape.recomputed:
            unfused = _attention_half(replace(shape, recomputed=frozenset()))
            attention = sum(t.size for t in unfused) + _dropout_hashes(shape)
        # The MLP is freed before attention is recomputed.
        return count * sum(kept), max(mlp - kept[1], attention - sum(kept))
    if training.recompute_method == "block":
        done = min(training.recompute_num_layers or count, count)
        groups, rest = [1] * done, count - done
    else:
        size = training.recompute_num_layers or 1
        groups, rest = [min(size, count - start) for start in range(0, count, size)], 0
    held = len(groups) * shape.residual + rest * (attention + mlp)
    # When a group is recomputed, those after it are freed; its input is the first residual sum of its blocks.
    peaks = [number * shape.residual + group * (attention + mlp) for number, group in enumerate(groups)]
    return held, max([0, *(peak + max(0, _dropout_hashes(shape) - mlp) - held for peak in peaks)])


def _embedding(shape: ActivationShape) -> int:
    ids = shape.tokens * (INDEX_BYTES + MASK_BYTES) if shape.tp > 1 else 0
    dropped = shape.model.hidden_dropout and "dropout" in shape.eager
    return ids + (shape.residual // shape.width * MASK_BYTES if dropped else 0)


def _wgrad_operands(shape: ActivationShape, tensors: Sequence[KeptTensor]) -> int:
    """Return the bytes of the inputs and output gradients of a block's linears."""
    inputs = sum(tensor.size for tensor in tensors if tensor.wgrad_input)
    gradients = (shape.queries + 2 * shape.keys) * shape.width + shape.residual
    for name, rows, width in shape.mlps:
        out = rows if name == "experts" else shape.rows
        gradients += ((1 + shape.model.gated) * rows * width + out * shape.model.hidden_size) * shape.width
    return inputs + gradients


def _block_backward(shape: ActivationShape) -> int:
    """Return the most memory of a block's backward beside what is kept: that of the MLP.

    The gradients of the residual stream and of what the linears take and give.
    """
    wide = max(rows * width for _, rows, width in shape.mlps) * shape.width
    return shape.residual + max((1 + shape.model.gated) * wide, wide + shape.gathered)


def _dropout_hashes(shape: ActivationShape) -> int:
    """Return the bytes of the hashes that attention dropout compares with its probability: three steps of int64."""
    if not shape.model.attention_dropout:
        return 0
    return 3 * INDEX_BYTES * shape.tokens * shape.length * shape.model.num_attention_heads // shape.tp


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
    logits = chunk * (rows * (shape.width + copied) + hidden)
    wgrad = rows * model.hidden_size * shape.wide if shape.keeps_loss_wgrad else 0
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
        kept, wgrad, memory = 0, 0, []
        for action in (action for action in actions if action.kind in COMPUTE_KINDS):
            stage = stages[action.stage]
            if action.kind == FORWARD:
                kept += stage.kept + stage.kept_loss
                memory.append(ActionMemory(action, kept, wgrad, stage.forward + messages, kept + wgrad))
                continue
            if action.kind == WEIGHT:
                after = wgrad - stage.wgrad
                memory.append(ActionMemory(action, kept, wgrad, 0, kept + after))
                wgrad = after
                continue
            kept -= stage.kept_loss
            after = wgrad + (stage.wgrad if action.kind == INPUT else 0)
            temporary = max(stage.backward, after - wgrad - stage.kept) + messages
            memory.append(ActionMemory(action, kept, wgrad, temporary, kept - stage.kept + after))
            kept, wgrad = kept - stage.kept, after
        ranks.append(memory)
    return ranks


def peak_activations(config: RunConfig, dp: int) -> list[dict[str, int]]:
    """Return the bytes at the peak of every pipeline rank; arguments as for :func:`activation_memory`."""
    peaks = (max(memory, key=lambda at: at.kept + at.wgrad + at.temporary) for memory in activation_memory(config, dp))
    return [{"activations": at.kept, "delayed gradients": at.wgrad, "temporary": at.temporary} for at in peaks]
