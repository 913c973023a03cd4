"""Inputs of objectives from frozen models: log-probabilities under a reference model, or logits of a teacher.

A forward pass of the frozen model precedes every step and evaluation. The model is that of another location on the
ranks of the run (:class:`megatron.training.scoring.FrozenModel`) or, with adapters, the run's own without them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from megatron.config.errors import Problem, UserError
from megatron.config.run import HUGGING_FACE_PREFIX, RunConfig
from megatron.config.text import flag
from megatron.convert.saved_model import open_model
from megatron.data.dataset import split_label
from megatron.data.errors import DataError
from megatron.distributed.launch import run_on_rank0
from megatron.distributed.mesh import Mesh
from megatron.distributed.micro_batch import MicroBatch
from megatron.layers.adapters import adapters_disabled
from megatron.layers.loss import OutputLayer
from megatron.training.component import Component
from megatron.training.scoring import ComputingModel, FrozenModel, Measure, record
from megatron.training.trainer import Trainer

FROZEN_MODELS = {"dpo": "reference_model", "distillation": "teacher_model"}
"""Options that name the frozen model, by objective."""


def reference_logps(hidden_SBH: Tensor, batch: MicroBatch, output_layer: OutputLayer) -> dict[str, Tensor]:
    """Return the log-probability of each label, ``reference_logps`` ``[B, S]``."""
    return {"reference_logps": -output_layer.token_losses(hidden_SBH, batch.labels.unsqueeze(-1))}


def teacher_logits(k: int) -> Measure[dict[str, Tensor]]:
    """Return a function that returns the ``k`` largest logits of each token and their ids, ``[B, S, k]``."""

    def measure(hidden_SBH: Tensor, batch: MicroBatch, output_layer: OutputLayer) -> dict[str, Tensor]:
        logits, ids = output_layer.top_logits(hidden_SBH, k)
        return {"teacher_logits": logits, "teacher_ids": ids}

    return measure


class FrozenModelInputs(Component):
    """Adds the results of a frozen model to the micro-batches of the last stage, for the objective."""

    def __init__(self, trainer: Trainer) -> None:
        """Add nothing yet."""
        self._trainer = trainer
        self._model: ComputingModel | None = None  # None if the data have what is computed in advance
        # Context of the passes.
        self._mode: Callable[[], AbstractContextManager[object]] = nullcontext

    def on_start(self, stopped: Callable[[], bool]) -> Sequence[str]:
        """Open the frozen model that the data need; see :class:`Component`.

        Raises:
            UserError: if no model is given and one is needed, it cannot be opened, or it has another vocabulary.
            DataError: if only some of the data have what is computed in advance.
            CheckpointError: if its weights cannot be read.
        """
        trainer, config = self._trainer, self._trainer.config
        name = FROZEN_MODELS[config.training.objective]
        location = getattr(config.training, name)
        inputs = {"reference_logps", "teacher_logits"}
        given = {split: not inputs.isdisjoint(dataset[0].extra) for split, dataset in trainer.data.datasets.items()}
        if location is None and all(given.values()):
            return [f"{name.replace('_', ' ')}: computed in advance"]
        if location is None and any(given.values()):
            lacking = " and ".join(split_label(split) for split, has in given.items() if not has)
            seen = f"the {lacking} data have no ref_chosen_logps and ref_rejected_logps, which other data have"
            raise DataError(seen, "python tasks/finetune/precompute.py dpo")
        without_adapters = config.model.lora_rank is not None and config.checkpoint.load is None
        if name == "reference_model" and location is None and without_adapters:
            self._model, self._mode = trainer, partial(adapters_disabled, trainer.chunks.values())
            return ["reference model: this one without its adapters"]
        location = frozen_location(config)
        self._model = open_frozen(config, trainer.mesh, trainer.device, location)
        return [f"{name.replace('_', ' ')}: {location}"]

    def on_batches(self, batches: list[MicroBatch]) -> list[MicroBatch]:
        """Return the micro-batches with further named tensors. Collective, as :func:`record`."""
        if self._model is None:
            return batches
        teaches = FROZEN_MODELS[self._trainer.config.training.objective] == "teacher_model"
        k = self._trainer.config.training.distillation_top_k
        with self._mode():
            found = record(self._model, batches, teacher_logits(k) if teaches else reference_logps)
        if not found:  # not a rank of the last stage
            return batches
        return [replace(batch, extra={**batch.extra, **more}) for batch, more in zip(batches, found, strict=True)]


def frozen_location(config: RunConfig) -> str:
    """Return the location of the frozen model that the objective needs; the reference is the model to start from.

    Raises:
        UserError: if none is given, and ``--load`` continues a run, which may have started from anything.
    """
    name, start = FROZEN_MODELS[config.training.objective], config.checkpoint.first_start
    location: str | None = getattr(config.training, name)
    starts = start.resume_mode == "weights-only" or str(start.load).startswith(HUGGING_FACE_PREFIX)
    if location is None and name == "reference_model" and starts and start.ckpt_step is None:
        location = start.load
    if location is None:
        sentence = f"--objective {config.training.objective} needs {flag(name)}"
        raise UserError([Problem("E322", sentence, (f"{flag(name)} CHECKPOINT",))])
    return location


def open_frozen(config: RunConfig, mesh: Mesh, device: torch.device, location: str) -> FrozenModel:
    """Build the frozen model of a location beside a run. Collective.

    Raises:
        UserError: if the model cannot be opened, or has another vocabulary than that of the run.
        CheckpointError: if its weights cannot be read.
    """
    links = config.data.follow_links
    run_on_rank0(lambda: bool(open_model(location, links)), mesh.world)  # a message of one rank is enough
    source = open_model(location, links)
    if source.model.vocab != config.model.vocab:
        name = flag(FROZEN_MODELS[config.training.objective])
        sentence = f"{name} {location} has a vocabulary of {source.model.vocab}, the model one of {config.model.vocab}"
        raise UserError([Problem("E321", sentence, (f"{name} A_MODEL_OF_THE_SAME_TOKENIZER",))])
    return FrozenModel.build(config, mesh, device, source, source.model)
