#!/usr/bin/env bash
# Llama 3 8B on 64 H100s, 160B tokens (20 for each parameter). From the root of the repository:   sbatch slurm/train_llama3_8b.sh
# DRY_RUN=1 bash slurm/train_llama3_8b.sh shows what it would start; SMALL=1 sbatch --nodes=2 ... tries it on CPUs.
#
# 64 = TP2 x PP1 x DP32; 512/32 = 16 micro-batches
# of 80 GB: state 23.8 + activations 27.8; a checkpoint has 90 GB
# 160B tokens = 38,147 steps; at MFU 44% 8.7 s a step, 7,517 tokens/s a GPU, 3.8 days
#SBATCH --job-name=train_llama3_8b
##SBATCH --account=ACCOUNT
##SBATCH --partition=PARTITION
#SBATCH --nodes=8 --ntasks-per-node=1 --gpus-per-node=8 --exclusive --mem=0
#SBATCH --time=1-00:00:00 --signal=B:USR1@300 --requeue
#SBATCH --output=runs/%x-%j.out --open-mode=append

source slurm/lib.sh || { echo "submit it from the root of the repository" >&2 && exit 2; }
DATA=${DATA:-data/corpus_text_document} # from slurm/preprocess_array.sh

model=(--preset llama3-8b --bf16)
layout=(
    --tensor-model-parallel-size 2 --sequence-parallel
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
)
batch=(--micro-batch-size 1 --global-batch-size 512 --train-iters 38147)
data=(--data-path "$DATA" --split "99,1,0" --eval-interval 1000 --eval-iters 10)
run=(--save-interval 500 --async-save --keep-last 3)

if [ -n "$SMALL" ]; then
    small_nodes=2 # x 4 ranks = TP2 x DP4
    model+=(--num-query-groups 2)
    batch+=(--global-batch-size 8)
    data=(--mock-data)
    run+=("${tiny[@]}")
fi
train "${model[@]}" "${layout[@]}" "${batch[@]}" "${data[@]}" "${run[@]}" "$@"
