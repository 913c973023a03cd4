"""Open the weights of ``dcp:DIR``, ``deepspeed:DIR`` or ``nanotron:DIR`` as those of a Hugging Face model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from megatron.checkpoint.framework_folders import find_config_folder, find_framework_checkpoint
from megatron.config.errors import Problem, UserError
from megatron.config.model import ModelConfig
from megatron.config.schemes import DCP_PREFIX, DEEPSPEED_PREFIX, NANOTRON_PREFIX
from megatron.config.text import shell_word
from megatron.convert.frameworks.dcp import read_dcp
from megatron.convert.frameworks.deepspeed import read_deepspeed
from megatron.convert.frameworks.names import from_nanotron, huggingface_names
from megatron.convert.frameworks.nanotron import read_nanotron
from megatron.convert.frameworks.pieces import PartialTensors
from megatron.convert.huggingface.config import (
    CONFIG_FILE,
    model_type_for,
    nanotron_rotates_pairs,
    read_config,
    read_model_config,
    read_model_type,
    refuse_outside_links,
)
from megatron.convert.huggingface.families import model_families
from megatron.convert.huggingface.weights import HuggingFaceWeights

READERS: Mapping[str, Callable[[Path], PartialTensors]] = {
    DCP_PREFIX: read_dcp,
    DEEPSPEED_PREFIX: read_deepspeed,
    NANOTRON_PREFIX: read_nanotron,
}
"""Functions that read the tensors of a checkpoint by its own names, by scheme."""


def open_framework(
    scheme: str, place: str, model: ModelConfig | None, flag: str, follow_links: bool
) -> HuggingFaceWeights:
    """Open the weights of a checkpoint of another program.

    Args:
        scheme: key of ``READERS``.
        place: folder of the checkpoint, or of several.
        model: architecture; None for that of the configuration beside the checkpoint.
        flag: option that gives the location, for messages.
        follow_links: also read files to which links lead out of the folder.

    Raises:
        UserError: if there is no checkpoint or no configuration, or the model is not supported.
        CheckpointError: if the tensors are not those of the model.
    """
    folder = find_framework_checkpoint(scheme, place, flag)
    config_folder = find_config_folder(f"{scheme}{folder}")
    if not follow_links:
        refuse_outside_links(Path(place), [folder])
        refuse_outside_links(folder, (file for file in sorted(folder.rglob("*")) if file.is_file()))
        refuse_outside_links(config_folder or folder)  # with its tokenizer
    if config_folder is None and model is None:
        sentence = f"{folder} holds no {CONFIG_FILE}, so the architecture of its model is unknown"
        fix = f"cp {CONFIG_FILE}_OF_THE_HUGGING_FACE_MODEL {shell_word(str(folder / CONFIG_FILE))}"
        raise UserError([Problem("E850", sentence, (fix,))])
    found = model or read_model_config(config_folder or folder)
    if config_folder is None:
        kind = model_type_for(found)
    else:
        kind = read_model_type(read_config(config_folder), str(config_folder / CONFIG_FILE))
    tensors = READERS[scheme](folder)
    if scheme == NANOTRON_PREFIX:
        named = from_nanotron(tensors, found, nanotron_rotates_pairs(config_folder))
    else:
        named = huggingface_names(tensors, kind, found, model_families()[kind].prefix, str(folder))
    return HuggingFaceWeights(config_folder or folder, found, named, kind)
