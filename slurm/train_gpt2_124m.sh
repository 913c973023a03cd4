#!/usr/bin/env bash
# GPT-2 124M on one node of 8 GPUs, 10B tokens. From the root of the repository:   sbatch slurm/train_gpt2_124m.sh
# DRY_RUN=1 bash slurm/train_gpt2_124m.sh shows what it would start; SMALL=1 sbatch ... tries it on CPUs.
#
# 8 = TP1 x PP1 x DP8; 512/8/16 = 4 micro-batches
# of 80 GB: state 0.9 + activations 4.5; a checkpoint has 1 GB
# 10B tokens = 20,176 steps; at MFU 30% 0.19 s a step, 347,386 tokens/s a GPU, 1.0 hours
#SBATCH --job-name=train_gpt2_124m
##SBATCH --account=ACCOUNT
##SBATCH --partition=PARTITION
#SBATCH --nodes=1 --ntasks-per-node=1 --gpus-per-node=8 --exclusive --mem=0
#SBATCH --time=12:00:00 --signal=B:USR1@300 --requeue
#SBATCH --output=runs/%x-%j.out --open-mode=append

source slurm/lib.sh || { echo "submit it from the root of the repository" >&2 && exit 2; }
DATA=${DATA:-data/corpus_text_document} # from slurm/preprocess_array.sh

model=(--preset gpt2-124m --bf16)
layout=(--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather)
batch=(--micro-batch-size 16 --global-batch-size 512 --rampup-batch-size 128 128 390625 --train-samples 9765625)
data=(--data-path "$DATA" --split "99,1,0" --eval-interval 1000 --eval-iters 10)
run=(--save-interval 1000 --keep-last 3)

if [ -n "$SMALL" ]; then
    small_nodes=1 # x 4 ranks = DP4
    batch=(--micro-batch-size 1 --global-batch-size 16 --rampup-batch-size 8 4 64)
    data=(--mock-data)
    run+=("${tiny[@]}")
fi
train "${model[@]}" "${layout[@]}" "${batch[@]}" "${data[@]}" "${run[@]}" "$@"
