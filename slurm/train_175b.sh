#!/usr/bin/env bash
# GPT-3 175B on 1,024 H100s. Edit account, partition and paths; from the repository's root:   sbatch slurm/train_175b.sh
# DRY_RUN=1 bash slurm/train_175b.sh shows what it would start; SMALL=1 sbatch --nodes=3 slurm/train_175b.sh tries it on CPUs.
#
# 1024 = TP8 x PP16 x DP8; 96 layers = 16 x VPP3 x 2; 1536/8 = 192 micro-batches
# bubble 15/(3*192+15) = 2.5%; of 80 GB: state 10.2 + activations 11.8; a checkpoint has 1,951 GB
# 300B tokens = 95,368 steps; at MFU 44% 7.6 s a step, 404 tokens/s a GPU, 8.4 days
# a failure every 49 h (419 in 54 days on 16,384 H100s: Llama 3); to save takes 39 s at 50 GB/s, so
# every sqrt(2 x 39 s x 49 h) = 491 steps is best (Young 1974)
#SBATCH --job-name=train_175b
##SBATCH --account=ACCOUNT
##SBATCH --partition=PARTITION
#SBATCH --nodes=128 --ntasks-per-node=1 --gpus-per-node=8 --exclusive --mem=0
#SBATCH --time=2-00:00:00 --signal=B:USR1@300 --requeue
#SBATCH --output=runs/%x-%j.out --open-mode=append

source slurm/lib.sh || { echo "submit it from the root of the repository" >&2 && exit 2; }
DATA=${DATA:-data/corpus_text_document} # from slurm/preprocess_array.sh

model=(--preset gpt3-175b --bf16)
layout=(
    --tensor-model-parallel-size 8 --sequence-parallel
    --pipeline-model-parallel-size 16 --num-virtual-stages-per-pipeline-rank 3
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
)
batch=(--micro-batch-size 1 --global-batch-size 1536 --train-iters 95368)
optimizer=(--lr 6e-5 --min-lr 6e-6 --lr-decay-style cosine --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0)
data=(--data-path "$DATA" --split "99,1,0" --eval-interval 1000 --eval-iters 10)
run=(--save-interval 500 --async-save --keep-last 3 --keep-every 5000)

if [ -n "$SMALL" ]; then
    small_nodes=3 # x 4 ranks = TP2 x PP2 x DP3
    layout+=(--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2)
    batch+=(--global-batch-size 12)
    data=(--mock-data)
    run+=("${tiny[@]}")
fi
train "${model[@]}" "${layout[@]}" "${batch[@]}" "${optimizer[@]}" "${data[@]}" "${run[@]}" "$@"
