"""Draw the loss curve of a run, or of several side by side: ``python tools/plot_run.py RUN_DIR [RUN_DIR ...]``.

For a single run, finished or not, it writes the pictures that the run itself draws at its end, including its health and
the load of its experts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # if this checkout is not installed

from megatron.config.text import echo
from megatron.training.loggers.plots import LAYER_PLOTS, draw_runs
from megatron.training.loggers.run_folder import (
    EXPERTS_FILE,
    HEALTH_FILE,
    LOSS_CURVE_FILE,
    METRICS_FILE,
    read_history,
)

COMPARISON = "runs.png"


def build_parser() -> argparse.ArgumentParser:
    """Return the command-line parser."""
    parser = argparse.ArgumentParser(description="Draw loss and learning rate of one run or of several over tokens.")
    parser.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN_DIR", help="--run-dir of a run; or of several")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help=f"picture to write; .png, .pdf or .svg (default: RUN_DIR/{LOSS_CURVE_FILE}, "
        f"{HEALTH_FILE} if per-layer metrics were logged, {EXPERTS_FILE} with experts; of several runs ./{COMPARISON})",
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Draw the pictures, print their paths and return the exit status."""
    arguments = build_parser().parse_args(argv)
    folders: list[Path] = arguments.run_dirs
    single = len(folders) == 1
    out = arguments.out or (folders[0] / LOSS_CURVE_FILE if single else Path(COMPARISON))
    drawn = [out]
    try:
        names = short_names(folders)
        histories = [read_history(folder / METRICS_FILE) for folder in folders]
        draw_runs(dict(zip(names, histories)), out)
        if single and not arguments.out:
            for name, (_, draw) in LAYER_PLOTS.items():
                if draw(histories[0], names[0], folders[0] / name):
                    drawn.append(folders[0] / name)
    except (ValueError, OSError) as error:
        echo(f"plot_run: {error}", file=sys.stderr)
        return 1
    for folder, history in zip(folders, histories):
        if history.unreadable:
            lines = ", ".join(map(str, history.unreadable[:10])) + (", ..." if len(history.unreadable) > 10 else "")
            echo(f"plot_run: skipped unreadable lines of {folder / METRICS_FILE}: {lines}", file=sys.stderr)
    echo(*drawn, sep="\n")
    return 0


def short_names(folders: Sequence[Path]) -> list[str]:
    """Return the shortest path suffixes that distinguish the folders. Raise ValueError if a folder is given twice."""
    paths = [folder.resolve() for folder in folders]
    if duplicates := [str(folder) for folder, path in zip(folders, paths) if paths.count(path) > 1]:
        raise ValueError(f"{duplicates[0]} is given twice: give each run once")
    names = []
    for path in paths:
        length = 1
        while sum(other.parts[-length:] == path.parts[-length:] for other in paths) > 1:
            length += 1
        names.append(str(Path(*path.parts[-length:])))
    return names


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
