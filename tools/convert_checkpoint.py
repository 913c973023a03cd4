"""Convert checkpoints from and to Hugging Face and Megatron-LM.

``python tools/convert_checkpoint.py --load hf:HF_FOLDER --save CHECKPOINTS``
``python tools/convert_checkpoint.py --load CHECKPOINTS --save-hf HF_FOLDER``
``python tools/convert_checkpoint.py --load megatron:MEGATRON_FOLDER --save CHECKPOINTS`` (or ``--save-hf``)
``python tools/convert_checkpoint.py --load CHECKPOINTS --save-megatron MEGATRON_FOLDER``
``python tools/convert_checkpoint.py --load peft:PEFT_FOLDER --pretrained-checkpoint hf:HF_FOLDER --save CHECKPOINTS``
``python tools/convert_checkpoint.py --load CHECKPOINTS --save-peft PEFT_FOLDER``
``python tools/convert_checkpoint.py --load dcp:FOLDER --save CHECKPOINTS`` (or ``deepspeed:``, ``nanotron:``)

Adapters are merged into the weights of their model, except with ``--save-peft``.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # if this checkout is not installed

if __name__ == "__main__":  # until main has a handler of its own; the imports below take a while
    signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))

from megatron.config.files import add_links_flag
from megatron.config.schemes import FRAMEWORK_PREFIXES, split_scheme
from megatron.config.text import echo, shell_word
from megatron.data.progress import ByteProgress
from megatron.layers.parameters import num_parameters
from tools.lib.locations import (
    LOCATIONS,
    add_plugin_flag,
    add_pretrained_flag,
    location_argument,
    source_argument,
    source_options,
)

if TYPE_CHECKING:
    from megatron.convert.huggingface.convert import ConversionResult

UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
SOURCES = {
    "load hf:": ("save",),
    **{f"load {prefix}": ("save",) for prefix in FRAMEWORK_PREFIXES},
    "load megatron:": ("save", "save_hf"),
    "load peft:": ("save",),
    "load": ("save_hf", "save_megatron", "save_peft"),
}
"""Sources by the scheme of ``--load``, and the targets that they can be converted to."""
TARGETS = ("save", "save_hf", "save_megatron", "save_peft")
OTHERS = tuple(f"load {prefix}" for prefix in FRAMEWORK_PREFIXES)
OPTIONS = {
    "max_shard_size": ("save_hf",),
    "tokenizer": ("save_hf",),
    "model_type": ("save_hf", "save_peft", "load peft:"),
    "ema": ("save_hf", "save_peft"),
    "dtype": ("save_hf", "save_peft", "load hf:", *OTHERS),
    "workers": ("save_hf", "load hf:", *OTHERS),
    "no_check": ("save_hf", "load hf:"),
    "plugin": ("save_hf", "save_megatron", "load hf:", *OTHERS, "save_peft", "load peft:"),
    "ckpt_step": ("load", "load megatron:"),
    "pretrained_checkpoint": ("load", "load peft:"),
}
"""Options that apply only to some sources or targets."""


def parse_size(text: str) -> int:
    """Parse a size such as ``5GB`` into bytes."""
    match = re.fullmatch(rf"(\d+(?:\.\d+)?)({'|'.join(UNITS)})?", text.strip().upper())
    if match is None or float(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 5GB or 200MB")
    return int(float(match[1]) * UNITS[match[2] or "B"])


def parse_count(text: str) -> int:
    """Parse a number of at least 1."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def parse_output_folder(text: str) -> Path:
    """Parse a path on a disk; object stores are rejected, because the result is renamed once it is complete."""
    scheme, folder = split_scheme(text)
    if scheme:
        written = f"--save-{scheme.removesuffix(':')} {shell_word(folder)}"
        raise argparse.ArgumentTypeError(f"{text}: {scheme} is for --load; {written} writes that format")
    path = location_argument(text)
    if not isinstance(path, Path):
        raise argparse.ArgumentTypeError(f"{text} is in an object store; write to a local folder and copy it")
    return path


def build_parser() -> argparse.ArgumentParser:
    """Return the command-line parser."""
    parser = argparse.ArgumentParser(
        description="Turn a model of Hugging Face, or a checkpoint of Megatron-LM, into a checkpoint, or back.",
        epilog="One CPU process, tensor by tensor. If a conversion from or to Hugging Face is killed, the same command "
        "continues. The result is not kept if transformers computes other values.",
        allow_abbrev=False,
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--load", type=source_argument, metavar="PATH", help=LOCATIONS)
    for name in ("hf", "megatron", "peft"):
        older = f"--load {name}:DIR"
        source.add_argument(f"--load-{name}", type=f"{name}:{{}}".format, dest="load", metavar="DIR", help=older)
    target = parser.add_mutually_exclusive_group(required=True)
    kept = (
        "folder for a checkpoint: from Hugging Face of step 0 and weights only, from Megatron-LM with the run's state"
    )
    target.add_argument("--save", type=parse_output_folder, metavar="CKPT", help=kept)
    to_megatron = "folder to write, in Megatron-LM's format torch_dist; must not exist, or be empty"
    target.add_argument("--save-megatron", type=parse_output_folder, metavar="DIR", help=to_megatron)
    target.add_argument(
        "--save-hf", type=parse_output_folder, metavar="DIR", help="folder to write; must not exist, or be empty"
    )
    to_peft = "folder to write, of an adapter that PEFT loads; must not exist, or be empty"
    target.add_argument("--save-peft", type=parse_output_folder, metavar="DIR", help=to_peft)
    add_pretrained_flag(parser)
    parser.add_argument("--ckpt-step", type=int, metavar="N", help="which checkpoint of --load (the newest valid one)")
    parser.add_argument(
        "--dtype", choices=("fp32", "bf16", "fp16"), help="dtype of the weights written (that of the run; fp32)"
    )
    parser.add_argument("--max-shard-size", type=parse_size, metavar="SIZE", help="size of a weights file (5GB)")
    parser.add_argument("--tokenizer", type=Path, metavar="DIR", help="tokenizer files, instead of the checkpoint's")
    parser.add_argument("--model-type", metavar="TYPE", help="of transformers (the first that computes the same)")
    parser.add_argument("--ema", action="store_true", default=None, help="write the weight average of --ema-decay")
    workers = "files to write at a time (2; 1 for a model in fp32)"
    parser.add_argument("--workers", type=parse_count, metavar="N", help=workers)
    skipped = "skip the comparison with transformers"
    parser.add_argument("--no-check", action="store_true", default=None, help=skipped)
    add_links_flag(parser)
    add_plugin_flag(parser)
    return parser


def check_direction(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Exit with status 2 for flags that do not fit the source or the target."""
    source = f"load {split_scheme(args.load)[0]}".strip()
    target = next(name for name in TARGETS if getattr(args, name) is not None)
    if target not in SOURCES[source]:
        parser.error(
            "--load hf:, peft:, dcp:, deepspeed: and nanotron: go with --save, "
            "--load with --save-hf, --save-megatron or --save-peft, "
            "--load megatron: with --save or --save-hf"
        )
    for name, only in OPTIONS.items():
        if getattr(args, name) is not None and not {source, target} & {*only}:
            parser.error(f"{as_flag(name)}: only with {' or '.join(map(as_flag, only))}")


def as_flag(name: str) -> str:
    """Return the flag of an argument."""
    return f"--{name.replace('_', '-')}"


def main(argv: Sequence[str]) -> int:
    """Convert, and print what was written and how it was checked.

    Returns:
        The exit status: 1 if the conversion fails, 2 for invalid flags.
    """
    parser = build_parser()
    args = parser.parse_args(argv)
    check_direction(parser, args)

    from megatron.checkpoint.errors import CheckpointError
    from megatron.config.errors import UserError
    from megatron.config.plugins import load_plugins
    from megatron.convert.huggingface.check import uncovered_by_check
    from megatron.convert.model_card import CARD_FILE, OTHER_CARD_FILE

    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        load_plugins(args.plugin or ())
        done = convert(args)
    except (CheckpointError, UserError, OSError) as error:
        echo(f"convert_checkpoint: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        echo("convert_checkpoint: stopped; nothing was written", file=sys.stderr)
        return 130
    if isinstance(done, str):
        echo(done)
        return 0
    if done.kept:
        echo(f"continued: {done.kept} files of an interrupted conversion were complete")
    architecture = f"{done.architecture}, " if done.architecture else ""
    echo(f"wrote {done.path}: {architecture}{num_parameters(done.model):,} parameters")
    if (done.path / OTHER_CARD_FILE).exists():
        echo(f"{CARD_FILE} is that of --tokenizer; how the model was trained is in {OTHER_CARD_FILE}")
    if done.differences:
        logits, worst = done.differences[-1], max(done.differences, key=lambda difference: difference.relative)
        more = f"; at worst {worst}" if worst.relative > logits.relative else ""
        echo(f"transformers computes the same: {logits}{more}")
        missed = uncovered_by_check(done.model)
        if missed:
            echo(f"not compared: {missed}")
    else:
        echo(
            "not compared with transformers"
            + ("" if args.no_check else ", which cannot read the source, or has no such model")
        )
    return 0


def convert(args: argparse.Namespace) -> ConversionResult | str:
    """Run the conversion of the flags; return its result, or what was written."""
    from megatron.convert.huggingface.config import refuse_outside_links
    from megatron.convert.huggingface.convert import convert_from_huggingface, convert_to_huggingface
    from megatron.convert.huggingface.peft import PeftAdapters, export_peft, import_peft
    from megatron.convert.huggingface.weights import HuggingFaceWeights
    from megatron.convert.megatron_lm.save import import_megatron_lm, save_megatron_lm
    from megatron.convert.saved_model import SavedModel, describe_adapters
    from megatron.convert.sources import open_source

    report, checked = ProgressPrinter(), not args.no_check
    if args.tokenizer is not None and not args.follow_links:
        refuse_outside_links(args.tokenizer)
    source = open_source(args.load, source_options(args))
    for note in source.notes:
        echo(f"convert_checkpoint: {note}", file=sys.stderr)
    if isinstance(source, HuggingFaceWeights):
        return convert_from_huggingface(
            source, args.save, report, checked and not source.converted, args.dtype, args.workers or 2
        )
    if isinstance(source, PeftAdapters):
        path, adapted = import_peft(source, args.save)
        return f"wrote {path}: {describe_adapters(adapted)}"
    if not isinstance(source, SavedModel):
        raise TypeError(f"{args.load} is not converted")
    if args.save_peft is not None:
        adapted = export_peft(source, args.save_peft, args.dtype, args.model_type)
        return f"wrote {args.save_peft}: {describe_adapters(adapted)}"
    if args.save_hf is not None:
        return convert_to_huggingface(
            source,
            args.save_hf,
            report,
            dtype=args.dtype,
            shard_bytes=args.max_shard_size or parse_size("5GB"),
            tokenizer=args.tokenizer,
            model_type=args.model_type,
            checked=checked,
            workers=args.workers,
        )
    if args.save_megatron is not None:
        path, what = save_megatron_lm(source, args.save_megatron, report)
    else:
        path, what = import_megatron_lm(source.manifest, args.save, report)
    return f"wrote {path}: {what}"


class ProgressPrinter:
    """Print the bytes written, the rate and the time left, once a conversion takes more than a few seconds."""

    def __init__(self) -> None:
        self._line: ByteProgress | None = None
        self._done = 0

    def __call__(self, name: str, done: int, total: int) -> None:
        """Report ``done`` of ``total`` bytes, the last of them in tensor ``name``."""
        self._line = self._line or ByteProgress(sys.stderr, total)
        self._line.add(done - self._done)
        self._done = done
        if done == total:
            self._line.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
