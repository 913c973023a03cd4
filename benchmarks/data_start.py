"""Time and memory of opening very many sources: ``python benchmarks/data_start.py --folder DIR``.

Writes synthetic token files (indices of documents of random length, ``.bin`` files without disk blocks), then starts a
process that builds the order of a blend of all of them and reads the first batch: cold (no index tables yet), then warm
several times, then on two ranks at once. Prints seconds, and memory: private bytes that are not of files, which grow
per rank, and mapped bytes, which ranks share.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.config.data import DataConfig
from megatron.config.text import echo
from megatron.config.training import TrainingConfig
from megatron.data.indexed_dataset import INDEX_HEADER, INDEX_MAGIC, INDEX_VERSION
from megatron.data.loader import build_data

VOCABULARY = 50_000


def write_sources(folder: Path, sources: int, tokens: int, mean: int) -> None:
    """Write pairs of ``tokens`` tokens in documents of a lognormal length with this mean, unless they are there."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(sources):
        prefix = folder / f"source-{number:04d}"
        if prefix.with_suffix(".idx").exists():
            continue
        draw = np.random.default_rng(number)
        lengths = np.maximum(1, draw.lognormal(np.log(mean) - 0.5, 1.0, tokens // mean)).astype("<i4")
        ends = 2 * np.cumsum(lengths, dtype=np.int64)
        with open(prefix.with_suffix(".bin"), "wb") as file:
            file.truncate(int(ends[-1]))
        with open(prefix.with_suffix(".idx"), "wb") as file:
            file.write(INDEX_HEADER.pack(INDEX_MAGIC, INDEX_VERSION, 8, len(lengths), len(lengths) + 1))
            file.write(lengths.data)
            file.write(np.concatenate(([0], ends[:-1])).astype("<i8").data)
            file.write(np.arange(len(lengths) + 1, dtype="<i8").data)


def memory() -> dict[str, int]:
    """Return MiB of this process: private and not of files, private in all, resident in all."""
    fields = {}
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]:
        name, size = line.split()[:2]
        fields[name.rstrip(":")] = int(size) // 1024
    private = fields["Private_Clean"] + fields["Private_Dirty"]
    return {"anonymous": fields["Anonymous"], "private": private, "resident": fields["Rss"]}


def start(args: argparse.Namespace) -> None:
    """Build the data and read a batch in this process; print the results as JSON."""
    began = time.monotonic()
    if args.mixture:
        data = DataConfig(data_mixture=args.mixture, data_cache_path=args.cache)
    else:
        words = [
            word
            for number in range(args.sources)
            for word in (str(1 + number % 7), f"{args.folder}/source-{number:04d}")
        ]
        data = DataConfig(data_path=tuple(words), split="1", data_cache_path=args.cache)
    samples = int(0.9 * args.sources * args.tokens) // args.seq_length // args.batch * args.batch
    training = TrainingConfig(
        seq_length=args.seq_length, global_batch_size=args.batch, train_samples=samples, eval_iters=0
    )
    source = build_data(data, training, VOCABULARY, 1)
    source.summary()
    assert source.fingerprints  # noqa: S101
    built = time.monotonic() - began
    for sample in range(args.batch):
        source.datasets["train"][sample]
    found = {"seconds": round(built, 2), "batch": round(time.monotonic() - began - built, 3), **memory()}
    echo(json.dumps(found | {"notes": source.notes[:2]}))


def main() -> None:
    """Write the sources, and measure starts in processes of their own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--cache")
    parser.add_argument("--mixture", help="YAML file of --data-mixture, in the place of a blend of all sources")
    parser.add_argument("--sources", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=10**9, help="tokens of a source")
    parser.add_argument("--mean", type=int, default=2000, help="tokens of a document")
    parser.add_argument("--seq-length", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--here", action="store_true", help="start in this process")
    args = parser.parse_args()
    args.cache = args.cache or f"{args.folder}/cache"
    if args.here:
        start(args)
        return
    began = time.monotonic()
    write_sources(Path(args.folder), args.sources, args.tokens, args.mean)
    echo(f"wrote the sources in {time.monotonic() - began:.0f} s")
    command = [sys.executable, __file__, "--here", *sys.argv[1:]]
    for name, count in [("first", 1), *[("warm", 1)] * args.starts, ("two ranks", 2)]:
        ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(count)]
        for rank in ranks:
            echo(f"{name:9} {rank.communicate()[0].strip()}", flush=True)


if __name__ == "__main__":
    main()
