"""Conversion between a Hugging Face ``config.json`` and `ModelConfig`, without torch or transformers.

Unsupported values and unknown keys are refused by name, because they may change what the model computes.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from megatron.arguments.checks.checkpoint import link_problems
from megatron.arguments.validate import find_problems
from megatron.config.errors import Problem, UserError
from megatron.config.files import TABLE_FILE_BYTES, parse_json, read_small
from megatron.config.model import ModelConfig
from megatron.config.run import RunConfig
from megatron.config.schemes import HUGGING_FACE_PREFIX
from megatron.config.training import TrainingConfig
from megatron.convert.huggingface.families import MISSING, model_families
from megatron.convert.huggingface.keys import (
    ConfigKey,
    FieldValues,
    JsonObject,
    ModelFamily,
    UnsupportedConfigError,
    effective_options,
    exported,
    read_bool,
)
from megatron.data.errors import DataError

CONFIG_FILE = "config.json"
WEIGHTS_INDEX_FILE = "model.safetensors.index.json"
TIE_KEY = "tie_word_embeddings"
SPECIAL_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Keys of config.json and generation_config.json with the ids of special tokens."""


def words(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())


_NOTES = words(
    """architectures model_type transformers_version _name_or_path name_or_path dtype torch_dtype use_cache
    bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id tokenizer_class prefix
    attn_implementation _attn_implementation _attn_implementation_autoset output_attentions output_hidden_states
    return_dict torchscript use_bfloat16 tf_legacy_loss chunk_size_feed_forward gradient_checkpointing
    finetuning_task task_specific_params problem_type id2label label2id num_labels
    summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout
    n_ctx auto_map cache_implementation pretraining_tp reorder_and_upcast_attn"""
)
"""Keys that do not change what a language model computes: metadata, other heads, implementation choices."""

_GENERATION = words(
    """max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k
    top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
    num_return_sequences output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id
    remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens"""
)
"""Settings of text generation, which older versions of transformers store in config.json."""

_NOT_HERE: Mapping[str, tuple[Any, ...]] = {
    "is_encoder_decoder": (False,),
    "is_decoder": (False, True),  # a decoder-only model is one either way
    "tie_encoder_decoder": (False,),
    "cross_attention_hidden_size": (None,),
    "pruned_heads": ({}, None),
}
"""Keys of all model types with the only supported values."""

FP8_BLOCK = (128, 128)
"""Rows and columns of a block in DeepSeek's FP8."""


def fp8_block(config: JsonObject) -> tuple[int, int]:
    """Return rows and columns of the blocks of weights in FP8."""
    height, width = (config.get("quantization_config") or {}).get("weight_block_size", FP8_BLOCK)
    return height, width


def _unsupported_quantization(quantization: Any) -> str | None:
    """Return what is not supported of a ``quantization_config``; None if the weights can be dequantised."""
    if quantization is None:
        return None
    options = quantization if isinstance(quantization, dict) else {}
    method, block = options.get("quant_method"), options.get("weight_block_size", FP8_BLOCK)
    in_blocks = isinstance(block, list | tuple) and [type(each) for each in block] == [int, int] and min(block) > 0
    if method == "mxfp4" or (method == "fp8" and options.get("fmt", "e4m3") == "e4m3" and in_blocks):
        return None
    return f"weights quantised with {method} are not supported, only fp8 (e4m3) in blocks, and mxfp4"


MODEL_FILES = ("*.json", "model*.safetensors", "tokenizer*", "*.txt", "*.jinja")
"""Files of a model on the hub that are downloaded."""


def model_folder(name: str | Path, files: tuple[str, ...] = MODEL_FILES) -> Path:
    """Return the folder of a Hugging Face model: ``name``, or where ``files`` of ``org/name`` on the hub are cached.

    Raises:
        UserError: when there is no such folder, and the download fails.
    """
    if os.path.exists(name) or not re.fullmatch(r"[\w.-]+/[\w.-]+", str(name)):
        return Path(name)
    from megatron.data.tokenizers.huggingface import resolve_hub_name  # imports libraries that a folder does not need

    try:
        return resolve_hub_name(name, files, f"{HUGGING_FACE_PREFIX}DIR in place of {HUGGING_FACE_PREFIX}{name}")
    except DataError as error:
        raise UserError([Problem("E850", error.seen, error.fixes)]) from None


def refuse_outside_links(folder: Path, files: Iterable[Path] | None = None) -> None:
    """Raise UserError if ``files``, by default those of a Hugging Face model in the folder, lie outside of it."""
    if found := list(link_problems(folder, files)):
        raise UserError(found)


def read_config(folder: Path) -> JsonObject:
    """Read the ``config.json`` of a folder, or of ``org/name`` on the hub; else nanotron's configuration there.

    Raises:
        UserError: when there is none, or it is not a JSON object.
    """
    folder = model_folder(folder, (CONFIG_FILE,))
    if os.path.isfile(folder / NANOTRON_CONFIG_FILE) and not os.path.isfile(folder / CONFIG_FILE):
        return _from_nanotron(folder / NANOTRON_CONFIG_FILE)
    return read_options(folder / CONFIG_FILE, "a Hugging Face model")


NANOTRON_CONFIG_FILE = "model_config.json"
NANOTRON_ONLY = words("is_llama_config rope_interleaved")
"""Keys of nanotron's Llama besides those of Hugging Face."""


def _from_nanotron(path: Path) -> JsonObject:
    """Return the config.json for the model of nanotron's configuration."""
    options = read_options(path, "a model of nanotron")
    if options.get("is_llama_config") is not True:
        raise UserError([Problem("E851", f"{path}: only nanotron's Llama is supported, with is_llama_config true")])
    return {"model_type": "llama"} | {key: value for key, value in options.items() if key not in NANOTRON_ONLY}


def nanotron_rotates_pairs(folder: Path | None) -> bool:
    """Return True if the channels of a rotary pair are neighbours: nanotron's default before ``rope_interleaved``."""
    path = None if folder is None else folder / NANOTRON_CONFIG_FILE
    return path is None or not path.is_file() or read_options(path, "").get("rope_interleaved", True) is not False


def read_options(path: Path, kind: str) -> JsonObject:
    """Read the JSON object in a file that every folder of a ``kind`` has.

    Raises:
        UserError: when there is none.
    """
    folder = path.parent
    try:
        options = parse_json(read_small(path))
    except FileNotFoundError:
        fixes = () if os.path.exists(folder) else (f"hf download ORG/{folder.name} --local-dir {folder}",)
        raise UserError([Problem("E850", f"{folder} holds no {path.name}, so it is not {kind}", fixes)]) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError([Problem("E850", f"{path} cannot be read as JSON: {reason}")]) from None
    if not isinstance(options, dict):
        raise UserError([Problem("E850", f"{path} holds {type(options).__name__}, not an object")])
    return options


def read_model_values(folder: Path) -> FieldValues:
    """Return the fields of `ModelConfig`, by name, that a folder's ``config.json`` determines.

    Layers for further tokens (MTP) may be missing in the files: transformers does not use them, and saves none.

    Raises:
        UserError: when it cannot be read, or the model is not supported.
    """
    values = model_config_values(read_config(folder), str(folder / CONFIG_FILE))
    if values.get("mtp_num_layers") is not None and not _stores_layer(folder, values["num_layers"]):
        values["mtp_num_layers"] = None
    return values


def _stores_layer(folder: Path, layer: int) -> bool:
    """Return False if the weights of a folder can be read and have no such layer."""
    files, index = sorted(folder.glob("model*.safetensors")), folder / WEIGHTS_INDEX_FILE
    try:
        if index.exists():
            names = [*parse_json(read_small(index, TABLE_FILE_BYTES))["weight_map"]]
        elif files:
            with safe_open(files[0], "numpy") as header:
                names = [*header.offset_keys()]
        else:
            return True
    except (OSError, ValueError, KeyError, TypeError, SafetensorError):  # who opens the weights reports it
        return True
    return any(f"layers.{layer}." in str(name) for name in names)


def read_model_config(folder: Path) -> ModelConfig:
    """Read the architecture from a folder's config.json.

    Raises:
        UserError: when there is no config.json, or its options are unsupported or contradict each other.
    """
    model = ModelConfig(**read_model_values(folder))
    check_model_config(folder / CONFIG_FILE, model)
    return model


def check_model_config(where: object, model: ModelConfig) -> None:
    """Raise UserError with all contradictions between the options of a model that was read from ``where``."""
    run = RunConfig(model=model, training=TrainingConfig(seq_length=model.max_position_embeddings or 1))
    found = [p for p in find_problems(run, 1) if p.code == "E600" or p.code.startswith("E1")]
    if found:
        raise UserError([replace(problem, sentence=f"{where}: {problem.sentence}", fixes=()) for problem in found])


def read_model_type(config: JsonObject, where: str) -> str:
    """Return the model type of a config.json, a key of `model_families`."""
    kind, families = str(config.get("model_type")), model_families()
    if kind not in families:
        reason = f": it needs {MISSING[kind]}" if kind in MISSING else f", only {', '.join(families)}"
        sentence = f"{where}: model_type {kind!r} is not supported{reason}"
        raise UserError([Problem("E851", sentence)])
    architectures = config.get("architectures")
    named = architectures if isinstance(architectures, list) else [architectures]
    supported = families[kind].architecture
    if architectures and supported not in named:
        sentence = f"{where}: architectures {', '.join(map(str, named))}; only {supported} is supported for {kind}"
        raise UserError([Problem("E851", sentence)])
    return kind


def model_config_values(config: JsonObject, where: str) -> FieldValues:
    """Return the fields of `ModelConfig`, by name, that a config.json determines.

    Sizes that equal the computed defaults of `ModelConfig` (one key/value head per query head, heads that split the
    hidden size) are None, as in a preset.

    Args:
        config: content of config.json.
        where: its path, for messages.

    Raises:
        UserError: naming every unknown key and unsupported value.
    """
    family = model_families()[read_model_type(config, where)]
    values: FieldValues = {"num_query_groups": None, "kv_channels": None} | family.always
    problems = [Problem("E851", f"{where}: {sentence}", fixes) for sentence, fixes in _unsupported(config, family)]

    def read_tie(config: JsonObject) -> FieldValues:
        return {"untie_embeddings_and_output_weights": not read_bool(config, TIE_KEY, family.tied_by_default)}

    for read in (*(row.read for row in family.keys), read_tie):
        try:
            values |= read(config)
        except UnsupportedConfigError as refusal:
            problems.append(Problem("E851", f"{where}: {refusal}"))
    if problems:
        raise UserError(list(dict.fromkeys(problems)))
    heads = values.get("num_attention_heads", 1)  # a model without attention has none
    if values["num_query_groups"] == heads:
        values["num_query_groups"] = None
    if values["kv_channels"] is not None and values["kv_channels"] * heads == values["hidden_size"]:
        values["kv_channels"] = None
    head_dim = values["kv_channels"] or values["hidden_size"] // max(1, heads)
    if head_dim > 0 and values.get("softmax_scale") == head_dim**-0.5:
        values["softmax_scale"] = None
    return values


def _unsupported(config: JsonObject, family: ModelFamily) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield a sentence and fixes for every key with an unsupported value, and for every unknown key."""
    fixed = {**_NOT_HERE, **family.fixed}
    known = {name for row in family.keys for name in row.names} | {*fixed, TIE_KEY} | _NOTES | _GENERATION
    for name, value in config.items():
        if name == "quantization_config":
            if sentence := _unsupported_quantization(value):
                yield sentence, ()
        elif name in fixed and value not in fixed[name]:
            yield f"{name} {json.dumps(value)} is not supported, only {' or '.join(map(json.dumps, fixed[name]))}", ()
        elif name not in known:
            fix = f"remove {name} from config.json if the model computes the same without it"
            yield f"{name} {json.dumps(value)} is an unknown key", (fix,)


def model_type_for(model: ModelConfig, wanted: str | None = None) -> str:
    """Return the first model type of `model_families` that computes exactly the same as ``model``.

    Args:
        model: architecture.
        wanted: the only model type to consider; None for all.

    Raises:
        UserError: when there is none, naming the options that the closest model types lack.
    """
    model, families = exported(model), model_families()
    if wanted is not None and wanted not in families:
        raise UserError([Problem("E852", f"there is no model type {wanted}, only {', '.join(families)}")])
    effective = effective_options(model)
    lacking = {kind: family.lacks(model, effective) for kind, family in families.items() if wanted in (None, kind)}
    best = min(lacking, key=lambda kind: len(lacking[kind]))
    if not lacking[best]:
        return best
    problems = []
    for kind, options in lacking.items():
        if len(options) == len(lacking[best]):
            settings = ", ".join(f"{option} {getattr(model, option)}" for option in options)
            problems.append(Problem("E852", f"Hugging Face's {kind} has no {settings}"))
    raise UserError(problems)


def build_config_json(
    model: ModelConfig, dtype: str = "float32", special: JsonObject | None = None, kind: str | None = None
) -> FieldValues:
    """Return the content of the config.json for ``model``. Dropout rates that the family does not have are left out.

    Args:
        model: with vocabulary size and number of positions set.
        dtype: torch's name of the data type of the stored weights, such as ``bfloat16``.
        special: values of ``SPECIAL_TOKEN_IDS``; null when not given.
        kind: the model type; None for the first that can express the model.

    Raises:
        UserError: when no family computes exactly the same, or a size is not set.
    """
    model = exported(model)
    kind = model_type_for(model, kind)
    family = model_families()[kind]
    keys = {row.ours for row in family.keys if isinstance(row, ConfigKey)}
    for name in ("vocab_size", "max_position_embeddings"):
        if getattr(model, name) is None and name in keys:
            flag = f"--{name.replace('_', '-')} N"
            raise UserError([Problem("E852", f"{name} is not set, and config.json requires it", (flag,))])
    written: FieldValues = {}
    for row in family.keys:
        written |= row.write(model)
    return {
        "architectures": [family.architecture],
        "model_type": kind,
        **written,
        **{name: allowed[0] for name, allowed in family.fixed.items()},
        TIE_KEY: not model.untie_embeddings_and_output_weights,
        **{name: (special or {}).get(name) for name in SPECIAL_TOKEN_IDS},
        "dtype": dtype,  # transformers 5 and vLLM
        "torch_dtype": dtype,  # earlier ones
    }
