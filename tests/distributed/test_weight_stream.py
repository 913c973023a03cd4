"""Weights streamed from a run in any layout are those of its export, and transformers reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron.arguments.cli import parse
from megatron.arguments.sources import to_dict
from megatron.checkpoint.errors import CheckpointError
from megatron.checkpoint.format import Manifest
from megatron.checkpoint.save import save_sharded
from megatron.config.training import TrainingConfig
from megatron.convert.huggingface.config import build_config_json
from megatron.convert.huggingface.convert import convert_to_huggingface
from megatron.convert.saved_model import SavedModel
from megatron.distributed.grad_accumulator import GradAccumulator
from megatron.inference.scoring import compute_logprobs
from megatron.layers.context import BuildContext
from megatron.model.gpt import build_gpt
from megatron.training.build import build_trainer
from megatron.training.checkpoint_contents import tensors_to_save
from megatron.training.step import train_step
from megatron.training.trainer import Trainer
from megatron.training.weight_stream import refresh_weights, stream_weights
from tests.kit.cases import RATES
from tests.kit.pool import Pool
from tests.kit.solo import Allocations, one_rank_mesh
from tests.unit.convert.folders import ignore

RUN = (
    "--mock-data --vocab-size 131 --train-iters 2 --device cpu --num-layers 4 --seq-length 16 --micro-batch-size 1 "
    "--global-batch-size 4 --hidden-size 32 --num-attention-heads 4 --num-query-groups 2 --ffn-hidden-size 48 "
    "--position-embedding-type rope --normalization RMSNorm --activation swiglu --disable-bias-linear "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.3"
)
EXPERTS = f"{RUN} --num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01"
TIED = f"{RUN.replace('--untie-embeddings-and-output-weights', '')} --params-dtype bf16"
ZERO3 = "--data-parallel-sharding-strategy optim_grads_params"

BUCKET = 9000

LAYOUTS: dict[str, tuple[int, str]] = {
    "one": (1, RUN),
    "tp2-sp": (2, f"{RUN} --tensor-model-parallel-size 2 --sequence-parallel"),
    "tied-pp2": (2, f"{TIED} --pipeline-model-parallel-size 2"),
    "tp4-shared-heads": (4, f"{RUN} --tensor-model-parallel-size 4"),
    "zero3": (2, f"{RUN} {ZERO3}"),
    "ep2": (2, f"{EXPERTS} --expert-model-parallel-size 2"),
    "ep2-tp2-zero3": (
        4,
        f"{EXPERTS} --expert-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel {ZERO3}",
    ),
}


def trained(rank: int, world_size: int, flags: str) -> Trainer:
    """A run after a step."""
    config = parse(flags.split(), {"RANK": str(rank), "WORLD_SIZE": str(world_size)}).config
    trainer = build_trainer(config, rank, world_size)
    train_step(trainer, trainer.next_batches(), RATES)
    return trainer


def streamed(rank: int, world_size: int, flags: str, folder: Path) -> list[tuple[str, Tensor]]:
    """The weights that rank 0 receives; a checkpoint of the run is in ``folder``."""
    trainer = trained(rank, world_size, flags)
    found = [(name, tensor.clone()) for name, tensor in stream_weights(trainer, bucket_bytes=BUCKET)]
    save_sharded(folder, tensors_to_save(trainer), {"iteration": 1}, to_dict(trainer.config), trainer.mesh.world)
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_stream_is_the_export(pool: Pool, tmp_path: Path, name: str) -> None:
    ranks, flags = LAYOUTS[name]
    found, *others = pool.run(ranks, streamed, flags, tmp_path / "run")
    assert not any(others), "only rank 0 receives them"
    saved = SavedModel(Manifest.open(tmp_path / "run"))
    result = convert_to_huggingface(saved, tmp_path / "hf", ignore, shard_bytes=1 << 30, checked=False)
    exported = load_file(result.path / "model.safetensors")
    assert [each for each, _ in found] == [*dict(found)]
    assert dict(found).keys() == exported.keys()
    for each, tensor in found:
        assert tensor.dtype == exported[each].dtype
        assert torch.equal(tensor.view(torch.uint8), exported[each].view(torch.uint8)), each


def refreshed(rank: int, world_size: int, flags: str) -> tuple[Tensor, Tensor]:
    """Log-probabilities of a run, and of another model with its weights."""
    trainer, tokens = trained(rank, world_size, flags), torch.arange(24).view(2, 12)
    context = BuildContext(one_rank_mesh(), GradAccumulator(), torch.float32)
    chunk = build_gpt(trainer.config.model, TrainingConfig(), context).eval()
    for parameter in chunk.params.values():
        torch.nn.init.constant_(parameter, torch.nan)
    refresh_weights(chunk, stream_weights(trainer, everywhere=True))
    log_probs = chunk.logits(tokens).log_softmax(-1)[:-1].transpose(0, 1)
    return compute_logprobs(trainer, tokens), log_probs.gather(2, tokens[:, 1:, None]).squeeze(2)


@pytest.mark.parametrize("name", ["tp2-sp", "ep2"])
def test_refreshed_weights_compute_the_same(pool: Pool, name: str) -> None:
    ranks, flags = LAYOUTS[name]
    for ours, theirs in pool.run(ranks, refreshed, flags):
        torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-5)


def test_a_stream_of_another_model_is_refused() -> None:
    trainer = trained(0, 1, RUN)
    chunk, tensors = trainer.chunks[0], dict(stream_weights(trainer))
    name = "model.norm.weight"
    others: dict[str, dict[str, Tensor]] = {
        "lacks model.norm.weight": {n: t for n, t in tensors.items() if n != name},
        "lacks: more": tensors | {"more": tensors[name]},
        "another shape: model.norm.weight": tensors | {name: tensors[name][:-1]},
    }
    for message, stream in others.items():
        with pytest.raises(ValueError, match=message):
            refresh_weights(chunk, stream.items())


def test_transformers_computes_the_same_with_streamed_weights() -> None:
    transformers: Any = pytest.importorskip("transformers")
    trainer, tokens = trained(0, 1, RUN), torch.arange(24).view(2, 12)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**build_config_json(trainer.config.model))
    )
    model.load_state_dict(dict(stream_weights(trainer)))
    with torch.no_grad():
        log_probs = model.eval()(tokens).logits.log_softmax(-1)[:, :-1]
    expected = log_probs.gather(2, tokens[:, 1:, None]).squeeze(2)
    torch.testing.assert_close(compute_logprobs(trainer, tokens), expected, rtol=0, atol=1e-5)


def overflowing(rank: int, world_size: int, flags: str) -> str:
    """The error of this rank where the last rank alone has values that are too large for fp16."""
    trainer = trained(rank, world_size, flags)
    if rank == world_size - 1:
        for buffer in trainer.optimizer.weights.buffers:
            buffer.part.fill_(1e6)
    with pytest.raises(CheckpointError) as raised:
        [*stream_weights(trainer, torch.float16)]
    return str(raised.value)


@pytest.mark.parametrize("more", ["", "--lora-rank 4 --pretrained-checkpoint none"])
def test_all_ranks_raise_if_a_value_of_one_is_too_large(pool: Pool, more: str) -> None:
    ranks, flags = LAYOUTS["tp2-sp"]
    flags = f"{flags} {more}"
    first, *others = pool.run(ranks, overflowing, flags)
    assert "too large for fp16" in first
    assert others == [first] * (ranks - 1)


def needed(rank: int, world_size: int, flags: str) -> tuple[int, int]:
    """The most bytes of tensors that streaming keeps at a time, and twice those of a bucket or a larger tensor."""
    trainer, largest = trained(rank, world_size, flags), 0
    with Allocations() as allocations:
        for _, tensor in stream_weights(trainer, everywhere=True, bucket_bytes=BUCKET):
            largest = max(largest, tensor.nbytes)
    return allocations.peak, 2 * max(largest, BUCKET)


@pytest.mark.parametrize("name", ["zero3", "ep2"])
def test_streaming_needs_memory_for_a_tensor_and_a_bucket(pool: Pool, name: str) -> None:
    """What the caller still holds, or a thread of gloo a moment longer, and what comes next."""
    ranks, flags = LAYOUTS[name]
    for peak, allowed in pool.run(ranks, needed, flags, backend="gloo"):
        assert 0 < peak <= allowed
