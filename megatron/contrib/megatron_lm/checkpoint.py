"""Megatron-LM's checkpoints as checkpoints of ours: the table of tensors, the state and the configuration of the run.

`read_checkpoint` returns a manifest whose chunks are places in Megatron-LM's own files, so that everything that reads
checkpoints reads these. Neither Megatron-LM nor a GPU is needed, and no tensor is read. There are two formats:

* ``torch``: ``mp_rank_TT_PPP_EEE/model_optim_rng.pt`` of every rank of TP, PP and EP, each with its own shards. They
  are those of our specs. Layers and experts count from 0 on every rank.
* ``torch_dist``: ``.metadata`` lists boxes of global tensors in ``.distcp`` files, with the layers stacked.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from megatron.checkpoint.durable_files import checksum
from megatron.checkpoint.errors import DamagedCheckpointError, describe_findings
from megatron.checkpoint.format import (
    ITEM_BYTES,
    JSON,
    MEGATRON_LM_RANK,
    FileRecord,
    Manifest,
    TensorChunk,
    TensorRecord,
    box_end,
    contiguous_runs,
    format_box,
    intersect,
    match_view_dims,
    partition_problem,
    row_major_strides,
    split_box,
    to_dims,
    whole_box,
)
from megatron.config.errors import UserError
from megatron.config.model import ModelConfig
from megatron.contrib.megatron_lm.flags import Arguments, read_arguments
from megatron.contrib.megatron_lm.names import Place, find_place
from megatron.contrib.megatron_lm.pickles import Record, StoredTensor, read_pickle_file, read_torch_file
from megatron.distributed.sharding import Box, DenseSharding, ExpertSharding, ShardSpec
from megatron.layers.parameters import WORD_EMBEDDINGS, Sharding, gpt

RANK_FILE = "model_optim_rng.pt"
METADATA, COMMON_FILE = ".metadata", "common.pt"
COMMON_STATE = "common_state/"
OUTPUT_LAYER = "output_layer.weight"
MOMENTS = ("exp_avg", "exp_avg_sq")
BLOCK_ELEMENTS = 16 << 20
"""Elements of a chunk, at most: one is in memory at a time."""

OPTIMIZER = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(param|fp32_param|exp_avg|exp_avg_sq)\.(.+)")
"""Keys of the optimizer's tensors in torch_dist: what they hold, and the key of the parameter."""

UNREAD_OPTIMIZER = {
    "distrib_optim.pt": "its optimizer state is in distrib_optim.pt, in the order of that run's buffers, and not read",
    "optimizer.distributed.": "its optimizer state is in the order of that run's buffers, and not read; save it there "
    "with --dist-ckpt-optim-fully-reshardable",
}


@dataclass
class _Found:
    """What has been found of one of our tensors."""

    dtype: str
    sources: set[str] = field(default_factory=set)  # their names
    chunks: dict[Box, TensorChunk] = field(default_factory=dict)


@dataclass
class _Table:
    """The tensors of a checkpoint, by our names, as they are found in the files."""

    path: Path
    specs: Mapping[str, ShardSpec]  # of the whole model
    found: dict[str, _Found] = field(default_factory=dict)
    unknown: set[str] = field(default_factory=set)
    shapes: set[str] = field(default_factory=set)

    def add(self, name: str, theirs: str, tensor: StoredTensor, parts: Iterable[tuple[Box, int]]) -> None:
        """Add the parts of a stored tensor: boxes of our view, each with its first element in the stored one."""
        if not tensor.contiguous:
            raise DamagedCheckpointError(f"{tensor.path}: {theirs} is not stored in row-major order")
        found = self.found.setdefault(name, _Found(tensor.dtype))
        if found.dtype != tensor.dtype:
            raise DamagedCheckpointError(f"{tensor.path}: {theirs} is {tensor.dtype}, elsewhere {found.dtype}")
        found.sources.add(theirs)
        item, file = ITEM_BYTES[tensor.dtype], tensor.path.relative_to(self.path).as_posix()
        for box, first in parts:
            offset = tensor.offset + first * item
            for block in split_box(box, BLOCK_ELEMENTS):
                found.chunks.setdefault(block, TensorChunk(block, file, offset, block.numel * item, ""))
                offset += block.numel * item

    def records(self) -> dict[str, TensorRecord]:
        """Return the tensors.

        Raises:
            DamagedCheckpointError: naming those that are unknown, of another shape, missing or incomplete.
        """
        weights = self.found.keys() & self.specs.keys()
        findings = {
            "lacks": self.specs.keys() - weights,
            "holds tensors that the model of its args does not have": self.unknown,
            "holds tensors of another shape than in its args": self.shapes,
        }
        if any(findings.values()):
            raise DamagedCheckpointError(f"{self.path} {describe_findings(findings)}")
        records = {}
        for name, found in self.found.items():
            spec, chunks = self.specs[parameter_of(name)], tuple(found.chunks.values())
            problem = partition_problem(spec.view, [chunk.box for chunk in chunks])
            if problem:
                raise DamagedCheckpointError(
                    f"{self.path} does not hold all of {', '.join(sorted(found.sources))}: {problem}"
                )
            records[name] = TensorRecord(found.dtype, spec.shape, spec.view, chunks)
        return records


def parameter_of(name: str) -> str:
    """Return the parameter that a tensor belongs to: ``X`` for ``optim.exp_avg.X``."""
    return name.split(".", 2)[2] if name.startswith("optim.") else name


def read_checkpoint(path: Path) -> Manifest:
    """Return the manifest of a checkpoint of Megatron-LM.

    Raises:
        DamagedCheckpointError: if files are missing, damaged, or do not hold the model that ``args`` describe.
        UserError: if ``args`` have options that change what the model computes, and that there are none of here.
    """
    try:
        if (path / METADATA).is_file():
            args, config, table, state = _read_torch_dist(path)
        else:
            args, config, table, state = _read_ranks(path)
        tensors = table.records()
    except UserError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError) as error:
        raise DamagedCheckpointError(f"{path} is not a checkpoint of Megatron-LM, or is damaged: {error!r}") from error
    names = {chunk.file for record in tensors.values() for chunk in record.chunks}
    files = {name: FileRecord((path / name).stat().st_size, 0, checksum(b"")) for name in sorted(names)}
    return Manifest(path, 1, tensors, files, _run_state(args, state, tensors), config)


def _run_state(args: Arguments, state: Mapping[str, Any], tensors: Mapping[str, TensorRecord]) -> JSON:
    """Return the state of the run; without that of an optimizer if the checkpoint holds none that can be read."""
    iteration, consumed = to_dims((state.get("iteration", 0), args.get("consumed_train_samples", 0)))
    moments = [name for name in tensors if name.startswith("optim.")]
    sizes = {"tp": "tensor_model", "pp": "pipeline_model", "cp": "context", "ep": "expert_model"}
    layout = {axis: int(args.get(f"{name}_parallel_size") or 1) for axis, name in sizes.items()}
    layout["dp"] = int(args.get("data_parallel_size") or 1)
    found: JSON = {
        "iteration": iteration,
        "consumed_samples": consumed,
        "batches_since": {"iteration": 0, "consumed_samples": 0},
        "written_by": {
            "layout": {axis: size for axis, size in layout.items() if axis != "ep"},
            "program": "Megatron-LM",
        },
    }
    if not moments:
        why = state.get("why") or "it was saved without its optimizer state (--no-save-optim)"
        return found | {"no_optimizer": why}
    scaler, optimizer = state.get("scaler") or {}, {"steps": state.get("steps", iteration)}
    data = {"stretches": {}, "fingerprints": {}, "digest": "", "stream": [0, 1]}
    return found | {"optimizer": optimizer, "loss_scaler": scaler, "data": data}


# ---- torch: a file for each rank ----


@dataclass
class _RankFile:
    """The file of one rank."""

    path: Path
    tp: int
    pp: int
    ep: int
    content: Mapping[str, Any]

    def chunks(self) -> list[tuple[int, Mapping[str, Any]]]:
        """Return the tensors of its model chunks, with their numbers."""
        names = (
            ["model"] if "model" in self.content else sorted(k for k in self.content if re.fullmatch(r"model\d+", k))
        )
        if not names:
            raise DamagedCheckpointError(f"{self.path} holds no model")
        return [(int(name.removeprefix("model") or 0), self.content[name]) for name in sorted(names, key=len)]


def _read_ranks(path: Path) -> tuple[Arguments, JSON, _Table, Mapping[str, Any]]:
    """Read the files of all ranks."""
    folders = sorted(each for each in path.iterdir() if MEGATRON_LM_RANK.fullmatch(each.name))
    if not folders:
        raise DamagedCheckpointError(f"{path} holds neither {METADATA} nor mp_rank_00")
    first = read_torch_file(folders[0] / RANK_FILE)
    args = first["args"]
    if not isinstance(args, dict):
        raise DamagedCheckpointError(f"{folders[0] / RANK_FILE} has no args of the run")
    model, config = read_arguments(args, folders[0] / RANK_FILE)
    axes = [axis for axis in ("pipeline", "expert") if (args.get(f"{axis}_model_parallel_size") or 1) > 1]
    files = []
    for folder in folders:
        match = MEGATRON_LM_RANK.fullmatch(folder.name)
        numbers = [int(n) for n in (match.groups() if match else ()) if n is not None]
        if len(numbers) != 1 + len(axes):
            raise DamagedCheckpointError(f"{folder} does not fit the args: TP{''.join(f', {axis}' for axis in axes)}")
        at = dict(zip(axes, numbers[1:]))
        content = first if folder == folders[0] else read_torch_file(folder / RANK_FILE)
        files.append(_RankFile(folder / RANK_FILE, numbers[0], at.get("pipeline", 0), at.get("expert", 0), content))
    _check_ranks(path, args, files)
    table = _Table(path, gpt(model))
    state: dict[str, Any] = {"iteration": first.get("iteration", 0)}
    if any((folder / "distrib_optim.pt").exists() for folder in folders):
        state["why"] = UNREAD_OPTIMIZER["distrib_optim.pt"]
    starts = _first_layers(files)
    for file in files:
        state |= _add_rank(table, file, args, model, starts)
    return args, config, table, state


def _check_ranks(path: Path, args: Arguments, files: Sequence[_RankFile]) -> None:
    """Raise DamagedCheckpointError if there is no file for a rank of TP and PP."""
    tp, pp = (int(args.get(f"{axis}_model_parallel_size") or 1) for axis in ("tensor", "pipeline"))
    held = {(file.tp, file.pp) for file in files}
    missing = [(t, p) for t, p in product(range(tp), range(pp)) if (t, p) not in held]
    if missing:
        name = f"mp_rank_{missing[0][0]:02d}" + (f"_{missing[0][1]:03d}" if pp > 1 else "")
        raise DamagedCheckpointError(f"{path} lacks {name}, of TP {tp} and PP {pp}")
    if len(held) > tp * pp:
        raise DamagedCheckpointError(f"{path} holds more ranks than TP {tp} and PP {pp} of its args")


def _first_layers(files: Sequence[_RankFile]) -> dict[tuple[int, int], int]:
    """Return the first layer of each chunk and pipeline rank: chunk by chunk, and rank by rank in each."""
    counts: dict[tuple[int, int], int] = {}
    for file in files:
        for number, tensors in file.chunks():
            layers = {place.layer for place in map(find_place, tensors) if place.layer is not None}
            counts[number, file.pp] = max(counts.get((number, file.pp), 0), 1 + max(layers, default=-1))
    starts, layer = {}, 0
    for at in sorted(counts):
        starts[at] = layer
        layer += counts[at]
    return starts


def _add_rank(
    table: _Table, file: _RankFile, args: Arguments, model: ModelConfig, starts: Mapping[tuple[int, int], int]
) -> JSON:
    """Add the tensors of one rank; return what its file has of the run's state."""
    tp, ep = (int(args.get(f"{axis}_model_parallel_size") or 1) for axis in ("tensor", "expert"))
    etp = int(args.get("expert_tensor_parallel_size") or tp)
    padded = replace(model, make_vocab_size_divisible_by=args["padded_vocab_size"] // tp)
    experts = ExpertSharding(file.ep, ep, file.tp % etp, etp)
    specs = gpt(padded, Sharding(DenseSharding(file.tp, tp), experts))
    tied_copy = not model.untie_embeddings_and_output_weights
    parameters: list[tuple[str, str, ShardSpec, Place]] = []  # their names and ours, in the order of the optimizer
    weights = {}
    for number, tensors in file.chunks():
        for theirs, tensor in tensors.items():
            if not isinstance(tensor, StoredTensor) or theirs.endswith("._extra_state"):
                continue
            place = find_place(theirs)
            layer = None if place.layer is None else place.layer + starts[number, file.pp]
            name = place.name.replace("{i}", str(layer))
            if name == OUTPUT_LAYER and tied_copy and (file.pp or number):
                name = WORD_EMBEDDINGS
            if name not in specs:
                table.unknown.add(theirs)
                continue
            parameters.append((theirs, name, specs[name], place))
            weights[len(parameters) - 1] = tensor
    optimizer = _read_optimizer(file, parameters, table)
    for number, (theirs, name, spec, place) in enumerate(parameters):
        shape, parts = _local_parts(spec, place.expert)
        tensors = {name: optimizer.masters.get(number, weights[number])}
        tensors |= {f"optim.{kind}.{name}": tensor for kind, tensor in optimizer.moments.get(number, {}).items()}
        for ours, tensor in tensors.items():
            if tensor.shape != shape:
                table.shapes.add(f"{theirs} {list(tensor.shape)} instead of {list(shape)} in {file.path}")
                continue
            table.add(ours, theirs, tensor, parts)
    return optimizer.state


def _local_parts(spec: ShardSpec, expert: int | None) -> tuple[tuple[int, ...], list[tuple[Box, int]]]:
    """Return the shape of a rank's tensor, or of its ``expert``, and its parts, as `_Table.add` takes them."""
    view, pieces = spec.local_view, [(piece.local_box, piece.global_box) for piece in spec.pieces]
    shape = spec.local_shape
    if expert is not None:
        shape = prod(view[1:-1]), view[-1]
        view = (1, *view[1:])
        one = (1,)
        pieces = [
            (Box((0, *a.start[1:]), one + a.size[1:]), Box((b.start[0] + expert, *b.start[1:]), one + b.size[1:]))
            for a, b in pieces
            if expert < a.size[0]
        ]
    parts = []
    for local, whole in pieces:
        for run, first in contiguous_runs(local.start, local.size, view):
            start = tuple(a + b - c for a, b, c in zip(run.start, whole.start, local.start))
            parts.append((Box(start, run.size), first))
    return shape, parts


@dataclass
class _Optimizer:
    """What a rank's file has of the optimizer, by number of the parameter."""

    masters: dict[int, StoredTensor] = field(default_factory=dict)
    moments: dict[int, dict[str, StoredTensor]] = field(default_factory=dict)
    state: JSON = field(default_factory=dict)


def _read_optimizer(
    file: _RankFile, parameters: Sequence[tuple[str, str, ShardSpec, Place]], table: _Table
) -> _Optimizer:
    """Return main params and moments; groups hold the parameters in the order of the model."""
    found = _Optimizer()
    saved = file.content.get("optimizer")
    for part in saved if isinstance(saved, list) else [saved] if isinstance(saved, dict) else []:
        inner = part.get("optimizer", part)
        if not inner.get("state"):
            continue
        masters = part.get("fp32_from_fp16_params")
        for number, group in enumerate(inner["param_groups"]):
            members = [n for n, (_, _, spec, _) in enumerate(parameters) if _in_group(spec, group)]
            if len(members) != len(group["params"]):
                raise DamagedCheckpointError(
                    f"{file.path}: optimizer group {number} has {len(group['params'])} parameters, not the "
                    f"{len(members)} that its weight decay selects"
                )
            for at, (member, key) in enumerate(zip(members, group["params"])):
                state = inner["state"][key]
                found.moments[member] = {kind: state[kind] for kind in MOMENTS}
                if masters is not None:
                    found.masters[member] = masters[number][at]
                found.state["steps"] = _number(state.get("step", group.get("step", file.content.get("iteration", 0))))
        if "grad_scaler" in part:
            found.state["scaler"] = _loss_scaler(part["grad_scaler"])
    if found.moments and len(found.moments) != len(parameters):
        raise DamagedCheckpointError(
            f"{file.path}: the optimizer has {len(found.moments)} of {len(parameters)} parameters"
        )
    return found


def _in_group(spec: ShardSpec, group: Mapping[str, Any]) -> bool:
    """Return True if a parameter is one of an optimizer's group."""
    decays = spec.decays == bool(group.get("wd_mult", 1.0))
    return decays and spec.expert == bool(group.get("is_expert_parallel", False))


def _loss_scaler(saved: Mapping[str, Any] | None) -> JSON:
    """Return the state of a dynamic loss scaler; empty if the scale is constant."""
    if not saved or "growth_tracker" not in saved:
        return {}
    good, lives = (int(_number(saved[name])) for name in ("growth_tracker", "hysteresis_tracker"))
    return {"scale": float(_number(saved["scale"])), "good_steps": good, "lives": float(lives)}


def _number(value: Any) -> int:
    number = value.item() if isinstance(value, StoredTensor) else value
    return int(number)


# ---- torch_dist: boxes of global tensors ----


def _read_torch_dist(path: Path) -> tuple[Arguments, JSON, _Table, Mapping[str, Any]]:
    """Read the table of a distributed checkpoint."""
    metadata = read_pickle_file(path / METADATA)
    entries, places = (metadata.state[name] for name in ("state_dict_metadata", "storage_data"))
    stored = {}  # file, first byte and length by key and offset
    for index, info in places.items():
        where = info.state["relative_path"], *to_dims((info.state["offset"], info.state["length"]))
        offset = index.state.get("offset")
        stored[index.state["fqn"], None if offset is None else tuple(offset)] = where
    common = _common_state(path, stored)
    args = common["args"]
    if not isinstance(args, dict):
        raise DamagedCheckpointError(f"{path} has no args of the run")
    model, config = read_arguments(args, path)
    table = _Table(path, gpt(model))
    optimizer = common.get("optimizer") or {}
    parts = optimizer if isinstance(optimizer, list) else [optimizer]
    groups = [group for part in parts for group in (part.get("optimizer") or part).get("param_groups", ())]
    state: JSON = {"iteration": common.get("iteration", 0)}
    state["steps"] = next((_number(g["step"]) for g in groups if g.get("step") is not None), state["iteration"])
    state["scaler"] = next((_loss_scaler(part["grad_scaler"]) for part in parts if "grad_scaler" in part), {})
    masters = {m[2] for key in entries if (m := OPTIMIZER.fullmatch(key)) and m[1].endswith("param")}
    for key, entry in entries.items():
        if "size" not in (entry.state or {}):
            continue
        match = OPTIMIZER.fullmatch(key)
        if key.startswith("optimizer.distributed."):
            state["why"] = UNREAD_OPTIMIZER["optimizer.distributed."]
        elif match or key not in masters:
            kind, parameter = (match[1], match[2]) if match else ("param", key)
            prefix = f"optim.{kind}." if kind in MOMENTS else ""
            _add_tensor(table, model, key, parameter, prefix, entry, stored)
    return args, config, table, state


def _common_state(path: Path, stored: Mapping[Any, tuple[str, int, int]]) -> Mapping[str, Any]:
    """Return what all ranks have in common: an object of its own, or a file in older checkpoints."""
    for (key, _), (file, start, length) in stored.items():
        if key.startswith(COMMON_STATE):
            found = read_torch_file(_file(path, file), start, length)
            found = found[0] if isinstance(found, list) else found
            return dict(found)
    if (path / COMMON_FILE).is_file():
        return dict(read_torch_file(path / COMMON_FILE))
    raise DamagedCheckpointError(f"{path} holds neither {COMMON_STATE} nor {COMMON_FILE}, with the args of the run")


def _file(path: Path, name: str) -> Path:
    """Return a file of the folder; DamagedCheckpointError if the name leads out of it."""
    if not re.fullmatch(r"[\w.-]+", name) or name in (".", ".."):
        raise DamagedCheckpointError(f"{path / METADATA} names {name!r}, which is no file in its folder")
    return path / name


def _add_tensor(
    table: _Table,
    model: ModelConfig,
    key: str,
    parameter: str,
    prefix: str,
    entry: Record,
    stored: Mapping[Any, tuple[str, int, int]],
) -> None:
    """Add a global tensor, box by box."""
    place = find_place(parameter)
    size = to_dims(entry.state["size"])
    stacked = "{i}" in place.name and place.layer is None
    layers = size[0] if stacked else 1
    names = [place.name.replace("{i}", str(i if stacked else place.layer)) for i in range(layers)]
    unknown = [name for name in names if name not in table.specs]
    if unknown or (stacked and layers != model.num_layers):
        table.unknown.add(key if unknown else f"{key} of {layers} layers")
        return
    spec, shape = table.specs[names[0]], size[1:] if stacked else size
    whole = spec.view[:1] + shape[1:] if parameter in (WORD_EMBEDDINGS, OUTPUT_LAYER) and shape else shape
    if whole[0] > shape[0] or match_view_dims(whole, spec.view) is None:
        table.shapes.add(f"{key} {list(size)} instead of {list(spec.view)}{' for each layer' if stacked else ''}")
        return
    for chunk in entry.state["chunks"]:
        start, extent = to_dims(chunk.state["offsets"]), to_dims(chunk.state["sizes"])
        file, first, length = stored[key, start]
        tensor = read_torch_file(_file(table.path, file), first, length)
        if not isinstance(tensor, StoredTensor) or tensor.shape != extent:
            raise DamagedCheckpointError(
                f"{table.path / file}: {key} {format_box(Box(start, extent))} has another shape"
            )
        if entry.state["properties"].state[0] != tensor.dtype:
            raise DamagedCheckpointError(f"{table.path / file}: {key} is {tensor.dtype}, unlike in {METADATA}")
        if stacked:
            inner, numel = Box(start[1:], extent[1:]), prod(extent[1:])
            for at in range(extent[0]):
                parts = [(box, at * numel + begin) for box, begin in view_parts(inner, whole, spec.view)]
                table.add(prefix + names[start[0] + at], key, tensor, parts)
        else:
            table.add(prefix + names[0], key, tensor, view_parts(Box(start, extent), whole, spec.view))


def view_parts(box: Box, shape: tuple[int, ...], view: tuple[int, ...]) -> Iterator[tuple[Box, int]]:
    """Yield the boxes of the view that make up a box of ``shape``, each with the index of its first element in ``box``.

    Each is contiguous in the box. Rows beyond ``shape``, the padding of a vocabulary, are left out.
    """
    inside = intersect(box, whole_box(shape))
    groups = match_view_dims(shape, view)
    if inside is None or groups is None:
        return
    strides = row_major_strides(box.size)
    rows = max(0, len(shape) - 2)  # dimensions before are taken one by one, those after as a whole
    lead = [range(a, b) for a, b in zip(inside.start[:rows], box_end(inside)[:rows])]
    for at in product(*lead):
        for run in _interval_boxes(inside.start[rows], box_end(inside)[rows], view[groups[rows]]):
            first = sum(i * stride for i, stride in zip(run.start, row_major_strides(view[groups[rows]])))
            start, size = (*at, *run.start), (*(1 for _ in at), *run.size)
            for dim in range(rows + 1, len(shape)):
                start, size = (*start, inside.start[dim]), (*size, inside.size[dim])
            place = zip((*at, first), box.start, strides)
            yield Box(start, size), sum((i - a) * stride for i, a, stride in place)


def _interval_boxes(first: int, last: int, view: tuple[int, ...]) -> Iterator[Box]:
    """Yield boxes of ``view`` that hold the elements ``first`` to ``last`` of its row-major order, in this order."""
    if len(view) == 1:
        if first < last:
            yield Box((first,), (last - first,))
        return
    inner = prod(view[1:])
    begin, end = -(-first // inner), last // inner
    if begin > end:  # inside of one row
        begin = end = first // inner
        head = (first, last)
    else:
        head = (first, begin * inner)
    row = first // inner
    for part in _interval_boxes(head[0] - row * inner, head[1] - row * inner, view[1:]) if head[0] < head[1] else ():
        yield Box((row, *part.start), (1, *part.size))
    if begin < end:
        yield Box((begin, *(0 for _ in view[1:])), (end - begin, *view[1:]))
    if head[1] != last:
        for part in _interval_boxes(0, last - end * inner, view[1:]):
            yield Box((end, *part.start), (1, *part.size))
