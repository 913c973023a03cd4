"""Draw the loss curve of a run, or of several side by side: ``python tools/plot_run.py RUN_DIR [RUN_DIR ...]``.

Into the folder of a run, which may be going on, it draws what the run does at its end: its health too.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.training.health_plot import draw_health
from megatron.training.history import History, read_history
from megatron.training.plot import draw_history
from megatron.training.run_folder import HEALTH, LOSS_CURVE, METRICS
from megatron.training.runs_plot import draw_runs, short_names

COMPARISON = "runs.png"


def main(argv: Sequence[str]) -> int:
    """Draw the pictures and print where they are; returns the exit status."""
    parser = argparse.ArgumentParser(description="Draw loss and learning rate of one run or of several over tokens.")
    parser.add_argument(
        "run_dirs", type=Path, nargs="+", metavar="RUN_DIR", help="what a run was told with --run-dir; or several"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help=f"picture to write; .png, .pdf or .svg (default: RUN_DIR/{LOSS_CURVE}, and {HEALTH} where layers were "
        f"watched; of several runs ./{COMPARISON})",
    )
    arguments = parser.parse_args(argv)
    folders: list[Path] = arguments.run_dirs
    alone = len(folders) == 1
    out = arguments.out or (folders[0] / LOSS_CURVE if alone else Path(COMPARISON))
    drawn = [out]
    try:
        names = short_names(folders)
        histories = [read_history(folder / METRICS) for folder in folders]
        if alone:
            draw_history(histories[0], names[0], out)
        else:
            draw_runs(dict(zip(names, histories)), out)
        health = folders[0] / HEALTH
        if alone and not arguments.out and draw_health(folders[0] / METRICS, names[0], health):
            drawn.append(health)
    except (ValueError, OSError) as error:
        print(f"plot_run: {error}", file=sys.stderr)
        return 1
    for folder, history in zip(folders, histories):
        _say_left_out(folder, history)
    print(*drawn, sep="\n")
    return 0


def _say_left_out(folder: Path, history: History) -> None:
    if history.unreadable:
        lines = ", ".join(map(str, history.unreadable[:10])) + (", ..." if len(history.unreadable) > 10 else "")
        print(f"plot_run: left out what could not be read: line {lines} of {folder / METRICS}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
