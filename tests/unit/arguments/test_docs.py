from __future__ import annotations

import re
from pathlib import Path

from tools.generate_docs import FLAGS, flags_page

ROOT = Path(__file__).parents[3]


def test_the_flag_reference_is_what_the_code_says() -> None:
    assert FLAGS.read_text() == flags_page(), "run: python tools/generate_docs.py"


def test_every_code_is_explained_and_no_other() -> None:
    used = set[str]()
    for path in (ROOT / "megatron").rglob("*.py"):
        used |= set(re.findall(r'"(E\d{3})"', path.read_text()))
    explained = re.findall(r"^## (E\d{3}) \S", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)
    assert explained == sorted(set(explained)), "in order, each once"
    assert set(explained) == used
