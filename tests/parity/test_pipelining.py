"""PyTorch's pipelining: its schedules compute the same gradients on plain modules, and our runtime runs its orders."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.config.parallel import ParallelConfig
from megatron.config.training import TrainingConfig
from megatron.distributed.micro_batch import MicroBatch
from megatron.pipeline.actions import PipelineSchedule
from megatron.pipeline.communication import add_communication
from megatron.pipeline.plan import stage_layers
from megatron.pipeline.validate import validate_program
from megatron.training.build import build_trainer
from megatron.training.trainer import Trainer
from tests.kit.cases import MODEL, Case, batches_of
from tests.kit.pool import Pool
from tests.parity.plain import PlainStage

SCHEDULES = {
    "ScheduleGPipe": ("gpipe", 1),
    "Schedule1F1B": ("1f1b", 1),
    "ScheduleLoopedBFS": ("gpipe", 2),
    "ScheduleInterleaved1F1B": ("interleaved", 2),
    "ScheduleInterleavedZeroBubble": ("interleaved", 2),
    "ScheduleZBVZeroBubble": ("zb-v", 2),
    "ScheduleDualPipeV": ("dualpipe-v", 2),
}
"""PyTorch's, and ours on the same stages, as many on each rank."""

LAYERS, MICROBATCHES = 7, 8
UNTIED = replace(MODEL, num_layers=LAYERS, untie_embeddings_and_output_weights=True, vocab_size=104)
"""Stages of PyTorch's share no weights, and pad no vocabulary."""

MISDESCRIBED = "Schedule1F1B"
"""Its order is not what it runs: in torch 2.13 the last rank's first forward is micro-batch 1, not 0."""

Gradients = dict[str, Tensor]


def case_of(schedule: str, ranks: int) -> Case:
    """Micro-batches of one sample; some labels do not count."""
    ours, stages = SCHEDULES[schedule]
    parallel = ParallelConfig(
        pipeline_model_parallel_size=ranks, num_virtual_stages_per_pipeline_rank=stages, pipeline_schedule=ours
    )
    return Case(UNTIED, parallel, training=TrainingConfig(micro_batch_size=1), samples=MICROBATCHES)


# ---- PyTorch's side


def stock(name: str, trainer: Trainer, batches: Sequence[MicroBatch]) -> tuple[Any, list[PlainStage]]:
    """PyTorch's schedule over plain stages with the trainer's weights."""
    from torch.distributed import pipelining

    config = trainer.config
    mesh, layers = trainer.mesh, stage_layers(config.model, config.parallel, config.training.seq_length)
    here = [stage for stage, rank in enumerate(mesh.placement) if rank == mesh.coordinate["pp"]]
    modules = [PlainStage(UNTIED, layers[stage], UNTIED.vocab).double() for stage in here]
    for module in modules:
        module.load_state_dict({name: trainer.params[name].detach() for name in module.state_dict()})
    stages = [
        pipelining.PipelineStage(module, stage, len(layers), trainer.device) for stage, module in zip(here, modules)
    ]
    tokens = sum(float(batch.loss_mask.sum()) for batch in batches)

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / tokens

    schedule = getattr(pipelining.schedules, name)
    one = SCHEDULES[name][1] == 1
    return schedule(stages[0] if one else stages, len(batches), loss_fn=loss, scale_grads=False), modules


def step_of(schedule: Any, trainer: Trainer, batches: Sequence[MicroBatch]) -> None:
    """A step of PyTorch's, whose cross-entropy leaves out what does not count under a label of its own."""
    placement, rank = trainer.mesh.placement, trainer.mesh.coordinate["pp"]
    tokens = torch.cat([batch.tokens for batch in batches])
    labels = torch.cat([batch.labels.masked_fill(batch.loss_mask == 0, -100) for batch in batches])
    inputs = (tokens,) if placement[0] == rank else ()
    schedule.step(*inputs, **({"target": labels} if placement[-1] == rank else {}))


# ---- ours


def ours(trainer: Trainer, batches: Sequence[MicroBatch], program: PipelineSchedule | None) -> Gradients:
    """The gradients of a step of this rank's stages."""
    tokens = sum(float(batch.loss_mask.sum()) for batch in batches)
    trainer.buckets.start_step(len(batches))
    trainer.compute(batches, torch.tensor(1 / tokens, dtype=torch.float64), program)
    trainer.buckets.finish()
    return {name: gradient.clone() for name, gradient in trainer.buckets.grads.items()}


def order_of(schedule: Any, path: Path) -> PipelineSchedule:
    """Return PyTorch's form of a schedule, through a file as it writes it."""
    if hasattr(schedule, "_dump_csv"):
        schedule._dump_csv(str(path), format="compute_only")
    else:  # of one stage on a rank: it has an order, and does not write it
        orders = [schedule.pipeline_order[rank] for rank in sorted(schedule.pipeline_order)]
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([a for a in map(str, order) if "REDUCE_GRAD" not in a] for order in orders)
    return PipelineSchedule.load(path)


@dataclass(frozen=True)
class Found:
    """This rank's gradients: PyTorch's, ours, and ours in PyTorch's order, with that order where there is one."""

    theirs: Gradients
    ours: Gradients
    in_their_order: Gradients
    order: PipelineSchedule | None = None


def compared(rank: int, world_size: int, name: str, folder: Path) -> Found:
    """A step of each."""
    case = case_of(name, world_size)
    trainer = build_trainer(case.config(), rank, world_size)
    batches = batches_of(trainer, case, 0)
    schedule, modules = stock(name, trainer, batches)
    step_of(schedule, trainer, batches)
    theirs = {name: p.grad for module in modules for name, p in module.named_parameters() if p.grad is not None}
    in_our_order = ours(trainer, batches, None)
    if name == MISDESCRIBED:
        return Found(theirs, in_our_order, in_our_order)
    order = order_of(schedule, folder / f"{rank}.csv")
    program = add_communication(order)
    validate_program(program)
    return Found(theirs, in_our_order, ours(trainer, batches, program), order)


SHORT = {"Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleZBVZeroBubble"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in SHORT else pytest.mark.slow) for n in SCHEDULES])
def test_gradients_match_stock_pytorch(pool: Pool, tmp_path: Path, name: str) -> None:
    ranks = 2 if name in ("ScheduleGPipe", "ScheduleInterleaved1F1B") else 4
    results = pool.run(ranks, compared, name, tmp_path, backend="gloo")
    seen: list[str] = []
    for found in results:
        assert set(found.theirs) == set(found.ours) == set(found.in_their_order)
        seen += found.theirs
        for parameter, expected in found.theirs.items():
            torch.testing.assert_close(found.ours[parameter], expected, rtol=1e-10, atol=1e-14)
            torch.testing.assert_close(found.in_their_order[parameter], expected, rtol=1e-10, atol=1e-14)
        if found.order is not None and results[0].order is not None:
            assert found.order.ranks == results[0].order.ranks
            assert found.order.microbatches == MICROBATCHES
    assert len(seen) == len(set(seen)) == LAYERS * 12 + 5, "every parameter on one rank"
