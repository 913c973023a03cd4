"""Outputs of every module in a step, and their gradients: sizes, the first out of line, the sample that does it.

:class:`ModuleTrace` observes a step with hooks, which change no bit of it. tools/replay_step.py prints the table.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from megatron.config.text import listed_ranks
from megatron.distributed import comm
from megatron.distributed.micro_batch import MicroBatch
from megatron.pipeline.communication import add_communication
from megatron.pipeline.schedules import sequential_schedule
from megatron.training.callbacks.health import square_sum
from megatron.training.step import collect_sums, count_tokens
from megatron.training.step_record import as_json
from megatron.training.trainer import Trainer

RATIO = 4.0
"""Growth of a module since the step before, or of a sample over the median, from which on it is out of line."""

PEER_RATIO = 16.0
"""Multiple of the median over the same module of the other layers from which on a module is out of line."""


@dataclass
class ModuleSize:
    """Size of a module's outputs in a step, or of their gradients, over all ranks and micro-batches."""

    name: str
    backward: bool  # gradients of the outputs
    stage: int
    position: int  # in the order of execution on its rank
    squares: float = 0.0
    elements: int = 0
    largest: float = 0.0  # absolute value; NaN if an element is
    bad: list[tuple[int, int]] = field(default_factory=list)  # micro-batch and rank of what is not finite, ascending

    @property
    def rms(self) -> float:
        """Root of the mean square."""
        return math.sqrt(self.squares / self.elements) if self.elements else 0.0

    @property
    def order(self) -> tuple[bool, int, int]:
        """Key that sorts by execution: forward from the first stage, backward from the last one."""
        return self.backward, -self.stage if self.backward else self.stage, self.position

    @property
    def peers(self) -> tuple[str, bool]:
        """Key of the same module in all layers."""
        return re.sub(r"^layers\.\d+", "layers", self.name), self.backward

    def add(self, squares: float, elements: int, largest: float, bad: Sequence[tuple[int, int]]) -> None:
        """Add a part of the outputs."""
        self.squares, self.elements = self.squares + squares, self.elements + elements
        self.largest = math.nan if math.isnan(self.largest + largest) else max(self.largest, largest)
        self.bad = sorted({*self.bad, *bad})


class Suspicion(NamedTuple):
    """A module that is out of line."""

    module: ModuleSize
    why: str


class ModuleTrace:
    """Measures the outputs of this rank's modules, and their gradients, while it observes."""

    def __init__(self, trainer: Trainer, stop_at: str | None = None, keep: str | None = None) -> None:
        """Measure nothing yet.

        Args:
            trainer: the run.
            stop_at: name of a module before whose forward the debugger is entered.
            keep: name of a module whose inputs, outputs and gradients are kept in ``kept``, on the CPU.
        """
        self._trainer, self._stop_at, self._keep = trainer, stop_at, keep
        self.sizes: dict[tuple[str, bool], ModuleSize] = {}
        self.kept: dict[str, Tensor] = {}
        self._seen: set[tuple[str, int]] = set()

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Observe the steps that are computed inside."""
        self._seen.clear()
        with ExitStack() as hooks:
            for stage, chunk in self._trainer.chunks.items():
                for name, module in chunk.named_modules():
                    known = name or f"stage {stage}"
                    if known == self._stop_at:
                        hooks.enter_context(module.register_forward_pre_hook(enter_debugger))
                    hooks.enter_context(module.register_forward_hook(partial(self._see_output, stage, known)))
            yield

    def _see_output(self, stage: int, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        at = self._trainer.pipeline.at
        microbatch, tensors = 0 if at is None else at.microbatch, floating(output)
        if (name, microbatch) not in self._seen:  # otherwise activations are computed again for backward
            self._seen.add((name, microbatch))
            for i, tensor in enumerate(tensors):
                self._measure(name, False, stage, microbatch, tensor)
                self._keep_tensor(name, f"output.{i}", microbatch, tensor)
            for i, tensor in enumerate(floating(inputs)):
                self._keep_tensor(name, f"input.{i}", microbatch, tensor)
            if name == self._keep:
                self.kept |= {f"parameter.{n}": p.detach().cpu().clone() for n, p in module.named_parameters()}
        for i, tensor in enumerate(tensors):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._see_gradient, stage, name, microbatch, i))

    def _see_gradient(self, stage: int, name: str, microbatch: int, index: int, gradient: Tensor) -> None:
        self._measure(name, True, stage, microbatch, gradient)
        self._keep_tensor(name, f"gradient.{index}", microbatch, gradient)

    def _keep_tensor(self, name: str, what: str, microbatch: int, tensor: Tensor) -> None:
        if name == self._keep:
            self.kept[f"micro_batch.{microbatch}.{what}"] = tensor.detach().cpu().clone().contiguous()

    @torch.no_grad()
    def _measure(self, name: str, backward: bool, stage: int, microbatch: int, tensor: Tensor) -> None:
        number = sum(known is backward for _, known in self.sizes)
        size = self.sizes.setdefault((name, backward), ModuleSize(name, backward, stage, number))
        if tensor.numel():
            largest = float(tensor.abs().max())
            bad = [] if math.isfinite(largest) else [(microbatch, self._trainer.mesh.world.rank)]
            size.add(float(square_sum(tensor)), tensor.numel(), largest, bad)

    def gather(self) -> list[ModuleSize]:
        """Return the sizes over all ranks in the order of execution, on rank 0, and [] on the others. Collective."""
        mine: list[list[Any]] = []
        for x in self.sizes.values():
            numbers = as_json(x.squares), x.elements, as_json(x.largest)
            mine.append([x.name, x.backward, x.stage, x.position, *numbers, [*map(list, x.bad)]])
        found: dict[tuple[str, bool], ModuleSize] = {}
        for rows in comm.gather_objects(mine, self._trainer.mesh.world):
            for name, backward, stage, position, squares, elements, largest, bad in rows:
                size = found.setdefault((name, backward), ModuleSize(name, backward, stage, position))
                size.add(float(squares), elements, float(largest), [(int(i), int(rank)) for i, rank in bad])
        return sorted(found.values(), key=lambda size: size.order)


def enter_debugger(module: nn.Module, inputs: Any) -> None:
    """Enter the debugger before the forward of a module: ``inputs`` are its arguments."""
    breakpoint()


def floating(values: Any) -> list[Tensor]:
    """Return the floating-point tensors in nested values."""
    return [x for x in tree_leaves(values) if isinstance(x, Tensor) and x.is_floating_point()]


def first_out_of_line(sizes: Sequence[ModuleSize], before: Sequence[ModuleSize] = ()) -> Suspicion | None:
    """Return the first module, in the order of execution, whose outputs or gradients are out of line.

    Values that are not finite come first, then growth against the step ``before``, then against the median of the same
    module in the other layers.

    Args:
        sizes: of a step, in the order of execution.
        before: of a step to compare with: the one before, or the same one in another precision.
    """
    for size in sizes:
        if size.bad:
            microbatch = size.bad[0][0]
            ranks = [rank for i, rank in size.bad if i == microbatch]
            return Suspicion(size, f"not finite, first in micro-batch {microbatch} of {listed_ranks(ranks)}")
    earlier = {(size.name, size.backward): size for size in before}
    for size in sizes:
        known = earlier.get((size.name, size.backward))
        growth = 0.0 if known is None else max(grown(size.rms, known.rms), grown(size.largest, known.largest))
        if growth > RATIO:
            return Suspicion(size, f"{growth:.3g} times what it is compared with")
    peers: dict[tuple[str, bool], list[ModuleSize]] = {}
    for size in sizes:
        peers.setdefault(size.peers, []).append(size)
    for size in sizes:
        others = [x.rms for x in peers[size.peers] if x is not size]
        if others and (growth := grown(size.rms, median(others))) > PEER_RATIO:
            return Suspicion(size, f"{growth:.3g} times the median of the other layers")
    return None


def grown(now: float, before: float) -> float:
    """Return the ratio of two sizes; 1 for two zeros."""
    return now / before if before else (math.inf if now else 1.0)


class SampleSize(NamedTuple):
    """What one sample does when it is alone in its micro-batch."""

    sample: int
    rank: int
    micro_batch: int
    loss: float  # mean over its unmasked tokens
    output: float  # largest value of the outputs of the module
    gradient: float  # RMS of their gradient

    @property
    def finite(self) -> bool:
        """False if one of the numbers is not finite."""
        return all(math.isfinite(x) for x in self[3:])


def scan_samples(trainer: Trainer, batches: Sequence[MicroBatch], module: str) -> list[SampleSize]:
    """Compute every sample of the step alone, and return what it does; on rank 0, and [] on the others. Collective.

    A micro-batch keeps its shape: the sample is repeated, and only its first copy counts. Weights do not change, and
    gradients are overwritten.

    Args:
        trainer: the run, before the step.
        batches: this rank's micro-batches.
        module: name of the module to measure.
    """
    seed = trainer.scaler.scale / count_tokens(trainer, batches).clamp(min=1.0)
    schedule = add_communication(sequential_schedule(trainer.mesh.placement))
    mine: list[list[Any]] = []
    trainer.buckets.start_step(len(batches) * len(batches[0].tokens))
    with trainer.buckets.without_reduction():
        for i, batch in enumerate(batches):
            for j, sample in enumerate(batch.sample_ids.tolist()):
                trace, alone = ModuleTrace(trainer), only_sample(batch, j)
                with trace.observing():
                    trainer.compute([alone], seed, schedule)
                loss = collect_sums(trainer).get("lm loss", torch.zeros((), dtype=torch.float64))
                loss = comm.all_reduce(comm.all_reduce(loss, trainer.mesh.group("cp")), trainer.mesh.pipeline)
                weight = comm.all_reduce(trainer.objective.weight(alone).double(), trainer.mesh.group("cp"))
                output, gradient = (trace.sizes.get((module, backward)) for backward in (False, True))
                numbers = (
                    float(loss / weight.clamp(min=1.0)),
                    0.0 if output is None else output.largest,
                    0.0 if gradient is None else gradient.rms,
                )
                dp_rank = trainer.mesh.layout.group_of(trainer.mesh.rank, ("pp", "cp", "tp"))[0]
                mine.append([sample, dp_rank, i, *map(as_json, numbers)])
    found: dict[int, SampleSize] = {}
    for rows in comm.gather_objects(mine, trainer.mesh.world):
        for sample, rank, i, *texts in rows:
            new = SampleSize(sample, rank, i, *map(float, texts))
            old = found.get(sample, new)
            pairs = zip(old[3:], new[3:])  # only the ranks that hold the module, or the loss, have more than 0
            largest = [math.nan if math.isnan(a + b) else max(a, b) for a, b in pairs]
            found[sample] = SampleSize(sample, rank, i, *largest)
    return [found[sample] for sample in sorted(found)]


def only_sample(batch: MicroBatch, index: int) -> MicroBatch:
    """Return a micro-batch of the same shape in which all samples are number ``index``, and only the first counts."""
    rows = torch.full((len(batch.tokens),), index, device=batch.tokens.device)
    mask = batch.loss_mask[rows].clone()
    mask[1:] = 0.0

    def same(x: Tensor | None) -> Tensor | None:
        return None if x is None else x[rows.to(x.device)]

    return replace(
        batch,
        tokens=batch.tokens[rows],
        labels=batch.labels[rows],
        loss_mask=mask,
        sample_ids=batch.sample_ids[rows],
        positions=same(batch.positions),
        documents=same(batch.documents),
        host_documents=same(batch.host_documents),
        boundaries=None,
        extra={name: x[rows] for name, x in batch.extra.items()},
    )


def suspicious_samples(samples: Sequence[SampleSize]) -> list[SampleSize]:
    """Return the samples whose output of the module, or else loss or gradient, is not finite, or else out of line.

    A number is out of line if it is :data:`RATIO` times the median over the samples of the step. The worst comes first.
    """
    for bad in (
        [sample for sample in samples if not math.isfinite(sample.output)],  # before a weight that spoils all of them
        [sample for sample in samples if not sample.finite],
    ):
        if bad:
            return bad
    middle = [median(numbers) for numbers in zip(*(sample[3:] for sample in samples))]

    def worst(sample: SampleSize) -> float:
        return max(grown(abs(x), abs(m)) for x, m in zip(sample[3:], middle))

    return sorted((sample for sample in samples if worst(sample) > RATIO), key=worst, reverse=True)
