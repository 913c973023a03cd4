"""Megatron-LM's checkpoints as checkpoints of ours: the table of tensors, the state and the configuration of the run.

`read_checkpoint` returns a manifest whose chunks are places in Megatron-LM's own files, so that everything that reads
checkpoints reads these. Neither Megatron-LM nor a GPU is needed, and no tensor is read. There are two formats:

* ``torch``: ``mp_rank_TT_PPP_EEE/model_optim_rng.pt`` of every rank of TP, PP and EP, each with its own shards. They
  are those of our specs. Layers and experts count from 0 on every rank.
* ``torch_dist``: ``.metadata`` lists boxes of global tensors in ``.distcp`` files, with the layers stacked or numbered.
  Of a fused projection whose parts TP cuts one by one, each part is a tensor.
"""

from __future__ import annotations

import re
import reprlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from megatron.checkpoint.durable_files import Crc32, checksum
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
    encode_manifest,
    intersect,
    match_view_dims,
    partition_problem,
    row_major_strides,
    split_box,
    to_dims,
    whole_box,
)
from megatron.config.errors import UserError
from megatron.config.files import open_regular
from megatron.config.model import ModelConfig
from megatron.config.text import clipped, listed
from megatron.convert.dcp_table import METADATA, Places, place_in, read_box, read_table, stored_boxes
from megatron.convert.megatron_lm.model import Arguments, read_arguments
from megatron.convert.megatron_lm.names import find_place, is_hybrid, our_name
from megatron.convert.megatron_lm.pickles import Record, StoredTensor, read_torch_file
from megatron.distributed.param_layout import ParamShard, contiguous_boxes
from megatron.distributed.sharding import Box, DenseSharding, ExpertSharding, Sharding, ShardSpec
from megatron.layers.parameters import WORD_EMBEDDINGS, gpt, trainable

RANK_FILE = "model_optim_rng.pt"
COMMON_FILE = "common.pt"
COMMON_STATE = "common_state/"
OUTPUT_LAYER = "output_layer.weight"
MOMENTS = ("exp_avg", "exp_avg_sq")
COMPARED_BYTES = 1 << 20
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
    """The chunks of one of our tensors in Megatron-LM's files."""

    dtype: str
    sources: set[str] = field(default_factory=set)  # their names
    chunks: dict[Box, TensorChunk] = field(default_factory=dict)


@dataclass
class _Table:
    """The tensors of a checkpoint, by our names, as they are found in the files."""

    path: Path
    model: ModelConfig
    specs: Mapping[str, ShardSpec]  # of the whole model
    found: dict[str, _Found] = field(default_factory=dict)
    unknown: set[str] = field(default_factory=set)  # their names
    shapes: set[str] = field(default_factory=set)  # their names, with what they are and should be

    def add(self, name: str, theirs: str, tensor: StoredTensor, parts: Iterable[tuple[Box, int]]) -> None:
        """Add the parts of a stored tensor: boxes of our view, each with its first element in the stored one."""
        if not tensor.contiguous:
            raise DamagedCheckpointError(f"{tensor.path}: {clipped(theirs)} is not stored in row-major order")
        found = self.found.setdefault(name, _Found(tensor.dtype))
        if found.dtype != tensor.dtype:
            raise DamagedCheckpointError(f"{tensor.path}: {clipped(theirs)} is {tensor.dtype}, elsewhere {found.dtype}")
        found.sources.add(theirs)
        item, file = ITEM_BYTES[tensor.dtype], tensor.path.relative_to(self.path).as_posix()
        for box, first in parts:
            offset = tensor.offset + first * item
            for block in split_box(box, BLOCK_ELEMENTS):
                whole = tensor.crc is not None and block.numel == prod(tensor.shape)
                digest = Crc32(tensor.crc or 0).hexdigest() if whole else ""
                found.chunks.setdefault(block, TensorChunk(block, file, offset, block.numel * item, digest))
                offset += block.numel * item

    def records(self, prefixes: Sequence[str] = ("",)) -> dict[str, TensorRecord]:
        """Return the tensors, of which there must be one for every parameter and each of ``prefixes``.

        Raises:
            DamagedCheckpointError: naming those that are unknown, of another shape, missing or incomplete.
        """
        findings = {
            "lacks": {prefix + name for prefix in prefixes for name in self.specs} - self.found.keys(),
            "holds tensors that the model of its args does not have": self.unknown,
            "holds tensors of another shape than in its args": self.shapes,
        }
        if any(findings.values()):
            raise DamagedCheckpointError(f"{self.path} {describe_findings(findings)}")
        records = {}
        for name, found in self.found.items():
            spec, chunks = self.specs[re.sub(r"^optim\.\w+\.", "", name)], tuple(found.chunks.values())
            problem = partition_problem(spec.view, [chunk.box for chunk in chunks])
            if problem:
                theirs = listed(sorted(found.sources))
                raise DamagedCheckpointError(f"{self.path} does not hold all of {theirs}: {problem}")
            records[name] = TensorRecord(found.dtype, spec.shape, spec.view, chunks)
        return records


@dataclass
class _Content:
    """The tables of tensors and the state of a checkpoint, as read from its files."""

    path: Path
    args: Arguments
    model: ModelConfig = field(init=False)
    config: JSON = field(init=False)
    weights: _Table = field(init=False)
    optimizer: _Table = field(init=False)  # main params by the names of the weights, and moments
    iteration: Any = 0
    state: JSON = field(default_factory=dict)  # of the optimizer: "steps", "scaler"
    unread: str = ""  # why the state of the optimizer cannot be read

    def __post_init__(self) -> None:
        if not isinstance(self.args, dict):
            raise DamagedCheckpointError(f"{self.path} has no args of the run")
        self.model, self.config = read_arguments(self.args, self.path)
        specs = gpt(self.model)
        self.weights = _Table(self.path, self.model, specs)
        self.optimizer = _Table(self.path, self.model, trainable(specs))

    def tensors(self) -> dict[str, TensorRecord]:
        """Return all tensors; without those of the optimizer if they are incomplete, which `unread` explains."""
        records = self.weights.records()
        if self.optimizer.found and not self.unread:
            masters = [""] if not self.optimizer.specs.keys().isdisjoint(self.optimizer.found) else []
            try:
                return records | self.optimizer.records([*masters, *(f"optim.{kind}." for kind in MOMENTS)])
            except DamagedCheckpointError as error:
                self.unread = f"its optimizer state is not read: {error}"
        return records


def read_checkpoint(path: Path) -> Manifest:
    """Return the manifest of a checkpoint of Megatron-LM.

    Raises:
        DamagedCheckpointError: if files are missing, damaged, or do not hold the model that ``args`` describe.
        UserError: if ``args`` have options that change what the model computes, and that there are none of here.
    """
    try:
        files = [(file, file.stat()) for file in sorted(path.rglob("*"))]
        return _read_unchanged(path, tuple((str(file), stat.st_size, stat.st_mtime_ns) for file, stat in files))
    except OSError as error:
        raise DamagedCheckpointError(f"{error.filename or path} cannot be read: {error.strerror or error}") from error


@lru_cache(maxsize=1)  # a start opens the same checkpoint several times
def _read_unchanged(path: Path, files: tuple[tuple[str, int, int], ...]) -> Manifest:
    """Return the manifest of a checkpoint, which ``files`` identify."""
    try:
        content = _read_torch_dist(path) if (path / METADATA).is_file() else _read_ranks(path)
        tensors = content.tensors()
        state = _run_state(content, "optim.exp_avg." + WORD_EMBEDDINGS in tensors)
        encode_manifest({}, {}, state, content.config)  # raises for numbers that are not finite
    except (DamagedCheckpointError, UserError):
        raise
    except Exception as error:  # there may be anything in place of what is looked for
        reason = clipped(repr(error))
        raise DamagedCheckpointError(f"{path} is not a checkpoint of Megatron-LM, or is damaged: {reason}") from error
    names = {chunk.file for record in tensors.values() for chunk in record.chunks}
    sizes = {Path(file).relative_to(path).as_posix(): size for file, size, _ in files}
    records = {name: FileRecord(sizes[name], 0, checksum(b"")) for name in sorted(names)}
    return Manifest(path, 1, tensors, records, state, content.config)


def _run_state(content: _Content, moments: bool) -> JSON:
    """Return the state of the run; without that of an optimizer if there are no ``moments``."""
    args = content.args
    iteration, consumed = to_dims((content.iteration, args.get("consumed_train_samples", 0)))
    sizes = {
        "tp": "tensor_model_parallel",
        "pp": "pipeline_model_parallel",
        "cp": "context_parallel",
        "dp": "data_parallel",
    }
    found: JSON = {
        "iteration": iteration,
        "consumed_samples": consumed,
        "batches_since": {"iteration": 0, "consumed_samples": 0},
        "written_by": {
            "layout": {axis: int(args.get(f"{name}_size") or 1) for axis, name in sizes.items()},
            "program": "Megatron-LM",
        },
    }
    if not moments:
        why = content.unread or "it was saved without its optimizer state (--no-save-optim)"
        return found | {"no_optimizer": why}
    found["optimizer"] = {"steps": content.state.get("steps", iteration)}
    found["loss_scaler"] = content.state.get("scaler", {})
    return found | {"data": {"stretches": {}, "fingerprints": {}, "digest": "", "stream": [0, 1]}}


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
        names = [name for name in self.content if re.fullmatch(r"model\d*", name)]
        if not names:
            raise DamagedCheckpointError(f"{self.path} holds no model")
        numbers = {int(name.removeprefix("model") or 0): self.content[name] for name in names}
        return sorted(numbers.items(), key=lambda item: item[0])


def _read_ranks(path: Path) -> _Content:
    """Read the files of all ranks."""
    folders = sorted(each for each in path.iterdir() if MEGATRON_LM_RANK.fullmatch(each.name))
    if not folders:
        raise DamagedCheckpointError(f"{path} holds neither {METADATA} nor mp_rank_00")
    first = read_torch_file(folders[0] / RANK_FILE)
    if first.get("checkpoint_version", 3.0) != 3.0:
        seen = f"{folders[0] / RANK_FILE} has checkpoint_version {reprlib.repr(first['checkpoint_version'])}"
        raise DamagedCheckpointError(f"{seen}, with another order of queries, keys and values; only 3.0 is read")
    content = _Content(path, first["args"], iteration=first.get("iteration", 0))
    axes = [axis for axis in ("pipeline", "expert") if (content.args.get(f"{axis}_model_parallel_size") or 1) > 1]
    files = []
    for folder in folders:
        match = MEGATRON_LM_RANK.fullmatch(folder.name)
        numbers = [int(n) for n in (match.groups() if match else ()) if n is not None]
        if len(numbers) != 1 + len(axes):
            raise DamagedCheckpointError(f"{folder} does not fit the args: TP{''.join(f', {axis}' for axis in axes)}")
        at = dict(zip(axes, numbers[1:]))
        saved = first if folder == folders[0] else read_torch_file(folder / RANK_FILE)
        files.append(_RankFile(folder / RANK_FILE, numbers[0], at.get("pipeline", 0), at.get("expert", 0), saved))
    _check_ranks(path, content.args, files)
    if any((folder / "distrib_optim.pt").exists() for folder in folders):
        content.unread = UNREAD_OPTIMIZER["distrib_optim.pt"]
    starts = _first_layers(files)
    for file in files:
        _add_rank(content, file, starts)
    _check_tied_output(content, files)
    return content


def _check_ranks(path: Path, args: Arguments, files: Sequence[_RankFile]) -> None:
    """Raise DamagedCheckpointError if there is no file for a rank of TP and PP."""
    sizes = {axis: int(args.get(f"{axis}_model_parallel_size") or 1) for axis in ("tensor", "pipeline", "expert")}
    for axis, size in sizes.items():
        if not 1 <= size <= len(files):
            raise DamagedCheckpointError(f"{path} has {len(files)} ranks, fewer than {axis}_model_parallel_size {size}")
    tp, pp = sizes["tensor"], sizes["pipeline"]
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


def _add_rank(content: _Content, file: _RankFile, starts: Mapping[tuple[int, int], int]) -> None:
    """Add the tensors of one rank."""
    args, model = content.args, content.model
    tp, ep = (int(args.get(f"{axis}_model_parallel_size") or 1) for axis in ("tensor", "expert"))
    etp = int(args.get("expert_tensor_parallel_size") or tp)
    padded = replace(model, make_vocab_size_divisible_by=args["padded_vocab_size"] // tp)
    experts = ExpertSharding(file.ep, ep, file.tp % etp, etp)
    dense = DenseSharding(file.tp, tp)
    specs = gpt(padded, Sharding(dense, experts))
    # which is cut there, and whole on every rank here
    specs |= {name: dense.split(spec.shape, 0, spec.init) for name, spec in specs.items() if ".eh_proj." in name}
    parameters: list[_Parameter] = []  # in the order of the optimizer
    for number, tensors in file.chunks():
        for theirs, tensor in tensors.items():
            if not isinstance(tensor, StoredTensor) or theirs.endswith("._extra_state"):
                continue
            place = find_place(theirs)
            layer = place.layer
            if layer is not None and place.depth is None:
                layer += starts[number, file.pp]
            name = None if place.part else our_name(place, layer, model)
            if name == OUTPUT_LAYER and not model.untie_embeddings_and_output_weights and (file.pp or number):
                name = WORD_EMBEDDINGS
            if name is None or name not in specs:
                content.weights.unknown.add(theirs)
            else:
                parameters.append(_Parameter(theirs, name, specs[name], place.expert, tensor))
    for parameter in parameters:
        _add_shard(content.weights, parameter, parameter.name, parameter.tensor)
    try:
        trained = [parameter for parameter in parameters if parameter.spec.has_gradient]
        content.state |= _add_optimizer(content.optimizer, file, trained)
    except Exception as error:  # as above
        content.unread = f"its optimizer state is not read: {error}"


def _check_tied_output(content: _Content, files: Sequence[_RankFile]) -> None:
    """Raise DamagedCheckpointError if the last stage's copy of tied embeddings is not one, as its first bytes show."""
    if content.model.untie_embeddings_and_output_weights:
        return
    both: dict[tuple[int, str], bytes] = {}
    for file in files:
        for name, tensor in (item for _, tensors in file.chunks() for item in tensors.items()):
            if name in (WORD_EMBEDDINGS, OUTPUT_LAYER) and isinstance(tensor, StoredTensor):
                with open_regular(tensor.path) as stored:
                    stored.seek(tensor.offset)
                    both[file.tp, name] = stored.read(
                        min(COMPARED_BYTES, prod(tensor.shape) * ITEM_BYTES[tensor.dtype])
                    )
    for (tp, name), start in both.items():
        if start != both.get((tp, WORD_EMBEDDINGS)):
            raise DamagedCheckpointError(
                f"{content.path} ties the output layer to the embedding in args, but {name} differs"
            )


class _Parameter(NamedTuple):
    """A parameter in the file of a rank."""

    theirs: str
    name: str  # ours
    spec: ShardSpec  # of the rank
    expert: int | None  # of the rank
    tensor: StoredTensor


def _add_shard(table: _Table, parameter: _Parameter, name: str, tensor: StoredTensor) -> None:
    """Add a rank's shard of a parameter, or of state of the same shape."""
    shape, parts = _local_parts(parameter.spec, parameter.expert)
    if without_channel(tensor.shape, shape) == shape:
        table.add(name, parameter.theirs, tensor, parts)
    else:
        table.shapes.add(f"{parameter.theirs} {list(tensor.shape)} instead of {list(shape)} in {tensor.path}")


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


def _add_optimizer(table: _Table, file: _RankFile, parameters: Sequence[_Parameter]) -> JSON:
    """Add main params and moments of a rank; return steps and loss scale.

    An optimizer has groups, with weight decay and without, that hold the parameters in the order of the model. Experts
    have an optimizer of their own.
    """
    state: JSON = {}
    of_group = defaultdict(list)
    for parameter in parameters:
        of_group[parameter.spec.decays, parameter.spec.expert].append(parameter)
    saved, count = file.content.get("optimizer"), 0
    for part in saved if isinstance(saved, list) else [saved] if isinstance(saved, dict) else []:
        inner, masters = part.get("optimizer", part), part.get("fp32_from_fp16_params")
        for number, group in enumerate(inner["param_groups"] if inner.get("state") else ()):
            members = of_group[bool(group.get("wd_mult", 1.0)), bool(group.get("is_expert_parallel", False))]
            if len(members) != len(group["params"]):
                held = f"{len(group['params'])} parameters, not the {len(members)} that its weight decay selects"
                raise DamagedCheckpointError(f"{file.path}: group {number} of the optimizer has {held}")
            for at, (member, key) in enumerate(zip(members, group["params"])):
                kept = inner["state"][key]
                for kind in MOMENTS:
                    _add_shard(table, member, f"optim.{kind}.{member.name}", kept[kind])
                if masters is not None:
                    _add_shard(table, member, member.name, masters[number][at])
                state["steps"] = int(_number(kept.get("step", group.get("step", file.content.get("iteration", 0)))))
            count += len(members)
        if "grad_scaler" in part:
            state["scaler"] = _loss_scaler(part["grad_scaler"])
    if count not in (0, len(parameters)):
        raise DamagedCheckpointError(f"{file.path}: the optimizer has {count} of {len(parameters)} parameters")
    return state


def _loss_scaler(saved: Mapping[str, Any] | None) -> JSON:
    """Return the state of a dynamic loss scaler; empty if the scale is constant."""
    if not saved or "growth_tracker" not in saved:
        return {}
    good, lives = (int(_number(saved[name])) for name in ("growth_tracker", "hysteresis_tracker"))
    return {"scale": _number(saved["scale"]), "good_steps": good, "lives": float(lives)}


def _number(value: Any) -> float:
    return float(value.item() if isinstance(value, StoredTensor) else value)


# ---- torch_dist: boxes of global tensors ----


def _read_torch_dist(path: Path) -> _Content:
    """Read the table of a distributed checkpoint."""
    entries, stored = read_table(path)
    common = _common_state(path, stored)
    content = _Content(path, common["args"], iteration=common.get("iteration", 0))
    optimizer = common.get("optimizer") or {}
    if optimizer and all(str(key).isdecimal() for key in optimizer):  # one of dense parameters, one of experts
        optimizer = [*optimizer.values()]
    parts = optimizer if isinstance(optimizer, list) else [optimizer]
    groups = [group for part in parts for group in (part.get("optimizer") or part).get("param_groups", ())]
    steps = next((group["step"] for group in groups if group.get("step") is not None), content.iteration)
    content.state["steps"] = int(_number(steps))
    content.state["scaler"] = next((_loss_scaler(part["grad_scaler"]) for part in parts if "grad_scaler" in part), {})
    for key, entry in entries.items():
        match = OPTIMIZER.fullmatch(key)
        if "size" not in (entry.state or {}):
            continue
        if match:
            prefix = f"optim.{match[1]}." if match[1] in MOMENTS else ""
            _add_tensor(content.optimizer, key, match[2], prefix, entry, stored)
        elif key.startswith(("optimizer.", "chained_")):
            content.unread = UNREAD_OPTIMIZER["optimizer.distributed."]
        else:
            _add_tensor(content.weights, key, key, "", entry, stored)
    return content


def _common_state(path: Path, stored: Places) -> Mapping[str, Any]:
    """Return the state that is stored once for all ranks: as an object, or as a file in older checkpoints."""
    for (key, _), (file, start, length) in stored.items():
        if key.startswith(COMMON_STATE):
            found = read_torch_file(place_in(path, file), start, length)
            found = found[0] if isinstance(found, list) else found
            return dict(found)
    if (path / COMMON_FILE).is_file():
        return dict(read_torch_file(path / COMMON_FILE))
    raise DamagedCheckpointError(f"{path} holds neither {COMMON_STATE} nor {COMMON_FILE}, with the args of the run")


def _add_tensor(table: _Table, key: str, parameter: str, prefix: str, entry: Record, stored: Places) -> None:
    """Add a global tensor, box by box."""
    place = find_place(parameter)
    size = to_dims(entry.state["size"])
    stacked = "{i}" in place.name and place.layer is None
    layers = size[0] if stacked else 1

    def ours(layer: int) -> str:
        return our_name(place, layer if stacked else place.layer, table.model) or ""

    known = {ours(0), ours(layers - 1)} <= table.specs.keys() and place.part != ""
    if not known or (stacked and is_hybrid(table.model)):
        table.unknown.add(f"{key} of {layers} layers" if stacked and ours(0) in table.specs else key)
        return
    spec = table.specs[ours(0)]
    part = whole_box(spec.view) if place.part is None else spec.pieces[place.part_index].global_box
    full = size[1:] if stacked else size
    shape = without_channel(full, part.size)
    whole = part.size[:1] + shape[1:] if parameter in (WORD_EMBEDDINGS, OUTPUT_LAYER) and shape else shape
    if whole[0] > shape[0] or match_view_dims(whole, part.size) is None:
        table.shapes.add(f"{key} {list(size)} instead of {list(part.size)}{' for each layer' if stacked else ''}")
        return

    def parts(start: tuple[int, ...], extent: tuple[int, ...], before: int) -> Iterator[tuple[Box, int]]:
        if shape != full:
            start, extent = start[:1] + start[2:], extent[:1] + extent[2:]
        for box, first in view_parts(Box(start, extent), whole, part.size, part.start[0]):
            yield box, before + first

    for box, dtype, where in stored_boxes(table.path, key, entry, stored):
        start, extent = box.start, box.size
        tensor = read_box(table.path, key, box, dtype, where)
        if stacked:
            for at in range(extent[0]):
                own = parts(start[1:], extent[1:], at * prod(extent[1:]))
                table.add(prefix + ours(start[0] + at), key, tensor, own)
        else:
            table.add(prefix + ours(0), key, tensor, parts(start, extent, 0))


def without_channel(shape: tuple[int, ...], view: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a convolution of each channel, ``[channels, 1, width]``, as ours; others as they are."""
    return shape[:1] + shape[2:] if len(shape) == 3 and shape[1] == 1 and len(view) == 2 else shape


def view_parts(box: Box, shape: tuple[int, ...], view: tuple[int, ...], begin: int = 0) -> Iterator[tuple[Box, int]]:
    """Yield the boxes of the view that make up a box of ``shape``, each with the index of its first element in ``box``.

    Each is contiguous in the box. Rows beyond ``shape``, the padding of a vocabulary, are left out. If ``shape`` and
    ``view`` are those of some rows alone, ``begin`` is the first of them.
    """
    inside = intersect(box, whole_box(shape))
    groups = match_view_dims(shape, view)
    if inside is None or groups is None:
        return
    strides = row_major_strides(box.size)
    rows = max(0, len(shape) - 2)  # dimensions before are taken one by one, those after as a whole
    lead = [range(a, b) for a, b in zip(inside.start[:rows], box_end(inside)[:rows])]
    for at in product(*lead):
        for first, run in contiguous_boxes(view[groups[rows]], ParamShard(inside.start[rows], box_end(inside)[rows])):
            start, size = (*at, *run.start), (*(1 for _ in at), *run.size)
            for dim in range(rows + 1, len(shape)):
                start, size = (*start, inside.start[dim]), (*size, inside.size[dim])
            place = zip((*at, first), box.start, strides)
            yield Box((begin + start[0], *start[1:]), size), sum((i - a) * stride for i, a, stride in place)
