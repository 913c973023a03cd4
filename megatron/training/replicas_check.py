"""Check that all copies of the weights are bitwise equal.

Copies are on data-parallel ranks, and within a replica: key/value heads and other parameters that tensor-parallel ranks
share, and a tied weight of two pipeline stages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.config.problems import Problem, UserError
from megatron.parallel import comm
from megatron.parallel.comm import Group
from megatron.parallel.ownership import Share, slots
from megatron.parallel.shard import Box, Piece
from megatron.training.nonfinite import enumerate_ranks
from megatron.training.setup import Trainer

BLOCK = 1 << 22
"""Elements that are hashed at a time, to limit memory."""

_WORD_DTYPES = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_STRIDE = 0x1E3779B97F4A7C15


@dataclass(frozen=True)
class Copy:
    """One rank's copy of a part of a parameter."""

    what: str  # layers.0.mlp.linear_fc1.weight, or "the master of" it
    place: Box  # in the global parameter
    digest: int  # of its bits


def check_replicas(trainer: Trainer) -> None:
    """Compare all copies of weights and main parameters. Collective over all ranks.

    Raises:
        UserError: on every rank if copies differ, with the step, the first parameter and the ranks.

    """
    by_rank = comm.all_gather_objects(unequal(trainer), trainer.mesh.world)
    names = list(dict.fromkeys(copy.what for copies in by_rank for copy in copies))
    if not names:
        return
    iteration = trainer.iteration
    where = differing(names[0], by_rank)
    more = f"; copies of {len(names) - 1} more differ too" if len(names) > 1 else ""
    sentence = f"copies of the weights differ after step {iteration}: {names[0]} {where}{more}"
    last_check = max(0, iteration - (trainer.config.logging.check_weight_hash_across_dp_replicas_interval or 0))
    fix = f"the same command with --ckpt-step N, N at most {last_check}, the step of the last check that passed"
    raise UserError([Problem("E707", sentence, (fix,))])


def unequal(trainer: Trainer) -> list[Copy]:
    """Return this rank's copies that differ from another rank's. Collective over all ranks."""
    trainer.optimizer.weights.wait()
    parts = []
    part_digests = []
    for what, piece, x, groups in _copied_parts(trainer):  # some main parameters are computed: hash them one by one
        parts.append((what, piece, groups))
        part_digests.append(digest(x))
    digests = torch.stack(part_digests)
    parts_by_group: dict[tuple[int, ...], tuple[Group, list[int]]] = {}
    for i, (*_, groups) in enumerate(parts):
        for group in groups:
            parts_by_group.setdefault(group.ranks, (group, []))[1].append(i)
    differing_parts: set[int] = set()
    for _, (group, members) in sorted(parts_by_group.items(), key=lambda item: (-len(item[0]), item[0])):
        indices = torch.tensor(members, device=digests.device)
        mine = digests[indices]
        copies = comm.all_gather(mine, group).view(group.size, -1)
        differing_parts.update(indices[(copies != mine).any(0)].tolist())
    return [
        Copy(what, piece.place, int(digests[i])) for i, (what, piece, _) in enumerate(parts) if i in differing_parts
    ]


def _copied_parts(trainer: Trainer) -> Iterator[tuple[str, Piece, Tensor, list[Group]]]:
    """Yield this rank's parts of all weights and main parameters, with the groups whose ranks all hold a copy."""
    mesh = trainer.mesh
    for name, spec in trainer.specs.items():
        weight = trainer.params[name].detach()
        master = trainer.optimizer.masters.get(name)
        tensors = [(name, weight, Share(0, weight.numel()), mesh.group(*spec.reduce_axes))]
        if master is not None and master.dtype != weight.dtype:
            share = trainer.buckets.shares[name]
            tensors.append((f"the master of {name}", master, share, mesh.copies(*spec.reduce_axes)))
        for what, tensor, share, data_parallel in tensors:
            for slot in slots(spec, share):
                groups = [data_parallel, mesh.sharers(slot.piece.replicas), *([mesh.ends] if spec.tied else [])]
                yield what, slot.piece, slot.of(tensor), [group for group in groups if group.size > 1]


def differing(what: str, by_rank: Sequence[Sequence[Copy]]) -> str:
    """Describe on which ranks copies of a parameter differ from the majority, if there is a majority."""
    ranks_by_place: dict[Box, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, copies in enumerate(by_rank):
        for copy in copies:
            if copy.what == what:
                ranks_by_place[copy.place][copy.digest].append(rank)
    odd: list[int] = []
    for ranks_by_digest in ranks_by_place.values():
        sizes = [len(ranks) for ranks in ranks_by_digest.values()]
        tied = sizes.count(max(sizes)) > 1
        odd += [rank for ranks in ranks_by_digest.values() if tied or len(ranks) < max(sizes) for rank in ranks]
    holders = sorted(rank for rank, copies in enumerate(by_rank) if any(copy.what == what for copy in copies))
    majority = [rank for rank in holders if rank not in odd]
    minority = enumerate_ranks(sorted(set(odd)))
    if majority:
        return f"on {minority} differs from {enumerate_ranks(majority)}"
    return f"is not the same on {minority}"


@torch.no_grad()
def digest(x: Tensor) -> Tensor:
    """Return a 64-bit hash of the bits of ``x``, an int64 scalar on its device.

    The hash is the sum, modulo 2^64, of the elements times odd numbers that depend on their positions. A change of one
    element always changes it, and the order of summation does not matter.
    """
    words = x.contiguous().flatten().view(_WORD_DTYPES[x.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for start in range(0, words.numel(), BLOCK):
        block = words[start : start + BLOCK].long()
        position = torch.arange(start + 1, start + 1 + block.numel(), device=x.device) * _STRIDE
        total += (block * ((position ^ (position >> 29)) * _STRIDE | 1)).sum()
    return total
