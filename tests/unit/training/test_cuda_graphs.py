"""Captured steps, with a fake recorder in place of CUDA graphs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from megatron.config.errors import UserError
from megatron.distributed import comm
from megatron.distributed.launch import fake_process_group
from megatron.optimizer.lr_scheduler import Rates
from megatron.training import main
from megatron.training.build import build_trainer
from megatron.training.components.spikes import SpikeGuard
from megatron.training.cuda_graphs import WARM_UP_STEPS, CudaGraphRecorder, GraphedCallable, StepRunner
from megatron.training.metrics import StepMetrics
from megatron.training.trainer import Trainer
from tests.kit.runs import column, start, tiny_run
from tests.kit.solo import random_batch


@dataclass
class Tape:
    """Fake recorder that runs the work again at every replay and copies the results into the captured tensors.

    Like a graph, it computes on the captured inputs. Unlike one it also runs Python code, so after the capture it
    restores the weights.
    """

    state: Callable[[], list[Tensor]] = list
    recordings: int = 0
    repetitions: int = 0
    asides: int = field(default=0)

    def on_stream(self) -> AbstractContextManager[Any]:
        self.asides += 1
        return nullcontext()

    def record(self, work: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        self.recordings += 1
        before = [t.detach().clone() for t in self.state()]
        try:
            result = work()
        finally:
            with torch.no_grad():
                for tensor, value in zip(self.state(), before):
                    tensor.copy_(value)

        def replay() -> None:
            self.repetitions += 1
            again = work()
            for f in fields(result):
                if isinstance(getattr(result, f.name), Tensor):
                    getattr(result, f.name).copy_(getattr(again, f.name))

        return result, replay


@dataclass(frozen=True)
class Product:
    value: Tensor


def test_a_recording_is_made_after_the_warm_up_and_its_results_stay() -> None:
    tape = Tape()
    recording = GraphedCallable(lambda factor, inputs: Product(inputs[0] * factor), tape)
    results = [recording(3.0, [torch.tensor(float(i))]) for i in range(WARM_UP_STEPS + 3)]
    assert [r.value.item() for r in results] == [3.0 * i for i in range(WARM_UP_STEPS + 3)]
    assert (tape.asides, tape.recordings, tape.repetitions) == (WARM_UP_STEPS, 1, 3)


@pytest.mark.parametrize(
    "changed", [(2.0, torch.zeros(3)), (1.0, torch.zeros(4)), (1.0, torch.zeros(3, dtype=torch.int64))]
)
def test_other_constants_shapes_and_dtypes_are_captured_again(changed: tuple[float, Tensor]) -> None:
    tape = Tape()
    recording = GraphedCallable(lambda factor, inputs: Product(inputs[0] * factor), tape)
    for _ in range(WARM_UP_STEPS + 1):
        recording(1.0, [torch.zeros(3)])
    assert recording.recorded
    for _ in range(WARM_UP_STEPS):
        recording(changed[0], [changed[1]])
    assert (recording.recorded, tape.recordings) == (False, 1)
    recording(changed[0], [changed[1]])
    assert (recording.recorded, tape.recordings) == (True, 2)


def trainer_of(folder: Path, flags: str = "") -> Trainer:
    return build_trainer(tiny_run(folder, flags), 0, 1)


def state_of(trainer: Trainer) -> list[Tensor]:
    """Return everything that a step changes."""
    o, s = trainer.optimizer, trainer.scaler
    kept = [t for c in trainer.components for of_kind in c.tensors().values() for t in of_kind.values()]
    kept += [t for c in trainer.components if isinstance(c, SpikeGuard) for t in (c._values, c._count)]
    weights = [p.data for p in trainer.params.values()]
    counts = [count for _, rule in o.groups for count in rule.step_counts]
    grads = [bucket.shard for bucket in trainer.buckets.buckets]
    scaler = [t for t in vars(s).values() if torch.is_tensor(t)]
    return [*weights, *o.main_params.values(), *kept, *counts, *grads, *scaler]


def recorded(trainer: Trainer, mode: str) -> tuple[StepRunner, Tape]:
    tape = Tape(lambda: state_of(trainer))
    object.__setattr__(trainer.config.compute, "cuda_graph", mode)
    return StepRunner(trainer, tape), tape


def take_steps(trainer: Trainer, run: StepRunner, micro_batches: list[int]) -> list[tuple[float, ...]]:
    printed = []
    for step, count in enumerate(micro_batches):
        model = trainer.config.model
        documents = {"documents": torch.arange(8).expand(2, 8) // 3} if count == 1 else {}
        batches = [random_batch(model, 2, 8, seed=100 * step + i, **documents) for i in range(count)]
        lr = torch.tensor(1e-2 / (step + 1), dtype=torch.float32).item()  # as it is in fp32
        metrics = run(batches, Rates(lr, 0.1))
        printed.append(tuple(getattr(metrics, f.name).item() for f in fields(StepMetrics) if f.name != "extra"))
    return printed


@pytest.mark.parametrize("mode", ["optimizer", "step"])
@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--fp16 --initial-loss-scale 16 --loss-scale-window 2",
        "--mtp-num-layers 2 --mtp-detach-heads --position-embedding-type rope",
    ],
)
def test_recorded_steps_equal_eager_ones(mode: str, flags: str, tmp_path: Path) -> None:
    counts = [2] * 7 + [1] * 5  # the batch changes
    flags += " --hidden-dropout 0 --attention-dropout 0"
    eager = trainer_of(tmp_path, flags)
    expected = take_steps(eager, StepRunner(eager), counts)
    trainer = trainer_of(tmp_path, flags)
    run, tape = recorded(trainer, mode)
    assert take_steps(trainer, run, counts) == expected
    assert all(torch.equal(a, b) for a, b in zip(state_of(trainer), state_of(eager)))
    assert tape.repetitions > 0


def test_nothing_is_recorded_on_a_cpu(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    object.__setattr__(trainer.config.compute, "cuda_graph", "optimizer")
    with pytest.raises(UserError, match="E906"):
        StepRunner(trainer)


def test_a_whole_run_is_recorded(tmp_path: Path) -> None:
    """With evaluations, health reports, checkpoints and a batch-size ramp between the steps."""
    flags = "--device auto --rampup-batch-size 2 2 20 --log-health-interval 4 --eval-interval 5 --eval-iters 1 "
    flags += "--train-samples 60 --set training.train_iters=null --save-interval 6 --timing-log-level 2"
    tapes = []

    def runner(trainer: Trainer) -> StepRunner:
        tapes.append(Tape(lambda: state_of(trainer)))
        return StepRunner(trainer, tapes[-1])

    losses = []
    for name in ("none", "optimizer", "step"):
        folder, more = tmp_path / name, f"--cuda-graph {name}"
        printed = start(
            tiny_run(folder, f"{flags} --save {folder}/saved {more}"), patch.object(main, "StepRunner", runner)
        )
        assert printed.status == 0, printed.err
        losses.append(column(folder, "lm loss"))
    assert losses[1] == losses[2] == pytest.approx(losses[0], rel=1e-6)
    # an update does not know the batch, so a ramp does not change it
    assert [tape.recordings for tape in tapes] == [0, 1, 2]
    # of 20 steps, 5 with a health report are eager, and the first 3 of each shape
    assert [tape.repetitions for tape in tapes] == [0, 12, 9]


class Stream:
    """Log the streams it waits for."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log, self.device = name, log, torch.device("cuda", 0)

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")


def test_cuda_is_called_as_it_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: the order of calls, and arguments that the real functions have."""
    log: list[str] = []
    real = inspect.signature(torch.cuda.graph.__init__)

    class Graph:
        def replay(self) -> None:
            log.append("replayed")

    @contextmanager
    def capture(graph: Graph, **options: Any) -> Iterator[None]:
        real.bind(None, graph, **options)
        log.append("capture begins")
        yield
        log.append("capture ends")

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream("recording", log))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("main", log))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "graph", capture)
    recording = GraphedCallable(
        lambda factor, inputs: Product(inputs[0] * factor), CudaGraphRecorder(torch.device("cuda", 0))
    )
    for _ in range(WARM_UP_STEPS + 2):
        recording(2.0, [torch.ones(())])
    aside = ["recording waits for main", "main waits for recording"]
    assert log == [*aside * WARM_UP_STEPS, "capture begins", "capture ends", "replayed", "replayed"]


@dataclass
class TornTape(Tape):
    """Fake recorder whose captures fail in the middle: right after a method of the trainer's parts has returned."""

    owner: Any = None
    method: str = ""

    def record(self, work: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        def torn(*arguments: Any, **options: Any) -> None:
            real(*arguments, **options)
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore\n")

        real = getattr(self.owner, self.method)
        with patch.object(self.owner, self.method, torn):
            return super().record(work)


TEARS: dict[str, Callable[[Trainer], tuple[Any, str]]] = {
    "in forward": lambda t: (t.pipeline._stages[0], "forward"),
    "in backward": lambda t: (t.pipeline._stages[0], "backward"),
    "in the reduction": lambda t: (t.buckets, "finish"),
    "in the gather": lambda t: (t.optimizer.weights, "start_gather"),
}


def torn(folder: Path, where: str, flags: str, mode: str) -> tuple[Trainer, StepRunner]:
    trainer = trainer_of(folder, f"--hidden-dropout 0 --attention-dropout 0 --cuda-graph {mode} --device auto {flags}")
    tape = TornTape(lambda: state_of(trainer), owner=TEARS[where](trainer)[0], method=TEARS[where](trainer)[1])
    return trainer, StepRunner(trainer, tape)


@pytest.mark.parametrize("where", TEARS)
@pytest.mark.parametrize("flags", ["--fp16 --initial-loss-scale 16", "--data-parallel-sharding-strategy optim_grads"])
def test_a_step_whose_capture_fails_is_taken_eagerly(
    where: str, flags: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trainer, run = torn(tmp_path, where, flags, "auto")
    eager = trainer_of(tmp_path, f"--hidden-dropout 0 --attention-dropout 0 {flags}")
    counts = [2] * (WARM_UP_STEPS + 3)
    assert run.mode == "step"
    assert take_steps(trainer, run, counts) == take_steps(eager, StepRunner(eager), counts)
    assert all(torch.equal(a, b) for a, b in zip(state_of(trainer), state_of(eager), strict=True))
    assert run.mode == "none"
    assert capfd.readouterr().err.count("warning: --cuda-graph step could not capture it: ") == 1


@pytest.mark.parametrize(
    ("strategy", "owner", "method"),
    [
        ("no_shard", lambda t: t.optimizer, "reduce_gradients"),
        ("optim", lambda t: t.optimizer, "reduce_gradients"),
        ("optim", lambda t: t.optimizer.weights, "wait"),
        ("optim_grads", lambda t: t.optimizer, "reduce_gradients"),
    ],
)
def test_communication_of_a_failed_capture_is_neither_waited_for_nor_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str, owner: Callable[[Trainer], Any], method: str
) -> None:
    """One of two ranks, whose collectives return at once. The capture fails while some are in flight."""
    begun: list[comm.Pending] = []
    lost: list[comm.Pending] = []
    real = comm.Pending.wait

    def wait(pending: comm.Pending) -> Tensor:
        assert not any(pending is other for other in lost)
        return real(pending)

    class Torn(Tape):
        def record(self, work: Callable[[], Any]) -> Any:
            def tear(*_: Any) -> None:
                lost.extend(pending for pending in begun if pending.works)
                if lost:
                    raise RuntimeError("operation not permitted when stream is capturing")

            begun.clear()
            with patch.object(owner(trainer), method, tear):
                return super().record(work)

    def begin(pending: comm.Pending, *arguments: Any, **options: Any) -> None:
        init(pending, *arguments, **options)
        begun.append(pending)

    init = comm.Pending.__init__
    monkeypatch.setattr(comm.Pending, "__init__", begin)
    monkeypatch.setattr(comm.Pending, "wait", wait)
    sent = []
    for mode in ("none", "auto"):
        flags = f"--data-parallel-sharding-strategy {strategy} --cuda-graph {mode} --device auto"
        with fake_process_group(0, 2):
            trainer = build_trainer(tiny_run(tmp_path, flags, 2), 0, 2, device=torch.device("cpu"))
            run = StepRunner(trainer, Torn())
            take_steps(trainer, run, [2] * (WARM_UP_STEPS + 2))
            sent.append(trainer.mesh.meter.pop_bytes_sent())
    assert lost
    assert run.mode == "none"
    assert sent[0] == sent[1]


def test_a_failed_capture_that_was_asked_for_is_reported(tmp_path: Path) -> None:
    """A multi-line CUDA error becomes one sentence with a fix."""
    trainer, run = torn(tmp_path, "in backward", "", "step")
    with pytest.raises(UserError) as printed:
        take_steps(trainer, run, [1] * (WARM_UP_STEPS + 1))
    (problem,) = printed.value.problems
    assert problem.code == "E911"
    assert problem.sentence.endswith("RuntimeError: CUDA error: operation not permitted when stream is capturing")
    assert problem.fixes == ("--cuda-graph none",)
