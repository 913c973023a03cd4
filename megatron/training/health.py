"""Finding where a number went wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron.parallel import comm
from megatron.parallel.microbatch import MicroBatch
from megatron.training.setup import Trainer


class NonFiniteError(RuntimeError):
    """A loss or gradient was NaN or infinite and the run was told to stop."""


def explain_nonfinite(trainer: Trainer, batches: Sequence[MicroBatch]) -> str:
    """Step, rank and first bad module of a step that was skipped; collective over all ranks.

    Runs the micro-batches forward again on the unchanged weights and watches every module's output; when all are
    finite, the first parameter that backward gave a bad gradient is named instead.
    """
    found = first_bad_module(trainer.chunk, batches) or first_bad_gradient(trainer)
    everywhere = comm.all_gather_objects(found, trainer.mesh.world)
    rank, where = next(((r, w) for r, w in enumerate(everywhere) if w), (0, "nothing: it did not happen again"))
    others = sum(1 for w in everywhere if w) - 1
    also = f" (and on {others} other ranks)" if others > 0 else ""
    return f"the loss or gradient of step {trainer.iteration + 1} is not finite; first on rank {rank}{also}: {where}"


@torch.no_grad()
def first_bad_module(chunk: nn.Module, batches: Sequence[MicroBatch]) -> str | None:
    """Name of the first module whose output is not finite, with the micro-batch and its samples."""
    names = {module: name or "the loss" for name, module in chunk.named_modules()}
    bad: list[str] = []

    def watch(module: nn.Module, inputs: Any, output: Any) -> None:
        tensors = output if isinstance(output, tuple) else (output,)
        if not bad and not all(t.isfinite().all() for t in tensors if isinstance(t, Tensor)):
            bad.append(names[module])

    handles = [module.register_forward_hook(watch) for module in names]
    try:
        for i, batch in enumerate(batches):
            chunk(None, batch)
            if bad:
                return f"output of {bad[0]}, micro-batch {i}, samples {batch.sample_ids.tolist()}"
    finally:
        for handle in handles:
            handle.remove()
    return None


def first_bad_gradient(trainer: Trainer) -> str | None:
    """Name of the first parameter, in the order of backward, whose gradient is not finite."""
    for name in reversed(list(trainer.chunk.specs)):
        if not trainer.buckets.grads[name].isfinite().all():
            return f"gradient of {name}"
    return None
