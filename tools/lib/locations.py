"""Locations of checkpoints and models as arguments of the tools."""

from __future__ import annotations

import argparse

from megatron.checkpoint.location import Location, parse_location
from megatron.config.errors import UserError
from megatron.config.files import add_links_flag
from megatron.config.settings import SETTINGS


def add_pretrained_flag(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add the flag of a tool that reads adapters."""
    moved = "the model that the adapters in --load belong to, if it has moved: a checkpoint, or hf:DIR"
    parser.add_argument("--pretrained-checkpoint", metavar="PATH", help=moved)


def location_argument(text: str) -> Location:
    """Parse a location as `parse_location`; argparse would print a refused one, which holds a credential."""
    try:
        return parse_location(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def add_model_flags(model: argparse._ArgumentGroup) -> None:
    """Add the flags that choose a trained model, and the dtype and device to compute on."""
    model.add_argument(
        "--load",
        required=True,
        metavar="PATH",
        help="a folder of checkpoints, one of them, megatron:DIR, or hf:DIR or hf:ORG/NAME of Hugging Face",
    )
    model.add_argument("--ckpt-step", type=int, metavar="N", help="step of the checkpoint (the newest valid one)")
    model.add_argument("--ema", action="store_true", help="use the weight average of --ema-decay")
    add_pretrained_flag(model)
    dtypes, devices = (SETTINGS[name].option.choices for name in ("params_dtype", "device"))
    model.add_argument("--params-dtype", choices=dtypes, help="dtype of weights and activations (as trained or stored)")
    model.add_argument("--device", choices=devices, default="auto", help="device (auto)")
    add_links_flag(model)
    model.add_argument("--plugin", nargs="+", default=(), metavar="MODULE", help="modules with further model families")
