"""Every schedule ends, computes everything once, and has its stated bubble and memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed.pipelining import schedules as stock

from megatron.pipeline.actions import Action, PipelineSchedule, ScheduleError, ScheduleSize
from megatron.pipeline.communication import add_communication
from megatron.pipeline.schedules import SCHEDULES, make_schedule, microbatch_groups, sequential_schedule
from megatron.pipeline.simulate import StageCosts, Timeline, simulate
from megatron.pipeline.validate import validate_program

V_SHAPED = ("zb-v", "dualpipe-v")


def chunks_of(name: str, most: int = 4) -> list[int]:
    chunks = SCHEDULES[name].chunks
    return [chunks] if chunks else list(range(1, most + 1))


def sizes(name: str, ranks: int, microbatches: int) -> Iterator[tuple[int, int, int]]:
    for p in range(1, ranks + 1):
        for v in chunks_of(name):
            yield from ((p, v, m) for m in range(1, microbatches + 1))


def bubble(schedule: PipelineSchedule, seconds: tuple[float, float, float]) -> float:
    """The longest time that a rank idles between its first and its last action; communication takes none."""
    made = timeline(schedule, seconds)
    return max(span - busy for span, busy in zip(made.spans, made.busy))


def timeline(schedule: PipelineSchedule, seconds: tuple[float, float, float] = (1, 1, 1)) -> Timeline:
    """Every stage takes ``seconds`` for F, I and W."""
    return simulate(add_communication(schedule), StageCosts.uniform(schedule.stages, *seconds))


def memory(name: str, p: int, v: int, m: int) -> list[int]:
    """The most (stage, micro-batch) pairs between F and the end of backward, by rank; proves the schedule, too."""
    return [*validate_program(add_communication(make_schedule(name, p, v, m))).both]


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_size_ends_and_does_everything_once(name: str) -> None:
    for p, v, m in sizes(name, ranks=5, microbatches=9):
        schedule = make_schedule(name, p, v, m)
        validate_program(add_communication(schedule))
        assert (schedule.stages, schedule.microbatches) == (p * v, m)
        loop = tuple(stage % p for stage in range(p * v))
        assert schedule.placement == ((*range(p), *reversed(range(p))) if name in V_SHAPED else loop)


@pytest.mark.parametrize("seconds", [(1, 1, 1), (3, 4, 1), (2, 1, 0)])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved"])
def test_bubble_is_the_formula(name: str, seconds: tuple[int, int, int]) -> None:
    """(p - 1)(f + b) / v of a rank's f and b, which are v times a stage's."""
    for p, v, m in sizes(name, ranks=5, microbatches=11):
        if m >= p:
            assert bubble(make_schedule(name, p, v, m), seconds) == (p - 1) * sum(seconds), (p, v, m)


def test_memory_is_the_formula() -> None:
    for p, v, m in sizes("gpipe", ranks=5, microbatches=11):
        assert memory("gpipe", p, v, m) == [v * m] * p
        g = len(next(microbatch_groups(ScheduleSize(p, v, m, p))))
        expected = [min(v * m, 2 * (p - rank - 1) + (v - 1) * g + 1) for rank in range(p)]
        assert memory("interleaved", p, v, m) == expected
        assert memory("1f1b", p, 1, m) == [min(m, p - r) for r in range(p)]


@pytest.mark.parametrize(
    ("p", "m", "group", "lengths"),
    [
        (4, 8, 4, [4, 4]),
        (4, 3, 4, [3]),  # fewer micro-batches than ranks
        (4, 7, 4, [7]),  # a rest of fewer than the ranks is shared out
        (4, 11, 4, [6, 5]),
        (4, 12, 8, [8, 4]),  # one of as many is a group
        (4, 14, 8, [8, 6]),
        (4, 19, 8, [10, 9]),
    ],
)
def test_depth_first_groups(p: int, m: int, group: int, lengths: list[int]) -> None:
    groups = list(microbatch_groups(ScheduleSize(p, 2, m, group)))
    assert [len(each) for each in groups] == lengths
    assert [mb for each in groups for mb in each] == list(range(m))


@pytest.mark.parametrize(
    ("arguments", "sentence", "fixes"),
    [
        (("gipe", 2, 1, 4), "there is no schedule 'gipe'; choose from gpipe, 1f1b,", ("--pipeline-schedule gpipe",)),
        (("ZB-V", 2, 2, 4), "there is no schedule 'ZB-V'", ("--pipeline-schedule zb-v",)),
        (("fancy", 2, 1, 4), "there is no schedule 'fancy'", ()),
        (
            ("1f1b", 4, 2, 8),
            "1f1b has 1 stage on each rank, not 2",
            ("--num-virtual-stages-per-pipeline-rank 1", "--pipeline-schedule interleaved"),
        ),
        (("zb-v", 4, 1, 8), "zb-v has 2 stages on each rank, not 1", ("--num-virtual-stages-per-pipeline-rank 2",)),
        (("gpipe", 4, 1, 0), "0 micro-batches", ()),
        (("gpipe", 4, 1, 8, 4), "gpipe has no groups of micro-batches", ("--pipeline-schedule interleaved",)),
        (
            ("interleaved", 4, 2, 8, 3),
            "groups of 3 micro-batches: the first rank would wait for the last one",
            ("--microbatch-group-size-per-virtual-pipeline-stage 4",),
        ),
    ],
)
def test_refusals(arguments: tuple[str, int, int, int], sentence: str, fixes: tuple[str, ...]) -> None:
    with pytest.raises(ScheduleError) as error:
        make_schedule(*arguments)
    assert sentence in error.value.sentence
    assert error.value.fixes == fixes


@pytest.mark.parametrize("placement", [(0,), (0, 1, 2), (0, 1, 0, 1), (0, 1, 2, 2, 1, 0), (1, 0)])
def test_one_by_one_no_two_ranks_work_at_a_time(placement: tuple[int, ...]) -> None:
    schedule = sequential_schedule(placement, microbatches=3)
    assert schedule.placement == placement
    assert timeline(schedule).makespan == 3 * len(placement) * 3
    peaks = validate_program(add_communication(schedule))
    assert peaks.activations == tuple(placement.count(rank) for rank in range(1 + max(placement)))


STOCK = {
    "gpipe": stock.ScheduleGPipe,
    "1f1b": stock.Schedule1F1B,
    "interleaved": stock.ScheduleInterleaved1F1B,
    "zb-h1": stock.ScheduleInterleavedZeroBubble,
    "zb-v": stock.ScheduleZBVZeroBubble,
    "dualpipe-v": stock.ScheduleDualPipeV,
}
"""PyTorch's schedules. Its interleaved zero bubble with one stage on each rank is ZB-H1."""


def stock_schedule(kind: type, p: int, v: int, m: int) -> object:
    """A schedule of torch.distributed.pipelining with what it makes its order from, but without stages or processes."""
    schedule = object.__new__(kind)
    schedule.__dict__.update(
        _num_stages=p * v,
        num_stages=p * v,
        _n_microbatches=m,
        pp_group_size=p,
        n_local_stages=v,
        _stages=range(v),
        microbatches_per_round=m // max(1, m // p),
    )
    if kind in (stock.ScheduleGPipe, stock.Schedule1F1B):
        schedule.pipeline_order = schedule._get_pipeline_order()
    else:
        schedule.pipeline_order = {rank: schedule._calculate_single_rank_operations(rank) for rank in range(p)}
    return schedule


def written_by_stock(kind: type, p: int, v: int, m: int, path: Path) -> PipelineSchedule:
    """Its schedule by way of the file that it writes."""
    schedule = stock_schedule(kind, p, v, m)
    for rank, actions in schedule.pipeline_order.items():
        schedule.pipeline_order[rank] = [a for a in actions if a is None or a.computation_type != stock.REDUCE_GRAD]
    stock.PipelineScheduleMulti._dump_csv(schedule, path)
    return PipelineSchedule.load(path)


def is_in_stock(name: str, p: int, v: int, m: int) -> bool:
    """Return True if PyTorch has the schedule: one stage per rank, rounds of one size, a DualPipe with all its phases.

    Its 1F1B with fewer micro-batches than ranks does some that do not exist."""
    unequal = m % max(1, m // p)
    return not {"gpipe": v > 1, "1f1b": m < p, "interleaved": unequal, "dualpipe-v": m < 2 * p}.get(name)


@pytest.mark.parametrize("name", STOCK)
def test_order_matches_pytorch(name: str, tmp_path: Path) -> None:
    """Equal wherever PyTorch has the schedule, but for the last rank's forwards in 1F1B, which it counts from 1."""
    compared = [size for size in sizes(name, ranks=5, microbatches=14) if is_in_stock(name, *size)]
    for size in compared:
        theirs = list(written_by_stock(STOCK[name], *size, tmp_path / "stock.csv").ranks)
        if name == "1f1b":
            theirs[-1] = tuple(a._replace(microbatch=a.microbatch - (a.kind == "F")) for a in theirs[-1])
        assert list(make_schedule(name, *size).ranks) == theirs, size
    assert len(compared) > 20


def test_gpipe_is_breadth_first_as_in_pytorch_but_for_the_order_of_backward(tmp_path: Path) -> None:
    p, v, m = 3, 2, 5
    theirs = written_by_stock(stock.ScheduleLoopedBFS, p, v, m, tmp_path / "stock.csv").ranks
    turned = [
        [a if a.kind == "F" else Action(a.stage, "B", m - 1 - a.microbatch) for a in actions] for actions in theirs
    ]
    assert [list(actions) for actions in make_schedule("gpipe", p, v, m).ranks] == turned


def test_reductions_that_pytorch_plans_are_refused(tmp_path: Path) -> None:
    schedule = stock_schedule(stock.ScheduleGPipe, 2, 1, 4)
    stock.PipelineScheduleMulti._dump_csv(schedule, tmp_path / "stock.csv")
    with pytest.raises(ScheduleError, match=r"stock.csv, line 1: '0REDUCE_GRAD' is not an action here.*FSDP"):
        PipelineSchedule.load(tmp_path / "stock.csv")


SECONDS = [(1, 1, 1), (3, 3, 2), (2, 3, 2)]
"""f, i and w of a stage, with w <= f and w <= i."""


@pytest.mark.parametrize("seconds", SECONDS)
@pytest.mark.parametrize("p", [1, 2, 4, 7])
def test_bubbles_of_zb_h1_and_h2(p: int, seconds: tuple[int, int, int]) -> None:
    f, i, w = seconds
    for m in (p, 2 * p - 1, 2 * p, 3 * p + 1, 6 * p):
        assert bubble(make_schedule("zb-h1", p, 1, m), seconds) == (p - 1) * (f + i - w)
        if m >= 2 * p - 1:
            assert bubble(make_schedule("zb-h2", p, 1, m), seconds) == (p - 1) * max(0, f + i - 2 * w)


@pytest.mark.parametrize("p", [1, 2, 4, 7])
def test_the_v_has_no_bubble(p: int) -> None:
    """Where f = i = w and m >= 2p - 1."""
    for m in (2 * p - 1, 3 * p, 6 * p):
        assert bubble(make_schedule("zb-v", p, 2, m), (1, 1, 1)) == 0


@pytest.mark.parametrize("seconds", [(1, 1, 1), (3, 2, 1), (3, 3, 2)])
@pytest.mark.parametrize("p", [1, 2, 4, 7])
def test_bubble_of_dualpipe_v(p: int, seconds: tuple[int, int, int]) -> None:
    """Half of (p - 1)(f + i - w), where w <= i <= f <= b; a stage's seconds are half of a rank's."""
    f, i, w = seconds
    for m in (2 * p, 2 * p + 1, 5 * p):
        assert bubble(make_schedule("dualpipe-v", p, 2, m), seconds) == (p - 1) * (f + i - w)


def test_memory_of_zero_bubble_schedules() -> None:
    """ZB-H1 as 1F1B, ZB-H2 one less than twice that, ZB-V as 1F1B, DualPipeV half a micro-batch more."""
    for p in (1, 2, 3, 5):
        for m in range(1, 5 * p):
            assert memory("zb-h1", p, 1, m) == [min(m, p)] * p
            assert memory("zb-h2", p, 1, m) == [min(m, 2 * p - 1)] * p
            for name, most in (("zb-v", 2 * p), ("dualpipe-v", 2 * p + 1)):
                found = memory(name, p, 2, m)
                assert max(found) == min(2 * m, most)
                assert m < 2 * p or set(found) == {most}


def test_weights_follow_inputs_in_order() -> None:
    """So weight gradients are summed in the order of the micro-batches, as in schedules with whole backwards."""
    for name in ("zb-h1", "zb-h2", "zb-v", "dualpipe-v"):
        schedule = make_schedule(name, 4, 2 if "-v" in name else 1, 11)
        for actions in schedule.ranks:
            for stage in {action.stage for action in actions}:
                done = [action.microbatch for action in actions if action.stage == stage and action.kind in "BW"]
                assert done == list(range(11)), (name, stage)
