"""Cost of ``--elastic-replicas``: seconds of a step of two replicas of one process, and of plain DP 2, alternating.

Run with ``python -m benchmarks.elastic``. A replica and a rank of DP 2 compute the same micro-batches. The first two
steps of a start are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from megatron.training.replicas.store import serve

ROOT = Path(__file__).parents[1]
MODEL = (
    "--mock-data --device cpu --lr 1e-3 --vocab-size 1000 --num-layers 4 --hidden-size 256 --num-attention-heads 4 "
    "--ffn-hidden-size 1024 --max-position-embeddings 128 --seq-length 128 --global-batch-size 4 --log-interval 1"
)
WARM_UP = 2
"""Steps left out."""


def seconds(elastic: bool, steps: int) -> float:
    """Return the median seconds of a step of two processes."""
    base = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        if elastic:
            server, port = serve("127.0.0.1", 0)
            stack.callback(server.stop)
        else:
            with socket.create_server(("127.0.0.1", 0)) as probe:
                port = probe.getsockname()[1]
        processes = []
        for number in range(2):
            if elastic:
                world = {}
                flags = f"--run-dir {folder}/{number} --elastic-replicas 2 --elastic-server 127.0.0.1:{port} "
                flags += f"--elastic-replica {number} --elastic-timeout 60"
            else:
                world = {"RANK": str(number), "WORLD_SIZE": "2", "LOCAL_RANK": str(number), "MASTER_PORT": str(port)}
                flags = f"--run-dir {folder}/0"
            words = f"{MODEL} {flags} --train-iters {steps + WARM_UP}".split()
            command = [sys.executable, "pretrain_gpt.py", *words]
            processes.append(subprocess.Popen(command, cwd=ROOT, env=base | world, stdout=subprocess.DEVNULL))
            stack.callback(processes[-1].wait)
            stack.callback(processes[-1].kill)
        if max(process.wait() for process in processes):
            raise RuntimeError("a process has failed")
        lines = [json.loads(line) for line in (Path(folder) / "0/metrics.jsonl").open()]
    return median(line["iteration-time"] for line in lines if "lm loss" in line and line["iteration"] > WARM_UP)


def main() -> None:
    """Print the ratio of each round, and their median."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=6, help="of a run")
    parser.add_argument("--rounds", type=int, default=3, help="alternating")
    options = parser.parse_args()
    ratios = []
    for number in range(options.rounds):
        order = (True, False) if number % 2 else (False, True)
        found = {elastic: seconds(elastic, options.steps) for elastic in order}
        ratios.append(found[True] / found[False])
        print(f"2 replicas {found[True]:.4f} s, DP 2 {found[False]:.4f} s a step: {ratios[-1]:.3f}", flush=True)
    print(f"median {median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")


if __name__ == "__main__":
    main()
