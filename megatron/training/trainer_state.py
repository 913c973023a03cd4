"""Map a trainer to the tensors and values of a checkpoint, and back.

Tensors are global and carry no layout; the values are the step, the position in the data and the identity of the run.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.arguments.compatibility import resume_mode_fixes
from megatron.checkpoint.format import Manifest
from megatron.checkpoint.load import load_sharded
from megatron.checkpoint.save import local_bytes
from megatron.checkpoint.tensor_file import GlobalTensor, TensorPart
from megatron.config.data_paths import train_data_flag
from megatron.config.errors import Problem, UserError
from megatron.config.option import Role
from megatron.convert.huggingface.weights import WeightSource, fill_weights
from megatron.convert.saved_model import EMA_PREFIX
from megatron.data.dataset import split_label
from megatron.distributed import comm
from megatron.distributed.comm import Group
from megatron.distributed.param_layout import ShardBox, shard_boxes
from megatron.optimizer.main_params import accum_dtype
from megatron.training.loggers.run_folder import read_json_lines
from megatron.training.resume_source import Position, is_own_checkpoint, position_of
from megatron.training.startup import JOB_FACTS, StartFacts
from megatron.training.trainer import DIGEST_MODULUS, Trainer

RUN_ID_LETTERS = string.ascii_lowercase + string.digits
RUN_ID_LENGTH = 8


def new_run_id(world: Group, given: str = "") -> str:
    """Return a new random run ID, or the one ``given`` on rank 0; equal on every rank. Collective.

    The ID does not depend on the run's seed: two runs with one seed have two IDs.
    """
    return comm.broadcast_object(given or "".join(secrets.choice(RUN_ID_LETTERS) for _ in range(RUN_ID_LENGTH)), world)


def previous_run_id(metrics: Path, facts: StartFacts) -> str:
    """Return the run ID of the previous start if it belongs to the same job, else an empty string.

    The metrics file is the only record of the ID before the first checkpoint.

    Args:
        metrics: the run folder's ``metrics.jsonl``.
        facts: of this start, from :func:`megatron.training.startup.start_facts`.
    """
    last: dict[str, Any] = {}
    with suppress(OSError):  # the first start
        for line in read_json_lines(metrics):
            if line is not None and line.get("event") == "start":
                last = line
    same_job = any(name in facts for name in JOB_FACTS) and all(last.get(name) == facts.get(name) for name in JOB_FACTS)
    return str(last.get("run-id", "")) if same_job else ""


def restore_run(trainer: Trainer, manifest: Manifest, batches_since: Position) -> list[str]:
    """Resume exactly where the run that wrote the checkpoint was; return notes on the data. Collective.

    Args:
        trainer: built without initial weights.
        manifest: manifest of the checkpoint.
        batches_since: steps and samples at which the current batch size options took effect.

    Raises:
        DamagedCheckpointError: on every rank, if the checkpoint's checksums do not match.
        DataError: if the data cannot be opened.
        UserError: if the training data are not those that the run was reading.
    """
    saved = manifest.state
    trainer.start_at(*position_of(manifest), saved["data"]["stretches"], batches_since)
    evaluated = saved.get("evaluated", {})
    trainer.evaluated = dict(evaluated) if isinstance(evaluated, Mapping) else {"valid": evaluated}  # old checkpoints
    own = is_own_checkpoint(manifest.path, trainer.config.checkpoint)
    notes = _check_data(trainer, saved["data"], own)
    notes += _read_tensors(trainer, manifest)
    trainer.optimizer.set_steps_applied(saved["optimizer"]["steps"])
    if saved["loss_scaler"]:  # empty if the run that saved had a constant scale
        trainer.scaler.load_state_dict(saved["loss_scaler"])
    if trainer.optimizer.spikes is not None and saved.get("spikes"):
        trainer.optimizer.spikes.load_state_dict(saved["spikes"])
    if own:  # otherwise this is a fork, with a run ID of its own
        trainer.run_id = str(saved.get("run_id", ""))  # old checkpoints have none
        if "goodput" in saved:
            trainer.goodput.load_state_dict(saved["goodput"])
    return notes


def _read_tensors(trainer: Trainer, manifest: Manifest) -> list[str]:
    """Read weights, moments and averages; return a note if the checkpoint has no averages."""
    optimizer = trainer.optimizer
    wanted = local_tensors(trainer)
    averaged = any(name.startswith(EMA_PREFIX) for name in manifest.tensors)
    if not averaged:
        wanted = {name: tensor for name, tensor in wanted.items() if not name.startswith(EMA_PREFIX)}
    load_sharded(manifest, tensors_to_load(trainer, wanted), trainer.mesh.world)
    optimizer.main_params.set({name: wanted[name] for name in optimizer.main_params})
    if averaged or not optimizer.ema:
        optimizer.write_weights()
        return []
    optimizer.after_load()
    return ["the checkpoint has no average of the weights: it starts from the weights"]


def restore_weights(trainer: Trainer, manifest: Manifest) -> None:
    """Start a new run with the weights of a checkpoint; collective.

    Raises:
        DamagedCheckpointError: on every rank, if the checkpoint's checksums do not match.
        DataError: if the data cannot be opened.
    """
    _start_with_weights(
        trainer, lambda weights: load_sharded(manifest, tensors_to_load(trainer, weights), trainer.mesh.world)
    )


def restore_from_source(trainer: Trainer, source: WeightSource) -> None:
    """Start a new run with weights from another source; each rank reads its own parts.

    Raises:
        DataError: if the data cannot be opened.
    """
    _start_with_weights(trainer, lambda weights: fill_weights(trainer.specs, weights, source, trainer.buckets.shards))


def _start_with_weights(trainer: Trainer, read: Callable[[dict[str, Tensor]], object]) -> None:
    """Start a new run with weights that ``read`` writes into this rank's main parameters."""
    trainer.start_at(0, 0)
    main_params = dict(trainer.optimizer.main_params)
    read(main_params)
    trainer.optimizer.main_params.set(main_params)
    trainer.optimizer.after_load()


def local_tensors(trainer: Trainer) -> dict[str, Tensor]:
    """Return this rank's shards of all tensors of a checkpoint, by name."""
    shards = dict(trainer.optimizer.main_params)
    for kind, tensors in trainer.optimizer.extra_state().items():
        shards |= {f"optim.{kind}.{name}": tensor for name, tensor in tensors.items()}
    return shards


def tensors_to_save(trainer: Trainer) -> dict[str, GlobalTensor]:
    """Return the parts of each tensor that this rank writes, balanced over the ranks like the gradient buckets.

    Main parameters that are stored as remainders are computed only when written, so never all at once.
    """
    optimizer = trainer.optimizer
    main_params = optimizer.main_params
    readers: dict[str, tuple[torch.dtype, Callable[[], Tensor]]] = {
        name: (accum_dtype(weight.dtype), partial(main_params.__getitem__, name))
        for name, weight in main_params.weights.items()
    }
    for kind, tensors in optimizer.extra_state().items():
        for name, tensor in tensors.items():
            readers[f"optim.{kind}.{name}"] = tensor.dtype, tensor.detach
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
    return entries


def checkpoint_bytes(trainer: Trainer) -> int:
    """Return the bytes of all tensors of a checkpoint; collective."""
    return sum(comm.all_gather_objects(local_bytes(tensors_to_save(trainer)), trainer.mesh.world))


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


def parameter_name(name: str) -> str:
    """Return the parameter that a tensor of a checkpoint belongs to: ``X`` for ``optim.exp_avg.X``."""
    return name.split(".", 2)[2] if name.startswith("optim.") else name


def run_state(trainer: Trainer) -> dict[str, Any]:
    """Return the progress of the run as plain numbers; collective.

    Raises:
        RuntimeError: if the samples that the ranks have read are not those of the sample stream.
    """
    iteration, consumed_samples = trainer.batches_since
    spikes = trainer.optimizer.spikes
    return {
        "iteration": trainer.iteration,
        "consumed_samples": trainer.consumed_samples,
        "batches_since": {"iteration": iteration, "consumed_samples": consumed_samples},
        "evaluated": dict(trainer.evaluated),
        "optimizer": {"steps": trainer.optimizer.steps_applied()},
        "loss_scaler": trainer.scaler.state_dict(),
        "spikes": {} if spikes is None else spikes.state_dict(),
        "goodput": trainer.goodput.state_dict(),
        "run_id": trainer.run_id,
        "data": {
            # "stretches" is the name of the segments in this file format.
            "stretches": {split: list(counts) for split, counts in trainer.data.segments.items()},
            "fingerprints": dict(trainer.data.fingerprints),
            "digest": f"{consumed_digest(trainer):016x}",
        },
        "written_by": {"layout": dict(trainer.mesh.layout.sizes), "torch": torch.__version__},
    }


def consumed_digest(trainer: Trainer) -> int:
    """Return the digest of all samples that the ranks have read for the run's steps; collective.

    Each call adds the samples since the last one, so its cost does not grow with the run.

    Raises:
        RuntimeError: if it is not that of the first ``consumed_samples`` samples of the stream.
    """
    read_by_rank = comm.all_gather_objects(trainer.digest_read, trainer.mesh.dp_cp)
    read = sum(read_by_rank) % DIGEST_MODULUS
    if read != trainer.data.digest("train", trainer.digested_samples, trainer.consumed_samples):
        raise RuntimeError(f"the samples read up to step {trainer.iteration} are not those of the sample stream")
    trainer.digest = (trainer.digest + read) % DIGEST_MODULUS
    trainer.digested_samples = trainer.consumed_samples
    trainer.digest_read = 0
    return trainer.digest


def _check_data(trainer: Trainer, saved: Mapping[str, Any], own: bool) -> list[str]:
    """Compare the data with the checkpoint's, and set the digest; return notes on changed evaluation data.

    Raises:
        UserError: if the training samples, consumed or still to come, are not those of the run that saved.
    """
    fingerprints = trainer.data.fingerprints
    changed = [s for s, fingerprint in fingerprints.items() if saved["fingerprints"].get(s, fingerprint) != fingerprint]
    trainer.digest = trainer.data.digest("train", 0, trainer.consumed_samples)
    if f"{trainer.digest:016x}" != saved["digest"] and "train" not in changed:
        changed = ["train", *changed]
    data = f"{' and '.join(map(split_label, changed))} data"
    if "train" in changed:
        flag = train_data_flag(trainer.config.data)
        same = (f"{flag} THE_SAME_DATA",) if flag is not None else ()
        sentence = f"the {data} are not those of the checkpoint: other files, or another order"
        raise UserError(
            [Problem("E815", sentence, (*same, *resume_mode_fixes(Role.DATA, trainer.config.checkpoint, own)))]
        )
    if not changed:
        return []
    return [f"the {data} are not those of the checkpoint: losses on them cannot be compared with those before it"]
