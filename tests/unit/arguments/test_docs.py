from __future__ import annotations

import re
from pathlib import Path

from tools.generate_docs import FLAGS, flags_page

ROOT = Path(__file__).parents[3]


def test_the_flag_reference_is_up_to_date() -> None:
    assert FLAGS.read_text() == flags_page(), "run: python tools/generate_docs.py"


def test_every_code_is_explained_and_no_other() -> None:
    used = set[str]()
    for path in (*(ROOT / "megatron").rglob("*.py"), *(ROOT / "tools").glob("*.py")):
        used |= set(re.findall(r'(?:"|^ *)(E\d{3})\b', path.read_text(), re.MULTILINE))
    explained = re.findall(r"^## (E\d{3}) \S", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)
    assert explained == sorted(set(explained)), "in order, each once"
    assert set(explained) == used


def test_codes_that_only_the_start_reports_are_listed() -> None:
    """All codes outside the modules that ``--check-config`` calls, without codes of other programs."""
    checked = ("arguments/", "config/", "planner/", "distributed/layout.py", "training/machine.py")
    checked += ("training/resume_source.py", "training/failure_report.py", "convert/megatron_lm/model.py")
    checked += (
        "convert/huggingface/",
        "convert/sources.py",
        "training/measured_run.py",
        "data/skipped_dataset.py",
        "training/phases.py",
    )
    found = {"E916"}  # of variables, which only a start sets, beside the checks of the machine
    for path in (ROOT / "megatron").rglob("*.py"):
        if not str(path.relative_to(ROOT / "megatron")).startswith(checked):
            found |= set(re.findall(r'"(E\d{3})"', path.read_text()))
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    table = page.split("## What only the start finds\n")[1].split("\n## ")[0].split("|---|---|\n")[1]
    assert set(re.findall(r"E\d{3}", table)) == found
