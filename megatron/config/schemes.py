"""Schemes of the locations of models; checkpoints of this program have none, or that of an object store."""

HUGGING_FACE_PREFIX = "hf:"
"""Prefix of the folder of a Hugging Face model, or of its name ``ORG/NAME`` on the hub."""

MEGATRON_PREFIX = "megatron:"
"""Prefix of a folder of Megatron-LM's checkpoints, or of one of them."""

PEFT_PREFIX = "peft:"
"""Prefix of the folder of an adapter of PEFT."""

DCP_PREFIX = "dcp:"
"""Prefix of a checkpoint of torch.distributed.checkpoint: of FSDP2, or of torchtitan."""

DEEPSPEED_PREFIX = "deepspeed:"
"""Prefix of a checkpoint of DeepSpeed."""

NANOTRON_PREFIX = "nanotron:"
"""Prefix of a checkpoint of nanotron."""

FRAMEWORK_PREFIXES = (DCP_PREFIX, DEEPSPEED_PREFIX, NANOTRON_PREFIX)
"""Prefixes of checkpoints of other programs, of which the weights are read."""

WEIGHTS_PREFIXES = (HUGGING_FACE_PREFIX, *FRAMEWORK_PREFIXES)
"""Prefixes of models with weights alone: there is no run to continue."""


def split_scheme(location: str) -> tuple[str, str]:
    """Return the prefix of a location, empty for checkpoints of this program, and the rest."""
    prefixes = (*WEIGHTS_PREFIXES, MEGATRON_PREFIX, PEFT_PREFIX)
    prefix = next(filter(location.startswith, prefixes), "")
    return prefix, location.removeprefix(prefix)
