"""Model card of an exported checkpoint: how it was trained, from the checkpoint alone, without private paths."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from math import prod
from pathlib import Path, PurePath
from typing import Any

from megatron.arguments.compatibility import readable_config
from megatron.arguments.sources import resolve
from megatron.arguments.summary import describe_mixers, training_rows
from megatron.arguments.validate import is_met
from megatron.checkpoint.format import Manifest
from megatron.config.data_paths import data_sources, unique_names
from megatron.config.errors import UserError
from megatron.config.model import ModelConfig
from megatron.config.privacy import redact
from megatron.config.run import RunConfig
from megatron.config.settings import SETTINGS
from megatron.config.text import counted, package_version, printable
from megatron.convert.saved_model import describe_adapters
from megatron.layers.parameters import num_parameters

CARD_FILE = "README.md"
OTHER_CARD_FILE = "TRAINING.md"
"""Name of the card beside another one, which came with the tokenizer."""


def model_card(manifest: Manifest, model: ModelConfig, architecture: str, dtype: str) -> bytes:
    """Return the card of a model.

    Args:
        manifest: of its checkpoint.
        model: with the size of its vocabulary.
        architecture: class of transformers.
        dtype: data type of the weights.
    """
    rows = {
        "architecture": f"{architecture}: {_shape(model)}",
        "parameters": f"{num_parameters(model):,}, in {dtype}",
        "vocabulary": f"{model.vocab_size:,}",
        "positions": f"{model.max_position_embeddings:,}",
    }
    if "optimizer" in manifest.state:  # otherwise there are weights alone
        rows |= dict(_training(manifest))
    versions = f"{package_version()}, transformers {importlib.metadata.version('transformers')}"
    rows["exported with"] = versions
    cells = {
        name: redact(printable(text)).replace("\n", " ").replace("|", r"\|") for name, text in rows.items() if text
    }
    lines = [f"| {name} | {cell} |" for name, cell in cells.items()]
    head = ["---", "library_name: transformers", "pipeline_tag: text-generation", "---", "", f"# {architecture}", ""]
    return "\n".join([*head, "| | |", "|---|---|", *lines, ""]).encode()


def _shape(model: ModelConfig) -> str:
    parts = [f"{model.num_layers} layers", f"hidden {model.hidden_size}", *describe_mixers(model)]
    if model.hybrid_layer_pattern is not None:
        parts[0] = f"{model.residual_layers} layers `{model.hybrid_layer_pattern}`"
    if model.dense_layers:
        parts.append(f"MLP {model.ffn}")
    if model.num_experts:
        parts.append(f"{model.moe_router_topk} of {model.num_experts} experts of width {model.expert_ffn}")
        if model.dense_layers:
            parts[-1] += f" in {model.expert_blocks} layers"
    if model.num_experts and model.moe_shared_expert_intermediate_size:
        parts.append(f"a shared expert of width {model.moe_shared_expert_intermediate_size}")
    if model.prediction_depths:
        parts.append(f"{counted(model.prediction_depths, 'layer')} for further tokens")
    return ", ".join(parts)


def _start(load: str) -> str:
    """Return ``--load`` with the last name of a folder only, which may be private."""
    return load if re.fullmatch(r"hf:[\w.-]+/[\w.-]+", load) else f"a model or checkpoint in {Path(load).name}"


def _training(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Yield the rows of a run; for a run of another program, what is known of it."""
    state = manifest.state
    steps, samples = state.get("iteration"), state.get("consumed_samples")
    config = readable_config(manifest.config)
    known = {name for group in manifest.config.values() for name in _mapping(group)}
    written_by = _mapping(state.get("written_by"))
    layout = _mapping(written_by.get("layout"))
    ranks = prod(size for axis in ("pp", "dp", "cp", "tp") if isinstance(size := layout.get(axis), int))
    if isinstance(steps, int) and isinstance(samples, int):
        tokens = f", {samples * config.training.seq_length:,} tokens" if "seq_length" in known else ""
        yield "trained for", f"{steps:,} steps, {samples:,} samples{tokens}"
    if load := config.checkpoint.load:
        yield "start of the run", _start(load)
    if isinstance(base := _mapping(state.get("base")).get("location"), str):
        yield "adapters", f"{describe_adapters(config.model)}, merged into {_start(base)}"
    for split, loss in _mapping(state.get("losses")).items():
        yield f"last loss, {split}", f"{loss:.4f}" if isinstance(loss, float) else ""
    rows: dict[str, str] = {}
    if "program" not in written_by:  # the rows join options, of which other programs have only some
        with suppress(UserError, ValueError, ArithmeticError):  # options that contradict each other
            config = resolve(config, ranks)
            rows = training_rows(config, ranks)
    yield from ((name, rows[name]) for name in ("batch", "ramp", "optimizer", "diloco", "precision") if name in rows)
    yield "optimizer options", _optimizer_options(config, known)
    yield from _data(config, _mapping(_mapping(state.get("data")).get("fingerprints")))
    programs = [str(written_by[name]) for name in ("program", "version") if name in written_by]
    programs += [f"torch {written_by['torch']}"] if "torch" in written_by else []
    yield "trained with", ", ".join([*programs, counted(ranks, "rank")])


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _optimizer_options(config: RunConfig, known: Collection[str]) -> str:
    """Return the known options of the optimizer and its schedules that have an effect."""
    optimizer = (s for s in SETTINGS.values() if s.group == "optimizer" and s.name in known)
    used = (s for s in optimizer if all(is_met(n, config) for n in s.option.needs))
    values = ((setting, setting.value_in(config)) for setting in used)
    return ", ".join(f"{setting.name} {setting.show(value)}" for setting, value in values if value not in (None, ()))


def _data(config: RunConfig, fingerprints: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the names of the datasets of each split, without their folders, and fingerprints."""
    try:
        sources = data_sources(config.data)
    except (UserError, OSError):  # the file that lists them is gone
        sources = {}
    for split in {**sources, **fingerprints}:
        parts = []
        if split in sources:
            blend = sources[split].blend
            names = unique_names(blend.prefixes)
            weights = blend.weights or ()
            parts = [f"{w:g} {name}" for w, name in zip(weights, names, strict=True)] if weights else [*names]
        elif config.data.generated:
            parts = [config.data.plugin_dataset or "generated tokens"]
        elif config.data.chat_data_path:
            paths = config.data.chat_data_path if split == "train" else config.data.valid_chat_data_path
            parts = [PurePath(path).name for path in paths]
        if split in fingerprints:
            parts.append(f"fingerprint {fingerprints[split]}")
        yield f"data, {split}", ", ".join(parts)
