"""Objectives: what training minimises.

The loss of a step is a sum over the global batch divided by the sum of its weights, so it does not depend on how
samples are split into micro-batches and over ranks. A plugin adds an objective with ``register("objective", name)`` on
a subclass of :class:`Objective`; ``--objective name`` selects it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.config.model import ModelConfig
from megatron.config.plugins import registered
from megatron.config.training import TrainingConfig
from megatron.distributed import mappings
from megatron.distributed.micro_batch import MicroBatch
from megatron.layers.context import BuildContext
from megatron.layers.loss import OutputLayer


class Objective(ABC):
    """The loss of a micro-batch, computed by the last stage from the hidden states after the final norm."""

    # Further metrics that calls return, logged by these names as means: their sums divided by the sum of weights.
    metric_names: tuple[str, ...] = ()
    # False if exp of the logged loss is no perplexity.
    is_cross_entropy = True

    def __init__(self, config: ModelConfig, training: TrainingConfig, context: BuildContext) -> None:
        """Keep what the loss depends on.

        Args:
            config: of the model.
            training: options of objectives.
            context: the groups of ranks; ``context.cp`` is set if each holds a part of every sample.
        """
        self.config, self.training, self.context = config, training, context

    def weight(self, batch: MicroBatch) -> Tensor:
        """Return the weight of a micro-batch in the global loss, 0-d and fp64: its number of unmasked tokens.

        All ranks call it, on the same micro-batches as the last stage. Auxiliary losses are divided by the same sum
        of weights, so with another weight than tokens their coefficients mean something else.
        """
        return batch.loss_mask.sum(dtype=torch.float64)

    @abstractmethod
    def __call__(
        self, hidden_SBH: Tensor, batch: MicroBatch, output_layer: OutputLayer
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the summed loss, 0-d, and the metrics.

        Args:
            hidden_SBH: hidden states ``[S(/tp), B, H]``.
            batch: labels, loss mask and ``extra`` tensors.
            output_layer: call it once, for the summed cross-entropy of labels, or once its ``token_losses``.

        Returns:
            The loss, equal on all tensor-parallel ranks, and detached sums by name: those of ``metric_names``, and
            ``lm loss`` if the logged loss is not the loss itself.
        """


class NextTokenPrediction(Objective):
    """Cross-entropy of the next token, and the z-loss; the logged loss omits the latter."""

    def __call__(
        self, hidden_SBH: Tensor, batch: MicroBatch, output_layer: OutputLayer
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the summed loss, and the cross-entropy."""
        loss, cross_entropy = output_layer(
            hidden_SBH, batch.labels, batch.loss_mask, self.config.z_loss_coeff, batch.loss_grad
        )
        return loss, {"lm loss": cross_entropy}


TIE_EPS = 64
"""Roundings, of each token's log-probability and of its logits around 1, that make no preference."""


class PreferenceOptimization(Objective):
    """Direct preference optimization (DPO, arXiv 2305.18290) and its variants; the loss is a mean over pairs.

    A sample holds whole pairs of answers, each answer a document of its own, packed by
    :mod:`megatron.data.packed_dataset`. ``loss_mask`` marks the labels of the answers, ``extra`` has per token

    * ``answer``: number of the answer in the sample, 2 i for the preferred one of pair i, 2 i + 1 for the other;
    * ``pairs``: 1 at one label of every pair, else 0;
    * ``reference_logps``: numbers whose sum over the labels of an answer is its log-probability under the reference.

    ``rewards/accuracies`` counts pairs whose preferred answer has the larger reward, as in TRL. Ties do not count. For
    equal answers, and for all pairs while the policy is the reference, the computed margin is rounding, which depends
    on the layout. So a margin within ``TIE_EPS`` roundings is a tie too. Models in 16 bits round more than that.
    """

    metric_names = (
        "rewards/chosen",
        "rewards/rejected",
        "rewards/accuracies",
        "rewards/margins",
        "logps/chosen",
        "logps/rejected",
    )
    is_cross_entropy = False

    def weight(self, batch: MicroBatch) -> Tensor:
        """Return the number of pairs."""
        return (batch.extra["pairs"] * batch.loss_mask).sum(dtype=torch.float64)

    def __call__(
        self, hidden_SBH: Tensor, batch: MicroBatch, output_layer: OutputLayer
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the summed loss of the pairs, and TRL's metrics.

        Context-parallel ranks hold parts of the answers, and compute the same losses from the sums over all parts.
        They count on the first rank only; backward then adds the gradients of all ranks.
        """
        logps_BS = -output_layer.token_losses(hidden_SBH, batch.labels.unsqueeze(-1))
        mask_BS = batch.loss_mask.to(logps_BS.dtype)
        reference_BS = batch.extra["reference_logps"].to(logps_BS.dtype)
        slots = batch.length + batch.length % 2  # at most so many answers; an even number, for pairs
        first = slots * torch.arange(len(mask_BS), device=mask_BS.device)
        answers = (batch.extra["answer"] + first.unsqueeze(1)).flatten()
        parts_3T = torch.stack([logps_BS * mask_BS, reference_BS * mask_BS, mask_BS]).flatten(1)
        sums_3A = parts_3T.new_zeros(3, slots * len(mask_BS)).index_add(1, answers, parts_3T)
        cp = self.context.mesh.group("cp")
        sums_3A = mappings.copy_to_region(mappings.reduce_from_region(sums_3A, cp), cp)
        logps, reference, lengths = sums_3A.unflatten(1, (-1, 2))  # [pairs, 2] each
        counted = (lengths[:, 0] > 0) & (cp.rank == 0)
        ratios, beta = logps - reference, self.training.dpo_beta
        losses = preference_losses(ratios, lengths.clamp(min=1.0), self.training)
        chosen, rejected = (beta * ratios).detach().unbind(1)
        margins = chosen - rejected
        rounding = torch.finfo(ratios.dtype).eps * (lengths + logps.detach().abs() + reference.abs()).sum(1)
        preferred = (margins > TIE_EPS * beta * rounding).to(losses.dtype)
        values = (chosen, rejected, preferred, margins, *logps.detach().unbind(1))
        loss, *metrics = torch.stack([losses, *values]).where(counted, 0.0).sum(1)
        return loss, dict(zip(self.metric_names, metrics))


def preference_losses(ratios_N2: Tensor, lengths_N2: Tensor, training: TrainingConfig) -> Tensor:
    """Return the loss of each pair ``[N]``.

    ``sigmoid`` is equation 7 of arXiv 2305.18290, with the label smoothing of cDPO; ``ipo`` is equation 17 of arXiv
    2310.12036. As in TRL, ``ipo`` and ``sigmoid_norm`` divide each log-ratio by the length of its answer. ``kto_pair``
    is equation 8 of arXiv 2402.01306, the mean over both answers. It takes the reference point of an answer from the
    other one of its pair instead of from the micro-batch, so that the loss does not depend on the micro-batch size.

    Args:
        ratios_N2: log-probability of the preferred and of the other answer, less that under the reference model.
        lengths_N2: number of labels of the answers.
        training: type of the loss, beta and label smoothing.
    """
    beta, kind = training.dpo_beta, training.dpo_loss_type
    if kind == "kto_pair":
        points_N2 = ratios_N2.detach().clamp(min=0.0).flip(1)
        signs = ratios_N2.new_tensor([1.0, -1.0])
        return (1.0 - torch.sigmoid(beta * signs * (ratios_N2 - points_N2))).mean(1)
    if kind in ("ipo", "sigmoid_norm"):
        ratios_N2 = ratios_N2 / lengths_N2
    margins_N = ratios_N2[:, 0] - ratios_N2[:, 1]
    if kind == "ipo":
        return (margins_N - 0.5 / beta).square()
    wrong = training.dpo_label_smoothing
    return -(1.0 - wrong) * F.logsigmoid(beta * margins_N) - wrong * F.logsigmoid(-beta * margins_N)


class Distillation(Objective):
    """Forward divergence from a teacher (arXiv 1503.02531) on its most likely tokens, a mean over unmasked tokens.

    The teacher's probabilities of its k tokens are normalised to sum to 1, those of the student over the whole
    vocabulary: with all tokens it is the whole divergence. ``extra`` has the teacher's ``teacher_ids`` and
    ``teacher_logits`` ``[b, s, k]``.
    """

    metric_names = ("kl divergence",)
    is_cross_entropy = False

    def __call__(
        self, hidden_SBH: Tensor, batch: MicroBatch, output_layer: OutputLayer
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the summed loss, and the divergence alone."""
        temperature, label_weight = self.training.distillation_temperature, self.training.distillation_label_weight
        ids, teacher = batch.extra["teacher_ids"], batch.extra["teacher_logits"]
        dtype = torch.promote_types(hidden_SBH.dtype, torch.float32)
        log_p = (teacher.to(dtype) / temperature).log_softmax(-1)
        p, hidden = log_p.exp(), hidden_SBH / temperature
        if label_weight > 0.0:  # further rows of the one call: the labels, at temperature 1
            hidden = torch.cat((hidden, hidden_SBH), 1)
            ids = torch.cat((ids, batch.labels.unsqueeze(-1).expand_as(ids)))
            p = torch.cat((p, F.one_hot(torch.zeros_like(batch.labels), ids.shape[-1]).to(dtype)))
        losses, *labels = output_layer.token_losses(hidden, ids, p).split(len(batch.labels))
        entropy = (log_p.exp() * log_p).sum(-1)
        divergence = ((losses + entropy) * batch.loss_mask).sum() * temperature**2
        loss = (1.0 - label_weight) * divergence
        if labels:
            loss = loss + label_weight * (labels[0] * batch.loss_mask).sum()
        return loss, {"kl divergence": divergence.detach()}


OBJECTIVES: dict[str, type[Objective]] = {
    "next_token": NextTokenPrediction,
    "dpo": PreferenceOptimization,
    "distillation": Distillation,
}
"""Built-in objectives by the choices of ``--objective``."""


def make_objective(config: ModelConfig, training: TrainingConfig, context: BuildContext) -> Objective:
    """Create the objective ``training.objective``, built-in or registered by a plugin."""
    chosen = {**registered("objective"), **OBJECTIVES}[training.objective]
    objective: Objective = chosen(config, training, context)
    return objective
