"""Speed of merging token files beside that of ``cp`` of the same files, both with a flush to the disk.

    python -m benchmarks.merge                        # 4 pairs, 800 MB in all
    python -m benchmarks.merge --megabytes 4000 --folder DIR

Both are commands from their start to their end, and alternate; the parts lie in the memory of the system, and each
removes its last output immediately before, so that both find as much free memory. Processor time, of the command and
the kernel on its behalf, depends less on other work on the machine. Merging compares every byte with the manifests of
the parts and writes a manifest; ``cp`` is followed by ``sync`` of its copies. "After its start" leaves out what the
command takes for pairs of one document. Python reads compiled modules, as it does from the second start on.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np

from benchmarks.preprocess import ROOT, seconds_of
from benchmarks.record import conditions, options, ratios, run, spread, table, timed
from megatron.data.document_origins import make_runs
from megatron.data.indexed_writer import IndexedDatasetWriter

PARTS, DOCUMENTS = 4, 5000
TITLE = "# Speed of merging token files"
OURS, START, COPY = "merge_datasets.py", "merge_datasets.py of four documents", "cp and sync"


def write_parts(folder: Path, num_bytes: int) -> None:
    """Write pairs of random documents of 500 ids on average, ``num_bytes`` of ids in all."""
    draw = np.random.default_rng(1)
    folder.mkdir()
    for part in range(PARTS):
        with IndexedDatasetWriter(folder / f"part{part}", "<u2", origins=[f"{part}.jsonl"], manifest={}) as writer:
            while writer.num_tokens * 2 * PARTS < num_bytes:
                left = 1 + (num_bytes // PARTS // 2 - writer.num_tokens) // 500
                lengths = 1 + np.exp(draw.normal(5.7, 1.0, min(DOCUMENTS, left))).astype(np.int64)
                writer.add_origins(make_runs(np.arange(len(lengths)) + writer.num_documents + 1))
                writer.add_documents(draw.integers(0, 32_000, lengths.sum()).astype("<u2"), lengths)


def children_time() -> float:
    """Return the processor time of all processes that this one has waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(args: argparse.Namespace) -> Mapping[str, Any]:
    """Return the figures of all rounds."""
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        parts, tiny = folder / "parts", folder / "tiny"
        write_parts(parts, int(args.megabytes * 1e6))
        write_parts(tiny, 8)

        def merge(source: Path, target: Path) -> None:
            flags = ("--input", str(source), "--output-prefix", str(target / "all"))
            seconds_of(str(ROOT / "tools" / "merge_datasets.py"), *flags)

        def copy(target: Path) -> None:
            script = 'cp "$0"/* "$1" && sync "$1"/*'
            subprocess.run(["bash", "-c", script, str(parts), str(target)], check=True)

        contestants: dict[str, Callable[[Path], None]] = {
            OURS: partial(merge, parts),
            COPY: copy,
            START: partial(merge, tiny),
        }
        seconds: dict[str, list[float]] = {name: [] for name in contestants}
        processor: dict[str, list[float]] = {name: [] for name in contestants}
        for number in range(args.repeats + 1):
            for place, (name, act) in enumerate(contestants.items()):
                target = folder / f"target{place}"
                subprocess.run(["sync"], check=True)
                rmtree(target, ignore_errors=True)
                target.mkdir()
                before = children_time()
                took = timed(partial(act, target))
                if number:  # the first round compiles Python's modules and fills the memory of the system
                    seconds[name].append(took)
                    processor[name].append(children_time() - before)
        size = sum(path.stat().st_size for path in parts.iterdir())
    steady = {clock: [a - b for a, b in zip(of[OURS], of[START])] for clock, of in (("", seconds), ("cpu", processor))}
    return {
        "megabytes": round(size / 1e6),
        "seconds": {name: spread(found) for name, found in seconds.items()},
        "cpu_seconds": {name: spread(found) for name, found in processor.items()},
        "speed against cp and sync": ratios(seconds[COPY], seconds[OURS]),
        "speed against cp and sync, after its start": ratios(seconds[COPY], steady[""]),
        "speed against cp and sync, after its start, by processor time": ratios(processor[COPY], steady["cpu"]),
    }


def page(result: dict[str, Any]) -> str:
    """Return the page of the figures."""
    figures = {f"{name}, seconds": found for name, found in result["seconds"].items()}
    figures |= {f"{name}, seconds of processor time": found for name, found in result["cpu_seconds"].items()}
    figures |= {name: found for name, found in result.items() if name.startswith("speed")}
    rows = [[name, f"{middle:.2f}", f"{low:.2f} to {high:.2f}"] for name, (middle, low, high) in figures.items()]
    head = f"{PARTS} pairs, {result['megabytes']:,} MB in all; every file is flushed to the disk on both sides."
    lines = [TITLE, "", head, "", *table(("", "median", "range"), rows), "", conditions(result, "numpy", "xxhash")]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str]) -> int:
    """Measure, print, and keep the result if asked to."""
    parser = options(__doc__)
    parser.add_argument("--megabytes", type=float, default=800, help="of ids (800)")
    parser.add_argument("--folder", help="where to put three times as much for a while (the system's choice)")
    return run("merge", parser, argv, measure, page, packages=("numpy", "xxhash"), fixed=("megabytes",))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
