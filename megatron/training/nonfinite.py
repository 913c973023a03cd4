"""Locate the first NaN or infinity of a step: its rank, module and micro-batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from megatron.parallel import comm
from megatron.parallel.microbatch import MicroBatch
from megatron.pipeline.comms import add_communication
from megatron.pipeline.schedules import one_by_one
from megatron.training.setup import Trainer
from megatron.training.step import count_tokens

Outputs = list[tuple[int, str, bool]]
"""Stage, module name, and whether its whole output is finite."""


class NonFiniteError(RuntimeError):
    """A loss or gradient is NaN or infinite, and ``--on-nonfinite`` is ``stop``."""


@dataclass(frozen=True, order=True)
class Finding:
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
    by_rank = comm.all_gather_objects(first_nonfinite(trainer, batches), trainer.mesh.world)
    found = [(finding, rank) for rank, finding in enumerate(by_rank) if isinstance(finding, Finding)]
    step = f"the loss or gradient of step {trainer.iteration + 1} is not finite"
    if not found:
        return (
            f"{step}, but all values before the sum over ranks were finite when the step was run again: "
            "the sum overflows, or hardware is faulty"
        )
    first = min(finding for finding, _ in found)
    ranks = [rank for finding, rank in found if finding == first]
    return f"{step}; first on {enumerate_ranks(ranks)}: {first.text}"


def first_nonfinite(trainer: Trainer, batches: Sequence[MicroBatch]) -> Finding | None:
    """Return this rank's first finding. All micro-batches are run, because other ranks need their collectives."""
    first = None
    grad_seed = trainer.scaler.scale / count_tokens(batches, trainer.mesh.replicas).clamp(min=1.0)
    program = add_communication(one_by_one(trainer.mesh.placement))
    trainer.buckets.start_step(len(batches))
    with trainer.buckets.unreduced():
        for i, batch in enumerate(batches):
            with watching(trainer.chunks) as outputs:
                trainer.compute([batch], grad_seed, program)
            if first is None:
                first = first_bad_output(outputs, i, batch) or first_bad_gradient(trainer, i)
    for chunk in trainer.chunks.values():
        chunk.sums.take()
    return first


@contextmanager
def watching(chunks: Mapping[int, nn.Module]) -> Iterator[Outputs]:
    """Record which module outputs of the chunks are finite, in execution order."""
    outputs: Outputs = []

    def make_hook(stage: int, name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            tensors = output if isinstance(output, tuple) else (output,)
            finite = all(bool(t.isfinite().all()) for t in tensors if isinstance(t, Tensor))
            outputs.append((stage, name or f"stage {stage}", finite))

        return hook

    handles = [
        module.register_forward_hook(make_hook(stage, name))
        for stage, chunk in chunks.items()
        for name, module in chunk.named_modules()
    ]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def first_bad_output(outputs: Outputs, microbatch: int, batch: MicroBatch) -> Finding | None:
    """Return the first module whose output is not finite."""
    for position, (stage, name, finite) in enumerate(outputs):
        if not finite:
            text = f"output of {name}, micro-batch {microbatch}, samples {batch.sample_ids.tolist()}"
            return Finding(microbatch, False, stage, position, text)
    return None


def first_bad_gradient(trainer: Trainer, microbatch: int) -> Finding | None:
    """Return the first parameter in backward order whose gradient on this rank is not finite."""
    chunks = trainer.chunks
    stage_of = {param: stage for stage in sorted(chunks, reverse=True) for param in chunks[stage].parameters()}
    for position, name in enumerate(reversed(list(trainer.specs))):
        if not trainer.buckets.target(name).isfinite().all():
            stage = len(trainer.mesh.placement) - 1 - stage_of[trainer.params[name]]
            return Finding(microbatch, True, stage, position, f"gradient of {name}, micro-batch {microbatch}")
    return None


def enumerate_ranks(ranks: Sequence[int]) -> str:
    """Format as ``rank 1``, or as ``ranks 0, 1, 2 and 5 more``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f" and {len(ranks) - 3} more" if len(ranks) > 3 else ""
    return f"ranks {', '.join(map(str, ranks[:3]))}{more}"
