"""Bugs of conversion: a model of transformers computes the same here, and one from here the same in transformers."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from megatron.checkpoint.format import Manifest
from megatron.convert.huggingface import config as config_files
from megatron.convert.huggingface import convert
from megatron.convert.huggingface.config import TIE_KEY, read_model_config
from megatron.convert.huggingface.weights import HuggingFaceWeights
from megatron.convert.saved_model import SavedModel
from megatron.convert.weight_source import fill_weights
from tests.kit.checkpoints import save_model
from tests.kit.solo import Solo
from tests.known_bugs.alone import alone, distance
from tests.known_bugs.bug import KnownBug

EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}
TOKENS = torch.randint(0, 101, (2, 16), generator=torch.Generator().manual_seed(5))


def imported(rank: int, world_size: int, name: str) -> float:
    """Logits of a model of transformers whose files are read, from those of transformers, in fp64."""
    from tests.parity.test_hf import BY_NAME  # which imports transformers

    torch.manual_seed(1)
    theirs = of_transformers(BY_NAME[name].their_config())
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        theirs.save_pretrained(folder)
        model = read_model_config(folder)
        solo = Solo.build(model)
        fill_weights(solo.chunk.specs, solo.chunk.params, HuggingFaceWeights(folder, model))
    return distance({"": logits_of(solo)}, {"": their_logits(theirs)})


def exported(rank: int, world_size: int, name: str) -> float:
    """Logits in transformers of a model that was exported, from those here, in fp64."""
    from transformers import AutoModelForCausalLM

    from tests.parity.test_hf import BY_NAME

    solo = Solo.build(BY_NAME[name].config(), torch.float32)
    with tempfile.TemporaryDirectory() as temporary:
        saved = SavedModel(Manifest.open(save_model(solo.chunk, Path(temporary), files={})))
        out = Path(temporary) / "out"
        convert.convert_to_huggingface(saved, out, lambda *_: None, shard_bytes=10**9, checked=False)
        theirs = AutoModelForCausalLM.from_pretrained(out, **EAGER)
    double = Solo.build(BY_NAME[name].config())
    fill_from(double, solo.params)
    return distance({"": their_logits(theirs)}, {"": logits_of(double)})


@torch.no_grad()
def fill_from(solo: Solo, weights: dict[str, nn.Parameter]) -> None:
    """Copy weights of another type."""
    for name, parameter in solo.params.items():
        parameter.copy_(weights[name])


def of_transformers(their_config: Any) -> Any:
    """A model with random weights, in fp32."""
    from transformers import AutoModelForCausalLM

    from tests.parity.families import randomise

    model = AutoModelForCausalLM.from_config(their_config, **EAGER)
    randomise(model)
    return model.eval()


def logits_of(solo: Solo) -> Tensor:
    """Logits of our model, without padded vocabulary."""
    solo.chunk.eval()
    return solo.chunk.logits(TOKENS).transpose(0, 1)


def their_logits(model: Any) -> Tensor:
    """Logits of a model of transformers that computes in fp64."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from tests.parity.families import everything_in_double

    with everything_in_double(), torch.no_grad():
        config = AutoConfig.for_model(**model.config.to_dict())
        twin = AutoModelForCausalLM.from_config(config, **EAGER).double().eval()
        twin.load_state_dict(model.state_dict())
        logits: Tensor = twin(TOKENS, use_cache=False).logits
    return logits


def reading(**values: Any) -> Callable[[], AbstractContextManager[Any]]:
    """Options of the model that are read from config.json are others."""
    original = config_files.model_config_values
    return lambda: patch.object(config_files, "model_config_values", lambda *given: original(*given) | values)


def writing(**values: Any) -> Callable[[], AbstractContextManager[Any]]:
    """Keys of the config.json that is written have other values; None leaves one out."""
    original = convert.build_config_json

    def build(*given: Any, **named: Any) -> dict[str, Any]:
        written = {**original(*given, **named), **values}
        return {name: value for name, value in written.items() if values.get(name, "") is not None}

    return lambda: patch.object(convert, "build_config_json", build)


def _changing(change: Callable[[str, Tensor], Tensor]) -> AbstractContextManager[Any]:
    """Change the tensors that are read, under our names."""
    original = HuggingFaceWeights.read
    return patch.object(HuggingFaceWeights, "read", lambda self, name, *rest: change(name, original(self, name, *rest)))


def biases_dropped() -> AbstractContextManager[Any]:
    """Biases of queries, keys and values are zero."""
    return _changing(lambda name, found: torch.zeros_like(found) if name.endswith("qkv.bias") else found)


def halves_swapped() -> AbstractContextManager[Any]:
    """What gates and what is gated change places."""
    return _changing(lambda name, found: found.flip(0) if name.endswith("mlp.linear_fc1.weight") else found)


READ = "logits of a random model that transformers wrote, against transformers in fp64"
WRITTEN = "logits in transformers of a random model exported from here, against those here in fp64"
LLAMA, GEMMA, MIXTURE = "llama-gqa", "gemma2", "qwen3-moe-shares-of-all"

BUGS = {
    "channels-paired-otherwise": KnownBug(
        reports=("nurl-lang/nurl#584",),
        kind="Conversion",
        bug="rotary embeddings turned adjacent channels of weights whose halves belong together",
        check=f"{READ} (Llama)",
        detector=alone(imported, LLAMA),
        plant=reading(rotary_interleaved=True),
    ),
    "rotary-base-ignored": KnownBug(
        reports=("princeton-nlp/LLM-Shearing#66", "sgl-project/SpecForge#265"),
        kind="Conversion",
        bug="the base of rotary embeddings was 10,000 whatever config.json had",
        check=f"{READ} (Llama with a base of 500)",
        detector=alone(imported, "llama3-scaling"),
        plant=reading(rotary_base=10000.0),
    ),
    "rotary-scaling-ignored": KnownBug(
        reports=("vllm-project/speculators#574", "ggml-org/llama.cpp#24820", "Blaizzy/mlx-vlm#1710"),
        kind="Conversion",
        bug="the scaling of rotary embeddings was dropped on reading",
        check=f"{READ} (Llama 3)",
        detector=alone(imported, "llama3-scaling"),
        plant=reading(use_rope_scaling=False),
    ),
    "rotary-scaling-not-written": KnownBug(
        reports=("ServiceNow/Fast-LLM#55",),
        kind="Conversion",
        bug="the scaling of rotary embeddings was not in the exported config.json",
        check=f"{WRITTEN} (Llama 3)",
        detector=alone(exported, "llama3-scaling"),
        plant=writing(rope_parameters={"rope_type": "default", "rope_theta": 500.0}, rope_scaling=None),
    ),
    "norm-offset-missing": KnownBug(
        reports=("linkedin/Liger-Kernel#74", "pytorch/executorch#19901"),
        kind="Conversion",
        bug="Gemma's norms multiply by 1 + weight, and were read as plain ones",
        check=f"{READ} (Gemma 2)",
        detector=alone(imported, GEMMA),
        plant=reading(apply_layernorm_1p=False),
    ),
    "attention-scale-wrong": KnownBug(
        reports=("huggingface/transformers#31891", "NVIDIA/Megatron-LM#848"),
        kind="Conversion",
        bug="attention scores were multiplied by another factor than the model was trained with",
        check=f"{READ} (Gemma 2, whose factor is not that of its heads)",
        detector=alone(imported, GEMMA),
        plant=reading(softmax_scale=None),
    ),
    "embedding-scaled-twice": KnownBug(
        reports=("TensorAuto/OpenTau#179",),
        kind="Conversion",
        bug="embeddings were multiplied by the root of the hidden size twice",
        check=f"{READ} (Gemma 2)",
        detector=alone(imported, GEMMA),
        plant=reading(embedding_multiplier=64.0),
    ),
    "norm-epsilon-fixed": KnownBug(
        reports=("NVIDIA-NeMo/Megatron-Bridge#5712", "Lightning-AI/lit-llama#322", "huggingface/candle#271"),
        kind="Conversion",
        bug="norms used a default epsilon in place of the model's",
        check=f"{READ} (Llama with an epsilon of 1e-3)",
        detector=alone(imported, LLAMA),
        plant=reading(norm_epsilon=1e-5),
    ),
    "window-off-by-one": KnownBug(
        reports=("huggingface/transformers#39408",),
        kind="Conversion",
        bug="a window of n tokens let a query attend to n tokens before its own",
        check=f"{READ} (Mistral with a window of 5, eager attention)",
        detector=alone(imported, "mistral-window"),
        plant=reading(window_size=6),
    ),
    "window-ignored": KnownBug(
        reports=("unslothai/unsloth#8253",),
        kind="Conversion",
        bug="one of several attention paths did not get the window, and attended to the whole sequence",
        check=f"{READ} (Mistral with a window of 5, eager attention)",
        detector=alone(imported, "mistral-window"),
        plant=reading(window_size=None),
    ),
    "biases-dropped": KnownBug(
        reports=("paiml/entrenar#258", "ServiceNow/Fast-LLM#398"),
        kind="Conversion",
        bug="biases of queries, keys and values were not read or not written",
        check=f"{READ} (Qwen 2)",
        detector=alone(imported, "qwen2-qkv-bias"),
        plant=biases_dropped,
    ),
    "gate-and-up-swapped": KnownBug(
        reports=("nntrainer/nntrainer#4194", "charlie12345/ROCmFPX#49"),
        kind="Conversion",
        bug="the two halves of a gated MLP were taken for each other",
        check=f"{READ} (Llama)",
        detector=alone(imported, LLAMA),
        plant=halves_swapped,
    ),
    "expert-weights-normalised": KnownBug(
        reports=("pytorch/torchtitan#1448", "lablup/mlxcel#391"),
        kind="Conversion",
        bug="the weights of the chosen experts were normalised where the model's are not, or the reverse",
        check=f"{READ} (Qwen 3 MoE without norm_topk_prob)",
        detector=alone(imported, MIXTURE),
        plant=reading(moe_router_pre_softmax=False),
    ),
    "output-layer-tied": KnownBug(
        reports=("Lightning-AI/litgpt#1727",),
        kind="Conversion",
        bug="whether the output layer is the embedding was not what the exported files have",
        check=f"{WRITTEN} (Llama, not tied)",
        detector=alone(exported, LLAMA),
        plant=writing(**{TIE_KEY: True}),
    ),
}
