"""A plan as one HTML page, which needs no other file and no network."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory

from megatron.config.text import printable
from megatron.planner.report import (
    PlanReport,
    communication_rows,
    cost_rows,
    describe_layout,
    explanation,
    memory_rows,
    step_rows,
    sweep_rows,
    table,
    title,
    why_not,
)
from tools.lib.plan_figures import draw_plan

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


def plan_page(report: PlanReport) -> str:
    """Return the page. Raises ``ValueError`` if matplotlib is missing."""
    return printable("\n".join(_page(report))) + "\n"


def _page(report: PlanReport) -> Iterator[str]:
    best = report.plans[0]
    heading = escape(title(report))
    yield f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{heading}</title>'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<style>{STYLE}</style>\n</head>\n<body>\n<h1>{heading}</h1>"
    if report.assumed:
        yield f"<p>Assumed: <code>{escape(report.assumed)}</code></p>"
    yield "<h2>Fastest layouts that fit</h2>"
    head, rows = table(report)
    yield from _table([head, *rows], best=True)
    yield f"<h2>Plan 1: {escape(describe_layout(best, report.search.world_size))}</h2>"
    yield "<p>This checks the plan; a run drops the last two flags.</p>"
    yield f"<pre>{escape(report.command(best))}</pre>"
    yield f'<figure role="img" aria-label="Memory, time and sensitivity of plan 1">{_picture(report)}</figure>'
    yield '<div class="columns">'
    yield from _section("Seconds of a step", [["part", "takes", "share"], *step_rows(best)])
    yield from _section("Communication in a step", [*communication_rows(best)])
    yield from _section("What the run takes", [["", "plan 1"], *map(list, cost_rows(report))], words=1)
    yield "</div>"
    fits = f"GiB of a rank by pipeline rank; {report.search.capacity / 2**30:.1f} fit"
    yield from _section(fits, [*memory_rows(report)])
    choices = [[each.change, why_not(each), " ".join(each.flags)] for each in report.neighbours]
    yield from _section("Other choices", [["change", "why not", "flags"], *choices], words=1)
    yield from _section("Other networks, batches and numbers of accelerators", [*sweep_rows(report)])
    yield "<details><summary>Formulas with their numbers</summary>"
    yield f"<pre>{escape(chr(10).join(explanation(report)))}</pre></details>"
    if len(report.plans) > 1:
        yield "<details><summary>Command lines of the other plans</summary>"
        yield from (f"<pre>{escape(report.command(plan))}</pre>" for plan in report.plans[1:])
        yield "</details>"
    yield "</body>\n</html>"


def _section(heading: str, rows: Sequence[Sequence[str]], words: int | None = None) -> Iterator[str]:
    """Yield a heading and a table, whose columns from ``words`` on are texts; nothing without rows below the head."""
    if len(rows) > 1:
        yield f"<section><h2>{escape(heading)}</h2>"
        yield from _table(rows, words)
        yield "</section>"


def _table(rows: Iterable[Sequence[str]], words: int | None = None, best: bool = False) -> Iterator[str]:
    yield '<div class="scroll"><table>'
    for number, row in enumerate(rows):
        cell = "td" if number else "th"
        kinds = (" class=words" if words is not None and n >= words else "" for n in range(len(row)))
        cells = "".join(f"<{cell}{kind}>{escape(text)}</{cell}>" for text, kind in zip(row, kinds))
        yield f"<tr{' class=best' * (best and number == 1)}>{cells}</tr>"
    yield "</table></div>"


def _picture(report: PlanReport) -> str:
    """Return the SVG element of the picture."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "plan.svg"
        draw_plan(report, path)
        text = path.read_text(encoding="utf-8")
    return text[text.index("<svg") :]
