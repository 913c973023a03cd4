"""The simulator and the tool agree with docs/pipelines.md on schedules."""

from __future__ import annotations

import re
import shlex
from fractions import Fraction
from itertools import product
from pathlib import Path

import pytest

from megatron.pipeline.communication import add_communication
from megatron.pipeline.schedules import SCHEDULES, make_schedule
from megatron.pipeline.search import SEARCHED
from megatron.pipeline.simulate import StageCosts, Timeline, simulate
from tests.unit.pages import ROOT, page, rows
from tools.draw_schedule import main

IMAGES = ROOT / "docs" / "images" / "pipelines"
TEXT = page("pipelines")
BLOCKS = re.findall(r"^```\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
TOOL = "python tools/draw_schedule.py "
GRID = [*product((1, 2, 3), repeat=3)]
ANY = [(1, 1, 1), (2, 3, 1), (1, Fraction(1, 2), 2)]
TIMES = {
    "always": ANY,
    "p divides m": ANY,
    "w ≤ f, w ≤ i": [(f, i, w) for f, i, w in GRID if w <= min(f, i)],
    "w ≤ i ≤ f ≤ b": [(f, i, w) for f, i, w in GRID if w <= i <= f <= i + w],
    "f = i = w": [(1, 1, 1), (3, 3, 3)],
}
"""F, I and W under each condition of the table of formulas."""


def commands() -> list[tuple[str, list[str]]]:
    """Every command of the page, with the output that is shown."""
    found: list[tuple[str, list[str]]] = []
    for block in BLOCKS:
        for line in block.splitlines():
            if line.startswith(("python ", "torchrun ", "cat ", "for ", "done", "    ")):
                found.append((line.strip(), []))
            elif found:
                found[-1][1].append(line)
    return found


def test_commands_print_the_output_of_the_page(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.chdir(tmp_path)
    compared = 0
    for command, printed in commands():
        if command.startswith("cat "):
            assert (tmp_path / command.split()[1]).read_text().splitlines() == printed
        elif command.startswith(TOOL) and "--out" not in command:
            assert main(shlex.split(command)[2:]) == 0, command
            out = capsys.readouterr().out
            if printed:
                assert [line.rstrip() for line in out.splitlines()] == printed, command
        compared += bool(printed)
    assert compared >= 5


def value(formula: str, **letters: Fraction | int) -> Fraction:
    """Evaluate a formula of the table; a product is written without a sign."""
    python = re.sub(r"(?<=[\w)])(?=\()|(?<=\))(?=\w)|(?<=\d)(?=[a-z])", "*", formula).replace("min*", "min")
    exact = {letter: Fraction(number) for letter, number in letters.items()}
    return Fraction(eval(python, {"__builtins__": {}, "min": min}, exact))


def test_products_are_read() -> None:
    assert value("(p-1)(f+b)/v", p=4, f=1, b=2, v=2) == Fraction(9, 2)
    assert value("min(m, 2p-1)", m=9, p=3) == 5
    assert value("(p-1)f/2", p=4, f=3) == Fraction(9, 2)


def timeline(name: str, p: int, v: int, m: int, f: Fraction, i: Fraction, w: Fraction) -> Timeline:
    stages, share = p * v, Fraction(1, v)
    forward, input, weight = ((Fraction(x) * share,) * stages for x in (f, i, w))
    costs = StageCosts(forward, input, weight, 0, 0, (share,) * stages, (share,) * stages)
    return simulate(add_communication(make_schedule(name, p, v, m)), costs)


@pytest.mark.parametrize("row", rows(TEXT, "schedule | stages on a rank"), ids=lambda row: row[0])
def test_formulas_match_the_simulator_exactly(row: list[str]) -> None:
    name, chunks, idle, where, memory = row
    sizes = [(p, m) for p in (1, 2, 3, 4, 6) for m in (2 * p, 3 * p, 2 * p + 1) if where != "p divides m" or m % p == 0]
    for p, m in sizes:
        for v in (1, 2, 3) if chunks == "v" else (int(chunks),):
            for f, i, w in TIMES[where]:
                made = timeline(name, p, v, m, f, i, w)
                letters = {"p": p, "v": v, "m": m, "f": f, "i": i, "w": w, "b": i + w}
                assert made.makespan - m * (f + i + w) == value(idle, **letters), letters
                assert max(made.peak_memory) == value(memory, **letters), letters


def test_every_schedule_has_a_row_a_section_and_a_picture() -> None:
    assert [row[0] for row in rows(TEXT, "schedule | stages on a rank")] == [*SCHEDULES]
    assert re.findall(r"^### (\S+)\n", TEXT, re.MULTILINE) == [*SCHEDULES, SEARCHED]
    for name in (*SCHEDULES, SEARCHED):
        assert f"](images/pipelines/{name}.png)" in TEXT
    for section in TEXT.split("\n### ")[1:]:
        name = section.split("\n")[0]
        assert name not in SCHEDULES or "\nSource: " in section
    for _, advice in rows(TEXT, "you have"):
        assert {*re.findall("`(.+?)`", advice)} <= {*SCHEDULES, SEARCHED}


def test_pictures_are_there_and_none_is_left_over() -> None:
    linked = re.findall(r"\]\(images/pipelines/(\S+)\)", TEXT)
    assert sorted(linked) == sorted(path.name for path in IMAGES.iterdir())
    for name in linked:
        assert (IMAGES / name).read_bytes().startswith(b"\x89PNG")
    drawn = " ".join(command for command, _ in commands())
    loop = re.findall(r"for name in ([^;]+);", drawn)[0].split()
    made = {*loop, *re.findall(r"--out docs/images/pipelines/(\w+)\.png", drawn)}
    assert {f"{name}.png" for name in made} == {*linked}


def test_the_tables_that_are_printed_have_every_schedule() -> None:
    tables = [printed for command, printed in commands() if "--compare all" in command and printed]
    assert len(tables) == 2
    for printed in tables:
        assert [line.split()[0] for line in printed[1:]] == [*SCHEDULES, SEARCHED]
