"""All checks of a configuration: ``find_problems`` runs them and reports everything at once.

Numbers are checked against their limits first; later checks skip values already known to be wrong. The checks of the
model, parallelism, training, data and checkpoints are in ``checks/``. Those of kernels, the stop file, logging folders,
profiling and CUDA graphs, and of options that are set without effect (``needs`` of their fields), are here.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from os.path import exists, isdir  # unlike pathlib's they do not raise for a very long name
from pathlib import Path
from typing import Any, NoReturn

from megatron.arguments.checks import (
    adapters,
    checkpoint,
    context_parallel,
    data,
    diloco,
    fp8,
    grad_compression,
    model,
    objective,
    offload,
    training,
)
from megatron.arguments.checks.checkpoint import holds_checkpoints
from megatron.checkpoint.location import parse_location
from megatron.config.batch import final_iteration, get_num_microbatches
from megatron.config.errors import Problem
from megatron.config.model import ModelConfig
from megatron.config.option import Need
from megatron.config.plugins import registered
from megatron.config.run import (
    CPU_KERNELS,
    HUGGING_FACE_PREFIX,
    KERNEL_CANDIDATES,
    RunConfig,
    kernel_choices,
    kernel_problems,
)
from megatron.config.settings import SETTINGS, Setting
from megatron.config.text import flag
from megatron.pipeline.actions import ScheduleError
from megatron.pipeline.plan import DEFAULT_VIRTUAL_SCHEDULE, schedule_name, virtual_stages


def check_stop_file(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that the stop file can be created and is cheap to poll: rank 0 looks for it after every step."""
    name = config.training.stop_file
    if name is None:
        return
    path = parse_location(name)
    if name == "":
        yield Problem("E311", "--stop-file '' names no file", ("--stop-file runs/mine/stop", "drop --stop-file"))
    elif not isinstance(path, Path):
        sentence = f"--stop-file {path} must be on a disk, because it is polled after every step"
        yield Problem("E311", sentence, ("--stop-file runs/mine/stop",))
    elif isdir(path):
        sentence = f"--stop-file {path} is a folder, so the run would stop at once"
        yield Problem("E311", sentence, (f"--stop-file {path / 'stop'}",))
    elif not isdir(path.parent):
        sentence = f"--stop-file {path}: the folder {path.parent} does not exist"
        yield Problem("E311", sentence, (f"mkdir -p {path.parent}",))


def check_skip_train(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that ``--skip-train`` has batches to evaluate."""
    if config.training.skip_train and config.training.eval_iters == 0:
        sentence = "--skip-train only evaluates, and --eval-iters 0 turns evaluation off"
        yield Problem("E312", sentence, ("--eval-iters 100", "drop --skip-train"))


def check_required_checkpoint(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that there is a checkpoint for flags that need one."""
    checkpoint = config.checkpoint
    load = checkpoint.first_start.load
    folders = {"--load": load, "--save": checkpoint.save}
    if (load or "").startswith(HUGGING_FACE_PREFIX) or any(map(holds_checkpoints, folders.values())):
        return
    reason = "".join(f"; {flag} {folder} contains none" for flag, folder in folders.items() if folder is not None)
    if config.training.skip_train:
        sentence = f"--skip-train needs a checkpoint to evaluate{reason}"
        yield Problem("E312", sentence, ("--load RUN", "drop --skip-train"))
    elif checkpoint.exit_on_missing_checkpoint:
        sentence = f"--exit-on-missing-checkpoint needs a checkpoint to start from{reason}"
        yield Problem("E801", sentence, ("--load RUN", "drop --exit-on-missing-checkpoint"))


def check_kernels(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that every word of ``--kernels`` names an operation or an implementation that this model can use."""
    words = config.compute.kernels
    problems = list(kernel_problems(words))
    yield from problems
    if problems:
        return
    choices = kernel_choices(words)
    for operation, choice in choices.items() if config.training.device == "cpu" else ():
        on_cpu = CPU_KERNELS[:1] if operation == "fp8" else CPU_KERNELS
        if choice.alone and choice.name in KERNEL_CANDIDATES[operation] and choice.name not in on_cpu:
            sentence = f"--kernels {operation}={choice.name} needs a GPU, and this run uses a CPU"
            yield Problem("E903", sentence, (f"--kernels {operation}=auto",))
    parallel, choice = config.parallel, choices["attention"]
    if not choice.alone or choice.name == "torch":
        return
    if config.model.attention_dropout > 0.0:
        sentence = (
            f"--kernels attention={choice.name} cannot be used with --attention-dropout "
            f"{config.model.attention_dropout:g}: only PyTorch's unfused attention drops weights"
        )
        yield Problem("E903", sentence, ("--attention-dropout 0", "--kernels attention=auto"))
        return
    model = config.model
    scores = f"--softmax-type {model.softmax_type}" if model.softmax_type != "vanilla" else ""
    if not scores and model.attn_logit_softcapping is not None and choice.name in ("cudnn", "varlen"):
        scores = "--attn-logit-softcapping"
    if scores:
        sentence = f"--kernels attention={choice.name} cannot be used with {scores}"
        yield Problem("E903", sentence, ("--kernels attention=auto",))
    elif parallel.context_parallel_size > parallel.cp_head_ranks:
        sentence = (
            f"--kernels attention={choice.name} cannot be used with --cp-comm-type {parallel.cp_comm_type}: "
            "only PyTorch's attention merges the results for the keys of several ranks"
        )
        yield Problem("E903", sentence, ("--kernels attention=auto", "--cp-comm-type a2a"))


NO_CUDA_GRAPH = "--cuda-graph none"

CAPTURES = ("optimizer", "step")
"""Values of ``--cuda-graph`` that always capture; ``auto`` does only where nothing speaks against it."""


def no_gpu_problem(mode: str) -> Problem:
    """Return the problem of a run that captures ``mode`` on a CPU."""
    return Problem("E906", f"--cuda-graph {mode} needs a GPU, and this run uses a CPU", (NO_CUDA_GRAPH,))


OPTIMIZER_ONLY = ("--cuda-graph optimizer", NO_CUDA_GRAPH)


def check_graph_device(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that CUDA graphs run on a GPU."""
    if config.compute.cuda_graph in CAPTURES and config.training.device == "cpu":
        yield no_gpu_problem(config.compute.cuda_graph)


def check_graph_dropout(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Reject dropout and noise: their counter is the step number, which a captured step would not update."""
    if config.compute.cuda_graph != "step":
        return
    if config.model.hidden_dropout or config.model.attention_dropout:
        sentence = "--cuda-graph step does not support dropout: every step would drop the same elements"
        yield Problem("E907", sentence, ("--hidden-dropout 0 --attention-dropout 0", *OPTIMIZER_ONLY))
    if config.training.neftune_alpha:
        sentence = "--cuda-graph step does not support --neftune-alpha: every step would add the same noise"
        yield Problem("E907", sentence, ("--neftune-alpha 0", *OPTIMIZER_ONLY))


def check_graph_weight_decay(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Reject a changing weight decay: it is captured as a constant."""
    mode, style = config.compute.cuda_graph, config.optimizer.weight_decay_incr_style
    if mode in CAPTURES and style != "constant":
        needed = f"--cuda-graph {mode} needs a constant weight decay"
        sentence = f"{needed}, and --weight-decay-incr-style {style} changes it"
        yield Problem("E908", sentence, ("--weight-decay-incr-style constant", NO_CUDA_GRAPH))


def check_graph_backend(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Reject gloo: it communicates from the CPU, which a graph does not capture."""
    mode, parallel = config.compute.cuda_graph, config.parallel
    if mode not in CAPTURES or parallel.distributed_backend != "gloo":
        return
    if (parallel.model_ranks if mode == "optimizer" else world_size) > 1:
        sentence = f"--cuda-graph {mode} cannot capture the communication of --distributed-backend gloo"
        yield Problem("E909", sentence, ("--distributed-backend nccl", NO_CUDA_GRAPH))


def check_graph_gather(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Reject all-gathers of weights that one step starts and the next one waits for: a graph ends with its step.

    ZeRO-3 gathers within the step, in memory that it frees and allocates again.
    """
    mode, parallel = config.compute.cuda_graph, config.parallel
    if mode == "step" and parallel.zero_stage == 3:
        sentence = "--cuda-graph step cannot capture optim_grads_params, which frees and allocates weights (ZeRO-3)"
        yield Problem("E913", sentence, OPTIMIZER_ONLY)
    if mode in CAPTURES and parallel.overlap_param_gather and parallel.zero_stage in (1, 2):
        sentence = f"--cuda-graph {mode} cannot capture --overlap-param-gather, which ends in the next step"
        yield Problem("E913", sentence, ("--no-overlap-param-gather", NO_CUDA_GRAPH))


def check_graph_pipeline(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Reject capturing a step with several pipeline ranks, which is untested."""
    ranks = config.parallel.pipeline_model_parallel_size
    if config.compute.cuda_graph == "step" and ranks > 1:
        sentence = f"--cuda-graph step is untested with pipeline parallelism; there are {ranks} pipeline ranks"
        yield Problem("E912", sentence, OPTIMIZER_ONLY)


def check_graph_documents(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Reject separate documents: the host selects the parts of attention, which differ in every step."""
    if config.compute.cuda_graph == "step" and config.data.reset_attention_mask:
        sentence = "--cuda-graph step cannot capture attention to documents, which end at other tokens in every step"
        yield Problem("E910", sentence, OPTIMIZER_ONLY)


def check_graph_attention(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Reject capturing context parallelism, patterns and caps that need FlexAttention, and sinks: all are untested."""
    size, model = config.parallel.context_parallel_size, config.model
    if config.compute.cuda_graph != "step":
        return
    if size > 1:
        sentence = f"--cuda-graph step is untested with context parallelism; there are {size} context-parallel ranks"
        yield Problem("E917", sentence, OPTIMIZER_ONLY)
    for name in ("attn_logit_softcapping", "softmax_type"):
        if (value := getattr(model, name)) != getattr(ModelConfig, name):
            sentence = f"--cuda-graph step is untested with {flag(name)} {value}"
            yield Problem("E917", sentence, OPTIMIZER_ONLY)
    try:
        windows = all(model.pattern(layer).only_window for layer in range(model.num_layers))
    except ValueError:  # reported by the check of the pattern
        return
    if not windows:
        sentence = f"--cuda-graph step is untested with --attention-pattern {model.attention_pattern}"
        yield Problem("E917", sentence, OPTIMIZER_ONLY)


def check_tp_overlap(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that symmetric memory, where it is requested, has GPUs and is not captured."""
    method, fixes = config.parallel.tp_comm_overlap_method, ("--tp-comm-overlap-method pipelined",)
    if method != "symmetric_memory":
        return
    if config.training.device == "cpu":
        yield Problem("E930", f"--tp-comm-overlap-method {method} needs GPUs, and this run uses CPUs", fixes)
    if config.compute.cuda_graph == "step":
        sentence = f"--tp-comm-overlap-method {method} is untested with --cuda-graph step"
        yield Problem("E931", sentence, (*fixes, *OPTIMIZER_ONLY))


GRAPH_CHECKS = (
    check_graph_dropout,
    check_graph_weight_decay,
    check_graph_backend,
    check_graph_gather,
    check_graph_pipeline,
    check_graph_documents,
    check_graph_attention,
    check_tp_overlap,
    model.check_graph_experts,
    adapters.check_graph_adapters,
    grad_compression.check_graph_compression,
    offload.check_graph_offload,
    objective.check_graph_objective,
)
"""Checks of ``--cuda-graph step`` on a GPU."""

MAX_GRAPH_ELEMENTS = 2**25
"""Largest hidden state of a micro-batch, in elements on a rank, for which ``--cuda-graph auto`` captures steps. A layer
of this size keeps a GPU busy for milliseconds, longer than the host needs to launch its kernels; a graph would gain
nothing, and keep its memory."""


MAX_GRAPH_BLOCKS = 1024
"""Largest number of blocks times micro-batches that ``--cuda-graph auto`` captures: each is some 30 kernels."""


def choose_cuda_graph(config: RunConfig, world_size: int, cuda: bool = True) -> tuple[str, str]:
    """Return the part of a step to capture, and why ``--cuda-graph auto`` chooses it.

    Args:
        config: resolved or not.
        world_size: number of ranks.
        cuda: True if the run uses a GPU.
    """
    mode, training, parallel = config.compute.cuda_graph, config.training, config.parallel
    if mode != "auto":
        return mode, ""
    if not cuda:
        return "none", "this run uses a CPU"
    step = replace(config, compute=replace(config.compute, cuda_graph="step"))
    problems = [problem.sentence for check in GRAPH_CHECKS for problem in check(step, world_size)]
    if problems:
        return "none", problems[0]
    mixers = [("mixer", name) for name in config.model.token_mixers]
    for kind, name in (("objective", training.objective), ("optimizer", config.optimizer.optimizer), *mixers):
        if name in registered(kind):
            return "none", f"the {kind} {name} is a plugin's, whose Python code a graph would freeze"
    blocks = config.model.num_layers * get_num_microbatches(training, parallel.data_parallel_size(world_size))
    if blocks > MAX_GRAPH_BLOCKS:
        return "none", f"a step has {blocks:,} blocks times micro-batches, above {MAX_GRAPH_BLOCKS:,}"
    tokens, hidden = training.micro_batch_size * training.seq_length, config.model.hidden_size
    elements = tokens * hidden // (parallel.tensor_model_parallel_size * parallel.context_parallel_size)
    size = f"a micro-batch of {tokens:,} tokens x {hidden:,} has {elements:,} elements on a rank"
    if elements > MAX_GRAPH_ELEMENTS:
        return "none", f"{size}, above {MAX_GRAPH_ELEMENTS:,}: the GPU is slower than the host"
    return "step", f"{size}, at most {MAX_GRAPH_ELEMENTS:,}: the host would be the limit"


def check_empty_names(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Reject empty names of folders and projects."""
    for setting in SETTINGS.values():
        if setting.group == "logging" and setting.value_in(config) == "":
            yield Problem("E702", f"{setting.flag} '' is empty", (f"drop {setting.flag}", f"{setting.flag} NAME"))


def check_run_folder(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that ``--run-dir`` is a folder or can be created. Rank 0 finds out later whether it is writable."""
    if not config.logging.run_dir:
        return
    folder = Path(config.logging.run_dir)
    existing = next(path for path in (folder, *folder.parents) if exists(path))
    if not isdir(existing):
        where = "it" if existing == folder else str(existing)
        yield Problem("E701", f"--run-dir {folder}: {where} is a file, not a folder", (f"--run-dir {existing}-run",))


MAX_PROFILE_STEPS = 20
"""Largest number of steps in one profile. The profiler keeps all events in memory: 6 MB a step for 2 layers and 4
micro-batches."""


def check_sample_prompts(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that the prompts can be read; texts are generated by whole models only."""
    path = config.logging.sample_prompts
    if path is not None and config.training.eval_iters and not Path(path).is_file():
        sentence = f"--sample-prompts {path}: there is no such file; it has a prompt per line"
        yield Problem("E708", sentence, ("drop --sample-prompts",))
    names = ("pipeline_model_parallel_size", "expert_model_parallel_size", "sequence_parallel")
    for name in names if config.logging.sample_prompts is not None else ():
        if (value := getattr(config.parallel, name, 1)) > 1 or value is True:
            setting = SETTINGS[name]
            sentence = f"--sample-prompts generates text without {setting.flag} only"
            fixes = (setting.spell(setting.default), "drop --sample-prompts")
            yield Problem("E708", sentence, fixes)


def check_evaluated_tasks(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that lm-eval is installed and the folder of tasks exists; the tasks themselves are loaded at the start."""
    folder = config.training.evaluate_tasks_path
    if not config.training.evaluate_tasks:
        return
    if find_spec("lm_eval") is None:
        sentence = "--evaluate-tasks needs lm-eval, which is not installed"
        yield Problem("E709", sentence, ("pip install 'megatron-pretrain[evaluate]'", "drop --evaluate-tasks"))
    if folder is not None and not isdir(folder):
        yield Problem("E709", f"--evaluate-tasks-path {folder} is not a folder", ("drop --evaluate-tasks-path",))


def check_window(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that the last step to profile comes after the first, and not too long after it."""
    profiling = config.profiling
    start, end = profiling.profile_step_start, profiling.profile_step_end
    if (profiling.profile or profiling.profile_memory) and end - start > MAX_PROFILE_STEPS:
        limit = f"at most {MAX_PROFILE_STEPS} fit, because all events stay in memory"
        fixes = (f"--profile-step-end {start + MAX_PROFILE_STEPS}",)
        yield Problem("E706", f"a profile of {end - start:,} steps; {limit}", fixes)
    if profiling.requested and end <= start:
        sentence = f"--profile-step-end {end} must be above --profile-step-start {start}"
        yield Problem("E705", sentence, (f"--profile-step-end {start + 2}",))


def check_ranks(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that the chosen ranks exist, even without steps: a running job can be asked for a profile."""
    ranks = config.profiling.profile_ranks
    beyond = [rank for rank in ranks if rank >= world_size]
    if beyond:
        existing = " ".join(str(rank) for rank in ranks if rank < world_size)
        available = "only rank 0 exists" if world_size == 1 else f"ranks are 0 to {world_size - 1}"
        yield Problem("E704", f"--profile-ranks {beyond[0]}: {available}", (f"--profile-ranks {existing or 0}",))


def profiling_notes(config: RunConfig, world_size: int) -> Iterator[str]:
    """Yield a note if the run ends before the profile starts."""
    profiling = config.profiling
    steps = final_iteration(config.training, config.parallel.data_parallel_size(world_size))
    start = profiling.profile_step_start
    if profiling.requested and start > steps:
        yield f"--profile-step-start {start}: no profile, because the run ends with step {steps:,}"


def cuda_graph_notes(config: RunConfig, world_size: int) -> Iterator[str]:
    """Yield a note if health reports keep every step from using the graph."""
    if config.compute.cuda_graph == "step" and config.logging.log_health_interval == 1:
        yield "--log-health-interval 1: --cuda-graph step has no effect, because steps with a health report run eagerly"


def _has_interleaved_stages(config: RunConfig) -> bool:
    """Return True for the interleaved schedule. Invalid schedules are reported by the pipeline checks."""
    try:
        stages = virtual_stages(config.model, config.parallel)
    except ScheduleError:
        return True
    return stages > 1 and schedule_name(config.parallel, stages) == DEFAULT_VIRTUAL_SCHEDULE


CONDITIONS = {
    "several_stages": lambda c: c.parallel.pipeline_model_parallel_size > 1 or virtual_stages(c.model, c.parallel) > 1,
    "interleaved_stages": _has_interleaved_stages,
}
"""Conditions of options that follow from several fields, and so cannot be computed in ``config``."""


def is_met(need: Need, config: RunConfig) -> bool:
    """Return True if options that depend on ``need`` have an effect."""
    if not isinstance(need.condition, str):
        return need.condition(config)
    if need.condition in CONDITIONS:
        return CONDITIONS[need.condition](config)
    name, equals, values = need.condition.partition("=")
    setting = SETTINGS[name]
    value = setting.value_in(config)
    if not equals:
        return value is not None and value is not False
    # a plugin may use the options of built-in optimizers
    plugins = registered(setting.option.kind) if setting.option.kind else ()
    return value in values.split("|") or value in plugins


SETTINGS_BY_NEED: dict[Need, list[Setting]] = defaultdict(list)
for each_setting in SETTINGS.values():
    for each_need in each_setting.option.needs:
        SETTINGS_BY_NEED[each_need].append(each_setting)


def _unused(need: Need, config: RunConfig) -> list[Setting]:
    """Return the settings that are set without effect."""
    if is_met(need, config):
        return []
    return [setting for setting in SETTINGS_BY_NEED[need] if setting.value_in(config) != setting.default]


def unused_option_notes(config: RunConfig, given: Collection[str]) -> list[str]:
    """Return notes about options without effect; only those in ``given``, not those of a preset."""
    unused = {
        need: [s for s in _unused(need, config) if s.name in given and s.value_in(config) is not None]
        for need in SETTINGS_BY_NEED
    }
    return [_no_effect(settings, need) for need, settings in unused.items() if settings]


def _no_effect(unused: Sequence[Setting], need: Need) -> str:
    *others, last = (setting.flag for setting in unused)
    subject = f"{', '.join(others)} and {last} have" if others else f"{last} has"
    return f"{subject} no effect without {need}"


Check = Callable[[RunConfig, int], Iterator[Problem]]


def _checks() -> list[Check]:
    """Return the functions named ``check_...`` of the modules of checks, in order."""
    own = sys.modules[__name__]
    modules = (
        model,
        adapters,
        context_parallel,
        grad_compression,
        training,
        objective,
        diloco,
        offload,
        fp8,
        data,
        checkpoint,
        own,
    )
    return [f for each in modules for name, f in vars(each).items() if name.startswith("check_")]


NOTES = (
    training.batch_notes,
    training.learning_rate_notes,
    data.data_notes,
    checkpoint.checkpoint_notes,
    profiling_notes,
    cuda_graph_notes,
    model.attention_notes,
    model.pipeline_notes,
    model.expert_notes,
    model.sharding_notes,
    context_parallel.context_parallel_notes,
    grad_compression.grad_compression_notes,
    fp8.fp8_notes,
    diloco.diloco_notes,
)
"""Functions of a configuration without problems and the number of ranks; they yield notes of one line."""


def find_problems(config: RunConfig, world_size: int, doubtful: Set[str] = frozenset()) -> list[Problem]:
    """Return every problem of a run on ``world_size`` ranks.

    Each number is checked against its limits first. Checks of how values fit together skip values already known to be
    wrong, so that one mistake is reported once.

    Args:
        config: resolved or not.
        world_size: number of ranks.
        doubtful: fields whose given value could not be read.
    """
    found = []
    wrong = set(doubtful)
    for name, setting in SETTINGS.items():
        value = setting.value_in(config)
        if not setting.allows(value):
            wrong.add(name)
            sentence = f"{setting.flag} {setting.show(value)}: must be {setting.option.limits}"
            found.append(Problem("E600", sentence, (setting.spell(_suggest(setting, value)),)))
    known = config
    for setting in (SETTINGS[name] for name in wrong):
        group = replace(getattr(known, setting.group), **{setting.name: _Unknown()})
        known = replace(known, **{setting.group: group})
    for check in _checks():
        with suppress(_UnknownError):
            found.extend(check(known, world_size))
    return found


def _suggest(setting: Setting, value: Any) -> Any:
    """Return the upper limit for a larger value; else the default, the example or the lower limit."""
    option, least, most = setting.option, setting.option.bounds.get("at_least"), setting.option.bounds.get("at_most")
    if setting.many:
        return setting.default or tuple(item if option.allows(item) else least for item in value)
    suggestions = (most if most is not None and value > most else None, setting.default, option.example, least)
    return setting.scalar(next(number for number in suggestions if number is not None))


class _UnknownError(Exception):
    """A check used a value that is already known to be wrong."""


def _refuse(*operands: object) -> NoReturn:
    raise _UnknownError


USES = {"__getattr__", "__call__", "__fspath__"}.union(*map(vars, (int, float, str, tuple)))
_Unknown = type("_Unknown", (), dict.fromkeys(USES - {"__new__", "__getattribute__", "__doc__"}, _refuse))
"""Placeholder for a wrong value: every use of it raises ``_UnknownError``."""
