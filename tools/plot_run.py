"""Draw the loss curve of a run, or of several side by side: ``python tools/plot_run.py RUN_DIR [RUN_DIR ...]``.

For a single run, finished or not, it writes the pictures that the run itself draws at its end, including its health.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.training.health_plot import draw_health
from megatron.training.history import read_history
from megatron.training.plot import draw_history
from megatron.training.run_folder import HEALTH, LOSS_CURVE, METRICS
from megatron.training.runs_plot import draw_runs, short_names

COMPARISON = "runs.png"


def main(argv: Sequence[str]) -> int:
    """Draw the pictures, print their paths and return the exit status."""
    parser = argparse.ArgumentParser(description="Draw loss and learning rate of one run or of several over tokens.")
    parser.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN_DIR", help="--run-dir of a run; or of several")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help=f"picture to write; .png, .pdf or .svg (default: RUN_DIR/{LOSS_CURVE}, and {HEALTH} if per-layer metrics "
        f"were logged; of several runs ./{COMPARISON})",
    )
    arguments = parser.parse_args(argv)
    folders: list[Path] = arguments.run_dirs
    single = len(folders) == 1
    out = arguments.out or (folders[0] / LOSS_CURVE if single else Path(COMPARISON))
    drawn = [out]
    try:
        names = short_names(folders)
        histories = [read_history(folder / METRICS) for folder in folders]
        if single:
            draw_history(histories[0], names[0], out)
        else:
            draw_runs(dict(zip(names, histories)), out)
        health = folders[0] / HEALTH
        if single and not arguments.out and draw_health(folders[0] / METRICS, names[0], health):
            drawn.append(health)
    except (ValueError, OSError) as error:
        print(f"plot_run: {error}", file=sys.stderr)
        return 1
    for folder, history in zip(folders, histories):
        if history.unreadable:
            lines = ", ".join(map(str, history.unreadable[:10])) + (", ..." if len(history.unreadable) > 10 else "")
            print(f"plot_run: skipped unreadable lines of {folder / METRICS}: {lines}", file=sys.stderr)
    print(*drawn, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
