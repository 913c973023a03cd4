"""Open the model of any location: checkpoints of a run, ``hf:DIR``, ``megatron:DIR`` or ``peft:DIR``.

``OPENERS`` has a function for each scheme; every program opens models with `open_source`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from megatron.checkpoint.errors import CheckpointError
from megatron.checkpoint.folder import CheckpointFolder
from megatron.checkpoint.format import Manifest, is_megatron_lm
from megatron.checkpoint.location import parse_location
from megatron.config.errors import Problem, UserError
from megatron.config.schemes import HUGGING_FACE_PREFIX, MEGATRON_PREFIX, PEFT_PREFIX, split_scheme
from megatron.config.text import shell_word
from megatron.convert.base_model import BaseModel, find_recorded_base
from megatron.convert.huggingface.config import CONFIG_FILE, refuse_outside_links
from megatron.convert.huggingface.peft import PeftAdapters, find_named_base
from megatron.convert.huggingface.weights import open_huggingface
from megatron.convert.saved_model import SavedModel, open_checkpoint, read_run_config
from megatron.convert.weight_source import ModelSource, SourceOptions

WHOLE = SourceOptions()
"""Options of the newest weights of a location."""


def open_source(location: str, options: SourceOptions = WHOLE) -> ModelSource:
    """Open the model of a location.

    Args:
        location: a folder of checkpoints, or one of them, on a disk or in an object store; ``hf:DIR`` or
            ``hf:ORG/NAME``; ``megatron:DIR``; ``peft:DIR``, an adapter that is added to the weights of its base.
        options: which of its models, and how.

    Raises:
        UserError: if the location is empty or of another scheme, an option does not apply, or the model is not
            supported.
        CheckpointError: if there is none, or its weights do not match its model.
    """
    scheme, place = split_scheme(location)
    if not place:
        fixes = f"{options.flag} CHECKPOINTS", f"{options.flag} {HUGGING_FACE_PREFIX}DIR"
        raise UserError([Problem("E801", f"{options.flag} '{location}' names no folder", fixes)])
    return OPENERS[scheme](place, options)


def open_checkpoints(place: str, options: SourceOptions) -> SavedModel:
    """Open a checkpoint, or one in a folder of checkpoints."""
    path, flag = parse_location(place), options.flag
    if isinstance(path, Path) and (path / CONFIG_FILE).is_file() and not CheckpointFolder(path).named():
        sentence = f"{flag} {path} is a Hugging Face model, not a folder of checkpoints"
        raise UserError([Problem("E801", sentence, (f"{flag} {HUGGING_FACE_PREFIX}{path}",))])
    manifest, notes = open_checkpoint(path, options.step)
    return open_saved(manifest, options, notes)


def open_megatron_lm(place: str, options: SourceOptions) -> SavedModel:
    """Open a checkpoint of Megatron-LM, or one in a folder of them."""
    manifest, notes = open_checkpoint(parse_location(place), options.step)
    if not is_megatron_lm(manifest.path):
        seen = f"{options.flag} {MEGATRON_PREFIX}{manifest.path} is not a checkpoint of Megatron-LM"
        raise CheckpointError(seen, f"{options.flag} {shell_word(place)}")
    return open_saved(manifest, options, notes)


def open_saved(manifest: Manifest, options: SourceOptions = WHOLE, notes: Sequence[str] = ()) -> SavedModel:
    """Open the model of a checkpoint. Adapters are added to the weights of the model that they name."""
    if read_run_config(manifest).model.lora_rank is None:
        if options.pretrained is not None:
            raise CheckpointError(f"{manifest.path} holds no adapters", "drop --pretrained-checkpoint")
        return SavedModel(manifest, options.average, None, notes)
    base = find_recorded_base(manifest, options.pretrained)
    return SavedModel(manifest, options.average, (base, _open_base(base, options)), notes)


def open_peft(place: str, options: SourceOptions) -> PeftAdapters:
    """Open an adapter of PEFT, and the model that it belongs to."""
    folder = Path(place)
    if options.step is not None or options.average:
        flag = "--ema" if options.average else "--ckpt-step"
        raise UserError([Problem("E803", f"{flag}: a folder of PEFT holds one adapter", (f"drop {flag}",))])
    if not options.follow_links:
        refuse_outside_links(folder)
    base = find_named_base(folder, options.pretrained)
    return PeftAdapters(folder, base, _open_base(base, options), options.model_type)


def _open_base(base: BaseModel, options: SourceOptions) -> ModelSource:
    return open_source(base.location, SourceOptions(follow_links=options.follow_links))


OPENERS: Mapping[str, Callable[[str, SourceOptions], ModelSource]] = {
    "": open_checkpoints,
    HUGGING_FACE_PREFIX: open_huggingface,
    MEGATRON_PREFIX: open_megatron_lm,
    PEFT_PREFIX: open_peft,
}
"""Functions that open the model of a place, by the prefix of its scheme."""
