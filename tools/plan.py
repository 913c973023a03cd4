"""Plan a run before a cluster is booked: ``python tools/plan.py --preset llama2-7b --gpus 64``.

Takes the flags of a training run besides its own. Prints the fastest layouts that fit, and of the best what it takes:
memory of every pipeline rank, seconds of a step, communication, days, energy, checkpoints; why other layouts lose; and
the command line. Options of the layout that are given stay as they are. Does not import torch.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # if this checkout is not installed

from megatron.arguments.cli import ParsedArguments, flags_config, parse, parse_flags
from megatron.arguments.help import make_parser
from megatron.arguments.megatron_flags import check_unknown_flags
from megatron.arguments.planning import nothing_fits
from megatron.arguments.presets import PAPER_TOKENS_PER_STEP
from megatron.arguments.sources import from_assignments, from_mapping, read_yaml
from megatron.arguments.validate import find_problems
from megatron.checkpoint.durable_files import publish_file
from megatron.config.batch import final_consumed_samples, full_global_batch_size
from megatron.config.data_paths import SOURCE_OPTIONS
from megatron.config.errors import Problem, UserError
from megatron.config.run import RunConfig
from megatron.config.settings import SETTINGS
from megatron.config.text import echo, flag
from megatron.convert.huggingface.config import read_model_values
from megatron.layers.parameters import num_parameters
from megatron.planner.calibrate import calibrate
from megatron.planner.costs import HOURS_BETWEEN_FAILURES, STORAGE_BANDWIDTH, RunCosts, Terms
from megatron.planner.hardware import Cluster, accelerators, find_accelerator
from megatron.planner.report import PlanReport, as_dict, text
from megatron.planner.search import LayoutSearch, Plan
from megatron.training.measured_run import read_measured_run
from tools.lib.plan_figures import draw_plan
from tools.lib.plan_page import plan_page

TOKENS_PER_PARAMETER = 20
"""Tokens of a run by default, per parameter that a token uses (Hoffmann et al. 2022, arXiv 2203.15556, table 3)."""

REQUIRED_FLAGS: Mapping[str, tuple[str, ...]] = {
    "--bf16": ("params_dtype",),
    "--mock-data": tuple(name for names in SOURCE_OPTIONS for name in names),
}
"""Flags that every run needs, and the fields of which any takes their place."""


def main(argv: Sequence[str]) -> int:
    """Print the plans and return the exit status."""
    usage = "%(prog)s --gpus N [--gpu NAME] [these flags] [flags of a run]"
    parser = argparse.ArgumentParser("plan.py", usage=usage, description=__doc__, allow_abbrev=False)
    add_flags(parser)
    options, flags = parser.parse_known_args(argv)
    try:
        check_files(options)
        check_spelling(flags, [flag(name) for name in vars(options)])
        report = make_report(options, flags)
        echo("\n".join(text(report, options.explain)))
        write_files(report, options)
    except UserError as error:
        echo(error, file=sys.stderr)
        return 2
    except (OSError, ValueError) as error:
        echo(f"plan: {error}", file=sys.stderr)
        return 1
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all flags, those of a run included, for completion."""
    parser = make_parser()
    add_flags(parser)
    return parser


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that are no options of a run."""
    cluster = parser.add_argument_group("cluster")
    names = f"{', '.join(accelerators())}, or a FILE.yaml of one such row (default: %(default)s)"
    cluster.add_argument("--gpus", type=positive(int), required=True, metavar="N", help="accelerators")
    cluster.add_argument("--gpu", default="h100-80g", metavar="NAME", help=names)
    cluster.add_argument("--nodes-of", type=positive(int), metavar="N", help="accelerators of a node")
    cluster.add_argument("--network", type=parse_rate, metavar="RATE", help="of an accelerator: 400Gb/s, 50GB/s")
    fitted = "fit the efficiency of the accelerators to the steps that run folders have measured"
    cluster.add_argument("--calibrate", type=Path, nargs="+", default=[], metavar="RUN", help=fitted)
    written = "write the fitted accelerator, for --gpu and --plan-gpu"
    cluster.add_argument("--calibrated", type=Path, metavar="FILE.yaml", help=written)
    run = parser.add_argument_group("run")
    tokens = f"of the run, such as 300B (default: {TOKENS_PER_PARAMETER} per parameter that a token uses)"
    run.add_argument("--tokens", type=parse_amount, metavar="N", help=tokens)
    days = "most days of the run, with saves and failures; else a number of accelerators that is enough"
    run.add_argument("--max-days", type=positive(float), metavar="X", help=days)
    run.add_argument("--price", type=positive(float), metavar="X", help="of an accelerator-hour")
    watts = "drawn by an accelerator, with its share of hosts and cooling (default: the limit of the accelerator)"
    run.add_argument("--watts", type=positive(float), metavar="X", help=watts)
    mtbf = f"hours of an accelerator between failures (default: {HOURS_BETWEEN_FAILURES:,.0f}, as Llama 3 had)"
    run.add_argument("--mtbf", type=positive(float), default=HOURS_BETWEEN_FAILURES, metavar="X", help=mtbf)
    storage = f"of a node to the storage of checkpoints (default: {STORAGE_BANDWIDTH / 1e9:.2f}GB/s, as Llama 3 had)"
    run.add_argument("--storage", type=parse_rate, default=STORAGE_BANDWIDTH, metavar="RATE", help=storage)
    output = parser.add_argument_group("output")
    output.add_argument("--count", type=positive(int), default=5, metavar="N", help="plans to show (default: 5)")
    output.add_argument("--explain", action="store_true", help="print every formula with its numbers")
    again = "search again for other networks, batches and numbers of accelerators, which takes 15 times as long"
    output.add_argument("--sweep", action="store_true", help=again)
    output.add_argument("--json", type=Path, metavar="FILE", help="write all numbers")
    output.add_argument("--png", type=Path, metavar="FILE", help="draw the plan; .png, .pdf or .svg")
    output.add_argument("--html", type=Path, metavar="FILE", help="write a page with everything")


def positive(kind: type[int] | type[float]) -> Callable[[str], float]:
    """Return a parser of numbers above 0."""

    def parse_positive(text: str) -> float:
        value = kind(text)
        if not 0 < value < math.inf:
            raise argparse.ArgumentTypeError(f"{text} is not above 0")
        return value

    parse_positive.__name__ = kind.__name__  # in the message for what is no number
    return parse_positive


UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}


def parse_amount(text: str) -> float:
    """Parse a number with a unit: ``300B``, ``1.4T``."""
    found = re.fullmatch(r"([\d.]+(?:e\d+)?)([KMBT]?)", text)
    if not found or not float(found[1]):
        raise argparse.ArgumentTypeError(f"{text} is not a number such as 300B")
    return float(found[1]) * UNITS[found[2]]


def parse_rate(text: str) -> float:
    """Parse bits or bytes per second: ``400Gb/s``, ``50GB/s``. Returns bytes per second."""
    found = re.fullmatch(r"([\d.]+)([KMGT]?)([bB])(?:/s|ps)", text)
    if not found or not float(found[1]):
        raise argparse.ArgumentTypeError(f"{text} is not a rate such as 400Gb/s or 50GB/s")
    return float(found[1]) * UNITS[found[2]] / (8 if found[3] == "b" else 1)


def make_report(options: argparse.Namespace, argv: Sequence[str]) -> PlanReport:
    """Search, and describe what was found.

    Raises:
        UserError: if the flags are invalid, or nothing fits.
    """
    cluster = Cluster.of(find_accelerator(options.gpu), options.nodes_of, options.network, options.gpus)
    if options.calibrate:
        cluster = calibrated(cluster, options.calibrate, options.calibrated)
    run = PlannedRun.read(argv, options.gpus, options.tokens)
    watts = options.watts or cluster.accelerator.watts
    terms = Terms(run.tokens, options.price, watts, options.mtbf, options.storage)
    search = LayoutSearch(run.config, options.gpus, cluster, find_problems, run.given)
    plans = search.best(options.count)
    if not plans:
        raise UserError([nothing_fits(search, "--gpus {}".format)])
    if options.max_days is not None and days_of(plans[0], search, terms) > options.max_days:
        raise UserError([too_slow(plans[0], search, terms, options.max_days)])
    flags, assumed = shlex.join(run.flags), shlex.join(run.assumed)
    return PlanReport.of(search, terms, plans, flags, assumed, options.sweep)


def calibrated(cluster: Cluster, runs: Sequence[Path], file: Path | None) -> Cluster:
    """Return a cluster as its runs have shown it; print what changed, and write it to a file."""
    calibration = calibrate(cluster, [read_measured_run(folder) for folder in runs])
    echo("\n".join([*calibration.report(), ""]))
    if file is not None:
        publish_file(file, calibration.to_yaml().encode())
        echo(file)
    return calibration.cluster


def days_of(plan: Plan, search: LayoutSearch, terms: Terms) -> float:
    """Return the days of a run with a plan, with saves and failures."""
    return RunCosts.of(plan, search.world_size, search.cluster, terms).days_with_failures


def too_slow(best: Plan, search: LayoutSearch, terms: Terms, most: float) -> Problem:
    """Return the problem that even the best plan takes more than ``most`` days, and how many accelerators do not."""
    days = days_of(best, search, terms)
    fixes = []
    for times in sorted({math.ceil(days / most) + more for more in (0, 1, 2)} | {2 * math.ceil(days / most)}):
        larger = replace(search, world_size=times * search.world_size)
        if any(days_of(plan, larger, terms) <= most for plan in larger.best(1)):
            fixes.append(f"--gpus {larger.world_size}")
            break
    sentence = f"the fastest plan takes {days:.1f} days on {search.world_size:,} accelerators: --max-days {most:g}"
    return Problem("E964", sentence, (*fixes, f"--max-days {math.ceil(days)}"))


class PlannedRun(NamedTuple):
    """A run whose layout is open."""

    # With batch and length; its layout is that of the flags.
    config: RunConfig
    tokens: float
    # Flags of the run, and those of them that nobody gave.
    flags: list[str]
    assumed: list[str]
    # Fields that were given.
    given: frozenset[str]

    @classmethod
    def read(cls, argv: Sequence[str], ranks: int, tokens: float | None) -> PlannedRun:
        """Complete the flags of a run by what a run needs and a plan does not depend on, or can assume.

        Args:
            argv: flags of the run.
            ranks: of the run.
            tokens: of the run; None if only the flags of the run may state them.

        Raises:
            UserError: if the flags are invalid, or the batch is unknown.
        """
        given = given_fields(argv)
        if tokens is not None and not given.isdisjoint(LENGTHS):
            flag = SETTINGS[next(name for name in LENGTHS if name in given)].flag
            raise UserError([Problem("E003", f"--tokens and {flag} contradict each other", (f"drop {flag}",))])
        assumed = [flag for flag, names in REQUIRED_FLAGS.items() if given.isdisjoint(names)]
        length = ["--train-iters", str(10**6)] if given.isdisjoint(LENGTHS) else []  # as a first guess
        parsed = parse_layout_free([*argv, *assumed, *length], ranks)
        config = parsed.config
        if config.model.vocab_size is None:
            raise UserError([Problem("E104", "the vocabulary size is not specified", ("--vocab-size 50257",))])
        if given.isdisjoint(("global_batch_size", "step_batch_size_schedule")):
            assumed += ["--global-batch-size", str(batch_of_paper(parse_flags(argv).known.preset, config))]
            parsed = parse_layout_free([*argv, *assumed, *length], ranks)
            config = parsed.config
        of_step = full_global_batch_size(config.training, 1) * config.training.seq_length
        if length:
            if tokens is None:
                count = num_parameters(config.model, active=config.model.num_experts is not None)
                tokens = float(TOKENS_PER_PARAMETER * count)
            assumed += ["--train-iters", str(math.ceil(tokens / of_step))]
            config = parse_layout_free([*argv, *assumed], ranks).config
        elif tokens is None:
            tokens = float(final_consumed_samples(config.training, 1) * config.training.seq_length)
        return cls(config, tokens, [*argv, *assumed], assumed, frozenset(given))


LENGTHS = ("train_iters", "train_samples", "num_epochs")
"""Fields of which one states the length of a run."""


def given_fields(argv: Sequence[str]) -> set[str]:
    """Return the names of the fields that flags and files set."""
    line = parse_flags(argv)
    trees = ((path, read_yaml(path)) for path in line.known.config)
    sources = [from_mapping(tree, path) for path, tree in trees if not isinstance(tree, Problem)]
    sources.append(from_assignments(line.known.set))
    return {flag.setting.name for flag in line.given}.union(*(source.values for source in sources))


def parse_layout_free(flags: Sequence[str], ranks: int) -> ParsedArguments:
    """Parse the flags of a run on all ranks, or on the fewest that hold a model if the batch does not fit these."""
    try:
        return parse(["--check-config", *flags, "--world-size", str(ranks)], {}, read_model=read_model_values)
    except UserError:
        return parse(["--check-config", *flags], {}, read_model=read_model_values)


def batch_of_paper(preset: str | None, config: RunConfig) -> int:
    """Return the samples of a step in the paper of the preset, as a number that many layouts divide."""
    if preset is None or preset not in PAPER_TOKENS_PER_STEP:
        why = f", and the preset {preset} has none of a paper" if preset else ""
        sentence = f"the global batch size is not specified{why}"
        raise UserError([Problem("E960", sentence, ("--global-batch-size 512",))])
    samples = PAPER_TOKENS_PER_STEP[preset] / config.training.seq_length
    unit = 2 ** max(0, int(math.log2(samples / 4)))  # papers quote rounded tokens
    return unit * round(samples / unit)


def check_spelling(argv: Sequence[str], own: Sequence[str]) -> None:
    """Raise a UserError for unknown flags that are misspelt ones of the planner's ``own``."""
    line = parse_flags(argv)
    problems = check_unknown_flags(line.foreign, flags_config(line), own)[0].problems
    meant = [each for each in problems if each.fixes and each.fixes[0].split()[0] in own]
    if meant:
        raise UserError(meant)


def check_files(options: argparse.Namespace) -> None:
    """Raise ``ValueError`` for a file that cannot be written, before the search."""
    for path in filter(None, (options.json, options.png, options.html)):
        if path.is_dir() or not path.absolute().parent.is_dir():
            raise ValueError(f"{path} cannot be written: {'it is a folder' if path.is_dir() else 'no such folder'}")
    if options.png and not options.png.suffix:
        raise ValueError(f"{options.png}: the file name needs an extension: .png, .pdf or .svg")


def write_files(report: PlanReport, options: argparse.Namespace) -> None:
    """Write the files that the flags name."""
    if options.json:
        publish_file(options.json, (json.dumps(as_dict(report), indent=2) + "\n").encode())
        echo(options.json)
    if options.png:
        draw_plan(report, options.png)
        echo(options.png)
    if options.html:
        publish_file(options.html, plan_page(report).encode())
        echo(options.html)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
