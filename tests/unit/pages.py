"""The texts of the documents, and the tables in them."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]


def page(name: str) -> str:
    """Return the text of a page of ``docs/``."""
    return (ROOT / "docs" / f"{name}.md").read_text()


def rows(text: str, heading: str) -> list[list[str]]:
    """Return the cells of the first table whose header begins so."""
    table = text[text.index(f"\n| {heading} |") :].split("\n\n")[0].strip().splitlines()[2:]
    return [[cell.strip() for cell in row[1:-1].split("|")] for row in table]
