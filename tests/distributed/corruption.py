"""Bits that flip in runs of many layouts, and what ``--replay-check`` finds.

``python -m tests.distributed.corruption`` is the long form. A callback of a run plants them: in outputs of modules, in
gradients of them, in local and in reduced gradients, in weights and moments between and after updates, and in weights
that other ranks own. With ``--on-corruption report`` a run goes on, so that one run has many faults and clean checks.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import re
import shlex
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from megatron.config import plugins
from megatron.config.batch import get_num_microbatches
from megatron.config.plugins import register
from megatron.config.run import RunConfig
from megatron.optimizer.grad_buffer import BucketLayout, ReduceHandle, Reduction
from megatron.training.callbacks.base import Callback
from megatron.training.components import nonfinite
from megatron.training.incidents import read_incidents
from megatron.training.metrics import StepMetrics
from megatron.training.trainer import Trainer
from tests.kit.pool import Pool, RankError
from tests.kit.runs import start, tiny_run

PLACES = ("activation", "gradient", "local gradient", "reduction", "state", "update", "gather")
FOUND_AS = {"local gradient": "gradient"}
"""Places that the report calls otherwise."""

GOLDEN = Path(__file__).parents[1] / "golden" / "corruption.txt"

RUN_SECONDS = 3600.0

COMMON = (
    "--replay-check 1 --on-corruption report --on-nonfinite skip --micro-batch-size 1 --log-interval 1000 "
    "--hidden-dropout 0.1 --eval-iters 0"
)
TP, PP, EP = (f"--{each}-model-parallel-size" for each in ("tensor", "pipeline", "expert"))
CP = "--context-parallel-size"
ZERO1 = "--use-distributed-optimizer"
ZERO2, ZERO3 = (f"--data-parallel-sharding-strategy {each}" for each in ("optim_grads", "optim_grads_params"))
MOE = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 16 --moe-router-load-balancing-type seq_aux_loss"
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
OVERLAP = "--overlap-grad-reduce --overlap-param-gather"
LAYOUTS: Mapping[str, tuple[int, str]] = {
    "DP2, ZeRO-1": (2, f"{ZERO1} --num-layers 2"),
    "TP2 SP x DP4, ZeRO-1": (8, f"{TP} 2 --sequence-parallel {ZERO1}"),
    "DP8": (8, "--num-layers 2"),
    "PP2 x DP4, 1F1B, ZeRO-1": (8, f"{PP} 2 {ZERO1} --global-batch-size 8"),
    "CP2 x DP4, ZeRO-1, bf16": (8, f"{CP} 2 {ZERO1} --params-dtype bf16"),
    "DP8, ZeRO-2, bf16": (8, f"{ZERO2} --params-dtype bf16"),
    "EP2 x DP8, ZeRO-1": (8, f"{MOE} {EP} 2 {ZERO1}"),
    "DP8, ZeRO-3": (8, ZERO3),
    "TP2 SP x PP2 x DP2, ZeRO-1, bf16": (8, f"{TP} 2 {PP} 2 --sequence-parallel {ZERO1} --params-dtype bf16"),
    "TP2 x CP2 x DP2": (8, f"{TP} 2 {CP} 2"),
    "DP8, ZeRO-1, bf16, overlap, 2 micro-batches": (
        8,
        f"{ZERO1} {OVERLAP} --params-dtype bf16 --global-batch-size 16",
    ),
    "TP2 x PP2 x DP2, zero bubble": (8, f"{TP} 2 {PP} 2 --pipeline-schedule zb-h1 --global-batch-size 4"),
    "TP2 x DP4, ZeRO-3, recomputation": (8, f"{TP} 2 {ZERO3} {RECOMPUTE}"),
    "TP2 SP x EP2 x DP4, ZeRO-2": (8, f"{MOE} {TP} 2 {EP} 2 --sequence-parallel {ZERO2}"),
}
"""Ranks and flags; each replica gets one micro-batch of a model of one layer by default."""


@dataclass(frozen=True)
class Fault:
    """A bit that flips in a step on a rank."""

    step: int
    rank: int
    place: str
    seed: int


class FaultyReduction(Reduction):
    """Flips a bit in the gradients that it gets, or in their sum."""

    def __init__(self, reduction: Reduction, before: Callable[[Tensor], None], after: Callable[[Tensor], None]) -> None:
        super().__init__(reduction.shards, reduction.copies)
        self._reduction, self._before, self._after = reduction, before, after
        self.copies_gradients = reduction.copies_gradients

    def start_reduce_scatter(self, x: Tensor) -> ReduceHandle:
        self._before(x)
        return self._and_then(self._reduction.start_reduce_scatter(x), self.copies.size == 1)

    def start_all_reduce(self, part: Tensor) -> ReduceHandle:
        if self.shards.size == 1:
            self._before(part)
        return self._and_then(self._reduction.start_all_reduce(part), True)

    def _and_then(self, handle: ReduceHandle, last: bool) -> ReduceHandle:
        def finish(x: Tensor) -> Tensor:
            total = handle.finish(x)
            if last:
                self._after(total)
            return total

        return ReduceHandle(handle.pending, finish)


class Planter(Callback):
    """Plants faults on this rank."""

    interval = 1
    pauses = False

    def __init__(self, faults: Mapping[int, Fault], trainer: Trainer) -> None:
        super().__init__(trainer)
        self.faults, self.due = faults, None
        self.details: dict[int, str] = {}
        self._undo: Callable[[], None] | None = None
        self._micro_batches = get_num_microbatches(trainer.config.training, trainer.mesh.dp_size)
        for bucket in trainer.buckets.buckets:
            hooks = (partial(self._in_bucket, place, bucket.layout) for place in ("local gradient", "reduction"))
            bucket.reduction = FaultyReduction(bucket.reduction, *hooks)

    def _take(self, place: str) -> random.Random | None:
        """Return a source of random numbers if the fault of this step is of a place, once."""
        fault = self.due
        if fault is None or fault.place != place:
            return None
        self.due = None
        return random.Random(fault.seed)

    def _flip(self, x: Tensor, rng: random.Random, what: str) -> Callable[[], None]:
        words = x.data.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])
        index = [rng.randrange(size) for size in x.shape]
        bit = rng.randrange(8 * x.element_size())
        mask = torch.tensor(1, dtype=words.dtype) << bit

        def flip() -> None:
            words[tuple(index)] ^= mask

        flip()
        self.details[self.trainer.iteration + 1] = what
        return flip

    def on_step_start(self) -> None:
        step = self.trainer.iteration + 1
        self.due = fault = self.faults.get(step)
        if fault is None:
            return
        rng = random.Random(fault.seed + 1)
        if fault.place in ("activation", "gradient"):
            chunk = rng.choice([*self.trainer.chunks.values()])
            leaves = [(n, m) for n, m in chunk.named_modules() if n and next(m.children(), None) is None]
            name, module = rng.choice(leaves)
            self._calls = rng.randrange(self._micro_batches)
            self._hook = module.register_forward_hook(partial(self._in_output, fault.place, name))
        elif fault.place == "state":
            self._undo = self._flip_state(random.Random(fault.seed))
            self.due = None

    def _in_output(self, place: str, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        tensors = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.numel() and x.is_floating_point()]
        if place == "gradient":
            tensors = [x for x in tensors if x.requires_grad and x.grad_fn is not None]
        if not tensors or self._calls:
            self._calls -= bool(tensors)
            return
        if (rng := self._take(place)) is None:
            return
        if place == "activation":
            self._flip(rng.choice(tensors), rng, name)
        else:
            rng.choice(tensors).register_hook(partial(self._in_gradient, rng, name))

    def _in_gradient(self, rng: random.Random, name: str, gradient: Tensor) -> Tensor:
        flipped = gradient.clone()
        self._flip(flipped, rng, name)
        return flipped

    def _in_bucket(self, place: str, layout: BucketLayout, x: Tensor) -> None:
        shards = {name: layout.shard(name) for name in layout.specs}
        held = {name: shard for name, shard in shards.items() if shard is not None}
        if not held or (rng := self._take(place)) is None:
            return
        if place == "local gradient":
            name = rng.choice([*layout.specs])
            self._flip(layout.view(x, name), rng, name)
        else:
            name = rng.choice([*held])
            self._flip(layout.shard_view(x, name, held[name]), rng, name)

    def _flip_state(self, rng: random.Random, names: Sequence[str] = ()) -> Callable[[], None]:
        optimizer = self.trainer.optimizer
        kinds = optimizer.state()
        wide = {name: optimizer.main_params[name] for name in optimizer.main_params}
        if any(wide[name].data_ptr() != weight.data_ptr() for name, weight in optimizer.weights.shards.items()):
            kinds["main parameter"] = wide
        # a flipped weight is to leave nothing behind: neither gathered weights, nor other gradients of a copied norm
        if self.trainer.mesh.tp.size == 1 and all(buffer.group.size == 1 for buffer in optimizer.weights.buffers):
            kinds["weight"] = dict(optimizer.weights.shards)
        kind = rng.choice([kind for kind, tensors in kinds.items() if tensors])
        name = rng.choice([*(names or kinds[kind])])
        return self._flip(kinds[kind][name], rng, name)

    def before_update(self, loss: Tensor | None, grad_norm: Tensor) -> None:
        if self._undo is not None:
            self._undo()
            self._undo = None

    def after_update(self, names: Sequence[str], skipped: Tensor) -> None:
        if names and (rng := self._take("update")) is not None:
            self._undo = self._flip_state(rng, names)

    def on_step_end(self, metrics: StepMetrics) -> None:
        """Undo what was flipped in an update, once it has been found."""
        self.before_update(None, metrics.loss)
        if getattr(self, "_hook", None) is not None:
            self._hook.remove()
            self._hook = None

    def on_iteration_end(self) -> None:
        """Flip a bit that another rank owns, before the step of the fault."""
        fault = self.faults.get(self.trainer.iteration + 1)
        if fault is None or fault.place != "gather":
            return
        rng = random.Random(fault.seed)
        self.trainer.optimizer.weights.wait()
        buffers = [buffer for buffer in self.trainer.optimizer.weights.buffers if buffer.group.size > 1]
        buffer = rng.choice(buffers)
        other = rng.choice([r for r in range(buffer.group.size) if r != buffer.group.rank])
        part = buffer.whole.view(buffer.group.size, -1)[other]
        self._flip(part, rng, f"rank {buffer.group.ranks[other]}")


def run_rank(rank: int, world_size: int, config: RunConfig, faults: Sequence[Fault]) -> dict[int, str]:
    """Take the steps of a run with faults; return what was flipped on this rank, by step."""
    planters: list[Planter] = []
    with patch.dict(plugins._registered, {"callback": {}}):

        @register("callback", "planter")
        def plant(trainer: Trainer) -> Planter:
            planters.append(Planter({f.step: f for f in faults if f.rank == rank}, trainer))
            return planters[0]

        goes_on = patch.object(nonfinite, "find_nonfinite_weight", lambda trainer: "")  # flips are undone
        outcome = start(config, goes_on, rank=rank, world_size=world_size)
    if outcome.status not in (0, None):
        raise RuntimeError(f"the run ended with {outcome.status}: {outcome.err[-2000:]}")
    return planters[0].details


class Score:
    """What was planted, and what was found, by layout and place."""

    def __init__(self) -> None:
        self.planted, self.found = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
        # Checks of one rank in one step, in steps without a fault; and alarms in such steps.
        self.clean = Counter[str]()
        self.alarms = 0
        self.notes: list[str] = []

    def add(self, other: Score) -> None:
        """Add what other runs have found."""
        self.planted += other.planted
        self.found += other.found
        self.clean += other.clean
        self.alarms += other.alarms
        self.notes += other.notes

    def note(self, text: str) -> None:
        """Keep what went wrong."""
        self.notes.append(text)
        print(text, flush=True)

    def of(self, layout: str, places: Sequence[str] = PLACES) -> str:
        """Return "found of planted" of a layout."""
        keys = [(layout, place) for place in places]
        return f"{sum(self.found[key] for key in keys)} of {sum(self.planted[key] for key in keys)}"

    def table(self) -> str:
        """Return the results in lines."""
        names = dict.fromkeys(layout for layout, _ in self.planted)
        lines = [f"{'layout (8 ranks)':44} {'found':10} {'clean checks':12}  {'  '.join(PLACES)}"]
        for name in names:
            places = "  ".join(f"{self.of(name, [place]):>{len(place)}}" for place in PLACES)
            lines.append(f"{name:44} {self.of(name):10} {self.clean[name]:12}  {places}")
        lines.append("")
        for place in PLACES:
            keys = [(name, place) for name in names]
            found, planted = sum(self.found[key] for key in keys), sum(self.planted[key] for key in keys)
            lines.append(f"{place:16} {found:5} of {planted} found at the next check, rank and place right")
        lines.append(f"{'all':16} {self.found.total():5} of {self.planted.total()}")
        lines.append(f"clean checks {self.clean.total()}, false alarms {self.alarms}")
        return "\n".join([*lines, *self.notes])


def run_layout(pool: Pool, name: str, steps: int, count: int, seed: int) -> Score:
    """Run a layout for some steps with ``count`` faults, and compare what was found with what was planted."""
    score = Score()
    world_size, flags = LAYOUTS[name]
    if "--num-layers" not in flags and PP not in flags:
        flags += " --num-layers 1"
    if "--global-batch-size" not in flags:
        sizes = [int(size) for size in re.findall(r"--(?:tensor|pipeline|context)\S+-size (\d)", flags)]
        flags += f" --global-batch-size {world_size // math.prod(sizes)}"
    rng = random.Random(seed)
    places = [p for p in PLACES if p != "gather" or ZERO1 in flags or f"{ZERO2} " in f"{flags} "]
    at = sorted(rng.sample(range(3, steps + 1), count))
    faults = [
        Fault(step, rng.randrange(world_size), places[(i + seed) % len(places)], rng.getrandbits(40))
        for i, step in enumerate(at)
    ]
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        config = tiny_run(run_dir, f"{COMMON} {flags} --train-iters {steps}", world_size)
        details = pool.run(world_size, run_rank, config, faults, timeout=RUN_SECONDS)
        corruptions = (incident for _, incident in read_incidents(run_dir) if incident.kind == "corruption")
        incidents = {incident.step: incident for incident in corruptions}
    clean = steps - count
    for fault in faults:
        what = details[fault.rank].pop(fault.step, None)
        if what is None and fault.place != "gather":
            what = details[fault.rank].pop(fault.step - 1, None)
        if what is None:  # a module without a tensor: nothing was flipped
            clean += 1
            continue
        score.planted[name, fault.place] += 1
        incident = incidents.pop(fault.step, None)
        if incident is None:
            score.note(f"{name}, seed {seed}: not found: {fault}: {what}")
            continue
        place, accused = incident.facts["place"], incident.facts["ranks"]
        named = any(part in incident.sentence for part in what.split(", "))
        if place == FOUND_AS.get(fault.place, fault.place) and accused == [fault.rank] and named:
            score.found[name, fault.place] += 1
        else:
            score.note(f"{name}, seed {seed}: misjudged: {fault}: {what}: {incident.sentence}")
    for step, incident in incidents.items():
        score.alarms += 1
        score.note(f"{name}, seed {seed}: false alarm in step {step}: {incident.sentence}")
    score.clean[name] += (clean - len(incidents)) * world_size
    return score


class Campaign:
    """Runs of all layouts in turn, until there are enough flips and clean checks."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.score = options, Score()
        self._names = (
            [options.layout] if options.layout else [name for name, (ranks, _) in LAYOUTS.items() if ranks == 8]
        )
        self._lock, self._seed, self._began = threading.Lock(), options.seed, time.monotonic()
        # Of the runs that have ended, and of those in progress.
        self._flips = self._clean = 0

    def take_runs(self) -> None:
        """Take runs until there are enough; in several threads."""
        with Pool() as pool:
            while (plan := self._plan()) is not None:
                name, count, clean, seed = plan
                try:
                    found = run_layout(pool, name, self.options.steps, count, seed)
                except RankError as error:
                    found = Score()
                    found.note(f"{name}, seed {seed}: failed: {error}")
                with self._lock:
                    self._flips += found.planted.total() - count
                    self._clean += found.clean.total() - clean
                    self.score.add(found)
                    self._report(name)

    def _plan(self) -> tuple[str, int, int, int] | None:
        options = self.options
        with self._lock:
            is_late = time.monotonic() - self._began > 60 * options.minutes
            if is_late or (self._flips >= options.count and self._clean >= options.clean):
                return None
            seed, name = self._seed, self._names[self._seed % len(self._names)]
            count = min(options.faults, max(0, options.count - self._flips))
            clean = (options.steps - count) * LAYOUTS[name][0]
            self._seed, self._flips, self._clean = seed + 1, self._flips + count, self._clean + clean
            return name, count, clean, seed

    def _report(self, name: str) -> None:
        """Print and write the results so far."""
        score, options, seconds = self.score, self.options, time.monotonic() - self._began
        flips, clean = score.planted.total(), score.clean.total()
        totals = f"{score.found.total()} of {flips}, {clean} clean, {score.alarms} false alarms"
        print(f"{name}: {totals}, {seconds:.0f} s", flush=True)
        if options.write:
            asked = f"{options.count} flips and {options.clean} clean checks"
            command = shlex.join(sys.argv[1:])
            state = "complete" if flips >= options.count and clean >= options.clean else f"so far; asked for {asked}"
            GOLDEN.write_text(
                f"""Flipped bits, and what --replay-check 1 has found, in runs of 8 ranks on CPUs (docs/corruption.md).
A clean check is that of one rank in one step, if no bit was flipped on any rank in this step.
{datetime.now():%Y-%m-%d}, {seconds:.0f} s, {state}: python -m tests.distributed.corruption {command}

{score.table()}
"""
            )


def main() -> None:
    """Plant faults until ``--count`` are planted, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000, help="bits to flip")
    parser.add_argument("--clean", type=int, default=10_000, help="clean checks: of one rank in one step")
    parser.add_argument("--steps", type=int, default=60, help="of a run")
    parser.add_argument("--faults", type=int, default=45, help="of a run, at most")
    parser.add_argument("--pools", type=int, default=1, help="runs at a time, each on processes of its own")
    parser.add_argument("--minutes", type=float, default=1e9, help="after which no further run begins")
    parser.add_argument("--layout", help="one of the layouts only")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true", help=f"write results after each run to {GOLDEN.name}")
    options = parser.parse_args()
    campaign = Campaign(options)
    threads = [threading.Thread(target=campaign.take_runs) for _ in range(options.pools)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(campaign.score.table())


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
