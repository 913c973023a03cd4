"""Filter and deduplicate a corpus that outgrows one machine, by datatrove on Slurm or on the cores of this machine.

    pip install 'datatrove[io]' spacy tokenizers
    python examples/datatrove_pipeline.py --input data/raw --output data/clean --tasks 1000 --partition cpu
    CORPUS=data/clean/text sbatch slurm/preprocess_array.sh    # after the last job

Every stage is a job array that starts when the one before has ended: quality filters, MinHash signatures, pairs of
equal bands, clusters, and the text without duplicates as JSON lines, which ``preprocess_data.py`` reads. A task that
has ended is not run again, so the same command continues after a failure. Without ``--partition`` all tasks run here.

``tools/deduplicate.py`` finds duplicates on one machine, in bounded memory and without copies of the text.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from datatrove.executor import LocalPipelineExecutor, SlurmPipelineExecutor
from datatrove.pipeline.dedup import (
    MinhashDedupBuckets,
    MinhashDedupCluster,
    MinhashDedupFilter,
    MinhashDedupSignature,
)
from datatrove.pipeline.dedup.minhash import MinhashConfig
from datatrove.pipeline.filters import C4QualityFilter, GopherQualityFilter, GopherRepetitionFilter
from datatrove.pipeline.readers import JsonlReader, ParquetReader
from datatrove.pipeline.writers import JsonlWriter
from datatrove.utils.hashing import HashConfig

QUALITY: dict[str, list[Callable[[], Any]]] = {
    "gopher": [GopherRepetitionFilter, GopherQualityFilter],
    "c4": [lambda: C4QualityFilter(filter_no_terminal_punct=False)],
    "none": [],
}
"""Filters by name, with the rules of Gopher (arXiv 2112.11446) and C4 (arXiv 1910.10683)."""


def stages(args: argparse.Namespace) -> list[tuple[str, int, list[Any]]]:
    """Return the name, the number of tasks and the steps of each stage."""
    config = MinhashConfig(args.ngram, args.bands, args.rows, hash_config=HashConfig(64, "sha1"))
    filtered, signatures, pairs, duplicates = (
        f"{args.output}/{name}" for name in ("filtered", "signatures", "pairs", "duplicates")
    )
    reader = ParquetReader if args.parquet else JsonlReader
    quality = [make() for name in args.quality for make in QUALITY[name]]
    kept = [JsonlReader(filtered), MinhashDedupFilter(duplicates), JsonlWriter(f"{args.output}/text")]
    return [
        ("filter", args.tasks, [reader(args.input, text_key=args.key), *quality, JsonlWriter(filtered)]),
        ("signatures", args.tasks, [JsonlReader(filtered), MinhashDedupSignature(signatures, config, args.language)]),
        ("pairs", args.bands, [MinhashDedupBuckets(signatures, pairs, config=config)]),
        ("clusters", 1, [MinhashDedupCluster(pairs, duplicates, config)]),
        ("text", args.tasks, kept),
    ]


def main(argv: Sequence[str]) -> int:
    """Submit the stages, or run them here."""
    parser = argparse.ArgumentParser("datatrove_pipeline.py", description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--input", required=True, metavar="DIR", help="folder or URI of JSON lines, compressed or not")
    add("--parquet", action="store_true", help="the folder holds Parquet files")
    add("--key", default="text", help="key or column of the text (text)")
    add("--output", required=True, metavar="DIR", help="folder that all tasks see; the result is DIR/text")
    add("--quality", nargs="+", choices=QUALITY, default=["gopher", "c4"], help="filters, in this order (gopher c4)")
    add("--language", default="eng_Latn", help="of the words, as datatrove names it (eng_Latn)")
    add("--ngram", type=int, default=5, help="words of an n-gram (5)")
    add("--bands", type=int, default=14, help="(14)")
    add("--rows", type=int, default=8, help="hash functions of a band (8)")
    add("--tasks", type=int, default=1, help="parts of the input, at most its number of files (1)")
    add("--workers", type=int, default=-1, help="tasks at the same time (all)")
    add("--partition", help="of Slurm; without it the tasks run on this machine")
    add("--time", default="24:00:00", help="limit of a task on Slurm (24:00:00)")
    args = parser.parse_args(argv)
    before: Any = None
    for name, tasks, steps in stages(args):
        common = {
            "tasks": tasks,
            "workers": args.workers,
            "logging_dir": f"{args.output}/logs/{name}",
            "depends": before,
        }
        if args.partition:
            slurm = {"time": args.time, "partition": args.partition, "job_name": name, "mail_type": "NONE"}
            before = SlurmPipelineExecutor(steps, **common, **slurm, venv_path=f"{sys.prefix}/bin/activate")
        else:
            before = LocalPipelineExecutor(steps, **common)
    before.run()  # with those that it depends on
    print(f"for the next step: CORPUS={args.output}/text sbatch slurm/preprocess_array.sh")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
