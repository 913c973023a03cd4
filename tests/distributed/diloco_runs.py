"""Driving replicas: as threads of one process, which is quick, or each in a pool of processes of its own."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor

from megatron.config.run import RunConfig
from megatron.training.build import build_trainer
from megatron.training.diloco.component import Diloco, Round
from megatron.training.replicas.members import Replicas
from megatron.training.step import train_step
from megatron.training.trainer import Trainer
from tests.kit.runs import Outcome, part_of, start, tiny_run

FP64 = "--params-dtype fp64 --clip-grad 0"


@dataclass
class QuietLog:
    """Collects the notes and metrics of a replica."""

    notes: list[str] = field(default_factory=list)
    metrics: list[dict[str, Any]] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Keep a note."""
        self.notes.append(text)

    def log(self, metrics: dict[str, Any]) -> None:
        """Keep metrics."""
        self.metrics.append(metrics)


def replica_config(flags: str = "", replicas: int = 2, world_size: int = 1, timeout: float = 20) -> RunConfig:
    """A replica that gives up on others after ``timeout`` seconds."""
    own = f"--diloco-server 127.0.0.1:1 --diloco-replicas {replicas} --diloco-timeout {timeout}"
    return tiny_run(Path("unused"), f"{own} {flags}", world_size)


def weights(trainer: Trainer) -> dict[str, Tensor]:
    """A copy of the main parameters."""
    return {name: value.clone() for name, value in trainer.optimizer.main_params.items()}


def take_step(trainer: Trainer) -> Any:
    """One step of the inner optimizer."""
    size = trainer.reader.next_batch_size
    metrics = train_step(trainer, trainer.next_batches(), trainer.schedule.rates(trainer.consumed_samples))
    trainer.progress.iteration += 1
    trainer.progress.consumed_samples += size
    return metrics


@dataclass
class Replica:
    """One replica of one rank."""

    config: RunConfig
    store: Any
    wanted: int | None = None
    log: QuietLog = field(default_factory=QuietLog)
    history: list[dict[str, Tensor]] = field(default_factory=list)

    def start(self) -> list[str]:
        """Build and join."""
        self.trainer = build_trainer(self.config, 0, 1)
        self.diloco = part_of(self.trainer, Diloco)
        self.diloco.connect(self.wanted, self.store)
        self.diloco.log = self.log  # type: ignore[assignment]
        return self.diloco.join()

    def train(self, until: int | None = None, before: Callable[[Trainer], None] = lambda trainer: None) -> None:
        """Take steps up to ``until``, and keep the weights after each."""
        trainer = self.trainer
        while trainer.iteration < (until or trainer.total_steps):
            before(trainer)
            metrics = take_step(trainer)
            self.diloco.on_step_end(metrics)
            self.history.append(weights(trainer))

    def close(self) -> None:
        """Close its connections, like the ones of a dead process."""
        if hasattr(self, "diloco") and hasattr(self.diloco, "replicas"):
            self.diloco.replicas.close_group()

    def run(self) -> None:
        """From start to end."""
        self.start()
        self.train()
        self.diloco.on_stop(None)


def together(acts: Sequence[Callable[[], Any]]) -> list[Any]:
    """Call all at once, and return what they return; raise the first error."""
    with ThreadPoolExecutor(len(acts)) as pool:
        return [future.result() for future in [pool.submit(act) for act in acts]]


LOST_CONNECTIONS = 0.1
"""Share of sums of which one member gets nothing, although all others do."""


class Killed(SystemExit):
    """Ends a thread as ``kill -9`` ends a process."""


class Mortality:
    """Kills replicas at a request to the store or in an exchange, and records what the others make of it."""

    def __init__(self, seed: int) -> None:
        self.left: dict[int, int] = {}  # requests that a replica has left, by the identity of its store
        self.exchanges: dict[int, int] = {}  # the same of sums over the members, each of a part of a round
        self.random = Random(seed)
        self.gradients: dict[int, dict[int, Tensor]] = {}  # of a round, by the index of the replica
        # by round, what every replica took from it: indices of members that contributed, and their average
        self.rounds: dict[int, list[tuple[tuple[int, ...], Tensor]]] = {}

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Kill replicas inside the context, and record their rounds."""
        ask, keep, synchronise, add_up = Replicas._ask, Diloco._keep, Diloco._synchronise, Diloco._sum
        lock = threading.Lock()

        def dying(replicas: Replicas, request: Callable[..., Any], *arguments: object) -> Any:
            with lock:
                left = self.left.get(id(replicas._store), 1 << 30)
                self.left[id(replicas._store)] = left - 1
            if left <= 0:
                raise Killed
            return ask(replicas, request, *arguments)

        def leaving(diloco: Diloco, *arguments: Any) -> Tensor:
            store = id(diloco.replicas._store)
            with lock:
                left = self.exchanges.get(store, 1 << 30)
                self.exchanges[store] = left - 1
            if left <= 0:
                self.left[store] = 0  # its heartbeat ends, too
                diloco.replicas.close_group()
                raise Killed
            total = add_up(diloco, *arguments)
            if self.random.random() < LOST_CONNECTIONS:
                raise RuntimeError("gloo/transport/tcp: connection reset by the test")
            return total

        def keeping(diloco: Diloco, done: Round) -> None:
            keep(diloco, done)
            indices = tuple(member.index for member in done.members if not member.facts["starting"])
            with lock:
                self.rounds.setdefault(diloco.outer.rounds, []).append((indices, done.average.clone()))

        def contributing(diloco: Diloco, facts: dict[str, Any], delta: Tensor, *rest: Any) -> Round:
            if not facts["starting"]:
                with lock:
                    of_round = self.gradients.setdefault(facts["rounds"] + 1, {})
                    of_round[diloco.replicas.index] = delta.clone()
            return synchronise(diloco, facts, delta, *rest)

        with (
            patch.object(Replicas, "_ask", dying),
            patch.object(Diloco, "_keep", keeping),
            patch.object(Diloco, "_sum", leaving),
            patch.object(Diloco, "_synchronise", contributing),
        ):
            yield


def run_rank(
    rank: int,
    world_size: int,
    config: RunConfig,
    kills_before: int | None = None,
    process: int | None = None,
    pause: float = 0.0,
) -> Outcome:
    """One rank of a replica that is a run of its own; before a step it may kill a ``process``, by default itself."""

    def strike(trainer: Trainer) -> None:
        time.sleep(pause)
        if trainer.iteration + 1 == kills_before:
            with suppress(ProcessLookupError):  # another replica was first
                os.kill(process or os.getpid(), signal.SIGKILL)

    original = Trainer.next_batches

    def next_batches(trainer: Trainer) -> Any:
        strike(trainer)
        return original(trainer)

    return start(config, patch.object(Trainer, "next_batches", next_batches), rank, world_size)


def run_replicas(flags: str, replicas: int = 2) -> list[Replica]:
    """Run replicas from start to end."""
    store = dist.HashStore()
    config = replica_config(flags, replicas)
    found = [Replica(config, store, index) for index in range(replicas)]
    together([replica.run for replica in found])
    return found


def largest_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Between two models, relative to the largest weight of each parameter."""
    assert a.keys() == b.keys()
    return max(float((a[n] - b[n]).abs().max() / (b[n].abs().max() + 1e-30)) for n in a)
