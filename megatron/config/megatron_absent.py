"""Megatron-LM flags (core 0.20) of unsupported features, by prefix or one by one."""

from __future__ import annotations

from megatron.config.megatron_flags import CONVERTER, ONE_FORM

_OTHER_EXPERTS = "this variant of mixture of experts is not implemented"
_AS_RECORDED = "tokenizer settings come from its files and the record beside the data"
_LOCAL = "--local-save DIR --local-save-interval N keep checkpoints on the nodes, each with a copy on another node"

# Prefix of flags -> reason why they are refused.
FAMILIES = {
    "--save-": "it writes tensors out for debugging",
    "--ckpt-": CONVERTER,
    "--dist-ckpt-": ONE_FORM,
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
