"""Checks of a run's health: per-layer metrics, the first non-finite value, and equality of all copies of the weights.

`HealthReport` observes a step with forward hooks and reports gradient norms, updates, activations, attention logits
and expert load per layer; the numbers are the same in every parallel layout. `explain_nonfinite` runs a failed step
again and names the first NaN or infinity. `check_weight_copies` compares weights and main parameters bitwise between
ranks.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass, field
from functools import partial
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from megatron.config.errors import Problem, UserError
from megatron.config.text import listed_ranks
from megatron.distributed import comm
from megatron.distributed.comm import Group
from megatron.distributed.micro_batch import MicroBatch
from megatron.distributed.param_layout import ParamShard, shard_boxes
from megatron.distributed.sharding import ShardPiece
from megatron.layers.attention import CoreAttention, largest_logit
from megatron.layers.context import ExplainsNonFinite
from megatron.layers.router import Router
from megatron.pipeline.communication import add_communication
from megatron.pipeline.schedules import sequential_schedule
from megatron.training.callbacks.base import Callback
from megatron.training.digests import box_digest
from megatron.training.metrics import StepMetrics
from megatron.training.step import count_tokens
from megatron.training.trainer import Trainer

EMBEDDING, HEAD = "embedding", "head"
COLUMNS = 8
GRADIENT, ZEROS, ELEMENTS, WEIGHT, WEIGHT_BEFORE, CHANGE, OUTPUT, OUTPUT_ELEMENTS = range(COLUMNS)
"""Columns of the per-layer sums: squares, zeros and elements of the gradient; squares of the weight after the step,
before it, and of its change; squares and elements of the layer's output. An output that is replicated over
tensor-parallel ranks is counted on each of them, which leaves the mean unchanged; parameters are counted once."""


class HealthReport(Callback):
    """Log per-layer metrics every ``--log-health-interval`` steps, from forward hooks and the gradient buffers."""

    observes_modules = True

    def __init__(self, trainer: Trainer, interval: int = 1) -> None:
        """Report every ``interval`` steps."""
        super().__init__(trainer)
        self.interval = interval

    def on_step_start(self) -> None:
        """Register the hooks."""
        trainer = self.trainer
        model = trainer.config.model
        layers = [EMBEDDING, *(f"layers.{i}" for i in range(model.num_layers)), HEAD]
        self.rows = {layer: row for row, layer in enumerate(layers)}  # of the tensors below, which are of this rank
        self.sums = torch.zeros(len(layers), COLUMNS, dtype=torch.float64, device=trainer.device)
        self.logits = self.sums.new_full((len(layers),), -torch.inf)  # largest attention logit
        self._counted = trainer.buckets.counted_shards()
        self._cp = trainer.mesh.group("cp")
        self._seen: dict[tuple[nn.Module, int], MicroBatch] = {}
        self._hooks = ExitStack()
        self._hooks.callback(setattr, trainer.optimizer, "observe_update", None)
        trainer.optimizer.observe_update = self._see_update
        for chunk in trainer.chunks.values():
            self._hooks.enter_context(chunk.register_forward_pre_hook(self._enter_chunk))
            for name, module in chunk.named_modules():
                if isinstance(module, CoreAttention):
                    hook = partial(self._see_attention, layer_name(name))
                elif name in self.rows:
                    hook = partial(self._see_output, name)
                else:
                    continue
                self._hooks.enter_context(module.register_forward_hook(hook))

    def on_step_end(self, metrics: StepMetrics) -> None:
        """Log the report; collective."""
        self.log.log(self.report(metrics))

    def _enter_chunk(self, chunk: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Keep the micro-batch for the embedding's hook; the embedding receives only its tokens."""
        self._chunk_batch = inputs[1]

    def _see_attention(self, layer: str, module: CoreAttention, inputs: tuple[Any, ...], output: Tensor) -> None:
        q_SBND, k_SBGD, _, context = inputs
        if self._is_first_forward(module, context.batch):
            row, mask = self.rows[layer], context.masks[module.pattern]
            if module.cp is not None:
                k_SBGD, mask = module.cp.gather_keys(k_SBGD, mask)
            logit = largest_logit(q_SBND, k_SBGD, mask, module.scores)
            self.logits[row] = torch.maximum(self.logits[row], logit)

    def _see_output(self, layer: str, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        x_SBH, batch = (output, self._chunk_batch) if layer == EMBEDDING else (output[0].sum(), inputs[1].batch)
        if self._is_first_forward(module, batch):
            counts_B = counted_samples(batch, self._cp)
            counted_SBH = x_SBH.detach().where(counts_B.view(1, -1, 1) > 0, 0.0)
            self.sums[self.rows[layer], OUTPUT] += square_sum(counted_SBH)
            self.sums[self.rows[layer], OUTPUT_ELEMENTS] += counts_B.sum() * (x_SBH.numel() // x_SBH.shape[1])

    def _is_first_forward(self, module: nn.Module, batch: MicroBatch) -> bool:
        """Return False if the forward pass recomputes activations of the micro-batch."""
        key = module, id(batch)
        if key in self._seen:
            return False
        self._seen[key] = batch  # keep it alive, so that its id is not reused
        return True

    @torch.no_grad()
    def report(self, metrics: StepMetrics) -> dict[str, float]:
        """Remove the hooks and return the metrics of the step, as :func:`summarize_health`. Collective."""
        self._hooks.close()
        trainer = self.trainer
        world = trainer.mesh.world
        for name, shard in trainer.optimizer.grads.items():
            if trainer.specs[name].norm_group:  # clipped by another factor than the rest
                continue
            row = self.sums[self.rows[layer_name(name)]]
            for gradient in self._boxes(name, 0, shard):
                row[GRADIENT] += square_sum(gradient)
                row[ZEROS] += gradient.numel() - torch.count_nonzero(gradient)
                row[ELEMENTS] += gradient.numel()
        chosen = self.sums.new_zeros(len(self.rows), trainer.config.model.num_experts or 0)  # tokens of each expert
        for chunk in trainer.chunks.values():
            for module in chunk.modules():
                if isinstance(module, Router):
                    chosen[self.rows[layer_name(module.context.prefix)]] = module.loads.chosen.double()
        sums, chosen = comm.all_reduce(torch.cat([self.sums, chosen], 1), world).tensor_split([COLUMNS], 1)
        finite_or_inf = self.logits.where(~self.logits.isnan(), torch.inf)  # a maximum over ranks may drop a NaN
        logits = comm.all_reduce(finite_or_inf, world, op="max")
        return summarize_health(list(self.rows), sums, logits, chosen, metrics)

    def _see_update(self, name: str, start: int, before: Tensor, after: Tensor) -> None:
        """Add the squares of weights and of their change, of the elements that this rank counts."""
        row = self.sums[self.rows[layer_name(name)]]
        for column, values in ((WEIGHT_BEFORE, before), (WEIGHT, after), (CHANGE, after - before)):
            for box in self._boxes(name, start, values):
                row[column] += square_sum(box)

    def _boxes(self, name: str, start: int, values: Tensor) -> Iterator[Tensor]:
        """Yield views of the elements that this rank counts; ``values`` start at element ``start`` of its shard."""
        if name not in self._counted:
            return
        share, start = self._counted[name], start + self.trainer.buckets.shards[name].start
        first, stop = max(share.start, start), min(share.stop, start + values.numel())
        if first < stop:
            spec = self.trainer.specs[name]
            counted = values.view(-1)[first - start : stop - start]
            for slot in shard_boxes(spec, ParamShard(first, stop), spec.owned):
                yield slot.view_in(counted)


def counted_samples(batch: MicroBatch, cp: Group) -> Tensor:
    """Return fp64 ``[B]``: 1 for samples with an unmasked label, 0 for samples that pad the batch.

    ``cp`` are the ranks that hold the samples together.
    """
    return (comm.all_reduce(batch.loss_mask.sum(1), cp) > 0).double()


def layer_name(name: str) -> str:
    """Return the layer of a parameter or module: ``layers.3`` for ``layers.3.mlp.linear_fc1.weight``."""
    first, *rest = name.split(".")
    if first == "layers":
        return f"layers.{rest[0]}"
    return EMBEDDING if first == EMBEDDING else HEAD


def square_sum(x: Tensor) -> Tensor:
    """Return the sum of squares in fp64: rows are summed in at least fp32, then in fp64."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return torch.linalg.vector_norm(x, dim=-1, dtype=wide).double().square().sum()


def summarize_health(
    rows: list[str], sums: Tensor, logits: Tensor, chosen: Tensor, metrics: StepMetrics
) -> dict[str, float]:
    """Return the metrics of a step from sums over all ranks. Waits for the device.

    Metrics are named ``health/<quantity>/<layer>``; layers are ``embedding``, ``layers.0``..., ``head``. Quantities are
    ``grad-norm`` (before clipping), ``zeros-share`` (of the gradient's elements), ``params-norm`` (after the step),
    ``update-ratio`` (norm of the update over the norm of the weights before it), ``activation-rms`` (of the layer's
    output), ``attention-logit`` (the largest) and, with experts, ``expert-load`` (tokens of the busiest expert over the
    mean of all experts). Totals over all layers have Megatron-LM's names where it has them.

    Args:
        rows: layer of each row of ``sums``, ``logits`` and ``chosen``.
        sums: fp64 ``[layers, 8]``.
        logits: fp64 ``[layers]``.
        chosen: fp64 ``[layers, experts]``.
        metrics: results of the step. The gradient buffers may still contain the loss scale and the clipping factor; the
            ratio to the step's gradient norm removes this common factor.
    """
    whole = sums.sum(0)
    buffer_norm = whole[GRADIENT].sqrt()
    usable = buffer_norm.isfinite() & (buffer_norm > 0)
    factor = torch.where(usable, metrics.grad_norm / buffer_norm, 1.0 / metrics.loss_scale)
    table = torch.cat([sums, whole.unsqueeze(0)])
    norms = table[:, GRADIENT].sqrt() * factor
    changes = (table[:, CHANGE] / table[:, WEIGHT_BEFORE]).sqrt()
    blocks = rows[1:-1]
    quantities = [
        ("grad-norm", [*rows, "total"], norms),
        ("zeros-share", rows, sums[:, ZEROS] / sums[:, ELEMENTS]),
        ("params-norm", rows, sums[:, WEIGHT].sqrt()),
        ("update-ratio", [*rows, "total"], changes),
        ("activation-rms", rows[:-1], (sums[:, OUTPUT] / sums[:, OUTPUT_ELEMENTS]).sqrt()[:-1]),
    ]
    if attending := [row for row, layer in enumerate(rows) if layer in blocks and logits[row] != -torch.inf]:
        quantities.append(("attention-logit", [rows[row] for row in attending], logits[attending]))
    if chosen.numel():
        routed = [row for row, layer in enumerate(rows) if layer in blocks and chosen[row].any()]
        loads = (chosen.amax(1) / chosen.mean(1))[routed]
        quantities.append(("expert-load", [rows[row] for row in routed], loads))
    values = {
        f"health/{quantity}/{layer}": value
        for quantity, layers, tensor in quantities
        for layer, value in zip(layers, tensor.tolist())
    }
    values["params-norm"] = whole[WEIGHT].sqrt().item()
    values["num-zeros"] = whole[ZEROS].item()
    if attending:
        values["max_attention_logit"] = logits.max().item()
    return values


@dataclass(frozen=True, order=True)
class NonFiniteFinding:
    """A non-finite output or gradient on one rank; findings are ordered by their time in the step."""

    microbatch: int  # index among the rank's micro-batches
    backward: bool  # True for a gradient
    stage: int  # position of the pipeline stage in execution order; backward starts with the last stage
    position: int  # of the module or parameter in execution order
    text: str = field(compare=False)  # description for people


def explain_nonfinite(trainer: Trainer, batches: Sequence[MicroBatch]) -> str:
    """Run a skipped step again and describe the first non-finite value and its ranks. Collective over all ranks.

    Micro-batches run one by one, so that pipeline order is time order, and without the data-parallel reduction, which
    would spread a bad gradient to all ranks. The weights are unchanged, the gradients are overwritten.
    """
    modules = [module for chunk in trainer.chunks.values() for module in chunk.modules()]
    limited = [module for module in modules if isinstance(module, ExplainsNonFinite)]
    with ExitStack() as repeated:
        for module in limited:
            repeated.enter_context(module.repeated())
        mine = first_nonfinite(trainer, batches)
    reasons = [reason for module in limited if (reason := module.nonfinite_reason()) is not None]
    own = [*max(reasons, default=())], [] if mine is None else [*astuple(mine)]
    gathered = comm.all_gather_objects([*own], trainer.mesh.world)
    by_rank = [NonFiniteFinding(*values) if values else None for _, values in gathered]
    found = [finding for finding in by_rank if finding is not None]
    step = f"the loss or gradient of step {batches[0].step + 1} is not finite"
    beyond = [(*reason, rank) for rank, (reason, _) in enumerate(gathered) if reason]
    if beyond and not found:
        _, text, rank = max(beyond)
        return f"step {batches[0].step + 1} changed no weight: on rank {rank} {text}"
    if not found:
        return (
            f"{step}, but all values before the sum over ranks were finite when the step was run again: "
            "the sum overflows, or hardware is faulty"
        )
    first = min(found)
    ranks = [rank for rank, finding in enumerate(by_rank) if finding == first]
    return f"{step}; first on {listed_ranks(ranks)}: {first.text}"


def first_nonfinite(trainer: Trainer, batches: Sequence[MicroBatch]) -> NonFiniteFinding | None:
    """Return this rank's first finding. All micro-batches are run, because other ranks need their collectives."""
    first = None
    grad_seed = trainer.scaler.scale / count_tokens(trainer, batches).clamp(min=1.0)
    schedule = add_communication(sequential_schedule(trainer.mesh.placement))
    outputs: list[tuple[int, str, bool]] = []  # stage, name and finiteness of modules, in the order of execution

    def record_output(stage: int, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        tensors = [t for t in tree_leaves(output) if isinstance(t, Tensor)]
        outputs.append((stage, name, all(bool(t.isfinite().all()) for t in tensors)))

    global_names = {weight: name.rpartition(".")[0] for name, weight in trainer.params.items()}
    trainer.buckets.start_step(len(batches))
    with trainer.buckets.without_reduction(), ExitStack() as hooks:
        for stage, chunk in trainer.chunks.items():
            for place, module in chunk.named_modules():
                own = [global_names[weight] for weight in module.parameters(recurse=False) if weight in global_names]
                hook = partial(record_output, stage, own[0] if own else place or f"stage {stage}")
                hooks.enter_context(module.register_forward_hook(hook))
        for i, batch in enumerate(batches):
            outputs.clear()
            trainer.compute([batch], grad_seed, schedule)
            for position, (stage, name, finite) in enumerate(outputs):
                if first is None and not finite:
                    text = f"output of {name}, micro-batch {i}, samples {batch.sample_ids.tolist()}"
                    first = NonFiniteFinding(i, False, stage, position, text)
            if first is None:
                first = first_bad_gradient(trainer, i)
    for chunk in trainer.chunks.values():
        chunk.sums.pop()
    return first


def first_bad_gradient(trainer: Trainer, microbatch: int) -> NonFiniteFinding | None:
    """Return the first parameter in backward order whose gradient on this rank is not finite."""
    chunks = trainer.chunks
    stage_of = {param: stage for stage in sorted(chunks, reverse=True) for param in chunks[stage].parameters()}
    for position, name in enumerate(reversed(list(trainer.buckets.specs))):
        if not trainer.buckets.accumulated(name).isfinite().all():
            stage = len(trainer.mesh.placement) - 1 - stage_of[trainer.params[name]]
            return NonFiniteFinding(microbatch, True, stage, position, f"gradient of {name}, micro-batch {microbatch}")
    return None


class WeightCopy(NamedTuple):
    """One rank's copy of a part of a parameter."""

    what: str  # layers.0.mlp.linear_fc1.weight, or "the master of" it
    place: str  # in the global parameter
    digest: int  # of its bits


def check_weight_copies(trainer: Trainer) -> None:
    """Compare all copies of weights and main parameters. Collective over all ranks.

    Raises:
        UserError: on every rank if copies differ, with the step, the first parameter and the ranks.
    """
    mine: list[list[Any]] = [[*copy] for copy in find_differing_copies(trainer)]
    by_rank = [[WeightCopy(*copy) for copy in copies] for copies in comm.all_gather_objects(mine, trainer.mesh.world)]
    names = list(dict.fromkeys(copy.what for copies in by_rank for copy in copies))
    if not names:
        return
    iteration = trainer.iteration
    where = describe_difference(names[0], by_rank)
    more = f"; copies of {len(names) - 1} more differ too" if len(names) > 1 else ""
    sentence = f"copies of the weights differ after step {iteration}: {names[0]} {where}{more}"
    last_check = max(0, iteration - (trainer.config.logging.check_weight_hash_across_dp_replicas_interval or 0))
    fix = f"the same command with --ckpt-step N, N at most {last_check}, the step of the last check that passed"
    raise UserError([Problem("E707", sentence, (fix,))])


def find_differing_copies(trainer: Trainer) -> list[WeightCopy]:
    """Return this rank's copies that differ from another rank's. Collective over all ranks."""
    trainer.optimizer.weights.wait()
    # some main parameters are computed: read them one by one
    parts = [
        (what, piece.global_box, groups, box_digest(x, piece.global_box))
        for what, piece, x, groups in _copied_parts(trainer)
    ]
    members: dict[tuple[int, ...], list[int]] = defaultdict(list)  # parts by the ranks that hold copies
    by_ranks: dict[tuple[int, ...], Group] = {}
    for i, (_, _, groups, _) in enumerate(parts):
        for group in groups:
            members[group.ranks].append(i)
            by_ranks.setdefault(group.ranks, group)
    differing: set[int] = set()
    for ranks in sorted(members, key=lambda ranks: (-len(ranks), ranks)):  # in one order on all ranks
        mine = torch.stack([parts[i][3] for i in members[ranks]])
        copies = comm.all_gather(mine, by_ranks[ranks]).view(len(ranks), -1)
        differing.update(compress(members[ranks], (copies != mine).any(0).tolist()))
    return [WeightCopy(parts[i][0], str(parts[i][1]), int(parts[i][3])) for i in sorted(differing)]


def _copied_parts(trainer: Trainer) -> Iterator[tuple[str, ShardPiece, Tensor, list[Group]]]:
    """Yield the parts of weights and main parameters that other ranks hold, too, with the groups of those that do."""
    mesh = trainer.mesh
    for name, spec in trainer.specs.items():
        share, copies = trainer.buckets.shards.get(name), mesh.optimizer_replica_group(*spec.reduce_axes)
        weight, master = trainer.optimizer.weights.shards.get(name), trainer.optimizer.main_params.get(name)
        tensors = []
        if trainer.config.parallel.zero_stage < 3:
            whole = trainer.params[name].detach()
            tensors.append((name, whole, ParamShard(0, whole.numel()), mesh.group(*spec.reduce_axes)))
        elif weight is not None and share is not None:
            tensors.append((name, weight, share, copies))
        if master is not None and weight is not None and share is not None and master.dtype != weight.dtype:
            tensors.append((f"the master of {name}", master, share, copies))
        for what, tensor, share, data_parallel in tensors:
            for slot in shard_boxes(spec, share):
                groups = [data_parallel, mesh.tp_subgroup(slot.piece.tp_ranks)]
                if spec.tied:
                    groups.append(mesh.embedding_group)
                if several := [group for group in groups if group.size > 1]:
                    yield what, slot.piece, slot.view_in(tensor), several


def describe_difference(what: str, by_rank: Sequence[Sequence[WeightCopy]]) -> str:
    """Describe on which ranks copies of a parameter differ from the majority, if there is a majority."""
    odd, majority = differing_ranks(what, by_rank)
    minority = listed_ranks(odd)
    return f"on {minority} differs from {listed_ranks(majority)}" if majority else f"is not the same on {minority}"


def differing_ranks(what: str, by_rank: Sequence[Sequence[WeightCopy]]) -> tuple[list[int], list[int]]:
    """Return the ranks whose copies of a parameter differ from the majority, all without one, and the majority."""
    by_place: dict[str, dict[int, int]] = defaultdict(dict)  # digests by rank
    for rank, copies in enumerate(by_rank):
        for copy in copies:
            if copy.what == what:
                by_place[copy.place][rank] = copy.digest
    odd: set[int] = set()
    for digests in by_place.values():
        (most, count), *others = Counter(digests.values()).most_common()
        tied = bool(others) and others[0][1] == count
        odd |= {rank for rank, digest in digests.items() if tied or digest != most}
    return sorted(odd), sorted({rank for digests in by_place.values() for rank in digests} - odd)


class ReplicaCheck(Callback):
    """Compare all copies of the weights every ``--check-weight-hash-across-dp-replicas-interval`` steps."""

    def __init__(self, trainer: Trainer, interval: int) -> None:
        """Check every ``interval`` steps."""
        super().__init__(trainer)
        self.interval = interval

    def on_step_end(self, metrics: StepMetrics) -> None:
        """Raise a UserError if copies differ; collective."""
        check_weight_copies(self.trainer)
