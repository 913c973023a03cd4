"""The frozen model that adapters are trained for (``--pretrained-checkpoint``): read at every start, never saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import torch

from megatron.arguments.compatibility import compare_configs
from megatron.arguments.sources import to_dict
from megatron.checkpoint.errors import CheckpointError
from megatron.checkpoint.format import Manifest
from megatron.config.errors import Problem, UserError
from megatron.convert.base_model import BaseModel
from megatron.convert.sources import SourceOptions, open_source
from megatron.convert.tokenizer_files import files_to_carry, tokenizer_notes
from megatron.convert.weight_source import WeightSource, fill_weights
from megatron.distributed.launch import gather_results, run_on_rank0
from megatron.kernels.quantized import quantize
from megatron.layers.adapters import adapted_row_norms
from megatron.training.component import Component
from megatron.training.resume_source import ResumeSource
from megatron.training.trainer import Trainer


class AdapterBase(Component):
    """Reads the frozen weights of a run with adapters, and checks that saved adapters belong to them."""

    name = "base"

    def __init__(self, trainer: Trainer) -> None:
        """Read nothing yet."""
        self._trainer = trainer
        self._base: BaseModel | None = None  # once it is read

    @classmethod
    def create(cls, trainer: Trainer) -> Self | None:
        """See :class:`Feature`."""
        return None if trainer.config.model.lora_rank is None else cls(trainer)

    def before_load(self, source: ResumeSource) -> Sequence[str]:
        """Read the frozen weights, and without adapters to load, start magnitudes; see :class:`Component`.

        Raises:
            UserError: if there is no such model, or it is another than the one configured.
        """
        trainer, model = self._trainer, self._trainer.config.model.base
        location = str(trainer.config.checkpoint.pretrained_checkpoint)

        def find() -> list[str]:
            try:
                return [*BaseModel.find(location).record.values()]
            except CheckpointError as error:
                sentence = f"--pretrained-checkpoint: {str(error).partition(chr(10))[0]}"
                raise UserError([Problem("E806", sentence, ("--pretrained-checkpoint ANOTHER",))]) from error

        def read() -> list[str]:
            links = SourceOptions(follow_links=True)  # they are checked with the options
            opened = open_source(base.location, links)
            saved = to_dict(replace(trainer.config, model=opened.model))
            changes = compare_configs(saved, replace(trainer.config, model=model), "weights-only", name="base")
            if changes.problems:
                raise UserError(changes.problems)
            read_frozen_weights(trainer, opened)
            own, files = trainer.files, opened.small_files()
            trainer.files = files_to_carry(own, files)
            return [f"frozen weights from {base.location}", *changes.lines, *tokenizer_notes(own, files)]

        self._base = base = BaseModel(*run_on_rank0(find, trainer.mesh.world))
        notes = gather_results(read, trainer.mesh.world)[0]
        trainer.optimizer.weights.start_gather()
        if source.fresh and trainer.config.model.lora_dora:
            initialize_magnitudes(trainer)
        return notes

    def check(self, manifest: Manifest) -> Sequence[str]:
        """See :class:`Component`.

        Raises:
            UserError: if the adapters of the checkpoint belong to other weights.
        """
        if self._base is None or (was := self._base.check_adapters(manifest)) == self._base.location:
            return ()
        return [f"the frozen weights were read from {was} before"]

    def state_dict(self) -> Mapping[str, Any]:
        """See :class:`Component`."""
        return {} if self._base is None else self._base.record


def read_frozen_weights(trainer: Trainer, source: WeightSource) -> None:
    """Read this rank's shards of the frozen weights, and quantise those that are kept so."""
    precision, weights = trainer.config.model.frozen_weights_precision, trainer.optimizer.weights
    for name, frozen in weights.frozen.items():
        dense = trainer.specs[name].dense
        if dense is None or precision is None:
            fill_weights(trainer.specs, {name: frozen}, source, weights.frozen_shards)
        else:
            values = torch.empty(dense.local_shape, dtype=torch.float32, device=frozen.device)
            fill_weights({name: dense}, {name: values}, source)
            frozen.copy_(quantize(values, precision))


@torch.no_grad()
def initialize_magnitudes(trainer: Trainer) -> None:
    """Set DoRA's magnitudes to the norms of the rows of the adapted weights; collective."""
    weights, shards = trainer.optimizer.weights, trainer.buckets.shards
    for block in (block for chunk in trainer.chunks.values() for block in chunk.layers.values()):
        with weights.gathered([block]):
            norms = adapted_row_norms(block)
        held = {name: norms[name][shards[name].start : shards[name].stop] for name in norms if name in shards}
        trainer.optimizer.main_params.set(held)
    trainer.use_loaded_weights()
