"""Bringing a trainer to where its run begins."""

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
"""Contents of small files, or what to copy, by their names in a checkpoint."""


def choose(options: CheckpointConfig, world: Group) -> Origin:
    """What the run begins with. Rank 0 looks, of the nodes' own disks one rank each; collective, with one answer.

    Raises:
        UserError: as `look`, and as `with_local`.

    """
    if options.local_save is None:
        return on_first(partial(look, options), world)
    return with_local(on_first(partial(_origin_or_refusal, options), world), options, world)


def _origin_or_refusal(options: CheckpointConfig) -> Origin | UserError:
    """What the run begins with, or why there is nothing for it in ``save`` and ``load``, which the nodes may mend.

    Raises:
        UserError: for what is no reason to go on from something else: a store that does not answer, a newer version.
    """
    try:
        return look(options)
    except UserError as error:
        if error.__cause__ is not None or not {problem.code for problem in error.problems} <= {"E811", "E812"}:
            raise
        return error


def begin(trainer: Trainer, origin: Origin) -> list[str]:
    """Bring a trainer, built ``fresh`` if the origin is, to where the run begins; collective.

    Returns:
        Notes: what was loaded, what has changed since, what was passed over.

    Raises:
        UserError: when what has changed does not go together with going on, or no checkpoint can be read.
        DataError: when the data cannot be opened.

    """
    notes, config = list(origin.notes), trainer.config
    if config.checkpoint.local_save is not None:
        trainer.local = tier_of(config.checkpoint, trainer.mesh.beside(), trainer.mesh.beside(), trainer.claims.node)
        notes += remarks(trainer.local)
    recorded = recorded_files(config.data, config.model.vocab)
    trainer.files = recorded
    if origin.fresh:
        return notes
    if origin.hf is not None:
        carried = carried_files(origin.hf)
        trainer.files = companions(recorded, carried)
        restore_from_source(trainer, HFSource(origin.hf, config.model))
        return [*notes, f"weights from {origin.hf}", *other_words(recorded, carried)]
    for candidate in origin.in_turn:
        try:
            manifest, files = _opened(trainer, candidate, notes)
            changes = changes_since(manifest, config, trainer.mesh.world.size, origin.mode, notes)
            trainer.files = companions(recorded, files)
            if origin.mode == "weights-only":
                restore_weights(trainer, manifest)
                notes += other_words(recorded, files)
            else:
                notes += restore(trainer, manifest, changes.batches_since)
        except DamagedError as error:
            notes.append(passed_over(_path_of(trainer, candidate), error))
            continue
        return [*notes, _loaded(trainer, manifest, origin.mode), *changes.lines]
    raise UserError([Problem("E811", "\n  ".join(["no checkpoint can be used:", *notes]))])


def _opened(trainer: Trainer, candidate: Candidate, notes: list[str]) -> tuple[Manifest, dict[str, bytes]]:
    """A checkpoint's manifest, and the small files that it carries; what is to be told goes to ``notes``; collective.

    Raises:
        DamagedError: when it cannot be used, on every rank.
    """
    t = trainer
    if not isinstance(candidate, LocalCheckpoint):
        return on_first(partial(_manifest_and_files, candidate), t.mesh.world)
    try:
        manifest, told = bring_together(_tier(t), candidate, to_fill(t, held(t)))
    except (OSError, StorageError) as error:
        raise DamagedError(f"it cannot be brought together: {error}") from error
    notes += told
    return manifest, on_first(partial(carried_by, manifest), t.mesh.world)


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
    """Files of the tokenizer of the data, by their names in a checkpoint.

    Raises:
        DataError: when it cannot be read.
    """
    recorded = carried_tokenizer(data, vocab_size)
    return {TOKENIZER + name: content for name, content in recorded.items()}


def companions(recorded: Files, carried: Files) -> dict[str, Path | bytes]:
    """Small files that the run's checkpoints carry: those of its data's tokenizer, and what its origin had besides.

    Raises:
        DataError: when the origin's generation_config.json cannot be read.
    """
    if not recorded:
        return dict(carried)
    kept = {name: content for name, content in carried.items() if not name.startswith(TOKENIZER)}
    same = TOKENIZER_JSON in carried and not other_words(recorded, carried)
    if GENERATION in kept and not same:  # its ids are those of another tokenizer
        kept[GENERATION] = _without_special_ids(_bytes(kept[GENERATION]))
    return kept | dict(recorded)


def other_words(recorded: Files, carried: Files) -> list[str]:
    """A note where the data's tokenizer is not the one that the weights were trained with."""
    if TOKENIZER_JSON not in recorded or TOKENIZER_JSON not in carried:
        return []
    if _bytes(recorded[TOKENIZER_JSON]) == _bytes(carried[TOKENIZER_JSON]):
        return []
    return [
        "the data's tokenizer is not that of the weights, to which its ids may mean other words: "
        "tools/preprocess_data.py --tokenizer-model takes the folder of the right one"
    ]


def _bytes(content: Path | bytes) -> bytes:
    return content if isinstance(content, bytes) else content.read_bytes()


def _without_special_ids(generation: bytes) -> bytes:
    """A generation_config.json that says nothing of the ids of another tokenizer."""
    try:
        settings = json.loads(generation)
    except ValueError as error:
        raise DataError(f"the origin's {GENERATION} is no JSON: {error}") from error
    if not isinstance(settings, dict):
        raise DataError(f"the origin's {GENERATION} is {type(settings).__name__} in JSON, not an object")
    return json.dumps({name: value for name, value in settings.items() if name not in SPECIAL_IDS}).encode()


def _loaded(trainer: Trainer, manifest: Manifest, mode: str) -> str:
    if mode == "weights-only":
        return f"weights from {manifest.path}"
    return f"resumed from {manifest.path}: step {trainer.iteration}, {trainer.consumed_samples:,} samples"
