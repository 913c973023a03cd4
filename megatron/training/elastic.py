"""Elastic data parallelism: replicas that sum their gradients in every step, and go on without one that is lost.

Each replica is a run of its own, with its own torch.distributed world and any layout. In a step, the micro-batches of
the global batch are dealt to the replicas in turn; after the reduction inside each, the same ranks of all replicas sum
gradients times tokens and divide by all tokens, so every replica takes the same update. A checkpoint is one of an
ordinary run: the first replica writes it.

Nothing changes before all ranks of all members have the sums. If a member is lost before that, the step is aborted, and
:class:`ElasticReplica` makes further attempts of the same step with those that are left
(:mod:`megatron.training.replicas.members`): with ``--elastic-batch keep`` they first compute the micro-batches that
no member has. A replica that starts is filled by another one between two steps.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Self

import torch
from torch import Tensor

from megatron.checkpoint.lease import Lease, acquire_lease
from megatron.checkpoint.location import parse_location
from megatron.config.batch import Origin
from megatron.config.launch import JobStart
from megatron.config.text import echo, listed
from megatron.distributed import comm
from megatron.distributed.launch import is_peer_lost, run_on_rank0
from megatron.training.checkpoint_contents import local_tensors, run_state
from megatron.training.component import CheckpointWriter, Component
from megatron.training.loggers.base import Metrics
from megatron.training.replicas.members import Member, ReplicaError, Replicas, ServerLostError, connect
from megatron.training.replicas.store import read_secret
from megatron.training.replicas.transfer import CHUNK_BYTES, copy_to_peers, hash_of, ordered_sum, shared_options
from megatron.training.resume_source import ResumeSource
from megatron.training.step import compute_gradients, weigh_batch
from megatron.training.trainer import Trainer

DIGEST_PARTS = 4
"""Of 16 bits each, of a digest of samples: their sums are exact in fp64."""


@dataclass
class Contribution:
    """What a rank adds to the sums of a step, in host memory."""

    # Gradients of its shards times tokens, one flat tensor for each bucket.
    gradients: list[Tensor]
    # fp64: tokens, losses times tokens, parts of the digest of the samples.
    sums: Tensor
    # Numbers of the micro-batches, the same on all ranks of a replica.
    numbers: list[int]

    def add(self, other: Contribution) -> None:
        """Add further micro-batches."""
        for mine, theirs in zip(self.gradients, other.gradients):
            mine += theirs
        self.sums += other.sums
        self.numbers += other.numbers


class ElasticReplica(Component):
    """This replica among the others: sums, agreement, filling, and who writes checkpoints."""

    pauses = False

    replicas: Replicas
    """All replicas, set by :meth:`before_load`."""

    def __init__(self, trainer: Trainer) -> None:
        """Know no other replica yet; see :meth:`before_load`."""
        self.trainer, self.options, self.world = trainer, trainer.config.elastic, trainer.mesh.world
        self.count = int(self.options.elastic_replicas or 1)
        self._is_connected = False
        self._members: list[Member] = []  # of the last commit
        self._is_open = False  # a replica waits to join after this step
        self._read_before = 0  # digest of what was read before this step
        self._lease: Lease | None = None
        self._resources = ExitStack()
        # Since the last log line: steps, seconds in exchanges, and attempts that were aborted; samples left out in all.
        self._steps, self._seconds, self._aborted, self._left_out = 0, 0.0, 0, 0

    @classmethod
    def create(cls, trainer: Trainer) -> Self | None:
        """See :class:`Feature`."""
        return None if trainer.config.elastic.elastic_replicas is None else cls(trainer)

    # ---- Starting

    def before_load(self, source: ResumeSource) -> Sequence[str]:
        """Claim an index; see :class:`Component`.

        Raises:
            UserError: if no server answers, the other replicas have other options, or no index is free.
        """
        options, timeout = self.options, self.options.elastic_timeout
        if self.trainer.config.training.skip_train:
            return ()
        store = connect(
            str(options.elastic_server), timeout, read_secret(options.elastic_secret_file, FLAGS), flags=FLAGS
        )
        replicas = Replicas(store, self.world.rank, self.world.size, self.count, timeout, flags=FLAGS)
        wanted = options.elastic_replica
        same = shared_options(self.trainer.config, self.world.size)
        same |= {"elastic_replicas": self.count, "elastic_batch": options.elastic_batch}
        claim = partial(replicas.claim, wanted, wanted is not None, same)
        place: list[Any] = run_on_rank0(lambda: [claim(), replicas.id], self.world)
        replicas.index, replicas.id = place
        replicas.watch()
        self.replicas, self._is_connected = replicas, True
        return ()

    def on_start(self, stopped: Callable[[], bool]) -> Sequence[str]:
        """Join the other replicas, and be filled by one that is further; see :class:`Component`.

        Raises:
            ReplicaError: if the server or the replica that sent its state is lost, or the run has ended.
        """
        trainer = self.trainer
        if not self._is_connected or trainer.iteration >= trainer.total_steps:
            return ()
        replicas = self.replicas
        if run_on_rank0(replicas.has_finished, self.world):
            raise ReplicaError("the other replicas have taken the last step: nothing is left to do")
        if self.world.rank == 0:
            echo(f"elastic replica {replicas.index}: waiting for the others", flush=True)
        begun = time.monotonic()
        run = run_on_rank0(lambda: trainer.progress.run_id or secrets.token_hex(4), self.world)
        digest = torch.tensor([hash_of(local_tensors(trainer))], device=trainer.device)
        digest = comm.all_reduce(digest, self.world)
        facts = self._facts(starting=True, run=run, digest=int(digest.item()))
        source = self._synchronise(facts, stopped)
        if source is None:
            return ["gave up joining the other replicas"]
        if self.world.rank == 0:
            replicas.forget_knock()
        others = [member.index for member in self._members if member.index != replicas.index]
        peers = f"with replica {listed(others)}" if others else "alone"
        note = f"elastic replica {replicas.index} of {self.count}, {peers}"
        if not facts["whole"]:
            seconds = time.monotonic() - begun
            note += f": filled by replica {source.index} after step {trainer.iteration}, in {seconds:.1f} seconds"
        elif not trainer.progress.run_id:
            trainer.progress.run_id = source.facts["run"]
        return [note]

    def on_stop(self, error: BaseException | None) -> None:
        """Leave; the others need not wait for this replica."""
        self._resources.close()
        if self._is_connected:
            self.replicas.leave()

    # ---- A step

    def on_step_start(self) -> None:
        """Take in a replica that waits, between two steps; see :class:`Component`."""
        if self._is_open:
            self._is_open = False
            if self.replicas.index == self._members[0].index and self.world.rank == 0:
                self.replicas.forget_knock()
            self.trainer.optimizer.weights.wait()
            self._synchronise(self._facts())
        self._read_before = self.trainer.reader.digest_read

    def on_gradients(self, losses: dict[str, Tensor], tokens: Tensor) -> None:
        """Sum gradients and losses over all replicas; see :class:`Component`.

        Raises:
            ReplicaError: if the server is gone, or the others went on without this replica.
        """
        trainer, replicas, began = self.trainer, self.replicas, time.monotonic()
        mine = self._contribution(losses, tokens, self._numbers(len(trainer.reader.step_places())))
        trainer.reader.digest_read = self._read_before  # an error leaves the state after the last step
        total = None
        try:
            total = self._sum(mine, self._members)
        except ReplicaError:
            raise
        except RuntimeError as error:
            replicas.break_group()
            if not is_peer_lost(error):
                raise
        failed = comm.all_reduce(torch.tensor(float(total is None), device=trainer.device), self.world, op="max")
        whole, step = not failed.item(), trainer.iteration + 1
        decision = run_on_rank0(lambda: replicas.settle(step, self._members, whole), self.world)
        if decision == "abort":
            replicas.break_group()
            self._aborted += 1
            total = self._repeat(mine)
        self._is_open = decision != "commit"  # after an abort, others may wait to return
        if total is None:
            raise RuntimeError("a step was committed without the sums of this rank")
        self._check_samples(total)
        self._apply(total, losses)
        self._steps += 1
        self._seconds += time.monotonic() - began

    def _repeat(self, mine: Contribution) -> Contribution:
        """Attempt the step with those that are left until it is committed; return the sums."""
        facts = self._facts(within_step=True)
        while True:
            facts["numbers"] = mine.numbers
            members = self.replicas.agree(facts)
            total = self.replicas.exchange(members, partial(self._complete, mine, members))
            if total is not None:
                self._accept(members)
                return total
            self._aborted += 1

    def _complete(self, mine: Contribution, members: list[Member]) -> Contribution:
        """Compute this replica's share of the missing micro-batches, and return the sums over the members."""
        if self.options.elastic_batch == "keep":
            self._compute_missing(members, mine)
        return self._sum(mine, members)

    def _compute_missing(self, members: Sequence[Member], mine: Contribution) -> None:
        """Compute this replica's share of the micro-batches that no member has."""
        trainer = self.trainer
        held = [number for member in members for number in member.facts["numbers"]]
        missing = sorted(set(range(len(trainer.reader.step_places()))).difference(held))
        if len(set(held)) < len(held):
            raise ReplicaError("two replicas have computed the same micro-batch")
        place = [member.index for member in members].index(self.replicas.index)
        if share := missing[place :: len(members)]:
            batches = trainer.complete(trainer.reader.read_more(share))
            tokens, loss_grad = weigh_batch(trainer, batches, trainer.scaler.scale.clone())
            losses = compute_gradients(trainer, batches, loss_grad, tokens)
            mine.add(self._contribution(losses, tokens, share))
            trainer.reader.digest_read = self._read_before

    def _numbers(self, micro_batches: int) -> list[int]:
        """Return the micro-batches of a step that this replica computes, given how many there are."""
        index = self.replicas.index
        if self.options.elastic_batch == "shrink":
            return [*range(index, micro_batches, self.count)]
        place = [member.index for member in self._members].index(index)
        return [*range(place, micro_batches, len(self._members))]

    @torch.no_grad()
    def _contribution(self, losses: Mapping[str, Tensor], tokens: Tensor, numbers: list[int]) -> Contribution:
        """Return what this rank has computed of micro-batches; gradients and losses are means over ``tokens``."""
        weight = tokens.double().clamp(min=1.0)
        values = torch.stack([tokens.double(), *(losses[name].double() * weight for name in sorted(losses))])
        digest = (self.trainer.reader.digest_read - self._read_before) % 2**64
        parts = [float(digest >> 16 * place & 0xFFFF) for place in range(DIGEST_PARTS)]
        sums = torch.cat([values.cpu(), torch.tensor(parts, dtype=torch.float64)])
        shards = [bucket.shard for bucket in self.trainer.buckets.buckets]
        return Contribution([(shard * weight.to(shard.dtype)).cpu() for shard in shards], sums, numbers)

    @torch.no_grad()
    def _sum(self, mine: Contribution, members: list[Member]) -> Contribution:
        """Return the sums over the members, the same bits on all ranks; ``mine`` stays as it is."""
        group = self.replicas.group(members)
        sums = comm.all_gather(mine.sums, group).view(group.size, -1)
        gradients = [
            torch.cat([ordered_sum(chunk, group) for chunk in flat.split(CHUNK_BYTES // flat.itemsize)])
            for flat in mine.gradients
        ]
        return Contribution(gradients, torch.stack([*sums]).sum(0), [])

    def _check_samples(self, total: Contribution) -> None:
        """Check that the samples of the step are those of the stream, and count them as read.

        Raises:
            RuntimeError: if a sample is missing, or was used twice.
        """
        reader = self.trainer.reader
        parts = total.sums[-DIGEST_PARTS:].tolist()
        digest = sum(int(part) << 16 * place for place, part in enumerate(parts)) % 2**64
        places = reader.step_places()
        expected = reader.digest_of(places) % 2**64
        if self.options.elastic_batch == "shrink":
            present = {member.index for member in self._members}
            used = [p for number, p in enumerate(places) if number % self.count in present]
            self._left_out += sum(map(len, places)) - sum(map(len, used))
            found = reader.digest_of(used) % 2**64
        else:
            found = expected
        if digest != found:
            raise RuntimeError(f"step {self.trainer.iteration + 1}: the replicas have not used the samples of the step")
        reader.digest_read = self._read_before + expected

    @torch.no_grad()
    def _apply(self, total: Contribution, losses: dict[str, Tensor]) -> None:
        """Put the means over all replicas in the place of this replica's."""
        tokens, *values = total.sums[:-DIGEST_PARTS].tolist()
        divisor = max(tokens, 1.0)
        for name, value in zip(sorted(losses), values):
            losses[name] = torch.full_like(losses[name], value / divisor)
        for bucket, gradient in zip(self.trainer.buckets.buckets, total.gradients):
            bucket.shard.copy_(gradient.div_(divisor))

    # ---- Agreement between two steps

    def _facts(self, **more: Any) -> dict[str, Any]:
        """Return what this replica arrives with."""
        position = [self.trainer.iteration, self.trainer.consumed_samples]
        return {"starting": False, "whole": True, "position": position, **more}

    def _synchronise(self, facts: dict[str, Any], stopped: Callable[[], bool] = lambda: False) -> Member | None:
        """Agree on the members of the next steps, and fill those that are behind; collective over this replica.

        Returns:
            The member that the others are equal to now; None if ``stopped``.
        """
        replicas, whole_state = self.replicas, cache(partial(run_state, self.trainer))
        while members := replicas.agree(facts, stopped):
            source = source_of(members)
            behind = [is_behind(member, source) for member in members]
            # Collective in this replica, whose ranks may fail at different places from here on; once, because the
            # others wait for it in vain if it takes longer than they wait for a connection.
            state = whole_state() if any(behind) and source.id == replicas.id else {}
            filled = replicas.exchange(members, partial(self._fill, state, members, source, behind, facts))
            if filled is not None:
                if not facts["whole"]:
                    self._adopt(*filled)
                self._accept(members)
                return source
        return None

    def _fill(
        self,
        state: Mapping[str, Any],
        members: list[Member],
        source: Member,
        behind: Sequence[bool],
        facts: dict[str, Any],
    ) -> tuple[Mapping[str, Any], Mapping[str, Tensor]]:
        """Return the ``state`` of ``source``, and copy its tensors to those that are behind."""
        group, tensors = self.replicas.group(members), local_tensors(self.trainer)
        if any(behind):
            facts["whole"] &= not behind[group.rank]  # until an attempt is committed
            state = comm.all_gather_objects(state, group)[members.index(source)]
            targets = [rank for rank, is_one in enumerate(behind) if is_one]
            copy_to_peers((tensors[name] for name in sorted(tensors)), group, members.index(source), targets)
        return state, tensors

    def _adopt(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Continue from the state and the tensors of another replica."""
        trainer, progress, since = self.trainer, self.trainer.progress, state["batches_since"]
        trainer.start_at(
            state["iteration"],
            state["consumed_samples"],
            state["data"]["stretches"],
            (since["iteration"], since["consumed_samples"]),
            Origin.from_state(state),
        )
        progress.evaluated, progress.losses = dict(state["evaluated"]), dict(state["losses"])
        progress.run_id = state["run_id"]
        trainer.optimizer.main_params.set({name: tensors[name] for name in trainer.optimizer.main_params})
        trainer.optimizer.write_weights()
        for component in trainer.components:
            if component.name and (own := state.get(component.name)):
                component.load_state_dict(own)

    def _accept(self, members: list[Member]) -> None:
        """Deal the micro-batches of the next steps to these members."""
        before, self._members = self._members, members
        self.trainer.reader.use_part(self._numbers)
        if not before:
            return
        step = self.trainer.iteration
        left, joined = set(before).difference(members), set(members).difference(before)
        present = f"replica{'s' * (len(members) > 1)} {listed([each.index for each in members])}"
        alerts = self.replicas.index == members[0].index
        for found, what, kind in ((left, "left", "replica-lost"), (joined, "joined", "replica-back")):
            for member in sorted(found, key=lambda each: each.index):
                text = f"elastic replica {member.index} {what} after step {step}; the run has {present}"
                self.log.warning(text, kind, alert=alerts)

    # ---- Checkpoints, the log and the end

    def writes(self, saver: CheckpointWriter) -> bool:
        """Return True on the first replica, which holds the lease on the folder; see :class:`Component`."""
        if not self._is_connected:
            return True
        replicas = self.replicas
        if not self._members and replicas.index:  # started after the last step, so it has not joined the others
            return False
        if self._members and self.trainer.iteration >= self.trainer.total_steps:  # wait for the replica that saves
            left = run_on_rank0(lambda: replicas.wait_for_first(self._members), self.world)
            self._members = self._members[len(self._members) - left :]
        if self._members and replicas.index != self._members[0].index:
            self._resources.close()  # the first one supersedes this lease
            self._lease = saver.lease = None
            return False
        save = self.trainer.config.checkpoint.save
        if self._lease is None and save is not None:
            folder = parse_location(save)

            def acquire() -> list[Any]:
                start = JobStart(group=f"elastic {self.trainer.progress.run_id}", attempt=replicas.series)
                return self._resources.enter_context(acquire_lease(folder, start=start)).to_json()

            self._lease = Lease.from_json(folder, run_on_rank0(acquire, self.world))
            saver.lease = self._lease
        return True

    def is_whole_after(self, error: Exception) -> bool:
        """See :class:`Component`."""
        return isinstance(error, ServerLostError)

    def metrics(self) -> Metrics:
        """See :class:`Component`."""
        steps = max(1, self._steps)
        found: dict[str, Any] = {
            "elastic-replicas": len(self._members),
            "elastic-seconds": self._seconds / steps,
            "elastic-aborted": self._aborted,
        }
        if self.options.elastic_batch == "shrink":
            found["elastic-left-out-samples"] = self._left_out
        self._steps, self._seconds, self._aborted = 0, 0.0, 0
        return found

    def on_iteration_end(self) -> None:
        """Record that the last step was taken and, by its writer, saved; see :class:`Component`."""
        if self.trainer.iteration >= self.trainer.total_steps:
            run_on_rank0(self.replicas.finish, self.world)


FLAGS = "--elastic"
"""Beginning of the options of these replicas."""


def source_of(members: Sequence[Member]) -> Member:
    """Return the member whose state all others have or receive.

    Raises:
        ReplicaError: if no member has a state.
    """
    best = max(members, key=lambda m: (m.facts["whole"], not m.facts["starting"], m.facts["position"], -m.index))
    if not best.facts["whole"]:
        raise ReplicaError("the replica that sent its state died: start again, from the checkpoint")
    return best


def is_behind(member: Member, source: Member) -> bool:
    """Return True if a member that starts needs the state of ``source``."""
    names = "starting", "whole", "position", "digest"
    return bool(member.facts["starting"]) and any(member.facts.get(n) != source.facts.get(n) for n in names)
