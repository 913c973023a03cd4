from __future__ import annotations

import re
from pathlib import Path

from tools.generate_docs import FLAGS, flags_page

ROOT = Path(__file__).parents[3]


def test_the_flag_reference_is_up_to_date() -> None:
    assert FLAGS.read_text() == flags_page(), "run: python tools/generate_docs.py"


def test_every_code_is_explained_and_no_other() -> None:
    used = set[str]()
    for path in (each for top in ("megatron", "tools", "tasks") for each in (ROOT / top).rglob("*.py")):
        used |= set(re.findall(r'(?:"|^ *)(E\d{3})\b', path.read_text(), re.MULTILINE))
    explained = re.findall(r"^## (E\d{3}) \S", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)
    assert explained == sorted(set(explained)), "in order, each once"
    assert set(explained) == used


def test_every_entry_explains_and_has_a_way_out() -> None:
    """The message has what is wrong; the entry has why, and a flag, a command or a sentence on what to do."""
    entries = re.split(r"^## (?=E\d{3} )", (ROOT / "docs" / "troubleshooting.md").read_text(), flags=re.MULTILINE)[1:]
    assert [entry.split("\n")[0] for entry in entries if not explains(entry)] == []
    assert not explains("E007 unknown preset\n[flags.md](flags.md) lists the presets.\n")
    assert not explains("E102 heads\nEvery head serves the same number of heads, and no head serves none.\n")


def explains(entry: str) -> bool:
    """Return True if an entry has two sentences, and something to type or to do."""
    text = " ".join(entry.split("\n", 1)[1].split())
    return len(re.findall(r"[.:;](?: |$)", text)) > 1 and ("`" in text or "Fix: " in text)


def test_codes_that_only_the_start_reports_are_listed() -> None:
    """All codes outside the modules that ``--check-config`` calls, without codes of other programs."""
    checked = ("arguments/", "config/", "planner/", "distributed/layout.py", "training/machine.py")
    checked += ("training/resume_source.py", "training/failure_report.py", "convert/megatron_lm/model.py")
    checked += (
        "convert/huggingface/",
        "convert/frameworks/",
        "checkpoint/framework_folders.py",
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
