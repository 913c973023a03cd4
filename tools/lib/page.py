"""Pieces of HTML pages that need no other file and no network: the document, sections, tables and their style."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from html import escape

STYLE = """
:root { color-scheme: light dark; --ink: #1f2933; --muted: #52606d; --line: #d9dee4; --back: #fff; --best: #eef4ff; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e7eb; --muted: #9aa5b1; --line: #3e4c59; --back: #14181d; --best: #1d2a44; }
}
body { margin: 2rem auto; padding: 0 1.5rem; max-width: 76rem; color: var(--ink); background: var(--back);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.35rem; } h2 { font-size: 1.05rem; margin: 2rem 0 .5rem; }
p { color: var(--muted); } .scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
.words { text-align: left; white-space: normal; min-width: 21rem; } th { color: var(--muted); font-weight: 600; }
tr.best td { background: var(--best); }
pre { white-space: pre-wrap; overflow-wrap: anywhere; padding: .7rem; border: 1px solid var(--line);
  font-size: .85rem; }
figure { margin: 1rem 0; padding: .5rem; background: #fff; } figure svg { width: 100%; height: auto; }
.columns { display: flex; flex-wrap: wrap; gap: 0 3rem; }
"""


def document(title: str, body: Iterable[str], style: str = "", script: str = "") -> Iterator[str]:
    """Yield a page. No script but ``script`` runs in it, and it can reach nothing but the server that it came from."""
    yield f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    allowed = f"script-src 'sha256-{digest}'" if script else "script-src 'none'"
    rest = "style-src 'unsafe-inline'; img-src data:; connect-src 'self'; base-uri 'none'"
    policy = f"default-src 'none'; {allowed}; {rest}"
    yield f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    yield f"<style>{STYLE}{style}</style>\n</head>\n<body>"
    yield from body
    if script:
        yield f"<script>{script}</script>"
    yield "</body>\n</html>"


def section(heading: str, rows: Sequence[Sequence[str]], words: int | None = None) -> Iterator[str]:
    """Yield a heading and a table, whose columns from ``words`` on are texts; nothing without rows below the head."""
    if len(rows) > 1:
        yield f"<section><h2>{escape(heading)}</h2>"
        yield from html_table(rows, words)
        yield "</section>"


def html_table(rows: Iterable[Sequence[str]], words: int | None = None, best: bool = False) -> Iterator[str]:
    """Yield a table, the first row of which is its head; with ``best`` the second stands out."""
    yield '<div class="scroll"><table>'
    for number, row in enumerate(rows):
        cell = "td" if number else "th"
        kinds = (" class=words" if words is not None and n >= words else "" for n in range(len(row)))
        cells = "".join(f"<{cell}{kind}>{escape(text)}</{cell}>" for text, kind in zip(row, kinds))
        yield f"<tr{' class=best' * (best and number == 1)}>{cells}</tr>"
    yield "</table></div>"
