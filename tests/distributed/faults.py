"""Typical faults of sharded training, each a patch of the library within a context."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from megatron.distributed import comm, mappings
from megatron.distributed.comm import Group
from megatron.distributed.grad_accumulator import GradAccumulator, Operand, WgradOperand
from megatron.distributed.mappings import PIPELINED, Product
from megatron.distributed.micro_batch import MicroBatch
from megatron.distributed.sharding import DenseSharding, ShardSpec
from megatron.kernels.block_attention import AttentionDropout
from megatron.layers import attention, linear, loss
from megatron.layers.adapters import LowRankProduct
from megatron.layers.context import BuildContext, ForwardContext
from megatron.layers.linear import LinearProduct, Parallel
from megatron.model.gpt import GPTChunk
from megatron.optimizer import distributed_optimizer
from megatron.optimizer.distributed_optimizer import PartialGradReducer
from megatron.pipeline import plan
from megatron.pipeline.actions import BACKWARD, INPUT, WEIGHT, Action, PipelineSchedule
from megatron.pipeline.runtime import Pipeline, Stage
from megatron.training import build as build_module
from megatron.training import build_model, step
from megatron.training import trainer as trainer_module
from megatron.training.trainer import Trainer


def bias_added_by_every_rank() -> AbstractContextManager[Any]:
    """A row-parallel bias inside the sum over ranks."""
    original = linear._RowParallelFunction.forward

    def forward(ctx: Any, x: Tensor, bias: Tensor | None, product: LinearProduct, *weights: Tensor) -> Tensor:
        y = original(ctx, x, bias, product, *weights)
        return y if bias is None else y + (product.comm.tp.size - 1) * bias

    return patch.object(linear._RowParallelFunction, "forward", staticmethod(forward))


def _adapters_changed(change: Callable[[LowRankProduct], None]) -> AbstractContextManager[Any]:
    original = LowRankProduct.__init__

    def init(self: LowRankProduct, context: BuildContext, parallel: Parallel) -> None:
        original(self, context, parallel)
        change(self)

    return patch.object(LowRankProduct, "__init__", init)


def adapters_of_another_part() -> AbstractContextManager[Any]:
    """Output rows use the rows of A of the next part."""

    def change(product: LowRankProduct) -> None:
        product.own = None if product.own is None else product.own.roll(1, 1)

    return _adapters_changed(change)


def adapters_scaled_by_the_rank() -> AbstractContextManager[Any]:
    """The outputs of adapters of rank 2 are divided by the rank."""

    def change(product: LowRankProduct) -> None:
        product.scale /= 2

    return _adapters_changed(change)


def _with_parts(change: Callable[[list[Tensor]], list[Tensor]]) -> AbstractContextManager[Any]:
    """Change the parts of which the product of gathered rows consists."""

    def gather_matmul(x: Tensor, product: Product, group: Group) -> tuple[Tensor, Tensor]:
        rows, y = PIPELINED.gather_matmul(x, product, group)
        return rows, torch.cat(change([*y.chunk(group.size)]))

    return patch.object(build_model, "PIPELINED", PIPELINED._replace(gather_matmul=gather_matmul))


def parts_in_another_order() -> AbstractContextManager[Any]:
    """The parts of a pipelined product are in the order in which the second rank multiplies them, its own first."""
    return _with_parts(lambda parts: parts[::-1])


def part_lost() -> AbstractContextManager[Any]:
    """Return the first rank's product for the last rank's rows."""
    return _with_parts(lambda parts: [*parts[:-1], parts[0]])


def rows_of_the_part_before() -> AbstractContextManager[Any]:
    """A broadcast is not waited for: the rows are what another part has left in the buffer."""
    original = comm.start_broadcast
    buffers: list[Tensor] = []

    def start(x: Tensor, group: Group, source: int) -> comm.Pending:
        pending = original(x, group, source)
        buffers.append(pending.wait().clone())
        return comm.Pending(buffers[-2] if source and source != group.rank else x)

    return patch.object(comm, "start_broadcast", start)


def replicas_counted_in_the_norm() -> AbstractContextManager[Any]:
    """Every rank adds all its pieces to the gradient norm, not only those it answers for."""
    original = distributed_optimizer.GradNorm.__init__

    def init(self: Any, *arguments: Any) -> None:
        with patch.object(ShardSpec, "owned", property(lambda spec: spec.pieces)):
            original(self, *arguments)

    return patch.object(distributed_optimizer.GradNorm, "__init__", init)


def tokens_counted_locally() -> AbstractContextManager[Any]:
    """The loss is divided by this replica's tokens times the replicas, not by the global count."""

    def count(trainer: Trainer, batches: Sequence[MicroBatch]) -> Tensor:
        return torch.stack([b.loss_mask.sum(dtype=torch.float64) for b in batches]).sum() * trainer.mesh.dp_cp.size

    return patch.object(step, "count_tokens", count)


@contextmanager
def dropout_by_local_row() -> Iterator[None]:
    """Sequence-parallel ranks drop the same rows of their parts."""
    original = GPTChunk._forward_context

    def from_zero(self: GPTChunk, *arguments: Any) -> ForwardContext:
        context = original(self, *arguments)
        return replace(context, rows=(range(len(context.row_positions)),))

    with patch.object(GPTChunk, "_forward_context", from_zero):
        yield


def dropout_by_local_head() -> AbstractContextManager[Any]:
    """Tensor-parallel ranks drop the same weights of their first heads."""

    def from_head_0(probability: float, key: int, sample_ids: Tensor, first_head: int, length: int) -> AttentionDropout:
        return AttentionDropout(probability, key, sample_ids, 0, length)

    return patch.object(attention, "AttentionDropout", from_head_0)


def dropout_by_local_sample() -> AbstractContextManager[Any]:
    """Every micro-batch drops what the first one does."""
    original = GPTChunk.forward

    def forward(self: GPTChunk, x: Tensor | None, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        return original(self, x, replace(batch, sample_ids=torch.arange(len(batch.sample_ids))))

    return patch.object(GPTChunk, "forward", forward)


def padding_in_the_partition_function() -> AbstractContextManager[Any]:
    """The vocabulary's padded rows take part in the softmax."""
    original = loss.OutputLayer.__init__

    def init(self: Any, *arguments: Any) -> None:
        original(self, *arguments)
        self.vocabulary = replace(self.vocabulary, held=self.weight.shape[0])

    return patch.object(loss.OutputLayer, "__init__", init)


def largest_logit_not_shared() -> AbstractContextManager[Any]:
    """Each rank subtracts its own largest logit."""
    original = comm.all_reduce

    def all_reduce(x: Tensor, group: Group, op: str = "sum") -> Tensor:
        return x if op == "max" else original(x, group, op)

    return patch.object(comm, "all_reduce", all_reduce)


def largest_logit_not_subtracted() -> AbstractContextManager[Any]:
    """Logits are exponentiated as they are."""
    original = comm.all_reduce

    def all_reduce(x: Tensor, group: Group, op: str = "sum") -> Tensor:
        return x.zero_() if op == "max" else original(x, group, op)

    return patch.object(comm, "all_reduce", all_reduce)


def deferred(dropped: int | None = None) -> AbstractContextManager[Any]:
    """No fault by itself: every B is an I and a W; the W of micro-batch ``dropped`` is left out."""

    def halves(action: Action) -> list[Action]:
        if action.kind != BACKWARD:
            return [action]
        kinds = (INPUT,) if action.microbatch == dropped else (INPUT, WEIGHT)
        return [action._replace(kind=kind) for kind in kinds]

    def program_for(*arguments: Any, **named: Any) -> PipelineSchedule:
        whole = plan.build_program(*arguments, **named)
        return PipelineSchedule(
            whole.name, tuple(tuple(half for a in rank for half in halves(a)) for rank in whole.ranks)
        )

    return patch.object(trainer_module, "_program", program_for)  # which keeps what it has built


def weight_gradient_dropped() -> AbstractContextManager[Any]:
    """The W action of one micro-batch never runs."""
    return deferred(dropped=1)


@contextmanager
def weight_gradient_empty() -> Iterator[None]:
    """The W action of one micro-batch runs, and adds nothing."""
    original = GradAccumulator.run_deferred

    def run(self: GradAccumulator, chunk: int, microbatch: int) -> None:
        queue = self._queues[chunk, microbatch]
        if microbatch == 1:
            queue[:] = [each._replace(x=WgradOperand(torch.zeros_like(each.x.wait()))) for each in queue]
        original(self, chunk, microbatch)

    with deferred(), patch.object(GradAccumulator, "run_deferred", run):
        yield


def kv_copy_drifts() -> AbstractContextManager[Any]:
    """One copy of a shared key/value head is off by the last bit of fp32."""
    original = build_module.build_trainer

    def build(*arguments: Any) -> Trainer:
        trainer = original(*arguments)
        name = "layers.0.self_attention.linear_qkv.weight"
        view = trainer.optimizer.main_params[name].view(trainer.specs[name].local_view)
        for piece in trainer.specs[name].pieces:
            if len(piece.tp_ranks) > 1 and piece.tp_ranks[-1] == trainer.mesh.tp.rank:
                view[piece.local_box.slices] *= 1.0 + 2.0**-23
        return trainer

    return patch("tests.kit.cases.build_trainer", build)


def kv_copies_not_summed() -> AbstractContextManager[Any]:
    """The ranks that share a key/value head each use their own part of its gradient."""
    original = DenseSharding.qkv

    def qkv(self: DenseSharding, *arguments: Any) -> ShardSpec:
        spec = original(self, *arguments)
        return replace(spec, pieces=tuple(replace(piece, partial=False) for piece in spec.pieces))

    return patch.object(DenseSharding, "qkv", qkv)


def queries_normalized_locally() -> AbstractContextManager[Any]:
    """The norm of all queries and keys divides by the RMS over a rank's own heads."""

    def local(sums: Tensor, group: Group) -> Tensor:
        return group.size * sums

    return patch.object(
        attention, "mappings", SimpleNamespace(reduce_from_region=local, copy_to_region=mappings.copy_to_region)
    )


def gradient_of_the_rms_kept_local() -> AbstractContextManager[Any]:
    """In backward, that RMS gets the gradient of a rank's own heads only."""
    kept = SimpleNamespace(reduce_from_region=mappings.reduce_from_region, copy_to_region=lambda sums, group: sums)
    return patch.object(attention, "mappings", kept)


def norms_of_kv_copies_not_summed() -> AbstractContextManager[Any]:
    """The ranks that share a key/value head each use their own part of the gradient of its norm."""
    original = DenseSharding.heads

    def heads(self: DenseSharding, *arguments: Any) -> tuple[ShardSpec, ShardSpec]:
        q, k = original(self, *arguments)
        return q, replace(k, pieces=tuple(replace(piece, partial=False) for piece in k.pieces))

    return patch.object(DenseSharding, "heads", heads)


def replicas_not_summed() -> AbstractContextManager[Any]:
    """Norms and biases of sequence-parallel ranks learn from their own rows only."""
    original = DenseSharding.replicate
    return patch.object(
        DenseSharding, "replicate", lambda self, shape, init, partial: original(self, shape, init, False)
    )


def partial_flipped(parameter: str) -> AbstractContextManager[Any]:
    """Flip the flag of one parameter that its copies hold partial gradients."""
    original = BuildContext.declare

    def declare(self: BuildContext, specs: dict[str, ShardSpec]) -> BuildContext:
        changed = dict(specs)
        for name, spec in specs.items():
            if self.name(name) == parameter:
                flipped = (replace(piece, partial=not piece.partial) for piece in spec.pieces)
                changed[name] = replace(spec, pieces=tuple(flipped))
        return original(self, changed)

    return patch.object(BuildContext, "declare", declare)


def infinite_gradient(weight: str = "layers.0.mlp.linear_fc1.weight") -> AbstractContextManager[Any]:
    """No fault of the library: numbers that overflow, as they do in fp16, in one weight's gradient on this rank."""
    original = GradAccumulator.accumulate_wgrad

    def add(self: GradAccumulator, name: str, x: Operand, dy: Operand, *rest: Any, **named: Any) -> Tensor | None:
        bad = name == weight
        return original(self, name, x, WgradOperand(dy.wait() * float("inf")) if bad else dy, *rest, **named)

    return patch.object(GradAccumulator, "accumulate_wgrad", add)


def skips_decided_alone() -> AbstractContextManager[Any]:
    """Every rank decides by its own gradients whether a step is skipped; the norm of finite ones is right."""
    original = distributed_optimizer.GradNorm.compute

    def compute(self: distributed_optimizer.GradNorm) -> Tensor:
        norm = original(self)
        if norm.isfinite():
            return norm
        with patch.object(comm, "all_reduce", lambda x, group, op="sum": x):
            return original(self)

    return patch.object(distributed_optimizer.GradNorm, "compute", compute)


# ---- of pipelines


def tied_weight_counted_twice_in_the_norm() -> AbstractContextManager[Any]:
    """The last stage answers for its copy of the embedding too."""
    original = distributed_optimizer.GradNorm.__init__

    def init(self: Any, specs: Any, *rest: Any) -> None:
        original(self, {name: replace(spec, counted_elsewhere=False) for name, spec in specs.items()}, *rest)

    return patch.object(distributed_optimizer.GradNorm, "__init__", init)


def tied_weight_not_summed() -> AbstractContextManager[Any]:
    """The first stage learns the embedding from its own use of it, the last one the output layer."""
    original = PartialGradReducer.__init__

    def init(self: Any, *arguments: Any) -> None:
        original(self, *arguments)
        self._tied = []

    return patch.object(PartialGradReducer, "__init__", init)


def seed_applied_twice() -> AbstractContextManager[Any]:
    """Every stage multiplies what it receives by the factor of the loss, which is in it already."""
    original = Stage.backward
    return patch.object(Stage, "backward", lambda self, mb, dy, seed: original(self, mb, dy * seed, seed))


def activation_of_another_microbatch() -> AbstractContextManager[Any]:
    """Use the input of micro-batch 0 for micro-batch 1 too."""
    original = Stage.forward
    first: dict[int, Tensor] = {}

    def forward(self: Stage, microbatch: int, x: Tensor | None, batch: MicroBatch) -> Tensor:
        if x is not None:
            x = first.setdefault(id(self), x.clone()) if microbatch <= 1 else x
        return original(self, microbatch, x, batch)

    return patch.object(Stage, "forward", forward)


def gradient_of_another_microbatch() -> AbstractContextManager[Any]:
    """Use the last received gradient for this micro-batch in one place."""
    original = Stage.backward
    last: dict[int, Tensor] = {}

    def backward(self: Stage, microbatch: int, dy: Tensor, seed: Tensor) -> Tensor | None:
        previous, last[id(self)] = last.get(id(self), dy), dy
        return original(self, microbatch, previous if microbatch == 1 else dy, seed)

    return patch.object(Stage, "backward", backward)


def labels_of_another_microbatch() -> AbstractContextManager[Any]:
    """Ranks without the first stage look at the micro-batch before: its labels, masks, positions, sample numbers."""
    original = Pipeline.run

    def run(self: Pipeline, actions: Any, batches: Sequence[MicroBatch], *rest: Any) -> None:
        original(self, actions, [batches[-1], *batches[:-1]] if 0 not in self._stages else batches, *rest)

    return patch.object(Pipeline, "run", run)


def loss_of_every_stage() -> AbstractContextManager[Any]:
    """Report the loss of one stage times the number of stages."""
    original = step.mean_loss

    def mean_loss(trainer: Trainer, sums: Mapping[str, Tensor], tokens: Tensor) -> Tensor:
        return original(trainer, sums, tokens) * len(set(trainer.mesh.placement))

    return patch.object(step, "mean_loss", mean_loss)
