"""Options of a training run, in groups, and the languages of ``--kernels`` and of factors by parameter name.

`RunConfig` collects the dataclasses of all groups. Their fields are the only source of the flags, YAML keys,
``--help``, docs/flags.md, of what may change when a run resumes (``role``), and of what is set without effect
(``needs``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from megatron.config.errors import Problem
from megatron.config.model import MAX_SIZE, ModelConfig
from megatron.config.option import Need, option
from megatron.config.parallel import ParallelConfig
from megatron.config.plugins import registered
from megatron.config.text import did_you_mean

DOCUMENT_BOUNDARY_OPTIONS = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
"""Data options that take effect at the end of a document."""

MAX_BATCH = 10**6
"""Samples in a batch; a ramp has at most as many steps."""

FP16 = Need("params_dtype=fp16", "fp16")
DYNAMIC_LOSS_SCALE = Need(
    lambda c: c.precision.params_dtype != "fp16" or c.precision.loss_scale is None,
    "a dynamic loss scale",
)
FP8 = Need("fp8_format")
FIRST_LAST_LAYERS_BF16 = Need("first_last_layers_bf16")
FULL_RECOMPUTE = Need("recompute_granularity=full")
DENSE_MLP = Need(
    lambda c: c.model.num_experts is None or c.model.moe_shared_expert_intermediate_size, "an MLP beside the experts"
)
EVALUATION = Need(lambda c: c.training.eval_iters > 0 or c.data.valid_chat_data_path, "--eval-iters above 0")
TRAINING_STEPS = Need(lambda c: not c.training.skip_train, "training steps (--skip-train takes none)")
TASKS = Need(lambda c: bool(c.training.evaluate_tasks), "--evaluate-tasks")
LR_SCALING = Need("lr_scaling=linear|sqrt")
LR_DECAY = Need(lambda c: c.optimizer.lr_decay_style != "constant", "a learning rate that decays")
WSD = Need("lr_decay_style=WSD")
WARMUP = Need(
    lambda c: bool(c.optimizer.lr_warmup_fraction or c.optimizer.lr_warmup_iters or c.optimizer.lr_warmup_samples),
    "a warm-up",
)
PARAM_REMAINDERS = Need(
    lambda c: c.precision.params_dtype == "bf16" and c.optimizer.optimizer != "muon",
    "--bf16 and --optimizer adam, lion or sgd",
)
FIRST_MOMENT = Need(
    lambda c: c.optimizer.optimizer != "muon" and "exp_avg" in state_kinds(c.optimizer.optimizer),
    "--optimizer adam or lion",
)
SECOND_MOMENT = Need(lambda c: "exp_avg_sq" in state_kinds(c.optimizer.optimizer), "--optimizer adam")
SAVE = Need("save", "a folder to save to")
LOCAL_SAVE = Need("local_save")
KEEP_LAST = Need(lambda c: c.checkpoint.save is None or c.checkpoint.keep_last, "--keep-last")
START_POINT = Need(
    lambda c: c.checkpoint.load is not None or c.checkpoint.save is not None,
    "a checkpoint to start from",
)
CHAT_DATA = Need("chat_data_path")
TOKEN_FILES = Need(lambda c: not (c.data.mock_data or c.data.chat_data_path), "files of tokens")
DOCUMENTS = Need(
    lambda c: not (c.data.mock_data or c.data.chat_data_path),
    "documents (generated tokens have none, and conversations are always separate)",
)
DOCUMENT_OPTIONS = Need(
    lambda c: any(getattr(c.data, name) for name in DOCUMENT_BOUNDARY_OPTIONS),
    "--reset-position-ids, --reset-attention-mask or --eod-mask-loss",
)
LAYER_PATTERNS = Need("attention_pattern")
GPT2_BPE = Need("tokenizer_type=GPT2BPETokenizer")
TIKTOKEN = Need("tokenizer_type=TikTokenizer")
TOKENIZER_WITH_MODEL = Need(
    "tokenizer_type=HuggingFaceTokenizer|SentencePieceTokenizer|GPTSentencePieceTokenizer|Llama2Tokenizer|TikTokenizer",
    "a --tokenizer-type that reads it",
)
WANDB = Need("wandb_project")
TIMERS = Need(lambda c: c.logging.timing_log_level > 0, "--timing-log-level above 0")
PROFILE = Need(lambda c: c.profiling.requested, "--profile, --profile-memory or --profile-pipeline")
RUN_DIR = Need("run_dir")
DILOCO = Need("diloco_sync_interval")
DPO = Need("objective=dpo")
DISTILLATION = Need("objective=distillation")
SMOOTHED = Need(
    lambda c: c.training.objective == "dpo" and c.training.dpo_loss_type.startswith("sigmoid"),
    "--objective dpo and --dpo-loss-type sigmoid or sigmoid_norm",
)


@dataclass(frozen=True)
class LoggingConfig:
    """Console output, metric files and experiment trackers."""

    log_interval: int = option(10, role="free", at_least=1)
    """Steps between log lines. The loss is the mean over them, the gradient norm that of the last."""
    run_dir: str | None = option(None, role="start")
    """Folder for the resolved config, metrics.jsonl, plots and profiles."""
    tensorboard_dir: str | None = option(None, role="start")
    """Folder for TensorBoard files."""
    wandb_project: str | None = option(None, role="start")
    """Weights & Biases project. WANDB_MODE=offline keeps the data on disk."""
    wandb_exp_name: str | None = option(None, role="start", needs=WANDB)
    """Name of the Weights & Biases run. Default: the name of run_dir."""
    wandb_save_dir: str | None = option(None, role="start", needs=WANDB)
    """Folder for files of Weights & Biases. Default: run_dir, or the current folder."""
    wandb_entity: str | None = option(None, role="start", needs=WANDB)
    """Weights & Biases user or team. Default: that of the login."""
    wandb_group: str | None = option(None, role="start", needs=WANDB)
    """Group of the Weights & Biases run."""
    wandb_tags: tuple[str, ...] = option((), role="start", needs=WANDB)
    """Tags of the Weights & Biases run."""
    wandb_notes: str | None = option(None, role="start", needs=WANDB)
    """Notes on the Weights & Biases run."""
    sample_prompts: str | None = option(None, role="start", needs=EVALUATION)
    """Text file with a prompt per line. After each evaluation, the console, TensorBoard and Weights & Biases get a
    continuation of each."""
    timing_log_level: int = option(0, role="start", at_least=0, at_most=2)
    """Timers logged: 0 for the whole step, 1 also its phases, 2 also their parts."""
    timing_log_option: str = option("minmax", role="start", choices=("max", "minmax", "all"), needs=TIMERS)
    """Values logged of each timer over all ranks."""
    log_health_interval: int | None = option(None, role="start", at_least=1)
    """Steps between reports on gradients, updates and activations of every layer. Default: never."""
    check_weight_hash_across_dp_replicas_interval: int | None = option(None, role="start", at_least=1)
    """Steps between checks that data-parallel replicas have bitwise equal weights. Default: never."""


@dataclass(frozen=True)
class ProfilingConfig:
    """Profiles of selected steps, written to run_dir. docs/operations.md explains how to profile a running job."""

    profile: bool = option(False, role="start", needs=RUN_DIR)
    """Record a PyTorch profile (Chrome trace) of the selected steps."""
    profile_memory: bool = option(False, role="start", needs=RUN_DIR)
    """Record memory allocations in those steps: a snapshot on GPU, a curve on CPU."""
    profile_pipeline: bool = option(False, role="start", needs=RUN_DIR)
    """Record the time of every pipeline action in those steps, on all ranks."""
    profile_step_start: int = option(10, role="start", at_least=1, needs=PROFILE)
    """First recorded step."""
    profile_step_end: int = option(12, role="start", at_least=2, needs=PROFILE)
    """Step before which recording ends."""
    profile_ranks: tuple[int, ...] = option((0,), role="start", at_least=0, needs="run_dir")
    """Ranks that record."""
    pytorch_profiler_collect_shapes: bool = option(False, role="start", needs="run_dir")
    """Record the shapes of operator inputs."""
    pytorch_profiler_collect_callstack: bool = option(False, role="start", needs="run_dir")
    """Record Python call stacks."""

    @property
    def requested(self) -> bool:
        """True if selected steps are recorded."""
        return self.profile or self.profile_memory or self.profile_pipeline


@dataclass(frozen=True)
class PrecisionConfig:
    """Number formats and the loss scaling of fp16. Main params, gradients and moments are at least fp32."""

    params_dtype: str = option(
        "fp32",
        role="free",
        choices=("fp64", "fp32", "bf16", "fp16"),
        aliases={"--bf16": "bf16", "--fp16": "fp16", "--fp64": "fp64"},
    )
    """Data type of weights and activations; fp64 is for tests."""
    loss_scale: float | None = option(None, role="free", above=0, example=65536, needs=FP16)
    """Constant loss scale for fp16. Default: dynamic."""
    initial_loss_scale: float = option(4294967296.0, role="free", above=0, needs=(FP16, DYNAMIC_LOSS_SCALE))
    """Initial dynamic loss scale."""
    min_loss_scale: float = option(1.0, role="free", above=0, needs=(FP16, DYNAMIC_LOSS_SCALE))
    """Lower bound of the dynamic loss scale."""
    loss_scale_window: int = option(1000, role="free", at_least=1, needs=(FP16, DYNAMIC_LOSS_SCALE))
    """Steps without overflow after which the dynamic loss scale doubles."""
    hysteresis: int = option(2, role="free", at_least=1, needs=(FP16, DYNAMIC_LOSS_SCALE))
    """The dynamic scale halves at the N-th overflow since it last doubled, and at each one after it."""
    fp8_format: str | None = option(None, role="free", choices=("e4m3", "hybrid"))
    """Multiply the linears of blocks in FP8. hybrid: gradients as e5m2, the rest as e4m3. Weights keep their type."""
    fp8_recipe: str = option(
        "tensorwise", role="free", choices=("tensorwise", "rowwise", "blockwise", "mxfp8", "delayed"), needs=FP8
    )
    """Elements that share a scale: tensorwise, rowwise, blockwise (1 x 128; weights 128 x 128) or mxfp8 (1 x 32). The
    last two need fp8_format e4m3. delayed is refused."""
    fp8_wgrad: bool = option(True, role="free", aliases={"--disable-fp8-wgrad": False}, needs=FP8)
    """Multiply weight gradients in FP8 too."""
    first_last_layers_bf16: bool = option(False, role="free", needs=FP8)
    """Keep the first and the last layers out of FP8."""
    num_layers_at_start_in_bf16: int = option(1, role="free", at_least=0, needs=(FP8, FIRST_LAST_LAYERS_BF16))
    """Number of first layers out of FP8."""
    num_layers_at_end_in_bf16: int = option(1, role="free", at_least=0, needs=(FP8, FIRST_LAST_LAYERS_BF16))
    """Number of last layers out of FP8."""

    def layer_in_fp8(self, layer: int, num_layers: int) -> bool:
        """Return True if the linears of a block, by its global index, are in FP8."""
        start, end = self.num_layers_at_start_in_bf16, num_layers - self.num_layers_at_end_in_bf16
        return self.fp8_format is not None and (not self.first_last_layers_bf16 or start <= layer < end)


def parse_batch_steps(words: Iterable[str]) -> list[tuple[int, int]]:
    """Parse ``--step-batch-size-schedule``; returns each global batch after the number of tokens it begins at.

    Raises:
        ValueError: for a word that is not ``TOKENS:BATCH``.
    """
    steps = []
    for word in " ".join(words).replace(",", " ").split():
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMBT]?):([1-9]\d*)", word, re.IGNORECASE)
        if match is None:
            raise ValueError(f"{word!r} is not TOKENS:BATCH, such as 200B:768")
        number, unit, size = match.groups()
        steps.append((round(float(number) * 1000 ** " KMBT".index(unit.upper() or " ")), int(size)))
    return steps


def _checked_batch_steps(text: str) -> str:
    parse_batch_steps([text])
    return text


@dataclass(frozen=True)
class TrainingConfig:
    """Run length, batch size, recomputation and evaluation."""

    seq_length: int = option(1024, role="data", at_least=1, at_most=MAX_SIZE)
    """Tokens per sample."""
    micro_batch_size: int = option(1, role="free", at_least=1, at_most=MAX_BATCH)
    """Samples per micro-batch of a rank."""
    global_batch_size: int | None = option(None, role="schedule", at_least=1, at_most=MAX_BATCH)
    """Samples per step over all ranks. Default: micro_batch_size x DP."""
    pad_global_batch: bool = option(False, role="free")
    """Pad a global batch that DP x micro_batch_size does not divide with samples that do not count."""
    rampup_batch_size: tuple[int, int, int] | None = option(None, role="schedule", at_least=1)
    """START INCREMENT SAMPLES: grow the global batch from START by INCREMENT over the first SAMPLES samples."""
    step_batch_size_schedule: tuple[str, ...] = option((), role="schedule", parse=_checked_batch_steps)
    """TOKENS:BATCH ...: global batch from a number of tokens on, such as 0:384 200B:768, with K, M, B or T."""
    train_iters: int | None = option(None, role="schedule", at_least=1)
    """Steps to train for."""
    train_samples: int | None = option(None, role="schedule", at_least=1)
    """Samples to train on, instead of train_iters."""
    num_epochs: int | None = option(None, role="schedule", at_least=1, needs=CHAT_DATA)
    """Passes over chat_data_path to train for, instead of train_iters."""
    eval_interval: int | None = option(1000, role="free", at_least=1, needs=(EVALUATION, TRAINING_STEPS))
    """Steps between evaluations, besides the one at the end; null for only that one, or with num_epochs for one at the
    end of each epoch."""
    eval_iters: int = option(0, role="free", at_least=0)
    """Global batches per evaluation; 0 turns evaluation off."""
    evaluate_tasks: tuple[str, ...] = option((), role="start", needs=TRAINING_STEPS)
    """Tasks of lm-eval to evaluate during training, such as hellaswag arc_easy."""
    evaluate_tasks_interval: int = option(1000, role="start", at_least=1, needs=TASKS)
    """Steps between evaluations of tasks."""
    evaluate_tasks_limit: int | None = option(None, role="start", at_least=1, needs=TASKS)
    """Examples of each task to evaluate. Default: all."""
    evaluate_tasks_path: str | None = option(None, role="start", needs=TASKS)
    """Folder with definitions of further tasks (YAML). It can contain code, which is run: ``!function`` names it."""
    exit_interval: int | None = option(None, role="start", at_least=1, needs=TRAINING_STEPS)
    """Stop cleanly after a step that is a multiple of this."""
    exit_duration_in_mins: float | None = option(None, role="start", above=0, example=60, needs=TRAINING_STEPS)
    """Stop cleanly with exit status 124 after the first step that ends this many minutes after the start."""
    stop_file: str | None = option(None, role="start", needs=TRAINING_STEPS)
    """Stop cleanly with exit status 0 after the next step once this file exists."""
    skip_train: bool = option(False, role="start")
    """Only evaluate the loaded checkpoint on the validation and test data."""
    seed: int = option(1234, role="data", at_least=0, below=2**32)
    """Seed of initialization, dropout and sample order."""
    device: str = option("auto", role="free", choices=("auto", "cpu", "cuda"))
    """Device to compute on."""
    on_nonfinite: str = option("stop", role="free", choices=("skip", "stop"))
    """Action when the loss or a gradient is NaN or infinite: skip the update, or stop the run."""
    recompute_granularity: str | None = option(
        None, role="free", choices=("full", "selective"), aliases={"--recompute-activations": "selective"}
    )
    """Activation recomputation in the backward pass: full (whole blocks) or selective (recompute_modules)."""
    recompute_method: str | None = option(None, role="free", choices=("uniform", "block"), needs=FULL_RECOMPUTE)
    """full: uniform (groups of recompute_num_layers; the default) or block (the first recompute_num_layers blocks)."""
    recompute_num_layers: int | None = option(None, role="free", at_least=1, needs=FULL_RECOMPUTE)
    """full: blocks per group (uniform, default 1) or recomputed per stage (block, default all)."""
    recompute_modules: tuple[str, ...] = option(
        ("layernorm", "activation"),
        role="free",
        choices=("layernorm", "activation", "core_attn", "mlp"),
        needs=Need("recompute_granularity=selective"),
    )
    """selective: modules to recompute."""
    cpu_offloading_num_layers: int = option(0, role="free", at_least=0)
    """Offload what the first blocks of every stage keep for backward to host memory. Recomputed groups of blocks, whose
    inputs are offloaded, count by their first block."""
    min_offloaded_tensor_size: int = option(
        1024 * 1024, role="free", at_least=1, needs=Need(lambda c: c.training.cpu_offloading_num_layers > 0, "offload")
    )
    """Elements of the smallest tensor that activation offload moves."""
    objective: str = option(
        "next_token", role="schedule", choices=("next_token", "dpo", "distillation"), kind="objective"
    )
    """Loss that training minimises: next_token (cross-entropy, and z_loss_coeff), dpo (preferences), distillation
    (divergence from a teacher), or the name of a plugin."""
    reference_model: str | None = option(None, role="start", needs=DPO)
    """Frozen model that log-ratios of preferences are relative to: a checkpoint, a folder of checkpoints, hf:DIR,
    megatron:DIR or peft:DIR. Default: the columns ref_chosen_logps and ref_rejected_logps of the data; without these
    the model that the run starts from."""
    teacher_model: str | None = option(None, role="start", needs=DISTILLATION)
    """Model whose most likely tokens the student learns, of any size but with the same vocabulary: a checkpoint, a
    folder of checkpoints, hf:DIR, megatron:DIR or peft:DIR."""
    teacher_logits: str | None = option(None, role="start", needs=DISTILLATION)
    """Folder that tasks/finetune/precompute.py has written for these data, instead of teacher_model."""
    dpo_loss_type: str = option(
        "sigmoid", role="schedule", choices=("sigmoid", "sigmoid_norm", "ipo", "kto_pair"), needs=DPO
    )
    """Loss of a pair: sigmoid (DPO), sigmoid_norm (of log-probabilities per token), ipo or kto_pair."""
    dpo_beta: float = option(0.1, role="schedule", above=0, needs=DPO)
    """Factor of the log-ratios to the reference model; for ipo the regularisation tau."""
    dpo_label_smoothing: float = option(0.0, role="schedule", at_least=0, below=0.5, needs=SMOOTHED)
    """Probability that the preference of a pair is wrong (conservative DPO)."""
    distillation_top_k: int = option(32, role="schedule", at_least=1, needs=DISTILLATION)
    """Most likely tokens of the teacher that the student is trained on, at each position."""
    distillation_temperature: float = option(1.0, role="schedule", above=0, needs=DISTILLATION)
    """Divisor of the logits of teacher and student in the divergence, which is multiplied by its square."""
    distillation_label_weight: float = option(0.0, role="schedule", at_least=0, at_most=1, needs=DISTILLATION)
    """Weight of the cross-entropy of the labels in the loss; the divergence has the rest."""
    neftune_alpha: float = option(0.0, role="schedule", at_least=0)
    """Noise on the embeddings in training (NEFTune): uniform, of up to this / sqrt(tokens of the document x hidden
    size)."""
    cross_entropy_chunk_size: int | None = option(None, role="free", at_least=1)
    """Tokens per chunk of the loss; only one chunk of logits exists at a time. Default: as many as give 1 GiB of logits
    on a GPU; 1,024 on a CPU."""
    mlp_chunk_size: int | None = option(None, role="free", at_least=1, needs=DENSE_MLP)
    """Tokens per chunk of the MLP on a rank: chunks are computed one after the other, and again in backward. Default:
    all at once."""


@dataclass(frozen=True)
class ComputeConfig:
    """Plugins, choice of kernels, determinism and CUDA graphs."""

    plugin: tuple[str, ...] = option((), role="free", append=True)
    """Modules to import before other options are checked, or names of entry points of the group megatron.plugins. They
    may register optimizers, kernels and more. Repeated flags add up."""
    kernels: tuple[str, ...] = option(("auto",), role="free")
    """auto (the fastest ones installed that pass the check against PyTorch), torch (plain PyTorch, eager), compiled
    (torch.compile between the matrix products), or OPERATION=NAME. The last one given for an operation wins."""
    deterministic: bool = option(False, role="free", aliases={"--deterministic-mode": True})
    """Make repeated runs bitwise equal, or refuse to run."""
    cuda_graph: str = option("auto", role="free", choices=("none", "optimizer", "step", "auto"))
    """Part captured and replayed as a CUDA graph: the optimizer, the whole step, or auto: on GPUs the step where it can
    be captured and micro-batches are so short that the host would be the limit, else none."""
    reduced_precision_reduction: bool = option(False, role="free")
    """Let matrix products on GPUs add partial sums in bf16 or fp16, as PyTorch does by default, instead of fp32."""


RULE_STATE = {
    "adam": ("exp_avg", "exp_avg_sq"),
    "sgd": ("momentum_buffer",),
    "lion": ("exp_avg",),
    "muon": ("exp_avg",),
}
"""What each built-in update rule keeps of every element. Muon updates the matrices of blocks, and adam the rest."""


def state_kinds(rule: str) -> tuple[str, ...]:
    """Return what an update rule, built in or registered by a plugin, keeps of every element."""
    return RULE_STATE[rule] if rule in RULE_STATE else getattr(registered("optimizer").get(rule), "state_kinds", ())


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer, learning rate and weight decay schedules. Schedules count samples, not steps."""

    optimizer: str = option("adam", role="state", choices=tuple(RULE_STATE), kind="optimizer")
    """Update rule; adam is AdamW."""
    lr: float = option(1e-4, role="schedule", at_least=0)
    """Peak learning rate."""
    min_lr: float = option(0.0, role="schedule", at_least=0, needs=LR_DECAY)
    """Learning rate at the end of the decay."""
    lr_scaling: str = option("none", role="schedule", choices=("none", "linear", "sqrt"))
    """Multiply lr, min_lr and their decoupled forms by the full global batch / lr_base_batch_size (linear, for sgd), or
    by its square root (sqrt, for adam). Not lr_warmup_init."""
    lr_base_batch_size: int | None = option(None, role="schedule", at_least=1, at_most=MAX_BATCH, needs=LR_SCALING)
    """Global batch, in samples, for which lr was chosen."""
    lr_decay_style: str = option(
        "linear", role="schedule", choices=("constant", "linear", "cosine", "inverse-square-root", "WSD")
    )
    """Shape of the decay."""
    lr_wsd_decay_style: str = option(
        "exponential", role="schedule", choices=("exponential", "linear", "cosine", "minus_sqrt"), needs=WSD
    )
    """Shape of the final decay of WSD."""
    lr_decay_iters: int | None = option(None, role="schedule", at_least=1)
    """Steps until min_lr. Default: the whole run."""
    lr_decay_samples: int | None = option(None, role="schedule", at_least=1)
    """Samples until min_lr. Default: the whole run."""
    lr_wsd_decay_iters: int | None = option(None, role="schedule", at_least=1, needs=WSD)
    """Steps of WSD's final decay."""
    lr_wsd_decay_samples: int | None = option(None, role="schedule", at_least=1, needs=WSD)
    """Samples of WSD's final decay."""
    lr_warmup_fraction: float | None = option(None, role="schedule", at_least=0, below=1, example=0.01)
    """Warm-up length as a fraction of the decay length."""
    lr_warmup_iters: int = option(0, role="schedule", at_least=0)
    """Warm-up steps."""
    lr_warmup_samples: int = option(0, role="schedule", at_least=0)
    """Warm-up samples."""
    lr_warmup_init: float = option(0.0, role="schedule", at_least=0, needs=WARMUP)
    """Learning rate at the start of the warm-up."""
    weight_decay: float = option(
        0.01, role="schedule", at_least=0, needs=Need("weight_decay_incr_style=constant", "a constant weight decay")
    )
    """Weight decay, decoupled in adam and added to the gradient in sgd. Biases and other 1-D parameters have none."""
    start_weight_decay: float | None = option(None, role="schedule", at_least=0)
    """Initial weight decay of weight_decay_incr_style."""
    end_weight_decay: float | None = option(None, role="schedule", at_least=0)
    """Final weight decay of weight_decay_incr_style."""
    weight_decay_incr_style: str = option("constant", role="schedule", choices=("constant", "linear", "cosine"))
    """Shape of the weight decay schedule."""
    clip_grad: float = option(1.0, role="schedule", at_least=0)
    """Clip the global gradient norm to this; 0 turns clipping off."""
    adam_beta1: float = option(0.9, role="schedule", at_least=0, below=1, needs="optimizer=adam|muon")
    """Decay rate of the first moment."""
    adam_beta2: float = option(0.999, role="schedule", at_least=0, below=1, needs="optimizer=adam|muon")
    """Decay rate of the second moment."""
    adam_eps: float = option(1e-8, role="schedule", above=0, needs="optimizer=adam|muon")
    """Epsilon added to the square root of the second moment."""
    sgd_momentum: float = option(0.9, role="schedule", at_least=0, below=1, needs="optimizer=sgd")
    """Momentum of sgd."""
    lion_beta1: float = option(0.95, role="schedule", at_least=0, below=1, needs="optimizer=lion")
    """Weight of the momentum in lion's update direction."""
    lion_beta2: float = option(0.98, role="schedule", at_least=0, below=1, needs="optimizer=lion")
    """Decay rate of lion's momentum."""
    muon_momentum: float = option(0.9, role="schedule", at_least=0, below=1, needs="optimizer=muon")
    """Momentum of muon."""
    muon_nesterov: bool = option(False, role="schedule", needs="optimizer=muon")
    """Use Nesterov momentum in muon."""
    muon_num_ns_steps: int = option(5, role="schedule", at_least=1, needs="optimizer=muon")
    """Newton-Schulz iterations of muon."""
    muon_fp32_matmul_prec: str = option("medium", role="free", choices=("medium", "high"), needs="optimizer=muon")
    """Matrix products of muon's iterations on a GPU: medium (rounded to bf16) or high (fp32). CPUs use fp32."""
    muon_scale_mode: str = option(
        "spectral", role="schedule", choices=("spectral", "unit_rms_norm", "shape_scaling"), needs="optimizer=muon"
    )
    """Scale of muon's update of a matrix [m, n]: max(m, n)^0.5, (m/n)^0.5, or max(1, m/n)^0.5."""
    muon_extra_scale_factor: float = option(1.0, role="schedule", above=0, needs="optimizer=muon")
    """Extra factor of muon's updates."""
    muon_split_qkv: bool = option(True, role="schedule", aliases={"--muon-no-split-qkv": False}, needs="optimizer=muon")
    """Treat the query, key and value weights as separate matrices in muon."""
    store_param_remainders: bool = option(False, role="free", needs=PARAM_REMAINDERS)
    """With bf16 weights, store only the lower 16 bits of each fp32 main param."""
    exp_avg_dtype: str = option("fp32", role="free", choices=("fp32", "bf16"), needs=FIRST_MOMENT)
    """Data type of adam's and lion's first moment."""
    exp_avg_sq_dtype: str = option("fp32", role="free", choices=("fp32", "bf16"), needs=SECOND_MOMENT)
    """Data type of adam's second moment."""
    optimizer_cpu_offload: bool = option(False, role="free")
    """Keep main params, moments and averages in host memory, and update them on the CPU. Muon's matrices stay on the
    device."""
    optimizer_offload_fraction: float = option(
        1.0, role="free", at_least=0, at_most=1, needs=Need("optimizer_cpu_offload")
    )
    """Fraction of each rank's shards to offload; whole parameters, those first whose gradients backward completes
    first."""
    decoupled_lr: float | None = option(None, role="schedule", at_least=0)
    """Peak learning rate of the embeddings and the output layer. Default: lr."""
    decoupled_min_lr: float | None = option(None, role="schedule", at_least=0, needs=Need("decoupled_lr"))
    """Final value of decoupled_lr. Default: min_lr."""
    lr_factors: tuple[str, ...] = option((), role="schedule")
    """PATTERN=FACTOR: multiply the learning rate of parameters whose names match. The last match wins."""
    weight_decay_factors: tuple[str, ...] = option((), role="schedule")
    """PATTERN=FACTOR: multiply the weight decay of parameters whose names match. The last match wins. Default: 1 for
    matrices, 0 for biases, norms and other 1-D parameters."""
    ema_decay: float | None = option(None, role="schedule", above=0, below=1, example=0.999)
    """Keep an exponential moving average of the weights with this decay per step."""
    skip_spikes: float | None = option(None, role="schedule", above=0, example=6)
    """Skip an update whose loss or gradient norm is this many standard deviations above the mean of spike_window."""
    spike_window: int = option(128, role="schedule", at_least=2, needs=Need("skip_spikes"))
    """Previous steps over which skip_spikes computes mean and standard deviation."""


@dataclass(frozen=True)
class DilocoConfig:
    """Replicas on slow networks that train apart and average their weights from time to time (DiLoCo)."""

    diloco_sync_interval: int | None = option(None, role="schedule", at_least=1)
    """Steps between two synchronisations of a weight with the other replicas (H in arXiv 2311.08105)."""
    diloco_server: str | None = option(None, role="start", needs=DILOCO)
    """HOST:PORT of tools/diloco_server.py, the same for all replicas."""
    diloco_secret_file: str | None = option(None, role="start", needs=DILOCO)
    """File with a secret of 16 characters or more, the same for the server and all replicas; others are refused."""
    diloco_replicas: int = option(2, role="schedule", at_least=1, needs=DILOCO)
    """Replicas that the samples are divided among, and that a start waits for, up to diloco_timeout."""
    diloco_replica: int | None = option(None, role="start", at_least=0, needs=DILOCO)
    """Index of this replica, from 0. Default: that of its checkpoint, or the first one without a living replica."""
    diloco_outer_lr: float = option(0.7, role="schedule", above=0, needs=DILOCO)
    """Learning rate of the outer SGD."""
    diloco_outer_momentum: float = option(0.9, role="schedule", at_least=0, below=1, needs=DILOCO)
    """Nesterov momentum of the outer SGD."""
    diloco_fragments: int = option(1, role="schedule", at_least=1, needs=DILOCO)
    """Parts of the model that are synchronised in turn, one every diloco_sync_interval / diloco_fragments steps."""
    diloco_delay: int = option(0, role="schedule", at_least=0, needs=DILOCO)
    """Steps taken while a synchronisation is in progress (arXiv 2501.18512)."""
    diloco_mix: float = option(0.0, role="schedule", at_least=0, below=1, needs=DILOCO)
    """Share of a replica's own weights in those after a synchronisation; the rest are the outer weights."""
    diloco_int8: bool = option(False, role="schedule", needs=DILOCO)
    """Send outer gradients as int8 with stochastic rounding, except weights that several ranks of a replica hold."""
    diloco_timeout: float = option(60.0, role="start", above=0, needs=DILOCO)
    """Seconds without a heartbeat after which a replica counts as dead."""

    @property
    def streams(self) -> int:
        """Streams that the training samples are dealt to."""
        return 1 if self.diloco_sync_interval is None else self.diloco_replicas


TOKENIZER_TYPES = (
    "HuggingFaceTokenizer",
    "GPT2BPETokenizer",
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "TikTokenizer",
    "ByteTokenizer",
    "NullTokenizer",
)
"""Supported tokenizers, by their names in Megatron-LM."""

UNSUPPORTED_TOKENIZER_TYPES = {
    "BertWordPieceLowerCase": "serves BERT",
    "BertWordPieceCase": "serves BERT",
    "MultimodalTokenizer": "serves models of text and images",
    "NullMultimodalTokenizer": "serves models of text and images",
    "SFTTokenizer": "reads conversations, as --chat-data-path does here",
}
"""Other tokenizers of Megatron-LM, with the reason why they are not supported."""


def _tokenizer_type(text: str) -> str:
    """Return the tokenizer type; raise ValueError for unsupported types of Megatron-LM."""
    if text in UNSUPPORTED_TOKENIZER_TYPES:
        raise ValueError(f"{text} of Megatron-LM is not supported: it {UNSUPPORTED_TOKENIZER_TYPES[text]}")
    return text


@dataclass(frozen=True)
class DataConfig:
    """Token files, how documents are packed into samples, and the tokenizer."""

    data_path: tuple[str, ...] = option((), role="free")
    """PREFIX of .bin/.idx files, or several to blend: WEIGHT PREFIX pairs, or prefixes weighted by their size."""
    split: str | None = option(
        None, role="data", needs=Need(lambda c: bool(c.data.data_path or c.data.data_args_path), "--data-path")
    )
    """Weights of the train, validation and test splits of every prefix in data_path. Default: 969, 30, 1."""
    train_data_path: tuple[str, ...] = option((), role="free")
    """Files used for training only, in the form of data_path."""
    valid_data_path: tuple[str, ...] = option((), role="free")
    """Files used for validation only."""
    test_data_path: tuple[str, ...] = option((), role="free")
    """Files used for testing only, after training."""
    data_args_path: str | None = option(None, role="free")
    """Text file with the value of data_path."""
    per_split_data_args_path: str | None = option(None, role="free")
    """JSON file with the data paths of train, valid and test, as strings or lists of strings."""
    mock_data: bool = option(False, role="data")
    """Train on synthetic tokens."""
    chat_data_path: tuple[str, ...] = option((), role="free")
    """JSON-lines files to fine-tune on: conversations under messages, or texts under prompt and completion. The loss
    is that of the answers; conversations share samples, but not attention."""
    valid_chat_data_path: tuple[str, ...] = option((), role="free", needs=CHAT_DATA)
    """Conversations used for validation only. With eval_iters 0 an evaluation reads all of them."""
    chat_template: str | None = option(None, role="free", needs=CHAT_DATA)
    """Jinja file with the chat template. Default: that of the tokenizer."""
    bad_samples: str = option("error", role="free", choices=("error", "skip"), needs=CHAT_DATA)
    """Action for lines of chat_data_path that cannot be used or do not fit into a sample: refuse the run, or skip and
    count them. No conversation is truncated."""
    multiple_validation_sets: bool = option(False, role="free", needs=TOKEN_FILES)
    """Evaluate on each validation prefix separately, instead of on their blend."""
    validation_set_names: tuple[str, ...] = option((), role="free", needs=Need("multiple_validation_sets"))
    """multiple_validation_sets: their names. Default: the last part of each prefix."""
    data_cache_path: str | None = option(
        None, role="start", needs=Need(lambda c: not c.data.mock_data, "data in files")
    )
    """Folder that caches sample indices and the ids of conversations between starts. Default: build them in memory at
    every start."""
    reset_position_ids: bool = option(False, role="data", needs=DOCUMENTS)
    """Restart position ids at every document of a sample."""
    reset_attention_mask: bool = option(False, role="data", needs=DOCUMENTS)
    """Restrict attention to tokens of the same document."""
    reset_attention_pattern: bool = option(False, role="data", needs=("reset_attention_mask", LAYER_PATTERNS))
    """Count the chunks, first tokens and prefix of attention_pattern from the start of each document, not of the
    sample. Conversations always do."""
    eod_mask_loss: bool = option(False, role="data", needs=DOCUMENTS)
    """Exclude the prediction after the end of a document from the loss."""
    tokenizer_type: str | None = option(None, role="free", choices=TOKENIZER_TYPES, parse=_tokenizer_type)
    """Tokenizer of the data. Default: the one recorded with the data."""
    tokenizer_model: str | None = option(None, role="free", needs=TOKENIZER_WITH_MODEL)
    """Tokenizer to load: a file, a folder, or a name on the Hugging Face hub."""
    vocab_file: str | None = option(None, role="free", needs=GPT2_BPE)
    """GPT2BPETokenizer: vocab.json."""
    merge_file: str | None = option(None, role="free", needs=GPT2_BPE)
    """GPT2BPETokenizer: merges.txt."""
    tiktoken_pattern: str | None = option(None, role="free", choices=("v1", "v2"), needs=TIKTOKEN)
    """TikTokenizer: regular expression that splits text into words."""
    tiktoken_num_special_tokens: int = option(1000, role="free", at_least=0, at_most=10**6, needs=TIKTOKEN)
    """TikTokenizer: ids reserved for special tokens."""
    follow_links: bool = option(False, role="start")
    """Also read files to which links lead out of the folder of a tokenizer or of a Hugging Face model."""
    eod_id: int | None = option(None, role="data", at_least=0, needs=DOCUMENT_OPTIONS)
    """Id of the end-of-document token. Default: as recorded with the data, or that of the tokenizer."""


RESUME_MODES = ("exact", "new-schedule", "weights-only")
"""Resume modes, from the one that restores most of a checkpoint to the one that restores least."""


@dataclass(frozen=True)
class CheckpointConfig:
    """Folders and intervals of checkpoints, retention, and the start of a run."""

    save: str | None = option(None, role="start")
    """Folder for checkpoints, or s3://BUCKET/RUN. If it holds checkpoints, the run resumes from the newest valid
    one."""
    save_interval: int | None = option(None, role="start", at_least=1, needs=(SAVE, TRAINING_STEPS))
    """Steps between checkpoints. Default: only when the run ends or stops."""
    keep_last: int | None = option(None, role="start", at_least=1, needs=(SAVE, TRAINING_STEPS))
    """Number of checkpoints to keep; older ones are deleted after each save. Default: all."""
    keep_every: int | None = option(None, role="start", at_least=1, needs=(SAVE, KEEP_LAST, TRAINING_STEPS))
    """keep_last: never delete checkpoints of steps that are a multiple of this."""
    async_save: bool = option(False, role="start", needs=(SAVE, TRAINING_STEPS))
    """Write checkpoints in the background, from a copy in host memory."""
    save_hf_interval: int | None = option(None, role="start", at_least=1, needs=(SAVE, TRAINING_STEPS))
    """Steps between checkpoints that are exported to Hugging Face, to the folder hf in save, while training goes on. A
    multiple of save_interval."""
    local_save: str | None = option(None, role="start", needs=TRAINING_STEPS)
    """Folder on each node's disk or memory for checkpoints between those in save; {node} is the node number."""
    local_save_interval: int | None = option(None, role="start", at_least=1, needs=(LOCAL_SAVE, TRAINING_STEPS))
    """Steps between checkpoints in local_save."""
    load: str | None = option(None, role="start")
    """Start point when the save folder holds no checkpoint: a checkpoint or a folder of checkpoints, saved in any
    layout, or megatron:DIR for those of Megatron-LM; hf:DIR or hf:ORG/NAME (on the hub) for the weights and
    architecture of a Hugging Face model."""
    pretrained_checkpoint: str | None = option(None, role="start")
    """The model that fine-tuning starts from, in the forms of load; its weights alone are read, once. With lora_rank
    they stay frozen: every start reads them, and checkpoints in save hold the adapters alone."""
    ckpt_step: int | None = option(None, role="start", at_least=0, needs=START_POINT)
    """Step of the checkpoint to load. Default: the newest valid one."""
    exit_on_missing_checkpoint: bool = option(False, role="start", needs=START_POINT)
    """Stop if neither save nor load holds a checkpoint, instead of starting from scratch."""
    resume_mode: str = option(
        "exact",
        role="start",
        choices=RESUME_MODES,
        aliases={"--finetune": "weights-only"},
        needs=START_POINT,
    )
    """Restore from load, or without it from save: exact (everything), new-schedule (everything, but batch size, run
    length, optimizer settings and schedules from the flags), or weights-only."""

    @property
    def first_start(self) -> CheckpointConfig:
        """The same with ``pretrained_checkpoint`` in the place of ``load``, if that is not set or is ``save``."""
        if self.pretrained_checkpoint is None or self.load not in (None, self.save):
            return self
        return replace(self, load=self.pretrained_checkpoint, resume_mode="weights-only")


@dataclass(frozen=True)
class RunConfig:
    """All options of ``pretrain_gpt.py``."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    diloco: DilocoConfig = field(default_factory=DilocoConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    profiling: ProfilingConfig = field(default_factory=ProfilingConfig)

    @property
    def resume_options(self) -> CheckpointConfig:
        """Options of the checkpoint to resume or start from; adapters start from nothing."""
        return self.checkpoint if self.model.lora_rank is not None else self.checkpoint.first_start


KERNEL_CANDIDATES: dict[str, tuple[str, ...]] = {
    "norm": ("triton", "apex", "compiled", "torch"),
    "add_norm": ("triton", "compiled", "torch"),
    "split_qkv": ("triton", "compiled", "torch"),
    "activation": ("triton", "compiled", "torch"),
    "dropout": ("compiled", "torch"),
    "cross_entropy": ("compiled", "torch"),
    "attention": ("cudnn", "flash_attn", "varlen", "flex", "torch"),
    "linear": ("apex", "addmm", "torch"),
    "adam": ("triton", "apex", "torch"),
    "fp8": ("compiled", "scaled_mm", "torch"),
}
"""Implementations of every operation, in the order that ``auto`` tries on a GPU; ``torch`` is always available."""

CPU_KERNELS = ("torch", "compiled")
"""Implementations that run on CPUs; of ``fp8`` only the first does."""

KERNEL_ALIASES = {"weight_gradient": "linear", "rotary": "split_qkv"}
"""Earlier names of operations."""

GLOBAL_KERNEL_CHOICES = ("auto", "torch", "compiled")
"""Choices that apply to every operation."""


@dataclass(frozen=True)
class KernelChoice:
    """Implementation chosen for an operation."""

    name: str = "auto"  # of an implementation, or auto
    alone: bool = False  # chosen as OPERATION=NAME: the run is refused if the implementation is unavailable


def kernel_choices(words: Sequence[str]) -> Mapping[str, KernelChoice]:
    """Return the choice for each operation from valid ``--kernels`` arguments. Later ones win."""
    choices = dict.fromkeys(KERNEL_CANDIDATES, KernelChoice())
    for word in words:
        operation, equals, name = word.partition("=")
        if equals:
            choices[KERNEL_ALIASES.get(operation, operation)] = KernelChoice(name, alone=name != "auto")
        else:
            choices = {
                op: KernelChoice(word if word in (*names, "auto") else "torch")
                for op, names in KERNEL_CANDIDATES.items()
            }
    return choices


def kernel_problems(words: Sequence[str]) -> Iterator[Problem]:
    """Yield a problem for every argument with an unknown operation or implementation."""
    if not words:
        yield Problem("E901", "--kernels has no value", ("--kernels auto",))
    for word in words:
        given, equals, name = word.partition("=")
        operation = KERNEL_ALIASES.get(given, given)
        plugins = (each.partition("=") for each in registered("kernel"))
        added = (plugin for of, _, plugin in plugins if of == operation)
        names = (*dict.fromkeys([*KERNEL_CANDIDATES.get(operation, ()), *added]), "auto")
        if equals and operation in KERNEL_CANDIDATES and name not in names:
            sentence = f"--kernels {word}: implementations of {operation} are {', '.join(names)}"
            yield Problem("E901", sentence, (f"--kernels {operation}={did_you_mean(name, names) or 'auto'}",))
        elif equals and operation not in KERNEL_CANDIDATES:
            guess = did_you_mean(operation, KERNEL_CANDIDATES)
            sentence = f"--kernels {word}: no operation {operation}; operations are {', '.join(KERNEL_CANDIDATES)}"
            yield Problem("E901", sentence, (f"--kernels {guess}={name}" if guess else "--kernels auto",))
        elif not equals and word not in GLOBAL_KERNEL_CHOICES:
            sentence = f"--kernels {word}: not one of {', '.join(GLOBAL_KERNEL_CHOICES)}, nor OPERATION=NAME"
            fix = f"{word}=torch" if word in KERNEL_CANDIDATES else did_you_mean(word, GLOBAL_KERNEL_CHOICES) or "auto"
            yield Problem("E901", sentence, (f"--kernels {fix}",))


def parse_factor(text: str) -> tuple[str, float]:
    """Parse a text such as ``layers.*.bias=0.5`` into pattern and factor.

    Raises:
        ValueError: with a message that completes a sentence that begins with the text.
    """
    pattern, equals, number = text.rpartition("=")
    if not (equals and pattern):
        raise ValueError("has no '=' between a pattern of parameter names and a factor")
    try:
        factor = float(number)
    except ValueError:
        raise ValueError(f"ends with '{number}', which is not a number") from None
    if not (math.isfinite(factor) and factor >= 0):
        raise ValueError(f"has the factor {number}, which must be finite and at least 0")
    return pattern, factor


def matching_factor(name: str, factors: Iterable[tuple[str, float]], default: float) -> float:
    """Return the factor of the last shell pattern that matches a parameter's name, or the default."""
    found = default
    for pattern, factor in factors:
        if fnmatchcase(name, pattern):
            found = factor
    return found
