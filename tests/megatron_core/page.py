"""Write the tables of docs/coming_from_megatron.md from the kept results: ``python -m tests.megatron_core.page``."""

from __future__ import annotations

from pathlib import Path

from tests.megatron_core import moves
from tests.megatron_core.__main__ import markdown, read

PAGE = Path(__file__).parents[2] / "docs" / "coming_from_megatron.md"
MARKS = "<!-- {} -->", "<!-- end of {} -->"


def tables() -> dict[str, str]:
    """Return the tables by name."""
    rows = {name: row.split(" | ") for name, row in moves.read().items()}
    orders = [f"| {name.removeprefix('sample orders ')} | {row[0]} |" for name, row in rows.items() if len(row) == 2]
    moved = [[name, *(part.split(": ", 1)[1] for part in row[:2])] for name, row in rows.items() if len(row) == 3]
    head = "| model, layouts there | here, steps 26 to 75 | back there, steps 51 to 100 |\n|---|---|---|"
    return {
        "training": markdown(read()).strip(),
        "orders": "\n".join(["| seeds | result |\n|---|---|", *orders]),
        "moves": "\n".join([head, *(f"| {' | '.join(row)} |" for row in moved)]),
    }


def filled(text: str) -> str:
    """Return the page with its tables."""
    for name, table in tables().items():
        begin, end = (mark.format(name) for mark in MARKS)
        before, rest = text.split(begin)
        text = f"{before}{begin}\n\n{table}\n\n{end}{rest.split(end)[1]}"
    return text


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
