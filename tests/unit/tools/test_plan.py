"""The report of ``megatron plan``: its commands as runs accept them, its numbers as the planner's, its files."""

from __future__ import annotations

import json
import math
import re
import shlex
from html.parser import HTMLParser
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import pytest

from megatron.arguments.cli import parse
from megatron.planner.memory import max_peak_bytes, peaks_by_rank
from megatron.planner.report import ACCURACY, short, step_rows
from megatron.planner.search import HEADROOM
from megatron.planner.step_time import PARTS
from tools.plan import main

ROOT = Path(__file__).parents[3]

SMALL = (
    "--gpus 8 --gpu h100-80g --preset gpt2-124m --global-batch-size 64 --seq-length 512 --pipeline-schedule 1f1b"
    " --pipeline-model-parallel-size 2 --tokens 1B --count 4"
)


def printed(capsys: pytest.CaptureFixture[str], flags: str, status: int = 0) -> str:
    assert main(shlex.split(flags)) == status
    found = capsys.readouterr()
    return found.err if status else found.out


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with all files of one plan and what was printed."""
    path = tmp_path_factory.mktemp("plan")
    with pytest.MonkeyPatch.context() as patch:
        lines: list[str] = []
        patch.setattr("sys.stdout", type("Written", (), {"write": lambda self, text: lines.append(text)})())
        files = " ".join(f"--{kind} {path / f'plan.{kind}'}" for kind in ("json", "png", "html"))
        assert main(shlex.split(f"{SMALL} --price 2 --explain {files}")) == 0
    (path / "text").write_text("".join(lines))
    return path


def test_command_lines_are_accepted_as_printed(folder: Path) -> None:
    found = json.loads((folder / "plan.json").read_text())
    text = (folder / "text").read_text()
    assert found["plans"][0]["command"] in text
    for plan in found["plans"]:
        program, name, *flags = shlex.split(plan["command"])
        parsed = parse(flags, {})
        assert (program, name, parsed.world_size, parsed.check_only) == ("python", "pretrain_gpt.py", 8, True)
        assert max_peak_bytes(parsed.config, 8) == plan["memory"]
        parallel, layout = parsed.config.parallel, plan["layout"]
        assert (layout["TP"], layout["PP"]) == (str(parallel.tensor_model_parallel_size), "2")
        assert layout["DP"] == str(parallel.data_parallel_size(8))
        assert parsed.config.training.train_iters == plan["costs"]["steps"]
        assert parallel.pipeline_schedule == "1f1b"


def test_numbers_add_up(folder: Path) -> None:
    found = json.loads((folder / "plan.json").read_text())
    best = found["plans"][0]
    assert sum(best["parts"].values()) == pytest.approx(best["seconds"])
    assert [plan["seconds"] for plan in found["plans"]] == sorted(plan["seconds"] for plan in found["plans"])
    for plan in found["plans"]:
        config = parse(shlex.split(plan["command"])[2:], {}).config
        by_rank = [sum(parts.values()) for parts in peaks_by_rank(config, 8)]
        assert [sum(parts.values()) for parts in plan["memory_by_pipeline_rank"]] == by_rank
        assert max(by_rank) == sum(plan["memory"].values()) < found["capacity"]
    costs = best["costs"]
    assert costs["days"] * 86400 == pytest.approx(best["seconds"] * 1e9 / (64 * 512), rel=1e-4)
    assert costs["price"] == pytest.approx(2 * 8 * 24 * costs["days"])


def test_text_has_what_json_has(folder: Path) -> None:
    found, text = json.loads((folder / "plan.json").read_text()), (folder / "text").read_text()
    rows = re.findall(r"^ ?\d+  .*$", text, re.MULTILINE)
    assert all(short(plan["seconds"]) in row for plan, row in zip(found["plans"], rows, strict=True))
    assert all(line in text for line in found["explanation"])
    for neighbour in found["neighbours"]:
        assert re.search(rf"{re.escape(neighbour['change'])} +{re.escape(neighbour['reason'])}", text)
    for point in found["sensitivity"]:
        if point["kept_seconds"] is not None:
            assert short(point["kept_seconds"]) in text
        assert bool(point["refused"]) == (point["kept_seconds"] is None)
        assert point["refused"] in text
    assert any(point["refused"] for point in found["sensitivity"])
    best = found["plans"][0]
    listed = dict(re.findall(r"^ +([a-z]+) +[\d.e-]+ s +([\d.]+)%$", text, re.MULTILINE))
    assert listed.keys() == {part for part, each in best["parts"].items() if each >= 0.0005 * best["seconds"]}
    assert "0.0" not in listed.values()
    assert ("as nothing is recomputed" in text) == (best["layout"]["recompute"] == "none")
    assert " 1 blocks" not in text
    assert any("%" in neighbour["reason"] for neighbour in found["neighbours"])


def test_parts_that_would_be_shown_as_zero_are_not() -> None:
    parts = dict.fromkeys(PARTS, 0.0) | {"compute": 0.999, "data": 0.0006, "optimizer": 0.0004}
    plan = SimpleNamespace(time=SimpleNamespace(parts=parts, seconds=1.0))
    assert [row[0] for row in step_rows(plan)] == ["compute", "data", "sum"]  # type: ignore[arg-type]


def test_accuracy_is_that_of_the_published_runs() -> None:
    sources = json.loads((ROOT / "benchmarks/results/published.json").read_text())["sources"].values()
    for kind, experts in (("dense", False), ("experts", True)):
        sizes = sorted(abs(error) for source in sources for error in source[kind])
        high = sizes[math.ceil(0.9 * len(sizes)) - 1]
        numbers = re.findall(r"[\d.]+", ACCURACY[experts])
        assert numbers == [str(len(sizes)), f"{100 * median(sizes):.1f}", "90", f"{100 * high:.1f}"]


class Page(HTMLParser):
    """Reads the elements and the texts of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loaded: list[str] = []
        self.cells: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "link", "img", "br"):
            self.open.append(tag)
        self.loaded += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th", "pre"):
            self.cells.append(data)


def test_page_is_complete_and_loads_nothing(folder: Path) -> None:
    text, found = (folder / "plan.html").read_text(), json.loads((folder / "plan.json").read_text())
    page = Page(text)
    assert page.open == []
    assert all(target.startswith("#") for target in page.loaded)  # glyphs of the picture
    assert not re.search(r"@import|url\((?!#)", text)
    assert all(plan["command"] in page.cells for plan in found["plans"])
    assert all(neighbour["reason"] in page.cells for neighbour in found["neighbours"])
    assert "<svg" in text


def test_picture_is_drawn(folder: Path) -> None:
    from matplotlib.image import imread

    picture = imread(folder / "plan.png")
    assert picture.shape[0] > 1000
    assert picture.shape[1] == 13 * 150
    assert len({tuple(pixel[:3]) for row in picture[::10] for pixel in row[::10]}) > 20


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--gpu h100", "--gpu h100-80g"),
        ("--tokens 1B --train-iters 10", "--tokens and --train-iters contradict"),
        ("--vocab-size 0", "--vocab-size"),
        ("--max-day 5", "did you mean --max-days?\n  fix: --max-days 5"),
        ("--seq-lenght 512", "did you mean --seq-length?"),
        ("--hidden-size 100 --num-attention-heads 3", "does not divide into 3 heads"),
    ],
)
def test_mistakes_are_refused_with_a_sentence(capsys: pytest.CaptureFixture[str], flags: str, message: str) -> None:
    assert message in printed(capsys, f"--gpus 8 --preset gpt2-124m {flags}", 2)


def test_files_are_checked_before_the_search(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for files, message in (
        (f"--json {tmp_path}", "it is a folder"),
        (f"--html {tmp_path}/none/plan.html", "no such folder"),
        (f"--png {tmp_path}/plan", "needs an extension"),
    ):
        assert message in printed(capsys, f"--gpus 8 --preset gpt3-175b {files}", 1)


def test_a_batch_is_that_of_the_paper_or_required(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --vocab-size 128"
    assert "--global-batch-size 512" in printed(capsys, f"--gpus 8 {sizes}", 2)
    assert "the preset tiny-llama has none of a paper" in printed(
        capsys, "--gpus 1 --preset tiny-llama --vocab-size 512", 2
    )


def test_too_few_days_name_enough_accelerators(capsys: pytest.CaptureFixture[str]) -> None:
    run = "--preset gpt2-124m --global-batch-size 64 --tokens 10T"
    run += " --pipeline-model-parallel-size 1 --tensor-model-parallel-size 1 --micro-batch-size 4"
    text = printed(capsys, f"--gpus 2 {run} --max-days 0.1", 2)
    days = float(re.findall(r"takes ([\d.]+) days", text)[0])
    fewer = f"--max-days {0.7 * days}"
    more = re.findall(r"fix: --gpus (\d+)", printed(capsys, f"--gpus 2 {run} {fewer}", 2))
    assert more == ["4"]
    assert "plan 1" in printed(capsys, f"--gpus {more[0]} {run} {fewer}")


def test_a_run_that_fits_nowhere_names_enough_accelerators(capsys: pytest.CaptureFixture[str]) -> None:
    run = "--gpu rtx4090-24g --preset gpt2-1.5b --global-batch-size 64 --micro-batch-size 1 --count 1"
    run += " --pipeline-model-parallel-size 1 --cpu-offloading-num-layers 0 --no-optimizer-cpu-offload"
    text = printed(capsys, f"--gpus 1 {run}", 2)
    enough = float(re.findall(r"or ([\d.]+) GiB per rank", text)[0])
    assert HEADROOM * enough > 18 * 1.557e9 / 2**30  # bytes of weights, gradients, main parameters and moments
    count = re.findall(r"fix: --gpus (\d+)", text)[0]
    assert "plan 1" in printed(capsys, f"--gpus {count} {run}")
