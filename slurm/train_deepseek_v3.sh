#!/usr/bin/env bash
# DeepSeek-V3 on 2,048 H100s, on the tokens of its paper. From the root of the repository:   sbatch slurm/train_deepseek_v3.sh
# DRY_RUN=1 bash slurm/train_deepseek_v3.sh shows what it would start; SMALL=1 sbatch --nodes=2 ... tries it on CPUs.
#
# 2048 = TP1 x PP16 x DP128; experts EP64 x DP2; 61 layers in stages of 1 to 4; 15360/128 = 120 micro-batches
# bubble 15/(1*120+15) = 11.1%; of 80 GB: state 18.5 + activations 20; a checkpoint has 7,629 GB
# 14.8T tokens = 243,760 steps; at MFU 30% 30.2 s a step, 1,017 tokens/s a GPU, 82.2 days
# a failure every 25 h (419 in 54 days on 16,384 H100s: Llama 3); to save takes 153 s at 50 GB/s, so
# every sqrt(2 x 153 s x 25 h) = 173 steps is best (Young 1974)
#SBATCH --job-name=train_deepseek_v3
##SBATCH --account=ACCOUNT
##SBATCH --partition=PARTITION
#SBATCH --nodes=256 --ntasks-per-node=1 --gpus-per-node=8 --exclusive --mem=0
#SBATCH --time=2-00:00:00 --signal=B:USR1@300 --requeue
#SBATCH --output=runs/%x-%j.out --open-mode=append

source slurm/lib.sh || { echo "submit it from the root of the repository" >&2 && exit 2; }
DATA=${DATA:-data/corpus_text_document} # from slurm/preprocess_array.sh

model=(--preset deepseek-v3 --bf16)
layout=(
    --pipeline-model-parallel-size 16 --pipeline-model-parallel-layout auto
    --expert-model-parallel-size 64 # 8 nodes of a stage
    --recompute-granularity selective --recompute-modules mlp mla_up_proj
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
)
batch=(--micro-batch-size 1 --global-batch-size 15360 --rampup-batch-size 3072 768 114500000 --train-samples 3613281250)
data=(--data-path "$DATA" --split "99,1,0" --eval-interval 1000 --eval-iters 10)
run=(--save-interval 200 --async-save --keep-last 3)

if [ -n "$SMALL" ]; then
    small_nodes=2 # x 4 ranks = PP2 x DP4, experts EP4 x DP1
    model+=(
        --num-experts 16 --moe-ffn-hidden-size 32 --moe-shared-expert-intermediate-size 32 --moe-layer-freq "[0]+[1]*3"
        --q-lora-rank 32 --kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16
    )
    layout+=(--pipeline-model-parallel-size 2 --expert-model-parallel-size 4)
    batch=(--micro-batch-size 1 --global-batch-size 16 --rampup-batch-size 8 4 64)
    data=(--mock-data)
    run+=("${tiny[@]}")
fi
train "${model[@]}" "${layout[@]}" "${batch[@]}" "${data[@]}" "${run[@]}" "$@"
