"""Elastic replicas as processes: a server, starts that can be killed, and a record of every step of each."""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any
from unittest.mock import patch

import torch

from megatron.training import elastic, loop, main
from megatron.training.elastic import ElasticReplica
from megatron.training.replicas.members import Replicas
from megatron.training.replicas.store import serve
from megatron.training.trainer import Trainer
from tests.kit.processes import ForkedProgram, free_port
from tests.kit.runs import tiny_run

FP64 = "--params-dtype fp64"

LIMIT_SECONDS = 60.0

STACKS = signal.SIGRTMIN
"""Lets a rank print its stacks."""


def weights_hash(trainer: Trainer) -> str:
    """A hash of the main parameters and the moments of this rank."""
    digest = hashlib.blake2b(digest_size=8)
    state = trainer.optimizer.state()
    tensors = [*trainer.optimizer.main_params.items(), *(i for kind in sorted(state) for i in state[kind].items())]
    for name, tensor in tensors:
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


MOMENTS: dict[str, tuple[Any, str]] = {
    "exchange": (ElasticReplica, "on_gradients"),
    "vote": (Replicas, "settle"),
    "commit": (Replicas, "settle"),
    "fill": (elastic, "copy_to_peers"),
}
"""Where a start can die: at the call of a function, or at its return for a commit."""


def dies(place: str, mark: Path) -> AbstractContextManager[Any]:
    """Let this process be killed at a place once ``mark`` is there."""
    owner, name = MOMENTS[place]
    act = getattr(owner, name)

    def struck(*arguments: Any) -> Any:
        found = act(*arguments) if place == "commit" else None
        if mark.exists():
            os.kill(os.getpid(), signal.SIGKILL)
        return found if place == "commit" else act(*arguments)

    return patch.object(owner, name, struck)


def steps_allowed(run: Path) -> float:
    """Return the step after which all replicas of a run wait."""
    file = run / "limit"
    return int(file.read_text()) if file.exists() else float("inf")


def replica_rank(folder: Path, flags: str, name: str, pause: float, place: str = "") -> int:
    """One rank of a start of a replica; after each step it appends a line to ``folder/steps.RANK.jsonl``."""
    faulthandler.register(STACKS, all_threads=True)
    take_step, complete, rank = loop.take_step, Trainer.complete, os.environ["RANK"]
    computed: list[int] = []  # samples of the current step

    def completed(trainer: Trainer, batches: list[Any]) -> Any:
        computed.extend(number for batch in batches for number in batch.sample_ids.tolist())
        return complete(trainer, batches)

    def recorded(trainer: Trainer, *arguments: Any) -> Any:
        time.sleep(pause)
        while trainer.iteration >= steps_allowed(folder.parent):
            time.sleep(0.02)
        computed.clear()
        metrics = take_step(trainer, *arguments)
        line = {
            "start": name,
            "step": trainer.iteration,
            "loss": metrics.loss.item(),
            "norm": metrics.grad_norm.item(),
            "weights": weights_hash(trainer),
            "before": trainer.reader.start_digest,
            "read": {trainer.mesh.dp_rank: trainer.reader.digest_read},
            "computed": computed,
            "time": time.monotonic(),
            "core": int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9,  # seconds of waiting for a core
        }
        with (folder / f"steps.{rank}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        return metrics

    no_picture = patch("megatron.training.loggers.run_logger.draw_plots", lambda *arguments: None)
    death = dies(place, folder.parent / f"death.{name}") if place else nullcontext()
    with patch.object(loop, "take_step", recorded), patch.object(Trainer, "complete", completed), no_picture, death:
        status = main.run(tiny_run(folder, flags, int(os.environ["WORLD_SIZE"])))
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
        ranks: of each.
        pause: seconds before every step.
    """

    folder: Path
    flags: str
    count: int = 3
    ranks: int = 1
    pause: float = 0.0
    programs: dict[int, list[ForkedProgram]] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)  # of the last start of each replica
    starts: int = 0
    printed: dict[int, int] = field(default_factory=dict)  # characters before the last start of each replica
    read: dict[Path, tuple[int, list[dict[str, Any]]]] = field(default_factory=dict)  # bytes and lines of a file

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.server, port = serve("127.0.0.1", 0)
        self.plain = self.flags
        self.flags += f" --elastic-replicas {self.count} --elastic-server 127.0.0.1:{port}"

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.kill(*self.programs)
        self.server.stop()

    def start(self, *indices: int, place: str = "") -> None:
        """Start replicas, which die at a place of ``MOMENTS`` after :meth:`strike`."""
        for index in indices:
            folder = self.folder / str(index)
            folder.mkdir(exist_ok=True)
            self.starts += 1
            name, own = f"{index}.{self.starts}", f"{self.flags} --elastic-replica {index}"
            world = {"WORLD_SIZE": str(self.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
            self.names[index], self.programs[index] = name, []
            self.printed[index] = len(self.text_of(index))
            for rank in range(self.ranks):
                own_rank, output = {"RANK": str(rank), "LOCAL_RANK": str(rank)}, self.folder / f"{index}.{rank}.output"
                arguments = replica_rank, folder, own, name, self.pause, place
                self.programs[index].append(ForkedProgram(*arguments, output=output, environment=world | own_rank))

    def kill(self, *indices: int) -> None:
        """Kill replicas."""
        for index in indices:
            for program in self.programs[index]:
                program.kill()

    def strike(self, *indices: int) -> None:
        """Let replicas die at the place with which they were started, when they come there."""
        for index in indices:
            (self.folder / f"death.{self.names[index]}").touch()

    def allow(self, step: int) -> None:
        """Let all replicas wait after a step."""
        file = self.folder / "limit.new"
        file.write_text(str(step))
        file.replace(self.folder / "limit")

    def advance(self, done: Callable[[], bool]) -> None:
        """Let the replicas take one step after another until ``done()``."""
        last = 0.0

        def is_done() -> bool:
            nonlocal last
            if done():
                return True
            if self.last_step() >= steps_allowed(self.folder) and time.monotonic() > last + 0.5:
                self.allow(self.last_step() + 1)
                last = time.monotonic()
            return False

        self.wait(is_done)

    def join(self, *indices: int) -> None:
        """Wait until the last starts of replicas have joined, with few steps of the others."""
        self.wait(lambda: all(self.waits(index) for index in indices))
        self.advance(lambda: all(self.is_back(index) for index in indices))

    def waits(self, index: int) -> bool:
        """Return True if the last start of a replica was about to join."""
        return "waiting for the others" in self.text_of(index)[self.printed[index] :]

    def text_of(self, index: int) -> str:
        """What the first rank of a replica has printed, in all its starts."""
        file = self.folder / f"{index}.0.output"
        return file.read_text() if file.exists() else ""

    def steps(self, index: int, rank: int = 0) -> list[dict[str, Any]]:
        """What a rank of a replica has recorded, in all its starts."""
        path = self.folder / str(index) / f"steps.{rank}.jsonl"
        done, found = self.read.get(path, (0, []))
        if path.exists() and path.stat().st_size > done:
            with path.open("rb") as file:
                file.seek(done)
                for line in file:
                    if line.endswith(b"\n"):
                        done += len(line)
                        with suppress(ValueError):  # of a line that a kill has cut off
                            found.append(json.loads(line))
            self.read[path] = done, found
        return found

    def step_of(self, index: int) -> int:
        """The last step that one replica has taken."""
        lines = self.steps(index)
        return int(lines[-1]["step"]) if lines else 0

    def last_step(self) -> int:
        """The last step that a replica has taken."""
        return max(self.step_of(index) for index in range(self.count))

    def is_back(self, index: int) -> bool:
        """Return True if the last start of a replica has taken a step."""
        lines = self.steps(index)
        return bool(lines) and lines[-1]["start"] == self.names[index]

    def output(self) -> str:
        """All that was printed, and how the last starts have ended."""
        ends = {name: [p.poll() for p in self.programs[index]] for index, name in self.names.items()}
        return f"{ends}\n" + "\n".join(
            f"--- {path.name}\n{path.read_text()}" for path in sorted(self.folder.glob("*.output"))
        )

    def wait(self, done: Callable[[], bool], seconds: float = LIMIT_SECONDS) -> None:
        """Wait until ``done()``.

        Raises:
            TimeoutError: after ``seconds``.
        """
        until = time.monotonic() + seconds
        while not done():
            if time.monotonic() > until:
                for program in [each for programs in self.programs.values() for each in programs]:
                    with suppress(ProcessLookupError):
                        program.send_signal(STACKS)
                time.sleep(1.0)
                raise TimeoutError(self.output())
            time.sleep(0.03)

    def wait_for_end(self, *indices: int) -> list[int | None]:
        """Wait for the end of all ranks of replicas, and return their exit statuses."""
        programs = [program for index in indices for program in self.programs[index]]
        self.wait(lambda: all(program.poll() is not None for program in programs))
        return [program.poll() for program in programs]

    def finish(self, *indices: int) -> None:
        """Wait for the end of replicas, which is to be a good one."""
        statuses = self.wait_for_end(*indices)
        if any(statuses):
            raise RuntimeError(f"statuses {statuses}\n{self.output()}")


def by_step(fleet: Fleet, after: int = 0) -> Mapping[int, list[dict[str, Any]]]:
    """The records of all ranks of all replicas by step."""
    found: dict[int, list[dict[str, Any]]] = {}
    for index in range(fleet.count):
        for rank in range(fleet.ranks):
            for line in fleet.steps(index, rank):
                if line["step"] > after:
                    found.setdefault(line["step"], []).append(line | {"index": index, "rank": rank})
    return found


def undisturbed(folder: Path, flags: str) -> dict[int, dict[str, Any]]:
    """What one process records of a run without replicas, by step."""
    folder.mkdir(parents=True)
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    output = folder.parent / f"{folder.name}.output"
    with ForkedProgram(replica_rank, folder, flags, "one", 0.0, output=output, environment=place) as program:
        if program.wait(LIMIT_SECONDS):
            raise RuntimeError(program.output)
    return {line["step"]: line for line in map(json.loads, (folder / "steps.0.jsonl").read_text().splitlines())}


def broken_promises(
    fleet: Fleet, one: Mapping[int, dict[str, Any]] | None, tolerance: float = 1e-9, after: int = 0
) -> Iterator[str]:
    """Yield what is wrong with the steps after one.

    Args:
        fleet: whose replicas have never all been lost at once, so that each step was taken once.
        one: steps of one process, which must be the same up to rounding; None with ``--elastic-batch shrink``.
        tolerance: largest relative difference.
        after: the step.
    """
    taken: dict[tuple[str, int], int] = {}  # last step of a rank of a start
    for step, lines in sorted(by_step(fleet, after).items()):
        for rank in range(fleet.ranks):
            mine = [line for line in lines if line["rank"] == rank]
            if len({(line["weights"], line["loss"]) for line in mine}) > 1:
                yield f"step {step}: rank {rank} of the replicas have different bits: {mine}"
            computed = [number for line in mine for number in line["computed"]]
            if len({*computed}) < len(computed):
                yield f"step {step}: samples are computed twice: {mine}"
        for line in lines:
            start = line["start"], line["rank"]
            if taken.get(start, step - 1) != step - 1:
                yield f"step {step} follows {taken[start]} in {start}"
            taken[start] = step
        if one is not None:
            yield from _differences(lines, one[step], tolerance, fleet.ranks)


def _differences(lines: list[dict[str, Any]], theirs: dict[str, Any], tolerance: float, ranks: int) -> Iterator[str]:
    """Yield what a step of replicas does not have in common with the same step of one process."""
    for name in ("loss", "norm"):
        if abs(lines[0][name] - theirs[name]) > tolerance * abs(theirs[name]):
            yield f"step {theirs['step']}: {name} {lines[0][name]}, {theirs[name]} without replicas"
    for start in {line["start"] for line in lines}:
        mine = [line for line in lines if line["start"] == start]
        if len(mine) == ranks and samples_of(mine) != samples_of([theirs]):  # some may be killed before they record it
            yield f"step {theirs['step']}: the samples are others than without replicas: {mine}"
    if others := {number for line in lines for number in line["computed"]}.difference(theirs["computed"]):
        yield f"step {theirs['step']}: samples {sorted(others)} are not those of the step"


def samples_of(lines: list[dict[str, Any]]) -> int:
    """The digest of what all ranks of one start have read up to a step."""
    read: dict[str, int] = {}
    for line in lines:
        read |= line["read"]  # the same on all ranks of a data-parallel rank
    return int(lines[0]["before"] + sum(read.values())) % 2**64
