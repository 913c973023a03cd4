"""Average models, drop layers, resize the vocabulary, make MLPs experts, add heads, or cast weights.

    python tools/edit_checkpoint.py --load runs/a/checkpoints --average runs/b/checkpoints --save mean
    python tools/edit_checkpoint.py --load runs/a/checkpoints --drop-layers 20-27 --resize-vocab 50432 --save small
    python tools/edit_checkpoint.py --load runs/a/checkpoints --num-experts 8 --moe-router-topk 2 --save sparse
    python tools/edit_checkpoint.py --load runs/a/checkpoints --mtp-num-layers 1 --save with_heads
    python tools/edit_checkpoint.py --load runs/a/checkpoints --cast bf16 --save half
    python tools/edit_checkpoint.py --load runs/adapters/checkpoints --merge --save merged

Changes are made in this order, block by block, so memory does not depend on the size of the model. The result is a
checkpoint of step 0, weights only: `pretrain_gpt.py --load DIR --resume-mode weights-only`, `tools/generate.py` and
`tools/convert_checkpoint.py` read it.
"""

from __future__ import annotations

import argparse
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # if this checkout is not installed

from megatron.config.files import add_links_flag
from megatron.config.text import counted, echo
from megatron.layers.parameters import num_parameters
from tools.convert_checkpoint import ProgressPrinter, parse_count, parse_output_folder
from tools.lib.locations import add_plugin_flag, add_pretrained_flag, location_argument, source_options


def parse_layers(text: str) -> frozenset[int]:
    """Parse layers such as ``3,20-27``."""
    layers: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,5})(?:-(\d{1,5}))?\s*", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise argparse.ArgumentTypeError(f"{text!r} are no layers such as 3,20-27")
        layers |= {*range(int(match[1]), int(match[2] or match[1]) + 1)}
    return frozenset(layers)


def build_parser() -> argparse.ArgumentParser:
    """Return the command-line parser."""
    parser = argparse.ArgumentParser(
        "edit_checkpoint.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    checkpoints = "--save folder of a run, or one checkpoint in it; s3://BUCKET/RUN"
    parser.add_argument("--load", type=location_argument, required=True, metavar="CKPT", help=checkpoints)
    parser.add_argument("--ckpt-step", type=int, metavar="N", help="which checkpoint of --load (the newest valid one)")
    parser.add_argument("--save", type=parse_output_folder, required=True, metavar="DIR", help="a new folder")
    add_pretrained_flag(parser)
    add_links_flag(parser)
    add_plugin_flag(parser)
    changes = parser.add_argument_group("changes, made in this order")
    merged = "add adapters to the weights of their model, which the other changes do too"
    changes.add_argument("--merge", action="store_true", help=merged)
    mean = "take the mean with the weights of these checkpoints"
    changes.add_argument("--average", type=location_argument, nargs="+", default=[], metavar="CKPT", help=mean)
    dropped = "remove these blocks, numbered from 0, such as 3,20-27"
    changes.add_argument("--drop-layers", type=parse_layers, default=frozenset(), metavar="LAYERS", help=dropped)
    vocab = "number of tokens; rows of new ones are the mean of all rows, the last are removed"
    changes.add_argument("--resize-vocab", type=parse_count, metavar="N", help=vocab)
    experts = "turn every MLP into N experts that are copies of it, with a random router"
    changes.add_argument("--num-experts", type=parse_count, metavar="N", help=experts)
    changes.add_argument("--moe-router-topk", type=parse_count, metavar="K", help="experts of a token (2)")
    heads = "number of heads of multi-token prediction; new ones are random, 0 removes all"
    changes.add_argument("--mtp-num-layers", type=int, choices=range(100), metavar="N", help=heads)
    changes.add_argument("--seed", type=int, metavar="N", help="of the routers and heads (1234)")
    cast = "dtype of the stored weights, and in which a run from them computes (fp32, and as before)"
    changes.add_argument("--cast", choices=("fp32", "bf16", "fp16"), help=cast)
    return parser


def main(argv: Sequence[str]) -> int:
    """Write the changed model; return the exit status: 1 if that fails, 2 for invalid flags."""
    parser = build_parser()
    args = parser.parse_args(argv)
    given = (args.merge, args.average, args.drop_layers, args.resize_vocab, args.num_experts, args.cast)
    if not any(given) and args.mtp_num_layers is None:
        flags = "--merge, --average, --drop-layers, --resize-vocab, --num-experts, --mtp-num-layers or --cast"
        parser.error(f"no change given: {flags}")
    if args.moe_router_topk is not None and args.num_experts is None:
        parser.error("--moe-router-topk: only with --num-experts")
    if args.seed is not None and args.num_experts is None and args.mtp_num_layers is None:
        parser.error("--seed: only with --num-experts or --mtp-num-layers")

    from megatron.checkpoint.errors import CheckpointError
    from megatron.config.errors import UserError
    from megatron.config.plugins import load_plugins
    from megatron.convert.sources import SourceOptions, open_checkpoints
    from tools.lib.surgery import Changes, change_checkpoint

    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        load_plugins(args.plugin or ())
        first = open_checkpoints(str(args.load), source_options(args))
        others = [open_checkpoints(str(each), SourceOptions(follow_links=args.follow_links)) for each in args.average]
        for note in (note for model in (first, *others) for note in model.notes):
            echo(f"edit_checkpoint: {note}", file=sys.stderr)
        if args.merge and first.merged is None:
            raise CheckpointError(f"{first.manifest.path} holds no adapters", "drop --merge")
        routers = {name: value for name in ("moe_router_topk", "seed") if (value := getattr(args, name)) is not None}
        changes = Changes(
            others, args.drop_layers, args.resize_vocab, args.num_experts, heads=args.mtp_num_layers, **routers
        )
        path, model = change_checkpoint(first, changes, args.save, ProgressPrinter(), args.cast)
    except (CheckpointError, UserError, OSError) as error:
        echo(f"edit_checkpoint: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        echo("edit_checkpoint: stopped; nothing was written", file=sys.stderr)
        return 130
    echo(f"wrote {path}: {counted(model.num_layers, 'layer')}, {num_parameters(model):,} parameters")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
