"""The page of a run: what its folder records, for people, as one HTML document."""

from __future__ import annotations

import base64
import json
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from megatron.config.files import read_small
from megatron.config.settings import SETTINGS
from megatron.config.text import counted, format_bytes, format_compact, printable
from megatron.training.loggers.base import WENT_BACK
from megatron.training.loggers.plots import running_mean
from megatron.training.loggers.run_folder import HEALTH_FILE
from tools.lib.charts import MARKS, ChartBook, compact
from tools.lib.page import document, html_table, section
from tools.lib.report_facts import (
    Curves,
    Happening,
    at,
    done,
    duration,
    forecast_rows,
    happenings,
    learning_charts,
    marks,
    option_text,
    phase_spans,
    planned_tokens,
    run_state,
    seconds_left,
    slow_ranks,
    speed_charts,
    summary_rows,
)
from tools.lib.run_hours import INSIDE, PARTS, RunHours, run_hours
from tools.lib.run_record import RunRecord

MAX_ROWS = 300
"""Rows of a table; of more the last are shown."""

MAX_PICTURE_BYTES = 2 << 20
PNG = b"\x89PNG\r\n"
MAX_TEXT = 2_000  # characters of a text
NOT_MEASURED = "not measured"
REFUSED = re.compile(r"(note: |E\d{3} )")  # errors of flags and files; some come in the middle of a run
END_SECONDS = 60.0  # between the last record of a start and the error that ends it
STRIPED = ("unrecorded", "waiting", "bubble", "data")  # parts of bars on which no word can be read
HEAT_LEVELS = (0, 25, 50, 75, 90, 110, 150, 200, 400)
"""Lower ends of the colours of a heat map, in percent of the mean load; 0 stands for an idle expert alone."""


@dataclass(frozen=True)
class PageOptions:
    """What the page shows besides the run folder."""

    # Of an accelerator-hour, in any currency; None if unknown.
    price: float | None = None
    other: RunRecord | None = None
    # Lines of tools/diff_runs.py on the other run.
    differences: Sequence[str] = ()
    # Tokens read of each source; None if the data were not opened.
    read: Mapping[str, int] | None = None


def report_page(record: RunRecord, options: PageOptions, now: float | None = None) -> str:
    """Return the page of a run."""
    return page_around(report_body(record, options, now), run_name(record))


def page_around(body: str, title: str) -> str:
    """Return the page with a body of :func:`report_body`."""
    here = Path(__file__)
    style, script = (here.with_name(f"report.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    return "\n".join(document(title, ['<main id="report">', body, "</main>"], style, script)) + "\n"


def run_name(record: RunRecord) -> str:
    """Return the name of a run: that of its folder."""
    return printable(record.folder.resolve().name)


def report_body(record: RunRecord, options: PageOptions, now: float | None = None) -> str:
    """Return what is inside the page, which changes while a run goes on."""
    hours, found = run_hours(record), happenings(record)
    tokens = done(record)[1]
    first = float(np.nanmin(record.column("consumed-tokens"))) if record.lines else 0.0
    planned = planned_tokens(record)
    flags = marks(found)
    last = max(tokens, first, 1.0, *(mark.x for mark in flags))  # what was undone happened further on
    book = ChartBook(0.0, last, flags, phase_spans(record, tokens))
    parts = [
        *_header(record, options, hours, planned, time.time() if now is None else now),
        *_charts(record, options, book, found),
        *_hours(hours),
        *_speed(record, book, options, hours),
        *_experts(record),
        *_health(record),
        *_data(record, options),
        *_checkpoints(record),
        *_incidents(record),
        *_differences(options),
        *_configuration(record),
        *_origin(record),
        f'<script type="application/json" id="data">{book.json()}</script>',
    ]
    return printable("\n".join(part for part in parts if part))


def short(text: str, most: int = MAX_TEXT) -> str:
    """Return a text cut to ``most`` characters, escaped."""
    return escape(text if len(text) <= most else f"{text[:most]} … ({len(text):,} characters)")


# ---- Head


def _header(record: RunRecord, options: PageOptions, hours: RunHours, planned: float, now: float) -> Iterator[str]:
    state, rows = run_state(record, now), summary_rows(record)
    step, tokens = done(record)
    yield f'<header><h1>{escape(run_name(record))} <span class="state {state.name}">{state.name}</span></h1>'
    if state.why:
        yield f'<p class="why">{short(state.why, 400)}</p>'
    for name in ("model", "parameters", "ranks", "pipeline"):
        if name in rows:
            yield f'<p class="row"><b>{name}</b> {escape(rows[name])}</p>'
    yield "</header>"
    for text in record.missing:
        yield f'<p class="missing">{short(text, 400)}</p>'
    share = tokens / planned if planned > 0 else math.nan
    if math.isfinite(share):
        width = 100 * min(share, 1.0)
        yield f'<div class="progress" role="img" aria-label="{share:.1%} of the planned tokens">'
        yield f'<i style="width:{width:.2f}%"></i></div>'
    yield '<dl class="cards">'
    for label, value, detail in _cards(record, options, hours, step, tokens, share, state.name):
        yield f"<div><dt>{label}</dt><dd>{escape(value)}</dd><dd class=detail>{escape(detail)}</dd></div>"
    yield "</dl>"


def _cards(
    record: RunRecord, options: PageOptions, hours: RunHours, step: int, tokens: int, share: float, state: str
) -> Iterator[tuple[str, str, str]]:
    """Yield label, value and detail of the figures in the head."""
    curves = Curves(record)
    yield "tokens", compact(tokens), f"{share:.1%} of what is planned" if math.isfinite(share) else "of an unknown plan"
    starts = [start for start in record.starts if start.trains and WENT_BACK not in start.facts]
    yield "steps", f"{step:,}", counted(len(starts), "start")
    if skipped := sum(record.counts(number, step) for number, step, _ in record.skipped):
        yield "skipped updates", f"{skipped:,}", f"{skipped / step:.1%} of the steps"
    loss = curves.values("lm loss")
    if (finite := loss[np.isfinite(loss)]).size:
        yield "loss, smoothed", f"{running_mean(finite)[-1]:.4g}", f"last line {loss[-1]:.4g}"
    kept = [each for each in record.evaluations if record.counts(each.start, each.iteration)]
    if kept:
        yield escape(kept[-1].name), f"{kept[-1].loss:.4g}", f"after step {kept[-1].iteration:,}"
    speed = curves.values("tokens-per-second")
    if (speed := speed[np.isfinite(speed)]).size:
        yield "tokens/s", compact(float(np.median(speed[-50:]))), "median of the last lines"
    mfu = curves.values("mfu")
    if (mfu := mfu[np.isfinite(mfu)]).size:
        yield "MFU", f"{np.median(mfu[-50:]):.1%}", "median of the last lines"
    if hours.total:
        yield "goodput", f"{hours.parts['training'] / hours.total:.1%}", f"of {duration(hours.total)}"
    if state == "running":
        left = seconds_left(record)
        ends = at(time.time() + left)[:-3] + " UTC" if math.isfinite(left) else "the plan is not known"
        yield "time left", duration(left), ends
    yield "rank-hours", f"{hours.rank_seconds / 3600:,.4g}", str(record.environment.get("device", "device unknown"))
    if options.price is not None:
        yield "cost", f"{options.price * hours.rank_seconds / 3600:,.2f}", f"at {options.price:g} per rank-hour"
    if math.isfinite(hours.joules) and hours.tokens:
        energy = hours.joules / 3.6e6
        yield "energy", f"{energy:,.3g} kWh", f"{hours.joules / hours.tokens:.3g} J per token"


# ---- Charts


def _charts(record: RunRecord, options: PageOptions, book: ChartBook, found: Sequence[Happening]) -> Iterator[str]:
    name = run_name(options.other) if options.other is not None else ""
    yield "<section><h2>Learning, over tokens</h2>"
    yield '<p class="help js">Drag over a chart to zoom in, double-click to see all again. '
    yield "With the keyboard: arrows move the cursor, + and - zoom, 0 shows all. Hold Shift to move further.</p>"
    yield '<div class="charts">'
    for chart in learning_charts(record, options.other, name):
        yield from book.draw(chart)
    yield "</div>"
    kinds = dict.fromkeys(mark.kind for mark in book.marks)
    if kinds:
        yield '<p class="marks">'
        yield from (f'<span><i class="flag {kind}">{MARKS[kind][0]}</i> {MARKS[kind][1]}</span>' for kind in kinds)
        yield "</p>"
    yield "</section>"
    rows = [each for each in found if each.kind != "batch"]
    if rows:
        dropped = f" (the last {MAX_ROWS} of {len(rows):,})" if len(rows) > MAX_ROWS else ""
        yield f"<details{' open' * (len(rows) <= 12)}><summary>What happened{dropped}</summary>"
        yield '<div class="scroll"><table><tr><th class=words>time (UTC)</th><th>step</th><th>tokens</th>'
        yield "<th class=words>what</th></tr>"
        for each in rows[-MAX_ROWS:]:
            letter = MARKS[each.kind][0] if each.kind in MARKS else "!"
            place = compact(each.tokens) if math.isfinite(each.tokens) else ""
            what = f'<i class="flag {each.kind}">{letter}</i> {each.kind}: {short(each.text, 600)}'
            yield f"<tr><td class=time>{at(each.time)}</td><td>{each.iteration:,}</td><td>{place}</td>"
            yield f"<td class=words>{what}</td></tr>"
        yield "</table></div></details>"


def _speed(record: RunRecord, book: ChartBook, options: PageOptions, hours: RunHours) -> Iterator[str]:
    charts = [line for chart in speed_charts(record) for line in book.draw(chart)]
    if charts:
        yield '<section><h2>Speed and memory, over tokens</h2><div class="charts">'
        yield from charts
        yield "</div></section>"
    yield '<div class="columns">'
    yield from _costs(record, options, hours)
    yield from section("Slowest ranks", slow_ranks(record))
    yield from section("Forecast of the planner", forecast_rows(record))
    yield "</div>"


# ---- Hours and costs


def _hours(hours: RunHours) -> Iterator[str]:
    if not hours.total:
        return
    yield "<section><h2>Where the hours went</h2>"
    yield from _bar(hours.parts, hours.total, list(PARTS))
    rows = [["part", "time", "share", "what"]]
    for name, meaning in PARTS.items():
        seconds = hours.parts[name]
        if seconds:
            rows.append([name, duration(seconds), f"{seconds / hours.total:.2%}", meaning])
    rows.append(["all", duration(hours.total), "100%", "from the start of the first process to the last record"])
    yield from html_table(rows, words=3)
    whole = sum(hours.inside.values())
    if whole:
        yield "<h3>Inside training</h3>"
        yield from _bar(hours.inside, whole, list(INSIDE))
    yield "</section>"


def _bar(parts: Mapping[str, float], total: float, order: Sequence[str]) -> Iterator[str]:
    """Yield a bar of parts, with a legend."""
    words = "; ".join(f"{name} {parts[name] / total:.1%}" for name in order if parts[name])
    yield f'<div class="bar" role="img" aria-label="{escape(words)}">'
    for name in order:
        share = 100 * parts[name] / total
        if share:
            text = name if share > 9 and name not in STRIPED else ""
            title = f"{name}: {duration(parts[name])}, {share:.2f}%"
            yield f'<i class="part {name}" style="width:{share:.4f}%" title="{title}"><span>{text}</span></i>'
    yield '</div><p class="marks">'
    for name in order:
        if parts[name]:
            yield f'<span><i class="part swatch {name}"></i> {name} {100 * parts[name] / total:.1f}%</span>'
    yield "</p>"


def _costs(record: RunRecord, options: PageOptions, hours: RunHours) -> Iterator[str]:
    tokens = done(record)[1]
    rank_hours = hours.rank_seconds / 3600
    rows = [["", ""], ["rank-hours", f"{rank_hours:,.4g} of {record.environment.get('device', 'an unknown device')}"]]
    lost = hours.total - hours.parts["training"]
    if hours.total:
        rows.append(["of these without a result", f"{lost / hours.total:.1%}"])
    if options.price is None:
        rows.append(["cost", "no price is known: --price PER_RANK_HOUR"])
    else:
        cost = options.price * rank_hours
        rows.append(["cost", f"{cost:,.2f} at {options.price:g} per rank-hour"])
        if tokens:
            rows.append(["cost of a billion tokens", f"{cost / tokens * 1e9:,.2f}"])
    if math.isfinite(hours.joules):
        rows.append(["energy", f"{hours.joules / 3.6e6:,.4g} kWh, of the log lines that have it"])
        if hours.tokens:
            rows.append(["energy of a token", f"{hours.joules / hours.tokens:.4g} J"])
    else:
        rows.append(["energy", f"{NOT_MEASURED}: no log line has energy-joules"])
    yield from section("Cost and energy", rows, words=1)


# ---- Experts and data


def _experts(record: RunRecord) -> Iterator[str]:
    records = [each for each in record.expert_loads if record.counts(each[0], each[1])]
    if not records:
        return
    chosen = sorted({0, len(records) // 2, len(records) - 1})
    yield "<section><h2>Load of every expert</h2>"
    yield "<p>Tokens of an expert, in percent of the mean of its layer. Rows are layers, columns experts.</p>"
    yield '<div class="heats">'
    for number in chosen:
        _, iteration, _, loads = records[number]
        yield from _heat_map(iteration, [(layer, row) for layer, row in enumerate(loads) if row])
    yield '</div><p class="marks">'
    for level, low in enumerate(HEAT_LEVELS):
        high = HEAT_LEVELS[level + 1] if level + 1 < len(HEAT_LEVELS) else None
        text = "idle" if low == 0 else f"{low if low > 25 else 1}–{high}%" if high else f"from {low}%"
        text = "below 50%" if low == 25 else text
        yield f'<span><i class="swatch h{level}"></i> {text}</span>'
    yield "</p></section>"


def _heat_map(iteration: int, rows: Sequence[tuple[int, Sequence[int]]]) -> Iterator[str]:
    """Yield the loads of a record, ``(layer, loads)``."""
    width = max((len(row) for _, row in rows), default=0)
    if not width:
        return
    paths: dict[int, list[str]] = {}
    for place, (_, row) in enumerate(rows):
        for expert, load in enumerate(row):
            level = 0 if load == 0 else max(1, max(n for n, low in enumerate(HEAT_LEVELS) if load >= low))
            paths.setdefault(level, []).append(f"M{expert} {place}h1v1h-1z")
    busiest = max(((load, layer, expert) for layer, row in rows for expert, load in enumerate(row)))
    idle = sum(load == 0 for _, row in rows for load in row)
    words = f"busiest: {busiest[0]}%, expert {busiest[2]} of layer {busiest[1]}"
    words += f"; {counted(idle, 'expert')} without a token" if idle else ""
    yield f"<figure class=heat><figcaption><b>step {iteration:,}</b> {words}</figcaption>"
    yield f'<svg viewBox="0 0 {width} {len(rows)}" preserveAspectRatio="none" role="img" aria-label="{words}">'
    yield from (f'<path class="h{level}" d="{"".join(parts)}"/>' for level, parts in sorted(paths.items()))
    yield "</svg></figure>"


def _health(record: RunRecord) -> Iterator[str]:
    """Yield the picture of the health of layers, if the run has drawn one."""
    picture = record.folder / HEALTH_FILE
    try:
        content = read_small(picture, MAX_PICTURE_BYTES) if picture.exists() else b""
    except (OSError, ValueError):  # larger, or no file
        return
    if content.startswith(PNG):
        yield "<details><summary>Health of every layer</summary>"
        image = base64.b64encode(content).decode()
        yield f'<img class="picture" alt="health of every layer" src="data:image/png;base64,{image}"></details>'


def _data(record: RunRecord, options: PageOptions) -> Iterator[str]:
    train = record.data.get("train")
    sources = train.get("sources") if isinstance(train, Mapping) else None
    if not isinstance(sources, list):
        return
    named = [each for each in sources if isinstance(each, Mapping)]
    total = sum(each["tokens"] for each in named if isinstance(each.get("tokens"), int))
    read = options.read
    head = ["source", "planned tokens", "share", "epochs", "loss", *(["read", "share read"] if read else [])]
    rows = [head]
    for each in named[:MAX_ROWS]:
        name, tokens = str(each.get("source", "")), each.get("tokens")
        epochs = each.get("epochs")
        losses = record.column(f"source loss {name}")
        losses = losses[np.isfinite(losses)]
        row = [
            name,
            format_compact(tokens) if isinstance(tokens, int) else "",
            f"{tokens / total:.2%}" if isinstance(tokens, int) and total else "",
            f"{epochs:.3g}" if isinstance(epochs, int | float) else "",
            f"{running_mean(losses)[-1]:.4g}" if len(losses) else NOT_MEASURED,
        ]
        if read:
            mine = read.get(name, 0)
            row += [format_compact(mine), f"{mine / max(1, sum(read.values())):.2%}"]
        rows.append(row)
    yield from (line.replace("<table>", '<table class="first-words">') for line in section("Training data", rows))
    if skipped := train.get("skipped") if isinstance(train, Mapping) else None:
        yield f"<p>Samples left out: {short(json.dumps(skipped), 400)}</p>"


def _checkpoints(record: RunRecord) -> Iterator[str]:
    saves = [event for _, event in record.events if event["event"] == "checkpoint"]
    rows = [["time (UTC)", "step", "size", "written in", "training waited", "there now", "folder"]]
    for event in saves[-MAX_ROWS:]:
        path = str(event.get("path", ""))
        size, seconds, waited = (float(event.get(n, math.nan)) for n in ("bytes", "seconds", "blocking-seconds"))
        there = "" if "://" in path else "yes" if Path(path).is_dir() else "no"
        sized = format_bytes(size) if math.isfinite(size) else ""
        times = f"{seconds:.2f} s", f"{waited:.2f} s"
        rows.append([at(float(event["time"])), f"{int(event['iteration']):,}", sized, *times, there, path])
    if saves:
        dropped = f"the last {MAX_ROWS} of " if len(saves) > MAX_ROWS else ""
        yield f"<details{' open' * (len(saves) <= 8)}><summary>Checkpoints ({dropped}{len(saves):,})</summary>"
        yield from html_table(rows, words=6)
        yield "</details>"


def _incidents(record: RunRecord) -> Iterator[str]:
    if record.incidents or record.failures:
        yield "<section><h2>Incidents and failures</h2>"
        for folder, incident in record.incidents[-MAX_ROWS:]:
            place = f"{folder.parent.name}/{folder.name}"
            yield f'<details class="incident"><summary>step {incident.step}: {short(str(incident.kind), 60)}, '
            yield f"{short(str(incident.sentence), 400)}</summary><p>{at_or_nothing(incident.time)} "
            yield f'<a href="{escape(place)}/">{escape(place)}</a></p>'
            yield f"<pre>{short(json.dumps(incident.facts, indent=1), 20_000)}</pre></details>"
        rows = [["failed at (UTC)", "rank", "machine", "kind", "error"]]
        for failure in record.failures[-MAX_ROWS:]:
            rank, host, kind, text = (str(failure.get(name, "")) for name in ("rank", "host", "kind", "sentence"))
            if kind != "other" or not REFUSED.match(text) or is_in_a_start(record, failure.get("time")):
                rows.append([at_or_nothing(failure.get("time")), rank, host, kind, text[:MAX_TEXT]])
        yield from html_table(rows, words=4) if len(rows) > 1 else ()
        yield "</section>"
    if record.journal:
        yield f"<details><summary>Journal ({counted(len(record.journal), 'line')} of incidents.md)</summary>"
        yield f"<pre>{short(chr(10).join(record.journal[-MAX_ROWS:]), 200_000)}</pre></details>"


def is_in_a_start(record: RunRecord, seconds: Any) -> bool:
    """Return True if a start of the run was under way at a time."""
    known = isinstance(seconds, int | float)
    return known and any(start.time <= seconds <= start.end + END_SECONDS for start in record.starts)


def at_or_nothing(seconds: Any) -> str:
    """Return a time as a date in UTC; empty if it is none."""
    return at(seconds) if isinstance(seconds, int | float) and 0 <= seconds < 1e11 else ""


# ---- Configuration and origin


def _differences(options: PageOptions) -> Iterator[str]:
    if options.other is not None:
        yield f"<section><h2>Differences from {escape(run_name(options.other))}</h2>"
        yield f"<p>This run is on the left of each |, {escape(run_name(options.other))} on the right.</p>"
        yield f"<pre>{short(chr(10).join(options.differences), 100_000)}</pre></section>"


def _configuration(record: RunRecord) -> Iterator[str]:
    if not record.config:
        return
    changed, rest = [["option", "value", "default"]], [["option", "value", "default"]]
    for group, values in record.config.items():
        for name, value in values.items() if isinstance(values, Mapping) else ((group, values),):
            setting = SETTINGS.get(str(name))
            default = None if setting is None else setting.default
            shown, usual = option_text(value), option_text(default)
            flag = str(name) if setting is None else setting.flag
            (rest if setting is not None and shown == usual else changed).append([flag, shown[:500], usual])
    yield "<section><h2>Configuration</h2><p>Options that are not at their default, or were derived.</p>"
    yield from (line.replace("<table>", '<table class="options">') for line in html_table(changed))
    yield f"<details><summary>{counted(len(rest) - 1, 'option')} at the default</summary>"
    yield from (line.replace("<table>", '<table class="options">') for line in html_table(rest))
    yield "</details></section>"


def _origin(record: RunRecord) -> Iterator[str]:
    environment = record.environment
    if record.command:
        yield f"<section><h2>Command</h2><pre>{short(record.command, 20_000)}</pre></section>"
    if not environment:
        return
    packages = environment.get("packages")
    rows = [["", ""]]
    for name, value in environment.items():
        if name != "packages":
            rows.append([str(name).replace("_", " "), "unknown" if value is None else str(value)])
    if isinstance(packages, Mapping):
        rows += [[str(name), str(version)] for name, version in packages.items()]
    yield "<details><summary>Environment and revision</summary>"
    yield from html_table(rows, words=1)
    yield "</details>"
