"""Small Hugging Face folders, written by the `safetensors` package, and checkpoints to convert."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import save_file
from torch import Tensor

from megatron.arguments.sources import to_dict
from megatron.checkpoint.format import Manifest, whole_box
from megatron.checkpoint.save import save_sharded
from megatron.checkpoint.tensor_file import GlobalTensor, TensorPart
from megatron.config.model import ModelConfig
from megatron.config.precision import PrecisionConfig
from megatron.config.run import RunConfig
from megatron.convert.base_model import BaseModel
from megatron.convert.huggingface.config import build_config_json, model_type_for, read_model_config
from megatron.convert.huggingface.weights import build_on_meta, map_tensors
from megatron.convert.sources import open_source
from megatron.distributed.comm import Group
from megatron.distributed.sharding import ShardSpec
from megatron.layers.parameters import gpt, in_checkpoints
from tests.kit.solo import tiny

LLAMA: dict[str, Any] = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "activation": "swiglu",
    "add_bias_linear": False,
    "ffn_hidden_size": 48,
    "num_query_groups": 2,
    "untie_embeddings_and_output_weights": True,
}


def llama(**changes: Any) -> ModelConfig:
    """A tiny Llama."""
    return tiny(**(LLAMA | changes))


def random_weights(model: ModelConfig, dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Tensor]:
    """Under transformers' names."""
    generator = torch.Generator().manual_seed(seed)
    made = map_tensors(model_type_for(model), model, build_on_meta(model).specs).values()
    return {s.name: (0.2 * torch.randn(s.stored, generator=generator)).to(dtype) for found in made for s in found}


def opened(folder: Path) -> Any:
    """The model in a folder."""
    return open_source(f"hf:{folder}")


def write_folder(folder: Path, model: ModelConfig, weights: dict[str, Tensor], shards: int = 1) -> Path:
    """A Hugging Face folder with these weights, whatever they are."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(build_config_json(model)))
    if shards == 1:
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        return folder
    names = sorted(weights)
    places = {}
    for i in range(shards):
        file, held = f"model-{i + 1:05d}-of-{shards:05d}.safetensors", names[i::shards]
        save_file({name: weights[name] for name in held}, folder / file, {"format": "pt"})
        places |= dict.fromkeys(held, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def whole_tensor(spec: ShardSpec, value: Tensor) -> GlobalTensor:
    """A tensor of one rank, to be saved."""
    return GlobalTensor(
        spec.shape, spec.view, value.dtype, (TensorPart(whole_box(spec.view), value.reshape(spec.view)),)
    )


def write_checkpoint(
    path: Path,
    model: ModelConfig,
    params_dtype: str = "fp32",
    files: dict[str, bytes] | None = None,
    std: float = 0.2,
) -> Manifest:
    """A checkpoint with random weights, a moment of each, and these small files."""
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for name, spec in build_on_meta(model).specs.items():
        for stored in (name, f"optim.exp_avg.{name}"):
            tensors[stored] = whole_tensor(spec, std * torch.randn(spec.view, generator=generator))
    config = replace(RunConfig(model=model), precision=PrecisionConfig(params_dtype=params_dtype))
    small: dict[str, Path | bytes] = dict(files or {})
    save_sharded(path, tensors, {"iteration": 7}, to_dict(config), Group(), small)
    return Manifest.open(path)


def write_adapters(path: Path, base: Path, **options: Any) -> Manifest:
    """A checkpoint with random adapters of the model in a Hugging Face folder, and another average of them."""
    generator = torch.Generator().manual_seed(2)
    model = replace(read_model_config(base), lora_rank=3, **options)
    tensors = {}
    for name, spec in in_checkpoints(gpt(model)).items():
        for stored in (name, f"optim.ema.{name}"):
            value = 0.2 * torch.randn(spec.view, generator=generator) + float(name.endswith("magnitude"))
            tensors[stored] = whole_tensor(spec, value)
    state = {"iteration": 7, "base": BaseModel.find(f"hf:{base}").record}
    save_sharded(path, tensors, state, to_dict(RunConfig(model=model)), Group())
    return Manifest.open(path)


def ignore(name: str, done: int, total: int) -> None:
    """No report."""


def card_of(folder: Path) -> dict[str, str]:
    """The rows of the table, below the front matter."""
    empty, front, text = (folder / "README.md").read_text().split("---\n", 2)
    assert not empty
    assert yaml.safe_load(front) == {"library_name": "transformers", "pipeline_tag": "text-generation"}
    rows = [line.strip("| ").split(" | ", 1) for line in text.splitlines() if line.startswith("| ")]
    return dict(rows[1:])
