"""Locations of checkpoints as arguments of the tools."""

from __future__ import annotations

import argparse

from megatron.checkpoint.location import Location, parse_location
from megatron.config.errors import UserError


def location_argument(text: str) -> Location:
    """Parse a location as `parse_location`; argparse would print a refused one, which holds a credential."""
    try:
        return parse_location(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
