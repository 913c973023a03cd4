#!/usr/bin/env bash
# What a run's newest checkpoint is worth: its loss on the validation and test data, in any layout, and the tasks of lm-eval
# on the model of slurm/convert_to_hf.sh.   RUN=runs/train_175b sbatch slurm/evaluate.sh
# The model is the checkpoint's; more flags may follow, such as --ckpt-step 5000.
#   TASKS   of lm-eval (none); it is run where $RUN/hf is and lm-eval is installed
#SBATCH --job-name=evaluate
##SBATCH --account=ACCOUNT
##SBATCH --partition=PARTITION
#SBATCH --nodes=8 --ntasks-per-node=1 --gpus-per-node=8 --exclusive --mem=0
#SBATCH --time=04:00:00
#SBATCH --output=slurm-%x-%j.out

source slurm/lib.sh || { echo "submit it from the root of the repository" >&2 && exit 2; }
DATA=${DATA:-data/corpus_text_document} # that of the training
ITERS=${ITERS:-50}

layout=(--tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 8)
data=(--data-path "$DATA" --split "99,1,0")
batch=(--micro-batch-size 1 --global-batch-size 64)
if [ -n "$SMALL" ]; then # 4 ranks = TP2 x PP1 x DP2
    layout=(--tensor-model-parallel-size 2 --sequence-parallel --device cpu)
    data=(--mock-data)
fi
once pretrain_gpt.py --skip-train --load "$RUN/checkpoints" --eval-iters "$ITERS" --bf16 "${layout[@]}" "${batch[@]}" "${data[@]}" "$@"

if [ -n "${TASKS:-}" ]; then
    alone -m lm_eval --model hf --model_args "pretrained=$RUN/hf" --tasks "$TASKS" --output_path "$RUN/lm-eval"
fi
