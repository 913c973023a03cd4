#!/usr/bin/env bash
# GPT-3 175B on 1,024 H100s with 80 GB each. Edit account, partition and paths; then:   sbatch slurm/train_175b.sh
#
# 1024 = TP8 x PP16 x DP8; 96 layers = 16 x VPP3 x 2; 1536/8 = 192 micro-batches
#SBATCH --job-name=train_175b
##SBATCH --account=ACCOUNT
##SBATCH --partition=PARTITION
#SBATCH --nodes=128 --ntasks-per-node=1 --gpus-per-node=8 --exclusive
#SBATCH --time=2-00:00:00 --signal=B:USR1@300 --requeue --no-kill
#SBATCH --output=slurm-%x-%j.out --open-mode=append
source slurm/lib.sh || { echo "submit it from the root of the repository" >&2 && exit 2; }
DATA=${DATA:-data/corpus_text_document}

model=(--preset gpt3-175b --bf16)
layout=(
    --tensor-model-parallel-size 8 --sequence-parallel
    --pipeline-model-parallel-size 16 --num-virtual-stages-per-pipeline-rank 3
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
)
batch=(--micro-batch-size 1 --global-batch-size 1536 --train-iters 95368)
optimizer=(--lr 6e-5 --min-lr 6e-6)
data=(--data-path "$DATA" --split "99,1,0")
run=(--save-interval 500)
if [ -n "$SMALL" ]; then # 3 nodes x 4 ranks = TP2 x PP2 x DP3
    model+=("${tiny[@]}")
    layout+=(--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2)
    batch=(--micro-batch-size 1 --global-batch-size 12)
    data=(--mock-data)
    run=()
fi
train "${model[@]}" "${layout[@]}" "${batch[@]}" "${optimizer[@]}" "${data[@]}" "${run[@]}" "$@"
