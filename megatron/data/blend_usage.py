"""Tokens of each source that every stage of a run reads, computed from file headers alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from megatron.config.batch import (
    WHOLE_RUN,
    Origin,
    final_consumed_samples,
    full_global_batch_size,
    planned_samples,
)
from megatron.config.data_paths import data_sources, split_shares
from megatron.config.mixture import plan_segments
from megatron.config.run import RunConfig
from megatron.data.errors import DataError
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.skipped_dataset import SKIPPED, SampleSkips


class SourceUse(NamedTuple):
    """Tokens, samples and epochs of a source in a stage."""

    name: str
    once: int  # tokens of one epoch
    begin: int  # tokens read before the stage
    tokens: int  # tokens read in the stage
    samples: int
    share: float  # of the stage

    @property
    def epochs(self) -> float:
        """Passes over the source in the stage."""
        return self.tokens / self.once

    @property
    def epochs_at_end(self) -> float:
        """Passes over the source since the beginning of the run."""
        return (self.begin + self.tokens) / self.once

    @property
    def repeated(self) -> int:
        """Tokens of the stage that were read before."""
        return max(0, self.begin + self.tokens - max(self.begin, self.once))


@dataclass(frozen=True)
class StageUse:
    """The sources of a stage."""

    name: str
    seq_length: int
    sources: tuple[SourceUse, ...]

    @property
    def tokens(self) -> int:
        """Tokens of the stage."""
        return sum(use.tokens for use in self.sources)

    @property
    def samples(self) -> int:
        """Samples of the stage."""
        return sum(use.samples for use in self.sources)


def blend_usage(
    config: RunConfig,
    world_size: int,
    origin: Origin = WHOLE_RUN,
    begin: tuple[int, int] = (0, 0),
    segments: Mapping[str, Sequence[int]] | None = None,
) -> list[StageUse]:
    """Return the stages of a run on token files; a blend is one stage.

    Numbers of a mixture are exact but for ``skip_documents``, those of a blend within a sample. What a run reads beyond
    its plan is a stage of its own. ``begin``, ``segments`` and ``origin`` are those of `build_data`.

    Raises:
        UserError: if a mixture does not fit the run, or reads a source more often than it may.
        DataError: if a file cannot be read, or a source has no tokens.
    """
    data, training = config.data, config.training
    dp = config.parallel.data_parallel_size(world_size)
    streams, length = config.diloco.streams, training.seq_length
    samples = streams * planned_samples(training, dp, *begin)
    if data.data_mixture is None:
        return [StageUse("run", length, tuple(_blend(config, samples)))]
    mixture = data.mixture
    once = {name: count_tokens(source.paths) for name, source in mixture.sources.items()}
    laid_out = segments or {}
    slack = samples if "train" in laid_out else streams * full_global_batch_size(training, dp)
    sizes = [*laid_out.get("train", [samples])]
    skips = SampleSkips(data, length, laid_out.get(SKIPPED, ()), streams * begin[1], training.phase_name)
    end = skips.ranges.end(streams * final_consumed_samples(training, dp, *begin))
    if end > sum(sizes):
        sizes.append(end - sum(sizes))
    planned, *further = plan_segments(mixture, sizes, length, once, origin.sources, slack * length)
    stages = []
    for plan in [*planned, *chain(*further)]:
        numbers = zip(once.items(), plan.begins, plan.counts)
        uses = (
            SourceUse(name, tokens, begin, count * plan.seq_length, count, count / max(1, plan.samples))
            for (name, tokens), begin, count in numbers
        )
        name = plan.stage.name if plan in planned else f"{plan.stage.name}, longer"
        stages.append(StageUse(name, plan.seq_length, tuple(use for use in uses if use.samples)))
    return stages


def count_tokens(prefixes: tuple[str, ...]) -> int:
    """Return the tokens of files, from their sizes.

    Raises:
        DataError: if a file cannot be read, or there are no tokens.
    """
    tokens = sum(IndexedDataset(prefix, verify=False).num_tokens for prefix in prefixes)
    if not tokens:
        raise DataError(f"{' and '.join(prefixes[:3])} have no tokens", "leave out this source")
    return tokens


def _blend(config: RunConfig, samples: int) -> Iterator[SourceUse]:
    """Yield the sources of a blend by weights, or by their sizes."""
    train = data_sources(config.data)["train"]
    part = 1.0 if train.split is None else split_shares(train.split)[0]
    once = {prefix: max(1, round(part * count_tokens((prefix,)))) for prefix in train.blend.prefixes}
    weights: Mapping[str, float] = once
    if train.blend.weights is not None:
        weights = dict.fromkeys(once, 0.0)
        for prefix, weight in zip(train.blend.prefixes, train.blend.weights):
            weights = {**weights, prefix: weights[prefix] + weight}
    total = sum(weights.values())
    for prefix, tokens in once.items():
        count = round(samples * weights[prefix] / total)
        yield SourceUse(prefix, tokens, 0, count * config.training.seq_length, count, weights[prefix] / total)


COLUMNS = ("stage", "length", "source", "share", "tokens", "samples", "epochs", "in all", "repeated")
"""Columns of `usage_table`: the last two count from the beginning of the run."""

LEFT = ("stage", "source")


def usage_table(stages: Sequence[StageUse], most: int | None = None) -> list[str]:
    """Return lines with the sources of each stage, of which the ``most`` largest are listed, and those of the run."""
    rows: list[tuple[str, ...]] = [COLUMNS]
    for stage in stages:
        title = stage.name, f"{stage.seq_length:,}"
        uses = sorted(stage.sources, key=lambda use: -use.tokens)
        for use in uses[:most]:
            rows.append((*title, use.name, f"{use.share:.2%}", *_counts(use)))
            title = "", ""
        if len(uses) > len(uses[:most]):
            tokens, samples = (sum(column) for column in zip(*((use.tokens, use.samples) for use in uses[most:])))
            rows.append((*title, f"{len(uses[most:]):,} more", "", f"{tokens:,}", f"{samples:,}", "", "", ""))
    if len(stages) > 1:
        title = "all", ""
        for use in sorted(whole_run(stages), key=lambda use: -use.tokens)[:most]:
            rows.append((*title, use.name, f"{use.share:.2%}", *_counts(use)))
            title = "", ""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [
        "  ".join(
            cell.ljust(w) if COLUMNS[i] in LEFT else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths))
        ).rstrip()
        for row in rows
    ]


def whole_run(stages: Sequence[StageUse]) -> list[SourceUse]:
    """Return the use of each source over all stages."""
    found: dict[str, SourceUse] = {}
    for use in (use for stage in stages for use in stage.sources):
        before = found.get(use.name, use._replace(tokens=0, samples=0))
        found[use.name] = before._replace(tokens=before.tokens + use.tokens, samples=before.samples + use.samples)
    total = sum(use.tokens for use in found.values())
    return [use._replace(share=use.tokens / total) for use in found.values()]


def _counts(use: SourceUse) -> tuple[str, ...]:
    numbers = f"{use.tokens:,}", f"{use.samples:,}"
    return *numbers, f"{use.epochs:,.3g}", f"{use.epochs_at_end:,.3g}", f"{use.repeated:,}"
