"""Folders with weights in FP8 blocks and in MXFP4 against the same weights dequantised element by element."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron.checkpoint.errors import CheckpointError
from megatron.checkpoint.format import whole_box
from megatron.checkpoint.tensor_file import TensorFile
from megatron.convert.huggingface.config import CONFIG_FILE
from megatron.convert.huggingface.convert import convert_from_huggingface
from megatron.convert.huggingface.quantized import dequantized
from megatron.convert.saved_model import SavedModel
from megatron.convert.sources import open_checkpoint
from megatron.convert.weight_source import ModelSource
from megatron.distributed.sharding import Box
from tests.parity.test_hf import BY_NAME
from tests.parity.test_hf_convert import build
from tests.parity.test_moe import GPT_OSS
from tests.unit.convert.folders import ignore, opened

HEIGHT, WIDTH = 7, 12  # of a block; neither divides the weights
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [HEIGHT, WIDTH], "activation_scheme": "dynamic"}
FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def in_fp8(weight: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """A weight, quantised: its codes, a random factor of each block, and the product of each pair."""
    rows, columns = weight.shape
    factors = torch.rand(-(-rows // HEIGHT), -(-columns // WIDTH), generator=generator) + 0.5
    codes = weight.to(torch.float8_e4m3fn)
    products = torch.empty(rows, columns, dtype=torch.bfloat16)
    for i in range(rows):
        for j in range(0, columns, WIDTH):
            products[i, j : j + WIDTH] = codes[i, j : j + WIDTH].float() * factors[i // HEIGHT, j // WIDTH]
    return codes, factors, products


def in_mxfp4(shape: tuple[int, int, int], generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Random blocks and exponents of experts ``[E, inputs, outputs]``, and the numbers that they stand for."""
    experts, inputs, outputs = shape
    codes = torch.randint(16, (experts, outputs, inputs // 32, 32), generator=generator)
    exponents = torch.randint(118, 127, codes.shape[:-1], generator=generator)
    values = torch.empty(shape, dtype=torch.bfloat16)
    for e in range(experts):
        for o in range(outputs):
            row = zip(codes[e, o].flatten().tolist(), exponents[e, o].repeat_interleave(32).tolist())
            numbers = [(-1) ** (code >> 3) * FP4[code & 7] * 2.0 ** (exponent - 127) for code, exponent in row]
            values[e, :, o] = torch.tensor(numbers)
    bytes_ = codes[..., 0::2] | codes[..., 1::2] << 4
    return bytes_.to(torch.uint8), exponents.to(torch.uint8), values


def write(folder: Path, config: dict[str, object], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir()
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def folders(kind: str, tmp_path: Path) -> tuple[Path, Path]:
    """A quantised model, and the same one in bf16."""
    generator = torch.Generator().manual_seed(0)
    case = BY_NAME["deepseek-v3"]
    if kind == "mxfp4":
        case = replace(GPT_OSS, theirs=GPT_OSS.theirs | {"intermediate_size": 64})
    build(case, seed=3).to(torch.bfloat16).save_pretrained(tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / CONFIG_FILE).read_text())
    quantised: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for name, tensor in load_file(tmp_path / "hf" / "model.safetensors").items():
        if kind == "mxfp4" and name.endswith(("gate_up_proj", "down_proj")):
            shape = tuple(tensor.shape)
            made = in_mxfp4(shape, generator)  # type: ignore[arg-type]
            quantised[f"{name}_blocks"], quantised[f"{name}_scales"], plain[name] = made
        elif kind == "fp8" and (name.endswith("_proj.weight") or "kv_a_proj" in name):
            quantised[name], quantised[f"{name}_scale_inv"], plain[name] = in_fp8(tensor, generator)
        else:
            quantised[name] = plain[name] = tensor
    quantisation = FP8 if kind == "fp8" else {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    first = write(tmp_path / "quantised", config | {"quantization_config": quantisation}, quantised)
    return first, write(tmp_path / "plain", config, plain)


def random_box(shape: tuple[int, ...], rng: random.Random) -> Box:
    starts = tuple(rng.randrange(size) for size in shape)
    return Box(starts, tuple(rng.randint(1, size - start) for start, size in zip(starts, shape)))


@pytest.mark.parametrize("kind", ["fp8", "mxfp4"])
def test_every_box_is_that_of_the_dequantised_weights(kind: str, tmp_path: Path) -> None:
    """And a conversion, with the check against transformers, keeps the same numbers."""
    quantised, plain = folders(kind, tmp_path)
    sources: list[ModelSource] = [opened(folder) for folder in (quantised, plain)]
    assert sources[0].model == sources[1].model
    assert sources[0].precision == sources[1].precision == "bf16"
    rng = random.Random(kind)
    for name, spec in sources[1].specs.items():
        for box in (whole_box(spec.view), *(random_box(spec.view, rng) for _ in range(8))):
            ours, expected = (source.read(name, spec.view, box) for source in sources)
            assert ours.dtype == expected.dtype
            assert torch.equal(ours, expected), (name, box)
    done = convert_from_huggingface(sources[0], tmp_path / "save", ignore)
    assert done.differences
    saved = SavedModel(open_checkpoint(tmp_path / "save")[0])
    for name, spec in saved.specs.items():
        values = saved.read(name, spec.view, whole_box(spec.view))
        assert torch.equal(values, sources[1].read(name, spec.view, whole_box(spec.view)).float())


def test_factors_that_do_not_fit_are_named(tmp_path: Path) -> None:
    quantised, _ = folders("fp8", tmp_path)
    tensors = load_file(quantised / "model.safetensors")
    name = next(name for name in tensors if name.endswith("_scale_inv"))
    save_file(tensors | {name: tensors[name][:-1].contiguous()}, quantised / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{name} is torch.float32 .* does not fit the quantised weight"):
        opened(quantised)


FP8_VECTOR, BYTES = torch.zeros(8, dtype=torch.float8_e4m3fn), torch.zeros(2, 3, 4, 16, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("tensors", "sentence"),
    [
        ({"x": FP8_VECTOR, "x_scale_inv": torch.ones(1)}, r"x_scale_inv .* which is torch.float8_e4m3fn \[8\]"),
        ({"x": FP8_VECTOR[0], "x_scale_inv": torch.ones(())}, r"x_scale_inv .* which is torch.float8_e4m3fn \[\]"),
        ({"x_blocks": BYTES[0], "x_scales": BYTES[0, ..., 0]}, r"x_scales .* which is torch.uint8 \[3, 4, 16\]"),
        ({"x_blocks": BYTES[..., 1:], "x_scales": BYTES[..., 0]}, r"x_scales .* which is torch.uint8 \[2, 3, 4, 15\]"),
        ({"x_blocks": BYTES, "x_scales": BYTES[..., :2, 0]}, r"x_scales is torch.uint8 \[2, 3, 2\], and does not fit"),
        ({"x": FP8_VECTOR, "x_blocks": BYTES, "x_scales": BYTES[..., 0]}, "x is stored twice"),
    ],
)
def test_weights_of_another_form_are_named(tensors: dict[str, Tensor], sentence: str, tmp_path: Path) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    file = TensorFile(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=sentence):
        dequantized(dict.fromkeys(file.keys, file), (HEIGHT, WIDTH))
