#!/usr/bin/env bash
# Llama 3 70B on 512 H100s, 1.4T tokens (20 for each parameter). From the root of the repository:   sbatch slurm/train_llama3_70b.sh
# DRY_RUN=1 bash slurm/train_llama3_70b.sh shows what it would start; SMALL=1 sbatch --nodes=2 ... tries it on CPUs.
#
# 512 = TP8 x PP4 x DP16; 80 layers = 4 x VPP5 x 4; 1024/16 = 64 micro-batches
# bubble 3/(5*64+3) = 0.9%; of 80 GB: state 14.3 + activations 39.4; a checkpoint has 788 GB
# 1.4T tokens = 170,799 steps; at MFU 44% 18.1 s a step, 904 tokens/s a GPU, 35.0 days
#SBATCH --job-name=train_llama3_70b
##SBATCH --account=ACCOUNT
##SBATCH --partition=PARTITION
#SBATCH --nodes=64 --ntasks-per-node=1 --gpus-per-node=8 --exclusive --mem=0
#SBATCH --time=2-00:00:00 --signal=B:USR1@300 --requeue
#SBATCH --output=runs/%x-%j.out --open-mode=append

source slurm/lib.sh || { echo "submit it from the root of the repository" >&2 && exit 2; }
DATA=${DATA:-data/corpus_text_document} # from slurm/preprocess_array.sh

model=(--preset llama3-70b --bf16)
layout=(
    --tensor-model-parallel-size 8 --sequence-parallel
    --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 5
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
)
batch=(--micro-batch-size 1 --global-batch-size 1024 --rampup-batch-size 512 512 4000000 --train-samples 170898438)
data=(--data-path "$DATA" --split "99,1,0" --eval-interval 1000 --eval-iters 10)
run=(--save-interval 500 --async-save --keep-last 3)

if [ -n "$SMALL" ]; then
    small_nodes=2 # x 4 ranks = TP2 x PP2 x DP2
    model+=(--num-query-groups 2)
    layout+=(--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2)
    batch=(--micro-batch-size 1 --global-batch-size 16 --rampup-batch-size 8 4 64)
    data=(--mock-data)
    run+=("${tiny[@]}")
fi
train "${model[@]}" "${layout[@]}" "${batch[@]}" "${data[@]}" "${run[@]}" "$@"
