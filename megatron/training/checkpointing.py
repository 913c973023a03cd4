"""What of a trainer a checkpoint holds, and the way there and back.

Tensors are global and by name: the weights at the precision of their masters (those that a model computes with are
these, rounded), and under ``optim.{kind}.{name}`` what the update rule remembers of each. The rest is plain numbers.
Initial weights and dropout are functions of seeds, samples of their number: no random generator has a state to save.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.manifest import Manifest
from megatron.checkpoint.parts import GlobalTensor, Part
from megatron.checkpoint.store import read
from megatron.config.compare import Role, ways_out
from megatron.config.data_paths import flag_of_files
from megatron.config.problems import Problem, UserError
from megatron.convert.checkpoint import AVERAGE
from megatron.data.splits import spoken
from megatron.model.fill import Source, fill
from megatron.optim.masters import wide
from megatron.optim.optimizer import Optimizer
from megatron.parallel import comm
from megatron.parallel.ownership import Slot, slots
from megatron.training.origin import Place, is_own, place_of
from megatron.training.run_identity import kept_run_id
from megatron.training.setup import DIGESTS, Trainer


def restore(trainer: Trainer, manifest: Manifest, batches_since: Place) -> list[str]:
    """Go on exactly where the run that wrote the checkpoint was; collective.

    ``batches_since`` is where the batches of now began.

    Returns:
        Notes on the data.

    Raises:
        DamagedError: when the checkpoint's bytes are not those that were written, on every rank alike.
        DataError: when the data cannot be opened.
        UserError: when the training data are not those that the run was reading.

    """
    t, saved = trainer, manifest.state
    t.begin_at(*place_of(manifest), saved["data"]["stretches"], batches_since)
    t.evaluated = _evaluated(saved)
    own = is_own(manifest.path, t.config.checkpoint)  # a fork is a run of its own
    notes = _take_up_data(t, saved["data"], own)
    notes += _read_tensors(t, manifest)
    t.optimizer.set_steps_applied(saved["optimizer"]["steps"])
    if saved["loss_scaler"]:  # there is none where the run that saved had a constant one
        t.scaler.load_state_dict(saved["loss_scaler"])
    if t.optimizer.spikes is not None and saved.get("spikes"):
        t.optimizer.spikes.load_state_dict(saved["spikes"])
    t.run_id = kept_run_id(saved, own)
    if own and "goodput" in saved:
        t.goodput.load_state_dict(saved["goodput"])
    return notes


def _read_tensors(trainer: Trainer, manifest: Manifest) -> list[str]:
    """Weights, moments and averages; where the checkpoint has no average, it starts from the weights, which is said."""
    t, wanted = trainer, held(trainer)
    averaged = any(name.startswith(AVERAGE) for name in manifest.tensors)
    if not averaged:
        wanted = {name: tensor for name, tensor in wanted.items() if not name.startswith(AVERAGE)}
    read(manifest, to_fill(t, wanted), t.mesh.world)
    t.optimizer.masters.put({name: wanted[name] for name in t.optimizer.masters})
    if averaged or not t.optimizer.average:
        t.optimizer.publish()
        return []
    t.optimizer.begin()
    return ["the checkpoint has no average of the weights: it starts from the weights"]


def restore_weights(trainer: Trainer, manifest: Manifest) -> None:
    """Begin a run with the weights of a checkpoint; collective.

    Raises:
        DamagedError: when the checkpoint's bytes are not those that were written, on every rank alike.
        DataError: when the data cannot be opened.

    """
    t = trainer
    t.begin_at(0, 0)
    masters = dict(t.optimizer.masters)
    read(manifest, to_fill(t, masters), t.mesh.world)
    t.optimizer.masters.put(masters)
    t.optimizer.begin()


def restore_from_source(trainer: Trainer, source: Source) -> None:
    """Begin a run with weights from elsewhere, each rank reading what it holds.

    Raises:
        DataError: when the data cannot be opened.

    """
    trainer.begin_at(0, 0)
    masters = dict(trainer.optimizer.masters)
    fill(trainer.specs, masters, source, trainer.buckets.shares)
    trainer.optimizer.masters.put(masters)
    trainer.optimizer.begin()


def held(trainer: Trainer) -> dict[str, Tensor]:
    """This rank's shares of all tensors of a checkpoint, by name."""
    found = dict(trainer.optimizer.masters)
    for kind, tensors in trainer.optimizer.extra_state().items():
        found |= {f"optim.{kind}.{name}": tensor for name, tensor in tensors.items()}
    return found


def to_write(trainer: Trainer) -> dict[str, GlobalTensor]:
    """The parts that this rank writes: what it answers for, as even over the ranks as buckets are cut.

    Masters that are kept as remainders are put together when they are asked for: never all of them are there at once.
    """
    t, counted, entries = trainer, trainer.buckets.counted(), {}
    for name, (dtype, whole) in _givers(t.optimizer).items():
        parameter = parameter_of(name)
        spec, updated = t.specs[parameter], t.buckets.shares[parameter]
        share = counted.get(parameter)
        if share is not None:
            mine = slice(share.start - updated.start, share.stop - updated.start)
            found = slots(spec, share, spec.owned)
            parts = tuple(Part(slot.piece.place, partial(_elements, whole, mine, slot)) for slot in found)
            entries[name] = GlobalTensor(spec.shape, spec.view, dtype, parts)
    return entries


def _givers(optimizer: Optimizer) -> dict[str, tuple[torch.dtype, Callable[[], Tensor]]]:
    """Of all tensors of a checkpoint the type, and what gives this rank's share of it, by name."""
    masters = optimizer.masters
    found: dict[str, tuple[torch.dtype, Callable[[], Tensor]]] = {
        name: (wide(weight.dtype), partial(masters.__getitem__, name)) for name, weight in masters.weights.items()
    }
    for kind, tensors in optimizer.extra_state().items():
        for name, tensor in tensors.items():
            found[f"optim.{kind}.{name}"] = tensor.dtype, tensor.detach
    return found


def _elements(whole: Callable[[], Tensor], mine: slice, slot: Slot) -> Tensor:
    """The elements of a slot of what this rank writes of its share."""
    written: Tensor = slot.of(whole().view(-1)[mine])
    return written


def to_fill(trainer: Trainer, tensors: Mapping[str, Tensor]) -> dict[str, GlobalTensor]:
    """The parts that this rank needs: all that it holds of every piece, copies too."""
    t, entries = trainer, {}
    for name, tensor in tensors.items():
        spec = t.specs[parameter_of(name)]
        found = slots(spec, t.buckets.shares[parameter_of(name)])
        parts = tuple(Part(slot.piece.place, slot.of(tensor.detach())) for slot in found)
        entries[name] = GlobalTensor(spec.shape, spec.view, tensor.dtype, parts)
    return entries


def parameter_of(name: str) -> str:
    """The parameter that a tensor of a checkpoint belongs to: ``optim.exp_avg.X`` is of ``X``."""
    return name.split(".", 2)[2] if name.startswith("optim.") else name


def state(trainer: Trainer) -> dict[str, Any]:
    """How far a run is, in plain numbers; collective.

    Raises:
        RuntimeError: when the samples that the ranks have read are not those of the stream.

    """
    t = trainer
    return {
        "iteration": t.iteration,
        "consumed_samples": t.consumed_samples,
        "batches_since": dict(zip(("iteration", "consumed_samples"), t.batches_since)),
        "evaluated": dict(t.evaluated),
        "optimizer": {"steps": t.optimizer.steps_applied()},
        "loss_scaler": t.scaler.state_dict(),
        "spikes": {} if t.optimizer.spikes is None else t.optimizer.spikes.state_dict(),
        "goodput": t.goodput.state_dict(),
        "run_id": t.run_id,
        "data": {
            "stretches": {split: list(counts) for split, counts in t.data.stretches.items()},
            "fingerprints": dict(t.data.fingerprints),
            "digest": f"{consumed_digest(t):016x}",
        },
        "written_by": {"layout": dict(t.mesh.layout.sizes), "torch": torch.__version__},
    }


def consumed_digest(trainer: Trainer) -> int:
    """Digest of all samples that the run has consumed, from what its ranks have read; collective.

    Every call takes up what was read since the one before, so that its cost does not grow with the run.

    Raises:
        RuntimeError: when it is not that of the first ``consumed_samples`` samples of the stream.

    """
    t = trainer
    read_by_rank = comm.all_gather_objects(t.digest_read, t.mesh.replicas)
    read = sum(read_by_rank) % DIGESTS
    if read != t.data.digest("train", t.digested_samples, t.consumed_samples):
        raise RuntimeError(f"the samples read up to step {t.iteration} are not those of the sample stream")
    t.digest, t.digested_samples, t.digest_read = (t.digest + read) % DIGESTS, t.consumed_samples, 0
    return t.digest


def _evaluated(saved: Mapping[str, Any]) -> dict[str, int]:
    """Steps taken before the last evaluation on each split; older checkpoints know of one validation set only."""
    steps = saved.get("evaluated", {})
    return dict(steps) if isinstance(steps, Mapping) else {"valid": steps}


def _take_up_data(trainer: Trainer, saved: Mapping[str, Any], own: bool) -> list[str]:
    """Count the samples that the run has consumed as read; returns notes on data that are not the checkpoint's.

    ``own`` says whether that lies in the run's own ``save`` folder.

    Raises:
        UserError: when the samples that were consumed, or are still to come, are not what they were for the run that
            saved. What is evaluated on may be.

    """
    t = trainer
    changed = [s for s, mark in t.data.fingerprints.items() if saved["fingerprints"].get(s, mark) != mark]
    t.digest = t.data.digest("train", 0, t.consumed_samples)
    if f"{t.digest:016x}" != saved["digest"] and "train" not in changed:
        changed = ["train", *changed]
    data = f"{' and '.join(map(spoken, changed))} data"
    if "train" in changed:
        flag = flag_of_files(t.config.data)
        same = (f"{flag} THE_SAME_DATA",) if flag is not None else ()
        sentence = f"the {data} are not those of the checkpoint: other files, or another order"
        raise UserError([Problem("E815", sentence, (*same, *ways_out(Role.DATA, t.config.checkpoint, own)))])
    if not changed:
        return []
    return [f"the {data} are not those of the checkpoint: losses on them cannot be compared with those before it"]
