"""With --batch-invariant, training, scoring and generation find the same log-probabilities to the bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from torch import Tensor

from megatron.arguments.cli import parse
from megatron.distributed.micro_batch import MicroBatch
from megatron.inference.generate import Continuation, PipelinedModel, SamplingParams, generate_scored
from megatron.inference.scoring import compute_logprobs, record
from megatron.training.build import build_trainer
from megatron.training.step import compute_gradients, weigh_batch
from megatron.training.trainer import Trainer
from tests.kit.pool import Pool
from tests.kit.short import one_in

RUN = (
    "--mock-data --vocab-size 131 --train-iters 1 --device cpu --num-layers 2 --seq-length 256 --hidden-size 48 "
    "--num-attention-heads 4 --ffn-hidden-size 100 --micro-batch-size 1 --global-batch-size 4 --attention-dropout 0 "
    "--hidden-dropout 0 --init-method-std 0.15"
)
ROPE = "--position-embedding-type rope"
LLAMA = f"{ROPE} --activation swiglu --normalization RMSNorm --num-query-groups 2 --qk-layernorm"
EXPERTS = "--num-experts 6 --moe-router-topk 2 --disable-bias-linear --activation swiglu"
MODELS = {
    "gpt2": "",
    "llama": f"{LLAMA} --untie-embeddings-and-output-weights",
    "window": f"{ROPE} --window-size 7 --attn-logit-softcapping 5 --final-logit-softcapping 3 --activation geglu_tanh",
    "sigmoid": f"{EXPERTS} --moe-router-score-function sigmoid --moe-aux-loss-coeff 0.01",
    "shared": f"{EXPERTS} --moe-shared-expert-intermediate-size 40 --moe-shared-expert-gate",
    "latent": "--multi-latent-attention --kv-lora-rank 24 --q-lora-rank 20 --qk-head-dim 16 --qk-pos-emb-head-dim 8 "
    f"--v-head-dim 12 --normalization RMSNorm {ROPE} --disable-bias-linear",
    "sinks": f"{ROPE} --softmax-type learnable --attention-output-gate",
}
CASES = [
    pytest.param(model, dtype, marks=() if (model, dtype) in SHORT else pytest.mark.slow)
    for SHORT in [{("llama", "fp32"), ("sigmoid", "fp32"), ("latent", "fp32"), ("window", "bf16")}]
    for model in MODELS
    for dtype in ("fp32", "bf16")
]
NEW = 12
SAMPLING = SamplingParams(1.0, seed=3)


def build(flags: str, rank: int = 0, world_size: int = 1) -> Trainer:
    config = parse(f"{RUN} {flags}".split(), {"RANK": str(rank), "WORLD_SIZE": str(world_size)}).config
    return build_trainer(config, rank, world_size)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 131, (length,), generator=generator).tolist() for length in (5, 1, 170, 9, 30)]


def write(trainer: Trainer, batch_size: int) -> list[Continuation]:
    chunks = trainer.chunks.values()
    with trainer.optimizer.weights.gathered(part for chunk in chunks for part in chunk.parts):
        return generate_scored(PipelinedModel(trainer), prompts(), NEW, SAMPLING, batch_size=batch_size)


def scores_of(trainer: Trainer, found: Sequence[Continuation], batch_size: int) -> list[list[float]]:
    """Log-probabilities of the new tokens, by passes over whole sequences that are padded at their ends."""
    whole = [prompt + new.tokens for prompt, new in zip(prompts(), found)]
    longest = max(map(len, whole))
    tokens = torch.tensor([ids + [0] * (longest - len(ids)) for ids in whole])
    log_probs = compute_logprobs(trainer, tokens, batch_size).tolist()
    return [row[len(ids) - NEW - 1 : len(ids) - 1] for row, ids in zip(log_probs, whole)]


def trained_losses(trainer: Trainer, tokens: Tensor, micro_batch: int) -> Tensor:
    """The losses of tokens ``[B, S - 1]`` in a pass with a backward pass."""
    losses: list[Tensor] = []
    layer = next(chunk.output_layer for chunk in trainer.chunks.values() if chunk.output_layer is not None)
    layer.losses.register_forward_hook(lambda module, inputs, out: losses.append(out))
    batches = [
        replace(MicroBatch.of_tokens(rows[:, :-1]), labels=rows[:, 1:], loss_mask=torch.ones(rows[:, 1:].shape))
        for rows in tokens.split(micro_batch)
    ]
    weight, loss_grad = weigh_batch(trainer, batches, torch.ones(()))
    compute_gradients(trainer, batches, loss_grad, weight)
    return torch.cat([loss.view(tokens.shape[1] - 1, -1).t() for loss in losses])


@pytest.mark.parametrize(("model", "dtype"), CASES)
def test_generation_scoring_and_training_agree_to_the_bit(model: str, dtype: str) -> None:
    trainer = build(f"{MODELS[model]} --params-dtype {dtype} --batch-invariant")
    together, alone = write(trainer, 5), write(trainer, 1)
    assert together == alone
    for batch_size in (1, 4):
        assert scores_of(trainer, together, batch_size) == [new.log_probs for new in together]
    tokens = torch.arange(4 * 40).view(4, 40) * 7 % 131
    scores = compute_logprobs(trainer, tokens)
    for micro_batch in (1, 4):
        assert torch.equal(-trained_losses(trainer, tokens, micro_batch), scores)


@dataclass(frozen=True)
class Layout:
    ranks: int
    flags: str
    model: str = "llama"
    # Equal to one process to the bit; else up to BOUND.
    equal: bool = True


LAYOUTS = {
    "dp2": Layout(2, ""),
    "pp2": Layout(2, "--pipeline-model-parallel-size 2"),
    "zero3": Layout(2, "--data-parallel-sharding-strategy optim_grads_params"),
    "cp2-a2a": Layout(2, "--context-parallel-size 2 --cp-comm-type a2a"),
    "tp2": Layout(2, "--tensor-model-parallel-size 2", equal=False),
    "ep2": Layout(2, "--expert-model-parallel-size 2", "sigmoid", equal=False),
}
BOUND = 1e-5
"""Between layouts that add in another order, in fp32."""


def layout_scores(rank: int, world_size: int, flags: str) -> tuple[list[Continuation], list[list[float]]]:
    trainer = build(flags, rank, world_size)
    found = write(trainer, 4)
    return found, scores_of(trainer, found, 2)


@cache
def expected(model: str) -> tuple[list[Continuation], list[list[float]]]:
    return layout_scores(0, 1, f"{MODELS[model]} --batch-invariant")


@pytest.mark.parametrize("name", one_in(2, LAYOUTS))
def test_layouts(pool: Pool, name: str) -> None:
    layout = LAYOUTS[name]
    found, scores = expected(layout.model)
    for ours, again in pool.run(
        layout.ranks, layout_scores, f"{MODELS[layout.model]} --batch-invariant {layout.flags}"
    ):
        assert [new.log_probs for new in ours] == again, "of the same layout"
        if layout.equal:
            assert (ours, again) == (found, scores)
        else:
            assert [new.tokens for new in ours] == [new.tokens for new in found]
            torch.testing.assert_close(torch.tensor(again), torch.tensor(scores), rtol=0, atol=BOUND)


def test_documents_are_computed_as_alone() -> None:
    """Packed one after the other, from any place in the sample."""
    trainer = build(f"{MODELS['llama']} --batch-invariant")
    lengths = (7, 150, 3, 24)
    tokens = torch.arange(sum(lengths)).unsqueeze(0) * 7 % 131
    documents = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths)).unsqueeze(0)
    positions = torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0)
    packed = replace(MicroBatch.of_tokens(tokens, positions), documents=documents, labels=tokens.roll(-1, 1))

    def measure(batch: MicroBatch) -> Tensor:
        return record(trainer, [batch], lambda hidden, part, output: output.token_scores(hidden, part.labels)[0])[0]

    together = measure(packed)
    for part, labels, found in zip(*(t.split(lengths, 1) for t in (tokens, packed.labels, together))):
        assert torch.equal(measure(replace(MicroBatch.of_tokens(part), labels=labels)), found)


@pytest.mark.parametrize(("dtype", "bound"), [("fp32", 1e-5), ("bf16", 0.1)])
def test_bounds_without_the_option(dtype: str, bound: float) -> None:
    trainer = build(f"{MODELS['llama']} --params-dtype {dtype}")
    found = write(trainer, 5)
    error = max(
        abs(ours - theirs)
        for row, new in zip(scores_of(trainer, found, 4), found)
        for ours, theirs in zip(row, new.log_probs)
    )
    assert 0 < error < bound, "0 would show that the tests above show nothing"
