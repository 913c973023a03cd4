"""What objectives read of frozen models: log-probabilities under a reference model, or logits of a teacher.

A forward pass of the frozen model precedes every step and evaluation. The model is that of another location on the
ranks of the run (:class:`megatron.training.scoring.FrozenModel`) or, with adapters, the run's own without them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

from torch import Tensor

from megatron.config.errors import Problem, UserError
from megatron.config.text import flag
from megatron.convert.saved_model import open_model
from megatron.distributed.launch import run_on_rank0
from megatron.distributed.micro_batch import MicroBatch
from megatron.layers.loss import OutputLayer
from megatron.model.objective import Distillation, PreferenceOptimization
from megatron.training.scoring import ComputingModel, FrozenModel, Measure, record
from megatron.training.trainer import Trainer


def reference_logps(hidden_SBH: Tensor, batch: MicroBatch, output_layer: OutputLayer) -> dict[str, Tensor]:
    """Return the log-probability of each label, ``reference_logps`` ``[B, S]``."""
    return {"reference_logps": -output_layer.token_losses(hidden_SBH, batch.labels.unsqueeze(-1))}


def teacher_logits(k: int) -> Measure[dict[str, Tensor]]:
    """Return a function that returns the ``k`` largest logits of each token and their ids, ``[B, S, k]``."""

    def measure(hidden_SBH: Tensor, batch: MicroBatch, output_layer: OutputLayer) -> dict[str, Tensor]:
        logits, ids = output_layer.top_logits(hidden_SBH, k)
        return {"teacher_logits": logits, "teacher_ids": ids}

    return measure


@dataclass(frozen=True)
class FrozenInputs:
    """Adds the results of a frozen model to the micro-batches of the last stage, for the objective."""

    model: ComputingModel
    measure: Measure[dict[str, Tensor]]
    # Context of the passes.
    mode: Callable[[], AbstractContextManager[object]] = nullcontext

    def __call__(self, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Return the micro-batches with further named tensors. Collective, as :func:`record`."""
        with self.mode():
            found = record(self.model, batches, self.measure)
        if not found:  # not a rank of the last stage
            return list(batches)
        return [replace(batch, extra={**batch.extra, **more}) for batch, more in zip(batches, found, strict=True)]


def frozen_inputs(trainer: Trainer) -> tuple[FrozenInputs | None, list[str]]:
    """Return what adds the inputs of the run's objective that its data do not have, if any, and notes. Collective.

    Raises:
        UserError: if no model is given and one is needed, it cannot be opened, or it has another vocabulary.
        CheckpointError: if its weights cannot be read.
    """
    config, training, objective = trainer.config, trainer.config.training, trainer.objective
    if isinstance(objective, Distillation):
        name, measure = "teacher_model", teacher_logits(training.distillation_top_k)
    elif isinstance(objective, PreferenceOptimization):
        name, measure = "reference_model", reference_logps
    else:
        return None, []
    location = getattr(training, name)
    if location is None and "reference_logps" in set.intersection(
        *(set(dataset[0].extra) for dataset in trainer.data.datasets.values())
    ):
        return None, ["reference log-probabilities from the data"]
    if location is None and name == "reference_model" and config.model.lora_rank is not None:
        adapters = next(iter(trainer.chunks.values())).context.adapters
        return FrozenInputs(trainer, measure, adapters.disabled), ["reference: the model without its adapters"]
    location = location or config.checkpoint.pretrained_checkpoint
    if location is None:
        sentence = f"--objective {training.objective} needs {flag(name)}"
        raise UserError([Problem("E322", sentence, (f"{flag(name)} CHECKPOINT",))])
    run_on_rank0(lambda: bool(open_model(location)), trainer.mesh.world)  # a message of one rank is enough
    model, source = open_model(location)
    if model.vocab != config.model.vocab:
        sentence = f"{flag(name)} {location} has a vocabulary of {model.vocab}, the model one of {config.model.vocab}"
        raise UserError([Problem("E321", sentence, (f"{flag(name)} A_MODEL_OF_THE_SAME_TOKENIZER",))])
    frozen = FrozenModel.build(config, trainer.mesh, trainer.device, source, model)
    return FrozenInputs(frozen, measure), [f"{name.replace('_', ' ')}: {location}"]
