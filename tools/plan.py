"""Plan a run before a cluster is booked: ``python tools/plan.py --preset llama2-7b --gpus 64 --gpu h100-80g``.

Takes the flags of a training run besides its own. Prints the fastest layouts that fit, with what they take: memory,
seconds per step, days and costs. Options that are given stay as they are.
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # if this checkout is not installed

from megatron.arguments.cli import ParsedArguments, parse
from megatron.arguments.presets import PAPER_TOKENS_PER_STEP
from megatron.arguments.validate import find_problems
from megatron.config.errors import Problem, UserError
from megatron.config.text import did_you_mean, echo, format_compact
from megatron.convert.huggingface.config import read_model_values
from megatron.layers.parameters import num_parameters
from megatron.planner.costs import RunCosts, Terms
from megatron.planner.hardware import Accelerator, Cluster, accelerators
from megatron.planner.report import plans_table, step_parts
from megatron.planner.search import LayoutSearch

TOKENS_PER_PARAMETER = 20
"""Tokens of a run by default (Hoffmann et al. 2022, arXiv 2203.15556, table 3)."""


def main(argv: Sequence[str]) -> int:
    """Print the plans and return the exit status."""
    parser = build_parser()
    options, flags = parser.parse_known_args(argv)
    try:
        print_plans(options, flags)
    except UserError as error:
        echo(error, file=sys.stderr)
        return 2
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the flags that are no options of a run."""
    parser = argparse.ArgumentParser("plan.py", description=__doc__, allow_abbrev=False)
    parser.add_argument("--gpus", type=int, required=True, metavar="N", help="accelerators")
    parser.add_argument("--gpu", default="h100-80g", metavar="NAME", help=", ".join(accelerators()))
    parser.add_argument("--nodes-of", type=int, metavar="N", help="accelerators of a node")
    parser.add_argument("--network", type=parse_rate, metavar="RATE", help="of an accelerator, such as 400Gb/s")
    parser.add_argument("--tokens", type=parse_amount, metavar="N", help="of the run, such as 300B")
    parser.add_argument("--price", type=float, metavar="X", help="of an accelerator-hour")
    parser.add_argument("--watts", type=float, metavar="X", help="of an accelerator (default: its limit)")
    parser.add_argument("--count", type=int, default=10, metavar="N", help="plans to show (default: 10)")
    return parser


UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}


def parse_amount(text: str) -> float:
    """Parse a number with a unit: ``300B``."""
    digits = text.rstrip("KMBT")
    return float(digits) * UNITS[text[len(digits) :]]


def parse_rate(text: str) -> float:
    """Parse bits or bytes per second: ``400Gb/s``, ``50GB/s``. Returns bytes per second."""
    for ending, size in (("b/s", 1 / 8), ("B/s", 1.0)):
        if text.endswith(ending):
            digits = text.removesuffix(ending).rstrip("KMGT")
            return float(digits) * UNITS[text.removesuffix(ending)[len(digits) :]] * size
    raise argparse.ArgumentTypeError(f"{text} has no unit: write 400Gb/s or 50GB/s")


def find_accelerator(name: str) -> Accelerator:
    """Return the accelerator of the table."""
    known = accelerators()
    if name not in known:
        guess = did_you_mean(name, known)
        fixes = tuple(f"--gpu {each}" for each in ([guess] if guess else known))
        raise UserError([Problem("E002", f"--gpu {name}: there is no such accelerator in the table", fixes)])
    return known[name]


def complete_flags(argv: Sequence[str], options: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Return the flags of a run, completed by what a run needs, and what was added."""
    given = {word.partition("=")[0] for word in argv}
    added: list[str] = []
    if not {"--bf16", "--fp16", "--params-dtype", "--config"} & given:
        added.append("--bf16")
    if not {"--mock-data", "--data-path", "--data-args-path", "--train-data-path", "--config"} & given:
        added.append("--mock-data")
    if not {"--train-iters", "--train-samples", "--num-epochs", "--config"} & given:
        added += ["--train-iters", "1"]
    return [*argv, *added], added


def print_plans(options: argparse.Namespace, argv: Sequence[str]) -> None:
    """Search, and print what was found."""
    flags, _ = complete_flags(argv, options)
    parsed = parse(["--check-config", *flags], {}, read_model=read_model_values)
    config = parsed.config
    if config.model.vocab_size is None:
        raise UserError([Problem("E104", "the vocabulary size is not specified", ("--vocab-size 50257",))])
    if "global_batch_size" not in parsed.given:
        batch = default_batch(argv, parsed)
        config = replace(config, training=replace(config.training, global_batch_size=batch))
        flags += ["--global-batch-size", str(batch)]
    cluster = Cluster.of(find_accelerator(options.gpu), options.nodes_of, options.network)
    parameters = num_parameters(config.model, active=config.model.num_experts is not None)
    tokens = options.tokens or TOKENS_PER_PARAMETER * parameters
    terms = Terms(tokens, options.price, options.watts or cluster.accelerator.watts)
    plans = LayoutSearch(config, options.gpus, cluster, find_problems, parsed.given).best(options.count)
    if not plans:
        raise UserError([Problem("E002", "no layout fits")])
    costs = [RunCosts.of(plan, options.gpus, cluster, terms) for plan in plans]
    echo(f"{format_compact(tokens)} tokens on {options.gpus} x {cluster.accelerator.name}")
    echo("\n".join(plans_table(plans, costs, options.gpus)))
    echo()
    echo("\n".join(step_parts(plans[0])))
    echo()
    command = shlex.join(["python", "pretrain_gpt.py", *flags])
    echo(f"{command} {' '.join(plans[0].flags)} --check-config --world-size {options.gpus}")


def default_batch(argv: Sequence[str], parsed: ParsedArguments) -> int:
    """Return the samples of a step in the paper of the preset."""
    words = [*argv, ""]
    preset = words[words.index("--preset") + 1] if "--preset" in words else ""
    if preset not in PAPER_TOKENS_PER_STEP:
        raise UserError([Problem("E002", "the global batch size is not specified", ("--global-batch-size 512",))])
    samples = PAPER_TOKENS_PER_STEP[preset] / parsed.config.training.seq_length
    unit = 2 ** max(0, int(math.log2(samples / 4)))  # papers quote rounded tokens of batches that layouts can divide
    return unit * round(samples / unit)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
