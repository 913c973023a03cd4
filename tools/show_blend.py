"""Show what a run would read of each source, by stage: ``show_blend.py --data-mixture FILE --train-iters N``.

Takes the flags of a training run besides its own, with all its phases, and opens only the headers of the token files.
Prints for each stage of a mixture, or for a blend, the share, tokens, samples and epochs of every source, the epochs
since the beginning of the run, and the tokens that were read before. Does not import torch.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # if this checkout is not installed

from megatron.arguments.cli import ParsedArguments
from megatron.arguments.phases import collect_phases
from megatron.checkpoint.durable_files import publish_file
from megatron.config.errors import Problem, UserError
from megatron.config.text import echo
from megatron.data.blend_usage import StageUse, blend_usage, usage_table, whole_run
from megatron.data.errors import DataError
from megatron.training.phases import PhaseChoice
from megatron.training.resume_source import ResumeSource
from megatron.training.start import Beginning, parse_phases, planned_beginnings


def main(argv: Sequence[str]) -> int:
    """Print the table and return the exit status: 2 for invalid flags or data, 1 if a file cannot be written."""
    usage = "%(prog)s [--png FILE] [--json FILE] [--top N] [flags of a run]"
    parser = argparse.ArgumentParser("show_blend.py", usage=usage, description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--png", type=Path, metavar="FILE", help="draw the shares and the epochs over the tokens of the run"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers, and no table")
    parser.add_argument("--top", type=int, metavar="N", help="list the N largest sources of each stage (default: all)")
    options, flags = parser.parse_known_args(argv)
    try:
        stages = read_stages(flags)
        if options.json is None:
            echo("\n".join(usage_table(stages, options.top)))
        else:
            publish_file(options.json, json.dumps(as_dict(stages), indent=2).encode())
        if options.png is not None:
            from tools.lib.blend_figure import draw_blend

            draw_blend(stages, options.png)
    except (UserError, DataError) as error:
        echo(error, file=sys.stderr)
        return 2
    except (OSError, ValueError) as error:
        echo(f"show_blend: {error}", file=sys.stderr)
        return 1
    return 0


def read_stages(flags: Sequence[str]) -> list[StageUse]:
    """Return the stages of all phases of a run.

    Raises:
        UserError: if flags are invalid, or data do not fit the run.
        DataError: if files cannot be read.
    """
    phases = [replace(each, check_only=False) for each in parse_phases(["--check-config", *flags])]
    if any(each.config.data.generated or each.config.data.chat_data_path for each in phases):
        raise UserError([Problem("E501", "there are no token files to blend", ("--data-mixture FILE.yaml",))])
    beginnings = planned_beginnings(phases, PhaseChoice(0, ResumeSource()))

    def read_phase(phase: tuple[ParsedArguments, Beginning]) -> list[StageUse]:
        (parsed, (origin, _)), config = phase, phase[0].config
        stages = blend_usage(config, parsed.world_size, origin)
        if len(phases) == 1 or config.training.phases == config.data.data_mixture:
            return stages
        name = str(config.training.phase_name)
        return [replace(each, name=name if len(stages) == 1 else f"{name}, {each.name}") for each in stages]

    names = [str(each.config.training.phase_name) for each in phases]
    return [*chain(*collect_phases(names, [*zip(phases, beginnings)], read_phase))]


def as_dict(stages: Sequence[StageUse]) -> dict[str, Any]:
    """Return all numbers in JSON types."""
    listed = [
        {
            "name": stage.name,
            "seq_length": stage.seq_length,
            "tokens": stage.tokens,
            "samples": stage.samples,
            "sources": [{**use._asdict(), "epochs": use.epochs, "repeated": use.repeated} for use in stage.sources],
        }
        for stage in stages
    ]
    run = [{**use._asdict(), "epochs": use.epochs_at_end, "repeated": use.repeated} for use in whole_run(stages)]
    return {"stages": listed, "sources": run}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
