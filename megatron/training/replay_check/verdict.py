"""Name the rank, the place and the cause of a difference, from what all ranks have found.

A rank whose first difference is in something that it has computed itself, while all that it has got from others was
the same, has computed wrong. Where no rank has, communication has: on ranks that got something else although all ranks
gave the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from megatron.config.text import listed, listed_ranks
from megatron.training.replay_check.recorder import BACKWARD, FORWARD, GIVEN, GOT, GRADIENT, REDUCED

TRANSIENT, UNSTABLE, NONDETERMINISTIC = "transient", "unstable", "nondeterministic"
"""Causes: one computation of a step differs from all others, which agree; several differ from each other, on one rank
alone; on several ranks, or in the first step of a start. State or updates on several ranks, or in the first two checks,
are of the third kind, too."""

REDUCING = ("all-reduce", "reduce-scatter")

PLACES = ("activation", "gradient", "reduction", "update", "gather", "state", "message", "copies")
"""Places in which values are wrong: at a module's output, a gradient before its reduction, the reduction, an update,
gathered weights, main parameters and moments between two updates, communication inside a replica, copies of weights."""

SOFTWARE = {
    "state": "a callback or plugin may change weights or moments between two updates",
    "update": "an update rule may not be deterministic, or keep state of its own",
}
"""Possible causes in software, by place of a finding."""


@dataclass(frozen=True)
class Difference:
    """The first difference of a rank, between a step and its replay or between replays."""

    # Kind of the event, its place, its pipeline action, and its label, as of :class:`Event`.
    kind: str
    place: str
    action: str
    label: str
    # The event before it, which was the same.
    after: str
    # Parameters whose gradients differ, before or after the reduction; a few.
    parameters: Sequence[str] = ()

    @property
    def where(self) -> str:
        """One of :data:`PLACES`."""
        if self.kind == FORWARD:
            return "activation"
        if self.kind in (GRADIENT, BACKWARD):
            return "gradient"
        if self.kind == REDUCED or (self.kind == GOT and self.is_of_gradients):
            return "reduction"
        if self.kind == GIVEN and self.is_of_gradients:  # between the reduction over dp and that of partial gradients
            return "gradient" if "over dp" in self.place or "over edp" in self.place else "reduction"
        if self.kind == GOT:
            return "gather" if any(f"all-gather over {axes}" in self.place for axes in ("dp", "edp")) else "message"
        return "gradient" if self.action[:1] in ("B", "I", "W") else "activation"

    @property
    def is_of_gradients(self) -> bool:
        """True for communication outside of the pipeline's actions."""
        return not self.action or any(f"{op} over {axes}" in self.place for op in REDUCING for axes in ("dp", "edp"))

    def describe(self) -> str:
        """Return the difference for people."""
        what = {FORWARD: "output of ", BACKWARD: "gradient of the output of ", GIVEN: "", GOT: "result of "}
        texts = {GRADIENT: f"gradient of {self.place}", REDUCED: f"reduced gradient of {self.place}"}
        found = texts.get(self.kind) or what[self.kind] + self.place
        action = f" in {self.action}" if self.action else ""
        named = self.where == "reduction" and self.parameters
        gradients = f", in gradients of {listed(self.parameters)}" if named else ""
        return f"{found}{action}{gradients}" + (f", after {self.after}" if self.after else "")


@dataclass(frozen=True)
class RankReport:
    """What one rank has found, and where it runs."""

    rank: int
    host: str
    # Among the ranks of the host.
    local_rank: int
    device: str
    # First difference between the computation that differs and the others; between two replays if several differ.
    first: Difference | None = None
    # Labels of communication to which this rank gave something else.
    given: Sequence[str] = ()
    # Findings outside of the replay: place, of PLACES, and text.
    found: Sequence[Sequence[str]] = ()

    def to_json(self) -> dict[str, Any]:
        """Return it for other ranks."""
        return {**asdict(self), "given": [*self.given], "found": [[*each] for each in self.found]}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> RankReport:
        """Read what :meth:`to_json` has returned on another rank."""
        first = value["first"]
        return cls(**{**value, "first": None if first is None else Difference(**first)})


@dataclass(frozen=True)
class Verdict:
    """What was found in a check."""

    # One of the causes above.
    cause: str
    # One of :data:`PLACES`.
    place: str
    # The ranks at fault; several if they cannot be told apart.
    ranks: Sequence[int]
    sentence: str
    hosts: Sequence[str] = field(default_factory=list)

    @property
    def is_hardware(self) -> bool:
        """True unless an operation may be to blame that is not deterministic."""
        return self.cause != NONDETERMINISTIC


def odd_one_out(classes: Sequence[Sequence[int]]) -> int | None:
    """Return the computation of a step that differs from all others, which agree; None if more differ.

    Args:
        classes: of each rank, for each computation the index of the first one with the same digests; 0 is the step.
    """
    whole = [*zip(*classes)]
    odd = [[i for i, other in enumerate(whole) if other != one] for one in whole]
    most = min(odd, key=len)
    return most[0] if len(most) == 1 else None


def judge(reports: Sequence[RankReport], step: int, replays: int, odd: int | None, calibrated: bool) -> Verdict:
    """Return the verdict on a check in which at least one rank has a difference.

    Args:
        reports: of all ranks, in their order.
        step: that was checked, from 1.
        replays: how often it was replayed.
        odd: see :func:`odd_one_out`.
        calibrated: earlier checks of this start have found that what is repeated gives the same bits.
    """
    firsts = {report.rank: report.first for report in reports if report.first}
    if not firsts:
        return _judge_findings(reports, step, calibrated)
    culprits = culprits_of(firsts, reports)
    first = firsts[culprits[0]]
    found = f"{first.where} on {_named(reports, culprits)}, {first.describe()}"
    if odd is not None:
        which = f"step {step} differs from" if odd == 0 else f"replay {odd} of step {step} differs from the step and"
        agree = f"its {replays} replays, which agree" if odd == 0 else "the others, which agree"
        return _verdict(
            TRANSIENT, first.where, culprits, f"{which} {agree}: {found}; a transient fault of hardware", reports
        )
    begin = f"{replays} replays of step {step} differ from each other: {found}; "
    if calibrated and len(culprits) == 1 and len(reports) > 1:
        sentence = f"{begin}no other rank differs, and at the start none did: a faulty unit"
        return _verdict(UNSTABLE, first.where, culprits, sentence, reports)
    sentence = f"{begin}an operation that is not deterministic, so hardware cannot be judged"
    return _verdict(NONDETERMINISTIC, first.where, culprits, sentence, reports)


def _judge_findings(reports: Sequence[RankReport], step: int, calibrated: bool) -> Verdict:
    order = {place: i for i, place in enumerate(("state", "update", "gather", "copies"))}
    found = min((order[place], place) for report in reports for place, _ in report.found)[1]
    culprits = [report.rank for report in reports if any(place == found for place, _ in report.found)]
    texts = dict.fromkeys(text for report in reports for place, text in report.found if place == found)
    sentence = f"{found} differs in the check of step {step}, on {_named(reports, culprits)}: {listed([*texts][:4])}"
    software = SOFTWARE.get(found)
    if software is None or (calibrated and len(culprits) == 1):
        return _verdict(TRANSIENT, found, culprits, f"{sentence}; a transient fault of hardware", reports)
    why = "no single fault reaches several ranks" if len(culprits) > 1 else "this start has not found it stable before"
    return _verdict(NONDETERMINISTIC, found, culprits, f"{sentence}; {why}: {software}", reports)


def culprits_of(firsts: Mapping[int, Difference], reports: Sequence[RankReport]) -> list[int]:
    """Return the ranks at fault, given the first difference of each rank that has one."""
    # Other ranks' gradients enter in the reduction.
    own = [r for r, first in firsts.items() if first.kind not in (GOT, REDUCED) and first.where != "reduction"]
    if own:
        return own
    wrong_inputs = {label for report in reports for label in report.given}
    got = [r for r, first in firsts.items() if first.kind != GOT or first.label not in wrong_inputs]
    return got or [*firsts]


def _named(reports: Sequence[RankReport], ranks: Sequence[int]) -> str:
    if len(ranks) > 4:
        return listed_ranks([*ranks])
    return listed([f"rank {rank} on {reports[rank].host} ({reports[rank].device})" for rank in ranks])


def _verdict(cause: str, place: str, ranks: Sequence[int], sentence: str, reports: Sequence[RankReport]) -> Verdict:
    return Verdict(cause, place, [*ranks], sentence, [*dict.fromkeys(reports[rank].host for rank in ranks)])
