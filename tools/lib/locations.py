"""Locations of checkpoints and models as arguments of the tools."""

from __future__ import annotations

import argparse

from megatron.checkpoint.location import Location
from megatron.config.errors import UserError
from megatron.config.files import add_links_flag
from megatron.config.settings import SETTINGS
from megatron.config.text import shell_word
from megatron.convert.sources import SourceOptions, checkpoint_location

LOCATIONS = (
    "a folder of checkpoints, one of them, s3://BUCKET/RUN, hf:DIR or hf:ORG/NAME of Hugging Face, megatron:DIR of "
    "Megatron-LM, peft:DIR, an adapter, or dcp:DIR, deepspeed:DIR or nanotron:DIR of other programs"
)
"""Description of the locations that every program loads."""


def add_pretrained_flag(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add the flag of a tool that reads adapters."""
    moved = "the model that the adapters in --load belong to, if it has moved: a checkpoint, or hf:DIR"
    parser.add_argument("--pretrained-checkpoint", metavar="PATH", help=moved)


def add_plugin_flag(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add the flag of a tool that reads models, which may have mixers or a family of a plugin."""
    parts = "modules that register mixers, model families or other parts of the model"
    parser.add_argument("--plugin", nargs="+", metavar="MODULE", help=parts)


def location_argument(text: str) -> Location:
    """Parse the location of checkpoints; argparse would print a refused one, which holds a credential."""
    try:
        location = checkpoint_location(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if location is None:
        imported = f"python tools/convert_checkpoint.py --load {shell_word(text)} --save NEW"
        raise argparse.ArgumentTypeError(f"{text} is not a checkpoint; {imported} writes one")
    return location


def source_argument(text: str) -> str:
    """Return a location of any scheme, checked as `location_argument` does for checkpoints."""
    try:
        checkpoint_location(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def add_model_flags(model: argparse._ArgumentGroup) -> None:
    """Add the flags that choose a trained model, and the dtype and device to compute on."""
    model.add_argument(
        "--load",
        required=True,
        metavar="PATH",
        help=LOCATIONS,
    )
    model.add_argument("--ckpt-step", type=int, metavar="N", help="step of the checkpoint (the newest valid one)")
    model.add_argument("--ema", action="store_true", help="use the weight average of --ema-decay")
    add_pretrained_flag(model)
    dtypes, devices = (SETTINGS[name].option.choices for name in ("params_dtype", "device"))
    model.add_argument("--params-dtype", choices=dtypes, help="dtype of weights and activations (as trained or stored)")
    model.add_argument("--device", choices=devices, default="auto", help="device (auto)")
    add_links_flag(model)
    add_plugin_flag(model)


def source_options(args: argparse.Namespace) -> SourceOptions:
    """Return which model of ``--load`` the flags choose."""
    average, kind = bool(vars(args).get("ema")), vars(args).get("model_type")
    return SourceOptions(args.ckpt_step, average, args.pretrained_checkpoint, args.follow_links, model_type=kind)
