#!/usr/bin/env bash
# Evaluate the newest checkpoint of a run: loss on the validation and test data, and tasks of lm-eval.
#   RUN=runs/train_175b sbatch slurm/evaluate.sh
# Model, data and length are those of the run ($RUN/config.yaml); the layout below may differ. Flags may follow, such as
# --ckpt-step 5000.   ITERS: batches of each evaluation (10)
# TASKS=hellaswag,arc_easy also runs lm-eval, if installed, on the model of slurm/convert_to_hf.sh ($RUN/hf).
#SBATCH --job-name=evaluate
##SBATCH --account=ACCOUNT
##SBATCH --partition=PARTITION
#SBATCH --nodes=8 --ntasks-per-node=1 --gpus-per-node=8 --exclusive --mem=0
#SBATCH --time=04:00:00
#SBATCH --output=runs/%x-%j.out

source slurm/lib.sh || { echo "submit it from the root of the repository" >&2 && exit 2; }
if [ -z "$DRY_RUN" ]; then
    [ -f "$RUN/config.yaml" ] || refuse "$RUN is not the folder of a run" "fix: RUN=runs/mine sbatch slurm/evaluate.sh"
    [ -z "${TASKS:-}" ] || [ -d "$RUN/hf" ] || refuse "there is no $RUN/hf" "fix: RUN=$RUN sbatch slurm/convert_to_hf.sh"
fi

layout=(--tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 8)
if [ -n "$SMALL" ]; then
    small_nodes=1
    layout=(--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 1)
fi
evaluation=(--skip-train --load "$RUN/checkpoints" --eval-iters "${ITERS:-10}" --run-dir "$RUN/evaluation")
data=() # the run's own flag, which names copies on the disks of its nodes, would not do
[ ! -f "$RUN/slurm/data_path" ] || mapfile -t data <"$RUN/slurm/data_path"
others=( # reset options of the run that do not apply to an evaluation
    checkpoint.save=null checkpoint.save_interval=null checkpoint.keep_last=null checkpoint.keep_every=null
    checkpoint.async_save=false checkpoint.local_save=null checkpoint.local_save_interval=null
    training.stop_file=null parallel.pipeline_schedule=null parallel.expert_tensor_parallel_size=null
    parallel.num_virtual_stages_per_pipeline_rank=null parallel.pipeline_model_parallel_layout=null
    parallel.expert_model_parallel_size=1 logging.tensorboard_dir=null logging.wandb_project=null
)
once pretrain_gpt.py --config "$RUN/config.yaml" "${evaluation[@]}" "${layout[@]}" "${data[@]}" "$@" --set "${others[@]}"

[ -z "${TASKS:-}" ] ||
    alone -m lm_eval --model hf --model_args "pretrained=$RUN/hf" --tasks "$TASKS" --output_path "$RUN/lm-eval"
