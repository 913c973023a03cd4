"""The part of ``tools/inspect_dataset.py`` that shows the samples of a run's steps, and of spikes of its loss."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from megatron.arguments.cli import parse
from megatron.config.errors import UserError
from megatron.config.text import counted, echo, listed, listed_ranks, shell_word
from megatron.convert.huggingface.config import read_model_values
from megatron.data.document_finder import DocumentFinder
from megatron.data.errors import DataError, ToolParser, disk_error
from megatron.training.resume_source import stored_config
from megatron.training.start import with_data
from tools.lib.run_samples import RunSamples, RunStart, StepSamples
from tools.lib.spikes import Spike, begins_phase, exclusion_file, find_spikes, resume_command, tail_probability

MOST_DOCUMENTS = 5
"""Documents that a report on spikes names."""

LARGEST_CHANCE = 0.05
"""Probability from which on the spikes of a document count as chance."""


def build_parser() -> ToolParser:
    """Return the command-line parser."""
    parser = ToolParser(
        "inspect_dataset.py",
        description="Show the training samples of steps of a run: documents, input files and lines, text, and ranks. "
        "Instead of --run, the flags of a run that has not started may follow after --.",
        epilog="Exit status: 1 if the data cannot be read or are not those of the run, 2 for wrong flags.",
    )
    parser.add_argument("--run", type=Path, metavar="RUN_DIR", help="folder given to the run as --run-dir")
    parser.add_argument("--step", type=int, nargs="+", default=[], metavar="N", help="steps, counted from 1")
    parser.add_argument("--samples", type=int, nargs="+", metavar="I", help="only these samples of a step, from 0")
    parser.add_argument("--rank", type=int, metavar="R", help="only the samples that this rank reads")
    parser.add_argument("--tokens", type=int, default=48, metavar="N", help="tokens shown of each document (48)")
    parser.add_argument("--spike", action="store_true", help="find the spikes of the loss and the gradient norm")
    parser.add_argument("--deviations", type=float, default=6.0, metavar="Z", help="robust z-score of a spike (6)")
    parser.add_argument(
        "--window", type=int, default=64, metavar="N", help="log lines that a line is compared with (64)"
    )
    parser.add_argument(
        "--exclude", type=Path, metavar="FILE", help="write the places of the samples to FILE, for --skip-samples @FILE"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object per sample and line instead of text")
    return parser


def main(argv: Sequence[str]) -> int:
    """Show samples, or spikes; return the exit status."""
    own, flags = ([*argv], None) if "--" not in argv else ([*argv[: argv.index("--")]], [*argv[argv.index("--") + 1 :]])
    parser = build_parser()
    args = parser.parse(own)
    if problem := flag_problem(args, flags):
        return parser.fail(problem, 2)
    try:
        inspect(args, flags)
    except (UserError, DataError) as error:
        return parser.fail(error, 2 if isinstance(error, UserError) else 1)
    except OSError as error:
        return parser.fail(disk_error(error, args.exclude or "FILE", "--exclude"), 1)
    return 0


def flag_problem(args: argparse.Namespace, flags: Sequence[str] | None) -> DataError | None:
    """Return what is wrong with the flags; ``flags`` are those of a run."""
    if (args.run is None) == (flags is None):
        return DataError("give either --run RUN_DIR or, after --, the flags of a run", "--run RUN_DIR --step 1")
    if args.spike and args.run is None:
        return DataError("--spike needs the log of a run", "--run RUN_DIR --spike")
    if not args.step and not args.spike:
        return DataError("give the steps to show, or --spike", "--step 1", "--spike")
    if args.tokens < 0 or args.window < 1 or not args.deviations > 0:
        return DataError("--tokens must be at least 0, --window at least 1 and --deviations above 0", "--window 64")
    return None


def inspect(args: argparse.Namespace, flags: Sequence[str] | None) -> None:
    """Print what the flags ask for.

    Raises:
        DataError: if the data cannot be read, or are not those of the run.
        UserError: if the flags of the run are wrong.
        OSError: if a file cannot be read or written.
    """
    if flags is None:
        run = RunSamples.of_folder(args.run)
    else:
        parsed = parse([*flags, "--check-config"], recall=stored_config, read_model=read_model_values)
        config = with_data(parsed.config, parsed.world_size)
        run = RunSamples([RunStart(config, parsed.world_size, {})])
    steps, spikes = args.step, list[Spike]()
    if args.spike:
        found = find_spikes(run.lines, args.deviations, args.window)
        spikes = [s for s in found if not steps or any(s.first <= step <= s.last for step in steps)]
        steps = [step for spike in spikes for step in range(spike.first, spike.peak + 1)]
        report_spikes(run, spikes, args.json)
    else:
        for step in steps:
            for line in report_step(run.at(step), args):
                echo(line)
    if args.exclude is not None and steps:
        exclude(run, steps, spikes, args.exclude, args.run)


def report_step(found: StepSamples, args: argparse.Namespace) -> Iterator[str]:
    """Yield the lines on the samples of a step; JSON objects with ``--json``."""
    numbers, readers, finder = found.numbers(), found.readers(), DocumentFinder(args.tokens)
    if args.samples is not None and (beyond := [i for i in args.samples if not 0 <= i < len(numbers)]):
        raise DataError(f"step {found.step} has samples 0 to {len(numbers) - 1}, no {beyond[0]}", "--samples 0")
    chosen = range(len(numbers)) if args.samples is None else args.samples
    shown = [numbers[i] for i in chosen if args.rank is None or args.rank in readers[numbers[i]][1]]
    if not args.json:
        first, last = found.place(numbers[0]), found.place(numbers[-1])
        checked = "as the digests of the log show" if found.checked else "not yet in a log line that could be compared"
        yield f"step {found.step}: {counted(found.size, 'sample')} at places {first} to {last}, {checked}"
    train = found.source.datasets["train"]
    for number in shown:
        micro_batch, ranks = readers[number]
        parts = [finder.part(span) for span in train.spans(number) if span.tokens]
        facts: dict[str, Any] = {
            "step": found.step,
            "sample": number,
            "place": found.place(number),
            "micro_batch": micro_batch,
            "ranks": ranks,
            "checked": found.checked,
            "documents": [asdict(part) for part in parts],
        }
        if not parts:  # generated, or conversations
            facts["ids"] = train[number].tokens[: args.tokens].tolist()
        changed = bool(parts) and found.start.config.data.fim_data
        if changed:  # the documents are shown as they are in the token files
            facts["ids"] = train[number].tokens[: args.tokens * len(parts)].tolist()
            facts["text"] = finder.text(parts[0].source, facts["ids"])
        if args.json:
            yield json.dumps(facts)
            continue
        yield f"sample {number} at place {facts['place']}, micro-batch {micro_batch} of {listed_ranks(ranks)}"
        for part in parts:
            row = "" if part.row is None else f":{part.row}"
            where = ("" if part.file is None else f", {part.file}{row}") + ", before --fim-data" * changed
            span = f"tokens {part.first} to {part.first + part.tokens - 1} of {part.of}"
            yield f"  {part.source} document {part.document}, {span}{where}"
            shown_text = json.dumps(part.text, ensure_ascii=False) if part.text is not None else f"ids {part.ids}"
            yield f"    {shown_text}{' ...' if part.tokens > len(part.ids) else ''}"
        if not parts:
            yield f"  ids {facts['ids']}"
        if changed:
            read = json.dumps(facts["text"], ensure_ascii=False) if facts["text"] is not None else f"ids {facts['ids']}"
            yield f"  read by the model, with --fim-data:\n    {read}"


def report_spikes(run: RunSamples, spikes: Sequence[Spike], as_json: bool) -> None:
    """Print the spikes, the largest z-score first, and the documents whose steps are spikes more often than by chance.

    If spikes were independent of documents, the spikes among the steps that read a document would be binomial with the
    share of all steps that are spikes. The documents with the smallest probability of that many are named.
    """
    if not spikes and not as_json:
        echo(f"no spike in {counted(len(run.lines), 'log line')}")
    finder, held = DocumentFinder(shown=0), Counter[tuple[str, int]]()
    for spike in sorted(spikes, key=lambda spike: -max(spike.scores.values())):
        steps = [run.at(step) for step in range(spike.first, spike.peak + 1)]
        places, documents = [each for found in steps for each in place_ranges(found)], set[tuple[str, int]]()
        for found in steps:
            spans = (span for i in found.numbers() for span in found.source.datasets["train"].spans(i))
            of_step = {(span.source, finder.document(span)) for span in spans if span.tokens}
            held.update(of_step)
            documents |= of_step
        if as_json:
            numbers = {kind: finite(getattr(spike, kind)) for kind in ("scores", "values")}
            echo(json.dumps({**asdict(spike), **numbers, "places": places, "documents": sorted(documents)}))
        else:
            echo(f"{spike}; samples at places {listed([f'{begin}:{end}' for begin, end in places])}")
    several = [document for document, count in held.items() if count > 1]
    if not several or as_json:
        return
    last, spiked = run.lines[-1].iteration, sum(spike.peak + 1 - spike.first for spike in spikes)
    read = {document: len(steps) for document, steps in run.steps_that_read(several, last).items()}
    share = spiked / (last - min(start.origin.iteration for start in run.starts))
    chances = {document: tail_probability(held[document], read[document], share) for document in several}
    for source, document in sorted(several, key=lambda document: (chances[document], document))[:MOST_DOCUMENTS]:
        hits, of = held[source, document], read[source, document]
        if chances[source, document] < LARGEST_CHANCE:
            file, row = finder.origin(source, document)
            origin = "" if file is None else f" ({file}{'' if row is None else f':{row}'})"
            name = f"{source}:{document}"
            echo(
                f"  document {name}{origin}: {hits} of the {of} steps that read it are spikes (by chance "
                f"{of * share:.2g}); leave it out with --skip-documents {shell_word(name)}"
            )


def finite(numbers: Mapping[str, float]) -> dict[str, float | None]:
    """Return numbers for JSON, which has no infinity."""
    return {name: x if math.isfinite(x) else None for name, x in numbers.items()}


def place_ranges(found: StepSamples) -> list[tuple[int, int]]:
    """Return the places of the samples of a step, begin and end of each range."""
    places = [found.place(number) for number in found.numbers()]
    runs = ([*run] for _, run in groupby(enumerate(places), key=lambda pair: pair[1] - pair[0]))
    return [(run[0][1], run[-1][1] + 1) for run in runs]


def exclude(run: RunSamples, steps: Sequence[int], spikes: Sequence[Spike], file: Path, folder: Path | None) -> None:
    """Write the places of steps to a file, and print the command that goes on without them."""
    reasons = {step: str(spike) for spike in spikes for step in range(spike.first, spike.peak + 1)}
    ranges, count = list[tuple[str, str]](), 0
    for step in steps:
        why, found = reasons.get(step, f"step {step}").partition(";")[0], run.at(step)
        count += found.size
        ranges += [(f"{found.phase}{begin}:{end}", f"step {step}, {why}") for begin, end in place_ranges(found)]
    file.write_text(exclusion_file(ranges))
    echo(f"{file}: {counted(count, 'sample')} of {counted(len(steps), 'step')}", file=sys.stderr)
    if folder is None:
        echo(f"to leave them out: --skip-samples @{shell_word(str(file))}", file=sys.stderr)
        return
    config, begin = run.starts[0].config, run.starts[0].origin.iteration
    if begins_phase(config) and min(steps) <= begin:
        word = shell_word(f"@{file.resolve()}")
        echo(
            f"to go on without them: the command of the phase of step {min(steps)}, --skip-samples {word}",
            file=sys.stderr,
        )
        return
    words = [*config.data.skip_samples, f"@{file.resolve()}"]
    command, taken = resume_command(folder, config, begin, min(steps), words)
    since = f"from step {taken}" if taken else "from the beginning"
    echo(f"to go on {since} without them:\n{command}", file=sys.stderr)
