"""The command line of tools/generate_docs.py; tests/unit/arguments/test_docs.py checks the pages themselves."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import generate_docs


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path that the tool writes to."""
    monkeypatch.setattr(generate_docs, "ROOT", tmp_path)
    (tmp_path / "logs.md").write_text(generate_docs.LOGS.read_text())
    monkeypatch.setattr(generate_docs, "LOGS", tmp_path / "logs.md")
    monkeypatch.setattr(generate_docs, "FLAGS", tmp_path / "flags.md")
    return tmp_path / "flags.md"


def test_the_page_is_written(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate_docs.main([]) == 0
    assert page.read_text() == generate_docs.flags_page()
    assert capsys.readouterr().out == "flags.md\nlogs.md\n"


def test_help_writes_nothing(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        generate_docs.main(["--help"])
    assert "docs/flags.md" in capsys.readouterr().out
    assert not page.exists()


@pytest.mark.parametrize("argument", ["--check", "flags.md"])
def test_unknown_arguments_are_refused(argument: str, page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        generate_docs.main([argument])
    assert argument in capsys.readouterr().err
    assert not page.exists()
