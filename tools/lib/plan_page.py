"""A plan as one HTML page, which needs no other file and no network."""

from __future__ import annotations

from collections.abc import Iterator
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
from tools.lib.page import document, html_table, section
from tools.lib.plan_figures import draw_plan


def plan_page(report: PlanReport) -> str:
    """Return the page. Raises ``ValueError`` if matplotlib is missing."""
    return printable("\n".join(document(title(report), _page(report)))) + "\n"


def _page(report: PlanReport) -> Iterator[str]:
    best = report.plans[0]
    yield f"<h1>{escape(title(report))}</h1>"
    if report.assumed:
        yield f"<p>Assumed: <code>{escape(report.assumed)}</code></p>"
    yield "<h2>Fastest layouts that fit</h2>"
    head, rows = table(report)
    yield from html_table([head, *rows], best=True)
    yield f"<h2>Plan 1: {escape(describe_layout(best, report.search.world_size))}</h2>"
    yield "<p>This checks the plan; a run drops the last two flags.</p>"
    yield f"<pre>{escape(report.command(best))}</pre>"
    yield f'<figure role="img" aria-label="Memory, time and sensitivity of plan 1">{_picture(report)}</figure>'
    yield '<div class="columns">'
    yield from section("Seconds of a step", [["part", "takes", "share"], *step_rows(best)])
    yield from section("Communication in a step", [*communication_rows(best)])
    yield from section("What the run takes", [["", "plan 1"], *map(list, cost_rows(report))], words=1)
    yield "</div>"
    fits = f"GiB of a rank by pipeline rank; {report.search.capacity / 2**30:.1f} fit"
    yield from section(fits, [*memory_rows(report)])
    choices = [[each.change, why_not(each), " ".join(each.flags)] for each in report.neighbours]
    yield from section("Other choices", [["change", "why not", "flags"], *choices], words=1)
    yield from section("Other networks, batches and numbers of accelerators", [*sweep_rows(report)])
    yield "<details><summary>Formulas with their numbers</summary>"
    yield f"<pre>{escape(chr(10).join(explanation(report)))}</pre></details>"
    if len(report.plans) > 1:
        yield "<details><summary>Command lines of the other plans</summary>"
        yield from (f"<pre>{escape(report.command(plan))}</pre>" for plan in report.plans[1:])
        yield "</details>"


def _picture(report: PlanReport) -> str:
    """Return the SVG element of the picture."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "plan.svg"
        draw_plan(report, path)
        text = path.read_text(encoding="utf-8")
    return text[text.index("<svg") :]
