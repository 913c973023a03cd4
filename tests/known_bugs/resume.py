"""Bugs of resuming: a run that was stopped must end to the bit like one that was not."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch import Tensor

from megatron.checkpoint.format import Manifest
from megatron.checkpoint.tensor_file import GlobalTensor
from megatron.data.loader import DataSource
from megatron.distributed.launch import run_on_rank0
from megatron.distributed.micro_batch import MicroBatch
from megatron.optimizer.distributed_optimizer import DistributedOptimizer
from megatron.training import checkpoint_contents, checkpointer
from megatron.training.components.average import AverageWeights
from megatron.training.components.state_checksums import StateChecksums
from megatron.training.trainer import Trainer
from tests.cards.cell import largest
from tests.kit.runs import NUMBERS, checkpoint, part_of, start, steps, tiny_run
from tests.kit.solo import mesh_of
from tests.known_bugs.alone import alone
from tests.known_bugs.bug import KnownBug

STOPPED, LAST = 3, 6
STAGES = "--pipeline-model-parallel-size 2"
LAYER = re.compile(r"(?<=layers\.)\d+")
INITIAL_SCALE = 2.0**10
BF16 = "--bf16 --optimizer muon --ema-decay 0.5 --lr-warmup-iters 2 --lr-decay-style cosine"
FP64 = "--params-dtype fp64"
FP16 = f"--fp16 --initial-loss-scale {INITIAL_SCALE} --loss-scale-window 2"


def run(folder: Path, flags: str, rank: int, world_size: int) -> None:
    """Run to the end from the last checkpoint in a folder, or from scratch; the job's process group stays."""
    saving = f"--save {folder}/saved --save-interval {STOPPED} --train-iters {LAST}"
    with patch("megatron.training.main.destroy_distributed", lambda: None):
        outcome = start(tiny_run(folder, f"{saving} {flags}", world_size), None, rank, world_size)
    if outcome.status:
        raise RuntimeError(outcome.err)


UNDISTURBED: dict[str, Path] = {}
"""Folders of runs that were not stopped, by their flags: those of all bugs with these flags."""


def common_folder(rank: int, world_size: int) -> Path:
    """A new folder, the same on all ranks."""
    return Path(run_on_rank0(partial(tempfile.mkdtemp, prefix="resumed-"), mesh_of(rank, world_size).world))


def resumed(rank: int, world_size: int, flags: str, further: str = "") -> float:
    """The steps after a stop, with flags for them alone, and the last checkpoint, from those of a run without."""
    parts, whole = common_folder(rank, world_size), UNDISTURBED.get(flags)
    if whole is None:
        whole = common_folder(rank, world_size)
        run(whole, flags, rank, world_size)
        UNDISTURBED[flags] = whole
    if rank == 0:
        name = f"iter_{STOPPED:07d}"
        shutil.copytree(whole / "saved" / name, parts / "saved" / name)
    run(parts, f"{flags} {further}", rank, world_size)
    if rank:
        return 0.0
    after, expected = steps(parts), steps(whole)
    if min(after) <= STOPPED:
        raise RuntimeError("the run started from step 0, which gives the numbers of a resumed one")
    numbers = [of(after[i], expected[i]) for i in range(STOPPED + 1, LAST + 1)]
    (tensors, _), (those, _) = (checkpoint(folder / f"saved/iter_{LAST:07d}") for folder in (parts, whole))
    shutil.rmtree(parts)
    return largest([*numbers, *(relative(tensors[n], those[n]) for n in those)])


def of(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """The largest relative distance of the numbers of a step."""
    same = [name for name in NUMBERS & expected.keys() if isinstance(expected[name], float | int)]
    return largest(abs(found[name] - expected[name]) / max(abs(expected[name]), 1e-12) for name in same)


def relative(found: Tensor, expected: Tensor) -> float:
    """Distance of two tensors, relative to the norm of the second."""
    return float((found - expected).norm() / expected.norm().clamp(min=1e-12))


def _after_loading(change: Callable[[Trainer], None]) -> AbstractContextManager[Any]:
    """Change what a run has loaded to resume."""
    original = checkpointer.restore_run  # type: ignore[attr-defined]

    def restore(trainer: Trainer, *arguments: Any) -> list[str]:
        notes: list[str] = original(trainer, *arguments)
        change(trainer)
        return notes

    return patch.object(checkpointer, "restore_run", restore)


def moments_forgotten() -> AbstractContextManager[Any]:
    """The state of the update rules begins at zero again."""

    def forget(trainer: Trainer) -> None:
        for tensors in trainer.optimizer.state().values():
            for tensor in tensors.values():
                tensor.zero_()

    return _after_loading(forget)


def schedule_restarted() -> AbstractContextManager[Any]:
    """The learning rate is that of the first steps."""

    def change(trainer: Trainer) -> None:
        trainer.schedule = replace(trainer.schedule, begin=trainer.schedule.begin + trainer.consumed_samples)

    return _after_loading(change)


def main_parameters_rounded() -> AbstractContextManager[Any]:
    """The main parameters are those of the weights in bf16."""

    def change(trainer: Trainer) -> None:
        main = trainer.optimizer.main_params
        main.set({name: value.bfloat16().float() for name, value in main.items()})

    return _after_loading(change)


def schedule_lags() -> AbstractContextManager[Any]:
    """The learning rate is that of the step before."""

    def change(trainer: Trainer) -> None:
        trainer.schedule = replace(trainer.schedule, begin=trainer.schedule.begin + trainer.reader.next_batch_size)

    return _after_loading(change)


def average_from_the_weights() -> AbstractContextManager[Any]:
    """The average of the weights begins anew."""
    return _after_loading(lambda trainer: part_of(trainer, AverageWeights).on_weights_loaded())


def initial_loss_scale() -> AbstractContextManager[Any]:
    """The loss scale is that of the start."""
    return _after_loading(lambda trainer: trainer.scaler.scale.fill_(INITIAL_SCALE) and None)


def growth_of_the_scale_counted_anew() -> AbstractContextManager[Any]:
    """Steps without overflow are counted from the resumption."""
    return _after_loading(lambda trainer: trainer.scaler._good_steps.zero_() and None)  # type: ignore[attr-defined]


def samples_from_the_beginning() -> AbstractContextManager[Any]:
    """The data begin anew."""

    def change(trainer: Trainer) -> None:
        first, source = trainer.consumed_samples, trainer.reader.source
        before = DataSource.micro_batch

        class Rewound(DataSource):
            """Reads the samples of the beginning under later numbers."""

            def micro_batch(self, split: str, places: range, *rest: Any) -> MicroBatch:
                return before(source, split, range(places.start - first, places.stop - first), *rest)

        trainer.reader.source = Rewound(**vars(source))

    return _after_loading(change)


@contextmanager
def layers_numbered_in_their_stage() -> Iterator[None]:
    """Each stage reads layers by their numbers inside of it, and nothing compares the checksums of what was loaded."""
    original = checkpoint_contents.load_sharded  # type: ignore[attr-defined]

    def load(manifest: Manifest, tensors: Mapping[str, GlobalTensor], *rest: Any) -> None:
        first = min(int(number) for name in tensors for number in LAYER.findall(name))
        local = {LAYER.sub(lambda n: str(int(n[0]) - first), name): tensor for name, tensor in tensors.items()}
        original(manifest, local, *rest)

    unchecked = patch.object(StateChecksums, "load_state_dict", lambda self, state: None)
    with patch.object(checkpoint_contents, "load_sharded", load), unchecked:
        yield


def weights_not_gathered() -> AbstractContextManager[Any]:
    """Each rank rounds the main parameters that it has loaded to its own part of the weights, and gathers none."""
    write = "write_weights"
    return patch.object(DistributedOptimizer, write, lambda optimizer: optimizer.main_params.write_weights())


SAME = "six steps with a stop after the third against six without: every number and every tensor of the checkpoint"

BUGS = {
    "moments-lost": KnownBug(
        reports=("KempnerInstitute/KempnerForge#115", "OpenNMT/OpenNMT-py#617"),
        kind="Resuming",
        bug="the moments of the optimizer were dropped when a checkpoint was loaded",
        check=SAME,
        detector=alone(resumed, BF16, within=0.0),
        plant=moments_forgotten,
    ),
    "muon-weights-not-gathered": KnownBug(
        reports=("NVIDIA/Megatron-LM#6920",),
        kind="Resuming",
        bug="with Muon on several replicas the loaded weights were not gathered, so the run went on with other ones",
        check=f"{SAME} (Muon on two replicas that shard the state)",
        detector=replace(alone(resumed, f"{BF16} --use-distributed-optimizer", within=0.0), world_size=2),
        plant=weights_not_gathered,
    ),
    "layers-of-the-first-stage": KnownBug(
        reports=("NVIDIA/Megatron-LM#7452 (finding 12)",),
        kind="Resuming",
        bug="a checkpoint named the layers of a stage from 0, so that with more stages all loaded those of the first",
        check="six steps on two replicas, of which the last three run in two stages, against six on the replicas: "
        "every number and every tensor of the checkpoint but its checksums, which find this bug too",
        detector=replace(alone(resumed, FP64, STAGES), world_size=2),
        plant=layers_numbered_in_their_stage,
    ),
    "schedule-restarted": KnownBug(
        reports=("NVIDIA-NeMo/Automodel#763",),
        kind="Resuming",
        bug="the steps of the schedule were counted from 0 again, so the learning rate was that of the first step",
        check=SAME,
        detector=alone(resumed, BF16, within=0.0),
        plant=schedule_restarted,
    ),
    "main-parameters-rounded": KnownBug(
        reports=("TensorAuto/OpenTau#185", "NVIDIA/apex#42"),
        kind="Resuming",
        bug="fp32 main parameters were made from the model's weights in 16 bits again",
        check=f"{SAME} (bf16)",
        detector=alone(resumed, BF16, within=0.0),
        plant=main_parameters_rounded,
    ),
    "schedule-lags": KnownBug(
        reports=("Lightning-AI/pytorch-lightning#4655", "Lightning-AI/pytorch-lightning#1772"),
        kind="Resuming",
        bug="the learning rate lagged one step behind",
        check=SAME,
        detector=alone(resumed, BF16, within=0.0),
        plant=schedule_lags,
    ),
    "average-lost": KnownBug(
        reports=("ai2cm/ace#349", "lightly-ai/lightly-train#892"),
        kind="Resuming",
        bug="the moving average of the weights began anew",
        check=SAME,
        detector=alone(resumed, BF16, within=0.0),
        plant=average_from_the_weights,
    ),
    "samples-repeat": KnownBug(
        reports=("kyutai-labs/pocket-tts#287", "huggingface/accelerate#2823", "verl-project/verl#3457"),
        kind="Resuming",
        bug="the data began anew, or in another order, while the model went on",
        check=SAME,
        detector=alone(resumed, BF16, within=0.0),
        plant=samples_from_the_beginning,
    ),
    "loss-scale-reset": KnownBug(
        reports=("huggingface/accelerate#4289", "huggingface/transformers#11663", "mosaicml/composer#1376"),
        kind="Resuming",
        bug="the loss scale of fp16 was not restored",
        check=f"{SAME} (fp16)",
        detector=alone(resumed, FP16, within=0.0),
        plant=initial_loss_scale,
    ),
    "scale-grows-late": KnownBug(
        reports=("facebookresearch/metaseq#3",),
        kind="Resuming",
        bug="the loss scale was restored, but not the steps since its last change, so it grew at other steps",
        check=f"{SAME} (fp16)",
        detector=alone(resumed, FP16, within=0.0),
        plant=growth_of_the_scale_counted_anew,
    ),
}
