"""Flags by the names that they have in other trainers, and in older versions of Megatron-LM.

Pure data, read only when such a flag is met.
"""

from __future__ import annotations

from megatron.config.megatron_flags import ALL_SINKS

SAME = {
    "--learning-rate": "--lr",
    "--peak-lr": "--lr",
    "--max-lr": "--lr",
    "--min-learning-rate": "--min-lr",
    "--lr-scheduler": "--lr-decay-style",
    "--lr-scheduler-type": "--lr-decay-style",
    "--warmup-steps": "--lr-warmup-iters",
    "--warmup-iters": "--lr-warmup-iters",
    "--warmup-ratio": "--lr-warmup-fraction",
    "--beta1": "--adam-beta1",
    "--beta2": "--adam-beta2",
    "--adam-epsilon": "--adam-eps",
    "--wd": "--weight-decay",
    "--grad-clip": "--clip-grad",
    "--max-norm": "--clip-grad",
    "--max-grad-norm": "--clip-grad",
    "--gradient-clip-val": "--clip-grad",
    "--layers": "--num-layers",
    "--n-layer": "--num-layers",
    "--n-layers": "--num-layers",
    "--num-hidden-layers": "--num-layers",
    "--dim": "--hidden-size",
    "--d-model": "--hidden-size",
    "--embed-dim": "--hidden-size",
    "--n-embd": "--hidden-size",
    "--n-head": "--num-attention-heads",
    "--n-heads": "--num-attention-heads",
    "--num-heads": "--num-attention-heads",
    "--n-kv-head": "--num-query-groups",
    "--n-kv-heads": "--num-query-groups",
    "--num-kv-heads": "--num-query-groups",
    "--num-key-value-heads": "--num-query-groups",
    "--head-dim": "--kv-channels",
    "--ffn-size": "--ffn-hidden-size",
    "--intermediate-size": "--ffn-hidden-size",
    "--rope-theta": "--rotary-base",
    "--rms-norm-eps": "--norm-epsilon",
    "--layer-norm-eps": "--norm-epsilon",
    "--initializer-range": "--init-method-std",
    "--seq-len": "--seq-length",
    "--max-seq-len": "--seq-length",
    "--max-seq-length": "--seq-length",
    "--sequence-length": "--seq-length",
    "--context-length": "--seq-length",
    "--block-size": "--seq-length",
    "--steps": "--train-iters",
    "--max-steps": "--train-iters",
    "--max-iters": "--train-iters",
    "--train-steps": "--train-iters",
    "--num-train-steps": "--train-iters",
    "--local-batch-size": "--micro-batch-size",
    "--device-batch-size": "--micro-batch-size",
    "--per-device-train-batch-size": "--micro-batch-size",
    "--eval-steps": "--eval-interval",
    "--save-steps": "--save-interval",
    "--save-total-limit": "--keep-last",
    "--log-freq": "--log-interval",
    "--logging-steps": "--log-interval",
    "--out-dir": "--save",
    "--output-dir": "--save",
    "--dump-folder": "--save",
    "--resume": "--load",
    "--resume-from-checkpoint": "--load",
    "--data": "--data-path",
    "--data-dir": "--data-path",
    "--dataset": "--data-path",
    "--dataset-path": "--data-path",
    "--tokenizer": "--tokenizer-model",
    "--tokenizer-name": "--tokenizer-model",
    "--tokenizer-path": "--tokenizer-model",
    "--tp": "--tensor-model-parallel-size",
    "--tp-size": "--tensor-model-parallel-size",
    "--tensor-parallel-size": "--tensor-model-parallel-size",
    "--tensor-parallel-degree": "--tensor-model-parallel-size",
    "--pp": "--pipeline-model-parallel-size",
    "--pp-size": "--pipeline-model-parallel-size",
    "--pipeline-parallel-size": "--pipeline-model-parallel-size",
    "--pipeline-parallel-degree": "--pipeline-model-parallel-size",
    "--pipeline-parallel-schedule": "--pipeline-schedule",
    "--pipeline-parallel-microbatch-size": "--micro-batch-size",
    "--pipeline-parallel-layers-per-stage": "--num-layers-per-virtual-pipeline-stage",
    "--vpp": "--num-virtual-stages-per-pipeline-rank",
    "--vpp-size": "--num-virtual-stages-per-pipeline-rank",
    "--virtual-pipeline-model-parallel-size": "--num-virtual-stages-per-pipeline-rank",
    "--microbatch-group-size-per-vp-stage": "--microbatch-group-size-per-virtual-pipeline-stage",
    "--random-seed": "--seed",
}
"""A flag of others -> ours, which takes the same value."""

_TO_TENSORBOARD = (
    "--log-batch-size-to-tensorboard",
    "--no-log-batch-size-to-tensorboard",
    "--log-learning-rate-to-tensorboard",
    "--no-log-learning-rate-to-tensorboard",
    "--no-log-learnig-rate-to-tensorboard",  # so it was spelled
    "--log-loss-scale-to-tensorboard",
)

_ENCODERS = "it is of models with an encoder, and here is a decoder alone"

OTHERWISE: dict[str, tuple[str, tuple[str, ...]]] = {
    "--dtype": ("a format is a flag by itself", ("--bf16", "--fp16", "--params-dtype fp32")),
    "--mixed-precision": ("a format is a flag by itself", ("--bf16", "--fp16", "--params-dtype fp32")),
    "--gradient-accumulation-steps": (
        "it follows from the batch: micro-batch x data-parallel ranks x accumulation",
        ("--global-batch-size N",),
    ),
    "--num-microbatches": (
        "it follows from the batch: --global-batch-size / (--micro-batch-size x data-parallel ranks)",
        ("drop --num-microbatches",),
    ),
    "--gradient-checkpointing": ("activations are recomputed", ("--recompute-granularity full",)),
    "--activation-checkpointing": ("activations are recomputed", ("--recompute-granularity full",)),
    "--epochs": ("a run's length is said in steps or samples", ("--train-iters N", "--train-samples N")),
    "--num-epochs": ("a run's length is said in steps or samples", ("--train-iters N", "--train-samples N")),
    "--num-train-epochs": ("a run's length is said in steps or samples", ("--train-iters N", "--train-samples N")),
    "--data-impl": ("token files are memory-mapped, and nothing else", ("drop --data-impl",)),
    "--dataset-impl": ("token files are memory-mapped, and nothing else", ("drop --dataset-impl",)),
    "--nproc": ("the launcher starts the ranks", ("torchrun --nproc-per-node {} pretrain_gpt.py",)),
    "--nproc-per-node": ("it belongs to the launcher", ("torchrun --nproc-per-node {} pretrain_gpt.py",)),
    "--wandb-mode": (
        "the environment says it, before the command",
        ("WANDB_MODE=offline", "WANDB_MODE=online", "WANDB_MODE=disabled"),
    ),
    "--standalone-embedding-stage": (
        "a layout gives the embedding a stage of its own, such as --pipeline-model-parallel-layout 'E|t*4|t*4|t*4L'",
        ("drop --standalone-embedding-stage",),
    ),
    "--pipeline-model-parallel-split-rank": (_ENCODERS, ("drop --pipeline-model-parallel-split-rank",)),
    "--encoder-pipeline-model-parallel-size": (_ENCODERS, ("drop --encoder-pipeline-model-parallel-size",)),
    "--overlap-p2p-communication": ("transfers always overlap", ("drop --overlap-p2p-communication",)),
    **{flag: (ALL_SINKS, (f"drop {flag}",)) for flag in _TO_TENSORBOARD},
}
"""A flag of others that says what is said in another way here -> which way, and what to paste; ``{}`` is the value."""

HARMLESS = {
    "--data-impl": (("mmap", "infer"), "token files are memory-mapped, and nothing else"),
    "--dataset-impl": (("mmap", "infer"), "token files are memory-mapped, and nothing else"),
    **dict.fromkeys(_TO_TENSORBOARD, ((), ALL_SINKS)),
}
"""An older flag -> the values that ask for what is done anyhow, and why they may be ignored."""
