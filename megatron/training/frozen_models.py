"""Inputs of objectives from frozen models: log-probabilities under a reference model, or logits of a teacher.

A forward pass of the frozen model precedes every step and evaluation. The model is that of another location on the
ranks of the run (:class:`FrozenModel`) or, with adapters, the run's own without them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Self

import torch
from torch import Tensor

from megatron.config.errors import Problem, UserError
from megatron.config.parallel import ParallelConfig
from megatron.config.run import RunConfig
from megatron.config.schemes import WEIGHTS_PREFIXES
from megatron.config.text import flag
from megatron.convert.sources import SourceOptions, open_source
from megatron.convert.weight_source import ModelSource, fill_weights
from megatron.data.dataset import split_label
from megatron.data.errors import DataError
from megatron.distributed.launch import run_on_rank0
from megatron.distributed.mesh import Mesh
from megatron.distributed.micro_batch import MicroBatch
from megatron.inference.scoring import ComputingModel, Measure, record
from megatron.layers.loss import OutputLayer
from megatron.model.gpt import GPTChunk
from megatron.pipeline.plan import LAYER_SPLIT_OPTIONS, build_program
from megatron.pipeline.runtime import Pipeline
from megatron.training.build_model import build_context, build_pipeline, build_stages
from megatron.training.component import Component
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


@dataclass
class FrozenModel:
    """A model that only computes: the chunks of a rank, with whole weights for every data-parallel rank."""

    config: RunConfig
    mesh: Mesh
    device: torch.device
    chunks: Mapping[int, GPTChunk]
    pipeline: Pipeline

    @classmethod
    def build(cls, config: RunConfig, mesh: Mesh, device: torch.device, source: ModelSource) -> Self:
        """Build this rank's chunks, and read its shards of the weights. Collective.

        Args:
            config: of the run whose layout and data type the model has, resolved.
            mesh: of that run.
            device: of this rank.
            source: of the architecture and the weights.

        Raises:
            UserError: if the layers cannot be split over the stages of the mesh.
            CheckpointError: if the weights cannot be read.
        """
        if source.model.num_layers != config.model.num_layers:  # the options may not fit other layers
            defaults: dict[str, Any] = {n: getattr(ParallelConfig(), n) for n in chain(*LAYER_SPLIT_OPTIONS)}
            config = replace(config, parallel=replace(config.parallel, **defaults))
        precision = replace(config.precision, fp8_format=None)
        training = replace(config.training, objective="next_token")
        config = replace(config, model=source.model, precision=precision, training=training)
        context, _ = build_context(config, mesh, device, draw_initial_values=False, allocate=True)
        chunks = build_stages(config, context)
        fill_weights(context.specs, context.params, source)
        for chunk in chunks.values():
            chunk.eval().requires_grad_(requires_grad=False)
        return cls(config, mesh, device, chunks, build_pipeline(config, context, chunks))

    def compute(self, batches: Sequence[MicroBatch], loss_grad: None = None) -> None:
        """Run the pipeline over this rank's micro-batches, forward only."""
        program = build_program(self.config.parallel, len(batches), evaluation=True)
        self.pipeline.run(program.ranks[self.mesh.coordinate["pp"]], batches, loss_grad)


class FrozenModelInputs(Component):
    """Adds the results of a frozen model to the micro-batches of the last stage, for the objective."""

    def __init__(self, trainer: Trainer) -> None:
        """Add nothing yet."""
        self._trainer = trainer
        self._model: ComputingModel | None = None  # None if the data have what is computed in advance
        # Context of the passes.
        self._mode: Callable[[], AbstractContextManager[object]] = nullcontext

    @classmethod
    def create(cls, trainer: Trainer) -> Self | None:
        """See :class:`Feature`."""
        return cls(trainer) if trainer.config.training.objective in FROZEN_MODELS else None

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
            self._model, self._mode = trainer, next(iter(trainer.chunks.values())).context.adapters.off
            return ["reference model: this one without its adapters"]
        location = frozen_location(config)
        with trainer.clock("checkpoint"):
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
    starts = start.resume_mode == "weights-only" or str(start.load).startswith(WEIGHTS_PREFIXES)
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
    name = flag(FROZEN_MODELS[config.training.objective])
    options = SourceOptions(follow_links=config.data.follow_links, flag=name)
    run_on_rank0(lambda: bool(open_source(location, options)), mesh.world)  # a message of one rank is enough
    source = open_source(location, options)
    if source.model.vocab != config.model.vocab:
        sentence = f"{name} {location} has a vocabulary of {source.model.vocab}, the model one of {config.model.vocab}"
        raise UserError([Problem("E321", sentence, (f"{name} A_MODEL_OF_THE_SAME_TOKENIZER",))])
    return FrozenModel.build(config, mesh, device, source)
