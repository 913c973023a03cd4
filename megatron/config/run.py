"""Options of a training run, in groups, and the language of ``--kernels``.

`RunConfig` collects the dataclasses of all groups. Their fields are the only source of the flags, YAML keys,
``--help``, docs/flags.md, of what may change when a run resumes (``role``), and of what is set without effect
(``needs``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from megatron.config.errors import Problem, did_you_mean
from megatron.config.model import ModelConfig
from megatron.config.option import Need, option
from megatron.config.parallel import ParallelConfig
from megatron.config.plugins import registered

DOCUMENT_BOUNDARY_OPTIONS = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
"""Data options that take effect at the end of a document."""

FP16 = Need("params_dtype=fp16", "fp16", "--fp16")
DYNAMIC_LOSS_SCALE = Need(
    lambda c: c.precision.params_dtype != "fp16" or c.precision.loss_scale is None,
    "a dynamic loss scale",
    "--set precision.loss_scale=null",
)
FULL_RECOMPUTE = Need("recompute_granularity=full", fix="--recompute-granularity full")
TRAINING_STEPS = Need(lambda c: not c.training.skip_train, "training steps (skip_train takes none)")
WSD = Need("lr_decay_style=WSD", fix="--lr-decay-style WSD")
WARMUP = Need(
    lambda c: bool(c.optimizer.lr_warmup_fraction or c.optimizer.lr_warmup_iters or c.optimizer.lr_warmup_samples),
    "a warm-up",
)
PARAM_REMAINDERS = Need(
    lambda c: c.precision.params_dtype == "bf16" and c.optimizer.optimizer != "muon",
    "bf16 and optimizer adam, lion or sgd",
    "--bf16",
)
SAVE = Need("save", "a folder to save to", "--save checkpoints")
KEEP_LAST = Need(
    lambda c: c.checkpoint.save is None or c.checkpoint.keep_last is not None, "keep_last", "--keep-last 3"
)
START_POINT = Need(
    lambda c: c.checkpoint.load is not None or c.checkpoint.save is not None,
    "a checkpoint to start from",
    "--load checkpoints",
)
TOKEN_FILES = Need(lambda c: not c.data.mock_data, "files of tokens")
DOCUMENTS = Need(
    lambda c: not c.data.mock_data, "documents (generated tokens have none)", "--no-mock-data --data-path PREFIX"
)
DOCUMENT_OPTIONS = Need(
    lambda c: any(getattr(c.data, name) for name in DOCUMENT_BOUNDARY_OPTIONS),
    "reset_position_ids, reset_attention_mask or eod_mask_loss",
)
GPT2_BPE = Need("tokenizer_type=GPT2BPETokenizer", fix="--tokenizer-type GPT2BPETokenizer")
TIKTOKEN = Need("tokenizer_type=TikTokenizer", fix="--tokenizer-type TikTokenizer")
TOKENIZER_WITH_MODEL = Need(
    "tokenizer_type=HuggingFaceTokenizer|SentencePieceTokenizer|GPTSentencePieceTokenizer|Llama2Tokenizer|TikTokenizer",
    "a tokenizer_type that reads it",
    "--tokenizer-type HuggingFaceTokenizer",
)
WANDB = Need("wandb_project", fix="--wandb-project mine")
PROFILE = Need(
    lambda c: c.profiling.profile or c.profiling.profile_memory or c.profiling.profile_pipeline,
    "profile, profile_memory or profile_pipeline",
)


@dataclass(frozen=True)
class LoggingConfig:
    """Console output, metric files and experiment trackers."""

    log_interval: int = option(
        10,
        "Steps between log lines. The loss is the mean over them, the gradient norm that of the last.",
        at_least=1,
        role="free",
    )
    run_dir: str | None = option(
        None, "Folder for the resolved config, metrics.jsonl, plots and profiles.", role="start"
    )
    tensorboard_dir: str | None = option(None, "Folder for TensorBoard files.", role="start")
    wandb_project: str | None = option(
        None, "Weights & Biases project. WANDB_MODE=offline keeps the data on disk.", role="start"
    )
    wandb_exp_name: str | None = option(
        None, "Name of the Weights & Biases run. Default: the name of run_dir.", role="start", needs=WANDB
    )
    wandb_save_dir: str | None = option(
        None,
        "Folder for files of Weights & Biases. Default: run_dir, or the current folder.",
        role="start",
        needs=WANDB,
    )
    wandb_entity: str | None = option(
        None, "Weights & Biases user or team. Default: that of the login.", role="start", needs=WANDB
    )
    timing_log_level: int = option(
        0,
        "Timers logged: 0 for the whole step, 1 also its phases, 2 also their parts.",
        at_least=0,
        at_most=2,
        role="start",
    )
    timing_log_option: str = option(
        "minmax",
        "Values logged of each timer over all ranks.",
        choices=("max", "minmax", "all"),
        role="start",
        needs=Need(lambda c: c.logging.timing_log_level > 0, "timing_log_level above 0"),
    )
    log_health_interval: int | None = option(
        None,
        "Steps between reports on gradients, updates and activations of every layer. Default: never.",
        at_least=1,
        role="start",
    )
    check_weight_hash_across_dp_replicas_interval: int | None = option(
        None,
        "Steps between checks that data-parallel replicas have bitwise equal weights. Default: never.",
        at_least=1,
        role="start",
    )


@dataclass(frozen=True)
class ProfilingConfig:
    """Profiles of selected steps, written to run_dir. docs/operations.md explains how to profile a running job."""

    profile: bool = option(
        False,
        "Record a PyTorch profile (Chrome trace) of the selected steps.",
        role="start",
        needs=Need("run_dir", fix="--run-dir runs/mine"),
    )
    profile_memory: bool = option(
        False,
        "Record memory allocations in those steps: a snapshot on GPU, a curve on CPU.",
        role="start",
        needs=Need("run_dir", fix="--run-dir runs/mine"),
    )
    profile_pipeline: bool = option(
        False,
        "Record the time of every pipeline action in those steps, on all ranks.",
        role="start",
        needs=Need("run_dir", fix="--run-dir runs/mine"),
    )
    profile_step_start: int = option(10, "First recorded step.", at_least=1, role="start", needs=PROFILE)
    profile_step_end: int = option(12, "Step before which recording ends.", at_least=2, role="start", needs=PROFILE)
    profile_ranks: tuple[int, ...] = option((0,), "Ranks that record.", at_least=0, role="start", needs="run_dir")
    pytorch_profiler_collect_shapes: bool = option(
        False, "Record the shapes of operator inputs.", role="start", needs="run_dir"
    )
    pytorch_profiler_collect_callstack: bool = option(
        False, "Record Python call stacks.", role="start", needs="run_dir"
    )


@dataclass(frozen=True)
class PrecisionConfig:
    """Number formats and the loss scaling of fp16. Main params, gradients and moments are at least fp32."""

    params_dtype: str = option(
        "fp32",
        "Data type of weights and activations; fp64 is for tests.",
        choices=("fp64", "fp32", "bf16", "fp16"),
        aliases={"--bf16": "bf16", "--fp16": "fp16", "--fp64": "fp64"},
        role="free",
    )
    loss_scale: float | None = option(
        None, "Constant loss scale for fp16. Default: dynamic.", above=0, example=65536, role="free", needs=FP16
    )
    initial_loss_scale: float = option(
        4294967296.0, "Initial dynamic loss scale.", above=0, role="free", needs=(FP16, DYNAMIC_LOSS_SCALE)
    )
    min_loss_scale: float = option(
        1.0, "Lower bound of the dynamic loss scale.", above=0, role="free", needs=(FP16, DYNAMIC_LOSS_SCALE)
    )
    loss_scale_window: int = option(
        1000,
        "Steps without overflow after which the dynamic loss scale doubles.",
        at_least=1,
        role="free",
        needs=(FP16, DYNAMIC_LOSS_SCALE),
    )
    hysteresis: int = option(
        2,
        "The dynamic scale halves at the N-th overflow since it last doubled, and at each one after it.",
        at_least=1,
        role="free",
        needs=(FP16, DYNAMIC_LOSS_SCALE),
    )


@dataclass(frozen=True)
class TrainingConfig:
    """Run length, batch size, recomputation and evaluation."""

    seq_length: int = option(1024, "Tokens per sample.", at_least=1, role="data")
    micro_batch_size: int = option(1, "Samples per micro-batch of a rank.", at_least=1, role="free")
    global_batch_size: int | None = option(
        None, "Samples per step over all ranks. Default: micro_batch_size x DP.", at_least=1, role="schedule"
    )
    pad_global_batch: bool = option(
        False,
        "Pad a global batch that DP x micro_batch_size does not divide with samples that do not count.",
        role="free",
    )
    rampup_batch_size: tuple[int, int, int] | None = option(
        None,
        "START INCREMENT SAMPLES: grow the global batch from START by INCREMENT over the first SAMPLES samples.",
        at_least=1,
        role="schedule",
    )
    train_iters: int | None = option(None, "Steps to train for.", at_least=1, role="schedule")
    train_samples: int | None = option(
        None, "Samples to train on, instead of train_iters.", at_least=1, role="schedule"
    )
    eval_interval: int | None = option(
        None,
        "Steps between evaluations. Default: only at the end.",
        at_least=1,
        role="free",
        needs=(Need(lambda c: c.training.eval_iters > 0, "eval_iters above 0"), TRAINING_STEPS),
    )
    eval_iters: int = option(0, "Global batches per evaluation; 0 turns evaluation off.", at_least=0, role="free")
    exit_interval: int | None = option(
        None, "Stop cleanly after a step that is a multiple of this.", at_least=1, role="start", needs=TRAINING_STEPS
    )
    exit_duration_in_mins: float | None = option(
        None,
        "Stop cleanly with exit status 124 after the first step that ends this many minutes after the start.",
        above=0,
        example=60,
        role="start",
        needs=TRAINING_STEPS,
    )
    stop_file: str | None = option(
        None,
        "Stop cleanly with exit status 0 after the next step once this file exists.",
        role="start",
        needs=TRAINING_STEPS,
    )
    skip_train: bool = option(
        False, "Only evaluate the loaded checkpoint on the validation and test data.", role="start"
    )
    seed: int = option(1234, "Seed of initialization, dropout and sample order.", at_least=0, below=2**32, role="data")
    device: str = option("auto", "Device to compute on.", choices=("auto", "cpu", "cuda"), role="free")
    on_nonfinite: str = option(
        "stop",
        "Action when the loss or a gradient is NaN or infinite: skip the update, or stop the run.",
        choices=("skip", "stop"),
        role="free",
    )
    recompute_granularity: str | None = option(
        None,
        "Activation recomputation in the backward pass: full (whole blocks) or selective (recompute_modules).",
        choices=("full", "selective"),
        aliases={"--recompute-activations": "selective"},
        role="free",
    )
    recompute_method: str | None = option(
        None,
        "full: uniform (groups of recompute_num_layers; the default) or block (the first recompute_num_layers blocks).",
        choices=("uniform", "block"),
        role="free",
        needs=FULL_RECOMPUTE,
    )
    recompute_num_layers: int | None = option(
        None,
        "full: blocks per group (uniform, default 1) or recomputed per stage (block, default all).",
        at_least=1,
        role="free",
        needs=FULL_RECOMPUTE,
    )
    recompute_modules: tuple[str, ...] = option(
        ("layernorm", "activation"),
        "selective: modules to recompute.",
        choices=("layernorm", "activation", "core_attn", "mlp"),
        role="free",
        needs=Need("recompute_granularity=selective", fix="--recompute-granularity selective"),
    )
    objective: str = option(
        "next_token",
        "Loss that training minimises: next_token (cross-entropy, and z_loss_coeff), or the name of a plugin.",
        choices=("next_token",),
        kind="objective",
        role="schedule",
    )
    cross_entropy_chunk_size: int = option(
        1024, "Tokens per chunk of the loss; only one chunk of logits exists at a time.", at_least=1, role="free"
    )


@dataclass(frozen=True)
class ComputeConfig:
    """Plugins, choice of kernels, determinism and CUDA graphs."""

    plugin: tuple[str, ...] = option(
        (),
        "Modules to import before other options are checked, or names of entry points of the group megatron.plugins. "
        "They may register optimizers, kernels and more. Repeated flags add up.",
        append=True,
        role="free",
    )
    kernels: tuple[str, ...] = option(
        ("auto",),
        "auto (the fastest ones installed that pass the check against PyTorch), torch (plain PyTorch, eager), compiled "
        "(torch.compile between the matrix products), or OPERATION=NAME. The last one given for an operation wins.",
        role="free",
    )
    deterministic: bool = option(
        False,
        "Make repeated runs bitwise equal, or refuse to run.",
        aliases={"--deterministic-mode": True},
        role="free",
    )
    cuda_graph: str = option(
        "none",
        "Part captured and replayed as a CUDA graph: the optimizer, or the whole step.",
        choices=("none", "optimizer", "step"),
        role="free",
    )


MOMENTS_PER_PARAMETER = {"adam": 2, "sgd": 1, "lion": 1, "muon": 2}
"""State tensors per parameter of each update rule."""


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer, learning rate and weight decay schedules. Schedules count samples, not steps."""

    optimizer: str = option(
        "adam", "Update rule; adam is AdamW.", choices=tuple(MOMENTS_PER_PARAMETER), kind="optimizer", role="state"
    )
    lr: float = option(1e-4, "Peak learning rate.", at_least=0, role="schedule")
    min_lr: float = option(
        0.0,
        "Learning rate at the end of the decay.",
        at_least=0,
        role="schedule",
        needs=Need(lambda c: c.optimizer.lr_decay_style != "constant", "a learning rate that decays"),
    )
    lr_decay_style: str = option(
        "linear",
        "Shape of the decay.",
        choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"),
        role="schedule",
    )
    lr_wsd_decay_style: str = option(
        "exponential",
        "Shape of the final decay of WSD.",
        choices=("exponential", "linear", "cosine", "minus_sqrt"),
        role="schedule",
        needs=WSD,
    )
    lr_decay_iters: int | None = option(
        None, "Steps until min_lr. Default: the whole run.", at_least=1, role="schedule"
    )
    lr_decay_samples: int | None = option(
        None, "Samples until min_lr. Default: the whole run.", at_least=1, role="schedule"
    )
    lr_wsd_decay_iters: int | None = option(None, "Steps of WSD's final decay.", at_least=1, role="schedule", needs=WSD)
    lr_wsd_decay_samples: int | None = option(
        None, "Samples of WSD's final decay.", at_least=1, role="schedule", needs=WSD
    )
    lr_warmup_fraction: float | None = option(
        None, "Warm-up length as a fraction of the decay length.", at_least=0, below=1, example=0.01, role="schedule"
    )
    lr_warmup_iters: int = option(0, "Warm-up steps.", at_least=0, role="schedule")
    lr_warmup_samples: int = option(0, "Warm-up samples.", at_least=0, role="schedule")
    lr_warmup_init: float = option(
        0.0, "Learning rate at the start of the warm-up.", at_least=0, role="schedule", needs=WARMUP
    )
    weight_decay: float = option(
        0.01,
        "Weight decay, decoupled in adam and added to the gradient in sgd. Biases and other 1-D parameters have none.",
        at_least=0,
        role="schedule",
        needs=Need("weight_decay_incr_style=constant", "a constant weight decay"),
    )
    start_weight_decay: float | None = option(
        None, "Initial weight decay of weight_decay_incr_style.", at_least=0, role="schedule"
    )
    end_weight_decay: float | None = option(
        None, "Final weight decay of weight_decay_incr_style.", at_least=0, role="schedule"
    )
    weight_decay_incr_style: str = option(
        "constant", "Shape of the weight decay schedule.", choices=("constant", "linear", "cosine"), role="schedule"
    )
    clip_grad: float = option(
        1.0, "Clip the global gradient norm to this; 0 turns clipping off.", at_least=0, role="schedule"
    )
    adam_beta1: float = option(
        0.9, "Decay rate of the first moment.", at_least=0, below=1, role="schedule", needs="optimizer=adam|muon"
    )
    adam_beta2: float = option(
        0.999, "Decay rate of the second moment.", at_least=0, below=1, role="schedule", needs="optimizer=adam|muon"
    )
    adam_eps: float = option(
        1e-8,
        "Epsilon added to the square root of the second moment.",
        above=0,
        role="schedule",
        needs="optimizer=adam|muon",
    )
    sgd_momentum: float = option(0.9, "Momentum of sgd.", at_least=0, below=1, role="schedule", needs="optimizer=sgd")
    lion_beta1: float = option(
        0.95,
        "Weight of the momentum in lion's update direction.",
        at_least=0,
        below=1,
        role="schedule",
        needs="optimizer=lion",
    )
    lion_beta2: float = option(
        0.98, "Decay rate of lion's momentum.", at_least=0, below=1, role="schedule", needs="optimizer=lion"
    )
    muon_momentum: float = option(
        0.9, "Momentum of muon.", at_least=0, below=1, role="schedule", needs="optimizer=muon"
    )
    muon_nesterov: bool = option(False, "Use Nesterov momentum in muon.", role="schedule", needs="optimizer=muon")
    muon_num_ns_steps: int = option(
        5, "Newton-Schulz iterations of muon.", at_least=1, role="schedule", needs="optimizer=muon"
    )
    muon_scale_mode: str = option(
        "spectral",
        "Scale of muon's update of a matrix [m, n]: max(m, n)^0.5, (m/n)^0.5, or max(1, m/n)^0.5.",
        choices=("spectral", "unit_rms_norm", "shape_scaling"),
        role="schedule",
        needs="optimizer=muon",
    )
    muon_extra_scale_factor: float = option(
        1.0, "Extra factor of muon's updates.", above=0, role="schedule", needs="optimizer=muon"
    )
    muon_split_qkv: bool = option(
        True,
        "Treat the query, key and value weights as separate matrices in muon.",
        aliases={"--muon-no-split-qkv": False},
        role="schedule",
        needs="optimizer=muon",
    )
    store_param_remainders: bool = option(
        False,
        "With bf16 weights, store only the lower 16 bits of each fp32 main param.",
        role="free",
        needs=PARAM_REMAINDERS,
    )
    exp_avg_dtype: str = option(
        "fp32",
        "Data type of adam's and lion's first moment.",
        choices=("fp32", "bf16"),
        role="free",
        needs=Need("optimizer=adam|lion", fix="--optimizer adam"),
    )
    exp_avg_sq_dtype: str = option(
        "fp32",
        "Data type of adam's second moment.",
        choices=("fp32", "bf16"),
        role="free",
        needs=Need("optimizer=adam", fix="--optimizer adam"),
    )
    decoupled_lr: float | None = option(
        None, "Peak learning rate of the embeddings and the output layer. Default: lr.", at_least=0, role="schedule"
    )
    decoupled_min_lr: float | None = option(
        None,
        "Final value of decoupled_lr. Default: min_lr.",
        at_least=0,
        role="schedule",
        needs=Need("decoupled_lr", fix="--decoupled-lr 1e-4"),
    )
    lr_factors: tuple[str, ...] = option(
        (),
        "PATTERN=FACTOR: multiply the learning rate of parameters whose names match. The last match wins.",
        role="schedule",
    )
    weight_decay_factors: tuple[str, ...] = option(
        (),
        "PATTERN=FACTOR: multiply the weight decay of parameters whose names match. The last match wins. "
        "Default: 1 for matrices, 0 for biases, norms and other 1-D parameters.",
        role="schedule",
    )
    ema_decay: float | None = option(
        None,
        "Keep an exponential moving average of the weights with this decay per step.",
        above=0,
        below=1,
        example=0.999,
        role="schedule",
    )
    skip_spikes: float | None = option(
        None,
        "Skip an update whose loss or gradient norm is this many standard deviations above the mean of spike_window.",
        above=0,
        example=6,
        role="schedule",
    )
    spike_window: int = option(
        128,
        "Previous steps over which skip_spikes computes mean and standard deviation.",
        at_least=2,
        role="schedule",
        needs=Need("skip_spikes", fix="--skip-spikes 6"),
    )


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
    "SFTTokenizer": "serves training on conversations",
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

    data_path: tuple[str, ...] = option(
        (),
        "PREFIX of .bin/.idx files, or several to blend: WEIGHT PREFIX pairs, or prefixes weighted by their size.",
        role="free",
    )
    split: str | None = option(
        None,
        "Weights of the train, validation and test splits of every prefix in data_path. Default: 969, 30, 1.",
        role="data",
        needs=Need(lambda c: bool(c.data.data_path or c.data.data_args_path), "data_path"),
    )
    train_data_path: tuple[str, ...] = option(
        (), "Files used for training only, in the form of data_path.", role="free"
    )
    valid_data_path: tuple[str, ...] = option((), "Files used for validation only.", role="free")
    test_data_path: tuple[str, ...] = option((), "Files used for testing only, after training.", role="free")
    data_args_path: str | None = option(None, "Text file with the value of data_path.", role="free")
    per_split_data_args_path: str | None = option(
        None, "JSON file with the data paths of train, valid and test, as strings or lists of strings.", role="free"
    )
    mock_data: bool = option(False, "Train on synthetic tokens.", role="data")
    multiple_validation_sets: bool = option(
        False,
        "Evaluate on each validation prefix separately, instead of on their blend.",
        role="free",
        needs=TOKEN_FILES,
    )
    validation_set_names: tuple[str, ...] = option(
        (),
        "multiple_validation_sets: their names. Default: the last part of each prefix.",
        role="free",
        needs=Need("multiple_validation_sets", fix="--multiple-validation-sets"),
    )
    data_cache_path: str | None = option(
        None,
        "Folder that caches sample indices between starts. Default: build them in memory at every start.",
        role="start",
        needs=TOKEN_FILES,
    )
    reset_position_ids: bool = option(
        False, "Restart position ids at every document of a sample.", role="data", needs=DOCUMENTS
    )
    reset_attention_mask: bool = option(
        False, "Restrict attention to tokens of the same document.", role="data", needs=DOCUMENTS
    )
    eod_mask_loss: bool = option(
        False, "Exclude the prediction after the end of a document from the loss.", role="data", needs=DOCUMENTS
    )
    tokenizer_type: str | None = option(
        None,
        "Tokenizer of the data. Default: the one recorded with the data.",
        choices=TOKENIZER_TYPES,
        parse=_tokenizer_type,
        role="free",
    )
    tokenizer_model: str | None = option(
        None,
        "Tokenizer to load: a file, a folder, or a name on the Hugging Face hub.",
        role="free",
        needs=TOKENIZER_WITH_MODEL,
    )
    vocab_file: str | None = option(None, "GPT2BPETokenizer: vocab.json.", role="free", needs=GPT2_BPE)
    merge_file: str | None = option(None, "GPT2BPETokenizer: merges.txt.", role="free", needs=GPT2_BPE)
    tiktoken_pattern: str | None = option(
        None,
        "TikTokenizer: regular expression that splits text into words.",
        choices=("v1", "v2"),
        role="free",
        needs=TIKTOKEN,
    )
    tiktoken_num_special_tokens: int = option(
        1000, "TikTokenizer: ids reserved for special tokens.", at_least=0, role="free", needs=TIKTOKEN
    )
    eod_id: int | None = option(
        None,
        "Id of the end-of-document token. Default: as recorded with the data, or that of the tokenizer.",
        at_least=0,
        role="data",
        needs=DOCUMENT_OPTIONS,
    )


HUGGING_FACE_PREFIX = "hf:"
"""Prefix of ``load`` for a folder with a Hugging Face model."""

RESUME_MODES = ("exact", "new-schedule", "weights-only")
"""Resume modes, from the one that restores most of a checkpoint to the one that restores least."""


@dataclass(frozen=True)
class CheckpointConfig:
    """Folders and intervals of checkpoints, retention, and the start of a run."""

    save: str | None = option(
        None,
        "Folder for checkpoints, or s3://BUCKET/RUN. If it holds checkpoints, the run resumes from the newest valid "
        "one.",
        role="start",
    )
    save_interval: int | None = option(
        None,
        "Steps between checkpoints. Default: only when the run ends or stops.",
        at_least=1,
        role="start",
        needs=(SAVE, TRAINING_STEPS),
    )
    keep_last: int | None = option(
        None,
        "Number of checkpoints to keep; older ones are deleted after each save. Default: all.",
        at_least=1,
        role="start",
        needs=(SAVE, TRAINING_STEPS),
    )
    keep_every: int | None = option(
        None,
        "keep_last: never delete checkpoints of steps that are a multiple of this.",
        at_least=1,
        role="start",
        needs=(SAVE, KEEP_LAST, TRAINING_STEPS),
    )
    async_save: bool = option(
        False,
        "Write checkpoints in the background, from a copy in host memory.",
        role="start",
        needs=(SAVE, TRAINING_STEPS),
    )
    local_save: str | None = option(
        None,
        "Folder on each node's disk or memory for checkpoints between those in save; {node} is the node number.",
        role="start",
        needs=TRAINING_STEPS,
    )
    local_save_interval: int | None = option(
        None,
        "Steps between checkpoints in local_save.",
        at_least=1,
        role="start",
        needs=(Need("local_save", fix="--local-save /dev/shm/checkpoints"), TRAINING_STEPS),
    )
    load: str | None = option(
        None,
        "Start point when the save folder holds no checkpoint: a checkpoint or a folder of checkpoints, saved in any "
        "layout, or hf:DIR for the weights and architecture of a Hugging Face model.",
        role="start",
    )
    ckpt_step: int | None = option(
        None,
        "Step of the checkpoint to load. Default: the newest valid one.",
        at_least=0,
        role="start",
        needs=START_POINT,
    )
    resume_mode: str = option(
        "exact",
        "What to restore from load, or without it from save: exact (everything), new-schedule (everything, but batch "
        "size, run length, optimizer settings and schedules from the flags), or weights-only.",
        choices=RESUME_MODES,
        aliases={
            "--finetune": "weights-only",
            "--override-opt-param-scheduler": "new-schedule",
            "--override-opt_param-scheduler": "new-schedule",
        },
        role="start",
        needs=START_POINT,
    )


@dataclass(frozen=True)
class RunConfig:
    """All options of ``pretrain_gpt.py``."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    profiling: ProfilingConfig = field(default_factory=ProfilingConfig)


KERNEL_CANDIDATES: dict[str, tuple[str, ...]] = {
    "norm": ("apex", "compiled", "torch"),
    "add_norm": ("compiled", "torch"),
    "rotary": ("compiled", "torch"),
    "activation": ("compiled", "torch"),
    "dropout": ("compiled", "torch"),
    "cross_entropy": ("compiled", "torch"),
    "attention": ("flash_attn", "cudnn", "torch"),
    "linear": ("apex", "addmm", "torch"),
    "adam": ("apex", "torch"),
}
"""Implementations of every operation, in the order that ``auto`` tries on a GPU; ``torch`` is always available."""

KERNEL_ALIASES = {"weight_gradient": "linear"}
"""Earlier names of operations."""

GLOBAL_KERNEL_CHOICES = ("auto", "torch", "compiled")
"""Choices that apply to every operation."""


@dataclass(frozen=True)
class KernelChoice:
    """Implementation chosen for an operation."""

    # name of an implementation, or auto
    name: str = "auto"
    # chosen as OPERATION=NAME: the run is refused if the implementation is unavailable
    alone: bool = False


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


def kernel_names(operation: str) -> tuple[str, ...]:
    """Return the implementations of an operation, built-in ones first, then those that plugins register."""
    prefix = f"{operation}="
    plugins = (word.removeprefix(prefix) for word in registered("kernel") if word.startswith(prefix))
    return tuple(dict.fromkeys((*KERNEL_CANDIDATES.get(operation, ()), *plugins)))


def kernel_problems(words: Sequence[str]) -> Iterator[Problem]:
    """Yield a problem for every argument with an unknown operation or implementation."""
    if not words:
        yield Problem("E901", "--kernels has no value", ("--kernels auto",))
    for word in words:
        given, equals, name = word.partition("=")
        operation = KERNEL_ALIASES.get(given, given)
        names = (*kernel_names(operation), "auto")
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
