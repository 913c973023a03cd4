"""Flags of Megatron-LM (core 0.20) that are not flags here: which are harmless, and what to do instead of the others.

Pure data, read only when such a flag is met. A flag is looked up in ``IGNORED``, then ``REFUSED``, then by the longest
prefix in ``FAMILIES``, then in ``OTHERS``.
"""

from __future__ import annotations

# What they ask for is always done, or they only choose between implementations of the same numbers.
_FUSED = "which kernels are fused does not change the numbers"
_OVERLAP = "how communication overlaps with computing does not change the numbers"
_ALWAYS_FP32 = "softmax, masters and gradient sums are always at least fp32"
_ONE_STACK = "there is one implementation of the model; --kernels alone says what computes it"
_ATTENTION = "attention is computed by the kernel that --kernels chooses"
_MEMORY_ONLY = "memory is managed by PyTorch; the numbers are the same"
_ALWAYS_LOGGED = "step time and speed are in every progress line"
ALL_SINKS = "console, metrics.jsonl, TensorBoard and Weights & Biases get the same numbers, at every log_interval"
_MAPPED = "samples are read from memory-mapped files by the training process itself"

_ONE_FORM = "checkpoints have one form of their own, which every layout reads"
_OWN_PARTS = "every rank writes and reads its own parts, whatever the layout"
_ALWAYS_CHECKED = "a checkpoint's parts and checksums are always checked"
_WRITER = "--async-save alone says it: a thread of each rank writes, whose priority cannot be set"
_NO_RANDOM_STATE = "random numbers are functions of the seed and the place; there is no state to save or load"

IGNORED = {
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
    "--no-create-attention-mask-in-dataloader": "masks are never made by the data loader",
    "--use-cpu-initialization": "weights depend on the seed and their names only, never on the device",
    "--te-rng-tracker": "random numbers are functions of the seed and the place; there is no state to track",
    "--no-save-rng": _NO_RANDOM_STATE,
    "--no-load-rng": _NO_RANDOM_STATE,
    "--ckpt-format": _ONE_FORM,
    "--dist-ckpt-format": _ONE_FORM,
    "--use-dist-ckpt": _ONE_FORM,
    "--auto-detect-ckpt-format": _ONE_FORM,
    "--dist-ckpt-optim-fully-reshardable": _ONE_FORM,
    "--distrib-optim-fully-reshardable-mem-efficient": _ONE_FORM,
    "--ckpt-drop-redundant-extra-state": _ONE_FORM,
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
    "--load-main-params-from-ckpt": "weights are saved and loaded at the precision of their masters",
    "--no-save-tokenizer-assets": "the tokenizer's few files are always saved with the weights",
    "--disable-save-tokenizer-assets": "the tokenizer's few files are always saved with the weights",
    "--use-checkpoint-opt_param-scheduler": "a schedule that is not the checkpoint's is refused, so it is kept",
    "--use-checkpoint-opt-param-scheduler": "a schedule that is not the checkpoint's is refused, so it is kept",
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
    "--disable-gloo-process-groups": "groups are made with the one backend of --distributed-backend",
    "--use-ring-exchange-p2p": _OVERLAP,
    "--lazy-mpu-init": "groups are made at the start",
    "--local-rank": "the rank is read from the launcher's environment",
    "--manual-gc": _MEMORY_ONLY,
    "--manual-gc-interval": _MEMORY_ONLY,
    "--no-manual-gc-eval": _MEMORY_ONLY,
    "--disable-manual-gc-eval": _MEMORY_ONLY,
    "--empty-unused-memory-level": _MEMORY_ONLY,
    "--init-model-with-meta-device": _MEMORY_ONLY,
    "--exit-signal-handler": "a signal always ends the run cleanly",
    "--exit-signal-handler-for-training": "a signal always ends the run cleanly",
    "--log-throughput": _ALWAYS_LOGGED,
    "--no-barrier-with-level-1-timing": "timers never wait for other ranks",
    "--tensorboard-log-interval": ALL_SINKS,
    "--tensorboard-queue-size": ALL_SINKS,
    "--log-timers-to-tensorboard": ALL_SINKS,
    "--log-validation-ppl-to-tensorboard": ALL_SINKS,
    "--log-memory-to-tensorboard": ALL_SINKS,
    "--log-world-size-to-tensorboard": ALL_SINKS,
    "--no-log-loss-scale-to-tensorboard": ALL_SINKS,
    "--disable-log-loss-scale-to-tensorboard": ALL_SINKS,
    "--use-pytorch-profiler": "the profiler is PyTorch's",
    "--log-straggler": "progress lines name a slow rank",
    "--no-one-logger": "nothing is reported to anybody unasked",
    "--disable-msc": "files are read by path",
    "--num-workers": _MAPPED,
    "--no-mmap-bin-files": _MAPPED,
    "--dataloader-fast-cache-load": _MAPPED,
    "--dataloader-defer-npy-index-mmap": _MAPPED,
    "--num-dataset-builder-threads": _MAPPED,
    "--per-dataset-sequences-path": _MAPPED,
    "--mid-level-dataset-surplus": "every dataset of a blend is laid out for 0.005 more samples than its share",
    "--null-tokenizer-pad-id": "no id of the NullTokenizer is padding",
    "--use-precision-aware-optimizer": "--exp-avg-dtype, --exp-avg-sq-dtype and --store-param-remainders alone say it",
    "--moe-grouped-gemm": _FUSED,
    "--moe-permute-fusion": _FUSED,
    "--moe-router-fusion": _FUSED,
    "--moe-token-dispatcher-type": "tokens go to their experts in one all-to-all; the numbers are the same",
    "--moe-router-score-function": "experts are chosen by a softmax",
    "--moe-layer-freq": "every block has experts",
    "--muon-tp-mode": "muon computes with whole matrices, however they are cut",
    "--muon-coefficient-type": "the coefficients are those of the quintic iteration",
    "--muon-scalar-optimizer": "what is no matrix of a block is moved by adam",
    "--group-query-attention": "--num-query-groups alone says it",
    "--no-position-embedding": "--position-embedding-type alone says it",
    "--dataloader-type": "samples come in the one order of --dataloader-type single",
    "--fp8-param-gather": "there are no fp8 parameters",
    "--bert-no-binary-head": "there is no BERT head",
    "--no-data-sharding": "samples come once, in the shuffled order of the data",
}

# Ignored only with these values; any other is refused.
HARMLESS_VALUES = {
    "--dataloader-type": ("single",),
    "--transformer-impl": ("local", "transformer_engine"),
    "--mid-level-dataset-surplus": ("0.005",),
    "--null-tokenizer-pad-id": ("-1",),
    "--moe-router-score-function": ("softmax",),
    "--moe-layer-freq": ("1",),
    "--muon-coefficient-type": ("quintic",),
    "--muon-scalar-optimizer": ("adam",),
}

_CONVERTER = "a tool converts checkpoints, without a run"
_FROM_FLAGS = "options come from flags, and those that differ from the checkpoint's are told or refused"
_ONE_KIND = "there is one kind of checkpoint, in one folder"
_OTHER_EXPERTS = "that variant of experts is not built"
_IN_HEALTH = "it belongs to the report on every layer"
_AS_RECORDED = "a tokenizer is what its files and the record beside the data say"

# Flag -> (why not, what to paste instead; nothing but leaving it out where that is empty).
REFUSED: dict[str, tuple[str, tuple[str, ...]]] = {
    "--persistent-save-interval": ("it is spelled shorter", ("--save-interval N",)),
    "--save-retain-interval": ("that is said in two flags", ("--keep-last 1 --keep-every N",)),
    "--non-persistent-save-interval": ("that is said in two flags", ("--local-save DIR --local-save-interval N",)),
    "--pretrained-checkpoint": (
        "--load serves both: it is read while --save holds no checkpoint",
        ("--load DIR --resume-mode weights-only",),
    ),
    "--no-load-optim": (
        "a run goes on with its optimizer's state, or starts anew with nothing but weights",
        ("--resume-mode weights-only",),
    ),
    "--no-save-optim": ("a run could not go on from such a checkpoint; convert it where weights are all you want", ()),
    "--exit-on-missing-checkpoint": (
        "--load without a checkpoint is always an error, unless it is also --save, where a run begins",
        (),
    ),
    "--use-checkpoint-args": (_FROM_FLAGS, ("--config RUN_DIR/config.yaml",)),
    "--use-mp-args-from-checkpoint-args": (_FROM_FLAGS, ("--config RUN_DIR/config.yaml",)),
    "--ckpt-convert-format": (_CONVERTER, ("python tools/convert_checkpoint.py",)),
    "--ckpt-convert-save": (_CONVERTER, ("python tools/convert_checkpoint.py",)),
    "--yaml-cfg": ("its file has another form", ("--config FILE.yaml",)),
    "--encoder-num-layers": ("there is one stack of layers", ("--num-layers N",)),
    "--decoder-num-layers": ("there is one stack of layers", ("--num-layers N",)),
    "--encoder-seq-length": ("there is one sequence length", ("--seq-length N",)),
    "--decoder-seq-length": ("there is one sequence length", ("--seq-length N",)),
    "--batch-size": ("that is its old name", ("--micro-batch-size N",)),
    "--warmup": ("that is its old name", ("--lr-warmup-fraction X",)),
    "--model-parallel-size": ("that is its old name", ("--tensor-model-parallel-size N",)),
    "--checkpoint-activations": ("that is its old name", ("--recompute-granularity full",)),
    "--rope-type": ("it belongs to multi-latent attention", ("--position-embedding-type rope|yarn",)),
    "--rotary-seq-len-interpolation-factor": (
        "linear interpolation of positions is not built",
        ("--position-embedding-type yarn --rotary-scaling-factor X", "--use-rope-scaling --rope-scaling-factor X"),
    ),
    "--quick-geglu": ("that activation is not built", ("--swiglu",)),
    "--apply-layernorm-1p": ("norm weights start at 1 and are stored so", ()),
    "--apply-residual-connection-post-layernorm": ("blocks are pre-norm", ()),
    "--fp32-residual-connection": ("the residual stream has the format of --params-dtype", ("--params-dtype fp32",)),
    "--init-method-xavier-uniform": ("weights start normal", ("--init-method-std X",)),
    "--embedding-init-method-std": ("one standard deviation serves all", ("--init-method-std X",)),
    "--no-initialization": ("weights are always initialised", ()),
    "--data-parallel-random-init": ("replicas always start equal", ()),
    "--padded-vocab-size": ("padding follows from the layout", ("--vocab-size N --make-vocab-size-divisible-by M",)),
    "--no-pad-vocab-size": ("padding is never seen by the model", ("--make-vocab-size-divisible-by 1",)),
    "--disable-pad-vocab-size": ("padding is never seen by the model", ("--make-vocab-size-divisible-by 1",)),
    "--no-bias-gelu-fusion": (
        "in Megatron-LM it turns the tanh form of gelu into the exact one, and does nothing to other activations",
        ("--activation gelu", "drop --no-bias-gelu-fusion"),
    ),
    "--no-check-for-nan-in-loss-and-grad": (
        "a step that is not finite is never applied",
        ("--on-nonfinite skip", "--on-nonfinite stop"),
    ),
    "--step-batch-size-schedule": ("the batch grows linearly", ("--rampup-batch-size START INCREMENT SAMPLES",)),
    "--decrease-batch-size-if-needed": ("the batch is never changed silently", ("--global-batch-size N",)),
    "--distribute-saved-activations": ("saved activations are not spread over ranks", ("--sequence-parallel",)),
    "--exit-signal": ("SIGTERM, SIGINT and SIGUSR1 end the run cleanly, no other", ()),
    "--exit-signal-handler-for-dataloader": ("there are no data loader processes", ()),
    "--distributed-timeout-seconds-after-init": ("one timeout holds", ("--distributed-timeout-minutes N",)),
    "--ddp-num-buckets": ("buckets are cut by size", ("--ddp-bucket-size N",)),
    "--dataloader-inter-document-masking": (
        "attention and positions have a flag each",
        ("--reset-attention-mask --reset-position-ids",),
    ),
    "--allow-ambiguous-pad-tokens": ("a padding id that is another special id as well never masks anything", ()),
    "--full-validation": ("an evaluation reads as many batches as it is told", ("--eval-iters N",)),
    "--phase-transition-iterations": ("one blend serves the whole run", ()),
    "--object-storage-cache-path": ("data are read from files", ()),
    "--trust-remote-code": ("code that comes with a model or tokenizer is never run", ()),
    "--use-gigatoken": ("tools/preprocess_data.py takes gigatoken wherever it gives the same ids", ()),
    "--vocab-extra-ids": ("they are counted in the size of the vocabulary", ("--vocab-size N",)),
    "--null-tokenizer-eod-id": ("one flag says which id ends documents, whatever the tokenizer", ("--eod-id N",)),
    "--eval-global-batch-size": ("evaluation uses the training batch", ("--eval-iters N",)),
    "--eval-micro-batch-size": ("evaluation uses the training batch", ("--eval-iters N",)),
    "--no-weight-decay-cond-type": (
        "biases and other 1-D parameters have no weight decay, unless they are given some by name",
        ("--weight-decay-factors '*.q_layernorm.weight=1' '*.k_layernorm.weight=1'",),
    ),
    "--apply-wd-to-qk-layernorm": (
        "biases and other 1-D parameters have no weight decay, unless they are given some by name",
        ("--weight-decay-factors '*.q_layernorm.weight=1' '*.k_layernorm.weight=1'",),
    ),
    "--head-lr-mult": ("learning rates are multiplied by name", ("--lr-factors 'output_layer.*=X'",)),
    "--log-params-norm": (_IN_HEALTH, ("--log-health-interval N",)),
    "--log-num-zeros-in-grad": (_IN_HEALTH, ("--log-health-interval N",)),
    "--log-max-attention-logit": (_IN_HEALTH, ("--log-health-interval N",)),
    "--check-for-spiky-loss": ("an update may be skipped for it", ("--skip-spikes 6",)),
    "--check-for-large-grads": ("an update may be skipped for it", ("--skip-spikes 6",)),
    "--record-memory-history": ("it is spelled shorter", ("--profile-memory",)),
    "--memory-snapshot-path": ("snapshots lie in the run's folder", ("--profile-memory --run-dir DIR",)),
    "--record-shapes": ("it is spelled longer", ("--pytorch-profiler-collect-shapes",)),
    "--optimizer-cuda-graph": ("one flag says what is a graph", ("--cuda-graph optimizer",)),
    "--enable-cuda-graph": ("one flag says what is a graph", ("--cuda-graph step",)),
    "--external-cuda-graph": ("one flag says what is a graph", ("--cuda-graph step",)),
    "--cuda-graph-impl": ("one flag says what is a graph", ("--cuda-graph step",)),
    "--delay-wgrad-compute": ("schedules that split backward delay weight gradients", ("--pipeline-schedule zb-h1",)),
    "--use-tp-pp-dp-mapping": ("ranks are placed with TP innermost, then CP, DP, PP", ()),
}

# Flags that are both ours and Megatron-LM's, with another default: its default, and why ours differs.
OTHER_DEFAULTS = {
    "--num-query-groups": ("1, beside --group-query-attention", "one per query head, unless it is given"),
    "--recompute-modules": ("core_attn", "recomputing attention saves nothing under SDPA"),
    "--ddp-bucket-size": ("40,000,000 or 1,000,000 x DP, the larger", "one number that does not depend on the layout"),
    "--overlap-grad-reduce": ("off", "the numbers are the same, and it is not slower"),
    "--eval-iters": ("100", "evaluation is asked for"),
    "--log-interval": ("100", "a line every ten steps"),
    "--profile-ranks": ("none", "a profile that is asked for is recorded"),
}

# Prefix -> what all flags that start so belong to.
FAMILIES = {
    "--save-": "it writes tensors out for debugging",
    "--ckpt-": _CONVERTER,
    "--dist-ckpt-": _ONE_FORM,
    "--non-persistent-": _ONE_KIND,
    "--override-ckpt-": "the steps of a checkpoint are its own",
    "--replication": _ONE_KIND,
    "--log-": "it logs a quantity that is not logged here",
    "--no-log-": "it turns off a quantity that is not logged here",
    "--disable-log-": "it turns off a quantity that is not logged here",
    "--one-logger-": "nothing is reported to anybody unasked",
    "--app-tag-": "nothing is reported to anybody unasked",
    "--otel-": "metrics go to no such collector",
    "--moe-": _OTHER_EXPERTS,
    "--expert-tensor-parallel-num-": _OTHER_EXPERTS,
    "--use-grouped-gemm-": _OTHER_EXPERTS,
    "--num-layers-at-": "fp8 is not built",
    "--fp8-": "fp8 is not built",
    "--no-fp8-": "fp8 is not built",
    "--disable-fp8-": "fp8 is not built",
    "--fp4-": "fp4 is not built",
    "--cuda-graph-": "--cuda-graph says what is a graph; how cannot be tuned",
    "--no-tp-comm-": "overlap of TP communication cannot be tuned",
    "--disable-tp-comm-": "overlap of TP communication cannot be tuned",
    "--cpu-offloading-": "offloading is not built",
    "--optimizer-c": "the optimizer stays on the device",
    "--optimizer-offload-": "the optimizer stays on the device",
    "--muon-": "that variant of muon is not built",
    "--mtp-": "multi-token prediction is not built",
    "--dsa-": "that attention variant is not built",
    "--no-dsa-": "that attention variant is not built",
    "--disable-dsa-": "that attention variant is not built",
    "--linear-": "that attention variant is not built",
    "--qk-clip": "query-key clipping is not built",
    "--mup-": "maximal-update parametrisation is not built",
    "--relative-attention-": "relative position biases are not built",
    "--mamba-": "hybrid models are not built",
    "--hybrid-": "hybrid models are not built",
    "--gdp-": "hybrid models are not built",
    "--heterogeneous-": "all layers have one shape",
    "--fim-": "fill-in-the-middle is not built",
    "--sft": "training on conversations is not built",
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
    "--inprocess-": "a failed run is started again by the launcher",
    "--ft-": "a failed run is started again by the launcher",
    "--fault-injector-": "it belongs to Megatron-LM's own tests",
    "--error-injection-": "it belongs to Megatron-LM's own tests",
    "--fsdp-": "fully sharded data parallel is not built in this version",
    "--megatron-fsdp-": "fully sharded data parallel is not built in this version",
    "--torch-fsdp2-": "fully sharded data parallel is not built in this version",
    "--use-megatron-fsdp": "fully sharded data parallel is not built in this version",
    "--use-torch-fsdp2": "fully sharded data parallel is not built in this version",
    "--mhc-": "hyper-connections are not built",
    "--flight-recorder-": "use PyTorch's TORCH_FR_* environment variables",
    "--no-flight-recorder-": "use PyTorch's TORCH_FR_* environment variables",
    "--disable-flight-recorder-": "use PyTorch's TORCH_FR_* environment variables",
    "--pytorch-profiler-": "the profile is a Chrome trace",
    "--straggler-": "progress lines name a slow rank; there is nothing to set",
    "--gtp-": "weights are sharded by TP alone",
}

# The rest, a list of words: known to Megatron-LM, not here.
OTHERS = """
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
--experimental-attention-variant --fake-process-group --fine-grained-activation-offloading
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
--run-workload-inspector-server --sample-rate --short-seq-prob --skip-train --softmax-type --spec --start-eval-at-iter
--suggested-communication-unit-size --swin-backbone-type --symmetric-ar-type --te-precision-config-file
--tensor-parallel-num-weight-shards --test-mode --titles-data-path --train-sync-interval --use-kitchen-attention
--use-legacy-static-engine --use-mup --use-one-sent-docs
--use-same-sampling-seed-across-dp-ranks --use-torch-optimizer-for-cpu-offload --v-head-dim --wgrad-deferral-limit
--window-attn-skip-freq --yarn-correction-range-round-to-int
"""
