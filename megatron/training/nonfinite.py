"""Finding where a number went wrong."""

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
"""Stage, module, and whether all of its output is finite."""


class NonFiniteError(RuntimeError):
    """A loss or gradient was NaN or infinite and the run was told to stop."""


@dataclass(frozen=True, order=True)
class Finding:
    """Something on one rank that is not finite; the earlier in the step, the smaller.

    Attributes:
        microbatch: index in the rank's share of the step.
        backward: whether it is a gradient.
        stage: of the pipeline, in the order in which they have their turn; backward begins with the last.
        position: of the module in the order in which outputs are finished, or of the parameter in that of backward.
        text: for people.
    """

    microbatch: int
    backward: bool
    stage: int
    position: int
    text: str = field(compare=False)


def explain_nonfinite(trainer: Trainer, batches: Sequence[MicroBatch]) -> str:
    """Step, rank and first bad module or gradient of a step that was skipped; collective over all ranks.

    Runs the step again, one micro-batch after the other so that what is first in the pipeline is first in time, up to
    the reduction over data-parallel ranks, after which a bad gradient would be everywhere. The weights stay as they
    are; the gradients do not.
    """
    everywhere = comm.all_gather_objects(first_nonfinite(trainer, batches), trainer.mesh.world)
    found = [(finding, rank) for rank, finding in enumerate(everywhere) if isinstance(finding, Finding)]
    step = f"the loss or gradient of step {trainer.iteration + 1} is not finite"
    if not found:
        return f"{step}, yet on every rank by itself it was when run again: their sum overflows, or hardware fails"
    first = min(finding for finding, _ in found)
    ranks = [rank for finding, rank in found if finding == first]
    return f"{step}; first on {enumerate_ranks(ranks)}: {first.text}"


def first_nonfinite(trainer: Trainer, batches: Sequence[MicroBatch]) -> Finding | None:
    """This rank's first finding. It goes on after it, because its peers wait for it in the collectives that follow."""
    t, first = trainer, None
    seed = t.scaler.scale / count_tokens(batches, t.mesh.replicas).clamp(min=1.0)
    program = add_communication(one_by_one(t.mesh.placement))
    t.buckets.start_step(len(batches))
    with t.buckets.unreduced():
        for i, batch in enumerate(batches):
            with watching(t.chunks) as outputs:
                t.compute([batch], seed, program)
            if first is None:
                first = first_bad_output(outputs, i, batch) or first_bad_gradient(t, i)
    for chunk in t.chunks.values():
        chunk.sums.take()
    return first


@contextmanager
def watching(chunks: Mapping[int, nn.Module]) -> Iterator[Outputs]:
    """While the body runs, collects the outputs of all modules of some stages, in the order in which they finish."""
    outputs: Outputs = []

    def hook(stage: int, name: str) -> Any:
        def note(module: nn.Module, inputs: Any, output: Any) -> None:
            tensors = output if isinstance(output, tuple) else (output,)
            finite = all(bool(t.isfinite().all()) for t in tensors if isinstance(t, Tensor))
            outputs.append((stage, name or f"stage {stage}", finite))

        return note

    handles = [
        module.register_forward_hook(hook(stage, name))
        for stage, chunk in chunks.items()
        for name, module in chunk.named_modules()
    ]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def first_bad_output(outputs: Outputs, microbatch: int, batch: MicroBatch) -> Finding | None:
    """The first module whose output is not finite."""
    for position, (stage, name, finite) in enumerate(outputs):
        if not finite:
            text = f"output of {name}, micro-batch {microbatch}, samples {batch.sample_ids.tolist()}"
            return Finding(microbatch, False, stage, position, text)
    return None


def first_bad_gradient(trainer: Trainer, microbatch: int) -> Finding | None:
    """The first parameter, in the order of backward, whose gradient on this rank is not finite."""
    t = trainer
    stage_of = {p: stage for stage in sorted(t.chunks, reverse=True) for p in t.chunks[stage].parameters()}
    for position, name in enumerate(reversed(list(t.specs))):
        if not t.buckets.target(name).isfinite().all():
            turn = len(t.mesh.placement) - 1 - stage_of[t.params[name]]
            return Finding(microbatch, True, turn, position, f"gradient of {name}, micro-batch {microbatch}")
    return None


def enumerate_ranks(ranks: Sequence[int]) -> str:
    """``rank 1``; ``ranks 0, 1, 2 and 5 more``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f" and {len(ranks) - 3} more" if len(ranks) > 3 else ""
    return f"ranks {', '.join(map(str, ranks[:3]))}{more}"
