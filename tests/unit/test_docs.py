"""Links, flags, commands and tables of the README and of every page in docs/."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout, suppress
from io import StringIO
from pathlib import Path

import pytest

from megatron.__main__ import PROGRAMS
from megatron.arguments.cli import parse
from tests.distributed import product

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY", "AGENTS", "CHANGELOG")),
    *sorted((ROOT / "docs").glob("*.md")),
]
FENCE = re.compile(r"^```[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"(?:^|[ `])(?:torchrun (?P<launch>.*?) |python3? )pretrain_(?:gpt|hybrid)\.py (?P<flags>.*)")
FOREIGN = {
    "corruption": "--clean",
    "AGENTS": "--check",
    "CONTRIBUTING": "--check --every",
    "SECURITY": "--disable-pip --generate-hashes --master-port --no-annotate --python-version --redact "
    "--require-hashes --universal",
    "README": "--require-hashes",
    "evaluation": "--limit",
    "megatron_lm": "--ckpt-fully-parallel-save",
    "running": "--measure --rdzv-conf --shutdown-timeout --signals-to-handle",
    "slurm": "--allocations --build-arg --contiguous --duplicates --faults --me --name --parsable2 --segment --start "
    "--starttime --state --switches",
    "troubleshooting": "--learning-rate --max-steps --n-layer",
}
"""By page, flags of Slurm, pip, docker, torchrun, Megatron-LM, and of programs of the tests; and misspelled ones."""

LENGTHS = {"README": 120, "AGENTS": 60, "memory": 100, "long_context": 200, "extending": 450}
"""Lines that a page may have."""


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_have_targets(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", page.read_text())):
        name, _, anchor = target.partition("#")
        if name.startswith("http"):
            continue
        path = (page.parent / name) if name else page
        assert path.exists(), target
        assert not anchor or anchor in anchors(path), target


def missing_code(text: str) -> set[str]:
    """Return the files, packages and classes that a text names in backticks and that are not in the code."""
    tops = ("", "megatron/**/", "tools/**/", "tests/**/", "benchmarks/**/", "tasks/**/", "examples/**/")
    files = {str(path.relative_to(ROOT)) for top in tops for path in ROOT.glob(f"{top}*.py")}
    source = "".join(path.read_text() for path in ROOT.glob("megatron/**/*.py"))
    named = set(re.findall(r"`([\w/]+\.py)`", text))
    lost = {name for name in named if not any(file == name or file.endswith(f"/{name}") for file in files)}
    classes = set(re.findall(r"`([A-Z][a-z]+[A-Z]\w+)\b", text))
    return lost | {name for name in classes if not re.search(rf"^class {name}\b", source, re.MULTILINE)}


def test_files_and_classes_of_the_map_exist() -> None:
    assert missing_code((ROOT / "docs" / "architecture.md").read_text() + PAGES[0].read_text()) == set()
    assert missing_code("`training/loop.py` `training/lost.py` `ShardSpec` `GradSink.add` `pretrain_gpt.py`") == {
        "training/lost.py",
        "GradSink",
    }


READ_IN_TWENTY_MINUTES = 900
"""Lines, at 45 a minute."""


def lines_of(file: Path, names: Sequence[str]) -> int:
    """Return the lines of functions, classes and methods of a file; a missing one is a KeyError."""
    found = dict[str, int]()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            for part in [node, *node.body] if isinstance(node, ast.ClassDef) else [node]:
                if isinstance(part, ast.FunctionDef | ast.ClassDef):
                    name = part.name if part is node else f"{node.name}.{part.name}"
                    found[name] = (part.end_lineno or 0) - part.lineno + 1
    return sum(found[name] for name in names)


def test_the_reading_path_is_eight_files_and_twenty_minutes() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| \d \| `(megatron/\S+\.py)` \| (.*?) \|", page, re.MULTILINE)
    assert len(rows) == 8
    total = sum(lines_of(ROOT / file, re.findall(r"`([\w.]+)`", names)) for file, names in rows)
    assert 0.8 * READ_IN_TWENTY_MINUTES < total <= READ_IN_TWENTY_MINUTES


@pytest.mark.parametrize("page", [page for page in PAGES if page.stem != "flags"], ids=lambda page: page.name)
def test_cells_are_short(page: Path) -> None:
    rows = [line for line in FENCE.sub("", page.read_text()).splitlines() if line.startswith("|")]
    cells = [re.sub(r"\]\([^)]*\)", "]", cell).strip() for row in rows for cell in row.split(" | ")]
    assert [cell for cell in cells if len(cell) > 200] == []


def commands(text: str) -> Iterator[tuple[str, int]]:
    """Yield the flags and the number of ranks of each training command, in blocks of code and in tables."""
    joined = re.sub(r" *\\\n *", " ", text)
    for line in re.findall(r"`([^`\n]+)`", FENCE.sub("", joined)) + "\n".join(FENCE.findall(joined)).splitlines():
        found = COMMAND.search(" " + line.split("  #")[0])
        if found is None or re.search(r"\.\.\.|\$|<", found["flags"]):
            continue
        sizes = re.findall(r"--(?:nproc-per-node|nnodes) (\d+)", found["launch"] or "")
        ranks = 1
        for size in sizes:
            ranks *= int(size)
        yield found["flags"].split(" & ")[0].rstrip(" &"), ranks


RUN = "data", "phases"
"""Pages whose commands other tests run."""


@pytest.mark.parametrize("page", [page for page in PAGES if page.stem not in RUN], ids=lambda page: page.name)
def test_training_commands_pass_the_checks(page: Path) -> None:
    """Data are generated and checkpoints replaced by a preset."""
    for flags, ranks in commands(page.read_text()):
        if "hf:" in flags or "--help" in flags:
            continue
        flags = re.sub(r"--data-path (?:[^-\s]\S* ?)+", "--mock-data ", flags)
        flags = re.sub(r"--load \S+( --resume-mode \S+)?", "--preset tiny-llama", flags)
        argv = shlex.split(flags)
        argv = ["--mock-data"] * ("--mock-data" not in argv) + argv
        if "--vocab-size" not in argv:
            argv += ["--vocab-size", "32000"]
        given = [] if "--world-size" in argv else ["--world-size", str(ranks)]
        parse([*argv, "--check-config", *given], {})


def test_commands_are_found() -> None:
    text = "```\ntorchrun --nproc-per-node 8 pretrain_gpt.py --a 1 \\\n    --b\npython pretrain_gpt.py ... --c\n```\n"
    assert list(commands(text + "`python pretrain_gpt.py --d`")) == [("--d", 1), ("--a 1 --b", 8)]
    assert len(list(commands(PAGES[0].read_text()))) >= 4


@pytest.fixture(scope="module")
def known_flags() -> set[str]:
    """Flags of all programs, of the scripts, the benchmarks and the proofs."""
    with redirect_stdout(StringIO()) as helps:
        programs = ("pretrain_*.py", "tools/[!_]*.py", "tools/*/__main__.py", "tasks/*/[!_]*.py")
        for path in (path for pattern in programs for path in ROOT.glob(pattern)):
            with suppress(SystemExit):
                importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts)).main(["--help"])
    patterns = ("examples/*.sh", "slurm/*.sh", "benchmarks/*.py", "tests/*/__main__.py")
    sources = [path for pattern in patterns for path in ROOT.glob(pattern)]
    texts = [helps.getvalue(), *(path.read_text() for path in (ROOT / "docs" / "flags.md", *sources))]
    return set(re.findall(r"--[a-z0-9-]+", "".join(texts)))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_flags_exist(page: Path, known_flags: set[str]) -> None:
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9](?![\w*-])", page.read_text()))
    assert sorted(named - known_flags) == FOREIGN.get(page.stem, "").split()


@pytest.mark.parametrize("page", [page for page in PAGES if page.stem in LENGTHS], ids=lambda page: page.name)
def test_pages_are_short(page: Path) -> None:
    assert len(page.read_text().splitlines()) <= LENGTHS[page.stem]


def test_the_table_of_layouts_matches_the_log() -> None:
    text, rows = (ROOT / "docs" / "performance.md").read_text(), product.markdown_rows(product.FILE.read_text())
    table = text.split("### Layouts")[1].split("\n\n")[2].splitlines()
    assert table[2:] == rows
    total = sum(int(row.split("|")[2].replace(",", "")) for row in rows)
    assert f"{total:,} layouts and models, none failed" in text


def test_every_tool_is_in_the_table_of_exit_statuses() -> None:
    tools = (ROOT / "docs" / "tools.md").read_text()
    table = tools.split("## Exit statuses of the tools")[1].split("\n\n")[1]
    named = set(re.findall(r"^\| `(\w+\.py)", table, re.MULTILINE))
    assert named == {path.name for each in PROGRAMS for path in ROOT.glob(each)}
