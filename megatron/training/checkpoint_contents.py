"""Contents of a checkpoint: read from a trainer to be saved, and loaded into one.

Tensors are global and named: weights in the precision of the main parameters, and tensors of components under
``optim.{kind}.{name}``. The rest is plain numbers: the position of the run, and the state of components. Initial
weights and dropout are functions of seeds, and the sample order is a function of consumed samples, so no random
generator state is saved, and nothing depends on the layout.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.errors import DamagedCheckpointError
from megatron.checkpoint.format import Manifest
from megatron.checkpoint.load import load_sharded
from megatron.checkpoint.save import local_bytes
from megatron.checkpoint.tensor_file import GlobalTensor, TensorPart
from megatron.config.batch import WHOLE_RUN, Origin
from megatron.config.text import package_version
from megatron.convert.weight_source import WeightSource, fill_weights
from megatron.distributed import comm
from megatron.distributed.comm import Group
from megatron.distributed.param_layout import ShardBox, shard_boxes
from megatron.optimizer.main_params import accum_dtype
from megatron.training.component import Component, name_in_errors
from megatron.training.loggers.console import print_warning
from megatron.training.resume_source import Position, is_own_checkpoint, position_of, state_problem
from megatron.training.trainer import Trainer


@dataclass(frozen=True)
class CheckpointContents:
    """Contents of one checkpoint, beside the configuration and the files of the run."""

    iteration: int  # steps taken
    tensors: Mapping[str, GlobalTensor]  # this rank's parts
    state: Mapping[str, Any]  # progress of the run
    started: float = field(default_factory=time.monotonic)  # when the save began

    @classmethod
    def of(cls, trainer: Trainer) -> CheckpointContents:
        """Return the contents of a checkpoint of this step; collective.

        Raises:
            RuntimeError: if the samples that the ranks have read are not those of the sample stream.
        """
        started = time.monotonic()
        for component in trainer.components:
            with name_in_errors(component.plugin, "before_save"):
                component.before_save()
        return cls(trainer.iteration, tensors_to_save(trainer), run_state(trainer), started)


def local_tensors(trainer: Trainer) -> dict[str, Tensor]:
    """Return this rank's shards of all tensors of a checkpoint that belong to a parameter, by name."""
    return dict(trainer.optimizer.main_params) | tensors_of(trainer.components)


def tensors_of(components: Sequence[Component]) -> dict[str, Tensor]:
    """Return this rank's shards of the tensors of components, by name.

    Raises:
        ValueError: if a kind is not a word, or belongs to two components.
    """
    shards: dict[str, Tensor] = {}
    owners: dict[str, Component] = {}
    for component in components:
        with name_in_errors(component.plugin, "tensors"):
            for kind, tensors in component.tensors().items():
                if not kind.isidentifier() or owners.setdefault(kind, component) is not component:
                    raise ValueError(f"the kind of tensors {kind!r} is not a word, or in use")
                shards |= {f"optim.{kind}.{name}": tensor for name, tensor in tensors.items()}
    return shards


def tensors_to_save(trainer: Trainer) -> dict[str, GlobalTensor]:
    """Return the parts of each tensor that this rank writes, balanced over the ranks like the gradient buckets.

    Main parameters that are stored as remainders are computed only when written, so never all at once.
    """
    main_params = trainer.optimizer.main_params
    readers: dict[str, tuple[torch.dtype, Callable[[], Tensor]]] = {
        name: (accum_dtype(weight.dtype), partial(main_params.__getitem__, name))
        for name, weight in main_params.weights.items()
    }
    readers |= {name: (tensor.dtype, tensor.detach) for name, tensor in tensors_of(trainer.components).items()}
    counted = trainer.buckets.counted_shards()
    entries = {}
    for name, (dtype, whole) in readers.items():
        parameter = parameter_name(name)
        spec = trainer.specs[parameter]
        updated = trainer.buckets.shards[parameter]
        share = counted.get(parameter)
        if share is not None:
            mine = slice(share.start - updated.start, share.stop - updated.start)
            boxes = shard_boxes(spec, share, spec.owned)
            parts = tuple(TensorPart(box.piece.global_box, partial(_elements, whole, mine, box)) for box in boxes)
            entries[name] = GlobalTensor(spec.shape, spec.view, dtype, parts)
    for component in trainer.components:
        entries |= component.stored_tensors()
    return entries


def total_bytes(tensors: Mapping[str, GlobalTensor], group: Group) -> int:
    """Return the bytes of the parts of all ranks; collective."""
    return sum(comm.all_gather_objects(local_bytes(tensors), group))


def _elements(whole: Callable[[], Tensor], mine: slice, box: ShardBox) -> Tensor:
    written: Tensor = box.view_in(whole().view(-1)[mine])
    return written


def tensors_to_load(trainer: Trainer, tensors: Mapping[str, Tensor]) -> dict[str, GlobalTensor]:
    """Return the parts of each tensor that this rank reads: all that it holds, replicated parts included."""
    entries = {}
    for name, tensor in tensors.items():
        parameter = parameter_name(name)
        spec = trainer.specs[parameter]
        boxes = shard_boxes(spec, trainer.buckets.shards[parameter])
        parts = tuple(TensorPart(box.piece.global_box, box.view_in(tensor.detach())) for box in boxes)
        entries[name] = GlobalTensor(spec.shape, spec.view, tensor.dtype, parts)
    return entries


def further_tensors_to_load(trainer: Trainer, manifest: Manifest) -> dict[str, GlobalTensor]:
    """Return the parts that components read of a checkpoint, beside :func:`local_tensors`."""
    entries: dict[str, GlobalTensor] = {}
    for component in trainer.components:
        entries |= component.tensors_to_load(manifest)
    return entries


def parameter_name(name: str) -> str:
    """Return the parameter that a tensor of a checkpoint belongs to: ``X`` for ``optim.exp_avg.X``."""
    return name.split(".", 2)[2] if name.startswith("optim.") else name


def run_state(trainer: Trainer) -> dict[str, Any]:
    """Return the progress of the run as plain numbers; collective.

    Raises:
        RuntimeError: if the samples that the ranks have read are not those of the sample stream.
    """
    progress = trainer.progress
    iteration, consumed_samples = progress.batches_since
    name = trainer.config.training.phase_name or ""
    states = {component.name: _state_of(component) for component in trainer.components if component.name}
    return {
        "iteration": progress.iteration,
        "consumed_samples": progress.consumed_samples,
        "batches_since": {"iteration": iteration, "consumed_samples": consumed_samples},
        "evaluated": dict(progress.evaluated),
        "losses": {split: loss for split, loss in progress.losses.items() if math.isfinite(loss)},
        "run_id": progress.run_id,
        **({"phase": {"name": name, **progress.origin.to_state()}} if name or progress.origin != WHOLE_RUN else {}),
        **{name: state for name, state in states.items() if state},
        "written_by": {
            "layout": dict(trainer.mesh.layout.sizes),
            "torch": torch.__version__,
            "version": package_version(),
        },
    }


def _state_of(component: Component) -> dict[str, Any]:
    """Return the state of a component; that of a callback is left out, with a warning, if it is not JSON."""
    with name_in_errors(component.plugin, "state_dict"):
        state = dict(component.state_dict())
    if component.plugin is not None:
        try:
            json.dumps(state, allow_nan=False)
        except (TypeError, ValueError) as error:
            print_warning(f"the state of the {component.name} is not saved: {error}")
            return {}
    return state


def restore_run(trainer: Trainer, manifest: Manifest, batches_since: Position, origin: Origin) -> list[str]:
    """Resume exactly where the run that wrote the checkpoint was; return notes. Collective.

    Args:
        trainer: built without initial weights.
        manifest: manifest of the checkpoint.
        batches_since: steps and samples of the phase at which the current batch size options took effect.
        origin: of the phase that continues, or begins there.

    Raises:
        DamagedCheckpointError: on every rank, if checksums do not match, or the state of a component is odd.
        DataError: if the data cannot be opened.
        UserError: if the training data are not those that the run was reading.
    """
    types = {component.name: component.state_types for component in trainer.components if component.state_types}
    if problem := state_problem(manifest, types, [c.name for c in trainer.components if c.missing is None]):
        raise DamagedCheckpointError(f"{manifest.path}: {problem}")
    saved, progress = manifest.state, trainer.progress
    position = position_of(manifest)
    begins = 0 < position[0] == origin.iteration and not origin.read  # the phase, with data of its own
    trainer.start_at(*position, None if begins else saved["data"]["stretches"], batches_since, origin)
    evaluated = saved.get("evaluated", {})
    progress.evaluated = dict(evaluated) if isinstance(evaluated, Mapping) else {"valid": evaluated}  # old checkpoints
    progress.losses = dict(saved.get("losses", {}))
    notes = _restore_components(trainer, manifest)
    if is_own_checkpoint(manifest.path, trainer.config.checkpoint):  # otherwise a fork, with a run ID of its own
        progress.run_id = str(saved.get("run_id", ""))  # old checkpoints have none
    return notes


def _restore_components(trainer: Trainer, manifest: Manifest) -> list[str]:
    """Load the main parameters and the state of components; return notes."""
    components, main_params = trainer.components, dict(trainer.optimizer.main_params)
    names = {component.name for component in components}
    lost = [key for key in manifest.state if key.startswith("callback ") and key not in names]
    notes = [f"the checkpoint has state of the {key}, which no plugin registers: it is not kept" for key in lost]
    for component in components:
        notes += component.prepare(manifest)
    kinds = {name.split(".", 2)[1] for name in manifest.tensors if name.startswith("optim.")}
    missing = [c for c in components if c.missing is not None and not kinds.issuperset(c.tensors())]
    wanted = main_params | tensors_of([component for component in components if component not in missing])
    load_sharded(manifest, tensors_to_load(trainer, wanted), trainer.mesh.world)
    trainer.optimizer.main_params.set(main_params)
    trainer.optimizer.write_weights()
    own = is_own_checkpoint(manifest.path, trainer.config.checkpoint)
    for component in components:
        with name_in_errors(component.plugin, "loading"):
            notes += component.load(manifest)
            if component in missing:
                component.on_weights_loaded()
                notes.append(str(component.missing).format(name=component.name))
            elif (state := manifest.state.get(component.name)) and (own or not component.is_of_run):
                component.load_state_dict(state)
    return notes


def restore_weights(trainer: Trainer, source: Manifest | WeightSource) -> None:
    """Start a new run with the weights of a checkpoint (collective), or of a source of which each rank reads its parts.

    Raises:
        DamagedCheckpointError: on every rank, if the checkpoint's checksums do not match.
        DataError: if the data cannot be opened.
    """
    trainer.start_at(0, 0)
    main_params = dict(trainer.optimizer.main_params)
    if isinstance(source, Manifest):
        load_sharded(source, tensors_to_load(trainer, main_params), trainer.mesh.world)
    else:
        fill_weights(trainer.specs, main_params, source, trainer.buckets.shards)
    trainer.optimizer.main_params.set(main_params)
    trainer.use_loaded_weights()
