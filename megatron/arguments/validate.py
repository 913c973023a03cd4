"""All checks of a configuration: ``find_problems`` runs them and reports everything at once.

Numbers are checked against their limits first; later checks skip values already known to be wrong. The checks of the
model, parallelism, training, data and checkpoints are in ``checks/``. Those of kernels, the stop file, logging
folders,
profiling and CUDA graphs, and of options that are set without effect, are here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Set
from dataclasses import dataclass, fields, replace
from os.path import exists, isdir
from pathlib import Path
from typing import Any, NoReturn

from megatron.arguments.checks import checkpoint, data, model, parallel, training
from megatron.arguments.checks import model as model_module
from megatron.arguments.checks.checkpoint import holds_checkpoints
from megatron.arguments.sources import flat_values
from megatron.checkpoint.object_store import RemotePath, parse_location
from megatron.config.batch import final_iteration
from megatron.config.errors import Problem
from megatron.config.run import DOCUMENT_BOUNDARY_OPTIONS, ProfilingConfig, RunConfig, kernel_choices, kernel_problems
from megatron.config.settings import SETTINGS, Setting
from megatron.pipeline.actions import ScheduleError
from megatron.pipeline.plan import DEFAULT_VIRTUAL_SCHEDULE, schedule_name, virtual_stages


def check_kernels(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that every word of ``--kernels`` names an operation or an implementation that this model can use."""
    words = config.compute.kernels
    problems = list(kernel_problems(words))
    yield from problems
    if problems or config.model.attention_dropout == 0.0:
        return
    choice = kernel_choices(words)["attention"]
    if choice.alone and choice.name != "torch":
        sentence = (
            f"--kernels attention={choice.name} cannot be used with --attention-dropout "
            f"{config.model.attention_dropout:g}: only PyTorch's unfused attention drops weights"
        )
        yield Problem("E903", sentence, ("--attention-dropout 0", "--kernels attention=auto"))


KERNEL_CHECKS = (check_kernels,)


# unlike pathlib's it does not raise for a very long name


def check_stop_file(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that the stop file can be created and is cheap to poll: rank 0 looks for it after every step."""
    name = config.training.stop_file
    if name is None:
        return
    if name == "":
        yield Problem("E311", "--stop-file '' names no file", ("--stop-file runs/mine/stop", "drop --stop-file"))
        return
    path = parse_location(str(name))
    if isinstance(path, RemotePath):
        sentence = f"--stop-file {path} must be on a disk, because it is polled after every step"
        yield Problem("E311", sentence, ("--stop-file runs/mine/stop",))
    elif isdir(path):
        sentence = f"--stop-file {path} is a folder, so the run would stop at once"
        yield Problem("E311", sentence, (f"--stop-file {path / 'stop'}",))
    elif not isdir(path.parent):
        sentence = f"--stop-file {path}: the folder {path.parent} does not exist"
        yield Problem("E311", sentence, (f"mkdir -p {path.parent}",))


def check_skip_train(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that ``--skip-train`` has weights and batches to evaluate."""
    if not config.training.skip_train:
        return
    checkpoint = config.checkpoint
    if config.training.eval_iters == 0:
        sentence = "--skip-train only evaluates, and --eval-iters 0 turns evaluation off"
        yield Problem("E312", sentence, ("--eval-iters 100", "drop --skip-train"))
    if checkpoint.load is None and not holds_checkpoints(checkpoint.save):
        reason = "" if checkpoint.save is None else f"; --save {checkpoint.save} contains none"
        sentence = f"--skip-train needs a checkpoint to evaluate{reason}"
        yield Problem("E312", sentence, ("--load RUN", "drop --skip-train"))


STOPPING_CHECKS = (check_stop_file, check_skip_train)


# unlike pathlib's they do not raise for a very long name


NAMED_PLACES = ("run_dir", "tensorboard_dir", "wandb_project", "wandb_exp_name", "wandb_save_dir", "wandb_entity")


def check_empty_names(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Reject empty names of folders and projects."""
    for name in NAMED_PLACES:
        if getattr(config.logging, name) == "":
            flag = SETTINGS[name].flag
            yield Problem("E702", f"{flag} '' is empty", (f"drop {flag}", f"{flag} NAME"))


def check_run_folder(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that ``--run-dir`` is a folder or can be created. Rank 0 finds out later whether it is writable."""
    if not config.logging.run_dir:
        return
    folder = Path(str(config.logging.run_dir))
    existing = next(path for path in (folder, *folder.parents) if exists(path))
    if not isdir(existing):
        where = "it" if existing == folder else str(existing)
        yield Problem("E701", f"--run-dir {folder}: {where} is a file, not a folder", (f"--run-dir {existing}-run",))


LOGGING_CHECKS = (check_empty_names, check_run_folder)


MAX_PROFILE_STEPS = 20
"""Largest number of steps in one profile. The profiler keeps all events in memory: 6 MB a step for 2 layers and 4
micro-batches."""


def check_window(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that the last step to profile comes after the first, and not too long after it."""
    profiling = config.profiling
    start = profiling.profile_step_start
    end = profiling.profile_step_end
    if (profiling.profile or profiling.profile_memory) and end - start > MAX_PROFILE_STEPS:
        sentence = (
            f"a profile of {end - start:,} steps; at most {MAX_PROFILE_STEPS} fit, because all events stay in memory"
        )
        yield Problem("E706", sentence, (f"--profile-step-end {start + MAX_PROFILE_STEPS}",))
    if _is_requested(profiling) and end <= start:
        sentence = f"--profile-step-end {end} must be above --profile-step-start {start}"
        yield Problem("E705", sentence, (f"--profile-step-end {start + 2}",))


def check_ranks(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that the chosen ranks exist, even without steps: a running job can be asked for a profile."""
    beyond = [rank for rank in config.profiling.profile_ranks if rank >= world_size]
    if beyond:
        existing = [str(rank) for rank in config.profiling.profile_ranks if rank < world_size]
        available = "only rank 0 exists" if world_size == 1 else f"ranks are 0 to {world_size - 1}"
        sentence = f"--profile-ranks {beyond[0]}: {available}"
        yield Problem("E704", sentence, (f"--profile-ranks {' '.join(existing) or 0}",))


def profiling_notes(config: RunConfig, world_size: int) -> Iterator[str]:
    """Yield a note if the run ends before the profile starts."""
    profiling = config.profiling
    steps = final_iteration(config.training, config.parallel.data_parallel_size(world_size))
    start = profiling.profile_step_start
    if _is_requested(profiling) and start > steps:
        yield f"--profile-step-start {start}: no profile, because the run ends with step {steps:,}"


def _is_requested(profiling: ProfilingConfig) -> bool:
    return profiling.profile or profiling.profile_memory or profiling.profile_pipeline


PROFILING_CHECKS = (check_window, check_ranks)


NO_CUDA_GRAPH = "--cuda-graph none"


def check_cuda_graph_device(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that CUDA graphs run on a GPU."""
    if config.compute.cuda_graph != "none" and config.training.device == "cpu":
        yield no_gpu_problem(config.compute.cuda_graph)


def no_gpu_problem(recorded: str) -> Problem:
    """Return the problem of a run that captures ``recorded`` on a CPU."""
    return Problem("E906", f"--cuda-graph {recorded} needs a GPU, and this run uses a CPU", (NO_CUDA_GRAPH,))


def check_cuda_graph_dropout(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Reject dropout: its counter is the step number, which a captured step would not update."""
    model = config.model
    if config.compute.cuda_graph != "step" or not (model.hidden_dropout or model.attention_dropout):
        return
    fixes = ("--hidden-dropout 0 --attention-dropout 0", "--cuda-graph optimizer", NO_CUDA_GRAPH)
    yield Problem("E907", "--cuda-graph step does not support dropout: every step would drop the same elements", fixes)


def check_cuda_graph_weight_decay(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Reject a changing weight decay: it is captured as a constant."""
    optimizer = config.optimizer
    if config.compute.cuda_graph != "none" and optimizer.weight_decay_incr_style != "constant":
        sentence = (
            f"--cuda-graph {config.compute.cuda_graph} needs a constant weight decay, "
            f"and --weight-decay-incr-style {optimizer.weight_decay_incr_style} changes it"
        )
        yield Problem("E908", sentence, ("--weight-decay-incr-style constant", NO_CUDA_GRAPH))


def check_cuda_graph_backend(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Reject gloo: it communicates from the CPU, which a graph does not capture."""
    parallel = config.parallel
    recorded = config.compute.cuda_graph
    communicates = {"none": False, "optimizer": parallel.model_ranks > 1, "step": world_size > 1}[recorded]
    if communicates and parallel.distributed_backend == "gloo":
        sentence = f"--cuda-graph {recorded} cannot capture the communication of --distributed-backend gloo"
        yield Problem("E909", sentence, ("--distributed-backend nccl", NO_CUDA_GRAPH))


def check_cuda_graph_documents(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Reject flash-attn with documents: their number is an argument of its call and differs in every step."""
    words = config.compute.kernels
    if config.compute.cuda_graph != "step" or not config.data.reset_attention_mask or any(kernel_problems(words)):
        return
    if kernel_choices(words)["attention"].name in ("auto", "flash_attn"):
        sentence = (
            "--cuda-graph step cannot capture flash-attn on documents, "
            f"which --kernels {' '.join(words)} selects where it is installed"
        )
        without = " ".join([*(word for word in words if not word.startswith("attention=")), "attention=torch"])
        yield Problem("E910", sentence, (f"--kernels {without}", "--cuda-graph optimizer", NO_CUDA_GRAPH))


def check_cuda_graph_pipeline(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Reject capturing a step with several pipeline ranks, which is untested."""
    ranks = config.parallel.pipeline_model_parallel_size
    if config.compute.cuda_graph == "step" and ranks > 1:
        sentence = f"--cuda-graph step is untested with pipeline parallelism; there are {ranks} pipeline ranks"
        yield Problem("E912", sentence, ("--cuda-graph optimizer", NO_CUDA_GRAPH))


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


@dataclass(frozen=True)
class OptionRule:
    """Fields that have an effect only under a condition."""

    fields: tuple[str, ...]
    active: Callable[[RunConfig], bool]  # the condition
    needs: str  # the condition in words
    remedy: str = ""  # flags that fulfil the condition; for mistakes

    def unused_fields(self, config: RunConfig) -> list[str]:
        """Return the fields that are set without effect."""
        if self.active(config):
            return []
        values = ((name, getattr(getattr(config, SETTINGS[name].group), name)) for name in self.fields)
        return [name for name, value in values if value != SETTINGS[name].default]


def _recomputes(granularity: str) -> Callable[[RunConfig], bool]:
    return lambda c: c.training.recompute_granularity == granularity


def _tokenizer_is(*tokenizers: str) -> Callable[[RunConfig], bool]:
    return lambda c: c.data.tokenizer_type in tokenizers


TOKENIZERS_WITH_A_MODEL = (
    "HuggingFaceTokenizer",
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "TikTokenizer",
)
"""Tokenizers that read ``tokenizer_model``."""

DYNAMIC_SCALE = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")


def _is_interleaved(config: RunConfig) -> bool:
    """Return True for the interleaved schedule. Invalid schedules are reported by the pipeline checks."""
    try:
        stages = virtual_stages(config.model, config.parallel)
    except ScheduleError:
        return True
    return stages > 1 and schedule_name(config.parallel, stages) == DEFAULT_VIRTUAL_SCHEDULE


MISPLACED_OPTIONS = (
    OptionRule(
        ("microbatch_group_size_per_virtual_pipeline_stage",),
        _is_interleaved,
        "the interleaved schedule and several stages per rank",
        "--pipeline-schedule interleaved --num-virtual-stages-per-pipeline-rank 2",
    ),
    OptionRule(
        ("rotary_base", "rotary_percent", "rotary_interleaved"),
        lambda c: c.model.position_embedding_type in ("rope", "yarn"),
        "rotary positions",
        "--position-embedding-type rope",
    ),
    OptionRule(
        ("use_rope_scaling",),
        lambda c: c.model.position_embedding_type == "rope",
        "position_embedding_type rope",
        "--position-embedding-type rope",
    ),
    OptionRule(
        ("rope_scaling_factor", "rope_original_max_position", "rope_low_freq_factor", "rope_high_freq_factor"),
        lambda c: c.model.use_rope_scaling,
        "use_rope_scaling",
        "--use-rope-scaling",
    ),
    OptionRule(
        ("rotary_scaling_factor", "yarn_original_max_position_embeddings", "yarn_beta_fast", "yarn_beta_slow"),
        lambda c: c.model.position_embedding_type == "yarn",
        "position_embedding_type yarn",
        "--position-embedding-type yarn",
    ),
    OptionRule(("loss_scale", *DYNAMIC_SCALE), lambda c: c.precision.params_dtype == "fp16", "fp16", "--fp16"),
    OptionRule(
        DYNAMIC_SCALE,
        lambda c: c.precision.params_dtype != "fp16" or c.precision.loss_scale is None,
        "a dynamic loss scale",
        "--set precision.loss_scale=null",
    ),
    OptionRule(
        ("recompute_method", "recompute_num_layers"),
        _recomputes("full"),
        "recompute_granularity full",
        "--recompute-granularity full",
    ),
    OptionRule(
        ("recompute_modules",),
        _recomputes("selective"),
        "recompute_granularity selective",
        "--recompute-granularity selective",
    ),
    OptionRule(
        ("lr_wsd_decay_iters", "lr_wsd_decay_samples", "lr_wsd_decay_style"),
        lambda c: c.optimizer.lr_decay_style == "WSD",
        "lr_decay_style WSD",
        "--lr-decay-style WSD",
    ),
    OptionRule(
        ("save_interval", "keep_last", "keep_every", "async_save"),
        lambda c: c.checkpoint.save is not None,
        "a folder to save to",
        "--save checkpoints",
    ),
    OptionRule(
        ("keep_every",),
        lambda c: c.checkpoint.save is None or c.checkpoint.keep_last is not None,
        "keep_last",
        "--keep-last 3",
    ),
    OptionRule(
        ("ckpt_step", "resume_mode"),
        lambda c: c.checkpoint.load is not None or c.checkpoint.save is not None,
        "a checkpoint to start from",
        "--load checkpoints",
    ),
    OptionRule(
        DOCUMENT_BOUNDARY_OPTIONS,
        lambda c: not c.data.mock_data,
        "documents (generated tokens have none)",
        "--no-mock-data --data-path PREFIX",
    ),
    OptionRule(
        ("validation_set_names",),
        lambda c: c.data.multiple_validation_sets,
        "multiple_validation_sets",
        "--multiple-validation-sets",
    ),
    OptionRule(
        ("wandb_exp_name", "wandb_save_dir", "wandb_entity"),
        lambda c: c.logging.wandb_project is not None,
        "wandb_project",
        "--wandb-project mine",
    ),
    OptionRule(
        ("profile", "profile_memory", "profile_pipeline"),
        lambda c: c.logging.run_dir is not None,
        "run_dir",
        "--run-dir runs/mine",
    ),
    OptionRule(
        ("decoupled_min_lr",),
        lambda c: c.optimizer.decoupled_lr is not None,
        "decoupled_lr",
        "--decoupled-lr 1e-4",
    ),
    OptionRule(
        ("exp_avg_dtype",),
        lambda c: c.optimizer.optimizer in ("adam", "lion"),
        "optimizer adam or lion",
        "--optimizer adam",
    ),
    OptionRule(("exp_avg_sq_dtype",), lambda c: c.optimizer.optimizer == "adam", "optimizer adam", "--optimizer adam"),
    OptionRule(
        ("store_param_remainders",),
        lambda c: c.precision.params_dtype == "bf16" and c.optimizer.optimizer != "muon",
        "bf16 and optimizer adam, lion or sgd",
        "--bf16",
    ),
    OptionRule(
        (
            "moe_ffn_hidden_size",
            "moe_shared_expert_intermediate_size",
            "moe_router_pre_softmax",
            "moe_aux_loss_coeff",
            "moe_z_loss_coeff",
        ),
        lambda c: c.model.num_experts is not None,
        "num_experts",
        "--num-experts 8",
    ),
    OptionRule(
        ("local_save_interval",),
        lambda c: c.checkpoint.local_save is not None,
        "local_save",
        "--local-save /dev/shm/checkpoints",
    ),
    OptionRule(
        ("spike_window",),
        lambda c: c.optimizer.skip_spikes is not None,
        "skip_spikes",
        "--skip-spikes 6",
    ),
    OptionRule(
        ("vocab_file", "merge_file"),
        _tokenizer_is("GPT2BPETokenizer"),
        "tokenizer_type GPT2BPETokenizer",
        "--tokenizer-type GPT2BPETokenizer",
    ),
    OptionRule(
        ("tiktoken_pattern", "tiktoken_num_special_tokens"),
        _tokenizer_is("TikTokenizer"),
        "tokenizer_type TikTokenizer",
        "--tokenizer-type TikTokenizer",
    ),
    OptionRule(
        ("tokenizer_model",),
        _tokenizer_is(*TOKENIZERS_WITH_A_MODEL),
        "a tokenizer_type that reads it",
        "--tokenizer-type HuggingFaceTokenizer",
    ),
)

UNUSED_OPTIONS = (
    OptionRule(
        ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
        lambda c: c.parallel.pipeline_model_parallel_size > 1 or virtual_stages(c.model, c.parallel) > 1,
        "several stages",
    ),
    OptionRule(("sequence_parallel",), lambda c: c.parallel.tensor_model_parallel_size > 1, "TP above 1"),
    OptionRule(("eval_interval",), lambda c: c.training.eval_iters > 0, "eval_iters above 0"),
    OptionRule(
        (
            *("eval_interval", "exit_interval", "exit_duration_in_mins", "stop_file"),
            *("save_interval", "keep_last", "keep_every", "async_save", "local_save", "local_save_interval"),
        ),
        lambda c: not c.training.skip_train,
        "training steps (skip_train takes none)",
    ),
    OptionRule(("min_lr",), lambda c: c.optimizer.lr_decay_style != "constant", "a learning rate that decays"),
    OptionRule(
        ("lr_warmup_init",),
        lambda c: bool(c.optimizer.lr_warmup_fraction or c.optimizer.lr_warmup_iters or c.optimizer.lr_warmup_samples),
        "a warm-up",
    ),
    OptionRule(
        ("weight_decay",),
        lambda c: c.optimizer.weight_decay_incr_style == "constant",
        "a constant weight decay",
    ),
    OptionRule(
        ("adam_beta1", "adam_beta2", "adam_eps"),
        lambda c: c.optimizer.optimizer in ("adam", "muon"),
        "optimizer adam or muon",
    ),
    OptionRule(
        (
            "muon_momentum",
            "muon_nesterov",
            "muon_num_ns_steps",
            "muon_scale_mode",
            "muon_extra_scale_factor",
            "muon_split_qkv",
        ),
        lambda c: c.optimizer.optimizer == "muon",
        "optimizer muon",
    ),
    OptionRule(
        ("moe_router_topk", "moe_router_load_balancing_type"),
        lambda c: c.model.num_experts is not None,
        "num_experts",
    ),
    OptionRule(("lion_beta1", "lion_beta2"), lambda c: c.optimizer.optimizer == "lion", "optimizer lion"),
    OptionRule(
        ("profile_step_start", "profile_step_end"),
        lambda c: c.profiling.profile or c.profiling.profile_memory or c.profiling.profile_pipeline,
        "profile, profile_memory or profile_pipeline",
    ),
    OptionRule(
        ("profile_ranks", "pytorch_profiler_collect_shapes", "pytorch_profiler_collect_callstack"),
        lambda c: c.logging.run_dir is not None,
        "run_dir",
    ),
    OptionRule(("timing_log_option",), lambda c: c.logging.timing_log_level > 0, "timing_log_level above 0"),
    OptionRule(("sgd_momentum",), lambda c: c.optimizer.optimizer == "sgd", "optimizer sgd"),
    OptionRule(("split",), lambda c: bool(c.data.data_path or c.data.data_args_path), "data_path"),
    OptionRule(("data_cache_path", "multiple_validation_sets"), lambda c: not c.data.mock_data, "files of tokens"),
    OptionRule(
        ("eod_id",),
        lambda c: any(getattr(c.data, name) for name in DOCUMENT_BOUNDARY_OPTIONS),
        "reset_position_ids, reset_attention_mask or eod_mask_loss",
    ),
)


def _check_rule(rule: OptionRule) -> Callable[[RunConfig, int], Iterator[Problem]]:
    def check(config: RunConfig, world_size: int) -> Iterator[Problem]:
        unused = rule.unused_fields(config)
        if unused:
            defaults = " ".join(SETTINGS[name].spell(SETTINGS[name].default) for name in unused)
            yield Problem("E601", _no_effect(unused, rule.needs), (rule.remedy, defaults))

    return check


def unused_option_notes(config: RunConfig, given: Collection[str]) -> list[str]:
    """Return notes about options without effect; only those in ``given``, not those of a preset."""
    found = (([name for name in rule.unused_fields(config) if name in given], rule.needs) for rule in UNUSED_OPTIONS)
    return [_no_effect(unused, needs) for unused, needs in found if unused]


def _no_effect(names: list[str], needs: str) -> str:
    if len(names) == 1:
        return f"{names[0]} has no effect without {needs}"
    return f"{', '.join(names[:-1])} and {names[-1]} have no effect without {needs}"


UNUSED_OPTION_CHECKS = tuple(_check_rule(rule) for rule in MISPLACED_OPTIONS)


CHECKS = (
    *model.MODEL_CHECKS,
    *parallel.LAYOUT_CHECKS,
    *model_module.EXPERT_CHECKS,
    *parallel.SHARDING_CHECKS,
    *parallel.PIPELINE_CHECKS,
    *training.BATCH_CHECKS,
    *training.OPTIMIZER_CHECKS,
    *data.DATA_CHECKS,
    *checkpoint.CHECKPOINT_CHECKS,
    *STOPPING_CHECKS,
    *KERNEL_CHECKS,
    *CUDA_GRAPH_CHECKS,
    *LOGGING_CHECKS,
    *PROFILING_CHECKS,
    *UNUSED_OPTION_CHECKS,
)


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
    for name, value in flat_values(config).items():
        setting = SETTINGS[name]
        if value is None or setting.kind.scalar not in (int, float):
            continue
        limits = setting.option.limits
        if not all(limits.hold(item) for item in (value if setting.kind.many else (value,))):
            wrong.add(name)
            shown = setting.spell(value).partition(" ")[2]
            fix = setting.spell(_suggest(setting, value))
            found.append(Problem("E600", f"{name} {shown}: must be {limits}", (fix,)))
    known = _without(config, wrong)
    for check in CHECKS:
        try:
            found.extend(check(known, world_size))
        except _UnknownError:
            continue
    return found


def _suggest(setting: Setting, value: Any) -> Any:
    """Return the upper limit for a larger value; else the default, the example or the lower limit."""
    limits = setting.option.limits
    default = setting.default
    if setting.kind.many:
        return default or tuple(item if limits.hold(item) else limits.at_least for item in value)
    if limits.at_most is not None and value > limits.at_most:
        return setting.kind.scalar(limits.at_most)
    suggested = default if default is not None else setting.option.example
    return setting.kind.scalar(limits.at_least if suggested is None else suggested)


class _UnknownError(Exception):
    """A check used a value that is already known to be wrong."""


class _Unknown:
    """Placeholder for a wrong value: every use of it raises ``_UnknownError``."""

    def _refuse(self, *others: object) -> NoReturn:
        raise _UnknownError

    __getattr__ = __call__ = __fspath__ = __bool__ = __len__ = __iter__ = __getitem__ = __contains__ = _refuse
    __hash__ = __format__ = __str__ = __repr__ = __int__ = __float__ = __index__ = __round__ = __abs__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __neg__ = _refuse
    __floordiv__ = __rfloordiv__ = __truediv__ = __rtruediv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = _refuse


def _without(config: RunConfig, names: set[str]) -> RunConfig:
    """Replace the values of ``names`` by ``_Unknown``."""
    hidden: dict[str, dict[str, Any]] = {}
    for name in names:
        hidden.setdefault(SETTINGS[name].group, {})[name] = _Unknown()
    groups = {f.name: getattr(config, f.name) for f in fields(config)}
    return replace(config, **{group: replace(groups[group], **values) for group, values in hidden.items()})
