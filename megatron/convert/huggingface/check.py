"""Check of a conversion: `transformers` on the Hugging Face files against our model on the checkpoint.

Both run on the same tokens in fp32, and each module's weights are in memory only while it runs (`LazyWeightLoader`).
transformers' model looks up its weights by its own names, so the check does not depend on our conversion tables. An
export also checks that ``AutoTokenizer`` gives the ids of the run's tokenizer.

Shapes: B rows of tokens, S tokens of a row, H hidden, V vocabulary.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from megatron.checkpoint.errors import MAX_NAMES, CheckpointError, raise_if_any
from megatron.checkpoint.format import whole_box
from megatron.config.files import parse_json
from megatron.config.model import ModelConfig
from megatron.config.text import listed
from megatron.config.training import TrainingConfig
from megatron.convert.huggingface.config import CONFIG_FILE, read_options
from megatron.convert.huggingface.families import model_families
from megatron.convert.huggingface.weights import build_on_meta, open_weights
from megatron.convert.weight_source import WeightSource, fill_in_blocks
from megatron.data.tokenizers.huggingface import (
    TOKENIZER_CONFIG,
    TOKENIZER_JSON,
    load_with_transformers,
    parse_tokenizer,
)
from megatron.distributed.micro_batch import MicroBatch
from megatron.kernels.qkv import RotaryEmbedding


class LazyWeightLoader:
    """Loads the parameters of each module before its forward pass and releases them after it."""

    def __init__(
        self, model: nn.Module, load: Callable[[str], Tensor], aliases: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """Register forward hooks on all modules of ``model``.

        Args:
            model: on the meta device.
            load: returns the value of a parameter by its dotted name.
            aliases: tied parameter -> name of the parameter to load instead.
        """
        self._load, self._aliases = load, aliases
        self._meta: dict[nn.Module, dict[str, nn.Parameter]] = {}  # parameters to restore, of loaded modules
        self._prefixes: dict[nn.Module, str] = {}
        for name, module in model.named_modules():
            if next(module.parameters(recurse=False), None) is not None:
                self._prefixes[module] = f"{name}." if name else ""
                module.register_forward_pre_hook(lambda module, inputs: self.load(module))
                module.register_forward_hook(lambda module, inputs, output: self.release(module))

    def load(self, module: nn.Module) -> None:
        """Load a module's own parameters until :meth:`release`."""
        self._meta[module] = dict(module.named_parameters(recurse=False))
        for name, parameter in self._meta[module].items():
            full = self._prefixes[module] + name
            value = self._load(self._aliases.get(full, full))
            if value.shape != parameter.shape:
                raise ValueError(f"{full} is {list(parameter.shape)}, its value {list(value.shape)}")
            setattr(module, name, nn.Parameter(value, requires_grad=False))

    def release(self, module: nn.Module) -> None:
        """Put a module's meta parameters back."""
        for name, parameter in self._meta.pop(module).items():
            setattr(module, name, parameter)


TOLERANCE = 1e-5
"""Largest allowed difference, relative to the largest value of transformers."""

SAMPLE_ROWS, SAMPLE_TOKENS = 2, 32
"""Rows of random tokens, and tokens per row, which the number of positions and the window may change."""

MAX_CHECKED_WINDOW = 256
"""Longest window that the rows exceed; the memory of the logits grows with it."""


class MismatchError(CheckpointError):
    """The converted model does not compute the same, or its tokenizer gives other ids."""


@dataclass(frozen=True)
class OutputDifference:
    """Largest difference between two outputs that should be equal."""

    what: str  # name of the output
    absolute: float
    relative: float  # to the largest absolute value of transformers

    @classmethod
    def between(cls, what: str, ours: Tensor, theirs: Tensor) -> OutputDifference:
        """Compare two tensors of one shape. The difference is infinite if one of them is not finite."""
        absolute = (ours - theirs).abs().max().item()
        scale = theirs.abs().max().item()
        if not torch.isfinite(ours).all() or not torch.isfinite(theirs).all():
            return cls(what, float("inf"), float("inf"))
        return cls(what, absolute, absolute / scale if scale else absolute)

    def __str__(self) -> str:
        return f"{self.what} by {self.absolute:.1e} ({self.relative:.1e} of the largest)"


@dataclass(frozen=True)
class ModelOutputs:
    """Outputs of a model that are compared."""

    blocks: Tensor  # hidden states after each block, [blocks, B, S, H]
    logits: Tensor  # [B, S, V]
    angles: Tensor  # rotary frequencies and magnitudes; empty without rotary embedding


def check_model(
    folder: Path, config: Path, model: ModelConfig, source: WeightSource, rounded: torch.dtype = torch.float32
) -> list[OutputDifference]:
    """Compare transformers' model of a Hugging Face folder with ours.

    Args:
        folder: folder with safetensors files.
        config: config.json of transformers' model.
        model: architecture of our model.
        source: our weights.
        rounded: data type to which the weights of the folder are rounded.

    Returns:
        Differences of the rotary frequencies, of the hidden states after each block, and of the logits; none if
        transformers has no model of this type, as may be with a plugin's.

    Raises:
        MismatchError: naming the first difference above ``TOLERANCE``, or tensors that transformers did not use.
        CheckpointError: naming tensors with NaN or infinite values, which make a comparison impossible.
        DamagedCheckpointError: when a file cannot be read.
    """
    if not _is_known(config):
        return []
    tokens_BS, positions_BS = sample_inputs(model)
    theirs = run_transformers(folder, config, tokens_BS, positions_BS, rounded)
    ours = run_own_model(model, source, tokens_BS, positions_BS)
    found = []
    if ours.angles.numel() and theirs.angles.numel():
        found.append(OutputDifference.between("rotary frequencies", ours.angles, theirs.angles))
    # theirs may have a layer for each residual layer of ours
    ends = [model.residual_layer(block) - 1 for block in range(1, model.num_layers)] + [-1]
    after_blocks = theirs.blocks if len(theirs.blocks) == model.num_layers else theirs.blocks[ends]
    for i, (a, b) in enumerate(zip(ours.blocks, after_blocks, strict=True)):
        found.append(OutputDifference.between(f"block {i}", a, b))
    found.append(OutputDifference.between("logits", ours.logits, theirs.logits))
    wrong = next((difference for difference in found if difference.relative > TOLERANCE), None)
    if wrong is not None:
        if wrong.absolute == float("inf"):
            extremes = {key: file.tensor(key).aminmax() for key, file in open_weights(folder).items()}  # NaN propagates
            odd = [key for key, (least, most) in extremes.items() if not (least.isfinite() and most.isfinite())]
            raise_if_any(folder, {"holds tensors with values that are NaN or infinite": odd})
        raise MismatchError(
            f"transformers computes other numbers from {folder} than this model: the first to differ is {wrong}; "
            f"the final {found[-1]}; rounding explains up to {TOLERANCE:g} of the largest"
        )
    return found


def sample_inputs(model: ModelConfig) -> tuple[Tensor, Tensor]:
    """Return random tokens and their positions, both ``[B, S]``.

    Rows are longer than the model's window, up to ``MAX_CHECKED_WINDOW`` (see :func:`uncovered_by_check`). With learned
    positions, the last row has the last positions. Rotary embedding uses small positions only, since the angles of
    large positions differ by rounding; the frequencies are compared instead.
    """
    window = largest_window(model) or 0
    length = SAMPLE_TOKENS + window if window <= MAX_CHECKED_WINDOW else SAMPLE_TOKENS
    length = min(length, model.max_position_embeddings or length)
    generator = torch.Generator().manual_seed(length)
    tokens_BS = torch.randint(model.vocab, (SAMPLE_ROWS, length), generator=generator)
    positions_BS = torch.arange(length).repeat(SAMPLE_ROWS, 1)
    if model.position_embedding_type == "learned_absolute" and model.max_position_embeddings is not None:
        positions_BS[-1] += model.max_position_embeddings - length
    return tokens_BS, positions_BS


def largest_window(model: ModelConfig) -> int | None:
    """Return the number of tokens beyond which a layer hides others, or None if none does."""
    windows = (model.pattern(layer).window for layer in range(model.num_layers))
    return max((window for window in windows if window is not None), default=None)


def uncovered_by_check(model: ModelConfig) -> str | None:
    """Return what the check does not cover because its rows are too short, or None."""
    window, positions = largest_window(model), model.max_position_embeddings
    length = sample_inputs(model)[0].shape[1]
    if window is None or window < length or (positions is not None and window >= positions):
        return None
    return f"the window of {window} tokens, because the rows compared have {length}"


@torch.no_grad()
def run_own_model(model: ModelConfig, source: WeightSource, tokens_BS: Tensor, positions_BS: Tensor) -> ModelOutputs:
    """Run our model on the weights of ``source``, in fp32, without layers for further tokens."""
    # the loss is not used: chunks of 1 token keep its memory small
    training = TrainingConfig(cross_entropy_chunk_size=1)
    chunk = build_on_meta(replace(model, make_vocab_size_divisible_by=1, mtp_num_layers=None), training)
    chunk.rotary = {t: RotaryEmbedding(model, t, torch.float32, torch.device("cpu")) for t in chunk.rotary}
    chunk.eval()
    head, norm = chunk.output_layer, chunk.final_layernorm
    if head is None or norm is None:
        raise ValueError("a whole model has a final norm and an output layer")

    def load(name: str) -> Tensor:
        spec = chunk.specs[name]
        value = torch.empty(spec.view)
        fill_in_blocks(source, name, spec.view, whole_box(spec.view), value)
        return value.view(spec.shape)

    weights = LazyWeightLoader(chunk, load, {"output_layer.weight": head.name})
    for name, module in chunk.named_modules():
        parts = name.endswith(("q_layernorm", "k_layernorm")) or isinstance(module, nn.ParameterDict)
        if parts:  # small, and applied by kernels that their parents call
            weights.load(module)
    blocks = _OutputRecorder(list(chunk.layers.values()), lambda out: out[0].sum().transpose(0, 1))
    normed = _OutputRecorder([norm], lambda out: out[1])
    chunk(None, MicroBatch.of_tokens(tokens_BS, positions_BS))
    weights.load(head)
    logits_SBV = head.logits(normed.stacked[0])
    weights.release(head)
    angles = _angles({table.kind: (rotary.frequencies, rotary.scale) for table, rotary in chunk.rotary.items()})
    return ModelOutputs(blocks.stacked, logits_SBV.transpose(0, 1), angles)


@torch.no_grad()
def run_transformers(
    folder: Path, config: Path, tokens_BS: Tensor, positions_BS: Tensor, rounded: torch.dtype = torch.float32
) -> ModelOutputs:
    """Run transformers' model on the files of ``folder``, with weights rounded to a data type, in fp32."""
    from transformers import AutoModelForCausalLM

    settings = _transformers_config(config)
    settings._experts_implementation = "eager"  # the others require widths that are multiples of 16 bytes
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            settings, attn_implementation="eager", dtype=torch.float32, trust_remote_code=False
        ).eval()
    angles = {}
    for module in model.modules():  # these buffers are computed, not stored
        buffers = module._non_persistent_buffers_set
        for name in buffers:
            setattr(module, name, torch.empty_like(getattr(module, name), device="cpu"))
        if buffers:
            model._init_weights(module)
        for name in (name for name in buffers if name.endswith("inv_freq") and "original" not in name):
            magnitude = getattr(module, name.replace("inv_freq", "attention_scaling"))
            angles["local" if name.startswith("sliding") else "global"] = getattr(module, name), magnitude
    tied = dict(model._tied_weights_keys) if settings.tie_word_embeddings else {}
    weights = _TransformersWeights(folder, f"{model.base_model_prefix}.", rounded)
    for name, buffer in [*model.named_buffers()]:
        if buffer.is_meta:  # stored, such as biases of experts
            module, _, last = name.rpartition(".")
            setattr(model.get_submodule(module), last, weights.load(name))
    lazy = LazyWeightLoader(model, weights.load, tied)
    for name, module in model.named_modules():
        if name.endswith("conv1d"):  # small, and applied by functions of their parents
            lazy.load(module)
    layers = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    blocks = _OutputRecorder(list(layers), lambda out: out[0] if isinstance(out, tuple) else out)
    mask_BS = torch.ones_like(tokens_BS)  # without a mask, transformers infers documents from the positions
    out = model(tokens_BS, position_ids=positions_BS, attention_mask=mask_BS, use_cache=False)
    count = settings.num_hidden_layers
    heads = (rf"layers\.{count + n}\." for n in range(getattr(settings, "num_mtp_layers", 0)))
    ignored = *IGNORED_BUFFERS, *(model._keys_to_ignore_on_load_unexpected or ()), *heads
    weights.refuse_unused({*tied, *ignored})
    return ModelOutputs(blocks.stacked, out.logits, _angles(angles))


def _is_known(path: Path) -> bool:
    """Return True if transformers has a model of the type in a config.json, its own or one that a plugin registers."""
    from transformers import CONFIG_MAPPING

    kind = str(read_options(path, "a Hugging Face model")["model_type"])
    return (model_families()[kind].known_as or kind) in CONFIG_MAPPING


def _transformers_config(path: Path) -> Any:
    """Return transformers' configuration in a config.json; remote code is not run."""
    from transformers import AutoConfig

    given = read_options(path, "a Hugging Face model")
    known_as = model_families()[str(given["model_type"])].known_as
    if known_as is None:
        return AutoConfig.from_pretrained(path, trust_remote_code=False)
    return AutoConfig.for_model(**given | {"model_type": known_as})


IGNORED_BUFFERS = (r"rotary_emb\.inv_freq", r"attn\.masked_bias")
"""Buffers that old versions of transformers stored with the weights."""


RENAMED = {
    "model.": "backbone.",
    ".mlp.": ".block_sparse_moe.",
    "lm_head.": "embed_out.",
    ".gate.moe_statics.": ".moe_statics.",
    ".router.weight": ".router.layer.weight",
    ".experts.gate_up_proj": ".input_linear.weight",
    ".experts.down_proj": ".output_linear.weight",
}
"""Parts of names in transformers 5 -> in the files: of Nemotron-H, Mixtral, GPT-NeoX, Ernie and Granite's
experts."""
EXPERT_MATRICES = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "up_proj": (("up_proj",),),
    "down_proj": (("down_proj",), ("w2",)),
}
"""Stacked expert parameters of transformers 5 -> names of each expert's matrices in the files: Qwen's, Mixtral's and
Nemotron's."""


class _TransformersWeights:
    """Tensors of a folder by transformers' names, in fp32; records which are used."""

    def __init__(self, folder: Path, prefix: str, rounded: torch.dtype) -> None:
        self._folder, self._prefix, self._rounded = folder, prefix, rounded
        self._files = open_weights(folder)
        self._used: set[str] = set()

    def load(self, name: str) -> Tensor:
        key = self._key(name)
        if key is None:
            mlp, _, parameter = name.rpartition(".experts.")
            experts = self._experts(mlp, EXPERT_MATRICES.get(parameter, ()))
            if experts:
                return torch.stack(experts)
            raise MismatchError(f"{self._folder} lacks {name}, which transformers needs")
        self._used.add(key)
        return self._files[key].tensor(key).to(self._rounded).to(torch.float32)

    def _key(self, name: str) -> str | None:
        """Return the key of a tensor in the files, with or without prefix, or by an old name; None if absent."""
        without = name.removeprefix(self._prefix)
        names = (name, without, *(n.replace(a, b) for a, b in RENAMED.items() for n in (name, without)))
        return next((key for key in names if key in self._files), None)

    def _experts(self, mlp: str, spellings: Sequence[tuple[str, ...]]) -> list[Tensor]:
        """Return the matrix of every expert, stored under one of the spellings; empty if there is none."""
        for matrices in spellings:
            experts: list[Tensor] = []
            while self._key(f"{mlp}.experts.{len(experts)}.{matrices[0]}.weight") is not None:
                expert = f"{mlp}.experts.{len(experts)}"
                experts.append(torch.cat([self.load(f"{expert}.{matrix}.weight") for matrix in matrices]))
            if experts:
                return experts
        return []

    def refuse_unused(self, ignored: Collection[str]) -> None:
        unused = [k for k in self._files if k not in self._used and not any(re.search(p, k) for p in ignored)]
        if unused:
            names = listed(unused, MAX_NAMES)
            raise MismatchError(f"transformers does not use these tensors of {self._folder}: {names}")


def _angles(rotaries: Mapping[str, tuple[Tensor, float]]) -> Tensor:
    """Return the logarithms of the frequencies and of the factors of cosine and sine, so that all count equally."""
    parts = [torch.cat((freqs, torch.tensor([factor]))) for _, (freqs, factor) in sorted(rotaries.items())]
    return torch.cat([*parts, torch.empty(0)]).double().log()


class _OutputRecorder:
    """Records the outputs of modules in one tensor.

    Separate tensors would fragment the memory between weights that are loaded and released.
    """

    def __init__(self, modules: Sequence[nn.Module], read: Callable[[Any], Tensor]) -> None:
        """Register hooks that record ``read(output)``, tensors of one shape, of every module."""
        self._count, self._read = len(modules), read
        self._outputs: Tensor | None = None
        for i, module in enumerate(modules):
            module.register_forward_hook(partial(self._record, i))

    @property
    def stacked(self) -> Tensor:
        """Recorded outputs, ``[modules, ...]``."""
        if self._outputs is None:
            raise ValueError("none of the modules has run")
        return self._outputs

    def _record(self, i: int, module: nn.Module, inputs: Any, output: Any) -> None:
        value = self._read(output)
        if self._outputs is None:
            self._outputs = value.new_empty(self._count, *value.shape)
        self._outputs[i] = value


SAMPLE_TEXTS = (
    "The quick brown fox doesn't jump; it's 3 feet off, isn't it? They'LL see.",
    "In 2024, 1234567 people paid $99.95 (or 3,14159 euros) at 10:45:30.",
    "  two spaces,\ttab,\n\n\nthree line feeds,\r\nand trailing spaces   ",
    "def mean(values):\n    total = sum(values)\n\treturn total / len(values)  # x_1 += 0x7F\n",
    "café, cafe\u0301, naïve, \ufb01ne, ½, \u2026 \u201cquoted\u201d \u2014 straße",
    "日本語のテキスト。 Привет, مرحبا १२३ 中文\uff0c한국어",
    "😀👍🏽 \U0001f468\u200d\U0001f469\u200d\U0001f467 \u00a0non-breaking\u200bzero-width CamelCase snake_case",
)
"""Texts on which tokenizers commonly differ: contractions, digits, white space, code, composed letters, scripts."""


def check_tokenizer(files: Mapping[str, bytes], config: Mapping[str, Any]) -> dict[str, bytes]:
    """Compare the exported tokenizer, as ``AutoTokenizer`` loads it, with the ids that training used.

    transformers 5 may ignore the rules in ``tokenizer.json`` and rebuild the tokenizer with those of the class that
    ``tokenizer_class`` names or, for some model types such as qwen2, with those of a fixed class.

    Args:
        files: the small files of the export, by name.
        config: content of config.json.

    Returns:
        The files to export: ``files``, with another ``tokenizer_class`` where only that one gives the same ids.
    """
    if TOKENIZER_JSON not in files:
        return dict(files)
    try:
        ours, _ = parse_tokenizer(files[TOKENIZER_JSON])
        ours.no_truncation()
        ours.no_padding()
        expected = [one.ids for one in ours.encode_batch(list(SAMPLE_TEXTS), add_special_tokens=False)]
    except Exception as error:  # the library raises no other class in encoding
        seen = f"the tokenizer's {TOKENIZER_JSON} cannot be read by the tokenizers library: {error}"
        raise CheckpointError(seen, "--tokenizer ANOTHER_FOLDER", "--no-check") from error

    settings = parse_json(files.get(TOKENIZER_CONFIG, b"{}")) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    settings.pop("auto_map", None)  # code that is never run
    generic = {**files, TOKENIZER_CONFIG: (json.dumps(settings, indent=2) + "\n").encode()}
    problem = ""
    for candidate in (dict(files), generic):
        try:
            found = _transformers_ids(candidate, config)
        except Exception as error:  # whatever the class it builds finds wrong with this vocabulary
            problem = f"cannot load the tokenizer: {error}"
            continue
        if found == expected:
            return candidate
        text, a, b = next((t, a, b) for t, a, b in zip(SAMPLE_TEXTS, expected, found, strict=True) if a != b)
        problem = f"gives other ids than the tokenizer of the run: {len(b)} ids for {len(a)} of {text!r}"
    raise MismatchError(
        f"AutoTokenizer of transformers {problem}; for model_type {config['model_type']} it does not follow "
        f"{TOKENIZER_JSON}. Export without the check, and load with transformers.PreTrainedTokenizerFast instead",
        "--no-check",
        "--tokenizer ANOTHER_FOLDER",
    )


def _transformers_ids(files: Mapping[str, bytes], config: Mapping[str, Any]) -> list[list[int]]:
    """Return the ids of ``SAMPLE_TEXTS`` from the tokenizer that ``AutoTokenizer`` loads from these files."""
    tokenizer = load_with_transformers({**files, CONFIG_FILE: json.dumps(config).encode()})
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in SAMPLE_TEXTS]
