"""Handling of unknown flags: Megatron-LM flags are ignored or refused by name, misspelled flags get a suggestion.

The tables cover Megatron-LM core 0.20 and common names of other trainers. A flag is looked up in ``REPLACED_FLAGS``
and
``RENAMED_FLAGS`` (other trainers), then in ``REFUSED_FLAGS``, ``IGNORED_FLAGS``, by the longest prefix in
``REFUSED_PREFIXES``, and in ``UNSUPPORTED_FLAGS``; otherwise the most similar flag is suggested. docs/flags.md is
generated from these tables.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain

from megatron.arguments.sources import ConfigSource
from megatron.config.errors import Problem, did_you_mean
from megatron.config.run import RunConfig
from megatron.config.settings import SPELLINGS

# Reasons of IGNORED: the behaviour is always on, or the flag selects among implementations with equal results.
_FUSED = "kernel fusion does not change the results"
_OVERLAP = "overlap of communication and computation does not change the results"
_ALWAYS_FP32 = "softmax, main params and gradient sums are always at least fp32"
_ONE_STACK = "there is one implementation of the model; --kernels selects its kernels"
_ATTENTION = "--kernels selects the attention kernel"
_MEMORY_ONLY = "PyTorch manages memory; the results are the same"
_ALWAYS_LOGGED = "step time and throughput are in every log line"
SAME_METRICS_EVERYWHERE = (
    "console, metrics.jsonl, TensorBoard and Weights & Biases get the same metrics, every log_interval"
)
_MAPPED = "the training process reads samples from memory-mapped files"

ONE_CHECKPOINT_FORMAT = "there is one checkpoint format, which every layout reads"
_OWN_PARTS = "every rank writes and reads its own part, in any layout"
_ALWAYS_CHECKED = "the parts and checksums of a checkpoint are always verified"
_WRITER = "--async-save is the only option; each rank writes in a thread, whose priority cannot be set"
_NO_RANDOM_STATE = "random numbers are a function of seed and position; there is no state to save or load"

IGNORED_FLAGS = {
    "--use-mcore-models": _ONE_STACK,
    "--transformer-impl": _ONE_STACK,
    "--use-flash-attn": _ATTENTION,
    "--attention-backend": _ATTENTION,
    "--flash-attention-version": _ATTENTION,
    "--no-masked-softmax-fusion": _FUSED,
    "--no-bias-swiglu-fusion": _FUSED,
    "--no-bias-dropout-fusion": _FUSED,
    "--no-rope-fusion": _FUSED,
    "--no-persist-layer-norm": _FUSED,
    "--no-gradient-accumulation-fusion": _FUSED,
    "--cross-entropy-loss-fusion": _FUSED,
    "--cross-entropy-fusion-impl": _FUSED,
    "--use-fused-weighted-squared-relu": _FUSED,
    "--fused-residual-rmsnorm": _FUSED,
    "--use-te-activation-func": _FUSED,
    "--use-transformer-engine-op-fuser": _FUSED,
    "--disable-jit-fuser": _FUSED,
    "--no-gradient-reduce-div-fusion": _FUSED,
    "--attention-softmax-in-fp32": _ALWAYS_FP32,
    "--accumulate-allreduce-grads-in-fp32": _ALWAYS_FP32,
    "--apply-query-key-layer-scaling": _ALWAYS_FP32,
    "--calculate-per-token-loss": "the loss is always the mean over all tokens of the global batch",
    "--no-create-attention-mask-in-dataloader": "the data loader never creates masks",
    "--use-cpu-initialization": "initial weights depend on seed and parameter name only, not on the device",
    "--te-rng-tracker": "random numbers are a function of seed and position; there is no state to track",
    "--no-save-rng": _NO_RANDOM_STATE,
    "--no-load-rng": _NO_RANDOM_STATE,
    "--ckpt-format": ONE_CHECKPOINT_FORMAT,
    "--dist-ckpt-format": ONE_CHECKPOINT_FORMAT,
    "--use-dist-ckpt": ONE_CHECKPOINT_FORMAT,
    "--auto-detect-ckpt-format": ONE_CHECKPOINT_FORMAT,
    "--dist-ckpt-optim-fully-reshardable": ONE_CHECKPOINT_FORMAT,
    "--distrib-optim-fully-reshardable-mem-efficient": ONE_CHECKPOINT_FORMAT,
    "--ckpt-drop-redundant-extra-state": ONE_CHECKPOINT_FORMAT,
    "--ckpt-fully-parallel-save": _OWN_PARTS,
    "--no-ckpt-fully-parallel-save": _OWN_PARTS,
    "--ckpt-fully-parallel-load": _OWN_PARTS,
    "--ckpt-fully-parallel-load-exchange-algo": _OWN_PARTS,
    "--ckpt-fully-parallel-load-per-rank-objects": _OWN_PARTS,
    "--ckpt-fully-parallel-save-process-group": _OWN_PARTS,
    "--ckpt-fully-parallel-load-process-group": _OWN_PARTS,
    "--ckpt-assume-constant-structure": _OWN_PARTS,
    "--ckpt-pg-tensors-cache-path": _OWN_PARTS,
    "--ckpt-pg-tensors-cache-create": _OWN_PARTS,
    "--dist-ckpt-workers": _OWN_PARTS,
    "--verify-integrity": _ALWAYS_CHECKED,
    "--dist-ckpt-strictness": _ALWAYS_CHECKED,
    "--no-ckpt-load-validate-sharding-integrity": _ALWAYS_CHECKED,
    "--disable-ckpt-load-validate-sharding-integrity": _ALWAYS_CHECKED,
    "--async-strategy": _WRITER,
    "--use-persistent-ckpt-worker": _WRITER,
    "--async-ckpt-cpu-priority": _WRITER,
    "--async-ckpt-io-priority": _WRITER,
    "--async-ckpt-use-cpu-shm": _WRITER,
    "--load-main-params-from-ckpt": "weights are saved and loaded in the precision of the main params",
    "--no-save-tokenizer-assets": "checkpoints always include the tokenizer's files",
    "--disable-save-tokenizer-assets": "checkpoints always include the tokenizer's files",
    "--use-checkpoint-opt_param-scheduler": "the checkpoint's schedule is always kept; a different one is refused",
    "--use-checkpoint-opt-param-scheduler": "the checkpoint's schedule is always kept; a different one is refused",
    "--overlap-param-gather-with-optimizer-step": _OVERLAP,
    "--no-align-param-gather": _OVERLAP,
    "--no-align-grad-reduce": _OVERLAP,
    "--disable-align-grad-reduce": _OVERLAP,
    "--ddp-pad-buckets-for-high-nccl-busbw": _OVERLAP,
    "--ddp-average-in-collective": "gradients are summed and the loss is divided by the global number of tokens",
    "--no-overlap-p2p-communication": _OVERLAP,
    "--overlap-p2p-communication-warmup-flush": _OVERLAP,
    "--tp-comm-overlap": _OVERLAP,
    "--tp-comm-overlap-cfg": _OVERLAP,
    "--tp-comm-overlap-rs-dgrad": _OVERLAP,
    "--tp-comm-bootstrap-backend": _OVERLAP,
    "--nccl-communicator-config-path": _OVERLAP,
    "--use-sharp": _OVERLAP,
    "--sharp-enabled-group": _OVERLAP,
    "--high-priority-stream-groups": _OVERLAP,
    "--use-nccl-ub": _OVERLAP,
    "--disable-symmetric-registration": _OVERLAP,
    "--disable-gloo-process-groups": "all process groups use the backend of --distributed-backend",
    "--use-ring-exchange-p2p": _OVERLAP,
    "--lazy-mpu-init": "process groups are created at startup",
    "--local-rank": "the local rank comes from the launcher's environment",
    "--manual-gc": _MEMORY_ONLY,
    "--manual-gc-interval": _MEMORY_ONLY,
    "--no-manual-gc-eval": _MEMORY_ONLY,
    "--disable-manual-gc-eval": _MEMORY_ONLY,
    "--empty-unused-memory-level": _MEMORY_ONLY,
    "--init-model-with-meta-device": _MEMORY_ONLY,
    "--exit-signal-handler": "a signal always stops the run cleanly",
    "--exit-signal-handler-for-training": "a signal always stops the run cleanly",
    "--log-throughput": _ALWAYS_LOGGED,
    "--no-barrier-with-level-1-timing": "timers never use barriers",
    "--tensorboard-log-interval": SAME_METRICS_EVERYWHERE,
    "--tensorboard-queue-size": SAME_METRICS_EVERYWHERE,
    "--log-timers-to-tensorboard": SAME_METRICS_EVERYWHERE,
    "--log-validation-ppl-to-tensorboard": SAME_METRICS_EVERYWHERE,
    "--log-memory-to-tensorboard": SAME_METRICS_EVERYWHERE,
    "--log-world-size-to-tensorboard": SAME_METRICS_EVERYWHERE,
    "--no-log-loss-scale-to-tensorboard": SAME_METRICS_EVERYWHERE,
    "--disable-log-loss-scale-to-tensorboard": SAME_METRICS_EVERYWHERE,
    "--use-pytorch-profiler": "the PyTorch profiler is the only one",
    "--log-straggler": "log lines name a slow rank",
    "--no-one-logger": "there is no reporting to external services by default",
    "--disable-msc": "files are always read by path",
    "--num-workers": _MAPPED,
    "--no-mmap-bin-files": _MAPPED,
    "--dataloader-fast-cache-load": _MAPPED,
    "--dataloader-defer-npy-index-mmap": _MAPPED,
    "--num-dataset-builder-threads": _MAPPED,
    "--per-dataset-sequences-path": _MAPPED,
    "--mid-level-dataset-surplus": "every dataset of a blend is built with 0.005 more samples than its share",
    "--null-tokenizer-pad-id": "the NullTokenizer has no padding id",
    "--use-precision-aware-optimizer": "--exp-avg-dtype, --exp-avg-sq-dtype and --store-param-remainders select it",
    "--moe-grouped-gemm": _FUSED,
    "--moe-permute-fusion": _FUSED,
    "--moe-router-fusion": _FUSED,
    "--moe-token-dispatcher-type": "tokens are dispatched with an all-to-all; the results are the same",
    "--moe-router-score-function": "the router uses a softmax",
    "--moe-router-dtype": "the router computes in at least fp32",
    "--moe-layer-freq": "every block has experts",
    "--muon-tp-mode": "muon always updates complete matrices, in any layout",
    "--muon-coefficient-type": "muon uses the coefficients of the quintic iteration",
    "--muon-scalar-optimizer": "adam updates all parameters that are not a matrix of a block",
    "--group-query-attention": "--num-query-groups selects it",
    "--no-position-embedding": "--position-embedding-type selects it",
    "--dataloader-type": "samples always come in the order of --dataloader-type single",
    "--fp8-param-gather": "there are no fp8 parameters",
    "--bert-no-binary-head": "there is no BERT head",
    "--no-data-sharding": "every sample is used once per epoch, in shuffled order",
}

# Ignored with these values only; other values are refused.
IGNORED_VALUES = {
    "--dataloader-type": ("single",),
    "--transformer-impl": ("local", "transformer_engine"),
    "--mid-level-dataset-surplus": ("0.005",),
    "--null-tokenizer-pad-id": ("-1",),
    "--moe-router-score-function": ("softmax",),
    "--moe-router-dtype": ("fp32",),
    "--moe-layer-freq": ("1",),
    "--muon-coefficient-type": ("quintic",),
    "--muon-scalar-optimizer": ("adam",),
}

SEPARATE_CONVERTER = "a separate tool converts checkpoints"
_FROM_FLAGS = "options come from flags; differences from the checkpoint's are reported or refused"
_IN_HEALTH = "it is part of the per-layer health report"

# Flag -> (reason, fixes to paste). Without fixes, the fix is to drop the flag.
REFUSED_FLAGS: dict[str, tuple[str, tuple[str, ...]]] = {
    "--persistent-save-interval": ("it has another name", ("--save-interval N",)),
    "--save-retain-interval": ("two flags replace it", ("--keep-last 1 --keep-every N",)),
    "--non-persistent-save-interval": ("two flags replace it", ("--local-save DIR --local-save-interval N",)),
    "--pretrained-checkpoint": (
        "--load replaces it; it is used while --save holds no checkpoint",
        ("--load DIR --resume-mode weights-only",),
    ),
    "--no-load-optim": (
        "a run either resumes with its optimizer state, or restarts from the weights only",
        ("--resume-mode weights-only",),
    ),
    "--no-save-optim": ("a run cannot resume from such a checkpoint; convert a checkpoint to get the weights only", ()),
    "--exit-on-missing-checkpoint": (
        "a --load folder without a checkpoint is always an error, unless it is also the --save folder",
        (),
    ),
    "--use-checkpoint-args": (_FROM_FLAGS, ("--config RUN_DIR/config.yaml",)),
    "--use-mp-args-from-checkpoint-args": (_FROM_FLAGS, ("--config RUN_DIR/config.yaml",)),
    "--ckpt-convert-format": (SEPARATE_CONVERTER, ("python tools/convert_checkpoint.py",)),
    "--ckpt-convert-save": (SEPARATE_CONVERTER, ("python tools/convert_checkpoint.py",)),
    "--fake-process-group": ("another option builds one rank of a large run", ("--fake-world --world-size N",)),
    "--yaml-cfg": ("the file has another format", ("--config FILE.yaml",)),
    "--encoder-num-layers": ("there is one stack of layers", ("--num-layers N",)),
    "--decoder-num-layers": ("there is one stack of layers", ("--num-layers N",)),
    "--encoder-seq-length": ("there is one sequence length", ("--seq-length N",)),
    "--decoder-seq-length": ("there is one sequence length", ("--seq-length N",)),
    "--batch-size": ("it is an old name", ("--micro-batch-size N",)),
    "--warmup": ("it is an old name", ("--lr-warmup-fraction X",)),
    "--model-parallel-size": ("it is an old name", ("--tensor-model-parallel-size N",)),
    "--checkpoint-activations": ("it is an old name", ("--recompute-granularity full",)),
    "--rope-type": ("it belongs to multi-latent attention", ("--position-embedding-type rope|yarn",)),
    "--rotary-seq-len-interpolation-factor": (
        "linear interpolation of positions is not implemented",
        ("--position-embedding-type yarn --rotary-scaling-factor X", "--use-rope-scaling --rope-scaling-factor X"),
    ),
    "--quick-geglu": ("the activation is not implemented", ("--swiglu",)),
    "--apply-layernorm-1p": ("norm weights are initialized to 1 and stored as they are", ()),
    "--apply-residual-connection-post-layernorm": ("blocks are pre-norm", ()),
    "--fp32-residual-connection": ("the residual stream has the data type of --params-dtype", ("--params-dtype fp32",)),
    "--init-method-xavier-uniform": ("initial weights are normally distributed", ("--init-method-std X",)),
    "--embedding-init-method-std": ("all weights have the same standard deviation", ("--init-method-std X",)),
    "--no-initialization": ("weights are always initialized", ()),
    "--data-parallel-random-init": ("replicas always start equal", ()),
    "--padded-vocab-size": ("padding follows from the layout", ("--vocab-size N --make-vocab-size-divisible-by M",)),
    "--no-pad-vocab-size": ("the model never sees the padding", ("--make-vocab-size-divisible-by 1",)),
    "--disable-pad-vocab-size": ("the model never sees the padding", ("--make-vocab-size-divisible-by 1",)),
    "--no-bias-gelu-fusion": (
        "in Megatron-LM it replaces the tanh form of gelu by the exact one, and does not affect other activations",
        ("--activation gelu", "drop --no-bias-gelu-fusion"),
    ),
    "--no-check-for-nan-in-loss-and-grad": (
        "an update that is not finite is never applied",
        ("--on-nonfinite skip", "--on-nonfinite stop"),
    ),
    "--step-batch-size-schedule": ("the batch size grows linearly", ("--rampup-batch-size START INCREMENT SAMPLES",)),
    "--decrease-batch-size-if-needed": ("the batch size is never changed silently", ("--global-batch-size N",)),
    "--distribute-saved-activations": ("saved activations are not sharded over ranks", ("--sequence-parallel",)),
    "--exit-signal": ("the run always stops cleanly on SIGTERM, SIGINT and SIGUSR1, and only on these", ()),
    "--exit-signal-handler-for-dataloader": ("there are no data loader processes", ()),
    "--distributed-timeout-seconds-after-init": ("there is one timeout", ("--distributed-timeout-minutes N",)),
    "--ddp-num-buckets": ("buckets are set by size", ("--ddp-bucket-size N",)),
    "--dataloader-inter-document-masking": (
        "two flags replace it, for attention and for positions",
        ("--reset-attention-mask --reset-position-ids",),
    ),
    "--allow-ambiguous-pad-tokens": ("a padding id that is also another special id never masks anything", ()),
    "--full-validation": ("an evaluation reads a given number of batches", ("--eval-iters N",)),
    "--phase-transition-iterations": ("there is one blend for the whole run", ()),
    "--object-storage-cache-path": ("data are read from files", ()),
    "--trust-remote-code": ("code that comes with a model or tokenizer is never executed", ()),
    "--use-gigatoken": ("tools/preprocess_data.py uses gigatoken wherever it gives the same ids", ()),
    "--vocab-extra-ids": ("they are part of the vocabulary size", ("--vocab-size N",)),
    "--null-tokenizer-eod-id": ("one flag sets the end-of-document id of all tokenizers", ("--eod-id N",)),
    "--eval-global-batch-size": ("evaluation uses the training batch size", ("--eval-iters N",)),
    "--eval-micro-batch-size": ("evaluation uses the training batch size", ("--eval-iters N",)),
    "--no-weight-decay-cond-type": (
        "biases and other 1-D parameters have no weight decay, except by name",
        ("--weight-decay-factors '*.q_layernorm.weight=1' '*.k_layernorm.weight=1'",),
    ),
    "--apply-wd-to-qk-layernorm": (
        "biases and other 1-D parameters have no weight decay, except by name",
        ("--weight-decay-factors '*.q_layernorm.weight=1' '*.k_layernorm.weight=1'",),
    ),
    "--head-lr-mult": ("learning rates are scaled by parameter name", ("--lr-factors 'output_layer.*=X'",)),
    "--log-params-norm": (_IN_HEALTH, ("--log-health-interval N",)),
    "--log-num-zeros-in-grad": (_IN_HEALTH, ("--log-health-interval N",)),
    "--log-max-attention-logit": (_IN_HEALTH, ("--log-health-interval N",)),
    "--check-for-spiky-loss": ("such an update can be skipped", ("--skip-spikes 6",)),
    "--check-for-large-grads": ("such an update can be skipped", ("--skip-spikes 6",)),
    "--record-memory-history": ("it has another name", ("--profile-memory",)),
    "--memory-snapshot-path": ("snapshots are written to run_dir", ("--profile-memory --run-dir DIR",)),
    "--record-shapes": ("it has another name", ("--pytorch-profiler-collect-shapes",)),
    "--optimizer-cuda-graph": ("one flag selects what is captured", ("--cuda-graph optimizer",)),
    "--enable-cuda-graph": ("one flag selects what is captured", ("--cuda-graph step",)),
    "--external-cuda-graph": ("one flag selects what is captured", ("--cuda-graph step",)),
    "--cuda-graph-impl": ("one flag selects what is captured", ("--cuda-graph step",)),
    "--delay-wgrad-compute": ("schedules that split backward delay weight gradients", ("--pipeline-schedule zb-h1",)),
    "--use-tp-pp-dp-mapping": ("the rank order is TP (innermost), CP, DP, PP", ()),
}

# Flags of both with another default here: Megatron-LM's default, and the reason for ours.
DIFFERENT_DEFAULTS = {
    "--num-query-groups": ("1, with --group-query-attention", "one per query head"),
    "--recompute-modules": ("core_attn", "recomputing attention saves nothing with SDPA"),
    "--ddp-bucket-size": ("40,000,000 or 1,000,000 x DP, the larger", "a size that does not depend on the layout"),
    "--overlap-grad-reduce": ("off", "the results are the same, and it is not slower"),
    "--moe-router-load-balancing-type": ("aux_loss", "the loss does not depend on the layout"),
    "--eval-iters": ("100", "evaluation is opt-in"),
    "--log-interval": ("100", "a log line every ten steps"),
    "--profile-ranks": ("none", "a requested profile is always recorded"),
}


_OTHER_EXPERTS = "this variant of mixture of experts is not implemented"
_AS_RECORDED = "tokenizer settings come from its files and the record beside the data"
_LOCAL = "--local-save DIR --local-save-interval N keep checkpoints on the nodes, each with a copy on another node"

# Prefix of flags -> reason why they are refused.
REFUSED_PREFIXES = {
    "--save-": "it writes tensors out for debugging",
    "--ckpt-": SEPARATE_CONVERTER,
    "--dist-ckpt-": ONE_CHECKPOINT_FORMAT,
    "--non-persistent-": _LOCAL,
    "--override-ckpt-": "the step of a checkpoint cannot be changed",
    "--replication": _LOCAL,
    "--log-": "it logs a quantity that is not logged here",
    "--no-log-": "it turns off a quantity that is not logged here",
    "--disable-log-": "it turns off a quantity that is not logged here",
    "--one-logger-": "there is no reporting to external services by default",
    "--app-tag-": "there is no reporting to external services by default",
    "--otel-": "OpenTelemetry is not implemented",
    "--moe-": _OTHER_EXPERTS,
    "--expert-tensor-parallel-num-": _OTHER_EXPERTS,
    "--use-grouped-gemm-": _OTHER_EXPERTS,
    "--num-layers-at-": "fp8 is not implemented",
    "--fp8-": "fp8 is not implemented",
    "--no-fp8-": "fp8 is not implemented",
    "--disable-fp8-": "fp8 is not implemented",
    "--fp4-": "fp4 is not implemented",
    "--cuda-graph-": "--cuda-graph selects what is captured; there are no other settings",
    "--no-tp-comm-": "overlap of TP communication cannot be tuned",
    "--disable-tp-comm-": "overlap of TP communication cannot be tuned",
    "--cpu-offloading-": "offloading is not implemented",
    "--optimizer-c": "the optimizer stays on the device",
    "--optimizer-offload-": "the optimizer stays on the device",
    "--muon-": "this variant of muon is not implemented",
    "--mtp-": "multi-token prediction is not implemented",
    "--dsa-": "this attention variant is not implemented",
    "--no-dsa-": "this attention variant is not implemented",
    "--disable-dsa-": "this attention variant is not implemented",
    "--linear-": "this attention variant is not implemented",
    "--qk-clip": "query-key clipping is not implemented",
    "--mup-": "maximal-update parametrisation is not implemented",
    "--relative-attention-": "relative position biases are not implemented",
    "--mamba-": "hybrid models are not implemented",
    "--hybrid-": "hybrid models are not implemented",
    "--gdp-": "hybrid models are not implemented",
    "--heterogeneous-": "all layers have one shape",
    "--fim-": "fill-in-the-middle is not implemented",
    "--sft": "training on conversations is not implemented",
    "--tokenizer-": _AS_RECORDED,
    "--no-tokenizer-": _AS_RECORDED,
    "--disable-tokenizer-": _AS_RECORDED,
    "--no-use-tokenizer-": _AS_RECORDED,
    "--disable-use-tokenizer-": _AS_RECORDED,
    "--inference-": "it belongs to inference",
    "--no-inference-": "it belongs to inference",
    "--rl-": "it belongs to reinforcement learning",
    "--no-rl-": "it belongs to reinforcement learning",
    "--grpo-": "it belongs to reinforcement learning",
    "--logits-": "it belongs to distillation",
    "--dino-": "it belongs to vision models",
    "--vision-": "it belongs to vision models",
    "--biencoder-": "it belongs to retrieval models",
    "--retriever-": "it belongs to retrieval models",
    "--inprocess-": "the launcher restarts a failed run",
    "--ft-": "the launcher restarts a failed run",
    "--fault-injector-": "it belongs to Megatron-LM's own tests",
    "--error-injection-": "it belongs to Megatron-LM's own tests",
    "--fsdp-": "fully sharded data parallel is not implemented",
    "--megatron-fsdp-": "fully sharded data parallel is not implemented",
    "--torch-fsdp2-": "fully sharded data parallel is not implemented",
    "--use-megatron-fsdp": "fully sharded data parallel is not implemented",
    "--use-torch-fsdp2": "fully sharded data parallel is not implemented",
    "--mhc-": "hyper-connections are not implemented",
    "--flight-recorder-": "use PyTorch's TORCH_FR_* environment variables",
    "--no-flight-recorder-": "use PyTorch's TORCH_FR_* environment variables",
    "--disable-flight-recorder-": "use PyTorch's TORCH_FR_* environment variables",
    "--pytorch-profiler-": "the profile is a Chrome trace",
    "--straggler-": "log lines name a slow rank; there are no settings",
    "--gtp-": "weights are sharded by TP only",
}

# All other Megatron-LM flags without a counterpart here.
UNSUPPORTED_FLAGS = """
--activation-func-clamp-value
--activation-offload-fraction --adlr-autoresume --adlr-autoresume-interval --attention-output-gate
--batch-invariant-backend --batch-invariant-mode --bert-embedder-type --bert-load --block-data-path
--cache-mla-latents --calc-ft-timeouts --chat-template
--classes-fraction --config-logger-dir --cp-comm-type
--create-all-gather-group --data-per-class-fraction
--ddp-param-name-patterns-for-fp32-local-accumulation --ddp-reduce-scatter-with-fp32-accumulation
--decode-only-cuda-graphs
--defer-embedding-wgrad-compute --delay-offload-until-cuda-graph
--delta-offload-bytes-across-pp-ranks --disable-bf16-reduced-precision-matmul
--disable-clone-scatter-output-in-embedding --disable-mamba-mem-eff-path --disable-straggler-on-startup
--disable-strict-fsdp-dtensor-load --dump-param-to-param-group-map --embedding-path --enable-chunked-prefill
--enable-experimental --enable-ft-package --enable-full-sharding-in-hsdp --enable-mhc-connections --enable-msc
--ep-overlap-early-attn-memory-release --evidence-data-path
--experimental-attention-variant --fine-grained-activation-offloading
--fine-grained-offloading-max-inflight-offloads --first-last-layers-bf16 --flash-decode --fp16-lm-cross-entropy
--freeze-all-layers --glu-linear-offset --gpu-sniff-test-interval --hierarchical-context-parallel-sizes
--high-priority-a2a-comm-stream --ict-head-size --ict-load --img-h --img-w --indexer-batch-size --indexer-log-interval
--is-hybrid-model --iter-per-epoch --iterations-to-skip --keep-fp8-transpose-cache --kitchen-attention-backend
--kv-lora-rank --langrl-env-config --logging-level --main-grads-dtype --main-params-dtype --mask-factor --mask-prob
--mask-type --max-seqlen-per-dp-cp-rank --max-tokens-to-oom
--min-offloaded-tensor-size --mla-down-proj-fusion
--mlp-chunks-for-prefill --mlp-chunks-for-training --mrope-section --mscale --mscale-all-dim --multi-latent-attention
--nccl-all-reduce-for-prefill --no-clone-scatter-output-in-embedding --no-pin-cpu-grads --no-pin-cpu-params
--no-rope-freq --no-strict-fsdp-dtensor-load --no-use-layer-wise-param-layout --no-yarn-correction-range-round-to-int
--num-channels --num-classes --num-speculative-tokens --nvtx-ranges
--offload-modules --onnx-safe --outer-dp-sharding-strategy --output-bert-embeddings --output-logit-dtype
--overlap-cpu-optimizer-d2h-h2d --overlap-dispatch-backward-with-experts-wgrad --overlap-moe-expert-parallel-comm
--patch-dim --perform-rl-step --pipeline-model-parallel-comm-backend
--q-lora-rank --qk-head-dim --qk-l2-norm --qk-pos-emb-head-dim --query-in-block-prob
--refit-method --rerun-mode --result-rejected-tracker-filename --reuse-grad-buf-for-mxfp8-param-ag
--run-workload-inspector-server --sample-rate --short-seq-prob --softmax-type --spec --start-eval-at-iter
--suggested-communication-unit-size --swin-backbone-type --symmetric-ar-type --te-precision-config-file
--tensor-parallel-num-weight-shards --test-mode --titles-data-path --train-sync-interval --use-kitchen-attention
--use-legacy-static-engine --use-mup --use-one-sent-docs
--use-same-sampling-seed-across-dp-ranks --use-torch-optimizer-for-cpu-offload --v-head-dim --wgrad-deferral-limit
--window-attn-skip-freq --yarn-correction-range-round-to-int
"""


RENAMED_FLAGS = {
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
"""Flag of another trainer -> our flag, which takes the same value."""

_ALWAYS_MAPPED = "token files are always memory-mapped"
_TO_TENSORBOARD = (
    "--log-batch-size-to-tensorboard",
    "--no-log-batch-size-to-tensorboard",
    "--log-learning-rate-to-tensorboard",
    "--no-log-learning-rate-to-tensorboard",
    "--no-log-learnig-rate-to-tensorboard",  # spelled like this in Megatron-LM
    "--log-loss-scale-to-tensorboard",
)

_ENCODERS = "it belongs to encoder-decoder models, which are not supported"

REPLACED_FLAGS: dict[str, tuple[str, tuple[str, ...]]] = {
    "--dtype": ("every data type has its own flag", ("--bf16", "--fp16", "--params-dtype fp32")),
    "--mixed-precision": ("every data type has its own flag", ("--bf16", "--fp16", "--params-dtype fp32")),
    "--gradient-accumulation-steps": (
        "set the global batch size: micro-batch size x data-parallel size x accumulation steps",
        ("--global-batch-size N",),
    ),
    "--num-microbatches": (
        "it is --global-batch-size / (--micro-batch-size x data-parallel size)",
        ("drop --num-microbatches",),
    ),
    "--gradient-checkpointing": ("activations are recomputed", ("--recompute-granularity full",)),
    "--activation-checkpointing": ("activations are recomputed", ("--recompute-granularity full",)),
    "--epochs": ("the run length is given in steps or samples", ("--train-iters N", "--train-samples N")),
    "--num-epochs": ("the run length is given in steps or samples", ("--train-iters N", "--train-samples N")),
    "--num-train-epochs": (
        "the run length is given in steps or samples",
        ("--train-iters N", "--train-samples N"),
    ),
    "--data-impl": (_ALWAYS_MAPPED, ("drop --data-impl",)),
    "--dataset-impl": (_ALWAYS_MAPPED, ("drop --dataset-impl",)),
    "--nproc": ("it belongs to the launcher", ("torchrun --nproc-per-node {} pretrain_gpt.py",)),
    "--nproc-per-node": ("it belongs to the launcher", ("torchrun --nproc-per-node {} pretrain_gpt.py",)),
    "--wandb-mode": (
        "set the environment variable before the command",
        ("WANDB_MODE=offline", "WANDB_MODE=online", "WANDB_MODE=disabled"),
    ),
    "--standalone-embedding-stage": (
        "use a layout with a stage for the embedding, such as --pipeline-model-parallel-layout 'E|t*4|t*4|t*4L'",
        ("drop --standalone-embedding-stage",),
    ),
    "--pipeline-model-parallel-split-rank": (_ENCODERS, ("drop --pipeline-model-parallel-split-rank",)),
    "--encoder-pipeline-model-parallel-size": (_ENCODERS, ("drop --encoder-pipeline-model-parallel-size",)),
    "--overlap-p2p-communication": ("transfers always overlap", ("drop --overlap-p2p-communication",)),
    **{flag: (SAME_METRICS_EVERYWHERE, (f"drop {flag}",)) for flag in _TO_TENSORBOARD},
}
"""Flag of another trainer -> how to express it here, and fixes to paste; ``{}`` stands for the flag's value."""

IGNORED_OLD_FLAGS = {
    "--data-impl": (("mmap", "infer"), _ALWAYS_MAPPED),
    "--dataset-impl": (("mmap", "infer"), _ALWAYS_MAPPED),
    **dict.fromkeys(_TO_TENSORBOARD, ((), SAME_METRICS_EVERYWHERE)),
}
"""Old flag -> the values with which it is ignored, and the reason."""


GENERAL_FLAGS = (
    "--preset",
    "--config",
    "--set",
    "--check-config",
    "--fake-world",
    "--fake-rank",
    "--world-size",
    "--help",
)
KEEP_SCHEDULE_FLAGS = ("--use-checkpoint-opt_param-scheduler", "--use-checkpoint-opt-param-scheduler")
MAX_REASONS = 3


def check_unknown_flags(foreign: Iterable[Sequence[str]]) -> tuple[ConfigSource, list[str]]:
    """Return the problems of flags that the parser does not know, and notes on those that are ignored.

    Args:
        foreign: each unknown flag with its arguments, and arguments that follow no flag.
    """
    layer = ConfigSource()
    ignored: dict[str, list[str]] = {}
    for words in foreign:
        spelling, arguments = _split(words)
        reason = _ignore_reason(spelling, arguments)
        if reason:
            ignored.setdefault(reason, []).append(" ".join([spelling, *arguments]))
        else:
            layer.problems.append(_problem(spelling, arguments, layer.doubtful))
    if len(ignored) > MAX_REASONS:
        return layer, [f"ignored, as docs/flags.md explains: {', '.join(chain(*ignored.values()))}"]
    return layer, [f"ignored: {', '.join(flags)} because {reason}" for reason, flags in ignored.items()]


def _split(words: Sequence[str]) -> tuple[str, list[str]]:
    """Split ``--flag=value ...`` into flag and arguments; the flag is empty if there is none."""
    if not words[0].startswith("--"):
        return "", list(words)
    spelling, equals, value = words[0].partition("=")
    return spelling, [value, *words[1:]] if equals else list(words[1:])


def _ignore_reason(spelling: str, arguments: Sequence[str]) -> str | None:
    """Return the reason why a flag with these arguments is ignored, or None if it is not."""
    values, reason = IGNORED_OLD_FLAGS.get(
        spelling, (IGNORED_VALUES.get(spelling, arguments), IGNORED_FLAGS.get(spelling))
    )
    return reason if set(arguments) <= set(values) else None


def _problem(spelling: str, arguments: list[str], doubtful: set[str]) -> Problem:
    """Return the problem of an unknown flag, and add the option that was meant to ``doubtful``."""
    if not spelling:
        return Problem("E001", f"{' '.join(arguments)}: belongs to no flag")
    normalized = spelling.lower().replace("_", "-")
    if normalized in REPLACED_FLAGS:
        why, templates = REPLACED_FLAGS[normalized]
        fixes = tuple(template.replace("{}", " ".join(arguments) or "N") for template in templates)
        return Problem("E001", f"{spelling}: no such flag; {why}", fixes)
    meant = RENAMED_FLAGS.get(normalized)
    reason = None if meant else refusal_reason(spelling)
    if reason is not None:
        why, fixes = reason
        return Problem("E004", f"{' '.join([spelling, *arguments])} of Megatron-LM is not supported: {why}", fixes)
    meant = meant or did_you_mean(normalized, [*SPELLINGS, *GENERAL_FLAGS, *IGNORED_FLAGS])
    if meant is None:
        return Problem("E001", f"{spelling}: no such flag", ("--help",))
    if meant in SPELLINGS:
        doubtful.add(SPELLINGS[meant].name)
    return Problem("E001", f"{spelling}: no such flag; did you mean {meant}?", (" ".join([meant, *arguments]),))


def refusal_reason(spelling: str) -> tuple[str, tuple[str, ...]] | None:
    """Return the reason why a Megatron-LM flag is refused, and fixes; None if it is not a flag of Megatron-LM."""
    drop = (f"drop {spelling}",)
    if spelling in REFUSED_FLAGS:
        why, fixes = REFUSED_FLAGS[spelling]
        return why, fixes or drop
    if spelling in IGNORED_FLAGS:
        return f"{IGNORED_FLAGS[spelling]}; other values are not supported", drop
    prefix = max((p for p in REFUSED_PREFIXES if spelling.startswith(p)), key=len, default=None)
    if prefix is not None:
        return REFUSED_PREFIXES[prefix], drop
    return ("it has no counterpart", drop) if spelling in UNSUPPORTED_FLAGS.split() else None


def implied_default_problems(spellings: Collection[str], config: RunConfig) -> list[Problem]:
    """Return the problems of flags that are ignored only where Megatron-LM's implied default is the same as ours."""
    found, model = [], config.model
    if "--group-query-attention" in spellings and model.num_query_groups is None:
        sentence = (
            "--group-query-attention without --num-query-groups means one group in Megatron-LM, one per head here"
        )
        fixes = ("--num-query-groups 1", f"--num-query-groups {model.num_attention_heads}")
        found.append(Problem("E004", sentence, fixes))
    if "--no-position-embedding" in spellings and model.position_embedding_type == "learned_absolute":
        sentence = "--no-position-embedding contradicts --position-embedding-type learned_absolute"
        fixes = ("--position-embedding-type none", "--position-embedding-type rope")
        found.append(Problem("E004", sentence, fixes))
    keep = next((flag for flag in KEEP_SCHEDULE_FLAGS if flag in spellings), None)
    if keep and config.checkpoint.resume_mode == "new-schedule":
        sentence = f"{keep} keeps the checkpoint's schedule, but --resume-mode new-schedule replaces it"
        found.append(Problem("E004", sentence, ("--resume-mode exact", f"drop {keep}")))
    return found


def implied_default_notes(spellings: Collection[str], given: Collection[str]) -> Iterator[str]:
    """Yield notes on implied defaults that differ from Megatron-LM's.

    Args:
        spellings: flags on the command line.
        given: fields that were set.
    """
    if "--disable-bias-linear" in spellings and "activation" not in given:
        yield "activation is gelu_tanh; Megatron-LM without biases computes the exact form: --activation gelu"
    if {"--no-create-attention-mask-in-dataloader", "--reset-attention-mask"} <= set(spellings):
        yield "attention is restricted to documents; Megatron-LM would not restrict it without masks"
