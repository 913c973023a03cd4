"""What the README names exists: links, flags, presets."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.arguments.presets import PRESETS
from tests.distributed import product
from tests.distributed.grid import FACTORS, valid
from tests.distributed.pairwise import covering
from tools.draw_schedule import main

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FOREIGN = {"--index-url", "--no-deps", "--nproc-per-node", "--nnodes", "--rdzv-backend", "--rdzv-endpoint"}
"""Flags of pip and torchrun."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_flags_exist() -> None:
    tools = ["pretrain_gpt.py", *(str(path.relative_to(ROOT)) for path in (ROOT / "tools").glob("*.py"))]
    commands = [[sys.executable, str(ROOT / tool), "--help"] for tool in tools]
    commands.append(["bash", str(ROOT / "examples" / "quickstart.sh"), "--help"])
    helps = "".join(
        subprocess.run(
            c,
            cwd=ROOT,
            env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for c in commands
    )
    known = set(re.findall(r"--[a-z0-9-]+", helps)) | FOREIGN
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", PAGES[0].read_text())) <= known


def test_presets_are_all_named() -> None:
    row = next(line for line in PAGES[0].read_text().splitlines() if line.startswith("| presets"))
    families = re.findall(r"(\w+)-([\w./]+)", row)
    assert {f"{family}-{size}" for family, sizes in families for size in sizes.split("/")} == set(PRESETS)


def test_the_layout_matrix_is_as_large_as_it_says() -> None:
    text = " ".join(PAGES[0].read_text().split())
    assert (
        f"CI runs {len(covering(FACTORS, valid))} further ones that cover every pair of {len(FACTORS)} factors" in text
    )


def test_schedules_are_compared_as_it_says(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    text = PAGES[0].read_text()
    (command,) = re.findall(r"^python tools/draw_schedule.py (--compare .*?) +#", text, re.MULTILINE)
    assert main(command.split()) == 0
    assert "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines()) in text


def test_the_table_of_layouts_is_that_of_the_log() -> None:
    readme, rows = PAGES[0].read_text(), product.for_readme(product.FILE.read_text())
    table = readme.split("## The same numbers in every layout")[1].split("\n\n")[2].splitlines()
    assert table[2:] == rows
    total = sum(int(row.split("|")[2].replace(",", "")) for row in rows)
    assert f"{total:,} layouts and models, none failed" in readme


def test_every_tool_is_in_the_table_of_exit_statuses() -> None:
    operations = (ROOT / "docs" / "operations.md").read_text()
    table = operations.split("## Exit statuses of the tools")[1].split("\n\n")[1]
    named = set(re.findall(r"^\| `(\w+\.py)", table, re.MULTILINE))
    assert named == {path.name for path in (ROOT / "tools").glob("*.py")}
