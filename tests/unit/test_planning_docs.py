"""Commands of docs/planning.md print what the page shows, and its derivations give its figures.

``python -m tests.unit.test_planning_docs`` writes the lines that the commands print now into the page; forecasts of
seconds change with the model of time, and are compared within 30 %.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest
import torch

import pretrain_gpt
from megatron.arguments.presets import PRESETS
from megatron.arguments.sources import build_config
from megatron.layers.parameters import num_parameters
from megatron.pipeline.communication import add_communication
from megatron.pipeline.schedules import make_schedule
from megatron.pipeline.simulate import StageCosts, simulate
from megatron.planner.hardware import Efficiency, accelerators
from tests.unit.pages import ROOT, page, rows
from tools import draw_schedule, memory, plan

TEXT = page("planning")
BLOCK = re.compile(r"^```bash\n(.*)\n```\n\n```text( forecast)?\n((?:.+\n)+)```$", re.MULTILINE)
BLOCKS = [found.groups() for found in BLOCK.finditer(TEXT)]
PROGRAMS: dict[str, Callable[[list[str]], int]] = {
    "pretrain_gpt.py": pretrain_gpt.main,
    "tools/draw_schedule.py": draw_schedule.main,
    "tools/memory.py": memory.main,
    "tools/plan.py": plan.main,
}
NUMBER = re.compile(r"\d[\d,]*\.?\d*")


def run(command: str) -> list[str]:
    """Return the lines that a command prints, in this process."""
    _, program, *argv = shlex.split(command)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        if program == "-c":
            exec(argv[0], {})  # of this repository's page
        else:
            assert PROGRAMS[program](argv) == 0, command
    return out.getvalue().splitlines()


def label(line: str) -> tuple[str, bool]:
    """Question of a row, and whether it belongs to the table of bytes."""
    return NUMBER.split(line)[0].strip(), "GiB" in line


def values(line: str) -> list[float]:
    return [float(number.replace(",", "")) for number in NUMBER.findall(line)]


@pytest.mark.parametrize(("command", "forecast", "shown"), BLOCKS, ids=range(len(BLOCKS)))
def test_commands_print_what_the_page_shows(command: str, forecast: str | None, shown: str) -> None:
    printed = run(command)
    for line in shown.splitlines():
        if forecast is None:
            assert line in [each.rstrip() for each in printed], "\n".join(printed)
            continue
        alike = [values(each)[: len(values(line))] for each in printed if label(each) == label(line)]
        assert any(each == pytest.approx(values(line), rel=0.3) for each in alike), (line, printed)


def test_bytes_under_zero_are_those_of_the_formulas() -> None:
    table = rows(TEXT, "stage")
    for _, paper, of_paper, here, of_here in table:
        for formula, figure in ((paper, of_paper), (here, of_here)):
            assert eval(formula.replace("n", "4")) == float(figure)
    wholes = [float(row[4]) for row in table]
    size = num_parameters(build_config(dict(PRESETS["llama2-7b"])).model)
    assert [f"{size * each / 2**30:.2f}" for each in wholes] == ["112.96", "56.48", "37.65", "28.24"]
    papers = [float(row[2]) for row in table]
    assert [f"{papers[0] / papers[1]:.1f}", f"{wholes[0] / wholes[1]:.1f}"] == ["2.3", "2.0"]
    assert [f"{papers[0] / papers[2]:.1f}", f"{wholes[0] / wholes[2]:.1f}"] == ["2.9", "3.0"]


@pytest.mark.parametrize("stages", [4, pytest.param(32, marks=pytest.mark.slow)])
def test_micro_batches_for_an_efficiency_are_the_fewest(stages: int) -> None:
    """Against the simulator, which knows no formula."""

    def efficiency(microbatches: int) -> Fraction:
        costs = StageCosts(*[(Fraction(1),) * stages] * 3)
        timeline = simulate(add_communication(make_schedule("1f1b", stages, 1, microbatches)), costs)
        return sum(timeline.busy) / len(timeline.busy) / Fraction(timeline.makespan)

    (found,) = [[int(cell) for cell in row] for row in rows(TEXT, "stages") if row[0] == str(stages)]
    for share, microbatches in zip((Fraction(9, 10), Fraction(19, 20)), found[1:]):
        assert efficiency(microbatches) >= share > efficiency(microbatches - 1)


def test_derivations_give_the_figures_of_the_text() -> None:
    h100, reached = accelerators()["h100-80g"], Efficiency()
    flops, network, link = h100.peak("bf16") * 0.75, 12.5e9 * 0.8, h100.link.bandwidth * 0.75
    sizes = {name: num_parameters(build_config(dict(PRESETS[f"llama3-{name}"])).model) for name in ("70b", "405b")}
    a, gib = 8192 * 8192 * 2, 2**30
    figures = {
        f"{16 / 19:.1%}": "84.2%",
        f"{3 / 16:.1%}": "18.8%",
        f"{15 / 143:.1%} {15 / 527:.1%}": "10.5% 2.8%",
        f"{18 * sizes['405b'] / 1e12:.1f} {18 * sizes['405b'] / 2048 / 1e9:.1f}": "7.3 3.6",
        f"{sizes['405b'] / 1e9:.1f}B": "405.9B",
        f"{10 * 7 / 8 * a * 20 * 64 / gib:,.0f} GiB": "1,400 GiB",
        f"{2 * a / 8 * 64 * 15 / 4 / gib:.1f} GiB": "7.5 GiB",
        f"{6 * sizes['70b'] / 32 * 7 / 8 / 1e9:.1f} {6 * sizes['70b'] / 32 * 7 / 8 / gib:.1f}": "11.6 10.8",
        f"{8 * sizes['70b'] * 255 / 256 / 1e9:.0f} {8 * sizes['70b'] * 255 / 256 / 8 / network:.0f}": "562 7",
        f"{3_200_064 / 3_320_640:.0%}": "96%",
        f"{flops / network / 1e3:.0f} {flops / (4 * network) / 1e3:.0f}": "74 19",
        f"{20 * 7 * flops / (72 * 8192 * link):.1f} {20 * 7 * flops / (72 * 8192 * network):.0f}": "0.5 18",
        f"{torch.finfo(torch.float16).max:,.0f}": "65,504",
    }
    assert {*figures} == {*figures.values()}
    assert (reached.matmul, reached.link, reached.network) == (0.75, 0.75, 0.8)
    assert torch.finfo(torch.float16).smallest_normal * torch.finfo(torch.float16).eps == 2**-24
    text = " ".join(TEXT.split()).replace(" %", "%")
    for words in figures.values():
        assert all(word in text for word in words.split()), words
    assert 0.95 < 32 * flops / (24 * h100.host.bandwidth) / 18_000 < 1.05


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "zeros"), [("--fp16 --loss-scale 1", 3_200_064), ("--fp16 --loss-scale 65536", 0), ("--bf16", 0)]
)
def test_gradients_that_are_zero_without_a_scaler(tmp_path: Path, flags: str, zeros: int) -> None:
    (command,) = re.findall(r"^python (pretrain_gpt.py .*) --fp16 --loss-scale 1$", TEXT, re.MULTILINE)
    run(f"python {command.replace('RUN', str(tmp_path))} {flags}")
    lines = map(json.loads, (tmp_path / "metrics.jsonl").open())
    assert [line["num-zeros"] for line in lines if "num-zeros" in line] == [zeros]
    assert f"`num-zeros` in `RUN/metrics.jsonl` is {3_200_064:,}" in TEXT


def rewrite(found: re.Match[str]) -> str:
    """Return a block with the lines that its command prints now."""
    command, forecast, shown = found.groups()
    printed = {label(line): line.rstrip() for line in reversed(run(command)) if values(line)}
    ends = {row: [found.end() for found in NUMBER.finditer(line)] for row, line in printed.items()}
    lines = []
    for line in shown.splitlines():
        now = printed.get(label(line), line)
        if forecast:  # of the first columns
            now = now[: ends[label(line)][len(values(line)) - 1]] + NUMBER.split(line)[-1]
        lines.append(now)
    return f"```bash\n{command}\n```\n\n```text{forecast or ''}\n" + "\n".join(lines) + "\n```"


if __name__ == "__main__":
    (ROOT / "docs" / "planning.md").write_text(BLOCK.sub(rewrite, TEXT))
