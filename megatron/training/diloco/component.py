"""DiLoCo (arXiv 2311.08105, 2501.18512): replicas that train apart, and exchange their progress every H steps.

The rest of the package is what :class:`Diloco` stands on: the outer optimizer, the other replicas, and the server
through which replicas find each other.

:class:`Diloco` is called after every step. When a fragment of the model is due, a thread agrees with the other replicas
on who takes part, averages the outer gradients, and repeats this without members that have died, while up to
``diloco_delay`` steps are taken. Then all members apply the same outer update.

A replica whose outer gradient is not finite or absurdly large is left out of the average (`left_out`), and ends. All
members compute who that is from the norms with which they have arrived, so they agree without another message.

A replica that starts makes such an exchange before its first step, with nothing to contribute, and receives the outer
state if others are further. There is no other way into a run: a replica that was killed or cut off starts again.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from megatron.checkpoint.format import Manifest
from megatron.checkpoint.save import run_in_background
from megatron.config.text import echo, listed
from megatron.distributed import comm
from megatron.distributed.comm import Group
from megatron.distributed.launch import run_on_rank0
from megatron.optimizer.grad_compression import int8_all_reduce
from megatron.training.component import Component, Kinds
from megatron.training.diloco.outer_optimizer import GRAD, OuterOptimizer
from megatron.training.failure_report import NonFiniteError
from megatron.training.metrics import StepMetrics
from megatron.training.replicas.members import Member, ReplicaError, Replicas, connect
from megatron.training.replicas.store import read_secret
from megatron.training.replicas.transfer import CHUNK_BYTES, copy_to_peers, hash_of, ordered_sum, shared_options
from megatron.training.resume_source import ResumeSource, stream_of
from megatron.training.trainer import Trainer

ABSURD_NORM = 1000.0
"""Outer gradients whose norm is more than so many times the median of the others' are left out.

Replicas differ by less: those of a round have taken the same number of steps with the same learning rates, and one
that has skipped updates is short of those alone.
"""


@dataclass(frozen=True)
class Round:
    """A committed exchange."""

    members: list[Member]
    # Whose outer gradients were averaged; none if all members were starting.
    names: list[str]
    average: Tensor
    # Seconds from the arrival to the commit, attempts, and bytes sent by this rank.
    seconds: float
    attempts: int
    bytes: float


class Diloco(Component):
    """Synchronises this replica with the others. Its state is that of the outer optimizer."""

    name = "outer"
    state_types: ClassVar[Mapping[str, Any]] = dict.fromkeys(("rounds", "iteration", "consumed_samples"), int)
    missing = "the checkpoint has no outer weights: DiLoCo starts from the weights"
    memory_part = "outer"
    pauses = False

    replicas: Replicas
    """All replicas, set by :meth:`connect`."""

    def __init__(self, trainer: Trainer) -> None:
        """Start the outer optimizer from the main parameters; :meth:`connect` finds the other replicas."""
        self.trainer, self.options, self.world = trainer, trainer.config.diloco, trainer.mesh.world
        self.outer = OuterOptimizer(trainer.optimizer.main_params, self.options)
        self._is_connected = False
        self._members: list[Member] = []  # in the last exchange
        self._exchange: Future[Round] | None = None  # in progress
        self._measured: dict[str, float] = {}  # of the last exchange
        # Parameters that several ranks of a replica hold, at different places: all must get the same bits.
        self._shared = {
            name
            for name, spec in trainer.specs.items()
            if (spec.tied and trainer.mesh.embedding_group.size > 1)
            or any(len(piece.tp_ranks) > 1 for piece in spec.pieces)
        }

    @classmethod
    def create(cls, trainer: Trainer) -> Self | None:
        """See :class:`Feature`."""
        return None if trainer.config.diloco.diloco_sync_interval is None else cls(trainer)

    def connect(self, wanted: int | None = None, store: Any = None) -> None:
        """Claim an index, which selects the samples of this replica; collective over its ranks.

        Args:
            wanted: index in the checkpoint to be loaded.
            store: of all replicas; None connects to ``diloco_server``.

        Raises:
            UserError: if no server answers, the other replicas have other options, or no index is free.
        """
        options, timeout = self.options, self.options.diloco_timeout
        if store is None:
            store = connect(str(options.diloco_server), timeout, read_secret(options.diloco_secret_file))
        replicas = Replicas(store, self.world.rank, self.world.size, options.diloco_replicas, timeout)
        required = options.diloco_replica is not None
        wanted = options.diloco_replica if required else wanted
        claim = partial(replicas.claim, wanted, required, shared_options(self.trainer.config, self.world.size))
        place: list[Any] = run_on_rank0(lambda: [claim(), replicas.id], self.world)
        replicas.index, replicas.id = place
        self.trainer.reader.use_stream(replicas.index)
        self.replicas, self._is_connected = replicas, True

    # ---- State

    def state_dict(self) -> Mapping[str, Any]:
        """See :class:`Component`."""
        return self.outer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See :class:`Component`."""
        self.outer.load_state_dict(state)

    def tensors(self) -> Kinds:
        """See :class:`Component`."""
        return self.outer.kinds()

    def prepare(self, manifest: Manifest) -> Sequence[str]:
        """Allocate the averaged gradients that the checkpoint has; see :class:`Component`."""
        prefix = f"optim.{GRAD}."
        self.outer.expect_grads({name.removeprefix(prefix) for name in manifest.tensors if name.startswith(prefix)})
        return ()

    def on_weights_loaded(self) -> None:
        """See :class:`Component`."""
        self.outer.reset()

    def before_save(self) -> None:
        """Wait for an exchange in progress, so that its result is part of the state; see :class:`Component`."""
        self.finish()

    def is_whole_after(self, error: Exception) -> bool:
        """Return True if the other replicas are lost; see :class:`Component`."""
        return isinstance(error, ReplicaError)

    # ---- In the training loop

    def on_step_end(self, metrics: StepMetrics) -> None:
        """Merge a round whose delay is over, and begin the one that is due."""
        trainer, options = self.trainer, self.options
        iteration, last = trainer.iteration, trainer.iteration == trainer.total_steps
        if (self._exchange is not None or self.outer.pending) and (last or iteration >= self._merge_at):
            self._merge(options.diloco_mix)
        if not last and iteration % (int(options.diloco_sync_interval or 1) // options.diloco_fragments):
            return
        trainer.optimizer.weights.wait()
        self._began = iteration, trainer.consumed_samples
        facts = {"starting": False, "rounds": self.outer.rounds, "position": [*self._began], "whole": last}
        delta = self.outer.gradients(self._names(facts))
        squared = torch.linalg.vector_norm(delta, dtype=torch.float64).square().to(trainer.device)
        facts["norm"] = math.sqrt(comm.all_reduce(squared, self.world).item())
        ready = None
        if delta.is_cuda:  # untested on GPUs
            delta, on_device = torch.empty(delta.shape, dtype=delta.dtype, pin_memory=True), delta
            delta.copy_(on_device, non_blocking=True)
            ready = torch.cuda.Event()
            ready.record()
        self._exchange = run_in_background(partial(self._synchronise, facts, delta, ready), "DiLoCo exchange")
        if last or options.diloco_delay == 0:
            self._merge(0.0 if last else options.diloco_mix)

    def on_stop(self, error: BaseException | None) -> None:
        """Free the index; the others need not wait for this replica."""
        if self._is_connected:
            self.replicas.leave()

    @property
    def _merge_at(self) -> int:
        began, _ = self.outer.position if self._exchange is None else self._began
        return began + self.options.diloco_delay

    def finish(self) -> None:
        """Wait for the exchange in progress, if any, and keep its result.

        Raises:
            ReplicaError: if the server is gone, or the others went on without this replica. The next round of the
                fragment then covers the steps of this one, too.
        """
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return
        began, lost = time.monotonic(), None
        try:
            done = exchange.result()
        except ReplicaError as error:
            lost = error
        anywhere = torch.tensor(float(lost is not None), device=self.trainer.device)
        if comm.all_reduce(anywhere, self.world, op="max").item():  # all ranks of this replica end alike
            raise lost or ReplicaError("another rank of this replica has lost the other replicas: start it again")
        excluded = left_out(done.members)
        if (reason := excluded.get(self.replicas.index)) is not None:
            raise NonFiniteError(
                f"DiLoCo round {self.outer.rounds + 1} leaves out this replica: {reason}; its weights are not saved: "
                "start it again, and it resumes its newest checkpoint and receives the outer weights"
            )
        self._keep(done)
        self.outer.position = self._began
        for index, reason in excluded.items():
            self.log.note(f"DiLoCo round {self.outer.rounds}: replica {index} is left out: {reason}")
        blocked = time.monotonic() - began
        before, self._members = set(self._members), done.members
        for members, what in ((before.difference(done.members), "left"), ({*done.members} - before, "joined")):
            if members:
                indices = listed(sorted(member.index for member in members))
                self.log.note(f"DiLoCo round {self.outer.rounds}: replica {indices} {what}")
        self._measured = {
            "diloco-members": len(done.members),
            "diloco-attempts": done.attempts,
            "diloco-seconds": done.seconds,
            "diloco-blocked-seconds": blocked,
            "diloco-sent-bytes": done.bytes,
        }

    def _keep(self, done: Round) -> None:
        """Keep averaged gradients for the merge."""
        self.outer.receive(done.names, done.average)
        self.outer.rounds += 1

    def _merge(self, mix: float) -> None:
        self.finish()
        norm = self._outer_gradient_norm()
        self.trainer.optimizer.weights.wait()
        self.outer.step(mix)
        self.trainer.optimizer.write_weights()
        self.log.log({"diloco-round": self.outer.rounds, **self._measured, "diloco-outer-grad-norm": norm})
        self._measured = {}

    def _outer_gradient_norm(self) -> float:
        """Return the norm of the averaged outer gradients of all ranks; collective over them. Waits for the device."""
        trainer, total = self.trainer, torch.zeros((), dtype=torch.float64)
        for name, share in trainer.buckets.counted_shards().items():
            if name in self.outer.grads:
                start = trainer.buckets.shards[name].start
                mine = self.outer.grads[name].view(-1)[share.start - start : share.stop - start]
                total += mine.double().square().sum().cpu()
        return float(comm.all_reduce(total.to(trainer.device), self.world).sqrt())

    # ---- Starting

    def before_load(self, source: ResumeSource) -> Sequence[str]:
        """See :class:`Component`."""
        if not self.trainer.config.training.skip_train:
            self.connect(run_on_rank0(lambda: stream_of(source), self.world))
        return ()

    def on_start(self, stopped: Callable[[], bool]) -> Sequence[str]:
        """See :class:`Component`."""
        trainer = self.trainer
        if trainer.config.training.skip_train or trainer.iteration >= trainer.total_steps:
            return ()
        with trainer.clock("joining"):
            return self.join(stopped)

    def join(self, stopped: Callable[[], bool] = lambda: False) -> list[str]:
        """Take the place of this replica in the run; collective over its ranks. Call when the checkpoint is loaded.

        Returns when all replicas that start are there, or, if others are training, after their next synchronisation.

        Args:
            stopped: polled by the first rank meanwhile; True gives up.

        Returns:
            Notes.

        Raises:
            ReplicaError: if the server is gone, or the replica with the outer weights died while it sent them.
        """
        trainer, outer = self.trainer, self.outer
        if outer.rounds == 0:
            outer.position = trainer.iteration, trainer.consumed_samples
        tensors = {f"{kind} {name}": value for kind, found in outer.kinds().items() for name, value in found.items()}
        digest = torch.tensor([hash_of(tensors)], device=trainer.device)
        facts = {
            "starting": True,
            "rounds": outer.rounds,
            "position": [*outer.position],
            "whole": False,
            "pending": outer.pending,
            "digest": int(comm.all_reduce(digest, self.world).item()),
        }
        if self.world.rank == 0:
            wait = f"{self.options.diloco_timeout:g} seconds for replicas that start"
            echo(f"DiLoCo replica {self.replicas.index}: waiting for the next synchronisation, or up to {wait}")
        done = self._synchronise(facts, torch.zeros(0), None, stopped)
        if not done.members:
            return ["gave up joining the other replicas"]
        self._members = done.members
        others = [member.index for member in done.members if member.index != self.replicas.index]
        peers = f"with replica {listed(others)}" if others else "alone"
        notes = [f"DiLoCo replica {self.replicas.index} of {self.options.diloco_replicas}, {peers}"]
        source = source_of(done.members, left_out(done.members))
        if not self._is_behind(source, self.replicas.index, facts):
            return notes
        outer.rounds, outer.position = source.facts["rounds"], tuple(source.facts["position"])
        outer.pending = source.facts.get("pending", False)
        trainer.optimizer.main_params.set(outer.params)
        trainer.use_loaded_weights(by=self)
        trainer.start_at(*outer.position, trainer.data.segments, trainer.progress.batches_since)
        notes.append(f"received the outer weights of step {trainer.iteration} from replica {source.index}")
        if done.names or not source.facts["starting"]:
            self._keep(done)
            if source.facts["whole"] or self.options.diloco_delay == 0:
                outer.step(0.0)
                trainer.use_loaded_weights(by=self)
        return notes

    @staticmethod
    def _is_behind(source: Member, index: int, facts: Mapping[str, Any]) -> bool:
        """Return True if a starting replica with ``facts`` receives the outer state of ``source``."""
        if not facts["starting"] or source.index == index:
            return False
        return any(facts[name] != source.facts.get(name) for name in ("rounds", "digest"))

    # ---- The exchange, in a thread

    def _synchronise(
        self,
        facts: dict[str, Any],
        delta: Tensor,
        ready: torch.cuda.Event | None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Round:
        """Exchange until an attempt is committed; without members if ``stopped``."""
        began, attempts, replicas = time.monotonic(), 0, self.replicas
        replicas.meter.pop_bytes_sent()
        if ready is not None:
            ready.synchronize()
        while True:
            attempts += 1
            members = replicas.agree(facts, stopped)
            if not members:
                return Round([], [], delta, 0.0, attempts, 0.0)
            found = replicas.exchange(members, partial(self._communicate, members, facts, delta), _is_finite)
            if found is not None:
                sent = sum(replicas.meter.pop_bytes_sent().values())
                return Round(members, *found, time.monotonic() - began, attempts, sent)

    def _communicate(self, members: Sequence[Member], facts: dict[str, Any], delta: Tensor) -> tuple[list[str], Tensor]:
        """Return averaged outer gradients and their names, after a replica that is behind has received the rest."""
        excluded, training = left_out(members), [member.index for member in members if not member.facts["starting"]]
        if training and len(excluded) == len(training):
            reasons = "; ".join(f"replica {index}: {excluded[index]}" for index in training)
            raise NonFiniteError(
                f"DiLoCo leaves out all replicas, {reasons}: start them again from earlier checkpoints"
            )
        source, group = source_of(members, excluded), self.replicas.group(members)
        behind = [self._is_behind(source, member.index, member.facts) for member in members]
        if any(behind):
            if behind[group.rank]:
                facts["rounds"] = -1  # until an attempt is committed, it has neither its own state nor another's
                pending = source.facts.get("pending", False)
                self.outer.expect_grads(self.outer.fragment(source.facts["rounds"] - 1) if pending else ())
            targets = [rank for rank, is_behind in enumerate(behind) if is_behind]
            tensors = [kind[name] for kind in self.outer.kinds().values() for name in sorted(kind)]
            copy_to_peers(tensors, group, members.index(source), targets)
        if source.facts["starting"]:
            return [], delta
        names = self._names(source.facts)
        if facts["starting"]:
            delta = self.outer.gradients(names).cpu().zero_()
        elif self.replicas.index in excluded:
            delta = torch.zeros_like(delta)
        exact = sum(self.outer.params[name].numel() for name in names if name in self._shared)
        if not self.options.diloco_int8:
            exact = len(delta)
        rounded, kept = delta.split([len(delta) - exact, exact])
        key = source.facts["rounds"] << 20
        total = torch.cat([self._sum(rounded, group, key), self._sum(kept, group, None)])
        return names, total.div_(len(training) - len(excluded))

    def _names(self, facts: Mapping[str, Any]) -> list[str]:
        """Return the parameters of a round; those that several ranks hold come last."""
        names = [*self.outer.params] if facts["whole"] else self.outer.fragment(facts["rounds"])
        return sorted(names, key=lambda name: name in self._shared)

    def _sum(self, x: Tensor, group: Group, key: int | None) -> Tensor:
        """Return the sum over members, in their order; rounded to int8 with a ``key``."""
        total = torch.empty_like(x)
        for number, (chunk, out) in enumerate(zip(*(y.split(CHUNK_BYTES // x.itemsize) for y in (x, total)))):
            if group.size == 1 or not len(chunk):
                out.copy_(chunk)
            elif key is not None:
                out.copy_(int8_all_reduce(chunk, group, torch.tensor(key + number)))
            else:
                out.copy_(ordered_sum(chunk, group))
        return total


def left_out(members: Sequence[Member]) -> dict[int, str]:
    """Return the indices of the members whose outer gradients are not averaged, and why.

    Every rank of every member has the same ``members``, and returns the same. With two replicas, the median of the
    others is the norm of the other one. Norms of zero, of replicas that have skipped all updates, are not compared.
    """
    norms = {member.index: float(member.facts["norm"]) for member in members if "norm" in member.facts}
    finite = {index: norm for index, norm in norms.items() if math.isfinite(norm)}
    found = {index: "its outer gradient is not finite" for index in norms if index not in finite}
    for index, norm in finite.items():
        others = [other for each, other in finite.items() if each != index and other]
        if others and norm > ABSURD_NORM * (median := statistics.median(others)):
            found[index] = f"its outer gradient has a norm of {norm:.3g}, {norm / median:.3g} times that of the others"
    return found


def source_of(members: Sequence[Member], excluded: Container[int] = ()) -> Member:
    """Return the member whose outer state all others have or receive; one that is not ``excluded``, if possible.

    Raises:
        ReplicaError: if no member has a state.
    """

    def progress(member: Member) -> tuple[bool, int, list[int], bool]:
        facts = member.facts
        return not facts["starting"], facts["rounds"], facts["position"], member.index not in excluded

    best = max(members, key=progress)
    if best.facts["rounds"] < 0:
        raise ReplicaError(
            "the replica with the outer weights died while it sent them: start again, from the checkpoints"
        )
    return best


def _is_finite(found: tuple[list[str], Tensor]) -> bool:
    return math.isfinite(torch.linalg.vector_norm(found[1], dtype=torch.float64).item())
