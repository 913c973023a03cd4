"""The proof of programs against an independent judge: every schedule of the library, and ones broken on purpose."""

from __future__ import annotations

import re

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron.pipeline.actions import (
    BACKWARD,
    COMMUNICATION_KINDS,
    COMPUTE_KINDS,
    EVALUATION_KINDS,
    FORWARD,
    INPUT,
    WEIGHT,
    Action,
    PipelineSchedule,
    ScheduleError,
)
from megatron.pipeline.communication import add_communication
from megatron.pipeline.schedules import SCHEDULES, make_schedule
from megatron.pipeline.validate import REMOVE_COMMUNICATION_FIX, PeakCounts, validate_program
from tests.unit.pipeline.judge import Play

ACTION = re.compile(rf"\d+({'|'.join((*COMMUNICATION_KINDS, *COMPUTE_KINDS))})\d+")

BREAKAGES = ("drop", "double", "swap", "move", "hasten W", "swap posts", "wrong rank", "other kind")
"""Changes of an action in a valid program."""


def program(*lines: str) -> PipelineSchedule:
    """From the text of each rank."""
    return PipelineSchedule("mine", tuple(tuple(Action.parse(word) for word in line.split()) for line in lines))


def refusal(found: PipelineSchedule, evaluation: bool = False) -> str:
    """The sentence with which a program is refused."""
    with pytest.raises(ScheduleError) as error:
        validate_program(found, evaluation)
    return error.value.sentence


@st.composite
def schedules(draw: st.DrawFn, ranks: int, chunks: int, microbatches: int) -> PipelineSchedule:
    """Any schedule of the library, up to a size."""
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    wanted = SCHEDULES[name].chunks or draw(st.integers(1, chunks))
    return make_schedule(name, draw(st.integers(1, ranks)), wanted, draw(st.integers(1, microbatches)))


def held_at_most(schedule: PipelineSchedule, rank: int, start: tuple[str, ...], end: tuple[str, ...]) -> int:
    """The most micro-batches of stages between an action of kinds ``start`` and one of kinds ``end``, by looking."""
    actions = schedule.ranks[rank]
    most = 0
    for now in range(len(actions)):
        began = {(a.stage, a.microbatch) for a in actions[: now + 1] if a.kind in start}
        ended = {(a.stage, a.microbatch) for a in actions[: now + 1] if a.kind in end}
        most = max(most, len(began - ended))
    return most


@settings(max_examples=40, derandomize=True, deadline=None)
@given(schedules(ranks=16, chunks=4, microbatches=64))
def test_every_schedule_of_the_library_is_valid(schedule: PipelineSchedule) -> None:
    validate_program(add_communication(schedule))


@settings(max_examples=40, derandomize=True, deadline=None)
@given(schedules(ranks=4, chunks=3, microbatches=6))
def test_the_judge_confirms_that_schedules_finish(schedule: PipelineSchedule) -> None:
    found = add_communication(schedule)
    assert Play(found, schedule.placement).comes_to_its_end()
    for evaluation in (found.only(EVALUATION_KINDS), add_communication(schedule.only((FORWARD,)))):
        assert Play(evaluation, schedule.placement, trains=False).comes_to_its_end()
        validate_program(evaluation, evaluation=True)


@settings(max_examples=40, derandomize=True, deadline=None)
@given(schedules(ranks=4, chunks=3, microbatches=6))
def test_peaks_are_counted(schedule: PipelineSchedule) -> None:
    ranks = range(len(schedule.ranks))
    peaks = validate_program(add_communication(schedule))
    assert peaks.activations == tuple(held_at_most(schedule, r, (FORWARD,), (BACKWARD, INPUT)) for r in ranks)
    assert peaks.weights == tuple(held_at_most(schedule, r, (INPUT,), (WEIGHT,)) for r in ranks)
    assert peaks.both == tuple(held_at_most(schedule, r, (FORWARD,), (BACKWARD, WEIGHT)) for r in ranks)


@st.composite
def breakages(draw: st.DrawFn) -> tuple[str, list[Action], PipelineSchedule, tuple[int, ...]]:
    """Draw the change, the actions it was made to, the program after it, and the placement that was meant."""
    whole = add_communication(draw(schedules(ranks=4, chunks=3, microbatches=5)))
    ranks = [list(actions) for actions in whole.ranks]
    what = draw(st.sampled_from(BREAKAGES))
    rank = draw(st.integers(0, len(ranks) - 1))
    actions = ranks[rank]
    eligible = [i for i, a in enumerate(actions) if what != "hasten W" or a.kind == WEIGHT]
    if what == "swap posts":
        eligible = [i for i, a in enumerate(actions) if a.kind in COMMUNICATION_KINDS]
    assume(len(eligible) > 1)
    place, other = (draw(st.sampled_from(eligible)) for _ in range(2))
    touched = [actions[place]]
    if what == "drop":
        actions.pop(place)
    elif what == "double":
        actions.insert(other, actions[place])
    elif what in ("swap", "swap posts"):
        touched.append(actions[other])
        actions[place], actions[other] = actions[other], actions[place]
    elif what == "move":
        actions.insert(other, actions.pop(place))
    elif what == "hasten W":
        half = actions.index(Action(actions[place].stage, INPUT, actions[place].microbatch))
        actions.insert(half, actions.pop(place))
    elif what == "wrong rank":
        assume(len(ranks) > 1)
        ranks[(rank + draw(st.integers(1, len(ranks) - 1))) % len(ranks)].append(actions.pop(place))
    else:
        actions[place] = actions[place]._replace(kind=draw(st.sampled_from((*COMPUTE_KINDS, *COMMUNICATION_KINDS))))
        touched.append(actions[place])
    return what, touched, PipelineSchedule("broken", tuple(map(tuple, ranks))), whole.placement


@settings(max_examples=150, derandomize=True, deadline=None)
@given(breakages())
def test_only_broken_schedules_are_refused(
    breakage: tuple[str, list[Action], PipelineSchedule, tuple[int, ...]],
) -> None:
    what, touched, found, placement = breakage
    if Play(found, placement).comes_to_its_end():
        validate_program(found)
        return
    sentence = refusal(found)
    assert ACTION.search(sentence)
    if what in ("drop", "double", "hasten W", "wrong rank"):
        assert re.search(rf"\b{touched[0]}\b", sentence), f"{what} {touched[0]}: {sentence}"


def pairs(microbatches: int) -> PipelineSchedule:
    """1F1B on two ranks."""
    return add_communication(make_schedule("1f1b", 2, 1, microbatches))


def without(found: PipelineSchedule, text: str) -> PipelineSchedule:
    """The program without the action of that text."""
    return PipelineSchedule("broken", tuple(tuple(a for a in actions if str(a) != text) for actions in found.ranks))


def test_a_deadlock_of_ordered_channels_that_mailboxes_would_not_have() -> None:
    """Rank 1 takes micro-batch 1 first, and only then posts the receive of what was sent first."""
    found = program(
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B1 0B1 0RECV_B0 0B0",
        "1RECV_F1 1F1 1B1 1SEND_B1 1RECV_F0 1F0 1B0 1SEND_B0",
    )
    assert Play(found, (0, 1), ordered=False).comes_to_its_end()
    assert not Play(found, (0, 1)).comes_to_its_end()
    assert refusal(found) == (
        "rank 1 has 1RECV_F1 where 1RECV_F0 belongs: transfer 0 from rank 0 to rank 1 is 0SEND_F0, "
        "and receives must be in the order of the sends"
    )
    validate_program(add_communication(found.only(COMPUTE_KINDS)))


def test_a_circle_is_reported_rank_by_rank() -> None:
    found = add_communication(program("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"))
    assert not Play(found, (0, 1), ordered=False).comes_to_its_end()
    assert refusal(found) == (
        "deadlock: ranks wait for each other in a cycle: "
        "rank 0 waits for 0RECV_B0 before 0B0, which rank 1 sends after 1B0; "
        "rank 1 waits for 1RECV_F1 before 1F1, which rank 0 sends after 0F1"
    )


def test_of_a_long_circle_the_beginning_is_reported() -> None:
    """With two stages on each rank in a loop, and the second one of rank 0 before its first."""
    others = [f"{rank}F0 {rank + 6}F0" for rank in range(1, 6)]
    sentence = refusal(add_communication(program("6F0 0F0", *others)), evaluation=True)
    assert sentence.endswith("which rank 3 sends after 3F0; and so on over 6 ranks, back to rank 0")
    assert sentence.count("waits for") == 3


def test_ranks_that_only_wait_for_a_circle_are_not_in_it() -> None:
    sentence = refusal(add_communication(program("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1", "2F1 2B1 2F0 2B0")))
    assert "rank 0" not in sentence
    assert "rank 1 waits for 1RECV_B0" in sentence
    assert "rank 2 waits for 2RECV_F1" in sentence


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        (("0F0 0B0 0B0",), "rank 0 has 0B0 twice"),
        (("0F0 0I0 0B0 0W0",), "rank 0 has 0B0 after 0I0: a backward is one B, or one I and one W"),
        (("0F0 0B0 0W0",), "rank 0 has 0W0 after 0B0: a backward is one B, or one I and one W"),
        (("0F0 0W0 0I0",), "rank 0 has 0W0 before 0I0, whose result it needs"),
        (("0F0 0I0 0F1 0B1",), "rank 0 has no 0B0 or 0W0: stages 0 to 0 each do micro-batches 0 to 1"),
        (("0F0 0B0 0F2 0B2",), "rank 0 has no 0F1: stages 0 to 0 each do micro-batches 0 to 2"),
        (("0B0 0F0",), "rank 0 has 0B0 before 0F0, whose result it needs"),
        (("0F0 0SEND_F0 0B0",), "0SEND_F0 has no other end: the stages are 0 to 0"),
        (("0F0 1F0 0SEND_F0 1B0 0B0",), "0SEND_F0 has no channel: stages 0 and 1 are both on rank 0"),
        (("0F0 1F0 0B0 1B0",), "rank 0 has 0B0 before 1B0, whose result it needs"),
        (("0F0 1F0 0B0",), "rank 0 has no 1B0 or 1I0: stages 0 to 1 each do micro-batches 0 to 0"),
        (("0F0 0B0", ""), "rank 1 of 2 has no action: every rank needs a stage"),
    ],
)
def test_sentences(lines: tuple[str, ...], sentence: str) -> None:
    assert refusal(program(*lines)) == sentence


@pytest.mark.parametrize("text", ["0SEND_F1", "1RECV_F1", "1SEND_B0", "0RECV_B0"])
def test_communication_that_is_missing_is_named_and_can_be_left_out(text: str) -> None:
    with pytest.raises(ScheduleError) as error:
        validate_program(without(pairs(2), text))
    assert text in error.value.sentence
    assert error.value.fixes == (REMOVE_COMMUNICATION_FIX,)


def test_an_action_on_another_rank_is_named() -> None:
    sentence = refusal(program("0F0 0F1 0B0", "1F0 1B0 1F1 1B1 0B1"))
    assert sentence == "stage 0 is on rank 0 and on rank 1, with 0F0 and 0B1"


def test_an_evaluation_goes_forward_and_keeps_nothing() -> None:
    forwards = pairs(3).only(EVALUATION_KINDS)
    assert validate_program(forwards, evaluation=True) == PeakCounts((0, 0), (0, 0), (0, 0))
    assert "no 1RECV_F1" in refusal(without(forwards, "1RECV_F1"), evaluation=True)
    assert refusal(pairs(3), evaluation=True) == "rank 0 has 0RECV_B0 in an evaluation, which has only forwards"


def test_a_program_from_a_file_may_send_late_and_receive_early() -> None:
    """Valid, if slow: what counts is the order, not the place that ``add_communication`` would have chosen."""
    rank_0 = "0RECV_B0 0RECV_B1 0F0 0F1 0SEND_F0 0SEND_F1 0B0 0B1"
    rank_1 = "1RECV_F0 1RECV_F1 1F0 1B0 1F1 1SEND_B0 1B1 1SEND_B1"
    assert validate_program(program(rank_0, rank_1)).activations == (2, 1)
