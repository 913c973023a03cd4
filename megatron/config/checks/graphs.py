"""Whether what is recorded as a CUDA graph can be repeated as it was recorded."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.kernels import wishes, word_problems
from megatron.config.problems import Problem
from megatron.config.run import RunConfig

EAGERLY = "--cuda-graph none"


def device(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """CUDA graphs are recorded on GPUs."""
    if config.compute.cuda_graph != "none" and config.training.device == "cpu":
        yield no_gpu(config.compute.cuda_graph)


def no_gpu(recorded: str) -> Problem:
    """What a run on CPUs is told that shall record ``recorded``."""
    return Problem("E906", f"--cuda-graph {recorded} records on a GPU, and this run computes on a CPU", (EAGERLY,))


def dropout(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Dropout is keyed by the step's number, which a recorded step would repeat."""
    model = config.model
    if config.compute.cuda_graph != "step" or not (model.hidden_dropout or model.attention_dropout):
        return
    fixes = ("--hidden-dropout 0 --attention-dropout 0", "--cuda-graph optimizer", EAGERLY)
    yield Problem("E907", "--cuda-graph step would drop the same elements in every step", fixes)


def weight_decay(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Weight decay is recorded as a number."""
    o = config.optimizer
    if config.compute.cuda_graph != "none" and o.weight_decay_incr_style != "constant":
        sentence = (
            f"--cuda-graph {config.compute.cuda_graph} records one weight decay, "
            f"and --weight-decay-incr-style {o.weight_decay_incr_style} moves it"
        )
        yield Problem("E908", sentence, ("--weight-decay-incr-style constant", EAGERLY))


def communication(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """gloo communicates from the CPU, which a graph leaves out."""
    parallel, recorded = config.parallel, config.compute.cuda_graph
    communicates = {"none": False, "optimizer": parallel.model_ranks > 1, "step": world_size > 1}[recorded]
    if communicates and parallel.distributed_backend == "gloo":
        sentence = f"--cuda-graph {recorded} records communication, which --distributed-backend gloo does on the CPU"
        yield Problem("E909", sentence, ("--distributed-backend nccl", EAGERLY))


def documents(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """flash-attn is called with as many sequences as there are documents: other ones in every step."""
    words = config.compute.kernels
    if config.compute.cuda_graph != "step" or not config.data.reset_attention_mask or any(word_problems(words)):
        return
    if wishes(words)["attention"].name in ("auto", "flash_attn"):
        sentence = (
            "--cuda-graph step would repeat the documents of one step in flash-attn, "
            f"which --kernels {' '.join(words)} takes where it is installed"
        )
        masked = " ".join([*(word for word in words if not word.startswith("attention=")), "attention=torch"])
        yield Problem("E910", sentence, (f"--kernels {masked}", "--cuda-graph optimizer", EAGERLY))


def pipeline(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """A recorded step that sends to other pipeline ranks was never tried."""
    ranks = config.parallel.pipeline_model_parallel_size
    if config.compute.cuda_graph == "step" and ranks > 1:
        sentence = f"--cuda-graph step has not been tried on a pipeline, and there are {ranks} pipeline ranks"
        yield Problem("E912", sentence, ("--cuda-graph optimizer", EAGERLY))


def remarks(config: RunConfig) -> Iterator[str]:
    """A line where every step is watched, and so none repeated."""
    if config.compute.cuda_graph == "step" and config.logging.log_health_interval == 1:
        yield "--log-health-interval 1: steps of a health report run eagerly, so --cuda-graph step repeats none"


CHECKS = (device, dropout, weight_decay, communication, documents, pipeline)
