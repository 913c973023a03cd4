"""Locations of checkpoints as arguments of the tools."""

from __future__ import annotations

import argparse

from megatron.checkpoint.location import Location, parse_location
from megatron.config.errors import UserError


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
