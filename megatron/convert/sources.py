"""Open the model of any location: checkpoints of a run, ``hf:DIR``, ``megatron:DIR``, ``peft:DIR`` and others.

``OPENERS`` has a function for each scheme; every program opens models with `open_source`. Imports neither torch nor
what reads the weights before a model is opened.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.arguments.compatibility import unknown_options
from megatron.checkpoint.errors import CheckpointError
from megatron.checkpoint.folder import CheckpointFolder
from megatron.checkpoint.format import FOREIGN_READERS, Manifest, is_megatron_lm
from megatron.checkpoint.location import Location, parse_location
from megatron.config.errors import Problem, UserError
from megatron.config.model import ModelConfig
from megatron.config.schemes import FRAMEWORK_PREFIXES, HUGGING_FACE_PREFIX, MEGATRON_PREFIX, PEFT_PREFIX, split_scheme
from megatron.config.text import shell_word
from megatron.convert.huggingface.config import CONFIG_FILE, model_folder, read_model_config, refuse_outside_links
from megatron.convert.megatron_lm.checkpoint import read_checkpoint

if TYPE_CHECKING:
    from megatron.convert.base_model import BaseModel
    from megatron.convert.huggingface.peft import PeftAdapters
    from megatron.convert.huggingface.weights import HuggingFaceWeights
    from megatron.convert.saved_model import SavedModel
    from megatron.convert.weight_source import ModelSource


@dataclass(frozen=True)
class SourceOptions:
    """Options for opening a model at a location.

    Options of a user that do not apply to the scheme of the location are refused. ``model`` and ``model_type`` come
    from programs, for weights without a configuration of their own.
    """

    step: int | None = None  # of the checkpoint; None for the newest valid one
    average: bool = False  # the moving average of the weights
    # The model that adapters belong to, if it is not where they name it.
    pretrained: str | None = None
    follow_links: bool = False  # also read files to which links lead out of a folder
    model: ModelConfig | None = None  # that weights of Hugging Face must fit; None for that of their config.json
    model_type: str | None = None  # of transformers, whose linears adapters of PEFT name; None for that of their base
    flag: str = "--load"  # which gives the location, for messages


WHOLE = SourceOptions()
"""Options of the newest weights of a location."""


def open_source(location: str, options: SourceOptions = WHOLE) -> ModelSource:
    """Open the model of a location.

    Args:
        location: a folder of checkpoints, or one of them, on a disk or in an object store; ``hf:DIR`` or
            ``hf:ORG/NAME``; ``megatron:DIR``; ``peft:DIR``, an adapter that is added to the weights of its base;
            ``dcp:DIR``, ``deepspeed:DIR`` or ``nanotron:DIR``.
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


def checkpoint_location(location: str) -> Location | None:
    """Return the folder of checkpoints that a location names; None for a model without the state of a run."""
    return parse_location(location) if split_scheme(location)[0] in ("", *FOREIGN_READERS) else None


def open_checkpoint(path: Location, step: int | None = None) -> tuple[Manifest, list[str]]:
    """Open a checkpoint folder, or the newest valid checkpoint (or that of ``step``) in a ``--save`` folder.

    Returns:
        The manifest, and notes for the user: which checkpoint it is, which newer ones were skipped and why, and
        options in it that this version does not know.

    Raises:
        CheckpointError: when there is none, or a newer version wrote it.
        DamagedCheckpointError: when it is damaged.
    """
    manifest, skipped = CheckpointFolder(path).newest(step)
    notes = [f"from {manifest.path}, step {manifest.state.get('iteration')}"]
    notes += [f"passed over {found.path}: {found.problem}" for found in skipped]
    if unknown := unknown_options(manifest.config):
        notes.append(f"it has options that this version does not know: {', '.join(unknown)}")
    return manifest, notes


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
    from megatron.convert.base_model import find_recorded_base
    from megatron.convert.saved_model import SavedModel, read_run_config

    if read_run_config(manifest).model.lora_rank is None:
        if options.pretrained is not None:
            raise CheckpointError(f"{manifest.path} holds no adapters", "drop --pretrained-checkpoint")
        return SavedModel(manifest, options.average, None, notes)
    base = find_recorded_base(manifest, options.pretrained)
    return SavedModel(manifest, options.average, (base, _open_base(base, options)), notes)


def open_huggingface(place: str, options: SourceOptions) -> HuggingFaceWeights:
    """Open ``hf:DIR`` or ``hf:ORG/NAME``."""
    from megatron.convert.huggingface.weights import HuggingFaceWeights

    given = {"ckpt_step": options.step, "ema": options.average, "pretrained_checkpoint": options.pretrained}
    _refuse("a Hugging Face folder holds one set of weights, and no adapters", given)
    folder = model_folder(place)
    if not options.follow_links:
        refuse_outside_links(folder)
    return HuggingFaceWeights(folder, options.model or read_model_config(folder))


def open_other(scheme: str, place: str, options: SourceOptions) -> HuggingFaceWeights:
    """Open the weights in a checkpoint of another program: ``dcp:DIR``, ``deepspeed:DIR`` or ``nanotron:DIR``."""
    from megatron.convert.frameworks.source import open_framework

    given = {"ckpt_step": options.step, "ema": options.average, "pretrained_checkpoint": options.pretrained}
    _refuse(f"{scheme}DIR is the weights of one checkpoint; name its folder", given)
    return open_framework(scheme, place, options.model, options.flag, options.follow_links)


def open_peft(place: str, options: SourceOptions) -> PeftAdapters:
    """Open an adapter of PEFT, and the model that it belongs to."""
    from megatron.convert.huggingface.peft import PeftAdapters, find_named_base

    _refuse("a folder of PEFT holds one adapter", {"ckpt_step": options.step, "ema": options.average})
    folder = Path(place)
    if not options.follow_links:
        refuse_outside_links(folder)
    base = find_named_base(folder, options.pretrained)
    return PeftAdapters(folder, base, _open_base(base, options), options.model_type)


def _refuse(sentence: str, given: Mapping[str, object]) -> None:
    """Raise UserError with the reason for ``given`` options that weights of a kind do not have."""
    flags = [f"--{name.replace('_', '-')}" for name, value in given.items() if value not in (None, False)]
    if flags:
        raise UserError([Problem("E803", f"{flag}: {sentence}", (f"drop {flag}",)) for flag in flags])


def _open_base(base: BaseModel, options: SourceOptions) -> ModelSource:
    return open_source(base.location, SourceOptions(follow_links=options.follow_links))


OPENERS: Mapping[str, Callable[[str, SourceOptions], ModelSource]] = {
    "": open_checkpoints,
    HUGGING_FACE_PREFIX: open_huggingface,
    MEGATRON_PREFIX: open_megatron_lm,
    PEFT_PREFIX: open_peft,
    **{scheme: partial(open_other, scheme) for scheme in FRAMEWORK_PREFIXES},
}
"""Functions that open the model of a place, by the prefix of its scheme."""

FOREIGN_READERS[MEGATRON_PREFIX] = read_checkpoint  # of checkpoints that are read like those of this program
