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
from megatron.convert.weight_source import fill_weights
from megatron.inference.generate import SamplingParams, generate
from tests.kit.solo import Solo, random_batch
from tests.parity.families import everything_in_double, tensors_of
from tests.parity.hybrids import HYBRIDS, build, from_hybrid
from tests.unit.convert.folders import ignore, opened

transformers = pytest.importorskip("transformers")

IGNORED = -100  # the label `transformers` leaves out
WIDE = ("e_score_correction_bias", "A_log", "dt_bias", ".D")
SLOW = ("mamba2-tied", "nemotron-3-latent", "granite-4")


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
        unused = {"time_step_limit"} if kind == "nemotron_h" else set()  # its lower limit is time_step_min
        for key in {"_name_or_path", "use_cache", "dtype"} | unused:
            config.pop(key, None)
    assert configs[0] == configs[1]
    assert_same_numbers(saved, load(tmp_path / "back"))


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
