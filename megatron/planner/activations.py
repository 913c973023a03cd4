"""Memory of a rank's activations in bytes, computed from the configuration without torch.

Each mixer states what it keeps from forward to backward (:meth:`megatron.layers.mixers.base.Mixer.kept`). For a GPT-2
block in 16 bits with fused kernels it adds up to ``32 sbh`` bytes: each norm keeps its input and its output (8),
attention q, k, v and its output (8), the MLP what its activation takes and gives (16). Korthikanti et al. (2022, arXiv
2205.05198) count ``sbh (34 + 5as/h)``: the same, 2 for the masks of hidden dropout, which are computed again here, and
5as/h for the scores of attention, which are not stored. A rank keeps these for every micro-batch between its forward
and its backward; the schedule determines their number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from megatron.config.batch import get_num_microbatches, loss_chunk_tokens
from megatron.config.parallel import ParallelConfig
from megatron.config.run import RunConfig
from megatron.distributed.sharding import padded_vocab_size
from megatron.layers.mixers.activations import INDEX_BYTES, INPUT, MASK_BYTES, ActivationShape, KeptTensor
from megatron.layers.mixers.base import Mixer
from megatron.layers.mixers.registry import find_mixer
from megatron.layers.multi_token_parameters import head_kept
from megatron.layers.recompute_plan import RecomputePlan
from megatron.pipeline.actions import BACKWARD, FORWARD, WEIGHT, Action
from megatron.pipeline.actions import INPUT as INPUT_GRADIENT
from megatron.pipeline.partition import StageLayers
from megatron.pipeline.plan import build_schedule, resolve_pipeline, schedule_name, stage_layers
from megatron.pipeline.schedules import SCHEDULES
from megatron.planner.rank_state import alike_layers, kind_of_stage, rotary_tables_of

BLOCKS_IN_TRANSIT = 2
"""Most offloaded blocks whose activations are on the device at a time."""


def residual_layer_tensors(mixer: Mixer, shape: ActivationShape, takers: Sequence[Mixer]) -> Iterator[KeptTensor]:
    """Yield what a residual layer keeps if nothing is recomputed.

    Args:
        mixer: of the layer.
        shape: of the rank.
        takers: mixers whose norms take the residual sum that is counted here; none if it is counted elsewhere.
    """
    placement, again = shape.model.layernorm_placement, ("layernorm", *mixer.recomputed_as)
    modules = {name for each in takers for name in each.recomputed_as}
    if placement == "post":  # without a norm before it, the sum is the mixer's input, of which a router may keep a copy
        inputs = [kept for each in takers for kept in each.kept(shape) if kept.name == INPUT]
        if inputs or (takers and not shape.recomputed.isdisjoint(modules)):
            yield KeptTensor("residual sum", shape.hidden, shape.width, (), any(kept.wgrad_input for kept in inputs))
    elif takers and not (shape.widens("add_norm") and shape.recomputed.isdisjoint({"layernorm", *modules})):
        yield KeptTensor("residual sum", shape.hidden, shape.width)
    if placement != "pre":
        if not shape.widens("norm"):
            yield KeptTensor("output before its norm", shape.hidden, shape.width)
        yield from shape.statistics("norm", shape.rows, shape.hidden)
    if shape.model.hidden_dropout and "dropout" in shape.eager:
        yield KeptTensor("mask of hidden dropout", shape.hidden, MASK_BYTES)
    if placement != "post":
        yield from shape.statistics("add_norm", shape.rows, shape.hidden, *again)
    for kept in mixer.kept(shape):
        if placement != "post" or kept.name != INPUT:
            yield kept


@dataclass(frozen=True)
class BlockMemory:
    """Bytes of a block for one micro-batch."""

    # Kept from F to B or I, with the selective recomputation of the run.
    kept: int
    # Of these, in tensors that are large enough to be offloaded.
    moved: int
    # Operands of weight gradients, kept from I to W.
    wgrad: int
    # Most memory beside what is kept, in the forward and in the backward of the block, and in its weight gradients.
    forward: int
    backward: int
    weight: int
    # The most in a forward that keeps nothing.
    unkept_forward: int

    @classmethod
    def of(cls, config: RunConfig, mixers: Iterable[str]) -> BlockMemory:
        """Compute the memory of a block, whose mixers are given by name."""
        shape, least = ActivationShape.of(config), config.training.min_offloaded_tensor_size
        moved = wgrad = left = weight = 0
        forward, backward, unkept = [], [], []
        found = [*map(find_mixer, mixers)]
        takers = [found, *([] for _ in found[1:])] if config.model.parallel_attention else [[each] for each in found]
        # Layers after this one keep nothing yet in forward, and nothing more in backward.
        for mixer, sharing in reversed([*zip(found, takers)]):
            tensors = [*residual_layer_tensors(mixer, shape, sharing)]
            kept = [t for t in tensors if shape.recomputed.isdisjoint(t.recomputed_by)]
            of_all, of_kept = (sum(t.size for t in some) for some in (tensors, kept))
            in_forward, in_backward = mixer.temporary(shape)
            linears = mixer.linears(shape)
            if shape.copied:
                copies = [linear.operands * shape.copied for linear in linears]
                beside = [
                    (2 - linear.deferred) * shape.residual + linear.beside_operands * shape.width for linear in linears
                ]
                in_backward = max(in_backward, *map(sum, zip(copies, beside)))
                weight = max(weight, *copies)
            forward.append(of_all - of_kept + in_forward - left)
            backward.append(of_all - of_kept + in_backward - left)
            unkept.append(of_all + in_forward - shape.residual)
            left += of_kept
            moved += sum(t.size for t in kept if t.elements >= least)
            gradients = sum(linear.scattered for linear in linears if linear.deferred)
            wgrad += sum(t.size for t in tensors if t.wgrad_input) + gradients * shape.width
        return cls(left, moved, wgrad, max(forward), max(backward), weight, max(unkept))


@dataclass(frozen=True)
class StageMemory:
    """Bytes of a stage for one micro-batch."""

    # Kept from F to B or I; those of the loss are freed when backward begins.
    kept: int
    kept_loss: int
    # Operands of weight gradients, kept from I to W.
    wgrad: int
    # Most memory beside these in F, in that of the loss, in B or I, and in W.
    forward: int
    loss: int
    backward: int
    weight: int
    # Kept on the host from F to B or I, instead of the device.
    host: int

    @classmethod
    def of(cls, config: RunConfig, stage: StageLayers, memory: Mapping[tuple[str, ...], BlockMemory]) -> StageMemory:
        """Compute the memory of a stage; ``memory`` is that of every kind of block by its mixers."""
        shape = ActivationShape.of(config)
        blocks = [memory[config.model.mixers(layer)] for layer in stage.layers]
        offloaded = config.training.cpu_offloading_num_layers
        kept, forward, backward, host, transit = _blocks(config, shape, blocks, offloaded)
        kept += _embedding(shape) if stage.first else 0
        own_positions = config.parallel.context_parallel_size > 1 or config.data.reset_position_ids
        rows = shape.tokens if own_positions else shape.tokens // shape.samples
        channels = sum(table.channels for table in rotary_tables_of(shape.model, stage))
        kept += 2 * rows * channels * shape.width  # cosines and sines
        loss, loss_forward = _loss(shape) if stage.last else (0, 0)
        weight = max((block.weight for block in blocks), default=0)
        wgrad = sum(block.wgrad for block in blocks)
        if stage.last:
            backward = max(backward, _last_norm(shape))
            heads = _heads(config, shape, [memory[config.model.mixers(layer)] for layer in shape.model.head_layers])
            # Offloaded blocks leave the device when the next ones begin, which the last ones do not have.
            loss_forward += transit
            forward = max(forward - heads.kept, heads.forward + transit)
            backward = max(backward - heads.kept, heads.backward + transit)
            kept, loss, wgrad = kept + heads.kept, loss + heads.kept_loss, wgrad + heads.wgrad
            weight = max(weight, heads.weight)
        return cls(kept, loss, wgrad, max(loss_forward, forward - loss), loss_forward, backward, weight, host)


def _heads(config: RunConfig, shape: ActivationShape, blocks: Sequence[BlockMemory]) -> StageMemory:
    """Return the memory of the heads of the last stage, which have these blocks."""
    norm, entropy = _kept_by_loss(shape)
    kept = kept_loss = wgrad = forward = backward = 0
    for number, block in reversed([*enumerate(blocks)]):
        own = [*head_kept(shape, first=number == 0)]
        inside, in_forward, in_backward, _, _ = _blocks(config, shape, [block], 0)
        # Later heads keep nothing yet in forward, and nothing more in backward, but the gradients of their states.
        forward, backward = max(forward, in_forward - kept), max(backward, in_backward - kept)
        kept += sum(t.size for t in own) + inside + norm
        kept_loss += entropy
        wgrad += sum(t.size for t in own if t.wgrad_input) + block.wgrad + shape.residual
    weight = max((block.weight for block in blocks), default=0)
    return StageMemory(kept, kept_loss, wgrad, forward, 0, backward + len(blocks) * shape.residual, weight, host=0)


def _largest(blocks: Sequence[BlockMemory]) -> tuple[int, int]:
    """Return the most memory beside what all of these blocks keep, in the forward and in the backward of one."""
    forward, backward, later = [0], [0], 0
    for block in reversed(blocks):
        forward.append(block.forward - later)
        backward.append(block.backward - later)
        later += block.kept
    return max(forward), max(backward)


def _recomputed(blocks: Sequence[BlockMemory], residual: int) -> int:
    """Return the most memory beside what recomputed blocks keep; the gradient of their output is there in forward."""
    forward, backward = _largest(blocks)
    return max(forward + residual, backward)


def _blocks(
    config: RunConfig, shape: ActivationShape, blocks: Sequence[BlockMemory], offloaded: int
) -> tuple[int, int, int, int, int]:
    """Return what blocks keep, and the most beside it in the forward and in the backward of one.

    The last numbers are what they keep on the host, the activations of the first ``offloaded`` blocks; and how much of
    that is on the device, too, at a time.
    """
    if not blocks:
        return 0, 0, 0, 0, 0
    training, count, residual = config.training, len(blocks), shape.residual
    plan, offloaded = RecomputePlan.from_config(training, count), min(offloaded, count)
    groups = [[*map(blocks.__getitem__, numbers)] for numbers, recomputed in plan.segments(count) if recomputed]
    rest = blocks[plan.blocks :]
    is_moved = shape.hidden >= training.min_offloaded_tensor_size
    inputs = [is_moved and sum(map(len, groups[:number])) < offloaded for number in range(len(groups))]
    moved = [residual] * sum(inputs) + [block.moved for block in rest[: max(0, offloaded - plan.blocks)]]
    held = len(groups) * residual + sum(block.kept for block in rest) - sum(moved)
    # With blocks left on the device, the peak is where all of them are, after the last offloaded one.
    transit = sum(sorted(moved)[-1 if offloaded < count and not groups else -BLOCKS_IN_TRANSIT :])
    forward, backward = _largest(rest)
    if not groups:
        return held, forward + transit, backward + transit, sum(moved), transit
    # When a group is recomputed, those after it are freed; its input is the first residual sum of its blocks.
    peaks = [
        inputs[:number].count(False) * residual + sum(block.kept for block in group) + _recomputed(group, residual)
        for number, group in enumerate(groups)
    ]
    if not rest:  # attention of the last block is gone when its MLP is computed
        forward = max(block.unkept_forward for block in blocks)
    backward = max([(backward + held) * (len(rest) > 0), *peaks]) - held
    return held, forward + transit, backward + transit, sum(moved), transit


def _embedding(shape: ActivationShape) -> int:
    ids = shape.tokens * (INDEX_BYTES + MASK_BYTES) if shape.tp > 1 else 0
    dropped = shape.model.hidden_dropout and "dropout" in shape.eager
    return ids + (shape.hidden * MASK_BYTES if dropped else 0)


def _kept_by_loss(shape: ActivationShape) -> tuple[int, int]:
    """Return what a norm before the loss keeps, and the gradient of its output, which the loss keeps."""
    norm = sum(t.size for t in shape.statistics("add_norm", shape.rows, shape.hidden))
    norm += 0 if shape.widens("add_norm") else shape.residual
    return norm, shape.tokens * shape.model.hidden_size * shape.width


def _last_norm(shape: ActivationShape) -> int:
    """Return what the backward of the norm before the loss needs in fp32, with what it keeps; 0 if it is fused."""
    if shape.widens("add_norm"):
        return 6 * shape.hidden * shape.wide
    if shape.copied and "add_norm" in shape.eager:
        return 4 * shape.hidden * shape.wide + 2 * shape.residual
    return 0


def _loss(shape: ActivationShape) -> tuple[int, int]:
    """Return what the final norm and the loss keep until backward, and what they need besides in forward."""
    (norm, entropy), model, hidden = _kept_by_loss(shape), shape.model, shape.model.hidden_size * shape.width
    rows = padded_vocab_size(model.vocab, model.make_vocab_size_divisible_by, shape.tp) // shape.tp
    copied = shape.wide if "cross_entropy" in shape.eager and shape.width < shape.wide else 0
    default = loss_chunk_tokens(shape.tokens, rows * (copied or shape.width), shape.on_gpu)
    chunk = min(shape.tokens, shape.config.training.cross_entropy_chunk_size or default)
    uncapped = shape.width if model.final_logit_softcapping is not None else 0
    product = max(hidden, shape.copied * (rows + model.hidden_size))  # the gradient of the input, then of the weight
    logits = chunk * (rows * (shape.width + copied + uncapped) + product)
    # A plugin's loss may be scaled before backward, so the weight gradient of the output layer waits for it.
    waits = shape.config.training.objective != "next_token"
    wgrad = rows * model.hidden_size * shape.wide if waits else 0
    logits += shape.residual if model.logits_scaling != 1.0 else 0  # the scaled hidden states
    return norm + entropy + wgrad, shape.residual + shape.gathered(shape.tokens) * shape.width + logits


class InFlight(NamedTuple):
    """Micro-batches whose activations a rank keeps during an action, by stage."""

    action: Action
    # Between F and B or I, that of the action included.
    kept: Mapping[int, int]
    # Between I and W.
    delayed: Mapping[int, int]

    def exceeds(self, other: InFlight) -> bool:
        """Return True if no more is held in another action of the same kind and stage."""
        pairs = ((self.kept, other.kept), (self.delayed, other.delayed))
        return all(mine[stage] >= count for mine, theirs in pairs for stage, count in theirs.items())


def in_flight_during(actions: Iterable[Action]) -> Iterator[InFlight]:
    """Yield what a rank holds in each of its computing actions."""
    kept, delayed = Counter[int](), Counter[int]()
    for action in actions:
        kept[action.stage] += action.kind == FORWARD
        yield InFlight(action, Counter(kept), Counter(delayed))
        kept[action.stage] -= action.kind in (BACKWARD, INPUT_GRADIENT)
        delayed[action.stage] += (action.kind == INPUT_GRADIENT) - (action.kind == WEIGHT)


PERIODS = 6
"""Groups of as many micro-batches as ranks after which the hand-written schedules hold no more: a test compares them
with longer steps."""


def decisive_microbatches(parallel: ParallelConfig, microbatches: int) -> int:
    """Return a smaller number of micro-batches of which a rank holds as many at a time as of ``microbatches``."""
    name, ranks = schedule_name(parallel, 1), parallel.pipeline_model_parallel_size
    if name not in SCHEDULES or name == "gpipe":
        return microbatches
    group = parallel.microbatch_group_size_per_virtual_pipeline_stage or ranks
    full, rest = divmod(microbatches, group)
    # A remainder that is no group of its own makes the first groups longer.
    enough = PERIODS + (rest if rest < ranks else 0)
    return microbatches if full <= enough else enough * group + rest


def decisive_actions(config: RunConfig, dp: int) -> tuple[tuple[InFlight, ...], ...]:
    """Return by rank the actions of a step in which one holds most: no other holds at least as much of all stages.

    Every kind of action of every stage is among them. Arguments as for :func:`activation_memory`.
    """
    parallel = resolve_pipeline(config.model, config.parallel)
    of_schedule = ParallelConfig(
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        num_virtual_stages_per_pipeline_rank=parallel.num_virtual_stages_per_pipeline_rank,
        pipeline_schedule=parallel.pipeline_schedule,
        microbatch_group_size_per_virtual_pipeline_stage=parallel.microbatch_group_size_per_virtual_pipeline_stage,
    )
    count = decisive_microbatches(of_schedule, get_num_microbatches(config.training, dp))
    return _decisive_actions(of_schedule, count)


@lru_cache(maxsize=1024)
def _decisive_actions(parallel: ParallelConfig, microbatches: int) -> tuple[tuple[InFlight, ...], ...]:
    found = []
    for actions in build_schedule(parallel, microbatches).ranks:
        most: dict[tuple[str, int], list[InFlight]] = {}
        for held in in_flight_during(actions):
            of_kind = most.setdefault((held.action.kind, held.action.stage), [])
            if not any(each.exceeds(held) for each in of_kind):
                of_kind[:] = [*(each for each in of_kind if not held.exceeds(each)), held]
        found.append(tuple(held for of_kind in most.values() for held in of_kind))
    return tuple(found)


class ActionMemory(NamedTuple):
    """Bytes of a rank's activations in and after an action."""

    action: Action
    # Kept for B or I of all micro-batches in flight, and operands of delayed weight gradients.
    kept: int
    wgrad: int
    # The most that exists besides, within the action; True if the loss needs it.
    temporary: int
    of_loss: bool
    # What a stage sends and receives, which exists besides, too.
    messages: int
    # Kept after the action.
    after: int
    # Kept on the host for B or I of all micro-batches in flight.
    host: int

    @classmethod
    def of(cls, held: InFlight, stages: Sequence[StageMemory], messages: int) -> ActionMemory:
        """Compute the memory of an action; ``messages`` are the bytes that a stage sends and receives."""
        kind, stage = held.action.kind, stages[held.action.stage]
        kept = sum(count * (stages[each].kept + stages[each].kept_loss) for each, count in held.kept.items())
        wgrad = sum(count * stages[each].wgrad for each, count in held.delayed.items())
        host = sum(count * stages[each].host for each, count in held.kept.items())
        if kind == FORWARD:
            of_loss = 0 < stage.forward == stage.loss
            return cls(held.action, kept, wgrad, stage.forward, of_loss, messages, kept + wgrad, host)
        if kind == WEIGHT:
            return cls(held.action, kept, wgrad, stage.weight, False, 0, kept + wgrad - stage.wgrad, host)
        kept -= stage.kept_loss
        delayed = stage.wgrad if kind == INPUT_GRADIENT else 0
        temporary = max(stage.backward, delayed - stage.kept)
        return cls(held.action, kept, wgrad, temporary, False, messages, kept - stage.kept + wgrad + delayed, host)


def activation_memory(config: RunConfig, dp: int) -> list[list[ActionMemory]]:
    """Return the memory of all computing actions of a step, by pipeline rank.

    Args:
        config: of the run.
        dp: data-parallel size.
    """
    count = get_num_microbatches(config.training, dp)
    schedule = build_schedule(resolve_pipeline(config.model, config.parallel), count)
    return _memory_in(config, map(in_flight_during, schedule.ranks))


def _memory_in(config: RunConfig, ranks: Iterable[Iterable[InFlight]]) -> list[list[ActionMemory]]:
    """Return the memory of some actions of each pipeline rank."""
    model, shape = config.model, ActivationShape.of(config)
    names = map(model.mixers, {*alike_layers(model), *model.head_blocks})
    blocks = {mixers: BlockMemory.of(config, mixers) for mixers in {*names}}
    stages = stage_layers(model, config.parallel, config.training.seq_length)
    kinds = {kind_of_stage(model, stage): stage for stage in stages}
    of_kind = {kind: StageMemory.of(config, stage, blocks) for kind, stage in kinds.items()}
    memory = [of_kind[kind_of_stage(model, stage)] for stage in stages]
    # A stage's output that is being sent, and a gradient that is being received.
    messages = 2 * shape.residual if config.parallel.pipeline_model_parallel_size > 1 else 0
    return [[ActionMemory.of(held, memory, messages) for held in actions] for actions in ranks]


def peak_activations(config: RunConfig, dp: int) -> list[dict[str, int]]:
    """Return the bytes at the peak of every pipeline rank, by part; arguments as for :func:`activation_memory`.

    ``activations`` are those that micro-batches in flight keep, ``delayed gradients`` the operands of weight gradients
    that a schedule delays, ``logits`` what the loss needs if the peak is there, ``temporary`` what a block needs if it
    is in one, and ``pipeline buffers`` what a stage sends and receives.
    """
    peaks = []
    for memory in _memory_in(config, decisive_actions(config, dp)):
        at = max(memory, key=lambda at: at.kept + at.wgrad + at.temporary + at.messages)
        temporary = {"logits": at.temporary * at.of_loss, "temporary": at.temporary * (not at.of_loss)}
        kept = {"activations": at.kept, "delayed gradients": at.wgrad}
        peaks.append(kept | temporary | {"pipeline buffers": at.messages})
    return peaks


def peak_host_activations(config: RunConfig, dp: int) -> list[int]:
    """Return the most bytes of activations on the host by pipeline rank; arguments: :func:`activation_memory`."""
    if not config.training.cpu_offloading_num_layers:
        return [0] * config.parallel.pipeline_model_parallel_size
    return [max(at.host for at in memory) for memory in _memory_in(config, decisive_actions(config, dp))]
