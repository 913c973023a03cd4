"""What is measured on one GPU: the models, our settings of a step, and those of `transformers`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from megatron.arguments.cli import parse
from megatron.config.run import RunConfig
from megatron.convert.huggingface.config import build_config_json
from megatron.distributed.sharding import padded_vocab_size
from megatron.optimizer.lr_scheduler import Rates
from megatron.training.build import build_trainer
from megatron.training.cuda_graphs import StepRunner

COMMON = "--mock-data --bf16 --train-iters 1000 --eval-iters 0 --clip-grad 1"
RATES, BETAS, EPS, CLIP = Rates(1e-4, 0.1), (0.9, 0.95), 1e-8, 1.0
Step = Callable[[], Tensor]
"""Takes one training step and returns its loss, not waited for."""


@dataclass(frozen=True)
class Case:
    """A model and a batch.

    Attributes:
        flags: of the model and its samples.
        samples: of a step.
        micro_batches: sizes to try, the most promising first; each divides ``samples``.
        goal: MFU that is aimed at on one H200.
    """

    flags: str
    samples: int
    micro_batches: tuple[int, ...]
    goal: float


_1B = (
    "--preset llama3-8b --num-layers 16 --hidden-size 2048 --num-attention-heads 32 --ffn-hidden-size 8192 "
    "--no-untie-embeddings-and-output-weights"
)
_TINY = "--preset llama3-8b --num-layers 2 --hidden-size 32 --num-attention-heads 8 --ffn-hidden-size 64"

CASES = {
    "124M-s1024": Case("--preset gpt2-124m --seq-length 1024", 64, (32, 64), 0.45),
    "1B-s2048": Case(f"{_1B} --seq-length 2048", 16, (4, 8), 0.50),
    "1B-s4096": Case(f"{_1B} --seq-length 4096", 8, (2, 4), 0.50),
    "8B-shape-s8192": Case("--preset llama3-8b --num-layers 8 --seq-length 8192", 4, (1, 2), 0.55),
}
"""GPT-2, the shape of Llama-3.2-1B, and eight layers of Llama-3-8B."""

REHEARSAL = {
    name: Case(f"{shape} --vocab-size 300 --seq-length 32 --max-position-embeddings 32", 4, (2, 4), case.goal)
    for (name, case), shape in zip(
        CASES.items(),
        (_TINY.replace("llama3-8b", "gpt2-124m"), *(f"{_TINY} --num-query-groups 2" for _ in range(3))),
    )
}
"""The same in miniature."""


@dataclass(frozen=True)
class Ours:
    """A setting of ours."""

    micro_batch: int
    more: str = "--kernels torch"

    @property
    def name(self) -> str:
        """For tables."""
        return f"micro-batch {self.micro_batch} {self.more}"

    def changed(self, change: str) -> Ours:
        """With a flag that takes the place of an earlier one of its name."""
        flags = {flag.split()[0]: flag for flag in re.split(r" (?=--)", f"{self.more} {change}")}
        return replace(self, more=" ".join(flags.values()))

    def make(self, case: Case, device: torch.device) -> Step:
        """Build the model; weights are drawn on the device, which is faster."""
        trainer = build_trainer(self.config(case, device), 0, 1, fresh=False)
        with torch.no_grad():
            for name, master in trainer.optimizer.main_params.items():
                init = trainer.specs[name].init
                _ = master.fill_(init.value) if init.std is None else master.normal_(std=init.std)
        trainer.optimizer.after_load()
        trainer.start_at(0, 0)
        batches, run = trainer.next_batches(), StepRunner(trainer)
        return lambda: run(batches, RATES).loss

    def config(self, case: Case, device: torch.device) -> RunConfig:
        """As the command line would make it."""
        batch = f"--micro-batch-size {self.micro_batch} --global-batch-size {case.samples}"
        return parse(f"{case.flags} {COMMON} {batch} {self.more} --device {device.type}".split(), {}).config


@dataclass(frozen=True)
class Theirs:
    """A setting of `transformers`.

    Attributes:
        micro_batch: samples.
        weights: ``bf16``, updated as such; or ``fp32``, under autocast.
        compiled: by torch.compile, the whole model.
    """

    micro_batch: int
    weights: str = "bf16"
    compiled: bool = False

    @property
    def name(self) -> str:
        """For tables."""
        return f"micro-batch {self.micro_batch}, {self.weights} weights, {'compiled' if self.compiled else 'eager'}"

    def make(self, case: Case, device: torch.device) -> Step:
        """Return the usual training step, with fused AdamW, SDPA and the fused activation."""
        from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM  # takes seconds
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        def causal(*args: Any, **options: Any) -> Any:
            return sdpa_attention_forward(*args[:4], None, **options | {"is_causal": True})

        # Inside torch.compile `sdpa` itself would be given a mask, equal to causal, which no flash kernel takes.
        AttentionInterface.register("causal_sdpa", causal)
        ours = Ours(self.micro_batch).config(case, device)
        vocabulary = padded_vocab_size(ours.model.vocab, ours.model.make_vocab_size_divisible_by, 1)
        values = build_config_json(ours.model) | {"vocab_size": vocabulary, "use_cache": False}
        if values["model_type"] == "gpt2":
            values["activation_function"] = "gelu_pytorch_tanh"
        dtype = torch.bfloat16 if self.weights == "bf16" else torch.float32
        with torch.device(device):
            config = AutoConfig.for_model(**{k: v for k, v in values.items() if k != "torch_dtype"})
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="causal_sdpa").train()
        tokens = torch.randint(0, ours.model.vocab, (case.samples, ours.training.seq_length + 1), device=device)
        parts = [part.contiguous() for part in tokens.split(self.micro_batch)]
        return self._step(model.to(device), parts, device)

    def _step(self, model: nn.Module, parts: Sequence[Tensor], device: torch.device) -> Step:
        options = {"lr": float(RATES.lr), "betas": BETAS, "eps": EPS, "weight_decay": RATES.weight_decay}
        optimizer = torch.optim.AdamW(model.parameters(), fused=True, **options)
        call = torch.compile(model, dynamic=False) if self.compiled else model
        inputs = [part[:, :-1].contiguous() for part in parts]
        labels = [part[:, 1:].contiguous() for part in parts]

        def step() -> Tensor:
            total = torch.zeros((), device=device)
            for tokens, label in zip(inputs, labels):
                with torch.autocast(device.type, torch.bfloat16, enabled=self.weights == "fp32"):
                    loss = call(input_ids=tokens, labels=label, shift_labels=label).loss / len(parts)
                loss.backward()
                total += loss.detach()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return total

        return step


Setting = Ours | Theirs
