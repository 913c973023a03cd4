"""Whether all copies of the weights are equal to the bit: those of data-parallel replicas and those inside one.

Inside one are shared key/value heads, what tensor-parallel ranks repeat, and a tied weight of two pipeline stages.
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
"""Words that are hashed at a time, so that little memory is needed for it."""

_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_STRIDE = 0x1E3779B97F4A7C15


@dataclass(frozen=True)
class Copy:
    """What one rank holds of a parameter, and other ranks too.

    Attributes:
        what: ``layers.0.mlp.linear_fc1.weight``, or ``master of`` it.
        place: in the global parameter.
        digest: of its bits.
    """

    what: str
    place: Box
    digest: int


def check_replicas(trainer: Trainer) -> None:
    """Compare all copies of weights and masters; collective over all ranks.

    Raises:
        UserError: on every rank, naming the step, the first parameter and the ranks, when copies differ.

    """
    t = trainer
    everywhere = comm.all_gather_objects(unequal(t), t.mesh.world)
    names = list(dict.fromkeys(copy.what for copies in everywhere for copy in copies))
    if not names:
        return
    where = differing(names[0], everywhere)
    more = f"; so do copies of {len(names) - 1} more" if len(names) > 1 else ""
    since = t.iteration - (t.config.logging.check_weight_hash_across_dp_replicas_interval or 0)
    sentence = f"copies of the weights differ after step {t.iteration}: {names[0]} {where}{more}"
    fix = f"the same command with --ckpt-step N, a checkpoint of step {max(0, since)} at most, when all were equal"
    raise UserError([Problem("E707", sentence, (fix,))])


def unequal(trainer: Trainer) -> list[Copy]:
    """This rank's pieces of which a peer holds another copy; collective over all ranks."""
    trainer.optimizer.weights.wait()
    held, found_digests = [], []
    for what, piece, x, groups in _held(trainer):  # one master at a time: some are made for the purpose
        held.append((what, piece, groups))
        found_digests.append(digest(x))
    digests = torch.stack(found_digests)
    shared: dict[tuple[int, ...], tuple[Group, list[int]]] = {}
    for i, (*_, groups) in enumerate(held):
        for group in groups:
            shared.setdefault(group.ranks, (group, []))[1].append(i)
    found: set[int] = set()
    for _, (group, indices) in sorted(shared.items(), key=lambda item: (-len(item[0]), item[0])):
        places = torch.tensor(indices, device=digests.device)
        mine = digests[places]
        copies = comm.all_gather(mine, group).view(group.size, -1)
        found.update(places[(copies != mine).any(0)].tolist())
    return [Copy(what, piece.place, int(digests[i])) for i, (what, piece, *_) in enumerate(held) if i in found]


def _held(trainer: Trainer) -> Iterator[tuple[str, Piece, Tensor, list[Group]]]:
    """What this rank holds of every weight, and of every master, each with the groups in which all ranks hold it."""
    t = trainer
    for name, spec in t.specs.items():
        weight, master = t.params[name].detach(), t.optimizer.masters.get(name)
        tensors = [(name, weight, Share(0, weight.numel()), t.mesh.group(*spec.reduce_axes))]
        if master is not None and master.dtype != weight.dtype:
            tensors.append((f"the master of {name}", master, t.buckets.shares[name], t.mesh.copies(*spec.reduce_axes)))
        for what, tensor, share, replicas in tensors:
            for slot in slots(spec, share):
                groups = [replicas, t.mesh.sharers(slot.piece.replicas), *([t.mesh.ends] if spec.tied else [])]
                yield what, slot.piece, slot.of(tensor), [group for group in groups if group.size > 1]


def differing(what: str, everywhere: Sequence[Sequence[Copy]]) -> str:
    """Where copies of a parameter differ: on which ranks they are not what most have, if most have the same."""
    ranks_by_place: dict[Box, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, copies in enumerate(everywhere):
        for copy in copies:
            if copy.what == what:
                ranks_by_place[copy.place][copy.digest].append(rank)
    odd: list[int] = []
    for ranks_by_digest in ranks_by_place.values():
        sizes = [len(ranks) for ranks in ranks_by_digest.values()]
        tied = sizes.count(max(sizes)) > 1
        odd += [rank for ranks in ranks_by_digest.values() if tied or len(ranks) < max(sizes) for rank in ranks]
    everyone = sorted(rank for rank, copies in enumerate(everywhere) if any(copy.what == what for copy in copies))
    others = [rank for rank in everyone if rank not in odd]
    here = enumerate_ranks(sorted(set(odd)))
    return f"on {here} is not what it is on {enumerate_ranks(others)}" if others else f"is not the same on {here}"


@torch.no_grad()
def digest(x: Tensor) -> Tensor:
    """64 bits made of the bits of ``x`` and their places, an int64 scalar on its device.

    The sum, modulo 2^64, of the words times odd numbers that their places choose: a change in one word alone always
    changes it, and the order of adding never does.
    """
    words = x.contiguous().flatten().view(_WORDS[x.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for start in range(0, words.numel(), BLOCK):
        block = words[start : start + BLOCK].long()
        place = torch.arange(start + 1, start + 1 + block.numel(), device=x.device) * _STRIDE
        total += (block * ((place ^ (place >> 29)) * _STRIDE | 1)).sum()
    return total
