"""Draw the loss curve of a run: ``python tools/plot_run.py RUN_DIR``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.training.history import read_history
from megatron.training.plot import draw_history
from megatron.training.run_folder import LOSS_CURVE, METRICS


def main(argv: Sequence[str]) -> int:
    """Draw the picture and print where it is; returns the exit status."""
    parser = argparse.ArgumentParser(description="Draw a run's loss, learning rate and batch size over tokens.")
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="what the run was told with --run-dir")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help=f"picture to write; .png, .pdf or .svg (default: RUN_DIR/{LOSS_CURVE})"
    )
    arguments = parser.parse_args(argv)
    out = arguments.out or arguments.run_dir / LOSS_CURVE
    try:
        history = read_history(arguments.run_dir / METRICS)
        draw_history(history, arguments.run_dir.resolve().name, out)
    except (ValueError, OSError) as error:
        print(f"plot_run: {error}", file=sys.stderr)
        return 1
    if history.unreadable:
        lines = ", ".join(map(str, history.unreadable[:10])) + (", ..." if len(history.unreadable) > 10 else "")
        print(f"plot_run: left out what could not be read: line {lines} of {METRICS}", file=sys.stderr)
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
