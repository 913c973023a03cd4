"""Everything a training run is told, group by group. These dataclasses are the only source of the flags."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron.config.model import ModelConfig
from megatron.config.option import option
from megatron.config.parallel import ParallelConfig
from megatron.config.reporting import LoggingConfig, ProfilingConfig


@dataclass(frozen=True)
class PrecisionConfig:
    """Number formats and fp16's loss scaling. Masters, gradients and moments are at least fp32."""

    params_dtype: str = option(
        "fp32",
        "Format of weights and activations; fp64 is for tests.",
        choices=("fp64", "fp32", "bf16", "fp16"),
        aliases={"--bf16": "bf16", "--fp16": "fp16", "--fp64": "fp64"},
    )
    loss_scale: float | None = option(None, "Constant loss scale for fp16. Default: dynamic.", above=0, example=65536)
    initial_loss_scale: float = option(4294967296.0, "First dynamic loss scale.", above=0)
    min_loss_scale: float = option(1.0, "The dynamic scale never falls below this.", above=0)
    loss_scale_window: int = option(1000, "Good steps after which the dynamic scale doubles.", at_least=1)
    hysteresis: int = option(
        2, "The dynamic scale halves at the N-th overflow since it last doubled, and at each one after it.", at_least=1
    )


@dataclass(frozen=True)
class TrainingConfig:
    """Length, batch, recomputation and evaluation."""

    seq_length: int = option(1024, "Tokens of a sample.", at_least=1)
    micro_batch_size: int = option(1, "Samples a rank computes at once.", at_least=1)
    global_batch_size: int | None = option(
        None, "Samples of a step over all ranks. Default: micro_batch_size x DP.", at_least=1
    )
    pad_global_batch: bool = option(
        False,
        "Where ranks and micro-batches do not divide a global batch, fill it up with samples that do not count.",
    )
    rampup_batch_size: tuple[int, int, int] | None = option(
        None,
        "START INCREMENT SAMPLES: grow the global batch from START by INCREMENT over the first SAMPLES samples.",
        at_least=1,
    )
    train_iters: int | None = option(None, "Steps to train.", at_least=1)
    train_samples: int | None = option(None, "Samples to train, instead of train_iters.", at_least=1)
    eval_interval: int | None = option(None, "Steps between evaluations. Default: only at the end.", at_least=1)
    eval_iters: int = option(0, "Global batches of one evaluation; 0 turns evaluation off.", at_least=0)
    exit_interval: int | None = option(None, "Stop cleanly after a step that is a multiple of this.", at_least=1)
    exit_duration_in_mins: float | None = option(
        None,
        "Stop cleanly, with exit status 124, after the step that ends this long after the start.",
        above=0,
        example=60,
    )
    stop_file: str | None = option(
        None, "Stop cleanly, with exit status 0, after the step in which there is a file of this name."
    )
    skip_train: bool = option(False, "Evaluate what is loaded on the validation and test data, and take no step.")
    seed: int = option(1234, "Seed of initialisation, dropout and sample order.", at_least=0, below=2**32)
    device: str = option("auto", "Where to compute.", choices=("auto", "cpu", "cuda"))
    on_nonfinite: str = option(
        "stop",
        "What a loss or gradient that is NaN or infinite does: skip the update, or stop.",
        choices=("skip", "stop"),
    )
    recompute_granularity: str | None = option(
        None,
        "Activations to compute again in backward: whole blocks, or chosen modules.",
        choices=("full", "selective"),
        aliases={"--recompute-activations": "selective"},
    )
    recompute_method: str | None = option(
        None,
        "With full: uniform (groups of recompute_num_layers; the default) or block (the first recompute_num_layers).",
        choices=("uniform", "block"),
    )
    recompute_num_layers: int | None = option(
        None, "Blocks per group (uniform, default 1) or in all (block, default all).", at_least=1
    )
    recompute_modules: tuple[str, ...] = option(
        ("layernorm", "activation"),
        "With selective: what to recompute.",
        choices=("layernorm", "activation", "core_attn", "mlp"),
    )
    cross_entropy_chunk_size: int = option(1024, "Tokens whose logits exist at once in the loss.", at_least=1)


@dataclass(frozen=True)
class ComputeConfig:
    """Which implementations compute the same numbers."""

    kernels: tuple[str, ...] = option(
        ("auto",),
        "auto (the fastest that this machine has and that prove to compute the same), torch (stock PyTorch, eager), "
        "compiled (torch.compile between the matrix products), or OPERATION=NAME, later ones winning.",
    )
    deterministic: bool = option(
        False,
        "Equal runs are equal to the bit, or the run is refused.",
        aliases={"--deterministic-mode": True},
    )
    cuda_graph: str = option(
        "none",
        "What is recorded once and replayed as a CUDA graph: the optimizer, or the whole step.",
        choices=("none", "optimizer", "step"),
    )


MOMENTS = {"adam": 2, "sgd": 1, "lion": 1, "muon": 2}
"""Update rules, and the tensors of a parameter's size that each keeps for it."""


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer and its schedules. Steps of a schedule are counted in samples."""

    optimizer: str = option("adam", "Update rule; adam is AdamW.", choices=tuple(MOMENTS))
    lr: float = option(1e-4, "Peak learning rate.", at_least=0)
    min_lr: float = option(0.0, "Learning rate at the end of the decay.", at_least=0)
    lr_decay_style: str = option(
        "linear", "Shape of the decay.", choices=("constant", "linear", "cosine", "inverse-square-root", "WSD")
    )
    lr_wsd_decay_style: str = option(
        "exponential", "Shape of WSD's final decay.", choices=("exponential", "linear", "cosine", "minus_sqrt")
    )
    lr_decay_iters: int | None = option(None, "Steps until min_lr. Default: the whole run.", at_least=1)
    lr_decay_samples: int | None = option(None, "Samples until min_lr. Default: the whole run.", at_least=1)
    lr_wsd_decay_iters: int | None = option(None, "Steps of WSD's final decay.", at_least=1)
    lr_wsd_decay_samples: int | None = option(None, "Samples of WSD's final decay.", at_least=1)
    lr_warmup_fraction: float | None = option(
        None, "Warm-up as a share of the decay length.", at_least=0, below=1, example=0.01
    )
    lr_warmup_iters: int = option(0, "Warm-up steps.", at_least=0)
    lr_warmup_samples: int = option(0, "Warm-up samples.", at_least=0)
    lr_warmup_init: float = option(0.0, "Learning rate at the start of the warm-up.", at_least=0)
    weight_decay: float = option(
        0.01,
        "Weight decay, decoupled in adam, added to the gradient in sgd; biases and 1-D parameters have none.",
        at_least=0,
    )
    start_weight_decay: float | None = option(
        None, "Weight decay at the start, with weight_decay_incr_style.", at_least=0
    )
    end_weight_decay: float | None = option(None, "Weight decay at the end, with weight_decay_incr_style.", at_least=0)
    weight_decay_incr_style: str = option(
        "constant", "How weight decay moves from start to end.", choices=("constant", "linear", "cosine")
    )
    clip_grad: float = option(1.0, "Largest global gradient norm; 0 turns clipping off.", at_least=0)
    adam_beta1: float = option(0.9, "Decay of the first moment.", at_least=0, below=1)
    adam_beta2: float = option(0.999, "Decay of the second moment.", at_least=0, below=1)
    adam_eps: float = option(1e-8, "Added to the root of the second moment.", above=0)
    sgd_momentum: float = option(0.9, "Momentum of sgd.", at_least=0, below=1)
    lion_beta1: float = option(0.95, "Weight of the momentum in the direction of lion.", at_least=0, below=1)
    lion_beta2: float = option(0.98, "Decay of the momentum of lion.", at_least=0, below=1)
    muon_momentum: float = option(0.9, "Momentum of muon.", at_least=0, below=1)
    muon_nesterov: bool = option(False, "Nesterov momentum in muon.")
    muon_num_ns_steps: int = option(5, "Newton-Schulz iterations of muon.", at_least=1)
    muon_scale_mode: str = option(
        "spectral",
        "What muon multiplies the update of a matrix [m, n] by: max(m, n)^0.5, (m/n)^0.5, or max(1, m/n)^0.5.",
        choices=("spectral", "unit_rms_norm", "shape_scaling"),
    )
    muon_extra_scale_factor: float = option(1.0, "Multiplies the updates of muon besides.", above=0)
    muon_split_qkv: bool = option(
        True,
        "Muon takes queries, keys and values for matrices of their own.",
        aliases={"--muon-no-split-qkv": False},
    )
    store_param_remainders: bool = option(
        False, "Keep of the masters of bf16 weights only the 16 bits that the weights lack."
    )
    exp_avg_dtype: str = option("fp32", "Format of adam's and lion's first moment.", choices=("fp32", "bf16"))
    exp_avg_sq_dtype: str = option("fp32", "Format of adam's second moment.", choices=("fp32", "bf16"))
    decoupled_lr: float | None = option(
        None, "Peak learning rate of the embeddings and the output layer. Default: lr.", at_least=0
    )
    decoupled_min_lr: float | None = option(None, "What decoupled_lr decays to. Default: min_lr.", at_least=0)
    lr_factors: tuple[str, ...] = option(
        (), "PATTERN=FACTOR: multiplies the learning rate of the parameters whose names match; the last match counts."
    )
    weight_decay_factors: tuple[str, ...] = option(
        (),
        "PATTERN=FACTOR: multiplies the weight decay of the parameters whose names match; the last match counts. "
        "Default: 1 for matrices, 0 for biases, norms and other vectors.",
    )
    ema_decay: float | None = option(
        None,
        "Keep an exponential moving average of the weights with this decay per step.",
        above=0,
        below=1,
        example=0.999,
    )
    skip_spikes: float | None = option(
        None,
        "Skip an update whose loss or gradient norm lies this many standard deviations above the mean of those before.",
        above=0,
        example=6,
    )
    spike_window: int = option(128, "Steps before, over which skip_spikes takes mean and deviation.", at_least=2)


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
"""What turns text into ids, as Megatron-LM names it."""

OTHER_TOKENIZERS = {
    "BertWordPieceLowerCase": "serves BERT",
    "BertWordPieceCase": "serves BERT",
    "MultimodalTokenizer": "serves models of text and images",
    "NullMultimodalTokenizer": "serves models of text and images",
    "SFTTokenizer": "serves training on conversations",
}
"""Megatron-LM's others, and why they are not here."""


def _tokenizer_type(text: str) -> str:
    """A tokenizer's name.

    Raises:
        ValueError: for those of Megatron-LM that are not here.
    """
    if text in OTHER_TOKENIZERS:
        raise ValueError(f"{text} of Megatron-LM is not here: it {OTHER_TOKENIZERS[text]}")
    return text


@dataclass(frozen=True)
class DataConfig:
    """Where tokens come from, how documents share a sample, and which tokenizer wrote them."""

    data_path: tuple[str, ...] = option(
        (), "PREFIX of .bin/.idx files; or several to blend, each after its WEIGHT, or all without: by their sizes."
    )
    split: str | None = option(
        None,
        "Weights of the train, validation and test parts of every prefix in data_path. Default: 969, 30, 1.",
    )
    train_data_path: tuple[str, ...] = option((), "Whole files to train on, said as data_path is.")
    valid_data_path: tuple[str, ...] = option((), "Whole files to evaluate on during training.")
    test_data_path: tuple[str, ...] = option((), "Whole files to evaluate on after training.")
    data_args_path: str | None = option(None, "A text file with the words of data_path.")
    per_split_data_args_path: str | None = option(
        None, "A JSON file with the words of train, valid and test: texts, or lists of words."
    )
    mock_data: bool = option(False, "Train on generated tokens.")
    multiple_validation_sets: bool = option(
        False, "Evaluate on each prefix of the validation data by itself, instead of on their blend."
    )
    validation_set_names: tuple[str, ...] = option(
        (), "With multiple_validation_sets: what to call them. Default: the last part of each prefix."
    )
    data_cache_path: str | None = option(
        None, "Folder that keeps the orders of samples for later starts. Default: they are made anew in memory."
    )
    reset_position_ids: bool = option(False, "Count positions anew in every document of a sample.")
    reset_attention_mask: bool = option(False, "Let tokens see those of their own document only.")
    eod_mask_loss: bool = option(False, "Leave what follows the end of a document out of the loss.")
    tokenizer_type: str | None = option(
        None,
        "Tokenizer of the data. Default: the one recorded beside the data.",
        choices=TOKENIZER_TYPES,
        parse=_tokenizer_type,
    )
    tokenizer_model: str | None = option(
        None, "What the tokenizer is read from: a file, a folder, or a name on the Hugging Face hub."
    )
    vocab_file: str | None = option(None, "vocab.json of GPT2BPETokenizer.")
    merge_file: str | None = option(None, "merges.txt of GPT2BPETokenizer.")
    tiktoken_pattern: str | None = option(None, "How TikTokenizer cuts text into words.", choices=("v1", "v2"))
    tiktoken_num_special_tokens: int = option(1000, "Ids that TikTokenizer keeps for special tokens.", at_least=0)
    eod_id: int | None = option(
        None, "Id that ends a document. Default: as recorded beside the data, or as the tokenizer says.", at_least=0
    )


AFTER_DOCUMENTS = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
"""Options of the data that do something where a document ends."""

HUGGING_FACE = "hf:"
"""What the name of a Hugging Face model's folder starts with in ``load``."""

RESUME_MODES = ("exact", "new-schedule", "weights-only")
"""What a run takes over from the checkpoint it starts from, most first."""


@dataclass(frozen=True)
class CheckpointConfig:
    """Where checkpoints go, which are kept, and what a run starts from."""

    save: str | None = option(
        None,
        "Folder for this run's checkpoints, or s3://BUCKET/RUN. A run whose folder holds some goes on from the newest "
        "valid one.",
    )
    save_interval: int | None = option(
        None, "Steps between checkpoints. Default: only when the run ends or is stopped.", at_least=1
    )
    keep_last: int | None = option(
        None, "Checkpoints to keep; older ones are deleted after each save. Default: all.", at_least=1
    )
    keep_every: int | None = option(
        None, "With keep_last: checkpoints of steps that are a multiple of this are never deleted.", at_least=1
    )
    async_save: bool = option(False, "Write checkpoints while training goes on, from a copy in the host's memory.")
    local_save: str | None = option(
        None,
        "Folder on each node's own disk or memory for checkpoints between those in save; {node} is the node's number.",
    )
    local_save_interval: int | None = option(None, "Steps between checkpoints in local_save.", at_least=1)
    load: str | None = option(
        None,
        "What to start from while the save folder holds no checkpoint: a folder of checkpoints or one of them, written "
        "in any layout, or hf:DIR, the weights and the shape of a Hugging Face model.",
    )
    ckpt_step: int | None = option(None, "Step of the checkpoint to load. Default: the newest valid one.", at_least=0)
    resume_mode: str = option(
        "exact",
        "What to take over from load, or without it from save: everything; everything, with batch, length, optimizer "
        "numbers and schedules as flagged now; or nothing but the weights.",
        choices=RESUME_MODES,
        aliases={
            "--finetune": "weights-only",
            "--override-opt-param-scheduler": "new-schedule",
            "--override-opt_param-scheduler": "new-schedule",
        },
    )


@dataclass(frozen=True)
class RunConfig:
    """All groups together; what ``pretrain_gpt.py`` is given."""

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
