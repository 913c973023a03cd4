"""Read the weights of a checkpoint of DeepSpeed: the fp32 partitions of ZeRO, or the weights that every rank has.

``zero_pp_rank_R_mp_rank_00_optim_states.pt`` holds the part of the main parameters that rank R updates, as flat
tensors. In stages 1 and 2 they are laid out one after the other over all ranks, and ``param_slice_mappings`` names
which elements of which parameter each rank has. In stage 3 every rank has an equal part of every parameter, in the
order of ``param_shapes``, and the last parts are padded. The pickles are read without running them
(:mod:`megatron.convert.megatron_lm.pickles`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

from megatron.checkpoint.errors import CheckpointError, DamagedCheckpointError
from megatron.checkpoint.format import ITEM_BYTES, row_major_strides, to_dims, whole_box
from megatron.checkpoint.tensor_file import DTYPES
from megatron.config.text import listed
from megatron.convert.frameworks.pieces import AssembledTensor, MappedFiles, PartialTensor, TensorPiece
from megatron.convert.megatron_lm.pickles import StoredTensor, read_torch_file
from megatron.distributed.param_layout import ParamShard, contiguous_boxes

OPTIMIZER_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
MODEL_FILE = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")

Run = tuple[int, StoredTensor]
"""Some consecutive elements of a parameter: the first one, and their place."""


def read_deepspeed(path: Path) -> dict[str, PartialTensor]:
    """Return the weights of a checkpoint by the names of the model's parameters. No tensor is read.

    Args:
        path: folder with the files of all ranks, such as ``global_step10``.

    Raises:
        CheckpointError: if the model was cut by tensor or pipeline parallelism.
        DamagedCheckpointError: if the file of a rank is missing, damaged, or parameters are incomplete.
    """
    try:
        return _read(path)
    except (CheckpointError, DamagedCheckpointError):
        raise
    except Exception as error:  # there may be anything in place of what is looked for
        raise DamagedCheckpointError(f"{path} is not a checkpoint of DeepSpeed, or is damaged: {error!r}") from error


def _read(path: Path) -> dict[str, PartialTensor]:
    models, optimizers = (_files(path, pattern) for pattern in (MODEL_FILE, OPTIMIZER_FILE))
    if any(path.glob("layer_*-model_*")) or any(cut for _, cut in (*models, *optimizers)):
        raise CheckpointError(
            f"{path} was cut by tensor or pipeline parallelism of Megatron-DeepSpeed, which is not read"
        )
    if not models:
        raise DamagedCheckpointError(f"{path} holds no mp_rank_00_model_states.pt")
    files = MappedFiles()
    first = read_torch_file(models[min(models)])
    if not optimizers:
        return {name: _whole(files, tensor) for name, tensor in first["module"].items() if _is_tensor(tensor)}
    states = [read_torch_file(optimizers[rank, 0])["optimizer_state_dict"] for rank, _ in sorted(optimizers)]
    _check_ranks(path, [rank for rank, _ in sorted(optimizers)], _world_size(first, states[0]))
    shapes = {name: to_dims(shape) for group in first["param_shapes"] for name, shape in group.items()}
    runs: dict[str, list[Run]] = {name: [] for name in shapes}
    for rank, state in enumerate(states):
        if "fp32_flat_groups" in state:
            _add_stage_3(runs, shapes, state["fp32_flat_groups"], rank, len(states))
        else:
            _add_stage_1(runs, state)
    found: dict[str, PartialTensor] = {}
    frozen = _frozen_runs([read_torch_file(models[at]) for at in sorted(models)])
    for name, shape, parts in chain(((name, shapes[name], runs[name]) for name in shapes), frozen):
        pieces = tuple(chain.from_iterable(_pieces(files, shape, run) for run in parts))
        dtype = parts[0][1].dtype if parts else "F32"
        found[name] = whole = AssembledTensor(DTYPES[dtype], shape, pieces)
        whole.check(name, path)
    for name in {*(first.get("buffer_names") or ())} & first["module"].keys():  # every rank has them whole
        found[name] = _whole(files, first["module"][name])
    for copy, name in (first.get("shared_params") or {}).items():
        found[copy] = found[name]
    return found


def _files(path: Path, pattern: re.Pattern[str]) -> dict[tuple[int, int], Path]:
    """Return the files of a kind, by their rank of data parallelism and of model parallelism."""
    matches = [(pattern.fullmatch(file.name), file) for file in path.iterdir()]
    return {(int(match[1] or 0), int(match[2])): file for match, file in matches if match}


def _is_tensor(value: object) -> bool:
    return isinstance(value, StoredTensor)


def _world_size(model: Mapping[str, Any], state: Mapping[str, Any]) -> int:
    count = state.get("partition_count") or model["dp_world_size"]
    return int(max(count) if isinstance(count, list) else count)


def _check_ranks(path: Path, ranks: Sequence[int], count: int) -> None:
    if missing := sorted({*range(count)} - {*ranks}):
        names = [f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in missing]
        raise DamagedCheckpointError(f"{path} lacks {listed(names[:3])} of the {count} ranks that wrote it")
    if len(ranks) > count:
        raise DamagedCheckpointError(f"{path} holds files of {len(ranks)} ranks, but {count} ranks wrote it")


def _whole(files: MappedFiles, place: StoredTensor) -> AssembledTensor:
    box = whole_box(place.shape)
    return AssembledTensor(DTYPES[place.dtype], place.shape, (TensorPiece(box, partial(files.tensor, place)),))


def _part(flat: StoredTensor, start: int, count: int) -> StoredTensor:
    """Return some elements of a flat tensor."""
    if len(flat.shape) != 1 or not 0 <= start <= start + count <= flat.shape[0]:
        raise DamagedCheckpointError(f"{flat.path} has a partition of {list(flat.shape)} elements, too few")
    offset = flat.offset + ITEM_BYTES[flat.dtype] * start
    return flat._replace(shape=(count,), strides=(1,), offset=offset, crc=None)


def _add_stage_1(runs: dict[str, list[Run]], state: Mapping[str, Any]) -> None:
    """Add the elements that a rank has in stages 1 and 2."""
    groups = zip(state["param_slice_mappings"], state["single_partition_of_fp32_groups"], strict=True)
    for mapping, flat in groups:
        for name, fragment in mapping.items():
            count, start = to_dims((fragment.state["numel"], fragment.state["start"]))
            first = sum(place.shape[0] for _, place in runs[name])
            runs[name].append((first, _part(flat, start, count)))


def _add_stage_3(
    runs: dict[str, list[Run]],
    shapes: Mapping[str, tuple[int, ...]],
    groups: Sequence[StoredTensor],
    rank: int,
    ranks: int,
) -> None:
    """Add the elements that a rank has in stage 3."""
    left, start = [*reversed(groups)], 0
    for name, shape in shapes.items():
        size = -(-prod(shape) // ranks)
        while left and start == left[-1].shape[0]:
            left.pop()
            start = 0
        first = rank * size
        count = max(0, min(size, prod(shape) - first))
        part = _part(left[-1], start, size)  # with its padding
        if count:
            runs[name].append((first, _part(part, 0, count)))
        start += size


def _pieces(files: MappedFiles, shape: tuple[int, ...], run: Run) -> Iterator[TensorPiece]:
    """Yield the boxes of a parameter that consecutive elements of it are."""
    first, place = run
    for start, box in contiguous_boxes(shape, ParamShard(first, first + place.shape[0])):
        strides = tuple(row_major_strides(box.size))
        part = _part(place, start - first, box.numel)._replace(shape=box.size, strides=strides)
        yield TensorPiece(box, partial(files.tensor, part))


def _frozen_runs(models: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, tuple[int, ...], list[Run]]]:
    """Yield the name, shape and elements of the parameters without gradients: whole, or a part on every rank."""
    for name, size in (models[0].get("frozen_param_shapes") or {}).items():
        shape, runs = to_dims(size), list[Run]()
        for model in models:
            part, first = model["frozen_param_fragments"][name], sum(place.shape[0] for _, place in runs)
            count = min(prod(part.shape), prod(shape) - first)  # without padding
            if count:
                runs.append((first, _part(part._replace(shape=(prod(part.shape),), strides=(1,)), 0, count)))
        yield name, shape, runs
