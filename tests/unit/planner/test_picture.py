"""Pictures of timelines: every action in its place, in colours that people tell apart."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from megatron.pipeline.actions import Action
from megatron.pipeline.communication import add_communication
from megatron.pipeline.schedules import make_schedule
from megatron.pipeline.simulate import Interval, StageCosts, Timeline, simulate
from megatron.planner import timeline as timeline_module
from megatron.planner.timeline import COLORS, action_color, draw_figure, figure_size
from megatron.training.loggers.plots import open_figure as saved

ROOT = Path(__file__).parents[3]

COLOR_BLIND = {
    "normal": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
"""What linear red, green and blue become: Machado, Oliveira and Fernandes 2009, at full severity."""


def timeline(name: str, ranks: int, chunks: int, microbatches: int, latency: float = 0) -> Timeline:
    stages = ranks * chunks
    program = add_communication(make_schedule(name, ranks, chunks, microbatches))
    return simulate(program, StageCosts.uniform(stages, 1 / chunks, 1 / chunks, 1 / chunks, latency))


def drawn(panels: Mapping[str, Timeline], **more: float) -> Figure:
    figure = Figure(figsize=figure_size(panels), layout="constrained")
    draw_figure(figure, panels, **more)
    return figure


def bars(figure: Figure, panel: int = 0) -> list[tuple[tuple[float, ...], float, float, float]]:
    """Colour, middle, left and right of each coloured bar."""
    found = []
    for collection in figure.axes[2 * panel].collections:
        face = tuple(collection.get_facecolor()[0][:3]) if len(collection.get_facecolor()) else ()
        if (
            isinstance(collection, PolyCollection)
            and not collection.get_hatch()
            and face != to_rgb(timeline_module.IDLE_COLOR)
        ):
            for path in collection.get_paths():
                box = path.get_extents()
                found.append((face, (box.y0 + box.y1) / 2, box.x0, box.x1))
    return found


def test_every_action_is_a_bar_in_its_place_with_its_micro_batch() -> None:
    made = timeline("zb-v", 3, 2, 7, latency=0.25)
    figure = drawn({"zb-v": made})
    wanted = [
        (*action_color(action.kind, int(action.stage >= 3), 2), rank, start, end, str(action.microbatch))
        for rank, intervals in enumerate(made.intervals)
        for action, start, end in intervals
    ]
    numbers = {(round(x, 6), round(y, 6)): t.get_text() for t in figure.axes[0].texts for x, y in [t.get_position()]}
    found = [
        (*face, middle, left, right, numbers[round((left + right) / 2, 6), round(middle, 6)])
        for face, middle, left, right in bars(figure)
    ]
    assert len(figure.axes[0].texts) == len(wanted)
    for a, b in zip(sorted(found), sorted(wanted)):
        assert a[:-1] == pytest.approx(b[:-1])
        assert a[-1] == b[-1]


def test_two_timelines_have_one_clock_that_begins_at_zero() -> None:
    short, long = timeline("zb-h1", 2, 1, 4), timeline("1f1b", 2, 1, 4)
    late = Timeline("late", tuple(tuple(Interval(a, s + 100, e + 100) for a, s, e in r) for r in long.intervals))
    figure = drawn({"a": short, "b": late})
    assert {axes.get_xlim() for axes in figure.axes} == {(0, 15)}
    assert min(left for _, _, left, _ in bars(figure, 1)) == 0
    assert [axes.get_title(loc="left") for axes in figure.axes[::2]] == ["a", "b"]
    assert figure.axes[2].get_title(loc="right").startswith("makespan 15, bubble 20.0%")


def test_waiting_for_a_transfer_is_hatched_and_nothing_else() -> None:
    def hatched(figure: Figure) -> float:
        found = [c for c in figure.axes[0].collections if c.get_hatch()]
        return sum(path.get_extents().width for collection in found for path in collection.get_paths())

    made = timeline("1f1b", 4, 1, 6, latency=0.5)
    assert hatched(drawn({"": made})) == pytest.approx(sum(made.exposed_time)) != 0
    assert hatched(drawn({"": timeline("1f1b", 4, 1, 6)})) == 0
    labels = [[text.get_text() for text in drawn({"": t}).legends[0].texts] for t in (made, timeline("1f1b", 4, 1, 6))]
    assert ["waits for a transfer" in texts for texts in labels] == [True, False]


def test_what_is_held_stands_beneath() -> None:
    made = timeline("1f1b", 4, 1, 8)
    figure = drawn({"": made}, limit=6.0)
    memory = figure.axes[1]
    held = [line.get_ydata() for line in memory.lines[:4]]
    assert [max(values) for values in held] == [4, 3, 2, 1]
    assert [values[-1] for values in held] == [0, 0, 0, 0]
    assert list(memory.get_yticks()) == [0, 4]
    assert list(memory.lines[-1].get_ydata()) == [6, 6]
    assert figure.legends[0].texts[-1].get_text() == "limit of memory: 6"
    at = np.searchsorted(memory.lines[0].get_xdata(), 10.0, side="right") - 1
    assert held[0][at] == 4  # all of warm-up, and no backward yet


def test_the_numbers_of_eight_ranks_and_two_dozen_micro_batches_are_readable() -> None:
    made = timeline("zb-v", 8, 2, 24)
    texts = drawn({"": made}).axes[0].texts
    assert len(texts) == 8 * 2 * 24 * 3
    assert min(text.get_fontsize() for text in texts) >= 5


def test_where_there_is_no_room_bars_are_seen_and_numbers_are_left_out() -> None:
    made = timeline("gpipe", 2, 1, 1500)
    assert figure_size({"": made})[0] == timeline_module.WIDEST
    work = drawn({"": made}).axes[0]
    assert len(work.texts) == 0
    points = 72 * timeline_module.WIDEST / float(made.makespan)
    white = [bar for bar in work.collections if to_rgb("white") in map(to_rgb, bar.get_edgecolor())]
    edges = [float(edge) for bar in white for edge in bar.get_linewidth()]
    assert 0 < max(edges) < 0.25 * points


@pytest.mark.parametrize("sight", COLOR_BLIND)
def test_people_of_any_colour_vision_tell_the_kinds_apart(sight: str) -> None:
    """2.3 is a difference that is just seen."""
    for chunk, least in ((0, 25), (1, 10)):
        seen = {kind: _lab(np.array(action_color(kind, chunk, 2)), np.array(COLOR_BLIND[sight])) for kind in COLORS}
        apart = {pair: np.linalg.norm(seen[pair[0]] - seen[pair[1]]) for pair in combinations(seen, 2)}
        assert min(apart.values()) > least, apart


def test_copies_in_black_and_white_tell_the_kinds_apart() -> None:
    lightness = sorted(_lab(np.array(to_rgb(face)), np.eye(3))[0] for face in COLORS.values())
    assert min(np.diff(lightness)) > 10


def _lab(rgb: np.ndarray, sight: np.ndarray) -> np.ndarray:
    """CIE L*a*b* of sRGB values ``[3]`` under daylight (D65)."""
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(sight @ linear, 0, 1)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    x, y, z = np.cbrt(to_xyz @ seen / (0.9505, 1.0, 1.089))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("name", ["a.png", "a.svg"])
def test_whatever_a_run_may_leave_is_drawn(tmp_path: Path, name: str) -> None:
    one = Timeline("one", ((Interval(Action(0, "F", 0), 1, 1),), ()))
    panels = {"one": one, "none": Timeline("none", ((), ())), "real": timeline("dualpipe-v", 2, 2, 3)}
    with saved(tmp_path / name, *figure_size(panels), grid=False) as figure:
        draw_figure(figure, panels, unit="seconds", limit=3)
    assert (tmp_path / name).stat().st_size > 5000


def test_nothing_is_loaded_before_something_is_drawn() -> None:
    program = (
        "import sys, megatron.planner.timeline as p; sys.exit(bool({'matplotlib', 'numpy', 'torch'} & {*sys.modules}))"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == 0
