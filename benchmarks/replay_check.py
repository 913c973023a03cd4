"""Cost of ``--replay-check N``: seconds of runs with and without it, alternating, in one process each time.

Run with ``python -m benchmarks.replay_check``. The first step of a start, which is computed four times, is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
MODEL = (
    "--mock-data --device cpu --lr 1e-3 --vocab-size 1000 --num-layers 4 --hidden-size 256 --num-attention-heads 4 "
    "--ffn-hidden-size 1024 --max-position-embeddings 128 --seq-length 128 --global-batch-size 8 --log-interval 1"
)


def seconds(flags: str, steps: int) -> float:
    """Return the mean seconds of a step."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "pretrain_gpt.py", *MODEL.split(), *flags.split(), "--train-iters", str(steps + 1)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command += ["--run-dir", folder]
        subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
        lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").open()]
        return sum(line["iteration-time"] for line in lines if "lm loss" in line and line["iteration"] > 1) / steps


def main() -> None:
    """Print the ratio of each round, and their median."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--interval", type=int, default=50, help="N")
    parser.add_argument("--rounds", type=int, default=5, help="alternating")
    options = parser.parse_args()
    ratios = []
    for number in range(options.rounds):
        pair = [f"--replay-check {options.interval}", ""]
        order = pair if number % 2 else pair[::-1]
        found = {flags: seconds(flags, options.interval) for flags in order}
        ratios.append(found[pair[0]] / found[pair[1]])
        print(f"with {found[pair[0]]:.4f} s, without {found[pair[1]]:.4f} s a step: {ratios[-1]:.4f}", flush=True)
    print(f"median {median(ratios):.4f} ({min(ratios):.4f} to {max(ratios):.4f})")


if __name__ == "__main__":
    main()
