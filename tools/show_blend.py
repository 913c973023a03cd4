"""Show what a run would read of each source, by stage: ``show_blend.py --data-mixture FILE --train-iters N``.

Takes the flags of a training run besides its own, and opens only the headers of the token files. Prints for each stage
of a mixture, or for a blend, the share, tokens, samples and epochs of every source, the epochs since the beginning of
the run, and the tokens that were read before. Does not import torch.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # if this checkout is not installed

from megatron.arguments.cli import parse
from megatron.checkpoint.durable_files import publish_file
from megatron.config.errors import Problem, UserError
from megatron.config.text import echo
from megatron.convert.huggingface.config import read_model_values
from megatron.data.blend_usage import StageUse, blend_usage, usage_table, whole_run
from megatron.data.errors import DataError


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
        parsed = parse(["--check-config", *flags], read_model=read_model_values)
        if parsed.config.data.generated or parsed.config.data.chat_data_path:
            raise UserError([Problem("E501", "there are no token files to blend", ("--data-mixture FILE.yaml",))])
        stages = blend_usage(parsed.config, parsed.world_size)
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
