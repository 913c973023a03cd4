"""An independent judge of programs: ranks, mailboxes and tensors that are made once and used up, played move by move.

It shares nothing with the passes that it judges. Whoever uses a tensor must hold it, and holds it no more; what is
held, sent or expected at the end was in vain.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import product

from megatron.pipeline.actions import Action, PipelineSchedule

Tensor = tuple[str, int, int]
"""A kind of action, its stage, its micro-batch."""


class Play:
    """A run of a program on ranks that hold the stages of ``placement``.

    A mailbox is ``ordered`` if, as a channel does, it only moves the oldest tensor sent to the oldest receive. Without
    training, activations are not kept for a backward.
    """

    def __init__(
        self, program: PipelineSchedule, placement: Sequence[int], ordered: bool = True, trains: bool = True
    ) -> None:
        self.scripts = [list(actions) for actions in program.ranks]
        self.placement, self.ordered = placement, ordered
        actions = [action for script in self.scripts for action in script]
        self.trains = trains
        self.microbatches = 1 + max(action.microbatch for action in actions)
        self.held: list[Counter[Tensor]] = [Counter() for _ in self.scripts]
        self.sent: dict[tuple[int, int], list[Tensor]] = {}
        self.expected: dict[tuple[int, int], list[Tensor]] = {}
        for microbatch in range(self.microbatches):
            self.held[placement[0]]["input", 0, microbatch] += 1
            if self.trains:
                self.held[placement[-1]]["gradient", len(placement) - 1, microbatch] += 1

    def comes_to_its_end(self) -> bool:
        """Return True if every rank finishes, with every action done once and no message left."""
        while any(self.moves(rank) for rank in range(len(self.scripts))):
            self.deliver()
        all_held = sum(self.held, Counter())
        wanted = {("done", *where): 1 for where in product(range(len(self.placement)), range(self.microbatches))}
        left = [*self.scripts, *self.sent.values(), *self.expected.values()]
        return not any(left) and all_held == wanted

    def moves(self, rank: int) -> bool:
        """Do the rank's next action if it is possible, and return True then."""
        if not self.scripts[rank]:
            return False
        action = self.scripts[rank][0]
        if self.placement[action.stage] != rank:
            return False
        uses, makes = self.effect(action)
        if any(self.held[rank][tensor] < 1 for tensor in uses):
            return False
        other = action.stage + (1 if action.kind in ("SEND_F", "RECV_B") else -1)
        if "_" in action.kind and (not 0 <= other < len(self.placement) or self.placement[other] == rank):
            return False
        self.scripts[rank].pop(0)
        self.held[rank] = self.held[rank] - Counter(uses) + Counter(makes)
        what = "input" if action.kind.endswith("F") else "gradient"
        if "SEND" in action.kind:
            self.sent.setdefault((rank, self.placement[other]), []).append((what, other, action.microbatch))
        elif "RECV" in action.kind:
            self.expected.setdefault((self.placement[other], rank), []).append((what, action.stage, action.microbatch))
        return True

    def effect(self, action: Action) -> tuple[Iterable[Tensor], Iterable[Tensor]]:
        """Return the tokens that an action uses up, and those that it makes."""
        stage, kind, mb = action
        kept, done = ("activations", stage, mb), ("done", stage, mb)
        if kind == "F":
            return [("input", stage, mb)], [*self.passed("input", stage, 1, mb), kept if self.trains else done]
        if kind in ("B", "I"):
            rest = done if kind == "B" else ("half", stage, mb)
            return [("gradient", stage, mb), kept], [*self.passed("gradient", stage, -1, mb), rest]
        uses: dict[str, list[Tensor]] = {
            "W": [("half", stage, mb)],
            "SEND_F": [("parcel of input", stage + 1, mb)],
            "SEND_B": [("parcel of gradient", stage - 1, mb)],
        }
        return uses.get(kind, []), [done] if kind == "W" else []

    def passed(self, what: str, stage: int, step: int, mb: int) -> list[Tensor]:
        """The result of ``stage`` for the one after ``step``, if there is one: at hand for it, or a parcel to send."""
        if not 0 <= stage + step < len(self.placement):
            return []
        here = self.placement[stage] == self.placement[stage + step]
        return [(what if here else f"parcel of {what}", stage + step, mb)]

    def deliver(self) -> None:
        """Move what both sides of a mailbox have posted."""
        for way, sent in self.sent.items():
            expected = self.expected.get(way, [])
            while found := self.first_that_fits(sent, expected):
                sent.remove(found)
                expected.remove(found)
                self.held[way[1]][found] += 1

    def first_that_fits(self, sent: Sequence[Tensor], expected: Sequence[Tensor]) -> Tensor | None:
        """The next tensor to move."""
        if self.ordered:
            sent, expected = sent[:1], expected[:1]
        return next((tensor for tensor in sent if tensor in expected), None)
