#!/usr/bin/env bash
# Qwen3 30B-A3B on 1,024 H100s, 660B tokens (20 for each parameter). From the root of the repository:   sbatch slurm/train_qwen3_30b_a3b.sh
# DRY_RUN=1 bash slurm/train_qwen3_30b_a3b.sh shows what it would start; SMALL=1 sbatch --nodes=2 ... tries it on CPUs.
#
# 1024 = TP1 x PP1 x DP1024; experts EP8 x DP128; 1024/1024 = 1 micro-batches
# of 80 GB: state 29.2 + activations 22; a checkpoint has 341 GB
# 660B tokens = 157,357 steps; at MFU 30% 0.39 s a step, 10,634 tokens/s a GPU, 16.8 hours
#SBATCH --job-name=train_qwen3_30b_a3b
##SBATCH --account=ACCOUNT
##SBATCH --partition=PARTITION
#SBATCH --nodes=128 --ntasks-per-node=1 --gpus-per-node=8 --exclusive --mem=0
#SBATCH --time=2-00:00:00 --signal=B:USR1@300 --requeue
#SBATCH --output=runs/%x-%j.out --open-mode=append

source slurm/lib.sh || { echo "submit it from the root of the repository" >&2 && exit 2; }
DATA=${DATA:-data/corpus_text_document} # from slurm/preprocess_array.sh

model=(--preset qwen3-30b-a3b --bf16)
layout=(
    --expert-model-parallel-size 8 # the GPUs of a node
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
)
batch=(--micro-batch-size 1 --global-batch-size 1024 --train-iters 157357)
data=(--data-path "$DATA" --split "99,1,0" --eval-interval 1000 --eval-iters 10)
run=(--save-interval 500 --async-save --keep-last 3)

if [ -n "$SMALL" ]; then
    small_nodes=2 # x 4 ranks = DP8, experts EP4 x DP2
    model+=(--num-query-groups 2 --kv-channels 16 --num-experts 16 --moe-ffn-hidden-size 32 --moe-router-topk 4)
    layout+=(--expert-model-parallel-size 4)
    batch+=(--global-batch-size 16)
    data=(--mock-data)
    run+=("${tiny[@]}")
fi
train "${model[@]}" "${layout[@]}" "${batch[@]}" "${data[@]}" "${run[@]}" "$@"
