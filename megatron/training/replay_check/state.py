"""Checks of what a step leaves: updates of copies, weights against their owners, and state between two updates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron.distributed import comm
from megatron.distributed.comm import Group
from megatron.optimizer.param_groups import ParamGroup
from megatron.optimizer.parameter_store import WeightBuffer
from megatron.optimizer.rules import UpdateArgs, UpdateRule
from megatron.training.digests import digest, words_of
from megatron.training.trainer import Trainer

Finding = tuple[str, str]
"""Place, of :data:`megatron.training.replay_check.verdict.PLACES`, and text."""

COPIED_ELEMENTS = 1 << 20
"""Elements of parameters of a group whose update is repeated in a check; at least one parameter."""


@dataclass(frozen=True)
class Flags:
    """Flags on the device, and what each means."""

    # bool [n].
    values: Tensor
    # Called with the indices of flags that are set.
    describe: Callable[[Sequence[int]], Iterator[Finding]]

    def findings(self) -> list[Finding]:
        """Return what is set; waits for the device."""
        return [*self.describe(self.values.nonzero().flatten().tolist())]


class StateAtRest:
    """Digests of main parameters, weights and moments after an update, compared before the next one."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._names: list[str] = []
        self._digests = torch.zeros(0, dtype=torch.int64)

    def forget(self) -> None:
        """Forget the digests, because the state was set or updated."""
        self._names = []

    def remember(self) -> None:
        """Take digests of all state, without waiting for the device."""
        if state := self._state():
            self._names, self._digests = [*state], torch.stack([digest(x) for x in state.values()])

    def compare(self) -> Flags:
        """Return what differs from the digests; nothing does if there are none."""
        state, names = self._state(), self._names
        found = torch.zeros(0, dtype=torch.bool, device=self._trainer.device)
        if names:
            found = torch.stack([digest(state[name]) for name in names]) != self._digests
        return Flags(found, lambda indices: (("state", names[i]) for i in indices))

    def _state(self) -> dict[str, Tensor]:
        optimizer = self._trainer.optimizer
        found = {f"weight {name}": x for name, x in optimizer.weights.shards.items()}
        found |= {f"frozen weight {name}": x for name, x in optimizer.weights.frozen.items()}
        remainders = optimizer.main_params.remainders
        found |= {f"remainder of {name}": x for name, x in remainders.items()}
        for name in optimizer.main_params:
            weight = optimizer.weights.shards[name]
            if name not in remainders and optimizer.main_params[name].data_ptr() != weight.data_ptr():
                found[f"main parameter {name}"] = optimizer.main_params[name]
        for kind, tensors in optimizer.state().items():
            found |= {f"{kind} of {name}": x for name, x in tensors.items()}
        return found


class UpdateCheck:
    """Repeats the update of some parameters of every group, in turn, on copies."""

    def __init__(self) -> None:
        self._copies: list[tuple[ParamGroup, UpdateRule, UpdateRule, UpdateArgs, UpdateArgs, list[int]]] = []

    def copy(self, group: ParamGroup, rule: UpdateRule, args: UpdateArgs, number: int) -> None:
        """Copy parameters, state and gradients before an update; ``number`` is that of the check."""
        order = [(number + i) % len(group.names) for i in range(len(group.names))]
        chosen: list[int] = []
        elements = 0
        for index in order:
            elements += rule.params[index].numel()
            if chosen and elements > COPIED_ELEMENTS:
                break
            chosen.append(index)
        repeated = rule.of_copies(chosen)
        if repeated is None:
            return
        weights = [
            mine if args.weights[index] is rule.params[index] else args.weights[index].clone()
            for index, mine in zip(chosen, repeated.params)
        ]
        grads = [args.grads[index].clone() for index in chosen]
        again = replace(args, grads=grads, weights=weights, observe=None)
        self._copies.append((group, rule, repeated, args, again, chosen))

    @torch.no_grad()
    def compare(self, device: torch.device) -> Flags:
        """Update the copies; return which parameters, weights and moments differ."""
        names, flags = [], []
        for group, rule, repeated, args, again, chosen in self._copies:
            repeated.update(again)
            for place, index in enumerate(chosen):
                pairs = [(group.names[index], rule.params[index], repeated.params[place])]
                if args.weights[index] is not rule.params[index]:
                    pairs.append((f"weight {group.names[index]}", args.weights[index], again.weights[place]))
                for kind, tensors in rule.state.items():
                    pairs.append((f"{kind} of {group.names[index]}", tensors[index], repeated.state[kind][place]))
                names += [name for name, _, _ in pairs]
                flags += [(words_of(x) != words_of(y)).any() for _, x, y in pairs]
        self._copies = []
        found = torch.stack(flags) if flags else torch.zeros(0, dtype=torch.bool, device=device)
        return Flags(found, lambda indices: (("update", names[i]) for i in indices))


class GatherCheck:
    """Compares every part of the gathered weights with the digest of the rank that owns it."""

    def __init__(self, trainer: Trainer) -> None:
        self._device = trainer.device
        self._names = {id(param): name for name, param in trainer.params.items()}
        self._by_group: dict[tuple[int, ...], tuple[Group, list[WeightBuffer]]] = {}
        if trainer.config.parallel.zero_stage < 3:  # others are gathered in the step, which is computed again
            for buffer in trainer.optimizer.weights.buffers:
                if buffer.group.size > 1:
                    self._by_group.setdefault(buffer.group.ranks, (buffer.group, []))[1].append(buffer)

    @torch.no_grad()
    def compare(self) -> Flags:
        """Return which parts differ; collective."""
        places: list[tuple[WeightBuffer, int]] = []
        flags = [torch.zeros(0, dtype=torch.bool, device=self._device)]
        for _, (group, buffers) in sorted(self._by_group.items()):
            rows = torch.stack([words_of(buffer.whole).view(group.size, -1).sum(1) for buffer in buffers])
            owned = comm.all_gather(torch.stack([*rows[:, group.rank]]), group).view(group.size, -1).t()
            flags.append((rows != owned).flatten())
            places += [(buffer, source) for buffer in buffers for source in range(group.size)]
        return Flags(torch.cat(flags), lambda found: (self._describe(*places[i]) for i in found))

    def _describe(self, buffer: WeightBuffer, source: int) -> Finding:
        size = buffer.whole.numel() // buffer.group.size
        start = buffer.whole.storage_offset() + source * size
        inside = [
            self._names[id(param)]
            for param, view in buffer.views
            if view.storage_offset() < start + size and view.storage_offset() + view.numel() > start
        ]
        return "gather", f"the part of rank {buffer.group.ranks[source]} of {', '.join(inside)}"
