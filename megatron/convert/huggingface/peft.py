"""Adapters in the format of PEFT: ``adapter_config.json`` and ``adapter_model.safetensors``, in both directions.

PEFT has an adapter per linear of transformers. The weight tables of `families` give the place of the rows of its
weight, and so of its B, among those of ours. Where a linear of transformers holds several parts of ours that have an A
each, such as the QKV projection of GPT-NeoX, its A stacks theirs and its B is zero outside their blocks: the rank is a
multiple of ours, and the sum the same.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.arguments.compatibility import compare_configs
from megatron.arguments.sources import resolve, to_dict
from megatron.checkpoint.durable_files import durable_rename, sync_folder, write_file
from megatron.checkpoint.errors import CheckpointError, raise_if_any
from megatron.checkpoint.format import whole_box
from megatron.checkpoint.save import save_sharded
from megatron.checkpoint.tensor_file import GlobalTensor, TensorFile, TensorFileWriter, TensorPart
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.errors import Problem, UserError
from megatron.config.model import ModelConfig
from megatron.config.option import MAX_SIZE
from megatron.config.precision import PrecisionConfig
from megatron.config.run import RunConfig
from megatron.config.schemes import HUGGING_FACE_PREFIX, split_scheme
from megatron.convert.base_model import BaseModel
from megatron.convert.huggingface.config import model_type_for, read_config, read_model_type, read_options, words
from megatron.convert.huggingface.convert import check_target, new_checkpoint, raise_if_overflow
from megatron.convert.huggingface.families import model_families
from megatron.convert.huggingface.keys import JsonObject
from megatron.convert.huggingface.weights import map_tensors, tensor_findings
from megatron.convert.saved_model import MergedWeights, SavedModel, describe_adapters
from megatron.convert.staging import disk_errors, removed_on_error
from megatron.convert.tokenizer_files import SmallFiles, files_to_carry, find_tokenizer_files
from megatron.convert.weight_source import ModelSource
from megatron.distributed.comm import Group
from megatron.distributed.sharding import Box, ShardSpec
from megatron.layers.adapter_parameters import is_adaptable, linear_parts, part_of_rows
from megatron.layers.context import DTYPES
from megatron.layers.parameters import gpt, trainable

ADAPTER_CONFIG_FILE = "adapter_config.json"
ADAPTER_WEIGHTS_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Of the names of all tensors of PEFT."""

LORA_A, LORA_B, LORA_MAGNITUDE = ".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector"
"""Suffixes of the names of tensors of PEFT."""


@dataclass(frozen=True)
class PeftLinear:
    """A linear of transformers, as some rows of one of ours."""

    ours: str  # global name of our linear
    rows: Tensor  # [its outputs], the row of ours
    part_of: Tensor  # [its outputs], the index of the row's part in `linear_parts`
    inputs: int
    transposed: bool  # transformers stores ``[in, out]``

    @property
    def parts(self) -> tuple[int, ...]:
        """The parts of ours that it holds."""
        return tuple(sorted({*self.part_of.tolist()}))

    def shapes(self, rank: int) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of A, B and the magnitudes of an adapter."""
        return (rank, self.inputs), (len(self.rows), rank), (len(self.rows),)


def peft_linears(kind: str, model: ModelConfig) -> dict[str, PeftLinear]:
    """Return the linears of a model that can have adapters, by their names in transformers.

    Args:
        kind: key of `model_families`.
        model: architecture.

    Raises:
        UserError: when the family has no place for some of our linears.
    """
    weights = {name: spec for name, spec in gpt(model).items() if is_adaptable(name, spec)}
    biases = {name.replace(".weight", ".bias"): replace(spec, view=spec.view[:-1]) for name, spec in weights.items()}
    places, family = map_tensors(kind, model, weights | biases), model_families()[kind]
    found = {}
    for name, weight in weights.items():
        ours = name.removesuffix(".weight")
        numbers, part_of = torch.arange(weight.shape[0]), torch.tensor(part_of_rows(weight))
        theirs: dict[str, Tensor] = {}
        for mapping in places[f"{ours}.bias"]:  # which has the rows of the weight, in the same order
            rows = theirs.setdefault(mapping.name.removesuffix(".bias"), numbers.new_empty(mapping.stored))
            mapping.arrange(rows).copy_(numbers.view(weight.view[:-1])[mapping.box.slices])
        transposed = places[name][0].order[0] == len(weight.view) - 1
        for each, rows in theirs.items():
            each = each.replace(family.prefix, family.loaded_prefix or family.prefix, 1)
            found[each] = PeftLinear(ours, rows, part_of[rows], weight.shape[1], transposed)
    return found


# ---- To PEFT ----


def to_peft(merged: MergedWeights, kind: str, base: str | None) -> tuple[JsonObject, dict[str, Tensor]]:
    """Return the content of ``adapter_config.json``, and the tensors of PEFT.

    Args:
        merged: the adapters.
        kind: model type of transformers, a key of `model_families`.
        base: name of the model for transformers, if there is one.
    """
    model, rank = merged.model, merged.model.lora_rank or 1
    linears = peft_linears(kind, model)
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    for name, linear in linears.items():
        parts = merged.adapted_parts(linear.ours)
        held = [part for part in linear.parts if part in parts]
        if not held:
            continue
        stacked = merged.adapter(f"{linear.ours}.lora_a").view(-1, rank, linear.inputs)
        blocks, b = [stacked[parts.index(part)] for part in held], merged.adapter(f"{linear.ours}.lora_b")[linear.rows]
        if held == [*linear.parts] and all(torch.equal(block, blocks[0]) for block in blocks):
            blocks = blocks[:1]
        else:
            b = torch.cat([b * (linear.part_of == part).unsqueeze(1) for part in held], 1)
        ranks[name] = len(blocks) * rank
        tensors |= {f"{name}{LORA_A}": torch.cat(blocks), f"{name}{LORA_B}": b}
        if model.lora_dora:
            tensors[f"{name}{LORA_MAGNITUDE}"] = merged.magnitudes(linear.ours)[linear.rows]
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": _number(model.lora_scale * rank),
        "lora_dropout": 0.0,
        "use_dora": model.lora_dora,
        "use_rslora": False,
        "bias": "none",
        "fan_in_fan_out": all(linears[name].transposed for name in ranks),
        "target_modules": _shortest_ends(ranks, linears),
        "rank_pattern": {name: each for name, each in ranks.items() if each != rank},
        "alpha_pattern": {name: _number(model.lora_scale * each) for name, each in ranks.items() if each != rank},
    }
    return config, {PREFIX + name: tensor.contiguous() for name, tensor in tensors.items()}


def _number(value: float) -> float:
    """Return a whole number as an int, as PEFT writes it."""
    return int(value) if value.is_integer() else value


def _shortest_ends(adapted: Collection[str], linears: Collection[str]) -> list[str]:
    """Return the shortest ends of names that select exactly the adapted linears."""
    for count in (1, 2):
        ends = {".".join(name.split(".")[-count:]) for name in adapted}
        if all(name in adapted for name in linears if name.endswith(tuple(f".{end}" for end in ends))):
            return sorted(ends)
    return sorted(adapted)


def export_peft(
    saved: SavedModel, folder: Path, dtype: str | None = None, model_type: str | None = None
) -> ModelConfig:
    """Write the adapters of a checkpoint as a folder that ``PeftModel.from_pretrained`` loads.

    Args:
        saved: the checkpoint.
        folder: must not exist, or be empty.
        dtype: ``fp32``, ``bf16`` or ``fp16``; None for that in which the adapters are stored.
        model_type: of the base in transformers; None for that of the base, or the first that computes the same.

    Returns:
        The architecture with the options of the adapters.

    Raises:
        UserError: when no Hugging Face model computes the same as the base.
        CheckpointError: when the checkpoint holds no adapters, or the folder is not empty.
        StorageError: when writing fails. Nothing is left behind.
    """
    if saved.base is None or saved.merged is None:
        raise CheckpointError(f"{saved.manifest.path} holds no adapters", "--save-hf DIR")
    flag, location = "--save-peft", saved.base.location
    check_target(folder, flag)
    base, run = RunConfig(model=saved.merged.base.model), RunConfig(model=saved.model)
    for problem in compare_configs(to_dict(base), resolve(run, 1), "exact", name="base").problems:
        raise CheckpointError(f"{saved.manifest.path}: {problem.sentence}", "--save-hf DIR")
    scheme, place = split_scheme(location)
    theirs = place if scheme == HUGGING_FACE_PREFIX else None
    config, tensors = to_peft(saved.merged, transformers_type(saved.merged.base, model_type), theirs)
    if dtype is not None:
        exact, tensors = tensors, {name: tensor.to(DTYPES[dtype]) for name, tensor in tensors.items()}
        for name, rounded in tensors.items():
            raise_if_overflow(name, rounded, exact[name])
    building = folder.with_name(f"{folder.name}.tmp{os.getpid()}")
    with disk_errors(building, flag), removed_on_error(building):
        building.mkdir(parents=True)
        entries = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
        with TensorFileWriter(building / ADAPTER_WEIGHTS_FILE, entries, {"format": "pt"}) as file:
            for name, tensor in tensors.items():
                file.write(name, tensor)
        write_file(building / ADAPTER_CONFIG_FILE, (json.dumps(config, indent=2) + "\n").encode())
        sync_folder(building)
        durable_rename(building, folder)  # replaces an empty folder
    return saved.merged.model


def transformers_type(base: ModelSource, wanted: str | None) -> str:
    """Return the model type of a base: ``wanted``, that of its folder, or the first that computes the same."""
    if wanted is None and base.config_file is not None:
        return read_model_type(read_config(base.config_file.parent), str(base.config_file))
    return model_type_for(base.model, wanted)


# ---- From PEFT ----


def find_named_base(folder: Path, pretrained: str | None) -> BaseModel:
    """Find the model of an adapter: ``pretrained``, or the one that its options name.

    Raises:
        UserError: when the adapter has options that are not supported.
        CheckpointError: when there is no such model, or the adapter names none.
    """
    named = read_adapter_config(folder).get("base_model_name_or_path")
    if pretrained is None and not isinstance(named, str):
        raise CheckpointError(f"{folder} does not name its base", f"--pretrained-checkpoint {HUGGING_FACE_PREFIX}DIR")
    return BaseModel.find(pretrained or f"{HUGGING_FACE_PREFIX}{named}")


class PeftAdapters:
    """An adapter of PEFT: a model whose weights are those of its base with the adapter added."""

    def __init__(self, folder: Path, base: BaseModel, source: ModelSource, model_type: str | None = None) -> None:
        """Read the adapter of a folder.

        Args:
            folder: with the files of PEFT.
            base: the model that it belongs to.
            source: weights of that model.
            model_type: as of :func:`export_peft`.

        Raises:
            UserError: when the adapter has options that are not supported.
            CheckpointError: when its tensors do not fit its base.
            DamagedCheckpointError: when its file cannot be read.
        """
        self.folder, self.base, self._source = folder, base, source
        self.adapted, self.tensors = from_peft(folder, transformers_type(source, model_type), source.model)
        self._merged = MergedWeights(source, _InMemory(self.tensors), self.adapted)
        self.model, self.precision, self.config_file = source.model, source.precision, source.config_file
        self.specs: Mapping[str, ShardSpec] = gpt(self.model)
        self.notes: Sequence[str] = (f"{describe_adapters(self.adapted)}, of {base.location}", *source.notes)

    def read(self, name: str, view: tuple[int, ...], box: Box) -> Tensor:
        """Return the elements of ``box`` of a tensor."""
        return self._merged.read(name, view, box)

    def small_files(self) -> SmallFiles:
        """Return the tokenizer files of the adapter, or else of its base."""
        return files_to_carry(find_tokenizer_files(self.folder), self._source.small_files())


class _InMemory:
    """Tensors by name, as a source."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def read(self, name: str, view: tuple[int, ...], box: Box) -> Tensor:
        """Return the elements of ``box`` of a tensor."""
        return self._tensors[name].view(view)[box.slices]


def import_peft(adapters: PeftAdapters, save: Path) -> tuple[Path, ModelConfig]:
    """Write an adapter of PEFT as a checkpoint of step 0, from which a run can start.

    Args:
        adapters: to write.
        save: a ``--save`` folder without checkpoints.

    Returns:
        The checkpoint, and the architecture with the options of the adapters.

    Raises:
        CheckpointError: when the folder holds checkpoints.
        StorageError: when writing fails.
    """
    path, specs = new_checkpoint(save), gpt(adapters.adapted)
    stored = {}
    for name, tensor in adapters.tensors.items():
        shape, view = specs[name].shape, specs[name].view
        stored[name] = GlobalTensor(shape, view, tensor.dtype, (TensorPart(whole_box(view), tensor.view(view)),))
    config = RunConfig(
        model=adapters.adapted,
        precision=PrecisionConfig(params_dtype=adapters.precision),
        checkpoint=CheckpointConfig(pretrained_checkpoint=adapters.base.location),
    )
    state = {"iteration": 0, "consumed_samples": 0, "base": adapters.base.record}
    save_sharded(path, stored, state, to_dict(resolve(config, 1)), Group(), adapters.small_files())
    return path, adapters.adapted


@dataclass(frozen=True)
class _Module:
    """The adapter of a linear of transformers."""

    linear: PeftLinear
    a: Tensor
    b: Tensor
    magnitude: Tensor | None
    scale: float

    def split(self) -> dict[int, tuple[Tensor, Tensor]]:
        """Return A and B of each part of ours that has an adapter; B with all rows.

        Blocks of B are recognised, as `to_peft` writes them. Otherwise all parts have the same A.
        """
        parts = self.linear.parts
        used = [part for part in parts if self.b[self.linear.part_of == part].any()]
        if len(parts) == 1 or not used or len(self.a) % len(used) or (self.magnitude is not None and used != [*parts]):
            return dict.fromkeys(parts, (self.a, self.b))
        blocks = self.b.view(len(self.b), len(used), -1)
        own = self.linear.part_of.unsqueeze(1) == torch.tensor(used)
        if blocks[~own].any():
            return dict.fromkeys(parts, (self.a, self.b))
        return {part: (a, blocks[:, i]) for i, (part, a) in enumerate(zip(used, self.a.chunk(len(used))))}


def from_peft(folder: Path, kind: str, base: ModelConfig) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Read an adapter in PEFT's format.

    Ranks that differ are padded with zeros, which training leaves at zero.

    Args:
        folder: with the files of PEFT.
        kind: model type of transformers, a key of `model_families`.
        base: architecture of the model.

    Returns:
        The architecture with the options of the adapters, and their tensors by our names.

    Raises:
        UserError: when the adapter has options that are not supported.
        CheckpointError: when its tensors do not fit its options or the model.
        DamagedCheckpointError: when its file cannot be read.
    """
    modules = _read_modules(folder, read_adapter_config(folder), peft_linears(kind, base))
    splits = [(module, module.split()) for module in modules]
    rank = max(len(a) for _, parts in splits for a, _ in parts.values())
    scale = Counter(module.scale for module in modules).most_common(1)[0][0]
    unlike = [f"{module.scale:g}" for module in modules if not 2**-64 < module.scale / scale < 2**64]
    raise_if_any(folder, {f"has scales that one matrix cannot hold beside {scale:g}": unlike})
    adapted: dict[str, set[int]] = defaultdict(set)
    for module, parts in splits:
        adapted[module.linear.ours] |= parts.keys()
    dora = modules[0].magnitude is not None
    targets = _targets(base, adapted)
    model = replace(base, lora_rank=rank, lora_alpha=scale * rank, lora_target=targets, lora_dora=dora)
    dtype = reduce(torch.promote_types, (module.a.dtype for module in modules), torch.float32)
    tensors = {name: torch.zeros(spec.shape, dtype=dtype) for name, spec in trainable(gpt(model)).items()}
    for module, parts in splits:
        linear = module.linear
        stacked = tensors[f"{linear.ours}.lora_a"].view(-1, rank, linear.inputs)
        for part, (a, b) in parts.items():
            own = linear.part_of == part
            stacked[sorted(adapted[linear.ours]).index(part), : len(a)] = a
            factor = 1.0 if math.isclose(module.scale, scale) else module.scale / scale
            tensors[f"{linear.ours}.lora_b"][linear.rows[own], : len(a)] = b[own].to(dtype) * factor
        if module.magnitude is not None:
            tensors[f"{linear.ours}.lora_magnitude"][linear.rows] = module.magnitude.to(dtype)
    return model, tensors


def _targets(base: ModelConfig, adapted: Mapping[str, Collection[int]]) -> tuple[str, ...]:
    """Return the patterns of ``lora_target`` that match these parts of linears, by the linear's global name."""
    by_name: dict[str, dict[str, Collection[int]]] = defaultdict(dict)
    for linear, parts in adapted.items():
        by_name[linear.rpartition(".")[2]][linear] = parts
    found, specs = [], gpt(base)
    for name, linears in by_name.items():
        first, parts = next(iter(linears.items()))
        names = linear_parts(specs[f"{first}.weight"])
        in_all = len(linears) == base.num_layers and all(each == parts for each in linears.values())
        for linear, adapted_parts in {name: parts}.items() if in_all else linears.items():
            whole = len(adapted_parts) == len(names)
            found += [linear] if whole else [f"{linear}.{names[part]}" for part in sorted(adapted_parts)]
    return tuple(found)


_NOTES = words(
    """r lora_alpha rank_pattern alpha_pattern use_dora use_rslora target_modules exclude_modules layers_to_transform
    layers_pattern fan_in_fan_out lora_dropout base_model_name_or_path revision inference_mode peft_version auto_mapping
    runtime_config qalora_group_size megatron_core eva_config ensure_weight_tying"""
)
"""Options of PEFT that are read, or that do not change what a trained adapter computes."""

_SUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM", None),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),  # others change the weights of the base
}
"""Options of PEFT with the only supported values; others must be null, false or empty."""


def read_adapter_config(folder: Path) -> JsonObject:
    """Read ``adapter_config.json``.

    Raises:
        UserError: when it cannot be read, or has options that are not supported, naming all.
    """
    path = folder / ADAPTER_CONFIG_FILE
    config = read_options(path, "an adapter of PEFT")
    problems = []
    for name, value in {"peft_type": None, **config}.items():
        if name in _SUPPORTED and value not in _SUPPORTED[name]:
            allowed = " or ".join(map(json.dumps, _SUPPORTED[name]))
            problems.append(f"{name} {json.dumps(value)} is not supported, only {allowed}")
        elif name not in _NOTES and name not in _SUPPORTED and value:
            problems.append(f"{name} {json.dumps(value)} is not supported")
    problems += [f"{name} is {json.dumps(config.get(name))}, not {what}" for name, what in _odd_values(config)]
    if problems:
        raise UserError([Problem("E851", f"{path}: {problem}") for problem in problems])
    return config


def _odd_values(config: JsonObject) -> Iterator[tuple[str, str]]:
    """Yield the options that have another type than in PEFT, and the type."""

    def is_positive(value: Any, whole: bool) -> bool:
        return type(value) in ((int,) if whole else (int, float)) and 0 < value < MAX_SIZE

    for name, pattern_name, whole in (("r", "rank_pattern", True), ("lora_alpha", "alpha_pattern", False)):
        kind = "whole number" if whole else "number"
        if not is_positive(config.get(name), whole):
            yield name, f"a {kind} above 0"
        pattern = config.get(pattern_name) or {}
        if not isinstance(pattern, dict) or not all(is_positive(value, whole) for value in pattern.values()):
            yield pattern_name, f"an object of {kind}s above 0"
        elif not all(re.fullmatch(r"\^?[\w.]+", end) for end in pattern):
            yield pattern_name, "an object with ends of names, without regular expressions"


def _read_modules(folder: Path, config: JsonObject, linears: Mapping[str, PeftLinear]) -> list[_Module]:
    """Read the adapters of all linears of transformers, after a check of names, shapes and types."""
    path = folder / ADAPTER_WEIGHTS_FILE
    if not path.exists():
        pickled = any(folder.glob("adapter_model.*"))
        reason = f"pickled weights, which can run any code; only {path.name} is read" if pickled else f"no {path.name}"
        raise CheckpointError(f"{folder} holds {reason}")
    file = TensorFile(path)
    suffixes = (LORA_A, LORA_B, LORA_MAGNITUDE) if config.get("use_dora") else (LORA_A, LORA_B)
    held = {key.removeprefix(PREFIX).removesuffix(suffix) for key in file.keys for suffix in suffixes}
    adapted = held & linears.keys() | _targeted(config, linears)
    ranks = _values_of_pattern(config, "rank_pattern", sorted(adapted), config["r"])
    alphas = _values_of_pattern(config, "alpha_pattern", adapted, config["lora_alpha"])
    expected = {
        f"{PREFIX}{name}{suffix}": shape
        for name, rank in ranks.items()
        for suffix, shape in zip(suffixes, linears[name].shapes(rank))
    }
    strange = {"holds tensors that no adapter of this model has": {*file.keys} - expected.keys()}
    raise_if_any(path, tensor_findings(dict.fromkeys(file.keys, file), expected, torch.float64) | strange)
    if not ranks:
        raise CheckpointError(f"{path} holds no adapter")
    modules = []
    for name, rank in ranks.items():
        a, b, *magnitude = (file.tensor(f"{PREFIX}{name}{suffix}") for suffix in suffixes)
        scale = alphas[name] / (math.sqrt(rank) if config.get("use_rslora") else rank)
        modules.append(_Module(linears[name], a, b, next(iter(magnitude), None), scale))
    return modules


def _targeted(config: JsonObject, names: Collection[str]) -> set[str]:
    """Return the linears that a list of ``target_modules`` selects. Regular expressions are not evaluated."""
    if any(config.get(option) for option in ("exclude_modules", "layers_to_transform")):
        return set()
    targets = config.get("target_modules")
    if not isinstance(targets, list):
        return {*names} if targets == "all-linear" else set()
    ends = {end for end in targets if isinstance(end, str)}
    return {name for name in names if not ends.isdisjoint(_ends(name))}


def _values_of_pattern(config: JsonObject, option: str, names: Iterable[str], default: Any) -> dict[str, Any]:
    """Return the value of each linear in a ``rank_pattern`` or ``alpha_pattern``: that of the first end that fits."""
    pattern = {end: (n, value) for n, (end, value) in enumerate((config.get(option) or {}).items())}
    usual = len(pattern), default
    return {name: min(pattern.get(end, usual) for end in _ends(name))[1] for name in names}


def _ends(name: str) -> list[str]:
    """Return the ways to select a name: ``^name``, or its end as whole words."""
    parts = name.split(".")
    return [f"^{name}", *(".".join(parts[start:]) for start in range(len(parts)))]
