"""Write a checkpoint of ours as one of Megatron-LM: ``torch_dist``, with a fully reshardable optimizer state.

torch.distributed.checkpoint writes the files, and reads one part of a tensor at a time.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

from megatron.arguments.sources import from_dict, resolve
from megatron.checkpoint.durable_files import sync_folder, write_file
from megatron.checkpoint.errors import CheckpointError
from megatron.checkpoint.format import MEGATRON_LM_NEWEST, Manifest, split_box
from megatron.checkpoint.load import CheckpointReader
from megatron.checkpoint.save import save_sharded
from megatron.checkpoint.tensor_file import GlobalTensor, TensorPart
from megatron.config.batch import Origin, lr_scale, schedule_lengths, schedule_start
from megatron.config.run import RunConfig
from megatron.convert.huggingface.convert import check_target, new_checkpoint
from megatron.convert.megatron_lm.checkpoint import BLOCK_ELEMENTS, MOMENTS, view_parts
from megatron.convert.megatron_lm.model import unwritable_options, write_arguments
from megatron.convert.megatron_lm.names import Key, is_hybrid, layers_numbered, their_keys
from megatron.convert.saved_model import SavedModel
from megatron.convert.staging import ProgressCallback, disk_errors, removed_on_error
from megatron.distributed.comm import Group
from megatron.distributed.sharding import Box, ShardSpec, padded_vocab_size
from megatron.layers.context import DTYPES
from megatron.layers.parameters import WORD_EMBEDDINGS, trainable
from megatron.optimizer.lr_scheduler import LearningRateSchedule

VOCABULARY = (WORD_EMBEDDINGS, "output_layer.weight")
METADATA_JSON = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
WITH_EXTRA_STATE = re.compile(
    r"((?:decoder|mtp)\.(?:\w+\.)*"
    r"(?:linear_\w+|\w+_layernorm|fc[12]_latent_proj|eh_proj|enorm|hnorm|in_proj|out_proj|out_norm|final_norm)\.)weight"
)
"""Weights of modules that keep an object of their own, which is empty without FP8: of each layer, and of each expert.
Norms have one in Transformer Engine alone."""


def save_megatron_lm(saved: SavedModel, folder: Path, report: ProgressCallback) -> tuple[Path, str]:
    """Write a checkpoint into a new folder of Megatron-LM's checkpoints.

    Args:
        saved: the checkpoint.
        folder: must not exist, or be empty.
        report: progress callback.

    Returns:
        The folder of the checkpoint, and what it holds.

    Raises:
        CheckpointError: if the folder is not empty, or Megatron-LM does not compute the model.
        DamagedCheckpointError: if a checksum of the checkpoint does not match.
        StorageError: if writing fails. Nothing is left behind.
    """
    check_target(folder, "--save-megatron")
    if lacking := unwritable_options(saved.model):
        raise CheckpointError(f"Megatron-LM has no counterpart of {', '.join(lacking)}", "--save-hf DIR")
    config = resolve(from_dict({g: v for g, v in saved.manifest.config.items() if g != "checkpoint"}), 1)
    config = replace(config, model=config.model.base)
    iteration = int(saved.manifest.state.get("iteration", 0))
    path = folder / f"iter_{iteration:07d}"
    plan = _Plan(saved, config, report)
    made = path if folder.exists() else folder
    with disk_errors(folder, "--save-megatron"), removed_on_error(made), _error_of_rank():
        path.mkdir(parents=True)
        writer = FileSystemWriter(path, thread_count=1, sync_files=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is one process
            save({}, storage_writer=writer, planner=plan, no_dist=True)
        # megatron-core before 0.20 reads the common state from a file of its own, and 0.20 from either
        write_file(path / "common.pt", _pickled(plan.common).getvalue())
        write_file(path / "metadata.json", json.dumps(METADATA_JSON).encode())
        sync_folder(path)
        write_file(folder / MEGATRON_LM_NEWEST, str(iteration).encode())
        sync_folder(folder)
    return path, "weights and optimizer state" if plan.kinds else f"weights alone: {plan.why}"


def import_megatron_lm(manifest: Manifest, folder: Path, report: ProgressCallback) -> tuple[Path, str]:
    """Write a checkpoint of Megatron-LM as one of ours, with the run's state; arguments and result as above."""
    path, reader = new_checkpoint(folder, manifest.state["iteration"]), CheckpointReader(manifest)
    total = sum(prod(record.shape) * _stored_dtype(record.dtype).itemsize for record in manifest.tensors.values())
    done = 0

    def read(name: str, box: Box) -> Tensor:
        nonlocal done
        values = reader.read(name, box).to(_stored_dtype(manifest.tensors[name].dtype))
        done += values.nbytes
        report(name, done, total)
        return values

    tensors = {}
    for name, record in manifest.tensors.items():
        parts = tuple(TensorPart(chunk.box, partial(read, name, chunk.box)) for chunk in record.chunks)
        tensors[name] = GlobalTensor(record.shape, record.view, _stored_dtype(record.dtype), parts)
    save_sharded(path, tensors, manifest.state, manifest.config, Group())
    return path, "weights and optimizer state" if "optimizer" in manifest.state else "weights alone"


def _stored_dtype(name: str) -> torch.dtype:
    """Return the type in which a tensor of Megatron-LM is stored, which has the ``name`` in safetensors."""
    return torch.float64 if name == "F64" else torch.float32


@contextmanager
def _error_of_rank() -> Iterator[None]:
    """Raise the error of our own that `save` wraps as that of a rank."""
    try:
        yield
    except BaseException as error:
        cause = getattr(error, "failures", {}).get(0)
        if cause is not None and isinstance(cause[0], CheckpointError | OSError):
            raise cause[0] from error
        raise


class _Plan(DefaultSavePlanner):
    """All that is written; tensors are read when they are."""

    def __init__(self, saved: SavedModel, config: RunConfig, report: ProgressCallback) -> None:
        super().__init__(flatten_state_dict=False)
        self._reader, self._saved, self._report = CheckpointReader(saved.manifest), saved, report
        self._read: dict[tuple[str, torch.Size | None], Callable[[], Any]] = {}
        self._items: list[WriteItem] = []
        self._done = 0
        state, model = saved.manifest.state, saved.model
        self.kinds, self.why = self._moments(saved)
        vocabulary = padded_vocab_size(model.vocab, model.make_vocab_size_divisible_by, 1)
        args = write_arguments(config, {k: v for k, v in state.items() if self.kinds or k != "optimizer"}, vocabulary)
        params_dtype = DTYPES[config.precision.params_dtype]
        args |= {"params_dtype": params_dtype, "exp_avg_dtype": torch.float32, "exp_avg_sq_dtype": torch.float32}
        self.common = _common_state(config, state, args, bool(self.kinds))
        self._add_object("common_state/shard_0_1", [self.common])
        numbered = layers_numbered(model)
        layers: dict[str, list[str]] = {}  # our names, by their stack or by itself
        for name in saved.specs:
            stack = name if numbered else re.sub(r"^layers\.\d+\.", "layers.{i}.", name)
            layers.setdefault(stack, []).append(name)
        for pattern, names in layers.items():
            spec, rows = saved.specs[names[0]], vocabulary if pattern in VOCABULARY else None
            dtype = torch.float32 if spec.wide else params_dtype
            for key in their_keys(pattern, model):
                self._add_tensor(key, "", "", names, spec, dtype, rows)
                for kind in self.kinds if spec.has_gradient else ():
                    prefix = "" if kind == "param" else f"optim.{kind}."
                    self._add_tensor(key, f"optimizer.state.{kind}.", prefix, names, spec, torch.float32, rows)
                if not key.part and (module := WITH_EXTRA_STATE.fullmatch(key.whole)):
                    stacked = "{i}" in pattern
                    counts = (*(len(names),) * stacked, *spec.view[: int(spec.expert)]) or (1,)
                    size = ".".join(map(str, counts))
                    for at in product(*map(range, counts)):
                        self._add_object(f"{module[1]}_extra_state/shard_{'.'.join(map(str, at))}_{size}", [None])
        if is_hybrid(model):
            self._add_object("output_layer._extra_state/shard_0_1", [None])
        parts = (item.tensor_data for item in self._items if item.tensor_data is not None)
        self._total = sum(prod(part.chunk.sizes) * part.properties.dtype.itemsize for part in parts)

    def _moments(self, saved: SavedModel) -> tuple[tuple[str, ...], str]:
        """Return the kinds of optimizer state to write, or why there are none."""
        if saved.merged is not None:
            return (), "the optimizer state is that of adapters, which are merged"
        moments = {f"optim.{kind}.{name}" for kind in MOMENTS for name in trainable(saved.specs)}
        if "optimizer" not in saved.manifest.state or not moments <= {*self._reader.names}:
            return (), "the checkpoint has no state of Adam for all weights"
        return ("param", *MOMENTS), ""

    def _add_object(self, key: str, content: Any) -> None:
        self._items.append(WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO))
        self._read[key, None] = partial(_pickled, content)

    def _add_tensor(
        self,
        key: Key,
        before: str,
        prefix: str,
        names: list[str],
        spec: ShardSpec,
        dtype: torch.dtype,
        rows: int | None,
    ) -> None:
        """Add a tensor: a stack of ours if they are of all layers, with ``rows`` rows if it is padded.

        Args:
            key: of the tensor, without what is ``before`` it.
            before: beginning of the key.
            prefix: beginning of our names.
            names: of ours, without ``prefix``.
            spec: of ours.
            dtype: to write.
            rows: with padding; None without.
        """
        view = spec.view if key.part is None else spec.pieces[key.part].global_box.size
        begin = 0 if key.part is None else spec.pieces[key.part].global_box.start[0]
        shape = (view[0], prod(view[1:-1]), view[-1]) if spec.expert else (view if key.part is not None else spec.shape)
        stacked = names[0].startswith("layers.") and not layers_numbered(self._saved.model)
        padded = shape if rows is None else (rows, *shape[1:])

        def theirs(dims: tuple[int, ...], first: int, channel: int) -> torch.Size:
            if key.of_convolution:
                dims = (*dims[:1], channel, *dims[1:])
            return torch.Size((first, *dims) if stacked else dims)

        size = theirs(padded, len(names), 1)
        matrices = [range(n) for n in padded[:-2]] if len(padded) > 2 else []  # experts are written one by one
        for layer, name in enumerate(names):
            for at in product(*matrices):
                inner = Box((*at, *(0 for _ in padded[len(at) :])), (*(1 for _ in at), *padded[len(at) :]))
                for box in split_box(inner, BLOCK_ELEMENTS):
                    offset, sizes = theirs(box.start, layer, 0), theirs(box.size, 1, 1)
                    data = TensorWriteData(ChunkStorageMetadata(offset, sizes), TensorProperties(dtype), size)
                    index = MetadataIndex(before + key.name, offset)
                    self._items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
                    parts = partial(view_parts, box, shape, view, begin)
                    self._read[index.fqn, offset] = partial(self._part, prefix + name, spec.view, parts, sizes, dtype)

    def _part(
        self,
        name: str,
        view: tuple[int, ...],
        parts: Callable[[], Iterator[tuple[Box, int]]],
        sizes: torch.Size,
        dtype: torch.dtype,
    ) -> Tensor:
        """Return a part of a tensor, of boxes of ours that each begin at an element of it; padding is 0."""
        flat = torch.zeros(sizes.numel(), dtype=dtype)
        for part, first in parts():
            weight = name in self._saved.specs
            values = self._saved.read(name, view, part) if weight else self._reader.read(name, part)
            flat[first : first + part.numel] = values.reshape(-1).to(dtype)
        self._done += flat.nbytes
        self._report(name, self._done, self._total)
        return flat.view(sizes)

    def create_local_plan(self) -> SavePlan:
        """Return the list of what is written."""
        return SavePlan(self._items)

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """Return the content of an item."""
        found: Tensor | io.BytesIO = self._read[write_item.index.fqn, write_item.index.offset]()
        return found


def _pickled(content: Any) -> io.BytesIO:
    stream = io.BytesIO()
    torch.save(content, stream)
    return stream


def _common_state(config: RunConfig, state: Mapping[str, Any], args: dict[str, Any], optimizer: bool) -> dict[str, Any]:
    """Return the state that is stored once for all ranks."""
    namespace = argparse.Namespace()
    vars(namespace).update(args)
    common: dict[str, Any] = {"args": namespace, "checkpoint_version": 3.0, "iteration": state.get("iteration", 0)}
    if not optimizer:
        return common
    begin = state.get("batches_since", {})
    lengths = schedule_lengths(config, 1, begin.get("iteration", 0), begin.get("consumed_samples", 0))
    start = schedule_start(config, Origin.from_state(state))
    schedule = LearningRateSchedule.from_config(config.optimizer, lengths, lr_scale(config, 1), start)
    consumed = state["consumed_samples"]
    rates, steps = schedule.rates(consumed), state["optimizer"]["steps"]
    options = config.optimizer
    shared = {
        "default_config": True,
        "lr_mult": 1.0,
        "is_decoupled_lr": False,
        "max_lr": schedule.peak,
        "min_lr": schedule.floor,
        "lr": rates.lr,
        "betas": (options.adam_beta1, options.adam_beta2),
        "eps": options.adam_eps,
        "bias_correction": True,
        "step": steps,
    }
    decay = {"wd_mult": 1.0, "weight_decay": rates.weight_decay}, {"wd_mult": 0.0, "weight_decay": 0.0}
    scaler = state.get("loss_scaler") or {}
    scale = {}
    if scaler:
        scale["grad_scaler"] = {
            "scale": torch.tensor([scaler["scale"]]),
            "growth_tracker": scaler["good_steps"],
            "hysteresis_tracker": int(scaler["lives"]),
        }
    parts = [
        {
            "optimizer": {"param_groups": [shared | each | {"is_expert_parallel": expert} for each in decay]},
            "param_state_sharding_type": "fully_reshardable",
            **scale,
        }
        for expert in (False, True)
    ]
    # with expert parallelism, experts have an optimizer of their own
    common["optimizer"] = dict(enumerate(parts)) if config.parallel.expert_model_parallel_size > 1 else parts[0]
    common["opt_param_scheduler"] = {
        "max_lr": schedule.peak,
        "lr_warmup_steps": int(schedule.warmup),
        "num_steps": round(consumed - start),
        "lr_decay_style": options.lr_decay_style,
        "lr_decay_steps": int(schedule.decay),
        "min_lr": schedule.floor,
        "start_wd": schedule.weight_decay_start,
        "end_wd": schedule.weight_decay_end,
        "wd_incr_style": schedule.weight_decay_style,
        "wd_incr_steps": int(schedule.total),
    }
    common["content_metadata"] = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }
    common["num_floating_point_operations_so_far"] = 0.0
    return common
