"""Continue the prompts of ``--sample-prompts`` after each evaluation, to read what the model has learned."""

from __future__ import annotations

from pathlib import Path

from megatron.config.errors import Problem, UserError
from megatron.config.files import read_small
from megatron.convert.tokenizer_files import by_huggingface_names
from megatron.inference.generate import SamplingParams, check_prompts, generate
from megatron.inference.text import InferenceError, open_codec
from megatron.training.callbacks.base import Callback
from megatron.training.loggers.base import Metrics
from megatron.training.trainer import Trainer

NEW_TOKENS = 64
SAMPLING = SamplingParams(temperature=0.8, top_p=0.95)


class SamplePrompts(Callback):
    """Generates on every rank, because tensor-parallel ranks compute together; rank 0 logs the texts."""

    def __init__(self, trainer: Trainer, path: Path) -> None:
        """Read and encode the prompts.

        Raises:
            UserError: if the file or the tokenizer cannot be read, or the model cannot continue a prompt.
        """
        super().__init__(trainer)
        try:
            self._texts = read_small(path).decode().splitlines()
            self._codec = open_codec(by_huggingface_names(trainer.files))
            self._prompts = [self._codec.encode(text) for text in self._texts]
            positions = trainer.config.model.max_position_embeddings or trainer.config.training.seq_length
            self._new_tokens = max(1, min(NEW_TOKENS, positions - max(map(len, self._prompts), default=0)))
            check_prompts(trainer.config.model, self._prompts, self._new_tokens)
        except (OSError, UnicodeError, InferenceError) as error:
            raise UserError([Problem("E708", f"--sample-prompts {path}: {error}")]) from error
        self._sampled = -1  # step; several validation sets may be evaluated in one

    def on_evaluate(self, metrics: Metrics) -> None:
        """Continue the prompts once per step."""
        if self._sampled == self.trainer.iteration:
            return
        self._sampled = self.trainer.iteration
        (chunk,) = self.trainer.chunks.values()  # whole: the checks refuse other layouts
        end = () if self._codec.end is None else (self._codec.end,)
        with self.trainer.optimizer.weights.gathered(chunk.parts):
            found = generate(chunk, self._prompts, self._new_tokens, SAMPLING, end)
        self.log.samples([(text, self._codec.decode(ids)) for text, ids in zip(self._texts, found)])
