"""Driving replicas: as threads of one process, which is quick, or each in a pool of processes of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megatron.config.run import RunConfig
from megatron.training.build import build_trainer
from megatron.training.diloco import Diloco
from megatron.training.step import train_step
from megatron.training.trainer import Trainer
from tests.runs import tiny_run

FP64 = "--params-dtype fp64 --clip-grad 0"


@dataclass
class QuietLog:
    """What a replica logs."""

    notes: list[str] = field(default_factory=list)
    metrics: list[dict[str, Any]] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Keep a note."""
        self.notes.append(text)

    def log(self, metrics: dict[str, Any]) -> None:
        """Keep metrics."""
        self.metrics.append(metrics)


def replica_config(flags: str = "", replicas: int = 2, world_size: int = 1) -> RunConfig:
    """A replica whose rounds are of a second at most, if nobody answers."""
    own = f"--diloco-server 127.0.0.1:1 --diloco-replicas {replicas} --diloco-timeout 3"
    return tiny_run(Path("unused"), f"{own} {flags}", world_size)


def weights(trainer: Trainer) -> dict[str, Tensor]:
    """A copy of the main parameters."""
    return {name: value.clone() for name, value in trainer.optimizer.main_params.items()}


def take_step(trainer: Trainer) -> Any:
    """One step of the inner optimizer."""
    size = trainer.next_batch_size
    metrics = train_step(trainer, trainer.next_batches(), trainer.schedule.rates(trainer.consumed_samples))
    trainer.iteration += 1
    trainer.consumed_samples += size
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
        self.diloco = Diloco(self.trainer, self.wanted, self.store)
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

    def run(self) -> None:
        """From start to end."""
        self.start()
        self.train()
        self.diloco.on_stop(None)


def together(acts: Sequence[Callable[[], Any]]) -> list[Any]:
    """Call all at once, and return what they return; raise the first error."""
    with ThreadPoolExecutor(len(acts)) as pool:
        return [future.result() for future in [pool.submit(act) for act in acts]]


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
