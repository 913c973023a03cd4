"""Hybrid models of `transformers` through their own files: bits, logits, gradients, text, configurations."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from megatron.config.training import TrainingConfig
from megatron.convert.huggingface.convert import convert_from_huggingface, convert_to_huggingface
from megatron.convert.saved_model import SavedModel
from megatron.convert.sources import open_checkpoint
from megatron.convert.weight_source import WeightSource, fill_weights
from megatron.distributed.sharding import Box, DenseSharding, ExpertSharding, Sharding
from megatron.inference.generate import SamplingParams, generate
from megatron.layers.parameters import gpt
from tests.kit.solo import Solo, random_batch
from tests.parity.families import everything_in_double, tensors_of
from tests.parity.hybrids import HYBRIDS, build, from_hybrid
from tests.unit.convert.folders import ignore, opened

transformers = pytest.importorskip("transformers")

IGNORED = -100  # the label `transformers` leaves out
WIDE = ("e_score_correction_bias", "A_log", "dt_bias", ".D")
PARTS = ("mamba2", "nemotron-3", "granite-4-experts", "qwen3-next", "qwen3-5")
UNUSED = {"nemotron_h": ("time_step_limit",)} | dict.fromkeys(
    ("qwen3_5_text", "qwen3_5_moe_text"), ("attn_output_gate",)
)
"""Keys of published folders that transformers does not use: the least time step is ``time_step_min``."""
SLOW = ("mamba2-tied", "nemotron-3-latent", "granite-4", "qwen3-5-moe")


def weights_of(folder: Path) -> dict[str, Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def load(folder: Path) -> nn.Module:
    """A folder as a person loads it; transformers must find every tensor, and no other."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, dtype="float32")
    assert not any(info.values()), info
    loaded: nn.Module = model
    return loaded


def twin_of(theirs: nn.Module) -> nn.Module:
    """The same model, wholly in double inside `everything_in_double`."""
    theirs.config._experts_implementation = "eager"
    twin: nn.Module = transformers.AutoModelForCausalLM.from_config(theirs.config, attn_implementation="eager").double()
    twin.load_state_dict(theirs.state_dict())
    return twin.eval()


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in HYBRIDS])
def test_there_and_back(name: str, tmp_path: Path) -> None:
    theirs = build(name)
    dtype = (torch.float32, torch.bfloat16)[[*HYBRIDS].index(name) % 2]
    theirs.to(dtype).save_pretrained(tmp_path / "hf", max_shard_size="20KB")
    imported = convert_from_huggingface(opened(tmp_path / "hf"), tmp_path / "save", ignore)
    assert imported.differences[-1].what == "logits"
    saved = SavedModel(open_checkpoint(tmp_path / "save")[0])
    kind = theirs.config.model_type
    exported = convert_to_huggingface(saved, tmp_path / "back", ignore, shard_bytes=30_000, model_type=kind)
    assert exported.differences[-1].what == "logits"
    before, after = (weights_of(tmp_path / folder) for folder in ("hf", "back"))
    assert before.keys() == after.keys()
    for key, value in before.items():
        assert after[key].dtype == (torch.float32 if key.endswith(WIDE) else dtype)
        assert torch.equal(value, after[key].to(value.dtype)), key
    configs = [transformers.AutoConfig.from_pretrained(tmp_path / folder).to_dict() for folder in ("hf", "back")]
    for config in configs:
        for key in ("_name_or_path", "use_cache", "dtype", *UNUSED.get(kind, ())):
            config.pop(key, None)
    assert configs[0] == configs[1]
    assert_same_numbers(saved, load(tmp_path / "back"))


class Counted:
    """A source of weights, and how many elements were read."""

    def __init__(self, source: WeightSource) -> None:
        self.source, self.elements = source, 0

    def read(self, name: str, view: tuple[int, ...], box: Box) -> Tensor:
        self.elements += box.numel
        return self.source.read(name, view, box)


@pytest.mark.parametrize("name", PARTS)
def test_a_rank_reads_its_part_of_a_folder(name: str, tmp_path: Path) -> None:
    """Of a stage of two, and of two ranks of tensor and of expert tensor parallelism: no element of the others."""
    theirs = build(name)
    theirs.save_pretrained(tmp_path / "hf")
    source = opened(tmp_path / "hf")
    whole, layers = from_hybrid(tensors_of(theirs), source.model), source.model.num_layers
    stages = {(True, False): range(layers // 2), (False, True): range(layers // 2, layers)}
    for (first, last), own in stages.items():
        for rank in range(2):
            sharding = Sharding(DenseSharding(rank, 2), ExpertSharding(0, 1, rank, 2), True)
            specs = gpt(source.model, sharding, own, first, last)
            held = {key: torch.full(spec.local_shape, torch.nan) for key, spec in specs.items()}
            counted = Counted(source)
            fill_weights(specs, held, counted)
            for key, spec in specs.items():
                value = whole[key].reshape(source.specs[key].view)
                for piece in spec.pieces:
                    part = held[key].view(spec.local_view)[piece.local_box.slices]
                    assert torch.equal(part, value[piece.global_box.slices]), key
            assert counted.elements == sum(piece.global_box.numel for spec in specs.values() for piece in spec.pieces)
            assert counted.elements < 0.5 * sum(value.numel() for value in whole.values())


def assert_same_numbers(saved: SavedModel, theirs: nn.Module) -> None:
    """In fp64: logits, loss, gradients of all parameters, and text that is most likely."""
    ours = Solo.build(saved.model, torch.float64, TrainingConfig(cross_entropy_chunk_size=7))
    fill_weights(ours.chunk.specs, ours.chunk.params, saved)
    batch = random_batch(saved.model, samples=2, length=16, seed=3)
    prompts = batch.tokens[:, :5].tolist()
    with everything_in_double():
        twin = twin_of(theirs)
        held = from_hybrid(tensors_of(twin), saved.model)
        assert held.keys() == ours.params.keys()
        assert all(torch.equal(ours.params[key][: len(value)], value) for key, value in held.items())
        labels = batch.labels.where(batch.loss_mask > 0, IGNORED)
        out = twin(input_ids=batch.tokens, labels=labels, shift_labels=labels, use_cache=False)
        out.loss.backward()
        # without a cache: with one, transformers does not limit the time steps
        options = {"max_new_tokens": 7, "do_sample": False, "eos_token_id": None, "use_cache": False}
        texts = [twin.generate(input_ids=torch.tensor([prompt]), **options)[0] for prompt in prompts]
    ours.chunk.eval()
    logits_BSV = ours.chunk.logits(batch.tokens).transpose(0, 1)
    assert (logits_BSV - out.logits).abs().max() <= 1e-10 * out.logits.abs().max().clamp(min=1)
    assert generate(ours.chunk, prompts, 7, SamplingParams(0.0)) == [text[5:].tolist() for text in texts]
    ours.chunk.train()
    assert ours.backward([batch]).item() == pytest.approx(out.loss.item(), rel=1e-11)
    grads = {key: parameter.grad for key, parameter in twin.named_parameters() if parameter.grad is not None}
    missing = {key: torch.zeros_like(value) for key, value in tensors_of(twin).items() if key not in grads}
    reference = from_hybrid(grads | missing, saved.model)
    scale = max(grad.norm() for grad in reference.values())
    for key, grad in ours.buckets.grads.items():
        error = (grad[: len(reference[key])] - reference[key]).norm()
        assert error <= 1e-9 * max(reference[key].norm(), 1e-3 * scale), key
