"""Every command of docs/phases.md runs, in order, and prints the output on the page."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.unit.test_data_docs import blocks, matches, run

PAGE = Path(__file__).parents[2] / "docs" / "phases.md"


def test_every_command_prints_the_output_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    monkeypatch.setattr("megatron.training.loggers.run_logger.draw_plots", lambda *arguments: None)
    found = list(blocks(PAGE.read_text()))
    assert len(found) >= 3
    for block in found:
        status, output = run(block.commands)
        assert status == 0, output
        assert block.output is None or matches(block.output, output), f"{block.commands}\n{output}"
