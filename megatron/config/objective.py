"""The loss that training minimises, and its frozen models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron.config.option import Need, option

DPO = Need("objective=dpo")
DISTILLATION = Need("objective=distillation")
SMOOTHED = Need(
    "objective=dpo and dpo_loss_type=sigmoid|sigmoid_norm",
    "--objective dpo and --dpo-loss-type sigmoid or sigmoid_norm",
)


@dataclass(frozen=True, init=False, eq=False, repr=False)
class ObjectiveOptions:
    """Options of the objective."""

    objective: str = option(
        "next_token", role="schedule", choices=("next_token", "dpo", "distillation"), kind="objective"
    )
    """Loss that training minimises: next_token (cross-entropy, and z_loss_coeff), dpo (preferences), distillation
    (divergence from a teacher), or the name of a plugin."""
    reference_model: str | None = option(None, role="start", needs=DPO)
    """Frozen model that log-ratios of preferences are relative to: a checkpoint, a folder of checkpoints, hf:DIR,
    megatron:DIR or peft:DIR. Default: the columns ref_chosen_logps and ref_rejected_logps of the data; without these
    the model that the run starts from."""
    teacher_model: str | None = option(None, role="start", needs=DISTILLATION)
    """Model whose most likely tokens the student learns, of any size but with the same vocabulary: a checkpoint, a
    folder of checkpoints, hf:DIR, megatron:DIR or peft:DIR."""
    teacher_logits: str | None = option(None, role="start", needs=DISTILLATION)
    """Folder that tasks/finetune/precompute.py has written for these data, instead of teacher_model."""
    dpo_loss_type: str = option(
        "sigmoid", role="schedule", choices=("sigmoid", "sigmoid_norm", "ipo", "kto_pair"), needs=DPO
    )
    """Loss of a pair: sigmoid (DPO), sigmoid_norm (of log-probabilities per token), ipo or kto_pair."""
    dpo_beta: float = option(0.1, role="schedule", above=0, needs=DPO)
    """Factor of the log-ratios to the reference model; for ipo the regularisation tau."""
    dpo_label_smoothing: float = option(0.0, role="schedule", at_least=0, below=0.5, needs=SMOOTHED)
    """Probability that the preference of a pair is wrong (conservative DPO)."""
    distillation_top_k: int = option(32, role="schedule", at_least=1, needs=DISTILLATION)
    """Most likely tokens of the teacher that the student is trained on, at each position."""
    distillation_temperature: float = option(1.0, role="schedule", above=0, needs=DISTILLATION)
    """Divisor of the logits of teacher and student in the divergence, which is multiplied by its square."""
    distillation_label_weight: float = option(0.0, role="schedule", at_least=0, at_most=1, needs=DISTILLATION)
    """Weight of the cross-entropy of the labels in the loss; the divergence has the rest."""

    refused: ClassVar = """
    objective=dpo and not chat_data_path
    E320 --objective dpo reads pairs of answers, from --chat-data-path
      fix: --chat-data-path PAIRS.jsonl | --objective next_token

    objective=distillation and not teacher_model and not teacher_logits
    E322 --objective distillation needs either --teacher-model or --teacher-logits
      fix: --teacher-model CHECKPOINT

    objective=distillation and teacher_model and teacher_logits
    E322 --objective distillation needs either --teacher-model or --teacher-logits
      fix: drop --teacher-model | drop --teacher-logits

    cuda_graph=step and objective=dpo|distillation
    E919 --cuda-graph step is untested with --objective {objective}
      fix: --cuda-graph optimizer | --cuda-graph none

    objective=distillation and distillation_top_k>vocab_size
    E323 --distillation-top-k {distillation_top_k}: the vocabulary has {vocab_size} tokens
      fix: --distillation-top-k {vocab_size}

    objective=distillation and final_logit_softcapping and distillation_temperature!=1.0
    E323 --distillation-temperature other than 1 cannot be used with --final-logit-softcapping
      fix: --distillation-temperature 1
    """
