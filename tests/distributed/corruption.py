"""Bits that flip in runs of many layouts, and what ``--replay-check`` finds.

``python -m tests.distributed.corruption`` is the long form. A callback of a run plants them: in outputs of modules, in
gradients of them, in local and in reduced gradients, in weights and moments between and after updates, and in weights
that other ranks own. With ``--on-corruption report`` a run goes on, so that one run has many faults and clean checks.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from megatron.config import plugins
from megatron.config.plugins import register
from megatron.config.run import RunConfig
from megatron.optimizer.grad_buffer import BucketLayout, ReduceHandle, Reduction
from megatron.training.callbacks.base import Callback
from megatron.training.incidents import read_incidents
from megatron.training.metrics import StepMetrics
from megatron.training.trainer import Trainer
from tests.kit.pool import Pool
from tests.kit.runs import start, tiny_run

PLACES = ("activation", "gradient", "local gradient", "reduction", "state", "update", "gather")
FOUND_AS = {"local gradient": "gradient"}
"""Places that the report calls otherwise."""

COMMON = (
    "--replay-check 1 --on-corruption report --on-nonfinite skip --micro-batch-size 1 --log-interval 1000 "
    "--hidden-dropout 0.1 --eval-iters 0"
)
SHARDING = "--data-parallel-sharding-strategy"
MOE = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 16 --moe-router-load-balancing-type seq_aux_loss"
LAYOUTS: Mapping[str, tuple[int, str]] = {
    "one rank": (1, "--params-dtype bf16"),
    "TP2 x DP2": (4, "--tensor-model-parallel-size 2"),
    "TP2 SP x DP2, ZeRO-1": (4, "--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer"),
    "DP4, ZeRO-1, bf16, overlap": (
        4,
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --params-dtype bf16",
    ),
    "DP4, ZeRO-2, bf16": (4, f"{SHARDING} optim_grads --params-dtype bf16"),
    "DP4, ZeRO-3": (4, f"{SHARDING} optim_grads_params"),
    "PP2 x DP2, 1F1B": (4, "--pipeline-model-parallel-size 2 --use-distributed-optimizer"),
    "PP2 x TP2, zero bubble": (
        4,
        "--pipeline-model-parallel-size 2 --pipeline-schedule zb-h1 --tensor-model-parallel-size 2",
    ),
    "CP2 x DP2": (4, "--context-parallel-size 2 --use-distributed-optimizer"),
    "EP2 x DP2": (4, f"{MOE} --expert-model-parallel-size 2 --use-distributed-optimizer"),
    "recomputation": (2, "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
    "TP2 x PP2 x DP2, ZeRO-1": (
        8,
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --use-distributed-optimizer "
        "--sequence-parallel --params-dtype bf16",
    ),
    "DP8": (8, "--global-batch-size 8"),
}


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
            self._calls = rng.randrange(2)
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

        outcome = start(config, rank=rank, world_size=world_size)
    if outcome.status not in (0, None):
        raise RuntimeError(f"the run ended with {outcome.status}: {outcome.err[-2000:]}")
    return planters[0].details


@dataclass
class Score:
    """What was planted, and what was found."""

    planted: Counter[str]
    found: Counter[str]
    clean: int = 0
    wrong: int = 0


def run_layout(pool: Pool, name: str, steps: int, count: int, seed: int, score: Score) -> None:
    """Run a layout for some steps with ``count`` faults, and compare what was found with what was planted."""
    world_size, flags = LAYOUTS[name]
    rng = random.Random(seed)
    places = [p for p in PLACES if p != "gather" or ("distributed-opt" in flags or "optim_grads " in flags)]
    at = sorted(rng.sample(range(3, steps + 1), count))
    faults = [
        Fault(step, rng.randrange(world_size), places[(i + seed) % len(places)], rng.getrandbits(40))
        for i, step in enumerate(at)
    ]
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        config = tiny_run(run_dir, f"{COMMON} {flags} --train-iters {steps}", world_size)
        details = pool.run(world_size, run_rank, config, faults)
        corruptions = (incident for _, incident in read_incidents(run_dir) if incident.kind == "corruption")
        incidents = {incident.step: incident for incident in corruptions}
    for fault in faults:
        what = details[fault.rank].pop(fault.step, None)
        if what is None and fault.place != "gather":
            what = details[fault.rank].pop(fault.step - 1, None)
        if what is None:  # no such module, or no second call: nothing was flipped
            score.clean += fault.step not in incidents
            score.wrong += fault.step in incidents
            continue
        score.planted[fault.place] += 1
        incident = incidents.pop(fault.step, None)
        if incident is None:
            print(f"{name}: not found: {fault}: {what}", flush=True)
            continue
        place, ranks = incident.facts["place"], incident.facts["ranks"]
        named = any(part in incident.sentence for part in what.split(", "))
        if place == FOUND_AS.get(fault.place, fault.place) and ranks == [fault.rank] and named:
            score.found[fault.place] += 1
        else:
            print(f"{name}: misjudged: {fault}: {what}: {incident.sentence}", flush=True)
    for step, incident in incidents.items():
        score.wrong += 1
        print(f"{name}: false alarm in step {step}: {incident.sentence}", flush=True)
    score.clean += steps - count - len(incidents)


def main() -> None:
    """Plant faults until ``--count`` are planted, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000, help="bits to flip")
    parser.add_argument("--clean", type=int, default=10_000, help="clean checks")
    parser.add_argument("--steps", type=int, default=100, help="of a run")
    parser.add_argument("--faults", type=int, default=30, help="of a run, at most")
    parser.add_argument("--minutes", type=float, default=1e9, help="after which no further run begins")
    parser.add_argument("--layout", help="one of the layouts only")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    score, began, seed = Score(Counter(), Counter()), time.monotonic(), options.seed
    names = [options.layout] if options.layout else [*LAYOUTS]
    with Pool() as pool:
        while score.planted.total() < options.count or score.clean < options.clean:
            if time.monotonic() - began > 60 * options.minutes:
                break
            count = min(options.faults, max(0, options.count - score.planted.total()))
            name = names[seed % len(names)]
            run_layout(pool, name, options.steps, count, seed, score)
            seed += 1
            print(f"{name}: {score}", f"{time.monotonic() - began:.0f} s", flush=True)
    for place in PLACES:
        print(f"{place:16} {score.found[place]:5} of {score.planted[place]} found, rank and place right")
    print(f"clean checks {score.clean}, false alarms {score.wrong}")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
