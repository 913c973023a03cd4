"""Options of checks for faults, their records, and the policies that follow."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

from megatron.config.alerts import command_problems, webhook_problems
from megatron.config.errors import Problem
from megatron.config.option import Need, Run, option
from megatron.config.text import counted

ALERTS = Need("alert_command or alert_webhook", "--alert-command or --alert-webhook")

REWIND = "rewind"

MOST_REWIND_STEPS = 10**6
"""Limit of N in ``rewind:N``."""

TRAINING_STEPS = Need("not skip_train", "training steps (--skip-train takes none)")


class Policy(NamedTuple):
    """Policy for steps that are spikes, or not finite."""

    # ``log``, ``skip``, ``stop`` or ``rewind``.
    act: str
    # Steps to go back at least, whose samples are left out then; 0 without ``rewind``.
    steps: int = 0


def parse_policy(words: tuple[str, ...], text: str) -> Policy:
    """Parse one of ``words`` or ``rewind:N``.

    Raises:
        ValueError: for another text.
    """
    match = re.fullmatch(rf"{REWIND}:([1-9]\d{{0,6}})", text)
    if match is not None and int(match[1]) <= MOST_REWIND_STEPS:
        return Policy(REWIND, int(match[1]))
    if text not in words:
        raise ValueError(f"{text!r} is not {', '.join(words)} or {REWIND}:N, such as {REWIND}:100")
    return Policy(text)


parse_spike_policy = partial(parse_policy, ("log", "skip"))
parse_nonfinite_policy = partial(parse_policy, ("skip", "stop"))

REPLAY = Need("replay_check")


@dataclass(frozen=True)
class ReliabilityConfig:
    """Faults of hardware, data and numbers: how they are found, recorded and survived."""

    log_slowest_ranks_interval: int | None = option(None, role="start", at_least=1)
    """Steps between reports on the slowest ranks: machine, and excess in data, forward, backward and optimizer without
    waits for other ranks. Default: never."""
    alert_command: str | None = option(None, role="start")
    """Program, with arguments, that is run when the run ends, stops or fails, and at incidents."""
    alert_webhook: str | None = option(None, role="start")
    """URL that receives the same alerts as JSON: env:VARIABLE or file:PATH that holds it, or a URL without a key."""
    alert_interval_mins: float = option(10.0, role="start", at_least=0, needs=ALERTS)
    """Minutes between two alerts of one kind."""
    on_spike: str = option("skip", role="free", check=parse_spike_policy, needs=Need("skip_spikes"))
    """Action at a spike: log it, skip the update, or rewind:N: go back to the newest checkpoint from at least N steps
    before it, and leave out the samples of the last N steps."""
    max_rewinds: int = option(10, role="start", at_least=1, needs=TRAINING_STEPS)
    """Times that a run goes back with rewind:N; the next time it stops."""
    max_incidents: int = option(20, role="start", at_least=0, needs=Need("run_dir"))
    """Folders of incidents in run_dir that spikes and steps that are not finite may fill; further ones are only
    logged."""
    rank_logs: bool = option(True, role="start", needs="run_dir")
    """Write warnings, errors and crashes of each rank into RUN_DIR/ranks."""
    replay_check: int | None = option(None, role="free", at_least=1, example=50)
    """Compute every N-th step again, also the first two of a start and those that are saved, and compare to the bit."""
    on_corruption: str = option("stop", role="free", choices=("stop", "exclude", "report"), needs=REPLAY)
    """After a difference: end the run, and refuse to resume (stop); end it, and let a restart resume from a checkpoint
    before it without the node (exclude); or record it and go on (report)."""

    refused: ClassVar = """
    replay_check and cuda_graph=optimizer|step
    E981 --replay-check {replay_check} repeats steps eagerly, and --cuda-graph {cuda_graph} captures them
      fix: --cuda-graph none | drop --replay-check

    replay_check and diloco_sync_interval
    E981 --replay-check {replay_check} is untested with --diloco-sync-interval
      fix: drop --replay-check | drop --diloco-sync-interval

    replay_check and grad_compression!=none
    E981 --replay-check {replay_check}: --grad-compression keeps errors, which a repeated step would change
      fix: drop --replay-check | --grad-compression none

    replay_check and optimizer_cpu_offload
    E981 --replay-check {replay_check} is untested with --optimizer-cpu-offload
      fix: drop --replay-check | drop --optimizer-cpu-offload

    replay_check and local_save
    E981 --replay-check {replay_check} is untested with --local-save: nodes could resume from what is suspect
      fix: drop --replay-check | drop --local-save
    """

    def check_suspects(self, config: Run, world_size: int) -> Iterator[Problem]:
        """Check that suspect checkpoints are recorded on a disk."""
        save = config.checkpoint.save
        if self.replay_check is not None and save is not None and "://" in save:
            sentence = f"--replay-check {self.replay_check} is untested with object stores, such as {save}"
            yield Problem("E981", sentence, ("drop --replay-check", "--save DIR"))

    def row_checks(self, config: Run, world_size: int) -> str:
        """Return which steps are computed again, and what follows a difference."""
        if self.replay_check is None:
            return ""
        follows = {"stop": "ends the run", "exclude": "ends the run, and a restart leaves the node out"}
        return (
            f"every {counted(self.replay_check, 'step')}, the first and those that are saved are computed again; a "
            f"difference {follows.get(self.on_corruption, 'is reported')}"
        )

    def note_slowest_ranks(self, config: Run, world_size: int) -> Iterator[str]:
        """Note that a single rank is not compared."""
        if self.log_slowest_ranks_interval is not None and world_size == 1:
            yield "--log-slowest-ranks-interval has no effect on one rank"

    def check_alerts(self, config: Run, world_size: int) -> Iterator[Problem]:
        """Check that the program and the URL of alerts can be found, before they are needed."""
        if self.alert_command is not None:
            yield from command_problems(self.alert_command)
        if self.alert_webhook is not None:
            yield from webhook_problems(self.alert_webhook)

    def check_rewind(self, config: Run, world_size: int) -> Iterator[Problem]:
        """Check that a run that goes back has checkpoints, and is alone."""
        policies = {"--on-nonfinite": (config.training.on_nonfinite, "stop")}
        if config.optimizer.skip_spikes is not None:
            policies["--on-spike"] = self.on_spike, "skip"
        for name, (text, instead) in policies.items():
            if not text.startswith(REWIND) or config.training.skip_train:
                continue
            if config.checkpoint.save is None:
                yield Problem(
                    "E980", f"{name} {text} goes back to a checkpoint, and --save is not given", ("--save FOLDER",)
                )
            if config.elastic.elastic_replicas is not None:
                sentence = f"{name} {text} does not support --elastic-replicas: each replica would go back by itself"
                yield Problem("E980", sentence, (f"{name} {instead}", "drop --elastic-replicas"))
            if config.diloco.diloco_sync_interval is not None:
                sentence = f"{name} {text} does not support --diloco-sync-interval: one replica would go back alone"
                yield Problem("E980", sentence, (f"{name} {instead}", "drop --diloco-sync-interval"))
