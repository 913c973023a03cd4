"""Build the index caches of a run before it starts: ``python tools/build_index.py FLAGS --data-cache-path FOLDER``.

FLAGS are those of pretrain_gpt.py, the same as for the run: the samples depend on its data, sequence length, batch,
seed and splits. --world-size N is the number of ranks; only the default of --global-batch-size depends on it. The index
tables of every split are written to FOLDER, where all ranks of the run find them. A run that would resume from a
checkpoint gets the tables that it needs from there on.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # if this checkout is not installed

from megatron.arguments.cli import parse
from megatron.checkpoint.format import Manifest
from megatron.config.batch import WHOLE_RUN, Origin
from megatron.config.errors import UserError
from megatron.config.run import RunConfig
from megatron.config.text import echo
from megatron.convert.huggingface.config import read_model_values
from megatron.data.blended_dataset import BlendedDataset, segments_of
from megatron.data.build import resolve_epochs
from megatron.data.dataset import Dataset, SourceDataset
from megatron.data.dataset_info import resolve_vocab_size
from megatron.data.errors import DataError
from megatron.data.index_cache import cache_entry_of
from megatron.data.loader import DataSource, build_data
from megatron.data.mixture import CACHED_ABOVE, MixtureDataset
from megatron.training.resume_source import find_resume_source, position_of, stored_config
from megatron.training.start import with_tokenizer

TABLE_HEAD = ("split", "source", "sequences", "tokens", "epochs", "samples", "MB", "tables")
NOT_CACHED = "not kept"

TableRow = tuple[str, ...]
Identity = tuple[str, int]


def main(argv: Sequence[str]) -> int:
    """Build the missing tables and print all of them.

    Returns:
        The exit status: 1 if FOLDER does not hold all tables in the end, 2 for invalid flags or data.
    """
    if {"-h", "--help"} & {*argv}:
        echo(__doc__)
        return 0
    try:
        parsed = parse([*argv, "--check-config"], recall=stored_config, read_model=read_model_values)
        folder = cache_folder(parsed.config)
        before = {cache_identity(path) for path in folder.glob("*/")}
        source = build_run_data(parsed.config, parsed.world_size)
    except (UserError, DataError) as error:
        echo(error, file=sys.stderr)
        return 2
    rows = [row for split, dataset in source.datasets.items() for row in table_rows(split, dataset, before)]
    widths = [max(map(len, column)) for column in zip(TABLE_HEAD, *rows)]
    for split, name, *numbers, tables in (TABLE_HEAD, *rows):
        right_aligned = (number.rjust(width) for number, width in zip(numbers, widths[2:]))
        echo("  ".join([split.ljust(widths[0]), name.ljust(widths[1]), *right_aligned, tables]))
    for note in (*parsed.notes, *source.notes):
        echo(f"note: {note}", file=sys.stderr)
    return int(any(row[-1] == NOT_CACHED for row in rows))


def cache_folder(config: RunConfig) -> Path:
    """Return the folder of the tables."""
    if config.data.generated:
        option = "--plugin-dataset" if config.data.plugin_dataset else "--mock-data"
        raise DataError(f"{option} needs no tables", f"replace {option} by --data-path PREFIX")
    if config.data.data_cache_path is None:
        raise DataError("the folder of the tables is not specified", "--data-cache-path FOLDER")
    return Path(config.data.data_cache_path)


def build_run_data(config: RunConfig, world_size: int) -> DataSource:
    """Build the datasets of a run with ``world_size`` ranks, from where it will start."""
    config = resolve_epochs(with_tokenizer(config), world_size)
    resumed = find_resume_source(config.checkpoint)
    begin, segments, origin = (0, 0), None, WHOLE_RUN
    if resumed.paths and resumed.mode != "weights-only":
        manifest = Manifest.open(resumed.paths[0])
        origin, segments = Origin.from_state(manifest.state), manifest.state["data"]["stretches"]
        begin = origin.local(*position_of(manifest))
    vocab_size = resolve_vocab_size(config.data, config.model.vocab_size)
    ranks = config.parallel.data_parallel_size(world_size)
    return build_data(config.data, config.training, vocab_size, ranks, segments=segments, begin=begin, origin=origin)


def table_rows(split: str, samples: Dataset, before: Collection[Identity]) -> Iterator[TableRow]:
    """Yield the rows of a split; ``before`` are the cache entries that existed already."""
    segments = segments_of(samples)
    shown: set[int] = set()
    for number, segment in enumerate(segments, 1):
        title = split if len(segments) == 1 else f"{split} {number}/{len(segments)}"
        sources = segment.datasets if isinstance(segment, BlendedDataset) else (segment,)
        for dataset in (part for source in sources for part in segments_of(source)):
            # later segments of a blend continue the orders of earlier ones
            if not isinstance(dataset, SourceDataset) or id(dataset) in shown:
                continue
            shown.add(id(dataset))
            numbers = len(dataset.part), dataset.tokens, dataset.epochs, len(dataset)
            yield (title, dataset.source, *(f"{n:,}" for n in numbers), *_kept(dataset.largest_table, before))
        if isinstance(segment, MixtureDataset):
            yield from mixture_rows(title, segment, before)
        if isinstance(segment, BlendedDataset):
            name = f"blend of {len(segment.datasets)}"
            yield (title, name, "", "", "", f"{len(segment):,}", *_kept(segment.dataset_index, before))


def mixture_rows(title: str, samples: MixtureDataset, before: Collection[Identity]) -> Iterator[TableRow]:
    """Yield the rows of the sources of a mixture, of the epoch that each begins in; small ones need no table."""
    plan = samples.plans[0]
    for stream, begin in zip(samples.streams, plan.begins):
        if stream.documents >= CACHED_ABOVE:
            table = stream.token_sums(begin // stream.tokens)
            numbers = f"{stream.documents:,}", f"{stream.tokens:,}", "1", ""
            yield (title, stream.name, *numbers, *_kept(table, before))


def _kept(table: NDArray[Any], before: Collection[Identity]) -> tuple[str, str]:
    """Return the size in MB of a table's cache entry, and whether it existed already."""
    entry = cache_entry_of(table)
    if entry is None:
        return "-", NOT_CACHED
    size = sum(file.stat().st_size for file in entry.iterdir())
    return f"{size / 1e6:,.1f}", "found" if cache_identity(entry) in before else "built"


def cache_identity(entry: Path) -> Identity:
    """Return what distinguishes a cache entry from one that replaces it."""
    return entry.name, entry.stat().st_mtime_ns


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
