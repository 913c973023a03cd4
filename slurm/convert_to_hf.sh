#!/usr/bin/env bash
# Convert the newest checkpoint of a run to a Hugging Face model.   RUN=runs/train_175b sbatch slurm/convert_to_hf.sh
# One process without a GPU, tensor by tensor. Flags of convert_checkpoint.py may follow, such as --ckpt-step 5000, or
# --workers 4 to write four files at a time. After the time limit, submit it again: it continues.
#   OUT   the folder to write ($RUN/hf); an existing one is never changed
#SBATCH --job-name=convert_to_hf
##SBATCH --account=ACCOUNT
##SBATCH --partition=PARTITION
#SBATCH --nodes=1 --ntasks=1 --cpus-per-task=8 --mem=0
#SBATCH --time=12:00:00
#SBATCH --output=runs/%x-%j.out

source slurm/lib.sh || { echo "submit it from the root of the repository" >&2 && exit 2; }
[ -n "$DRY_RUN" ] || [ -d "$RUN/checkpoints" ] ||
    refuse "$RUN is not the folder of a run: it has no checkpoints" "fix: RUN=runs/mine sbatch slurm/convert_to_hf.sh"
alone tools/convert_checkpoint.py --load "$RUN/checkpoints" --save-hf "${OUT:-$RUN/hf}" "$@"
