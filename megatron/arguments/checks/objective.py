"""Checks of the objectives that read preferences or a frozen model."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.errors import Problem
from megatron.config.run import RunConfig
from megatron.config.text import flag


def check_preferences(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that there are preferences to optimize."""
    if config.training.objective == "dpo" and not config.data.chat_data_path:
        sentence = "--objective dpo reads pairs of answers, from --chat-data-path"
        yield Problem("E320", sentence, ("--chat-data-path PAIRS.jsonl", "--objective next_token"))


def check_teacher(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that there is one teacher, and that its logits can be compared."""
    training, model = config.training, config.model
    if training.objective != "distillation":
        return
    given = [flag(name) for name in ("teacher_model", "teacher_logits") if getattr(training, name) is not None]
    if len(given) != 1:
        sentence = "--objective distillation needs either --teacher-model or --teacher-logits"
        yield Problem("E322", sentence, tuple(f"drop {name}" for name in given) or ("--teacher-model CHECKPOINT",))
    if model.vocab_size is not None and training.distillation_top_k > model.vocab_size:
        sentence = f"--distillation-top-k {training.distillation_top_k}: the vocabulary has {model.vocab_size} tokens"
        yield Problem("E323", sentence, (f"--distillation-top-k {model.vocab_size}",))
    if model.final_logit_softcapping is not None and training.distillation_temperature != 1.0:
        sentence = "--distillation-temperature other than 1 cannot be used with --final-logit-softcapping"
        yield Problem("E323", sentence, ("--distillation-temperature 1",))


def check_graph_objective(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Reject capturing a step whose objective reads a frozen model, which is untested."""
    if config.compute.cuda_graph == "step" and config.training.objective in ("dpo", "distillation"):
        sentence = f"--cuda-graph step is untested with --objective {config.training.objective}"
        yield Problem("E919", sentence, ("--cuda-graph optimizer", "--cuda-graph none"))
