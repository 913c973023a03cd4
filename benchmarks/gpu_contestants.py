"""Models measured on one GPU, and the training steps that are compared: ours and that of `transformers`."""

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
"""Takes a training step and returns the loss without synchronisation."""


@dataclass(frozen=True)
class Case:
    """A model and a batch."""

    # Options of the model and the sequence length.
    flags: str
    # Per step and rank.
    samples: int
    # Sizes to try, best guess first; each divides ``samples``.
    micro_batches: tuple[int, ...]
    # MFU to reach on one H200.
    goal: float
    # Chunk size of the loss to try beside the default.
    chunk: int = 4096


_1B = (
    "--preset llama3-8b --num-layers 16 --hidden-size 2048 --num-attention-heads 32 --ffn-hidden-size 8192 "
    "--no-untie-embeddings-and-output-weights"
)
CASES = {
    "124M-s1024": Case("--preset gpt2-124m --seq-length 1024", 64, (32, 64), 0.45),
    "1B-s2048": Case(f"{_1B} --seq-length 2048", 16, (4, 8), 0.50, 8192),
    "1B-s4096": Case(f"{_1B} --seq-length 4096", 8, (2, 4), 0.50, 8192),
    "8B-shape-s8192": Case("--preset llama3-8b --num-layers 8 --seq-length 8192", 4, (1, 2), 0.55, 8192),
}
"""GPT-2, the shape of Llama-3.2-1B, and eight layers of Llama-3-8B."""

TINY = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 16 --ffn-hidden-size 64 --vocab-size 300 --seq-length 32 "
    "--max-position-embeddings 32"
)
REHEARSAL = {
    name: replace(case, flags=f"{case.flags} {TINY}", samples=4, micro_batches=(2, 4), chunk=64)
    for name, case in CASES.items()
}
"""Tiny versions of all cases."""


def random_tokens(case: Case, config: RunConfig, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Return the inputs and labels of each micro-batch: uniform ids, the same for every implementation."""
    generator = torch.Generator().manual_seed(1)
    shape = case.samples, config.training.seq_length + 1
    ids = torch.randint(0, config.model.vocab, shape, generator=generator).to(device)
    parts = ids.split(config.training.micro_batch_size)
    return [(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in parts]


@dataclass(frozen=True)
class Ours:
    """Our training step with some options."""

    micro_batch: int
    flags: str = "--kernels torch --cuda-graph none"
    # Of which this process is the first.
    ranks: int = 1

    @property
    def name(self) -> str:
        """Return the description for tables."""
        return f"micro-batch {self.micro_batch} {self.flags}"

    def changed(self, flag: str) -> Ours:
        """Return these options with one added or replaced."""
        flags = {each.split()[0]: each for each in re.split(r" (?=--)", f"{self.flags} {flag}")}
        return replace(self, flags=" ".join(flags.values()))

    def make(self, case: Case, device: torch.device) -> Step:
        """Build the step; weights are drawn on the device, which is faster."""
        config = self.config(case, device)
        trainer = build_trainer(config, 0, self.ranks, fresh=False)
        with torch.no_grad():
            for name, master in trainer.optimizer.main_params.items():
                init = trainer.specs[name].init
                _ = master.fill_(init.value) if init.std is None else master.normal_(std=init.std)
        trainer.use_loaded_weights()
        trainer.start_at(0, 0)
        tokens = random_tokens(case, config, device)
        batches = [replace(batch, tokens=x, labels=y) for batch, (x, y) in zip(trainer.next_batches(), tokens)]
        run = StepRunner(trainer)
        return lambda: run(batches, RATES).loss

    def config(self, case: Case, device: torch.device) -> RunConfig:
        """Return the configuration that the command line would give."""
        batch = f"--micro-batch-size {self.micro_batch} --global-batch-size {case.samples * self.ranks}"
        launch = {"RANK": "0", "WORLD_SIZE": str(self.ranks), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        argv = f"{case.flags} {COMMON} {batch} {self.flags} --device {device.type}".split()
        return parse(argv, launch if self.ranks > 1 else {}).config


@dataclass(frozen=True)
class Theirs:
    """The training step of a `transformers` model with fused AdamW, SDPA and the fused activation."""

    micro_batch: int
    # bf16: the optimizer updates bf16 weights. fp32: fp32 weights under autocast. main: fp32 main parameters and
    # gradients beside bf16 weights, as ours has them.
    weights: str = "bf16"
    # Compile the whole model.
    compiled: bool = False

    @property
    def name(self) -> str:
        """Return the description for tables."""
        return f"micro-batch {self.micro_batch}, {self.weights} weights, {'compiled' if self.compiled else 'eager'}"

    def make(self, case: Case, device: torch.device) -> Step:
        """Build the step."""
        from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM  # takes seconds
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        def causal(*args: Any, **options: Any) -> Any:
            return sdpa_attention_forward(*args[:4], None, **options | {"is_causal": True})

        # Inside torch.compile, "sdpa" gets a mask equal to the causal one, which no flash kernel accepts.
        AttentionInterface.register("causal_sdpa", causal)
        config = Ours(self.micro_batch).config(case, device)
        vocabulary = padded_vocab_size(config.model.vocab, config.model.make_vocab_size_divisible_by, 1)
        values = build_config_json(config.model) | {"vocab_size": vocabulary, "use_cache": False}
        if values["model_type"] == "gpt2":
            values["activation_function"] = "gelu_pytorch_tanh"
        dtype = torch.float32 if self.weights == "fp32" else torch.bfloat16
        with torch.device(device):
            described = AutoConfig.for_model(**{k: v for k, v in values.items() if k != "torch_dtype"})
            model = AutoModelForCausalLM.from_config(
                described, dtype=dtype, attn_implementation="causal_sdpa", trust_remote_code=False
            ).train()
        return self._step(model.to(device), random_tokens(case, config, device), device)

    def _step(self, model: nn.Module, batches: Sequence[tuple[Tensor, Tensor]], device: torch.device) -> Step:
        options = {"lr": float(RATES.lr), "betas": BETAS, "eps": EPS, "weight_decay": RATES.weight_decay}
        weights = [*model.parameters()]
        updated = [weight.detach().float() for weight in weights] if self.weights == "main" else weights
        optimizer = torch.optim.AdamW(updated, fused=True, **options)
        call = torch.compile(model, dynamic=False) if self.compiled else model

        def step() -> Tensor:
            total = torch.zeros((), device=device)
            for tokens, labels in batches:
                with torch.autocast(device.type, torch.bfloat16, enabled=self.weights == "fp32"):
                    loss = call(input_ids=tokens, labels=labels, shift_labels=labels).loss / len(batches)
                loss.backward()
                total += loss.detach()
                if updated is not weights:
                    take_gradients(weights, updated)
            nn.utils.clip_grad_norm_(updated, CLIP)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if updated is not weights:
                with torch.no_grad():
                    torch._foreach_copy_(weights, updated)
            return total

        return step


def take_gradients(weights: Sequence[Tensor], main_params: Sequence[Tensor]) -> None:
    """Add the gradients of weights to those of their main parameters, and drop them."""
    for weight, main in zip(weights, main_params):
        if weight.grad is not None:
            main.grad = weight.grad.float() if main.grad is None else main.grad.add_(weight.grad)
            weight.grad = None


Setting = Ours | Theirs
