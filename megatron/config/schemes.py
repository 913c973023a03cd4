"""Schemes of the locations of models; checkpoints of this program have none, or that of an object store."""

HUGGING_FACE_PREFIX = "hf:"
"""Prefix of the folder of a Hugging Face model, or of its name ``ORG/NAME`` on the hub."""

MEGATRON_PREFIX = "megatron:"
"""Prefix of a folder of Megatron-LM's checkpoints, or of one of them."""

PEFT_PREFIX = "peft:"
"""Prefix of the folder of an adapter of PEFT."""


def split_scheme(location: str) -> tuple[str, str]:
    """Return the prefix of a location, empty for checkpoints of this program, and the rest."""
    prefixes = (HUGGING_FACE_PREFIX, MEGATRON_PREFIX, PEFT_PREFIX)
    prefix = next(filter(location.startswith, prefixes), "")
    return prefix, location.removeprefix(prefix)
