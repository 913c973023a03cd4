"""Elastic replicas as processes: a server, starts that can be killed, and a record of every step of each."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any
from unittest.mock import patch

import torch

from megatron.training import loop, main
from megatron.training.replicas.store import serve
from megatron.training.trainer import Trainer
from tests.kit.processes import ForkedProgram
from tests.kit.runs import tiny_run

FP64 = "--params-dtype fp64"

LIMIT_SECONDS = 120.0


def weights_hash(trainer: Trainer) -> str:
    """A hash of the main parameters and the moments of this rank."""
    digest = hashlib.blake2b(digest_size=8)
    state = trainer.optimizer.state()
    tensors = [*trainer.optimizer.main_params.items(), *(i for kind in sorted(state) for i in state[kind].items())]
    for name, tensor in tensors:
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def replica(folder: Path, flags: str, name: str, pause: float) -> int:
    """One start of a replica of one rank; after each step it appends a line to ``folder/steps.jsonl``."""
    take_step = loop.take_step

    def recorded(trainer: Trainer, *arguments: Any) -> Any:
        time.sleep(pause)
        metrics = take_step(trainer, *arguments)
        line = {
            "start": name,
            "step": trainer.iteration,
            "loss": metrics.loss.item(),
            "norm": metrics.grad_norm.item(),
            "weights": weights_hash(trainer),
            "samples": f"{(trainer.reader.start_digest + trainer.reader.digest_read) % 2**64:016x}",
            "time": time.monotonic(),
        }
        with (folder / "steps.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        return metrics

    no_picture = patch("megatron.training.loggers.run_logger.draw_plots", lambda *arguments: None)
    with patch.object(loop, "take_step", recorded), no_picture:
        status = main.run(tiny_run(folder, flags))
    sys.stdout.flush()
    sys.stderr.flush()
    if status:
        os._exit(status)
    return status


@dataclass
class Fleet:
    """The replicas of a run.

    Attributes:
        folder: of the run; replica 1 has ``folder/1``.
        flags: of all replicas.
        count: of replicas.
        pause: seconds before every step.
    """

    folder: Path
    flags: str
    count: int = 3
    pause: float = 0.0
    programs: dict[int, ForkedProgram] = field(default_factory=dict)
    starts: int = 0

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.server, port = serve("127.0.0.1", 0)
        self.flags += f" --elastic-replicas {self.count} --elastic-server 127.0.0.1:{port}"

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for program in self.programs.values():
            program.kill()
        self.server.stop()

    def start(self, *indices: int, flags: str = "") -> None:
        """Start replicas."""
        for index in indices:
            folder = self.folder / str(index)
            folder.mkdir(exist_ok=True)
            self.starts += 1
            name, output = f"{index}.{self.starts}", self.folder / f"{index}.output"
            own = f"{self.flags} --elastic-replica {index} {flags}"
            self.programs[index] = ForkedProgram(replica, folder, own, name, self.pause, output=output)

    def kill(self, *indices: int) -> None:
        """Kill replicas."""
        for index in indices:
            self.programs[index].kill()

    def steps(self, index: int) -> list[dict[str, Any]]:
        """What a replica has recorded, in all its starts."""
        found: list[dict[str, Any]] = []
        with suppress(FileNotFoundError):
            for line in (self.folder / str(index) / "steps.jsonl").read_text().splitlines():
                with suppress(ValueError):  # cut off by a kill
                    found.append(json.loads(line))
        return found

    def step_of(self, index: int) -> int:
        """The last step that a replica has taken."""
        lines = self.steps(index)
        return int(lines[-1]["step"]) if lines else 0

    def output(self) -> str:
        """All that was printed."""
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in sorted(self.folder.glob("*.output")))

    def wait(self, done: Callable[[], bool], seconds: float = LIMIT_SECONDS) -> None:
        """Wait until ``done()``.

        Raises:
            TimeoutError: after ``seconds``.
        """
        until = time.monotonic() + seconds
        while not done():
            if time.monotonic() > until:
                raise TimeoutError(self.output())
            time.sleep(0.01)

    def finish(self, *indices: int) -> None:
        """Wait for the end of replicas, which is to be a good one."""
        self.wait(lambda: all(self.programs[index].poll() is not None for index in indices))
        statuses = [self.programs[index].poll() for index in indices]
        if any(statuses):
            raise RuntimeError(f"statuses {statuses}\n{self.output()}")


def by_step(fleet: Fleet) -> Mapping[int, list[dict[str, Any]]]:
    """The records of all replicas by step."""
    found: dict[int, list[dict[str, Any]]] = {}
    for index in range(fleet.count):
        for line in fleet.steps(index):
            found.setdefault(line["step"], []).append(line | {"index": index})
    return found
