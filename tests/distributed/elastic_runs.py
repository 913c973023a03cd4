"""Runs under torchrun's agents: as torchrun starts them, or forked off, which saves every rank seconds of imports."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from unittest.mock import patch

from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from megatron.training import main
from megatron.training.trainer import Trainer
from tests.distributed.crash_runs import EARLY
from tests.kit.processes import ForkedProgram, free_port
from tests.kit.runs import steps, tiny_run

for name in EARLY:
    import_module(name)

PAUSE = 0.03
"""Seconds before every step: something else can happen meanwhile."""

LAST_CALL_SECONDS = 3
"""Seconds that a sufficient number of agents waits for more of them; torchrun's default is 30."""

OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Ranks of a start meet in their own store; with the agents' store, an agent that comes later cannot join."""

Strike = Callable[[Trainer], None]


def die(trainer: Trainer) -> None:
    """Be killed."""
    os.kill(os.getpid(), signal.SIGKILL)


def die_with_agent(trainer: Trainer) -> None:
    """Be killed together with the agent, as when a node loses its power."""
    os.kill(os.getppid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def hang(trainer: Trainer) -> None:
    """Be away for good, as in a collective without other ranks."""
    while True:
        time.sleep(60)


STRIKES: dict[str, Strike] = {"die": die, "die with agent": die_with_agent, "hang": hang}


@dataclass(frozen=True)
class Plan:
    """The event on one rank in the middle of a step, once in a run.

    Attributes:
        what: one of ``STRIKES``.
        rank: of the world.
        step: from 1.
        world: ranks that there must be; any where it is 0.
    """

    what: str
    rank: int
    step: int
    world: int = 0


def disturbed(folder: Path, plans: tuple[Plan, ...]) -> AbstractContextManager[Any]:
    """Disturb ranks according to ``plans``, and record each disturbance in ``folder``.

    Fewer ranks than a plan is for take their time, so that others can join them before.
    """
    compute = Trainer.compute

    def between(trainer: Trainer, batches: Any, seed: Any, program: Any = None) -> None:
        here = trainer.mesh.world
        time.sleep(1.0 if any(here.size < plan.world for plan in plans) and not any(folder.glob("struck*")) else PAUSE)
        for number, plan in enumerate(plans):
            mark, meant = folder / f"struck{number}", (here.rank, trainer.iteration + 1) == (plan.rank, plan.step)
            if seed is not None and meant and plan.world in (0, here.size) and not mark.exists():
                mark.touch()
                STRIKES[plan.what](trainer)
        compute(trainer, batches, seed, program)

    return patch.object(Trainer, "compute", between)


def rank(folder: Path, flags: str, plans: tuple[Plan, ...]) -> None:
    """One rank; ends the process unless all is well."""
    no_picture = patch("megatron.training.loggers.run_logger.draw_plots", lambda *arguments: None)
    with disturbed(folder, plans), no_picture:
        status = main.run(tiny_run(folder, flags, int(os.environ["WORLD_SIZE"])))
    sys.stdout.flush()
    sys.stderr.flush()
    if status:
        os._exit(status)


def run_agent(config: LaunchConfig, *arguments: Any) -> int:
    """Run an agent and its ranks, with ``arguments`` of :func:`rank`."""
    elastic_launch(config, rank)(*arguments)
    return 0


@dataclass
class Job:
    """Agents of one run: the first of them hosts the store in which they meet.

    Attributes:
        folder: of the run.
        flags: of the run, besides where it saves.
        nodes: how many agents there may be.
        ranks: of each.
        restarts: that failures may cause.
        plans: what happens to ranks.
    """

    folder: Path
    flags: str
    nodes: int = 1
    ranks: int = 1
    restarts: int = 3
    plans: tuple[Plan, ...] = ()
    agents: list[ForkedProgram] = field(default_factory=list)
    port: int = field(default_factory=free_port)

    def add(self) -> ForkedProgram:
        """Start one more agent."""
        self.folder.mkdir(parents=True, exist_ok=True)
        config = LaunchConfig(
            1,
            self.nodes,
            self.ranks,
            run_id=self.folder.name,
            rdzv_backend="c10d",
            rdzv_endpoint=f"127.0.0.1:{self.port}",
            rdzv_configs={"last_call_timeout": LAST_CALL_SECONDS},
            max_restarts=self.restarts,
            start_method="fork",
        )
        log = self.folder / f"agent{len(self.agents)}.txt"
        arguments = config, self.folder, self.flags, self.plans
        environment = OWN_STORE if self.nodes > 1 else {}
        self.agents.append(ForkedProgram(run_agent, *arguments, output=log, environment=environment))
        return self.agents[-1]

    def wait(self, true: Callable[[], bool], seconds: float = 120.0) -> None:
        """Until something is ``true``.

        Raises:
            TimeoutError: with the output of the agents, when it does not become so.
        """
        until = time.monotonic() + seconds
        while not true():
            if time.monotonic() > until:
                raise TimeoutError(self.output())
            time.sleep(0.02)

    def output(self) -> str:
        """Return the output of all agents and ranks."""
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("agent*.txt")))

    def struck(self) -> bool:
        """Return True if every planned disturbance has happened."""
        return len(list(self.folder.glob("struck*"))) == len(self.plans)

    def step(self) -> int:
        """The last step that is recorded."""
        return max(steps(self.folder), default=0) if (self.folder / "metrics.jsonl").exists() else 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for agent in self.agents:
            agent.kill()
