"""Checks of ``--cuda-graph``: whatever is captured must be the same in every step."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.kernels import wishes, word_problems
from megatron.config.problems import Problem
from megatron.config.run import RunConfig

EAGERLY = "--cuda-graph none"


def check_cuda_graph_device(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that CUDA graphs run on a GPU."""
    if config.compute.cuda_graph != "none" and config.training.device == "cpu":
        yield no_gpu(config.compute.cuda_graph)


def no_gpu(recorded: str) -> Problem:
    """Return the problem of a run that captures ``recorded`` on a CPU."""
    return Problem("E906", f"--cuda-graph {recorded} needs a GPU, and this run uses a CPU", (EAGERLY,))


def check_cuda_graph_dropout(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Reject dropout: its counter is the step number, which a captured step would not update."""
    model = config.model
    if config.compute.cuda_graph != "step" or not (model.hidden_dropout or model.attention_dropout):
        return
    fixes = ("--hidden-dropout 0 --attention-dropout 0", "--cuda-graph optimizer", EAGERLY)
    yield Problem("E907", "--cuda-graph step does not support dropout: every step would drop the same elements", fixes)


def check_cuda_graph_weight_decay(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Reject a changing weight decay: it is captured as a constant."""
    optimizer = config.optimizer
    if config.compute.cuda_graph != "none" and optimizer.weight_decay_incr_style != "constant":
        sentence = (
            f"--cuda-graph {config.compute.cuda_graph} needs a constant weight decay, "
            f"and --weight-decay-incr-style {optimizer.weight_decay_incr_style} changes it"
        )
        yield Problem("E908", sentence, ("--weight-decay-incr-style constant", EAGERLY))


def check_cuda_graph_backend(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Reject gloo: it communicates from the CPU, which a graph does not capture."""
    parallel = config.parallel
    recorded = config.compute.cuda_graph
    communicates = {"none": False, "optimizer": parallel.model_ranks > 1, "step": world_size > 1}[recorded]
    if communicates and parallel.distributed_backend == "gloo":
        sentence = f"--cuda-graph {recorded} cannot capture the communication of --distributed-backend gloo"
        yield Problem("E909", sentence, ("--distributed-backend nccl", EAGERLY))


def check_cuda_graph_documents(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Reject flash-attn with documents: their number is an argument of its call and differs in every step."""
    words = config.compute.kernels
    if config.compute.cuda_graph != "step" or not config.data.reset_attention_mask or any(word_problems(words)):
        return
    if wishes(words)["attention"].name in ("auto", "flash_attn"):
        sentence = (
            "--cuda-graph step cannot capture flash-attn on documents, "
            f"which --kernels {' '.join(words)} selects where it is installed"
        )
        without = " ".join([*(word for word in words if not word.startswith("attention=")), "attention=torch"])
        yield Problem("E910", sentence, (f"--kernels {without}", "--cuda-graph optimizer", EAGERLY))


def check_cuda_graph_pipeline(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Reject capturing a step with several pipeline ranks, which is untested."""
    ranks = config.parallel.pipeline_model_parallel_size
    if config.compute.cuda_graph == "step" and ranks > 1:
        sentence = f"--cuda-graph step is untested with pipeline parallelism; there are {ranks} pipeline ranks"
        yield Problem("E912", sentence, ("--cuda-graph optimizer", EAGERLY))


def cuda_graph_notes(config: RunConfig) -> Iterator[str]:
    """Yield a note if health reports keep every step from using the graph."""
    if config.compute.cuda_graph == "step" and config.logging.log_health_interval == 1:
        yield "--log-health-interval 1: --cuda-graph step has no effect, because steps with a health report run eagerly"


CUDA_GRAPH_CHECKS = (
    check_cuda_graph_device,
    check_cuda_graph_dropout,
    check_cuda_graph_weight_decay,
    check_cuda_graph_backend,
    check_cuda_graph_documents,
    check_cuda_graph_pipeline,
)
