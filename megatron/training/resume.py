"""Load the start state of a trainer: a checkpoint, Hugging Face weights, or none."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from megatron.checkpoint.errors import DamagedError, StorageError
from megatron.checkpoint.exchange import Tier
from megatron.checkpoint.folder import Checkpoints
from megatron.checkpoint.local import LocalCheckpoint
from megatron.checkpoint.local_loading import bring_together
from megatron.checkpoint.manifest import Manifest
from megatron.checkpoint.remote import Location
from megatron.config.hf import SPECIAL_IDS
from megatron.config.problems import Problem, UserError
from megatron.config.run import CheckpointConfig, DataConfig
from megatron.convert.checkpoint import GENERATION, TOKENIZER, carried_by, carried_files
from megatron.convert.hf_folder import HFSource
from megatron.data.errors import DataError
from megatron.data.vocabulary import carried_tokenizer
from megatron.parallel.comm import Group
from megatron.training.checkpointing import held, restore, restore_from_source, restore_weights, to_fill
from megatron.training.local_tier import remarks, tier_of, with_local
from megatron.training.origin import Candidate, Origin, changes_since, look, passed_over
from megatron.training.setup import Trainer
from megatron.training.together import on_first

TOKENIZER_JSON = TOKENIZER + "tokenizer.json"

Files = Mapping[str, Path | bytes]
"""Contents or paths of small files, by their names in a checkpoint."""


def choose(options: CheckpointConfig, world: Group) -> Origin:
    """Return what the run starts from, the same on every rank; collective.

    Rank 0 searches ``save`` and ``load``, and one rank per node the node's own disk.

    Raises:
        UserError: as :func:`find_resume_source` and :func:`add_local_checkpoints`.

    """
    if options.local_save is None:
        return on_first(partial(look, options), world)
    return with_local(on_first(partial(_source_or_error, options), world), options, world)


def _source_or_error(options: CheckpointConfig) -> Origin | UserError:
    """Return what the run starts from; or the error if ``save`` and ``load`` have nothing usable, but nodes might.

    Raises:
        UserError: for errors that local checkpoints must not hide: an unreachable store, a newer format version.
    """
    try:
        return look(options)
    except UserError as error:
        if error.__cause__ is not None or not {problem.code for problem in error.problems} <= {"E811", "E812"}:
            raise
        return error


def begin(trainer: Trainer, source: Origin) -> list[str]:
    """Load what the run starts from into a trainer that was built with ``fresh=source.fresh``; collective.

    Returns:
        Notes: what was loaded, which options have changed, which checkpoints were passed over.

    Raises:
        UserError: if changed options do not allow resuming, or no checkpoint can be read.
        DataError: if the data cannot be opened.

    """
    notes = list(source.notes)
    config = trainer.config
    if config.checkpoint.local_save is not None:
        trainer.local = tier_of(config.checkpoint, trainer.mesh.beside(), trainer.mesh.beside(), trainer.claims.node)
        notes += remarks(trainer.local)
    recorded = recorded_files(config.data, config.model.vocab)
    trainer.files = recorded
    if source.fresh:
        return notes
    if source.hf is not None:
        carried = carried_files(source.hf)
        trainer.files = companions(recorded, carried)
        restore_from_source(trainer, HFSource(source.hf, config.model))
        return [*notes, f"weights from {source.hf}", *other_words(recorded, carried)]
    for candidate in source.candidates:
        try:
            manifest, files = _opened(trainer, candidate, notes)
            changes = changes_since(manifest, config, trainer.mesh.world.size, source.mode, notes)
            trainer.files = companions(recorded, files)
            if source.mode == "weights-only":
                restore_weights(trainer, manifest)
                notes += other_words(recorded, files)
                loaded = f"weights from {manifest.path}"
            else:
                notes += restore(trainer, manifest, changes.batches_since)
                loaded = f"resumed from {manifest.path}: step {trainer.iteration}, {trainer.consumed_samples:,} samples"
        except DamagedError as error:
            notes.append(passed_over(_path_of(trainer, candidate), error))
            continue
        return [*notes, loaded, *changes.lines]
    raise UserError([Problem("E811", "\n  ".join(["no checkpoint can be used:", *notes]))])


def _opened(trainer: Trainer, candidate: Candidate, notes: list[str]) -> tuple[Manifest, dict[str, bytes]]:
    """Return a checkpoint's manifest and the small files that it carries, and append to ``notes``; collective.

    Raises:
        DamagedError: on every rank, if it cannot be used.
    """
    world = trainer.mesh.world
    if not isinstance(candidate, LocalCheckpoint):
        return on_first(partial(_manifest_and_files, candidate), world)
    try:
        manifest, transfer_notes = bring_together(_tier(trainer), candidate, to_fill(trainer, held(trainer)))
    except (OSError, StorageError) as error:
        raise DamagedError(f"its files cannot be collected from the nodes: {error}") from error
    notes += transfer_notes
    return manifest, on_first(partial(carried_by, manifest), world)


def _manifest_and_files(path: Location) -> tuple[Manifest, dict[str, bytes]]:
    manifest = Manifest.open(path)
    return manifest, carried_by(manifest)


def _tier(trainer: Trainer) -> Tier:
    if trainer.local is None:
        raise ValueError("there are local checkpoints, but no local_save")
    return trainer.local


def _path_of(trainer: Trainer, candidate: Candidate) -> Location:
    if not isinstance(candidate, LocalCheckpoint):
        return candidate
    return Checkpoints(_tier(trainer).folder).path(candidate.iteration)


def recorded_files(data: DataConfig, vocab_size: int) -> dict[str, Path | bytes]:
    """Return the files of the data's tokenizer, by their names in a checkpoint.

    Raises:
        DataError: if the tokenizer cannot be read.
    """
    recorded = carried_tokenizer(data, vocab_size)
    return {TOKENIZER + name: content for name, content in recorded.items()}


def companions(recorded: Files, carried: Files) -> dict[str, Path | bytes]:
    """Return the small files for the run's checkpoints: the tokenizer of its data, and the other files it loaded.

    Args:
        recorded: tokenizer files of the run's data.
        carried: files of the checkpoint or model that the run starts from.

    Raises:
        DataError: if the generation_config.json in ``carried`` cannot be read.
    """
    if not recorded:
        return dict(carried)
    kept = {name: content for name, content in carried.items() if not name.startswith(TOKENIZER)}
    same = TOKENIZER_JSON in carried and not other_words(recorded, carried)
    if GENERATION in kept and not same:  # its special token ids belong to another tokenizer
        kept[GENERATION] = _without_special_ids(_bytes(kept[GENERATION]))
    return kept | dict(recorded)


def other_words(recorded: Files, carried: Files) -> list[str]:
    """Return a note if the data's tokenizer is not the one that the weights were trained with."""
    if TOKENIZER_JSON not in recorded or TOKENIZER_JSON not in carried:
        return []
    if _bytes(recorded[TOKENIZER_JSON]) == _bytes(carried[TOKENIZER_JSON]):
        return []
    return [
        "the data's tokenizer is not that of the weights, so token ids may have other meanings: "
        "pass the folder of the right one to tools/preprocess_data.py --tokenizer-model"
    ]


def _bytes(content: Path | bytes) -> bytes:
    return content if isinstance(content, bytes) else content.read_bytes()


def _without_special_ids(generation: bytes) -> bytes:
    """Return a generation_config.json without special token ids."""
    try:
        settings = json.loads(generation)
    except ValueError as error:
        raise DataError(f"the {GENERATION} of the loaded model is not valid JSON: {error}") from error
    if not isinstance(settings, dict):
        raise DataError(f"the {GENERATION} of the loaded model is a JSON {type(settings).__name__}, not an object")
    return json.dumps({name: value for name, value in settings.items() if name not in SPECIAL_IDS}).encode()
